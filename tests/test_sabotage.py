"""The comparisons with one device can fail: each defect here, put into the library on every rank, is found by them."""

from __future__ import annotations

import copy
import importlib
import math
from collections.abc import Callable
from contextlib import AbstractContextManager, ExitStack
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from tensor3d import Cube, Embedding3D, Face, Projection3D, Sequences, TransformerLayer3D, gather, local, shard
from tensor3d.attention import attention
from tensor3d.distributed.collectives import Axis, CommHandle, reduce_scatter
from tensor3d.distributed.grad_reducer import GradReducer
from tensor3d.sharding.matmul import matmul
from tensor3d.sharding.param_layout import Layout, mix, vector
from tensor3d.sharding.weight_slabs import all_gather_weight
from tests.ranks import run_ranks
from tests.single_device_reference import error, fill, full
from tests.tied_weight_model import Tied, truth

pytestmark = pytest.mark.slow
TOLERANCE, FAR_ABOVE = 1e-9, 1e-3

# --- measures: how far the cube is from one device -----------------------------------------------------------------


def on_both(make: Callable[[Cube], nn.Module], cube: Cube, weights: dict[str, Tensor]) -> tuple[nn.Module, float]:
    """The module on the cube, and how far its weights are from `weights`; the vectors get their values from there."""
    cube.manual_seed(7)
    module = make(cube)
    for name, parameter in module.named_parameters():
        if parameter.dim() == 1:
            fill(parameter, weights[name])
    return module, max(error(full(p), weights[name]) for name, p in module.named_parameters())


def weights_of(make: Callable[[Cube], nn.Module]) -> dict[str, Tensor]:
    single = Cube.single()
    single.manual_seed(7)
    named = {name: p.detach() for name, p in make(single).named_parameters()}
    generator = torch.Generator().manual_seed(1)
    return {n: p if p.dim() > 1 else p + 0.3 * torch.randn(p.shape, generator=generator) for n, p in named.items()}


def tied_model() -> Callable[[Cube], float]:
    """Losses and gradients of embedding, norms, products, tied projections and a narrow head, against plain torch."""
    weights = weights_of(Tied)
    wanted = truth(weights, 0)

    def measure(cube: Cube) -> float:
        model, distance = on_both(Tied, cube, weights)
        model(0).backward()
        return max(distance, *(error(full(p.grad), wanted[name], name) for name, p in model.named_parameters()))

    return measure


def transformer_layer() -> Callable[[Cube], float]:
    """Output and gradients of a layer over 8 packs of 8 tokens, against its twin in the sound library."""

    def make(cube: Cube) -> nn.Module:
        return TransformerLayer3D(16, 4, cube, std=0.3)

    def run(module: nn.Module, x: Tensor, cube: Cube, packs: int) -> Tensor:
        sequences = Sequences.from_lengths([3, 5] * packs)
        result = gather(module(shard(x, cube, "z"), sequences), cube, "z")
        (result * result.detach().cos()).sum().backward()
        return result

    weights, x = weights_of(make), torch.randn(64, 16, generator=torch.Generator().manual_seed(2))
    twin, _ = on_both(make, Cube.single(), weights)
    wanted = run(twin, x, Cube.single(), packs=8)
    gradients = {name: full(p.grad) for name, p in twin.named_parameters()}

    def measure(cube: Cube) -> float:
        layer, distance = on_both(make, cube, weights)
        distance = max(distance, error(run(layer, x, cube, packs=2), wanted))
        return max(distance, *(error(full(p.grad), gradients[name], name) for name, p in layer.named_parameters()))

    return measure


def vocabulary() -> Callable[[Cube], float]:
    """Logits over 14 entries, whose slices are padded on every rank of 2x2x2, against plain torch."""

    def make(cube: Cube) -> nn.Module:
        return Embedding3D(14, 8, cube, std=0.5)

    weights, x = weights_of(make), torch.randn(16, 8, generator=torch.Generator().manual_seed(3))

    def measure(cube: Cube) -> float:
        embedding, distance = on_both(make, cube, weights)
        projection = Projection3D(8, 14, cube, holds_weight=False)
        logits = projection(shard(x, cube, "z"), embedding.weight)
        return max(distance, error(gather(logits, cube, "y"), F.linear(x, weights["weight"])))

    return measure


# --- defects -------------------------------------------------------------------------------------------------------


def in_backward() -> bool:
    return torch._C._current_graph_task_id() != -1


def unsummed_over(*names: str) -> Callable[[Tensor, Axis], CommHandle]:
    """A reduce-scatter that, in backward along these axes, takes this rank's part for the sum."""

    def scatter(parts: Tensor, axis: Axis) -> CommHandle:
        if in_backward() and axis.size > 1 and axis.name in names:
            return CommHandle(parts.chunk(axis.size)[axis.index])
        return reduce_scatter(parts, axis)

    return scatter


def own_statistics(statistics: Tensor, axis: Axis) -> Tensor:
    return statistics.expand(axis.size, *statistics.shape)


def slab_over_y(weight: Tensor, cube: Cube, rows: Axis, dtype: torch.dtype) -> CommHandle:
    crossed: Any = SimpleNamespace(axis=lambda name: cube.axis("y" if name == "x" else name), speed=cube.speed)
    return all_gather_weight(weight, crossed, rows, dtype)


