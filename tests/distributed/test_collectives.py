"""The collectives: what they return, and that each is the adjoint of its dual."""

from __future__ import annotations

import time
from typing import Any

import pytest
import torch
from torch import Tensor

from tensor3d import Cube, all_reduce_replicated
from tensor3d.distributed.collectives import (
    Axis,
    CommHandle,
    all_equal,
    all_gather,
    all_reduce,
    all_to_all,
    reduce_scatter,
)
from tensor3d.distributed.comm_stats import Place
from tensor3d.distributed.cube_shape import AxisName
from tests.ranks import run_ranks

# Cube and axes: members of 2 and of 4, axes taken together with a group of their own, and the whole world.
CUBES: dict[tuple[int, int, int, int], tuple[tuple[AxisName, ...], ...]] = {
    (2, 2, 2, 1): (("x",), ("z",), ("x", "z"), ("y", "z"), ("x", "y", "z")),
    (1, 4, 2, 1): (("y",), ("z",)),
    (1, 2, 2, 2): (("data",), ("data", "z"), ("data", "x", "y", "z")),
}


def of_rank(rank: int, *size: int, salt: int = 0) -> Tensor:
    """What rank `rank` puts in: every rank can compute everyone's, and so the truth."""
    return torch.randn(size, generator=torch.Generator().manual_seed(97 * rank + salt), dtype=torch.float64)


def _values(axis: Axis, rank: int) -> dict[str, float]:
    """Distances between what the collectives return and what all inputs say."""
    shards, parts = [of_rank(r, 3, 2) for r in axis.ranks], [of_rank(r, 3 * axis.size, 2) for r in axis.ranks]
    own, own_part = of_rank(rank, 3, 2), of_rank(rank, 3 * axis.size, 2)
    # A transposed input is not contiguous, and must not be changed.
    crooked = own.t().contiguous().t()
    gathered, scattered = all_gather(crooked, axis).wait(), reduce_scatter(own_part, axis).wait()
    send, receive = ([uneven(axis, a, b) for a, b in pairs] for pairs in _pairs(axis))
    exchanged = all_to_all(of_rank(rank, sum(send), salt=1), send, receive, axis).wait()
    incoming = []
    for i, peer in enumerate(axis.ranks):
        sizes = [uneven(axis, i, j) for j in range(axis.size)]
        incoming.append(of_rank(peer, sum(sizes), salt=1).split(sizes)[axis.index])
    wanted_scatter = torch.stack(parts).sum(0).chunk(axis.size)[axis.index]
    return {
        "gather": float((gathered - torch.cat(shards)).abs().max()),
        "scatter": float((scattered - wanted_scatter).abs().max()),
        "reduce": float((all_reduce(own.clone(), axis).wait() - torch.stack(shards).sum(0)).abs().max()),
        "exchange": float((exchanged - torch.cat(incoming)).abs().sum()),
        "input kept": float((crooked - own).abs().max() + (own_part - of_rank(rank, 3 * axis.size, 2)).abs().max()),
    }


def uneven(axis: Axis, sender: int, receiver: int) -> int:
    """How many elements one member sends another: some none, and no two directions alike."""
    return (2 * sender + receiver) % (axis.size + 1)


def _pairs(axis: Axis) -> tuple[list[tuple[int, int]], list[tuple[int, int]]]:
    return [(axis.index, j) for j in range(axis.size)], [(i, axis.index) for i in range(axis.size)]


def _products(axis: Axis, rank: int) -> dict[str, tuple[float, float]]:
    """This rank's share of <f(u), v> and <u, f*(v)> for each pair."""
    send, receive = ([uneven(axis, a, b) for a, b in pairs] for pairs in _pairs(axis))
    small, large = of_rank(rank, 3, 2, salt=2), of_rank(rank, 3 * axis.size, 2, salt=3)
    other = of_rank(rank, 3, 2, salt=4)
    out, back = of_rank(rank, sum(send), salt=5), of_rank(rank, sum(receive), salt=6)
    return {
        "gather and scatter": (
            dot(all_gather(small, axis).wait(), large),
            dot(small, reduce_scatter(large, axis).wait()),
        ),
        "reduce and itself": (
            dot(all_reduce(small.clone(), axis).wait(), other),
            dot(small, all_reduce(other.clone(), axis).wait()),
        ),
        "exchange and its way back": (
            dot(all_to_all(out, send, receive, axis).wait(), back),
            dot(out, all_to_all(back, receive, send, axis).wait()),
        ),
    }


