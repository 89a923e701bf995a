"""Attention whose scores depend on how far a key is from its query: a bias by distance, and disentangled positions.

    score(i, j) = (q_i k_j + q_i K[b] + k_j Q[b]) / sqrt(t d) + bias[b]        b = bucket(i - j)

t counts the products. Of T5 and MPNet the bias alone (Raffel et al. 2020, arXiv 1910.10683, §2.1), of DeBERTa both
products (He et al. 2021, arXiv 2006.03654, §3.1, equation 4). Buckets hold far distances together.

n buckets, h heads of a rank, d head dimension
"""

from __future__ import annotations

import functools
import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor

from tensor3d.batches.length_groups import LengthGroup
from tensor3d.torch_private import without_modes

Numbers = NDArray[np.int64]


class Buckets(Protocol):
    """Which row of a table stands for a distance."""

    @property
    def rows(self) -> int:
        """Of the table."""

    def of(self, distances: Numbers) -> Numbers:
        """The row of each distance, query less key, of any shape."""


@dataclass(frozen=True, kw_only=True)
class BiasBuckets:
    """T5's, of both directions (Raffel et al. 2020, §2.1): half of the rows are for keys after the query; of each half
    the first half for one distance each, the others for distances that grow up to the farthest.

    Raises:
        ValueError: rows that do not divide by 4, or a farthest distance that has no bucket of its own anyway.
    """

    rows: int = 32
    farthest: int = 128
    """From this distance on all share the last bucket."""

    def __post_init__(self) -> None:
        if self.rows < 4 or self.rows % 4:
            raise ValueError(f"buckets of both directions need rows that divide by 4. Got {self.rows}.")
        if self.farthest <= self.rows // 4:
            raise ValueError(f"the farthest distance must be above rows / 4 = {self.rows // 4}. Got {self.farthest}.")

    def of(self, distances: Numbers) -> Numbers:
        half, exact = self.rows // 2, self.rows // 4
        away = np.abs(distances)
        # In torch and in fp32, as models have learnt them: where a logarithm is rounded decides on a bucket.
        ratio = torch.from_numpy(np.maximum(away, 1)).float() / exact
        grown = (torch.log(ratio) / math.log(self.farthest / exact) * (half - exact)).long().numpy()
        far: Numbers = np.minimum(exact + grown, half - 1)
        return np.where(away < exact, away, far) + np.where(distances < 0, half, 0)


@dataclass(frozen=True, kw_only=True)
class LogBuckets:
    """DeBERTa's (He et al. 2021; the second version's code): near distances have a bucket each, to both sides, and far
    ones share those that are left, ever more of them.

    Raises:
        ValueError: a span below 2 or odd, or a farthest distance within the half of it that is told apart anyway.
    """

    span: int = 256
    """Buckets to each side; the table has twice as many rows."""
    farthest: int = 512
    """Distances below it are told apart by their logarithm; the last bucket has all beyond, too."""

    def __post_init__(self) -> None:
        if self.span < 2 or self.span % 2:
            raise ValueError(f"buckets to each side must be even. Got {self.span}.")
        if self.farthest <= self.span // 2 + 1:
            raise ValueError(f"the farthest distance must be above {self.span // 2 + 1}. Got {self.farthest}.")

    @property
    def rows(self) -> int:
        return 2 * self.span

    def of(self, distances: Numbers) -> Numbers:
        middle, given = self.span // 2, torch.from_numpy(np.ascontiguousarray(distances))
        away = torch.where(given.abs() < middle, torch.tensor(middle - 1), given.abs())
        # In fp32, as models have learnt them.
        steps = torch.log(away / middle) / torch.log(torch.tensor((self.farthest - 1) / middle)) * (middle - 1)
        far = (torch.ceil(steps) + middle) * given.sign()
        bucket = torch.where(away <= middle, given.to(far.dtype), far).long()
        numbers: Numbers = (bucket + self.span).clamp(0, self.rows - 1).numpy()
        return numbers


@dataclass(frozen=True, kw_only=True, eq=False)
class RelativeTerms:
    """What scores have beside q k^T. At least one of the three."""

    buckets: Buckets
    bias: Tensor | None = None
    """(n, h)"""
    keys: Tensor | None = None
    """(n, h, d): queries meet that of their distance (content to position)."""
    queries: Tensor | None = None
    """(n, h, d): keys meet that of their distance (position to content)."""

    def __post_init__(self) -> None:
        if not self.tensors:
            raise ValueError("relative positions need a bias, keys or queries by distance. Got none of them.")
        for name, each in (("bias", self.bias), ("keys", self.keys), ("queries", self.queries)):
            wanted = 2 if name == "bias" else 3
            if each is not None and (each.dim() != wanted or each.shape[0] != self.buckets.rows):
                shape = "(rows, heads)" if name == "bias" else "(rows, heads, head dimension)"
                raise ValueError(f"{name} must be {shape} with {self.buckets.rows} rows. Got {tuple(each.shape)}.")

    @property
    def tensors(self) -> list[Tensor]:
        return [each for each in (self.bias, self.keys, self.queries) if each is not None]

    def scale(self, head_dim: int) -> float:
        """Of all products."""
        return 1 / math.sqrt(head_dim * (1 + (self.keys is not None) + (self.queries is not None)))

    def check(self, q: Tensor) -> None:
        """Raises ValueError unless they are for the heads of q, (rows, h, d), and of its type, but for a bias."""
        for name, each in (("bias", self.bias), ("keys", self.keys), ("queries", self.queries)):
            if each is not None and each.shape[1:] != (q.shape[1:2] if name == "bias" else q.shape[1:]):
                raise ValueError(
                    f"{name} by distance must have the heads of q, {tuple(q.shape)}. Got {tuple(each.shape)}."
                )
            if each is not None and name != "bias" and each.dtype != q.dtype:
                raise ValueError(f"{name} by distance must be of q's type, {q.dtype}. Got {each.dtype}.")

    def without_rows(self, result: Tensor) -> Tensor:
        """The result where no row has met them: a backward pass comes through here all the same, as on other ranks."""
        return result + sum(each[:0].sum().to(result.dtype) for each in self.tensors)


