"""Documents on disk, in the indexed format of Megatron-LM (`megatron/core/datasets/indexed_dataset.py`).

`PREFIX.bin` holds the ids of all items, one after another. `PREFIX.idx` says where they begin (little-endian):

    magic                 9 bytes, b"MMIDIDX\x00\x00"
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
import shutil
import struct
import uuid
import warnings
from collections.abc import Iterable, Sequence
from contextlib import ExitStack
from functools import cached_property
from itertools import chain
from pathlib import Path
from types import MappingProxyType, TracebackType
from typing import Any, BinaryIO

import numpy as np
from numpy.typing import ArrayLike, NDArray

from tensor3d.files import create, open_regular

MAGIC = b"MMIDIDX\x00\x00"
VERSION = 1
HEADER = struct.Struct("<9sQBQQ")
TYPES = MappingProxyType(
    {code: np.dtype(name) for code, name in ((1, "u1"), (2, "i1"), (3, "<i2"), (4, "<i4"), (5, "<i8"), (8, "<u2"))}
)
"""Numpy type of the ids by code. The format's codes 6 and 7 are floating-point numbers, which are no ids."""
_BLOCK = 1 << 20
"""Items that are looked at or written at a time."""


class IndexedDataset:
    """Reads documents without loading them: ids and index stay in memory maps. Opening reads the index once.

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
        dtype, items, boundaries = _read_header(index)
        raw = np.asarray(np.memmap(index, mode="r", dtype=np.uint8))[HEADER.size :]
        self.lengths = raw[: 4 * items].view("<i4")
        self._pointers = raw[4 * items : 12 * items].view("<i8")
        self.documents = raw[12 * items : 12 * items + 8 * boundaries].view("<i8")
        size = _check_items(index, self.lengths, self._pointers, dtype.itemsize)
        _check_documents(index, self.documents, items)
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
        start = int(self._pointers[item]) // self.ids.dtype.itemsize
        return self.ids[start : start + int(self.lengths[item])]

    @cached_property
    def starts(self) -> NDArray[np.int64]:
        """int64 (items + 1,): where each item begins in `ids`, then the number of ids."""
        starts = np.zeros(len(self) + 1, dtype=np.int64)
        np.cumsum(self.lengths, dtype=np.int64, out=starts[1:])
        return starts


class IndexedWriter:
    """Writes documents, as many as the disk holds: what the index needs is kept in files beside it until the end.

    A context manager: the files appear when it ends well, and not at all when it fails.

    Args:
        prefix: path without `.bin` and `.idx`.
        vocab_size: ids lie below it. Up to 65,536 the ids take two bytes each, else four.
    """

    def __init__(self, prefix: str | Path, *, vocab_size: int) -> None:
        if vocab_size < 1:
            raise ValueError(f"vocab_size must be at least 1. Got {vocab_size}.")
        self._code = 8 if vocab_size <= 2**16 else 4
        self._paths = _paths(Path(prefix))
        self._vocab_size = vocab_size
        self._items = 0
        self._boundaries = 1

    def __enter__(self) -> IndexedWriter:
        tag = uuid.uuid4().hex
        names = (*(path.name for path in self._paths), *(f"{self._paths[0].name}.{part}" for part in ("len", "doc")))
        self._drafts = tuple(self._paths[0].with_name(f"{name}.{tag}.tmp") for name in names)
        with ExitStack() as opened:
            self._index, self._data, self._lengths, self._documents = (
                opened.enter_context(create(draft)) for draft in self._drafts
            )
            self._opened = opened.pop_all()
        self._documents.write(np.zeros(1, dtype="<i8").tobytes())
        return self

    def add_document(self, items: Iterable[Sequence[int]]) -> None:
        """Appends a document.

        Raises:
            ValueError: an item without ids, or an id outside the vocabulary.
        """
        items = list(items)
        lengths = [len(item) for item in items]
        ids = np.fromiter(chain.from_iterable(items), dtype=np.int64, count=sum(lengths))
        self.add_documents(ids, lengths, [len(items)])

    def add_documents(self, ids: NDArray[np.integer], lengths: ArrayLike, items: ArrayLike) -> None:
        """Appends many documents at once.

        Args:
            ids: (n,), of all items, one after another.
            lengths: (m,), ids of each item; their sum is n.
            items: items of each document; their sum is m.

        Raises:
            ValueError: an item without ids, an id outside the vocabulary, or sums that are not so.
        """
        sizes, counts = np.asarray(lengths, dtype=np.int64), np.asarray(items, dtype=np.int64)
        if sizes.sum() != len(ids) or counts.sum() != len(sizes):
            raise ValueError(
                f"the lengths of {len(sizes)} items add up to {sizes.sum()}, and {len(ids)} ids are given; the "
                f"documents' items add up to {counts.sum()}. Both sums must be met."
            )
        ends = np.cumsum(counts)
        if (sizes < 1).any():
            item = int(np.argmax(sizes < 1))
            document = int(np.searchsorted(ends, item, side="right"))
            number = item - int(ends[document] - counts[document])
            raise ValueError(f"item {number} of document {self._boundaries - 1 + document} is empty; leave it out.")
        outside = ids[(ids < 0) | (ids >= self._vocab_size)]
        if len(outside):
            raise ValueError(f"ids must lie between 0 and {self._vocab_size - 1}. Got {outside[0]}.")
        _put(self._data, ids, TYPES[self._code])
        _put(self._lengths, sizes, "<i4")
        _put(self._documents, self._items + ends, "<i8")
        self._items += len(sizes)
        self._boundaries += len(counts)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        index, data = self._drafts[:2]
        try:
            with self._opened:
                if error is None:
                    self._write_index()
                    # On disk before it has its name: also where the machine fails, what has its name is whole.
                    for file in (self._data, self._index):
                        file.flush()
                        os.fsync(file.fileno())
            if error is None:
                # The index comes last: where there is one, its data is complete.
                os.replace(data, self._paths[1])
                os.replace(index, self._paths[0])
        finally:
            for draft in self._drafts:
                draft.unlink(missing_ok=True)

    def _write_index(self) -> None:
        width = TYPES[self._code].itemsize
        self._index.write(HEADER.pack(MAGIC, VERSION, self._code, self._items, self._boundaries))
        for file in (self._lengths, self._documents):
            file.seek(0)
        shutil.copyfileobj(self._lengths, self._index, _BLOCK)
        self._lengths.seek(0)
        position = 0
        while block := self._lengths.read(4 * _BLOCK):
            lengths = np.frombuffer(block, dtype="<i4")
            ends = position + np.cumsum(lengths, dtype=np.int64)
            _put(self._index, (ends - lengths) * width, "<i8")
            position = int(ends[-1])
        shutil.copyfileobj(self._documents, self._index, _BLOCK)


def _put(file: BinaryIO, values: NDArray[Any], dtype: Any) -> None:
    file.write(np.ascontiguousarray(values, dtype=dtype).data)


def _paths(prefix: Path) -> tuple[Path, Path]:
    """The .idx and the .bin; a prefix may itself contain dots."""
    return prefix.with_name(f"{prefix.name}.idx"), prefix.with_name(f"{prefix.name}.bin")


def _read_header(path: Path) -> tuple[np.dtype[np.integer], int, int]:
    """Type of the ids, number of items, and number of document boundaries, which the file has room for."""
    with open_regular(path) as file:
        header = file.read(HEADER.size)
    if header.startswith(b"TNTIDX"):
        raise ValueError(
            f"{path} is an index of the older format TNTIDX, of fairseq and of Megatron's `--dataset-impl lazy` or "
            "`cached`, which is not read here. Prepare the data again with `--dataset-impl mmap`."
        )
    if len(header) < HEADER.size or header[: len(MAGIC)] != MAGIC:
        raise ValueError(f"{path} is no index of an indexed dataset: it does not begin with {MAGIC!r} and a header.")
    _, version, code, items, boundaries = HEADER.unpack(header)
    if version != VERSION:
        raise ValueError(f"{path} has version {version} of the format; only version {VERSION} is known.")
    if code not in TYPES:
        raise ValueError(f"{path} stores ids of type code {code}; known are {dict(TYPES)}.")
    size, found = HEADER.size + 12 * items + 8 * boundaries, path.stat().st_size
    if items and found == size + items:
        warnings.warn(
            f"{path} has a mode of one byte for each of its {items} items behind the document boundaries, as Megatron "
            "writes for data of several kinds; they are ignored.",
            stacklevel=3,
        )
    elif found != size:
        wrong = "cut short" if found < size else "longer than that, and damaged or no such file"
        raise ValueError(
            f"{path} has {found} bytes; {items} items and {boundaries} document boundaries take {size}. It is {wrong}; "
            "prepare it again."
        )
    return TYPES[code], items, boundaries


def _check_items(path: Path, lengths: NDArray[np.int32], pointers: NDArray[np.int64], width: int) -> int:
    """Bytes of all items, which must lie one after another. Looks at a block at a time: an index may be large."""
    position = 0
    for start in range(0, len(lengths), _BLOCK):
        part = lengths[start : start + _BLOCK].astype(np.int64)
        if (part < 0).any():
            raise ValueError(f"{path} is damaged: item {start + int(np.argmax(part < 0))} has a negative length.")
        ends = position + np.cumsum(part) * width
        if (pointers[start : start + _BLOCK] != ends - part * width).any():
            raise ValueError(f"{path} is damaged: its items do not lie one after another.")
        position = int(ends[-1])
    return position


def _check_documents(path: Path, documents: NDArray[np.int64], items: int) -> None:
    if len(documents) == 0 or documents[0] != 0 or documents[-1] != items or (documents[1:] < documents[:-1]).any():
        raise ValueError(f"{path} is damaged: its documents must begin at item 0, ascend and end at item {items}.")