def dot(left: Tensor, right: Tensor) -> float:
    return float((left * right).sum())


def _check_axes(shape: tuple[int, int, int, int], axes: tuple[tuple[AxisName, ...], ...]) -> Any:
    cube = Cube(*shape)
    found = [cube.over(*names) for names in axes]
    return [(axis.name, _values(axis, cube.rank), _products(axis, cube.rank)) for axis in found]


@pytest.mark.parametrize("shape", CUBES, ids=str)
def test_values_and_adjoints(shape: tuple[int, int, int, int]) -> None:
    results = run_ranks(8, _check_axes, shape, CUBES[shape])
    for on_ranks in zip(*results, strict=True):
        for name, values, _ in on_ranks:
            assert max(values.values()) <= 1e-13, (name, values)
        for pair in on_ranks[0][2]:
            left, right = (sum(products[pair][side] for _, _, products in on_ranks) for side in (0, 1))
            assert abs(left) > 1e-3, f"{pair} proves nothing"
            assert left == pytest.approx(right, abs=1e-12), (on_ranks[0][0], pair)


# --- between CPUs by direct exchange (distributed/gloo.py) ---------------------------------------------------------

SIZES = (0, 1, 2, 3, 5, 8, 2**18 + 1)
"""Numbers that are summed: none, in one exchange (up to four), in two, with a remainder, and by gloo's own ring."""


def _sums(dtype: torch.dtype) -> list[tuple[bool, bool, Tensor]]:
    """Whether a sum lies where its part lay, equals that of all parts, and what it is."""
    axis, found = Cube(data=4).axis("data"), []
    for size in SIZES:
        parts = [(64 * of_rank(rank, size, salt=7)).to(dtype) for rank in axis.ranks]
        part = parts[axis.index].clone()
        total = all_reduce(part, axis).wait()
        tolerance = {torch.bfloat16: 3e-2, torch.float32: 1e-6}.get(dtype, 0.0)
        wanted = torch.stack(parts).to(torch.float64).sum(0)
        same = torch.allclose(total.to(torch.float64), wanted, rtol=tolerance, atol=128 * tolerance)
        found.append((total.data_ptr() == part.data_ptr(), same, total))
    return found


@pytest.mark.parametrize(
    "dtype",
    [torch.int64, *(pytest.param(dtype, marks=pytest.mark.slow) for dtype in (torch.float32, torch.bfloat16))],
    ids=str,
)
def test_sums_of_any_size_are_made_in_place_and_the_same_bits_everywhere(dtype: torch.dtype) -> None:
    for sums in zip(*run_ranks(4, _sums, dtype), strict=True):
        assert all(in_place and right for in_place, right, _ in sums)
        assert all(torch.equal(total, sums[0][2]) for _, _, total in sums)


def _rounded() -> tuple[bool, int]:
    axis = Cube(data=4).axis("data")
    parts = [of_rank(rank, 4 * 5, 3).to(torch.bfloat16) for rank in axis.ranks]
    with axis.traffic.counting() as count:
        own = reduce_scatter(parts[axis.index], axis).wait()
    wanted = torch.stack(parts).to(torch.float32).sum(0).to(torch.bfloat16).chunk(4)[axis.index]
    return torch.equal(own, wanted), count.received["data", "reduce-scatter"]


def test_half_types_are_rounded_once_and_a_scatter_receives_what_the_ring_does() -> None:
    assert run_ranks(4, _rounded) == [(True, 3 * 5 * 3 * 2)] * 4


class _Waits:
    """How often a rank is told to wait for each kind."""

    def __init__(self) -> None:
        self.seen: list[str] = []

    def issued(self, place: Place) -> None:
        self.seen.append(place[2])

    def waits(self, place: Place) -> None:
        self.seen.append("waits")

    def has(self, place: Place) -> None:
        self.seen.append("has")


def _waits() -> list[str]:
    axis = Cube(data=4).axis("data")
    axis.traffic.observer = observer = _Waits()
    reduce_scatter(torch.ones(8), axis).wait()
    all_reduce(torch.ones(17), axis).wait()
    return observer.seen


