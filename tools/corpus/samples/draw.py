"""The first phase: sequences of each run of documents."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from tensor3d.data import MaskingRules, Pairs, SpecialTokens, mask_tokens, sample_pairs, sample_texts
from tensor3d.data.array_utils import first_rows, ranges
from tensor3d.data.masking import MASKED_SHARE, StoredMasks, masked_counts
from tensor3d.data.segments import SPECIAL_TOKENS, SPECIAL_TOKENS_OF_SINGLE, Segments, full_lengths
from tensor3d.ops.seeds import mix
from tools.corpus.pipeline import Context, Unit, draft
from tools.corpus.samples.document_runs import Choice, DocumentRun, IndexView, cut_run
from tools.corpus.tokenizers.base import smallest

# --- Sequences on their way from the run that they were drawn from to the shards, as plain arrays on disk -------------


class Piece(NamedTuple):
    """Sequences `begin` to `end - 1` of a part."""

    part: str
    begin: int
    end: int


@dataclass(frozen=True, kw_only=True, eq=False)
class Sequences:
    """Sequences with what is stored of them."""

    ids: NDArray[np.integer]
    """(ids,): segments one after another."""
    items: NDArray[np.int32]
    """int32 (sequences, 2) ids of A and of B, or (sequences, 1) of the text."""
    labels: NDArray[np.uint8]
    """uint8 (sequences,): 0 where B follows A, 1 where it was drawn at random; (0,) of single texts."""
    masks: NDArray[np.integer]
    """(ids,): of each sequence the places that are guessed, then what is seen there; (0,) if drawn at load."""

    @property
    def lengths(self) -> NDArray[np.int64]:
        """int64 (sequences,): tokens, the special ones counted."""
        return _lengths(self.items)


_NAMES = ("ids", "items", "labels", "masks")


def write_part(folder: Path, name: str, sequences: Sequences) -> None:
    for kind in _NAMES:
        with draft(_path(folder, name, kind)) as file:
            np.save(file, getattr(sequences, kind))


def read_piece(folder: Path, piece: Piece, masked_share: float = MASKED_SHARE) -> Sequences:
    """The sequences of a piece, as copies: no file stays open. Of the rest of its part only the lengths are read."""
    ids, items, labels, masks = (np.load(_path(folder, piece.part, kind), mmap_mode="r") for kind in _NAMES)
    chosen = slice(piece.begin, piece.end)
    own_ids = _range(items.sum(axis=1, dtype=np.int64), chosen)
    own_masks = _range(2 * masked_counts(_lengths(items), masked_share), chosen) if len(masks) else slice(0, 0)
    return Sequences(
        ids=np.array(ids[own_ids]),
        items=np.array(items[chosen]),
        labels=np.array(labels[chosen]),
        masks=np.array(masks[own_masks]),
    )


def _range(sizes: NDArray[np.int64], chosen: slice) -> slice:
    """Where the chosen ones lie, when so many numbers of each lie one after another."""
    first = int(sizes[: chosen.start].sum())
    return slice(first, first + int(sizes[chosen].sum()))


def _lengths(items: NDArray[np.int32]) -> NDArray[np.int64]:
    return full_lengths(items[:, 0], items[:, 1] if items.shape[1] == 2 else np.zeros_like(items[:, 0]))


def _path(folder: Path, name: str, kind: str) -> Path:
    return folder / f"{name}.{kind}.npy"


# --- The first phase --------------------------------------------------------------------------------------------------

CONTINUATIONS, PARTS = "continuations.npy", "parts"
"""Names in the output and in its scratch folder."""
_DRAW_STREAM, _SHUFFLE_STREAM, _MASK_STREAM = 21, 22, 23
_TOKENS_AT_ONCE = 1 << 19
"""Bounds the memory of a worker."""


@dataclass(frozen=True, kw_only=True)
class DrawRules:
    """How sequences are drawn."""

    max_length: int
    short_probability: float
    single: bool
    static: MaskingRules | None
    """Masks are drawn now, by these. None: in training."""
    whole_words: bool
    special: SpecialTokens
    seed: int

    @property
    def largest(self) -> int:
        """Above every id, and above every place in a sequence."""
        return max(self.special.vocab_size, self.max_length)

    @property
    def id_type(self) -> np.dtype[np.integer]:
        return smallest(self.largest)


@dataclass(frozen=True, kw_only=True)
class DrawUnit(Unit):
    """A run of documents in one of the cuts of its corpus."""

    corpus: int
    cut: int
    """0, 1, ...: the same documents are drawn anew in every one."""
    run: int
    """Its number in the corpus."""
    prefix: Path
    first: int
    end: int
    """Documents `first` to `end - 1`, of which only those count that `choice` says."""
    choice: Choice
    held_out: bool


def draw(rules: DrawRules, unit: DrawUnit, context: Context) -> dict[str, Any]:
    """Draws the sequences of a run, shuffles them and writes them as a part."""
    run = IndexView(unit.prefix).read(
        unit.first,
        unit.end,
        unit.choice,
        held_out=unit.held_out,
        special=rules.special,
        context=context if unit.cut == 0 else None,
    )
    place = (unit.corpus, unit.cut, unit.run, int(unit.held_out))
    drawn = _sample(rules, run, place)
    order = np.random.default_rng(mix(rules.seed, _SHUFFLE_STREAM, *place)).permutation(len(drawn))
    continuations = None
    if rules.static is not None and rules.whole_words:
        continuations = np.load(context.folder / CONTINUATIONS)
    ids, masks = [], []
    for first, segments in _blocks(rules, run, drawn, order):
        # Sequences are masked by their places in the part.
        numbers = np.arange(first, first + len(segments))
        ids.append(segments.ids.astype(rules.id_type))
        masks.append(_masks(rules, segments, numbers, place, continuations))
    cut_documents, cut_sentences = _cuts(rules, run, drawn) if rules.single else (0, 0)
    write_part(context.scratch / PARTS, unit.name, _sequences(rules, drawn, order, ids, masks))
    return {
        "documents": int(np.count_nonzero(np.diff(run.documents))),
        "sequences": len(drawn),
        "tokens": int(drawn.lengths.sum(dtype=np.int64)),
        "random": int((drawn.label == 1).sum()),
        "cut_documents": cut_documents,
        "cut_sentences": cut_sentences,
    }


def _sample(rules: DrawRules, run: DocumentRun, place: tuple[int, ...]) -> Pairs:
    if not len(run.lengths):
        nothing = np.empty(0, dtype=np.int64)
        return Pairs(
            a_start=nothing,
            a_length=nothing.astype(np.int32),
            b_start=nothing,
            b_length=nothing.astype(np.int32),
            label=nothing.astype(np.int8),
        )
    corpus, cut, number, held_out = place
    sample = sample_texts if rules.single else sample_pairs
    return sample(
        run if rules.single else _in_halves(rules, run),
        max_length=rules.max_length,
        seed=mix(rules.seed, _DRAW_STREAM, corpus, number, held_out),
        epoch=cut,
        short_probability=rules.short_probability,
    )


def _in_halves(rules: DrawRules, run: DocumentRun) -> DocumentRun:
    """Cuts items so that all their ids are used: in many corpora a document is one item, longer than a sequence. Two
    halves fill a pair to the last id, and one is never cut to make place for a random B."""
    room = rules.max_length - SPECIAL_TOKENS
    return cut_run(run, longest=-(-room // 2), room=room, parts=2)


def _cuts(rules: DrawRules, run: DocumentRun, drawn: Pairs) -> tuple[int, int]:
    """Of single texts: documents that lie in several of them, and sentences that are longer than one."""
    texts = np.bincount(np.searchsorted(run.starts[run.documents], drawn.a_start, side="right"), minlength=1)
    longest = rules.max_length - SPECIAL_TOKENS_OF_SINGLE
    return int(np.count_nonzero(texts > 1)), int(np.count_nonzero(run.lengths > longest))


def _blocks(
    rules: DrawRules, run: DocumentRun, drawn: Pairs, order: NDArray[np.int64]
) -> Iterator[tuple[int, Segments]]:
    """The sequences in their new order, some at a time, and the place of the first of them."""
    size = max(1, _TOKENS_AT_ONCE // rules.max_length)
    for first in range(0, len(order), size):
        yield first, drawn.segments(run, order[first : first + size])


def _masks(
    rules: DrawRules,
    segments: Segments,
    numbers: NDArray[np.int64],
    place: tuple[int, ...],
    continuations: NDArray[np.generic] | None,
) -> NDArray[np.integer]:
    """Of each sequence the places that are guessed, then what is seen there; nothing if masks are drawn at load."""
    if rules.static is None:
        return np.empty(0, dtype=rules.id_type)
    tokens = segments.tokens(rules.special)
    masked = mask_tokens(
        tokens.ids,
        tokens.guessable,
        segments.lengths,
        sequences=numbers,
        special=rules.special,
        seed=mix(rules.seed, _MASK_STREAM, *place),
        epoch=0,
        continuations=continuations,
        rules=rules.static,
    )
    stored = StoredMasks.of(masked, segments.lengths)
    counts = stored.counts
    flat = np.empty(2 * len(stored.places), dtype=rules.id_type)
    first = first_rows(2 * counts)
    flat[ranges(first, counts)] = stored.places
    flat[ranges(first + counts, counts)] = stored.seen
    return flat


def _sequences(
    rules: DrawRules,
    drawn: Pairs,
    order: NDArray[np.int64],
    ids: list[NDArray[np.integer]],
    masks: list[NDArray[np.integer]],
) -> Sequences:
    items = [drawn.a_length[order]] if rules.single else [drawn.a_length[order], drawn.b_length[order]]
    nothing = np.empty(0, dtype=rules.id_type)
    return Sequences(
        ids=np.concatenate([nothing, *ids]),
        items=np.stack(items, axis=1).astype("<i4"),
        labels=np.empty(0, dtype=np.uint8) if rules.single else drawn.label[order].astype(np.uint8),
        masks=np.concatenate([nothing, *masks]),
    )
