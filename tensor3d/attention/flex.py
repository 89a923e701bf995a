"""FlexAttention (Dong et al. 2024, arXiv 2412.05496) with a document mask: one kernel, which skips blocks of other
sequences.

T rows of a rank, R rows that ask, h heads of a rank, d head dimension; blocks of 128 rows
"""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable
from functools import lru_cache
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from tensor3d.attention.backends import AttentionArgs
from tensor3d.ops.compiled_regions import OPTIONS, own_copy

BLOCK = 128
COMPILED_ON = ("cuda",)
Bools = NDArray[np.bool_]
Numbers = NDArray[np.int64]


def flex(q: Tensor, k: Tensor, v: Tensor, call: AttentionArgs) -> Tensor:
    """Saved for backward: q, k, v, the result, the logarithms of the sums of exponentials, and which rows are finite.

    The kernel takes what it masks times 0, which of what is not finite is NaN, in other sequences too. So it gets zeros
    for such rows, and all of a sequence that has one is NaN behind it.
    """
    mask = call.sequences.once(("blocks", call.queries, call.causal, call.window), lambda: block_mask(call))
    _, owners, members = _on_device(call)
    finite = [t.isfinite().flatten(1).all(1) for t in (q, k, v)]
    q, k, v = (torch.where(rows[:, None, None], t, 0) for rows, t in zip(finite, (q, k, v), strict=True))
    q, k, v = (t.transpose(0, 1).unsqueeze(0) for t in (q, k, v))
    kernel = compiled(_kind(q), _kind(k), _kind(v), _setting(q, call)) if q.device.type in COMPILED_ON else masked
    result = kernel(q, k, v, mask).squeeze(0).transpose(0, 1)
    # One more than there are sequences, for slots that are not used: -1.
    broken = torch.zeros(len(call.sequences.lengths) + 1, dtype=torch.int32, device=q.device)
    broken = broken.index_add(0, members, (~(finite[1] & finite[2])).int())
    harmed = (broken[owners] > 0) | (~finite[0] & (owners >= 0))
    return result.masked_fill(harmed[:, None, None], math.nan)


def masked(q: Tensor, k: Tensor, v: Tensor, mask: Any) -> Tensor:
    """Of (1, h, rows, d). Compiled, it is one kernel; as it is, all scores lie in memory."""
    from torch.nn.attention.flex_attention import flex_attention  # takes its time, and few need it

    result = flex_attention(q, k, v, block_mask=mask)
    assert isinstance(result, Tensor), "without a request for more there is no more"
    return result


@lru_cache(maxsize=256)
def compiled(*_: Hashable) -> Callable[[Tensor, Tensor, Tensor, Any], Tensor]:
    """The kernel for tensors of one kind and masks of one kind, compiled at its first call.

    A copy of its own for each: of one function the compiler makes but a few, and computes what comes later as it is
    written. Of a copy that meets another kind after all it makes as many, and `fullgraph` turns what comes later into
    an error.
    """
    return torch.compile(own_copy(masked), dynamic=False, fullgraph=True, options=OPTIONS)


def _kind(tensor: Tensor) -> Hashable:
    return tensor.shape, tensor.stride(), tensor.dtype, tensor.device, tensor.requires_grad, tensor.is_inference()


def _setting(q: Tensor, call: AttentionArgs) -> Hashable:
    """What else compiled code depends on."""
    autocast = torch.get_autocast_dtype(q.device.type) if torch.is_autocast_enabled(q.device.type) else None
    return call.causal, call.window, torch.is_grad_enabled(), autocast


def _places(call: AttentionArgs) -> tuple[Numbers, Numbers, Numbers]:
    """Of each query its row and its sequence, -1 of a slot that is not used; and the sequence of each key."""
    lengths = np.asarray(call.sequences.lengths, dtype=np.int64)
    member = np.repeat(np.arange(len(lengths)), lengths)
    asking = np.arange(len(member)) if call.queries is None else call.queries.numbers
    return asking, np.where(asking < 0, -1, member[asking]), member


def _on_device(call: AttentionArgs) -> list[Tensor]:
    """Those, made once for all layers."""
    device = call.sequences.device
    return call.sequences.once(
        ("places", call.queries),
        lambda: [torch.from_numpy(each).to(device, non_blocking=True) for each in _places(call)],
    )


def block_mask(call: AttentionArgs) -> Any:
    """Which blocks hold anything to see, and which nothing else. Worked out on the host from lengths, so that no mask
    of T*T entries is made and nothing waits for the device."""
    from torch.nn.attention.flex_attention import BlockMask

    causal, window = call.causal, call.window
    asking, owner, member = _places(call)
    row, owners, members = _on_device(call)

    def seen(batch: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        distance = row[query] - key
        allowed = owners[query] == members[key]
        if causal:
            allowed = allowed & (distance >= 0)
        return allowed if window is None else allowed & (distance < window) & (distance > -window)

    some, whole = blocks(asking, owner, np.arange(len(member)), member, causal, window)
    device = call.sequences.device
    return BlockMask.from_kv_blocks(
        *_listed(some & ~whole, device),
        *_listed(whole, device),
        BLOCK_SIZE=BLOCK,
        mask_mod=seen,
        seq_lengths=(len(asking), len(member)),
    )


def blocks(
    asking: Numbers, owner: Numbers, rows: Numbers, member: Numbers, causal: bool, window: int | None
) -> tuple[Bools, Bools]:
    """Blocks (of queries, of keys) in which some query may see some key; and those in which every query sees every key.

    Args:
        asking, owner: of each query, its row and its sequence, -1 for a slot that is not used.
        rows, member: the same of each key.
    """
    (q_first, q_last), (k_first, k_last) = _bounds(asking), _bounds(rows)
    (q_low, q_high), (k_low, k_high) = _bounds(owner), _bounds(member)
    # From key to query: the least and the greatest distance in a block.
    least, most = q_first[:, None] - k_last, q_last[:, None] - k_first
    some = (q_low[:, None] <= k_high) & (q_high[:, None] >= k_low)
    whole = (q_low[:, None] == k_high) & (q_high[:, None] == k_low)
    if causal:
        some, whole = some & (most >= 0), whole & (least >= 0)
    if window is not None:
        some &= (least < window) & (most > -window)
        whole &= (most < window) & (least > -window)
    # The last block may hang over the end, where there is nothing to see.
    whole[len(asking) // BLOCK :], whole[:, len(rows) // BLOCK :] = False, False
    return some, whole


def _bounds(values: Numbers) -> tuple[Numbers, Numbers]:
    """The least and the greatest of each block."""
    starts = np.arange(0, len(values), BLOCK)
    return np.minimum.reduceat(values, starts), np.maximum.reduceat(values, starts)


def _listed(wanted: Bools, device: torch.device) -> tuple[Tensor, Tensor]:
    """int32 (1, 1, blocks of queries), how many; and (1, 1, blocks of queries, blocks of keys), which, those first."""
    counts, which = wanted.sum(1), np.argsort(~wanted, axis=1, kind="stable")
    counted, listed = (
        torch.from_numpy(each.astype(np.int32))[None, None].to(device, non_blocking=True) for each in (counts, which)
    )
    return counted, listed
