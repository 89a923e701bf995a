"""Sums of gradients over ranks in buckets, each of which travels as soon as all of its gradients are there.

Gradients stand end to end in an order that all ranks share, cut into buckets of one size: so bytes and collectives of a
step follow from the number of elements alone (`tensor3d.cost_model`). Buckets leave in that order on every rank, so a
rank whose gradients come in another one only waits longer (as in DistributedDataParallel, Li et al. 2020, §3.2.3).

A bucket is the memory of the gradients in it: each is copied to its place and let go of, and `.grad` becomes a view.
(A call that takes many tensors copies all, there and back, in gloo.) Either each bucket has memory of its own, in which
case what has one for itself is summed where it lies; or those of one axis and type lie end to end in memory that stays
from pass to pass (`KeptMemory`), in which a gradient lies whole wherever buckets are cut. New memory costs a CPU time:
its system clears every page of it.

Where the ranks share gradients out (ZeRO stage 2, Rajbhandari et al. 2020, arXiv 1910.02054, §5.2), what stands end to
end are the rows of each gradient that one of D ranks gets, C n/R elements of it (distributed/data_shares.py), and a
bucket of c of these is (D, c): row d holds what rank d gets, with zeros where it gets less. It is reduce-scattered, and
let go of when that is done: what stays is the sum of this rank's rows. Received: (D - 1) c, half of an all-reduce.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from tensor3d.distributed.collectives import Axis, CommHandle, all_reduce, reduce_scatter
from tensor3d.distributed.comm_stats import bucket_elements
from tensor3d.distributed.cube_policies import MixedPrecisionPolicy
from tensor3d.distributed.cube_shape import chunk_bounds
from tensor3d.distributed.seeds import Number
from tensor3d.torch_private import storage_uses


class GradSlot(NamedTuple):
    """One gradient among those that are summed, the same on the ranks that it is summed over."""

    number: Number
    """Of the parameter."""
    over: str
    """The axis of its sum."""
    dtype: torch.dtype
    device: str
    elements: int
    uses: int = 0
    """After how many in a backward pass it is complete."""
    rows: int | None = None
    """R, of which each rank gets the sums of its share. None: each rank gets all sums."""

    def travelling(self, members: int) -> int:
        """Elements of it in one row of buckets: C n/R, or all n."""
        if self.rows is None:
            return self.elements
        return -(-self.rows // members) * (self.elements // self.rows) if self.rows else 0


class _Group(NamedTuple):
    """Gradients that are summed over one axis, in one type, on one device."""

    over: str
    dtype: torch.dtype
    """In which they travel."""
    device: str
    elements: int
    """Of a row."""
    converted: bool
    """Whether they travel in another type than they have."""
    rows: int
    """D, one for each rank that gets shares; 1: each rank gets all sums."""

    @property
    def may_stay(self) -> bool:
        """Whether it is memory of gradients after a pass, and may stay for the next one."""
        return not self.converted and self.rows == 1


@dataclass(frozen=True, kw_only=True)
class _Bucket:
    axis: Axis
    dtype: torch.dtype
    """In which it travels."""
    elements: int
    """c: of a row."""
    group: _Group
    """Those of one axis and type, end to end."""
    start: int
    """Its first element in them."""


class _Piece(NamedTuple):
    """Elements `first` to `last` of a gradient, or of each share of it, which travel in a bucket, from element `place`
    of it, or of each row, on."""

    bucket: int
    place: int
    first: int
    last: int


class BucketPlan:
    """Which part of which gradient travels in which bucket.

    Args:
        slots: in the order in which gradients are expected, the same on the ranks of each sum.
        axes: this rank's, by name.
    """

    def __init__(self, slots: Sequence[GradSlot], axes: Mapping[str, Axis], precision: MixedPrecisionPolicy) -> None:
        self.axes = axes
        self.slots = {slot.number: slot for slot in slots}
        self.places = {slot.number: place for place, slot in enumerate(slots)}
        groups: dict[tuple[str, torch.dtype, str, bool], list[GradSlot]] = {}
        for slot in slots:
            groups.setdefault((slot.over, slot.dtype, slot.device, slot.rows is not None), []).append(slot)
        self.buckets: list[_Bucket] = []
        self.pieces: dict[Number, list[_Piece]] = {slot.number: [] for slot in slots}
        for (over, dtype, device, shared), group in groups.items():
            members = axes[over].size
            rows = members if shared else 1
            total, base, start = sum(slot.travelling(members) for slot in group), len(self.buckets), 0
            reduced = precision.reduced(dtype)
            whole = _Group(over, reduced, device, total, reduced != dtype, rows)
            size = bucket_elements(members, dtype.itemsize, total * rows) // rows
            for slot in group:
                stop = start + slot.travelling(members)
                for bucket in range(start // size, -(-stop // size)):
                    first, last = max(start, bucket * size), min(stop, (bucket + 1) * size)
                    piece = _Piece(base + bucket, first - bucket * size, first - start, last - start)
                    self.pieces[slot.number].append(piece)
                start = stop
            self.buckets += [
                _Bucket(axis=axes[over], dtype=reduced, elements=min(size, total - begin), group=whole, start=begin)
                for begin in range(0, total, size)
            ]
        complete = [0] * len(self.buckets)  # the place of the last gradient of each bucket
        for number, pieces in self.pieces.items():
            for piece in pieces:
                complete[piece.bucket] = max(complete[piece.bucket], self.places[number])
        self.order = sorted(range(len(self.buckets)), key=complete.__getitem__)
        """In which buckets leave."""

    @property
    def overlaps(self) -> bool:
        """Whether a bucket may still travel when it has left."""
        return all(axis.overlap for axis in self.axes.values())

    def first_bucket(self, slot: GradSlot) -> int:
        """Of the buckets in which a gradient travels."""
        pieces = self.pieces[slot.number]
        return pieces[0].bucket if pieces else 0


_LETTING_GO = (0.0, 0.001)
"""Seconds: gloo's threads let go of what they have summed a moment after it was waited for."""


