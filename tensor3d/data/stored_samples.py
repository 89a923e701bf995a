"""Sequences that were drawn before training and lie on disk: every epoch has the same ones.

A shard is `PREFIX.bin/.idx`, an indexed dataset in which a document is a sequence and its items are the segments A and
B, or the text alone; `PREFIX.labels.npy` with a byte for each pair; and, where masks were drawn once and for all,
`PREFIX.masks.bin/.idx`: of each sequence the places of the tokens to guess and what the model sees there.
"""

from __future__ import annotations

import errno
from collections.abc import Sequence
from functools import cached_property
from pathlib import Path
from tokenize import TokenError
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from tensor3d.data.array_utils import ranges
from tensor3d.data.indexed_dataset import IndexedDataset
from tensor3d.data.masking import MASKED_SHARE, StoredMasks, masked_counts
from tensor3d.data.segments import NO_LABEL, Segments, full_lengths
from tensor3d.data.shard_exchange import RemoteSource
from tensor3d.data.sources import LocalSource, Sampler
from tensor3d.files import open_regular

if TYPE_CHECKING:
    from tensor3d.distributed.host_all_to_all import HostAllToAll

LABELS, MASKS = "labels.npy", "masks"
"""Ends of the names of the files beside the ids."""
_AGAIN = "copy it again or prepare the samples again."


class StoredShard:
    """One shard. Ids and index are memory-mapped, by two open files, and two more with masks; labels are read.

    Args:
        prefix: path of the files, without their endings.
        single: sequences are single texts.
        static: masks are stored with them.
        masked_share: with `static`, the share of the tokens that is guessed.

    Raises:
        ValueError: a file is missing, cut short, foreign or contradicts the others; the message names it. Or too many
            files are open.
    """

    def __init__(self, prefix: Path, *, single: bool, static: bool, masked_share: float = MASKED_SHARE) -> None:
        self.prefix, self.single, self.static, self._masked_share = prefix, single, static, masked_share
        try:
            self._open(prefix)
        except OSError as error:
            if error.errno != errno.EMFILE:
                raise
            raise ValueError(
                f"{prefix} cannot be opened: this process has too many files open, and every shard keeps "
                f"{4 if static else 2}. Raise its limit (ulimit -n), or prepare the samples in fewer shards."
            ) from error

    def _open(self, prefix: Path) -> None:
        single, static = self.single, self.static
        self._text = _Items(IndexedDataset(prefix), 1 if single else 2)
        self._labels = None if single else _labels(prefix.with_name(f"{prefix.name}.{LABELS}"), len(self))
        self._masks = None
        if static:
            self._masks = _Items(IndexedDataset(prefix.with_name(f"{prefix.name}.{MASKS}")), 2)
            self._check_masks(self._masks)

    def __len__(self) -> int:
        return len(self._text.lengths)

    @cached_property
    def lengths(self) -> NDArray[np.int32]:
        """int32 (sequences,): tokens of each, the special ones counted."""
        a = self._text.lengths[:, 0]
        b = np.zeros_like(a) if self.single else self._text.lengths[:, 1]
        return full_lengths(a, b).astype(np.int32)

    @property
    def labels(self) -> NDArray[np.integer]:
        """(sequences,): 0 where B follows A, 1 where it was drawn at random; (0,) of single texts."""
        return np.empty(0, dtype=np.uint8) if self._labels is None else self._labels

    def segments(self, chosen: NDArray[np.integer]) -> Segments:
        """The chosen sequences, with their masks if these are stored. ValueError for places outside a sequence."""
        lengths = self._text.lengths[chosen].astype(np.int64)
        return Segments(
            a_length=lengths[:, 0],
            b_length=np.zeros(len(lengths), dtype=np.int64) if self.single else lengths[:, 1],
            label=np.full(len(lengths), NO_LABEL) if self._labels is None else self._labels[chosen].astype(np.int64),
            ids=self._text.ids(chosen),
            masks=None if self._masks is None else self._read_masks(self._masks, chosen),
        )

    def _read_masks(self, masks: _Items, chosen: NDArray[np.integer]) -> StoredMasks:
        counts = masks.lengths[chosen, 0].astype(np.int64)
        stored = StoredMasks(places=masks.ids(chosen, 0), seen=masks.ids(chosen, 1), counts=counts)
        # [CLS] and the last [SEP] are never guessed.
        last = np.repeat(self.lengths[chosen] - 1, counts)
        if not ((stored.places > 0) & (stored.places < last)).all():
            raise ValueError(f"{masks.dataset.prefix}.bin is damaged: a masked place lies outside its text; {_AGAIN}")
        return stored

    def _check_masks(self, masks: _Items) -> None:
        counts = masked_counts(self.lengths, self._masked_share)
        if masks.lengths.shape != (len(self), 2) or (masks.lengths != counts[:, None]).any():
            raise ValueError(f"{masks.dataset.prefix}.idx does not belong to {self.prefix}.idx; {_AGAIN}")


