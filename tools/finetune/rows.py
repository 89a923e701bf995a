"""Rows of files: TSV, CSV, JSON lines, Parquet and saved datasets, with the place of each for messages."""

from __future__ import annotations

import csv
import importlib
import json
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from difflib import get_close_matches
from pathlib import Path
from typing import Any, Literal, TypeVar, cast

from tools.common.files import is_unicode, open_regular, parsed_json, read_file
from tools.corpus.quick.text_sources import read_lines

T = TypeVar("T")
EMBEDDED = "embedded"
"""In the place of a file to train on: a task made of the text that comes with Python."""
Format = Literal["auto", "tsv", "csv", "jsonl", "parquet"]
Quotes = Literal["auto", "yes", "no"]
Column = int | str
"""By its name in the header, or by its number, from 1."""
_FORMATS: Mapping[str, Format] = {
    ".tsv": "tsv",
    ".csv": "csv",
    ".jsonl": "jsonl",
    ".json": "jsonl",
    ".ndjson": "jsonl",
    ".parquet": "parquet",
}


@dataclass(frozen=True, kw_only=True)
class Row:
    """One row of a file."""

    where: str
    """File and line, as messages name it."""
    number: int
    """Rows of the file before it."""
    values: Mapping[Column, str | None]
    """Those of the columns that were asked for. None: JSON's null."""


@dataclass(frozen=True, kw_only=True)
class Record:
    """One row of JSON lines, Parquet or a saved dataset, with lists and objects as they are."""

    where: str
    number: int
    values: Mapping[Column, Any]
    """Those of the columns that were asked for, without those that may be missing and are."""


def read_rows(
    path: Path,
    columns: Sequence[Column],
    *,
    format: Format = "auto",
    header: bool = True,
    quotes: Quotes = "auto",
    skip: bool = False,
    separator: str | None = None,
) -> Iterator[Row]:
    """The rows of a UTF-8 file, or of a folder that the library datasets has saved (`save_to_disk`). Empty lines at a
    file's end are passed over; any other one would be a row of nothing.

    Args:
        columns: those that are needed; by number alone where there is no header, by name alone but in TSV and CSV.
        format: "auto": by the file's suffix.
        header: whether the first line of TSV or CSV names the columns.
        quotes: whether a value in double quotes may hold separators and line ends. "auto": in CSV, but not in TSV.
        skip: give rows with more or fewer columns than the first as rows of None.
        separator: what joins the texts of a JSON list. None: a list is refused.

    Raises:
        ValueError: of the file, naming it and the line: it does not exist, is not UTF-8, a column is missing or there
            twice, a row has more or fewer columns than the first, a quote is not closed, or a line is no JSON object.
    """
    kind = kind_of(path, format)
    if kind not in ("tsv", "csv"):
        return (_in_text(record, columns, separator) for record in read_records(path, columns, format=format))
    quoted = kind == "csv" if quotes == "auto" else quotes == "yes"
    mark = "\t" if kind == "tsv" else ","
    lines = _quoted(path, mark) if quoted else _plain(path, mark)
    return _table(path, columns, _without_end(lines, [""]), header, skip)


def read_records(
    path: Path, columns: Sequence[Column], *, optional: Sequence[Column] = (), format: Format = "auto"
) -> Iterator[Record]:
    """The rows of JSON lines, Parquet or a saved dataset with their values as they are: lists stay lists, and numbers
    numbers. Classes have their names.

    Args:
        columns, optional: those that are needed, and those that may be missing, by name.
        format: as in `read_rows`.

    Raises:
        ValueError: as `read_rows`; a format of text alone.
    """
    kind = kind_of(path, format)
    if kind == "dataset":
        return _dataset(path, columns, optional)
    if kind == "parquet":
        return _parquet(path, columns, optional)
    if kind == "jsonl":
        return _objects(path, columns, optional)
    raise ValueError(f"{path} must be a file of JSON lines or Parquet, or a saved dataset. Got {kind}.")


def kind_of(path: Path, format: Format) -> str:
    """ "tsv", "csv", "jsonl", "parquet" or "dataset". Raises ValueError where that cannot be known."""
    if path.is_dir():
        return "dataset"
    if not path.is_file():
        raise ValueError(
            f"{path.absolute()} is no file. Give the path of one, with columns in TSV, CSV, JSON lines or Parquet."
        )
    kind = _FORMATS.get(path.suffix.lower()) if format == "auto" else format
    if kind is None:
        raise ValueError(
            f'{path} does not say by its suffix what it is. Set data.format to "tsv", "csv", "jsonl" or "parquet".'
        )
    return kind


def _in_text(record: Record, columns: Sequence[Column], separator: str | None) -> Row:
    where = record.where
    values = {column: _text_of(record.values[column], where, column, separator) for column in columns}
    return Row(where=where, number=record.number, values=values)


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
            yield Row(where=where, number=number, values=dict.fromkeys(columns))
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


