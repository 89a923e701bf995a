"""One directory for all ranks, and for two runs by mistake."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Iterable
from pathlib import Path

import pytest

from tensor3d import checkpoint
from tensor3d.checkpoint import Checkpoints, writer
from tensor3d.checkpoint import directory as sharing
from tensor3d.checkpoint.format import FileSum
from tests.checkpoint.subject import ALONE, Shape, held_back, make
from tests.ranks import run_ranks


def names(directory: Path) -> list[str]:
    return sorted(path.name for path in directory.iterdir())


# --- all ranks -----------------------------------------------------------------------------------------------------


def a_folder_each(shape: Shape, root: Path) -> str:
    cube, _, _ = make(shape, seed=1)
    sharing.SOME_SECONDS = 0.3
    with pytest.raises(ValueError, match="all ranks share") as problem:
        Checkpoints(root / f"node-{cube.rank // 2}", cube)
    return str(problem.value)


def test_a_folder_of_its_own_on_another_machine(tmp_path: Path) -> None:
    told = run_ranks(4, a_folder_each, (2, 1, 2, 1), tmp_path)
    assert len(set(told)) == 1
    assert f"is not seen by rank 2 ({tmp_path}/node-1), rank 3 ({tmp_path}/node-1). Choose" in told[0]
    assert names(tmp_path / "node-0") == []


def seen_late(shape: Shape, root: Path) -> list[Path | None]:
    """Rank 1 comes by another way, which is there later than the folder; so is what rank 0 makes in it."""
    cube, model, optimizer = make(shape, seed=1)
    way, write, left = root / f"way-{cube.rank}", writer.write_file, [2]

    def late(path: Path, parts: Iterable[memoryview]) -> FileSum:
        left[0] -= 1
        return write(path / "not yet" if left[0] >= 0 else path, parts)

    if cube.rank == 0:
        way.symlink_to(root / "shared", target_is_directory=True)
    else:
        threading.Timer(0.4, lambda: way.symlink_to(root / "shared", target_is_directory=True)).start()
        writer.write_file = late
    with Checkpoints(way, cube) as checkpoints:
        for number in (1, 2):
            checkpoints.save(number, model, optimizer, {})
        checkpoints.wait()
        assert [outcome.error for outcome in checkpoints.finished()] == [None, None]
    assert cube.rank == 0 or left[0] < 0
    return [checkpoint.latest(root / "shared")]


def test_a_folder_that_is_seen_late(tmp_path: Path) -> None:
    (tmp_path / "shared").mkdir()
    assert run_ranks(2, seen_late, (1, 2, 1, 1), tmp_path) == [[tmp_path / "shared" / "step-00000002"]] * 2
    assert names(tmp_path / "shared") == ["step-00000001", "step-00000002"]


def in_the_way(shape: Shape, file: Path) -> bool:
    cube, _, _ = make(shape, seed=1)
    with pytest.raises(OSError, match="file"):
        Checkpoints(file, cube)
    return True


def test_a_folder_that_cannot_be_made(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("in the way")
    assert all(run_ranks(2, in_the_way, (1, 2, 1, 1), tmp_path / "file"))


# --- two runs ------------------------------------------------------------------------------------------------------


def wait_for(count: int, directory: Path) -> None:
    end = time.monotonic() + 20
    while len(list(directory.glob("*.partial"))) < count:
        assert time.monotonic() < end, f"{count} are not being written: {names(directory)}"
        time.sleep(0.01)


def test_another_run_takes_nothing_away_that_is_being_written(tmp_path: Path) -> None:
    cube, model, optimizer = make(ALONE, seed=1)
    with held_back() as go, Checkpoints(tmp_path, cube) as first:
        first.save(1, model, optimizer, {"run": 1})
        wait_for(1, tmp_path)
        second = Checkpoints(tmp_path, cube)
        second.save(2, model, optimizer, {"run": 2})
        wait_for(2, tmp_path)
        go.set()
        first.wait()
        second.close()
    assert [outcome.error for outcome in (*first.finished(), *second.finished())] == [None, None]
    assert names(tmp_path) == ["step-00000001", "step-00000002"]
    assert checkpoint.verify(tmp_path / "step-00000001") == []


def left_behind(directory: Path, name: str, *, file: float, folder: float) -> Path:
    """Something that was begun, and was last changed so many seconds ago."""
    path = directory / name
    path.mkdir()
    (path / "rank-00000.safetensors").write_bytes(b"half")
    now = time.time()
    os.utime(path / "rank-00000.safetensors", (0, now - file))
    os.utime(path, (0, now - folder))
    return path


def test_what_nobody_goes_on_with_is_swept_up(tmp_path: Path) -> None:
    dead = left_behind(tmp_path, "step-00000001.0a1b.partial", file=700, folder=900)
    former = left_behind(tmp_path, "step-00000002.partial", file=700, folder=900)  # of an earlier tensor3d
    alive = left_behind(tmp_path, "step-00000003.0a1b.partial", file=500, folder=900)
    (tmp_path / "step-12345678.token").touch()
    cube, model, optimizer = make(ALONE, seed=1)
    with Checkpoints(tmp_path, cube) as checkpoints:
        assert not dead.exists()
        assert not former.exists()
        assert alive.exists()
        os.utime(alive / "rank-00000.safetensors", (0, 0))
        os.utime(tmp_path / "step-12345678.token", (0, 0))
        checkpoints.save(4, model, optimizer, {})  # a run of weeks does not keep it
    assert names(tmp_path) == ["step-00000004"]
