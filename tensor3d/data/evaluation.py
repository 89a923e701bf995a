"""Held-out packs in a fixed order."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import torch

from tensor3d.data.batch import Pack
from tensor3d.data.layout import BatchLayout
from tensor3d.data.loader import Step, to_batch
from tensor3d.data.pretraining import PretrainingData


def evaluation_batches(
    data: PretrainingData,
    *,
    cube_shape: tuple[int, int, int, int],
    data_index: int,
    x_index: int,
    z_index: int,
    packs_per_rank: int,
    device: torch.device | str = "cpu",
    with_read_rows: bool = False,
) -> Iterator[Step]:
    """Every pack of the held-out data once, with the pairs and masks of epoch 0: the same each time, on any cube.

    Each step has one micro-batch, and the totals of that micro-batch over all planes. All batches have the shapes of
    training; the last one is filled up with empty packs, which add to no total.

    Args:
        data: the held-out documents.
        cube_shape: sizes of the axes data, x, y, z.
        data_index, x_index, z_index: this rank's place.
        packs_per_rank: k, as in training.
        device: where the batches are delivered.
        with_read_rows: as of `Loader`.

    Raises:
        ValueError: see `BatchLayout`, at the call and not at the first step.
    """
    layout = BatchLayout(
        cube_shape=cube_shape,
        data_index=data_index,
        x_index=x_index,
        z_index=z_index,
        packs_per_rank=packs_per_rank,
        capacity=data.capacity,
    )
    return _steps(data, layout, device, with_read_rows)


def _steps(
    data: PretrainingData, layout: BatchLayout, device: torch.device | str, with_read_rows: bool
) -> Iterator[Step]:
    epoch = data.epochs[0]
    order = np.arange(len(epoch.packs))
    for index, first in enumerate(range(0, len(order), layout.micro_batch)):
        start = first + layout.plane_start
        own = order[start : start + layout.plane_packs]
        packs = data.packs(0, own) + [Pack.empty()] * (layout.plane_packs - len(own))
        all_packs = order[first : first + layout.micro_batch]
        tokens = int(epoch.tokens[all_packs].sum())
        yield Step(
            index=index,
            batches=[to_batch(packs, data, layout, with_read_rows=with_read_rows).to(device)],
            targets=int(epoch.targets[all_packs].sum()),
            sequences=int(epoch.sequences[all_packs].sum()),
            tokens=tokens,
            squares=int(epoch.squares[all_packs].sum()),
            lengths=np.bincount(epoch.lengths_in(all_packs)),
            fill=tokens / (layout.micro_batch * data.capacity),
        )
