"""A few rows of a matrix at a time on CPUs: what comes and goes on the way stays in the cache."""

from __future__ import annotations

from collections.abc import Iterable
from functools import reduce

import torch
from torch import Tensor

from tensor3d.torch_private import FakeTensor

# --- Which tensors the host may look into -----------------------------------------------------------------------------


def is_host_readable(tensor: Tensor) -> bool:
    """Whether the host can read its values now. On a device it would have to wait, and a fake tensor has none."""
    return tensor.device.type == "cpu" and not isinstance(tensor, FakeTensor)


# --- A few rows of a matrix at a time on CPUs -------------------------------------------------------------------------

_AT_ONCE = 2**19
"""Elements."""


def chunk_rows(columns: int) -> int:
    """How many rows of so many columns are taken at a time."""
    return max(1, _AT_ONCE // max(1, columns))


def iter_row_chunks(*matrices: Tensor) -> list[tuple[Tensor, ...]]:
    """Rows of each of them, in order: as many at a time as `chunk_rows` says of the first."""
    rows = chunk_rows(matrices[0].shape[1])
    return list(zip(*(each.split(rows) for each in matrices), strict=True))


def sum_of_rows(matrix: Tensor, dtype: torch.dtype) -> Tensor:
    """(rows, columns) to (columns,) of this type; where that is not the elements' own, added up in fp32 at least."""
    if matrix.device.type != "cpu" or matrix.dtype == dtype:
        return matrix.sum(0, dtype=dtype)
    # A sum in another type than its elements' converts all of them first on a CPU.
    wide = torch.promote_types(dtype, torch.float32)
    return together(part.sum(0, dtype=wide) for (part,) in iter_row_chunks(matrix)).to(dtype)


def together(sums: Iterable[Tensor]) -> Tensor:
    """What all parts have given, added up in the tensor of the first."""
    return reduce(Tensor.add_, sums)
