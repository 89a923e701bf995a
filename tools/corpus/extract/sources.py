"""The inputs, cut into pieces that can be read each by itself, and the pieces put together to units of work."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import cast

from tools.corpus.extract.formats import Format, tell_format, tell_packing
from tools.corpus.extract.parquet import cut_row_groups
from tools.corpus.extract.piece import Piece
from tools.corpus.work import Unit, read_manifest

ENGINE_FILES = frozenset({"step.json", "left-out.jsonl"})
BZIP2_SHARE = 4
"""Text takes about so many times the bytes of its .bz2 or .gz, so a unit of those has fewer bytes."""
_SUFFIXES = {
    "text": (".txt", ".txt.gz", ".txt.bz2"),
    "books": (".txt", ".txt.gz", ".txt.bz2"),
    "parquet": (".parquet",),
}


@dataclass(frozen=True, kw_only=True)
class Pieces(Unit):
    """A unit of the work: a piece of a large file, or several small files."""

    pieces: tuple[Piece, ...]


@dataclass(frozen=True, kw_only=True)
class Source:
    path: Path
    name: str


def find_sources(inputs: Iterable[Path], wanted: str) -> list[Source]:
    """The files of the corpus in its order: as the inputs are given, within a folder by their names.

    Args:
        inputs: files, or folders that are searched to all depths. Names that begin with "." or "_" are passed over.
        wanted: a format or "auto". Where it has suffixes of its own, other files of a folder are passed over.

    Raises:
        ValueError: an input is missing, or no file is found.
    """
    sources: list[Source] = []
    for path in inputs:
        if path.is_file():
            sources.append(Source(path=path, name=path.name))
        elif path.is_dir():
            sources += _walk(path, _SUFFIXES.get(wanted, ()))
        else:
            raise ValueError(f"{path} does not exist. Name files or folders with the text of the corpus.")
    if not sources:
        what = f"{' or '.join(_SUFFIXES[wanted])} file" if wanted in _SUFFIXES else "file"
        names = ", ".join(map(str, inputs)) or "nothing"
        raise ValueError(f"there is no {what} in the input ({names}). Name files, or folders that hold some.")
    return sources


def _walk(folder: Path, suffixes: tuple[str, ...]) -> Iterator[Source]:
    known: frozenset[str] = frozenset()
    if (folder / "step.json").is_file():
        read_manifest(folder, "download")  # complete, or an error
        known = ENGINE_FILES
    files = ((path.relative_to(folder), path) for path in folder.rglob("*") if path.is_file())
    for relative, path in sorted(files, key=lambda file: file[0].parts):
        hidden = any(part.startswith((".", "_")) for part in relative.parts)
        if not hidden and relative.as_posix() not in known and relative.name.endswith(suffixes or ("",)):
            yield Source(path=path, name=relative.as_posix())


def cut_sources(sources: Iterable[Source], wanted: str, unit_bytes: int) -> list[Pieces]:
    """The units of the corpus, in its order. They depend on the files and on `unit_bytes`, on nothing else.

    Args:
        sources: files.
        wanted: the format of all, or "auto".
        unit_bytes: text that a unit should take, about.

    Raises:
        ValueError: a file whose format cannot be told, or that is packed in a way that cannot be read.
    """
    groups: list[list[Piece]] = []
    weight = unit_bytes
    for source in sources:
        for piece in _cut(source, wanted, unit_bytes):
            cost = piece.size * (BZIP2_SHARE if piece.packing else 1)
            if not groups or weight + cost > unit_bytes:
                groups.append([])
                weight = 0
            groups[-1].append(piece)
            weight += cost
    digits = max(5, len(str(len(groups) - 1)))
    return [
        Pieces(name=f"{number:0{digits}d}", size=sum(piece.size for piece in group), pieces=tuple(group))
        for number, group in enumerate(groups)
    ]


def _cut(source: Source, wanted: str, unit_bytes: int) -> Iterator[Piece]:
    packing = tell_packing(source.path)
    format_ = tell_format(source.path, packing) if wanted == "auto" else cast(Format, wanted)
    size = source.path.stat().st_size
    if format_ == "parquet":
        ranges = cut_row_groups(source.path, unit_bytes)
    elif format_ == "books" or packing == "gz" or not size:
        ranges = [(0, size, size)]
    else:
        step = max(1, unit_bytes // BZIP2_SHARE) if packing == "bz2" else unit_bytes
        ranges = [(at, min(at + step, size), min(step, size - at)) for at in range(0, size, step)]
    for begin, end, taken in ranges:
        yield Piece(
            path=source.path, name=source.name, format=format_, packing=packing, begin=begin, end=end, size=taken
        )  # fmt: skip
