"""BERT with a masked-LM and a next-sentence head, for packed batches.

M tokens of the cube, H hidden size, R masked slots and C [CLS] slots of the cube, V vocabulary
h is always on face z, (M/xy, H/z), unless a comment says otherwise
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from models.bert.config import BertConfig
from models.bert.huggingface.from_pretrained import Pretrained
from tensor3d import (
    MLP3D,
    Attention3D,
    Block3D,
    Cube,
    Dropout3D,
    Embedding3D,
    GatedMLP3D,
    LayerNorm3D,
    Linear3D,
    LookupEmbedding3D,
    Projection3D,
    RMSNorm3D,
    SmallHead3D,
    TransformerLayer3D,
    all_reduce_replicated,
    cross_entropy,
    gather_together,
    local_rows,
    redistribute,
    select,
    unfold_rows,
)
from tensor3d.attention import Backend
from tensor3d.attention.relative import Buckets
from tensor3d.batches.row_selection import RowSelection
from tensor3d.data.masking import MASKED_SHARE
from tensor3d.data.packed_batch import Pack, PackedBatch, collate
from tensor3d.layers.attention import Recompute
from tensor3d.layers.linear import kept_for_heads
from tensor3d.layers.mlp import GatedActivation
from tensor3d.layers.relative import RelativeBias3D, RelativeEmbedding3D, RelativeRows
from tensor3d.ops.activations import activated

# ----------------------------------------------------------------------------------------------------------------------
# Layers with rotary positions.
#
# The modern encoder's are what ModernBERT (Warner et al. 2024, arXiv 2412.13663, §2.1) changed of BERT's, with BERT's
# objectives kept: GeGLU, LayerNorm before each block, no bias, and local attention. As there, the first layer has no
# norm before its attention, for the embeddings end with one; and with a window, every n-th layer sees whole sequences,
# beginning with the first. Its window of 128 tokens, 64 to each side, is `window=65` here. `family="modernbert"` is all
# of it: no token types, a rotary base of local layers, heads without a pooler. `family="eurobert"` (Boizard et al.
# 2025, arXiv 2503.05500, §2.1) is a decoder's layer that sees all tokens, as of Llama 3: RMSNorm before both blocks of
# every layer, a gate of SiLU, fewer heads of keys and values, and no norm of the embeddings. `family="gemma3_text"` is
# EmbeddingGemma (Schechter Vera et al. 2025, arXiv 2509.20354), the same of Gemma 3: RMSNorms of queries and keys and
# of what attention and MLP give, too, a gate of GELU, and windows. `family="qwen3"` (Yang et al. 2025, arXiv
# 2505.09388) has EuroBERT's layer with RMSNorms of queries and keys; of Qwen3-Embedding (Zhang et al. 2025, arXiv
# 2506.05176), which is `causal`, the state of the last token is the vector of a text.
#
# Others kept BERT's norms behind each block. Jina's third embedding model (`family="jina_embeddings_v3"`, Sturua et al.
# 2024, arXiv 2409.10173) kept all but the table of positions; NomicBERT (`"nomic_bert"`, Nussbaum et al. 2024, arXiv
# 2402.01613) has a gate of SiLU and no bias in a layer's products; GTE (`"gte"`, Zhang et al. 2024, arXiv 2407.19669) a
# gate of GELU, without bias and with dropout behind it.


def rotary_layer(
    config: BertConfig,
    cube: Cube,
    number: int,
    *,
    backend: Backend = "auto",
    recompute: Recompute = "none",
    reshard_after_forward: bool = True,
) -> Block3D:
    """Layer `number` of the encoder, counted from 0, face z to face z.

    Args:
        backend, recompute, reshard_after_forward: as in `BertModel`.

    Raises:
        ValueError: sizes that do not divide, named with the axis.
    """
    attention = Attention3D(
        config.hidden,
        config.heads,
        cube,
        config.causal,
        dropout=config.attention_dropout,
        backend=backend,
        bias=config.layer_biases[0],
        std=config.std,
        recompute=recompute,
        reshard_after_forward=reshard_after_forward,
        rotary_base=config.rotary_base_of(number),
        rotary_factor=config.rotary_factor,
        window=config.window_of(number),
        kv_heads=config.kv_heads,
        head_dim=config.head_size,
        qk_norm=config.eps if config.traits.qk_norm else None,
        zero_centered_norms=config.traits.qk_norm and config.traits.zero_centered_norms,
    )
    made: dict[str, Any] = {"std": config.std, "reshard_after_forward": reshard_after_forward}
    mlp: nn.Module
    if config.has_gate:
        mlp = GatedMLP3D(
            config.hidden,
            cube,
            config.inner_size,
            gate_activation(config),
            down_bias=config.layer_biases[3],
            dropout=config.gate_dropout,
            **made,
        )
    else:
        mlp = MLP3D(config.hidden, cube, config.inner_size, activation=config.activation, **made)
    out_dropout = config.attention_out_dropout
    has_out_norms = config.traits.out_norms
    return Block3D(
        attention,
        norm_of(config, cube) if config.has_attention_norm(number) else nn.Identity(),
        mlp,
        norm_of(config, cube),
        norm="pre" if config.pre_norm else "post",
        dropout=Dropout3D(config.dropout, cube),
        attention_out_dropout=None if out_dropout is None else Dropout3D(out_dropout, cube),
        attention_out_norm=norm_of(config, cube) if has_out_norms else None,
        mlp_out_norm=norm_of(config, cube) if has_out_norms else None,
        recompute=recompute,
    )


def gate_activation(config: BertConfig) -> GatedActivation:
    """Of the MLP's gate."""
    if config.activation == "relu":  # which no family with a gate has
        raise ValueError("a gate has no relu here. Choose silu, gelu or gelu_tanh.")
    return config.activation


