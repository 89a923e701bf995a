"""Signs of life while a save is waited for, and what goes wrong during one or after it."""

from __future__ import annotations

import errno
import os
import threading
import time
from collections.abc import Iterable
from itertools import chain, islice
from pathlib import Path
from typing import Any

import pytest
import torch

from tensor3d import Cube, checkpoint
from tensor3d.checkpoint import Checkpoints, manager, writer
from tensor3d.checkpoint import directory as folders
from tensor3d.checkpoint.format import FileSum
from tests.checkpoint.subject import ALONE, Shape, make
from tests.ranks import run_ranks


def refusal(path: Path) -> OSError:
    return PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(path))


def names(directory: Path) -> list[str]:
    return sorted(path.name for path in directory.iterdir())


# --- a save that takes long ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("how", ["waiting save", "synchronous", "wait", "close", "next save"])
def test_waiting_for_a_write_gives_signs_of_life(tmp_path: Path, how: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rank 0 stops after two pieces of 1,000 bytes, until three signs have been seen."""
    go, before, told, threads = threading.Event(), writer.write_file, [], set()

    def slow(path: Path, parts: Iterable[memoryview]) -> FileSum:
        pieces = iter(parts)
        begun = list(islice(pieces, 4)) if path.suffix == ".safetensors" else []
        assert go.wait(30)
        return before(path, chain(begun, pieces))

    def waiting(written: int) -> None:
        told.append(written)
        threads.add(threading.get_ident())
        if len(told) == 3:
            go.set()

    monkeypatch.setattr(writer, "PIECE", 1000)
    monkeypatch.setattr(writer, "write_file", slow)
    cube, model, optimizer = make(ALONE, seed=1)
    checkpoints = Checkpoints(tmp_path, cube, asynchronous=how != "synchronous", waiting=waiting)
    checkpoints.save(1, model, optimizer, {}, wait=how == "waiting save")
    if how == "wait":
        checkpoints.wait()
    elif how == "next save":
        checkpoints.save(2, model, optimizer, {})
    checkpoints.close()
    assert told[:3] == [2000] * 3
    assert threads == {threading.get_ident()}
    assert checkpoint.verify(tmp_path / "step-00000001") == []


def late(shape: Shape, folder: Path) -> list[int]:
    cube, model, optimizer = make(shape, seed=1)
    told: list[int] = []
    with Checkpoints(folder, cube, waiting=told.append) as checkpoints:
        told.clear()
        if cube.rank == 1:
            time.sleep(0.6)
        checkpoints.save(1, model, optimizer, {})
        return told[:2]


def test_waiting_for_a_rank_that_comes_late_too(tmp_path: Path) -> None:
    assert run_ranks(2, late, (2, 1, 1, 1), tmp_path)[0] == [0, 0]


def test_there_is_one_buffer_at_a_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    others: list[int] = []

    class Counted(manager.HostBuffer):
        living = 0

        def __init__(self, *args: Any) -> None:
            others.append(Counted.living)
            Counted.living += 1
            super().__init__(*args)

        def __del__(self) -> None:
            Counted.living -= 1

    monkeypatch.setattr(manager, "HostBuffer", Counted)
    cube, model, optimizer = make(ALONE, seed=1)
    with Checkpoints(tmp_path, cube) as checkpoints:
        for number, asynchronous in enumerate([True, False, True]):
            checkpoints.asynchronous = asynchronous
            model.register_buffer(f"more_{number}", torch.zeros(100))
            with monkeypatch.context() as patch:
                if number == 1:  # the problem with a save holds no memory either
                    patch.setattr(writer, "write_checksums", lambda *_: 1 / 0)
                checkpoints.save(number, model, optimizer, {})
                checkpoints.wait()
        assert [outcome.path is None for outcome in checkpoints.finished()] == [False, True, False]
    assert others == [0, 0, 0]


# --- what goes wrong -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("wait", [True, False])
def test_an_error_that_nobody_foresaw_is_told(tmp_path: Path, wait: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> None:
        raise MemoryError

    monkeypatch.setattr(manager, "write", fail)
    cube, model, optimizer = make(ALONE, seed=1)
    with Checkpoints(tmp_path, cube) as checkpoints:
        checkpoints.save(1, model, optimizer, {}, wait=wait)
        checkpoints.wait()
        (outcome,) = checkpoints.finished()
        assert (outcome.path, outcome.error) == (None, "rank 0: MemoryError")
        with pytest.raises(RuntimeError, match=r"written any more.*went wrong.*step 1\b"):
            checkpoints.save(2, model, optimizer, {})


def test_an_error_that_cannot_be_sent_to_other_ranks(tmp_path: Path) -> None:
    for error in run_ranks(2, unsendable, (2, 1, 1, 1), tmp_path):
        assert error == "rank 1: OddError: of a kind"


class OddError(Exception):
    def __reduce__(self) -> str:
        raise TypeError("cannot be pickled")


def unsendable(shape: Shape, folder: Path) -> str | None:
    cube, model, optimizer = make(shape, seed=1)

    def fail(*_: object) -> FileSum:
        raise OddError("of a kind")

    if cube.rank == 1:
        writer.write_file = fail  # type: ignore[assignment]
    with Checkpoints(folder, cube) as checkpoints:
        checkpoints.save(1, model, optimizer, {}, wait=True)
        return checkpoints.finished()[0].error


def test_trouble_after_the_rename_takes_no_checkpoint_away(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The directory cannot be synced; rotation runs all the same."""
    before = folders.sync

    def refuse(folder: Path) -> None:
        if folder == tmp_path:
            raise refusal(folder)
        before(folder)

    cube, model, optimizer = make(ALONE, seed=1)
    with Checkpoints(tmp_path, cube, keep_last=1, asynchronous=False) as checkpoints:
        checkpoints.save(1, model, optimizer, {})
        monkeypatch.setattr(folders, "sync", refuse)
        checkpoints.save(2, model, optimizer, {})
        first, second = checkpoints.finished()
    assert first.error is None
    assert second.path == checkpoint.latest(tmp_path) == tmp_path / "step-00000002"
    assert second.error == f"rank 0: Permission denied: {tmp_path}"
    assert names(tmp_path) == ["step-00000002"]


def test_a_rename_that_fails_leaves_the_former_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    before = os.replace

    def refuse(source: Path, target: Path) -> None:
        if source.suffix == ".partial":
            raise refusal(target)
        before(source, target)

    cube, model, optimizer = make(ALONE, seed=1)
    with Checkpoints(tmp_path, cube, asynchronous=False) as checkpoints:
        checkpoints.save(1, model, optimizer, {"former": True})
        monkeypatch.setattr(os, "replace", refuse)
        checkpoints.save(1, model, optimizer, {})
        _, outcome = checkpoints.finished()
    assert outcome.path is None
    assert names(tmp_path) == ["step-00000001"]
    assert checkpoint.read_progress(tmp_path / "step-00000001")["former"] is True


def test_a_best_that_cannot_be_marked_stops_no_rotation(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(path: Path) -> None:
        raise refusal(path)

    cube, model, optimizer = make(ALONE, seed=1)
    with Checkpoints(tmp_path, cube, keep_last=1, asynchronous=False) as checkpoints:
        with monkeypatch.context() as patch:
            patch.setattr(folders, "mark_best", refuse)
            checkpoints.save(1, model, optimizer, {})
            checkpoints.mark_best(2)
            for number in (2, 3, 4):
                checkpoints.save(number, model, optimizer, {})
        assert names(tmp_path) == ["step-00000002", "step-00000004"], "the best is kept, the others go"
        outcomes = checkpoints.finished()
        checkpoints.save(5, model, optimizer, {})
    assert outcomes[0].error is None
    for outcome in outcomes[1:]:
        assert outcome.path is not None
        assert outcome.error == f"rank 0: Permission denied: {tmp_path / 'step-00000002'}"
    assert checkpoint.best(tmp_path) == tmp_path / "step-00000002"


def test_several_problems_are_all_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(path: Path, **_: object) -> None:
        raise refusal(path)

    monkeypatch.setattr(folders, "rotate", refuse)
    monkeypatch.setattr(folders, "settle", refuse)
    model = torch.nn.Linear(2, 2)
    with Checkpoints(tmp_path, Cube.single(), asynchronous=False) as checkpoints:
        checkpoints.save(1, model, torch.optim.SGD(model.parameters()), {})
        (outcome,) = checkpoints.finished()
    path = tmp_path / "step-00000001"
    assert outcome.path == path
    assert outcome.error == f"rank 0: Permission denied: {path}; rank 0: Permission denied: {tmp_path}"
