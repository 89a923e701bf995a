"""Numbers, units and dates in templates: `{{convert|5|km|mi}}` -> "5 km"."""

from __future__ import annotations

# Signs of fractions and ranges are meant.
# ruff: noqa: RUF001
import re
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Protocol


class Arguments(Protocol):
    """A template's arguments."""

    @property
    def positions(self) -> tuple[str, ...]: ...

    @property
    def named(self) -> Mapping[str, str]: ...


UNITS: Mapping[str, str] = MappingProxyType({
    "sqmi": "sq mi", "sqkm": "km²", "km2": "km²", "m2": "m²", "cm2": "cm²", "mm2": "mm²", "sqft": "sq ft",
    "sqin": "sq in",
    "m3": "m³", "km3": "km³", "cm3": "cm³", "cuft": "cu ft", "cuin": "cu in", "cumi": "cu mi", "cuyd": "cu yd",
    "acre": "acres", "foot": "feet", "inch": "inches", "mile": "miles", "yard": "yards", "F": "°F", "C": "°C",
    "F-change": "°F", "C-change": "°C", "nmi": "nautical miles", "kn": "knots", "impgal": "imp gal", "USgal": "US gal",
    "kph": "km/h", "m/s2": "m/s²", "/sqmi": "per sq mi", "/km2": "per km²", "PD/km2": "per km²", "PD/sqmi": "per sq mi",
    "ozt": "troy oz", "LT": "long tons", "ST": "short tons", "MT": "tonnes", "t": "tonnes", "lb": "lb", "oz": "oz",
})  # fmt: skip
"""Codes of `{{convert}}` that a reader would not know; others are shown as they are."""

_RANGES: Mapping[str, str] = MappingProxyType({
    "-": "–", "–": "–", "to": " to ", "and": " and ", "or": " or ", "by": " by ", "x": " × ", "×": " × ", "*": " × ",
    "to(-)": " to ", "and(-)": " and ", "to about": " to about ", "+/-": " ± ", "±": " ± ", "+": " + ", "/": "/",
    ",": ", ", ", and": ", and ", ", or": ", or ", "xx": " × ",
})  # fmt: skip
_LONGEST_NUMBER = 40
_NUMBER = re.compile(r"[-−+]?[\d,.\s/+⁄e-]*\d[\d,.]*|\.\d+")
_MONTHS = (
    "January", "February", "March", "April", "May", "June", "July", "August", "September", "October", "November",
    "December",
)  # fmt: skip


def convert(call: Arguments) -> str:
    """The amount as given, not converted: `|5|to|10|km|mi` -> "5 to 10 km", `|6|ft|2|in|m` -> "6 ft 2 in"."""
    values = list(call.positions)
    if not values:
        return ""
    text = values.pop(0)
    while len(values) >= 2 and values[0] in _RANGES:
        text += _RANGES[values[0]] + values[1]
        values = values[2:]
    if values:
        text += " " + UNITS.get(values[0], values[0])
    # "6 ft 2 in" is the amount as it is given, "5 km mi" is not.
    while (
        len(values) >= 3
        and len(values[1]) <= _LONGEST_NUMBER  # the expression tries every digit as the last
        and _NUMBER.fullmatch(values[1])
        and values[2] in ("in", "oz", "lb", "st", "yd", "ft", "furlong")
    ):
        text += f" {values[1]} {values[2]}"
        values = values[2:]
    return text


def amount(call: Arguments) -> str:
    """`{{val|1.5|0.2|e=6|u=m/s}}` -> "1.5 ± 0.2 × 10^6 m/s"."""
    text = " ± ".join(value for value in call.positions[:2] if value)
    if exponent := call.named.get("e"):
        text += f" × 10^{exponent}"
    unit = call.named.get("u") or call.named.get("ul") or ""
    return " ".join(part for part in (call.named.get("p", ""), text, unit) if part)


def fraction(call: Arguments) -> str:
    """`|1|2` -> "1/2", `|3|1|2` -> "3 1/2", `|2` -> "1/2"."""
    parts = [part for part in call.positions if part]
    if len(parts) == 1:
        return f"1/{parts[0]}"
    return f"{parts[0]} {parts[1]}/{parts[2]}" if len(parts) == 3 else "/".join(parts[:2])


def ordinal(call: Arguments) -> str:
    number = call.positions[0] if call.positions else ""
    if not number[-1:].isdigit():
        return number
    teen = number[-2:] in ("11", "12", "13")
    return number + ("th" if teen else {"1": "st", "2": "nd", "3": "rd"}.get(number[-1], "th"))


def date(positions: Sequence[str], named: Mapping[str, str]) -> str:
    """Year, month and day as a text: ("2010", "5", "1") -> "May 1, 2010", or "1 May 2010" under df=y."""
    year, month, day = (*positions[:3], "", "", "")[:3]
    if not month:
        return year
    if month.isdecimal() and 1 <= int(month[:3]) <= 12:
        month = _MONTHS[int(month[:3]) - 1]
    if not day:
        return f"{month} {year}"
    if named.get("df") in ("y", "yes"):
        return f"{day} {month} {year}"
    return f"{month} {day}, {year}"
