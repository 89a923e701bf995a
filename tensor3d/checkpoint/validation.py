"""What a checkpoint says it holds, read from its JSON files with nothing taken on trust."""

from __future__ import annotations

import os
import re
from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from tensor3d.checkpoint.directory import PROGRESS, DamagedError, read_json, read_progress
from tensor3d.checkpoint.format import CHECKSUMS, DTYPES, NAME_OF, TENSORS, FileSum, checksum, file_name
from tensor3d.checkpoint.state import CPU_STREAM
from tensor3d.files import open_regular, what_is_wrong

_FILE = re.compile(r"rank-\d{5,}\.safetensors")
_SENSELESS = (KeyError, TypeError, AttributeError, ValueError)  # of JSON that says something else than it should
_ELSEWHERE = "Resume from an earlier checkpoint."
_NUMBERS = 1 << 24  # read at once


@dataclass(frozen=True, kw_only=True)
class StoredChunk:
    """A block of a tensor: which file has it, where it begins in the logical tensor, and how large it is."""

    file: str
    offsets: tuple[int, ...]
    sizes: tuple[int, ...]


@dataclass(frozen=True, kw_only=True)
class StoredTensor:
    """A logical tensor of a checkpoint."""

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    chunks: tuple[StoredChunk, ...]

    @property
    def bytes(self) -> int:
        return prod(self.shape) * self.dtype.itemsize


@dataclass(frozen=True, kw_only=True)
class CheckpointIndex:
    """A checkpoint, without the numbers in its tensors."""

    folder: Path
    progress: dict[str, Any]
    tensors: dict[str, StoredTensor]
    files: dict[str, FileSum]
    """Every file but the list of checksums itself."""

    @property
    def bytes(self) -> int:
        """Of all files together."""
        return sum(file.bytes for file in self.files.values())


def read_contents(folder: Path) -> CheckpointIndex:
    """Reads everything but the tensors.

    Raises:
        DamagedError: lists that are missing, make no sense or contradict each other; the message names the file.
        ValueError: no checkpoint, or one of another version.
    """
    progress = read_progress(folder)
    sums = _checksums(folder / CHECKSUMS)
    tensors = _tensors(folder / TENSORS)
    needed = {chunk.file for tensor in tensors.values() for chunk in tensor.chunks} | {TENSORS, PROGRESS}
    if missing := sorted(needed - sums.keys()):
        raise DamagedError(f"{folder / CHECKSUMS} is damaged: it has no line for {', '.join(missing)}. {_ELSEWHERE}")
    _check_streams(folder / TENSORS, tensors, progress["ranks"])
    return CheckpointIndex(folder=folder, progress=progress, tensors=tensors, files=sums)


def size_problems(contents: CheckpointIndex) -> list[str]:
    """Files that are missing, or longer or shorter than they were written."""
    problems = []
    for name, wanted in contents.files.items():
        path = contents.folder / name
        try:
            size = path.stat().st_size
        except OSError as problem:
            problems.append(f"{path} is missing: {problem.strerror}")
            continue
        if size != wanted.bytes:
            problems.append(f"{path} is damaged: {size} bytes instead of {wanted.bytes}")
    return problems


def checksum_problems(contents: CheckpointIndex, names: Iterable[str]) -> list[str]:
    """Files whose bytes are not those that were written. Reads them whole."""
    problems = []
    for name in names:
        path = contents.folder / name
        try:
            found = checksum(path)
        except OSError as problem:
            problems.append(f"{path} cannot be read: {problem.strerror}")
            continue
        if found != contents.files[name]:
            problems.append(
                f"{path} is damaged: CRC-32 {found.crc32:08x} instead of {contents.files[name].crc32:08x}, of "
                f"{found.bytes} bytes"
            )
    return problems


def verify(folder: Path) -> list[str]:
    """Everything that is wrong with a checkpoint, a sentence each, with the file's name. Empty: it is good."""
    try:
        contents = read_contents(folder)
    except ValueError as problem:
        return [str(problem)]
    if problems := size_problems(contents):
        return problems
    return checksum_problems(contents, contents.files) or header_problems(contents, contents.files)


def strangers(folder: Path) -> list[str]:
    """Names in the folder of a checkpoint that no save has put there, as text that can be shown. Nothing opens them."""
    own = {CHECKSUMS, *_checksums(folder / CHECKSUMS)}
    return sorted(ascii(name)[1:-1] for name in os.listdir(folder) if name not in own)


def value_problems(contents: CheckpointIndex) -> list[str]:
    """Tensors with numbers that are not finite, a sentence each. Reads every tensor of floats, a piece at a time.

    Raises:
        DamagedError: a file that is no regular one or no safetensors file. `verify` finds what else is damaged.
    """
    problems = []
    for tensor in contents.tensors.values():
        if not tensor.dtype.is_floating_point:
            continue
        nans = infinities = 0
        for chunk in tensor.chunks:
            for piece in _pieces(contents.folder / chunk.file, tensor.name):
                nans += int(piece.isnan().sum())
                infinities += int(piece.isinf().sum())
        if nans or infinities:
            problems.append(
                f"{tensor.name} has numbers that are not finite: {nans} NaN and {infinities} inf of "
                f"{prod(tensor.shape)}. A run that reads it goes on with them. {_ELSEWHERE}"
            )
    return problems


