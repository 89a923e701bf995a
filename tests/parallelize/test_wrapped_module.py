"""Code of others that keeps its parameters: tied ones, recompute inside, and what is read and set from outside."""

from __future__ import annotations

import copy
import io
from types import MethodType
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from tensor3d import Cube, gather, shard
from tensor3d.parallelize import full_state_dict, parallelize, rules
from tensor3d.sharding.param_layout import matrix, vector
from tests.parallelize.foreign import HIDDEN, ROWS, Scale, errors_of, own_plane, varied
from tests.ranks import run_ranks
from tests.single_device_reference import name_of, ranks_of, worst

pytestmark = pytest.mark.usefixtures("fp64")
Shape = tuple[int, int, int, int]
SHAPES = [(1, 2, 2, 1), (2, 1, 1, 2)]
WORDS = 24


class Tied(nn.Module):
    """Holds its embedding's weight a second time, and its child's gamma."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(WORDS, HIDDEN)
        self.output_weight = self.embed.weight
        self.scale = Scale(HIDDEN)
        self.gate = self.scale.gamma
        self.up, self.down = nn.Linear(HIDDEN, 2 * HIDDEN), nn.Linear(2 * HIDDEN, HIDDEN)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.scale(self.embed(ids)) * self.gate
        return x + self.down(F.gelu(self.up(x)))


class TiedInside(nn.Module):
    """To be kept whole: two products with one weight, and a third read of it."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(HIDDEN, HIDDEN), nn.Linear(HIDDEN, HIDDEN)
        self.second.weight = self.first.weight

    def forward(self, x: Tensor) -> Tensor:
        weight = self.first.weight
        assert weight is self.second.weight
        return self.second(F.gelu(self.first(x))) @ weight


class Recomputing(nn.Module):
    """Recomputes a method of its own, or a closure over itself."""

    def __init__(self, reentrant: bool, closure: bool) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(HIDDEN, 2 * HIDDEN), nn.Linear(2 * HIDDEN, HIDDEN)
        self.gate = nn.Parameter(torch.ones(HIDDEN))
        self.reentrant, self.closure = reentrant, closure

    def inner(self, x: Tensor) -> Tensor:
        return self.gate * self.down(F.gelu(self.up(x * self.gate)))

    def forward(self, x: Tensor) -> Tensor:
        inner = (lambda h: self.inner(h) * self.gate) if self.closure else self.inner
        return x + checkpoint(inner, x, use_reentrant=self.reentrant)


class RecomputingCall(Recomputing):
    """Recomputes whole calls of itself, as the layers of the transformers library do."""

    def __call__(self, x: Tensor) -> Tensor:
        result: Tensor = checkpoint(super().__call__, x, use_reentrant=self.reentrant)
        return result

    def forward(self, x: Tensor) -> Tensor:
        return x + self.inner(x)


