"""From a corpus to the packs of training steps, the same on every rank."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import count, pairwise

import numpy as np

from models.gpt.batch import Text
from tensor3d.data import IndexedDataset, SpecialTokens
from tensor3d.packing import StreamPacker

_WINDOW = 512  # texts that wait for a pack: few, so that short ones do not come late


def texts_of(documents: IndexedDataset, special: SpecialTokens, length: int) -> list[Text]:
    """Documents as texts of at most `length` tokens: [CLS], the document, [SEP], cut where it is too long.

    A rest of a single token, at which there is nothing to be predicted, is left out.
    """
    texts: list[Text] = []
    bounds = documents.starts[documents.documents]
    for first, last in pairwise(bounds.tolist()):
        ids = [special.cls, *documents.ids[first:last].tolist(), special.sep]
        parts = (ids[start : start + length] for start in range(0, len(ids), length))
        texts += [part for part in parts if len(part) > 1]
    return texts


def packs_of(texts: Sequence[Text], capacity: int, seed: int) -> Iterator[list[Text]]:
    """Packs without end: every epoch has all texts, in an order of its own."""
    packer, waiting = StreamPacker(capacity, window=_WINDOW), dict[int, Text]()
    numbers = count()
    for epoch in count():
        for text in np.random.default_rng((seed, epoch)).permutation(len(texts)).tolist():
            waiting[next(numbers)] = texts[text]
            pack = packer.add(len(texts[text]))
            if pack is not None:
                yield [waiting.pop(number) for number in pack]
