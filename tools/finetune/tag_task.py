"""Tagging as a task: which tag has each word of a text? (Devlin et al. 2018, §5.3)"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from torch import Tensor

from models.bert import BertConfig
from models.bert.tasks import BertForTokenClassification
from models.bert.text_batches import TextBatch
from tensor3d import Cube
from tensor3d.data.packed_batch import IGNORED
from tensor3d.distributed.object_collectives import run_on_rank0
from tools.common.files import write_file
from tools.corpus.tokenizers import Tokenizer
from tools.finetune.config import FinetuneConfig
from tools.finetune.data import EMBEDDED
from tools.finetune.tag_data import Sentence, TagData, Told, checked, read_sentences, scheme_of
from tools.finetune.tasks import TEST, Evaluation, Example, TaskFacts, in_order, remedy
from tools.tagging.schemes import OUTSIDE, TAG_METRICS, Counts, Scheme, tag_metrics
from tools.tagging.windows import (
    Pieces,
    WordTags,
    WordText,
    cut,
    tag_texts,
    targets_of,
    unknown_in,
    window_targets,
    window_text,
    windows_of,
)

# --- What is read -----------------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True, eq=False)
class Part:
    """The sentences of one file, as the model reads them."""

    texts: Sequence[WordText]
    pieces: Sequence[Pieces]
    tags: Sequence[Sequence[str]] | None
    """Of the words of each. None: the file has none."""


@dataclass(frozen=True, kw_only=True, eq=False)
class Parts:
    """All that is read, and what is said of it."""

    parts: dict[str, Part]
    """"train", "dev" and, where there is one, "test"."""
    scheme: Scheme
    labels: tuple[str, ...]
    report: tuple[str, ...]


def read_parts(data: TagData, tokenizer: Tokenizer) -> Parts:
    """Reads, checks and cuts the files.

    Raises:
        ValueError: of a file, naming it and the line: see `read_sentences` and `checked`; fewer than two tags, a tag of
            dev or test that training does not have, a sentence without a piece.
    """
    names = ["train", "dev", *(["test"] if data.test is not None else [])]
    told = {name: Told() for name in names}
    found = {name: read_sentences(data, name, told[name]) for name in names}
    scheme = scheme_of(data, found["train"])
    found = {name: checked(sentences, scheme, data, told[name]) for name, sentences in found.items()}
    # Pythons differ: what the embedded task has in dev alone is a tag too.
    learnt = ("train", "dev") if data.train == EMBEDDED else ("train",)
    labels = data.labels or _labels([sentence for name in learnt for sentence in found[name]], data)
    for sentences in found.values():
        _check_labels(sentences, labels)
    report = [f"tags of the scheme {scheme}: {', '.join(labels)}"]
    parts = {}
    for name, sentences in found.items():
        parts[name], more = _part(sentences, tokenizer)
        report.append("; ".join([told[name].in_words(name, len(sentences)), *more]))
    return Parts(parts=parts, scheme=scheme, labels=labels, report=tuple(report))


def _labels(train: Sequence[Sentence], data: TagData) -> tuple[str, ...]:
    seen = {tag for sentence in train for tag in sentence.tags or ()}
    if len(seen) < 2:
        raise ValueError(f"{data.train} has {len(seen)} different tags, and two are needed. Got {sorted(seen)}.")
    return (*([OUTSIDE] if OUTSIDE in seen else []), *in_order(seen - {OUTSIDE}))


def _check_labels(sentences: Sequence[Sentence], labels: Sequence[str]) -> None:
    known = set(labels)
    for sentence in sentences:
        for tag, place in zip(sentence.tags or (), sentence.places, strict=False):
            if tag not in known:
                raise ValueError(
                    f"{place}: the tag {tag!r} is none of those that are learnt: {', '.join(labels[:20])}. Correct it, "
                    "or name all tags in data.labels."
                )


def _part(sentences: Sequence[Sentence], tokenizer: Tokenizer) -> tuple[Part, list[str]]:
    """A file as the model reads it, and what is to be told of it."""
    texts = [sentence.text for sentence in sentences]
    pieces = cut(texts, tokenizer)
    for sentence, own in zip(sentences, pieces, strict=True):
        if (own.first < 0).all():
            raise ValueError(
                f"{sentence.places[0]}: no word has a token. Got {sentence.text.text!r:.60}. Leave it out."
            )
    without = sum(int((own.first < 0).sum()) for own in pieces)
    shared = sum(int((np.diff(own.first[own.first >= 0]) == 0).sum()) for own in pieces)
    named = tokenizer.count_named(text.text for text in texts)
    numbers = (
        (without, f"words have no token: no tag is learnt of them, and they are {OUTSIDE} where no entity goes on"),
        (shared, "words begin in a token of the word before, which learns that one's tag, and go on what it begins"),
        (named, "texts have the names of special tokens in them (data.special_tokens)"),
    )
    tags = None if sentences[0].tags is None else [sentence.tags or () for sentence in sentences]
    told = [f"{count:,} {what}" for count, what in numbers if count]
    if unknown := unknown_in(texts, pieces, tokenizer).in_words():
        told.append(unknown)
    return Part(texts=texts, pieces=pieces, tags=tags), told


# --- The task ---------------------------------------------------------------------------------------------------------


class TagTask:
    """Windows of texts, with the tags of their words.

    Every rank makes one at the same point; the files are read and cut on the first one alone.

    Raises:
        ValueError: of a file, naming it and the line; an unknown metric; a tokenizer without [CLS].
    """

    name, unit = "tag", "windows"
    truncated = 0  # texts are read whole, in windows

    def __init__(self, data: TagData, recipe: FinetuneConfig, tokenizer: Tokenizer, cube: Cube) -> None:
        if data.special_tokens == "tokens":
            tokenizer.read_names()
        _ = tokenizer.special  # windows begin with [CLS]
        read = run_on_rank0(cube, lambda: read_parts(data, tokenizer), any_time=True)
        self.notes, self.labels, self._scheme = read.report, read.labels, read.scheme
        self.best = recipe.run.metric or ("accuracy" if read.scheme == "plain" else "f1")
        if self.best not in TAG_METRICS:
            raise ValueError(f"run.metric of {self.name} is one of {', '.join(TAG_METRICS)}. Got {self.best!r}.")
        self._data, self._options, self._cube, self._tokenizer = data, recipe.model, cube, tokenizer
        self._recipe = recipe
        self._settings = data.settings(read.scheme)
        self._slots = recipe.run.tokens_per_rank * cube.shape.ranks
        self._parts = {name: part for name, part in read.parts.items() if name != "train"}
        self.train = self._examples(read.parts["train"])

    def _examples(self, part: Part) -> list[Example]:
        """The windows with something to learn: each word in one of them."""
        number = {label: place for place, label in enumerate(self.labels)}
        assert part.tags is not None, "training has tags"
        targets = [
            targets_of(own, np.array([number[tag] for tag in tags]), every=self._data.label_pieces == "all")
            for own, tags in zip(part.pieces, part.tags, strict=True)
        ]
        examples = []
        for window in windows_of(part.pieces, self._settings):
            own = window_targets(window, targets[window.text])
            if count := int((own != IGNORED).sum()):
                text = window_text(window, part.pieces, self._tokenizer)
                examples.append(Example(text=text, target=own, targets=count))
        return examples

    def make_model(self, config: BertConfig, cube: Cube) -> BertForTokenClassification:
        options = self._options
        return BertForTokenClassification(
            config,
            len(self.labels),
            cube,
            recompute=options.recompute,
            reshard_after_forward=options.reshard_after_forward,
        )

    def loss(
        self, model: BertForTokenClassification, laid: TextBatch, examples: Sequence[Example], targets: int
    ) -> Tensor:
        labels = laid.spread_tokens([example.target for example in examples], IGNORED)
        loss: Tensor = model(laid.batch, labels, targets)
        return loss

    @property
    def parts(self) -> Sequence[str]:
        return tuple(self._parts)

    def outputs(self, model: BertForTokenClassification, part: str) -> list[WordTags]:
        pieces = self._parts[part].pieces
        return tag_texts(model, pieces, self._tokenizer, self._settings, batch_tokens=self._slots)

    def evaluate(self, model: BertForTokenClassification) -> Evaluation:
        metrics: dict[str, float] = {}
        outputs: dict[str, list[WordTags]] = {}
        for name, part in self._parts.items():
            if part.tags is not None:
                outputs[name] = self.outputs(model, name)
                found, _ = tag_metrics(self._names(outputs[name]), part.tags, self._scheme)
                metrics |= {(TEST if name == "test" else "") + key: value for key, value in found.items()}
        return Evaluation(metrics=metrics, outputs=outputs)

    def doubts(self, best: Evaluation) -> Sequence[str]:
        said = {tag for tags in self._names(best.outputs["dev"]) for tag in tags}
        there = {tag for tags in self._parts["dev"].tags or () for tag in tags}
        if len(said) > 1 or len(there) < 2:
            return ()
        return (f"all words of dev are tagged {said.pop()!r}. {remedy(self._recipe)}",)

    def write_predictions(self, best: Evaluation, folder: Path) -> list[Path]:
        """Of dev and test NAME.conll: word, the file's tag where it has one, the model's tag, with tabs between. Where
        there are tags NAME-labels.tsv too: precision, recall, F1 and number of the entities of each label."""
        return run_on_rank0(self._cube, lambda: self._written(best, folder))

    def facts(self) -> TaskFacts:
        return TaskFacts(problem="tag", labels=self.labels, more={**self._settings.as_facts(), **self._names_read()})

    def _names_read(self) -> dict[str, str]:
        return {} if self._data.special_tokens == "text" else {"special_tokens": self._data.special_tokens}

    def _names(self, outputs: Sequence[WordTags]) -> list[list[str]]:
        return [each.names(self.labels, self._scheme) for each in outputs]

    def _written(self, best: Evaluation, folder: Path) -> list[Path]:
        files = []
        for name, part in self._parts.items():
            said = self._names(best.outputs[name])
            columns = [[text.words for text in part.texts], *([] if part.tags is None else [part.tags]), said]
            sentences = (zip(*rows, strict=True) for rows in zip(*columns, strict=True))
            lines = ["\n".join(map("\t".join, rows)) + "\n" for rows in sentences]
            files.append(folder / f"{name}.conll")
            write_file(files[-1], "\n".join(lines))
            if part.tags is not None:
                files.append(folder / f"{name}-labels.tsv")
                write_file(files[-1], _table(tag_metrics(said, part.tags, self._scheme)[1]))
        return files


def _table(counts: dict[str, Counts]) -> str:
    rows = [["label", "precision", "recall", "f1", "entities"]]
    rows += [[label, *(f"{score:.4f}" for score in each.scores()), str(each.there)] for label, each in counts.items()]
    return "".join("\t".join(row) + "\n" for row in rows)
