"""What an inspection is asked for, and what it has found, as text and as JSON."""

from __future__ import annotations

import json
import textwrap
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import tyro

from tools.corpus.inspect.histogram import Histogram

_WIDTH = 116
_NAME = 34


@dataclass(frozen=True, kw_only=True)
class InspectOptions:
    """Show what a folder of the preparation holds: counts, histograms of lengths, and a few pieces to read."""

    folder: tyro.conf.Positional[Path]
    """Output of a step of tools.corpus, `prepare` included."""
    plot: Path | None = None
    """PNG file to draw the histograms into."""
    samples: int = 3
    """Documents, sentences, pieces or sequences to show, drawn at random."""
    packs: int = 2
    """Packs to show, drawn at random."""
    seed: int = 0
    """Draws them; and the sentence pairs of a folder that `prepare` made."""
    max_length: int = 512
    """Tokens of a sequence, at most, where sequences are not cut yet: in a folder that `prepare` made."""
    json: bool = False
    """Print a JSON object instead of text."""


@dataclass(frozen=True)
class Figure:
    """A number, or a word that stands for one."""

    name: str
    value: int | float | str
    unit: str = ""

    def text(self) -> str:
        if not isinstance(self.value, int | float):
            shown = str(self.value)
        elif isinstance(self.value, int):
            shown = f"{self.value:,}"
        else:
            shown = f"{self.value:,.4f}" if abs(self.value) < 100 else f"{self.value:,.2f}"
        return f"  {self.name:<{_NAME}} {shown:>16} {self.unit}".rstrip()


@dataclass(frozen=True)
class Excerpt:
    """Something to read."""

    title: str
    paragraphs: tuple[str, ...]
    """Each is wrapped to the width of a screen; one that begins with spaces stays a line."""

    def text(self) -> Iterator[str]:
        yield f"  {self.title}"
        for paragraph in self.paragraphs:
            if paragraph.startswith(" "):
                yield f"    {paragraph}"
            else:
                yield from textwrap.wrap(
                    paragraph,
                    _WIDTH,
                    initial_indent="    ",
                    subsequent_indent="    ",
                    break_long_words=False,
                    break_on_hyphens=False,
                )


@dataclass(kw_only=True)
class Report:
    """What a folder holds."""

    folder: Path
    kind: str
    """In words: "documents of plain text"."""
    figures: list[Figure] = field(default_factory=list)
    noted: Mapping[str, Any] = field(default_factory=dict)
    """What the step that made the folder has counted."""
    lists: dict[str, list[Figure]] = field(default_factory=dict)
    """By heading: names and how often each occurs, the commonest first."""
    hints: list[str] = field(default_factory=list)
    """What a reader had better know, and what to do."""
    histograms: list[Histogram] = field(default_factory=list)
    excerpts: dict[str, list[Excerpt]] = field(default_factory=dict)
    """By heading."""

    def add(self, name: str, value: int | float | str, unit: str = "") -> None:
        self.figures.append(Figure(name, value, unit))

    def text(self) -> str:
        lines = [f"{self.folder}: {self.kind}", "", *(figure.text() for figure in self.figures)]
        for hint in self.hints:
            lines += ["", *textwrap.wrap(f"hint: {hint}", _WIDTH, break_long_words=False, break_on_hyphens=False)]
        known = [(figure.name, figure.value) for figure in self.figures]
        noted = [Figure(name.replace("_", " "), value) for name, value in self.noted.items() if _is_plain(value)]
        noted = [figure for figure in noted if (figure.name, figure.value) not in known]
        if noted:
            lines += ["", "counted besides by the step that made it", *(figure.text() for figure in noted)]
        for heading, figures in self.lists.items():
            if figures:
                lines += ["", heading, *(figure.text() for figure in figures)]
        for histogram in self.histograms:
            lines += ["", *histogram.text()]
        for heading, excerpts in self.excerpts.items():
            if excerpts:
                lines += ["", heading]
            for excerpt in excerpts:
                lines += ["", *excerpt.text()]
        return "\n".join(lines)

    def json(self) -> str:
        values = {
            "folder": str(self.folder),
            "kind": self.kind,
            "figures": {figure.name.replace(" ", "_"): figure.value for figure in self.figures},
            "hints": self.hints,
            "noted": dict(self.noted),
            "lists": {
                heading: {figure.name: figure.value for figure in figures} for heading, figures in self.lists.items()
            },
            "histograms": [histogram.values() for histogram in self.histograms],
            "excerpts": {
                heading: [{"title": excerpt.title, "text": list(excerpt.paragraphs)} for excerpt in excerpts]
                for heading, excerpts in self.excerpts.items()
            },
        }
        return json.dumps(values, indent=2, ensure_ascii=False)


def _is_plain(value: object) -> bool:
    return isinstance(value, int | float | str) and not isinstance(value, bool)
