"""Windows of contexts that are longer than a model's sequences, each with its question (Devlin et al. 2018, §4.2).

Q questions, W windows; P passages, as questions of one paragraph share its text
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any

import numpy as np
from numpy.typing import NDArray
from tqdm import tqdm

from models.bert.text_batches import EncodedText
from tools.common.bounds import AtLeast, check_bounds
from tools.common.log import progress as progress_of
from tools.corpus.tokenizers import Tokenizer
from tools.corpus.tokenizers.base import UnknownText

# --- How contexts are cut into windows, and which spans may be answers ------------------------------------------------

FACTS = "answer"
"""Where `facts` of a model.json keep these settings."""


@dataclass(frozen=True, kw_only=True)
class AnswerSettings:
    """Numbers as Devlin et al. 2018 and their code have them.

    Raises:
        ValueError: a number out of its range, or windows with no room for a context.
    """

    max_length: int = 384
    """Tokens of a window, special ones included."""
    stride: Annotated[int, AtLeast(1)] = 128
    """Tokens of the context between the beginnings of two windows."""
    question_length: Annotated[int, AtLeast(1)] = 64
    """Tokens of a question, at most; the rest is left out."""
    answer_length: Annotated[int, AtLeast(1)] = 30
    """Tokens of an answer, at most."""
    no_answer: bool = False
    """A question may have no answer, as in SQuAD v2.0."""
    null_threshold: float = 0.0
    """There is no answer where the score of [CLS] exceeds the best answer's by more than this: in a model.json the one
    that was found on dev, where fine-tuning looked for one."""

    def __post_init__(self) -> None:
        check_bounds(self)
        if self.max_length < self.question_length + 4:
            raise ValueError(
                f"max_length must be at least question_length={self.question_length} and 4 more: three special tokens "
                f"and one of the context. Got {self.max_length}."
            )
        if not math.isfinite(self.null_threshold):
            raise ValueError(f"null_threshold must be finite. Got {self.null_threshold}.")

    @classmethod
    def from_facts(cls, facts: Mapping[str, Any]) -> AnswerSettings:
        """The settings that a model was fine-tuned with, of `facts` of its model.json; defaults where it tells none.

        Raises:
            ValueError: what stands there is no such settings.
        """
        told = facts.get(FACTS, {})
        names = {field.name for field in dataclasses.fields(cls)}
        try:
            return cls(**{name: value for name, value in told.items() if name in names})
        except (TypeError, AttributeError) as problem:
            raise ValueError(f"model.json: facts.{FACTS} are no settings of answers: {told!r:.80}.") from problem

    def fitted(self, positions: int) -> AnswerSettings:
        """The same for sequences of at most so many tokens: shorter windows, and what depends on their length."""
        if self.max_length <= positions:
            return self
        return dataclasses.replace(
            self,
            max_length=positions,
            stride=max(1, min(self.stride, positions // 3)),
            question_length=max(1, min(self.question_length, positions // 3 - 3)),
        )


# --- Windows of contexts that are longer than a model's sequences, each with its question -----------------------------

_AT_ONCE = 4096
"""Questions that are encoded together, between two looks at the progress bar."""


@dataclass(frozen=True, kw_only=True, eq=False)
class Passage:
    """A context as the tokenizer cuts it."""

    ids: NDArray[np.int32]
    """(tokens,)"""
    starts: NDArray[np.int32]
    """(tokens,): where each token begins in the context, in characters."""
    ends: NDArray[np.int32]
    """(tokens,): where it ends."""

    def tokens_of(self, start: int, end: int) -> tuple[int, int]:
        """First and last token that have a character of context[start:end]; the first is behind the last one where no
        token has."""
        first = int(np.searchsorted(self.ends, start, side="right"))
        last = int(np.searchsorted(self.starts, end, side="left")) - 1
        return first, last


@dataclass(frozen=True, kw_only=True, eq=False)
class Windows:
    """All windows of some questions, question by question: [CLS] question [SEP] part of the context [SEP], with one or
    two [SEP] between, as the tokenizer's layout says."""

    passages: Sequence[Passage]
    passage: NDArray[np.int32]
    """(Q,): the passage of each question."""
    heads: Sequence[NDArray[np.int32]]
    """Of each question: [CLS] question [SEP], with all special tokens that stand between."""
    question: NDArray[np.int32]
    """(W,): the question of each window, ascending."""
    first: NDArray[np.int32]
    """(W,): first token of the passage in each window."""
    tokens: NDArray[np.int32]
    """(W,): tokens of the passage in each window."""
    sep: int
    """Id of the separator."""
    second_type: int = 1
    """Of the context's tokens."""

    def __len__(self) -> int:
        return len(self.question)

    @property
    def head_sizes(self) -> NDArray[np.int32]:
        """(W,): tokens before those of the passage."""
        return np.array([len(head) for head in self.heads], dtype=np.int32)[self.question]

    @property
    def lengths(self) -> NDArray[np.int64]:
        """(W,): tokens of each window."""
        lengths: NDArray[np.int64] = self.head_sizes.astype(np.int64) + self.tokens + 1
        return lengths

    @property
    def of_questions(self) -> NDArray[np.int64]:
        """(Q + 1,): the windows of question q are those from [q] up to [q + 1]."""
        return np.searchsorted(self.question, np.arange(len(self.heads) + 1))

    def text(self, window: int) -> EncodedText:
        """The window as the model reads it."""
        question = int(self.question[window])
        head, ids = self.heads[question], self.passages[self.passage[question]].ids
        first, tokens = int(self.first[window]), int(self.tokens[window])
        whole = np.concatenate((head, ids[first : first + tokens], (self.sep,))).astype(np.int64)
        types = np.zeros(len(whole), dtype=np.int64)
        types[len(head) :] = self.second_type
        return EncodedText(ids=whole, types=types)

    def targets(self, answers: Sequence[tuple[int, int] | None]) -> NDArray[np.int64]:
        """(W, 2): places in the window of the answer's first and last token; [CLS], place 0, where the window does not
        hold the whole answer, or there is none; -1 where no token has a character of it.

        Args:
            answers: of each question the characters of its context, start and end; None: no answer.
        """
        spans = np.full((len(answers), 2), -1, dtype=np.int64)
        for number, answer in enumerate(answers):
            if answer is not None:
                spans[number] = self.passages[self.passage[number]].tokens_of(*answer)
        none = np.array([answer is None for answer in answers], dtype=np.bool_)[self.question]
        span = spans[self.question]
        lost = (span[:, 0] > span[:, 1]) & ~none
        within = span - self.first[:, None]
        whole = ~none & ~lost & (within[:, 0] >= 0) & (within[:, 1] < self.tokens)
        targets = np.where(whole[:, None], within + self.head_sizes[:, None], 0)
        targets[lost] = -1
        return targets


