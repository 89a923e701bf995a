"""Several products of one input: each equals its own, and the input travels once."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tensor3d import Cube, Face, Linear3D, MixedPrecisionPolicy, shard
from tensor3d.sharding.activation_layout import other
from tensor3d.sharding.matmul import HandedOn, Reshard, matmul_each
from tests.ranks import run_ranks
from tests.saved_tensors import saved_bytes
from tests.single_device_reference import TOLERANCE, compare, error, fast_alone, ranks_of, worst

Shape = tuple[int, int, int, int]
ROWS, INPUTS, SIZES = 32, 24, (40, 8, 16)
ALL_AGAIN: tuple[Reshard, ...] = (True, True, True)
ALL_KEPT: tuple[Reshard, ...] = (False, False, False)
OF_ONE: tuple[Reshard, ...] = ("weight", True, True)  # which keeps what all read
MIXED: tuple[Reshard, ...] = ("input", False, True)


class Several(nn.Module):
    """Three layers that read the same input, the second one without a bias."""

    def __init__(self, cube: Cube, face: Face, reshards: tuple[Reshard, ...]) -> None:
        super().__init__()
        self.cube, self.face, self.reshards = cube, face, reshards
        self.layers = nn.ModuleList(Linear3D(INPUTS, size, cube, face, size != 8) for size in SIZES)

    def each(self, x: Tensor) -> tuple[Tensor, ...]:
        layers: Any = list(self.layers)
        weights, biases = [layer.weight for layer in layers], [layer.bias for layer in layers]
        return matmul_each(x, weights, self.cube, self.face, biases, reshard_after_forward=self.reshards)

    def forward(self, x: Tensor) -> Tensor:
        return _one_of(self.each(x))


def _one_of(results: tuple[Tensor, ...]) -> Tensor:
    """Something in which all take part, and that lies on the cube as they do."""
    widest = max(result.shape[1] for result in results)
    return sum((F.pad(each.sin(), (0, widest - each.shape[1])) for each in results[1:]), results[0].cos())


def _compared(shape: Shape) -> dict[str, float]:
    cube, errors = Cube(*shape), dict[str, float]()
    faces: tuple[Face, ...] = ("z", "y")
    for face in faces:
        for reshards in (ALL_AGAIN, MIXED):
            found = compare(
                lambda each: Several(each, face, reshards),  # noqa: B023
                cube,
                rows=ROWS,
                columns=INPUTS,
                face_in=face,
                face_out=other(face),
                dtype=torch.float64,
                call=lambda m, x, c: m(x) if c is cube else _by_torch(m, x, cube.axis(other(face)).size),  # noqa: B023
            )
            errors |= {f"{name} on face {face}, {reshards}": value for name, value in found.items()}
    return errors


def _by_torch(twin: Any, x: Tensor, parts: int) -> Tensor:
    """Each part of the columns is made of the same part of every result, as a rank makes its own."""
    results = [F.linear(x, layer.weight, layer.bias) for layer in twin.layers]
    slices = [_one_of(tuple(each.chunk(parts, 1)[n] for each in results)) for n in range(parts)]
    return torch.cat(slices, 1)


@pytest.mark.parametrize("shape", fast_alone((2, 2, 2, 1), (1, 2, 4, 1), (4, 2, 1, 1), (1, 2, 2, 2)))
def test_each_equals_torchs_own(shape: Shape) -> None:
    name, value = worst(run_ranks(ranks_of(shape), _compared, shape))
    assert value <= TOLERANCE[torch.float64], f"{name} differs by {value}"


def test_on_one_device_each_equals_torchs_own() -> None:
    torch.manual_seed(0)
    for compute in (None, torch.bfloat16):
        cube = Cube.single(precision=MixedPrecisionPolicy(compute=compute))
        module = Several(cube, "z", MIXED)
        x = torch.randn(ROWS, INPUTS, requires_grad=True)
        module(x).square().sum().backward()
        found = [x.grad, *(parameter.grad for parameter in module.parameters())]
        x.grad = None
        module.zero_grad()
        with torch.autocast("cpu", compute, enabled=compute is not None):
            _by_torch(module, x, parts=1).float().square().sum().backward()
        wanted = [x.grad, *(parameter.grad for parameter in module.parameters())]
        for got, want in zip(found, wanted, strict=True):
            assert got is not None
            assert want is not None
            assert error(got, want) <= (1e-5 if compute is None else 2e-2)


def _travelled(shape: Shape) -> list[tuple[Any, Any]]:
    """What a rank receives over y and z, and in how many collectives, of three weights at once and of one as large."""
    cube, found = Cube(*shape), []
    x = shard(torch.randn(ROWS, INPUTS), cube, "z").requires_grad_()
    for reshards in (ALL_AGAIN, ALL_KEPT, OF_ONE):
        several = Several(cube, "z", reshards)
        one = Linear3D(INPUTS, sum(SIZES), cube, "z", reshard_after_forward=reshards[0])
        for module in (several, one):
            with cube.traffic.counting() as count:
                result = module.each(x) if module is several else [module(x)]
                torch.stack([each.sum() for each in result]).sum().backward()
            inside = {key: number for key, number in count.received.items() if key[0] in ("x", "y", "z")}
            found.append((inside, count.calls["y", "all-gather"], count.calls["y", "reduce-scatter"]))
    return list(zip(found[::2], found[1::2], strict=True))


def test_the_input_travels_as_of_one_weight() -> None:
    for found in run_ranks(8, _travelled, (2, 2, 2, 1)):
        for (several, *calls), (one, *calls_of_one) in found:
            assert several == one
            assert several["y", "all-gather"] > 0
            assert calls == calls_of_one
        assert [several[1:] for several, _ in found] == [(2, 1), (1, 1), (1, 1)]


def test_the_input_is_saved_once() -> None:
    module, x = Several(Cube.single(), "z", ALL_AGAIN), torch.randn(ROWS, INPUTS, requires_grad=True)
    assert saved_bytes(lambda: module.each(x)[0]) == 4 * (ROWS * INPUTS + sum(SIZES) * INPUTS)


def _in_part(shape: Shape | None) -> list[bool]:
    """A pass through one result of three, of which another's weight is frozen, and through what is handed on alone."""
    torch.manual_seed(0)
    cube = Cube.single() if shape is None else Cube(*shape)
    module = Several(cube, "z", MIXED)
    x = shard(torch.randn(ROWS, INPUTS), cube, "z").requires_grad_()
    first, second, third = (layer.weight for layer in module.layers)
    second.requires_grad_(False)
    with HandedOn(x, cube) as residual:
        results = module.each(x)
    passed: list[Tensor] = []
    first.register_post_accumulate_grad_hook(lambda parameter: passed.append(parameter.grad))
    (results[1].square().sum() + results[2].square().sum()).backward(retain_graph=True)
    alone = Several(cube, "z", MIXED)
    alone.load_state_dict(module.state_dict())
    same_x = x.detach().requires_grad_()
    by_itself = [layer(same_x) for layer in alone.layers]
    (by_itself[1].square().sum() + by_itself[2].square().sum()).backward()
    assert x.grad is not None
    assert same_x.grad is not None
    found = [
        error(x.grad, same_x.grad) < 1e-5,
        first.grad is None and second.grad is None and not passed,
        torch.equal(_local(third.grad), _local(alone.layers[2].weight.grad)),
    ]
    x.grad = None
    residual.tensor.sum().backward()
    return [*found, torch.equal(_local(x.grad), torch.ones_like(x))]


def _local(gradient: Any) -> Tensor:
    local: Tensor = gradient.to_local() if hasattr(gradient, "to_local") else gradient
    return local


def test_a_pass_may_go_through_some_of_them() -> None:
    assert all(_in_part(None))
    for found in run_ranks(4, _in_part, (2, 2, 1, 1)):
        assert all(found)


def test_what_is_no_input_is_refused() -> None:
    module = Several(Cube.single(), "z", ALL_AGAIN)
    with pytest.raises(ValueError, match="reads face z, where this rank has 24 columns"):
        module.each(torch.randn(ROWS, 8))
    module.reshards = (True, True, "all")  # type: ignore[assignment]
    with pytest.raises(ValueError, match="reshard_after_forward must be"):
        module.each(torch.randn(ROWS, INPUTS))
