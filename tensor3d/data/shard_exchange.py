"""Sequences that lie on other ranks' disks (Zeng et al., 2022, section 4: exchange of samples between ranks).

Each data rank can read its own shards only. It draws the pairs of these; their lengths, two or four bytes each, go to
everybody when an epoch begins, so that every rank knows the packs and steps of all ranks as if it could read all
shards. What is in a pack is then the same as without exchange, bit for bit; only where its ids are read differs. Before
a round of steps each rank sends the sequences that others will need and it has, in one all-to-all of uneven parts.

All of it happens in one background thread, on the host, in the same order on all ranks.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from time import perf_counter
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from tensor3d.data.indexed_dataset import IndexedDataset
from tensor3d.data.segments import Segments, encoded_sizes
from tensor3d.data.sources import ConcatSamples, PairSampler, Sampler, in_order

if TYPE_CHECKING:
    from tensor3d.distributed.host_all_to_all import HostAllToAll


class RemoteSource:
    """A `Source` of which each data rank reads a part: shard `s` of `S` belongs to data rank `s * data // S`.

    `draw` is collective: every member of `everyone` draws the same epochs in the same order.

    Args:
        sampler: draws the shards of this rank; those of other ranks are not touched and may be missing.
        everyone: the peers along the data axis.

    Raises:
        ValueError: a shard of this rank is missing, or shards that do not divide among the data ranks.
    """

    def __init__(self, sampler: Sampler[Any], everyone: HostAllToAll) -> None:
        own = shards_of(sampler.shards, everyone.size, everyone.index)
        missing = [shard for shard in own if shard in sampler.missing]
        if missing:
            raise ValueError(
                f"data rank {everyone.index} of {everyone.size} needs shards {own.start} to {own.stop - 1} of "
                f"{sampler.shards}, and shard {', '.join(map(str, missing))} is not on its machine. Copy its files "
                "there."
            )
        if max(sampler.max_length, 2) >= 2**31:
            raise ValueError(f"max_length must be below 2**31. Got {sampler.max_length}.")
        self._own, self._everyone, self._sampler = own, everyone, sampler
        self._wire = np.dtype(np.uint16 if sampler.max_length < 2**16 else np.int32)

    @property
    def shards(self) -> int:
        return self._sampler.shards

    def draw(self, epoch: int) -> RemoteEpochSamples:
        """The own shards' sequences, and everybody's lengths. PeerError where another rank could not draw its own."""
        try:
            own = ConcatSamples([self._sampler.draw(shard, epoch) for shard in self._own])
        except Exception as error:
            self._everyone.abort(f"{type(error).__name__}: {error}")
            raise
        counts = self._everyone.all_gather(np.diff(own.offsets))
        lengths = self._everyone.all_gather(own.lengths.astype(self._wire))
        offsets = np.concatenate(([0], np.cumsum(np.concatenate(counts))))
        return RemoteEpochSamples(
            lengths=np.concatenate(lengths).astype(np.int32),
            offsets=offsets,
            owners=offsets[:: len(self._own)],
            own=own,
            first=int(offsets[self._own.start]),
        )

    def confirm(self, epoch: int, digest: str) -> None:
        """Compares the packs of an epoch with everybody's, before the first of them is exchanged."""
        digests = self._everyone.all_gather(np.frombuffer(bytes.fromhex(digest), dtype=np.uint8))
        different = [rank for rank, other in enumerate(digests) if other.tobytes().hex() != digest]
        if different:
            raise ValueError(
                f"data rank {different[0]} has packed epoch {epoch} otherwise than data rank {self._everyone.index}. "
                "Use the same plan files, and the same versions of Python, numpy and scipy, on all machines."
            )


class RemotePairs(RemoteSource):
    """Sentence pairs, or single texts, of which each data rank draws those of its own shards.

    Args:
        shards: documents whose items are sentences; those of other ranks may be None.
        everyone: the peers along the data axis.
        max_length, seed, short_probability, single: see `ShardedPairs`.

    Raises:
        ValueError: see `RemoteSource`.
    """

    def __init__(
        self,
        shards: Sequence[IndexedDataset | None],
        everyone: HostAllToAll,
        *,
        max_length: int,
        seed: int,
        short_probability: float = 0.1,
        single: bool = False,
    ) -> None:
        sampler = PairSampler(
            shards, max_length=max_length, seed=seed, short_probability=short_probability, single=single
        )
        super().__init__(sampler, everyone)


def shards_of(shards: int, ranks: int, index: int) -> range:
    """The shards of data rank `index`. Raises ValueError where they do not divide among the ranks."""
    if shards % ranks:
        raise ValueError(
            f"{shards} shards do not divide among data={ranks}. Prepare the corpus with a multiple of {ranks} shards, "
            "or choose another number of data ranks."
        )
    each = shards // ranks
    return range(index * each, (index + 1) * each)


@dataclass(frozen=True, kw_only=True, eq=False)
class RemoteEpochSamples:
    """A `EpochSamples` of which this rank can read its own shards."""

    lengths: NDArray[np.int32]
    offsets: NDArray[np.int64]
    owners: NDArray[np.int64]
    """int64 (data ranks + 1,): data rank `d` has the sequences `owners[d]` to `owners[d + 1] - 1`."""
    own: ConcatSamples
    first: int
    """Number of the first own sequence."""

    def segments(self, chosen: NDArray[np.integer]) -> Segments:
        chosen = np.asarray(chosen) - self.first
        if len(chosen) and not (chosen.min() >= 0 and chosen.max() < len(self.own.lengths)):
            raise ValueError("a sequence of another data rank's shard cannot be read here; it comes by exchange.")
        return self.own.segments(chosen)

    def owner(self, chosen: NDArray[np.integer]) -> NDArray[np.int64]:
        """int64 (sequences,): the data rank that has each sequence."""
        return np.searchsorted(self.owners, chosen, side="right") - 1


