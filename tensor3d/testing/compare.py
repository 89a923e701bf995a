"""A layer on one cube: what each rank got, and where its block lies in the full tensor."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Literal, cast

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from tensor3d.batches.sequences import Sequences
from tensor3d.distributed.cube import Cube
from tensor3d.distributed.cube_shape import CubeShape
from tensor3d.sharding.activation_layout import Face
from tensor3d.sharding.param_layout import local, local_slices
from tensor3d.testing.inputs import Input, Sharded, block, here

# --- What one device gives: parameters with values of their own, the output, and every gradient -----------------------

Loss = Callable[[Tensor], Tensor]


@dataclass(frozen=True, kw_only=True)
class Expected:
    """Of the reference, on one device. Parameters bear the layer's names."""

    parameters: dict[str, Tensor]
    output: Tensor
    direction: Tensor
    """Gradient of the loss with respect to the output: where backward begins."""
    gradients: dict[str, Tensor | None]
    """By name: `"input 0"` and so on, then the parameters'."""


def input_name(number: int) -> str:
    return f"input {number}"


@contextmanager
def default_dtype(dtype: torch.dtype) -> Iterator[None]:
    """Inside, new parameters have this type."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


def expect(
    reference: nn.Module, names: Mapping[str, str], inputs: Sequence[Input], loss: Loss | None, dtype: torch.dtype
) -> Expected:
    """Gives the reference's parameters values of their own, and runs it forward and backward.

    Args:
        names: of each of the layer's parameters the reference's name.

    Raises:
        ValueError: it returns something else than one tensor, differs from call to call, has nothing to train, or
            its output or a gradient is not finite.
    """
    reference = reference.to(dtype)
    generator = torch.Generator().manual_seed(1)
    parameters = dict(reference.named_parameters())
    for parameter in parameters.values():
        _disturb(parameter, generator)
    arguments = [_whole(given) for given in inputs]
    output = reference(*arguments)
    _check_output(output, reference, arguments)
    direction = _direction(output.detach(), loss, generator)
    output.backward(direction)
    gradients = {input_name(i): value.grad for i, value in enumerate(arguments) if isinstance(inputs[i], Sharded)}
    gradients |= {name: parameters[theirs].grad for name, theirs in names.items()}
    for name, gradient in gradients.items():
        _check_finite(gradient, f"gradient of {name}")
    return Expected(
        parameters={name: parameters[theirs].detach().clone() for name, theirs in names.items()},
        output=output.detach().clone(),
        direction=direction,
        gradients=gradients,
    )


def _disturb(parameter: Tensor, generator: torch.Generator) -> None:
    """Biases begin at 0 and gains at 1, which would hide mistakes. The noise is bounded: gains stay positive."""
    with torch.no_grad():
        bound = 0.5 if parameter.dim() < 2 else (3.0 / max(parameter.shape[-1], 1)) ** 0.5
        noise = torch.rand(parameter.shape, generator=generator, dtype=parameter.dtype) * 2 - 1
        parameter.add_(noise * bound)


def _whole(given: Input) -> Any:
    if isinstance(given, Sharded):
        return given.tensor.clone().requires_grad_()
    if isinstance(given, Sequences):
        return given
    return given.tensor if hasattr(given, "tensor") else given.value


def _check_output(output: Any, reference: nn.Module, arguments: Sequence[Any]) -> None:
    what = type(reference).__name__
    if not isinstance(output, Tensor):
        raise ValueError(
            f"{what} must return one tensor to be compared. Got {type(output).__name__}. Wrap it in a module that "
            "returns the part in question."
        )
    if not output.requires_grad:
        raise ValueError(
            f"the output of {what} has no gradient: it depends on no parameter and on no activation. Give it one "
            "of them."
        )
    _check_finite(output, "output")
    with torch.no_grad():
        again = reference(*arguments)
    if not torch.equal(again, output):
        raise ValueError(
            f"{what} gives another output at a second call, so nothing can be compared. Does it draw random numbers? "
            "Make it without dropout, or in eval mode."
        )


def _check_finite(values: Tensor | None, what: str) -> None:
    if values is not None and not values.isfinite().all():
        raise ValueError(
            f"the reference's own {what} is not finite, so nothing can be compared with it. Choose inputs where it is: "
            "has a row nothing but zeros (sqrt has no gradient at 0), or no label that counts?"
        )


def _direction(output: Tensor, loss: Loss | None, generator: torch.Generator) -> Tensor:
    if loss is not None:
        leaf = output.clone().requires_grad_()
        (direction,) = torch.autograd.grad(loss(leaf), leaf)
        return direction
    if output.dim() == 0:
        return torch.ones_like(output)
    return torch.randn(output.shape, generator=generator, dtype=output.dtype)


# --- A layer on one cube ----------------------------------------------------------------------------------------------

Returns = Literal["y", "z", "rows-y", "rows-z", "scalar"]
"""How an output lies: on a face; its rows as on a face and its columns whole (few outputs, row losses); one number."""

MakeLayer = Callable[[Cube], nn.Module]


@dataclass(frozen=True, kw_only=True)
class Block:
    """A rank's part of a tensor."""

    place: tuple[slice, ...]
    """Where it belongs in the full tensor."""
    values: Tensor | None
    """None: no gradient arrived."""
    plain: bool = False
    """A parameter that is a plain tensor on a cube of several ranks."""


