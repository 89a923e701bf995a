"""Bounds of settings, which stand beside them: `steps: Annotated[int, AtLeast(1)] = 300`."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass, is_dataclass
from functools import cache
from typing import Any, Protocol, get_type_hints, runtime_checkable

_SMALLEST, _LARGEST = 2.0**-126, (2 - 2.0**-23) * 2.0**127
"""Of fp32, in which nearly all is computed: below, a number is 0 there or loses digits, above, it is infinite."""


@runtime_checkable
class Bound(Protocol):
    """What a setting must be."""

    def needed(self, value: Any) -> str | None:
        """What the value is not and must be; None where it is."""


@dataclass(frozen=True)
class AtLeast:
    """Finite in fp32, and no lower than this."""

    least: float
    why: str = ""
    """Said behind the number."""

    def needed(self, value: float) -> str | None:
        if not value >= self.least:  # which NaN is not either
            return f"at least {self.least}{self.why}"
        return _finite(value)


def _finite(value: float) -> str | None:
    if value == math.inf:
        return "finite"
    return f"at most {_LARGEST:.3g}, the largest number of fp32" if value > _LARGEST else None


@dataclass(frozen=True)
class Within:
    """No lower than one number and no higher than another."""

    least: float
    most: float

    def needed(self, value: float) -> str | None:
        return None if self.least <= value <= self.most else f"at least {self.least} and at most {self.most}"


@dataclass(frozen=True)
class Positive:
    """Above 0 and finite, in fp32 too."""

    def needed(self, value: float) -> str | None:
        if not 0 < value < math.inf:
            return "above 0 and finite"
        return f"at least {_SMALLEST:.3g}, or it is 0 in fp32" if value < _SMALLEST else _finite(value)


@dataclass(frozen=True)
class Share:
    """At least 0 and below 1."""

    all: bool = False
    """1 is one too."""

    def needed(self, value: float) -> str | None:
        if 0 <= value < 1 or (self.all and value == 1):
            return None
        return "at least 0 and at most 1" if self.all else "at least 0 and below 1"


@dataclass(frozen=True)
class Written:
    """A text of a form."""

    pattern: str
    """Regular expression that all of it matches."""
    form: str
    """What that is, in words."""

    def needed(self, value: str) -> str | None:
        return None if re.fullmatch(self.pattern, value) else self.form


LANGUAGE = Written(r"[a-z]{2,3}(-[a-z]+)*", "an ISO 639-1 code, such as en or de")


def check_whole(value: Any, key: str) -> None:
    """Raises ValueError for a whole number of more than 64 bits, as TOML has none either: arrays, random streams and
    files count in 64. It is not said how large it is: Python writes no number of more than 4,300 digits."""
    for each in value if isinstance(value, tuple | list) else (value,):
        if isinstance(each, int) and not -(2**63) <= each < 2**63:
            raise ValueError(f"{key} must be a whole number of at most 64 bits. Got one of {each.bit_length()} bits.")


@cache
def _hints(kind: type) -> dict[str, Any]:
    """With what stands beside the types. Settings are checked whenever some are made, and Python compiles each type."""
    return get_type_hints(kind, include_extras=True)


def check_bounds(settings: Any, where: str = "") -> None:
    """Compares each setting of a dataclass, and of those in it, with the bounds in its annotation; None fits all.

    Args:
        where: the key of the dataclass in its file, for messages.

    Raises:
        ValueError: a setting out of its bounds, or a whole number of more than 64 bits, named with its key.
    """
    kind: Any = type(settings)
    for name, hint in _hints(kind).items():
        value, key = getattr(settings, name), f"{where}.{name}" if where else name
        if is_dataclass(value):
            check_bounds(value, key)
        check_whole(value, key)
        for bound in getattr(hint, "__metadata__", ()):
            if isinstance(bound, Bound) and value is not None and (needed := bound.needed(value)) is not None:
                raise ValueError(f"{key} must be {needed}. Got {value}.")
