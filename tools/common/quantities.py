"""Sizes, rates and times as people type them: 80e9, 80GB, 80GiB, 400Gbit, 312T, 4us."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

_NUMBER = re.compile(r"([+-]?(?:\d+\.?\d*|\.\d+)(?:[eE][+-]?\d+)?)\s*([^\d\s.].*)?")
_DECIMAL = {"": 1.0, "k": 1e3, "M": 1e6, "G": 1e9, "T": 1e12, "P": 1e15}
_BINARY = {f"{prefix}i": 1024.0**power for power, prefix in enumerate("KMGTP", start=1)}


@dataclass(frozen=True, kw_only=True)
class Quantity:
    """What an option measures."""

    of: str
    """Its unit in words: that of a number without one."""
    units: Mapping[str, float]
    """What may stand behind a number, and what it is of that unit."""
    least: float
    """Below that, and above `most`, it is a slip of the finger: as a rule a unit that was meant and not written."""
    most: float
    bounds: str
    """The two in words, behind "must be"."""
    written: str
    """Ways to write one, for messages."""
    meant: str
    """The unit that people mean who write none."""

    def parse(self, option: str, text: str) -> float:
        """The value in the quantity's unit.

        Args:
            option: as typed, such as "--memory", for messages.
            text: as "25e9" or "25GB", or with a space between. Small and capital letters are the same where only one
                unit can be meant: GB and Gb are not.

        Raises:
            ValueError: no number, an unknown unit, or a value beyond the bounds.
        """
        found = _NUMBER.fullmatch(text.strip())
        factor = None if found is None else self._factor((found[2] or "").strip())
        if found is None or factor is None:
            raise ValueError(f"{option} must be {self.of}: {self.written}. Got {text!r}.")
        value = float(found[1]) * factor
        if not (math.isfinite(value) and self.least <= value <= self.most):
            hint = self.meant if not found[2] else ""
            raise ValueError(
                f"{option} must be {self.bounds}. Got {text} = {value:g} {self.of}. "
                + (f"Write the unit, such as {found[1]}{hint}." if hint else f"Write {self.written}.")
            )
        return value

    def _factor(self, unit: str) -> float | None:
        if unit in ("", *self.units):
            return self.units[unit] if unit else 1.0
        alike = {factor for known, factor in self.units.items() if known.lower() == unit.lower()}
        # "Gb" is a gigabit to some and a gigabyte to others.
        ambiguous = unit.removesuffix("/s").endswith("b") and "Gbit" in self.units
        return alike.pop() if len(alike) == 1 and not ambiguous else None


def _units(prefixes: Mapping[str, float], *words: str, factor: float = 1.0) -> dict[str, float]:
    return {prefix + word: size * factor for prefix, size in prefixes.items() for word in words}


BYTES = Quantity(
    of="bytes",
    units=MappingProxyType(_units({**_DECIMAL, **_BINARY}, "B")),
    least=1e6,
    most=1e18,
    bounds="at least 1 MB",
    written="a number such as 80e9, or with a unit, such as 80GB or 80GiB",
    meant="GB",
)
BYTES_A_SECOND = Quantity(
    of="bytes/s",
    units=MappingProxyType(
        _units({**_DECIMAL, **_BINARY}, "B", "B/s") | _units(_DECIMAL, "bit", "bit/s", factor=1 / 8)
    ),
    least=1e6,
    most=1e18,
    bounds="at least 1 MB/s",
    written="a number such as 25e9, or with a unit, such as 25GB (bytes) or 200Gbit (bits)",
    meant="GB",
)
FLOPS = Quantity(
    of="FLOP/s",
    units=MappingProxyType(_units(_DECIMAL, "FLOP/s", "FLOPS") | _units({"G": 1e9, "T": 1e12, "P": 1e15}, "")),
    least=1e6,
    most=1e21,
    bounds="at least 1 MFLOP/s",
    written="a number such as 312e12, or with a unit, such as 312T or 312TFLOP/s",
    meant="T",
)
SECONDS = Quantity(
    of="seconds",
    units=MappingProxyType({"s": 1.0, "ms": 1e-3, "us": 1e-6, "µs": 1e-6, "ns": 1e-9}),
    least=1e-12,
    most=1.0,
    bounds="above 0 and at most 1 s",
    written="a number such as 4e-6, or with a unit, such as 4us",
    meant="us",
)
