"""A small model with everything a checkpoint must carry: an uneven vocabulary, both faces, an optimiser's moments."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
from torch import Tensor

from tensor3d import Cube, Embedding3D, Linear3D, LookupEmbedding3D, all_reduce_replicated, shard
from tensor3d.checkpoint import writer
from tensor3d.checkpoint.format import FileSum
from tests.dtensors import begin_adam
from tests.single_device_reference import full

Shape = tuple[int, int, int, int]
ALONE: Shape = (1, 1, 1, 1)
VOCAB = 67  # does not divide by anything


class Model(torch.nn.Module):
    def __init__(self, cube: Cube, *, positions: int = 8, hidden: int = 16) -> None:
        super().__init__()
        self.tokens = Embedding3D(VOCAB, hidden, cube)
        self.positions = LookupEmbedding3D(positions, hidden, cube)
        self.linear = Linear3D(hidden, 24, cube)
        self.register_buffer("seen", torch.tensor([3, 4]))


def make(shape: Shape, seed: int, **sizes: int) -> tuple[Cube, Model, torch.optim.Optimizer]:
    cube = Cube(*shape)
    cube.manual_seed(seed)
    model = Model(cube, **sizes)
    return cube, model, torch.optim.AdamW(model.parameters(), lr=0.1, fused=True)


def step(cube: Cube, model: Model, optimizer: torch.optim.Optimizer) -> None:
    ids = torch.arange(64).chunk(cube.shape.planes)[cube.shape.plane_of(cube.rank)]
    x = model.tokens(ids) + model.positions(ids % 8) + shard(torch.ones(64, 16), cube, "z")
    all_reduce_replicated(model.linear(x).square().sum(), cube.over("data", "x", "y", "z")).backward()
    if isinstance(optimizer, torch.optim.AdamW):
        begin_adam(optimizer)
    optimizer.step()
    optimizer.zero_grad()


def state(model: Model, optimizer: torch.optim.Optimizer) -> list[Tensor]:
    """Logical tensors: parameters, buffer, both moments and the count of steps of each parameter."""
    memory = [optimizer.state[p][key] for p in model.parameters() for key in ("exp_avg", "exp_avg_sq", "step")]
    return [full(t).clone() for t in [*model.parameters(), *model.buffers(), *memory]]


def same(ours: list[Tensor], theirs: list[Tensor]) -> bool:
    return all(torch.equal(a, b) for a, b in zip(ours, theirs, strict=True))


def files_of(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in sorted(folder.iterdir())}


@contextmanager
def held_back(seen: list[int] | None = None) -> Iterator[threading.Event]:
    """Until the event is set, a save waits before it writes its tensors. `seen` gets the priority of its thread."""
    go, before = threading.Event(), writer.write_file

    def slow(path: Path, parts: Iterable[memoryview]) -> FileSum:
        if seen is not None:
            seen.append(os.getpriority(os.PRIO_PROCESS, threading.get_native_id()))
        assert go.wait(60)
        return before(path, parts)

    writer.write_file = slow
    try:
        yield go
    finally:
        go.set()
        writer.write_file = before
