"""What `explain` leaves of its dry step: nothing, in the model, in its gradients, in the graph behind its inputs."""

from __future__ import annotations

from collections import OrderedDict, UserDict, namedtuple
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from tensor3d import Cube, Linear3D
from tensor3d.explain import explain

# --- the graph behind the inputs ------------------------------------------------------------------------------------


def model_output(x: Tensor) -> Any:
    return pytest.importorskip("transformers.modeling_outputs").BaseModelOutput(last_hidden_state=x)


Pair = namedtuple("Pair", ["x", "other"])


class Mine(dict[str, Any]):
    """A dict of the caller's own, whose items are its attributes, as in many configurations."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.__dict__ = self


@dataclass(frozen=True)
class Record:
    x: Tensor


@dataclass(frozen=True, slots=True)
class Slotted:
    x: Tensor


CONTAINERS: list[Any] = [
    pytest.param(lambda x: x, lambda held: held, id="tensor"),
    pytest.param(lambda x: [[x]], lambda held: held[0][0], id="list"),
    pytest.param(lambda x: Pair(x, 1), lambda held: held.x, id="namedtuple"),
    pytest.param(Record, lambda held: held.x, id="dataclass"),
    pytest.param(Slotted, lambda held: held.x, id="dataclass with slots"),
    pytest.param(lambda x: OrderedDict(x=Record(x)), lambda held: held["x"].x, id="OrderedDict"),
    pytest.param(lambda x: UserDict(x=x), lambda held: held["x"], id="UserDict"),
    pytest.param(lambda x: Mine(x=x), lambda held: held.x, id="own dict"),
    pytest.param(lambda x: model_output(x), lambda held: held[0], id="ModelOutput"),
]


class Reading(nn.Module):
    """A layer given its input in a container, and perhaps the same one again; it notes what it is given."""

    def __init__(self, cube: Cube, read: Callable[[Any], Tensor]) -> None:
        super().__init__()
        self.layer, self.read = Linear3D(8, 8, cube), read
        self.given: tuple[Any, Any] = (None, None)

    def forward(self, held: Any, again: Any = None) -> Tensor:
        self.given = (held, again)
        return self.layer(self.read(held))


@pytest.mark.parametrize("put, read", CONTAINERS)
def test_the_callers_graph_is_not_entered(put: Callable[[Tensor], Any], read: Callable[[Any], Tensor]) -> None:
    model = Reading(Cube.single(), read)
    start = torch.ones(4, 8, requires_grad=True)
    x = start.exp()
    held = put(x)
    for inputs in ((held, held), OrderedDict(held=held, again=held), UserDict(held=held, again=held)):
        explain(model, inputs=inputs)
        assert type(model.given[0]) is type(held)
        assert model.given[0] is model.given[1], "one object stays one"
        assert read(held) is x, "the caller's own is as it was"
        assert start.grad is None
    x.sum().backward()
    assert start.grad is not None, "its graph is still there"


def test_what_needs_no_gradient_is_not_copied() -> None:
    held = Record(torch.ones(4, 8))
    model = Reading(Cube.single(), lambda held: held.x)
    explain(model, inputs=(held,))
    assert model.given[0] is held


# --- the model ------------------------------------------------------------------------------------------------------


class Normed(nn.Module):
    """Batch norm, whose kernel writes to its buffers behind autograd's back, and buffers that forward makes."""

    def __init__(self, cube: Cube) -> None:
        super().__init__()
        self.norm, self.layer = nn.BatchNorm1d(8, affine=False), Linear3D(8, 8, cube)
        self.register_buffer("mean", None)
        self.register_buffer("table", torch.arange(8).expand(4, 8))

    def forward(self, x: Tensor) -> Tensor:
        self.mean = x.detach().mean(0) + self.table[0]
        if "count" not in self._buffers:
            self.register_buffer("count", torch.ones(()))
        return self.layer(self.norm(x))


@pytest.mark.parametrize("inference", [False, True])
def test_buffers_are_as_before_for_every_way_to_change_them(inference: bool) -> None:
    cube = Cube.single()
    model = Normed(cube)
    if inference:
        with torch.inference_mode():
            model.norm.running_mean, model.norm.running_var = torch.zeros(8), torch.ones(8)
        model.norm.num_batches_tracked = None
    held = dict(model.named_buffers())
    values = {name: buffer.clone() for name, buffer in held.items()}
    explain(model, inputs=(torch.randn(16, 8) + 3,))
    assert {name: id(buffer) for name, buffer in model.named_buffers()} == {name: id(held[name]) for name in held}
    assert model.mean is None
    for name, value in values.items():
        assert torch.equal(held[name], value), name


def test_a_forward_that_waits_for_its_backward_may_be_explained() -> None:
    model = nn.Sequential(nn.BatchNorm1d(8), Linear3D(8, 8, Cube.single()))
    x = torch.randn(16, 8, requires_grad=True)
    waiting = model(x)
    explain(model, inputs=(x,))
    waiting.sum().backward()
    assert x.grad is not None


class Hidden(nn.Module):
    """Layers whose graph is made in backward alone, by a reentrant checkpoint: two of the cube, one of PyTorch."""

    def __init__(self, cube: Cube) -> None:
        super().__init__()
        self.inner = nn.Sequential(Linear3D(8, 8, cube), nn.LayerNorm(8), Linear3D(8, 8, cube, "y"))

    def forward(self, x: Tensor) -> Tensor:
        return checkpoint(self.inner, x, use_reentrant=True)


@pytest.mark.parametrize("steps", [0, 1])
def test_a_reentrant_checkpoint_leaves_no_gradient(steps: int) -> None:
    model, x = Hidden(Cube.single()), torch.randn(4, 8, requires_grad=True)
    for _ in range(steps):
        model(x).square().sum().backward()
    before = {name: (parameter.grad, _copy(parameter.grad)) for name, parameter in model.named_parameters()}
    explain(model, inputs=(x,))
    for name, parameter in model.named_parameters():
        gradient, value = before[name]
        assert parameter.grad is gradient, name
        assert value is None or torch.equal(parameter.grad, value), name


def _copy(gradient: Tensor | None) -> Tensor | None:
    return None if gradient is None else gradient.clone()


def test_an_optimiser_in_backward_does_not_step() -> None:
    model, x = Hidden(Cube.single()), torch.randn(4, 8, requires_grad=True)
    gain = model.inner[1].weight
    loose = torch.ones(8, requires_grad=True)  # no parameter of the model
    stepped: list[Tensor] = []
    for leaf in (gain, loose):
        leaf.register_post_accumulate_grad_hook(stepped.append)
    explain(model, inputs=(x,), loss=lambda output: (output * loose).sum())
    assert not stepped
    (model(x) * loose).sum().backward()
    assert {id(leaf) for leaf in stepped} == {id(gain), id(loose)}, "they are told again"
