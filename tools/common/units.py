"""Bytes and seconds as commands show them. Bytes are decimal throughout, 1 MB = 10^6 bytes, as sizes of disks are told;
what tools.bench measures is in MiB = 2^20 bytes, and says so.
"""

from __future__ import annotations

_UNITS = ("B", "kB", "MB", "GB", "TB", "PB")


def in_bytes(count: float) -> str:
    """1234567 as "1.23 MB"."""
    for unit in _UNITS[:-1]:
        if count < 1000:
            return f"{count:.3g} {unit}" if count < 999.5 else f"1 {_UNITS[_UNITS.index(unit) + 1]}"
        count /= 1000
    return f"{count:,.3g} {_UNITS[-1]}"


def number_of(count: int, one: str, many: str) -> str:
    """1 as "1 box", 1234 as "1,234 boxes"."""
    return f"{count:,} {one if count == 1 else many}"


def in_time(seconds: float) -> str:
    """4000 as "1.1 hours"."""
    for size, name in ((86400.0, "days"), (3600.0, "hours"), (60.0, "minutes"), (1.0, "s")):
        if seconds >= 2 * size:
            return f"{seconds / size:,.1f} {name}"
    return f"{seconds:.1f} s" if seconds >= 1 else f"{1000 * seconds:.3g} ms"
