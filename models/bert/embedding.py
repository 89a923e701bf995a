"""BERT as a maker of sentence vectors, and what such vectors learn from (Reimers and Gurevych 2019, arXiv 1908.10084).

M tokens of the cube, H hidden size, C slots for texts of a plane, N texts, n examples of a step, m candidates (the
positives of all, then all negatives)
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from models.bert.config import BertConfig
from models.bert.huggingface.from_pretrained import Pretrained
from models.bert.model import BertModel
from models.bert.text_batches import TextBatch
from tensor3d import Cube, Layout, all_reduce_replicated, constant, local_param, local_rows, normal, select
from tensor3d.attention import Backend
from tensor3d.data.packed_batch import PackedBatch
from tensor3d.layers.attention import Recompute
from tensor3d.ops.as_type import as_type, without_autocast
from tensor3d.sharding.activation_layout import Face, gather_over
from tensor3d.sharding.redistribute import sum_rows

Pooling = Literal["cls", "mean", "max", "mean_sqrt_len", "last", "weightedmean"]

# --- Dense layers behind pooling --------------------------------------------------------------------------------------
#
# K columns of a vector, D those of the next one

Activation = Literal["identity", "tanh", "relu", "gelu", "silu", "sigmoid"]
_ACTIVATIONS: Mapping[Activation, Callable[[Tensor], Tensor]] = {
    "identity": lambda vectors: vectors,
    "tanh": torch.tanh,
    "relu": F.relu,
    "gelu": F.gelu,
    "silu": F.silu,
    "sigmoid": torch.sigmoid,
}
_COPIES = Layout(sum_over=())


@dataclass(frozen=True, kw_only=True)
class DenseConfig:
    """A dense layer behind pooling, as sentence-transformers' `Dense`.

    Raises:
        ValueError: fewer than one output, or an unknown activation.
    """

    outputs: int
    """D."""
    bias: bool = True
    activation: Activation = "tanh"

    def __post_init__(self) -> None:
        if self.outputs < 1:
            raise ValueError(f"outputs of a dense layer must be at least 1. Got {self.outputs}.")
        if self.activation not in _ACTIVATIONS:
            raise ValueError(f"activation must be one of {', '.join(_ACTIVATIONS)}. Got {self.activation!r}.")


class VectorDense(nn.Module):
    """`activation(v @ weight.T + bias)` of vectors (N, K) that every rank has whole, as `pooled_vectors` gives them.

    Texts are few beside tokens. So every rank has the whole weight (D, K), 4 * D * K bytes, and computes the same of
    all vectors, in fp32 at least: no size needs to divide, nothing is sent, and each copy's gradient is that of the one
    weight, which is summed over no ranks.
    """

    def __init__(self, inputs: int, config: DenseConfig, cube: Cube, *, std: float = 0.02) -> None:
        super().__init__()
        self.config, self.cube = config, cube
        self.weight = normal((config.outputs, inputs), _COPIES, cube, std)
        self.bias = constant((config.outputs,), _COPIES, cube, 0.0) if config.bias else None

    def forward(self, vectors: Tensor) -> Tensor:
        """(N, K) to (N, D), the same on every rank."""
        weight, bias = (
            None if parameter is None else as_type(local_param(parameter, _COPIES, self.cube), vectors.dtype)
            for parameter in (self.weight, self.bias)
        )
        assert weight is not None
        with without_autocast(vectors.device):
            return _ACTIVATIONS[self.config.activation](F.linear(vectors, weight, bias))

    def extra_repr(self) -> str:
        outputs, inputs = self.weight.shape
        return f"{inputs} -> {outputs}, {self.config.activation}, whole on every rank"


def dense_layers(dense: Sequence[DenseConfig], config: BertConfig, cube: Cube) -> nn.Sequential:
    """One behind another, the first one of vectors of the hidden size."""
    widths = [config.hidden, *(layer.outputs for layer in dense)]
    layers = [VectorDense(width, layer, cube, std=config.std) for width, layer in zip(widths, dense, strict=False)]
    return nn.Sequential(*layers)


# --- Vectors ----------------------------------------------------------------------------------------------------------


class BertForSentenceEmbedding(Pretrained):
    """The encoder, and one vector for each text from its last hidden states, maybe with dense layers behind it. Without
    these it has the encoder's weights alone.

    Args:
        pooling: as of `pooled_vectors`.
        dense: layers behind it, one after another. `from_pretrained` fills them from a checkpoint of ours; those beside
            a Hugging Face folder `with_dense` reads (models/bert/huggingface/dense.py).
        backend, recompute, reshard_after_forward: as in `BertModel`.
    """

    def __init__(
        self,
        config: BertConfig,
        cube: Cube,
        *,
        pooling: Pooling = "mean",
        dense: Sequence[DenseConfig] = (),
        backend: Backend = "auto",
        recompute: Recompute = "none",
        reshard_after_forward: bool = True,
    ) -> None:
        super().__init__()
        self.config, self.cube, self.pooling = config, cube, pooling
        self.bert = BertModel(
            config, cube, backend=backend, recompute=recompute, reshard_after_forward=reshard_after_forward
        )
        self.dense = dense_layers(dense, config, cube)
        self.width = dense[-1].outputs if dense else config.hidden
        """D: columns of a vector."""

    def forward(self, laid: TextBatch) -> Tensor:
        """(N, D), as `pooled_vectors`, (N, H), without dense layers."""
        vectors: Tensor = self.dense(pooled_vectors(self.bert, laid, self.pooling))
        return vectors


def pooled_vectors(model: BertModel, laid: TextBatch, pooling: Pooling) -> Tensor:
    """(N, H), fp32 at least: a vector of each text of the whole cube, in their order, the same on every rank.

    Differentiable, as copies are: every rank computes the same from them, such as a loss over all pairs of texts, and
    its backward pass takes its own texts' part of the gradient.

    Elements received: of sums over y `2(y-1)/y * C*H/z` (of the largest `(y-1) * C*H/z`, of one token's `(y-1)/y *
    C*H/z` twice), of columns `(z-1)/z * C*H`, of rows the other planes' `C*H`; backward of one token's alone `(y-1)/y *
    C*H/z`.

    Args:
        pooling: of all tokens, special ones included: "cls": that of [CLS]; "last": that of the last one; "mean";
            "max" of each column; "mean_sqrt_len": the sum over the square root of the number of tokens; "weightedmean":
            the mean with the weights 1, 2, 3, ... from the first token on.
    """
    cube, batch = model.cube, laid.batch
    y, z, planes = cube.axis("y"), cube.axis("z"), cube.over("data", "x")
    h = model(batch)  # (M/xy, H/z) on face z
    slots, dtype = batch.first.shape[0], torch.promote_types(h.dtype, torch.float32)
    if pooling in ("cls", "last"):
        rows = batch.first if pooling == "cls" else last_of_texts(batch)
        own = gather_over(select(h, rows, cube), y).to(dtype)  # (C, H/z), copies over y
    else:
        h, owner = h.to(dtype), local_rows(laid.owner, cube, "z")
        if pooling == "weightedmean":
            h = h * local_rows(batch.positions + 1, cube, "z").unsqueeze(1)
        rest = h.new_zeros(slots + 1, h.shape[1])  # the last slot: unused rows
        if pooling == "max":
            largest = (rest - torch.inf).scatter_reduce(0, owner.unsqueeze(1).expand_as(h), h, "amax")
            own = gather_over(largest[:slots], y).view(y.size, slots, -1).amax(0)
        else:
            own = all_reduce_replicated(rest.index_add(0, owner, h)[:slots], y)
    whole = gather_over(own.t(), z).t()  # (C, H), the same on the plane
    vectors = laid.in_order(gather_over(whole, planes))
    if pooling in ("cls", "last", "max"):
        return vectors
    lengths = torch.from_numpy(laid.lengths).to(vectors.device, dtype).unsqueeze(1)
    of_sums = {"mean": lengths, "mean_sqrt_len": lengths.sqrt(), "weightedmean": lengths * (lengths + 1) / 2}
    return vectors / of_sums[pooling]


def mean_of_texts(h: Tensor, batch: PackedBatch, cube: Cube, face: Face = "z") -> Tensor:
    """(C/y, H/z) on face z, of the type of h: the mean of the hidden states of each text of the plane, in the order of
    `batch.first`; 0 in unused slots. Sends what `sum_rows` sends.

    Args:
        h: (M/xy, H/z) on face z, of all rows.
        face: of h and of the result; on face y, y and z change places.
    """
    owner = owners(batch)
    sums = sum_rows(h, owner, len(batch.first), cube, face)
    return (sums / local_rows(_tokens(batch, owner).clamp(min=1), cube, face).unsqueeze(1)).to(h.dtype)


def last_of_texts(batch: PackedBatch, padding: int | None = None) -> Tensor:
    """int64 (C,): the row of the plane with the last token of each text, in the order of `batch.first`; -1: unused.

    Args:
        padding: an id: the last token that is not it counts; of a text without another one the first token.
    """
    owner, spare = owners(batch), len(batch.first)
    places = owner.where(owner >= 0, spare)
    if padding is not None:
        places = places.where(batch.ids != padding, spare)
    rows = torch.arange(len(owner), device=owner.device)
    return F.pad(batch.first, (0, 1)).scatter_reduce(0, places, rows, "amax")[:-1]


def _tokens(batch: PackedBatch, owner: Tensor) -> Tensor:
    """int64 (C,): of each text of the plane, in the order of `batch.first`; 0 in unused slots."""
    slots = len(batch.first)
    return owner.new_zeros(slots + 1).index_add(0, owner % (slots + 1), torch.ones_like(owner))[:slots]


def owners(batch: PackedBatch) -> Tensor:
    """int64 (rows,): which text each row of the plane is of, in the order of `batch.first`; -1: of none, as the unused
    tail of a pack. Behind the first token of a text, places are above 0; unused slots have 0."""
    first, rows = batch.first, batch.ids.shape[0]
    starts = torch.where(first < 0, rows, first)  # ascending, unused ones behind all
    begins = first.new_zeros(rows + 1).index_fill(0, starts, 1)[:rows]
    owner = torch.searchsorted(starts, torch.arange(rows, device=first.device), right=True) - 1
    return torch.where((batch.positions > 0) | (begins > 0), owner, -1)


# --- What vectors learn from ------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class VectorLoss:
    """Losses of vectors of a whole step, computed on every rank alike. Means over the examples.

    With sizes (Kusupati et al. 2022, arXiv 2205.13147) a vector's first columns are to be a good vector by themselves:
    the loss is the mean of those of each size and of the whole.
    """

    temperature: float = 0.05
    """Cosines are divided by it, in front of the softmax over candidates."""
    symmetric: bool = False
    """Whether a positive is to find its anchor among all anchors, too: the mean of both losses."""
    sizes: tuple[int, ...] = ()
    """Columns, each fewer than a vector has."""

    def in_batch(self, anchors: Tensor, candidates: Tensor, allowed: Tensor) -> Tensor:
        """Cross-entropy of each anchor's own positive among all candidates, by cosine (InfoNCE, van den Oord et al.
        2018; with negatives from the batch, Henderson et al. 2017).

        Args:
            anchors: (n, H)
            candidates: (m, H): the positives in the order of the anchors, then negatives.
            allowed: bool (n, m): which candidates an anchor is compared with; its own positive is one of them.
        """
        own = torch.arange(len(anchors), device=anchors.device)
        losses = []
        for a, c in self._cut(anchors, candidates):
            scores = (F.normalize(a, dim=1) @ F.normalize(c, dim=1).t() / self.temperature).masked_fill(
                ~allowed, -torch.inf
            )
            loss = F.cross_entropy(scores, own)
            if self.symmetric:
                loss = (loss + F.cross_entropy(scores[:, : len(anchors)].t(), own)) / 2
            losses.append(loss)
        return torch.stack(losses).mean()

    def cosine(self, firsts: Tensor, seconds: Tensor, scores: Tensor) -> Tensor:
        """(pairs, H) twice, (pairs,): the sum of the squares of what cosines and scores differ by."""
        errors = [F.cosine_similarity(a, b) - scores for a, b in self._cut(firsts, seconds)]
        return torch.stack(errors).square().mean(0).sum()

    def _cut(self, first: Tensor, second: Tensor) -> Sequence[tuple[Tensor, Tensor]]:
        return [(first[:, :size], second[:, :size]) for size in (*self.sizes, first.shape[1])]