def norm_of(config: BertConfig, cube: Cube) -> LayerNorm3D | RMSNorm3D:
    """A norm of hidden states, on face z."""
    if config.traits.rms_norm:
        return RMSNorm3D(config.hidden, cube, eps=config.eps, zero_centered=config.traits.zero_centered_norms)
    return LayerNorm3D(config.hidden, cube, eps=config.eps, bias=config.norm_bias)


# --- A micro-batch of a given size without any text, for a model that is to be looked at and not to be trained --------


def example_batch(
    tokens: int, longest: int, cube: Cube, *, with_read_rows: bool = False, with_draws: bool = False
) -> tuple[PackedBatch, int, int]:
    """This rank's part of `tokens` tokens, all of id 0; and the targets and sequences of the whole micro-batch.

    Each rank's rows on face y are one full pack, of sequences of `longest` tokens and one of the rest.

    Args:
        with_draws: random bits of masked places too, all of them 0.

    Raises:
        ValueError: tokens that do not divide among the ranks' rows on both faces.
    """
    shape = cube.shape
    unit = shape.planes * math.lcm(shape.y, shape.z)
    if tokens < 1 or tokens % unit:
        raise ValueError(f"tokens must divide by data * x * lcm(y, z) = {unit} on {shape}. Got {tokens}.")
    packs, slots = shape.planes * shape.z, tokens // (shape.planes * shape.z)
    whole, rest = divmod(slots, longest)
    lengths = np.array([longest] * whole + ([rest] if rest else []), dtype=np.int64)
    masked = max(1, round(MASKED_SHARE * slots))
    zeros = np.zeros(slots, dtype=np.int64)
    pack = Pack(
        ids=zeros,
        types=zeros,
        lengths=lengths,
        masked=np.arange(masked),
        masked_labels=zeros[:masked],
        next_labels=np.zeros(len(lengths), dtype=np.int64),
        draws=zeros[:masked] if with_draws else None,
    )
    batch = collate(
        [pack] * shape.z,
        capacity=slots,
        masked_per_pack=masked,
        max_sequences=len(lengths),
        shape=shape,
        rank=cube.rank,
        pad=0,
        with_read_rows=with_read_rows,
        planes_alike=True,
    )
    return batch.to(cube.device), packs * masked, packs * len(lengths)


# --- BERT with a masked-LM and a next-sentence head, for packed batches -----------------------------------------------


