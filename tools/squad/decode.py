"""From the logits of windows to answers (Devlin et al. 2018, §4.2 and §4.3, and the code they published).

T tokens of a question's windows that belong to the context; L tokens of an answer, at most
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.lib.stride_tricks import sliding_window_view
from numpy.typing import NDArray

from models.bert import BertConfig
from models.bert.tasks import BertForQuestionAnswering, span_logits
from tensor3d.distributed.object_collectives import run_on_rank0
from tools.common.log import progress as progress_of
from tools.common.workers import split
from tools.corpus.tokenizers import Tokenizer
from tools.corpus.tokenizers.base import is_mark
from tools.squad.windows import AnswerSettings, Passage, Windows, make_windows, most_context


@dataclass(frozen=True, kw_only=True)
class Candidate:
    """A span of the context as an answer, or "no answer"."""

    text: str
    """Empty: no answer."""
    start: int
    """Characters of the context; 0 and 0 for no answer."""
    end: int
    start_logit: float
    end_logit: float

    @property
    def score(self) -> float:
        return self.start_logit + self.end_logit


@dataclass(frozen=True, kw_only=True)
class Choice:
    """What the model says of one question."""

    spans: tuple[Candidate, ...]
    """Spans of the context, the best first, with different texts; at least one."""
    null: Candidate
    """No answer: of the window that is least sure of it, as the others may just not hold the answer."""

    @property
    def null_odds(self) -> float:
        """By how much the score of "no answer" exceeds that of the best span."""
        return self.null.score - self.spans[0].score

    def ranked(self, settings: AnswerSettings) -> list[tuple[Candidate, float]]:
        """Candidates with their probabilities, which add up to 1: spans by their scores; where there may be no answer,
        this too, first if its odds exceed the threshold, else behind the spans that score more, but never first."""
        candidates = list(self.spans)
        if settings.no_answer:
            place = sum(span.score >= self.null.score for span in candidates)
            candidates.insert(0 if self.null_odds > settings.null_threshold else max(1, place), self.null)
        scores = np.array([candidate.score for candidate in candidates])
        weights = np.exp(scores - scores.max())
        return list(zip(candidates, (weights / weights.sum()).tolist(), strict=True))

    def text(self, settings: AnswerSettings) -> str:
        """The answer; empty where there is none."""
        return self.ranked(settings)[0][0].text


def choose(
    windows: Windows,
    logits: Sequence[NDArray[np.floating]],
    contexts: Sequence[str],
    settings: AnswerSettings,
    *,
    n_best: int,
) -> list[Choice]:
    """The likeliest spans of each question.

    A span begins and ends in tokens of the context, in one window, with at most `settings.answer_length` tokens. A
    token that several windows hold may begin an answer only in the one where it has most context around it: the
    smaller number of tokens to its left or right is the largest there.

    Args:
        logits: of each window (tokens, 2), finite: how likely each token begins and ends the answer.
        contexts: of each question.
        n_best: spans of a question, at most.
    """
    bounds = windows.of_questions.tolist()
    heads = windows.head_sizes.tolist()
    choices = []
    for number, context in enumerate(contexts):
        own = range(bounds[number], bounds[number + 1])
        scores = [np.asarray(logits[window], dtype=np.float64) for window in own]
        firsts, tokens = windows.first[own.start : own.stop], windows.tokens[own.start : own.stop]
        spans = [part[heads[own.start] : -1] for part in scores]  # (tokens of the window, 2)
        tables = [
            _table(part, beginning, settings.answer_length)
            for part, beginning in zip(spans, most_context(firsts, tokens), strict=True)
        ]
        table = np.concatenate(tables)  # (T, L)
        rows = np.concatenate([first + np.arange(count) for first, count in zip(firsts, tokens, strict=True)])
        passage = windows.passages[windows.passage[number]]
        parts = np.concatenate(spans)
        choices.append(
            Choice(
                spans=tuple(_best(table, rows, parts, passage, context, n_best)),
                null=min((_null(part) for part in scores), key=lambda candidate: candidate.score),
            )
        )
    return choices


def _table(scores: NDArray[np.float64], beginning: NDArray[np.bool_], longest: int) -> NDArray[np.float64]:
    """(tokens, L): score of the span from each token over so many more; -inf where there is none."""
    ends = np.concatenate((scores[:, 1], np.full(longest - 1, -np.inf)))
    starts = np.where(beginning, scores[:, 0], -np.inf)
    table: NDArray[np.float64] = starts[:, None] + sliding_window_view(ends, longest)
    return table


def _best(
    table: NDArray[np.float64],
    rows: NDArray[np.int64],
    parts: NDArray[np.float64],
    passage: Passage,
    context: str,
    n_best: int,
) -> list[Candidate]:
    """Candidates with different texts, the best first.

    Args:
        rows: (T,) token of the passage that each row of the table is.
        parts: (T, 2) logits of the same tokens.
    """
    flat = table.ravel()
    found: dict[str, Candidate] = {}
    asked = 2 * n_best
    while True:
        asked = min(asked, len(flat))
        top = np.argpartition(flat, len(flat) - asked)[len(flat) - asked :]
        # Of equal scores the earliest and shortest span.
        top = top[np.lexsort((top, -flat[top]))]
        for place in top[np.isfinite(flat[top])].tolist():
            row, more = divmod(place, table.shape[1])
            start, end = int(passage.starts[rows[row]]), _end(passage, context, int(rows[row + more]))
            text = context[start:end]
            # Tokens of some vocabularies hold the space before a word.
            start += len(text) - len(text.lstrip())
            text = text.strip()
            if text and text not in found:
                found[text] = Candidate(
                    text=text,
                    start=start,
                    end=start + len(text),
                    start_logit=float(parts[row, 0]),
                    end_logit=float(parts[row + more, 1]),
                )
            if len(found) == n_best:
                return list(found.values())
        if asked == len(flat):
            return list(found.values())
        asked *= 4


def _end(passage: Passage, context: str, token: int) -> int:
    """Where an answer ends that ends in this token: behind the marks, too, that a tokenizer without accents drops,
    as a vowel sign of Thai or Hindi is."""
    end = int(passage.ends[token])
    next_start = int(passage.starts[token + 1]) if token + 1 < len(passage.starts) else len(context)
    while end < next_start and is_mark(context[end]):
        end += 1
    return end


def _null(scores: NDArray[np.float64]) -> Candidate:
    return Candidate(text="", start=0, end=0, start_logit=float(scores[0, 0]), end_logit=float(scores[0, 1]))


# --- A model answers questions about texts ----------------------------------------------------------------------------

BATCH_TOKENS = 16384
"""Tokens of the windows that are computed at once, on all ranks together."""


@dataclass(frozen=True, kw_only=True)
class Answer:
    """A part of a context that may answer the question."""

    text: str
    """context[start:end]; empty: there is no answer."""
    start: int
    """Characters of the context; 0 and 0 for no answer."""
    end: int
    probability: float
    """Among the answers that were kept."""


def answer_questions(
    model: BertForQuestionAnswering,
    tokenizer: Tokenizer,
    questions: Sequence[tuple[str, str]],
    *,
    settings: AnswerSettings,
    n_best: int = 5,
    batch_tokens: int = BATCH_TOKENS,
) -> list[list[Answer]]:
    """Answers to questions, each of them given with its context: the best ones first, at least one.

    Every rank of the cube passes the same questions, and all get the same answers. With `settings.no_answer` the empty
    answer is among them: first where it wins, and besides the n best otherwise.

    Args:
        n_best: spans of a question, at most.
        batch_tokens: tokens that are computed at once, on all ranks together.

    Raises:
        ValueError: a question or context without a token (the message gives its number, from 0), or a model with no
            positions for `settings.max_length` tokens.
        FloatingPointError: the model's logits are not finite.
    """
    if not questions:
        return []
    check_positions(model.config, settings)
    windows = run_on_rank0(model.cube, lambda: make_windows(questions, tokenizer, settings))
    contexts = [context for _, context in questions]
    logits = all_logits(model, windows, batch_tokens=batch_tokens)

    def chosen() -> list[list[Answer]]:
        choices = choose(windows, logits, contexts, settings, n_best=n_best)
        return [_answers(choice, settings) for choice in choices]

    return run_on_rank0(model.cube, chosen)


def all_logits(
    model: BertForQuestionAnswering, windows: Windows, *, batch_tokens: int = BATCH_TOKENS, progress: bool = False
) -> list[NDArray[np.float32]]:
    """Of each window (tokens, 2): how likely each token begins and ends the answer. The same on every rank.

    Raises:
        FloatingPointError: one is not finite.
    """
    logits: list[NDArray[np.float32]] = []
    with progress_of(total=len(windows), desc="answer", unit=" windows", shown=progress) as bar:
        for part in split(windows.lengths.tolist(), batch_tokens):
            texts = [windows.text(window) for window in range(part.start, part.stop)]
            found = [scores.float().numpy() for scores in span_logits(model, texts)]
            if not all(np.isfinite(scores).all() for scores in found):
                raise FloatingPointError("the model's scores of answers are not finite: its weights are spoilt.")
            logits += found
            bar.update(len(found))
    return logits


def check_positions(config: BertConfig, settings: AnswerSettings) -> None:
    """Raises ValueError where windows are longer than the model's sequences."""
    if not config.has_rotary and config.positions < settings.max_length:
        raise ValueError(
            f"windows of max_length={settings.max_length} tokens need a model with as many positions, and this one has "
            f"{config.positions}. Lower max_length."
        )


def _answers(choice: Choice, settings: AnswerSettings) -> list[Answer]:
    return [
        Answer(text=candidate.text, start=candidate.start, end=candidate.end, probability=probability)
        for candidate, probability in choice.ranked(settings)
    ]
