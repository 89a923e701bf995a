"""The corpus that is always there: the documentation that every Python carries.

It consists of the help topics of `pydoc` and the docstrings of the standard library, some 300,000 words of English
prose with some code in it. No download, no account; the text depends on the version of Python alone.
"""

from __future__ import annotations

import ast
import hashlib
import os
import re
import sysconfig
import warnings
from collections.abc import Iterable, Iterator, Sequence
from functools import cache
from pathlib import Path
from typing import Protocol

from tools.common.files import not_plain_text, open_regular
from tools.common.garbage import no_collections
from tools.corpus.sentences import likely_encoding

# --- Where text comes from --------------------------------------------------------------------------------------------

_BLOCK = 1 << 20


class Source(Protocol):
    """Documents of plain text, always in the same order."""

    def fingerprint(self) -> str:
        """Changes whenever a document changes. Cheap beside reading the documents."""

    def documents(self) -> Iterator[str]:
        """The documents; blank lines separate the paragraphs of one."""

    @property
    def without_text(self) -> Sequence[Path]:
        """Files that were to hold text and hold none, as far as they have been read."""


def hash_files(files: Iterable[Path], root: Path) -> str:
    """A hash of the files' contents and of their names below `root`; where the folder itself lies does not matter."""
    digest = hashlib.blake2b(digest_size=16)
    for file in files:
        digest.update(f"{file.relative_to(root).as_posix()}\0{file.stat().st_size}\0".encode())
        with open_regular(file) as stream:
            while block := stream.read(_BLOCK):
                digest.update(block)
    return digest.hexdigest()


# --- Plain text files as a corpus -------------------------------------------------------------------------------------


class TextSource:
    """One UTF-8 file, or every *.txt below a folder in the order of the names. A document ends at a blank line or with
    its file.

    Raises:
        ValueError: there is no file and no folder at the path, or no *.txt below it, or a file that is no text by its
            suffix.
    """

    def __init__(self, path: Path) -> None:
        if path.is_dir():
            self._root = path
            self._files = sorted(file for file in path.rglob("*.txt") if file.is_file())
        elif path.is_file():
            if kind := not_plain_text(path):
                raise ValueError(
                    f"{path} is {kind} by its suffix: its marks and names would be learnt as text. launch/corpus.sh "
                    "reads JSON lines and Parquet; or write the texts alone into a file *.txt, a blank line between "
                    "documents."
                )
            self._root = path.parent
            self._files = [path]
        else:
            # A pipe, such as that of `<(zcat my.gz)`, or a device: it cannot be read twice, as a source must be.
            what = "is neither a file nor a folder" if path.exists() else "does not exist"
            raise ValueError(
                f'{path.absolute()} {what}. The source is "embedded", a text file or a folder of *.txt files.'
            )
        if not self._files:
            raise ValueError(
                f"the folder {path.absolute()} holds no *.txt file; name one text file, or rename the files."
            )
        self.without_text: list[Path] = []

    def fingerprint(self) -> str:
        found = hash_files(self._files, self._root)
        # Such a file was one document before.
        return f"{found} CR" if any(map(has_cr_alone, self._files)) else found

    def documents(self) -> Iterator[str]:
        """Raises ValueError where a file is not UTF-8."""
        self.without_text.clear()
        for file in self._files:
            lines: list[str] = []
            empty = True
            for line in read_lines(file):
                if line.strip():
                    lines.append(line)
                    empty = False
                elif lines:
                    yield "\n".join(lines)
                    lines = []
            if lines:
                yield "\n".join(lines)
            if empty:
                self.without_text.append(file)


def has_cr_alone(file: Path) -> bool:
    """Whether lines end with CR, as of Macs before OS X and Excel's "Text (Macintosh)": there is one, and no LF."""
    found = False
    with open_regular(file) as stream:
        while block := stream.read(_BLOCK):
            if b"\n" in block:
                return False
            found = found or b"\r" in block
    return found