def _objects(path: Path, columns: Sequence[Column], optional: Sequence[Column]) -> Iterator[Record]:
    lines = ((number, line.strip()) for number, line in enumerate(read_lines(path), start=1))
    for number, (place, line) in enumerate(_without_end(lines, "")):
        where = f"{path} line {place}"
        try:
            row = parsed_json(line, unique=True)
        except ValueError as problem:
            raise ValueError(f"{where}: it is not valid JSON: {problem}. Write one object a line.") from None
        if not isinstance(row, dict):
            raise ValueError(f"{where}: it must be a JSON object. Got {line[:60]!r}.")
        missing = next((column for column in columns if column not in row), None)
        if missing is not None:
            raise ValueError(f"{where}: it has no key {missing!r}. It has {', '.join(map(repr, row))}.")
        values = {column: row[column] for column in (*columns, *optional) if column in row}
        yield Record(where=where, number=number, values=values)


def _text_of(value: Any, where: str, column: Column, separator: str | None) -> str | None:
    """Labels are often numbers or truth values in JSON."""
    if isinstance(value, list) and separator is not None:
        parts = [_text_of(part, where, column, None) or "" for part in value]
        if wrong := next((part for part in parts if separator in part), None):
            raise ValueError(f"{where}: a label has data.separator, {separator!r}, in it. Set another. Got {wrong!r}.")
        if "" in (part.strip() for part in parts):
            raise ValueError(f"{where}: {column!r} has an empty label. Got {value!r}.")
        return separator.join(parts)
    if value is None or is_unicode(value):
        return cast("str | None", value)
    if isinstance(value, float) and math.isnan(value):
        return None  # as pandas writes what is missing
    if isinstance(value, bool | int | float):
        return json.dumps(value)
    raise ValueError(f"{where}: {column!r} must be a text or a number, and Unicode. Got {value!r:.80}.")


# --- Parquet, and the Arrow files of a dataset that was saved ---------------------------------------------------------

_STATE, _INFO, _SPLITS = "state.json", "dataset_info.json", "dataset_dict.json"
Names = Mapping[Column, Sequence[str]]
"""Of columns whose values are numbers of classes (`ClassLabel`): the names of these."""


_SHOWN = 8  # names of a folder in a message


def check_there(path: Path, key: str) -> None:
    """Raises ValueError, with what was looked for and what there is instead, unless the path is a file.

    Args:
        key: of the recipe that names it, such as "data.dev"; empty where none does, as of a file of a folder.
    """
    if path.is_file():
        return
    looked, place = path.absolute(), path.parent
    near = ""
    if (place / _SPLITS).is_file():
        near = f" {place.absolute()} has the splits {', '.join(_object(place / _SPLITS).get('splits', ()))}."
    elif place.is_dir():
        there = sorted(each.name for each in place.iterdir() if not each.name.startswith("."))
        alike = get_close_matches(path.name, there, n=3)
        files = [name for name in there if (place / name).is_file()]
        near = f" There is {', '.join(files[:_SHOWN])}{', ...' if len(files) > _SHOWN else ''}." if files else ""
        near = f" Is it {' or '.join(alike)}?" if alike else near
    else:
        near = f" There is no folder {place.absolute()} either."
    relative = "" if path.is_absolute() else " Relative paths begin in the folder that the command is started in."
    named = f"{key} in the recipe, or give --{key} FILE" if key else "[data], or the file"
    raise ValueError(f"{looked} is no file.{near}{relative} Correct {named}.")


def check_dev(train: str, dev: str | None, what: str = "a file") -> None:
    """Raises ValueError unless dev is named where train is a file, and only there.

    Args:
        what: either is.
    """
    if train == EMBEDDED and dev is not None:
        raise ValueError(
            f'data.dev must name {what} where data.train does; data.train = "embedded" brings its own. Got '
            f"dev={dev!r}. Give --data.train FILE too, or leave data.dev out."
        )
    if train != EMBEDDED and dev is None:
        raise ValueError(
            f"data.dev must name {what}, as data.train does: examples that are not trained on, by which the best "
            f"weights are chosen. Got train={train!r} and dev=None. Give --data.dev FILE; where there is one file "
            "alone, move a tenth of its rows into another."
        )


def files_of(path: Path) -> list[Path]:
    """The file, or those of a folder."""
    inside = sorted(file for file in path.iterdir() if file.is_file()) if path.is_dir() else []
    return inside or [path]


def _parquet(path: Path, columns: Sequence[Column], optional: Sequence[Column]) -> Iterator[Record]:
    parquet = _pyarrow("parquet")
    with _naming(path), parquet.ParquetFile(path, page_checksum_verification=True) as file:
        there = _columns_of(path, columns, optional, file.schema_arrow.names)
        names = _class_names(_features_among(file.schema_arrow.metadata or {}))
        yield from _arrow_rows(path, file.iter_batches(columns=there), names)