def unknown_in(questions: Sequence[tuple[str, str]], windows: Windows, tokenizer: Tokenizer) -> UnknownText:
    """How much of the questions and their contexts, each of which counts once, has no piece.

    Args:
        questions: those of which the windows were made, with their contexts.
    """
    contexts = dict.fromkeys(context for _, context in questions)  # in the order of the passages
    found = tokenizer.count_unknown(list(contexts), [passage.ids.tolist() for passage in windows.passages])
    return found + tokenizer.count_unknown([text for text, _ in questions], [head.tolist() for head in windows.heads])


def make_windows(
    questions: Sequence[tuple[str, str]],
    tokenizer: Tokenizer,
    settings: AnswerSettings,
    *,
    names: Sequence[str] | None = None,
    progress: bool = False,
) -> Windows:
    """The windows of questions, each of them given with its context. A context that comes again is encoded once.

    Windows begin every `settings.stride` tokens of the context, up to the first one that reaches its end.

    Args:
        names: of the questions, in messages. Default: their numbers, from 0.
        progress: show a bar, on a terminal.

    Raises:
        ValueError: a question or a context without a token, or no room for one token of a context; a tokenizer without
            [CLS].
    """
    layout, sep = tokenizer.layout, tokenizer.special.sep
    if settings.max_length < settings.question_length + layout.tokens_between + 3:
        raise ValueError(
            f"max_length must be at least question_length={settings.question_length} and {layout.tokens_between + 3} "
            f"more: {layout.tokens_between + 2} special tokens and one of the context. Got {settings.max_length}."
        )
    numbers: dict[str, int] = {}
    passage = [numbers.setdefault(context, len(numbers)) for _, context in questions]
    with progress_of(total=len(numbers) + len(questions), desc="tokenize", unit=" texts", shown=progress) as bar:
        passages = [_passage(tokenizer, context, bar) for context in numbers]
        heads = list(_heads(tokenizer, [text for text, _ in questions], settings.question_length, bar))
    for number, head in enumerate(heads):
        if len(head) == 1 + layout.tokens_between:
            name = names[number] if names else number
            raise ValueError(f"question {name} has no token: {questions[number][0]!r:.60}. Write something.")
    question: list[int] = []
    first: list[int] = []
    tokens: list[int] = []
    for number, (place, head) in enumerate(zip(passage, heads, strict=True)):
        total, room = len(passages[place].ids), settings.max_length - len(head) - 1
        if not total:
            name = names[number] if names else number
            raise ValueError(f"the context of question {name} has no token: {questions[number][1]!r:.60}.")
        parts = parts_of(total, room, settings.stride)
        question += [number] * len(parts)
        first += [begin for begin, _ in parts]
        tokens += [count for _, count in parts]
    return Windows(
        passages=passages,
        passage=np.array(passage, dtype=np.int32),
        heads=heads,
        question=np.array(question, dtype=np.int32),
        first=np.array(first, dtype=np.int32),
        tokens=np.array(tokens, dtype=np.int32),
        sep=sep,
        second_type=layout.second_type,
    )