def test_whoever_watches_sees_the_wait_for_the_second_exchange_of_a_sum() -> None:
    waits = ["waits", "has"]
    assert run_ranks(4, _waits) == [["reduce-scatter", *waits, "all-reduce", *waits, *waits]] * 4


def test_numbers_are_equal_on_all_or_not() -> None:
    for same, other in run_ranks(3, _equal):
        assert same
        assert not other


def _equal() -> tuple[bool, bool]:
    axis = Cube(data=3).axis("data")
    return all_equal(-(2**62) + 5, axis), all_equal(7 + (axis.index == 1), axis)


# --- issued early, waited for late ---------------------------------------------------------------------------------


def _in_flight() -> list[float]:
    cube = Cube(2, 2, 2)
    own = of_rank(cube.rank, 500, 16)
    axes = [cube.axis("x"), cube.axis("y"), cube.over("y", "z")]
    # The inputs are dropped at once: a collective in flight must keep what it reads alive.
    gathering = [all_gather(own * (i + 1), axis) for i, axis in enumerate(axes)]
    scattering = reduce_scatter(all_gather(own, axes[0]).wait() * 1.0, axes[0])
    errors = [float((scattering.wait() - 2 * own).abs().max())]
    for i, axis in reversed(list(enumerate(axes))):
        wanted = torch.cat([of_rank(rank, 500, 16) * (i + 1) for rank in axis.ranks])
        first = gathering[i].wait()
        assert gathering[i].wait() is first, "a second wait gives the same tensor"
        errors.append(float((first - wanted).abs().max()))
        assert gathering[i].narrowed(7).wait().shape == (7, 16)
    return errors


def test_several_in_flight() -> None:
    assert max(max(errors) for errors in run_ranks(8, _in_flight)) == 0.0


def test_an_axis_of_one_member_sends_and_copies_nothing() -> None:
    cube, tensor = Cube.single(), torch.ones(4, 2)
    axis = cube.over("x", "y", "z", "data")
    with cube.traffic.counting() as count:
        assert all_gather(tensor, axis).wait() is tensor
        assert reduce_scatter(tensor, axis).wait() is tensor
        assert all_reduce(tensor, axis).wait() is tensor
        assert all_to_all(tensor, [8], [8], axis).wait() is tensor
        assert all_reduce_replicated(tensor, axis) is tensor
    assert count.total_calls == count.total_bytes == 0


# --- copies --------------------------------------------------------------------------------------------------------


def _sum_of_copies() -> tuple[float, float, int]:
    cube = Cube(1, 2, 2)
    part, axis = of_rank(cube.rank, 5).requires_grad_(), cube.over("y", "z")
    before = part.detach().clone()
    total = all_reduce_replicated(part, axis)
    gradient = of_rank(99, 5)
    with cube.traffic.counting() as backward:
        total.backward(gradient)
    assert part.grad is not None
    assert torch.equal(part, before), "the input was summed in place"
    wanted = torch.stack([of_rank(rank, 5) for rank in axis.ranks]).sum(0)
    return float((total - wanted).abs().max()), float((part.grad - gradient).abs().max()), backward.total_calls


def test_sum_of_copies_has_the_identity_as_its_backward() -> None:
    for forward, backward, calls in run_ranks(4, _sum_of_copies):
        assert forward <= 1e-14
        assert backward == 0.0
        assert calls == 0


def test_a_result_comes_in_the_type_that_is_asked_for_and_without_padding() -> None:
    pending = CommHandle(torch.ones(4, 2, dtype=torch.bfloat16)).narrowed(3).converted(torch.float32)
    result = pending.wait()
    assert (result.dtype, result.shape) == (torch.float32, (3, 2))
    assert pending.wait() is result


def _arrived() -> list[bool]:
    axis = Cube(2, 1, 1).axis("x")
    whole = reduce_scatter(torch.ones(4), axis)
    part = whole.then(lambda sums: sums[:1])
    deadline = time.monotonic() + 30
    while not part.has_arrived and time.monotonic() < deadline:  # nobody waits for it
        time.sleep(0.001)
    return [part.has_arrived, whole.has_arrived, part.wait().item() == 2.0, part.has_arrived]


def test_who_asks_learns_that_a_result_is_there() -> None:
    assert all(all(found) for found in run_ranks(2, _arrived))
