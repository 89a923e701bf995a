"""Values out of a config.json, with errors that name the file and the setting."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, TypeVar

T = TypeVar("T", int, float)

CONFIG = "config.json"


def table(settings: Mapping[str, Any], name: str, where: Path) -> Mapping[str, Any]:
    """A setting that has settings of its own; empty where it is not there."""
    value = settings.get(name) or {}
    if not isinstance(value, dict):
        raise ValueError(f"{where}: {name} must be an object. Got {value!r:.60}.")
    return value


def number(settings: Mapping[str, Any], name: str, where: Path, kind: type[T]) -> T:
    """Raises ValueError for what is none, or none of that kind."""
    value = settings[name]
    wanted = (int,) if kind is int else (int, float)
    if not isinstance(value, wanted) or isinstance(value, bool) or (type(value) is int and abs(value) >= 1 << 63):
        told = "a whole number" if kind is int else "a number"
        raise ValueError(f"{where}: {name} must be {told}. Got {value!r:.60}.")
    return kind(value)
