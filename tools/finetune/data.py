"""The section `data` of classification and regression, and the texts that it names."""

from __future__ import annotations

import csv
import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar

from models.bert.text_batches import EncodedText
from tools.common.bounds import AtLeast, check_bounds
from tools.corpus.quick.text_sources import EmbeddedSource, read_lines
from tools.corpus.sentences import split_sentences
from tools.corpus.tokenizers import Tokenizer
from tools.corpus.tokenizers.base import InTexts
from tools.predict.text_encoder import TextEncoder, TooLong

# --- Rows of TSV, CSV and JSON lines, with the place of each for messages ---------------------------------------------

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
    separator: str | None = None,
) -> Iterator[Row]:
    """The rows of a UTF-8 file. Empty lines at its end are passed over; any other one would be a row of nothing.

    Args:
        columns: those that are needed; by number alone where there is no header, by name alone in JSON lines.
        format: "auto": by the file's suffix.
        header: whether the first line of TSV or CSV names the columns.
        quotes: whether a value in double quotes may hold separators and line ends. "auto": in CSV, but not in TSV.
        skip: leave out rows with more or fewer columns than the first.
        separator: what joins the texts of a JSON list. None: a list is refused.

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
        return _objects(path, columns, separator)
    quoted = kind == "csv" if quotes == "auto" else quotes == "yes"
    mark = "\t" if kind == "tsv" else ","
    lines = _quoted(path, mark) if quoted else _plain(path, mark)
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


def _objects(path: Path, columns: Sequence[Column], separator: str | None) -> Iterator[Row]:
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
        values = {column: _text_of(row[column], where, column, separator) for column in columns}
        yield Row(where=where, number=number, values=values)


def _text_of(value: Any, where: str, column: Column, separator: str | None) -> str | None:
    """Labels are often numbers or truth values in JSON."""
    if isinstance(value, list) and separator is not None:
        parts = [_text_of(part, where, column, None) or "" for part in value]
        if wrong := next((part for part in parts if separator in part or not part.strip()), None):
            raise ValueError(f"{where}: a label has data.separator, {separator!r}, in it. Set another. Got {wrong!r}.")
        if "" in (part.strip() for part in parts):
            raise ValueError(f"{where}: {column!r} has an empty label. Got {value!r}.")
        return separator.join(parts)
    if value is None or isinstance(value, str):
        return value
    if isinstance(value, bool | int | float):
        return json.dumps(value)
    raise ValueError(f"{where}: {column!r} must be a text or a number. Got {value!r}.")


# --- A task that needs no file: with which word did this sentence begin? ----------------------------------------------
#
# The sentences are those of the documentation that every Python carries; the four commonest first words are the
# classes, and the model sees what comes after them. Everybody with the same Python has the same task.

FIRST_WORDS = ("If", "Return", "The", "This")
INNER_WORDS = ("be", "for", "is", "not")
"""Of the task with several labels: which of these words have been taken out of a sentence?"""
_DEV_EVERY = 10  # one document in so many
_WORDS = range(6, 25)
_prose = re.compile(r"[A-Z][A-Za-z' ,-]*[.]").fullmatch


def embedded_sentences(part: str) -> Iterator[str]:
    """Sentences of prose, 6 to 24 words each, of the documents of "train" or of "dev"."""
    for number, document in enumerate(EmbeddedSource().documents()):
        if (number % _DEV_EVERY == 0) == (part == "dev"):
            for sentence in split_sentences(document):
                if len(sentence.split()) in _WORDS and _prose(sentence):
                    yield sentence


def embedded_rows(part: str, separator: str | None = None) -> Iterator[tuple[str, str, str]]:
    """Where a row comes from, a sentence without its first word, and that word. With a separator: a sentence without
    those of INNER_WORDS, and those that it had."""
    for number, sentence in enumerate(embedded_sentences(part)):
        where = f"embedded {part}, sentence {number}"
        first, rest = sentence.split(maxsplit=1)
        if separator is not None:
            words = sentence.split()
            left = [word for word in words if word not in INNER_WORDS]
            yield where, " ".join(left), separator.join(word for word in INNER_WORDS if word in words)
        elif first in FIRST_WORDS:
            yield where, rest, first


# --- The section `data` of classification and regression --------------------------------------------------------------

EMBEDDED = "embedded"
_PART = 4096  # texts that are encoded together


@dataclass(frozen=True, kw_only=True)
class TextData:
    """Files of texts or pairs with a label each.

    Raises:
        ValueError: settings that do not fit together.
    """

    train: str = EMBEDDED
    """File to train on, or "embedded": a small task made of the text that comes with Python, train and dev in one."""
    dev: str | None = None
    """File to measure on while training: it decides which weights are kept."""
    test: str | None = None
    """File to predict at the end. It needs no labels; with `test_labels` the metrics are told too."""
    text: Column = "sentence"
    """Column of the text: its name in the header or key in JSON, or its number from 1."""
    text_b: Column | None = None
    """Column of the second text of a pair."""
    label: Column = "label"
    """Column of the label, or of the number in regression."""
    id: Column | None = None
    """Column that names a row in the predictions. Default: rows are counted from 0."""
    test_text: Column | None = None
    """Column of the text in the test file, where it differs (GLUE's test files begin with an index)."""
    test_text_b: Column | None = None
    """The same of the second text."""
    test_id: Column | None = None
    """The same of the name."""
    test_header: bool | None = None
    """Whether the test file has a header, where it differs."""
    test_labels: bool = False
    """Whether the test file has labels."""
    format: Format = "auto"
    """"auto": by the suffix, .tsv, .csv or .jsonl."""
    header: bool = True
    """Whether the first line of TSV or CSV names the columns."""
    quotes: Quotes = "auto"
    """Whether values of TSV or CSV may stand in double quotes. "auto": in CSV, not in TSV, as GLUE has them."""
    labels: tuple[str, ...] = ()
    """Classes in their order. Default: those of the training file, sorted. F1 is that of the last one of two."""
    max_length: Annotated[int, AtLeast(5)] = 128
    """Tokens of a text or pair, at most, with the special ones."""
    too_long: TooLong = "truncate"
    """What becomes of a longer one: its end is left out and counted, or an error."""
    special_tokens: InTexts = "text"
    """What the name of a special token in a text is, such as [SEP] or [E1]: text, or that token, as the transformers
    library has it. Predictions do the same."""
    multi_label: bool = False
    """Several labels may hold for a text, or none: `classify` learns a probability for each, and a threshold on dev."""
    separator: str = ","
    """Between the labels of a text, with multi_label; JSON may have a list."""
    class_weights: Literal["none", "balanced"] = "none"
    """"balanced": classes count more the fewer texts of the training file have them."""
    label_smoothing: float = 0.0
    """Share of each label that is spread evenly over the classes while learning, at least 0 and below 1."""
    bad: Literal["refuse", "skip"] = "refuse"
    """What becomes of a row of train or dev with too many or too few columns, no text or no label: an error, or it is
    left out and counted."""

    def __post_init__(self) -> None:
        if (self.train == EMBEDDED) != (self.dev is None):
            raise ValueError(
                'data.dev must name a file, as data.train does; data.train = "embedded" brings its own. Got '
                f"train={self.train!r} and dev={self.dev!r}."
            )
        check_bounds(self, "data")
        if len(set(self.labels)) < len(self.labels) or len(self.labels) == 1:
            raise ValueError(f"data.labels must be different, at least two. Got {list(self.labels)}.")
        if not 0 <= self.label_smoothing < 1:
            raise ValueError(f"data.label_smoothing must be at least 0 and below 1. Got {self.label_smoothing}.")
        if self.multi_label and (not self.separator.strip() or any(self.separator in label for label in self.labels)):
            raise ValueError(
                "data.separator must be a mark that is no space and that no label has in it. Got "
                f"{self.separator!r} and the labels {list(self.labels)}."
            )
        if any(mark in label for label in self.labels for mark in "\t\r\n"):
            raise ValueError(f"data.labels must have no tab and no line end. Got {list(self.labels)}.")

    def files(self) -> list[Path]:
        return [Path(name) for name in (self.train, self.dev, self.test) if name is not None and name != EMBEDDED]


@dataclass(frozen=True, kw_only=True, eq=False)
class Labelled:
    """The texts of one file, as the model reads them."""

    texts: list[EncodedText]
    ids: list[str]
    labels: list[str | None]
    """As they stand there; None where there is none."""
    where: list[str]
    """File and line of each."""
    truncated: int
    """Texts of which a part was left out."""
    named: int
    """Texts with the name of a special token in them."""
    skipped: int
    """Rows that were left out."""

    @property
    def lengths(self) -> list[int]:
        return [len(text.ids) for text in self.texts]


def read_part(data: TextData, part: str, tokenizer: Tokenizer) -> Labelled:
    """The texts of "train", "dev" or "test".

    Raises:
        ValueError: naming the file and the line; see `read_rows`. Also a text with nothing in it, and names that would
            break the predictions: with a tab or line end in them, or there twice.
    """
    reader = TextEncoder(tokenizer, data.max_length, data.too_long)
    columns = _columns(data, part)
    skip = data.bad == "skip" and part != "test"
    found = list(_rows(data, part, columns, skip=skip))
    needed = [columns[name] for name in ("text", "text_b", *(() if data.multi_label else ("label",)))]
    rows = [row for row in found if _filled(row, needed)] if skip else found
    if not rows:
        raise ValueError(f"{getattr(data, part)} has no row. Give a file with at least one.")
    pairs = columns["text_b"] is not None
    texts: list[EncodedText] = []
    for start in range(0, len(rows), _PART):
        texts += _encoded(reader, rows[start : start + _PART], columns, pairs)

    def column(name: str) -> list[str | None]:
        wanted = columns[name]
        return [None] * len(rows) if wanted is None else [row.values[wanted] for row in rows]

    ids = [str(row.number) if name is None else name for row, name in zip(rows, column("id"), strict=True)]
    _check_names(rows, ids, column("label"), repeated=part == "train")
    return Labelled(
        texts=texts,
        ids=ids,
        labels=[label and label.strip() for label in column("label")],
        where=[row.where for row in rows],
        truncated=reader.truncated,
        named=reader.named,
        skipped=found[-1].number + 1 - len(rows),
    )


def _columns(data: TextData, part: str) -> dict[str, Column | None]:
    columns: dict[str, Column | None] = {name: getattr(data, name) for name in ("text", "text_b", "id", "label")}
    if part == "test":
        for name in ("text", "text_b", "id"):
            columns[name] = getattr(data, f"test_{name}") or columns[name]
        if not data.test_labels:
            columns["label"] = None
    return columns


def _filled(row: Row, needed: Sequence[Column | None]) -> bool:
    """Whether the row has its texts and its label."""
    return all((row.values[column] or "").strip() for column in needed if column is not None)


def _check_names(rows: Sequence[Row], ids: Sequence[str], labels: Sequence[str | None], *, repeated: bool) -> None:
    """Raises ValueError for what a line of predictions could not hold, or could not be told apart by."""
    seen: dict[str, str] = {}
    for row, name, label in zip(rows, ids, labels, strict=True):
        for kind, value in (("id", name), ("label", label)):
            if value is not None and any(mark in value for mark in "\t\r\n"):
                raise ValueError(f"{row.where}: the {kind} {value!r} has a tab or line end, and predictions are TSV.")
        if not repeated and name in seen:
            raise ValueError(f"{row.where}: the id {name!r} is that of {seen[name]} already. Each row needs its own.")
        seen[name] = row.where


def _rows(data: TextData, part: str, columns: dict[str, Column | None], *, skip: bool) -> Iterator[Row]:
    name = getattr(data, part)
    if data.train == EMBEDDED and part != "test":
        names = [column for column in (columns["text"], columns["label"]) if column is not None]
        return (
            Row(where=where, number=number, values=dict(zip(names, values, strict=True)))
            for number, (where, *values) in enumerate(embedded_rows(part, data.separator if data.multi_label else None))
        )
    header = data.header if part != "test" or data.test_header is None else data.test_header
    needed = [column for column in columns.values() if column is not None]
    lists = data.separator if data.multi_label else None
    how: dict[str, Any] = {"format": data.format, "quotes": data.quotes, "skip": skip, "separator": lists}
    return read_rows(Path(name), needed, header=header, **how)


def _encoded(
    reader: TextEncoder, rows: Sequence[Row], columns: dict[str, Column | None], pairs: bool
) -> list[EncodedText]:
    firsts = _ids(reader, rows, columns["text"])
    seconds = _ids(reader, rows, columns["text_b"]) if pairs else [None] * len(rows)
    texts = []
    for number, (row, first, second) in enumerate(zip(rows, firsts, seconds, strict=True)):
        try:
            texts.append(reader.sequence(first, second, number))
        except ValueError as problem:
            raise ValueError(f"{row.where}: {problem}") from None
    return texts


def _ids(reader: TextEncoder, rows: Sequence[Row], column: Column | None) -> list[list[int]]:
    assert column is not None, "a text has a column"
    texts = [row.values[column] or "" for row in rows]
    encoded = reader.encode(texts)
    for row, text, ids in zip(rows, texts, encoded, strict=True):
        if not ids:
            raise ValueError(f"{row.where}: column {column!r} has no text. Got {text!r}. Leave the row out.")
    return encoded
