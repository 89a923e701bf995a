"""What can be done with SQuAD's files without a model."""

from __future__ import annotations

import json
import logging
import re
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import tyro
from numpy.typing import NDArray

from tools.common.cli import run_command
from tools.common.files import check_output
from tools.corpus.tokenizers import Tokenizer, load_tokenizer
from tools.corpus.tokenizers.folder import open_tokenizer
from tools.corpus.tokenizers.wordpiece import guess_accents
from tools.packing.histogram import read_histogram
from tools.squad.dataset import (
    Bad,
    Question,
    read_odds,
    read_predictions,
    read_questions,
    read_references,
    warn_of_unasked,
    write_json,
)
from tools.squad.scoring import best_thresholds, score, without_answer
from tools.squad.windows import AnswerSettings, make_windows, unknown_in

_log = logging.getLogger("tools.squad")

# --- What guessing gives: a baseline for scores -----------------------------------------------------------------------

_WORD = re.compile(r"\S+")


def random_spans(questions: Sequence[Question], *, longest: int = 30, seed: int = 0) -> dict[str, str]:
    """An answer to each question, by its id, that does not look at the question: words of the context, the first one
    drawn uniformly from all of them, and then their number, from 1 to `longest` or as many as there are.

    Raises:
        ValueError: a context without a word.
    """
    random = np.random.default_rng(seed)
    spans = {}
    for question in questions:
        words = [found.span() for found in _WORD.finditer(question.context)]
        if not words:
            raise ValueError(f"the context of question {question.id!r} has no word to guess. Leave it out.")
        first = int(random.integers(len(words)))
        last = first + int(random.integers(min(longest, len(words) - first)))
        spans[question.id] = question.context[words[first][0] : words[last][1]]
    return spans


# --- What can be done with SQuAD's files without a model --------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class WindowsCommand:
    """Cut the contexts into windows and count them."""

    file: tyro.conf.Positional[Path]
    """JSON of SQuAD v1.1 or v2.0."""
    vocab: Path
    """A vocab.txt (WordPiece), a tokenizer.json, or a folder of `tools.corpus tokenizer`."""
    cased: bool = False
    """A vocab.txt is a cased one."""
    strip_accents: bool | None = None
    """Text loses its accents before it is looked up in a vocab.txt. Default: not with --cased, nor where the vocabulary
    has pieces with accents, which is said."""
    max_length: int = 384
    """Tokens of a window, special ones included."""
    stride: int = 128
    """Tokens between the beginnings of two windows of a context."""
    question_length: int = 64
    """Tokens of a question, at most."""
    bad: Bad = "refuse"
    """What becomes of a question whose answer does not occur in its context."""
    histogram: Path | None = None
    """Write the lengths here, as tools.packing reads them: {"counts": [windows of 0 tokens, of 1, ...]}."""
    compare: Path | None = None
    """A file like that; the exit status is 1 where its counts differ."""

    def run(self) -> int:
        settings = AnswerSettings(max_length=self.max_length, stride=self.stride, question_length=self.question_length)
        check_output(self.histogram, "--histogram", others=[self.file, self.vocab, self.compare])
        tokenizer = _tokenizer(self.vocab, cased=self.cased, strip_accents=self.strip_accents)
        found = read_questions(self.file, bad=self.bad, answers=False)
        texts = [(question.text, question.context) for question in found.questions]
        windows = make_windows(
            texts,
            tokenizer,
            settings,
            names=[question.id for question in found.questions],
            progress=True,
        )
        counts = np.bincount(windows.lengths, minlength=self.max_length + 1)
        several = int((np.diff(windows.of_questions) > 1).sum())
        print(f"{len(found.questions):,} questions about {len(windows.passages):,} contexts")
        if found.moved or found.skipped:
            print(f"{found.moved:,} answers moved to where their text is; {found.skipped:,} questions left out")
        print(
            f"{len(windows):,} windows of at most {self.max_length} tokens, {int(windows.lengths.sum()):,} tokens; "
            f"{several:,} questions have more than one"
        )
        if unknown := unknown_in(texts, windows, tokenizer).in_words():
            print(unknown)
        if self.histogram is not None:
            note = f"windows of {self.file.name}: max_length {self.max_length}, stride {self.stride}"
            write_json(self.histogram, {"name": self.file.stem, "note": note, "counts": counts.tolist()})
        return 0 if self.compare is None else _compare(counts, self.compare)


