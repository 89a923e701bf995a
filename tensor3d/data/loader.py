"""Steps of packed batches, built in the background."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field, is_dataclass
from types import TracebackType
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from tensor3d.attention.varlen import order_of
from tensor3d.data.dataset import PretrainingData
from tensor3d.data.masking import masked_count
from tensor3d.data.packed_batch import BatchLayout, Pack, PackedBatch, collate, fit_packs_per_rank
from tensor3d.data.segments import Segments
from tensor3d.data.shard_exchange import FetchRequest, RemoteEpochSamples, ShardExchange
from tensor3d.data.sources import sequences_of
from tensor3d.data.step_schedule import NO_RAMP, BatchRamp, Schedule, StepPlan
from tensor3d.distributed.cube_shape import CubeShape
from tensor3d.packing import Work

# --- Batches on their way to a device, beside what it computes --------------------------------------------------------
#
# A copy that is issued where a batch is needed stands in line behind the step before, and the step waits for it. So the
# loader's own thread copies, on a stream of its own, as soon as a batch is built. Three things make that right:
#
# - the host memory is pinned, or a copy would not run beside the computation;
# - who takes the batch lets its stream wait for the copies (the device does; the host goes on at once);
# - memory that one stream has taken from the allocator and another one uses must not be given away before the other is
#   done with it: `record_stream` tells the allocator.

Prepare = Callable[[PackedBatch], object]


def settle(batch: PackedBatch) -> None:
    """Has all worked out and kept that layers would else find out on the host about the sequences, and copy: from
    memory that is not pinned, for which a host waits until the device has done everything before."""
    sequences = batch.sequences
    _ = sequences.grouping, sequences.positions
    if batch.read is not None:
        sequences.grouping_of(batch.read)
        order_of(batch.read, sequences)


@dataclass(frozen=True, kw_only=True, eq=False)
class DeviceBatch:
    """The batches of one step, under way or there."""

    batches: list[PackedBatch]
    copied: torch.cuda.Event | None = None
    """None: they need no copy."""

    def take(self) -> list[PackedBatch]:
        """The batches, for the current stream of their device. Waits for nothing on the host."""
        if self.copied is not None:
            stream = torch.cuda.current_stream(self.batches[0].ids.device)
            stream.wait_event(self.copied)
            for tensor in tensors_of(self.batches):
                tensor.record_stream(stream)
        return self.batches


class DevicePrefetcher:
    """Sends batches to a device, from a thread of the loader; to the CPU there is no way.

    Args:
        prepare: is given each batch where it has come to a GPU, still in the background: what a batch works out once
            and keeps (`cached_property`) and has to copy is then there, too.
    """

    def __init__(self, device: torch.device, prepare: Prepare = settle) -> None:
        if device.type == "cuda" and device.index is None:
            device = torch.device("cuda", torch.cuda.current_device())  # a background thread has one of its own
        self._device, self._prepare = device, prepare
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None

    def send(self, batches: Sequence[PackedBatch]) -> DeviceBatch:
        """Begins to copy batches in ordinary memory."""
        if self._stream is None:
            return DeviceBatch(batches=[batch.to(self._device) for batch in batches])
        with torch.cuda.device(self._device), torch.cuda.stream(self._stream):
            sent = [batch.pin_memory().to(self._device) for batch in batches]
            for batch in sent:
                self._prepare(batch)
            copied = torch.cuda.Event()
            copied.record()
        return DeviceBatch(batches=sent, copied=copied)


def tensors_of(value: object) -> Iterator[Tensor]:
    """Every tensor in dataclasses, lists, tuples and mappings, also what a dataclass has cached."""
    if isinstance(value, Tensor):
        yield value
    elif is_dataclass(value) and not isinstance(value, type):
        yield from tensors_of(vars(value))
    elif isinstance(value, Mapping):
        for each in value.values():
            yield from tensors_of(each)
    elif isinstance(value, list | tuple):
        for each in value:
            yield from tensors_of(each)


# --- Steps of packed batches, built in the background -----------------------------------------------------------------


@dataclass(frozen=True, kw_only=True, eq=False)
class TrainBatch:
    """What one rank needs for one step of the optimiser. The totals are those of the whole step, over all planes and
    micro-batches; they follow from the plan of the epoch, so no rank has to ask another."""

    index: int
    batches: list[PackedBatch]
    """This rank's micro-batches."""
    targets: int
    """Tokens to guess."""
    sequences: int
    tokens: int
    """Tokens in sequences; unused slots are not counted."""
    squares: int
    """Sum of the squared lengths of its sequences."""
    lengths: NDArray[np.int64]
    """int64 (longest + 1,): how many of its sequences have each length."""
    fill: float
    """Share of the token slots that hold a token, 0 to 1."""
    imbalance: float = 1.0
    """Most over mean work of a rank, in the micro-batch where that is worst; 1 where work is not weighed."""
    digests: Mapping[int, str] = field(default_factory=dict)
    """By epoch, a hash of all its packs: the same on all ranks, or they work on different steps."""


