"""Documents of plain text."""

from __future__ import annotations

import json
import random
import sys
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Generic, TypeVar

from tqdm import tqdm

from tools.corpus.inspection.histogram import Histogram
from tools.corpus.inspection.report import Excerpt, Report
from tools.corpus.work import read_manifest

if TYPE_CHECKING:
    from tools.corpus.inspection.command import InspectOptions

T = TypeVar("T")


@dataclass(frozen=True, kw_only=True)
class Document:
    """A line of a documents file."""

    id: str
    title: str
    text: str


class Drawn(Generic[T]):
    """A few of a stream, each as likely as any other (algorithm R of Vitter, 1985)."""

    def __init__(self, wanted: int, seed: int) -> None:
        self.items: list[T] = []
        self._wanted, self._seen, self._rng = wanted, 0, random.Random(seed)

    def offer(self, item: T) -> None:
        self._seen += 1
        if len(self.items) < self._wanted:
            self.items.append(item)
        elif (place := self._rng.randrange(self._seen)) < self._wanted:
            self.items[place] = item


def examine(options: InspectOptions) -> Report:
    """Reads every document once.

    Raises:
        ValueError: the folder was not made by `extract`, or a line of it is damaged.
    """
    manifest = read_manifest(options.folder, "extract")
    files = [options.folder / name for name in sorted(manifest.files) if name.endswith(".jsonl") and is_documents(name)]
    characters: Counter[int] = Counter()
    words: Counter[int] = Counter()
    drawn: Drawn[Document] = Drawn(options.samples, options.seed)
    titled = paragraphs = 0
    for document in read_documents(files, progress=sys.stderr.isatty()):
        characters[len(document.text)] += 1
        words[len(document.text.split())] += 1
        paragraphs += document.text.count("\n\n") + bool(document.text)
        titled += bool(document.title)
        drawn.offer(document)
    by_characters = Histogram.of_counts("characters of a document", characters)
    by_words = Histogram.of_counts("words of a document", words)
    report = Report(folder=options.folder, kind="documents of plain text", noted=manifest.counts)
    report.add("files", len(files))
    report.add("bytes", sum(manifest.files[file.name] for file in files))
    report.add("documents", by_words.total)
    report.add("with a title", titled)
    report.add("paragraphs", paragraphs)
    report.add("words", by_words.sum)
    report.add("characters", by_characters.sum)
    report.add("left out as bad", manifest.left_out)
    report.histograms = [by_words, by_characters]
    report.excerpts["first paragraphs"] = [_excerpt(document) for document in drawn.items]
    return report


def is_documents(name: str) -> bool:
    return name.startswith("documents-")


def read_documents(files: Sequence[Path], *, progress: bool = False) -> Iterator[Document]:
    """The documents of these files in order. Raises ValueError for a line that is none; names it."""
    total = sum(file.stat().st_size for file in files)
    with tqdm(desc="inspect", total=total, unit="B", unit_scale=True, disable=not progress) as bar:
        for path in files:
            with path.open("rb") as lines:
                for number, line in enumerate(lines, start=1):
                    bar.update(len(line))
                    yield _parse(line, path, number)


def _parse(line: bytes, path: Path, number: int) -> Document:
    try:
        values = json.loads(line)
        document = Document(id=values["id"], title=values["title"], text=values["text"])
    except (ValueError, KeyError, TypeError) as error:
        raise ValueError(f"{path}, line {number} is no document: {error!r}. Run `extract` again.") from error
    if not all(isinstance(value, str) for value in (document.id, document.title, document.text)):
        raise ValueError(f"{path}, line {number} is no document: id, title and text must be strings.")
    return document


def _excerpt(document: Document) -> Excerpt:
    name = ", ".join(part for part in (document.title, document.id and f"id {document.id}") if part)
    return Excerpt(name or "without title", (document.text.partition("\n\n")[0],))