@dataclass(frozen=True, kw_only=True)
class ScoreCommand:
    """Score predictions as SQuAD's own scripts do, and print their JSON.

    As for these scripts, answers need not stand in their contexts.
    """

    file: tyro.conf.Positional[Path]
    """JSON of SQuAD v1.1 or v2.0."""
    predictions: tyro.conf.Positional[Path]
    """JSON: ids of questions with their answers; empty text: no answer."""
    null_odds: Path | None = None
    """JSON: ids of questions with the odds that they have no answer. Of v2.0 alone."""
    threshold: float = 1.0
    """With null_odds: questions with odds above it are taken to have no answer. (1 as in evaluate-v2.0.py.)"""

    def run(self) -> int:
        found = read_references(self.file)
        if self.null_odds is not None and not found.impossible:
            raise ValueError(f"--null-odds is about SQuAD v2.0, and {self.file} is v1.1. Leave it out.")
        predictions = read_predictions(self.predictions)
        scores = score(found.questions, predictions, impossible=found.impossible)
        if scores.missing:
            missing = next(question.id for question in found.questions if question.id not in predictions)
            _log.warning("warning: %d questions have no prediction and score 0, such as %r", scores.missing, missing)
        warn_of_unasked(self.predictions, predictions, found.questions)
        summary = scores.summary(impossible=found.impossible)
        if self.null_odds is not None:
            odds = read_odds(self.null_odds, found.questions)
            summary = without_answer(scores, odds, self.threshold).summary(impossible=True)
            summary |= best_thresholds(scores, odds)
        print(json.dumps(summary, indent=1))
        return 0


@dataclass(frozen=True, kw_only=True)
class RandomCommand:
    """Answer with random spans of the contexts, and score them."""

    file: tyro.conf.Positional[Path]
    """JSON of SQuAD v1.1 or v2.0."""
    answer_length: int = 30
    """Words of an answer, at most."""
    seed: int = 0
    """Of the draws."""
    output: Path | None = None
    """Write the answers here, as `score` reads them."""

    def run(self) -> int:
        if self.answer_length < 1 or self.seed < 0:
            raise ValueError(
                f"--answer-length must be at least 1 and --seed at least 0. Got {self.answer_length} and {self.seed}."
            )
        check_output(self.output, others=[self.file])
        found = read_references(self.file)
        spans = random_spans(found.questions, longest=self.answer_length, seed=self.seed)
        if self.output is not None:
            write_json(self.output, spans)
        scores = score(found.questions, spans, impossible=found.impossible)
        print(json.dumps(scores.summary(impossible=found.impossible), indent=1))
        return 0


def _tokenizer(path: Path, *, cased: bool, strip_accents: bool | None) -> Tokenizer:
    if path.is_dir():
        return load_tokenizer(path)
    if path.suffix == ".json":
        return open_tokenizer("json", path)
    if not cased and strip_accents is None:
        strip_accents, told = guess_accents(path)
        _log.info("%s; --strip-accents True or False says otherwise", told)
    return open_tokenizer("wordpiece", path, lowercase=not cased, strip_accents=strip_accents)


def _compare(counts: NDArray[np.int64], path: Path) -> int:
    told = read_histogram(path)
    size = max(len(counts), len(told))
    ours, theirs = (np.pad(side, (0, size - len(side))) for side in (counts, told))
    different = np.flatnonzero(ours != theirs)
    if not len(different):
        print(f"the same lengths as in {path}: {int(ours.sum()):,} windows, bin by bin")
        return 0
    first = int(different[0])
    print(
        f"other lengths than in {path}: {len(different)} bins differ, the first one at {first} tokens, with "
        f"{int(ours[first]):,} windows here and {int(theirs[first]):,} there"
    )
    return 1


# --- `python -m tools.squad windows|score|random FILE ...`: SQuAD's files without a model -----------------------------


def main(arguments: Sequence[str] | None = None) -> int:
    """Exit status: 0; 1 where two histograms differ; 2 for bad input, with one message on standard error."""
    return run_command(
        "tools.squad",
        {"windows": WindowsCommand, "score": ScoreCommand, "random": RandomCommand},
        arguments,
        "Files of SQuAD v1.1 and v2.0: windows of contexts, scores of answers, and what guessing gives.",
    )


if __name__ == "__main__":
    sys.exit(main())
