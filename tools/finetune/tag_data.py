"""The section `data` of tagging, and the sentences that it names: columns of CoNLL, JSON lines, CSV, Parquet."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby, pairwise
from pathlib import Path
from typing import Any, Literal

import numpy as np

from tools.common.files import is_unicode, parsed_json
from tools.corpus.quick.text_sources import read_lines
from tools.corpus.tokenizers.base import InTexts
from tools.finetune.data import embedded_sentences
from tools.finetune.rows import EMBEDDED, Column, check_dev, files_of, read_records, read_rows
from tools.predict.inputs import check_words
from tools.tagging.schemes import (
    OUTSIDE,
    Entity,
    Scheme,
    detect_scheme,
    entities,
    has_prefix,
    repaired,
    spelled_otherwise,
    tags_of,
)
from tools.tagging.windows import TagSettings, WordText

# --- The section `data` of tagging ------------------------------------------------------------------------------------

Format = Literal["auto", "conll", "jsonl", "csv", "parquet"]
_FORMATS: dict[str, Format] = {
    **dict.fromkeys((".conll", ".txt", ".tsv", ".bio", ".iob", ".iob2", ".iobes"), "conll"),
    **dict.fromkeys((".jsonl", ".json", ".ndjson"), "jsonl"),
    ".csv": "csv",
    ".parquet": "parquet",
}


@dataclass(frozen=True, kw_only=True)
class TagData:
    """Files of sentences with a tag for each word.

    Raises:
        ValueError: settings that do not fit together.
    """

    train: str = EMBEDDED
    """File to train on, or "embedded": a small task made of the text that comes with Python, train and dev in one."""
    dev: str | None = None
    """File to measure on while training: it decides which weights are kept."""
    test: str | None = None
    """File to tag at the end."""
    test_tags: bool = True
    """Whether the test file has tags: its metrics are told too."""
    format: Format = "auto"
    """"auto": by the suffix. "conll": .conll, .txt, .tsv, .bio, .iob, .iob2, .iobes; "jsonl"; "csv"; "parquet". A
    folder is one that the library datasets has saved."""
    sentence: Column = "sentence"
    """Of CSV: the column that is the same in all rows of a sentence, by name or number from 1. Where it is empty the
    sentence goes on."""
    word: Column = "word"
    """Of CSV: the column of the word. Of CoNLL a number; default there: the first. Of Parquet and datasets the column
    of the list of words; default there: tokens."""
    tag: Column = "tag"
    """Of CSV: the column of the tag. Of CoNLL a number; default there: the last. Of Parquet and datasets the column
    of the list of tags; default there: tags."""
    scheme: Literal["auto", "iob1", "iob2", "iobes", "plain"] = "auto"
    """How tags spell entities. "auto": as most sentences of the training file have it; spans become iob2."""
    repair: bool = False
    """Let tags that break the scheme be replaced by those of the same entities, and spans that cut a word be widened,
    both counted. Otherwise they are errors."""
    labels: tuple[str, ...] = ()
    """Tags in their order. Default: those of the training file, O first."""
    label_pieces: Literal["first", "all"] = "first"
    """Pieces of a word that learn its tag. A word is tagged by its first piece in any case."""
    max_length: int = 128
    """Tokens of a window, special ones included: a longer text is read in several."""
    stride: int = 64
    """Tokens between the beginnings of two windows of a text."""
    special_tokens: InTexts = "text"
    """What the name of a special token in a text is, such as [SEP]: text, or that token, as the transformers library
    has it. Predictions do the same."""

    def __post_init__(self) -> None:
        check_dev(self.train, self.dev)
        if len(set(self.labels)) < len(self.labels) or len(self.labels) == 1:
            raise ValueError(f"data.labels must be different, at least two. Got {list(self.labels)}.")
        try:
            self.settings("plain")
        except ValueError as problem:
            raise ValueError(f"data.{problem}") from None

    def settings(self, scheme: Scheme) -> TagSettings:
        return TagSettings(scheme=scheme, max_length=self.max_length, stride=self.stride)

    def files(self) -> list[Path]:
        named = [Path(name) for name in (self.train, self.dev, self.test) if name is not None and name != EMBEDDED]
        return [file for path in named for file in files_of(path)]


# --- Sentences of files, with the place of each word for messages -----------------------------------------------------


@dataclass(frozen=True, kw_only=True, eq=False)
class Sentence:
    """One sentence or text."""

    text: WordText
    tags: Sequence[str] | None
    """Of the words. None: the file has none."""
    places: Sequence[str]
    """File and line of each word, as messages name them."""
    of_spans: bool = False
    """The tags were made of spans, and are iob2."""


@dataclass(kw_only=True)
class Told:
    """What is counted while a file is read."""

    documents: int = 0
    """Lines -DOCSTART- that are passed over."""
    widened: int = 0
    """Spans that cut a word."""
    replaced: int = 0
    """Tags that broke the scheme."""
    sentences: int = 0
    """Those in which tags were replaced."""

    def in_words(self, name: str, count: int) -> str:
        numbers = (
            (self.documents, "lines -DOCSTART- are passed over"),
            (self.widened, "spans that cut a word are widened (data.repair)"),
            (self.replaced, f"tags in {self.sentences:,} sentences are replaced (data.repair)"),
        )
        return "; ".join([f"{name}: {count:,} sentences", *(f"{some:,} {what}" for some, what in numbers if some)])


def read_sentences(data: TagData, part: str, told: Told) -> list[Sentence]:
    """The sentences of "train", "dev" or "test", with the tags as they stand there.

    Raises:
        ValueError: of the file, naming it and the line: it does not exist, is not UTF-8, has no sentence, lines with
            more or fewer columns than the first, words or tags with nothing or a space in them, tags and words of
            different number, spans outside of the text or that overlap.
    """
    name, tagged = getattr(data, part), part != "test" or data.test_tags
    if data.train == EMBEDDED and part != "test":
        return list(_embedded(part))
    path = Path(name)
    kind = _FORMATS.get(path.suffix.lower()) if data.format == "auto" else data.format
    if path.is_dir() or kind == "parquet":
        found = list(_of_objects(_of_records(path, data), data, told, tagged=tagged))
    elif kind is None:
        raise ValueError(
            f'{path} does not say by its suffix what it is. Set data.format to "conll", "jsonl", "csv" or "parquet".'
        )
    elif kind == "jsonl":
        found = list(_of_objects(_of_lines(path), data, told, tagged=tagged))
    elif kind == "csv":
        found = list(_of_rows(path, data, tagged=tagged))
    else:
        found = list(_of_columns(path, data, told, tagged=tagged))
    if not found:
        raise ValueError(f"{path} has no sentence. Give a file with at least one.")
    return found


def _sentence(lines: Sequence[tuple[str, str, str | None]]) -> Sentence:
    """Of the place, the word and the tag of each line."""
    places, words, tags = zip(*lines, strict=True)
    for place, word, tag in lines:
        if problem := check_words([word]):
            raise ValueError(f"{place}: {problem}")
        if tags[0] is not None:
            _check_tag(tag, place)
    return Sentence(text=WordText.of_words(words), tags=None if tags[0] is None else tags, places=places)


def _check_tag(tag: Any, place: str) -> None:
    if not is_unicode(tag) or tag.split() != [tag]:
        raise ValueError(
            f"{place}: a tag must be a name without spaces. Got {tag!r}. {OUTSIDE!r} is that of no entity."
        )


def _of_columns(path: Path, data: TagData, told: Told, *, tagged: bool) -> Iterator[Sentence]:
    lines: list[tuple[str, str, str | None]] = []
    width = 0
    for number, line in enumerate(read_lines(path), start=1):
        # Not of any space: a word may have a no-break space in it.
        values = line.split("\t") if "\t" in line else line.split(" ")
        place, values = f"{path} line {number}", [value for value in values if value]
        is_document = values[:1] == ["-DOCSTART-"]
        if is_document or not line.strip():
            if lines:
                yield _sentence(lines)
            lines = []
            told.documents += is_document
            continue
        width = width or len(values)
        if len(values) != width or width < 1 + tagged:
            needed = "a word and a tag are needed" if len(values) == width else f"the first line has {width}"
            raise ValueError(f"{place}: it has {len(values)} columns, and {needed}. Got {line[:60]!r}.")
        word, tag = (
            values[_place(path, data, column, otherwise, width)] for column, otherwise in (("word", 0), ("tag", -1))
        )
        lines.append((place, word, tag if tagged else None))
    if lines:
        yield _sentence(lines)


def _place(path: Path, data: TagData, name: str, otherwise: int, width: int) -> int:
    column = getattr(data, name)
    if column == name:  # as where nobody says otherwise
        return otherwise
    if not isinstance(column, int):
        raise ValueError(f"{path} has columns without names: data.{name} must be a number, from 1. Got {column!r}.")
    if not 1 <= column <= width:
        raise ValueError(f"{path} has the columns 1 to {width}. Got {column}.")
    return column - 1


def _of_rows(path: Path, data: TagData, *, tagged: bool) -> Iterator[Sentence]:
    columns = [data.sentence, data.word, *([data.tag] if tagged else [])]
    name, seen = "", set[str]()

    def named(row: Any) -> str:
        nonlocal name
        own = (row.values[data.sentence] or "").strip() or name
        if not own:
            raise ValueError(f"{row.where}: the column {data.sentence!r} names no sentence. Give the first row a name.")
        if own != name and own in seen:
            raise ValueError(f"{row.where}: the sentence {own!r} is there already. Put its rows one below another.")
        seen.add(own)
        name = own
        return own

    for _, rows in groupby(read_rows(path, columns, format="csv"), named):
        yield _sentence([(row.where, row.values[data.word] or "", row.values.get(data.tag)) for row in rows])


def _of_lines(path: Path) -> Iterator[tuple[str, Any]]:
    for number, line in enumerate(read_lines(path), start=1):
        where = f"{path} line {number}"
        if not line.strip():
            continue
        try:
            yield where, parsed_json(line, unique=True)
        except ValueError as problem:
            raise ValueError(f"{where}: it is not valid JSON: {problem}. Write one object a line.") from None


def _of_records(path: Path, data: TagData) -> Iterator[tuple[str, Any]]:
    """Rows of Parquet and of datasets, by the names that JSON has. What is null there is missing here."""
    words = "tokens" if data.word == "word" else data.word
    tags = "tags" if data.tag == "tag" else data.tag
    names = {words: "tokens", tags: "tags", "text": "text", "spans": "spans"}
    for record in read_records(path, (), optional=list(names), format="parquet"):
        yield record.where, {names[key]: value for key, value in record.values.items() if value is not None}


def _of_objects(rows: Iterator[tuple[str, Any]], data: TagData, told: Told, *, tagged: bool) -> Iterator[Sentence]:
    for where, row in rows:
        keys = {"tokens", "text"} & row.keys() if isinstance(row, dict) else set()
        if len(keys) != 1:
            raise ValueError(f'{where}: an object with "tokens" and "tags", or "text" and "spans", is needed.')
        if keys == {"tokens"}:
            yield _of_tokens(row, where, tagged=tagged)
        else:
            yield _of_spans(row, where, data, told, tagged=tagged)


def _of_tokens(row: dict[str, Any], where: str, *, tagged: bool) -> Sentence:
    words, tags = row["tokens"], row.get("tags") if tagged else None
    if problem := check_words(words):
        raise ValueError(f"{where}: {problem}")
    if tagged and (not isinstance(tags, list) or len(tags) != len(words)):
        number = f"{len(tags)}" if isinstance(tags, list) else repr(tags)[:60]
        raise ValueError(f'{where}: "tags" must be as many as "tokens", which are {len(words)}. Got {number}.')
    places = [f"{where}, word {place + 1}" for place in range(len(words))]
    for place, tag in zip(places, tags or (), strict=False):
        _check_tag(tag, place)
    return Sentence(text=WordText.of_words(words), tags=tags, places=places)


def _of_spans(row: dict[str, Any], where: str, data: TagData, told: Told, *, tagged: bool) -> Sentence:
    if not is_unicode(row["text"]):
        raise ValueError(f'{where}: "text" must be a string of Unicode. Got {row["text"]!r:.60}.')
    text = WordText.of_text(row["text"])
    words = len(text.starts)
    if not words:
        raise ValueError(f"{where}: the text has no word. Got {row['text']!r:.60}. Leave the line out.")
    places = [f"{where}, word {place + 1}" for place in range(words)]
    if not tagged:
        return Sentence(text=text, tags=None, places=places)
    spans = row.get("spans")
    if not isinstance(spans, list):
        raise ValueError(f'{where}: "spans" must be a list of objects with "start", "end" and "label".')
    found = sorted((_entity(span, text, where, data, told) for span in spans), key=lambda entity: entity.first)
    for one, other in pairwise(found):
        if other.first < one.stop:
            raise ValueError(
                f"{where}: two spans have the word {text.words[other.first]!r}, {one.label} and {other.label}. A word "
                "has one tag: leave one of them out."
            )
    return Sentence(text=text, tags=tags_of(found, words, "iob2"), places=places, of_spans=True)


def _entity(span: Any, text: WordText, where: str, data: TagData, told: Told) -> Entity:
    try:
        start, end, label = span["start"], span["end"], span["label"]
    except (TypeError, KeyError):
        start = end = label = None
    if type(start) is not int or type(end) is not int or not 0 <= start < end <= len(text.text):
        raise ValueError(
            f'{where}: a span needs "start", "end" and "label", the first two characters of a text of '
            f"{len(text.text)}, the end behind the last one. Got {span!r:.80}."
        )
    _check_tag(label, where)
    if label == OUTSIDE:
        raise ValueError(f"{where}: a span needs a label, which is not {OUTSIDE!r}. Got {span!r:.80}.")
    first = int(np.searchsorted(text.ends, start, side="right"))
    stop = int(np.searchsorted(text.starts, end, side="left"))
    if first >= stop:
        raise ValueError(f"{where}: there is no word in the span {span!r:.80}. Leave it out.")
    if text.starts[first] < start or text.ends[stop - 1] > end:
        if not data.repair:
            whole = text.text[text.starts[first] : text.ends[stop - 1]]
            raise ValueError(
                f"{where}: the span {span!r:.80} cuts a word of {whole!r}. Correct it, or let such spans be widened "
                "and counted: data.repair = true."
            )
        told.widened += 1
    return Entity(label, first, stop)


# --- The scheme of the tags -------------------------------------------------------------------------------------------


def scheme_of(data: TagData, train: Sequence[Sentence]) -> Scheme:
    """That of the recipe, or that of the training file.

    Raises:
        ValueError: tags that look like a scheme in another spelling, where the recipe says none.
    """
    if data.scheme != "auto":
        return data.scheme
    tagged = [sentence for sentence in train if sentence.tags and not sentence.of_spans]
    if problem := spelled_otherwise(tag for sentence in tagged for tag in sentence.tags or ()):
        tag, right = problem
        place = next(
            place for each in tagged for own, place in zip(each.tags or (), each.places, strict=True) if own == tag
        )
        raise ValueError(
            f"{place}: {tag!r} looks like a tag of an entity in a spelling that is not read here. Write {right!r}, and "
            'the others so too; or set data.scheme to "plain" if tags are labels by themselves.'
        )
    return detect_scheme([sentence.tags for sentence in tagged if sentence.tags])


def checked(sentences: Sequence[Sentence], scheme: Scheme, data: TagData, told: Told) -> list[Sentence]:
    """The same, with tags that keep to the scheme.

    Raises:
        ValueError: a tag of no such scheme, or one that breaks it and is not to be replaced; naming file and line.
    """
    return [
        sentence if sentence.tags is None else _checked(sentence, sentence.tags, scheme, data, told)
        for sentence in sentences
    ]


def _checked(sentence: Sentence, tags: Sequence[str], scheme: Scheme, data: TagData, told: Told) -> Sentence:
    if sentence.of_spans:
        found = entities(tags, "iob2")
        spelled = tags_of(found, len(tags), scheme)
        if entities(spelled, scheme) != found:
            raise ValueError(
                f"{sentence.places[0]}: spans of one label touch each other, which {scheme} tags cannot tell apart. "
                "Set data.scheme to iob2."
            )
        return dataclasses.replace(sentence, tags=spelled)
    needed = {"plain": "", "iobes": "B-, I-, E- or S-"}.get(scheme, "B- or I-")
    for tag, place in zip(tags, sentence.places, strict=True):
        if needed and tag != OUTSIDE and not (has_prefix(tag) and tag[:2] in needed):
            raise ValueError(
                f"{place}: {tag!r} is no tag of the scheme {scheme}, which begin with {needed}, or are {OUTSIDE}. "
                'Correct it, or set data.scheme; "plain" takes tags as they are.'
            )
    right = repaired(tags, scheme)
    wrong = [number for number, (tag, own) in enumerate(zip(tags, right, strict=True)) if tag != own]
    if wrong and not data.repair:
        first = wrong[0]
        before = f"behind {tags[first - 1]!r}" if first else "at the beginning"
        raise ValueError(
            f"{sentence.places[first]}: {tags[first]!r} {before} breaks the scheme {scheme}, which has "
            f"{right[first]!r} there. Correct it, set data.scheme, or let such tags be replaced and counted: "
            "data.repair = true."
        )
    told.replaced += len(wrong)
    told.sentences += bool(wrong)
    return dataclasses.replace(sentence, tags=right)


# --- A task that needs no file: which words of this sentence were names? ----------------------------------------------
#
# The sentences are those of the documentation that every Python carries, in small letters: what had a capital letter,
# but for the first word, is to be found.


def _embedded(part: str) -> Iterator[Sentence]:
    for number, sentence in enumerate(embedded_sentences(part)):
        text = WordText.of_text(sentence.lower())
        labels = [_kind(sentence, start) for start in text.starts.tolist()]
        tags = [OUTSIDE if label is None else f"I-{label}" for label in labels]
        places = [f"embedded {part}, sentence {number}"] * len(tags)
        if any(labels):
            yield Sentence(text=text, tags=repaired(tags, "iob2"), places=places)


def _kind(sentence: str, start: int) -> str | None:
    """What the part between two spaces is in which a word begins."""
    first = sentence.rfind(" ", 0, start) + 1
    whole = sentence[first:].split(maxsplit=1)[0].strip(",.'-")
    if not first or not whole[:1].isupper() or len(whole) < 2 or not sentence[start].isalpha():
        return None
    if whole in ("None", "True", "False"):
        return "VALUE"
    if whole.endswith(("Error", "Exception", "Warning")):
        return "ERROR"
    return "ACRONYM" if whole.isupper() else "NAME"
