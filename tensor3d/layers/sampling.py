"""One entry of a vocabulary whose slices lie on different ranks, drawn by the softmax of its logits.

R' rows of this rank, V vocabulary, V' its slice here, n members of the axis that splits it
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from tensor3d.distributed.collectives import gather_statistics
from tensor3d.distributed.cube import Cube
from tensor3d.distributed.cube_shape import chunk_bounds
from tensor3d.layers.norm_kernels import widened
from tensor3d.ops.row_chunks import chunk_rows, iter_row_chunks
from tensor3d.sharding.activation_layout import Face, check_face
from tensor3d.sharding.layout_checks import check_matrix, check_origin

_WORD = 2**32 - 1


def vocab_sample(logits: Tensor, draws: Tensor, vocab: int, cube: Cube, face: Face = "y") -> Tensor:
    """An entry of each row, by the probabilities that softmax makes of its logits: no logit leaves its rank. No
    gradient.

    Gumbel's trick: the largest of logits with independent noise -log(-log u) is such a draw (Maddison et al. 2014,
    arXiv 1411.0030). The noise is a function of the row's random bits and the entry's number alone, so the same rows
    draw the same entries on any cube, but where rounding of the logits decides. Elements received: 2(n-1) a row.

    Args:
        logits: (R', V') on `face`, as a projection to the vocabulary returns them (slices are DTensor's chunks).
        draws: int64 (R',): 64 random bits of each row, the same on all members of the axis.
        vocab: V.

    Returns:
        Entries (R',) int64, the same on all members of the axis.

    Raises:
        ValueError: logits of another width, or draws that are not int64 (R',).
    """
    check_face(face)
    axis = cube.axis(face)
    first, last = chunk_bounds(vocab, axis.size, axis.index)
    check_matrix(logits, "vocab_sample")
    if logits.shape[1] != last - first:
        raise ValueError(
            f"vocab_sample over {vocab} entries on face {face} needs logits (rows, {last - first}). Got "
            f"{tuple(logits.shape)}."
        )
    if draws.shape != logits.shape[:1] or draws.dtype != torch.int64:
        raise ValueError(
            f"draws must be int64 ({logits.shape[0]},), one for each row of logits. Got {draws.dtype} "
            f"{tuple(draws.shape)}."
        )
    check_origin(logits, face, cube, "vocab_sample")
    entries = torch.arange(first, last, device=logits.device)
    matrices = (logits.detach(), draws.unsqueeze(1))
    whole = logits.device.type != "cpu" or logits.shape[0] <= chunk_rows(logits.shape[1])
    parts = [matrices] if whole else iter_row_chunks(*matrices)
    best = torch.cat([_best(each, bits, entries) for each, bits in parts])
    largest, places = gather_statistics(best, axis).unbind(-1)
    winner = largest.argmax(0, keepdim=True)
    # The place inside the winner's slice; the slices before it are all of full size.
    return places.gather(0, winner)[0].long() + winner[0] * -(-vocab // axis.size)


def _best(logits: Tensor, draws: Tensor, entries: Tensor) -> Tensor:
    """(R', 2): the largest logit with its noise, and its place in this slice."""
    wide = widened(logits)
    if wide.shape[1] == 0:  # an axis larger than the vocabulary leaves empty slices
        return wide.new_tensor([-math.inf, 0.0]).expand(wide.shape[0], 2)
    largest, place = (wide + gumbel(draws, entries, wide.dtype)).max(1)
    return torch.stack([largest, place.to(wide.dtype)], 1)


def gumbel(draws: Tensor, entries: Tensor, dtype: torch.dtype) -> Tensor:
    """(R', V'): the noise of each row and entry, for draws (R', 1) and entries (V',), both int64."""
    low, high = draws & _WORD, draws >> 32 & _WORD
    bits = _scrambled(_scrambled(entries ^ low) + high & _WORD)
    u = ((bits.to(dtype) + 0.5) * 2.0**-32).clamp_(max=1 - 2.0**-24)  # fp32 rounds the last ones to 1
    return u.neg_().log1p_().neg_().log_().neg_()


def _scrambled(bits: Tensor) -> Tensor:
    """32 bits of which each depends on all of the argument's: SplitMix's output function for words of 32 bits. Its
    multipliers are below 2**31, so that in int64 no product overflows."""
    bits = (bits ^ bits >> 16) * 0x21F0AAAD & _WORD
    bits = (bits ^ bits >> 15) * 0x735A2D97 & _WORD
    return bits ^ bits >> 15
