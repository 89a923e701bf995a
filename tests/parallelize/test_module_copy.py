"""A copy uses its own weights, values and code: what builders cut is theirs, and attributes do not lead back."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tensor3d import Cube, Linear3D, gather, shard
from tensor3d.parallelize import ModuleBuilder, parallelize, rules
from tensor3d.sharding.param_layout import local, matrix
from tests.parallelize.foreign import Scale
from tests.ranks import run_ranks

SINGLE = Cube.single()
SUM_ALL = ("data", "x", "y", "z")


class Fused(nn.Module):
    """A query, a key and a value in one weight (in, out), as GPT-2's."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(8, 24))

    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        return (x @ self.weight).split(8, dim=-1)


class Split(nn.Module):
    def __init__(self, fused: nn.Module, workshop: ModuleBuilder, of_kinds: bool) -> None:
        super().__init__()
        self.parts = nn.ModuleList()
        for i in range(3):
            if of_kinds:  # from a module that is gone when the next one is made
                linear = nn.Linear(8, 8, bias=False)
                linear.weight.data = fused.get_parameter("weight").data[:, 8 * i : 8 * i + 8].t().contiguous()
                part = rules.linear("z").build(linear, "part", workshop)
            else:  # from views that are
                part = Linear3D(8, 8, workshop.cube, "z", bias=False)
                part.weight = workshop.parameter(fused.get_parameter("weight")[:, 8 * i : 8 * i + 8].t(), matrix("z"))
            self.parts.append(part)

    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        return tuple(part(x) for part in self.parts)


def _split(shape: tuple[int, int, int] | None, of_kinds: bool) -> list[bool]:
    torch.manual_seed(0)
    cube = SINGLE if shape is None else Cube(*shape)
    original, x = Fused(), torch.randn(8, 8)
    model = parallelize(original, cube, {"": rules.replace(lambda m, _, workshop: Split(m, workshop, of_kinds))})
    return [
        torch.allclose(gather(got, cube, "y"), wanted, atol=1e-5)
        for got, wanted in zip(model(shard(x, cube, "z")), original(x), strict=True)
    ]


@pytest.mark.parametrize("of_kinds", [False, True])
def test_a_fused_weight_may_be_split_into_temporary_tensors(of_kinds: bool) -> None:
    assert _split(None, of_kinds) == [True] * 3


def _split_both() -> list[bool]:
    return [*_split((1, 2, 1), False), *_split((1, 2, 1), True), _temporary_sources(Cube(1, 2, 1))]


def test_a_fused_weight_may_be_split_on_ranks() -> None:
    assert run_ranks(2, _split_both) == [[True] * 7] * 2


def _temporary_sources(cube: Cube) -> bool:
    """Whether each of many tensors that live for one call, and may lie where the last one did, gives its own."""
    workshop = ModuleBuilder(cube, lambda module, _: module)
    parameters = [workshop.parameter(torch.full((4, 4), float(i)), matrix("z")) for i in range(20)]
    buffers = [workshop.buffer(torch.full((4,), float(i))) for i in range(20)]
    first = [local(each.detach()).flatten()[0].item() for each in (*parameters, *buffers)]
    return first == [float(i) for i in range(20)] * 2


def test_tensors_that_live_for_one_call_are_told_apart() -> None:
    assert _temporary_sources(SINGLE)


def test_modules_that_live_for_one_call_are_told_apart() -> None:
    def build(module: nn.Module, name: str, workshop: ModuleBuilder) -> nn.Module:
        return nn.Sequential(*(workshop.copy(nn.Sequential(nn.Dropout(i / 20)), name) for i in range(20)))

    model = parallelize(nn.Sequential(nn.GELU()), SINGLE, {"0": rules.replace(build)})
    assert [copy[0].p for copy in model[0]] == [i / 20 for i in range(20)]


def test_the_same_view_of_a_tied_weight_stays_tied() -> None:
    def build(module: nn.Module, name: str, workshop: ModuleBuilder) -> nn.Module:
        layer = Linear3D(8, 8, workshop.cube, "z", bias=False)
        layer.weight = workshop.parameter(module.get_parameter("weight").t(), matrix("z"))
        return layer

    original = nn.ModuleDict({"a": nn.Linear(8, 8, bias=False), "b": nn.Linear(8, 8, bias=False)})
    original["b"].weight = original["a"].weight
    model = parallelize(original, SINGLE, {"*": rules.replace(build)})
    assert model["a"].weight is model["b"].weight


# --- attributes ----------------------------------------------------------------------------------------------------


