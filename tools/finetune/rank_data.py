"""The section `data` of ranking, and the queries with passages that it names."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, Literal

import numpy as np

from models.bert.text_batches import EncodedText
from tools.common.bounds import AtLeast, Positive, check_bounds
from tools.corpus.tokenizers import Tokenizer
from tools.corpus.tokenizers.base import InTexts
from tools.finetune.data import FIRST_WORDS, embedded_rows
from tools.finetune.rank_losses import Grades, LossName
from tools.finetune.ranking_metrics import Gain, grade_of
from tools.finetune.rows import EMBEDDED, Column, Format, Quotes, check_dev, files_of, kind_of, read_records, read_rows
from tools.predict.text_encoder import TextEncoder, TooLong

# --- The section `data` of ranking ------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class RankData:
    """Files of queries with passages and their grades: 0 is not relevant, and higher is better.

    Raises:
        ValueError: settings that do not fit together.
    """

    train: str = EMBEDDED
    """File to train on, or "embedded": a small task made of the text that comes with Python, train and dev in one."""
    dev: str | None = None
    """File to measure on while training: it decides which weights are kept."""
    test: str | None = None
    """File to rank at the end."""
    test_grades: bool = True
    """Whether the test file has grades: its metrics are told too."""
    format: Format = "auto"
    """"auto": by the suffix, .tsv, .csv, .jsonl or .parquet. A folder is one that the library datasets has saved."""
    header: bool = True
    """Whether the first line of TSV or CSV names the columns."""
    quotes: Quotes = "auto"
    """Whether values of TSV or CSV may stand in double quotes. "auto": in CSV, not in TSV."""
    query: Column = "query"
    """Column of the query."""
    passage: Column = "passage"
    """Column of one passage, where a row has one: rows with the same query belong together."""
    label: Column = "label"
    """Column of the grade of that passage."""
    passages: str = "passages"
    """Key of a list, where a row has all passages of a query: texts with a list of `grades` beside it, or objects with
    "text", "grade" and, if wanted, "id"."""
    grades: str = "grades"
    """Key of the list of their grades."""
    positive: str = "positive"
    """Key of the relevant passage, or a list of such, where a row has these and the others apart. Their grade is 1."""
    negatives: str = "negatives"
    """Key of the other ones, whose grade is 0."""
    id: Column | None = None
    """Column that names a query in the predictions. Default: queries are counted from 0."""
    loss: LossName = "pointwise"
    """"pointwise": cross-entropy of each passage by itself; "ranknet" and "margin": of each pair of a better and a
    worse passage; "softmax" and "listnet": of all passages of a query together."""
    margin: Annotated[float, Positive()] = 1.0
    """By which a better passage is to be ahead, of the loss "margin"."""
    gain: Gain = "linear"
    """What a passage counts in nDCG: its grade, as in trec_eval and BEIR, or ("exponential") 2^grade - 1."""
    max_passages: Annotated[int, AtLeast(0)] = 0
    """Passages of a query to train on, at most: the highest grades first, else as they come. 0: all."""
    max_length: Annotated[int, AtLeast(5)] = 256
    """Tokens of a query with a passage, at most, with the special ones."""
    too_long: TooLong = "truncate"
    """What becomes of a longer one: its end is left out and counted, or an error."""
    special_tokens: InTexts = "text"
    """What the name of a special token in a text is, such as [SEP]: text, or that token, as the transformers library
    has it. Predictions do the same."""
    bad: Literal["refuse", "skip"] = "refuse"
    """What becomes of a query of train whose passages all have the same grade, or none above 0, where the loss compares
    them: an error, or it is left out and counted."""

    def __post_init__(self) -> None:
        check_dev(self.train, self.dev)
        check_bounds(self, "data")
        if self.max_passages == 1 and self.loss != "pointwise":
            raise ValueError(f"data.max_passages must be at least 2, as the loss {self.loss} compares. Got 1.")

    def files(self) -> list[Path]:
        named = [Path(name) for name in (self.train, self.dev, self.test) if name is not None and name != EMBEDDED]
        return [file for path in named for file in files_of(path)]


# --- Queries of files -------------------------------------------------------------------------------------------------


@dataclass(kw_only=True, eq=False)
class Candidates:
    """A query with its passages."""

    query: str
    where: str
    """File and line, as messages name it."""
    id: str
    passages: list[str] = field(default_factory=list)
    ids: list[str] = field(default_factory=list)
    """Of the passages."""
    grades: list[float] = field(default_factory=list)
    """As many, or none where the file has none."""

    def add(self, text: Any, grade: Any, where: str, *, graded: bool, name: Any = None) -> None:
        """Raises ValueError, naming the place, for a text or a grade that is none."""
        if not isinstance(text, str):
            raise ValueError(f"{where}: a passage must be a text. Got {text!r:.60}.")
        own = str(len(self.ids)) if name is None else str(name)
        if any(mark in own for mark in "\t\r\n"):
            raise ValueError(f"{where}: the id {own!r:.60} has a tab or line end, and predictions are TSV.")
        self.passages.append(text)
        self.ids.append(own)
        if graded:
            self.grades.append(grade_of(grade, where))
            if self.grades[-1] < 0:
                raise ValueError(f"{where}: a grade must be 0 for what is not relevant, or more. Got {grade!r:.60}.")


def read_candidates(data: RankData, part: str) -> list[Candidates]:
    """The queries of "train", "dev" or "test", with their passages in the file's order.

    Raises:
        ValueError: of the file, naming it and the line: see `read_rows` and `read_records`; no query or no passage,
            grades that are no numbers, below 0, or not as many as passages, a passage with two grades.
    """
    if data.train == EMBEDDED and part != "test":
        return list(_embedded(part))
    path, graded = Path(getattr(data, part)), part != "test" or data.test_grades
    if kind_of(path, data.format) in ("tsv", "csv"):
        found = _of_table(path, data, graded=graded)
    else:
        found = _of_records(path, data, graded=graded)
    if not found:
        raise ValueError(f"{path} has no query. Give a file with at least one.")
    seen: dict[str, str] = {}
    for each in found:
        if not each.passages:
            raise ValueError(f"{each.where}: the query {each.query!r:.60} has no passage. Leave it out.")
        if seen.setdefault(each.id, each.where) != each.where:
            raise ValueError(f"{each.where}: the id {each.id!r} is that of {seen[each.id]} already. Give another one.")
        told: dict[str, float] = {}
        for text, grade in zip(each.passages, each.grades, strict=False):
            if told.setdefault(text, grade) != grade:
                raise ValueError(
                    f"{each.where}: the passage {text!r:.60} has the grades {told[text]:g} and {grade:g}. Leave one of "
                    "them out."
                )
    return found


def _of_table(path: Path, data: RankData, *, graded: bool) -> list[Candidates]:
    columns = [data.query, data.passage, *([data.label] if graded else []), *([] if data.id is None else [data.id])]
    rows = read_rows(path, columns, format=data.format, header=data.header, quotes=data.quotes)
    return _together(((row.where, row.values) for row in rows), data, graded=graded)


def _together(rows: Iterator[tuple[str, Any]], data: RankData, *, graded: bool) -> list[Candidates]:
    """Of rows with a passage each, those with the same query."""
    found: dict[str, Candidates] = {}
    for where, values in rows:
        query = _query(values[data.query], where)
        name = _name(values, data, where, len(found))
        own = found.setdefault(query, Candidates(query=query, where=where, id=name))
        if data.id is not None and values.get(data.id) is not None and name != own.id:
            raise ValueError(
                f"{where}: the query {query!r:.60} has the id {name!r}, and {own.id!r} in {own.where}. Rows with the "
                "same query belong together: give them the same id, or leave data.id out."
            )
        own.add(values[data.passage], values.get(data.label), where, graded=graded)
    return list(found.values())


def _of_records(path: Path, data: RankData, *, graded: bool) -> list[Candidates]:
    keys: list[Column] = [data.passages, data.grades, data.positive, data.negatives, data.passage, data.label]
    keys += [] if data.id is None else [data.id]
    records = [
        (each.where, each.values) for each in read_records(path, [data.query], optional=keys, format=data.format)
    ]
    if records and data.passage in records[0][1] and data.passages not in records[0][1]:
        for where, values in records:
            if data.passage not in values:
                raise ValueError(f"{where}: it has no key {data.passage!r}, which the first row has.")
        return _together(iter(records), data, graded=graded)
    return [_of_record(where, values, data, number, graded) for number, (where, values) in enumerate(records)]


def _of_record(where: str, values: Any, data: RankData, number: int, graded: bool) -> Candidates:
    found = Candidates(query=_query(values[data.query], where), where=where, id=_name(values, data, where, number))
    if values.get(data.passages) is not None:
        passages, grades = values[data.passages], values.get(data.grades)
        if not isinstance(passages, list):
            raise ValueError(f"{where}: {data.passages!r} must be a list. Got {passages!r:.60}.")
        if grades is not None and (not isinstance(grades, list) or len(grades) != len(passages)):
            told = len(grades) if isinstance(grades, list) else repr(grades)[:60]
            raise ValueError(f"{where}: {data.grades!r} must be as many as passages, {len(passages)}. Got {told}.")
        for place, each in enumerate(passages):
            if isinstance(each, dict):
                grade = each.get("grade") if grades is None else grades[place]
                found.add(each.get("text"), grade, where, graded=graded, name=each.get("id"))
            else:
                found.add(each, None if grades is None else grades[place], where, graded=graded)
        return found
    if values.get(data.positive) is None and values.get(data.negatives) is None:
        raise ValueError(
            f"{where}: a query needs {data.passages!r}, or {data.positive!r} and {data.negatives!r}, or one "
            f"{data.passage!r}. It has {', '.join(map(repr, values))}."
        )
    for key, grade in ((data.positive, 1.0), (data.negatives, 0.0)):
        own = values.get(key)
        for text in own if isinstance(own, list) else [] if own is None else [own]:
            found.add(text, grade, where, graded=graded)
    return found


def _query(text: Any, where: str) -> str:
    if not isinstance(text, str) or not text.strip():
        raise ValueError(f"{where}: a query must be a text with something in it. Got {text!r:.60}. Leave it out.")
    return text


def _name(values: Any, data: RankData, where: str, number: int) -> str:
    name = str(number) if data.id is None or values.get(data.id) is None else str(values[data.id])
    if any(mark in name for mark in "\t\r\n"):
        raise ValueError(f"{where}: the id {name!r:.60} has a tab or line end, and predictions are TSV.")
    return name


# --- As the model reads them ------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True, eq=False)
class RankPart:
    """The queries of one file, as the model reads them."""

    texts: Sequence[Sequence[EncodedText]]
    """Of each query: it with each of its passages."""
    grades: Sequence[Grades] | None
    """Of the same. None: the file has none."""
    queries: Sequence[str]
    """Their names."""
    passages: Sequence[Sequence[str]]
    """The names of those of each query."""
    truncated: int
    report: str


def read_part(data: RankData, part: str, tokenizer: Tokenizer) -> RankPart:
    """Raises ValueError as `read_candidates`; also, naming the place, a text without a token, and, of train, queries
    that the loss can learn nothing of."""
    found = read_candidates(data, part)
    told: list[str] = []
    if part == "train":
        found, told = _trained_on(found, data)
    elif without := sum(bool(each.grades) and max(each.grades) <= 0 for each in found):
        told.append(f"{without:,} without a relevant passage, which no metric counts")
    reader = TextEncoder(tokenizer, data.max_length, data.too_long)
    texts = [_encoded(each, reader) for each in found]
    if reader.named:
        told.append(f"{reader.named:,} texts have the names of special tokens in them (data.special_tokens)")
    told += filter(None, [reader.unknown.in_words()])
    count = sum(len(each.passages) for each in found)
    return RankPart(
        texts=texts,
        grades=[np.array(each.grades) for each in found] if found[0].grades else None,
        queries=[each.id for each in found],
        passages=[each.ids for each in found],
        truncated=reader.truncated,
        report="; ".join([f"{part}: {len(found):,} queries with {count:,} passages", *told]),
    )


def _trained_on(found: list[Candidates], data: RankData) -> tuple[list[Candidates], list[str]]:
    """Those that the loss learns of, and what is to be told of the others."""
    told: list[str] = []
    cut = 0
    if data.max_passages:
        for each in found:
            cut += max(0, len(each.passages) - data.max_passages)
            best = sorted(range(len(each.passages)), key=lambda place: -each.grades[place])[: data.max_passages]
            if len(best) == data.max_passages and len({each.grades[place] for place in best}) == 1:
                # There would be nothing to compare with: the best one of the lower grades takes the last place.
                lower = (place for place in range(len(each.grades)) if each.grades[place] < each.grades[best[0]])
                best[-1] = max(lower, key=lambda place: each.grades[place], default=best[-1])
            for name in ("passages", "ids", "grades"):
                setattr(each, name, [getattr(each, name)[place] for place in sorted(best)])
    without = [each for each in found if max(each.grades) <= 0]
    if data.loss == "pointwise":
        useful = found
    else:
        useful = [each for each in found if max(each.grades) > 0 and min(each.grades) < max(each.grades)]
        wrong = next((each for each in found if data.bad == "refuse" and each not in useful), None)
        if wrong is not None:
            lacks = "relevant one (all grades are 0)" if max(wrong.grades) <= 0 else "lower grade"
            raise ValueError(
                f"{wrong.where}: of the passages of {wrong.query!r:.60} none is a {lacks}, and the loss {data.loss} "
                'compares. Correct it, or let such queries be left out and counted: data.bad = "skip".'
            )
        if not useful:
            raise ValueError(f"{data.train} has no query with passages of different grades, for the loss {data.loss}.")
    if len(useful) < len(found):
        told.append(f"{len(found) - len(useful):,} left out, whose passages have all one grade (data.bad)")
    elif without:
        told.append(f"{len(without):,} without a relevant passage")
    if cut:
        told.append(f"{cut:,} passages left out (data.max_passages)")
    return useful, told


def _encoded(each: Candidates, reader: TextEncoder) -> list[EncodedText]:
    query, *passages = reader.encode([each.query, *each.passages])
    for text, ids in zip((each.query, *each.passages), (query, *passages), strict=True):
        if not ids:
            raise ValueError(f"{each.where}: a text has no token. Got {text!r:.60}. Leave it out, or write something.")
    try:
        return [reader.sequence(query, ids, number) for number, ids in enumerate(passages)]
    except ValueError as problem:
        raise ValueError(f"{each.where}: {problem}") from None


# --- A task that needs no file: which of these sentences began with that word? ----------------------------------------
#
# The sentences are those of the documentation that every Python carries, by the four commonest first words: such a word
# is a query, and the passages are what came after it and after each of the others.


def _embedded(part: str) -> Iterator[Candidates]:
    by_word: dict[str, list[str]] = {word: [] for word in FIRST_WORDS}
    rows = list(embedded_rows(part))
    for _, rest, first in rows:
        by_word[first].append(rest)
    for number, (where, rest, first) in enumerate(rows):
        found = Candidates(query=first, where=where, id=str(number))
        found.add(rest, 1, where, graded=True)
        for other, own in by_word.items():
            if other != first and own:  # of few sentences, none may begin so
                found.add(own[number % len(own)], 0, where, graded=True)
        yield found
