"""Rows of TSV, CSV and JSON lines, with the place of each for messages."""

from __future__ import annotations

import csv
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, TypeVar

from tools.corpus.text import read_lines

T = TypeVar("T")
Format = Literal["auto", "tsv", "csv", "jsonl"]
Quotes = Literal["auto", "yes", "no"]
Column = int | str
"""By its name in the header, or by its number, from 1."""
_FORMATS: Mapping[str, Format] = {".tsv": "tsv", ".csv": "csv", ".jsonl": "jsonl", ".json": "jsonl", ".ndjson": "jsonl"}


@dataclass(frozen=True, kw_only=True)
class Row:
    """One row of a file."""

    where: str
    """File and line, as messages name it."""
    number: int
    """Rows of the file before it, those that are left out included."""
    values: Mapping[Column, str | None]
    """Those of the columns that were asked for. None: JSON's null."""


def read_rows(
    path: Path,
    columns: Sequence[Column],
    *,
    format: Format = "auto",
    header: bool = True,
    quotes: Quotes = "auto",
    skip: bool = False,
) -> Iterator[Row]:
    """The rows of a UTF-8 file. Empty lines at its end are passed over; any other one would be a row of nothing.

    Args:
        columns: those that are needed; by number alone where there is no header, by name alone in JSON lines.
        format: "auto": by the file's suffix.
        header: whether the first line of TSV or CSV names the columns.
        quotes: whether a value in double quotes may hold separators and line ends. "auto": in CSV, but not in TSV.
        skip: leave out rows with more or fewer columns than the first.

    Raises:
        ValueError: of the file, naming it and the line: it does not exist, is not UTF-8, a column is missing or there
            twice, a row has more or fewer columns than the first, a quote is not closed, or a line is no JSON object.
    """
    if not path.is_file():
        raise ValueError(f"{path} is no file. Give the path of one, with columns in TSV, CSV or JSON lines.")
    kind = _FORMATS.get(path.suffix.lower()) if format == "auto" else format
    if kind is None:
        raise ValueError(f'{path} does not say by its suffix what it is. Set data.format to "tsv", "csv" or "jsonl".')
    if kind == "jsonl":
        return _objects(path, columns)
    quoted = kind == "csv" if quotes == "auto" else quotes == "yes"
    separator = "\t" if kind == "tsv" else ","
    lines = _quoted(path, separator) if quoted else _plain(path, separator)
    return _table(path, columns, _without_end(lines, [""]), header, skip)


def _plain(path: Path, separator: str) -> Iterator[tuple[int, list[str]]]:
    for number, line in enumerate(read_lines(path), start=1):
        yield number, line.split(separator)


def _quoted(path: Path, separator: str) -> Iterator[tuple[int, list[str]]]:
    reader = csv.reader((line + "\n" for line in read_lines(path)), delimiter=separator, strict=True)
    while True:
        number = reader.line_num + 1
        try:
            values = next(reader)
        except StopIteration:
            return
        except csv.Error as problem:
            raise ValueError(
                f'{path} line {number}: {problem}. Close the quotes of that row, or set data.quotes to "no".'
            ) from None
        yield number, values or [""]


def _without_end(lines: Iterator[tuple[int, T]], empty: T) -> Iterator[tuple[int, T]]:
    """Without the empty ones at the end."""
    held: list[tuple[int, T]] = []
    for line in lines:
        held.append(line)
        if line[1] != empty:
            yield from held
            held.clear()


def _table(
    path: Path, columns: Sequence[Column], lines: Iterator[tuple[int, list[str]]], header: bool, skip: bool
) -> Iterator[Row]:
    names: list[str] = []
    if header:
        _, names = next(lines, (0, []))
    width = len(names)
    for number, (line, values) in enumerate(lines):
        width = width or len(values)
        places = {column: _place(path, column, names, width) for column in columns}
        where = f"{path} line {line}"
        if len(values) != width and skip:
            continue
        if len(values) != width:
            raise ValueError(
                f"{where}: it has {len(values)} columns, and the first line has {width}. Correct the line, or see "
                "data.format, data.quotes and data.bad."
            )
        yield Row(where=where, number=number, values={column: values[place] for column, place in places.items()})


def _place(path: Path, column: Column, names: Sequence[str], width: int) -> int:
    if isinstance(column, int):
        if not 1 <= column <= width:
            raise ValueError(f"{path} has the columns 1 to {width}. Got {column}.")
        return column - 1
    if column not in names:
        known = f"It has {', '.join(map(repr, names))}" if names else "It has no header (data.header): give numbers"
        raise ValueError(f"{path} has no column {column!r}. {known}.")
    if names.count(column) > 1:
        raise ValueError(
            f"{path} has {names.count(column)} columns {column!r}. Give the number of the one that is meant."
        )
    return names.index(column)


def _objects(path: Path, columns: Sequence[Column]) -> Iterator[Row]:
    lines = ((number, line.strip()) for number, line in enumerate(read_lines(path), start=1))
    for number, (place, line) in enumerate(_without_end(lines, "")):
        where = f"{path} line {place}"
        try:
            row = json.loads(line)
        except (ValueError, RecursionError) as problem:
            raise ValueError(f"{where}: it is not valid JSON: {problem}. Write one object a line.") from None
        if not isinstance(row, dict):
            raise ValueError(f"{where}: it must be a JSON object. Got {line[:60]!r}.")
        missing = next((column for column in columns if column not in row), None)
        if missing is not None:
            raise ValueError(f"{where}: it has no key {missing!r}. It has {', '.join(map(repr, row))}.")
        yield Row(
            where=where, number=number, values={column: _text_of(row[column], where, column) for column in columns}
        )


def _text_of(value: Any, where: str, column: Column) -> str | None:
    """Labels are often numbers or truth values in JSON."""
    if value is None or isinstance(value, str):
        return value
    if isinstance(value, bool | int | float):
        return json.dumps(value)
    raise ValueError(f"{where}: {column!r} must be a text or a number. Got {value!r}.")
