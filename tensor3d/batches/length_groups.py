"""Sequences grouped by length class, so that each group is one batched attention with little padding.

The grouped attention of Zeng et al. 2022 (arXiv 2208.08124, §4.1) has fixed classes; here they are chosen for each
micro-batch, on the host, such that the padded area is least. On a CPU, where a call is cheap beside what it computes,
sequences that are long enough attend one by one instead, where they lie: what classes cost is the way there and back.

Where a window hides most of a long sequence, it goes into classes in blocks (as the chunks of Beltagy et al. 2020,
arXiv 2004.05150, §3.1): some rows that ask, and those around them that they may see. What is computed and kept grows
with the rows then, not with their square.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import pairwise
from typing import Any, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

Numbers = NDArray[np.int64]
T = TypeVar("T")

_MOST_GROUPS = 8
_SMALLEST_BLOCK = 64
# Of starting one more group, in score entries. On a CPU: what a few microseconds compute. On a GPU: what it computes in
# some fifty, which launching a group's kernels takes, there and back (an estimate: no GPU has measured it yet).
_GROUP_COST, _GROUP_COST_ON_GPU = 256.0, 2.0**19
# In score entries, on a CPU, there and back: a call; and a row that goes to a slot and returns.
_CALL_COST, _SLOT_COST = 4096.0, 80.0


@dataclass(frozen=True, kw_only=True)
class LengthGroup:
    """Sequences that are padded to one length and attend in one batch."""

    members: tuple[int, ...]
    """Which sequences."""
    length: int
    """Slots of each member: its longest member's length."""
    mask: Tensor | None
    """bool (members, 1, 1, length), True at real keys; None where nothing is padded."""
    device: torch.device
    asked: int | None = None
    """Slots of each member for rows that ask, where only some do; None: all do."""
    places: Tensor | None = None
    """int64 (members, asked): the place of each of these in its sequence; padding repeats the first."""
    _made: dict[Hashable, Any] = field(default_factory=dict, repr=False, compare=False)
    """Masks of windows and the like."""

    def once(self, key: Hashable, make: Callable[[], T]) -> T:
        """What `make` gave when it was first asked for by this key: all layers ask for the same."""
        if key not in self._made:
            self._made[key] = make()
        made: T = self._made[key]
        return made

    def masking(self, window: int | None, causal: bool) -> tuple[Tensor | None, bool]:
        """The mask that hides from real queries what they must not see, if there is one; and whether, instead, the
        kernel is to hide what comes after a query."""
        near = window is None or window >= self.length
        if self.places is not None:
            return (self.mask if near and not causal else self.band(None if near else window, causal)), False
        if not near:
            return self.band(window, causal), False
        # Padding stands at the end, so a causal mask alone already hides it from real rows.
        return (None, True) if causal else (self.mask, False)

    def band(self, window: int | None, causal: bool) -> Tensor:
        """bool, True where a query (dim -2) sees a key (dim -1) that is less than `window` away; causal: not after it.

        Of shape (length, length), or (members, 1, length, length) where padded keys are to be hidden, or
        (members, 1, asked, length) where some rows ask. Made once for all layers.
        """
        return self.once(("band", window, causal), lambda: self._made_band(window, causal))

    @property
    def distances(self) -> Tensor:
        """int64 (length, length), or (members, 1, asked, length) where some rows ask: how far before its query (dim
        -2) a key (dim -1) is."""
        keys = torch.arange(self.length, device=self.device)
        return (keys[:, None] if self.places is None else self.places[:, None, :, None]) - keys

    def _made_band(self, window: int | None, causal: bool) -> Tensor:
        distance = self.distances
        near = distance.abs() < (self.length if window is None else window)
        if causal:  # padding stands at the end, where no real row looks
            return near & (distance >= 0)
        # A slot of padding sees itself: what a row without any key gives is up to the kernel, and may be nan, in
        # gradients of the others too.
        return near if self.mask is None else (near & self.mask) | (distance == 0)

    @property
    def slots(self) -> int:
        return len(self.members) * self.length

    @property
    def asking_slots(self) -> int:
        return len(self.members) * (self.length if self.asked is None else self.asked)


