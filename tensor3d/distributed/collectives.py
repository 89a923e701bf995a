"""The four collectives, each written once. Everything that crosses the wire goes through this file.

    all_gather      shard (m, ...) -> (n*m, ...)      dual: reduce_scatter
    reduce_scatter  (n*m, ...) -> sum's shard (m, ...) dual: all_gather
    all_reduce      (m, ...) -> sum (m, ...)          dual: itself, for partial sums that become copies; the identity
                                                      where those copies are used alike (see `all_reduce_replicated`)
    all_to_all      flat blocks -> flat blocks        dual: itself with the sizes swapped

Each returns a `CommHandle`: issue early, `wait()` at the use. On an axis of one member nothing is sent or copied.
Inside `CommCounter.dry` they are counted and send nothing; their results have the right shape alone.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from tensor3d.distributed import gloo
from tensor3d.distributed.autograd_graph import check_summed
from tensor3d.distributed.comm_stats import CommCounter, Kind, Place, summed_elements
from tensor3d.distributed.group_teardown import ClosedGroup
from tensor3d.ops.autograd_function import Function, once_differentiable, out_of_graphs
from tensor3d.torch_private import all_gather_single, reduce_scatter_single, without_modes


@dataclass(frozen=True, kw_only=True)
class Axis:
    """The ranks that differ from this one along one axis of the cube, or along several taken together."""

    name: str
    """`"y"`, or `"data+x+z"` for axes taken together."""
    ranks: tuple[int, ...]
    """Global ranks of the members, ascending; this is the order in which they are gathered."""
    index: int
    """This rank's position among the members."""
    group: dist.ProcessGroup | ClosedGroup | None
    """None for an axis of one member."""
    traffic: CommCounter
    overlap: bool = True
    """Whether a collective may still travel when it is returned (`cube_policies.ExecutionPolicy`)."""
    mesh: DeviceMesh | None = field(default=None, repr=False, compare=False)
    """The cube's, whose groups last as long as it is held."""

    @cached_property  # layers ask a hundred times a pass
    def size(self) -> int:
        """How many members there are."""
        return len(self.ranks)


class CommHandle:
    """A collective's result on its way. `wait` returns it; a second `wait` returns it again."""

    __slots__ = ("_dtype", "_finish", "_inputs", "_place", "_result", "_rows", "_traffic", "_work", "travels")

    def __init__(
        self,
        result: Tensor,
        work: Any = None,
        inputs: Tensor | Sequence[Tensor] | None = None,
        *,
        traffic: CommCounter | None = None,
        place: Place | None = None,
        finish: gloo.Finish | None = None,
    ) -> None:
        self._result = result
        self._finish = finish  # makes the result of what has arrived
        self._rows: int | None = None
        self._dtype = result.dtype
        self._work = work
        self.travels = work is not None
        """Whether anything was sent for it; also when it has arrived."""
        self._inputs = inputs  # must outlive the transfer
        self._traffic, self._place = traffic, place

    @out_of_graphs
    def wait(self) -> Tensor:
        if self._work is not None:
            self._wait_for(self._work)
            self._work = self._inputs = None
            if self._finish is not None:
                finish, self._finish = self._finish, None
                self._result = finish(self._result, self._wait_for)
        if self._rows is not None:
            self._result, self._rows = self._result[: self._rows], None
        if self._result.dtype != self._dtype:
            self._result = self._result.to(self._dtype)
        return self._result

    @property
    def has_arrived(self) -> bool:
        """Whether `wait` would find it there, on the device too."""
        return self._work is None or bool(self._work.is_completed())

    def _wait_for(self, work: Any) -> None:
        if self._traffic is None or self._place is None:
            work.wait()
            return
        self._traffic.begin_waiting(self._place)
        work.wait()  # with NCCL the current stream does the waiting
        _end_waiting(self._traffic, self._place, self._result.is_cuda)

    def narrowed(self, rows: int) -> CommHandle:
        """The same, of whose result `wait` returns the first `rows` rows alone: for shards padded to travel."""
        self._rows = rows
        return self

    def then(self, take: Callable[[Tensor], Tensor]) -> CommHandle:
        """One whose result is made of this one's, when it is waited for: a part of what has travelled together."""
        return _Part(self, take)

    def converted(self, dtype: torch.dtype) -> CommHandle:
        """The same, whose result `wait` returns in another type than it travels in."""
        self._dtype = dtype
        return self


class _Part(CommHandle):
    __slots__ = ("_take", "_whole")

    def __init__(self, whole: CommHandle, take: Callable[[Tensor], Tensor]) -> None:
        super().__init__(whole._result)
        self.travels = whole.travels
        self._whole: CommHandle | None = whole
        self._take: Callable[[Tensor], Tensor] | None = take

    @property
    def has_arrived(self) -> bool:
        return self._whole is None or self._whole.has_arrived

    @out_of_graphs
    def wait(self) -> Tensor:
        if self._whole is not None and self._take is not None:
            whole, take, self._whole, self._take = self._whole, self._take, None, None
            self._result = take(whole.wait())
        return self._result