def bias_twice(a: Tensor, weight: Any, cube: Cube, face: Face, bias: Any = None, **rest: Any) -> Tensor:
    return matmul(a, weight, cube, face, bias, **rest) + local(bias)


def sums(*names: str) -> Callable[[Face], Layout]:
    """The layout of a vector, but for its sum; `Layout` itself would refuse to name an axis twice."""

    def vector_summed_over(face: Face) -> Layout:
        layout = copy.copy(vector(face))
        object.__setattr__(layout, "sum_over", names)
        return layout

    return vector_summed_over


def first_use_alone(self: GradReducer, parameter: Any, gradient: Any, over: Axis) -> None:
    current = self._passes.get(torch._C._current_graph_task_id())
    on_its_way = [each for each, _, _ in current.travelling] if current is not None else []
    if not any(parameter is each for each in on_its_way) and (current is None or id(parameter) not in current.uses):
        accumulate_grad(self, parameter, gradient, over)


accumulate_grad = GradReducer.accumulate_grad


def summed_again(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
    dist.all_reduce(total := gradient.clone())
    return total, None


def across_boundaries(q: Tensor, k: Tensor, v: Tensor, sequences: Sequences, **rest: Any) -> Tensor:
    return attention(q, k, v, Sequences.from_lengths([sequences.rows]), **rest)


def mix_with_rank(*numbers: int) -> int:
    return mix(*numbers, dist.get_rank())


Measure = Callable[[], Callable[[Cube], float]]
# What is broken: where it is measured, the module and the name in it, and what stands in its place. The ranks must go
# on talking in step, so defects that change sizes are put where everything divides.
DEFECTS: dict[str, tuple[Measure, str, Any]] = {
    "the sum of dA is dropped": (tied_model, "sharding.matmul.reduce_scatter", unsummed_over("y", "z")),
    "the sum of dW over x is dropped": (tied_model, "sharding.weight_slabs.reduce_scatter", unsummed_over("x")),
    "the ledger sums nothing": (
        tied_model,
        "distributed.grad_buckets.all_reduce",
        lambda part, axis: CommHandle(part),
    ),
    "LayerNorm takes its own columns for all": (tied_model, "layers.norm.gather_statistics", own_statistics),
    "LayerNorm's backward does too": (tied_model, "layers.norm.all_reduce", lambda part, axis: CommHandle(part)),
    "the narrow head sums no columns": (tied_model, "layers.heads.all_reduce", lambda part, axis: CommHandle(part)),
    "weights are gathered over y": (transformer_layer, "sharding.weight_slabs.all_gather_weight", slab_over_y),
    "bias gradients are summed over the other axis": (
        transformer_layer,
        "sharding.matmul.vector",
        sums("data", "x", "y"),
    ),
    "bias gradients are summed over an axis too many": (
        transformer_layer,
        "sharding.matmul.vector",
        sums("data", "x", "y", "z"),
    ),
    "the bias is added twice": (transformer_layer, "layers.linear.matmul", bias_twice),
    "a tied weight keeps one use": (
        tied_model,
        "distributed.grad_reducer.GradReducer.accumulate_grad",
        first_use_alone,
    ),
    "copies of the loss are summed backward": (tied_model, "distributed.collectives._SumCopies.backward", summed_again),
    "the padding of the vocabulary stays": (
        vocabulary,
        "distributed.collectives.CommHandle.narrowed",
        lambda self, rows: self,
    ),
    "sequences see each other": (transformer_layer, "layers.attention.attention", across_boundaries),
    "initial weights depend on the rank": (transformer_layer, "sharding.param_layout.mix", mix_with_rank),
}


def broken(path: str, defect: Any) -> AbstractContextManager[Any]:
    """The library with one name replaced. By module: the package has functions of the same names."""
    *parts, name = path.split(".")
    owner: Any = None
    if parts[-1][0].isupper() or parts[-1].startswith("_"):
        owner = getattr(importlib.import_module(".".join(["tensor3d", *parts[:-1]])), parts[-1])
        defect = staticmethod(defect) if name == "backward" else defect
    else:
        owner = importlib.import_module(".".join(["tensor3d", *parts]))
    return mock.patch.object(owner, name, defect)


def _distances() -> dict[str, float]:
    """Of the sound library in each measure, and of each defect; infinite where it raises."""
    torch.set_default_dtype(torch.float64)
    cube = Cube(2, 2, 2)
    measures = {make: make() for make in (tied_model, transformer_layer, vocabulary)}
    found = {make.__name__: measure(cube) for make, measure in measures.items()}
    for name, (make, path, defect) in DEFECTS.items():
        with ExitStack() as stack:
            stack.enter_context(broken(path, defect))
            try:
                found[name] = measures[make](cube)
            except (AssertionError, RuntimeError, ValueError):
                found[name] = math.inf
    found["sound again"] = max(measure(cube) for measure in measures.values())
    return found


@pytest.fixture(scope="module")
def distances() -> list[dict[str, float]]:
    return run_ranks(8, _distances)


@pytest.mark.parametrize("name", ["tied_model", "transformer_layer", "vocabulary", "sound again"])
def test_the_sound_library_agrees(name: str, distances: list[dict[str, float]]) -> None:
    assert max(found[name] for found in distances) <= TOLERANCE


@pytest.mark.parametrize("name", DEFECTS)
def test_a_defect_is_found(name: str, distances: list[dict[str, float]]) -> None:
    assert max(found[name] for found in distances) >= FAR_ABOVE
