"""ELECTRA's pre-training (Clark et al. 2020, arXiv 2003.10555): a small generator fills masked places, and the
discriminator, which is the model, says of every token whether it has been replaced.

M tokens of the cube, H hidden size of the discriminator, R masked slots of the cube, V vocabulary
h is always on face z, (M/xy, H/z), unless a comment says otherwise
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from models.bert.config import BertConfig
from models.bert.model import BertEmbeddings, BertModel, MaskedLMHead, classic_layer, example_batch
from tensor3d import (
    Cube,
    CubeShape,
    Dropout3D,
    Linear3D,
    SmallHead3D,
    all_reduce_replicated,
    cross_entropy,
    local_rows,
    redistribute,
)
from tensor3d.attention import Backend
from tensor3d.data.packed_batch import PackedBatch
from tensor3d.distributed.collectives import all_gather
from tensor3d.layers.attention import Recompute
from tensor3d.layers.sampling import vocab_sample
from tensor3d.ops.activations import activated


@dataclass(frozen=True, kw_only=True)
class ReplacedTokens:
    """What the objective needs beside the discriminator's sizes. The defaults are those of ELECTRA-Small, where the
    authors' code says them (google-research/electra, configure_pretraining.py).

    Raises:
        ValueError: a size or weight out of range.
    """

    generator_size: float = 0.25
    """The generator's hidden size, inner size and heads, as a share of the discriminator's; it has as many layers."""
    generator_heads: int | None = None
    """Attention heads of the generator. Default: its share, rounded, and at least 1."""
    weight: float = 50.0
    """Of the discriminator's loss, beside that of the generator (§3.1)."""

    def __post_init__(self) -> None:
        if not 0 < self.generator_size <= 1:
            raise ValueError(f"generator_size must be above 0 and at most 1. Got {self.generator_size}.")
        if not 0 <= self.weight < float("inf"):
            raise ValueError(f"the discriminator's weight must be at least 0 and finite. Got {self.weight}.")

    def generator(self, config: BertConfig) -> BertConfig:
        """The generator beside a discriminator.

        Raises:
            ValueError: a family that does not learn so, or sizes that do not fit together.
        """
        if config.family != "electra":
            raise ValueError(
                'replaced tokens are learnt by family="electra", which alone has a head for them. Got '
                f"family={config.family!r}. Set the family, or learn masked tokens."
            )
        hidden, heads = round(self.generator_size * config.hidden), self.generator_heads
        try:
            return replace(
                config,
                hidden=hidden,
                heads=max(1, round(self.generator_size * config.heads)) if heads is None else heads,
                inner=max(1, round(self.generator_size * config.inner_size)),
                embedding=None if config.embedding_size == hidden else config.embedding_size,
                next_sentence=False,
            )
        except ValueError as problem:
            raise ValueError(
                f"a generator of {self.generator_size:g} of the sizes of hidden={config.hidden}, heads={config.heads} "
                f"cannot be: {problem} Choose another generator_size, or say generator_heads."
            ) from None

    def check(self, config: BertConfig, shape: CubeShape) -> None:
        """Raises ValueError where the generator's sizes do not divide on a cube: what its layers would say."""
        found = self.generator(config)
        try:
            found.check(shape)
        except ValueError as problem:
            raise ValueError(
                f"the generator, of hidden={found.hidden} with {found.heads} heads: {problem} Choose another "
                "generator_size, or say generator_heads."
            ) from None


@dataclass(frozen=True, kw_only=True)
class ReplacedTokensOutput:
    """Scalars of the whole cube, the same on every rank. Sums over micro-batches are those of the step."""

    loss: Tensor
    """The generator's loss, and the discriminator's times its weight; the one to call `backward` on."""
    generator_loss: Tensor
    """Of the masked tokens, nats."""
    discriminator_loss: Tensor
    """Binary cross-entropy of all tokens, nats, without the weight."""
    generator_correct: Tensor
    """Masked positions whose likeliest token was the right one, a count."""
    discriminator_correct: Tensor
    """Tokens of which it was rightly said whether they are replaced, a count."""
    replaced: Tensor
    """Tokens in whose place another one was drawn, a count."""

    @property
    def sums(self) -> Tensor:
        """(6,): all of them in this order, without gradient."""
        return torch.stack(
            [
                self.loss.detach(),
                self.generator_loss,
                self.discriminator_loss,
                self.generator_correct,
                self.discriminator_correct,
                self.replaced,
            ]
        )


