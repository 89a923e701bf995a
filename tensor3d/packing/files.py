"""Plan files: a plan and what it was made for, as JSON."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tensor3d.packing.bounds import LowerBound
from tensor3d.packing.limits import Limits
from tensor3d.packing.plan import Plan, Strategy

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
    return _digest({"planner": planner, "limits": _limits_to_json(limits), "counts": counts})


def save_plan(plan: Plan, path: Path | str, fingerprint: str) -> None:
    """Writes a plan beside `path` and renames it: the file is there whole or not at all.

    A bound that the planner knew goes with it; none is computed for this.

    Args:
        fingerprint: of what the plan was made for (`fingerprint_of`, or a text of the caller's own).
    """
    path = Path(path)
    content = {
        "version": _VERSION,
        "fingerprint": fingerprint,
        "limits": _limits_to_json(plan.limits),
        "totals": _totals(plan),
        "bound": None if plan.known_bound is None else vars(plan.known_bound),
        "strategies": [[strategy.repeat, *strategy.lengths] for strategy in plan.strategies],
    }
    draft = path.with_name(f"{path.name}.{os.getpid()}.partial")
    try:
        with draft.open("w", encoding="utf-8") as file:
            json.dump({"format": _FORMAT, "digest": _digest(content), **content}, file, separators=(",", ":"))
            file.write("\n")
            file.flush()
            os.fsync(file.fileno())
        os.replace(draft, path)
    finally:
        draft.unlink(missing_ok=True)


def load_plan(path: Path | str, fingerprint: str) -> Plan:
    """Reads a plan that was made for `fingerprint`.

    Raises:
        ValueError: the file is damaged, cut off, something else, of a newer version, or its plan is for something else;
            names the file and, in the last case, both fingerprints.
        OSError: it cannot be read at all.
    """
    path = Path(path)
    try:
        content = json.loads(path.read_bytes())
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
        raise ValueError(f"{path} holds no valid plan: {problem}. Delete it and plan again.") from None


def _plan_from_json(content: dict[str, Any]) -> Plan:
    limits, bound = content["limits"], content["bound"]
    numbers = [number for row in content["strategies"] for number in row]
    if not all(type(number) is int for number in [*numbers, *([] if bound is None else [bound["packs"]])]):
        raise ValueError("a length, a repeat count or its lower bound is no whole number")
    if bound is not None and (bound["packs"] < 1 or bound["kind"] not in ("lp", "tokens")):
        raise ValueError(f"{bound} is no lower bound")
    plan = Plan(
        limits=Limits(**{**limits, "costs": None if limits["costs"] is None else tuple(limits["costs"])}),
        strategies=tuple(Strategy(lengths=tuple(row[1:]), repeat=row[0]) for row in content["strategies"]),
        known_bound=None if bound is None else LowerBound(**bound),
    )
    if _totals(plan) != content["totals"]:
        raise ValueError(f"its strategies make {_totals(plan)}, and it says {content['totals']}")
    if plan.known_bound is not None and plan.known_bound.packs > plan.packs:
        raise ValueError(f"it has {plan.packs} packs, fewer than its lower bound of {plan.known_bound.packs}")
    return plan


def _limits_to_json(limits: Limits) -> dict[str, Any]:
    return {
        "capacity": limits.capacity,
        "max_sequences": limits.max_sequences,
        "budget": limits.budget,
        "costs": None if limits.costs is None else list(limits.costs),
    }


def _totals(plan: Plan) -> dict[str, int]:
    return {"packs": plan.packs, "sequences": plan.sequences, "tokens": plan.tokens}


def _digest(content: dict[str, Any]) -> str:
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()
