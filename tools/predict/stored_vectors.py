"""Vectors that `tools.predict embed` has written, as arrays, Parquet or lines of JSON, to be searched in."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tools.common.files import parsed_json

Ids = Sequence[Any] | None
SUFFIXES = (".npy", ".parquet", ".jsonl")


@dataclass(frozen=True, kw_only=True, eq=False)
class StoredVectors:
    """Those of some files, one behind another. Arrays are mapped, and read where they are looked at; others are held.

    Raises:
        ValueError: vectors of different sizes.
    """

    files: Sequence[tuple[Path, NDArray[np.float32], Ids]]
    """Each with its vectors (n, H), and their ids where it has some."""

    def __post_init__(self) -> None:
        (first, one, _), *others = self.files
        for path, vectors, _ in others:
            if vectors.shape[1] != one.shape[1]:
                raise ValueError(
                    f"{path} has vectors of {vectors.shape[1]} numbers, and {first} of {one.shape[1]}. Search in those "
                    "of one model and one --dimensions."
                )

    @property
    def shape(self) -> tuple[int, int]:
        return len(self), self.files[0][1].shape[1]

    def __len__(self) -> int:
        return sum(len(vectors) for _, vectors, _ in self.files)

    def __getitem__(self, rows: slice) -> NDArray[np.float32]:
        """(rows, H)"""
        first, last, _ = rows.indices(len(self))
        found, before = [], 0
        for _, vectors, _ in self.files:
            part = vectors[max(0, first - before) : max(0, last - before)]
            found += [part] if len(part) else []
            before += len(vectors)
        return np.concatenate(found) if len(found) != 1 else found[0]

    def id_of(self, place: int) -> Any:
        for _, vectors, ids in self.files:
            if place < len(vectors):
                return None if ids is None else ids[place]
            place -= len(vectors)
        raise IndexError(place)


def open_vectors(path: Path) -> StoredVectors:
    """A file, or all of a folder in the order of their names.

    Raises:
        ValueError: no vectors there, or what are none; the message names the file.
    """
    found = [path]
    if path.is_dir():
        found = sorted(each for each in path.iterdir() if each.suffix in SUFFIXES and each.is_file())
    if not found or not all(each.is_file() for each in found):
        raise ValueError(f"{path} has no vectors: files {', '.join(SUFFIXES)} that `tools.predict embed` has written.")
    return StoredVectors(files=[_read(each) for each in found])


def _read(path: Path) -> tuple[Path, NDArray[np.float32], Ids]:
    readers: Mapping[str, Callable[[Path], tuple[Any, Ids]]]
    readers = {".npy": _array, ".parquet": _parquet, ".jsonl": _lines}
    if path.suffix not in readers:
        raise ValueError(f"{path} does not say by its suffix what it is: {', '.join(SUFFIXES)}.")
    try:
        vectors, ids = readers[path.suffix](path)
    except (OSError, TypeError, KeyError, AttributeError, ValueError, OverflowError, EOFError) as problem:
        told = f"no {problem}" if isinstance(problem, KeyError) else str(problem).partition("\n")[0]
        raise ValueError(f"{path} has no vectors that can be read: {told}. Write it again.") from None
    if vectors.ndim != 2 or not vectors.size or vectors.dtype != np.float32:
        raise ValueError(
            f"{path} must have vectors of numbers, (texts, size) in float32. Got shape {vectors.shape} and "
            f"{vectors.dtype}."
        )
    return path, vectors, ids


def _array(path: Path) -> tuple[Any, Ids]:
    found = np.load(path, mmap_mode="r", allow_pickle=False)
    if not isinstance(found, np.ndarray):
        raise ValueError("it is an archive of arrays (.npz)")
    return found, None


def _parquet(path: Path) -> tuple[Any, Ids]:
    table = pyarrow_parquet().read_table(path, columns=["id", "vector"])
    return _stacked(table.column("vector").to_pylist()), table.column("id").to_pylist()


def _lines(path: Path) -> tuple[Any, Ids]:
    with path.open("rb") as file:
        rows = [parsed_json(line, unique=True) for line in file if line.strip()]
    return _stacked([row.get("vector") if "error" in row else row["vector"] for row in rows]), [
        row.get("id") for row in rows
    ]


def _stacked(rows: Sequence[Sequence[float] | None]) -> NDArray[np.float32]:
    """A text that was skipped has no vector, and is nan. Raises ValueError for texts and truth values, of which NumPy
    would make numbers."""
    for number, row in enumerate(rows, start=1):
        if row is not None and not set(map(type, row)) <= {int, float}:
            raise ValueError(f"vector {number} is not of numbers alone, {row!r:.60}")
    size = next((len(row) for row in rows if row is not None), 0)
    return np.array([[np.nan] * size if row is None else row for row in rows], dtype=np.float32)


def pyarrow_parquet() -> Any:
    """The module. Raises ValueError where it is missing."""
    try:
        return importlib.import_module("pyarrow.parquet")
    except ImportError as problem:
        raise ValueError(f"Parquet needs pyarrow ({problem}): pip install pyarrow.") from None
