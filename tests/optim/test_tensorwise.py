"""LAMB and StableAdamW by regions: what they write to, and what remains when they are compiled."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode

from tensor3d import Cube, ExecutionPolicy
from tensor3d.ops.compiled_regions import CompiledRegions
from tensor3d.optim import Lamb, StableAdamW, decay_groups
from tests.single_device_reference import CPU, fused
from tools.bench.harness.memory import peak_on

KINDS = (Lamb, StableAdamW)
SIZES = ((256, 64), (64, 256), (48, 64), (3, 64), (1, 64), (0, 64), (64,))


class Named(CompiledRegions):
    """Writes down which regions are called with how many rows."""

    def __init__(self) -> None:
        super().__init__(False, CPU)
        self.calls: list[tuple[str, int]] = []

    def __call__(self, region: Any, *inputs: Any) -> Any:
        assert all(isinstance(each, Tensor) for each in inputs), "what a schedule changes would be compiled each time"
        self.calls.append((region.__name__, inputs[0].shape[-2]))
        return super().__call__(region, *inputs)


def parameters(dtype: torch.dtype = torch.float32) -> list[nn.Parameter]:
    torch.manual_seed(0)
    return [nn.Parameter(torch.randn(size, dtype=dtype)) for size in SIZES]


def steps(kind: type[Lamb | StableAdamW], weights: list[nn.Parameter], cube: Cube) -> Lamb | StableAdamW:
    """Three, each with another rate, decay and betas; the second one is skipped."""
    optimizer = kind(decay_groups(nn.ParameterList(weights), 0.1), cube, lr=0.1)
    for step in range(3):
        torch.manual_seed(step)
        for each in weights:
            each.grad = torch.randn(each.shape, dtype=each.dtype)
        for group in optimizer.param_groups:
            group["lr"] = 0.1 / (step + 1)
            group["weight_decay"] /= step + 1
            group["betas"] = (0.9 - 0.1 * step, 0.999 - 0.01 * step)
        optimizer.found_inf = torch.tensor(float(step == 1))
        optimizer.step()
    return optimizer


def values(optimizer: Lamb | StableAdamW) -> list[Tensor]:
    return [t for p, state in optimizer.state.items() for t in (p.detach(), state["exp_avg"], state["exp_avg_sq"])]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16], ids=str)
def test_blocks_of_rows_go_through_regions_others_not(kind: type[Lamb | StableAdamW], dtype: torch.dtype) -> None:
    """One row, none, vectors, and what is no memory of its own that begins at a round address."""
    cube, plain = fused(Cube.single()), Cube.single()
    cube.regions = named = Named()
    weights = parameters(dtype)
    weights.append(nn.Parameter(torch.randn(64, 32, dtype=dtype).t()))
    weights.append(nn.Parameter(torch.randn(8 * 64 + 1, dtype=dtype)[1:].view(8, 64)))
    twins = copy.deepcopy(weights)
    got, wanted = values(steps(kind, weights, cube)), values(steps(kind, twins, plain))
    first = "norms" if kind is Lamb else "surprise"
    rows = [size[0] for size in SIZES if len(size) > 1 and size[0] > 1]
    assert named.calls == 3 * [(name, count) for name in (first, "second_way") for count in rows]
    close = {torch.float32: 1e-5, torch.float64: 1e-13, torch.bfloat16: 3e-2}[dtype]
    assert all(torch.allclose(a, b, rtol=close, atol=close) for a, b in zip(got, wanted, strict=True))


def test_stand_ins_go_the_way_that_plans_expect() -> None:
    """Nobody asks where they lie, which they warn of."""
    cube = fused(Cube.single())
    cube.regions = named = Named()
    with FakeTensorMode():
        weight = nn.Parameter(torch.empty(8, 8))
        weight.grad = torch.empty(8, 8)
        Lamb([weight], cube, lr=0.1).step()
    assert named.calls == []


@pytest.mark.slow  # for the seconds that a compiler takes
@pytest.mark.parametrize("kind", KINDS)
def test_compiled_steps_are_the_same_and_keep_nothing(kind: type[Lamb | StableAdamW]) -> None:
    """One code for blocks of the same columns and for any rate, decay and betas; no memory but of one block."""
    cube = Cube.single(speed=ExecutionPolicy(compile=True))
    weights = parameters()
    twins = copy.deepcopy(weights)
    with torch._dynamo.config.patch(error_on_recompile=True):
        compiled = steps(kind, weights, cube)
    got, wanted = values(compiled), values(steps(kind, twins, Cube.single()))
    assert all(torch.allclose(a, b, rtol=1e-5, atol=1e-6) for a, b in zip(got, wanted, strict=True))
    assert len(cube.regions._made) == 2 * len({size[-1] for size in SIZES if len(size) > 1})
    large = [nn.Parameter(torch.randn(512, 128)) for _ in range(16)]
    for each in large:
        each.grad = torch.randn_like(each)
    optimizer = kind(large, cube, lr=0.1)
    optimizer.step()
    assert peak_on(CPU, optimizer.step) < 0.1 * sum(each.nbytes for each in large)
