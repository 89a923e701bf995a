"""Saving beside a training: exact, out of its way, and no end of it when the disk is full."""

from __future__ import annotations

import errno
import os
import re
import resource
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from time import perf_counter

import pytest
import torch
import torch.distributed as dist

from tensor3d import Cube, Linear3D, checkpoint
from tensor3d.checkpoint import Checkpoints, RankResult, manager, writer
from tensor3d.checkpoint.manager import BackgroundTask, on_this_stream
from tests.checkpoint.subject import ALONE, Shape, files_of, held_back, make, same, state, step
from tests.ranks import run_ranks, run_survivors


def beside(shape: Shape, folder: Path) -> tuple[bool, bool, list[int]]:
    """The same state twice: waited for, and written while training changes everything."""
    cube, model, optimizer = make(shape, seed=1)
    step(cube, model, optimizer)
    wanted = state(model, optimizer)
    priorities: list[int] = []
    with Checkpoints(folder / "waited", cube) as checkpoints:
        checkpoints.save(1, model, optimizer, {}, wait=True)
        assert [outcome.step for outcome in checkpoints.finished()] == [1]
    with held_back(priorities) as go, Checkpoints(folder / "beside", cube) as checkpoints:
        checkpoints.save(1, model, optimizer, {})
        for _ in range(3):  # collectives of all kinds, while the save is under way
            step(cube, model, optimizer)
        assert checkpoints.finished() == []
        go.set()
        checkpoints.wait()
        (outcome,) = checkpoints.finished()
        assert outcome.path == folder / "beside" / "step-00000001"
        assert outcome.error is None
        assert outcome.bytes == sum(map(len, files_of(outcome.path).values()))
    moved = not same(state(model, optimizer), wanted)
    checkpoint.load(folder / "beside" / "step-00000001", model, optimizer, cube)
    return moved, same(state(model, optimizer), wanted), priorities


def test_what_is_written_beside_training_is_what_was_there_at_the_call(tmp_path: Path) -> None:
    niceness = os.getpriority(os.PRIO_PROCESS, 0)
    results = [*run_ranks(4, beside, (2, 1, 2, 1), tmp_path / "four"), beside(ALONE, tmp_path / "one")]
    for moved, exact, priorities in results:
        assert moved
        assert exact
        assert sys.platform != "linux" or set(priorities) == {19}
    for name in ("four", "one"):
        waited, aside = (files_of(tmp_path / name / kind / "step-00000001") for kind in ("waited", "beside"))
        assert waited == aside
    assert os.getpriority(os.PRIO_PROCESS, 0) == niceness, "the thread that trains keeps its own"


def test_another_thread_works_on_the_stream_of_the_caller(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """It would begin on the default stream of the first GPU, which waits for no other."""
    told: list[object] = []

    @contextmanager
    def on(stream: object) -> Iterator[None]:
        told.append((stream, threading.get_ident()))
        yield

    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: f"of {device} in {threading.get_ident()}")
    monkeypatch.setattr(torch.cuda, "stream", on)
    action = on_this_stream(lambda: 7, torch.device("cuda", 3))
    task = BackgroundTask(action)
    task.wait(lambda: None)
    assert task.result() == 7
    ((stream, thread),) = told
    assert stream == f"of cuda:3 in {threading.get_ident()}"
    assert thread != threading.get_ident()
    assert on_this_stream(told.clear, torch.device("cpu")) == told.clear

    taken: list[torch.device] = []
    monkeypatch.setattr(manager, "on_this_stream", lambda action, device: taken.append(device) or action)
    cube, model, optimizer = make(ALONE, seed=1)
    with Checkpoints(tmp_path, cube) as checkpoints:
        checkpoints.save(1, model, optimizer, {}, wait=True)
    assert taken == [cube.device], "copies are compared so"