def _is_free(memory: Tensor, alone: int) -> bool:
    """Whether nobody else holds a part of it."""
    for pause in _LETTING_GO:
        if storage_uses(memory) <= alone:
            return True
        time.sleep(pause)
    return storage_uses(memory) <= alone


class KeptMemory:
    """Memory of buckets that stays from one pass to the next, unless somebody still holds a gradient of it."""

    def __init__(self) -> None:
        self._free: dict[_Group, tuple[Tensor, int]] = {}

    def take(self, group: _Group) -> tuple[Tensor, int]:
        """Room for all of a group, and how often its storage is in use where nobody else holds a part of it.

        On a GPU nobody waits for who has read it before: optimisers have, before the forward pass of this one.
        """
        memory, alone = self._free.pop(group, (None, 0))
        if memory is None:
            self._free.clear()  # of a plan before this one
        if memory is None or not _is_free(memory, alone):
            memory = torch.empty(group.elements, dtype=group.dtype, device=group.device)
            alone = storage_uses(memory)
        return memory, alone

    def keep(self, memories: Mapping[_Group, tuple[Tensor, int]]) -> None:
        """For the next pass."""
        self._free.update(memories)

    def forget(self) -> None:
        """Lets go of all of it."""
        self._free.clear()

    @property
    def bytes(self) -> int:
        """That are kept now."""
        return sum(memory.nbytes for memory, _ in self._free.values())