def read_lines(file: Path) -> Iterator[str]:
    """The lines of a UTF-8 file, without their ends: LF, CR LF or, where `has_cr_alone`, CR. Raises ValueError, naming
    the line, for what is not UTF-8."""
    with open_regular(file) as stream:
        for number, line in enumerate(stream.read().splitlines() if has_cr_alone(file) else stream, start=1):
            try:
                # The first line may begin with a byte order mark.
                text = line.decode("utf-8-sig" if number == 1 else "utf-8").rstrip("\r\n")
            except UnicodeDecodeError as error:
                likely = likely_encoding(line)
                reason = (
                    f"{file.absolute()} is not UTF-8 in line {number}: {error.reason}{likely and f', as of {likely}'}"
                )
                raise ValueError(f"{reason}. Convert the file to UTF-8 first.") from error
            if "\0" in text:
                reason = f"{file.absolute()} has NUL characters in line {number}, as of {likely_encoding(line)}"
                raise ValueError(f"{reason}. Convert the file to UTF-8 first.")
            yield text


# --- The corpus that is always there ----------------------------------------------------------------------------------

SKIPPED = frozenset({"test", "tests", "idle_test", "site-packages", "dist-packages", "lib-dynload", "__pycache__"})
"""Folders that hold tests, installed packages or nothing to read."""
_Documented = ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef


class EmbeddedSource:
    """A document is a help topic, or the docstrings of a module in the order of its source.

    Help topics repeat one another, and classes repeat the docstrings of their like: a paragraph is read where it comes
    first, and only there, so that no held-out paragraph has been trained on.

    Raises:
        ValueError: this Python has come without the sources of its standard library.
    """

    without_text: Sequence[Path] = ()
    """A module without docstrings is nothing to be told of."""

    def __init__(self) -> None:
        self._root = Path(sysconfig.get_path("stdlib"))
        self._files = list(_sources(self._root))
        if not self._files:
            raise ValueError(
                f"the standard library at {self._root} holds no .py file, so there is no embedded corpus. "
                "Use a Python that comes with its sources, or a text file as the source."
            )

    def fingerprint(self) -> str:
        return hash_files(self._files, self._root)

    def documents(self) -> Iterator[str]:
        seen: set[str] = set()
        for text in self._texts():
            paragraphs = [paragraph for paragraph in re.split(r"\n\s*\n", text) if paragraph.strip()]
            fresh = [paragraph for paragraph in paragraphs if " ".join(paragraph.split()) not in seen]
            seen.update(" ".join(paragraph.split()) for paragraph in fresh)
            if fresh:
                yield "\n\n".join(fresh)

    def _texts(self) -> Iterator[str]:
        # Imported here: half a megabyte of text that nobody else needs.
        from pydoc_data.topics import topics

        for name in sorted(topics):
            yield topics[name]
        for path in self._files:
            yield _docstrings_of(path, path.stat().st_mtime_ns)


def _sources(root: Path) -> Iterator[Path]:
    for folder, inner, names in os.walk(root):
        # What is removed from this list is not entered: site-packages can be large.
        inner[:] = sorted(set(inner) - SKIPPED)
        yield from (Path(folder, name) for name in sorted(names) if name.endswith(".py"))


@cache
def _docstrings_of(path: Path, written: int) -> str:
    """Those of a file as it was written last. Kept, some megabytes in all: parsing takes seconds, and a run that needs
    a tokenizer, texts to train on and texts to measure on reads the corpus three times."""
    return "\n\n".join(docstrings(path.read_bytes()))


def docstrings(source: bytes) -> list[str]:
    """Every docstring of a module, in the order of the source; none where it is not valid Python."""
    # A tree has no cycles. Its many objects had all that is loaded looked through again and again, half of the time.
    with no_collections(), warnings.catch_warnings():
        # Old escapes in other people's strings are not our concern.
        warnings.simplefilter("ignore")
        try:
            return list(_docstrings(ast.parse(source)))
        except (SyntaxError, ValueError):
            return []


def _docstrings(node: ast.AST) -> Iterator[str]:
    if isinstance(node, _Documented) and (text := ast.get_docstring(node)):
        yield text
    # Definitions also stand inside `if` and `try`, but never inside an expression.
    for field in ("body", "handlers", "orelse", "finalbody"):
        for child in getattr(node, field, ()):
            yield from _docstrings(child)
