"""A module on a cube against the same module on one device: the comparison that every layer's test makes."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from tensor3d import Cube, ExecutionPolicy, Face, Sequences, gather, shard
from tensor3d.ops.compiled_regions import CompiledRegions

# (x, y, z, data): each axis alone, a cube, boxes that are not cubic, and a data axis.
SHAPES = [
    (1, 1, 2, 1),
    (2, 2, 2, 1),
    (1, 8, 1, 1),
    (8, 1, 1, 1),
    (4, 2, 1, 1),
    (1, 2, 4, 1),
    (1, 2, 2, 2),
]
SMALL_SHAPES = [(2, 2, 2, 1), (1, 2, 4, 1), (1, 2, 2, 2)]
TOLERANCE = {torch.float64: 1e-9, torch.float32: 1e-4}


def name_of(shape: tuple[int, int, int, int]) -> str:
    x, y, z, data = shape
    return f"{x}x{y}x{z}" + (f"-data{data}" if data > 1 else "")


# All shapes for `parametrize`. The fast tier takes an axis alone, all three, and copies; the slow tier the others.
FAST_SHAPES = [(1, 1, 2, 1), (2, 2, 2, 1), (1, 2, 2, 2)]
EVERY_SHAPE = [
    pytest.param(shape, id=name_of(shape), marks=() if shape in FAST_SHAPES else pytest.mark.slow) for shape in SHAPES
]
# In fp32, where what is computed in another type by mistake does not fit, one shape is as good as all.
SHAPES_AND_TYPES = [
    *(pytest.param(*each.values, torch.float64, id=each.id, marks=each.marks) for each in EVERY_SHAPE),
    pytest.param((2, 2, 2, 1), torch.float32, id="2x2x2-float32"),
]


# The shapes that every model is held against; the fast tier takes the one with copies.
FOUR_SHAPES = [
    pytest.param(shape, id=name_of(shape), marks=() if shape == (1, 2, 2, 2) else pytest.mark.slow)
    for shape in [*SMALL_SHAPES, (4, 2, 1, 1)]
]


def fast_alone(shape: tuple[int, int, int, int], *others: tuple[int, int, int, int]) -> list[Any]:
    """Shapes for `parametrize`, of which the fast tier takes the first alone."""
    slow = (pytest.param(other, id=name_of(other), marks=pytest.mark.slow) for other in others)
    return [pytest.param(shape, id=name_of(shape)), *slow]


def ranks_of(shape: tuple[int, int, int, int]) -> int:
    x, y, z, data = shape
    return x * y * z * data


def full(tensor: Tensor | None) -> Tensor:
    """The logical tensor, put together by DTensor, which knows nothing of our own slicing."""
    assert tensor is not None, "no gradient arrived"
    if not isinstance(tensor, DTensor):
        return tensor.detach()
    return tensor.full_tensor().detach()


def error(got: Tensor, wanted: Tensor, name: str = "") -> float:
    """max|got - wanted| / max|wanted|, as a plain difference where the wanted values are all but zero."""
    got, wanted = got.detach(), wanted.detach()
    assert got.shape == wanted.shape, f"{name}: shape {tuple(got.shape)} instead of {tuple(wanted.shape)}"
    if wanted.numel() == 0:
        return 0.0
    return float((got - wanted).abs().max() / wanted.abs().max().clamp_min(1e-12))


def gradient_errors(module: nn.Module, twin: nn.Module) -> dict[str, float]:
    """Of every parameter, by name. Both have the same names."""
    wanted = dict(twin.named_parameters())
    assert wanted.keys() == dict(module.named_parameters()).keys()
    return {
        name: error(full(parameter.grad), full(wanted[name].grad), name)
        for name, parameter in module.named_parameters()
    }


def make_twins(
    make: Callable[[Cube], nn.Module], shape: tuple[int, int, int, int] | Cube, seed: int = 7
) -> tuple[Cube, nn.Module, Cube, nn.Module]:
    """The module on the cube of `shape`, and its twin on one device, from the same seed and with every vector filled.

    Biases start at 0 and gains at 1, which would hide much: they get values of their own.

    Args:
        shape: or a cube, for whoever compares one module after another and need not make its groups each time.
    """
    cube, single = shape if isinstance(shape, Cube) else Cube(*shape), Cube.single()
    modules = []
    for each in (cube, single):
        each.manual_seed(seed)
        modules.append(make(each))
    twin_parameters = dict(modules[1].named_parameters())
    for name, parameter in modules[0].named_parameters():
        if parameter.dim() == 1:
            values = torch.randn(parameter.shape, generator=torch.Generator().manual_seed(len(name)))
            values = (twin_parameters[name].detach() + 0.3 * values).to(parameter.dtype)
            twin_parameters[name].data.copy_(values)
            fill(parameter, values)
    return cube, modules[0], single, modules[1]


def fill(parameter: Tensor, values: Tensor) -> None:
    """Writes the full `values` into a vector that lies on a cube, by DTensor's own cutting."""
    if not isinstance(parameter, DTensor):
        parameter.data.copy_(values)
        return
    block = values
    for dim, placement in enumerate(parameter.placements):
        if placement.is_shard():
            mesh = parameter.device_mesh
            chunks = [
                *block.chunk(mesh.size(dim), placement.dim),
                *[block[:0]] * mesh.size(dim),
            ]  # empty ones at the end
            block = chunks[mesh.get_local_rank(dim)]
    parameter.to_local().data.copy_(block)