@dataclass(frozen=True, kw_only=True)
class LengthGroups:
    """All groups, and the way there and back: `rows[gather]` are the groups' slots, `slots[restore]` the rows."""

    groups: tuple[LengthGroup, ...]
    gather: Tensor | None
    """int64 (slots,): the row of each slot; padding repeats its sequence's first row. None: the rows as they are."""
    restore: Tensor | None
    """int64 (rows,): the slot of each row. Where some rows ask, (R,): the slot of each of them, and one slot beyond the
    last for those that are not used."""
    ask: Tensor | None = None
    """int64 (asking slots,), where some rows ask: which of them each slot holds; padding repeats its member's first."""

    @cached_property
    def restore_each(self) -> Tensor:
        """int64 (3 * rows,): of all slots three times, one after another, each row's slot in each. Made once for all
        layers, on the device."""
        assert self.gather is not None, "rows that stay as they lie have no way back"
        assert self.restore is not None, "there is a way back from a gather"
        return torch.cat([self.restore + number * len(self.gather) for number in range(3)])


def group_by_length(lengths: Sequence[int], starts: Sequence[int], device: torch.device) -> LengthGroups:
    """Groups sequences of `lengths` that begin at rows `starts`."""
    sizes, order = np.asarray(lengths, dtype=np.int64), np.argsort(np.asarray(lengths), kind="stable")
    classes = [order[part] for part in _classes(sizes[order], sizes[order], device)]
    runs = _runs(sizes)
    if _as_they_lie(classes, runs, sizes, sizes, device):
        return LengthGroups(groups=tuple(_group(sizes, run, device) for run in runs), gather=None, restore=None)
    groups, gather, restore, slot = [], [], np.empty(int(sizes.sum()), dtype=np.int64), 0
    for members in classes:
        rows, real = _laid(np.asarray(starts, dtype=np.int64)[members], sizes[members])
        restore[rows[real]] = slot + np.flatnonzero(real)
        gather.append(rows.reshape(-1))
        slot += rows.size
        groups.append(_group(sizes, members, device))
    return LengthGroups(
        groups=tuple(groups), gather=_sent(np.concatenate(gather), device), restore=_sent(restore, device)
    )


def group_queries(
    lengths: Sequence[int],
    starts: Sequence[int],
    rows: Numbers,
    device: torch.device,
    *,
    window: int | None = None,
    causal: bool = False,
) -> LengthGroups:
    """Groups the sequences in which rows ask. Others have no slot, or, where sequences stay as they lie, no query.

    Args:
        rows: int64 (R,), which rows ask; -1: a slot that is not used.
        window, causal: one by which sequences are cut into blocks, each a member like a sequence. None: they are whole.
    """
    sizes, firsts = np.asarray(lengths, dtype=np.int64), np.asarray(starts, dtype=np.int64)
    begins = firsts  # the first row of each that asks, if all do
    if window is not None:
        sizes, firsts, begins = _cut(sizes, firsts, window, causal)
    asking = np.flatnonzero(rows >= 0)
    asking = asking[np.argsort(rows[asking], kind="stable")]
    counts = np.bincount(np.searchsorted(begins, rows[asking], side="right") - 1, minlength=len(sizes))
    before = np.cumsum(counts) - counts
    order = np.lexsort((counts, sizes))
    order = order[counts[order] > 0]
    classes = [order[part] for part in _classes(sizes[order], counts[order], device)]
    alone = list(np.arange(len(sizes))[:, None])
    gathered = window is not None or not _as_they_lie(classes, alone, sizes, counts, device)
    groups, gather, ask, restore, slot = [], [_NONE], [_NONE], np.empty(len(rows), dtype=np.int64), 0
    for members in classes if gathered else alone:
        gather.append(_laid(firsts[members], sizes[members])[0].reshape(-1))
        chosen, wanted = _laid(before[members], counts[members])
        restore[asking[chosen[wanted]]] = slot + np.flatnonzero(wanted)
        ask.append(asking[chosen].reshape(-1))
        slot += chosen.size
        places = rows[asking[chosen]] - firsts[members, None]
        groups.append(_group(sizes, members, device, chosen.shape[1], _sent(places, device)))
    restore[rows < 0] = slot
    return LengthGroups(
        groups=tuple(groups),
        gather=_sent(np.concatenate(gather), device) if gathered else None,
        restore=_sent(restore, device),
        ask=_sent(np.concatenate(ask), device),
    )


def is_cut(longest: int, window: int) -> bool:
    """Whether a window is narrow enough for sequences of this length to go in blocks: less than half is computed."""
    return longest > 2 * (_block(window) + 2 * (window - 1))


def _block(window: int) -> int:
    """Rows of a block: as many as it sees to each side of itself, and enough for one product."""
    return max(_SMALLEST_BLOCK, window - 1)


