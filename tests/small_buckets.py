"""Buckets of gradients so small that tiny models fill many of them."""

from __future__ import annotations

from typing import Any
from unittest.mock import patch

from tensor3d.distributed import comm_stats


def small_buckets() -> Any:
    """Inside, or in a function that it decorates, a bucket has 64 bytes."""
    return patch.multiple(comm_stats, _LEAST_BYTES=64, _MOST_BYTES=64)