@dataclass(frozen=True, kw_only=True)
class PreTrainingOutput:
    """Scalars of the whole cube, the same on every rank, or this rank's part of them, as `BertForPreTraining` is asked
    for. Sums over micro-batches are those of the step."""

    loss: Tensor
    """Masked-LM plus next-sentence loss, in nats; the one to call `backward` on."""
    mlm_loss: Tensor
    """Masked-LM part, in nats."""
    nsp_loss: Tensor
    """Next-sentence part, in nats."""
    mlm_correct: Tensor
    """Masked positions predicted right, a count."""
    nsp_correct: Tensor
    """Next-sentence labels predicted right, a count."""

    @property
    def sums(self) -> Tensor:
        """(5,): all of them in this order, without gradient."""
        return torch.stack([self.loss.detach(), self.mlm_loss, self.nsp_loss, self.mlm_correct, self.nsp_correct])


class BertEmbeddings(nn.Module):
    """Token, position and type embeddings, LayerNorm where the family has one, dropout, and ELECTRA's projection of
    narrow ones. Rotary positions are turned in attention."""

    def __init__(self, config: BertConfig, cube: Cube) -> None:
        super().__init__()
        self.cube, columns = cube, config.embedding_size
        # As the library has it, also in models of fp64.
        self.scale = float(np.float32(math.sqrt(columns))) if config.traits.scaled_embeddings else None
        self.tokens = Embedding3D(config.vocab, columns, cube, std=config.std)
        self.positions = self.types = None
        self.first_position = config.first_position
        if config.position_rows:
            self.positions = LookupEmbedding3D(config.position_rows, columns, cube, std=config.std)
        if config.types:
            self.types = LookupEmbedding3D(config.types, columns, cube, std=config.std)
        self.norm = None
        if config.traits.embedding_norm:
            self.norm = LayerNorm3D(columns, cube, eps=config.eps, bias=config.norm_bias)
        self.dropout = Dropout3D(config.dropout, cube)
        self.projection = None
        if config.has_projection:
            self.projection = Linear3D(columns, config.hidden, cube, "z", std=config.std)

    def forward(
        self,
        ids: Tensor,
        positions: Tensor,
        types: Tensor,
        *,
        planes_alike: bool = False,
        added: Sequence[Tensor] = (),
    ) -> Tensor:
        h = self.dropout(self.normed(ids, positions, types, planes_alike=planes_alike, added=added))
        return h if self.projection is None else redistribute(self.projection(h), self.cube, to="z")

    def normed(
        self,
        ids: Tensor,
        positions: Tensor,
        types: Tensor,
        *,
        planes_alike: bool = False,
        added: Sequence[Tensor] = (),
    ) -> Tensor:
        """What ELECTRA's generator and discriminator have in common: the embeddings before dropout and projection.

        Args:
            added: to the sum of the embeddings, of their shape.
        """
        tokens = self.tokens(ids, planes_alike=planes_alike)
        chosen = [tokens if self.scale is None else tokens * self.scale, *added]
        if self.positions is not None:
            chosen.append(self.positions(positions + self.first_position if self.first_position else positions))
        if self.types is not None:
            chosen.append(self.types(torch.zeros_like(types) if self.types.rows == 1 else types))
        result: Tensor = functools.reduce(torch.add, chosen) if self.norm is None else self.norm(*chosen)
        return result


def classic_layer(
    config: BertConfig,
    cube: Cube,
    number: int,
    *,
    backend: Backend = "auto",
    recompute: Recompute = "none",
    reshard_after_forward: bool = True,
) -> TransformerLayer3D:
    """A layer as Devlin et al. have it, face z to face z; they are all alike, whatever the `number`."""
    return TransformerLayer3D(
        config.hidden,
        config.heads,
        cube,
        config.inner_size,
        activation=config.activation,
        norm=config.norm,
        dropout=config.mlp_dropout,
        attention_dropout=config.attention_dropout,
        attention_out_dropout=None if config.out_dropout == config.mlp_dropout else config.out_dropout,
        backend=backend,
        eps=config.eps,
        std=config.std,
        recompute=recompute,
        reshard_after_forward=reshard_after_forward,
    )