def _cut(sizes: Numbers, firsts: Numbers, window: int, causal: bool) -> tuple[Numbers, Numbers, Numbers]:
    """Of the blocks of all sequences, short ones of which are one: how many rows each sees, the first of these, and the
    first of those that ask in it."""
    block, near = _block(window), window - 1
    counts = np.where(sizes > block + 2 * near, -(-sizes // block), 1)
    own = np.repeat(np.arange(len(sizes)), counts)
    number = np.arange(len(own)) - np.repeat(np.cumsum(counts) - counts, counts)
    low, length, whole = number * block, sizes[own], counts[own] == 1
    first = np.maximum(0, low - near)
    last = np.where(whole, length, np.minimum(length, low + block + (0 if causal else near)))
    return last - first, firsts[own] + first, firsts[own] + low


def _group(
    sizes: Numbers, members: Numbers, device: torch.device, asked: int | None = None, places: Tensor | None = None
) -> LengthGroup:
    longest = int(sizes[members].max())
    real = np.arange(longest) < sizes[members, None]
    mask = None if real.all() else torch.from_numpy(real)[:, None, None, :].to(device, non_blocking=True)
    return LengthGroup(
        members=tuple(members.tolist()), length=longest, mask=mask, device=device, asked=asked, places=places
    )


def _runs(sizes: Numbers) -> list[Numbers]:
    """Neighbours of equal length."""
    return np.split(np.arange(len(sizes)), np.flatnonzero(np.diff(sizes)) + 1) if len(sizes) else []


def _as_they_lie(
    classes: list[Numbers], runs: list[Numbers], sizes: Numbers, asked: Numbers, device: torch.device
) -> bool:
    """Whether sequences are better taken in `runs`, where they lie, than brought into classes."""
    if len(classes) == len(runs) and all(map(np.array_equal, classes, runs)):
        return True

    def cost(groups: list[Numbers], of_slot: float) -> float:
        slots = [len(members) * int(sizes[members].max()) for members in groups]
        area = sum(count * int(asked[members].max()) for count, members in zip(slots, groups, strict=True))
        return area + _CALL_COST * len(groups) + of_slot * sum(slots)

    return device.type == "cpu" and cost(runs, 0.0) <= cost(classes, _SLOT_COST)


_NONE = np.empty(0, dtype=np.int64)


def _laid(first: Numbers, sizes: Numbers) -> tuple[Numbers, NDArray[np.bool_]]:
    """Numbers from `first` on, a row for each member, as many as the longest has; and which of them are not padding,
    which repeats the first."""
    offsets = np.arange(int(sizes.max()))
    real = offsets < sizes[:, None]
    return first[:, None] + np.where(real, offsets, 0), real


def _sent(numbers: Numbers, device: torch.device) -> Tensor:
    return torch.from_numpy(numbers).to(device, non_blocking=True)


def _classes(ascending: Numbers, asked: Numbers, device: torch.device) -> list[slice]:
    """Cuts sequences in ascending order of length into classes, by dynamic programming: least sum of
    members * longest * most rows that ask, and of what groups cost to start.

    Args:
        ascending: of each sequence, its rows.
        asked: of each sequence, its rows that ask.
    """
    if len(ascending) == 0:
        return []
    values, first, counts = np.unique(ascending, return_index=True, return_counts=True)
    before = np.concatenate([[0], np.cumsum(counts)]).astype(np.float64)
    # most[i, j]: rows that ask of any sequence of the distinct lengths i..j
    most = np.triu(np.broadcast_to(np.maximum.reduceat(asked, first), (len(values), len(values)))).astype(np.float64)
    most = np.maximum.accumulate(most, 1)
    # cost[i, j]: distinct lengths i..j in one class
    cost = (before[None, 1:] - before[:-1, None]) * values[None, :] * most
    cost += _GROUP_COST if device.type == "cpu" else _GROUP_COST_ON_GPU
    cost[np.tril_indices(len(values), -1)] = np.inf
    best, cuts = cost[0], []
    for _ in range(min(_MOST_GROUPS, len(values)) - 1):
        # with one class more: the last one is i..j, the others end before i
        options = np.concatenate([[np.inf], best[:-1]])[:, None] + cost
        options[0] = best  # or as many classes as before
        cuts.append(options.argmin(0))
        best = options.min(0)
    bounds, last = [len(values)], len(values) - 1
    for cut in reversed(cuts):
        if last >= 0 and cut[last] > 0:
            bounds.append(int(cut[last]))
            last = int(cut[last]) - 1
    bounds.append(0)
    edges = [int(before[bound]) for bound in reversed(bounds)]
    return [slice(start, stop) for start, stop in pairwise(edges)]
