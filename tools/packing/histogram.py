"""Histograms of sequence lengths: read from a file, or counted in a prepared corpus."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tensor3d.data import ShardedPairs
from tensor3d.data.segments import SPECIAL_TOKENS
from tools.common.files import parsed_json, read_file
from tools.common.idle_options import IdleRule
from tools.corpus.quick.corpus_info import load_corpus

REMEDY = (
    'A histogram file holds one JSON object with "counts", a list in which entry i counts the sequences of length i.'
)
_SHORTEST_PAIR = SPECIAL_TOKENS + 2
_LARGEST = int(np.iinfo(np.int64).max)


@dataclass(frozen=True, kw_only=True)
class HistogramSource:
    """Where a command takes its lengths from. A base of the commands' options."""

    histogram: Path | None = None
    """JSON file with "counts": entry i counts the sequences of length i."""
    corpus: Path | None = None
    """Instead of a histogram: a folder that `python -m tools.corpus prepare` wrote; its sentence pairs of epoch 0."""
    capacity: int | None = None
    """Token slots of a pack. Default: the last length of the histogram. A corpus needs it; it cuts pairs there."""
    seed: int = 0
    """Draws the pairs of a corpus."""

    def idle_rules(self) -> Sequence[IdleRule]:
        """What options need."""
        return (IdleRule(("seed",), self.corpus is not None, "the pairs of a --corpus"),)

    def lengths(self) -> tuple[NDArray[np.int64], int]:
        """Sequences by length, and the capacity.

        Raises:
            ValueError: none or both of the two sources, no capacity for a corpus, or a source that cannot be read.
        """
        if (self.histogram is None) == (self.corpus is None):
            raise ValueError("give either --histogram FILE.json or --corpus DIR.")
        if self.histogram is not None:
            counts = read_histogram(self.histogram)
            return counts, len(counts) - 1 if self.capacity is None else self.capacity
        assert self.corpus is not None
        if self.capacity is None:
            raise ValueError("a corpus has no longest sequence of its own: give --capacity, the token slots of a pack.")
        if self.capacity < _SHORTEST_PAIR:
            raise ValueError(
                f"--capacity must be at least {_SHORTEST_PAIR} with --corpus: a pair has {SPECIAL_TOKENS} special "
                f"tokens and one of each segment. Got {self.capacity}."
            )
        return corpus_histogram(self.corpus, self.capacity, self.seed), self.capacity


def corpus_histogram(folder: Path, max_length: int, seed: int) -> NDArray[np.int64]:
    """int64 (max_length + 1,): lengths of the sentence pairs that training with this seed draws in epoch 0.

    Raises:
        ValueError: the folder is no prepared corpus, or see `ShardedPairs` and `sample_pairs`.
    """
    pairs = ShardedPairs(load_corpus(folder).train, max_length=max_length, seed=seed)
    return np.bincount(pairs.draw(0).lengths, minlength=max_length + 1)


def read_histogram(path: Path) -> NDArray[np.int64]:
    """int64 (lengths,): entry `i` counts the sequences of `i` tokens.

    Args:
        path: a JSON file that holds an object with `counts`; its other entries are not looked at.

    Raises:
        ValueError: no such file, no JSON, an object of another kind, or counts that cannot be: none at all, negative,
            not whole, or of sequences without tokens.
    """
    path = Path(path)
    counts = _counts_of(path)
    for length, count in enumerate(counts):
        # A bool is an int to Python, not to us.
        if not isinstance(count, int) or isinstance(count, bool) or count > _LARGEST:
            raise ValueError(
                f"{path}: counts must be whole numbers, at most {_LARGEST:,}. Got {count!r} for length {length}."
            )
        if count < 0:
            raise ValueError(f"{path}: counts must be at least 0. Got {count} for length {length}.")
    if (tokens := sum(length * count for length, count in enumerate(counts))) > _LARGEST:
        raise ValueError(f"{path} counts {tokens:,} tokens, and at most {_LARGEST:,} can be counted. Lower the counts.")
    histogram = np.array(counts, dtype=np.int64)
    if not histogram.any():
        raise ValueError(f"{path} counts no sequence at all; there is nothing to pack. {REMEDY}")
    if histogram[0]:
        raise ValueError(
            f"{path} counts {histogram[0]} sequences of length 0; every sequence needs at least 1 token. "
            "Is the first entry meant for length 1? Then put a 0 before it."
        )
    return histogram


def _counts_of(path: Path) -> list[Any]:
    try:
        content = parsed_json(read_file(path), unique=True)
    except (FileNotFoundError, NotADirectoryError):
        raise ValueError(f"there is no histogram file {path.absolute()}. {REMEDY}") from None
    except OSError as problem:
        raise ValueError(f"{path} cannot be read: {problem.strerror}. {REMEDY}") from None
    except ValueError as problem:
        raise ValueError(f"{path} is no JSON: {problem}. {REMEDY}") from None
    if not isinstance(content, dict):
        raise ValueError(f"{path} holds a {type(content).__name__} where an object is needed. {REMEDY}")
    if "counts" not in content:
        raise ValueError(f"{path} has no counts; its entries are {sorted(content)[:8]}. {REMEDY}")
    counts = content["counts"]
    if not isinstance(counts, list):
        raise ValueError(f"{path}: counts is a {type(counts).__name__} where a list is needed. {REMEDY}")
    return counts