def test_a_save_waits_for_the_one_before_and_buffers_are_used_again(tmp_path: Path) -> None:
    cube, model, optimizer = make(ALONE, seed=1)
    step(cube, model, optimizer)
    with Checkpoints(tmp_path, cube, keep_last=None) as checkpoints:
        with held_back() as go:
            checkpoints.save(1, model, optimizer, {})
            buffer = checkpoints._buffer
            step(cube, model, optimizer)
            ends: list[float] = []

            def let_go() -> None:
                ends.append(perf_counter())
                go.set()

            threading.Timer(0.2, let_go).start()
            begin = perf_counter()
            assert checkpoints.save(2, model, optimizer, {}) >= ends[0] - begin
            assert checkpoints._buffer is buffer
        checkpoints.wait()
        assert [outcome.step for outcome in checkpoints.finished()] == [1, 2]
        model.register_buffer("new", torch.zeros(1000))  # the plan of before does not fit any more
        checkpoints.save(3, model, optimizer, {})
    assert "model.new" in checkpoint.read_contents(tmp_path / "step-00000003").tensors
    assert checkpoint.verify(tmp_path / "step-00000002") == []
    with pytest.raises(ValueError, match="closed"):
        checkpoints.save(4, model, optimizer, {})
    checkpoints.close()


def rotated(shape: Shape, folder: Path) -> list[RankResult]:
    cube, model, optimizer = make(shape, seed=1)
    with Checkpoints(folder, cube, keep_last=2, keep_every=4) as checkpoints:
        for number in range(1, 8):
            step(cube, model, optimizer)
            checkpoints.save(number, model, optimizer, {})
            if number == 2:
                checkpoints.protect(folder / "step-00000002")
            if number in (3, 5):
                checkpoints.mark_best(number)  # while it is being written, perhaps
        checkpoints.save(7, model, optimizer, {"again": True})
        checkpoints.wait()
        return checkpoints.finished()


def test_rotation_and_the_best(tmp_path: Path) -> None:
    first, second = run_ranks(2, rotated, (2, 1, 1, 1), tmp_path)
    assert [outcome.step for outcome in first] == [1, 2, 3, 4, 5, 6, 7, 7]
    assert [(o.path, o.bytes, o.error) for o in first] == [(o.path, o.bytes, o.error) for o in second]
    kept = [f"step-{number:08d}" for number in (2, 4, 5, 6, 7)]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["best", *kept]
    assert checkpoint.best(tmp_path) == tmp_path / "step-00000005"
    assert checkpoint.read_progress(tmp_path / "step-00000007")["again"] is True