# --- One group of sequences -------------------------------------------------------------------------------------------
#
# m members, A rows of each that ask, L rows of each, u buckets that occur


@dataclass(frozen=True, kw_only=True)
class _Columns:
    """Buckets of one group, numbered anew: only those that occur are multiplied."""

    used: Tensor
    """int64 (u,): which ones."""
    of_queries: Tensor
    """int64 (A, L), or (m, 1, A, L): the number of each."""
    of_keys: Tensor
    """The same, turned: (L, A), or (m, 1, L, A)."""


def attend(q: Tensor, k: Tensor, v: Tensor, terms: RelativeTerms, group: LengthGroup, call: _Call) -> Tensor:
    """(m, h, A, d). A GPU's kernel keeps the scores' second part (m, h, A, L) for backward; elsewhere probabilities are
    kept, and with dropout what of them stays.

    Args:
        q: (m, h, A, d)
        k, v: (m, h, L, d)
    """
    added = _added(q, k, terms, group)
    mask, causal = group.masking(call.window, call.causal)
    seen = group.band(None, True) if causal else mask
    if seen is not None:
        added = added.masked_fill(~seen, -math.inf)
    scale = terms.scale(q.shape[-1])
    if q.is_cuda:
        added = added.to(q.dtype)
        return F.scaled_dot_product_attention(q, k, v, attn_mask=added, dropout_p=call.dropout, scale=scale)
    own, keys = q.flatten(0, 1), k.flatten(0, 1).transpose(1, 2)
    scores = torch.baddbmm(added.expand(len(q), -1, -1, -1).flatten(0, 1), own, keys, alpha=scale)
    weights = scores.softmax(-1, dtype=torch.promote_types(q.dtype, torch.float32)).to(q.dtype)
    return torch.bmm(F.dropout(weights, call.dropout), v.flatten(0, 1)).view(q.shape)


class _Call(Protocol):
    """Of `AttentionArgs`."""

    dropout: float
    causal: bool
    window: int | None


def _added(q: Tensor, k: Tensor, terms: RelativeTerms, group: LengthGroup) -> Tensor:
    """What distance adds to the scores, (m, h, A, L), or with a bias alone (1, h, A, L)."""
    columns: _Columns = group.once(("relative", terms.buckets), lambda: _columns(terms.buckets, group))
    scale, parts = terms.scale(q.shape[-1]), []
    if terms.keys is not None:
        products = q @ (terms.keys.index_select(0, columns.used) * scale).permute(1, 2, 0)
        parts.append(_chosen(products, columns.of_queries))
    if terms.queries is not None:
        products = k @ (terms.queries.index_select(0, columns.used) * scale).permute(1, 2, 0)
        parts.append(_chosen(products, columns.of_keys).transpose(-1, -2))
    if terms.bias is not None:
        by_head = terms.bias.index_select(0, columns.used).t()[:, columns.of_queries]
        bias = by_head.squeeze(2).transpose(0, 1) if by_head.dim() == 5 else by_head.unsqueeze(0)
        parts.append(bias.to(q.dtype))
    return functools.reduce(torch.add, parts)


def _chosen(products: Tensor, numbers: Tensor) -> Tensor:
    """Of (m, h, rows, u) the column that each pair has: (m, h, rows, others)."""
    return products.gather(-1, numbers.expand(*products.shape[:3], -1))


def _columns(buckets: Buckets, group: LengthGroup) -> _Columns:
    distances = np.arange(1 - group.length, group.length)
    with without_modes():  # numbers of the host, also in a step that is counted without any
        rows = buckets.of(distances)
    used, of_distance = np.unique(rows, return_inverse=True)
    numbers = torch.from_numpy(of_distance.reshape(-1)).to(group.device, non_blocking=True)
    of_queries = numbers[group.distances + (group.length - 1)]
    return _Columns(
        used=torch.from_numpy(used).to(group.device, non_blocking=True),
        of_queries=of_queries,
        of_keys=of_queries.transpose(-1, -2).contiguous(),
    )


# --- Dense, one sequence ----------------------------------------------------------------------------------------------


def dense_scores(q: Tensor, k: Tensor, terms: RelativeTerms, distances: Tensor) -> Tensor:
    """All of the scores, (h, A, L), by the formula above.

    Args:
        q: (A, h, d)
        k: (L, h, d)
        distances: int64 (A, L), query less key.
    """
    rows = torch.from_numpy(terms.buckets.of(distances.cpu().numpy())).to(q.device)
    scores = torch.stack(list(_products(q, k, terms, rows))).sum(0) * terms.scale(q.shape[-1])
    return scores if terms.bias is None else scores + terms.bias[rows].permute(2, 0, 1)


def _products(q: Tensor, k: Tensor, terms: RelativeTerms, rows: Tensor) -> Iterator[Tensor]:
    yield torch.einsum("qhd,khd->hqk", q, k)
    if terms.keys is not None:
        yield torch.einsum("qhd,qkhd->hqk", q, terms.keys[rows])
    if terms.queries is not None:
        yield torch.einsum("khd,qkhd->hqk", k, terms.queries[rows])
