"""The inputs, cut into pieces that can be read each by itself, and the pieces put together to units of work."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import cast

from tools.corpus.extract.parquet import cut_row_groups
from tools.corpus.extract.read_context import (
    FileRange,
    Format,
    Site,
    detect_compression,
    detect_encoding,
    detect_format,
    printable,
    read_site,
)
from tools.corpus.pipeline import Unit, read_manifest

_log = logging.getLogger(__name__)
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

    pieces: tuple[FileRange, ...]


@dataclass(frozen=True, kw_only=True)
class InputFile:
    path: Path
    name: str
    """Below the input that it was found in; may be printed and written whatever bytes it has."""


def find_sources(inputs: Iterable[Path], wanted: str) -> tuple[list[InputFile], int]:
    """The files of the corpus in its order: as the inputs are given, within a folder by their names.

    Args:
        inputs: files, or folders that are searched to all depths and through links. Names that begin with "." are
            passed over.
        wanted: a format or "auto". Where it has suffixes of its own, other files of a folder are passed over.

    Returns:
        The files, and how many files and folders were passed over.

    Raises:
        ValueError: an input is missing, a link leads nowhere, or no file is found.
    """
    sources: list[InputFile] = []
    passed_over = 0
    for path in inputs:
        if path.is_file():
            sources.append(InputFile(path=path, name=printable(Path(path.name))))
        elif path.is_dir():
            for found in _walk(path, _SUFFIXES.get(wanted, ())):
                if found is None:
                    passed_over += 1
                else:
                    sources.append(InputFile(path=found, name=printable(found.relative_to(path))))
        else:
            raise ValueError(
                f"{printable(path.absolute())} is no file and no folder. Name some with the text of the corpus."
            )
    if not sources:
        what = f"{' or '.join(_SUFFIXES[wanted])} file" if wanted in _SUFFIXES else "file"
        names = ", ".join(map(printable, inputs)) or "nothing"
        raise ValueError(f"there is no {what} in the input ({names}). Name files, or folders that hold some.")
    return sources, passed_over


def tell_empty(sources: Iterable[InputFile]) -> None:
    """Says in the log which files have not one byte: among others these are no error."""
    empty = [source.path for source in sources if not source.path.stat().st_size]
    if empty:
        more = f", and {len(empty) - 1:,} more" if len(empty) > 1 else ""
        _log.warning("%s has no text%s: left out of the corpus.", printable(empty[0].absolute()), more)


def _walk(folder: Path, suffixes: tuple[str, ...], above: tuple[Path, ...] = ()) -> Iterator[Path | None]:
    """The files of a folder and those below it, by their names; None for what is passed over."""
    real = folder.resolve()
    if real in above:
        yield None  # a link to a folder that it lies in
        return
    known: frozenset[str] = frozenset()
    if (folder / "step.json").is_file():
        read_manifest(folder, "download")  # complete, or an error
        known = ENGINE_FILES
    for path in sorted(folder.iterdir(), key=lambda path: path.name):
        if path.name in known:
            continue
        if path.name.startswith("."):
            yield None
        elif path.is_dir():
            yield from _walk(path, suffixes, (*above, real))
        elif path.is_file():
            yield path if path.name.endswith(suffixes or ("",)) else None
        elif path.is_symlink():
            raise ValueError(f"{printable(path)} is a link to nothing. Remove it, or fetch what it stands for.")
        else:
            yield None


def cut_sources(sources: Iterable[InputFile], wanted: str, unit_bytes: int, language: str = "") -> list[Pieces]:
    """The units of the corpus, in its order. How they are cut depends on the files and on `unit_bytes` alone.

    Args:
        sources: files.
        wanted: the format of all, or "auto".
        unit_bytes: text that a unit should take, about.
        language: of the wikis that dumps are of, in place of what they say; "": as they say.

    Raises:
        ValueError: a file whose format cannot be told, or that is packed in a way that cannot be read.
    """
    groups: list[list[FileRange]] = []
    weight = unit_bytes
    for source in sources:
        for piece in _cut(source, wanted, unit_bytes, language):
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


def _cut(source: InputFile, wanted: str, unit_bytes: int, language: str) -> Iterator[FileRange]:
    packing = detect_compression(source.path)
    encoding = "" if wanted == "parquet" else detect_encoding(source.path, packing)
    format_ = cast(Format, wanted)
    if encoding:
        format_ = "encoded"
    elif wanted == "auto":
        format_ = detect_format(source.path, packing)
    size = source.path.stat().st_size
    if format_ == "parquet":
        ranges = cut_row_groups(source.path, unit_bytes)
    elif format_ in ("books", "damaged", "encoded") or packing == "gz" or not size:
        ranges = [(0, size, size)]
    else:
        step = max(1, unit_bytes // BZIP2_SHARE) if packing == "bz2" else unit_bytes
        ranges = [(at, min(at + step, size), min(step, size - at)) for at in range(0, size, step)]
    site = read_site(source.path, packing) if format_ == "mediawiki" else Site()
    site = replace(site, language=language or site.language)
    for begin, end, taken in ranges:
        yield FileRange(
            path=source.path, name=source.name, format=format_, packing=packing, begin=begin, end=end, size=taken,
            site=site, encoding=encoding,
        )  # fmt: skip