class ReplacedTokenHead(nn.Module):
    """A number for each token, above 0 where it looks replaced: dense, activation, one output."""

    def __init__(self, config: BertConfig, cube: Cube) -> None:
        super().__init__()
        self.activation = config.activation
        self.dense = Linear3D(config.hidden, config.hidden, cube, "z", std=config.std)
        self.output = SmallHead3D(config.hidden, 1, cube, "y", std=config.std)

    def forward(self, h: Tensor) -> Tensor:
        """h to (M/xz,), fp32 at least: those of this rank's rows on face y, the same on all members of y."""
        logits: Tensor = self.output(activated(self.dense(h), self.activation))
        return logits[:, 0]


class Generator(nn.Module):
    """A masked language model on another one's embeddings: all of them but their projection are shared, as in the
    authors' code (§3.2 names tokens and positions). Arguments as of `BertModel`."""

    def __init__(
        self,
        config: BertConfig,
        cube: Cube,
        *,
        backend: Backend = "auto",
        recompute: Recompute = "none",
        reshard_after_forward: bool = True,
    ) -> None:
        super().__init__()
        self.config, self.cube = config, cube
        self.dropout = Dropout3D(config.dropout, cube)
        self.projection = None
        if config.has_projection:
            self.projection = Linear3D(config.embedding_size, config.hidden, cube, "z", std=config.std)
        self.layers = nn.ModuleList(
            classic_layer(
                config, cube, number, backend=backend, recompute=recompute, reshard_after_forward=reshard_after_forward
            )
            for number in range(config.layers)
        )
        self.masked_lm = MaskedLMHead(config, cube)

    def forward(self, batch: PackedBatch, embeddings: BertEmbeddings) -> Tensor:
        """One plane's micro-batch to logits of its masked places, (R/xz, V/y) on face y."""
        h = self.dropout(embeddings.normed(batch.ids, batch.positions, batch.types, planes_alike=batch.planes_alike))
        if self.projection is not None:
            h = redistribute(self.projection(h), self.cube, to="z")
        for layer in self.layers:
            h = layer(h, batch.sequences)
        return self.masked_lm(h, batch.masked, embeddings.tokens.weight)