def parts_of(tokens: int, room: int, stride: int) -> list[tuple[int, int]]:
    """First token and number of tokens of each window of a text, up to the first one that reaches its end."""
    step = min(room, stride)
    last = -(-max(0, tokens - room) // step) * step
    return [(first, min(room, tokens - first)) for first in range(0, last + 1, step)]


def most_context(firsts: NDArray[np.int32], tokens: NDArray[np.int32]) -> list[NDArray[np.bool_]]:
    """Of each window, the tokens that have most context there; the first one of several such windows."""
    places = [slice(first, first + count) for first, count in zip(firsts.tolist(), tokens.tolist(), strict=True)]
    most = np.full(places[-1].stop, -1.0)
    best = np.empty(len(most), dtype=np.int64)
    for window, place in enumerate(places):
        left = np.arange(place.stop - place.start)
        # The longer window where both have as much, as in the published code.
        around = np.minimum(left, left[::-1]) + 0.01 * len(left)
        better = around > most[place]
        most[place][better], best[place][better] = around[better], window
    return [best[place] == window for window, place in enumerate(places)]


def _passage(tokenizer: Tokenizer, context: str, bar: tqdm) -> Passage:
    ids, places = tokenizer.encode_with_offsets(context)
    offsets = np.array(places, dtype=np.int32).reshape(-1, 2)
    bar.update()
    return Passage(ids=np.array(ids, dtype=np.int32), starts=offsets[:, 0], ends=offsets[:, 1])


def _heads(tokenizer: Tokenizer, texts: Sequence[str], longest: int, bar: tqdm) -> Iterable[NDArray[np.int32]]:
    for begin in range(0, len(texts), _AT_ONCE):
        encoded = tokenizer.encode(texts[begin : begin + _AT_ONCE])
        for ids in encoded:
            yield np.array([*tokenizer.before, *ids[:longest], *tokenizer.between], dtype=np.int32)
        bar.update(len(encoded))
