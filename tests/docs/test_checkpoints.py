"""The blocks of docs/checkpoints.md run as they stand: each is a program, the second one on another cube."""

from __future__ import annotations

import io
import os
import re
from contextlib import redirect_stdout
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from tensor3d import full_state_dict
from tests.ranks import run_ranks

PAGE = (Path(__file__).parents[2] / "docs" / "checkpoints.md").read_text()


def run(code: str) -> tuple[dict[str, Any], str]:
    """The names of a block, run by itself, and what it printed."""
    if dist.is_initialized():
        rank, world = str(dist.get_rank()), str(dist.get_world_size())
        os.environ.update(RANK=rank, WORLD_SIZE=world, LOCAL_RANK=rank)
    names: dict[str, Any] = {}
    with redirect_stdout(io.StringIO()) as printed:
        exec(compile(code, "docs/checkpoints.md", "exec"), names)
    return names, printed.getvalue()


def loaded(code: str) -> tuple[dict[str, torch.Tensor], Any, str]:
    names, printed = run(code)
    return full_state_dict(names["model"], names["cube"]), names["progress"], printed


def test_what_the_first_block_saves_the_second_one_loads_on_another_cube(tmp_path: Path) -> None:
    saving, loading = re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)
    assert "from_env(1, 2, 1, data=2)" in loading
    here = [code.replace("runs/mine", str(tmp_path)) for code in (saving, loading)]
    names, printed = run(here[0].replace("from_env(2, 2, 2)", "from_env(1, 1, 1)"))
    assert sorted(path.name for path in (tmp_path / "checkpoints").iterdir()) == [f"step-{n:08}" for n in (2, 3, 4)]
    assert {line.split()[-1] for line in printed.splitlines()} == {"None"}
    for state, progress, told in run_ranks(4, loaded, here[1]):
        assert (progress["step"], told.split()[0]) == (4, "4")
        for name, value in names["model"].state_dict().items():
            assert torch.equal(value, state[name])
