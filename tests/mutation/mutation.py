"""One mutation, and whether it still fits the code."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


@dataclass(frozen=True)
class Mutation:
    """A small break of one file."""

    name: str
    file: str
    """From the root of the repository."""
    old: str
    """What is replaced; stands in the file exactly once."""
    new: str
    """What stands there instead. The file must still be importable: whoever cannot import it tests nothing."""
    tests: tuple[str, ...]
    """Node ids of pytest, without parameters or with them, or whole files: those that must see it."""
    quick: bool = False
    """Whether it belongs to the dozen that CI runs."""

    @property
    def path(self) -> Path:
        return ROOT / self.file

    def mutated(self, source: str) -> str:
        """`source` with the break. Raises ValueError where `old` does not stand in it exactly once."""
        count = source.count(self.old)
        if count != 1:
            raise ValueError(f"{self.file} must have the text {self.old!r} exactly once. It has it {count} times.")
        return source.replace(self.old, self.new)

    def problems(self) -> list[str]:
        """Why the mutation no longer fits the code; empty if it does."""
        if not self.path.is_file():
            return [f"there is no file {self.file}"]
        problems = []
        try:
            source = self.mutated(self.path.read_text(encoding="utf-8"))
        except ValueError as error:
            problems.append(str(error))
        else:
            problems += _syntax(self.file, source)
        if self.old == self.new:
            problems.append("old and new are the same text")
        if not self.tests:
            problems.append("no test is named")
        return problems + [problem for test in self.tests for problem in _missing(test)]


def _syntax(file: str, source: str) -> list[str]:
    if file.endswith(".py"):
        try:
            compile(source, file, "exec", dont_inherit=True)  # a third of the time of a tree for Python
        except SyntaxError as error:
            return [f"the mutated {file} is no Python: {error}"]
    return []


def _missing(test: str) -> list[str]:
    """What of a node id does not exist."""
    file, *names = test.partition("[")[0].split("::")
    path = ROOT / file
    if not path.is_file():
        return [f"there is no test file {file}"]
    source = path.read_text(encoding="utf-8")
    return [
        f"{file} has no {name}" for name in names if not re.search(rf"^\s*(def|class) {name}\b", source, re.MULTILINE)
    ]
