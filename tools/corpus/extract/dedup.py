"""Finding documents that are there twice, with no more in memory than one bucket of their hashes.

Every unit writes the hashes of its documents, in sorted runs. A bucket takes a range of hashes out of all these runs,
and says which documents of which unit have come before. The units are then copied without those.
"""

from __future__ import annotations

import functools
import hashlib
import json
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
from numpy.typing import NDArray

from tools.corpus.pipeline import Context, Stage, Unit, draft

BUCKET = 1 << 19
"""Documents of a bucket, about; 16 bytes each, and as much again a few times to sort them."""
RUN = 1 << 19
"""Documents of a unit whose hashes are sorted together."""
_HASHES = ("<u8", "<u8", "<u4")
"""Columns: the high and the low half of a hash, the number of its document in the unit."""
_REPEATS = ("<u4", "<u4")
"""Columns: the number of a unit, the number of a document in it."""

Columns = Sequence[NDArray[Any]]


@dataclass(frozen=True, kw_only=True)
class Bucket(Unit):
    first: int
    """The high halves of its hashes lie from `first` to `last`."""
    last: int


def hash_text(text: str) -> bytes:
    """16 bytes that are the same for texts that differ in their white space only."""
    return hashlib.blake2b(" ".join(text.split()).encode(), digest_size=16).digest()


class HashStore:
    """Writes the hashes of a unit's documents in runs, each sorted, with the numbers of the documents.

    A unit may be a whole .gz file, so no more than a run is in memory.
    """

    def __init__(self, file: BinaryIO) -> None:
        self._file = file
        self._first = 0
        self._run = bytearray()

    def add(self, text: str) -> None:
        """Takes the text of the next document."""
        self._run += hash_text(text)
        if len(self._run) == 16 * RUN:
            self.write_run()

    def write_run(self) -> None:
        """Writes what has come since the last run; to be called once more after the last document."""
        high, low = np.frombuffer(bytes(self._run), dtype=">u8").reshape(-1, 2).T
        order = np.lexsort((low, high))
        _write(self._file, _HASHES, (high[order], low[order], self._first + order))
        self._first += len(order)
        self._run.clear()


