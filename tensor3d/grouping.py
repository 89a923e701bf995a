"""Sequences grouped by length class, so that each group is one batched attention with little padding.

The grouped attention of Zeng et al. 2022 (arXiv 2208.08124, §4.1) has fixed classes; here they are chosen for each
micro-batch, on the host, such that the padded area is least.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise

import numpy as np
import torch
from torch import Tensor

_MOST_GROUPS = 8
_GROUP_COST = 256.0  # of starting one more group, in score entries: what a few microseconds would compute


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
    _bands: dict[tuple[int, bool], Tensor] = field(default_factory=dict, repr=False, compare=False)
    """Masks of windows, once made."""

    def band(self, window: int, causal: bool) -> Tensor:
        """bool, True where a query (dim -2) sees a key (dim -1) that is less than `window` away; causal: not after it.

        Of shape (length, length), or (members, 1, length, length) where padded keys are to be hidden. Made once for
        all layers.
        """
        if (window, causal) not in self._bands:
            self._bands[window, causal] = self._made_band(window, causal)
        return self._bands[window, causal]

    def _made_band(self, window: int, causal: bool) -> Tensor:
        places = torch.arange(self.length, device=self.device)
        distance = places[:, None] - places
        if causal:  # padding stands at the end, where no real row looks
            return (distance >= 0) & (distance < window)
        near = distance.abs() < window
        # A slot of padding sees itself: what a row without any key gives is up to the kernel, and may be nan, in
        # gradients of the others too.
        return near if self.mask is None else (near & self.mask) | (distance == 0)

    @property
    def slots(self) -> int:
        return len(self.members) * self.length


@dataclass(frozen=True, kw_only=True)
class Grouping:
    """All groups, and the way there and back: `rows[gather]` are the groups' slots, `slots[restore]` the rows."""

    groups: tuple[LengthGroup, ...]
    gather: Tensor | None
    """int64 (slots,): the row of each slot; padding repeats its sequence's first row. None: the rows as they are."""
    restore: Tensor | None
    """int64 (rows,): the slot of each row."""


def group_by_length(lengths: Sequence[int], starts: Sequence[int], device: torch.device) -> Grouping:
    """Groups sequences of `lengths` that begin at rows `starts`."""
    sizes, order = np.asarray(lengths, dtype=np.int64), np.argsort(np.asarray(lengths), kind="stable")
    groups, gather, restore, slot = [], [], np.empty(int(sizes.sum()), dtype=np.int64), 0
    for members in _classes(sizes[order]):
        chosen = order[members]
        longest = int(sizes[chosen].max())
        offsets = np.arange(longest)
        real = offsets < sizes[chosen, None]
        rows = np.asarray(starts, dtype=np.int64)[chosen, None] + np.where(real, offsets, 0)
        restore[rows[real]] = slot + np.flatnonzero(real)
        gather.append(rows.reshape(-1))
        slot += rows.size
        mask = None if real.all() else torch.from_numpy(real)[:, None, None, :].to(device, non_blocking=True)
        groups.append(LengthGroup(members=tuple(int(i) for i in chosen), length=longest, mask=mask, device=device))
    slots = np.concatenate(gather) if gather else np.empty(0, dtype=np.int64)
    if np.array_equal(slots, np.arange(len(slots))):
        return Grouping(groups=tuple(groups), gather=None, restore=None)
    return Grouping(
        groups=tuple(groups),
        gather=torch.from_numpy(slots).to(device, non_blocking=True),
        restore=torch.from_numpy(restore).to(device, non_blocking=True),
    )


def _classes(ascending: np.ndarray) -> list[slice]:
    """Cuts lengths in ascending order into classes: least sum of members * longest**2, by dynamic programming."""
    if len(ascending) == 0:
        return []
    values, counts = np.unique(ascending, return_counts=True)
    before = np.concatenate([[0], np.cumsum(counts)]).astype(np.float64)
    square = values.astype(np.float64) ** 2
    # cost[i, j]: distinct lengths i..j in one class
    cost = (before[None, 1:] - before[:-1, None]) * square[None, :] + _GROUP_COST
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
