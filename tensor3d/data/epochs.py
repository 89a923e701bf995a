"""Epochs of packs: drawn, packed and put in order, each a function of (settings, epoch).

The length of an epoch is fixed to that of epoch 0, though another drawing packs into a few more or less: so pack `n`
of a run belongs to epoch `n // packs_per_epoch`, whatever the global batch, and a run resumes at any step without
retracing the epochs before. Of an epoch with more packs the last ones, which are random ones, are left out; of one with
fewer the first ones come twice. Epochs follow one another without a gap; no incomplete batch is dropped (but of bins,
see `LengthBuckets`).
"""

from __future__ import annotations

import hashlib
import threading
from concurrent.futures import Future
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from tensor3d.data.array_utils import ranges
from tensor3d.data.masking import MASKED_SHARE, masked_counts
from tensor3d.data.sources import EpochSamples, SampleSource
from tensor3d.files import make_folder
from tensor3d.ops.seeds import mix
from tensor3d.packing import (
    PLANNERS,
    Limits,
    PackAssignment,
    PackingPlan,
    StreamPacker,
    assign,
    fingerprint_of,
    load_plan,
    save_plan,
)

# --- Batches of sequences of like length, as LDDL has them: the baseline that packing is measured against -------------


@dataclass(frozen=True, kw_only=True)
class LengthBuckets:
    """Every step draws its sequences, one a pack, from one bin of lengths, and all ranks from the same one; packs are
    as long as the bin's longest sequence may be. What is left of all bins at the end is mixed, shortest first.

    Raises:
        ValueError: a width or batch below 1.
    """

    width: int
    """Tokens: bin `i` has the lengths from `i * width + 1` to `(i + 1) * width`."""
    batch: int
    """Sequences of a step, over all ranks."""

    def __post_init__(self) -> None:
        if self.width < 1 or self.batch < 1:
            raise ValueError(f"width and batch of bins must be at least 1. Got {self.width} and {self.batch}.")

    def edge(self, length: int) -> int:
        """The length to which the bin of `length` is padded."""
        return -(-length // self.width) * self.width

    def order(self, lengths: NDArray[np.integer], rng: np.random.Generator) -> NDArray[np.int64]:
        """int64 (sequences,): an order in which every `batch` consecutive sequences are of one bin, the left over ones
        of neighbouring bins; what is too few for a batch comes last.

        Args:
            lengths: whole numbers (sequences,), already in random order.
            rng: decides the order of the batches.
        """
        bin_of = (np.asarray(lengths) - 1) // self.width
        sequences = np.argsort(bin_of, kind="stable")
        counts = np.bincount(bin_of[sequences])
        place = np.arange(len(sequences)) - np.repeat(np.cumsum(counts) - counts, counts)
        full = place < np.repeat(counts // self.batch * self.batch, counts)
        sequences = np.concatenate([sequences[full], sequences[~full]])
        whole = len(sequences) // self.batch * self.batch
        batches = rng.permutation(sequences[:whole].reshape(-1, self.batch))
        return np.concatenate([batches.reshape(-1), sequences[whole:]])


# --- Epochs of packs --------------------------------------------------------------------------------------------------

STREAM = "stream"
"""The method that packs sequences as they come, without a plan."""
_STREAM = 2
_ORDER_STREAM = 6
_KEPT_EPOCHS = 2
"""The epoch that is read and the one that is prepared."""


@dataclass(frozen=True, kw_only=True, eq=False)
class Epoch:
    """What an epoch consists of, before any id is read."""

    number: int
    drawing: EpochSamples
    packs: PackAssignment
    """The packs of group 0, then those of group 1, and so on."""
    order: NDArray[np.int64]
    """int64 (packs_per_epoch,): the packs in the order of the run; pack `n` is one of group `n % groups`."""
    tokens: NDArray[np.int64]
    """int64 (packs,): tokens in each pack."""
    squares: NDArray[np.int64]
    """int64 (packs,): sum of the squared lengths in each pack."""
    targets: NDArray[np.int64]
    """int64 (packs,): tokens to guess in each pack, at most: as many, where the share is the same in all steps."""
    sequences: NDArray[np.int64]
    """int64 (packs,): sequences in each pack."""

    def lengths_in(self, packs: NDArray[np.int64]) -> NDArray[np.int64]:
        """int64 (sequences,): lengths of the sequences in these packs, one pack after another."""
        held = ranges(self.packs.offsets[packs], self.sequences[packs])
        return self.drawing.lengths[self.packs.sequences[held]].astype(np.int64)

    @cached_property
    def digest(self) -> str:
        """A hash of everything that is decided about the epoch: equal on all ranks, or they would train on different
        packs without noticing."""
        content = hashlib.sha256()
        for array in (self.drawing.lengths, self.packs.offsets, self.packs.sequences, self.order):
            content.update(np.ascontiguousarray(array).view(np.uint8).data)
        return content.hexdigest()


@dataclass(frozen=True, kw_only=True)
class PackingRules:
    """How the sequences of an epoch become packs.

    Raises:
        ValueError: an unknown method, a number below 1, bins of packs that hold several sequences.
    """

    method: str
    """A planner's name, or "stream"."""
    capacity: int
    """Token slots of a pack."""
    max_sequences: int
    """Sequences of a pack, at most."""
    masked_per_pack: int
    """Tokens to guess in a pack, at most."""
    seed: int
    masked_share: float = MASKED_SHARE
    """Share of a sequence's tokens to guess, at most."""
    groups: int = 1
    """Consecutive shards form a group, and a pack has sequences of one group only. Groups take turns in the order of
    packs, so a global batch has the same share of each."""
    bins: LengthBuckets | None = None
    plans: Path | None = None
    """Folder of plan files; an epoch that has one there is not planned again."""
    plan: PackingPlan | None = None
    """A plan of this method that was made before; it serves every epoch and group whose lengths it holds."""

    def __post_init__(self) -> None:
        known = (*PLANNERS, STREAM)
        if self.method not in known:
            raise ValueError(f"the packing method must be one of {', '.join(known)}. Got {self.method!r}.")
        for name in ("capacity", "max_sequences", "masked_per_pack", "groups"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1. Got {getattr(self, name)}.")
        if self.seed < 0:
            raise ValueError(f"seed must be at least 0. Got {self.seed}.")
        if self.bins is not None and (self.method != "padded" or self.groups > 1):
            raise ValueError(
                f'bins are for the method "padded" with one group. Got {self.method!r} and {self.groups} groups.'
            )

    @property
    def limits(self) -> Limits:
        """Of a pack. Tokens to guess are a sequence's cost: a function of its length."""
        costs = tuple(masked_counts(np.arange(self.capacity + 1), self.masked_share).tolist())
        return Limits(
            capacity=self.capacity, max_sequences=self.max_sequences, budget=self.masked_per_pack, costs=costs
        )


class Epochs:
    """The epochs of a run; the two latest are kept. Every method may be called from any thread.

    Drawing may be a collective (see `RemotePairs`). Then only what is the same on all ranks may ask for an epoch.

    Raises:
        ValueError: shards that do not divide among the groups.
    """

    def __init__(self, source: SampleSource, rules: PackingRules) -> None:
        if source.shards % rules.groups:
            raise ValueError(
                f"{source.shards} shards do not divide among {rules.groups} groups. Prepare the corpus with a multiple "
                "of them, or choose another number of groups."
            )
        self.source, self.rules = source, rules
        self._lock = threading.Lock()
        self._kept: dict[int, Future[Epoch]] = {}
        self._packs_per_epoch: int | None = None

    @property
    def packs_per_epoch(self) -> int:
        """Packs of every epoch: as many as epoch 0 has. The first call draws epoch 0."""
        if self._packs_per_epoch is None:
            self._packs_per_epoch = len(self[0].order)
        return self._packs_per_epoch

    def __getitem__(self, number: int) -> Epoch:
        """An epoch; drawn once and kept until others are asked for."""
        with self._lock:
            found = self._kept.get(number)
            future: Future[Epoch] = Future() if found is None else found
            self._kept[number] = future
            while len(self._kept) > _KEPT_EPOCHS:
                del self._kept[min(self._kept)]
        if found is None:
            try:
                future.set_result(self._draw(number))
            except BaseException as error:
                with self._lock:
                    self._kept.pop(number, None)
                future.set_exception(error)
        return future.result()

    def plan(self, number: int, group: int, lengths: NDArray[np.integer]) -> PackingPlan:
        """The plan of one group of an epoch, from its file where there is one."""
        rules = self.rules
        histogram = np.bincount(lengths, minlength=rules.capacity + 1)
        path = self.plan_path(number, group)
        made, limits = rules.plan, rules.limits
        if made is not None and made.limits == limits and np.array_equal(made.histogram(), histogram):
            return made
        if path is not None and path.exists():
            return load_plan(path, fingerprint_of(histogram, limits, rules.method))
        return PLANNERS[rules.method](
            histogram, limits.capacity, limits.max_sequences, budget=limits.budget, costs=limits.costs
        )

    def save_plan(self, number: int) -> list[Path]:
        """Plans an epoch and writes the plan files that are missing; returns their paths.

        Raises:
            ValueError: no folder of plans, a method without plans, or a file that is there belongs to other data.
        """
        if self.rules.plans is None or self.rules.method == STREAM:
            raise ValueError(f"there is no plan to be saved: plans={self.rules.plans}, method {self.rules.method!r}.")
        make_folder(self.rules.plans, "data.plans")
        drawing = self.source.draw(number)
        written = []
        for group in range(self.rules.groups):
            path = self.plan_path(number, group)
            lengths = drawing.lengths[self._sequences_of(drawing, group)]
            plan = self.plan(number, group, lengths)
            assert path is not None
            if not path.exists():
                histogram = np.bincount(lengths, minlength=self.rules.capacity + 1)
                save_plan(plan, path, fingerprint_of(histogram, self.rules.limits, self.rules.method))
                written.append(path)
        return written

    def plan_path(self, number: int, group: int) -> Path | None:
        if self.rules.plans is None:
            return None
        return self.rules.plans / f"epoch-{number:05d}-group-{group}.json"

    def _draw(self, number: int) -> Epoch:
        drawing = self.source.draw(number)
        parts = [self._pack(number, group, drawing) for group in range(self.rules.groups)]
        packs = PackAssignment(
            offsets=np.concatenate(([0], np.cumsum(np.concatenate([np.diff(part.offsets) for part in parts])))),
            sequences=np.concatenate([part.sequences for part in parts]),
        )
        lengths = drawing.lengths.astype(np.int64)
        epoch = Epoch(
            number=number,
            drawing=drawing,
            packs=packs,
            order=self._order(number, packs.totals(lengths), [len(part) for part in parts]),
            tokens=packs.totals(lengths),
            squares=packs.totals(lengths * lengths),
            targets=packs.totals(masked_counts(lengths, self.rules.masked_share)),
            sequences=np.diff(packs.offsets),
        )
        self.source.confirm(number, epoch.digest)
        return epoch

    def _pack(self, number: int, group: int, drawing: EpochSamples) -> PackAssignment:
        """The packs of one group, with the numbers that the sequences have in the whole epoch."""
        rules = self.rules
        own = self._sequences_of(drawing, group)
        lengths = drawing.lengths[own]
        rng = np.random.default_rng(mix(rules.seed, number, _STREAM, *([group] if rules.groups > 1 else [])))
        if rules.method == STREAM:
            packs = self._stream(lengths, rng)
        else:
            packs = assign(self.plan(number, group, lengths), lengths, rng)
        return PackAssignment(offsets=packs.offsets, sequences=packs.sequences + own.start)

    def _stream(self, lengths: NDArray[np.integer], rng: np.random.Generator) -> PackAssignment:
        limits = self.rules.limits
        packer = StreamPacker(limits.capacity, limits.max_sequences, budget=limits.budget, costs=limits.costs)
        shuffled = rng.permutation(len(lengths))
        packs = PackAssignment.of(packer.feed(lengths[shuffled].tolist()) + packer.flush())
        return PackAssignment(offsets=packs.offsets, sequences=shuffled[packs.sequences])

    def _order(self, number: int, tokens: NDArray[np.int64], counts: list[int]) -> NDArray[np.int64]:
        bins, groups = self.rules.bins, len(counts)
        available = np.arange(len(tokens))
        if bins is not None:
            rng = np.random.default_rng(mix(self.rules.seed, number, _ORDER_STREAM))
            available = bins.order(tokens, rng)
        size = self.packs_per_epoch if number else groups * max(counts)
        if bins is not None and not number:
            # Steps begin with an epoch, so that no step has sequences of two bins because it spans two epochs.
            size = max(1, len(tokens) // bins.batch) * bins.batch
        place = np.arange(size)
        first = np.concatenate(([0], np.cumsum(counts[:-1], dtype=np.int64)))
        group = place % groups
        return available[first[group] + place // groups % np.array(counts)[group]]

    def _sequences_of(self, drawing: EpochSamples, group: int) -> slice:
        per_group = self.source.shards // self.rules.groups
        first, end = drawing.offsets[group * per_group], drawing.offsets[(group + 1) * per_group]
        return slice(int(first), int(end))
