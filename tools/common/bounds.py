"""Bounds of settings, which stand beside them: `steps: Annotated[int, AtLeast(1)] = 300`."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass, is_dataclass
from typing import Any, Protocol, get_type_hints, runtime_checkable


@runtime_checkable
class Bound(Protocol):
    """What a setting must be."""

    def needed(self, value: Any) -> str | None:
        """What the value is not and must be; None where it is."""


@dataclass(frozen=True)
class AtLeast:
    """Finite, and no lower than this."""

    least: float
    why: str = ""
    """Said behind the number."""

    def needed(self, value: float) -> str | None:
        if not value >= self.least:  # which NaN is not either
            return f"at least {self.least}{self.why}"
        return "finite" if value == math.inf else None


@dataclass(frozen=True)
class Within:
    """No lower than one number and no higher than another."""

    least: float
    most: float

    def needed(self, value: float) -> str | None:
        return None if self.least <= value <= self.most else f"at least {self.least} and at most {self.most}"


@dataclass(frozen=True)
class Positive:
    """Above 0 and finite."""

    def needed(self, value: float) -> str | None:
        return None if 0 < value < math.inf else "above 0 and finite"


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


def check_bounds(settings: Any, where: str = "") -> None:
    """Compares each setting of a dataclass, and of those in it, with the bounds in its annotation; None fits all.

    Args:
        where: the key of the dataclass in its file, for messages.

    Raises:
        ValueError: a setting out of its bounds, or a whole number of more than 64 bits, named with its key.
    """
    for name, hint in get_type_hints(type(settings), include_extras=True).items():
        value, key = getattr(settings, name), f"{where}.{name}" if where else name
        if is_dataclass(value):
            check_bounds(value, key)
        check_whole(value, key)
        for bound in getattr(hint, "__metadata__", ()):
            if isinstance(bound, Bound) and value is not None and (needed := bound.needed(value)) is not None:
                raise ValueError(f"{key} must be {needed}. Got {value}.")
