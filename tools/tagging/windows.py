"""Texts by their words, cut into pieces and windows, and the tags that a model gives the words.

W windows; a text's words and pieces
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Annotated, Any

import numpy as np
import torch
from numpy.typing import NDArray

from models.bert.tasks import BertForTokenClassification, tag_logits
from models.bert.text_batches import EncodedText
from tensor3d.data.packed_batch import IGNORED
from tools.common.bounds import AtLeast, check_bounds
from tools.common.workers import split
from tools.corpus.tokenizers import Tokenizer
from tools.corpus.tokenizers.base import UnknownText, is_mark, is_of_word
from tools.squad.windows import most_context, parts_of
from tools.tagging.schemes import OUTSIDE, SCHEMES, Scheme, detect_scheme, ending, entities, going_on, has_prefix

FACTS = "tag"
"""Where `facts` of a model.json keep these settings."""


@dataclass(frozen=True, kw_only=True)
class TagSettings:
    """How a model reads texts, and what its labels mean.

    Raises:
        ValueError: a number out of its range, or an unknown scheme.
    """

    scheme: Scheme
    max_length: Annotated[int, AtLeast(3)]
    """Tokens of a window, special ones included."""
    stride: Annotated[int, AtLeast(1)]
    """Tokens between the beginnings of two windows of a text."""

    def __post_init__(self) -> None:
        check_bounds(self)
        if self.scheme not in SCHEMES:
            raise ValueError(f"scheme must be one of {', '.join(SCHEMES)}. Got {self.scheme!r}.")
        if self.stride > self.max_length - 2:
            raise ValueError(
                f"stride must be at most max_length - 2 = {self.max_length - 2}, so that no token falls between two "
                f"windows. Got {self.stride}."
            )

    @classmethod
    def from_facts(cls, facts: Mapping[str, Any], labels: Sequence[str], length: int) -> TagSettings:
        """Those of a model.json, for windows of `length` tokens. Where it tells none, as a folder of Hugging Face, the
        labels tell the scheme, and windows overlap by half.

        Raises:
            ValueError: what stands there is no such settings, or the labels are of another scheme (BILOU, BMES).
        """
        unread = [label for label in labels if label.startswith(("U-", "L-", "M-"))]
        if FACTS not in facts and unread and any(map(has_prefix, labels)):
            raise ValueError(
                f"{unread[0]!r} is a label of a scheme that is not read here (BILOU or BMES), and would be lost. "
                "Rename the labels in config.json: S- for U-, E- for L-, I- for M-."
            )
        half = max(1, (length - 2) // 2)
        told = facts.get(FACTS, {"scheme": detect_scheme([labels]), "stride": half})
        try:
            return cls(scheme=told["scheme"], stride=min(told["stride"], max(1, length - 2)), max_length=length)
        except (TypeError, KeyError) as problem:
            raise ValueError(f"model.json: facts.{FACTS} are no settings of tags: {told!r:.80}.") from problem

    def as_facts(self) -> dict[str, Any]:
        told = dataclasses.asdict(self)
        return {"max_length": told.pop("max_length"), FACTS: told}


# --- A text by its words, and the pieces of these ---------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True, eq=False)
class WordText:
    """A text, and where its words are."""

    text: str
    starts: NDArray[np.int32]
    """(words,): first character of each."""
    ends: NDArray[np.int32]
    """(words,): the character after the last."""

    @classmethod
    def of_words(cls, words: Sequence[str]) -> WordText:
        """With a space between them."""
        ends = np.cumsum([len(word) + 1 for word in words], dtype=np.int32) - 1
        starts = ends - np.array([len(word) for word in words], dtype=np.int32)
        return cls(text=" ".join(words), starts=starts, ends=ends)

    @classmethod
    def of_text(cls, text: str) -> WordText:
        """Words are of letters, marks and digits; any other character but a space is a word by itself, and so is each
        one of a script without spaces. Marks and joiners belong to the character before them."""
        starts: list[int] = []
        ends: list[int] = []
        goes_on = False
        for place, character in enumerate(text):
            if ends and ends[-1] == place and is_mark(character):
                ends[-1] = place + 1
                continue
            of_word = is_of_word(character)
            if of_word and goes_on:
                ends[-1] = place + 1
            elif not character.isspace():
                starts.append(place)
                ends.append(place + 1)
            goes_on = of_word
        return cls(text=text, starts=np.array(starts, dtype=np.int32), ends=np.array(ends, dtype=np.int32))

    @property
    def words(self) -> list[str]:
        return [self.text[start:end] for start, end in zip(self.starts.tolist(), self.ends.tolist(), strict=True)]


@dataclass(frozen=True, kw_only=True, eq=False)
class Pieces:
    """A text as the tokenizer cuts it."""

    ids: NDArray[np.int64]
    """(pieces,)"""
    first: NDArray[np.int64]
    """(words,): the piece that each word begins in; -1 where it has none. Words may share one."""
    word: NDArray[np.int64]
    """(pieces,): the word of each piece, of its last character; -1 where there is none, as of a space."""


def cut(texts: Sequence[WordText], tokenizer: Tokenizer) -> list[Pieces]:
    """The pieces of each text."""
    encoded = tokenizer.encode_all_with_offsets([text.text for text in texts])
    return [_pieces(text, *found) for text, found in zip(texts, encoded, strict=True)]


def unknown_in(texts: Sequence[WordText], pieces: Sequence[Pieces], tokenizer: Tokenizer) -> UnknownText:
    """How much of the texts the tokenizer has no pieces for."""
    return tokenizer.count_unknown([text.text for text in texts], [own.ids.tolist() for own in pieces])


def _pieces(text: WordText, ids: list[int], places: list[tuple[int, int]]) -> Pieces:
    starts, ends = np.array(places, dtype=np.int64).reshape(-1, 2).T
    count, words = len(ids), len(text.starts)
    first = np.searchsorted(ends, text.starts, side="right")
    inside = (first < count) & (np.append(starts, 0)[np.minimum(first, count)] < text.ends)
    word = np.searchsorted(text.ends, ends - 1, side="right")
    within = (word < words) & (np.append(text.starts, 0)[np.minimum(word, words)] < ends)
    return Pieces(ids=np.array(ids, dtype=np.int64), first=np.where(inside, first, -1), word=np.where(within, word, -1))


# --- Windows of texts, each of whose pieces is decided in one of them -------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class Window:
    """[CLS] pieces [SEP]"""

    text: int
    first: int
    """Piece of the text."""
    pieces: int
    own: NDArray[np.bool_]
    """(pieces,): those that have more context here than in another window, and are decided here."""

    @property
    def tokens(self) -> int:
        return self.pieces + 2


def windows_of(texts: Sequence[Pieces], settings: TagSettings) -> list[Window]:
    """The windows of all texts, text by text."""
    found = []
    for number, text in enumerate(texts):
        parts = parts_of(len(text.ids), settings.max_length - 2, settings.stride)
        own = most_context(*np.array(parts, dtype=np.int32).T)
        found += [Window(text=number, first=a, pieces=n, own=mask) for (a, n), mask in zip(parts, own, strict=True)]
    return found


def window_text(window: Window, texts: Sequence[Pieces], tokenizer: Tokenizer) -> EncodedText:
    special, ids = tokenizer.special, texts[window.text].ids
    part = ids[window.first : window.first + window.pieces]
    whole = np.concatenate(((special.cls,), part, (special.sep,))).astype(np.int64)
    return EncodedText(ids=whole, types=np.zeros_like(whole))


def targets_of(pieces: Pieces, tags: NDArray[np.int64], *, every: bool) -> NDArray[np.int64]:
    """(pieces,): the tag that each piece is to learn; -100: none.

    Args:
        tags: (words,)
        every: the later pieces of a word learn its tag too, not the first one alone.
    """
    targets = np.where(pieces.word >= 0, tags[pieces.word], IGNORED) if every else np.full(len(pieces.word), IGNORED)
    has = pieces.first >= 0
    # Of words that share a piece the first one has it.
    targets[pieces.first[has][::-1]] = tags[has][::-1]
    return targets.astype(np.int64)


def window_targets(window: Window, targets: NDArray[np.int64]) -> NDArray[np.int64]:
    """(tokens,): of the pieces that are decided there."""
    own = np.where(window.own, targets[window.first : window.first + window.pieces], IGNORED)
    return np.concatenate(((IGNORED,), own, (IGNORED,))).astype(np.int64)


@dataclass(frozen=True, kw_only=True, eq=False)
class WordTags:
    """What a model says of the words of a text."""

    numbers: NDArray[np.int64]
    """(words,): of tags; -1 of a word without a piece."""
    probabilities: NDArray[np.float32]
    """(words,): of these tags; 1 of a word without a piece."""
    shared: NDArray[np.bool_]
    """(words,): those that begin in the piece of a word before them, whose tag they have here."""

    def names(self, labels: Sequence[str], scheme: Scheme) -> list[str]:
        """A piece says what its first word is: the others go on that, for "B-" of each would be as many entities. So
        does a word without a piece that stands inside of an entity; elsewhere it is outside. Of an entity that ends in
        a word that goes on so, that word has the tag of a last one."""
        (known,) = np.nonzero(self.numbers >= 0)
        tags: list[str] = []
        for number, shared in zip(self.numbers[known].tolist(), self.shared[known].tolist(), strict=True):
            tags.append(going_on(tags[-1], scheme, labels) if shared and tags else labels[number])
        named = [OUTSIDE] * len(self.numbers)
        for place, tag in zip(known.tolist(), tags, strict=True):
            named[place] = tag
        for _, first, stop in entities(tags, scheme):
            for before, place in pairwise(known[first:stop].tolist()):
                inside = going_on(named[before], scheme, labels)
                named[before + 1 : place] = [inside] * (place - before - 1)
            if self.shared[last := known[stop - 1]]:
                named[last] = ending(named[last], scheme, labels)
        return named


def tag_texts(
    model: BertForTokenClassification,
    texts: Sequence[Pieces],
    tokenizer: Tokenizer,
    settings: TagSettings,
    *,
    batch_tokens: int,
) -> list[WordTags]:
    """The tags of all words: each is that of the word's first piece, in the window where this has most context. Every
    rank passes the same texts, and gets the same.

    Raises:
        FloatingPointError: the model's scores are not finite.
    """
    windows = windows_of(texts, settings)
    best = [np.empty(len(text.ids), dtype=np.int64) for text in texts]
    chances = [np.empty(len(text.ids), dtype=np.float32) for text in texts]
    for part in split([window.tokens for window in windows], batch_tokens):
        batch = [window_text(window, texts, tokenizer) for window in windows[part]]
        logits = torch.cat(tag_logits(model, batch))
        if not logits.isfinite().all():
            raise FloatingPointError("the model's scores of tags are not finite: its weights are spoilt.")
        likely, numbers = (each.numpy() for each in logits.float().softmax(1).max(1))
        end = 0
        for window in windows[part]:
            first, end = end + 1, end + window.tokens  # from behind [CLS]
            own = window.first + np.flatnonzero(window.own)
            best[window.text][own] = numbers[first : end - 1][window.own]
            chances[window.text][own] = likely[first : end - 1][window.own]
    return [_of_words(*each) for each in zip(texts, best, chances, strict=True)]


def _of_words(text: Pieces, numbers: NDArray[np.int64], chances: NDArray[np.float32]) -> WordTags:
    has = text.first >= 0
    probabilities = np.where(has, chances[text.first], 1).astype(np.float32)
    shared = np.zeros(len(has), dtype=np.bool_)
    (known,) = np.nonzero(has)
    shared[known[1:]] = np.diff(text.first[known]) == 0
    return WordTags(numbers=np.where(has, numbers[text.first], -1), probabilities=probabilities, shared=shared)
