"""Texts, laid into packs and onto the cube: the same micro-batch on every cube.

M tokens of the cube, k packs of each rank's rows on face y
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import torch
from torch import Tensor

from tensor3d import Cube, Sequences
from tensor3d.data.packed_batch import BatchLayout, fit_packs_per_rank
from tensor3d.packing import pack_batch

NO_TARGET = -100
"""The label of a token that no loss is taken at: `cross_entropy` passes it over."""

Text = Sequence[int]
"""Token ids of one sequence."""


@dataclass(frozen=True, kw_only=True, eq=False)
class CausalBatch:
    """What a rank needs of one micro-batch, on the cube's device. Positions are not needed: they follow from
    `sequences`."""

    ids: Tensor
    """int64 (M/x,): tokens of the whole plane."""
    labels: Tensor
    """int64 (M/x,): the next token of the same sequence, -100 at its end and in unused slots."""
    sequences: Sequences
    """Those of this rank's packs; an unused tail of a pack is one of its own."""


def pack_texts(texts: Sequence[Text], capacity: int, multiple_of: int = 1) -> list[list[Text]]:
    """Fills packs of `capacity` tokens with whole texts; what it returns depends on the arguments alone.

    Args:
        multiple_of: empty packs at the end make the number of packs a multiple of this.

    Raises:
        ValueError: no text, or one that is empty or longer than a pack.
    """
    packs = pack_batch([len(text) for text in texts], capacity, multiple_of=multiple_of)
    return [[texts[i] for i in packs.sequences[first:last]] for first, last in pairwise(packs.offsets)]


def count_targets(packs: Sequence[Sequence[Text]]) -> int:
    """Tokens that are to be predicted: all but the first of each text."""
    return sum(len(text) - 1 for pack in packs for text in pack)


def lay(packs: Sequence[Sequence[Text]], capacity: int, cube: Cube) -> CausalBatch:
    """This rank's part of a micro-batch: planes take consecutive packs of the list, and so do the members of z.

    Raises:
        ValueError: the packs do not divide by data*x*z, a pack's texts are longer than its capacity together, or the
            rows of a plane do not divide by y.
    """
    k = fit_packs_per_rank(len(packs), cube.shape, None)
    layout = BatchLayout(shape=cube.shape, rank=cube.rank, packs_per_rank=k, capacity=capacity)
    plane = packs[layout.plane_start :][: layout.plane_packs]
    own = plane[cube.coordinate["z"] * k :][:k]
    ids = [token for pack in plane for token in _filled([list(text) for text in pack], capacity, 0)]
    labels = [label for pack in plane for label in _filled([_next(text) for text in pack], capacity, NO_TARGET)]
    return CausalBatch(
        ids=torch.tensor(ids, device=cube.device),
        labels=torch.tensor(labels, device=cube.device),
        sequences=Sequences.from_lengths([n for pack in own for n in _lengths(pack, capacity)], cube.device),
    )


def _next(text: Text) -> list[int]:
    return [*text[1:], NO_TARGET]


def _filled(parts: list[list[int]], capacity: int, filler: int) -> list[int]:
    values = [value for part in parts for value in part]
    if len(values) > capacity:
        raise ValueError(f"a pack holds {capacity} tokens. Got texts of {len(values)} together. Pack them anew.")
    return values + [filler] * (capacity - len(values))


def _lengths(pack: Sequence[Text], capacity: int) -> list[int]:
    lengths = [len(text) for text in pack]
    unused = capacity - sum(lengths)
    return [*lengths, unused] if unused else lengths