@out_of_graphs
def all_gather(shard: Tensor, axis: Axis) -> CommHandle:
    """Concatenates the members' shards along dim 0, in the order of `axis.ranks`. All shards have the same shape."""
    if axis.size == 1:
        return CommHandle(shard)
    shard = shard.contiguous()
    place = axis.traffic.add(axis.name, "all-gather", (axis.size - 1) * _bytes(shard))
    if axis.traffic.is_dry:
        return CommHandle(torch.cat([shard] * axis.size))
    group = open_group(axis)
    if gloo.gathers_directly(axis.size * _bytes(shard), axis.size) and gloo.exchanges(shard, group):
        result, work, sent = gloo.start_all_gather(shard, group, axis.size)
        return _issued(CommHandle(result, work, sent, traffic=axis.traffic, place=place), axis)
    result = shard.new_empty((axis.size * shard.shape[0], *shard.shape[1:]))
    work = all_gather_single(result, shard, group=group, async_op=True)
    return _issued(CommHandle(result, work, shard, traffic=axis.traffic, place=place), axis)


@out_of_graphs
def reduce_scatter(parts: Tensor, axis: Axis) -> CommHandle:
    """Sums the members' tensors and leaves member i the i-th of `axis.size` equal slices along dim 0."""
    if axis.size == 1:
        return CommHandle(parts)
    assert parts.shape[0] % axis.size == 0, f"{parts.shape[0]} rows cannot be scattered over {axis.name}={axis.size}"
    parts, rows = parts.contiguous(), parts.shape[0] // axis.size
    place = axis.traffic.add(axis.name, "reduce-scatter", (axis.size - 1) * (_bytes(parts) // axis.size))
    if axis.traffic.is_dry:
        return CommHandle(parts.narrow(0, axis.index * rows, rows).clone())
    group = open_group(axis)
    if gloo.exchanges(parts, group):
        received, work, finish = gloo.start_reduce_scatter(parts, group, axis.size)
        return _issued(CommHandle(received, work, parts, traffic=axis.traffic, place=place, finish=finish), axis)
    result = parts.new_empty((rows, *parts.shape[1:]))
    work = reduce_scatter_single(result, parts, group=group, async_op=True)
    return _issued(CommHandle(result, work, parts, traffic=axis.traffic, place=place), axis)


@out_of_graphs
def all_reduce(part: Tensor, axis: Axis) -> CommHandle:
    """Sums the members' tensors, in place where `part` is contiguous; every member gets the same sum."""
    if axis.size == 1:
        return CommHandle(part)
    part = part.contiguous()
    place = axis.traffic.add(axis.name, "all-reduce", _received_of_sum(part.numel(), part.element_size(), axis))
    if axis.traffic.is_dry:
        return CommHandle(part)
    group = open_group(axis)
    if gloo.gathers_directly(_bytes(part), axis.size) and gloo.exchanges(part, group):
        received, work, finish, sent = gloo.start_all_reduce(part, group, axis.size)
        return _issued(CommHandle(received, work, sent, traffic=axis.traffic, place=place, finish=finish), axis)
    work = dist.all_reduce(part, group=group, async_op=True)
    return _issued(CommHandle(part, work, traffic=axis.traffic, place=place), axis)


@out_of_graphs
def all_reduce_largest(part: Tensor, axis: Axis) -> Tensor:
    """The largest of the members' numbers, element by element, the same on every member; none of them NaN, which some
    backends pass over. A device that computes is not waited for."""
    if axis.size == 1:
        return part
    part = part.contiguous()
    place = axis.traffic.add(axis.name, "all-reduce", _received_of_sum(part.numel(), part.element_size(), axis))
    if axis.traffic.is_dry:
        return part
    work = dist.all_reduce(part, dist.ReduceOp.MAX, group=open_group(axis), async_op=True)
    return CommHandle(part, work, traffic=axis.traffic, place=place).wait()


@out_of_graphs
def all_equal(number: int, axis: Axis) -> bool:
    """Whether all members have the same number, of at most 63 bits and a sign. Known to hosts, and to all alike."""
    if axis.size == 1:
        return True
    most, least = _largest_of_hosts([number, -number], axis)
    return most == -least


@out_of_graphs
def largest(number: int, axis: Axis) -> int:
    """The largest of the members' numbers. Known to hosts, and to all alike; no device is waited for."""
    return number if axis.size == 1 else _largest_of_hosts([number], axis)[0]


def _largest_of_hosts(numbers: list[int], axis: Axis) -> list[int]:
    """Of one or two numbers, each."""
    with without_modes():  # a run with tensors that have no values looks at these
        bounds = torch.tensor(numbers, device="cpu")
    place = axis.traffic.add(axis.name, "all-reduce", _received_of_sum(len(numbers), bounds.element_size(), axis))
    if axis.traffic.is_dry:
        return numbers
    group = open_group(axis)
    # Who counts collectives by a mode is to see this one.
    with without_modes() if "fake" in dist.get_backend(group) else nullcontext():
        if gloo.exchanges(bounds, group):  # as many bytes in one step, if there are two numbers
            pair = bounds.repeat(2)[:2] if len(numbers) == 1 else bounds
            found, work, sent = gloo.start_all_gather(pair, group, axis.size)
        else:
            found = sent = bounds
            work = dist.all_reduce(bounds, dist.ReduceOp.MAX, group=group, async_op=True)
    with without_modes():
        arrived = CommHandle(found, work, sent, traffic=axis.traffic, place=place).wait()
        most: list[int] = arrived.view(-1, 2 if found is not bounds else len(numbers)).amax(0).tolist()
    return most[: len(numbers)]


@out_of_graphs
def all_to_all(blocks: Tensor, send: Sequence[int], receive: Sequence[int], axis: Axis) -> CommHandle:
    """Sends `send[i]` elements of the flat `blocks` to member i and receives `receive[i]` from it, in member order."""
    if axis.size == 1:
        return CommHandle(blocks)
    blocks = blocks.contiguous()
    received = (sum(receive) - receive[axis.index]) * blocks.element_size()
    place = axis.traffic.add(axis.name, "all-to-all", received)
    if axis.traffic.is_dry:
        return CommHandle(blocks.new_zeros(sum(receive)))
    result = blocks.new_empty(sum(receive))
    work = dist.all_to_all_single(result, blocks, list(receive), list(send), group=open_group(axis), async_op=True)
    return _issued(CommHandle(result, work, blocks, traffic=axis.traffic, place=place), axis)


@contextmanager
def counted(axis: Axis, kind: Kind, received: int, *, on_device: bool) -> Iterator[None]:
    """Around an operator that sends by itself (sharding/fused_products.py): it counts, and is waited for, as a
    collective that moves `received` bytes to this rank. A hang inside is seen as one of that collective."""
    place = axis.traffic.add(axis.name, kind, received)
    axis.traffic.begin_waiting(place)
    yield
    _end_waiting(axis.traffic, place, on_device)


def _end_waiting(traffic: CommCounter, place: Place, on_device: bool) -> None:
    passed = None
    if traffic.watched and on_device:
        passed = torch.cuda.Event()
        passed.record()
    traffic.end_waiting(place, passed)


def _issued(pending: CommHandle, axis: Axis) -> CommHandle:
    if not axis.overlap:
        pending.wait()
    return pending


def open_group(axis: Axis) -> dist.ProcessGroup | None:
    """The axis's group. Raises ValueError where its cube is closed."""
    if isinstance(axis.group, ClosedGroup):
        raise ValueError("the cube is closed, and its groups are gone. Make another one with Cube(...) on every rank.")
    return axis.group


def _received_of_sum(elements: int, size: int, axis: Axis) -> int:
    return summed_elements(axis.size, elements) * size


def _bytes(tensor: Tensor) -> int:
    return tensor.numel() * tensor.element_size()


class _SumCopies(Function):
    @staticmethod
    def forward(ctx: Any, part: Tensor, axis: Axis) -> Tensor:
        ctx.result_face, ctx.made = None, "a sum over ranks"  # copies, which lie on no face
        return all_reduce(part.clone(), axis).wait()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return gradient, None


@out_of_graphs
def all_reduce_replicated(part: Tensor, axis: Axis) -> Tensor:
    """Differentiable sum over `axis` whose result is the same on every member and is used the same way by each.

    Since each copy's gradient is already the gradient of the one logical value, the backward is the identity: a second
    sum would count it `axis.size` times. Losses and the logits of narrow heads are such copies.

    Raises:
        ValueError: `part` is a mean over this rank's rows. A sum of means is no mean.
    """
    check_summed(part)
    # With one member too, where there is a graph: what follows must know of this sum (sharding/layout_checks.py).
    return _SumCopies.apply(part, axis) if axis.size > 1 or part.requires_grad else part


class _SumGradient(Function):
    @staticmethod
    def forward(ctx: Any, copies: Tensor, axis: Axis) -> Tensor:
        ctx.axis, ctx.keeps_face = axis, True
        return copies.view_as(copies)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return all_reduce(gradient.clone(), ctx.axis).wait(), None  # in place, so not on autograd's own tensor


@out_of_graphs
def sum_gradient(copies: Tensor, axis: Axis) -> Tensor:
    """A value that is the same on every member of `axis`, as it is, for each of them to use in its own way, such as for
    its own columns; in backward the members' gradients, which are parts, are added. The dual of
    `all_reduce_replicated`.

        mean = sum_gradient(all_reduce_replicated(h.sum(1, keepdim=True) / hidden, z), z)      # of rows on face z

    Elements received: none forward; backward 2(n-1)/n of its size, n members.
    """
    return _SumGradient.apply(copies, axis) if axis.size > 1 and copies.requires_grad else copies


# ----------------------------------------------------------------------------------------------------------------------
# A few numbers a row from every member of an axis: so LayerNorm and cross-entropy combine rows with split columns.


@out_of_graphs
def gather_statistics(statistics: Tensor, axis: Axis) -> Tensor:
    """(rows, s) numbers on each member -> (members, rows, s) on all of them, in one all-gather.

    Each member then combines them by itself, in the same order, so all get the same result to the last bit.
    """
    return all_gather(statistics, axis).wait().view(axis.size, *statistics.shape)