class StoredShards(Sampler[StoredShard]):
    """Draws what is stored, in every epoch the same.

    Args:
        shards: None: not on this machine.
        max_length: tokens of a sequence, at most.

    Raises:
        ValueError: a sequence that is longer.
    """

    def __init__(self, shards: Sequence[StoredShard | None], *, max_length: int) -> None:
        for shard in shards:
            if shard is not None and len(shard) and shard.lengths.max() > max_length:
                raise ValueError(
                    f"{shard.prefix} has a sequence of {shard.lengths.max()} tokens, and max_length is {max_length}; "
                    "raise that, or prepare samples of this length."
                )
        super().__init__(shards, max_length)

    def _draw(self, dataset: StoredShard, shard: int, epoch: int) -> StoredShard:
        return dataset


class StoredSamples(LocalSource):
    """Stored sequences, all of which are read here. What differs between epochs is how they are packed, and masked
    unless the masks are stored too.

    Raises:
        ValueError: no shard at all, one that is not here, or a sequence longer than `max_length`.
    """

    def __init__(self, shards: Sequence[StoredShard | None], *, max_length: int) -> None:
        super().__init__(StoredShards(shards, max_length=max_length))


class RemoteSamples(RemoteSource):
    """Stored sequences of which each data rank reads its own shards; see `RemoteSource`.

    Raises:
        ValueError: stored masks, which do not travel, and what `RemoteSource` and `StoredShards` refuse.
    """

    def __init__(self, shards: Sequence[StoredShard | None], everyone: HostAllToAll, *, max_length: int) -> None:
        if any(shard is not None and shard.static for shard in shards):
            raise ValueError(
                "samples with stored masks cannot be exchanged between ranks. Prepare them with --masking dynamic, or "
                "give every machine all shards and train without --exchange."
            )
        super().__init__(StoredShards(shards, max_length=max_length), everyone)


class _Items:
    """A dataset in which every document has the same number of items.

    Raises:
        ValueError: it is no such dataset.
    """

    def __init__(self, dataset: IndexedDataset, each: int) -> None:
        documents = dataset.documents
        if len(dataset.lengths) != each * (len(documents) - 1) or (documents != each * np.arange(len(documents))).any():
            raise ValueError(
                f"{dataset.prefix}.idx holds no samples, which have {each} items in each document. Documents of "
                f"sentences are made to samples first; if these are samples, {_AGAIN}"
            )
        if len(dataset.lengths) and dataset.lengths.min() == 0:
            raise ValueError(f"{dataset.prefix}.idx is damaged: item {dataset.lengths.argmin()} is empty; {_AGAIN}")
        self.dataset = dataset
        self.lengths = dataset.lengths.reshape(-1, each)
        """int32 (sequences, each)"""
        self._each = each

    def ids(self, chosen: NDArray[np.integer], item: int | None = None) -> NDArray[np.int64]:
        """int64 (ids,): those of the chosen sequences, or of one item of each."""
        starts = self.dataset.starts[: len(self.dataset.lengths)].reshape(-1, self._each)[chosen]
        lengths = self.lengths[chosen].astype(np.int64)
        if item is None:
            return self.dataset.ids[ranges(starts[:, 0], lengths.sum(axis=1))].astype(np.int64)
        return self.dataset.ids[ranges(starts[:, item], lengths[:, item])].astype(np.int64)


def read_array(path: Path) -> NDArray[Any]:
    """The numbers of an .npy file. Mapped at first, so that a size which is damaged takes no memory.

    Raises:
        ValueError: no such file: damaged, an archive of arrays, or one of pickles.
        OSError: it cannot be read, or is no regular file.
    """
    with open_regular(path) as file:
        if file.read(6) != b"\x93NUMPY":
            raise ValueError(f"{path} is no .npy file")
    try:
        return np.array(np.lib.format.open_memmap(path, mode="r"))
    except (ValueError, EOFError, OverflowError, TypeError, SyntaxError, TokenError) as error:
        raise ValueError(f"{path} is no .npy file of numbers: {error}") from None


def _labels(path: Path, sequences: int) -> NDArray[np.uint8]:
    """uint8 (sequences,): 0 where B follows A, 1 where it was drawn at random."""
    try:
        labels = read_array(path)
    except FileNotFoundError:
        raise ValueError(f"{path} is missing; {_AGAIN}") from None
    except (ValueError, OSError) as error:
        if isinstance(error, OSError) and error.errno == errno.EMFILE:
            raise
        raise ValueError(f"{path} is damaged: {error}; {_AGAIN}") from error
    if labels.dtype != np.uint8 or labels.shape != (sequences,) or (len(labels) and labels.max() > 1):
        raise ValueError(f"{path} is damaged: a 0 or 1 is needed for each of {sequences} pairs; {_AGAIN}")
    return np.asarray(labels)
