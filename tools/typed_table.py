"""From a TOML table to frozen dataclasses, with every key and type checked."""

from __future__ import annotations

import types
import typing
from dataclasses import fields, is_dataclass
from typing import Any, Literal, TypeVar, get_args, get_origin, get_type_hints

T = TypeVar("T")


def from_table(kind: type[T], table: Any, where: str = "") -> T:
    """A dataclass of type `kind`; what the table does not name has its default.

    Args:
        where: the key of the table in its file, for messages.

    Raises:
        ValueError: an unknown key or a value of the wrong type, named with its key; what `kind` itself refuses.
    """
    if not isinstance(table, dict):
        raise ValueError(f"{where} must be a table. Got {table!r}.")
    hints = get_type_hints(kind)
    known = [f.name for f in fields(kind)]  # type: ignore[arg-type]
    values = {}
    for name, value in table.items():
        key = f"{where}.{name}" if where else name
        if name not in known:
            raise ValueError(f"unknown key {key}. Known here: {', '.join(known)}.")
        wanted = hints[name]
        section = isinstance(wanted, type) and is_dataclass(wanted)
        values[name] = from_table(wanted, value, key) if section else _checked(value, wanted, key)
    return kind(**values)


def _checked(value: Any, wanted: Any, key: str) -> Any:
    """`value`, as float where a whole number stands for one. ValueError where it is not of the type `wanted`."""
    choices = get_args(wanted) if get_origin(wanted) in (typing.Union, types.UnionType) else (wanted,)
    for choice in choices:
        if get_origin(choice) is Literal:
            if value in get_args(choice):
                return value
        elif get_origin(choice) is tuple:  # tuple[T, ...] is TOML's array
            if type(value) is list:
                return tuple(_checked(item, get_args(choice)[0], f"{key}[{i}]") for i, item in enumerate(value))
        elif choice is float and type(value) is int:
            return float(value)
        elif type(value) is choice:
            return value
    names = " or ".join(_name(c) for c in choices if c is not type(None))
    raise ValueError(f"{key} must be of type {names}. Got {value!r}.")


def _name(choice: Any) -> str:
    if get_origin(choice) is Literal:
        return str(get_args(choice))
    if get_origin(choice) is tuple:
        return f"array of {_name(get_args(choice)[0])}"
    name: str = choice.__name__
    return name
