"""Packing one batch, for fine-tuning and inference, and putting the results back into the order of the sequences."""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from typing import Any, TypeVar, overload

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from tensor3d.packing.assign import PackAssignment
from tensor3d.packing.limits import MAX_CAPACITY, Limits
from tensor3d.packing.plan import PackingPlan
from tensor3d.packing.planners import lpfhp
from tensor3d.packing.stream import StreamPacker

Item = TypeVar("Item")
Scalar = TypeVar("Scalar", bound=np.generic)
_GOOD_ENOUGH = 400
"""One pack in this many above the bound is not worth a second attempt."""


def pack_batch(
    lengths: Sequence[int] | NDArray[np.integer],
    capacity: int,
    max_sequences: int | None = None,
    *,
    budget: int | None = None,
    costs: Sequence[int] | NDArray[np.integer] | None = None,
    multiple_of: int = 1,
) -> PackAssignment:
    """Packs the sequences of one batch, where there is no time for a plan and no corpus to plan for.

    Best fit, longest first; where that leaves something to gain (often because of `max_sequences`), also as
    `StreamPacker` does it, and the fewer packs are taken. The result is a function of the arguments alone. In
    fine-tuning and inference (Krell et al., 2021, arXiv 2107.02027) a batch is packed, computed, and its results are
    put back with `restore_order`.

    Args:
        lengths: whole numbers (sequences,): tokens of each sequence.
        capacity: token slots of a pack.
        max_sequences: sequences of a pack, at most. None: no limit but the capacity.
        budget: a second limit: the sum of the costs over a pack, at most.
        costs: whole numbers (capacity + 1 or more,): cost of a sequence by length.
        multiple_of: the number of packs is rounded up to a multiple of this by empty packs at the end, as a cube asks
            for that deals them to its ranks evenly.

    Raises:
        ValueError: no sequence, lengths that do not fit, a multiple below 1, or see `Limits`.
    """
    if not isinstance(multiple_of, int) or multiple_of < 1:
        raise ValueError(f"multiple_of must be a whole number, at least 1. Got {multiple_of!r}.")
    limits = Limits.of(capacity, max_sequences, budget=budget, costs=costs)
    lengths = _checked(lengths, limits)
    plan = lpfhp(np.bincount(lengths), capacity, max_sequences, budget=budget, costs=costs)
    packs = _by_plan(plan, lengths)
    bound = _pack_bound(lengths, limits)
    if plan.packs - bound > bound // _GOOD_ENOUGH:
        packer = StreamPacker(capacity, max_sequences, budget=budget, costs=costs)
        other = packer.feed(lengths) + packer.flush()
        if len(other) < plan.packs:
            packs = PackAssignment.of(other)
    empty = -len(packs) % multiple_of
    return PackAssignment(offsets=np.pad(packs.offsets, (0, empty), mode="edge"), sequences=packs.sequences)


@overload
def restore_order(packs: PackAssignment, values: Tensor) -> Tensor: ...
@overload
def restore_order(packs: PackAssignment, values: NDArray[Scalar]) -> NDArray[Scalar]: ...
@overload
def restore_order(packs: PackAssignment, values: list[Item]) -> list[Item]: ...
def restore_order(packs: PackAssignment, values: Any) -> Any:
    """Puts one value a sequence, in the order of the packs, back into the order in which the sequences were given.

    Args:
        packs: as `pack_batch` or `assign` returned them.
        values: a tensor or an array (sequences, ...) or a list: first those of pack 0, in the order of its sequences,
            then those of pack 1, and so on. Unused slots must have been dropped.

    Returns:
        The same kind; entry `i` belongs to sequence `i`. Of a tensor it is differentiable.

    Raises:
        ValueError: not one value for each sequence.
    """
    count = len(packs.sequences)
    if len(values) != count:
        raise ValueError(
            f"{count} sequences need {count} values, one each, in the order of the packs. Got {len(values)}. "
            "Drop the values of unused slots."
        )
    place = np.empty(count, dtype=np.int64)
    place[packs.sequences] = np.arange(count)
    if isinstance(values, list):
        return [values[i] for i in place.tolist()]
    if isinstance(values, Tensor):
        return values[torch.from_numpy(place).to(values.device)]
    return np.asarray(values)[place]