def _pieces(path: Path, name: str) -> Iterator[Tensor]:
    """A block, by some rows at a time."""
    try:
        open_regular(path).close()
        with safe_open(path, framework="pt") as file:
            block = file.get_slice(name)
            shape = block.get_shape()
            if not shape:
                yield file.get_tensor(name)
                return
            rows = max(1, _NUMBERS // max(1, prod(shape[1:])))
            for first in range(0, shape[0], rows):
                yield block[first : first + rows]
    except (SafetensorError, OSError) as problem:
        raise DamagedError(f"{path} cannot be read: {problem}. {_ELSEWHERE}") from None


def header_problems(contents: CheckpointIndex, names: Collection[str]) -> list[str]:
    """Those of the tensor files that do not hold what the list of tensors says."""
    wanted: dict[str, dict[str, tuple[str, tuple[int, ...]]]] = {}
    for tensor in contents.tensors.values():
        for chunk in tensor.chunks:
            wanted.setdefault(chunk.file, {})[tensor.name] = (NAME_OF[tensor.dtype], chunk.sizes)
    problems = []
    for name, blocks in wanted.items():
        if name not in names:
            continue
        path = contents.folder / name
        try:
            with safe_open(path, framework="pt") as file:
                slices = {key: file.get_slice(key) for key in file.keys()}  # noqa: SIM118 (no mapping)
                found = {key: (each.get_dtype(), tuple(each.get_shape())) for key, each in slices.items()}
        except (SafetensorError, OSError) as problem:
            problems.append(f"{path} is no safetensors file: {problem}")
            continue
        if found != blocks:
            different = sorted(key for key in found.keys() | blocks.keys() if found.get(key) != blocks.get(key))
            problems.append(f"{path} contradicts {TENSORS} on {different[0]}")
    return problems


def _checksums(path: Path) -> dict[str, FileSum]:
    content = read_json(path)
    try:
        files = {
            name: FileSum(bytes=_count(entry["bytes"]), crc32=int(entry["crc32"], 16))
            for name, entry in content["files"].items()
        }
    except _SENSELESS as problem:
        raise DamagedError(f"{path} is damaged: {what_is_wrong(problem)}. {_ELSEWHERE}") from None
    for name in files:
        if name not in (TENSORS, PROGRESS) and not _FILE.fullmatch(name):
            raise DamagedError(f"{path} names {name!r}, which is no file of a checkpoint. {_ELSEWHERE}")
    return files


def _tensors(path: Path) -> dict[str, StoredTensor]:
    content = read_json(path)
    try:
        tensors = {name: _tensor(name, entry) for name, entry in content["tensors"].items()}
    except _SENSELESS as problem:
        raise DamagedError(f"{path} is damaged: {what_is_wrong(problem)}. {_ELSEWHERE}") from None
    for tensor in tensors.values():
        if sum(prod(chunk.sizes) for chunk in tensor.chunks) != prod(tensor.shape):
            raise DamagedError(f"{path} is damaged: the blocks of {tensor.name} do not make it up. {_ELSEWHERE}")
    return tensors


def _check_streams(path: Path, tensors: dict[str, StoredTensor], ranks: int) -> None:
    """Raises DamagedError unless there is a random stream of every rank."""
    for rank in range(ranks):
        stream = tensors.get(f"{CPU_STREAM}{rank}")
        if stream is None or stream.dtype != torch.uint8 or len(stream.shape) != 1:
            raise DamagedError(f"{path} is damaged: it has no random stream of rank {rank} of {ranks}. {_ELSEWHERE}")


def _tensor(name: str, entry: Any) -> StoredTensor:
    shape = _counts(entry["shape"])
    chunks = []
    for rank, offsets, sizes in entry["chunks"]:
        chunk = StoredChunk(file=file_name(_count(rank)), offsets=_counts(offsets), sizes=_counts(sizes))
        ends = [first + size for first, size in zip(chunk.offsets, chunk.sizes, strict=True)]
        if len(ends) != len(shape) or any(end > size for end, size in zip(ends, shape, strict=True)):
            raise TypeError(f"a block of {name} lies outside of it")
        chunks.append(chunk)
    return StoredTensor(name=name, dtype=DTYPES[entry["dtype"]], shape=shape, chunks=tuple(chunks))


def _counts(values: Any) -> tuple[int, ...]:
    return tuple(_count(value) for value in values)


def _count(value: Any) -> int:
    if not isinstance(value, int) or isinstance(value, bool) or not 0 <= value < 2**63:
        raise TypeError(f"{value!r} is no count")
    return value
