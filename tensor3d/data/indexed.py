"""Documents on disk, in the indexed format of Megatron-LM (`megatron/core/datasets/indexed_dataset.py`).

`PREFIX.bin` holds the ids of all items, one after another. `PREFIX.idx` says where they begin (little-endian):

    magic                 9 bytes, b"MMIDIDX\\x00\\x00"
    version               u64, 1
    type of the ids       u8, see `TYPES`
    items                 u64, n
    document boundaries   u64, d + 1 for d documents
    lengths               i32 (n,), ids of each item
    pointers              i64 (n,), first byte of each item in the .bin
    documents             i64 (d + 1,), first item of each document, then n; begins with 0

An item is a sentence here, as Megatron's own preparation for BERT has it.
"""

from __future__ import annotations

import os
import struct
import uuid
from array import array
from collections.abc import Iterable, Sequence
from functools import cached_property
from itertools import chain
from pathlib import Path
from types import MappingProxyType, TracebackType

import numpy as np
from numpy.typing import NDArray

MAGIC = b"MMIDIDX\x00\x00"
VERSION = 1
HEADER = struct.Struct("<9sQBQQ")
TYPES = MappingProxyType(
    {code: np.dtype(name) for code, name in ((1, "u1"), (2, "i1"), (3, "<i2"), (4, "<i4"), (5, "<i8"), (8, "<u2"))}
)
"""Numpy type of the ids by code. The format's codes 6 and 7 are floating-point numbers, which are no ids."""


class IndexedDataset:
    """Reads documents without loading them: the ids stay in a memory map.

    Raises:
        ValueError: a file is missing, foreign, cut short or contradicts itself; the message names it.
    """

    lengths: NDArray[np.int32]
    """int32 (items,): ids of each item."""
    documents: NDArray[np.int64]
    """int64 (documents + 1,): items `documents[i]` to `documents[i + 1] - 1` are document `i`."""
    ids: NDArray[np.integer]
    """(ids,): all ids, items one after another."""

    def __init__(self, prefix: str | Path) -> None:
        self.prefix = Path(prefix)
        index, data = _paths(self.prefix)
        for path in (index, data):
            if not path.is_file():
                raise ValueError(f"{path} is missing; an indexed dataset is a pair of files, .bin and .idx.")
        dtype, items = _read_header(index)
        raw = np.asarray(np.memmap(index, mode="r", dtype=np.uint8))[HEADER.size :]
        self.lengths = raw[: 4 * items].view("<i4")
        pointers = raw[4 * items : 12 * items].view("<i8")
        self.documents = raw[12 * items :].view("<i8")
        _check_index(index, self.lengths, pointers, self.documents, dtype)
        size = int(np.sum(self.lengths, dtype=np.int64)) * dtype.itemsize
        if data.stat().st_size != size:
            raise ValueError(
                f"{data} has {data.stat().st_size} bytes where its index speaks of {size}; prepare it again."
            )
        # A file of no bytes cannot be mapped.
        self.ids = np.asarray(np.memmap(data, mode="r", dtype=dtype)) if size else np.empty(0, dtype=dtype)

    def __len__(self) -> int:
        return len(self.lengths)

    def __getitem__(self, item: int) -> NDArray[np.integer]:
        """(ids of the item,); IndexError outside 0 to items - 1."""
        if not 0 <= item < len(self):
            raise IndexError(f"item {item} of {len(self)}")
        return self.ids[self.starts[item] : self.starts[item + 1]]

    @cached_property
    def starts(self) -> NDArray[np.int64]:
        """int64 (items + 1,): where each item begins in `ids`, then the number of ids."""
        return np.concatenate(([0], np.cumsum(self.lengths, dtype=np.int64)))