@dataclass(frozen=True, kw_only=True, eq=False)
class FetchRequest:
    """What the peers need of one epoch."""

    drawing: RemoteEpochSamples
    sequences: Sequence[NDArray[np.int64]]
    """int64 (sequences,) for each peer: those it needs, in the order in which it needs them."""


@dataclass(frozen=True, kw_only=True)
class ExchangeOptions:
    """How sequences travel.

    Raises:
        ValueError: a number below 1.
    """

    every: int = 4
    """Steps of which the sequences move together: fewer and larger messages, more steps in memory."""
    within: int | None = None
    """Data ranks, at most, among which sequences move, consecutive ones; for example those of a node. The packs must
    then come from groups of shards (`PackingRules.groups`) that lie within as many. None: all."""

    def __post_init__(self) -> None:
        if self.every < 1 or (self.within is not None and self.within < 1):
            raise ValueError(f"every and within must be at least 1. Got {self.every} and {self.within}.")


def check_within(options: ExchangeOptions, ranks: int, groups: int) -> None:
    """Raises ValueError where sequences cannot stay within that many data ranks."""
    if options.within is None or options.within >= ranks:
        return
    blocks = ranks // options.within
    if ranks % options.within or groups % blocks:
        raise ValueError(
            f"an exchange within {options.within} of data={ranks} ranks needs a number of groups that is a multiple of "
            f"{ranks} / {options.within}, and that is whole. Got {groups} groups. Set data.groups, or another number."
        )


class ShardExchange:
    """Moves sequences to the ranks that need them. Every peer calls `fetch` with the same list, in the same order.

    Args:
        everyone: the peers along the data axis.
        near: those of them among which sequences move, consecutive ones. None: all.
        vocab_size: decides whether an id travels in two bytes or four.
    """

    rounds: int
    """Calls of `fetch` that have ended well."""
    received_bytes: int
    """Bytes of the sequences that came from others."""
    seconds: float
    """Spent in `fetch`, in the background."""

    def __init__(self, everyone: HostAllToAll, near: HostAllToAll | None = None, *, vocab_size: int) -> None:
        self.everyone, self.near = everyone, near or everyone
        self.rounds = self.received_bytes = 0
        self.seconds = 0.0
        self._first = everyone.index // self.near.size * self.near.size
        self._vocab_size = vocab_size

    @property
    def data_ranks(self) -> range:
        """Those among which sequences move."""
        return range(self._first, self._first + self.near.size)

    @property
    def blocks(self) -> int:
        """Parts of the data axis that exchange nothing with one another."""
        return self.everyone.size // self.near.size

    def abort(self, reason: str) -> None:
        """Tells all peers that this rank cannot go on."""
        for peers in {id(peers): peers for peers in (self.everyone, self.near)}.values():
            peers.abort(reason)

    def close(self) -> None:
        """Leaves all peers, also in the middle of a round; a second call does nothing."""
        self.near.close()
        self.everyone.close()

    def fetch(self, wanted: Sequence[FetchRequest]) -> list[Segments]:
        """What this rank wants of each, in its order."""
        start = perf_counter()
        near, me = self.near, self.near.index
        kind = self._kind(wanted)
        owners = [[self._owner(want.drawing, sequences) for sequences in want.sequences] for want in wanted]
        parts = []
        for peer in range(near.size):
            mine = []
            for want, owner in zip(wanted, owners, strict=True):
                segments = want.drawing.segments(want.sequences[peer][owner[peer] == me])
                segments.check(self._vocab_size)  # an id beyond the type on the wire would become another one
                mine.append(segments.encode(kind))
            parts.append(np.concatenate(mine))
        # (wanted, peers) lengths of what comes to this rank.
        lengths = [
            [want.drawing.lengths[want.sequences[me][owner[me] == peer]] for peer in range(near.size)]
            for want, owner in zip(wanted, owners, strict=True)
        ]
        sizes = [sum(int(encoded_sizes(row[peer]).sum()) for row in lengths) for peer in range(near.size)]
        before = near.received_bytes
        received = near.all_to_all(parts, sizes=sizes)
        self.received_bytes += near.received_bytes - before
        self.rounds += 1
        taken = [0] * near.size
        result = []
        for row, owner in zip(lengths, owners, strict=True):
            pieces = []
            for peer, here in enumerate(row):
                end = taken[peer] + int(encoded_sizes(here).sum())
                pieces.append(Segments.decode(received[peer][taken[peer] : end], here))
                taken[peer] = end
            result.append(in_order(pieces, owner[me]))
        self.seconds += perf_counter() - start
        return result

    def _owner(self, drawing: RemoteEpochSamples, sequences: NDArray[np.int64]) -> NDArray[np.int64]:
        """int64 (sequences,): the peer that has each."""
        owner = drawing.owner(sequences) - self._first
        outside = (owner < 0) | (owner >= self.near.size)
        if outside.any():
            raise ValueError(
                f"a pack has sequences of data rank {int(owner[outside][0]) + self._first}, not one of the data ranks "
                f"{self.data_ranks.start} to {self.data_ranks.stop - 1} that exchange. Choose groups of shards in them."
            )
        return owner

    def _kind(self, wanted: Sequence[FetchRequest]) -> np.dtype[np.generic]:
        longest = max(int(want.drawing.lengths.max()) for want in wanted)
        return np.dtype(np.uint16 if max(self._vocab_size - 1, longest) < 2**16 else np.int32)