def remove_duplicates(step: Stage, units: Sequence[Unit], documents: int) -> list[dict[str, int]]:
    """Writes the units' documents into the output, each text only where it comes first.

    Args:
        step: whose scratch folder holds what `documents_name` and `hashes_name` name, for every unit.
        units: in the order of the corpus.
        documents: how many they have together.

    Returns:
        Of every unit, what it loses: "duplicates", and their "characters" and "bytes".
    """
    count = max(1, -(-documents // BUCKET))
    bounds = [(number << 64) // count for number in range(count + 1)]
    buckets = [
        Bucket(name=f"{number:05d}", size=16 * documents // count, first=first, last=last - 1)
        for number, (first, last) in enumerate(pairwise(bounds))
    ]
    names = tuple(unit.name for unit in units)
    step.run("duplicates", buckets, functools.partial(find_repeats, names=names))
    copying = functools.partial(copy_first, names=names, buckets=tuple(bucket.name for bucket in buckets))
    return step.run("copy", units, copying)


def documents_name(unit: str) -> str:
    return f"documents-{unit}.jsonl"


def hashes_name(unit: str) -> str:
    return f"hashes-{unit}.bin"


def _repeats_name(bucket: str) -> str:
    return f"repeats-{bucket}.bin"


def find_repeats(bucket: Bucket, context: Context, *, names: Sequence[str]) -> dict[str, Any]:
    """Writes which documents of a bucket have the text of an earlier one, in the order of the corpus."""
    parts: list[Columns] = [[np.empty(0, dtype=kind) for kind in (*_HASHES, "<u4")]]
    rows = 0
    repeats: list[Columns] = []
    for part in _hashes_of(bucket, context.scratch, names):
        parts.append(part)
        rows += len(part[0])
        if rows >= BUCKET:
            # A text that is there a million times has all of them in one bucket.
            first, again = _part_repeats(parts)
            parts, rows = [first], 0
            repeats.append(again)
    repeats.append(_part_repeats(parts)[1])
    with draft(context.scratch / _repeats_name(bucket.name)) as file:
        _write(file, _REPEATS, [np.concatenate(columns) for columns in zip(*repeats, strict=True)])
    return {}


def _hashes_of(bucket: Bucket, scratch: Path, names: Sequence[str]) -> Iterator[Columns]:
    """High and low halves, numbers of documents and of units: what every run of every unit has in the bucket."""
    for unit, name in enumerate(names):
        for columns in _read(scratch / hashes_name(name), _HASHES, RUN):
            first = np.searchsorted(columns[0], np.uint64(bucket.first), side="left")
            last = np.searchsorted(columns[0], np.uint64(bucket.last), side="right")
            # Copies, so that no file stays open. A run is sorted by hash, and what is returned by document.
            order = np.argsort(columns[2][first:last])
            yield [*(column[first:last][order] for column in columns), np.full(last - first, unit, dtype="<u4")]


def _part_repeats(parts: Sequence[Columns]) -> tuple[Columns, Columns]:
    """The rows whose hash comes first, and the units and documents of the others; both in the order of the corpus."""
    columns = [np.concatenate(column) for column in zip(*parts, strict=True)]
    high, low, number, unit = columns
    # The sort is stable: documents with one text stay in the order of the corpus.
    order = np.lexsort((low, high))
    is_repeat = np.zeros(len(order), dtype=bool)
    is_repeat[order[1:]] = (np.diff(high[order]) == 0) & (np.diff(low[order]) == 0)
    return [column[~is_repeat] for column in columns], [unit[is_repeat], number[is_repeat]]


def copy_first(unit: Unit, context: Context, *, names: Sequence[str], buckets: Iterable[str]) -> dict[str, Any]:
    """Writes the documents of a unit whose text has not come before."""
    repeats = _repeats(context.scratch, names.index(unit.name), buckets)
    lost = {"duplicates": len(repeats), "characters": 0, "bytes": 0}
    name = documents_name(unit.name)
    remaining = iter(repeats)
    repeat = next(remaining, None)
    with (context.scratch / name).open("rb") as written, draft(context.folder / name) as file:
        for number, line in enumerate(written):
            if number == repeat:
                lost["characters"] += len(json.loads(line)["text"])
                lost["bytes"] += len(line)
                repeat = next(remaining, None)
            else:
                file.write(line)
    return lost


def _repeats(scratch: Path, unit: int, buckets: Iterable[str]) -> NDArray[np.uint32]:
    """The numbers of the documents of a unit that are repeats, in order; 4 bytes each."""
    parts = [np.empty(0, dtype=np.uint32)]
    for bucket in buckets:
        for units, documents in _read(scratch / _repeats_name(bucket), _REPEATS):
            first = np.searchsorted(units, np.uint32(unit), side="left")
            last = np.searchsorted(units, np.uint32(unit), side="right")
            parts.append(np.array(documents[first:last]))
    numbers = np.concatenate(parts)
    numbers.sort()
    return numbers


def _write(file: BinaryIO, kinds: Sequence[str], columns: Columns) -> None:
    """Writes columns one behind the other, so that a search in one reads little of the file."""
    for kind, column in zip(kinds, columns, strict=True):
        file.write(column.astype(kind).tobytes())


def _read(path: Path, kinds: Sequence[str], run: int | None = None) -> Iterator[Columns]:
    """The columns of a file, mapped; of one that was written in runs of so many rows, the columns of every run."""
    types = [np.dtype(kind) for kind in kinds]
    width = sum(kind.itemsize for kind in types)
    rows = path.stat().st_size // width
    for begin in range(0, rows, run or rows or 1):
        count = min(run or rows, rows - begin)
        bytes_ = np.memmap(path, dtype=np.uint8, mode="r", offset=begin * width, shape=(count * width,))
        bounds = np.cumsum([0, *(count * kind.itemsize for kind in types)]).tolist()
        yield [bytes_[first:last].view(kind) for (first, last), kind in zip(pairwise(bounds), types, strict=True)]
