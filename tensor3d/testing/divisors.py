"""A loss that no factor explains: whether it was divided by counts that differ from rank to rank.

M rows, H columns
"""

from __future__ import annotations

from collections.abc import Sequence
from math import isfinite

import torch
from torch import Tensor

from tensor3d.testing.expected import Expected
from tensor3d.testing.report import Outcome

_NEAR = 1e-4
_REMEDY = (
    "Divide by that of the whole step, which is the same on every rank; where labels are -100, "
    'sum_copies((mine != -100).sum(), cube.over("data", "x", "z")), with `mine` this rank\'s labels on face y.'
)


def divisor_hint(failing: Sequence[Outcome], expected: Expected) -> str:
    """What is to be said of a loss that is wrong on these cubes."""
    values = [rank["output"].values for outcome in failing for rank in outcome.ranks]
    if any(value is not None and not isfinite(float(value)) for value in values):
        return f"not finite. Does a rank that has none divide by its own count of rows? {_REMEDY}"
    whose = _divided_by(failing, expected)
    if whose in ("plane", "rank"):
        return (
            f"the loss was divided by the number of this {whose}'s rows that count, and the {whose}s have different "
            f"numbers: the gradient of each {whose}'s rows is the reference's times a factor of its own. {_REMEDY}"
        )
    return (
        "no factor of axis sizes and no missing sum explains it. First: is the divisor the count of the whole step "
        f"(labels != -100 counted over data, x and z)? {_REMEDY} Else: does it depend on the order of rows or the rank?"
    )


def _divided_by(failing: Sequence[Outcome], expected: Expected) -> str:
    """The largest group of ranks whose divisor is one number, as the gradients of inputs tell it."""
    for whose in ("cube", "plane", "rank"):
        if all(_has_divisors(whose, outcome, expected) for outcome in failing):
            return whose
    return "unknown"


def _has_divisors(whose: str, outcome: Outcome, expected: Expected) -> bool:
    """Whether inputs' gradients are the reference's times a factor of each group's rows (on face y)."""
    names = [name for name, wanted in expected.gradients.items() if name.startswith("input ") and wanted is not None]
    planes = outcome.shape.planes
    parts = {"cube": 1, "plane": planes, "rank": planes * outcome.shape.z}[whose]
    for name in names:
        wanted = expected.gradients[name]
        assert wanted is not None
        got = _assembled(outcome, name, wanted)
        if got is None or any(
            not _is_multiple(*pair) for pair in zip(got.chunk(parts), wanted.chunk(parts), strict=True)
        ):
            return False
    return bool(names)


def _assembled(outcome: Outcome, name: str, wanted: Tensor) -> Tensor | None:
    """(M, H) of the blocks of all ranks; None where one is missing."""
    got = torch.zeros_like(wanted)
    for rank in outcome.ranks:
        block = rank.get(name)
        if block is None or block.values is None:
            return None
        got[block.place] = block.values
    return got


def _is_multiple(got: Tensor, wanted: Tensor) -> bool:
    square = float(wanted.square().sum())
    factor = float((got * wanted).sum()) / square if square else 1.0
    return float((got - factor * wanted).abs().max()) <= _NEAR * float(got.abs().max())