class IndexedWriter:
    """Writes documents. A context manager: the files appear when it ends well, and not at all when it fails.

    Args:
        prefix: path without `.bin` and `.idx`.
        vocab_size: ids lie below it. Up to 65,536 the ids take two bytes each, else four.
    """

    def __init__(self, prefix: str | Path, *, vocab_size: int) -> None:
        if vocab_size < 1:
            raise ValueError(f"vocab_size must be at least 1. Got {vocab_size}.")
        self._paths = _paths(Path(prefix))
        self._vocab_size = vocab_size
        self._code = 8 if vocab_size <= 2**16 else 4
        self._lengths = array("i")
        self._documents = array("q", [0])

    def __enter__(self) -> IndexedWriter:
        tag = uuid.uuid4().hex
        self._drafts = tuple(path.with_name(f"{path.name}.{tag}.tmp") for path in self._paths)
        self._data = self._drafts[1].open("xb")
        return self

    def add_document(self, items: Iterable[Sequence[int]]) -> None:
        """Appends a document.

        Raises:
            ValueError: an item without ids, or an id outside the vocabulary.
        """
        items = list(items)
        lengths = [len(item) for item in items]
        if 0 in lengths:
            raise ValueError(f"item {lengths.index(0)} of document {len(self._documents) - 1} is empty; leave it out.")
        ids = np.fromiter(chain.from_iterable(items), dtype=np.int64, count=sum(lengths))
        outside = ids[(ids < 0) | (ids >= self._vocab_size)]
        if len(outside):
            raise ValueError(f"ids must lie between 0 and {self._vocab_size - 1}. Got {outside[0]}.")
        self._data.write(ids.astype(TYPES[self._code]).tobytes())
        self._lengths.extend(lengths)
        self._documents.append(len(self._lengths))

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        index, data = self._drafts
        try:
            self._data.close()
            if error is None:
                self._write_index(index)
                # The index comes last: where there is one, its data is complete.
                os.replace(data, self._paths[1])
                os.replace(index, self._paths[0])
        finally:
            for draft in self._drafts:
                draft.unlink(missing_ok=True)

    def _write_index(self, path: Path) -> None:
        lengths = np.array(self._lengths, dtype="<i4")
        ends = np.cumsum(lengths, dtype="<i8")
        pointers = (ends - lengths) * TYPES[self._code].itemsize
        documents = np.array(self._documents, dtype="<i8")
        with path.open("xb") as file:
            file.write(HEADER.pack(MAGIC, VERSION, self._code, len(lengths), len(documents)))
            for part in (lengths, pointers, documents):
                file.write(part.tobytes())


def _paths(prefix: Path) -> tuple[Path, Path]:
    """The .idx and the .bin; a prefix may itself contain dots."""
    return prefix.with_name(f"{prefix.name}.idx"), prefix.with_name(f"{prefix.name}.bin")


def _read_header(path: Path) -> tuple[np.dtype[np.integer], int]:
    """Type of the ids, and number of items; what is left of the file is known to be the document boundaries."""
    with path.open("rb") as file:
        header = file.read(HEADER.size)
    if len(header) < HEADER.size or header[: len(MAGIC)] != MAGIC:
        raise ValueError(f"{path} is no index of an indexed dataset: it does not begin with {MAGIC!r} and a header.")
    _, version, code, items, boundaries = HEADER.unpack(header)
    if version != VERSION:
        raise ValueError(f"{path} has version {version} of the format; only version {VERSION} is known.")
    if code not in TYPES:
        raise ValueError(f"{path} stores ids of type code {code}; known are {dict(TYPES)}.")
    size = HEADER.size + 12 * items + 8 * boundaries
    if path.stat().st_size != size:
        raise ValueError(
            f"{path} has {path.stat().st_size} bytes; {items} items and {boundaries} document boundaries take {size}. "
            "It is cut short or damaged; prepare it again."
        )
    return TYPES[code], items


def _check_index(
    path: Path,
    lengths: NDArray[np.int32],
    pointers: NDArray[np.int64],
    documents: NDArray[np.int64],
    dtype: np.dtype[np.integer],
) -> None:
    if (lengths < 0).any():
        raise ValueError(f"{path} is damaged: item {int(np.argmax(lengths < 0))} has a negative length.")
    if (pointers != (np.cumsum(lengths, dtype=np.int64) - lengths) * dtype.itemsize).any():
        raise ValueError(f"{path} is damaged: its items do not lie one after another.")
    if len(documents) == 0 or documents[0] != 0 or documents[-1] != len(lengths) or (np.diff(documents) < 0).any():
        raise ValueError(
            f"{path} is damaged: its documents must begin at item 0, ascend and end at item {len(lengths)}."
        )
