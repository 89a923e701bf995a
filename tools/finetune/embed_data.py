"""The section `data` of sentence vectors, and what it names: pairs, triplets, scored pairs, and collections as BEIR has
them (corpus.jsonl, queries.jsonl, qrels/*.tsv)."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

import numpy as np
from numpy.typing import NDArray

from models.bert.embedding import Activation, DenseConfig, Pooling
from models.bert.huggingface import model_folder_of
from models.bert.text_batches import EncodedText
from tools.common.bounds import AtLeast, Positive, check_bounds
from tools.corpus.tokenizers import Tokenizer
from tools.corpus.tokenizers.base import InTexts
from tools.finetune.config import ModelSection
from tools.finetune.data import embedded_neighbours
from tools.finetune.ranking_metrics import read_relevance
from tools.finetune.rows import EMBEDDED, Column, Format, Quotes, Row, check_dev, files_of, read_rows
from tools.predict.sentence_folder import SentenceSettings, sentence_files, sentence_settings
from tools.predict.text_encoder import TextEncoder, TooLong

CORPUS, QUERIES = "corpus.jsonl", "queries.jsonl"
MAX_LENGTH = 128
_SEPARATOR = "\x1f"  # between the texts of a JSON list, as `read_rows` gives them


@dataclass(frozen=True, kw_only=True)
class EmbedData:
    """Files of pairs, triplets or scored pairs of texts, and collections to search in.

    Raises:
        ValueError: settings that do not fit together.
    """

    train: str = EMBEDDED
    """File to train on, or "embedded": neighbouring sentences of the text that comes with Python, train and dev in
    one."""
    dev: str | None = None
    """What to measure on while training; it decides which weights are kept. A file with `eval_score`: pairs whose
    cosines are to be in the order of their scores. A file without: the positive of each pair is to be found among all
    others. A folder with corpus.jsonl, queries.jsonl and qrels/SPLIT.tsv, as BEIR has them: a collection."""
    test: str | None = None
    """The same, measured and predicted at the end."""
    dev_split: str = "dev"
    """Of a folder: which of its qrels."""
    test_split: str = "test"
    """The same of `test`."""
    anchor: Column = "anchor"
    """Column of the first text of a pair: its name in the header or key in JSON, or its number from 1."""
    positive: Column = "positive"
    """Column of the second text, which belongs to the first."""
    negatives: tuple[Column, ...] = ()
    """Columns of texts that do not belong to the first; in JSON one may hold a list."""
    score: Column = "score"
    """Column of the number, for loss = "cosine"."""
    eval_anchor: Column | None = None
    """Column in `dev` and `test`, where it differs."""
    eval_positive: Column | None = None
    """The same of the second text."""
    eval_score: Column | None = None
    """Column of the score in `dev` and `test`. Default: `score` with loss = "cosine", else they have none."""
    format: Format = "auto"
    """"auto": by the suffix, .tsv, .csv, .jsonl or .parquet. A folder is one that the library datasets has saved."""
    header: bool = True
    """Whether the first line of TSV or CSV names the columns."""
    quotes: Quotes = "auto"
    """Whether values of TSV or CSV may stand in double quotes. "auto": in CSV, not in TSV."""
    loss: Literal["in-batch", "cosine"] = "in-batch"
    """"in-batch": an anchor's positive is to be nearer to it than all other positives and negatives of the step;
    "cosine": the cosine of a pair is to be its score."""
    temperature: Annotated[float, Positive()] = 0.05
    """Cosines are divided by it, with "in-batch"."""
    symmetric: bool = False
    """Whether a positive is to find its anchor, too, with "in-batch"."""
    cache: bool = True
    """A step that needs more slots than run.tokens_per_rank is computed twice, in parts (gradient caching), and has the
    same negatives. false: its texts are one micro-batch, however large."""
    top_score: Annotated[float, Positive()] = 1.0
    """Scores are divided by it: 5 where 5 means the same, as in STS."""
    sizes: tuple[int, ...] = ()
    """Columns, fewer than a vector has, after which vectors may be cut: they learn to be good alone (Matryoshka)."""
    pooling: Pooling | None = None
    """From the last hidden states to a vector. Default: as model.start_from has it (sentence-transformers), else
    "mean"."""
    dense: tuple[int, ...] | None = None
    """Columns behind each of new dense layers, with biases, that follow pooling: [512] for vectors of 512. Default:
    those of model.start_from, with their weights, else none. []: none."""
    dense_activation: Activation = "tanh"
    """Of new dense layers."""
    query_prompt: str | None = None
    """What stands before each anchor, and each query of a collection. The folder that is made has it as its prompt
    "query". Default: the prompt by which model.start_from makes all vectors, mostly none."""
    document_prompt: str | None = None
    """What stands before each positive and negative, and each document of a collection; its prompt "document"."""
    normalize: bool | None = None
    """Whether the model is to give vectors of length 1. Default: as model.start_from has it, else true."""
    max_length: Annotated[int | None, AtLeast(5)] = None
    """Tokens of a text, at most, with the special ones. Default: as model.start_from has it, else 128."""
    too_long: TooLong = "truncate"
    """What becomes of a longer one: its end is left out and counted, or an error."""
    special_tokens: InTexts = "text"
    """What the name of a special token in a text is, such as [SEP]: text, or that token, as the transformers library
    has it. Predictions do the same."""

    def __post_init__(self) -> None:
        check_dev(self.train, self.dev, "a file or a folder")
        check_bounds(self, "data")
        if any(size < 1 for size in self.dense or ()):
            raise ValueError(f"data.dense must be columns, each at least 1. Got {list(self.dense or ())}.")
        if len(set(self.sizes)) < len(self.sizes) or any(size < 1 for size in self.sizes):
            raise ValueError(f"data.sizes must be different, each at least 1. Got {list(self.sizes)}.")
        if self.loss == "cosine" and (self.negatives or self.symmetric or self.train == EMBEDDED):
            raise ValueError(
                'data.loss = "cosine" learns from pairs with scores: data.negatives, data.symmetric and the embedded '
                f'pairs are for "in-batch". Got negatives={list(self.negatives)}, symmetric={self.symmetric}, '
                f"train={self.train!r}."
            )

    def files(self) -> list[Path]:
        found = [] if self.train == EMBEDDED else files_of(Path(self.train))
        for name, split in ((self.dev, self.dev_split), (self.test, self.test_split)):
            if name is not None:
                path = Path(name)
                found += collection_files(path, split) if is_collection(path) else files_of(path)
        return found

    @property
    def scored_by(self) -> Column | None:
        """The column of scores in dev and test."""
        return self.eval_score if self.eval_score is not None or self.loss == "in-batch" else self.score


def is_collection(path: Path) -> bool:
    return path.is_dir() and ((path / CORPUS).exists() or (path / QUERIES).exists() or (path / "qrels").is_dir())


def collection_files(path: Path, split: str) -> list[Path]:
    return [path / CORPUS, path / QUERIES, path / "qrels" / f"{split}.tsv"]


# --- How vectors are made: as the folder says that training begins with, unless the recipe says otherwise -------------


def start_settings(model: ModelSection) -> SentenceSettings | None:
    """Of model.start_from, where it is a folder of sentence-transformers, or one that `embed` has made.

    Raises:
        ValueError: settings that are not known here.
    """
    return None if model.start_from is None else sentence_settings(model_folder_of(Path(model.start_from)))


def encoder_folder(model: ModelSection) -> Path | None:
    """Where the weights to begin with lie: model.start_from, or the folder in it that its modules.json names."""
    if model.start_from is None:
        return None
    folder, begun = Path(model.start_from), start_settings(model)
    return folder if begun is None or begun.encoder == model_folder_of(folder) else begun.encoder


def start_files(model: ModelSection) -> list[Path]:
    """Those that say so, and the weights of dense layers that lie beside them."""
    folder, begun = None if model.start_from is None else model_folder_of(Path(model.start_from)), start_settings(model)
    if folder is None or begun is None:
        return []
    return [*(folder / name for name in sentence_files(folder)), *begun.dense_files]


def settings_for(data: EmbedData, model: ModelSection) -> SentenceSettings:
    """Those of the model that is made; `encoder` is the folder to begin with."""
    begun = start_settings(model) or SentenceSettings(encoder=Path(model.start_from or ""), normalize=True)
    if data.dense is not None:
        fresh = tuple(DenseConfig(outputs=outputs, activation=data.dense_activation) for outputs in data.dense)
        begun = dataclasses.replace(begun, dense=fresh, dense_folders=())
    given = {"query": data.query_prompt, "document": data.document_prompt}
    asked = {name: text for name, text in given.items() if text is not None}
    for name in asked:
        dataclasses.replace(begun, prompts=asked).with_prompt(name, begun.encoder)  # which says what cannot be
    return dataclasses.replace(
        begun,
        prompts={**begun.prompts, **asked},
        pooling=data.pooling or begun.pooling,
        normalize=begun.normalize if data.normalize is None else data.normalize,
        max_length=data.max_length or begun.max_length or MAX_LENGTH,
    )


# --- What is read -----------------------------------------------------------------------------------------------------


class TextTable:
    """Texts of files, each of which is encoded once, however often it is there."""

    def __init__(self, settings: SentenceSettings) -> None:
        self._settings = settings
        self._numbers: dict[str, int] = {}
        self._where: list[str] = []
        self.bare: list[str] = []
        """Of each, what stands behind its prompt."""

    def add(self, text: str | None, where: str, what: object, prompt: str | None = None) -> int:
        """Its number, behind this prompt or else that of all. Raises ValueError for a text with nothing in it, naming
        the place."""
        if not (text or "").strip():
            raise ValueError(f"{where}: {what!r} has no text. Got {text!r}. Leave the row out.")
        assert text is not None, "it has content"
        number = self._numbers.setdefault(self._settings.prepared(text, prompt), len(self._numbers))
        if number == len(self._where):
            self._where.append(where)
            self.bare.append(self._settings.prepared(text, ""))
        return number

    def encoded(self, encoder: TextEncoder) -> list[EncodedText]:
        """By number. Raises ValueError for a text without a token, or too long a one, naming its first place."""
        found = []
        for (text, number), ids in zip(self._numbers.items(), encoder.encode(list(self._numbers)), strict=True):
            if not ids:
                raise ValueError(f"{self._where[number]}: a text has no token. Got {text!r:.60}. Leave the row out.")
            try:
                found.append(encoder.sequence(ids, number=number))
            except ValueError as problem:
                raise ValueError(f"{self._where[number]}: {problem}") from None
        return found


@dataclass(frozen=True, kw_only=True, eq=False)
class Rows:
    """Pairs or triplets, as numbers in `texts`."""

    texts: Sequence[EncodedText]
    keys: NDArray[np.int64]
    """(texts,): the same for those that the model reads as the same, whatever their prompts."""
    examples: Sequence[tuple[int, ...]]
    """Anchor, positive, negatives."""
    scores: NDArray[np.float64] | None
    where: Sequence[str]


@dataclass(frozen=True, kw_only=True, eq=False)
class Collection:
    """Queries, documents, and which of these are relevant; as numbers in `texts`."""

    texts: Sequence[EncodedText]
    queries: Sequence[int]
    query_names: Sequence[str]
    documents: Sequence[int]
    document_names: Sequence[str]
    grades: Sequence[dict[int, float]]
    """Of each query, by the place of a document in `documents`."""
    notes: Sequence[str] = ()
    omitted: Sequence[int]
    """Of each query, the place of the document that is the query itself and not in its ranking; -1: there is none."""


def read_examples(data: EmbedData, part: str, settings: SentenceSettings, encoder: TextEncoder) -> Rows:
    """The rows of a file.

    Raises:
        ValueError: naming the file and the line: see `read_rows`; an empty text, a row without a negative where columns
            of negatives are named, a negative that is the positive or the anchor, a score that is no number or that no
            cosine can be.
    """
    table, examples, scores, where = TextTable(settings), [], [], []
    training = part == "train"
    anchor = data.anchor if training or data.eval_anchor is None else data.eval_anchor
    positive = data.positive if training or data.eval_positive is None else data.eval_positive
    score = (data.score if data.loss == "cosine" else None) if training else data.scored_by
    negatives = data.negatives if training else ()
    for row in _rows(data, part, [anchor, positive, *negatives, *([score] if score is not None else [])]):
        own = [
            table.add(_one(row, anchor), row.where, anchor, data.query_prompt),
            table.add(_one(row, positive), row.where, positive, data.document_prompt),
        ]
        for column in negatives:
            own += _negatives(row, column, table, own, data.document_prompt)
        examples.append(tuple(own))
        where.append(row.where)
        if score is not None:
            scores.append(_score(row.values[score], row.where, data.top_score))
    if not examples:
        raise ValueError(f"{getattr(data, part)} has no row. Give a file with at least one.")
    texts = table.encoded(encoder)
    seen: dict[bytes, int] = {}
    read = [text.ids for text in texts]
    if data.query_prompt != data.document_prompt:
        read = [np.array(ids[: encoder.max_length]) for ids in encoder.tokenizer.encode(table.bare)]
    keys = np.array([seen.setdefault(ids.tobytes(), len(seen)) for ids in read], dtype=np.int64)
    rows = None if score is None else np.array(scores)
    return Rows(texts=texts, keys=keys, examples=examples, scores=rows, where=where)


def _rows(data: EmbedData, part: str, columns: list[Column]) -> Iterator[Row]:
    if data.train == EMBEDDED and part != "test":
        for number, pair in enumerate(embedded_neighbours(part)):
            values = dict(zip(columns, pair, strict=False))
            yield Row(where=f"embedded {part}, pair {number}", number=number, values=values)
        return
    how: dict[str, Any] = {"format": data.format, "quotes": data.quotes, "header": data.header}
    yield from read_rows(Path(getattr(data, part)), columns, separator=_SEPARATOR, **how)


def _one(row: Row, column: Column) -> str | None:
    value = row.values[column]
    if value is not None and _SEPARATOR in value:
        raise ValueError(
            f"{row.where}: {column!r} must be one text, and is a list. Got {value.split(_SEPARATOR)!r:.60}."
        )
    return value


def _negatives(row: Row, column: Column, table: TextTable, own: Sequence[int], prompt: str | None) -> list[int]:
    value = row.values[column]
    if not (value or "").strip():
        raise ValueError(
            f"{row.where}: {column!r} has no negative. Got {value!r}. Give each row one, leave the row out, or leave "
            f"{column!r} out of data.negatives."
        )
    assert value is not None, "it has content"
    found = [table.add(text, row.where, column, prompt) for text in value.split(_SEPARATOR)]
    refused = [table.bare[each] for each in own[:2]]
    if same := [table.bare[each] for each in found if table.bare[each] in refused]:
        what = "anchor" if same[0] == refused[0] else "positive"
        raise ValueError(f"{row.where}: a negative in {column!r} is the {what} itself. Leave the row out.")
    return found


def _score(text: str | None, where: str, top: float) -> float:
    try:
        number = float(text or "") / top
    except ValueError:
        number = np.nan
    if not np.isfinite(number):
        raise ValueError(f"{where}: the score must be a number. Got {text!r}.")
    if abs(number) > 1:
        raise ValueError(
            f"{where}: by data.top_score = {top:g} the score is {number:g}, and a cosine is between -1 and 1. Set "
            "data.top_score to the score of texts that mean the same."
        )
    return number


def pairs_as_collection(rows: Rows) -> Collection:
    """The positive of each anchor is to be found among those of all, but for the anchor itself."""
    places: dict[int, int] = {}
    queries: dict[int, dict[int, float]] = {}
    anchors: dict[int, int] = {}
    positives: dict[int, int] = {}
    for anchor, positive, *_ in rows.examples:
        key, other = int(rows.keys[anchor]), int(rows.keys[positive])
        anchors.setdefault(key, anchor)
        positives.setdefault(other, positive)
        queries.setdefault(key, {})[places.setdefault(other, len(places))] = 1.0
    return Collection(
        texts=rows.texts,
        queries=[anchors[key] for key in queries],
        query_names=[str(number) for number in range(len(queries))],
        documents=[positives[key] for key in places],
        document_names=[str(number) for number in range(len(places))],
        grades=list(queries.values()),
        omitted=[places[key] if places.get(key, -1) not in (-1, *own) else -1 for key, own in queries.items()],
    )


def read_collection(
    folder: Path, split: str, settings: SentenceSettings, encoder: TextEncoder, data: EmbedData
) -> Collection:
    """A collection as BEIR has it (Thakur et al. 2021, arXiv 2104.08663): documents are their title and their text, and
    queries those of the relevance file.

    Raises:
        ValueError: naming the file and the line: see `read_rows` and `read_relevance`; an empty text, a name that is
            there twice or has a tab or line end.
    """
    table = TextTable(settings)
    corpus, queries, relevance = collection_files(folder, split)
    documents = _named(corpus, ("title", "text"), table, data.document_prompt)
    known = _named(queries, ("text",), table, data.query_prompt)
    if not relevance.is_file():
        there = ", ".join(sorted(path.name for path in relevance.parent.glob("*.tsv"))) or "none"
        raise ValueError(f"{relevance} is not there. Name another split, data.dev_split or data.test_split: {there}.")
    grades = read_relevance(relevance, queries=known, documents=documents)
    place = {name: number for number, name in enumerate(documents)}
    same = [place.get(name, -1) for name in grades]
    told = [f"{len(known) - len(grades):,} queries have no row in {relevance.name}"] if len(known) > len(grades) else []
    if own := sum(number >= 0 for number in same):
        told.append(f"{own:,} queries have the name of a document, which is left out of their rankings, as BEIR does")
    return Collection(
        texts=table.encoded(encoder),
        queries=[known[name] for name in grades],
        query_names=list(grades),
        documents=list(documents.values()),
        document_names=list(documents),
        grades=[{place[document]: grade for document, grade in found.items()} for found in grades.values()],
        notes=told,
        omitted=same,
    )


def _named(path: Path, columns: Sequence[str], table: TextTable, prompt: str | None) -> dict[str, int]:
    """Texts by their names, in the order of the file."""
    found: dict[str, int] = {}
    for row in read_rows(path, ("_id", *columns), format="jsonl"):
        name = row.values["_id"] or ""
        if not name.strip() or any(mark in name for mark in "\t\r\n"):
            raise ValueError(f"{row.where}: '_id' must be a name without tab and line end. Got {name!r}.")
        if name in found:
            raise ValueError(f"{row.where}: the name {name!r} is there already. Each needs its own.")
        text = " ".join(value.strip() for column in columns if (value := row.values[column]) and value.strip())
        found[name] = table.add(text, row.where, columns[-1], prompt)
    if not found:
        raise ValueError(f"{path} has no row. Give a file with at least one.")
    return found


def encoder_for(data: EmbedData, settings: SentenceSettings, tokenizer: Tokenizer) -> TextEncoder:
    assert settings.max_length is not None, "set by settings_for"
    return TextEncoder(tokenizer, settings.max_length, data.too_long)
