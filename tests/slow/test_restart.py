"""A rank that is killed: torchrun starts all of them again, they find each other, and the job ends well."""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path

import pytest

from tests.programs import ran

WORKER = """
import os, signal, sys
import torch
from tensor3d import Cube, Linear3D

attempt = int(os.environ["TORCHELASTIC_RESTART_COUNT"])
cube = Cube.from_env(1, 2, 2)
layer = Linear3D(8, 8, cube)
x = torch.ones(4, 4, device=cube.device, requires_grad=True)
layer(x).sum().backward()
if attempt < DEATHS and cube.rank == 1 + attempt:
    os.kill(os.getpid(), signal.SIGKILL)
layer(x).sum().backward()  # the others now wait for the dead
if cube.rank == 0:
    print(f"finished in attempt {attempt}", flush=True)
cube.close()
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    "deaths", [1, *(pytest.param(n, marks=pytest.mark.long(reason="one death says most")) for n in (0, 2))]
)
def test_a_job_outlives_its_ranks(deaths: int, tmp_path: Path) -> None:
    worker = tmp_path / "worker.py"
    worker.write_text(WORKER.replace("DEATHS", str(deaths)))
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--local-addr=127.0.0.1"]
    start = time.monotonic()
    done = ran(
        [*command, "--nproc-per-node=4", "--max-restarts=2", str(worker)],
        env={**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])},
        timeout=150,
    )
    print(f"{deaths} deaths: {time.monotonic() - start:.1f} s")
    assert done.returncode == 0, done.stderr[-3000:]
    assert done.stdout.splitlines() == [f"finished in attempt {deaths}"]
