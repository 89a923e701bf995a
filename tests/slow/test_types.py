"""A strictly typed program that imports the library type-checks, and mistakes in it are found by their types."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from tests.programs import ran

pytestmark = pytest.mark.slow

PROGRAM = """\
import torch
from torch import Tensor, nn

import tensor3d as t3d
from tensor3d.sharding.param_layout import vector
from tensor3d.parallelize import propose_plan
from tensor3d.testing import Report, check_layer, run_ranks


class Model(nn.Module):
    def __init__(self, cube: t3d.Cube) -> None:
        super().__init__()
        self.cube = cube
        self.embed = t3d.Embedding3D(11, 16, cube)
        self.layer = t3d.TransformerLayer3D(16, 2, cube)
        self.scale = t3d.constant((16,), vector("z"), cube, 1.0)
        self.project = t3d.Projection3D(16, 11, cube, weight=self.embed.weight)

    def forward(self, ids: Tensor, labels: Tensor, sequences: t3d.Sequences, count: int) -> Tensor:
        h: Tensor = self.layer(self.embed(ids), sequences)
        logits: Tensor = self.project(h * t3d.local_param(self.scale, vector("z"), self.cube))
        losses, _ = t3d.cross_entropy(logits, t3d.local_rows(labels, self.cube), 11, self.cube)
        return t3d.all_reduce_replicated(losses.sum() / count, self.cube.over("data", "x", "z"))


def step(cube: t3d.Cube, padded: Tensor, mask: Tensor) -> float:
    packs = t3d.pack_padded(t3d.local_shard(padded, cube), t3d.local_shard(mask, cube), cube)
    model = Model(cube)
    loss: Tensor = model(packs.ids, packs.ids, packs.sequences, 64)
    norm = t3d.clip_grad_norm_(model.parameters(), 1.0, cube)
    explained = t3d.explain(model, tokens=64)
    return loss.item() + norm.item() + explained.saved


def converted(module: nn.Module, cube: t3d.Cube, example: Tensor) -> dict[str, Tensor]:
    proposal = propose_plan(module, example)
    plan = {**proposal.plan, "head": t3d.rules.projection(turn=True)}
    with proposal.rows.holding(t3d.Sequences.from_lengths([8])):
        model = t3d.parallelize(module, cube, plan)
    return {name: value for name, value in t3d.full_state_dict(model, cube).items() if isinstance(value, Tensor)}


report: Report = check_layer(Model, None, torch.zeros(8, 16))
answers = run_ranks(8, step)
"""

MISTAKES = {
    't3d.Linear3D(16, 16, t3d.Cube(), face="x")': "[arg-type]",
    "t3d.Embedding3D(11, 16)": "[call-arg]",
    't3d.redistribute(torch.zeros(2), t3d.Cube(), to="z") + "text"': "[operator]",
    "t3d.rules.linear(3)": "[arg-type]",
    't3d.Cube().over("w")': "[arg-type]",
    "t3d.pack_padded(torch.zeros(2), None)": "[call-arg]",
    "t3d.Sequences.from_lengths(3)": "[arg-type]",
    "t3d.nothing": "[attr-defined]",
}


def mypy(file: Path) -> list[str]:
    finished = ran(
        [sys.executable, "-m", "mypy", "--strict", "--no-error-summary", "--no-pretty", str(file)],
        cwd=Path(__file__).parents[2],
        timeout=600,
    )
    assert finished.returncode in (0, 1), finished.stderr
    return [line for line in finished.stdout.splitlines() if file.name in line and ": error:" in line]


def test_a_typed_program_passes_and_its_mistakes_do_not(tmp_path: Path) -> None:
    file = tmp_path / "program.py"
    file.write_text(PROGRAM)
    assert mypy(file) == []
    first = len(PROGRAM.splitlines()) + 1
    file.write_text(PROGRAM + "\n".join(MISTAKES) + "\n")
    found = mypy(file)
    for number, (mistake, code) in enumerate(MISTAKES.items(), first):
        assert [line for line in found if f":{number}: error:" in line and line.endswith(code)], (mistake, found)
    assert len(found) == len(MISTAKES)
