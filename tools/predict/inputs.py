"""What is asked of a model, text by text, and how it is read from strings, objects and lines."""

from __future__ import annotations

import json
import os
import queue
import threading
import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, BinaryIO

from tools.common.files import is_unicode, parsed_json
from tools.corpus.sentences import likely_encoding

# --- Lines of an input of any length, as they come: a pause of whoever writes them is noticed -------------------------

MOST_LINE = 1 << 24
"""Bytes of a line; a longer one is no text, and would only fill the memory."""
_CHUNK = 1 << 16
_AHEAD = 8  # chunks


class LineReader:
    """Lines of a file or pipe, read by a thread, which waits when it is some chunks ahead.

    Args:
        wait: seconds that the first lines taken wait for others.
    """

    def __init__(self, file: BinaryIO, wait: float) -> None:
        self._file, self._wait = file, wait
        self._chunks: queue.Queue[list[bytes] | Exception | None] = queue.Queue(_AHEAD)
        self._rest: list[bytes] = []
        self._is_over = False
        # A daemon: it may be waiting for input that never comes.
        threading.Thread(target=self._read, name="input", daemon=True).start()

    def take(self, size: int, idle: float | None = None) -> list[bytes] | None:
        """Some lines, with their ends: about `size` bytes, or what has come when the wait is over; None at the end.

        Args:
            idle: seconds after which, where no line has come at all, there is nothing in the list. None: never.

        Raises:
            ValueError: a line of more than `MOST_LINE` bytes; after the lines before it.
            OSError: the input cannot be read.
        """
        taken: list[bytes] = []
        held, deadline = 0, None
        while held < size:
            if not self._rest and not self._fill(taken, deadline, idle):
                break
            if deadline is None:
                deadline = time.monotonic() + self._wait
            while self._rest and held < size:
                taken.append(self._rest.pop())
                held += len(taken[-1])
        return None if not taken and self._is_over else taken

    def _fill(self, taken: list[bytes], deadline: float | None, idle: float | None) -> bool:
        """Whether lines have come in time."""
        if self._is_over:
            return False
        timeout = idle if deadline is None else max(0.0, deadline - time.monotonic())
        try:
            found = self._chunks.get(timeout=timeout)
        except queue.Empty:
            return False
        if found is None:
            self._is_over = True
            return False
        if isinstance(found, Exception):
            if taken:  # what stands before it comes first; nothing is put behind it, so there is room
                self._chunks.put(found)
                return False
            raise found
        self._rest = found[::-1]
        return True

    def _read(self) -> None:
        # From the descriptor: a thread that waits inside of a buffered reader keeps Python from ending.
        descriptor = self._file.fileno()
        parts: list[bytes] = []
        size, number = 0, 0
        try:
            while chunk := os.read(descriptor, _CHUNK):
                *lines, rest = chunk.split(b"\n")
                if lines:
                    whole = [b"".join([*parts, lines[0]]), *lines[1:]]
                    self._chunks.put([line + b"\n" for line in whole])
                    number += len(whole)
                    parts, size = [], 0
                if rest:
                    parts.append(rest)
                    size += len(rest)
                if size > MOST_LINE:
                    raise ValueError(
                        f"line {number + 1}: longer than {MOST_LINE >> 20} MiB, which is no text. Is the input one of "
                        "lines?"
                    )
            if parts:
                self._chunks.put([b"".join(parts)])
            self._chunks.put(None)
        except (OSError, ValueError) as problem:
            self._chunks.put(problem)


# --- What is asked of a model, text by text ---------------------------------------------------------------------------

_NAMES = ("text", "text_b", "question", "context", "query", "passages")


@dataclass(frozen=True, kw_only=True)
class Fields:
    """The texts that a task reads of an object, by name."""

    first: str = "text"
    second: str | None = None
    needs_second: bool = False
    words: str | None = None
    """What may stand in the place of the first: a list of its words."""
    candidates: str | None = None
    """A list of texts that stand beside the first: strings, or objects with "text" or, where a collection is given,
    with the "id" of one of its texts."""
    reason: str = ""
    """Why it reads these, where the model decides: put behind messages about others."""

    @property
    def in_words(self) -> str:
        first = f'"{self.first}"'
        if self.words is not None:
            return f'{first} or "{self.words}"'
        if self.candidates is not None:
            return f'{first} and "{self.candidates}"'
        if self.second is None:
            return first
        return f'{first} and "{self.second}"' if self.needs_second else f'{first} and, for pairs, "{self.second}"'


@dataclass(frozen=True, kw_only=True)
class Candidate:
    """A text that is to be compared with others."""

    text: str | None
    """None: it has an id alone."""
    id: Any = None


@dataclass(frozen=True, kw_only=True)
class Query:
    """One text, or one pair."""

    where: str
    """For messages: "line 3"."""
    number: int
    """Of the line or text."""
    first: str
    second: str | None = None
    words: tuple[str, ...] | None = None
    """Those of `first`, where the input has them."""
    candidates: tuple[Candidate, ...] = ()
    """Those of the input."""
    id: Any = None
    """What the input calls it; None where it has no name. It comes back with the result."""


@dataclass(frozen=True, kw_only=True)
class InputProblem:
    """What stands in the place of a query, or of a result, that cannot be."""

    where: str
    number: int
    error: str
    id: Any = None

    def __str__(self) -> str:
        return f"{self.where}: {self.error}"