class GradBuckets:
    """The sums of one backward pass by a plan.

    Args:
        early: whether buckets leave as soon as they are full. Not: in `finish`.
        kept: memory that stays. None: each bucket gets its own.
    """

    def __init__(self, plan: BucketPlan, *, early: bool = True, kept: KeptMemory | None = None) -> None:
        self.plan = plan
        self.early = early
        self._kept = kept
        self._taken: dict[_Group, tuple[Tensor, int]] = {}
        self._finished, self._next = False, 0
        self._given: set[Number] = set()
        self.unused: dict[Number, Tensor] = {}
        """After `finish`: sums, flat, of what this rank has not given."""
        self._memory: dict[int, Tensor] = {}  # of buckets that are not full yet
        self._missing = [bucket.elements for bucket in plan.buckets]
        self._sent: list[CommHandle] = []
        self._copies: list[tuple[Tensor, Tensor]] = []  # of what lies elsewhere: the place of a sum, and the sum
        self._scattered: deque[tuple[CommHandle, int]] = deque()  # buckets by number
        self._own: dict[int, list[tuple[Tensor, int]]] = {}  # of a bucket of shares: where sums go, and lie in its row
        self._whole_ones: dict[Number, Tensor] = {}  # gradients in shares, while nothing has left
        self._streams: set[torch.cuda.Stream] = set()

    @property
    def has_sent(self) -> bool:
        """Whether a bucket has left: then every rank must send all of them."""
        return self._next > 0

    @property
    def is_full(self) -> bool:
        """Whether all gradients of the plan are there."""
        return len(self._given) == len(self.plan.slots)

    def takes(self, number: Number, gradient: Tensor, over: Axis) -> bool:
        """Whether there is still room for this gradient."""
        slot = self.plan.slots.get(number)
        fits = slot is not None and (slot.over, slot.dtype, slot.elements) == (
            over.name,
            gradient.dtype,
            gradient.numel(),
        )
        return fits and number not in self._given and not self._finished

    def put(self, number: Number, gradient: Tensor, *, owned: bool) -> Tensor:
        """Takes a gradient.

        Args:
            owned: whether a sum may overwrite `gradient`.

        Returns:
            What is the sum over ranks after `finish`: a view of the buckets, or, of what travels in another type or
            in several that have memory of their own, `gradient` itself or a copy of it. Of what is shared out this
            rank's rows of that.
        """
        self._given.add(number)
        pieces = self.plan.pieces[number]
        if gradient.is_cuda:
            self._streams.add(torch.cuda.current_stream(gradient.device))
        slot = self.plan.slots[number]
        place = self._place(pieces, gradient) if slot.rows is None else None
        if slot.rows is not None:
            result = self._put_shares(slot, pieces, gradient)
        elif place is not None:
            result = place.view(gradient.shape).copy_(gradient)
        else:
            result = gradient
            if not owned or not gradient.is_contiguous():
                result = gradient.clone(memory_format=torch.contiguous_format)
            flat = result.view(-1)
            for piece in pieces:
                own = flat[piece.first : piece.last]
                if self._is_alone(piece) and self._of(piece).dtype == gradient.dtype:
                    self._memory[piece.bucket] = own
                else:
                    self._copies.append((own, self._part(piece, gradient).copy_(own)))
        for piece in pieces:
            self._missing[piece.bucket] -= piece.last - piece.first
        if self.early:
            self._send()
        return result

    def _put_shares(self, slot: GradSlot, pieces: Sequence[_Piece], gradient: Tensor) -> Tensor:
        """(R, ...): each rank's share to its row of the buckets. Returns where the sums of this rank's will be."""
        assert slot.rows is not None
        if not self.has_sent:
            self._whole_ones[slot.number] = gradient
        axis = self.plan.axes[slot.over]
        first, last = chunk_bounds(slot.rows, axis.size, axis.index)
        own = gradient.new_empty((last - first, *gradient.shape[1:]))
        flat, width = gradient.reshape(-1), slot.travelling(axis.size)
        full = slot.elements // width if width else 0  # ranks that get a whole share; the next one gets the tail
        for piece in pieces:
            rows = self._part(piece, gradient)
            rows[:full].copy_(flat[: full * width].view(full, width)[:, piece.first : piece.last])
            if full < axis.size:
                rows[full:].zero_()
                tail = flat[full * width :][piece.first : piece.last]
                rows[full, : tail.numel()].copy_(tail)
            self._own.setdefault(piece.bucket, []).append((own.view(-1)[piece.first : piece.last], piece.place))
        return own

    def take_back(self, number: Number) -> Tensor:
        """A gradient as it was put in, of what is shared out, while nothing has left."""
        return self._whole_ones[number]

    def _of(self, piece: _Piece) -> _Bucket:
        return self.plan.buckets[piece.bucket]

    def _is_alone(self, piece: _Piece) -> bool:
        """Whether it is all of its bucket."""
        return piece.last - piece.first == self._of(piece).elements

    def _place(self, pieces: Sequence[_Piece], gradient: Tensor) -> Tensor | None:
        """Where a gradient lies whole, flat. None: nowhere."""
        if not pieces or self._of(pieces[0]).dtype != gradient.dtype:
            return None
        if len(pieces) == 1 and (self._stays(pieces[0]) or not self._is_alone(pieces[0])):
            return self._part(pieces[0], gradient)
        if not self._stays(pieces[0]):
            return None
        for piece in pieces:
            self._part(piece, gradient)
        first = self._of(pieces[0]).start + pieces[0].place
        return self._whole(self._of(pieces[0]).group)[first : first + gradient.numel()]

    def _part(self, piece: _Piece, gradient: Tensor) -> Tensor:
        """Its place in the memory of its bucket."""
        memory = self._memory.get(piece.bucket)
        if memory is None:
            bucket = self._of(piece)
            if self._stays(piece):
                memory = self._whole(bucket.group)[bucket.start : bucket.start + bucket.elements]
            else:
                rows = () if bucket.group.rows == 1 else (bucket.group.rows,)
                memory = torch.empty((*rows, bucket.elements), dtype=bucket.dtype, device=gradient.device)
            self._memory[piece.bucket] = memory
        elif memory.is_cuda:  # begun perhaps on another stream, which is known by now
            self._wait_for_streams(memory)
        return memory[..., piece.place : piece.place + piece.last - piece.first]

    def _stays(self, piece: _Piece) -> bool:
        """Whether its bucket lies in memory that stays. A type of the wire's own is nobody's gradient afterwards, and a
        bucket of shares is mostly others'."""
        return self._kept is not None and self._of(piece).group.may_stay

    def _whole(self, group: _Group) -> Tensor:
        if group not in self._taken:
            assert self._kept is not None
            self._taken[group] = self._kept.take(group)
        return self._taken[group][0]

    def keep_memory(self) -> None:
        """The next pass may take it: after `finish`, or before anything was put in."""
        if self._kept is not None:
            self._kept.keep(self._taken)

    def take_memory(self) -> None:
        """All that stays, at once, and not where a gradient needs it."""
        for bucket in self.plan.buckets if self._kept is not None else ():
            if bucket.group.may_stay:
                self._whole(bucket.group)

    def _wait_for_streams(self, memory: Tensor) -> None:
        """What this stream does from here on comes after what the others have done; the host waits for nothing."""
        current = torch.cuda.current_stream(memory.device)
        for stream in self._streams:
            if stream != current:
                current.wait_stream(stream)
                memory.record_stream(current)

    def finish(self) -> None:
        """Sends what has not left yet, with zeros for what this rank does not have, and waits for all."""
        if self._finished:
            return
        self._finished = True
        for number, slot in self.plan.slots.items():
            if number not in self._given:
                zeros = torch.zeros((), dtype=slot.dtype, device=slot.device)
                shape = (slot.elements,) if not slot.rows else (slot.rows, slot.elements // slot.rows)
                zeros = zeros.expand(shape)
                self.unused[number] = self.put(number, zeros, owned=False)
        self._send()
        for pending in self._sent:
            pending.wait()
        for place, total in self._copies:
            place.copy_(total)
        self._receive_shares(all_of_them=True)
        self._sent.clear()
        self._copies.clear()

    def _send(self) -> None:
        """All buckets that are full, up to the first one that is not."""
        while self._next < len(self.plan.order) and not self._missing[index := self.plan.order[self._next]]:
            self._next += 1
            memory = self._memory.pop(index)
            if memory.is_cuda:
                self._wait_for_streams(memory)
            bucket = self.plan.buckets[index]
            self._whole_ones.clear()
            if bucket.group.rows == 1:
                self._sent.append(all_reduce(memory, bucket.axis))
            else:
                self._scattered.append((reduce_scatter(memory, bucket.axis), index))
        self._receive_shares()

    def _receive_shares(self, *, all_of_them: bool = False) -> None:
        """Lets go of buckets of shares that have arrived: what this rank gets of them is copied to its place.

        Nothing is waited for while the pass runs: a rank that does not use what others have used sends it at the end,
        when all have come there.
        """
        while self._scattered and (all_of_them or self._scattered[0][0].has_arrived):
            scattered, index = self._scattered.popleft()
            row = scattered.wait().view(-1)
            for own, place in self._own.pop(index):
                if own.is_cuda:
                    self._wait_for_streams(own)
                own.copy_(row[place : place + own.numel()])
