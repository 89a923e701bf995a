"""Weights over x, each alone or those of a block together: gathered for their products, their gradients summed.

A slab is what the members of x hold of a weight together: its rows of this rank's chunk over the rows axis (y for a
matrix that is read on face z). A slab of N' rows is cut over x into chunks of ceil(N'/x) rows, the last ones shorter
or empty. Collectives need even shards, so a chunk travels padded to ceil(N'/x), and the padding, all at the end, is
cut off before the product: a vocabulary of 30522 has no padding logits.

Together, the chunks of several weights travel end to end as one shard (`WeightGroup`), as FSDP's do (Zhao et al. 2023,
§3.2): one gather for the forward pass of a block, one for its backward pass, one sum of their gradients. Bytes and the
order of each sum are those of one after another. What it costs is memory: the gathered shards of a block lie beside the
slab of the product whose turn it is until its last product has its own, and so do the gradients.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tensor3d.distributed.collectives import Axis, CommHandle, all_gather, reduce_scatter
from tensor3d.distributed.cube import Cube
from tensor3d.distributed.cube_shape import chunk_bounds, travel_together
from tensor3d.distributed.grad_reducer import HandIn
from tensor3d.distributed.weight_prefetch import Kind, PassPosition, Start, follows
from tensor3d.ops.as_type import as_type
from tensor3d.sharding.param_layout import local
from tensor3d.torch_private import at_end_of_pass, backward_pass

# --- One weight -------------------------------------------------------------------------------------------------------


def all_gather_weight(weight: Tensor, cube: Cube, rows: Axis, dtype: torch.dtype) -> CommHandle:
    """Starts the gather over x of W' (N', K/z), in the type of the product and without padding."""
    x, shard = cube.axis("x"), as_type(block_or_shadow(weight, cube, dtype), dtype)
    if x.size == 1:  # there is nothing to pad and nothing to cut off
        return CommHandle(shard)
    slab = _Slab.of(weight, rows, cube)
    return all_gather(_pad_rows(shard, slab.chunk), x).narrowed(slab.rows)


def block_or_shadow(parameter: Tensor, cube: Cube, dtype: torch.dtype) -> Tensor:
    """This rank's block, or its copy in the type of a product (`ExecutionPolicy.shadow_weights`): to be converted, and
    not to be written to."""
    block = local(parameter)
    if not cube.speed.shadow_weights or block.dtype == dtype:
        return block
    return cube.shadows.of(parameter, block, dtype)


def converted_pair(weight: Tensor, bias: Tensor | None, cube: Cube, dtype: torch.dtype) -> tuple[Tensor, Tensor] | None:
    """A weight that does not travel and its bias, in the type of a product by one operator. None where there is
    another way, or nothing to convert."""
    if bias is None or cube.axis("x").size > 1 or cube.speed.shadow_weights:
        return None
    blocks = local(weight), local(bias)
    if blocks[0].dtype == dtype or blocks[1].dtype != blocks[0].dtype:
        return None
    converted = torch.empty_like(blocks[0], dtype=dtype), torch.empty_like(blocks[1], dtype=dtype)
    torch._foreach_copy_(converted, blocks)
    return converted


def type_of_sum(weight: Tensor, cube: Cube) -> torch.dtype:
    """In which the gradient of W' is summed over x: where nothing travels, nothing is to be rounded for it."""
    return weight.dtype if cube.axis("x").size == 1 else cube.precision.reduced(weight.dtype)