def query_of(item: str | Mapping[str, Any], fields: Fields, number: int, word: str = "text") -> Query | InputProblem:
    """A query, or why there is none.

    Args:
        item: a string, or an object with the texts that `fields` names and, where it has one, an "id".
        word: what `number` counts.
    """
    where = f"{word} {number}"

    def problem(error: str, name: Any = None) -> InputProblem:
        return InputProblem(where=where, number=number, error=error, id=name)

    told = f"{fields.reason} " if fields.reason else ""
    if isinstance(item, str):
        if fields.needs_second or fields.candidates:
            return problem(f"a string alone is not enough. {told}Give an object with {fields.in_words}.")
        item = {fields.first: item}
    elif not isinstance(item, Mapping):
        return problem(f"a string or an object with {fields.in_words} is needed. Got {_short(item)}.")
    name = item.get("id")
    if not _is_json(name):
        return problem(f'"id" comes back with the result, and JSON has no such number. Got {_short(name)}.')
    for key in _NAMES:
        if item.get(key) is not None and key not in (fields.first, fields.second, fields.candidates):
            return problem(
                f'"{key}" is not read here, but {fields.in_words}. {told}Leave it out, or ask another task.', name
            )
    words = item.get(fields.words) if fields.words else None
    if words is not None:
        wrong = "give one of them" if item.get(fields.first) is not None else check_words(words)
        if wrong:
            return problem(f"{fields.in_words}: {wrong}", name)
        return Query(where=where, number=number, first=" ".join(words), words=tuple(words), id=name)
    first, second = item.get(fields.first), item.get(fields.second) if fields.second else None
    texts = [(fields.first, first)]
    if fields.second is not None and (fields.needs_second or second is not None):
        texts.append((fields.second, second))
    for needed, text in texts:
        if not isinstance(text, str):
            found = "no such key" if text is None else _short(text)
            return problem(
                f'"{needed}" must be a string. Got {found}. {told}Give an object with {fields.in_words}.', name
            )
        if not is_unicode(text):
            return problem(f'"{needed}" is not Unicode text: it has half of a surrogate pair.', name)
    beside = _candidates(item.get(fields.candidates)) if fields.candidates else ()
    if isinstance(beside, str):
        return problem(f'"{fields.candidates}" {beside}', name)
    return Query(where=where, number=number, first=str(first), second=second, candidates=beside, id=name)


def _candidates(given: Any) -> tuple[Candidate, ...] | str:
    """What a list holds, or what is wrong with it."""
    if not isinstance(given, list | tuple) or not given:
        return f"must be a list of texts, at least one. Got {_short(given)}."
    found = []
    for each in given:
        text = each.get("text") if isinstance(each, Mapping) else each
        name = each.get("id") if isinstance(each, Mapping) else None
        if (text is None and name is None) or (text is not None and not is_unicode(text)):
            return f'must have strings, or objects with "text" or "id". Got {_short(each)}.'
        if not _is_json(name):
            return f'has an "id" that comes back with the result, and JSON has no such number. Got {_short(name)}.'
        found.append(Candidate(text=text, id=name))
    return tuple(found)


def query_of_line(line: bytes, fields: Fields, number: int, *, is_plain: bool) -> Query | InputProblem:
    """A query of a line of JSON, or, where `is_plain`, of a line that is a text itself."""
    where = f"line {number}"

    def problem(error: str) -> InputProblem:
        return InputProblem(where=where, number=number, error=error)

    try:
        text = line.decode("utf-8-sig" if number == 1 else "utf-8").removesuffix("\n").removesuffix("\r")
    except UnicodeDecodeError as error:
        likely = likely_encoding(line)
        seems = likely and f", as of {likely}"
        return problem(f"not UTF-8 at byte {error.start + 1}{seems}. Convert the input: iconv -t utf-8.")
    if "\0" in text:
        seems = likely_encoding(line)
        return problem(f"it has NUL characters, as of {seems}. Convert the input: iconv -t utf-8.")
    if is_plain:
        if _is_object(text, fields):
            return problem(f"an object in JSON, and with --plain it would be text: {_short(text)}. Leave out --plain.")
        return query_of(text, fields, number, "line")
    if not text.strip():
        return problem("an empty line. Each line is a string or an object in JSON; leave empty ones out.")
    try:
        item = parsed_json(text, unique=True)
    except ValueError as error:
        return problem(f"not JSON ({error}): {_short(text)}. For lines that are texts themselves, say --plain.")
    return query_of(item, fields, number, "line")


def _is_object(text: str, fields: Fields) -> bool:
    """Whether a line is JSON with what the task reads."""
    if not text.startswith("{"):
        return False
    try:
        item = parsed_json(text)
    except ValueError:
        return False
    return isinstance(item, dict) and fields.first in item


def check_words(words: Any) -> str | None:
    """What is wrong with a list of words, as of {"tokens": [...]}; None: nothing."""
    if not isinstance(words, list | tuple) or not words:
        return f"a list of words is needed, at least one. Got {_short(words)}."
    if all(map(_is_plain, words)) and is_unicode("".join(words)):  # all at once: tags are given by the thousand
        return None
    for word in words:
        if not is_unicode(word) or not word.strip() or any(mark in word for mark in "\t\r\n"):
            return f"a word must be a text, not empty, without tab or line end. Got {_short(word)}."
    return None


def _is_plain(word: Any) -> bool:
    """A text without anything of a space in it, and not empty."""
    return isinstance(word, str) and word.split() == [word]


def _is_json(value: Any) -> bool:
    """Whether a value of JSON can be written again: Python reads NaN and 1e999, which JSON does not have."""
    if value is None or isinstance(value, str | int):
        return True
    try:
        json.dumps(value, allow_nan=False)
    except ValueError:
        return False
    return True


def _short(value: object) -> str:
    shown = repr(value)
    return shown if len(shown) <= 60 else shown[:57] + "..."
