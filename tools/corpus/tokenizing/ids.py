"""A range of documents as ids: what a worker does, and how the parts become one dataset.

What the workers import brings no torch, so that they are there at once and small.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from itertools import chain
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from tools.corpus.sentences import split_sentences
from tools.corpus.tokenizers import Tokenizer, load_tokenizer
from tools.corpus.tokenizers.base import smallest
from tools.corpus.tokenizing.documents import DocumentRange, read_texts
from tools.corpus.work import BadInput, Context, draft

BATCH = 1 << 20
"""Characters that go to the tokenizer at a time."""
COUNTS = ("documents", "sentences", "tokens", "unknown_tokens", "words", "characters", "documents_without_sentence")


def write_part(
    unit: DocumentRange, context: Context, *, tokenizer: Path, language: str, most_unknown: float
) -> dict[str, int]:
    """Writes the ids of a range to three files in the scratch folder; returns the `COUNTS`.

    NAME.ids holds all ids, NAME.lengths (int32) the ids of each sentence, NAME.items (int64) the sentences of each
    document.
    """
    made = load_tokenizer(tokenizer)
    counts = dict.fromkeys(COUNTS, 0)
    parts = [encode_documents(texts, made, language, counts) for texts in _batches(read_texts(unit, context))]
    ids = _joined([part[0] for part in parts], smallest(made.vocab_size))
    lengths = _joined([part[1] for part in parts], np.dtype("<i4"))
    items = _joined([part[2] for part in parts], np.dtype("<i8"))
    if counts["unknown_tokens"] > most_unknown * counts["tokens"]:
        context.bad(_not_for_this_text(unit, counts))
        counts = dict.fromkeys(COUNTS, 0)
        ids, lengths, items = ids[:0], lengths[:0], items[:0]
    for name, values in (("ids", ids), ("lengths", lengths), ("items", items)):
        with draft(context.scratch / f"{unit.name}.{name}") as file:
            file.write(values.tobytes())
    return counts


def read_part(
    unit: DocumentRange, scratch: Path, vocab_size: int
) -> tuple[NDArray[np.integer], NDArray[np.integer], NDArray[np.integer]]:
    """What `write_part` has written: ids, lengths, items."""
    path = scratch / unit.name
    ids = np.fromfile(path.with_suffix(".ids"), dtype=smallest(vocab_size))
    return ids, np.fromfile(path.with_suffix(".lengths"), "<i4"), np.fromfile(path.with_suffix(".items"), "<i8")


def encode_documents(
    texts: Sequence[str], tokenizer: Tokenizer, language: str, counts: dict[str, int]
) -> tuple[NDArray[np.integer], NDArray[np.integer], NDArray[np.integer]]:
    """All ids, the ids of each sentence, and the sentences of each document that has one; adds to the `COUNTS`."""
    split = [split_sentences(text, language) for text in texts]
    sentences = list(chain.from_iterable(split))
    # In batches again: a single document may be large.
    flats = [tokenizer.encode_flat(batch) for batch in _batches(sentences)]
    ids = _joined([flat.ids for flat in flats], smallest(tokenizer.vocab_size))
    lengths = _joined([flat.lengths for flat in flats], np.dtype("<i4"))
    # A sentence of nothing but control characters has no ids.
    owners = np.repeat(np.arange(len(split)), list(map(len, split)))[lengths > 0]
    items = np.bincount(owners, minlength=len(split))
    lengths = lengths[lengths > 0]
    counts["documents"] += int(np.count_nonzero(items))
    counts["documents_without_sentence"] += int(np.count_nonzero(items == 0))
    counts["sentences"] += len(lengths)
    counts["tokens"] += len(ids)
    counts["words"] += sum(sentence.count(" ") + 1 for sentence in sentences)
    counts["characters"] += sum(map(len, sentences))
    if tokenizer.unknown is not None:
        counts["unknown_tokens"] += int(np.count_nonzero(ids == tokenizer.unknown))
    return ids, lengths, items[items > 0]


def _batches(texts: Iterable[str]) -> Iterator[list[str]]:
    batch: list[str] = []
    size = 0
    for text in texts:
        batch.append(text)
        size += len(text)
        if size >= BATCH:
            yield batch
            batch, size = [], 0
    if batch:
        yield batch


def _joined(parts: Sequence[NDArray[np.integer]], dtype: np.dtype[np.integer]) -> NDArray[np.integer]:
    return np.concatenate([np.empty(0, dtype), *parts]).astype(dtype, copy=False)


def _not_for_this_text(unit: DocumentRange, counts: dict[str, int]) -> BadInput:
    share = counts["unknown_tokens"] / counts["tokens"]
    return BadInput(
        unit.file,
        f"bytes {unit.start} to {unit.end}",
        f"{share:.0%} of the tokens are unknown: this tokenizer is not for this text",
        "Take or train one for its language and case, raise --most-unknown",
    )
