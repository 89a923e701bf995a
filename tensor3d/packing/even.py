"""Packing a batch into a given number of packs, as small as they can be."""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from tensor3d.packing.assign import Packs
from tensor3d.packing.batch import pack_batch
from tensor3d.packing.limits import MAX_CAPACITY

_TRIES = 7
"""Capacities that are tried, as Coffman et al. propose."""
_GOOD_ENOUGH = 200
"""A capacity one in this many above the bound is not worth a further attempt."""


def pack_evenly(lengths: Sequence[int] | NDArray[np.integer], packs: int, *, multiple_of: int = 1) -> tuple[int, Packs]:
    """A batch in no more than `packs` packs of the smallest capacity that is found; empty ones at the end.

    Where a step works on one batch at a time, as in fine-tuning and inference: each rank gets one pack, and all are as
    full as they can be. Each sequence to the pack that has the least so far, longest first (Graham 1969: at most 4/3 of
    the least capacity); where that leaves something to gain, `pack_batch` with capacities between it and a lower bound,
    halving the interval (MULTIFIT; Coffman, Garey and Johnson 1978). The result is a function of the arguments alone.

    Args:
        lengths: whole numbers (sequences,): tokens of each sequence.
        packs: how many packs there are to be.
        multiple_of: the capacity is a multiple of it.

    Returns:
        The capacity, and the packs.

    Raises:
        ValueError: no sequence, one without tokens, or a number below 1.
    """
    if packs < 1 or multiple_of < 1:
        raise ValueError(f"packs and multiple_of must be at least 1. Got {packs} and {multiple_of}.")
    array = np.asarray(lengths)
    if array.ndim != 1 or not array.size or array.min() < 1 or not np.issubdtype(array.dtype, np.integer):
        pack_batch(array, max(1, int(array.max(initial=1))))  # refuses it in its own words

    lower = -(-_bound(array, packs) // multiple_of)
    best, load = _least_loaded(array, packs)
    upper = -(-load // multiple_of)
    for attempt in range(_TRIES):
        if upper - lower <= lower // _GOOD_ENOUGH or lower * multiple_of > MAX_CAPACITY:
            break
        # The bound itself first: with many sequences it is often met.
        middle = lower if attempt == 0 else (lower + upper) // 2
        found = pack_batch(array, middle * multiple_of, multiple_of=packs)
        if len(found) == packs:
            best, upper = found, middle
        else:
            lower = middle + 1
    return upper * multiple_of, best


def _bound(lengths: NDArray[np.integer], packs: int) -> int:
    """Slots that a pack needs in any case: for the tokens, and for k+1 of the k*packs+1 longest sequences."""
    before = np.concatenate(([0], np.cumsum(np.sort(lengths)[::-1], dtype=np.int64)))
    k = np.arange((len(lengths) - 1) // packs + 1)
    shared = before[k * packs + 1] - before[k * packs - k]
    return max(-(-int(lengths.sum()) // packs), int(shared.max()))


def _least_loaded(lengths: NDArray[np.integer], packs: int) -> tuple[Packs, int]:
    """Each sequence in the pack with the fewest tokens, longest first; and the most tokens of a pack."""
    loads = [(0, pack) for pack in range(packs)]
    members: list[list[int]] = [[] for _ in range(packs)]
    for sequence in np.argsort(-lengths, kind="stable").tolist():
        load, pack = loads[0]
        members[pack].append(sequence)
        heapq.heapreplace(loads, (load + int(lengths[sequence]), pack))
    sizes = np.cumsum([0, *map(len, members)], dtype=np.int64)
    sequences = np.empty(len(lengths), dtype=np.int64)
    for (first, last), of_pack in zip(pairwise(sizes.tolist()), members, strict=True):
        sequences[first:last] = of_pack
    return Packs(offsets=sizes, sequences=sequences), max(loads)[0]
