"""Training under its launcher, whole: signals, a stopped rank, a suspended run, and a launcher that is killed."""

from __future__ import annotations

import os
import signal
import subprocess
import time
from pathlib import Path

import pytest

from tensor3d import checkpoint
from tests.slow.kills import ROOT, losses, ranks_of, until, write_recipe

pytestmark = pytest.mark.slow

SECTION = """
[run]
steps = 100_000
evaluate_every = 0
checkpoint_every = 0
hang_after = 20.0
# With torchrun's own patience (below) enough for a machine that is busy elsewhere.
stop_within = 60.0
"""


class Run:
    """A run in a folder of its own."""

    def __init__(self, folder: Path, name: str, *, cube: str = "1x2x1", resume: bool = False) -> None:
        recipe = write_recipe(folder / "signals.toml", SECTION)
        self.folder = folder / name
        self.log = folder / f"{name}.log"
        places = ["--output", str(self.folder), "--corpus", str(folder / "corpus")]
        arguments = ["--cpu", "--cube", cube, str(recipe), *places, *(["--resume", "auto"] if resume else [])]
        with open(self.log, "ab") as log:
            self.launcher = subprocess.Popen(
                [ROOT / "launch" / "local.sh", *arguments],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                env={**os.environ, "TORCH_ELASTIC_SHUTDOWN_TIMEOUT": "90"},
            )

    def __enter__(self) -> Run:
        return self

    def __exit__(self, *_: object) -> None:
        for rank in ranks_of(self.launcher.pid):
            os.kill(rank, signal.SIGKILL)
        self.launcher.kill()
        self.launcher.wait()

    def step(self) -> int:
        return max((step for step, _ in losses(self.folder)), default=0)

    def trains(self) -> list[int]:
        """Waits until it has done some steps, and returns its ranks."""
        self.comes_to(3)
        return ranks_of(self.launcher.pid)

    def comes_to(self, step: int) -> None:
        until(lambda: self.step() >= step or self.launcher.poll() is not None, 180)
        assert self.step() >= step, self.said()

    def said(self) -> str:
        return self.log.read_text(errors="replace")


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of all runs, which share a corpus."""
    return tmp_path_factory.mktemp("signals")


@pytest.mark.parametrize(
    ("number", "cube"),
    [
        (signal.SIGTERM, "1x2x1"),
        pytest.param(
            *(signal.SIGUSR1, "1x1x1"), marks=pytest.mark.long(reason="USR1 is sent by the tests of hosts and Slurm")
        ),
    ],
)
def test_a_signal_saves_and_the_run_goes_on_exactly(number: int, cube: str, place: Path) -> None:
    with Run(place, f"stopped-{cube}", cube=cube) as run:
        run.trains()
        start = time.monotonic()
        run.launcher.send_signal(number)
        assert run.launcher.wait(60) == 75, run.said()
        assert time.monotonic() - start < 30
        done = run.step()
        found = checkpoint.latest(run.folder / "checkpoints")
        assert found is not None
        assert checkpoint.verify(found) == []
        assert checkpoint.read_progress(found)["step"] == done, "not a step is lost"
    with Run(place, f"stopped-{cube}", cube=cube, resume=True) as run:
        run.comes_to(done + 3)
        resumed = losses(run.folder)
    with Run(place, f"alone-{cube}", cube=cube) as run:
        run.comes_to(done + 3)
        alone = losses(run.folder)
    assert resumed[: done + 3] == alone[: done + 3]


def test_a_stopped_rank_ends_the_run_with_its_name(place: Path) -> None:
    with Run(place, "frozen") as run:
        ranks = run.trains()
        os.kill(ranks[1], signal.SIGSTOP)
        # 20 s for the hang, then 30 s that torchrun gives to a process before it kills
        assert run.launcher.wait(120) == 79, run.said()
        assert "rank 1 (y 1) does not answer (its process is stopped), last seen in step " in run.said()


@pytest.mark.long(
    reason="a suspension longer than a hang may last; tests/distributed/test_watchdog.py has one of a second"
)
def test_a_run_that_is_suspended_goes_on(place: Path) -> None:
    """Ctrl-Z for longer than a hang may last, and `fg`."""
    with Run(place, "suspended") as run:
        ranks = run.trains()
        run.launcher.send_signal(signal.SIGTSTP)
        until(lambda: all(state(process) == "T" for process in (*ranks, run.launcher.pid)), 20)
        done = run.step()
        time.sleep(25)
        assert run.step() == done
        run.launcher.send_signal(signal.SIGCONT)
        run.comes_to(done + 3)
        assert ranks_of(run.launcher.pid) == ranks
        run.launcher.send_signal(signal.SIGTERM)
        assert run.launcher.wait(60) == 75, run.said()


def state(process: int) -> str:
    return Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0]


def test_orphans_do_not_live_on(place: Path) -> None:
    with Run(place, "orphans") as run:
        ranks = run.trains()
        run.launcher.kill()
        run.launcher.wait()
        until(lambda: not any(Path(f"/proc/{rank}").exists() for rank in ranks), 20)
        assert "the job's store is gone" in run.said()
