"""The files of a checkpoint: tensors as safetensors, everything else as JSON, and a checksum of each.

    rank-00003.safetensors   the blocks that rank 3 wrote; also readable on their own
    tensors.json             every tensor: type, shape, and which file holds which block of it
    progress.json            the step, the cube, and what else the run remembers (`writer.facts_of` makes it)
    checksums.json           size and CRC-32 of all the others

Nothing is pickled, so reading a file can give wrong numbers at worst, and never runs code.
The header of a file says where its blocks lie, as PyTorch's `HuggingFaceStorageReader` expects it.
"""

from __future__ import annotations

import io
import json
import os
import struct
import zlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any, BinaryIO

import torch
from torch import Tensor
from torch.distributed.checkpoint.planner import TensorWriteData, WriteItem

from tensor3d.files import create, naming, open_regular

TENSORS, CHECKSUMS = "tensors.json", "checksums.json"
# safetensors' names of types, most bytes first: blocks in this order are aligned without gaps, which it forbids.
DTYPES = {
    "F64": torch.float64,
    "I64": torch.int64,
    "F32": torch.float32,
    "I32": torch.int32,
    "BF16": torch.bfloat16,
    "F16": torch.float16,
    "I16": torch.int16,
    "U8": torch.uint8,
    "I8": torch.int8,
    "BOOL": torch.bool,
}
NAME_OF = {dtype: name for name, dtype in DTYPES.items()}
PIECE = 4 * 2**20  # bytes a write: long stretches without Python's lock, and little to wait for


@dataclass(frozen=True, kw_only=True)
class FileSum:
    """What a file must be."""

    bytes: int
    crc32: int


@dataclass(frozen=True, kw_only=True)
class TensorBlock:
    """A part of a tensor in a file: `sizes` elements from `offsets` on, in the bytes `start` to `stop` of its data."""

    name: str
    dtype: torch.dtype
    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    start: int
    stop: int

    def view(self, data: Tensor) -> Tensor:
        """This block of the data of a file, [bytes] of uint8, as a tensor of `sizes`."""
        return data[self.start : self.stop].view(self.dtype).view(self.sizes)


def file_name(rank: int) -> str:
    return f"rank-{rank:05d}.safetensors"


def arrange(items: Iterable[WriteItem]) -> list[TensorBlock]:
    """Lays what a rank writes end to end. Raises ValueError for a type that safetensors does not know."""
    blocks: list[TensorBlock] = []
    start = 0
    for item in sorted(items, key=_by_alignment):
        data = data_of(item)
        stop = start + prod(data.chunk.sizes) * data.properties.dtype.itemsize
        blocks.append(
            TensorBlock(
                name=item.index.fqn,
                dtype=data.properties.dtype,
                offsets=tuple(data.chunk.offsets),
                sizes=tuple(data.chunk.sizes),
                start=start,
                stop=stop,
            )
        )
        start = stop
    return blocks


def header_of(blocks: Sequence[TensorBlock]) -> bytes:
    """The beginning of a safetensors file: its length, then JSON, filled up with blanks to a multiple of 8."""
    offsets = {block.name: {"saved_offsets": block.offsets} for block in blocks}
    content: dict[str, Any] = {
        "__metadata__": {"format": "pt", "DCP_VERSION": "1.0", "DCP_SHARDING_INFO": json.dumps(offsets)}
    }
    for block in blocks:
        content[block.name] = {
            "dtype": NAME_OF[block.dtype],
            "shape": block.sizes,
            "data_offsets": (block.start, block.stop),
        }
    text = json.dumps(content, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return struct.pack("<Q", len(text)) + text


def index_of(plans: Sequence[Sequence[WriteItem]]) -> bytes:
    """The content of tensors.json, from what each rank writes: chunks are [rank, offsets, sizes]."""
    tensors: dict[str, Any] = {}
    for rank, items in enumerate(plans):
        for item in items:
            data = data_of(item)
            entry = tensors.setdefault(
                item.index.fqn, {"dtype": NAME_OF[data.properties.dtype], "shape": list(data.size), "chunks": []}
            )
            entry["chunks"].append([rank, list(data.chunk.offsets), list(data.chunk.sizes)])
    return _encoded({"tensors": tensors})


def write_file(path: Path, parts: Iterable[memoryview]) -> FileSum:
    """Writes a new file and puts it on disk; the checksum is that of the memory it came from."""
    with naming(path), create(path, buffering=0) as file:
        written = write_parts(file, parts)
        os.fsync(file.fileno())
    return written


def write_parts(file: BinaryIO | io.FileIO, parts: Iterable[memoryview]) -> FileSum:
    size = crc = 0
    for part in parts:
        for first in range(0, len(part), PIECE):
            piece = part[first : first + PIECE]
            crc = zlib.crc32(piece, crc)
            size += len(piece)
            while len(piece):
                piece = piece[file.write(piece) :]
    return FileSum(bytes=size, crc32=crc)


def write_json(path: Path, content: dict[str, Any]) -> FileSum:
    return write_file(path, [memoryview(_encoded(content, indent=2))])


def write_checksums(folder: Path, sums: dict[str, FileSum]) -> FileSum:
    files = {name: {"bytes": each.bytes, "crc32": f"{each.crc32:08x}"} for name, each in sorted(sums.items())}
    return write_json(folder / CHECKSUMS, {"files": files})


def checksum(path: Path) -> FileSum:
    """Of a file as it is on disk. Raises OSError where it cannot be read."""
    size = crc = 0
    buffer = bytearray(PIECE)
    view = memoryview(buffer)
    with open_regular(path, buffering=0) as file:
        while count := file.readinto(buffer):  # type: ignore[attr-defined]  # a file without a buffer
            crc = zlib.crc32(view[:count], crc)
            size += count
    return FileSum(bytes=size, crc32=crc)


def _encoded(content: dict[str, Any], *, indent: int | None = None) -> bytes:
    return (json.dumps(content, indent=indent) + "\n").encode()


def data_of(item: WriteItem) -> TensorWriteData:
    assert item.tensor_data is not None, "only tensors are planned"
    return item.tensor_data


def _by_alignment(item: WriteItem) -> tuple[int, str]:
    dtype = data_of(item).properties.dtype
    if dtype not in NAME_OF:
        raise ValueError(f"{item.index.fqn} is of {dtype}, which a checkpoint cannot hold. Use one of {list(NAME_OF)}.")
    return -dtype.itemsize, item.index.fqn