class _Built(NamedTuple):
    step: TrainBatch
    delivery: DeviceBatch
    """Of its batches."""


Fetched = dict[tuple[int, int], Segments]
"""Content of this rank's packs by step and epoch, where it does not come from the epoch's drawing."""


class Loader:
    """Steps for one rank, without end. Step `i` is a function of the data, the global batch and `i`: the same packs on
    any cube and after any interruption.

    A context manager; `close` (also by leaving it) ends the background threads. Building starts at once.

    Args:
        data: where the packs come from.
        global_batch: packs of a step, over all ranks.
        shape, rank: the cube, and this rank of it.
        packs_per_rank: k; a micro-batch has data * x * z * k packs. None: the largest, one micro-batch a step.
        start_step: index of the first step.
        end_step: index after the last step; nothing is built beyond it. None: no end.
        lookahead: steps that are built ahead, at least 1; with an exchange, rounds of steps.
        device: where the batches are delivered. To a GPU they are copied in the background, as soon as they are built,
            on a stream of their own: no step waits for a copy. The stream that is current where a step is asked for
            (and no other one, unless the caller sees to it) may use its batches.
        work: what packs cost; ranks then get equal work (see `Schedule`).
        exchange: brings sequences of other data ranks' shards. Every rank makes its loader with the same arguments.
            Closing the loader before it has come to its end closes the exchange.
        every: steps of which the sequences are exchanged together.
        blocks: see `Schedule`. None: as the exchange has it, or one.
        with_read_rows: batches also say which rows heads read (`PackedBatch.read`).
        ramp: by which the first steps have fewer packs; each of its sizes must divide on the cube.

    Raises:
        ValueError: a global batch that does not divide, rows that do not divide by y, an argument out of range.
    """

    def __init__(
        self,
        data: PretrainingData,
        *,
        global_batch: int,
        shape: CubeShape,
        rank: int,
        packs_per_rank: int | None = None,
        start_step: int = 0,
        end_step: int | None = None,
        lookahead: int = 2,
        device: torch.device | str = "cpu",
        work: Work | None = None,
        exchange: ShardExchange | None = None,
        every: int = 1,
        blocks: int | None = None,
        with_read_rows: bool = False,
        ramp: BatchRamp = NO_RAMP,
    ) -> None:
        if start_step < 0 or lookahead < 1:
            raise ValueError(
                f"start_step must be at least 0 and lookahead at least 1. Got {start_step} and {lookahead}."
            )
        if every < 1:
            raise ValueError(f"every must be at least 1 step. Got {every}.")
        if blocks is None:
            blocks = 1 if exchange is None else exchange.blocks
        self.layout = BatchLayout(
            shape=shape,
            rank=rank,
            packs_per_rank=fit_packs_per_rank(ramp.unit(global_batch), shape, packs_per_rank),
            capacity=data.capacity,
        )
        self.schedule = Schedule(data, self.layout, global_batch=global_batch, work=work, blocks=blocks, ramp=ramp)
        self._data, self._with_read_rows = data, with_read_rows
        self._courier = DevicePrefetcher(torch.device(device))
        self._exchange = exchange
        self._every = every
        self._first_step, self._next_step, self._end_step = start_step, start_step, end_step
        self._drawn_epoch = 0
        # The second thread draws the next epoch while the first one goes on with this one. An exchange has one thread:
        # all ranks must do the same things in the same order.
        workers = 2 if exchange is None else 1
        self._threads = ThreadPoolExecutor(max_workers=workers, thread_name_prefix="loader")
        self._ahead: deque[Future[list[_Built]]] = deque()
        self._awaited: Future[list[_Built]] | None = None
        self._built: deque[_Built] = deque()
        self._closed = False
        for _ in range(lookahead):
            self._start_next()

    def __iter__(self) -> Iterator[TrainBatch]:
        return self

    def __next__(self) -> TrainBatch:
        """The next step. What fails in the background is raised here, and closes the loader."""
        if self._closed:
            raise ValueError("the loader is closed; make another one with start_step set to the step that is wanted.")
        if not self._built and not self._ahead:
            raise StopIteration
        try:
            if not self._built:
                self._awaited = self._ahead.popleft()
                self._built.extend(self._awaited.result())
                self._start_next()
            built = self._built.popleft()
            if self._exchange is None:
                self._draw_ahead(built.step.index)
            built.delivery.take()
        except BaseException:
            self.close()
            raise
        return built.step

    def __enter__(self) -> Loader:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Ends the background threads and waits for them; a second call does nothing."""
        self._closed = True
        self._threads.shutdown(wait=False, cancel_futures=True)
        under_way = [future for future in (self._awaited, *self._ahead) if future is not None and not future.done()]
        if self._exchange is not None and under_way:
            # Peers may have stopped at another step: nobody waits for them.
            self._exchange.close()
        self._threads.shutdown(wait=True)
        self._ahead.clear()

    def _start_next(self) -> None:
        first = self._next_step
        end = first + self._every
        if self._end_step is not None:
            end = min(end, self._end_step)
        if first < end:
            self._ahead.append(self._threads.submit(self._build, range(first, end)))
            self._next_step = end

    def _draw_ahead(self, step: int) -> None:
        """Has the epoch drawn that follows the one in which a step ends."""
        if (following := self._following_epoch(step)) is not None:
            self._threads.submit(self._data.epochs.__getitem__, following)

    def _draw_following(self, steps: range) -> None:
        """Draws the epoch after the one in which the steps before these ended. An epoch is drawn by all ranks together,
        so this happens at a fixed place among the rounds, one round after the epoch before was first needed."""
        if steps.start > self._first_step and (following := self._following_epoch(steps.start - 1)) is not None:
            self._data.epochs[following]

    def _following_epoch(self, step: int) -> int | None:
        """The epoch after that of a step, once, if the run comes to it."""
        following = self.schedule.last_epoch(step) + 1
        ends_before = self._end_step is not None and following > self.schedule.last_epoch(self._end_step - 1)
        if following <= self._drawn_epoch or ends_before:
            return None
        self._drawn_epoch = following
        return following

    def _build(self, steps: range) -> list[_Built]:
        try:
            if self._exchange is not None:
                self._draw_following(steps)
            plans = [self.schedule.step(step) for step in steps]
            fetched = {} if self._exchange is None else self._fetch(self._exchange, plans)
            return [self._assemble(plan, fetched) for plan in plans]
        except BaseException as error:
            if self._exchange is not None:
                self._exchange.abort(f"{type(error).__name__}: {error}")
            raise

    def _assemble(self, plan: StepPlan, fetched: Fetched) -> _Built:
        packs = self._packs(plan, fetched)
        size = self.layout.plane_packs
        delivery = self._courier.send(
            [
                to_batch(
                    packs[first : first + size],
                    self._data,
                    self.layout,
                    plan.capacity,
                    with_read_rows=self._with_read_rows,
                )
                for first in range(0, len(packs), size)
            ]
        )
        step = TrainBatch(
            index=plan.index,
            batches=delivery.batches,
            targets=plan.targets,
            sequences=plan.sequences,
            tokens=plan.tokens,
            squares=plan.squares,
            lengths=plan.lengths,
            fill=plan.tokens / (len(plan.packs) * plan.capacity),
            imbalance=plan.imbalance,
            digests={epoch: drawn.digest for epoch, drawn in plan.drawn.items()},
        )
        return _Built(step, delivery)

    def _packs(self, plan: StepPlan, fetched: Fetched) -> list[Pack]:
        """This plane's packs, micro-batch after micro-batch."""
        place = self.layout.shape.coordinate(self.layout.rank)
        slots = self.schedule.plane(place["data"], place["x"], len(plan.packs)).reshape(-1)
        packs: list[Pack | None] = [None] * len(slots)
        for epoch, here in epochs_of(plan, slots):
            content = fetched.get((plan.index, epoch))
            built = self._data.build(plan.drawn[epoch], plan.packs[slots[here]], content, step=plan.index)
            for slot, pack in zip(here.tolist(), built, strict=True):
                packs[slot] = pack
        return [pack for pack in packs if pack is not None]

    def _fetch(self, exchange: ShardExchange, plans: Sequence[StepPlan]) -> Fetched:
        """The content of this plane's packs, in the order in which `_packs` takes them."""
        x = self.layout.shape.coordinate(self.layout.rank)["x"]
        keys, wanted = [], []
        for plan in plans:
            planes = [self.schedule.plane(data, x, len(plan.packs)).reshape(-1) for data in exchange.data_ranks]
            for epoch, drawn in plan.drawn.items():
                assert isinstance(drawn.drawing, RemoteEpochSamples), "an exchange needs a source of ExchangedPairs"
                here = [slots[plan.epochs[slots] == epoch] for slots in planes]
                needed = [sequences_of(drawn.packs, plan.packs[slots]) for slots in here]
                keys.append((plan.index, epoch))
                wanted.append(FetchRequest(drawing=drawn.drawing, sequences=needed))
        return dict(zip(keys, exchange.fetch(wanted), strict=True))


