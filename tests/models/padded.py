"""The packs of the toy model as padded batches, for the original of transformers."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from tensor3d.data import Pack
from tests.models.toy import CAPACITY, one_by_one

PACKS = 16


def padded(packs: list[Pack]) -> dict[str, Tensor]:
    """All sequences of the packs, one a row, padded with id 7 to the capacity: the arguments of the original."""
    singles = one_by_one(packs)
    shape = (len(singles), CAPACITY)
    ids, types, mask = np.full(shape, 7), np.zeros(shape, np.int64), np.zeros(shape, np.int64)
    labels = np.full(shape, -100)
    for row, pack in enumerate(singles):
        length = len(pack.ids)
        ids[row, :length], types[row, :length], mask[row, :length] = pack.ids, pack.types, 1
        labels[row, pack.masked] = pack.masked_labels
    arrays = {"input_ids": ids, "token_type_ids": types, "attention_mask": mask, "labels": labels}
    arrays["next_sentence_label"] = np.concatenate([pack.next_labels for pack in singles])
    return {name: torch.from_numpy(array) for name, array in arrays.items()}


def of_tokens(hidden: Tensor, packs: list[Pack]) -> Tensor:
    """Of one row a slot of all packs, those that hold tokens."""
    slots = hidden.view(len(packs), CAPACITY, -1)
    return torch.cat([rows[: len(pack.ids)] for rows, pack in zip(slots, packs, strict=True)])


def of_sequences(pooled: Tensor, packs: list[Pack], planes: int) -> Tensor:
    """Of one row a [CLS] slot of all planes, those that hold sequences; each plane's come first among its slots."""
    count = len(packs) // planes
    of_plane = [sum(len(pack.lengths) for pack in packs[i * count : (i + 1) * count]) for i in range(planes)]
    return torch.cat([rows[:used] for rows, used in zip(pooled.chunk(planes), of_plane, strict=True)])