class RecomputingInside(nn.Module):
    """To be kept whole: recomputes a method that uses parameters of modules inside."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.gain = nn.Linear(HIDDEN, HIDDEN), Scale(HIDDEN)

    def inner(self, x: Tensor) -> Tensor:
        return F.gelu(self.gain(self.first(x))) * self.gain.gamma

    def forward(self, x: Tensor) -> Tensor:
        return checkpoint(self.inner, x, use_reentrant=False)


GATED: dict[str, Any] = {
    "up": rules.linear("z"),
    "down": rules.linear("y"),
    "": rules.wrapped({"gate": vector("z")}),
}
TIED: dict[str, Any] = GATED | {
    "embed": rules.embedding(),
    "scale": rules.wrapped({"gamma": vector("z")}),
    "": rules.wrapped({"gate": vector("z"), "output_weight": matrix("z")}),
}
WHOLE: dict[str, Any] = {"": rules.replicated(("data", "x", "y", "z"), enters="z")}


def compared(original: nn.Module, plan: dict[str, Any], cube: Cube) -> dict[str, float]:
    torch.manual_seed(6)
    varied(original)
    model = parallelize(original, cube, plan)
    rows, direction = torch.randn(ROWS, HIDDEN), torch.randn(ROWS, HIDDEN)
    if plan is TIED:
        rows = torch.randint(0, WORDS, (ROWS,))
        y = model(own_plane(rows, cube))
    elif plan is WHOLE:
        y = model(own_plane(rows, cube))
    else:
        y = model(shard(rows, cube, "z").requires_grad_())
    whole, wanted = gather(y, cube, "z"), original(rows)
    (whole * direction).sum().backward()
    (wanted * direction).sum().backward()
    back = full_state_dict(model, cube)
    assert list(back) == list(original.state_dict())
    assert all(torch.equal(back[name], value) for name, value in original.state_dict().items())
    return errors_of(model, original, cube, {"output": (whole, wanted)})


CASES: dict[str, tuple[Any, dict[str, Any]]] = {
    "tied": (Tied, TIED),
    "tied inside": (TiedInside, WHOLE),
    "a method": (lambda: Recomputing(reentrant=False, closure=False), GATED),
    "a closure": (lambda: Recomputing(reentrant=False, closure=True), GATED),
    "a call": (lambda: RecomputingCall(reentrant=False, closure=False), GATED),
    "modules inside": (RecomputingInside, WHOLE),
}


def _all(shape: Shape) -> dict[str, float]:
    torch.set_default_dtype(torch.float64)
    cube = Cube(*shape)
    return {f"{case} {n}": e for case, (make, plan) in CASES.items() for n, e in compared(make(), plan, cube).items()}


@pytest.mark.parametrize("shape", SHAPES, ids=name_of)
def test_tied_and_recomputed_parameters_get_the_originals_gradients_on_a_cube(shape: Shape) -> None:
    name, value = worst(run_ranks(ranks_of(shape), _all, shape))
    assert value <= 1e-9, f"{name} differs by {value}"


@pytest.mark.parametrize("case", CASES)
def test_tied_and_recomputed_parameters_get_the_originals_gradients_on_one_device(case: str) -> None:
    make, plan = CASES[case]
    assert max(compared(make(), plan, Cube.single()).values()) <= 1e-9


@pytest.mark.parametrize("make", [Recomputing, RecomputingCall])
def test_reentrant_recompute_works_too(make: Any) -> None:
    original, plain = make(reentrant=True, closure=False), make(reentrant=False, closure=False)
    model = parallelize(original, Cube.single(), GATED)
    plain.load_state_dict(original.state_dict())
    x = torch.randn(4, HIDDEN, requires_grad=True)
    model(x).square().sum().backward()
    plain(x).square().sum().backward()
    for name, parameter in plain.named_parameters():
        torch.testing.assert_close(model.get_parameter(name).grad, parameter.grad)


# --- what is read and set from outside -----------------------------------------------------------------------------


class Stateful(nn.Module):
    """An attribute that its forward reads, a property, and state of its own besides."""

    def __init__(self) -> None:
        super().__init__()
        self.gamma = nn.Parameter(torch.ones(4))
        self.factor, self.steps = 1.0, 0

    @property
    def doubled(self) -> float:
        return 2 * self.factor

    @doubled.setter
    def doubled(self, value: float) -> None:
        self.factor = value / 2

    def forward(self, x: Tensor, again: bool = False) -> Tensor:
        self.steps += 1
        if self.factor < 0:
            raise RuntimeError("a negative factor")
        return self(x) if again else self.factor * self.gamma * x

    def get_extra_state(self) -> int:
        return self.steps

    def set_extra_state(self, state: int) -> None:
        self.steps = state


def wrapped(module: nn.Module) -> Any:
    return parallelize(module, Cube.single(), {"": rules.wrapped({"gamma": vector("z")})})


def test_attributes_set_from_outside_reach_the_code() -> None:
    model = wrapped(Stateful())
    model.factor = 3.0
    assert model(torch.ones(1, 4)).tolist() == [[3.0] * 4]
    model.doubled = 4.0
    assert model.factor == 2.0
    assert model(torch.ones(1, 4)).tolist() == [[2.0] * 4]
    del model.factor
    with pytest.raises(AttributeError, match="factor"):
        model(torch.ones(1, 4))


def test_extra_state_is_stored_and_loaded() -> None:
    model, other = wrapped(Stateful()), wrapped(Stateful())
    model(torch.ones(1, 4))
    assert full_state_dict(model, Cube.single())["_extra_state"] == 1
    other.load_state_dict(model.state_dict())
    assert other.steps == 1


def test_outside_of_its_forward_its_parameters_are_parameters() -> None:
    model = wrapped(Stateful())
    parameter = model.get_parameter("gamma")
    model(torch.ones(1, 4), again=True).sum().backward()
    assert model.gamma is parameter
    assert parameter.grad is not None
    assert parameter.grad.tolist() == [1.0] * 4
    model.factor = -1.0
    with pytest.raises(RuntimeError, match="a negative factor"):
        model(torch.ones(1, 4))
    assert model.gamma is parameter


def test_a_hook_during_a_backward_pass_sees_the_parameter() -> None:
    model = wrapped(Stateful())
    seen = []
    model.register_full_backward_hook(lambda *_: seen.append(model.gamma))
    model(torch.ones(1, 4, requires_grad=True)).sum().backward()
    assert seen[0] is model.gamma


def test_a_forward_that_was_put_on_the_object_is_given_blocks() -> None:
    def doubled(self: Scale, x: Tensor) -> Tensor:
        assert not isinstance(self.gamma, nn.Parameter)
        return 2 * self.gamma * x

    original = Scale(4)
    original.forward = MethodType(doubled, original)  # type: ignore[method-assign]
    model = wrapped(original)
    twin = copy.deepcopy(model)
    twin.gamma.data.fill_(5.0)
    for one, wanted in ((model, 1.4), (twin, 10.0)):
        assert one(torch.ones(1, 4)).tolist() == [[wanted] * 4]


def test_a_stored_model_comes_back() -> None:
    model = nn.Sequential(wrapped(Scale(4)), parallelize(RecomputingInside(), Cube.single(), WHOLE))
    stored = io.BytesIO()
    torch.save(model, stored)
    stored.seek(0)
    back = torch.load(stored, weights_only=False)
    assert repr(back) == repr(model)
    assert type(back[0]) is type(model[0])
    x = torch.randn(2, HIDDEN)
    assert torch.equal(back[1](x), model[1](x))


def test_the_class_of_the_code_is_still_one_of_the_modules() -> None:
    model = wrapped(Scale(4))
    assert isinstance(model, Scale)
    assert type(model).__name__ == "Scale"
    assert type(model) is type(wrapped(Scale(4)))


def test_what_is_on_a_cube_is_not_put_there_again() -> None:
    with pytest.raises(ValueError, match="on a cube already"):
        wrapped(wrapped(Scale(4)))