def epochs_of(plan: StepPlan, slots: NDArray[np.int64]) -> list[tuple[int, NDArray[np.int64]]]:
    """Which of some slots of a step hold packs of which epoch."""
    epochs = plan.epochs[slots]
    return [(int(epoch), np.flatnonzero(epochs == epoch)) for epoch in np.unique(epochs)]


def to_batch(
    packs: list[Pack],
    data: PretrainingData,
    layout: BatchLayout,
    capacity: int | None = None,
    *,
    with_read_rows: bool = False,
) -> PackedBatch:
    """The packs of a plane as tensors, with the limits of their data; a smaller capacity where all packs fit it."""
    masked = data.masked_per_pack
    if capacity is not None and capacity < data.capacity:
        masked = min(masked, masked_count(capacity, data.masking.most))
    return collate(
        packs,
        capacity=data.capacity if capacity is None else capacity,
        masked_per_pack=masked,
        max_sequences=data.max_sequences,
        shape=layout.shape,
        rank=layout.rank,
        pad=data.special.pad,
        with_read_rows=with_read_rows,
        planes_alike=True,  # as `BatchLayout` has it
    )


# --- Held-out packs in a fixed order ----------------------------------------------------------------------------------


def evaluation_batches(
    data: PretrainingData,
    *,
    shape: CubeShape,
    rank: int,
    packs_per_rank: int,
    device: torch.device | str = "cpu",
    with_read_rows: bool = False,
) -> Iterator[TrainBatch]:
    """Every pack of the held-out data once, with the pairs and masks of epoch 0: the same each time, on any cube.

    Each step has one micro-batch, and the totals of that micro-batch over all planes. All batches have the shapes of
    training; the last one is filled up with empty packs, which add to no total.

    Args:
        data: the held-out documents.
        shape, rank: the cube, and this rank of it.
        packs_per_rank: k, as in training.
        device: where the batches are delivered.
        with_read_rows: as of `Loader`.

    Raises:
        ValueError: see `BatchLayout`, at the call and not at the first step.
    """
    layout = BatchLayout(shape=shape, rank=rank, packs_per_rank=packs_per_rank, capacity=data.capacity)
    return _steps(data, layout, device, with_read_rows)


def _steps(
    data: PretrainingData, layout: BatchLayout, device: torch.device | str, with_read_rows: bool
) -> Iterator[TrainBatch]:
    epoch = data.epochs[0]
    order = np.arange(len(epoch.packs))
    for index, first in enumerate(range(0, len(order), layout.micro_batch)):
        start = first + layout.plane_start
        own = order[start : start + layout.plane_packs]
        packs = data.packs(0, own) + [Pack.empty()] * (layout.plane_packs - len(own))
        all_packs = order[first : first + layout.micro_batch]
        tokens = int(epoch.tokens[all_packs].sum())
        yield TrainBatch(
            index=index,
            batches=[to_batch(packs, data, layout, with_read_rows=with_read_rows).to(device)],
            targets=int(epoch.targets[all_packs].sum()),
            sequences=int(epoch.sequences[all_packs].sum()),
            tokens=tokens,
            squares=int(epoch.squares[all_packs].sum()),
            lengths=np.bincount(epoch.lengths_in(all_packs)),
            fill=tokens / (layout.micro_batch * data.capacity),
        )