def _dataset(path: Path, columns: Sequence[Column], optional: Sequence[Column]) -> Iterator[Record]:
    if (path / _SPLITS).is_file():
        splits = ", ".join(str(path / name) for name in _object(path / _SPLITS).get("splits", ()))
        raise ValueError(f"{path} holds several datasets. Give one of them: {splits}.")
    if not (path / _STATE).is_file():
        raise ValueError(f"{path} is a folder without {_STATE}, and no dataset that was saved. Give a file, or one.")
    state = _object(path / _STATE)
    if state.get("_indices_data_files") or state.get("_indices_files"):
        raise ValueError(f"{path} is a selection of rows of another dataset. Save it with flatten_indices().")
    ipc, memory_map = _pyarrow("ipc"), _pyarrow("lib").memory_map
    try:
        files = [path / Path(each["filename"]).name for each in state["_data_files"]]
    except (KeyError, TypeError, AttributeError):
        raise ValueError(f"{path / _STATE} names no files of data (_data_files). Save the dataset again.") from None
    features = _object(path / _INFO).get("features") if (path / _INFO).is_file() else None
    names = _class_names(features)

    def batches() -> Iterator[Any]:
        for file in files:
            with open_regular(file):
                pass  # where it is none, mapping it would wait
            # Mapped, a length that is damaged takes no memory.
            with memory_map(str(file)) as opened, ipc.open_stream(opened) as stream:
                there = _columns_of(path, columns, optional, stream.schema.names)
                for batch in stream:
                    batch.validate(full=True)  # what a damaged one points to may lie anywhere
                    yield batch.select(there)

    with _naming(path):
        yield from _arrow_rows(path, batches(), names)


def _arrow_rows(path: Path, batches: Iterable[Any], names: Names) -> Iterator[Record]:
    number = 0
    for batch in batches:
        try:
            found = batch.to_pylist()
        except UnicodeDecodeError as problem:
            raise ValueError(f"{path} is not UTF-8 behind row {number}: {problem}.") from None
        for row in found:
            where = f"{path} row {number}"
            values = {column: _named(value, names.get(column), where) for column, value in row.items()}
            yield Record(where=where, number=number, values=values)
            number += 1


def _features_among(metadata: Mapping[bytes, bytes]) -> Any:
    """Those that the library datasets writes into a Parquet file too."""
    try:
        return json.loads(metadata[b"huggingface"])["info"]["features"]
    except (KeyError, TypeError, ValueError):
        return None


def _class_names(features: Any) -> Names:
    """Of columns of classes and of lists of them."""
    names: dict[Column, Sequence[str]] = {}
    for column, told in features.items() if isinstance(features, dict) else ():
        inner = told[0] if isinstance(told, list) and told else told
        inner = inner.get("feature", inner) if isinstance(inner, dict) else None
        if isinstance(inner, dict) and inner.get("_type") == "ClassLabel" and isinstance(inner.get("names"), list):
            names[column] = inner["names"]
    return names


def _named(value: Any, names: Sequence[str] | None, where: str) -> Any:
    """The name of a class; -1 is none, as in test sets without labels."""
    if names is None or value is None:
        return value
    if isinstance(value, list):
        return [_named(each, names, where) for each in value]
    if type(value) is not int or not -1 <= value < len(names):
        raise ValueError(
            f"{where}: classes have numbers below {len(names)}, by the names of its features. Got {value!r}."
        )
    return None if value == -1 else names[value]


def _columns_of(path: Path, columns: Sequence[Column], optional: Sequence[Column], there: list[Column]) -> list[str]:
    """Those that are read."""
    wanted = [*columns, *(column for column in optional if column in there)]
    for column in wanted:
        if there.count(column) != 1:
            found = f"{there.count(column)} columns" if column in there else "no column"
            raise ValueError(
                f"{path} has {found} {column!r}, and one is needed, by its name. It has {', '.join(map(repr, there))}."
            )
    return [str(column) for column in wanted]


def _object(path: Path) -> dict[str, Any]:
    try:
        found = parsed_json(read_file(path))
    except ValueError as problem:
        raise ValueError(f"{path} is no JSON: {problem}.") from None
    if not isinstance(found, dict):
        raise ValueError(f"{path} must be a JSON object. Got {found!r:.60}.")
    return found


def _pyarrow(module: str) -> Any:
    try:
        return importlib.import_module(f"pyarrow.{module}")
    except ImportError as error:
        raise ValueError(f"Parquet files and datasets need pyarrow ({error}): pip install pyarrow.") from error


@contextmanager
def _naming(path: Path) -> Iterator[None]:
    """What pyarrow raises on damage says nothing of the file."""
    from pyarrow import ArrowException

    try:
        yield
    except (ArrowException, OSError, MemoryError, UnicodeError) as problem:
        told = str(problem).partition("\n")[0].rstrip(".")
        raise ValueError(f"{path} is damaged, or not what it should be: {told}. Get it again.") from None
