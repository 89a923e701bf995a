"""Input that cannot be used: said with its place, or left out and listed."""

from __future__ import annotations

from dataclasses import dataclass


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
