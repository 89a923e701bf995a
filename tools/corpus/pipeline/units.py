"""Work that is cut into units, each of which any worker can do by itself."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

from tools.common.files import parsed_json, read_file, write_file

# --- Input that cannot be used: said with its place, or left out and listed -------------------------------------------


class BadInput(ValueError):  # noqa: N818 - what is raised is named for the user, not for the mechanism
    """Something in the input is damaged or missing.

    Args:
        file: where it is.
        at: the place in it, as "byte 1234", "line 7" or "row 3".
        reason: what is wrong there.
        remedy: what the user can do.
    """

    def __init__(self, file: object, at: str, reason: str, remedy: str) -> None:
        super().__init__(file, at, reason, remedy)  # all of it, or it would not pickle
        self.file, self.at, self.reason, self.remedy = str(file), at, reason, remedy

    def __str__(self) -> str:
        place = f"{self.file}, {self.at}" if self.at else self.file
        return f"{place}: {self.reason}. {self.remedy}, or leave it out by --skip-bad."


@dataclass(frozen=True, kw_only=True)
class LeftOut:
    """A line of left-out.jsonl."""

    file: str
    """Name without its folders: where the input lay on this machine is no part of an output."""
    at: str
    reason: str


# --- Work that is cut into units, each of which any worker can do by itself -------------------------------------------

LISTED = 10_000
"""Places a unit lists under --skip-bad, at most; more are only counted."""


@dataclass(frozen=True, kw_only=True)
class Unit:
    """A part of the work. Subclasses say what it is; they travel between processes."""

    name: str
    """Names the files it writes; different in all units of a phase."""
    size: int
    """Bytes of input."""


U = TypeVar("U", bound=Unit)


@dataclass(kw_only=True)
class Context:
    """What the work on a unit needs to know of the step, and what it reports."""

    folder: Path
    """The output, before it has its name."""
    scratch: Path
    """For files between two phases; removed with the end of the step."""
    skip_bad: bool
    on_progress: Callable[[int], None] = field(default=lambda size: None)
    left_out: list[LeftOut] = field(default_factory=list)
    skipped: int = 0

    def bad(self, error: BadInput) -> None:
        """Raises it, or notes it where bad input is to be left out."""
        if not self.skip_bad:
            raise error
        self.skipped += 1
        if len(self.left_out) < LISTED:
            self.left_out.append(LeftOut(file=Path(error.file).name, at=error.at, reason=error.reason))

    def progress(self, size: int) -> None:
        """Says that so many more bytes of the unit are done."""
        self.on_progress(size)


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """What became of a unit, as its mark in the scratch folder keeps it."""

    result: dict[str, Any]
    left_out: list[dict[str, str]]
    skipped: int


@dataclass(frozen=True, kw_only=True)
class WorkItem:
    """How a phase treats a unit, wherever it is worked on."""

    work: Callable[[Any, Context], dict[str, Any]]
    folder: Path
    scratch: Path
    marks: Path
    """Holds NAME.json of every unit that is done."""
    skip_bad: bool

    def mark(self, unit: Unit) -> Path:
        return self.marks / f"{unit.name}.json"

    def __call__(self, unit: Unit, on_progress: Callable[[int], None] = lambda size: None) -> Outcome:
        """Does a unit. The mark comes last: where there is one, the unit's files are complete."""
        context = Context(folder=self.folder, scratch=self.scratch, skip_bad=self.skip_bad, on_progress=on_progress)
        result = self.work(unit, context)
        left_out = [dataclasses.asdict(place) for place in context.left_out]
        text = json.dumps({"result": result, "left_out": left_out, "skipped": context.skipped})
        write_file(self.mark(unit), text)
        # As a later run would read it.
        return Outcome(**json.loads(text))

    def earlier(self, unit: Unit) -> Outcome | None:
        """What an earlier run has made of a unit, if it was done then."""
        try:
            return Outcome(**parsed_json(read_file(self.mark(unit))))
        except (FileNotFoundError, ValueError, TypeError):  # not done, or a mark that is damaged: it is done again
            return None
