"""What a planner returns: how many packs of which lengths."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from tensor3d.files import draft, read_file, what_is_wrong
from tensor3d.packing.column_generation import MAX_SIZE, LPRelaxation, size_of, solve
from tensor3d.packing.limits import Limits, has_scipy

# --- How many packs a set of sequences needs at least -----------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class LowerBound:
    """Packs that no plan can do without."""

    packs: int
    kind: Literal["lp", "tokens"]
    """lp: of the linear programme over all ways to fill a pack. tokens: what is needed, were sequences divisible."""


def token_bound(counts: dict[int, int], limits: Limits) -> LowerBound:
    """Packs that tokens, sequences or costs need, were sequences divisible."""
    tokens = sum(length * count for length, count in counts.items())
    needs = [-(-tokens // limits.capacity), -(-sum(counts.values()) // limits.max_sequences)]
    if limits.budget:
        cost = sum(limits.cost_of(length) * count for length, count in counts.items())
        needs.append(-(-cost // limits.budget))
    return LowerBound(packs=max(needs), kind="tokens")


def lp_bound(counts: dict[int, int], limits: Limits, relaxation: LPRelaxation) -> LowerBound:
    """The bound of a solution of the linear programme."""
    # The programme knows more than the token bound, but its generation may have ended early.
    return LowerBound(packs=max(relaxation.bound, token_bound(counts, limits).packs), kind="lp")


def lower_bound(histogram: NDArray[np.integer] | Sequence[int], limits: Limits) -> LowerBound:
    """The best bound there is: of the linear programme, or the token bound where that is too large or scipy is missing.

    Raises:
        ValueError: see `Limits.counts`.
    """
    counts = limits.counts(histogram)
    if size_of(counts, limits) > MAX_SIZE or not has_scipy():
        return token_bound(counts, limits)
    return lp_bound(counts, limits, solve(counts, limits))


# --- What a planner returns -------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class PackPattern:
    """One way to fill a pack, and how many packs are filled that way."""

    lengths: tuple[int, ...]
    """Tokens of each sequence in the pack, longest first."""
    repeat: int
    """Packs filled this way, at least 1."""


@dataclass(frozen=True, kw_only=True)
class PackingPlan:
    """All packs of a set of sequences. It speaks of lengths only; `assign` chooses the sequences.

    Raises:
        ValueError: no strategy, one without sequence or repeat, one not in order, or one that breaks the limits.
    """

    limits: Limits
    """Of every pack."""
    strategies: tuple[PackPattern, ...]
    known_bound: LowerBound | None = field(default=None, compare=False, repr=False)
    """The bound that a planner has found on its way; None: `lower_bound` is computed when it is asked for."""

    def __post_init__(self) -> None:
        if not self.strategies:
            raise ValueError("a plan needs at least one strategy. Got none.")
        for strategy in self.strategies:
            if strategy.repeat < 1:
                raise ValueError(f"a strategy is repeated at least once. Got {strategy}.")
            if not strategy.lengths or list(strategy.lengths) != sorted(strategy.lengths, reverse=True):
                raise ValueError(f"a strategy names the lengths of a pack, longest first. Got {strategy.lengths}.")
            self.limits.check_pack(strategy.lengths)

    @classmethod
    def of(
        cls, limits: Limits, repeats: Mapping[tuple[int, ...], int], known_bound: LowerBound | None = None
    ) -> PackingPlan:
        """A plan of `repeats[lengths]` packs each, strategies in descending order; those of no pack are left out."""
        strategies = (
            PackPattern(lengths=lengths, repeat=repeats[lengths])
            for lengths in sorted(repeats, reverse=True)
            if repeats[lengths]
        )
        return cls(limits=limits, strategies=tuple(strategies), known_bound=known_bound)

    @property
    def capacity(self) -> int:
        """Token slots of a pack."""
        return self.limits.capacity

    @cached_property
    def packs(self) -> int:
        return sum(strategy.repeat for strategy in self.strategies)

    @cached_property
    def sequences(self) -> int:
        return sum(strategy.repeat * len(strategy.lengths) for strategy in self.strategies)

    @cached_property
    def tokens(self) -> int:
        return sum(strategy.repeat * sum(strategy.lengths) for strategy in self.strategies)

    @property
    def efficiency(self) -> float:
        """Share of the token slots that hold a token, 0 to 1."""
        return self.tokens / (self.packs * self.capacity)

    @property
    def packing_factor(self) -> float:
        """Sequences per pack, on average."""
        return self.sequences / self.packs

    @cached_property
    def lower_bound(self) -> LowerBound:
        """Packs that no plan of these sequences in these limits can do without; the first call may take seconds."""
        return self.known_bound or lower_bound(self.histogram(), self.limits)

    def histogram(self) -> NDArray[np.int64]:
        """int64 (capacity + 1,): sequences of each length, as the planner was given them."""
        counts = np.zeros(self.capacity + 1, dtype=np.int64)
        for strategy in self.strategies:
            np.add.at(counts, list(strategy.lengths), strategy.repeat)
        return counts

    def check(self, histogram: NDArray[np.integer] | Sequence[int]) -> None:
        """Checks that the plan holds exactly these sequences. That its packs keep the limits is certain.

        Args:
            histogram: whole numbers (lengths,); `histogram[i]` sequences have `i` tokens.

        Raises:
            ValueError: it does not; or see `Limits.counts`.
        """
        counts = self.limits.counts(histogram)
        own = self.histogram()
        for length in range(1, self.capacity + 1):
            if own[length] != counts.get(length, 0):
                raise ValueError(
                    f"the plan holds {own[length]} sequences of length {length}. Got {counts.get(length, 0)}; "
                    "plan again with the histogram of these lengths."
                )


# --- Plan files: a plan and what it was made for, as JSON -------------------------------------------------------------

_FORMAT = "tensor3d packing plan"
_VERSION = 1
_FIELDS = {"version", "fingerprint", "limits", "totals", "bound", "strategies"}


def fingerprint_of(histogram: NDArray[np.integer] | Sequence[int], limits: Limits, planner: str) -> str:
    """64 hexadecimal digits that change with anything a plan depends on.

    Args:
        histogram: whole numbers (lengths,); zeros at its end change nothing.
        limits: those that the planner is given.
        planner: its name.

    Raises:
        ValueError: see `Limits.counts`.
    """
    counts = sorted(limits.counts(histogram).items())
    return _digest({"planner": planner, "limits": limits.to_json(), "counts": counts})


def save_plan(plan: PackingPlan, path: Path | str, fingerprint: str) -> None:
    """Writes a plan beside `path` and renames it: the file is there whole or not at all.

    A bound that the planner knew goes with it; none is computed for this.

    Args:
        fingerprint: of what the plan was made for (`fingerprint_of`, or a text of the caller's own).
    """
    path = Path(path)
    content = {
        "version": _VERSION,
        "fingerprint": fingerprint,
        "limits": plan.limits.to_json(),
        "totals": _totals(plan),
        "bound": None if plan.known_bound is None else vars(plan.known_bound),
        "strategies": [[strategy.repeat, *strategy.lengths] for strategy in plan.strategies],
    }
    whole = {"format": _FORMAT, "digest": _digest(content), **content}
    with draft(path) as file:
        file.write(json.dumps(whole, separators=(",", ":")).encode() + b"\n")


def load_plan(path: Path | str, fingerprint: str) -> PackingPlan:
    """Reads a plan that was made for `fingerprint`.

    Raises:
        ValueError: the file is damaged, cut off, something else, of a newer version, or its plan is for something else;
            names the file and, in the last case, both fingerprints.
        OSError: it cannot be read at all.
    """
    path = Path(path)
    try:
        content = json.loads(read_file(path))
    except (ValueError, RecursionError) as problem:
        raise ValueError(f"{path} is damaged or no plan file: {problem}. Delete it and plan again.") from None
    if not isinstance(content, dict) or content.pop("format", None) != _FORMAT:
        raise ValueError(f"{path} is no plan file: it does not say that its format is {_FORMAT!r}.")
    version = content.get("version")
    if version != _VERSION:
        raise ValueError(
            f"{path} is a plan file of version {version!r}, and this program reads {_VERSION}. "
            "Update tensor3d, or delete the file and plan again."
        )
    if content.pop("digest", None) != _digest(content) or set(content) != _FIELDS:
        raise ValueError(f"{path} is damaged: its digest is not that of its content. Delete it and plan again.")
    if content["fingerprint"] != fingerprint:
        raise ValueError(
            f"{path} holds a plan for other data, limits or planner: its fingerprint is {content['fingerprint']}. "
            f"Needed is {fingerprint}. Delete the file and plan again."
        )
    try:
        return _plan_from_json(content)
    except (ValueError, TypeError, KeyError, IndexError) as problem:
        raise ValueError(f"{path} holds no valid plan: {what_is_wrong(problem)}. Delete it and plan again.") from None


def _plan_from_json(content: dict[str, Any]) -> PackingPlan:
    limits, bound = content["limits"], content["bound"]
    numbers = [number for row in content["strategies"] for number in row]
    if not all(type(number) is int for number in [*numbers, *([] if bound is None else [bound["packs"]])]):
        raise ValueError("a length, a repeat count or its lower bound is no whole number")
    if bound is not None and (bound["packs"] < 1 or bound["kind"] not in ("lp", "tokens")):
        raise ValueError(f"{bound} is no lower bound")
    plan = PackingPlan(
        limits=Limits(**{**limits, "costs": None if limits["costs"] is None else tuple(limits["costs"])}),
        strategies=tuple(PackPattern(lengths=tuple(row[1:]), repeat=row[0]) for row in content["strategies"]),
        known_bound=None if bound is None else LowerBound(**bound),
    )
    if _totals(plan) != content["totals"]:
        raise ValueError(f"its strategies make {_totals(plan)}, and it says {content['totals']}")
    if plan.known_bound is not None and plan.known_bound.packs > plan.packs:
        raise ValueError(f"it has {plan.packs} packs, fewer than its lower bound of {plan.known_bound.packs}")
    return plan


def _totals(plan: PackingPlan) -> dict[str, int]:
    return {"packs": plan.packs, "sequences": plan.sequences, "tokens": plan.tokens}


def _digest(content: dict[str, Any]) -> str:
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()
