"""Bounds beside settings: what is out of them is named with its key, what is needed, and what it was."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Annotated

import pytest

from tools.common.bounds import AtLeast, Positive, Share, Within, check_bounds


@dataclass(frozen=True, kw_only=True)
class Inner:
    steps: Annotated[int | None, AtLeast(2, ": one and the next")] = None
    rate: Annotated[float, Positive()] = 1.0
    decay: Annotated[float, Positive(), Share()] = 0.5
    slots: Annotated[int, Within(5, 8)] = 5
    free: int = -1


@dataclass(frozen=True, kw_only=True)
class Outer:
    inner: Inner = field(default_factory=Inner)


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"steps": 1}, "must be at least 2: one and the next. Got 1."),
        ({"steps": math.nan}, "must be at least 2: one and the next. Got nan."),
        ({"steps": math.inf}, "must be finite. Got inf."),
        ({"rate": 0.0}, "must be above 0 and finite. Got 0.0."),
        ({"rate": math.inf}, "must be above 0 and finite. Got inf."),
        ({"rate": 1e-45}, "must be at least 1.18e-38, or it is 0 in fp32. Got 1e-45."),
        ({"rate": 1e39}, "must be at most 3.4e+38, the largest number of fp32. Got 1e+39."),
        ({"decay": 0.0}, "must be above 0 and finite. Got 0.0."),
        ({"decay": 1.0}, "must be at least 0 and below 1. Got 1.0."),
        ({"slots": 4}, "must be at least 5 and at most 8. Got 4."),
        ({"slots": 9}, "must be at least 5 and at most 8. Got 9."),
        ({"slots": math.nan}, "must be at least 5 and at most 8. Got nan."),
    ],
)
def test_what_is_out_of_bounds_is_named(values: dict[str, float], message: str) -> None:
    (name,) = values
    inner = Inner(**values)  # type: ignore[arg-type]
    for settings, where, key in ((inner, "", name), (inner, "run", f"run.{name}"), (Outer(inner=inner), "", "inner")):
        with pytest.raises(ValueError, match=key) as problem:
            check_bounds(settings, where)
        assert str(problem.value) == f"{f'inner.{name}' if key == 'inner' else key} {message}"


def test_bounds_themselves_and_none_are_inside() -> None:
    check_bounds(Outer(inner=Inner(steps=2, decay=0.999, slots=8)))
    check_bounds(Outer())
