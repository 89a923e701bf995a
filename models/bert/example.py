"""A micro-batch of a given size without any text, for a model that is to be looked at and not to be trained."""

from __future__ import annotations

import math

import numpy as np

from tensor3d import Cube
from tensor3d.data.batch import Pack, PackedBatch, collate
from tensor3d.data.masking import MASKED_SHARE


def example_batch(
    tokens: int, longest: int, cube: Cube, *, with_read_rows: bool = False
) -> tuple[PackedBatch, int, int]:
    """This rank's part of `tokens` tokens, all of id 0; and the targets and sequences of the whole micro-batch.

    Each rank's rows on face y are one full pack, of sequences of `longest` tokens and one of the rest.

    Raises:
        ValueError: tokens that do not divide among the ranks' rows on both faces.
    """
    shape = cube.shape
    unit = shape.planes * math.lcm(shape.y, shape.z)
    if tokens < 1 or tokens % unit:
        raise ValueError(f"tokens must divide by data * x * lcm(y, z) = {unit} on {shape}. Got {tokens}.")
    packs, slots = shape.planes * shape.z, tokens // (shape.planes * shape.z)
    whole, rest = divmod(slots, longest)
    lengths = np.array([longest] * whole + ([rest] if rest else []), dtype=np.int64)
    masked = max(1, round(MASKED_SHARE * slots))
    zeros = np.zeros(slots, dtype=np.int64)
    pack = Pack(
        ids=zeros,
        types=zeros,
        lengths=lengths,
        masked=np.arange(masked),
        masked_labels=zeros[:masked],
        next_labels=np.zeros(len(lengths), dtype=np.int64),
    )
    batch = collate(
        [pack] * shape.z,
        capacity=slots,
        masked_per_pack=masked,
        max_sequences=len(lengths),
        y=shape.y,
        z=shape.z,
        slice_index=cube.coordinate["z"],
        pad=0,
        with_read_rows=with_read_rows,
    )
    return batch.to(cube.device), packs * masked, packs * len(lengths)
