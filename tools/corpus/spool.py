"""Sentences on their way to the tokenizer, in a text file, so that a corpus need not fit into memory."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from tools.corpus.sentences import split_sentences


class Spool:
    """One sentence a line; an empty line ends a document."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self.words: NDArray[np.int64] = np.empty(0, dtype=np.int64)
        """int64 (documents,): words of each document, between spaces."""
        self.sentences = 0

    def write(self, documents: Iterable[str]) -> None:
        """Splits documents into sentences; one without any is left out."""
        words: list[int] = []
        with self._path.open("w", encoding="utf-8", newline="\n") as file:
            for document in documents:
                if sentences := split_sentences(document):
                    file.write("\n".join(sentences) + "\n\n")
                    words.append(sum(len(sentence.split()) for sentence in sentences))
                    self.sentences += len(sentences)
        self.words = np.array(words, dtype=np.int64)

    def documents(self) -> Iterator[list[str]]:
        """The sentences of each document."""
        with self._path.open(encoding="utf-8", newline="\n") as file:
            sentences: list[str] = []
            for line in file:
                if line == "\n":
                    yield sentences
                    sentences = []
                else:
                    sentences.append(line[:-1])
