"""Steps of packed batches, built in the background."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, replace
from types import TracebackType

import torch

from tensor3d.data.batch import Pack, PackedBatch, collate
from tensor3d.data.layout import BatchLayout, fit_packs_per_rank
from tensor3d.data.pretraining import PretrainingData


@dataclass(frozen=True, kw_only=True, eq=False)
class Step:
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
    fill: float
    """Share of the token slots that hold a token, 0 to 1."""


class Loader:
    """Endless steps for one rank. Step `i` is a function of the data, the global batch and `i`: the same packs on any
    cube and after any interruption.

    A context manager; `close` (also by leaving it) ends the background threads. Building starts at once.

    Args:
        data: where the packs come from.
        global_batch: packs of a step, over all ranks.
        cube_shape: sizes of the axes data, x, y, z.
        data_index, x_index, z_index: this rank's place.
        packs_per_rank: k; a micro-batch has data * x * z * k packs. None: the largest, one micro-batch a step.
        start_step: index of the first step.
        lookahead: steps that are built ahead, at least 1.
        device: where the batches are delivered. For a GPU they are built in pinned memory and copied when asked for.

    Raises:
        ValueError: a global batch that does not divide, rows that do not divide by y, an argument out of range.
    """

    def __init__(
        self,
        data: PretrainingData,
        *,
        global_batch: int,
        cube_shape: tuple[int, int, int, int],
        data_index: int,
        x_index: int,
        z_index: int,
        packs_per_rank: int | None = None,
        start_step: int = 0,
        lookahead: int = 2,
        device: torch.device | str = "cpu",
    ) -> None:
        if start_step < 0 or lookahead < 1:
            raise ValueError(
                f"start_step must be at least 0 and lookahead at least 1. Got {start_step} and {lookahead}."
            )
        self.layout = BatchLayout(
            cube_shape=cube_shape,
            data_index=data_index,
            x_index=x_index,
            z_index=z_index,
            packs_per_rank=fit_packs_per_rank(global_batch, cube_shape, packs_per_rank),
            capacity=data.capacity,
        )
        self._data = data
        self._global_batch = global_batch
        self._device = _with_index(torch.device(device))
        self._next_step = start_step
        self._drawn_epoch = 0
        # The second thread draws the next epoch while the first one goes on with this one.
        self._threads = ThreadPoolExecutor(max_workers=2, thread_name_prefix="loader")
        self._ahead: deque[Future[Step]] = deque()
        self._closed = False
        for _ in range(lookahead):
            self._start_next()

    def __iter__(self) -> Iterator[Step]:
        return self

    def __next__(self) -> Step:
        """The next step. What fails in the background is raised here, and closes the loader."""
        if self._closed:
            raise ValueError("the loader is closed; make another one with start_step set to the step that is wanted.")
        try:
            step = self._ahead.popleft().result()
            self._draw_ahead(step.index)
        except BaseException:
            self.close()
            raise
        self._start_next()
        return replace(step, batches=[batch.to(self._device) for batch in step.batches])

    def __enter__(self) -> Loader:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Ends the background threads and waits for them; a second call does nothing."""
        self._closed = True
        self._threads.shutdown(wait=True, cancel_futures=True)
        self._ahead.clear()

    def _start_next(self) -> None:
        self._ahead.append(self._threads.submit(self._build, self._next_step))
        self._next_step += 1

    def _draw_ahead(self, step: int) -> None:
        """Has the epoch drawn that follows the one in which a step ends."""
        following = (self._first_pack(step + 1) - 1) // self._data.packs_per_epoch + 1
        if following > self._drawn_epoch:
            self._drawn_epoch = following
            self._threads.submit(self._data.epoch, following)

    def _first_pack(self, step: int) -> int:
        return step * self._global_batch

    def _build(self, step: int) -> Step:
        first = self._first_pack(step)
        totals = self._data.run_totals(range(first, first + self._global_batch))
        batches = []
        for micro_batch in range(first, first + self._global_batch, self.layout.micro_batch):
            start = micro_batch + self.layout.plane_start
            packs = self._data.run_packs(range(start, start + self.layout.plane_packs))
            batches.append(to_batch(packs, self._data, self.layout))
        if self._device.type == "cuda":
            with torch.cuda.device(self._device):
                batches = [batch.pin_memory() for batch in batches]
        return Step(
            index=step,
            batches=batches,
            targets=totals.targets,
            sequences=totals.sequences,
            tokens=totals.tokens,
            fill=totals.tokens / (self._global_batch * self._data.capacity),
        )


def to_batch(packs: list[Pack], data: PretrainingData, layout: BatchLayout) -> PackedBatch:
    """The packs of a plane as tensors, with the limits of their data."""
    _, _, y, z = layout.cube_shape
    return collate(
        packs,
        capacity=data.capacity,
        masked_per_pack=data.masked_per_pack,
        max_sequences=data.max_sequences,
        y=y,
        z=z,
        slice_index=layout.z_index,
        pad=data.special.pad,
    )


def _with_index(device: torch.device) -> torch.device:
    """Names the current GPU: a background thread has a current one of its own."""
    if device.type == "cuda" and device.index is None:
        return torch.device("cuda", torch.cuda.current_device())
    return device