class DistanceTable(nn.Module):
    """DeBERTa's hidden states by distance of query and key, of which every layer makes keys and queries with the
    weights that it has for tokens (He et al. 2021, arXiv 2006.03654, §3.1; of one table for all layers and a LayerNorm
    behind it, as the second and third version have them)."""

    def __init__(self, config: BertConfig, buckets: Buckets, cube: Cube) -> None:
        super().__init__()
        self.table = RelativeEmbedding3D(buckets, config.hidden, cube, std=config.std)
        self.norm = LayerNorm3D(config.hidden, cube, eps=config.eps)
        self.dropout = Dropout3D(config.dropout, cube)

    def forward(self) -> RelativeRows:
        """Of all distances, n rows: (n/xy, H/z) on face z, of which each layer drops for itself."""
        rows = self.norm(self.table.all_rows())
        return RelativeRows(rows=rows, buckets=self.table.buckets, dropout=self.dropout)


class FirstConvolution(nn.Module):
    """A convolution of the embeddings along each sequence, added to what the first layer gives, and a LayerNorm: of the
    two largest DeBERTas of the second version, by their authors' code; the paper has none."""

    def __init__(self, config: BertConfig, kernel: int, cube: Cube) -> None:
        super().__init__()
        self.cube, self.kernel = cube, kernel
        self.conv = Linear3D(kernel * config.hidden, config.hidden, cube, "z", std=config.std)
        self.dropout = Dropout3D(config.dropout, cube)
        self.norm = LayerNorm3D(config.hidden, cube, eps=config.eps)

    def forward(self, embedded: Tensor, h: Tensor, positions: Tensor) -> Tensor:
        """Both (M/xy, H/z) on face z, to the same; positions (M/x,) of the plane's rows within their sequences."""
        found = self.dropout(self.conv(unfold_rows(embedded, positions, self.kernel, self.cube)))
        result: Tensor = self.norm(h, redistribute(activated(found, "gelu"), self.cube, to="z"))
        return result


class BertModel(Pretrained):
    """The encoder: embeddings and transformer layers (Devlin et al. 2018, §3; the modern one: models/bert/model.py).

    Every rank constructs it at the same time, after `cube.manual_seed`.

    Args:
        recompute, reshard_after_forward: memory against time, as in `TransformerLayer3D`; the results are the same.
        read_rows_only: the last layer computes only the rows that heads read, which its batches have to name
            (`PackedBatch.read`); the results are the same, but for dropout's draws.

    Raises:
        ValueError: heads or an inner size that do not divide by y, or a hidden size that does not by y and z.
    """

    def __init__(
        self,
        config: BertConfig,
        cube: Cube,
        *,
        backend: Backend = "auto",
        recompute: Recompute = "none",
        reshard_after_forward: bool = True,
        read_rows_only: bool = False,
    ) -> None:
        super().__init__()
        self.config, self.cube, self.read_rows_only = config, cube, read_rows_only
        self.embeddings = BertEmbeddings(config, cube)
        self.relative = None
        if config.distance_buckets is not None:
            self.relative = DistanceTable(config, config.distance_buckets, cube)
        self.convolution = None
        if config.conv_kernel is not None:
            self.convolution = FirstConvolution(config, config.conv_kernel, cube)
        self.relative_bias = None
        if config.traits.relative_bias:
            self.relative_bias = RelativeBias3D(config.heads, cube, std=config.std)
        layer = rotary_layer if config.has_rotary else classic_layer
        self.layers = nn.ModuleList(
            layer(
                config, cube, number, backend=backend, recompute=recompute, reshard_after_forward=reshard_after_forward
            )
            for number in range(config.layers)
        )
        # A residual stream that no LayerNorm has closed needs one at the end.
        self.final_norm = None
        if config.pre_norm:
            self.final_norm = norm_of(config, cube)

    def forward(self, batch: PackedBatch, added: Sequence[Tensor] = ()) -> Tensor:
        """One plane's micro-batch to hidden states (M/xy, H/z) on face z; of the read rows alone (U/y, H/z).

        Args:
            added: to the embeddings before their norm, (M/xy, H/z) on face z.

        Raises:
            ValueError: the last layer needs to know which rows are read, and the batch does not say.
        """
        # Asked for before anything is sent.
        chosen = self._read(batch) if self.read_rows_only else None
        h = embedded = self.embeddings(
            batch.ids, batch.positions, batch.types, planes_alike=batch.planes_alike, added=added
        )
        relative = None if self.relative_bias is None else self.relative_bias()
        if self.relative is not None:
            relative = self.relative()
        for number, layer in enumerate(self.layers[:-1]):
            h = layer(h, batch.sequences, relative=relative)
            if number == 0 and self.convolution is not None:
                h = self.convolution(embedded, h, batch.positions)
        h = self.layers[-1](h, batch.sequences, chosen, relative=relative)
        return h if self.final_norm is None else self.final_norm(h)

    def rows_of_heads(self, batch: PackedBatch) -> tuple[Tensor, Tensor]:
        """Where masked places (R,) and [CLS] (C,) are in what `forward` gives, as rows of the plane."""
        if not self.read_rows_only:
            return batch.masked, batch.first
        masked, first = self._read(batch).heads
        return masked, first

    def _read(self, batch: PackedBatch) -> RowSelection:
        if batch.read is None:
            raise ValueError(
                "a model with read_rows_only=True needs batches that say which rows are read. Got one without. Make "
                "it with collate(..., with_read_rows=True) or Loader(..., with_read_rows=True)."
            )
        return batch.read


