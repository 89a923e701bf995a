"""From documents to the packs of every epoch.

An epoch is drawn, packed and masked anew from (seed, epoch). Its length is fixed to the number of packs of epoch 0,
though another drawing packs into a few more or less: so pack `n` of a run belongs to epoch `n // packs_per_epoch`,
whatever the global batch, and a run resumes at any step without retracing the epochs before. Of an epoch with more
packs the last ones, which are random ones, are left out; of one with fewer the first ones come twice. Epochs follow one
another without a gap; no incomplete batch is dropped.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Iterator, Sequence
from concurrent.futures import Future
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from tensor3d.data.batch import Pack
from tensor3d.data.indexed import IndexedDataset
from tensor3d.data.masking import MASKED_SHARE, mask_tokens, masked_count, masked_counts
from tensor3d.data.pairs import Pairs, sample_pairs
from tensor3d.data.special import SpecialTokens
from tensor3d.packing import Packs, Plan, assign, lpfhp
from tensor3d.seeds import mix

_STREAM = 2
_KEPT_EPOCHS = 2
"""The epoch that is read and the one that is prepared."""


@dataclass(frozen=True, kw_only=True, eq=False)
class Epoch:
    """What an epoch consists of, before any id is read."""

    pairs: Pairs
    plan: Plan
    packs: Packs
    tokens: NDArray[np.int64]
    """int64 (packs,): tokens in each pack."""
    targets: NDArray[np.int64]
    """int64 (packs,): tokens to guess in each pack."""
    sequences: NDArray[np.int64]
    """int64 (packs,): sequences in each pack."""


@dataclass(frozen=True, kw_only=True)
class Totals:
    """What a group of packs holds."""

    targets: int
    sequences: int
    tokens: int


class PretrainingData:
    """Packs of masked sentence pairs for BERT, by epoch and number. Every method may be called from any thread.

    Args:
        documents: items are sentences.
        special: vocabulary and special ids of the tokenizer that prepared them.
        capacity: token slots of a pack.
        max_length: tokens of a sequence, at most.
        max_sequences: sequences of a pack, at most.
        masked_per_pack: tokens to guess in a pack, at most. None: the share of a full pack and two more, which is close
            to no limit for packing and wastes little of the masked-LM head.
        seed: everything that is drawn depends on it and on the epoch.
        short_probability: share of pairs that aim at a random shorter length.

    Raises:
        ValueError: limits that contradict one another.
    """

    def __init__(
        self,
        documents: IndexedDataset,
        special: SpecialTokens,
        *,
        capacity: int,
        max_length: int,
        max_sequences: int,
        masked_per_pack: int | None = None,
        seed: int,
        short_probability: float = 0.1,
    ) -> None:
        if max_length > capacity:
            raise ValueError(
                f"max_length={max_length} does not fit a pack of {capacity} slots; lower it or raise the capacity."
            )
        if max_sequences < 1:
            raise ValueError(f"max_sequences must be at least 1. Got {max_sequences}.")
        if masked_per_pack is None:
            masked_per_pack = default_masked_per_pack(capacity, max_sequences)
        elif masked_per_pack < masked_count(max_length):
            raise ValueError(
                f"a sequence of max_length={max_length} has {masked_count(max_length)} tokens to guess, more than "
                f"masked_per_pack={masked_per_pack}; raise that or lower max_length."
            )
        if seed < 0:
            raise ValueError(f"seed must be at least 0. Got {seed}.")
        self.documents = documents
        self.special = special
        self.capacity = capacity
        self.max_length = max_length
        self.max_sequences = max_sequences
        self.masked_per_pack = masked_per_pack
        self.seed = seed
        self.short_probability = short_probability
        self._lock = threading.Lock()
        self._epochs: dict[int, Future[Epoch]] = {}
        self._packs_per_epoch: int | None = None

    @property
    def packs_per_epoch(self) -> int:
        """Packs of every epoch: as many as epoch 0 has. The first call draws epoch 0."""
        if self._packs_per_epoch is None:
            self._packs_per_epoch = len(self.epoch(0).packs)
        return self._packs_per_epoch

    def epoch(self, number: int) -> Epoch:
        """The pairs, plan and packs of an epoch; drawn once and kept until others are asked for."""
        with self._lock:
            found = self._epochs.pop(number, None)
            future: Future[Epoch] = Future() if found is None else found
            self._epochs[number] = future
            while len(self._epochs) > _KEPT_EPOCHS:
                del self._epochs[next(iter(self._epochs))]
        if found is None:
            try:
                future.set_result(self._draw(number))
            except BaseException as error:
                with self._lock:
                    self._epochs.pop(number, None)
                future.set_exception(error)
        return future.result()

    def pack(self, epoch: int, index: int) -> Pack:
        """Pack `index` of an epoch; IndexError beyond its packs."""
        return self.packs(epoch, [index])[0]

    def packs(self, epoch: int, indices: Sequence[int]) -> list[Pack]:
        """Several packs of an epoch, built together in a few array operations."""
        drawn = self.epoch(epoch)
        chosen = [drawn.packs[index] for index in indices]
        sequences = np.concatenate(chosen)
        lengths = drawn.pairs.lengths[sequences].astype(np.int64)
        tokens = drawn.pairs.tokens(self.documents, self.special, sequences)
        masked = mask_tokens(
            tokens.ids,
            tokens.guessable,
            lengths,
            sequences=sequences,
            special=self.special,
            seed=self.seed,
            epoch=epoch,
        )
        labels = drawn.pairs.label[sequences].astype(np.int64)

        counts = np.array([len(pack) for pack in chosen])
        last_sequence = np.cumsum(counts)
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
                next_labels=labels[sequence],
            )
            for first, token, sequence, target in zip(
                first_token, _slices(last_token), _slices(last_sequence), _slices(last_masked), strict=True
            )
        ]

    def run_packs(self, numbers: Sequence[int]) -> list[Pack]:
        """Packs by their number in the run: epoch 0 has 0 to packs_per_epoch - 1, then come those of epoch 1."""
        return [pack for epoch, indices in self._locate(numbers) for pack in self.packs(epoch, indices)]

    def run_totals(self, numbers: Sequence[int]) -> Totals:
        """What the packs of these numbers hold, without building them."""
        targets = sequences = tokens = 0
        for epoch, indices in self._locate(numbers):
            drawn = self.epoch(epoch)
            targets += int(drawn.targets[indices].sum())
            sequences += int(drawn.sequences[indices].sum())
            tokens += int(drawn.tokens[indices].sum())
        return Totals(targets=targets, sequences=sequences, tokens=tokens)

    def _locate(self, numbers: Sequence[int]) -> Iterator[tuple[int, list[int]]]:
        """Ascending pack numbers of the run as (epoch, indices in the epoch)."""
        size = self.packs_per_epoch
        epochs = sorted({number // size for number in numbers})
        for epoch in epochs:
            drawn = len(self.epoch(epoch).packs)
            yield epoch, [number % size % drawn for number in numbers if number // size == epoch]

    def _draw(self, number: int) -> Epoch:
        pairs = sample_pairs(
            self.documents,
            max_length=self.max_length,
            seed=self.seed,
            epoch=number,
            short_probability=self.short_probability,
        )
        histogram = np.bincount(pairs.lengths, minlength=self.capacity + 1)
        plan = lpfhp(histogram, self.capacity, self.max_sequences, budget=self.masked_per_pack, cost=masked_count)
        packs = assign(plan, pairs.lengths, np.random.default_rng(mix(self.seed, number, _STREAM)))
        return Epoch(
            pairs=pairs,
            plan=plan,
            packs=packs,
            tokens=packs.totals(pairs.lengths),
            targets=packs.totals(masked_counts(pairs.lengths)),
            sequences=np.diff(packs.offsets),
        )


def default_masked_per_pack(capacity: int, max_sequences: int) -> int:
    """Tokens to guess in a pack: the share of a full pack and two more, or what its sequences can need if less."""
    # Rounding adds at most one half a sequence.
    needed = math.floor(MASKED_SHARE * capacity + max_sequences / 2)
    return max(1, min(math.ceil(MASKED_SHARE * capacity) + 2, needed))


def _slices(ends: NDArray[np.int64]) -> list[slice]:
    begins = [0, *ends[:-1].tolist()]
    return [slice(begin, end) for begin, end in zip(begins, ends.tolist(), strict=True)]
