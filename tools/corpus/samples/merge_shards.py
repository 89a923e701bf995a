"""The second phase: each shard gathers its pieces of all parts."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from tensor3d.data import IndexedWriter
from tensor3d.data.masking import MASKED_SHARE, masked_counts
from tensor3d.data.sampling import IS_RANDOM
from tensor3d.data.stored_samples import LABELS, MASKS
from tools.corpus.pipeline import Context, Unit, draft
from tools.corpus.samples.draw import PARTS, DrawRules, Piece, read_piece
from tools.corpus.tokenize.documents import entropy

# --- How many sequences of each corpus are used, and which shard gets which: arithmetic on counts alone ---------------


def targets(drawn: Sequence[int], weights: Sequence[float] | None) -> list[int]:
    """Sequences of each corpus to use, in the ratio of the weights: none fewer than it has, and one just these.

    Args:
        drawn: sequences of each corpus that have been drawn, above 0.
        weights: above 0. None: all that have been drawn.
    """
    if weights is None:
        return list(drawn)
    total = max(have / weight for have, weight in zip(drawn, weights, strict=True))
    return [max(have, round(total * weight)) for have, weight in zip(drawn, weights, strict=True)]


def cuts_missing(cuts: Sequence[int], target: int) -> int:
    """How often a corpus must be drawn again for its target, judging by the sequences of the `cuts` so far."""
    return max(0, math.ceil((target - sum(cuts)) * len(cuts) / sum(cuts)))


def kept(parts: Sequence[Sequence[int]], target: int) -> list[list[int]]:
    """Sequences of each part to use, so that they are `target`: of one cut after another all, of the last one those
    that are left to use, from all of its parts alike, and nothing of what comes behind.

    Args:
        parts: of each cut of a corpus, the sequences of its parts; `target` in all, at least.
    """
    left, result = target, []
    for cut in parts:
        size = sum(cut)
        share = min(left, size)
        before = 0
        here = []
        for count in cut:
            end = before + count
            here.append(end * share // size - before * share // size if size else 0)
            before = end
        result.append(here)
        left -= share
    assert left == 0, "fewer sequences than were to be used"
    return result


def deal(counts: Sequence[int], shards: int) -> list[list[tuple[int, int]]]:
    """Of each shard, where its sequences begin and end in each part.

    Sequence `g` of all parts together counts for shard `g % shards`; so shards differ by one sequence at most, also in
    what they have of a part. A shard takes its number of a part from consecutive places.

    Args:
        counts: sequences of each part, in order.
    """
    dealt: list[list[tuple[int, int]]] = [[] for _ in range(shards)]
    offset = 0
    for count in counts:
        begin = 0
        for shard in range(shards):
            own = _below(offset + count, shard, shards) - _below(offset, shard, shards)
            dealt[shard].append((begin, begin + own))
            begin += own
        offset += count
    return dealt


def _below(end: int, shard: int, shards: int) -> int:
    """Numbers below `end` that leave the remainder `shard`."""
    return (end - shard + shards - 1) // shards


MOST_RANDOM = 0.6
"""Share of random pairs that needs no word. A coin gives one half; the last sentence of a document has nothing behind
it, which adds a few percent to that where documents have many sentences."""
_UNLIKELY = 2.33
"""Standard deviations of the coin above one half that it reaches once in a hundred corpora."""


def hint_at_random_pairs(random: int, pairs: int) -> str | None:
    """What to say where more pairs are random than `MOST_RANDOM` and more than chance explains; None: nothing.

    Args:
        random: pairs whose segment B was drawn at random.
        pairs: all.
    """
    if random <= MOST_RANDOM * pairs or random - pairs / 2 <= _UNLIKELY * math.sqrt(pairs) / 2:
        return None
    return (
        f"{random / pairs:.1%} of the pairs have a second segment that was drawn at random, where chance gives 50 %: "
        "the first one is all that is left of its document, as where documents have one sentence, or a sentence fills "
        "a sequence. What the model is asked about such pairs teaches it little. Make single texts of them (python -m "
        "tools.corpus samples --single-texts), join documents, or raise --max-length."
    )


# --- The second phase -------------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class GatherUnit(Unit):
    """A shard, or the held-out sequences; its name is that of its files."""

    pieces: tuple[Piece, ...]


def gather(rules: DrawRules, unit: GatherUnit, context: Context) -> dict[str, Any]:
    """Writes the files of a shard. Returns its sequences, those of them that are random pairs, its tokens and its
    histogram of lengths."""
    pieces = np.zeros(rules.special.vocab_size, dtype=np.int64)
    prefix = context.folder / unit.name
    histogram = np.zeros(rules.max_length + 1, dtype=np.int64)
    random = 0
    with ExitStack() as stack:
        text = stack.enter_context(IndexedWriter(prefix, vocab_size=rules.largest))
        masks, share = None, MASKED_SHARE
        if rules.static is not None:
            share = rules.static.share
            beside = prefix.with_name(f"{prefix.name}.{MASKS}")
            masks = stack.enter_context(IndexedWriter(beside, vocab_size=rules.largest))
        labels = None
        if not rules.single:
            labels = stack.enter_context(draft(prefix.with_name(f"{prefix.name}.{LABELS}")))
            _begin_labels(labels, sum(piece.end - piece.begin for piece in unit.pieces))
        for piece in unit.pieces:
            sequences = read_piece(context.scratch / PARTS, piece, share)
            count, each = sequences.items.shape
            text.add_documents(sequences.ids, sequences.items.reshape(-1), np.full(count, each))
            if masks is not None:
                counts = masked_counts(sequences.lengths, share)
                masks.add_documents(sequences.masks, np.repeat(counts, 2), np.full(count, 2))
            if labels is not None:
                labels.write(sequences.labels.tobytes())
                random += int(np.count_nonzero(sequences.labels == IS_RANDOM))
            pieces += np.bincount(sequences.ids, minlength=len(pieces))
            histogram += np.bincount(sequences.lengths, minlength=len(histogram))
            context.progress(sequences.ids.nbytes)
    with draft(_counts_path(context.scratch, unit.name)) as file:
        np.save(file, pieces)
    tokens = int(histogram @ np.arange(len(histogram)))
    sequences_here = int(histogram.sum())
    return {"sequences": sequences_here, "random": random, "tokens": tokens, "histogram": histogram.tolist()}


def _begin_labels(file: BinaryIO, sequences: int) -> None:
    """What stands before the bytes of an array of so many labels: they are written as they come."""
    kind = np.lib.format.dtype_to_descr(np.dtype(np.uint8))
    np.lib.format.write_array_header_1_0(file, {"descr": kind, "fortran_order": False, "shape": (sequences,)})


def unigram_entropy(scratch: Path, shards: Iterable[str]) -> float:
    """Nats a token of the text in some shards, which have been gathered: the loss of a model that knows the
    frequencies only."""
    return entropy(np.sum([np.load(_counts_path(scratch, name)) for name in shards], axis=0))


def _counts_path(scratch: Path, name: str) -> Path:
    return scratch / PARTS / f"{name}.counts.npy"
