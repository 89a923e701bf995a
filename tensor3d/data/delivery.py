"""Batches on their way to a device, beside what it computes.

A copy that is issued where a batch is needed stands in line behind the step before, and the step waits for it. So the
loader's own thread copies, on a stream of its own, as soon as a batch is built. Three things make that right:

- the host memory is pinned, or a copy would not run beside the computation;
- who takes the batch lets its stream wait for the copies (the device does; the host goes on at once);
- memory that one stream has taken from the allocator and another one uses must not be given away before the other is
  done with it: `record_stream` tells the allocator.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, is_dataclass

import torch
from torch import Tensor

from tensor3d.attention.varlen import order_of
from tensor3d.data.batch import PackedBatch

Prepare = Callable[[PackedBatch], object]


def settle(batch: PackedBatch) -> None:
    """Has all worked out and kept that layers would else find out on the host about the sequences, and copy: from
    memory that is not pinned, for which a host waits until the device has done everything before."""
    sequences = batch.sequences
    _ = sequences.grouping, sequences.positions
    if batch.read is not None:
        sequences.grouping_of(batch.read.chosen.own)
        order_of(batch.read.chosen.own, sequences)


@dataclass(frozen=True, kw_only=True, eq=False)
class Delivery:
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


class Courier:
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

    def send(self, batches: Sequence[PackedBatch]) -> Delivery:
        """Begins to copy batches in ordinary memory."""
        if self._stream is None:
            return Delivery(batches=[batch.to(self._device) for batch in batches])
        with torch.cuda.device(self._device), torch.cuda.stream(self._stream):
            sent = [batch.pin_memory().to(self._device) for batch in batches]
            for batch in sent:
                self._prepare(batch)
            copied = torch.cuda.Event()
            copied.record()
        return Delivery(batches=sent, copied=copied)


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
