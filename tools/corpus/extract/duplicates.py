"""Finding documents that are there twice, with no more in memory than one bucket of their hashes.

Every unit writes the hashes of its documents, sorted. A bucket takes a range of hashes out of all these files, and says
which documents of which unit have come before. The units are then copied without those.
"""

from __future__ import annotations

import functools
import hashlib
import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tools.corpus.work import Context, Step, Unit, draft

BUCKET = 1 << 19
"""Documents of a bucket, about; 16 bytes each, and as much again a few times to sort them."""
_HASHES = ("<u8", "<u8", "<u4")
"""Columns: the high and the low half of a hash, the number of its document in the unit."""
_REPEATS = ("<u4", "<u4")
"""Columns: the number of a unit, the number of a document in it."""


@dataclass(frozen=True, kw_only=True)
class Bucket(Unit):
    first: int
    """The high halves of its hashes lie from `first` to `last`."""
    last: int


def hash_text(text: str) -> bytes:
    """16 bytes that are the same for texts that differ in their white space only."""
    return hashlib.blake2b(" ".join(text.split()).encode(), digest_size=16).digest()


def write_hashes(path: Path, hashes: Sequence[bytes]) -> None:
    """Writes the hashes of a unit's documents, sorted, each with the number of its document."""
    high, low = np.frombuffer(b"".join(hashes), dtype=">u8").reshape(-1, 2).T
    order = np.lexsort((low, high))
    _write(path, _HASHES, (high[order], low[order], order))


def remove_duplicates(step: Step, units: Sequence[Unit], documents: int) -> list[dict[str, int]]:
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
    parts: list[list[NDArray[Any]]] = []
    for unit, name in enumerate(names):
        columns = _read(context.scratch / hashes_name(name), _HASHES)
        first = np.searchsorted(columns[0], np.uint64(bucket.first), side="left")
        last = np.searchsorted(columns[0], np.uint64(bucket.last), side="right")
        # Copies, so that no file stays open.
        parts.append([*(np.array(column[first:last]) for column in columns), np.full(last - first, unit)])
    high, low, number, unit_of = (np.concatenate(columns) for columns in zip(*parts, strict=True))
    # The sort is stable: documents with one text stay in the order of the corpus.
    order = np.lexsort((low, high))
    same = (high[order][1:] == high[order][:-1]) & (low[order][1:] == low[order][:-1])
    repeats = order[1:][same]
    repeats = repeats[np.lexsort((number[repeats], unit_of[repeats]))]
    _write(context.scratch / _repeats_name(bucket.name), _REPEATS, (unit_of[repeats], number[repeats]))
    return {}


def copy_first(unit: Unit, context: Context, *, names: Sequence[str], buckets: Iterable[str]) -> dict[str, Any]:
    """Writes the documents of a unit whose text has not come before."""
    repeats = _repeats(context.scratch, names.index(unit.name), buckets)
    lost = {"duplicates": len(repeats), "characters": 0, "bytes": 0}
    name = documents_name(unit.name)
    with (context.scratch / name).open("rb") as written, draft(context.folder / name) as file:
        for number, line in enumerate(written):
            if number in repeats:
                lost["characters"] += len(json.loads(line)["text"])
                lost["bytes"] += len(line)
            else:
                file.write(line)
    return lost


def _repeats(scratch: Path, unit: int, buckets: Iterable[str]) -> set[int]:
    numbers: set[int] = set()
    for bucket in buckets:
        units, documents = _read(scratch / _repeats_name(bucket), _REPEATS)
        first = np.searchsorted(units, np.uint32(unit), side="left")
        last = np.searchsorted(units, np.uint32(unit), side="right")
        numbers.update(documents[first:last].tolist())
    return numbers


def _write(path: Path, kinds: Sequence[str], columns: Sequence[NDArray[Any]]) -> None:
    """Writes columns one behind the other, so that a search in one reads little of the file."""
    with draft(path) as file:
        for kind, column in zip(kinds, columns, strict=True):
            file.write(column.astype(kind).tobytes())


def _read(path: Path, kinds: Sequence[str]) -> list[NDArray[Any]]:
    """The columns of a file, mapped."""
    types = [np.dtype(kind) for kind in kinds]
    rows = path.stat().st_size // sum(kind.itemsize for kind in types)
    if not rows:
        return [np.empty(0, dtype=kind) for kind in types]
    bytes_ = np.memmap(path, dtype=np.uint8, mode="r")
    bounds = np.cumsum([0, *(rows * kind.itemsize for kind in types)]).tolist()
    return [bytes_[first:last].view(kind) for (first, last), kind in zip(pairwise(bounds), types, strict=True)]
