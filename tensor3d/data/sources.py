"""Where sequences come from: something that draws the sequences of an epoch and can read any of them."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Generic, Protocol, TypeVar

import numpy as np
from numpy.typing import NDArray

from tensor3d.data.indexed_dataset import IndexedDataset
from tensor3d.data.sampling import Pairs, sample_pairs, sample_texts
from tensor3d.data.segments import NO_LABEL, Segments
from tensor3d.ops.seeds import mix
from tensor3d.packing import PackAssignment

_STREAM = 5
Shard = TypeVar("Shard")


class EpochSamples(Protocol):
    """The sequences of an epoch, numbered from 0; those of shard 0 first, then those of shard 1, and so on."""

    @property
    def lengths(self) -> NDArray[np.int32]:
        """int32 (sequences,): tokens of each, the special ones counted."""

    @property
    def offsets(self) -> NDArray[np.int64]:
        """int64 (shards + 1,): shard `s` has the sequences `offsets[s]` to `offsets[s + 1] - 1`."""

    def segments(self, chosen: NDArray[np.integer]) -> Segments:
        """The content of the chosen sequences, in their order. ValueError for one that cannot be read from here."""


class SampleSource(Protocol):
    """Draws epochs. What it draws is a function of its settings and of the epoch, on any rank."""

    @property
    def shards(self) -> int:
        """Parts that the sequences come in, each of which lies on one disk."""

    def draw(self, epoch: int) -> EpochSamples: ...

    def confirm(self, epoch: int, digest: str) -> None:
        """Hears what has become of an epoch, as a hash of its packs. Raises ValueError where other ranks that draw from
        this source have come to something else."""


class ShardSamples(Protocol):
    """The sequences of one shard in an epoch, numbered from 0."""

    @property
    def lengths(self) -> NDArray[np.int32]:
        """int32 (sequences,): tokens of each, the special ones counted."""

    @property
    def labels(self) -> NDArray[np.integer]:
        """(sequences,): 0 where B follows A, 1 where it was drawn at random; (0,) of single texts."""

    def segments(self, chosen: NDArray[np.integer]) -> Segments:
        """The content of the chosen sequences, in their order."""


class Sampler(ABC, Generic[Shard]):
    """Draws the sequences of one shard at a time, so that whoever has a shard can draw it and nobody else need to.

    Args:
        datasets: by shard; None: not on this machine.
        max_length: tokens of a sequence, at most.
    """

    def __init__(self, datasets: Sequence[Shard | None], max_length: int) -> None:
        self._datasets, self.max_length = tuple(datasets), max_length

    @property
    def shards(self) -> int:
        return len(self._datasets)

    @property
    def missing(self) -> list[int]:
        """The shards that are not on this machine."""
        return [number for number, dataset in enumerate(self._datasets) if dataset is None]

    def draw(self, shard: int, epoch: int) -> ShardSamples:
        """ValueError for a shard that is not here."""
        dataset = self._datasets[shard]
        if dataset is None:
            raise ValueError(f"shard {shard} of {self.shards} is not on this machine.")
        return self._draw(dataset, shard, epoch)

    @abstractmethod
    def _draw(self, dataset: Shard, shard: int, epoch: int) -> ShardSamples: ...


class LocalSource:
    """A `SampleSource` that reads all shards here.

    Raises:
        ValueError: no shard at all, or one that is not here.
    """

    def __init__(self, sampler: Sampler[Any]) -> None:
        if sampler.missing or not sampler.shards:
            raise ValueError(
                f"of {sampler.shards} shards, shard {', '.join(map(str, sampler.missing)) or 0} is not on this "
                "machine. Copy its files here, or exchange sequences between data ranks that have all shards among "
                "them."
            )
        self._sampler = sampler

    @property
    def shards(self) -> int:
        return self._sampler.shards

    def draw(self, epoch: int) -> ConcatSamples:
        """The sequences of every shard."""
        return ConcatSamples([self._sampler.draw(shard, epoch) for shard in range(self.shards)])

    def confirm(self, epoch: int, digest: str) -> None:
        """Every rank draws for itself, and this one asks nobody."""


class ShardedPairs(LocalSource):
    """Sentence pairs, or single texts, drawn from the documents of each shard by themselves.

    Args:
        shards: documents whose items are sentences. None: not on this machine.
        max_length: tokens of a pair, at most.
        seed: everything that is drawn depends on it, on the shard and on the epoch.
        short_probability: share of pairs that aim at a random shorter length.
        single: single texts instead of pairs (`sample_texts`).

    Raises:
        ValueError: no shard at all, or one that is not here.
    """

    def __init__(
        self,
        shards: Sequence[IndexedDataset | None],
        *,
        max_length: int,
        seed: int,
        short_probability: float = 0.1,
        single: bool = False,
    ) -> None:
        if seed < 0:
            raise ValueError(f"seed must be at least 0. Got {seed}.")
        sampler = PairSampler(
            shards, max_length=max_length, seed=seed, short_probability=short_probability, single=single
        )
        super().__init__(sampler)


class PairSampler(Sampler[IndexedDataset]):
    """Of sentence pairs, or single texts; see `ShardedPairs`."""

    def __init__(
        self,
        datasets: Sequence[IndexedDataset | None],
        *,
        max_length: int,
        seed: int,
        short_probability: float,
        single: bool = False,
    ) -> None:
        super().__init__(datasets, max_length)
        self._short_probability = short_probability
        self._single = single
        # A single shard is drawn as a corpus that was never cut into shards.
        several = self.shards > 1
        self._seeds = [mix(seed, _STREAM, shard) if several else seed for shard in range(self.shards)]

    def _draw(self, dataset: IndexedDataset, shard: int, epoch: int) -> ShardPairs:
        sample = sample_texts if self._single else sample_pairs
        pairs = sample(
            dataset,
            max_length=self.max_length,
            seed=self._seeds[shard],
            epoch=epoch,
            short_probability=self._short_probability,
        )
        return ShardPairs(dataset=dataset, pairs=pairs)


@dataclass(frozen=True, kw_only=True, eq=False)
class ShardPairs:
    """The pairs or single texts of one shard, and where their ids are."""

    dataset: IndexedDataset
    pairs: Pairs

    @property
    def lengths(self) -> NDArray[np.int32]:
        return self.pairs.lengths

    @property
    def labels(self) -> NDArray[np.integer]:
        return self.pairs.label[self.pairs.label != NO_LABEL]

    def segments(self, chosen: NDArray[np.integer]) -> Segments:
        return self.pairs.segments(self.dataset, chosen)


class ConcatSamples:
    """A `EpochSamples` of which every shard is at hand."""

    def __init__(self, shards: Sequence[ShardSamples]) -> None:
        self._shards = tuple(shards)
        lengths = [shard.lengths for shard in shards]
        self.offsets = np.concatenate(([0], np.cumsum([len(of_shard) for of_shard in lengths], dtype=np.int64)))
        self.lengths = np.concatenate(lengths)

    def segments(self, chosen: NDArray[np.integer]) -> Segments:
        if len(self._shards) == 1:
            return self._shards[0].segments(chosen)
        shard_of = np.searchsorted(self.offsets, chosen, side="right") - 1
        parts = [
            shard.segments(chosen[shard_of == number] - self.offsets[number])
            for number, shard in enumerate(self._shards)
        ]
        return in_order(parts, shard_of)


def in_order(parts: Sequence[Segments], part_of: NDArray[np.integer]) -> Segments:
    """Puts together what several hold: the n-th sequence is the next one of part `part_of[n]`."""
    grouped = np.argsort(part_of, kind="stable")
    place = np.empty(len(part_of), dtype=np.int64)
    place[grouped] = np.arange(len(part_of))
    return Segments.concatenate(parts).take(place)


def sequences_of(packs: PackAssignment, chosen: Sequence[int] | NDArray[np.integer]) -> NDArray[np.int64]:
    """int64 (sequences,): those of the chosen packs, pack after pack. IndexError for a pack that is not there."""
    return np.concatenate([np.empty(0, dtype=np.int64), *(packs[int(index)] for index in chosen)])
