"""launch/torchrun.py under a scheduler, which sends a signal to torchrun and to the ranks, and maybe another one."""

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
