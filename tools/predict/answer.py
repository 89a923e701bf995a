"""The task `answer`: spans of a context that answer a question."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

from models.bert.tasks import BertForQuestionAnswering
from tools.corpus.tokenizers import Tokenizer
from tools.predict.inputs import Fields, InputProblem, Query
from tools.predict.results import Answered, Span
from tools.predict.tasks import PredictTask, Ready, problem_of
from tools.predict.text_encoder import TooLong
from tools.squad import AnswerSettings, answer_questions

Pair = tuple[str, str]


class Answer(PredictTask[Pair, Answered]):
    """The best answers to a question from a context, which may be longer than the model: it is read in windows.

    Args:
        k: answers of each question, at most.
        too_long: of questions with more tokens than `settings` has for them.
    """

    fields = Fields(first="question", second="context", needs_second=True)

    def __init__(
        self,
        model: BertForQuestionAnswering,
        tokenizer: Tokenizer,
        settings: AnswerSettings,
        k: int,
        batch_tokens: int,
        too_long: TooLong = "truncate",
    ) -> None:
        if k < 1:
            raise ValueError(f"k must be at least 1. Got {k}.")
        self.config, self.cube = model.config, model.cube
        self.model, self.tokenizer, self.k = model, tokenizer, k
        self.settings, self.batch_tokens = settings, batch_tokens
        self.refuses = too_long == "refuse"

    def ready(self, queries: Sequence[Query]) -> list[Ready[Pair] | InputProblem]:
        pairs = [(query.first, query.second or "") for query in queries]
        texts = [text for pair in pairs for text in pair]
        self.named += self.tokenizer.count_named(texts)
        found = self.tokenizer.encode(texts)
        self.unknown += self.tokenizer.count_unknown(texts, found)
        encoded = iter(found)
        return [
            self._ready(query, pair, next(encoded), next(encoded)) for query, pair in zip(queries, pairs, strict=True)
        ]

    def _ready(self, query: Query, pair: Pair, question: list[int], context: list[int]) -> Ready[Pair] | InputProblem:
        for name, ids in ((self.fields.first, question), (self.fields.second, context)):
            if not ids:
                return problem_of(query, f'"{name}" has no token. Leave it out, or write something.')
        if len(question) > self.settings.question_length:
            if self.refuses:
                return problem_of(
                    query,
                    f"the question has {len(question)} tokens, and the model reads {self.settings.question_length}. "
                    "Shorten it, or let its end be left out: --too-long truncate.",
                )
            self.truncated += 1
        # Each window has the question, and windows overlap.
        head = min(len(question), self.settings.question_length) + 3
        room = max(1, self.settings.max_length - head)
        windows = 1 + -(-max(0, len(context) - room) // self.settings.stride)
        tokens = len(context) + windows * head + (windows - 1) * max(0, room - self.settings.stride)
        return Ready(content=pair, tokens=tokens)

    def results(self, batch: Sequence[Pair]) -> list[Answered]:
        found = answer_questions(
            self.model, self.tokenizer, batch, settings=self.settings, n_best=self.k, batch_tokens=self.batch_tokens
        )
        return [Answered(answers=tuple(Span(**dataclasses.asdict(answer)) for answer in answers)) for answers in found]


def settings_for(facts: Mapping[str, Any], length: int, *, is_asked: bool) -> AnswerSettings:
    """How a model reads questions: as its model.json has it, with shorter windows where it has fewer places.

    Args:
        length: tokens of a sequence, at most.
        is_asked: windows are to have just so many.

    Raises:
        ValueError: model.json has no such settings.
    """
    settings = AnswerSettings.from_facts(facts)
    if is_asked and length > settings.max_length:
        return dataclasses.replace(settings, max_length=length)
    return settings.fitted(length)