class PredictionHead(nn.Module):
    """Dense, activation, LayerNorm: what stands before logits of the vocabulary, and of classes in a ModernBERT."""

    def __init__(self, config: BertConfig, cube: Cube) -> None:
        super().__init__()
        self.cube, self.activation = cube, config.head_activation
        columns = config.embedding_size
        self.dense = Linear3D(
            config.hidden,
            columns,
            cube,
            "z",
            config.head_bias,
            std=config.std,
            reshard_after_forward=kept_for_heads(cube),
        )
        self.norm = LayerNorm3D(columns, cube, "y", eps=config.eps, bias=config.norm_bias)

    def forward(self, h: Tensor) -> Tensor:
        """(R/xy, H/z) on face z to (R/xz, H/y) on face y; H of the embeddings, where theirs is another."""
        result: Tensor = self.norm(activated(self.dense(h), self.activation))
        return result


class MaskedLMHead(nn.Module):
    """Logits over the vocabulary for chosen rows: dense, activation, LayerNorm, and a projection that is the embedding
    of tokens, or has a weight of its own (`BertConfig.tied`). EuroBERT's is the projection alone."""

    def __init__(self, config: BertConfig, cube: Cube) -> None:
        super().__init__()
        self.cube, self.activation = cube, config.head_activation
        self.dense = self.norm = None
        if not config.traits.decoder_alone:
            before = PredictionHead(config, cube)
            self.dense, self.norm = before.dense, before.norm
        self.projection = Projection3D(
            config.embedding_size,
            config.vocab,
            cube,
            bias=not config.traits.decoder_alone,
            std=config.std,
            holds_weight=not config.tied,
        )

    def forward(self, h: Tensor, rows: Tensor, word_embedding: nn.Parameter) -> Tensor:
        """Rows (R/x,) of the plane to logits (R/xz, V/y) on face y.

        Args:
            word_embedding: the embedding of tokens (V, H); a projection with a weight of its own does not look at it.
        """
        chosen = select(h, rows, self.cube)  # (R/xy, H/z) on face z
        if self.dense is not None and self.norm is not None:
            chosen = redistribute(self.norm(activated(self.dense(chosen), self.activation)), self.cube, to="z")
        return self.projection(chosen, word_embedding if self.projection.tied else None)


class Pooler(nn.Module):
    """One vector a sequence, from its [CLS]: dense and tanh, or what the family has. (C/xz, H/y) on face y."""

    def __init__(self, config: BertConfig, cube: Cube) -> None:
        super().__init__()
        self.cube, self.activation = cube, config.traits.pooler
        self.dense = Linear3D(
            config.hidden,
            config.hidden,
            cube,
            "z",
            config.has_pooler_bias,
            std=config.std,
            reshard_after_forward=kept_for_heads(cube),
        )

    def forward(self, h: Tensor, rows: Tensor, dropout: nn.Module | None = None) -> Tensor:
        """`dropout`: of [CLS], before the dense layer."""
        chosen = select(h, rows, self.cube)
        return self.of_rows(chosen if dropout is None else dropout(chosen))

    def of_rows(self, h: Tensor) -> Tensor:
        """What is made of each row: (R/xy, H/z) on face z to (R/xz, H/y) on face y."""
        dense = self.dense(h)
        return torch.tanh(dense) if self.activation == "tanh" else activated(dense, self.activation)


