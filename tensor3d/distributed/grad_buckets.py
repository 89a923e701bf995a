"""Sums of gradients over ranks in buckets, each of which travels as soon as all of its gradients are there.

Gradients stand end to end in an order that all ranks share, cut into buckets of one size: so bytes and collectives of a
step follow from the number of elements alone (`tensor3d.cost_model`). Buckets leave in that order on every rank, so a
rank whose gradients come in another one only waits longer (as in DistributedDataParallel, Li et al. 2020, §3.2.3).

A bucket is no memory of its own: parts of gradients are summed where they lie, in one collective.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from tensor3d.distributed.collectives import Axis, CommHandle, all_reduce_coalesced
from tensor3d.distributed.comm_stats import bucket_elements
from tensor3d.distributed.cube_policies import MixedPrecisionPolicy
from tensor3d.distributed.seeds import Number


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


@dataclass(frozen=True, kw_only=True)
class _Bucket:
    axis: Axis
    dtype: torch.dtype
    """In which it travels."""
    elements: int


class _Piece(NamedTuple):
    """Elements `first` to `last` of a gradient, which travel in a bucket."""

    bucket: int
    first: int
    last: int


class BucketPlan:
    """Which part of which gradient travels in which bucket.

    Args:
        slots: in the order in which gradients are expected, the same on the ranks of each sum.
        axes: this rank's, by name.
    """

    def __init__(self, slots: Sequence[GradSlot], axes: Mapping[str, Axis], precision: MixedPrecisionPolicy) -> None:
        self.slots = {slot.number: slot for slot in slots}
        self.places = {slot.number: place for place, slot in enumerate(slots)}
        groups: dict[tuple[str, torch.dtype, str], list[GradSlot]] = {}
        for slot in slots:
            groups.setdefault((slot.over, slot.dtype, slot.device), []).append(slot)
        self.buckets: list[_Bucket] = []
        self.pieces: dict[Number, list[_Piece]] = {slot.number: [] for slot in slots}
        for (over, dtype, _), group in groups.items():
            total, base, start = sum(slot.elements for slot in group), len(self.buckets), 0
            size = bucket_elements(axes[over].size, dtype.itemsize, total)
            for slot in group:
                stop = start + slot.elements
                for bucket in range(start // size, -(-stop // size)):
                    first, last = max(start, bucket * size), min(stop, (bucket + 1) * size)
                    self.pieces[slot.number].append(_Piece(base + bucket, first - start, last - start))
                start = stop
            self.buckets += [
                _Bucket(axis=axes[over], dtype=precision.reduced(dtype), elements=min(size, total - begin))
                for begin in range(0, total, size)
            ]
        complete = [0] * len(self.buckets)  # the place of the last gradient of each bucket
        for number, pieces in self.pieces.items():
            for piece in pieces:
                complete[piece.bucket] = max(complete[piece.bucket], self.places[number])
        self.order = sorted(range(len(self.buckets)), key=complete.__getitem__)
        """In which buckets leave."""


class GradBuckets:
    """The sums of one backward pass by a plan.

    Args:
        early: whether buckets leave as soon as they are full. Not: in `finish`.
    """

    def __init__(self, plan: BucketPlan, *, early: bool = True) -> None:
        self.plan = plan
        self.early = early
        self._finished, self._next = False, 0
        self._given: set[Number] = set()
        self.unused: dict[Number, Tensor] = {}
        """After `finish`: sums, flat, of what this rank has not given."""
        self._parts: list[dict[int, Tensor]] = [{} for _ in plan.buckets]  # by the gradient's place
        self._missing = [bucket.elements for bucket in plan.buckets]
        self._sent: list[tuple[CommHandle, list[Tensor], list[Tensor]]] = []
        self._streams: set[torch.cuda.Stream] = set()

    @property
    def has_sent(self) -> bool:
        """Whether a bucket has left: then every rank must send all of them."""
        return self._next > 0

    def takes(self, number: Number, gradient: Tensor, over: Axis) -> bool:
        """Whether there is still room for this gradient."""
        slot = self.plan.slots.get(number)
        fits = slot is not None and (slot.over, slot.dtype, slot.elements) == (
            over.name,
            gradient.dtype,
            gradient.numel(),
        )
        return fits and number not in self._given and not self._finished

    def put(self, number: Number, gradient: Tensor) -> None:
        """Takes a contiguous gradient, which is the sum over ranks after `finish`."""
        flat = gradient.view(-1)
        self._given.add(number)
        for bucket, first, last in self.plan.pieces[number]:
            self._parts[bucket][self.plan.places[number]] = flat[first:last]
            self._missing[bucket] -= last - first
        if flat.is_cuda:
            self._streams.add(torch.cuda.current_stream(flat.device))
        if self.early:
            self._send()

    def finish(self) -> None:
        """Sends what has not left yet, with zeros for what this rank does not have, and waits for all."""
        if self._finished:
            return
        self._finished = True
        for number, slot in self.plan.slots.items():
            if number not in self._given:
                self.unused[number] = torch.zeros(slot.elements, dtype=slot.dtype, device=slot.device)
                self.put(number, self.unused[number])
        self._send()
        for pending, parts, sent in self._sent:
            pending.wait()
            if parts[0].dtype != sent[0].dtype:
                torch._foreach_copy_(parts, sent)
        self._sent.clear()

    def _send(self) -> None:
        """All buckets that are full, up to the first one that is not."""
        while self._next < len(self.plan.order) and not self._missing[index := self.plan.order[self._next]]:
            self._next += 1
            bucket, by_place = self.plan.buckets[index], self._parts[index]
            self._parts[index] = {}
            parts = [by_place[place] for place in sorted(by_place)]
            for stream in self._streams:  # gradients that were computed on another one; the host waits for nothing
                torch.cuda.current_stream(stream.device).wait_stream(stream)
            sent = [part.to(bucket.dtype) for part in parts]
            self._sent.append((all_reduce_coalesced(sent, bucket.axis), parts, sent))