class ElectraForPreTraining(nn.Module):
    """Discriminator and generator, which learn together. Every rank constructs it at the same time, after
    `cube.manual_seed`.

    Args:
        config: the discriminator's.
        settings: what the generator is, and how much the discriminator's loss weighs.
        backend, recompute, reshard_after_forward: as in `BertModel`.

    Raises:
        ValueError: another family than ELECTRA, or sizes that do not divide on the cube.
    """

    def __init__(
        self,
        config: BertConfig,
        settings: ReplacedTokens,
        cube: Cube,
        *,
        backend: Backend = "auto",
        recompute: Recompute = "none",
        reshard_after_forward: bool = True,
    ) -> None:
        super().__init__()
        settings.check(config, cube.shape)
        self.config, self.settings, self.cube = config, settings, cube
        self.bert = BertModel(
            config, cube, backend=backend, recompute=recompute, reshard_after_forward=reshard_after_forward
        )
        self.replaced_tokens = ReplacedTokenHead(config, cube)
        self.generator = Generator(
            settings.generator(config),
            cube,
            backend=backend,
            recompute=recompute,
            reshard_after_forward=reshard_after_forward,
        )

    def forward(
        self, batch: PackedBatch, targets: int, tokens: int, *, reduce_loss: bool = True
    ) -> ReplacedTokensOutput:
        """The loss of one micro-batch as its part of a step.

        Args:
            batch: with random bits of its masked places, `PackedBatch.draws`.
            targets: masked positions of the whole step, all planes and micro-batches.
            tokens: in sequences, of the whole step.
            reduce_loss: as of `BertForPreTraining.forward`.

        Raises:
            ValueError: a batch without random bits.
        """
        if batch.draws is None:
            raise ValueError(
                "a generator draws tokens by random bits of its masked places, and the batch has none. Make it of "
                "packs with draws, as PretrainingData(..., with_draws=True) does."
            )
        logits = self.generator(batch, self.bert.embeddings)
        labels = local_rows(batch.masked_labels, self.cube)
        mlm, predictions = cross_entropy(logits, labels, self.config.vocab, self.cube)
        drawn = vocab_sample(logits, local_rows(batch.draws, self.cube), self.config.vocab, self.cube)

        original = put(batch.masked_labels, batch.masked, batch.ids)
        seen = put(all_gather(drawn, self.cube.axis("z")).wait(), batch.masked, batch.ids)
        h = self.bert(replace(batch, ids=seen))
        scores = self.replaced_tokens(h)  # (M/xz,), copies over y
        counts, is_replaced = local_rows(in_sequences(batch), self.cube), local_rows(seen != original, self.cube)
        losses = F.binary_cross_entropy_with_logits(scores, is_replaced.to(scores.dtype), reduction="none")

        with torch.no_grad():
            right = ((scores > 0) == is_replaced) & counts
            correct = torch.stack([(predictions == labels).sum(), right.sum(), is_replaced.sum()])
        found = torch.where(counts, losses, 0.0).sum() / tokens
        sums = torch.cat([torch.stack([mlm.sum() / targets, found.to(mlm.dtype)]), correct.to(mlm.dtype)])
        # Rows of face y lie over data, x and z, and are equal over y: one all-reduce for all numbers.
        if reduce_loss:
            sums = all_reduce_replicated(sums, self.cube.over("data", "x", "z"))
        own = sums.detach()
        return ReplacedTokensOutput(
            loss=sums[0] + self.settings.weight * sums[1],
            generator_loss=own[0],
            discriminator_loss=own[1],
            generator_correct=own[2],
            discriminator_correct=own[3],
            replaced=own[4],
        )

    def example(self, tokens: int) -> dict[str, Any]:
        """Arguments of `forward` for a micro-batch of `tokens` tokens of the whole cube, all of id 0.

        Raises:
            ValueError: tokens that do not divide among the ranks' rows.
        """
        batch, targets, _ = example_batch(tokens, min(512, self.config.positions), self.cube, with_draws=True)
        return {"batch": batch, "targets": targets, "tokens": tokens}

    def generator_alone(self) -> nn.Module:
        """The generator as a masked language model of its own: the same parameters, under the names that they have in
        `BertForPreTraining`, for folders to be written or read. It computes nothing."""
        alone, shared, own = nn.Module(), self.bert.embeddings, self.generator
        bert, embeddings = nn.Module(), nn.Module()
        for name in ("tokens", "positions", "types", "norm"):
            embeddings.add_module(name, getattr(shared, name))
        embeddings.add_module("projection", own.projection)
        bert.add_module("embeddings", embeddings)
        bert.add_module("layers", own.layers)
        bert.config = own.config  # type: ignore[assignment]
        alone.add_module("bert", bert)
        alone.add_module("masked_lm", own.masked_lm)
        return alone


def put(values: Tensor, rows: Tensor, into: Tensor) -> Tensor:
    """A copy of `into`, with `values` in these rows; none where the row is below 0."""
    places = torch.where(rows < 0, into.shape[0], rows)
    return torch.cat([into, into.new_zeros(1)]).index_copy_(0, places, values)[:-1]


def in_sequences(batch: PackedBatch) -> Tensor:
    """bool (rows,): which of the plane's rows hold a token. Behind the first token of a sequence, places are above 0;
    unused slots have 0."""
    return put(torch.ones_like(batch.first), batch.first, batch.positions) > 0