def _checked(lengths: Sequence[int] | NDArray[np.integer], limits: Limits) -> NDArray[np.int64]:
    array = np.asarray(lengths)
    if array.ndim == 1 and not len(array):
        raise ValueError("there is no sequence to pack. Got no length.")
    if array.ndim != 1 or not np.issubdtype(array.dtype, np.integer):
        raise ValueError(
            f"lengths are a one-dimensional array of whole numbers. Got {array.dtype}, shape {array.shape}."
        )
    if array.min() < 1 or array.max() > limits.capacity:
        sequence = int(np.flatnonzero((array < 1) | (array > limits.capacity))[0])
        raise ValueError(
            f"a length must lie between 1 and the capacity of {limits.capacity}. Got {array[sequence]} for sequence "
            f"{sequence}. Truncate the sequences or raise the capacity."
        )
    return array.astype(np.int64)


def _pack_bound(lengths: NDArray[np.int64], limits: Limits) -> int:
    """Packs that are needed in any case: for the tokens, for the sequences, for those longer than half a pack."""
    tokens, long = int(lengths.sum()), int((2 * lengths > limits.capacity).sum())
    return max(-(-tokens // limits.capacity), -(-len(lengths) // limits.max_sequences), long)


def _by_plan(plan: PackingPlan, lengths: NDArray[np.int64]) -> PackAssignment:
    """The n-th slot of a length gets the n-th sequence of that length."""
    sizes = np.repeat([len(each.lengths) for each in plan.strategies], [each.repeat for each in plan.strategies])
    slots = np.concatenate([np.tile(each.lengths, each.repeat) for each in plan.strategies])
    sequences = np.empty(len(lengths), dtype=np.int64)
    sequences[np.argsort(slots, kind="stable")] = np.argsort(lengths, kind="stable")
    offsets = np.concatenate(([0], np.cumsum(sizes, dtype=np.int64)))
    return PackAssignment(offsets=offsets, sequences=sequences)


# --- Packing a batch into a given number of packs, as small as they can be --------------------------------------------

_TRIES = 7
"""Capacities that are tried, as Coffman et al. propose."""
_EVEN_ENOUGH = 200
"""A capacity one in this many above the bound is not worth a further attempt."""


def pack_evenly(
    lengths: Sequence[int] | NDArray[np.integer], packs: int, *, multiple_of: int = 1
) -> tuple[int, PackAssignment]:
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

    lower = -(-_capacity_bound(array, packs) // multiple_of)
    best, load = _least_loaded(array, packs)
    upper = -(-load // multiple_of)
    for attempt in range(_TRIES):
        if upper - lower <= lower // _EVEN_ENOUGH or lower * multiple_of > MAX_CAPACITY:
            break
        # The bound itself first: with many sequences it is often met.
        middle = lower if attempt == 0 else (lower + upper) // 2
        found = pack_batch(array, middle * multiple_of, multiple_of=packs)
        if len(found) == packs:
            best, upper = found, middle
        else:
            lower = middle + 1
    return upper * multiple_of, best


def _capacity_bound(lengths: NDArray[np.integer], packs: int) -> int:
    """Slots that a pack needs in any case: for the tokens, and for k+1 of the k*packs+1 longest sequences."""
    before = np.concatenate(([0], np.cumsum(np.sort(lengths)[::-1], dtype=np.int64)))
    k = np.arange((len(lengths) - 1) // packs + 1)
    shared = before[k * packs + 1] - before[k * packs - k]
    return max(-(-int(lengths.sum()) // packs), int(shared.max()))


def _least_loaded(lengths: NDArray[np.integer], packs: int) -> tuple[PackAssignment, int]:
    """Each sequence in the pack with the fewest tokens, longest first; and the most tokens of a pack."""
    loads = [(0, pack) for pack in range(packs)]
    members: list[list[int]] = [[] for _ in range(packs)]
    for sequence in np.argsort(-lengths, kind="stable").tolist():
        load, pack = loads[0]
        members[pack].append(sequence)
        heapq.heapreplace(loads, (load + int(lengths[sequence]), pack))
    return PackAssignment.of(members), max(loads)[0]
