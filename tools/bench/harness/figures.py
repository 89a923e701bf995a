"""Figures that say themselves which columns of a table they are, and what times of rounds come to.

    @dataclass(frozen=True, kw_only=True)
    class CubeFigures:
        seconds_median: Annotated[float, milliseconds("step ms")]

`table` makes the lines on the screen of a list of such objects; `dataclasses.asdict` makes the JSON of the same fields.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import KW_ONLY, asdict, dataclass
from functools import cache
from typing import Annotated, Any, TypeVar, get_type_hints

import numpy as np

from tools.common.machine import format_table

T = TypeVar("T")

# --- Columns ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Column:
    """How a field is shown: None as "-", a range as low-high."""

    title: str
    spec: str = ""
    """Of `format`."""
    scale: float = 1.0
    """By which numbers are multiplied first."""
    _: KW_ONLY
    of: str | None = None
    """What is shown in place of the field: an attribute, or an attribute or a key of one, with dots."""
    equal: str | None = None
    """An attribute, where which is true the word "equal" is shown: this field says the same as the column before."""
    before: str | None = None
    """The field before whose column this one stands. Default: columns have the order of the fields."""

    def cell(self, figures: Any, field: str) -> str:
        if self.equal is not None and _at(figures, self.equal):
            return "equal"
        value = _at(figures, self.of or field)
        if value is None:
            return "-"
        return "-".join(self._formatted(each) for each in (value if isinstance(value, tuple | list) else (value,)))

    def _formatted(self, value: Any) -> str:
        return format(value if self.scale == 1 else value * self.scale, self.spec)


def _at(figures: Any, path: str) -> Any:
    for name in path.split("."):
        figures = figures[name] if isinstance(figures, Mapping) else getattr(figures, name)
    return figures


def milliseconds(title: str, spec: str = ".1f", **more: Any) -> Column:
    """Of seconds."""
    return Column(title, spec, 1e3, **more)


def mebibytes(title: str, spec: str = ".2f", **more: Any) -> Column:
    """Of bytes."""
    return Column(title, spec, 2.0**-20, **more)


@cache
def columns(kind: type) -> dict[str, Column]:
    """The columns of a class of figures, by field, from left to right: those of `COLUMNS`, or of its fields."""
    if hasattr(kind, "COLUMNS"):
        return {column.of: column for column in kind.COLUMNS}
    found = {
        name: each
        for name, hint in get_type_hints(kind, include_extras=True).items()
        for each in getattr(hint, "__metadata__", ())
        if isinstance(each, Column)
    }
    order = list(found)
    for name, column in found.items():
        if column.before is not None:
            order.remove(name)
            order.insert(order.index(column.before), name)
    return {name: found[name] for name in order}


def header(kind: type) -> list[str]:
    return [column.title for column in columns(kind).values()]


def cells(figures: Any) -> list[str]:
    """What the table shows of one object, under `header`."""
    kind: type = type(figures)
    return [column.cell(figures, name) for name, column in columns(kind).items()]


def table(figures: Sequence[Any]) -> list[str]:
    """Lines: the header, and one for each of the figures, which are of one class and at least one."""
    return format_table(header(type(figures[0])), [cells(each) for each in figures])


def as_json(figures: Sequence[Any]) -> list[dict[str, Any]]:
    return [asdict(each) for each in figures]


# --- Times of rounds --------------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class Times:
    """Of steps, in rounds, beside those of another one in the same rounds. Seconds of a step are the mean over the
    ranks: their sum is then the time that passed."""

    seconds_median: Annotated[float, milliseconds("step ms")]
    seconds_quartiles: Annotated[tuple[float, float], milliseconds("quartiles")]
    ratio: Annotated[float, Column("ratio", ".2f")]
    """Median of the steps over that of the first one: above 1 is slower."""
    ratio_range: Annotated[tuple[float, float], Column("by round", ".2f")]
    """The lowest and the highest of the same ratio, taken in each round alone."""
    seconds: tuple[tuple[float, ...], ...]
    """Every step, by round."""


def times(rounds: Sequence[Sequence[float]], base: Sequence[Sequence[float]]) -> dict[str, Any]:
    """The fields of `Times`.

    Args:
        rounds: seconds of steps, by round.
        base: those of what they are compared with.
    """
    ratios = ratios_of(rounds, base)
    low, median, high = quartiles(flat(rounds))
    return {
        "seconds_median": median,
        "seconds_quartiles": (low, high),
        "ratio": median / statistics.median(flat(base)),
        "ratio_range": (min(ratios), max(ratios)),
        "seconds": tuple(tuple(seconds) for seconds in rounds),
    }


def ratios_of(rounds: Sequence[Sequence[float]], base: Sequence[Sequence[float]]) -> list[float]:
    """Median over median, in each round alone: what slows the machine down for a while meets both."""
    return [statistics.median(mine) / statistics.median(theirs) for mine, theirs in zip(rounds, base, strict=True)]


def quartiles(seconds: Sequence[float]) -> tuple[float, float, float]:
    low, median, high = (float(value) for value in np.quantile(seconds, [0.25, 0.5, 0.75]))
    return low, median, high


def spread(ratios: Sequence[float]) -> tuple[float, float]:
    """The lowest and the highest."""
    return min(ratios), max(ratios)


def flat(rounds: Sequence[Sequence[T]]) -> list[T]:
    return [each for turn in rounds for each in turn]


def means(turn: Sequence[Sequence[Any]], seconds: Callable[[Any], float] = float) -> list[float]:
    """Seconds of each step of a turn: the mean over the ranks.

    Args:
        turn: by rank and step.
        seconds: what a step of a rank took.
    """
    return [statistics.fmean(seconds(each) for each in step) for step in zip(*turn, strict=True)]


def relative_difference(values: Sequence[float]) -> float:
    """Between the largest and the smallest, over the least in size. NaN if one of them is."""
    array = np.array(values)
    # numpy's pass on a loss that is not a number; Python's may lose it.
    return float((array.max() - array.min()) / np.abs(array).min())


def deal(steps: int, rounds: int) -> list[int]:
    """Steps of each round, as even as can be, at least one: never more rounds than steps."""
    rounds = min(rounds, steps)
    return [steps // rounds + (number < steps % rounds) for number in range(rounds)]