@pytest.mark.parametrize(
    ("options", "message"), [({"keep_last": 0}, "keep_last must be at least 1"), ({"keep_every": -1}, "keep_every")]
)
def test_a_number_below_1(tmp_path: Path, options: dict[str, int], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Checkpoints(tmp_path, Cube.single(), **options)  # type: ignore[arg-type]


class _Counting(torch.optim.SGD):
    """Remembers a plain number."""

    def step(self, closure: object = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for parameter in group["params"]:
                self.state[parameter]["count"] = 1


def test_what_cannot_be_stored_is_refused_at_the_call(tmp_path: Path) -> None:
    cube, model, optimizer = make(ALONE, seed=1)
    with Checkpoints(tmp_path, cube) as checkpoints:
        with pytest.raises(ValueError, match=r"progress.*JSON"):
            checkpoints.save(1, model, optimizer, {"folder": tmp_path})
        with pytest.raises(ValueError, match=r"progress.*ranks, version"):
            checkpoints.save(1, model, optimizer, {"version": 3, "ranks": 1})
        with pytest.raises(ValueError, match="complex64"):
            checkpoints.save(1, model, optimizer, {}, {"wave": torch.zeros(1, dtype=torch.complex64)})
        counting = _Counting(model.parameters(), 0.1)
        counting.step()
        with pytest.raises(ValueError, match=r"the optimiser's count of \S+ is int"):
            checkpoints.save(1, model, counting, {})
        stranger = torch.optim.SGD(Linear3D(4, 4, cube).parameters(), 0.1)
        with pytest.raises(ValueError, match="that is not the model's"):
            checkpoints.save(1, model, stranger, {})
    assert list(tmp_path.iterdir()) == []


# --- a disk that refuses -------------------------------------------------------------------------------------------


def full_disk(shape: Shape, folder: Path, wait: bool) -> tuple[list[str | None], list[str]]:
    """Between two good saves one for which rank 1 alone has no room: the system's own refusal of a longer file."""
    cube, model, optimizer = make(shape, seed=1)
    step(cube, model, optimizer)
    _, most = resource.getrlimit(resource.RLIMIT_FSIZE)
    with Checkpoints(folder, cube) as checkpoints:
        checkpoints.save(1, model, optimizer, {}, wait=wait)
        checkpoints.wait()
        if cube.rank == cube.shape.ranks - 1:
            resource.setrlimit(resource.RLIMIT_FSIZE, (2000, most))
        checkpoints.save(2, model, optimizer, {}, wait=wait)
        checkpoints.wait()
        there = sorted(path.name for path in folder.iterdir())
        resource.setrlimit(resource.RLIMIT_FSIZE, (most, most))
        step(cube, model, optimizer)  # the run goes on
        checkpoints.save(3, model, optimizer, {}, wait=wait)
        checkpoints.wait()
        outcomes = checkpoints.finished()
    assert [outcome.path is None for outcome in outcomes] == [False, True, False]
    return [outcome.error for outcome in outcomes], there


@pytest.mark.parametrize("wait", [True, False])
def test_a_full_disk_on_one_rank_ends_no_run(tmp_path: Path, wait: bool) -> None:
    for errors, there in run_ranks(2, full_disk, (2, 1, 1, 1), tmp_path, wait):
        assert errors[0] is errors[2] is None
        assert re.fullmatch(r"rank 1: File too large: .*step-00000002\..*\.partial/rank-00001.safetensors", errors[1])
        assert there == ["step-00000001"], "what was begun is gone"
    assert checkpoint.verify(tmp_path / "step-00000001") == checkpoint.verify(tmp_path / "step-00000003") == []


def test_the_error_of_a_save_of_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cube, model, optimizer = make(ALONE, seed=1)
    checkpoint.save(tmp_path, 1, model, optimizer, cube, {})

    def refuse(*_: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), "tensors.json")

    monkeypatch.setattr(writer, "write_checksums", refuse)
    with pytest.raises(OSError, match="No space left on device"):
        checkpoint.save(tmp_path, 2, model, optimizer, cube, {})
    assert [path.name for path in tmp_path.iterdir()] == ["step-00000001"]


def test_an_older_one_that_cannot_be_deleted_is_told_beside_the_new_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cube, model, optimizer = make(ALONE, seed=1)

    def refuse(path: Path) -> None:
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(path))

    with Checkpoints(tmp_path, cube, keep_last=1, asynchronous=False) as checkpoints:
        checkpoints.save(1, model, optimizer, {})
        monkeypatch.setattr(
            "tensor3d.checkpoint.directory.discard", lambda path: refuse(path) if path.exists() else None
        )
        checkpoints.save(2, model, optimizer, {})
        first, second = checkpoints.finished()
    assert first.error is None
    assert second.path == tmp_path / "step-00000002"
    assert second.error == f"rank 0: Permission denied: {tmp_path / 'step-00000001'}"


def bereaved(folder: Path) -> tuple[bool, str, str]:
    """Rank 1 is killed while it writes."""
    cube, model, optimizer = make((2, 1, 1, 1), seed=1)
    step(cube, model, optimizer)
    checkpoints = Checkpoints(folder, cube)
    checkpoints.save(1, model, optimizer, {})
    checkpoints.wait()
    if cube.rank == 1:
        writer.write_file = lambda *_: os.kill(os.getpid(), 9)  # type: ignore[assignment]
    checkpoints.save(2, model, optimizer, {})
    checkpoints.wait()
    _, outcome = checkpoints.finished()
    with pytest.raises(RuntimeError, match=r"no checkpoint.*any more") as problem:
        checkpoints.save(3, model, optimizer, {})
    return outcome.path is None, str(outcome.error), str(problem.value)


def test_a_rank_that_dies_in_a_save(tmp_path: Path) -> None:
    missing, error, later = run_survivors(2, 1, bereaved, tmp_path)[0]
    assert missing
    assert error.startswith("rank 0: ")
    assert "a rank was lost while step 2 was saved" in later
    assert checkpoint.latest(tmp_path) == tmp_path / "step-00000001"


def left_by_an_error(folder: Path) -> bool:
    cube, model, optimizer = make((2, 1, 1, 1), seed=1)
    try:
        with Checkpoints(folder, cube) as checkpoints:
            checkpoints.save(1, model, optimizer, {})
            raise KeyError("of the run")
    except KeyError:
        ended = checkpoints.finished()
    dist.barrier()
    return [outcome.path for outcome in ended] == [checkpoint.latest(folder)]


def test_an_error_of_the_run_lets_the_last_save_end(tmp_path: Path) -> None:
    assert all(run_ranks(2, left_by_an_error, tmp_path))
    assert checkpoint.verify(tmp_path / "step-00000001") == []
