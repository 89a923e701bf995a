"""A task that needs no file: with which word did this sentence begin?

The sentences are those of the documentation that every Python carries; the four commonest first words are the classes,
and the model sees what comes after them. Everybody with the same Python has the same task.
"""

from __future__ import annotations

import re
from collections.abc import Iterator

from tools.corpus.embedded import EmbeddedSource
from tools.corpus.sentences import split_sentences

FIRST_WORDS = ("If", "Return", "The", "This")
_DEV_EVERY = 10  # one document in so many
_WORDS = range(6, 25)
_prose = re.compile(r"[A-Z][A-Za-z' ,-]*[.]").fullmatch


def embedded_sentences(part: str) -> Iterator[str]:
    """Sentences of prose, 6 to 24 words each, of the documents of "train" or of "dev"."""
    for number, document in enumerate(EmbeddedSource().documents()):
        if (number % _DEV_EVERY == 0) == (part == "dev"):
            for sentence in split_sentences(document):
                if len(sentence.split()) in _WORDS and _prose(sentence):
                    yield sentence


def embedded_rows(part: str) -> Iterator[tuple[str, str, str]]:
    """Where a row comes from, a sentence without its first word, and that word."""
    for number, sentence in enumerate(embedded_sentences(part)):
        first, rest = sentence.split(maxsplit=1)
        if first in FIRST_WORDS:
            yield f"embedded {part}, sentence {number}", rest, first
