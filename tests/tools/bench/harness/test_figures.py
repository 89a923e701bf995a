"""Columns that figures declare, and what times of rounds come to."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Annotated, ClassVar

import pytest

from tools.bench.harness.figures import (
    Column,
    Times,
    cells,
    header,
    means,
    mebibytes,
    milliseconds,
    relative_difference,
    table,
    times,
)


@dataclass(frozen=True, kw_only=True)
class Figures(Times):
    name: Annotated[str, Column("who", of="full", before="seconds_median")]
    held: Annotated[int | None, mebibytes("MiB")]
    expected: Annotated[int, mebibytes("closed form", equal="same")]
    same: bool

    @property
    def full(self) -> str:
        return f"the {self.name}"


@dataclass(frozen=True)
class Sides:
    seconds: dict[str, float]

    COLUMNS: ClassVar[tuple[Column, ...]] = (
        milliseconds("eager", of="seconds.eager"),
        milliseconds("compiled", ".0f", of="seconds.compiled"),
    )


def figures(held: int | None, same: bool) -> Figures:
    return Figures(**times([[1.0, 3.0], [2.0]], [[1.0], [2.0]]), name="one", held=held, expected=2**21, same=same)


def test_columns_stand_where_they_are_declared() -> None:
    assert header(Figures) == ["who", "step ms", "quartiles", "ratio", "by round", "MiB", "closed form"]
    assert cells(figures(2**20, True)) == [
        "the one",
        "2000.0",
        "1500.0-2500.0",
        "1.33",
        "1.00-2.00",
        "1.00",
        "equal",
    ]
    assert cells(figures(None, False))[-2:] == ["-", "2.00"]


def test_columns_of_what_stands_deeper() -> None:
    assert table([Sides({"eager": 1.5, "compiled": 2.0})]) == ["eager   compiled", "1500.0      2000"]


def test_seconds_of_a_step_are_the_mean_over_the_ranks() -> None:
    assert means([[1.0, 2.0], [3.0, 4.0]]) == [2.0, 3.0]
    found = times([[2.0, 4.0]], [[1.0, 2.0]])
    assert (found["seconds_median"], found["ratio"], found["seconds"]) == (3.0, 2.0, ((2.0, 4.0),))


def test_what_is_no_number_differs_from_all() -> None:
    assert relative_difference([4.0, 5.0]) == pytest.approx(0.25)
    assert math.isnan(relative_difference([1.0, float("nan"), 1.0]))