def compare(
    make: Callable[[Cube], nn.Module],
    shape: tuple[int, int, int, int] | Cube,
    *,
    rows: int,
    columns: int,
    face_in: Face,
    face_out: Face,
    dtype: torch.dtype,
    call: Callable[[nn.Module, Tensor, Cube], Tensor] | None = None,
    scale: float = 1.0,
) -> dict[str, float]:
    """Errors of output, input gradient and every parameter's gradient, of an activation-to-activation module."""
    torch.set_default_dtype(dtype)
    cube, module, single, twin = make_twins(make, shape)
    run: Any = call or (lambda m, x, c: m(x))
    generator = torch.Generator().manual_seed(11)
    x = scale * torch.randn(rows, columns, generator=generator, dtype=dtype)
    ours, theirs = x.clone().requires_grad_(), x.clone().requires_grad_()

    y = gather(run(module, shard(ours, cube, face_in), cube), cube, face_out)
    wanted = run(twin, theirs, single)
    direction = torch.randn(wanted.shape, generator=generator, dtype=dtype)
    (y * direction).sum().backward()
    (wanted * direction).sum().backward()
    errors = {"output": error(y, wanted), "input": error(ours.grad, theirs.grad)}  # type: ignore[arg-type]
    return errors | gradient_errors(module, twin)


def worst(results: list[dict[str, float]]) -> tuple[str, float]:
    """The largest error of all ranks, with its name."""
    return max(((name, value) for result in results for name, value in result.items()), key=lambda item: item[1])


CPU = torch.device("cpu")


def fused(cube: Cube) -> Cube:
    """The same processes, with the functions that a compiling cube uses, as they are written: nothing is compiled."""
    other = copy.copy(cube)
    other.speed = ExecutionPolicy(compile=True)
    other.regions = CompiledRegions(False, CPU)
    other.regions.with_activations = True  # as on a GPU
    return other


PACKS = [[8], [3, 5], [4, 4], [8], [1, 7], [2, 2, 4], [6, 2], [5, 3]]  # lengths of sequences in packs of 8


def sequences_of(cube: Cube) -> Sequences:
    """Those of this rank's packs on face y."""
    slices, place = cube.shape.planes * cube.shape.z, cube.coordinate
    mine = (place["data"] * cube.shape.x + place["x"]) * cube.shape.z + place["z"]
    held = PACKS[mine * len(PACKS) // slices : (mine + 1) * len(PACKS) // slices]
    return Sequences.from_lengths([length for pack in held for length in pack])
