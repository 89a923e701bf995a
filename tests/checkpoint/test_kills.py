"""kill -9 at every moment of a save: what `latest` names is whole, and the next run goes on from there."""

from __future__ import annotations

import io
import os
import shutil
import signal
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tensor3d import checkpoint
from tensor3d.checkpoint import Checkpoints
from tests.checkpoint.subject import ALONE, make, same, state, step
from tests.ranks import run_ranks

# Everything by which a save changes the disk.
CALLS: dict[Any, tuple[str, ...]] = {
    os: ("mkdir", "open", "replace", "unlink", "rmdir", "fsync"),
    io: ("open",),
    zlib: ("crc32",),  # before each piece that is written
}


class Doom:
    """Kills this process before the n-th of those calls."""

    def __init__(self, moment: int) -> None:
        self.left = moment
        for module, names in CALLS.items():
            for name in names:
                setattr(module, name, self._counting(getattr(module, name)))

    def _counting(self, call: Callable[..., Any]) -> Callable[..., Any]:
        def counted(*args: Any, **kwargs: Any) -> Any:
            self.left -= 1
            if self.left == 0:
                os.kill(os.getpid(), signal.SIGKILL)
            return call(*args, **kwargs)

        return counted


def killed(moment: int, directory: Path, trained: tuple[Any, Any, Any]) -> bool:
    """Replaces step 3 and rotates step 1 away, in a process that may not live to see it. False: it did."""
    child = os.fork()
    if child == 0:
        try:
            Doom(moment)
            cube, model, optimizer = trained  # before the fork: autograd's threads do not come along
            with Checkpoints(directory, cube, keep_last=2, asynchronous=False) as checkpoints:
                checkpoints.save(3, model, optimizer, {"again": True})
                (outcome,) = checkpoints.finished()
            os._exit(0 if outcome.error is None else 1)
        finally:
            os._exit(2)
    _, status = os.waitpid(child, 0)
    assert os.WIFSIGNALED(status) or os.WEXITSTATUS(status) == 0
    return os.WIFSIGNALED(status)


def swept(directory: Path) -> list[tuple[int, bool]]:
    """Every moment in turn, until a save lives through: (step of the latest, whether it is the new one)."""
    cube, model, optimizer = make(ALONE, seed=3)
    template = directory / "template"
    for number in (1, 2, 3):
        checkpoint.save(template, number, model, optimizer, cube, {})
    trained = make(ALONE, seed=3)
    step(*trained)
    new, found = state(*trained[1:]), []
    for moment in range(1, 1000):
        run = directory / f"run-{moment}"
        shutil.copytree(template, run)
        died = killed(moment, run, trained)
        newest = checkpoint.latest(run)
        assert newest is not None
        assert checkpoint.verify(newest) == [], f"killed before call {moment}"
        assert all(checkpoint.verify(path) == [] for path in checkpoint.complete(run))
        progress = checkpoint.load(newest, model, optimizer, cube)
        again = bool(progress.get("again"))
        if again:
            assert same(state(model, optimizer), new)
        found.append((progress["step"], again))
        for path in run.glob("*.partial/*"):
            os.utime(path, (0, 0))
        for path in run.glob("*.partial"):  # of a run that died long ago
            os.utime(path, (0, 0))
        with Checkpoints(run, cube, keep_last=2) as checkpoints:  # the next run, on what was left
            checkpoints.save(4, model, optimizer, {})
        assert [path.name for path in sorted(run.iterdir())] == ["step-00000003", "step-00000004"], moment
        shutil.rmtree(run)
        if not died:
            return found
    raise AssertionError("a save has no end")


@pytest.mark.slow
def test_killed_at_every_moment(tmp_path: Path) -> None:
    (found,) = run_ranks(1, swept, tmp_path)
    assert len(found) > 35, "fewer moments than a save has"
    assert {number for number, _ in found} == {3}, "step 3 is there at every moment, the old or the new one"
    turn = [again for _, again in found].index(True)
    assert turn > 15
    assert all(again for _, again in found[turn:]), "once it is there it stays"
