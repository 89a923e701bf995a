"""From the sequences of an epoch to packs of masked tokens."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from tensor3d.data.epochs import Epoch, Epochs, LengthBuckets, PackingRules
from tensor3d.data.masking import (
    MASKED_SHARE,
    MaskingRules,
    SpecialTokens,
    draws_at,
    mask_tokens,
    masked_count,
    masked_counts,
)
from tensor3d.data.segments import Segments
from tensor3d.data.sources import SampleSource, sequences_of
from tensor3d.packing import PackingPlan

if TYPE_CHECKING:
    from tensor3d.data.packed_batch import Pack

PADDED = "padded"
"""The method of one sequence a pack."""


class PretrainingData:
    """Packs of masked pairs or single texts for BERT, by epoch and number. Every method may be called from any thread.

    Args:
        source: where the sequences come from.
        special: vocabulary and special ids of the tokenizer that prepared them.
        capacity: token slots of a pack.
        max_length: tokens of a sequence, at most.
        max_sequences: sequences of a pack, at most.
        masking: how much of a sequence is guessed, and what the model sees there. Masks that were stored have to be of
            the same rules.
        masked_per_pack: tokens to guess in a pack, at most. None: the share of a full pack and two more, which is close
            to no limit for packing and wastes little of the masked-LM head.
        seed: everything that is drawn depends on it and on the epoch.
        method: a planner's name (`tensor3d.packing.PLANNERS`), or "stream".
        groups: see `PackingRules`; the shards of the source divide among them.
        bins: batches of like length, for the method "padded".
        plans: folder of plan files.
        plan: a plan of this method that was made before, used where it fits the lengths and limits.
        continuations: bool or uint8 (vocab_size,), which pieces go on with the word of the piece before and which end
            theirs (see `word_rows`): whole words are then masked. None: single tokens. Sequences that come with stored
            masks keep those.
        with_draws: also give each token to guess random bits (`Pack.draws`), a function of seed, epoch, sequence and
            place.

    Raises:
        ValueError: limits that contradict one another, or `continuations` of another vocabulary.
    """

    def __init__(
        self,
        source: SampleSource,
        special: SpecialTokens,
        *,
        capacity: int,
        max_length: int,
        max_sequences: int,
        masking: MaskingRules = MaskingRules(),  # noqa: B008  # frozen
        masked_per_pack: int | None = None,
        seed: int,
        method: str = "lpfhp",
        groups: int = 1,
        bins: LengthBuckets | None = None,
        plans: Path | None = None,
        plan: PackingPlan | None = None,
        continuations: NDArray[np.generic] | None = None,
        with_draws: bool = False,
    ) -> None:
        if continuations is not None and continuations.shape != (special.vocab_size,):
            raise ValueError(
                f"continuations are needed for each of the {special.vocab_size} pieces of the vocabulary. Got "
                f"{continuations.shape}; prepare the samples again with their tokenizer."
            )
        if method == PADDED:
            max_sequences = 1
        masked_per_pack = masked_budget(capacity, max_length, max_sequences, masked_per_pack, masking.most)
        self.rules = PackingRules(
            method=method,
            capacity=capacity,
            max_sequences=max_sequences,
            masked_per_pack=masked_per_pack,
            masked_share=masking.most,
            seed=seed,
            groups=groups,
            bins=bins,
            plans=plans,
            plan=plan,
        )
        self.epochs = Epochs(source, self.rules)
        self.special, self.masking = special, masking
        self._continuations, self._with_draws = continuations, with_draws

    @property
    def capacity(self) -> int:
        return self.rules.capacity

    @property
    def max_sequences(self) -> int:
        return self.rules.max_sequences

    @property
    def masked_per_pack(self) -> int:
        return self.rules.masked_per_pack

    @property
    def packs_per_epoch(self) -> int:
        """Packs of every epoch: as many as epoch 0 has. The first call draws epoch 0."""
        return self.epochs.packs_per_epoch

    @property
    def packing_factor(self) -> float:
        """Sequences per pack, on average over epoch 0."""
        return float(self.epochs[0].sequences.mean())

    def pack(self, epoch: int, index: int) -> Pack:
        """Pack `index` of an epoch; IndexError beyond its packs."""
        return self.packs(epoch, [index])[0]

    def packs(self, epoch: int, indices: Sequence[int] | NDArray[np.integer]) -> list[Pack]:
        """Several packs of an epoch; IndexError beyond its packs."""
        return self.build(self.epochs[epoch], indices)

    def build(
        self,
        drawn: Epoch,
        indices: Sequence[int] | NDArray[np.integer],
        segments: Segments | None = None,
        *,
        step: int = 0,
    ) -> list[Pack]:
        """Several packs of an epoch, together in a few array operations.

        Args:
            segments: content of the packs' sequences, pack after pack. None: it is read.
            step: of the run, by which the share that is guessed may change.
        """
        if len(indices) == 0:
            return []
        sequences = sequences_of(drawn.packs, indices)
        if segments is None:
            segments = drawn.drawing.segments(sequences)
        tokens = segments.tokens(self.special)
        lengths = segments.lengths
        if segments.masks is not None:
            if not np.array_equal(segments.masks.counts, masked_counts(lengths, self.masking.at(step))):
                raise ValueError(
                    f"the stored masks are not those of masking with a share of {self.masking.at(step):g}. Take the "
                    "share that they were stored with, the same in all steps."
                )
            masked = segments.masks.apply(tokens.ids, lengths)
        else:
            masked = mask_tokens(
                tokens.ids,
                tokens.guessable,
                lengths,
                sequences=sequences,
                special=self.special,
                seed=self.rules.seed,
                epoch=drawn.number,
                continuations=self._continuations,
                rules=self.masking,
                step=step,
            )

        draws = None
        if self._with_draws:
            draws = draws_at(masked.rows, lengths, sequences=sequences, seed=self.rules.seed, epoch=drawn.number)

        from tensor3d.data.packed_batch import Pack  # brings torch, which planning needs not

        last_sequence = np.cumsum(drawn.sequences[np.asarray(indices, dtype=np.int64)])
        last_token = np.cumsum(lengths)[last_sequence - 1]
        last_masked = np.searchsorted(masked.rows, last_token)
        first_token = np.concatenate(([0], last_token[:-1]))
        return [
            Pack(
                ids=masked.ids[token],
                types=tokens.types[token],
                lengths=lengths[sequence],
                masked=masked.rows[target] - first,
                masked_labels=masked.labels[target],
                next_labels=segments.label[sequence],
                draws=None if draws is None else draws[target],
            )
            for first, token, sequence, target in zip(
                first_token, _slices(last_token), _slices(last_sequence), _slices(last_masked), strict=True
            )
        ]


def masked_budget(
    capacity: int, max_length: int, max_sequences: int, masked_per_pack: int | None, share: float = MASKED_SHARE
) -> int:
    """Tokens to guess in a pack, at most, as it was asked for or by default. ValueError for limits that contradict."""
    if max_length > capacity:
        raise ValueError(
            f"max_length={max_length} does not fit a pack of {capacity} slots; lower it or raise the capacity."
        )
    if max_sequences < 1:
        raise ValueError(f"max_sequences must be at least 1. Got {max_sequences}.")
    if masked_per_pack is None:
        return default_masked_per_pack(capacity, max_sequences, share)
    if masked_per_pack < (needed := masked_count(max_length, share)):
        raise ValueError(
            f"a sequence of max_length={max_length} has {needed} tokens to guess, more than "
            f"masked_per_pack={masked_per_pack}; raise that or lower max_length."
        )
    return masked_per_pack


def default_masked_per_pack(capacity: int, max_sequences: int, share: float = MASKED_SHARE) -> int:
    """Tokens to guess in a pack: the share of a full pack and two more, or what its sequences can need if less."""
    # Rounding adds at most one half a sequence.
    needed = math.floor(share * capacity + max_sequences / 2)
    return max(1, min(math.ceil(share * capacity) + 2, needed))


def _slices(ends: NDArray[np.int64]) -> list[slice]:
    begins = [0, *ends[:-1].tolist()]
    return [slice(begin, end) for begin, end in zip(begins, ends.tolist(), strict=True)]
