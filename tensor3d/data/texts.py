"""Single texts, for masked-LM without next sentences (the "doc-sentences" of Liu et al., 2019, RoBERTa, section 4.2).

A text is [CLS] A [SEP]. A is a run of whole sentences of one document, as many as fit; the next text goes on behind it.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from tensor3d.data.pairs import Documents, Pairs, Sentences, check_sentences
from tensor3d.data.segments import NO_LABEL, SPECIAL_TOKENS_OF_SINGLE
from tensor3d.seeds import mix

_STREAM = 8


def sample_texts(
    dataset: Sentences, *, max_length: int, seed: int, epoch: int, short_probability: float = 0.1
) -> Pairs:
    """Cuts documents into texts; every sentence is in exactly one.

    A sentence that is longer than a text by itself loses tokens at both ends. In epochs above 0 the first text of each
    document aims at a random length, so that every epoch cuts elsewhere.

    Args:
        dataset: documents of sentences.
        max_length: tokens of a text, at most; the special ones counted.
        seed, epoch: the texts are a function of these two and the arguments.
        short_probability: share of the texts that aim at a random shorter length.

    Raises:
        ValueError: arguments out of range, a dataset without sentences or with an empty one.
    """
    room = max_length - SPECIAL_TOKENS_OF_SINGLE
    if room < 1:
        raise ValueError(f"max_length must be at least 3: 2 special tokens and one of text. Got {max_length}.")
    check_sentences(dataset, short_probability)
    rng = np.random.default_rng(mix(seed, epoch, _STREAM))
    documents = Documents.of(dataset)
    position = documents.first.copy()
    active = np.arange(len(position))
    parts: list[tuple[NDArray[np.int64], NDArray[np.int64]]] = []
    # One text of each document that still has sentences.
    while len(active):
        short = rng.random(len(active)) < short_probability
        if epoch > 0 and not parts:
            short[:] = True
        target = np.full(len(active), room)
        target[short] = rng.integers(1, room + 1, size=int(short.sum()))
        first = position[active]
        end = documents.within(first, target, documents.end[active])
        parts.append((first, end))
        position[active] = end
        active = active[end < documents.end[active]]
    first, end = map(np.concatenate, zip(*parts, strict=True))
    start, full = dataset.starts[first], dataset.starts[end] - dataset.starts[first]
    length = np.minimum(full, room)
    start = start + rng.binomial(full - length, 0.5)
    return Pairs(
        a_start=start,
        a_length=length.astype(np.int32),
        b_start=start + length,
        b_length=np.zeros(len(length), dtype=np.int32),
        label=np.full(len(length), NO_LABEL, dtype=np.int8),
    )
