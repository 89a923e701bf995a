"""The section `data` of classification and regression, and the texts that it names."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Annotated, Any, Literal

from models.bert.text_batches import EncodedText
from tools.common.bounds import AtLeast, check_bounds
from tools.corpus.quick.text_sources import EmbeddedSource
from tools.corpus.sentences import split_sentences
from tools.corpus.tokenizers import Tokenizer
from tools.corpus.tokenizers.base import InTexts, UnknownText
from tools.finetune.rows import EMBEDDED, Column, Format, Quotes, Row, check_dev, files_of, read_rows
from tools.predict.text_encoder import TextEncoder, TooLong

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
    return (sentence for document in _embedded_documents(part) for sentence in document if sentence)


def embedded_neighbours(part: str) -> Iterator[tuple[str, str]]:
    """Two such sentences, of which the second follows the first in its document."""
    return (pair for document in _embedded_documents(part) for pair in pairwise(document) if all(pair))


def _embedded_documents(part: str) -> Iterator[list[str]]:
    """The sentences of each; where one is not of that kind, nothing."""
    for number, document in enumerate(EmbeddedSource().documents()):
        if (number % _DEV_EVERY == 0) == (part == "dev"):
            sentences = split_sentences(document)
            yield [each if len(each.split()) in _WORDS and _prose(each) else "" for each in sentences]


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
    """"auto": by the suffix, .tsv, .csv, .jsonl or .parquet. A folder is one that the library datasets has saved."""
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
        check_dev(self.train, self.dev)
        check_bounds(self, "data")
        is_alone = len(self.labels) == 1 and not self.multi_label
        if len(set(self.labels)) < len(self.labels) or is_alone:
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
        named = [Path(name) for name in (self.train, self.dev, self.test) if name is not None and name != EMBEDDED]
        return [file for path in named for file in files_of(path)]


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
    unknown: UnknownText
    """How much of the texts the tokenizer has no pieces for."""
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
        unknown=reader.unknown,
        skipped=len(found) - len(rows),
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
