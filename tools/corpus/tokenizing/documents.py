"""The documents that the step `extract` has written, in ranges that one worker reads."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from tools.corpus.work import BadInput, Context, Unit, fingerprint_file, read_manifest

RANGE = 16 << 20
"""Bytes of a file that are one unit of work."""
_REMEDY = "Run `python -m tools.corpus extract` again"


@dataclass(frozen=True, kw_only=True)
class DocumentRange(Unit):
    """The documents whose lines begin in a range of a file."""

    file: Path
    start: int
    """Byte."""
    end: int
    """Byte after the range; the last line may go beyond it."""


def document_files(folders: Sequence[Path]) -> list[Path]:
    """Every file of documents, in the order of the corpus.

    Raises:
        ValueError: a folder is no finished output of `extract`.
    """
    manifests = [read_manifest(folder, "extract") for folder in folders]
    return [
        manifest.folder / name
        for manifest in manifests
        # More than 99,999 of them have longer numbers.
        for name in sorted(manifest.files, key=lambda name: (len(name), name))
        if name.startswith("documents-") and name.endswith(".jsonl")
    ]


def fingerprint_documents(files: Sequence[Path]) -> str:
    """A hash of the files' fingerprints."""
    return hashlib.blake2b("".join(map(fingerprint_file, files)).encode(), digest_size=16).hexdigest()


def ranges_of(files: Sequence[Path]) -> list[DocumentRange]:
    """The units of the files, in order; how they are cut depends on the sizes alone."""
    bounds = [
        (file, start, min(start + RANGE, size))
        for file in files
        for size in (file.stat().st_size,)
        for start in range(0, size, RANGE)
    ]
    return [
        DocumentRange(name=f"{number:07d}", size=end - start, file=file, start=start, end=end)
        for number, (file, start, end) in enumerate(bounds)
    ]


def read_lines(unit: DocumentRange) -> Iterator[tuple[int, bytes]]:
    """The lines of a range, each with the byte it begins at."""
    with unit.file.open("rb") as file:
        if unit.start:
            # A line that begins before the range belongs to the range before.
            file.seek(unit.start - 1)
            file.readline()
        at = file.tell()
        while at < unit.end:
            line = file.readline()
            yield at, line
            at += len(line)


def read_texts(unit: DocumentRange, context: Context) -> Iterator[str]:
    """The text of each document of a range. Damaged lines go to `context.bad`."""
    for at, line in read_lines(unit):
        try:
            text = parse_text(line, unit.file, at)
        except BadInput as error:
            context.bad(error)
        else:
            yield text
        context.progress(min(len(line), max(0, unit.end - at)))


def parse_text(line: bytes, file: Path, at: int) -> str:
    """The text of the document in a line.

    Raises:
        BadInput: not UTF-8, no JSON object, without a text, or a text that no file can hold.
    """
    try:
        document = json.loads(line.decode("utf-8"))
    except UnicodeDecodeError as error:
        raise BadInput(file, f"byte {at + error.start}", "not UTF-8", _REMEDY) from error
    except json.JSONDecodeError as error:
        raise BadInput(file, f"byte {at}", f"a line that is no JSON ({error.msg})", _REMEDY) from error
    text = document.get("text") if isinstance(document, dict) else None
    if not isinstance(text, str):
        raise BadInput(file, f"byte {at}", 'a line that is no object with a string "text"', _REMEDY)
    try:
        text.encode("utf-8")
    except UnicodeEncodeError as error:
        raise BadInput(file, f"byte {at}", f"half a surrogate pair, {text[error.start]!a}", _REMEDY) from error
    return text
