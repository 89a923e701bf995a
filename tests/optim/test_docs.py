"""docs/optimizers.md does what it says: its loop runs, and learns the same on one process and on 2x2x2."""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from tensor3d import Cube, Linear3D, shard
from tests.ranks import run_ranks
from tests.single_device_reference import error, full

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


@pytest.mark.slow
def test_the_loop_of_the_document() -> None:
    (code,) = re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.DOTALL)
    alone = _run(code.replace("from_env(2, 2, 2,", "from_env(1, 1, 1,"))
    assert len(alone) == 20
    assert alone[-1] < 0.5 * alone[0]
    for losses in run_ranks(8, _run, code):
        assert losses == pytest.approx(alone, rel=1e-2)


def _stepped(cube: Cube, name: str, fused: bool) -> list[torch.Tensor]:
    """Parameters after three steps."""
    cube.manual_seed(0)
    layer = Linear3D(8, 8, cube)
    parameters = [layer.weight] if name == "Muon" else list(layer.parameters())
    options: dict[str, Any] = {"fused": True} if fused else {}
    optimizer = getattr(torch.optim, name)(parameters, lr=0.01, **options)
    x = shard(torch.linspace(-1, 1, 128).reshape(16, 8), cube, "z")

    def closure() -> torch.Tensor:
        optimizer.zero_grad()
        loss = layer(x).square().sum()
        loss.backward()
        return loss.detach()

    for _ in range(3):
        optimizer.step(closure)
    return [full(parameter) for parameter in layer.parameters()]


def _tried(tries: list[tuple[str, bool]]) -> list[str]:
    """What each optimiser does: as on one device, what it raises there and here, or something else."""
    cube, found = Cube(1, 2, 1), []
    for name, fused in tries:
        try:
            wanted = _stepped(Cube.single(), name, fused)
        except TypeError:
            found.append("there is none")
            continue
        try:
            got = _stepped(cube, name, fused)
        except (RuntimeError, NotImplementedError):
            found.append("raises")
            continue
        found.append("yes" if max(map(error, got, wanted)) < 1e-5 else "differs")
    return found


QUICK = ("AdamW", "SGD", "Adagrad")


def _said(cell: str) -> str:
    """What the page says of the installed PyTorch."""
    first = re.fullmatch(r"yes from PyTorch (\d+)\.(\d+) on, raises with .*", cell)
    if first and tuple(map(int, torch.__version__.split(".")[:2])) < tuple(map(int, first.groups())):
        return "raises"
    known = re.match("yes|raises|there is none", cell)
    assert known, cell
    return known[0]


def _table() -> list[tuple[str, str, str]]:
    (section,) = re.findall(r"^## Optimisers of torch$(.*?)^## ", PAGE.read_text(), re.MULTILINE | re.DOTALL)
    rows = re.findall(r"^\| (`\w+`.*?) \| (.*?) \| (.*?) \|$", section, re.MULTILINE)
    return [
        (name, _said(plain), _said(fused)) for names, plain, fused in rows for name in re.findall(r"`(\w+)`", names)
    ]


@pytest.mark.parametrize("quick", [True, pytest.param(False, marks=pytest.mark.slow)])
def test_the_table_of_torchs_optimisers_says_what_they_do(quick: bool) -> None:
    table = _table()
    assert {name for name, _, _ in table} == {
        name
        for name, kind in vars(torch.optim).items()
        if isinstance(kind, type) and issubclass(kind, torch.optim.Optimizer)
    } - {"Optimizer", "SparseAdam"}
    # Those that start at once: the others have seconds of planning in their first step.
    tries = {(name, fused): (plain, kernels)[fused] for name, plain, kernels in table for fused in (False, True)}
    if quick:
        tries = {key: wanted for key, wanted in tries.items() if key[0] in QUICK and key[1]}
    for found in run_ranks(2, _tried, list(tries)):
        assert dict(zip(tries, found, strict=True)) == tries