def on_rank(
    layer: MakeLayer, inputs: Sequence[Input], expected: Expected, returns: Returns, shape: CubeShape
) -> dict[str, Block]:
    """Runs on every rank of a cube: builds the layer there, gives it the reference's parameters, and runs it."""
    torch.set_default_dtype(expected.output.dtype)
    cube = Cube(shape.x, shape.y, shape.z, shape.data, wire=shape.wire)
    return run(layer, inputs, expected, returns, cube)


def run(
    layer: MakeLayer, inputs: Sequence[Input], expected: Expected, returns: Returns, cube: Cube
) -> dict[str, Block]:
    """Output and gradients of this rank, by name. An output of the wrong shape is all there is."""
    cube.manual_seed(1)
    module = layer(cube)
    parameters = dict(module.named_parameters())
    for name, parameter in parameters.items():
        place = local_slices(parameter, cube)
        local(parameter).data.copy_(expected.parameters[name][place])
    leaves = [here(given, cube) for given in inputs]
    output = module(*map(_marked, inputs, leaves))
    if not isinstance(output, Tensor):
        raise ValueError(f"{type(module).__name__} must return one tensor. Got {type(output).__name__}.")
    place = output_place(expected.output.shape, returns, cube)
    blocks = {"output": Block(place=place, values=output.detach())}
    direction = expected.direction[place]
    if output.shape != direction.shape:
        return blocks
    output.backward(direction)
    for number, (given, leaf) in enumerate(zip(inputs, leaves, strict=True)):
        if isinstance(given, Sharded):
            where = block(given.tensor.shape, given.face, cube.shape, cube.rank)
            blocks[input_name(number)] = Block(place=where, values=_grad(leaf))
    for name, parameter in parameters.items():
        plain = cube.shape.ranks > 1 and not isinstance(parameter, DTensor)
        blocks[name] = Block(place=local_slices(parameter, cube), values=_grad(parameter), plain=plain)
    return blocks


def output_place(shape: Sequence[int], returns: Returns, cube: Cube) -> tuple[slice, ...]:
    """Where this rank's part of the output lies in the full one."""
    if returns == "scalar":
        return ()
    place = block(shape, cast(Face, returns[-1]), cube.shape, cube.rank)
    return place[:1] if returns.startswith("rows") else place


class _Input(torch.autograd.Function):
    """Says on which face an input lies, as the library's own functions do of their results."""

    @staticmethod
    def forward(ctx: Any, tensor: Tensor, face: Face) -> Tensor:
        ctx.result_face, ctx.made = face, "the input of check_layer"
        return tensor.view_as(tensor)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return gradient, None


def _marked(given: Input, leaf: Any) -> Any:
    return _Input.apply(leaf.requires_grad_(), given.face) if isinstance(given, Sharded) else leaf


def _grad(tensor: Tensor) -> Tensor | None:
    return None if tensor.grad is None else local(tensor.grad).detach()
