"""Sequences on their way from the run that they were drawn from to the shards, as plain arrays on disk."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from tensor3d.data.masking import masked_counts
from tensor3d.data.segments import full_lengths
from tools.corpus.work import draft


class Piece(NamedTuple):
    """Sequences `begin` to `end - 1` of a part."""

    part: str
    begin: int
    end: int


@dataclass(frozen=True, kw_only=True, eq=False)
class Sequences:
    """Sequences with what is stored of them."""

    ids: NDArray[np.integer]
    """(ids,): segments one after another."""
    items: NDArray[np.int32]
    """int32 (sequences, 2) ids of A and of B, or (sequences, 1) of the text."""
    labels: NDArray[np.uint8]
    """uint8 (sequences,): 0 where B follows A, 1 where it was drawn at random; (0,) of single texts."""
    masks: NDArray[np.integer]
    """(ids,): of each sequence the places that are guessed, then what is seen there; (0,) if drawn at load."""

    @property
    def lengths(self) -> NDArray[np.int64]:
        """int64 (sequences,): tokens, the special ones counted."""
        return _lengths(self.items)


_NAMES = ("ids", "items", "labels", "masks")


def write_part(folder: Path, name: str, sequences: Sequences) -> None:
    for kind in _NAMES:
        with draft(_path(folder, name, kind)) as file:
            np.save(file, getattr(sequences, kind))


def read_piece(folder: Path, piece: Piece) -> Sequences:
    """The sequences of a piece, as copies: no file stays open. Of the rest of its part only the lengths are read."""
    ids, items, labels, masks = (np.load(_path(folder, piece.part, kind), mmap_mode="r") for kind in _NAMES)
    chosen = slice(piece.begin, piece.end)
    own_ids = _range(items.sum(axis=1, dtype=np.int64), chosen)
    own_masks = _range(2 * masked_counts(_lengths(items)), chosen) if len(masks) else slice(0, 0)
    return Sequences(
        ids=np.array(ids[own_ids]),
        items=np.array(items[chosen]),
        labels=np.array(labels[chosen]),
        masks=np.array(masks[own_masks]),
    )


def _range(sizes: NDArray[np.int64], chosen: slice) -> slice:
    """Where the chosen ones lie, when so many numbers of each lie one after another."""
    first = int(sizes[: chosen.start].sum())
    return slice(first, first + int(sizes[chosen].sum()))


def _lengths(items: NDArray[np.int32]) -> NDArray[np.int64]:
    return full_lengths(items[:, 0], items[:, 1] if items.shape[1] == 2 else np.zeros_like(items[:, 0]))


def _path(folder: Path, name: str, kind: str) -> Path:
    return folder / f"{name}.{kind}.npy"
