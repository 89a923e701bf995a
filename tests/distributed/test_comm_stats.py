"""The count of what crosses the wire: the ring model to the byte for collectives and layers, and the order of issue."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import pytest
import torch
from torch import Tensor

from tensor3d import (
    Cube,
    Embedding3D,
    Face,
    LayerNorm3D,
    Linear3D,
    Sequences,
    SmallHead3D,
    TransformerLayer3D,
    cross_entropy,
    select,
    shard,
)
from tensor3d.cost_model.comm_volume import lookup_way
from tensor3d.distributed.collectives import Axis, all_gather, all_reduce, all_to_all, reduce_scatter
from tensor3d.distributed.comm_stats import CommCounter, CommStats, Key, Kind
from tensor3d.distributed.cube_shape import AXES
from tensor3d.sharding.activation_layout import other
from tensor3d.sharding.matmul import Reshard
from tests.ranks import run_ranks
from tests.single_device_reference import fast_alone, name_of

Shape = tuple[int, int, int, int]

# --- collectives ---------------------------------------------------------------------------------------------------


def _counts(dtype: torch.dtype) -> tuple[CommStats, dict[Key, int]]:
    cube = Cube(1, 4, 2)
    own, size = torch.zeros(12, 5, dtype=dtype), dtype.itemsize
    y, z, plane = cube.axis("y"), cube.axis("z"), cube.plane
    send, receive = [2 * y.index + j for j in range(4)], [2 * i + y.index for i in range(4)]
    with cube.traffic.counting() as count:
        all_gather(own, y).wait()
        all_gather(own, z).wait()
        all_gather(own, z).wait()
        reduce_scatter(own, y).wait()
        all_reduce(own.clone(), plane).wait()
        for elements in (1, 3, 4):  # of few numbers all travel, in pairs
            all_reduce(torch.zeros(elements, dtype=dtype), y).wait()
        all_to_all(torch.zeros(sum(send), dtype=dtype), send, receive, y).wait()
    return count, {
        ("y", "all-gather"): 3 * 60 * size,
        ("z", "all-gather"): 2 * 60 * size,
        ("y", "reduce-scatter"): 3 * 15 * size,
        ("y+z", "all-reduce"): 2 * 7 * 8 * size,  # 60 elements are 8 a member when rounded up
        ("y", "all-reduce"): 2 * 3 * (1 + 2 + 2) * size,
        ("y", "all-to-all"): sum(2 * i + y.index for i in range(4) if i != y.index) * size,
    }


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16], ids=str)
def test_the_count_follows_the_ring_model(dtype: torch.dtype) -> None:
    for count, wanted in run_ranks(8, _counts, dtype):
        assert dict(count.received) == wanted
        assert count.total_bytes == sum(wanted.values())
        assert count.calls["z", "all-gather"] == 2
        assert count.total_calls == 9


def _nested() -> list[tuple[CommStats, int]]:
    cube = Cube(1, 2, 1)
    y, own = cube.axis("y"), torch.zeros(1, dtype=torch.float32)
    all_gather(own, y).wait()
    with cube.traffic.counting() as outer:
        all_gather(own, y).wait()
        with cube.traffic.counting() as inner:
            with cube.traffic.counting() as twin:
                all_gather(own, y).wait()
            # Both have counted the same so far, and only one has ended.
            all_gather(own, y).wait()
        with suppress(KeyError), cube.traffic.counting() as broken_off:
            all_gather(own, y).wait()
            raise KeyError
        all_gather(own, y).wait()
    all_gather(own, y).wait()
    return [(outer, 5), (inner, 2), (twin, 1), (broken_off, 1)]


def test_counts_nest_and_nothing_is_counted_outside() -> None:
    for result in run_ranks(2, _nested):
        for count, gathers in result:
            assert count.order == [("y", "all-gather", 4)] * gathers
            assert dict(count.received) == {("y", "all-gather"): 4 * gathers}


# --- layers --------------------------------------------------------------------------------------------------------


class Wanted(Counter[Key]):
    """Bytes by axis and kind in the ring model."""

    def shards(self, axis: Axis, kind: Kind, shard_bytes: int) -> None:
        if axis.size > 1:
            self[axis.name, kind] += (axis.size - 1) * shard_bytes

    def sums(self, axis: Axis, elements: int, size: int) -> None:
        self.shards(axis, "all-reduce", 2 * -(-elements // axis.size) * size)


RESHARD: tuple[Reshard, ...] = (True, False, "input", "weight")


def product_traffic(cube: Cube, face: Face, M: int, K: int, N: int, reshard: Reshard) -> tuple[Wanted, Wanted]:
    """Forward and backward of a product of M tokens a box, in bfloat16 with fp32 weights."""
    x, columns, rows = cube.axis("x"), cube.axis(face), cube.axis(other(face))
    box = x.size * columns.size * rows.size
    A, W, C = M * K // box, N * K // box, M * N // box
    forward, backward = Wanted(), Wanted()
    forward.shards(rows, "all-gather", 2 * A)
    forward.shards(x, "all-gather", 2 * W)
    forward.shards(columns, "reduce-scatter", 2 * C)
    backward.shards(columns, "all-gather", 2 * C)
    if reshard in (True, "input"):
        backward.shards(rows, "all-gather", 2 * A)
    if reshard in (True, "weight"):
        backward.shards(x, "all-gather", 2 * W)
    backward.shards(rows, "reduce-scatter", 2 * A)
    backward.shards(x, "reduce-scatter", 4 * W)
    backward.sums(cube.axis("data"), W, 4)
    backward.sums(cube.over("data", "x", face), N // rows.size, 4)
    backward.sums(cube.over(*AXES), 2, 8)
    return forward, backward


def norm_traffic(cube: Cube, face: Face, M: int, H: int) -> tuple[Wanted, Wanted]:
    """Three statistics a row forward, two sums a row backward, and the gradients of gain and bias in one bucket."""
    columns, rows = cube.axis(face), M // (cube.shape.x * cube.axis(other(face)).size)
    forward, backward = Wanted(), Wanted()
    forward.shards(columns, "all-gather", 3 * 4 * rows)
    backward.sums(columns, 2 * rows, 4)
    backward.sums(cube.over("data", "x", other(face)), 2 * H // columns.size, 4)
    backward.sums(cube.over(*AXES), 2, 8)
    return forward, backward


def embedding_traffic(cube: Cube, M: int, V: int, H: int) -> tuple[Wanted, Wanted]:
    """In fp32. A vocabulary that does not divide travels over x padded to equal chunks; its columns as they are."""
    x, y, width = cube.axis("x"), cube.axis("y"), H // cube.shape.z
    slab, plane, rows = len(torch.arange(V).chunk(y.size)[y.index]), M // x.size, M // (x.size * y.size)
    chunk, few = -(-slab // x.size), min(-(-width // x.size), max(0, width - x.index * -(-width // x.size)))
    own = min(chunk, max(0, slab - x.index * chunk))
    way = lookup_way(cube.shape, plane, V, H, 4, 4)
    forward, backward = Wanted(), Wanted()
    forward.sums(x, 1, 8)
    there, columns = (rows, width) if way == "table" else (M // y.size, width if way == "rows" else few)
    forward.shards(y, "reduce-scatter", 4 * there * columns)
    backward.shards(y, "all-gather", 4 * there * columns)
    if way == "table":
        forward.shards(x, "all-gather", 4 * chunk * width)
        backward.shards(x, "reduce-scatter", 4 * chunk * width)
    else:
        forward.shards(x, "all-gather", 4 * plane)
    if way == "rows":
        forward.shards(x, "reduce-scatter", 4 * rows * width)
        backward.shards(x, "all-gather", 4 * rows * width)
    if way == "columns":
        forward["x", "all-to-all"] += 4 * ((slab - own) * few + rows * (width - few))
        backward["x", "all-to-all"] += 4 * ((x.size - 1) * rows * few + own * (width - few))
    backward.sums(cube.axis("data"), own * width, 4)
    backward.sums(cube.over(*AXES), 2, 8)
    return forward, backward


def head_traffic(cube: Cube, M: int, K: int, C: int) -> tuple[Wanted, Wanted]:
    """Logits are summed over the columns; backward only the gradients of weight and bias travel."""
    y = cube.axis("y")
    forward, backward = Wanted(), Wanted()
    forward.sums(y, M // (cube.shape.x * cube.shape.z) * C, 4)
    backward.sums(cube.over("data", "x", "z"), C * K // y.size + C, 4)
    backward.sums(cube.over(*AXES), 2, 8)
    return forward, backward


def select_traffic(cube: Cube, R: int, H: int) -> tuple[Wanted, Wanted]:
    """R rows a plane, there and back."""
    y, shard_bytes = cube.axis("y"), 4 * R * H // (cube.shape.y * cube.shape.z)
    forward, backward = Wanted(), Wanted()
    forward.shards(y, "reduce-scatter", shard_bytes)
    backward.shards(y, "all-gather", shard_bytes)
    return forward, backward


def loss_traffic(cube: Cube, M: int) -> tuple[Wanted, Wanted]:
    """Four numbers a row forward, nothing backward."""
    forward = Wanted()
    forward.shards(cube.axis("y"), "all-gather", 4 * 4 * M // (cube.shape.x * cube.shape.z))
    return forward, Wanted()


def _layers(shape: Shape) -> list[tuple[str, CommStats, Wanted]]:
    cube, M, K, N, V, found = Cube(*shape), 32, 24, 40, 67, []

    def watch(name: str, run: Callable[[], Tensor], wanted: tuple[Wanted, Wanted]) -> None:
        with cube.traffic.counting() as forward:
            result = run()
        with cube.traffic.counting() as backward:
            result.sum().backward()
        found.extend([(f"{name} forward", forward, wanted[0]), (f"{name} backward", backward, wanted[1])])

    faces: tuple[Face, Face] = ("y", "z")
    for face in faces:
        x = shard(torch.randn(M * cube.shape.data, K), cube, face).requires_grad_()
        half = x.detach().bfloat16().requires_grad_()
        for reshard in RESHARD:
            layer = Linear3D(K, N, cube, face, reshard_after_forward=reshard)
            wanted = product_traffic(cube, face, M, K, N, reshard)
            watch(f"linear {face} {reshard}", lambda: layer(half), wanted)  # noqa: B023
        norm = LayerNorm3D(K, cube, face)
        watch(f"norm {face}", lambda: norm(x), norm_traffic(cube, face, M, K))  # noqa: B023
    ids = torch.arange(M // cube.shape.x)
    head = SmallHead3D(K, 3, cube, "y")
    on_z = shard(torch.randn(M * cube.shape.data, K), cube, "z").requires_grad_()
    on_y = shard(torch.randn(M * cube.shape.data, K), cube, "y")
    logits = torch.randn(len(on_y), len(torch.arange(V).chunk(cube.shape.y)[cube.coordinate["y"]]), requires_grad=True)
    labels = torch.zeros(len(on_y), dtype=torch.int64)
    for vocab in (9, V, 1000):  # on 2x2x2 the table travels, its columns, and what is found
        embedding = Embedding3D(vocab, K, cube)
        watch(f"embedding {vocab}", lambda: embedding(ids % vocab), embedding_traffic(cube, M, vocab, K))  # noqa: B023
    watch("head", lambda: head(on_y), head_traffic(cube, M, K, 3))
    watch("select", lambda: select(on_z, ids[:8], cube), select_traffic(cube, 8, K))
    watch("loss", lambda: cross_entropy(logits, labels, V, cube)[0], loss_traffic(cube, M))
    return found


@pytest.mark.parametrize("shape", fast_alone((2, 2, 2, 1), (1, 2, 4, 1), (4, 2, 1, 1), (1, 2, 2, 2)))
def test_layers_move_what_their_closed_forms_say(shape: Shape) -> None:
    for result in run_ranks(8, _layers, shape):
        for name, count, wanted in result:
            assert dict(count.received) == dict(wanted), name


def _frozen() -> list[dict[str, int]]:
    """Backward traffic of a layer with one thing after another frozen, by (axis kind)."""
    cube, found = Cube(2, 2, 2), []
    for trained in ("xwb", "xw", "xb", "x", "wb", "w", "b"):
        layer, x = Linear3D(8, 8, cube), torch.ones(4, 4, requires_grad="x" in trained)
        layer.weight.requires_grad_("w" in trained)
        layer.bias.requires_grad_("b" in trained)  # type: ignore[union-attr]
        y = layer(x)
        with cube.traffic.counting() as count:
            y.sum().backward()
        assert (x.grad is not None) == ("x" in trained)
        assert (layer.weight.grad is not None) == ("w" in trained)
        assert (layer.bias.grad is not None) == ("b" in trained)  # type: ignore[union-attr]
        found.append({f"{axis} {kind}": calls for (axis, kind), calls in count.calls.items()})
    norm, z = LayerNorm3D(8, cube), torch.ones(4, 4, requires_grad=True)
    norm.requires_grad_(False)
    with cube.traffic.counting() as count:
        norm(z).sum().backward()
    assert norm.weight.grad is norm.bias.grad is None
    found.append({f"{axis} {kind}": calls for (axis, kind), calls in count.calls.items()})
    return found


def test_what_is_frozen_gets_no_gradient_and_costs_no_collective() -> None:
    dc, da = {"z all-gather": 1}, {"x all-gather": 1, "y reduce-scatter": 1}
    dw, db = {"y all-gather": 1, "x reduce-scatter": 1}, {"x+z all-reduce": 1}
    norm = {"z all-gather": 1, "z all-reduce": 1}
    asked = {"x+y+z all-reduce": 1}  # whether all ranks have used the same parameters
    wanted = [
        dc | da | dw | db | asked,
        dc | da | dw | asked,
        dc | da | db | asked,
        dc | da,
        dc | dw | db | asked,
        dc | dw | asked,
        db | asked,
        norm,
    ]
    for found in run_ranks(8, _frozen):
        assert found == wanted


# --- order ---------------------------------------------------------------------------------------------------------


def _order_of_issue(shape: Shape) -> list[Any]:
    cube = Cube(*shape)
    cube.manual_seed(3)
    layer = TransformerLayer3D(32, 8, cube, dropout=0.1)
    rows = 64 // cube.shape.planes
    # Every rank has sequences of its own: their lengths must not change what is sent when.
    mine = rows // cube.axis("z").size
    sequences = Sequences.from_lengths([1 + cube.rank % 3, mine - 1 - cube.rank % 3])
    x = torch.randn(rows // cube.axis("y").size, 32 // cube.axis("z").size, requires_grad=True)
    with cube.traffic.counting() as count:
        layer(x, sequences).square().sum().backward()
    return count.order


@pytest.mark.parametrize("shape", [(2, 2, 2, 1), (1, 2, 2, 2)], ids=name_of)
def test_all_ranks_issue_in_the_same_order(shape: Shape) -> None:
    """Communicators of NCCL that are in flight together deadlock where two ranks disagree; gloo would not show it."""
    orders = run_ranks(8, _order_of_issue, shape)
    assert len(orders[0]) > 4 * 5, "four products, each with two collectives forward and three or more backward"
    assert all(order == orders[0] for order in orders)


class _Passed:
    """As an event of a device: passed, or not yet."""

    def __init__(self, passed: bool) -> None:
        self.passed = passed

    def query(self) -> bool:
        return self.passed


def test_it_is_known_which_collective_is_waited_for() -> None:
    traffic = CommCounter()
    first, second = traffic.add("y", "all-gather", 8), traffic.add("x", "reduce-scatter", 8)
    assert traffic.waiting is None
    traffic.begin_waiting(first)
    assert traffic.waiting == (1, "y", "all-gather"), "the host waits"
    done, not_yet = _Passed(False), _Passed(False)
    traffic.end_waiting(first, done)
    traffic.end_waiting(second, not_yet)
    assert traffic.waiting == first, "the device does, for the first that it has not passed"
    done.passed = True
    assert traffic.waiting == (2, "x", "reduce-scatter")
    not_yet.passed = True
    assert traffic.waiting is None
    assert traffic.issued == 2
