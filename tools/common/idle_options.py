"""Options of a command line that change nothing beside its others: they are told, not refused, for a command may be
tried another way without being typed anew. `tools.training.idle_settings` does the same for recipes."""

from __future__ import annotations

import logging
from collections.abc import Iterable
from dataclasses import MISSING, fields
from typing import Any, NamedTuple

from tensor3d.distributed.process_group import place

_log = logging.getLogger(__name__)


class IdleRule(NamedTuple):
    """What options of a command need."""

    options: tuple[str, ...]
    """Fields of its dataclass."""
    works: bool
    """Whether they change anything."""
    needs: str
    """What they do so with, in words."""


def idle_options(command: Any, rules: Iterable[IdleRule]) -> list[str]:
    """A line for each option that was set to another value than its default and changes nothing."""
    defaults = {each.name: each.default for each in fields(command)}
    return [
        f"{_typed(name, getattr(command, name))} changes nothing: it is for {rule.needs}."
        for rule in rules
        if not rule.works
        for name in rule.options
        if defaults[name] is not MISSING and getattr(command, name) != defaults[name]
    ]


def tell_idle_options(command: Any, rules: Iterable[IdleRule]) -> None:
    """Says so in the log, on the first rank; it needs no connection to the others."""
    try:
        here = place()
    except ValueError:  # which connecting to the others will tell
        return
    if here is None or here.rank == 0:
        for line in idle_options(command, rules):
            _log.warning("%s", line)


def _typed(name: str, value: Any) -> str:
    """An option as it is typed."""
    option = name.replace("_", "-")
    if isinstance(value, bool):
        return f"--{option}" if value else f"--no-{option}"
    return f"--{option} {value}"
