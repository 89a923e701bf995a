"""How the settings that a message names are typed on a command line. It imports nothing heavy."""

from __future__ import annotations

import dataclasses
import re
from typing import get_args, get_type_hints


def with_options(told: str, options: type | None) -> str:
    """A message, and behind it how the settings that it names are typed: who says "Lower vocab_size" does not know the
    section that a command has it in.

    Args:
        told: the message.
        options: the dataclass that the command line is read into. None: the message stays as it is.
    """
    if options is None:
        return told
    typed = []
    for name, ways in _option_names(options).items():
        # A word of English means a setting where something is to be done with it.
        before = r"(?<![\w./-])" if "_" in name else r"\b(?:[Ll]ower|[Rr]aise|[Ss]et|[Cc]hange) (?:the )?"
        named = [*ways, *(way[2:].replace("-", "_") for way in ways if "." in way)]  # as typed, and as in a recipe
        if re.search(rf"{before}{name}(?!\w|\.\w)", told) and not any(each in told for each in named):
            typed.append(" or ".join(ways))
    return f"{told} (To be typed: {', '.join(typed)}.)" if typed else told


def _option_names(options: type, prefix: str = "--") -> dict[str, list[str]]:
    """The options by the names of their fields, which several sections may have."""
    found: dict[str, list[str]] = {}
    hints = get_type_hints(options, include_extras=True)
    for field in dataclasses.fields(options):
        hint = hints[field.name]
        kind, *marks = get_args(hint) if hasattr(hint, "__metadata__") else (hint,)
        name = field.name.replace("_", "-")
        if isinstance(kind, type) and dataclasses.is_dataclass(kind):
            # tyro leaves out the name of what is marked as a section without one.
            inner = prefix if any(getattr(mark, "name", None) == "" for mark in marks) else f"{prefix}{name}."
            for key, ways in _option_names(kind, inner).items():
                found.setdefault(key, []).extend(ways)
        else:
            found.setdefault(field.name, []).append(prefix + name)
    return found
