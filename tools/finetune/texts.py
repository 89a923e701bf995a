"""The section `data` of classification and regression, and the texts that it names."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from models.bert.texts import Text
from tools.corpus.tokenizers import Tokenizer
from tools.finetune.embedded import embedded_rows
from tools.finetune.tables import Column, Format, Quotes, Row, read_rows
from tools.reading import Reader, TooLong

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
    max_length: int = 128
    """Tokens of a text or pair, at most, with the special ones."""
    too_long: TooLong = "truncate"
    """What becomes of a longer one: its end is left out and counted, or an error."""
    bad: Literal["refuse", "skip"] = "refuse"
    """What becomes of a row of train or dev with too many or too few columns, no text or no label: an error, or it is
    left out and counted."""

    def __post_init__(self) -> None:
        if (self.train == EMBEDDED) != (self.dev is None):
            raise ValueError(
                'data.dev must name a file, as data.train does; data.train = "embedded" brings its own. Got '
                f"train={self.train!r} and dev={self.dev!r}."
            )
        if self.max_length < 5:
            raise ValueError(f"data.max_length must be at least 5. Got {self.max_length}.")
        if len(set(self.labels)) < len(self.labels) or len(self.labels) == 1:
            raise ValueError(f"data.labels must be different, at least two. Got {list(self.labels)}.")
        if any(mark in label for label in self.labels for mark in "\t\r\n"):
            raise ValueError(f"data.labels must have no tab and no line end. Got {list(self.labels)}.")

    def files(self) -> list[Path]:
        return [Path(name) for name in (self.train, self.dev, self.test) if name is not None and name != EMBEDDED]


@dataclass(frozen=True, kw_only=True, eq=False)
class Labelled:
    """The texts of one file, as the model reads them."""

    texts: list[Text]
    ids: list[str]
    labels: list[str | None]
    """As they stand there; None where there is none."""
    where: list[str]
    """File and line of each."""
    truncated: int
    """Texts whose end was left out."""
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
    reader = Reader(tokenizer, data.max_length, data.too_long)
    columns = _columns(data, part)
    skip = data.bad == "skip" and part != "test"
    found = list(_rows(data, part, columns, skip=skip))
    rows = [row for row in found if _filled(row, columns)] if skip else found
    if not rows:
        raise ValueError(f"{getattr(data, part)} has no row. Give a file with at least one.")
    pairs = columns["text_b"] is not None
    texts: list[Text] = []
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
        labels=column("label"),
        where=[row.where for row in rows],
        truncated=reader.truncated,
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


def _filled(row: Row, columns: dict[str, Column | None]) -> bool:
    """Whether the row has its texts and its label."""
    needed = (columns[name] for name in ("text", "text_b", "label"))
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
            for number, (where, *values) in enumerate(embedded_rows(part))
        )
    header = data.header if part != "test" or data.test_header is None else data.test_header
    needed = [column for column in columns.values() if column is not None]
    return read_rows(Path(name), needed, format=data.format, header=header, quotes=data.quotes, skip=skip)


def _encoded(reader: Reader, rows: Sequence[Row], columns: dict[str, Column | None], pairs: bool) -> list[Text]:
    firsts = _ids(reader.tokenizer, rows, columns["text"])
    seconds = _ids(reader.tokenizer, rows, columns["text_b"]) if pairs else [None] * len(rows)
    texts = []
    for number, (row, first, second) in enumerate(zip(rows, firsts, seconds, strict=True)):
        try:
            texts.append(reader.sequence(first, second, number))
        except ValueError as problem:
            raise ValueError(f"{row.where}: {problem}") from None
    return texts


def _ids(tokenizer: Tokenizer, rows: Sequence[Row], column: Column | None) -> list[list[int]]:
    assert column is not None, "a text has a column"
    texts = [row.values[column] or "" for row in rows]
    encoded = tokenizer.encode(texts)
    for row, text, ids in zip(rows, texts, encoded, strict=True):
        if not ids:
            raise ValueError(f"{row.where}: column {column!r} has no text. Got {text!r}. Leave the row out.")
    return encoded
