"""docs/optimizers.md does what it says: its loop runs, and learns the same on one process and on 2x2x2."""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

from tests.ranks import run_ranks

PAGE = Path(__file__).parent.parent.parent / "docs" / "optimizers.md"


def _run(code: str) -> list[float]:
    """Losses of the loop."""
    if dist.is_initialized():
        rank, world = str(dist.get_rank()), str(dist.get_world_size())
        os.environ.update(RANK=rank, WORLD_SIZE=world, LOCAL_RANK=rank)
    names: dict[str, Any] = {"history": []}
    recorded = code.replace("    scaler.scaled(", "    history.append(loss.item())\n    scaler.scaled(")
    exec(compile(recorded, str(PAGE), "exec"), names)
    assert float(names["scaler"].scale) == 2.0**16, "a step was skipped"
    return list(names["history"])


def test_the_loop_of_the_document() -> None:
    (code,) = re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.DOTALL)
    alone = _run(code.replace("from_env(2, 2, 2,", "from_env(1, 1, 1,"))
    assert len(alone) == 20
    assert alone[-1] < 0.5 * alone[0]
    for losses in run_ranks(8, _run, code):
        assert losses == pytest.approx(alone, rel=1e-2)
