"""Random histograms and limits, and what every plan made of them must fulfil."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from tensor3d.packing import LowerBound, Plan

_CAPACITIES = (8, 16, 32, 64, 128, 256, 512)
_LARGEST = 10**9


@dataclass(frozen=True, kw_only=True, eq=False)
class Case:
    """What a planner is given."""

    histogram: NDArray[np.int64]
    capacity: int
    max_sequences: int | None
    budget: int | None
    costs: NDArray[np.int64] | None


def draw_case(rng: np.random.Generator) -> Case:
    """A capacity of 4 to 512, often a limit on sequences or a budget, and lengths of several shapes."""
    capacity = int(rng.integers(4, rng.choice(_CAPACITIES) + 1))
    max_sequences = None if rng.random() < 0.3 else int(rng.integers(1, 17))
    histogram = np.zeros(capacity + 1, dtype=np.int64)
    total = float(np.exp(rng.uniform(0, np.log(_LARGEST))))
    weights = _weights(capacity, rng)
    histogram[1:] = np.floor(weights / weights.sum() * total)
    # At least one sequence, and always one of the likeliest length.
    histogram[1 + int(weights.argmax())] += 1
    budget, costs = (None, None) if rng.random() < 0.5 else _budget(histogram, capacity, rng)
    return Case(histogram=histogram, capacity=capacity, max_sequences=max_sequences, budget=budget, costs=costs)


def _weights(capacity: int, rng: np.random.Generator) -> NDArray[np.float64]:
    """(capacity,): weights of the lengths from 1."""
    lengths = np.arange(1, capacity + 1)
    shape = rng.integers(5)
    if shape == 0:  # many short ones, a peak at full length
        weights = np.exp(-lengths / (capacity * rng.uniform(0.1, 1)))
        weights[-1] += weights.sum() * rng.uniform(0, 0.5)
    elif shape == 1:  # a skewed bell
        weights = np.exp(-((np.log(lengths) - rng.uniform(0, np.log(capacity))) ** 2) / rng.uniform(0.1, 2))
    elif shape == 2:  # a few lengths
        weights = np.zeros(capacity)
        weights[rng.integers(0, capacity, size=rng.integers(1, 9))] = rng.random()
    elif shape == 3:  # a range
        low, high = np.sort(rng.integers(0, capacity, size=2))
        weights = ((lengths > low) & (lengths <= high + 1)).astype(np.float64)
    else:  # noise with gaps
        weights = rng.random(capacity) * (rng.random(capacity) < rng.uniform(0.1, 1))
        weights[rng.integers(capacity)] += 0.1
    return np.asarray(weights, dtype=np.float64)


def _budget(histogram: NDArray[np.int64], capacity: int, rng: np.random.Generator) -> tuple[int, NDArray[np.int64]]:
    """A budget that every single sequence keeps, and costs: a share of the tokens, their square, or any at all."""
    lengths = np.arange(capacity + 1)
    costs = (
        np.maximum(1, np.rint(0.15 * lengths)),
        lengths**2,
        rng.integers(0, capacity, size=capacity + 1),
    )[rng.integers(3)].astype(np.int64)
    dearest = int(costs[np.flatnonzero(histogram)].max())
    return dearest + int(rng.integers(0, dearest + 2)), costs


def faults(plan: Plan, case: Case, bound: LowerBound) -> list[str]:
    """What is wrong with a plan; nothing, it is hoped. Not by the plan's own means, so that it is a check of them too.

    Args:
        bound: packs that no plan of this case can do without.
    """
    found = []
    held = np.zeros_like(case.histogram)
    packs = 0
    for strategy in plan.strategies:
        lengths = np.array(strategy.lengths)
        np.add.at(held, lengths, strategy.repeat)
        packs += strategy.repeat
        found += [f"{problem}: {strategy}" for problem in _pack_faults(lengths, case)]
    if (held != case.histogram).any():
        found.append(f"other sequences than given, at lengths {np.flatnonzero(held != case.histogram).tolist()}")
    if packs != plan.packs:
        found.append(f"{packs} packs, and says {plan.packs}")
    if packs < bound.packs:
        found.append(f"{packs} packs, below the bound of {bound}")
    return found


def _pack_faults(lengths: NDArray[np.int64], case: Case) -> Sequence[str]:
    found = []
    if lengths.sum() > case.capacity:
        found.append("over the capacity")
    if case.max_sequences is not None and len(lengths) > case.max_sequences:
        found.append("too many sequences")
    if case.budget is not None and case.costs is not None and case.costs[lengths].sum() > case.budget:
        found.append("over the budget")
    return found
