"""Plain text files as a corpus."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from tools.corpus.source import hash_files


class TextSource:
    """One UTF-8 file, or every *.txt below a folder in the order of the names. A document ends at a blank line or with
    its file.

    Raises:
        ValueError: there is nothing at the path, or no *.txt below it.
    """

    def __init__(self, path: Path) -> None:
        if path.is_dir():
            self._root = path
            self._files = sorted(file for file in path.rglob("*.txt") if file.is_file())
        elif path.is_file():
            self._root = path.parent
            self._files = [path]
        else:
            raise ValueError(
                f'{path} does not exist. The source is "embedded", a text file or a folder of *.txt files.'
            )
        if not self._files:
            raise ValueError(f"the folder {path} holds no *.txt file; name one text file, or rename the files.")

    def fingerprint(self) -> str:
        return hash_files(self._files, self._root)

    def documents(self) -> Iterator[str]:
        """Raises ValueError where a file is not UTF-8."""
        for file in self._files:
            lines: list[str] = []
            for line in read_lines(file):
                if line.strip():
                    lines.append(line)
                elif lines:
                    yield "\n".join(lines)
                    lines = []
            if lines:
                yield "\n".join(lines)


def read_lines(file: Path) -> Iterator[str]:
    """The lines of a UTF-8 file, without their ends. Raises ValueError, naming the line, for what is not UTF-8."""
    with file.open("rb") as stream:
        for number, line in enumerate(stream, start=1):
            try:
                # The first line may begin with a byte order mark.
                yield line.decode("utf-8-sig" if number == 1 else "utf-8").rstrip("\r\n")
            except UnicodeDecodeError as error:
                reason = f"{file} is not UTF-8 in line {number}: {error.reason}"
                raise ValueError(f"{reason}. Convert the file to UTF-8 first.") from error
