"""Which packs a step consists of, and which rank works on which: the same answer on every rank, without asking any."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from tensor3d.data.dataset import PretrainingData
from tensor3d.data.epochs import Epoch
from tensor3d.data.masking import masked_counts
from tensor3d.data.packed_batch import BatchLayout
from tensor3d.packing import Work, attended, deal, imbalance


@dataclass(frozen=True, kw_only=True, eq=False)
class StepPlan:
    """The packs of one step in the order of their slots: micro-batch, data, x, then the z * k packs of a plane."""

    index: int
    epochs: NDArray[np.int64]
    """int64 (packs,): epoch of each pack."""
    packs: NDArray[np.int64]
    """int64 (packs,): its number in that epoch."""
    drawn: Mapping[int, Epoch]
    """The epochs that occur. Whoever builds the step takes them from here and asks for none: which of them a rank has
    packs of depends on the rank."""
    capacity: int
    """Token slots of each pack in this step."""
    targets: int
    """Tokens to guess, over all ranks."""
    sequences: int
    tokens: int
    squares: int
    """Sum of the squared lengths of its sequences: what attention costs."""
    lengths: NDArray[np.int64]
    """int64 (capacity + 1,): how many of its sequences have each length."""
    imbalance: float
    """Most over mean work of a rank, in the micro-batch where that is worst."""


@dataclass(frozen=True, kw_only=True)
class BatchRamp:
    """A global batch that rises through `stages` sizes, from a `stages`-th of its packs on in equal parts, for as many
    steps each; after `steps` it has all. So ModernBERT's batch grows (Warner et al. 2024, arXiv 2412.13663).

    A function of the step alone, whatever the length of the run.

    Raises:
        ValueError: fewer than one stage, several that take no steps, or steps without several stages.
    """

    stages: int = 1
    steps: int = 0

    def __post_init__(self) -> None:
        if self.stages < 1 or self.steps < 0 or (self.stages > 1) != (self.steps > 0):
            raise ValueError(
                "a ramp needs 1 stage and 0 steps, or more stages and at least 1 step. Got "
                f"stages={self.stages} and steps={self.steps}."
            )

    def unit(self, packs: int) -> int:
        """Packs of the first steps, where the last ones have `packs`.

        Raises:
            ValueError: packs that do not divide.
        """
        if packs % self.stages:
            raise ValueError(
                f"a global batch of {packs} packs does not divide by the {self.stages} stages of its ramp. Take a "
                "multiple, or other stages."
            )
        return packs // self.stages

    def before(self, step: int, packs: int) -> int:
        """Packs of all steps before this one, where the last steps have `packs`."""
        between = max(1, self.stages - 1)
        starts = (-(-stage * self.steps // between) for stage in range(self.stages))
        return self.unit(packs) * sum(max(0, step - start) for start in starts)


NO_RAMP = BatchRamp()


class Schedule:
    """The steps of a run. A step takes the next `global_batch` packs of the run, whatever the cube; where they lie in
    it is decided by the balance of work.

    Args:
        data: knows the packs.
        layout: sizes of the cube and of a micro-batch.
        global_batch: packs of a step, over all ranks.
        work: what a pack costs. Packs are then dealt to the slots of the step so that ranks have equal work in every
            micro-batch. None: packs lie in the order in which they come.
        blocks: consecutive data ranks form a block, and a pack goes to the block that its group belongs to.
        ramp: by which the first steps have fewer packs.

    Raises:
        ValueError: numbers that do not divide.
    """

    def __init__(
        self,
        data: PretrainingData,
        layout: BatchLayout,
        *,
        global_batch: int,
        work: Work | None = None,
        blocks: int = 1,
        ramp: BatchRamp = NO_RAMP,
    ) -> None:
        groups, data_ranks, unit = data.rules.groups, layout.shape.data, ramp.unit(global_batch)
        if unit % groups:
            raise ValueError(
                f"a global batch of {unit} packs has no equal share of {groups} groups of shards. Take a "
                "multiple, or other groups."
            )
        if data.rules.bins is not None and data.rules.bins.batch != global_batch:
            raise ValueError(
                f"bins were made for steps of {data.rules.bins.batch} sequences. Got a global batch of {global_batch}."
            )
        if data_ranks % blocks or groups % blocks:
            raise ValueError(
                f"{blocks} blocks of data ranks divide neither or only one of data={data_ranks} and {groups} groups of "
                "shards; both must divide."
            )
        if data.rules.bins is not None:
            # The rows of every bin must divide among the members of y.
            replace(layout, capacity=min(data.rules.bins.width, layout.capacity))
        self._data, self._layout, self._work = data, layout, work
        self._global_batch, self._blocks, self._ramp = global_batch, blocks, ramp

    def first_pack(self, step: int) -> int:
        """Number in the run of the first pack of a step."""
        return self._ramp.before(step, self._global_batch)

    def last_epoch(self, step: int) -> int:
        """The epoch in which a step ends."""
        return (self.first_pack(step + 1) - 1) // self._data.packs_per_epoch

    def step(self, index: int) -> StepPlan:
        # Packs by their numbers in the run: epoch 0 has 0 to packs_per_epoch - 1, then come those of epoch 1.
        number = np.arange(self.first_pack(index), self.first_pack(index + 1))
        size = self._data.packs_per_epoch
        epochs = number // size
        packs = np.empty_like(number)
        sums = np.empty((3, len(number)), dtype=np.int64)
        drawn = {epoch: self._data.epochs[epoch] for epoch in np.unique(epochs).tolist()}
        lengths = []
        for epoch, content in drawn.items():
            here = epochs == epoch
            packs[here] = chosen = content.order[number[here] % size]
            per_pack = (content.tokens, content.squares, content.sequences)
            sums[:, here] = np.stack([values[chosen] for values in per_pack])
            lengths.append(content.lengths_in(chosen))
        tokens, squares, sequences = sums
        each = np.concatenate(lengths)
        costs = (
            None if self._work is None else self._costs(self._work, tokens, squares, _near(self._work, each, sequences))
        )
        slots, unevenness = self._deal(number % self._data.rules.groups, costs)
        return StepPlan(
            index=index,
            epochs=epochs[slots],
            packs=packs[slots],
            drawn=drawn,
            capacity=self._capacity(int(tokens.max())),
            targets=int(masked_counts(each, self._data.masking.at(index)).sum()),
            sequences=int(sequences.sum()),
            tokens=int(tokens.sum()),
            squares=int(squares.sum()),
            lengths=np.bincount(each, minlength=self._layout.capacity + 1),
            imbalance=unevenness,
        )

    def plane(self, data: int, x: int, packs: int | None = None) -> NDArray[np.int64]:
        """int64 (micro-batches, z * k): the slots of the plane at a place on the axes data and x, in a step of so many
        packs. Default: the whole global batch."""
        shape = self._layout.shape
        slots = np.arange(self._global_batch if packs is None else packs)
        return slots.reshape(-1, shape.data, shape.x, self._layout.plane_packs)[:, data, x]

    def _deal(self, group: NDArray[np.int64], costs: NDArray[np.float64] | None) -> tuple[NDArray[np.int64], float]:
        """int64 (packs,): which pack lies in each slot; and how uneven the ranks' work is, if it is weighed."""
        shape, k = self._layout.shape, self._layout.packs_per_rank
        slots = np.arange(len(group)).reshape(-1, self._blocks, shape.data // self._blocks, shape.x, shape.z, k)
        dealt = np.empty_like(slots)
        weighed = costs is not None
        costs = np.ones((len(group), 2)) if costs is None else costs
        for block in range(self._blocks):
            here = np.flatnonzero(group * self._blocks // self._data.rules.groups == block)
            place = dealt[:, block]
            if weighed:
                bins = here[deal(costs[here], place.size // k)]
                # Like beside like: what is uneven between bins then lies between micro-batches, where nobody waits.
                here = bins[np.argsort(costs[bins, -1].sum(axis=1), kind="stable")]
            dealt[:, block] = here.reshape(place.shape)
        per_micro_batch = dealt.reshape(len(dealt), shape.planes * shape.z, k)
        worst = max(imbalance(costs[:, -1], micro_batch) for micro_batch in per_micro_batch)
        return dealt.reshape(-1), worst

    def _costs(
        self, work: Work, tokens: NDArray[np.int64], squares: NDArray[np.int64], near: NDArray[np.int64]
    ) -> NDArray[np.float64]:
        """float64 (packs, 2): tokens, and the work of the device, for which the unused tail is a sequence too."""
        tail = self._layout.capacity - tokens
        device = work.of(
            np.full_like(tokens, self._layout.capacity), squares + tail * tail, near + attended(tail, work.window)
        )
        return np.stack([tokens.astype(np.float64), device], axis=1)

    def _capacity(self, longest: int) -> int:
        bins = self._data.rules.bins
        return self._layout.capacity if bins is None else min(self._layout.capacity, bins.edge(longest))


def _near(work: Work, lengths: NDArray[np.int64], sequences: NDArray[np.int64]) -> NDArray[np.int64]:
    """int64 (packs,): pairs that attend to one another within the window, of packs of so many sequences each."""
    before = np.concatenate(([0], np.cumsum(attended(lengths, work.window))))
    ends = np.cumsum(sequences)
    return np.asarray(before[ends] - before[ends - sequences])
