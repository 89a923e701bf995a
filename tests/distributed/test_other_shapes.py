"""What docs/troubleshooting.md says of ranks that give different shapes to a layer."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = """
import torch
from tensor3d import Cube, Linear3D
from tensor3d.testing import run_ranks


def rows_of_its_own():
    cube = Cube(1, 2, 1)
    layer = Linear3D(8, 8, cube, "z")
    try:
        layer(torch.ones(4 + 2 * cube.rank, 8))
    except RuntimeError as error:
        return str(error)


if __name__ == "__main__":
    print(run_ranks(2, rows_of_its_own))
"""


@pytest.mark.slow
def test_in_torchs_debug_mode_every_rank_says_which_shapes_met(tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text(SCRIPT)
    root = Path(__file__).parents[2]
    environment = {**os.environ, "TORCH_DISTRIBUTED_DEBUG": "DETAIL", "PYTHONPATH": str(root)}
    done = subprocess.run(
        [sys.executable, "script.py"], cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("Detected mismatch between collectives on ranks") == 2
    assert done.stdout.count("TensorShape=[4, 8]") == done.stdout.count("TensorShape=[6, 8]") == 2
