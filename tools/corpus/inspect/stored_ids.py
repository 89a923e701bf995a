"""All ids of a folder, looked through once: those that are not shown may be beyond the vocabulary, too."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np

from tensor3d.data.indexed_dataset import IndexedDataset
from tensor3d.data.stored_samples import StoredShard
from tools.common.log import progress

_BLOCK = 1 << 20
_SEQUENCES = 4096
"""With stored masks, of which so many are looked at together."""


def check_ids(dataset: IndexedDataset, vocab_size: int, step: str, counted: int | None = None) -> int:
    """How often `counted` occurs. Read by blocks: what is read of a memory map counts as memory of the process.

    Args:
        step: made the files; for the error.

    Raises:
        ValueError: an id that the vocabulary does not have; the message names the file and the first such document.
    """
    path = dataset.prefix.with_name(f"{dataset.prefix.name}.bin")
    count = wrong = at = 0
    first: tuple[int, int] | None = None  # its place and itself
    size = dataset.ids.nbytes
    with path.open("rb") as file, progress(desc=f"ids of {path.name}", total=size, unit="B", unit_scale=True) as bar:
        while len(block := np.fromfile(file, dtype=dataset.ids.dtype, count=_BLOCK)):
            count += 0 if counted is None else int(np.count_nonzero(block == counted))
            if block.min() < 0 or block.max() >= vocab_size:
                outside = np.flatnonzero((block < 0) | (block >= vocab_size))
                first = first or (at + int(outside[0]), int(block[outside[0]]))
                wrong += len(outside)
            at += len(block)
            bar.update(block.nbytes)
    if first is not None:
        item = int(np.searchsorted(dataset.starts, first[0], side="right")) - 1
        document = int(np.searchsorted(dataset.documents, item, side="right")) - 1
        raise ValueError(
            f"{path} has the id {first[1]} in document {document:,}, and the vocabulary {vocab_size:,} pieces: "
            f"{wrong:,} of its {at:,} ids are none. It is damaged, or of another tokenizer. Copy it again, or run "
            f"{step} again."
        )
    return count


def check_shards(shards: Iterable[StoredShard | None], vocab_size: int) -> None:
    """Ids of samples, and what models see of them where masks are stored.

    Raises:
        ValueError: as `check_ids`; or masks outside of a text.
    """
    for shard in shards:
        if shard is None:
            continue
        check_ids(IndexedDataset(shard.prefix), vocab_size, "samples")
        for begin in range(0, len(shard) if shard.static else 0, _SEQUENCES):
            chosen = np.arange(begin, min(begin + _SEQUENCES, len(shard)))
            try:
                shard.segments(chosen).check(vocab_size)
            except ValueError as error:
                raise ValueError(
                    f"{shard.prefix}.masks.bin, sequences {begin:,} to {chosen[-1]:,}: {error} Run samples again."
                ) from None
