"""Repeated blocks under one pattern: layers.0.up and layers.1.up become layers.*.up where both are treated alike."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from itertools import combinations
from typing import TypeVar

Treatment = TypeVar("Treatment")


def fold(treatments: Mapping[str, Treatment], names: Iterable[str]) -> dict[str, Treatment]:
    """Patterns that together match exactly the keys of `treatments`, each with the one treatment of what it matches.

    Args:
        treatments: module names, each with what is to be done with it.
        names: of all modules. A pattern never matches one that has no treatment, or another one.
    """
    everything = list(names)
    folded: dict[str, Treatment] = {}
    matched: set[str] = set()
    for name, treatment in treatments.items():
        if name in matched:
            continue
        for pattern in _patterns(name):
            hits = [other for other in everything if _matches(pattern, other)]
            # A pattern of one is a name; and no two patterns may claim a module.
            if len(hits) > 1 and all(
                hit in treatments and treatments[hit] == treatment and hit not in matched for hit in hits
            ):
                folded[pattern] = treatment
                matched.update(hits)
                break
        else:
            folded[name] = treatment
            matched.add(name)
    return folded


def _patterns(name: str) -> Iterator[str]:
    """The name with its numbers starred: all of them, then ever fewer, the outer ones first."""
    parts = name.split(".")
    numbers = [place for place, part in enumerate(parts) if part.isdigit()]
    for size in range(len(numbers), 0, -1):
        for chosen in combinations(numbers, size):
            yield ".".join("*" if place in chosen else part for place, part in enumerate(parts))


def _matches(pattern: str, name: str) -> bool:
    return re.fullmatch(re.escape(pattern).replace(r"\*", "[^.]*"), name) is not None
