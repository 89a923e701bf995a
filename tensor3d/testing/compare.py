"""A layer on one cube: what each rank got, and where its block lies in the full tensor."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal, cast

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from tensor3d.cube import Cube
from tensor3d.faces import Face
from tensor3d.layout import Layout, local
from tensor3d.shape import MESH_AXES, CubeShape
from tensor3d.testing.expected import Expected, input_name
from tensor3d.testing.inputs import Activation, Input, block, here

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
        place = _place_of(parameter, cube)
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
        if isinstance(given, Activation):
            where = block(given.tensor.shape, given.face, cube)
            blocks[input_name(number)] = Block(place=where, values=_grad(leaf))
    for name, parameter in parameters.items():
        plain = cube.shape.ranks > 1 and not isinstance(parameter, DTensor)
        blocks[name] = Block(place=_place_of(parameter, cube), values=_grad(parameter), plain=plain)
    return blocks


def output_place(shape: Sequence[int], returns: Returns, cube: Cube) -> tuple[slice, ...]:
    """Where this rank's part of the output lies in the full one."""
    if returns == "scalar":
        return ()
    place = block(shape, cast(Face, returns[-1]), cube)
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
    return _Input.apply(leaf.requires_grad_(), given.face) if isinstance(given, Activation) else leaf


def _place_of(parameter: Tensor, cube: Cube) -> tuple[slice, ...]:
    if not isinstance(parameter, DTensor):
        return tuple(slice(0, size) for size in parameter.shape)
    cut = tuple(
        (axis, cast(Any, placement).dim)
        for axis, placement in zip(MESH_AXES, parameter.placements, strict=True)
        if placement.is_shard()
    )
    return Layout(cut=cut, sum_over=()).slices(parameter.shape, cube)


def _grad(tensor: Tensor) -> Tensor | None:
    return None if tensor.grad is None else local(tensor.grad).detach()
