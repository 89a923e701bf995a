"""Plans of one histogram by several planners at several limits, timed and compared with the bound."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from time import perf_counter
from typing import Literal

import numpy as np
from numpy.typing import NDArray
from tqdm import tqdm

from tensor3d.packing import PLANNERS, LowerBound, Plan, Planner

ALL = "all"
DEPTHS: tuple[int | None, ...] = (2, 3, 4, 8, 12, 16, None)


@dataclass(frozen=True, kw_only=True)
class Row:
    """One plan."""

    method: str
    max_sequences: int | None
    """Sequences of a pack, at most; None: no limit but the capacity."""
    packs: int
    efficiency: float
    """Share of the token slots that hold a token, 0 to 1."""
    packing_factor: float
    """Sequences per pack, on average."""
    seconds: float
    """For planning alone, without what is computed once a process."""
    lower_bound_packs: int
    """Packs that no plan with this limit can do without."""
    lower_bound_kind: Literal["lp", "tokens"]


def planners_of(method: str) -> Mapping[str, Planner]:
    """Those that are asked for, by name. Raises ValueError for a name that there is not."""
    if method != ALL and method not in PLANNERS:
        raise ValueError(f"--method must be one of {', '.join(PLANNERS)}, or {ALL}. Got {method}.")
    return {name: planner for name, planner in PLANNERS.items() if method in (ALL, name)}


def measure(
    counts: NDArray[np.int64],
    capacity: int,
    planners: Mapping[str, Planner],
    depths: Sequence[int | None],
    *,
    skip_refusals: bool,
) -> list[Row]:
    """Plans with each planner at each limit.

    Args:
        counts: int64 (lengths,): sequences of each length.
        capacity: token slots of a pack.
        planners: by name.
        depths: limits on the sequences of a pack.
        skip_refusals: whether a method that refuses a limit is left out with a line on stderr, or ends the report.

    Raises:
        ValueError: what no planner takes, or what one of them refuses.
    """
    for planner in planners.values():
        # What is imported at the first call is not the planner's time.
        planner([0, 2, 1], 4, 2)
    rows = []
    with tqdm(total=len(depths) * len(planners), disable=None, file=sys.stderr, leave=False) as progress:
        for depth in depths:
            timed: dict[str, tuple[Plan, float]] = {}
            refusals: dict[str, ValueError] = {}
            for name, planner in planners.items():
                progress.set_description(f"{name}, {limit_text(depth)} sequences a pack")
                start = perf_counter()
                try:
                    timed[name] = planner(counts, capacity, depth), perf_counter() - start
                except ValueError as refusal:
                    refusals[name] = refusal
                progress.update()
            # What all refuse is no fault of a method.
            if refusals and (not skip_refusals or not timed):
                raise next(iter(refusals.values()))
            for name, reason in refusals.items():
                progress.write(f"left out: {name}, {limit_text(depth)} sequences a pack: {reason}", file=sys.stderr)
            rows += list(_rows(timed, depth))
    return rows


def limit_text(depth: int | None) -> str:
    return "any" if depth is None else str(depth)


def _rows(timed: Mapping[str, tuple[Plan, float]], depth: int | None) -> Iterator[Row]:
    bound = _bound([plan for plan, _ in timed.values()])
    for name, (plan, seconds) in timed.items():
        yield Row(
            method=name,
            max_sequences=depth,
            packs=plan.packs,
            efficiency=plan.efficiency,
            packing_factor=plan.packing_factor,
            seconds=seconds,
            lower_bound_packs=bound.packs,
            lower_bound_kind=bound.kind,
        )


def _bound(plans: Sequence[Plan]) -> LowerBound:
    """The bound of plans for the same sequences and limits: one that a planner found on its way costs nothing."""
    known = [plan.known_bound for plan in plans if plan.known_bound is not None]
    return max(known, key=lambda bound: bound.packs) if known else plans[0].lower_bound
