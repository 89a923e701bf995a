"""Buckets of gradients so small that tiny models fill many of them."""

from __future__ import annotations

from typing import Any
from unittest.mock import patch

from tensor3d.distributed import comm_stats


def small_buckets(size: int = 64) -> Any:
    """Inside, or in a function that it decorates, a bucket has `size` bytes."""
    return patch.multiple(comm_stats, _LEAST_BYTES=size, _MOST_BYTES=size)
