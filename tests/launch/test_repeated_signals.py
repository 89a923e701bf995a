"""launch/torchrun.py under a scheduler: signals come to torchrun and to the ranks, twice, at any time."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

TORCHRUN = Path(__file__).parents[2] / "launch" / "torchrun.py"
RANK = """
import os, pathlib, signal, sys, time
came = []
for number in (signal.SIGTERM, signal.SIGUSR1):
    signal.signal(number, lambda number, frame: came.append(number))
folder, rank = pathlib.Path(sys.argv[1]), os.environ["RANK"]
(folder / f"rank{rank}").touch()
end = time.monotonic() + 60
while signal.SIGTERM not in came and time.monotonic() < end:
    time.sleep(0.02)
time.sleep(2)  # it saves
(folder / f"saved{rank}").touch()
sys.exit(75)
"""


@pytest.mark.slow
def test_torchrun_waits_for_its_ranks_whatever_comes_next(tmp_path: Path) -> None:
    (tmp_path / "rank.py").write_text(RANK)
    command = [sys.executable, str(TORCHRUN), "--standalone", "--local-addr=127.0.0.1", "--nproc-per-node=2"]
    launcher = subprocess.Popen(
        [*command, str(tmp_path / "rank.py"), str(tmp_path)],
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        end = time.monotonic() + 60
        while not all((tmp_path / f"rank{rank}").exists() for rank in range(2)):
            assert time.monotonic() < end
            time.sleep(0.05)
        for number in (signal.SIGUSR1, signal.SIGUSR1, signal.SIGTERM):
            launcher.send_signal(number)
            time.sleep(0.5)  # torchrun waits for the ranks by now
        _, said = launcher.communicate(timeout=60)
    finally:
        launcher.kill()
        launcher.wait()
    assert launcher.returncode == 75, said
    assert all((tmp_path / f"saved{rank}").exists() for rank in range(2)), said


BETWEEN_TWO_RANKS = """
import os, runpy, signal, sys, time
from torch.distributed.elastic.multiprocessing.subprocess_handler import SubprocessHandler
started, seen = SubprocessHandler._popen, sys.argv[-1] + "/rank0"
def start(handler, *arguments):
    if handler.local_rank_id == 1:
        while not os.path.exists(seen):
            time.sleep(0.02)
        os.kill(os.getpid(), signal.SIGTERM)
    return started(handler, *arguments)
SubprocessHandler._popen = start
sys.argv.pop(0)
runpy.run_path(sys.argv[0], run_name="__main__")
"""


@pytest.mark.slow
def test_a_signal_between_the_start_of_two_ranks_reaches_both(tmp_path: Path) -> None:
    """What was begun is not left behind, and how it ends is what torchrun answers."""
    (tmp_path / "rank.py").write_text(RANK)
    (tmp_path / "between.py").write_text(BETWEEN_TWO_RANKS)
    torchrun = [str(TORCHRUN), "--standalone", "--local-addr=127.0.0.1", "--nproc-per-node=2"]
    launcher = subprocess.run(
        [sys.executable, str(tmp_path / "between.py"), *torchrun, str(tmp_path / "rank.py"), str(tmp_path)],
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        stderr=subprocess.PIPE,
        text=True,
        timeout=30,
        check=False,
    )
    assert "SIGTERM; as soon as the ranks are there" in launcher.stderr
    assert (tmp_path / "saved0").exists(), launcher.stderr
    # The other one has had no time to say what it does with signals.
    assert launcher.returncode in (75, 128 + signal.SIGTERM), launcher.stderr
