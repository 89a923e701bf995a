"""Dense attention with a block-diagonal mask: what every other backend is compared with.

T rows of a rank, R rows that ask, h heads of a rank, d head dimension
"""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor

from tensor3d.attention.call import Call


def reference(q: Tensor, k: Tensor, v: Tensor, call: Call) -> Tensor:
    lengths, device = call.sequences.lengths, k.device
    member = torch.repeat_interleave(torch.arange(len(lengths), device=device), torch.tensor(lengths, device=device))
    keys = torch.arange(k.shape[0], device=device)
    asking = keys if call.queries is None else call.queries.rows.clamp_min(0)
    distance = asking[:, None] - keys
    allowed = member[asking][:, None] == member
    if call.causal:
        allowed &= distance >= 0
    if call.window is not None:
        allowed &= distance.abs() < call.window
    scores = torch.einsum("qhd,khd->hqk", q, k) / math.sqrt(q.shape[-1])
    wide = torch.promote_types(q.dtype, torch.float32)
    weights = torch.where(allowed, scores, -math.inf).softmax(-1, dtype=wide).to(q.dtype)
    result = torch.einsum("hqk,khd->qhd", F.dropout(weights, call.dropout), v)
    return result if call.queries is None else torch.where((call.queries.rows >= 0)[:, None, None], result, 0)
