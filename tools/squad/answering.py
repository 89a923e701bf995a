"""A model answers questions about texts."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from tqdm import tqdm

from models.bert import BertConfig
from models.bert.outputs import span_logits
from models.bert.tasks import BertForQuestionAnswering
from tensor3d.agree import on_first_rank
from tools.batches import split
from tools.corpus.tokenizers import Tokenizer
from tools.squad.choosing import Choice, choose
from tools.squad.settings import AnswerSettings
from tools.squad.windows import Windows, make_windows

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
    windows = on_first_rank(model.cube, lambda: make_windows(questions, tokenizer, settings))
    contexts = [context for _, context in questions]
    logits = all_logits(model, windows, batch_tokens=batch_tokens)

    def chosen() -> list[list[Answer]]:
        choices = choose(windows, logits, contexts, settings, n_best=n_best)
        return [_answers(choice, settings) for choice in choices]

    return on_first_rank(model.cube, chosen)


def all_logits(
    model: BertForQuestionAnswering, windows: Windows, *, batch_tokens: int = BATCH_TOKENS, progress: bool = False
) -> list[NDArray[np.float32]]:
    """Of each window (tokens, 2): how likely each token begins and ends the answer. The same on every rank.

    Raises:
        FloatingPointError: one is not finite.
    """
    logits: list[NDArray[np.float32]] = []
    with tqdm(total=len(windows), desc="answer", unit=" windows", disable=None if progress else True) as bar:
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
    if config.encoder == "classic" and config.positions < settings.max_length:
        raise ValueError(
            f"windows of max_length={settings.max_length} tokens need a model with as many positions, and this one has "
            f"{config.positions}. Lower max_length."
        )


def _answers(choice: Choice, settings: AnswerSettings) -> list[Answer]:
    return [
        Answer(text=candidate.text, start=candidate.start, end=candidate.end, probability=probability)
        for candidate, probability in choice.ranked(settings)
    ]
