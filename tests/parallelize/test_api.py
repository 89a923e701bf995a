"""Ranks that pass different originals are told so, all of them, instead of training a patchwork."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from tensor3d import Cube, parallelize, rules
from tests.ranks import run_ranks

PLAN = {"0": rules.linear("z"), "2": rules.linear("y")}


def perceptron() -> nn.Sequential:
    torch.manual_seed(5)
    return nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 8))


def refusal(change: str) -> tuple[str, int]:
    cube, module = Cube(1, 2, 2), perceptron()
    parallelize(module, cube, PLAN)
    assert cube.traffic.issued == 1  # two numbers a rank, where all is well
    if cube.rank in (1, 3):
        with torch.no_grad():
            if change == "a bit":
                module[2].bias[3] = torch.nextafter(module[2].bias[3], torch.tensor(9.0))
            elif change == "a place":
                module[0].weight.copy_(module[0].weight.clone().roll(1, 0) * 2)
            else:
                module[0].register_buffer("table", torch.ones(2))
    with pytest.raises(ValueError, match=r"ranks.*same model") as refused:
        parallelize(module, cube, PLAN)
    return str(refused.value), cube.traffic.issued


@pytest.mark.parametrize(
    ("change", "where"), [("a bit", ", first in 2.bias."), ("a place", ", first in 0.weight."), ("a buffer", ".")]
)
def test_other_weights_on_some_ranks_are_refused_on_all(change: str, where: str) -> None:
    results = run_ranks(4, refusal, change)
    assert all(result == results[0] for result in results)
    assert f"on ranks [1, 3]{where} Load them from one file" in results[0][0]
