"""What `propose_plan` returns."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from itertools import combinations
from typing import Literal, TypeVar

from tensor3d.distributed.cube import Cube
from tensor3d.distributed.object_collectives import first_names
from tensor3d.parallelize.parallel_rule import ParallelRule
from tensor3d.parallelize.torch_attention import PackedRows

# ----------------------------------------------------------------------------------------------------------------------
# Repeated blocks under one pattern: layers.0.up and layers.1.up become layers.*.up where both are treated alike.

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
            regular = re.compile(re.escape(pattern).replace(r"\*", "[^.]*"))
            hits = [other for other in everything if regular.fullmatch(other)]
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


# --- What `propose_plan` returns --------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class PlanLine:
    """One line of a plan: what the modules of a pattern become, as it is written by hand, and why."""

    pattern: str
    kind: str
    why: str


@dataclass(frozen=True, kw_only=True)
class DivisibilityRequirement:
    """A size of a layer that must divide by an axis."""

    layer: str
    what: str
    number: int
    axis: Literal["y", "z"]


@dataclass(frozen=True, kw_only=True)
class Proposal:
    """A plan for `parallelize`, in words too. `str()` of it is a table and a list of what is left open.

    Attributes:
        plan: pattern to kind. It is complete where `unresolved` is empty; `settled()` gives it only then.
        lines: the plan's lines, with reasons.
        remarks: on what face the arguments and results lie, which weights are tied, what happens by itself.
        unresolved: what the module does that the plan cannot carry over, each with the module and the remedy. Until
            it is mended, the module's result on a cube is an error or wrong.
        rows: what the attention layers of the plan take their sequences from.
    """

    plan: dict[str, ParallelRule]
    lines: tuple[PlanLine, ...]
    remarks: tuple[str, ...]
    unresolved: tuple[str, ...]
    rows: PackedRows
    module: str
    divisions: tuple[DivisibilityRequirement, ...] = field(repr=False)

    @property
    def chosen(self) -> tuple[str, ...]:
        """Every choice in words: the plan's lines, then the remarks."""
        return (*(f"{line.pattern}: {line.kind}, {line.why}" for line in self.lines), *self.remarks)

    def settled(self) -> dict[str, ParallelRule]:
        """The plan, for `parallelize`.

        Raises:
            ValueError: something is open, on which the module's result on a cube would be an error or wrong.
        """
        if self.unresolved:
            points = "\n".join(f"  - {point}" for point in self.unresolved)
            raise ValueError(
                f"the plan for {self.module} has open points, and its result on a cube would be an error or wrong:\n"
                f"{points}\nMend them and propose again, or take `proposal.plan`, add what is missing, and answer for "
                "it."
            )
        return self.plan

    def check(self, cube: Cube) -> None:
        """Raises ValueError, naming every layer and size at once, unless all sizes of the plan divide on `cube`."""
        wrong: dict[tuple[str, int, str], list[str]] = {}
        for each in self.divisions:
            if each.number % cube.axis(each.axis).size:
                wrong.setdefault((each.what, each.number, each.axis), []).append(each.layer)
        if wrong:
            lines = (
                f"{what}={number} does not divide by {axis}={cube.axis(axis).size} in {first_names(layers, 3)}"  # type: ignore[arg-type]
                for (what, number, axis), layers in wrong.items()
            )
            raise ValueError(
                f"the plan does not fit {cube.shape}: {'; '.join(lines)}. Choose another cube or other sizes."
            )

    def __str__(self) -> str:
        parts = [f"Plan for {self.module}"]
        cells = [("pattern", "kind", "why"), *((repr(line.pattern), line.kind, line.why) for line in self.lines)]
        first, second = (max(len(row[place]) for row in cells) for place in (0, 1))
        parts += [f"  {pattern:<{first}}  {kind:<{second}}  {why}" for pattern, kind, why in cells]
        if self.remarks:
            parts += ["Remarks", *(f"  - {remark}" for remark in self.remarks)]
        parts += ["Open", *(f"  - {point}" for point in self.unresolved)] if self.unresolved else ["Nothing is open."]
        return "\n".join(parts)