class Plain(nn.Module):
    """A linear beside values of several sorts."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(4, 4)
        self.seen: dict[str, Any] = {"count": 0, "sizes": [1]}
        self.same = self.seen["sizes"]
        self.register_buffer("scale", torch.ones(1))
        self.values = (self.scale, torch.zeros(1))
        self.double = functools.partial(self.times, k=2)
        self.steps = [self.double, self.once]

    def times(self, x: Tensor, k: int) -> Tensor:
        self.seen["count"] += 1
        self.seen["sizes"].append(len(x))
        self.values[1].add_(1)
        return k * self.up(x)

    def once(self, x: Tensor) -> Tensor:
        return x

    def forward(self, x: Tensor) -> Tensor:
        for step in self.steps:
            x = step(x)
        return x


@pytest.mark.parametrize("kind", ["container", "replicated"])
def test_what_forward_changes_is_the_copys_own(kind: str) -> None:
    original = Plain()
    plan = {"up": rules.linear("z")} if kind == "container" else {"": rules.replicated(SUM_ALL)}
    model = parallelize(original, SINGLE, plan)
    x = torch.randn(3, 4)
    result = model(x)
    result.sum().backward()
    assert original.seen == {"count": 0, "sizes": [1]}
    assert original.values[1] == 0
    assert original.up.weight.grad is None
    assert model.up.weight.grad is not None
    assert model.seen == {"count": 1, "sizes": [1, 3]}
    assert model.same is model.seen["sizes"]
    assert model.values[0] is model.scale
    assert torch.equal(result, original(x))


def test_a_value_of_two_modules_is_one_of_their_copies_too() -> None:
    counts = {"n": 0}
    original = nn.Sequential(nn.GELU(), nn.GELU())
    for part in original:
        part.counts = counts
    model = parallelize(original, SINGLE, {})
    assert model[0].counts is model[1].counts
    assert model[0].counts is not counts


def test_an_attribute_that_holds_itself_is_copied() -> None:
    original = nn.GELU()
    original.loop = []
    original.loop.append(original.loop)
    model = parallelize(original, SINGLE, {})
    assert model.loop[0] is model.loop
    assert model.loop is not original.loop


class Hiding(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 4)
        self.helper = Scale(4)

    def forward(self, x: Tensor) -> Tensor:
        return self.second(self.first(x))


def _in_a_closure(module: Hiding) -> Callable[[Tensor], Tensor]:
    before = module.forward
    return lambda x: 2 * before(x)


HIDDEN: dict[str, tuple[str, Callable[[Hiding], Any]]] = {
    "a parameter in a list": ("parameters", lambda m: [m.first.weight]),
    "a tensor that is trained": ("parameters", lambda m: {"w": torch.ones(4, requires_grad=True)}),
    "modules in a list, of the model": ("modules", lambda m: [m.first, m.second]),
    "a module in a partial": ("modules", lambda m: functools.partial(F.linear, m.first)),
    "a method of another module": ("modules", lambda m: m.helper.forward),
    "a method of another module in a partial": ("modules", lambda m: functools.partial(m.helper.forward)),
    "itself in a closure": ("modules", _in_a_closure),
}
HIDING_PLANS: dict[str, Callable[[], dict[str, Any]]] = {
    "own code": lambda: {"0.*": rules.replicated(SUM_ALL)},
    "replicated": lambda: {"0": rules.replicated(SUM_ALL)},
}


@pytest.mark.parametrize("plan", HIDING_PLANS)
@pytest.mark.parametrize("case", HIDDEN)
def test_what_would_lead_back_to_the_original_is_refused(case: str, plan: str) -> None:
    sort, make = HIDDEN[case]
    original = nn.Sequential(Hiding())
    original[0].kept = make(original[0])
    with pytest.raises(ValueError, match=f"'0' keeps {sort} in the attribute 'kept'"):
        parallelize(original, SINGLE, HIDING_PLANS[plan]())


def test_kept_modules_are_looked_into_as_well() -> None:
    original = nn.Sequential(nn.GELU(), nn.Dropout())
    original[0].kept = [original[1]]
    with pytest.raises(ValueError, match=r"'\b0\b'.*'kept'"):
        parallelize(original, SINGLE, {"1": rules.keep()})
    inner = nn.Sequential(nn.GELU(), nn.Tanh())
    inner[0].kept = [inner[1]]
    with pytest.raises(ValueError, match=r"'part\.0'.*'kept'"):
        parallelize(nn.ModuleDict({"part": inner}), SINGLE, {"part": rules.keep()})
