"""Where sequences begin and end among the rows of a rank."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, TypeVar

import numpy as np
import torch
from torch import Tensor

from tensor3d.batches.length_groups import LengthGroups, group_by_length, group_queries, is_cut
from tensor3d.batches.row_selection import RowSelection

T = TypeVar("T")


@dataclass(frozen=True, kw_only=True, eq=False)
class Sequences:
    """Contiguous sequences that cover all rows, on the device and on the host.

    The host copy saves the attention a device-to-host synchronisation. The unused tail of a pack is a sequence of its
    own: it attends to itself and is looked at by nobody.
    """

    cu_seqlens: Tensor
    """int32 (sequences + 1,): first row of each sequence, then the number of rows."""
    lengths: tuple[int, ...]
    """Rows of each sequence, on the host."""
    _made: dict[Hashable, Any] = field(default_factory=dict, repr=False)
    """What attention has worked out of them."""

    @classmethod
    def from_lengths(cls, lengths: Sequence[int], device: torch.device | str = "cpu") -> Sequences:
        """Raises ValueError for a length below 1."""
        lengths = tuple(int(length) for length in lengths)
        if any(length < 1 for length in lengths):
            raise ValueError(f"every sequence needs a length of at least 1. Got {min(lengths)}.")
        ends = torch.tensor((0, *lengths), dtype=torch.int32).cumsum(0, dtype=torch.int32)
        return cls(cu_seqlens=ends.to(device, non_blocking=True), lengths=lengths)

    def to(self, device: torch.device | str) -> Sequences:
        return Sequences(cu_seqlens=self.cu_seqlens.to(device, non_blocking=True), lengths=self.lengths)

    @property
    def device(self) -> torch.device:
        return self.cu_seqlens.device

    @cached_property
    def rows(self) -> int:
        return sum(self.lengths)

    @cached_property
    def max_seqlen(self) -> int:
        return max(self.lengths, default=0)

    @cached_property
    def starts(self) -> tuple[int, ...]:
        """First row of each sequence, on the host."""
        total, starts = 0, []
        for length in self.lengths:
            starts.append(total)
            total += length
        return tuple(starts)

    @cached_property
    def positions(self) -> Tensor:
        """int64 (rows,), on the device: the place of each row in its sequence, from 0. Made once for all layers."""
        lengths = torch.tensor(self.lengths, dtype=torch.int64)
        starts = torch.tensor(self.starts, dtype=torch.int64).repeat_interleave(lengths)
        return (torch.arange(self.rows) - starts).to(self.device, non_blocking=True)

    @cached_property
    def grouping(self) -> LengthGroups:
        """The sequences by length class. Made once for all layers."""
        return group_by_length(self.lengths, self.starts, self.device)

    def grouping_of(
        self, queries: RowSelection | None, window: int | None = None, causal: bool = False
    ) -> LengthGroups:
        """Those in which rows ask, by length class; long ones in blocks where a window is narrow (`is_cut`). Made once
        for all layers that have the same.

        Args:
            queries: None: all rows ask.
        """
        if window is None or not is_cut(self.max_seqlen, window):
            if queries is None:
                return self.grouping
            window, causal = None, False
        rows = np.arange(self.rows) if queries is None else queries.numbers
        return self.once(
            ("grouping", queries, window, causal),
            lambda: group_queries(self.lengths, self.starts, rows, self.device, window=window, causal=causal),
        )

    def once(self, key: Hashable, make: Callable[[], T]) -> T:
        """What `make` gave when it was first asked for by this key."""
        if key not in self._made:
            self._made[key] = make()
        made: T = self._made[key]
        return made