class BertForPreTraining(Pretrained):
    """The encoder with both heads of pre-training, or that of masked tokens alone (`BertConfig.next_sentence`), whose
    next-sentence figures are 0. Arguments as of `BertModel`.

    Raises:
        ValueError: an encoder that sees no later tokens, or see `BertModel`.
    """

    def __init__(
        self,
        config: BertConfig,
        cube: Cube,
        *,
        backend: Backend = "auto",
        recompute: Recompute = "none",
        reshard_after_forward: bool = True,
        read_rows_only: bool = False,
    ) -> None:
        super().__init__()
        if config.causal:
            raise ValueError(
                "masked tokens are told by what stands on both sides of them, and this encoder sees no later tokens. "
                "Got causal=True. Set it to false (is_causal of its config.json)."
            )
        self.config, self.cube = config, cube
        self.bert = BertModel(
            config,
            cube,
            backend=backend,
            recompute=recompute,
            reshard_after_forward=reshard_after_forward,
            read_rows_only=read_rows_only,
        )
        self.masked_lm = MaskedLMHead(config, cube)
        self.pooler, self.next_sentence = None, None
        if config.next_sentence:
            self.pooler = Pooler(config, cube)
            self.next_sentence = SmallHead3D(config.hidden, 2, cube, "y", std=config.std)

    def forward(
        self, batch: PackedBatch, targets: int, sequences: int, *, reduce_loss: bool = True
    ) -> PreTrainingOutput:
        """The loss of one micro-batch as its part of a step.

        Args:
            targets: masked positions of the whole step, all planes and micro-batches; so the sum of the micro-batches'
                losses is the step's mean, whatever the accumulation and the cube.
            sequences: next-sentence labels of the whole step.
            reduce_loss: whether the result is that of the whole cube. Otherwise it is this rank's part, of which those
                along data, x and z add up to it, while members of y hold copies: for whoever sums them later, with
                other numbers (`clip_gradients`' `along`). Gradients are the same bits.
        """
        h = self.bert(batch)
        masked, first = self.bert.rows_of_heads(batch)
        pooled = None
        with gather_together([self.masked_lm, *([] if self.pooler is None else [self.pooler])], self.cube):
            logits = self.masked_lm(h, masked, self.bert.embeddings.tokens.weight)
            if self.pooler is not None:
                pooled = self.pooler(h, first)
        labels = local_rows(batch.masked_labels, self.cube)
        mlm, predictions = cross_entropy(logits, labels, self.config.vocab, self.cube)

        if self.next_sentence is not None and pooled is not None:
            pair_logits = self.next_sentence(pooled)  # (C/xz, 2), copies over y
            pair_labels = local_rows(batch.next_labels, self.cube)
            pair_logits = pair_logits.to(mlm.dtype)  # at least fp32
            nsp = F.cross_entropy(pair_logits, pair_labels, reduction="sum")
            nsp_correct = (pair_logits.argmax(1) == pair_labels).sum(dtype=mlm.dtype)
        else:
            nsp = nsp_correct = mlm.new_zeros(())
        correct = (predictions == labels).sum(dtype=mlm.dtype)
        sums = torch.stack([mlm.sum() / targets, nsp / sequences, correct, nsp_correct])
        # Rows of face y lie over data, x and z, and are equal over y: one all-reduce for all four numbers.
        if reduce_loss:
            sums = all_reduce_replicated(sums, self.cube.over("data", "x", "z"))
        return PreTrainingOutput(
            loss=sums[:2].sum(),
            mlm_loss=sums[0].detach(),
            nsp_loss=sums[1].detach(),
            mlm_correct=sums[2].detach(),
            nsp_correct=sums[3].detach(),
        )

    def example(self, tokens: int) -> dict[str, Any]:
        """Arguments of `forward` for a micro-batch of `tokens` tokens of the whole cube, all of id 0.

        Raises:
            ValueError: tokens that do not divide among the ranks' rows.
        """
        longest = 512 if self.config.has_rotary else min(512, self.config.positions)
        batch, targets, sequences = example_batch(tokens, longest, self.cube, with_read_rows=self.bert.read_rows_only)
        return {"batch": batch, "targets": targets, "sequences": sequences}