def reduce_scatter_weight_grad(dw: Tensor, weight: Tensor, cube: Cube) -> CommHandle:
    """Starts the sum over x of the gradients of W'; the result has the local shape and the type of `weight`."""
    x, dw = cube.axis("x"), as_type(dw, type_of_sum(weight, cube))
    if x.size == 1:
        return CommHandle(dw)
    chunk = -(-dw.shape[0] // x.size)
    own = local(weight).shape[0]
    return reduce_scatter(_pad_rows(dw, chunk * x.size), x).narrowed(own).converted(weight.dtype)


@dataclass(frozen=True, kw_only=True)
class _Slab:
    """A weight's sizes over x, the same on all members."""

    rows: int
    """N', without padding."""
    chunk: int
    """Rows of a member's shard as it travels."""
    columns: int

    @classmethod
    def of(cls, weight: Tensor, rows: Axis, cube: Cube) -> _Slab:
        first, last = chunk_bounds(weight.shape[0], rows.size, rows.index)
        return cls(rows=last - first, chunk=-(-(last - first) // cube.axis("x").size), columns=local(weight).shape[1])

    @property
    def shard(self) -> int:
        """Elements that travel from a member."""
        return self.chunk * self.columns


def _pad_rows(tensor: Tensor, rows: int) -> Tensor:
    return tensor if tensor.shape[0] == rows else F.pad(tensor, (0, 0, 0, rows - tensor.shape[0]))


# --- Gathers ahead of their use ---------------------------------------------------------------------------------------


def position_in_pass(a: Tensor | None, cube: Cube) -> PassPosition:
    """Where a use in a forward pass stands, asked outside of autograd's functions.

    Args:
        a: what is multiplied; None: nothing that was computed.
    """
    if not torch.is_grad_enabled() or not _works_ahead(cube):
        return PassPosition.UNORDERED
    return PassPosition.FOLLOWING if a is not None and follows(a) else PassPosition.FIRST


def get_gathered_weight(
    weight: nn.Parameter,
    cube: Cube,
    rows: Axis,
    dtype: torch.dtype,
    *,
    kind: Kind = "product",
    position: PassPosition = PassPosition.FOLLOWING,
) -> CommHandle:
    """W' by a gather of its own, or by the one that the product before has started (distributed/weight_prefetch.py).

    Args:
        kind: what for; a tied weight has uses of both.
        position: of this use among those of the pass.
    """
    if cube.axis("x").size == 1:
        return all_gather_weight(weight, cube, rows, dtype)
    return _gathered([weight], [rows], cube, dtype, kind, position)


def pass_gathered_weight(weight: nn.Parameter, cube: Cube, rows: Axis, dtype: torch.dtype) -> None:
    """Tells the order that backward multiplies by a weight that was kept."""
    if _works_ahead(cube):
        cube.ahead.pass_kept(weight, rows, dtype)


def prefetch_next_weight(cube: Cube, *, position: PassPosition = PassPosition.FOLLOWING) -> None:
    """Starts the gather for the product after this one, to travel under what is computed now."""
    if position is not PassPosition.UNORDERED and _works_ahead(cube):
        cube.ahead.go_on(local, _gathering(cube))


def _gathered(
    weights: Sequence[nn.Parameter],
    rows: Sequence[Axis],
    cube: Cube,
    dtype: torch.dtype,
    kind: Kind,
    position: PassPosition,
) -> CommHandle:
    if position is PassPosition.UNORDERED or not _works_ahead(cube):
        return _start(weights, rows, cube, dtype)
    return cube.ahead.take(weights, local, kind, rows, dtype, position is PassPosition.FOLLOWING, _gathering(cube))


def _gathering(cube: Cube) -> Start:
    return lambda weights, rows, dtype: _start(weights, rows, cube, dtype)


def _start(weights: Sequence[nn.Parameter], rows: Sequence[Axis], cube: Cube, dtype: torch.dtype) -> CommHandle:
    """The slab of one weight, or the shards (x, elements) of several."""
    if len(weights) == 1:
        return all_gather_weight(weights[0], cube, rows[0], dtype)
    slabs = [_Slab.of(weight, axis, cube) for weight, axis in zip(weights, rows, strict=True)]
    flat = torch.empty((1, sum(slab.shard for slab in slabs)), dtype=dtype, device=local(weights[0]).device)
    places, blocks = [], [block_or_shadow(weight, cube, dtype).detach() for weight in weights]
    for block, slab, part in zip(blocks, slabs, flat.split([slab.shard for slab in slabs], 1), strict=True):
        place = part.view(slab.chunk, slab.columns)
        places.append(place[: block.shape[0]])
        if block.shape[0] < slab.chunk:  # padding, which is cut off again
            place[block.shape[0] :].zero_()
    torch._foreach_copy_(places, blocks)
    return all_gather(flat, cube.axis("x"))


def _works_ahead(cube: Cube) -> bool:
    return cube.speed.overlap and cube.axis("x").size > 1 and not cube.traffic.is_dry


# --- Of a product, wherever its weight comes from ---------------------------------------------------------------------


class WeightSource(Protocol):
    """One use of a weight: its slab, forward and backward, and where its gradient goes."""

    def gather(self, dtype: torch.dtype, position: PassPosition) -> CommHandle:
        """Starts, or has started, the gather of W' in the forward pass."""

    def gather_again(self, dtype: torch.dtype) -> CommHandle:
        """The same in a backward pass."""

    def expect(self, *, gather: bool, grad: bool) -> None:
        """What a backward pass will ask: told in the forward pass."""

    def accumulate_grad(self, dw: Tensor, over: Axis) -> None:
        """Hands the gradient of W' in, to be summed over x and then over the ranks of `over`."""


def weight_source(weight: nn.Parameter, cube: Cube, rows: Axis) -> WeightSource:
    """A weight's place in the group that is open, if it is there; else the weight alone."""
    for group in reversed(cube.open_groups):
        found = group.source(weight, rows)
        if found is not None:
            return found
    return _Alone(weight=weight, cube=cube, rows=rows)


@dataclass(kw_only=True, slots=True)  # made for every product: a frozen one takes three times as long
class _Alone:
    weight: nn.Parameter
    cube: Cube
    rows: Axis

    def gather(self, dtype: torch.dtype, position: PassPosition) -> CommHandle:
        return get_gathered_weight(self.weight, self.cube, self.rows, dtype, position=position)

    def gather_again(self, dtype: torch.dtype) -> CommHandle:
        return get_gathered_weight(self.weight, self.cube, self.rows, dtype)

    def expect(self, *, gather: bool, grad: bool) -> None:
        pass

    def accumulate_grad(self, dw: Tensor, over: Axis) -> None:
        sums = reduce_scatter_weight_grad(dw, self.weight, self.cube)
        self.cube.ledger.accumulate_grad(self.weight, sums, over)


# --- Several together -------------------------------------------------------------------------------------------------


@contextmanager
def gathered_together(weights: Callable[[], Sequence[tuple[nn.Parameter, Axis]]], cube: Cube) -> Iterator[None]:
    """Inside, the products with these weights take them from one gather over x, and so do their backward passes; their
    gradients are summed in one reduce-scatter.

    It is so where `ExecutionPolicy.weight_group_bytes` says so; of other uses of a weight than the first, and of
    weights of other types than the first one's, each goes alone.

    Args:
        weights: gives them with the axes over which their rows are cut. Not called where x is 1.
    """
    if cube.axis("x").size == 1 or cube.speed.weight_group_bytes == 0:
        yield
        return
    group = WeightGroup(weights(), cube)
    if not group.is_one:
        yield
        return
    cube.open_groups.append(group)
    try:
        yield
    finally:
        cube.open_groups.remove(group)
        group.end_forward()


@dataclass(kw_only=True)
class _Member:
    """A weight of a group, in one forward pass and the backward passes through it."""

    weight: nn.Parameter
    rows: Axis
    slab: _Slab
    gathers_again: bool = False
    has_grad: bool = False


@dataclass(kw_only=True)
class _Gathered:
    """Shards of several weights on their way, for those that have not taken theirs."""

    shards: CommHandle
    dtype: torch.dtype
    places: dict[int, tuple[int, int]]
    """Of each weight's: its first element in a shard, and the one behind its last."""
    left: set[int]


@dataclass(kw_only=True)
class _Sums:
    """Gradients of a backward pass, which leave together."""

    parts: Tensor
    """(x, elements): to each member of x, what it sums."""
    places: dict[int, tuple[int, int]]
    came: list[tuple[_Member, Axis]] = field(default_factory=list)


class WeightGroup:
    """Weights that are gathered together, in one forward pass of their block."""

    def __init__(self, weights: Sequence[tuple[nn.Parameter, Axis]], cube: Cube) -> None:
        self._cube = cube
        self._members: dict[int, _Member] = {}
        for weight, rows in weights:
            if weight.dtype == weights[0][0].dtype and local(weight).device == local(weights[0][0]).device:
                self._members[id(weight)] = _Member(weight=weight, rows=rows, slab=_Slab.of(weight, rows, cube))
        if cube.speed.shadow_weights:
            cube.shadows.enrol(*(member.weight for member in self._members.values()))
        self._given: set[int] = set()
        self._forward: _Gathered | None = None
        self._backward: dict[int, _Gathered] = {}
        self._sums: dict[int, _Sums] = {}

    @property
    def is_one(self) -> bool:
        """Whether they travel together: the same on all members of x."""
        if len(self._members) < 2:
            return False
        first = next(iter(self._members.values())).weight
        shard = sum(member.slab.shard for member in self._members.values())
        size = self._cube.precision.computed(first.dtype).itemsize
        gathered = self._cube.axis("x").size * shard * size
        return travel_together(self._cube.shape, gathered, self._cube.speed.weight_group_bytes)

    def source(self, weight: nn.Parameter, rows: Axis) -> WeightSource | None:
        """The place of a weight that has none yet."""
        member = self._members.get(id(weight))
        if member is None or member.rows is not rows or id(weight) in self._given:
            return None
        self._given.add(id(weight))
        return _Together(group=self, member=member)

    def end_forward(self) -> None:
        """All have taken theirs; or the block's forward pass is over: what nobody has taken goes."""
        forward, self._forward = self._forward, None
        if forward is not None:
            forward.shards.wait()

    def gather(self, member: _Member, dtype: torch.dtype, position: PassPosition) -> CommHandle:
        if self._forward is None:
            self._forward = self._begun(list(self._members.values()), dtype, position)
        return self._part(self._forward, member, dtype, position, self.end_forward)

    def gather_again(self, member: _Member, dtype: torch.dtype) -> CommHandle:
        task, position = backward_pass(), PassPosition.FOLLOWING
        if not member.gathers_again:  # it was kept, for a single pass
            return get_gathered_weight(member.weight, self._cube, member.rows, dtype)
        if task not in self._backward:
            again = [each for each in self._members.values() if each.gathers_again]
            self._backward[task] = self._begun(again, dtype, position)
            at_end_of_pass(partial(self._end_backward, task))
        return self._part(self._backward[task], member, dtype, position, partial(self._end_backward, task))

    def _part(
        self,
        gathered: _Gathered,
        member: _Member,
        dtype: torch.dtype,
        position: PassPosition,
        end: Callable[[], None],
    ) -> CommHandle:
        if dtype != gathered.dtype or id(member.weight) not in gathered.left:
            return get_gathered_weight(member.weight, self._cube, member.rows, dtype, position=position)
        return gathered.shards.then(partial(self._taken, gathered, member, end))

    def _begun(self, members: list[_Member], dtype: torch.dtype, position: PassPosition) -> _Gathered:
        weights, rows = [member.weight for member in members], [member.rows for member in members]
        return _Gathered(
            shards=_gathered(weights, rows, self._cube, dtype, "product", position),
            dtype=dtype,
            places=_places(members),
            left={id(member.weight) for member in members},
        )

    def _taken(self, gathered: _Gathered, member: _Member, end: Callable[[], None], shards: Tensor) -> Tensor:
        """One weight's slab out of what has arrived, which the last one to take its own lets go of."""
        key, slab = id(member.weight), member.slab
        gathered.left.discard(key)
        if not gathered.left:
            end()
        if len(gathered.places) == 1:
            return shards
        first, last = gathered.places[key]
        return shards[:, first:last].reshape(-1, slab.columns)[: slab.rows]

    def _end_backward(self, task: int) -> None:
        """All have taken theirs; or the pass is over, in which not all were asked for."""
        left = self._backward.pop(task, None)
        if left is not None:
            left.shards.wait()

    def accumulate_grad(self, member: _Member, dw: Tensor, over: Axis) -> None:
        task, cube, x = backward_pass(), self._cube, self._cube.axis("x").size
        is_first = task not in self._sums
        cube.ledger.announce(member.weight, partial(self._sent, task) if is_first else None)
        if is_first:
            expected = [each for each in self._members.values() if each.has_grad]
            shard = sum(each.slab.shard for each in expected)
            dtype = type_of_sum(member.weight, cube)
            parts = torch.empty((x, shard), dtype=dtype, device=dw.device)
            self._sums[task] = _Sums(parts=parts, places=_places(expected))
        sums, slab = self._sums[task], member.slab
        first, last = sums.places[id(member.weight)]
        place = sums.parts[:, first:last].unflatten(1, (slab.chunk, slab.columns))
        if slab.rows == x * slab.chunk:
            place.copy_(dw.view(place.shape))
        else:
            place.copy_(_pad_rows(dw, x * slab.chunk).view(place.shape))
        sums.came.append((member, over))
        if len(sums.came) == len(sums.places):
            cube.ledger.accumulate_grads(self._sent(task))

    def _sent(self, task: int) -> list[HandIn]:
        """All have come; or the pass is over, and what was not asked for is zeros."""
        sums = self._sums.pop(task, None)
        if sums is None:
            return []
        came = {id(member.weight) for member, _ in sums.came}
        for key, (first, last) in sums.places.items():
            if key not in came:
                sums.parts[:, first:last].zero_()
        total = reduce_scatter(sums.parts, self._cube.axis("x"))
        return [
            (member.weight, total.then(partial(_own_part, member, sums.places[id(member.weight)])), over)
            for member, over in sums.came
        ]


def _places(members: Sequence[_Member]) -> dict[int, tuple[int, int]]:
    found, first = {}, 0
    for member in members:
        found[id(member.weight)] = (first, first + member.slab.shard)
        first += member.slab.shard
    return found


def _own_part(member: _Member, place: tuple[int, int], total: Tensor) -> Tensor:
    """This rank's gradient of one weight out of the sums of all."""
    own = local(member.weight)
    part = total.view(-1)[place[0] : place[1]].view(member.slab.chunk, member.slab.columns)[: own.shape[0]]
    return part.to(own.dtype)


@dataclass(frozen=True, kw_only=True)
class _Together:
    """A weight's place in a group."""

    group: WeightGroup
    member: _Member

    def gather(self, dtype: torch.dtype, position: PassPosition) -> CommHandle:
        return self.group.gather(self.member, dtype, position)

    def gather_again(self, dtype: torch.dtype) -> CommHandle:
        return self.group.gather_again(self.member, dtype)

    def expect(self, *, gather: bool, grad: bool) -> None:
        self.member.gathers_again, self.member.has_grad = gather, grad

    def accumulate_grad(self, dw: Tensor, over: Axis) -> None:
        self.group.accumulate_grad(self.member, dw, over)
