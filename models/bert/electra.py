"""ELECTRA's pre-training (Clark et al. 2020, arXiv 2003.10555): a small generator fills masked places, and the
discriminator, which is the model, says of every token whether it has been replaced. DeBERTa's third version learns so
too (He et al. 2021, arXiv 2111.09543), with embeddings of which each has its own gradient.

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
from models.bert.embedding import owners
from models.bert.model import BertEmbeddings, BertModel, MaskedLMHead, classic_layer, example_batch
from tensor3d import (
    Cube,
    CubeShape,
    Dropout3D,
    LayerNorm3D,
    Linear3D,
    SmallHead3D,
    all_reduce_replicated,
    cross_entropy,
    local,
    local_rows,
    redistribute,
    select,
    spread_rows,
)
from tensor3d.attention import Backend
from tensor3d.data.packed_batch import PackedBatch
from tensor3d.distributed.collectives import all_gather
from tensor3d.layers.attention import Recompute
from tensor3d.layers.sampling import vocab_sample
from tensor3d.ops.activations import activated

_FAMILIES = ("electra", "deberta-v2")  # with a head that tells replaced tokens


@dataclass(frozen=True, kw_only=True)
class ReplacedTokens:
    """What the objective needs beside the discriminator's sizes. The defaults are those of ELECTRA-Small, where the
    authors' code says them (google-research/electra, configure_pretraining.py), and of a DeBERTa those of its third
    version (microsoft/DeBERTa, experiments/language_model/rtd_base.json).

    Raises:
        ValueError: a size, number or weight out of range.
    """

    generator_size: float | None = None
    """The generator's hidden size, inner size and heads, as a share of the discriminator's. Default: 0.25; a DeBERTa's
    is as large."""
    generator_heads: int | None = None
    """Attention heads of the generator. Default: its share, rounded, and at least 1."""
    generator_layers: int | None = None
    """Default: as many as the discriminator's; of a DeBERTa half of them, and at least 1."""
    weight: float = 50.0
    """Of the discriminator's loss, beside that of the generator (§3.1)."""

    def __post_init__(self) -> None:
        if self.generator_size is not None and not 0 < self.generator_size <= 1:
            raise ValueError(f"generator_size must be above 0 and at most 1. Got {self.generator_size}.")
        if self.generator_layers is not None and self.generator_layers < 1:
            raise ValueError(f"generator_layers must be at least 1. Got {self.generator_layers}.")
        if not 0 <= self.weight < float("inf"):
            raise ValueError(f"the discriminator's weight must be at least 0 and finite. Got {self.weight}.")

    def generator(self, config: BertConfig) -> BertConfig:
        """The generator beside a discriminator.

        Raises:
            ValueError: a family that does not learn so, or sizes that do not fit together.
        """
        if config.family not in _FAMILIES:
            raise ValueError(
                'replaced tokens are learnt by family="electra" and "deberta-v2", which alone have a head for them. '
                f"Got family={config.family!r}. Set the family, or learn masked tokens."
            )
        if config.conv_kernel is not None:
            raise ValueError(
                "replaced tokens are learnt by DeBERTas of the third version, which have no convolution. Got "
                f"conv_kernel={config.conv_kernel}. Leave it out, or learn masked tokens."
            )
        as_wide, layers = config.traits.disentangles_embeddings, self.generator_layers
        if as_wide and self.generator_size not in (None, 1.0):
            raise ValueError(
                f'the generator of a family="{config.family}" is as wide as the model, which has its embeddings. Got '
                f"generator_size={self.generator_size}. Leave it out, and say generator_layers."
            )
        size = (1.0 if as_wide else 0.25) if self.generator_size is None else self.generator_size
        hidden, heads = round(size * config.hidden), self.generator_heads
        if layers is None:
            layers = max(1, config.layers // 2) if as_wide else config.layers
        try:
            return replace(
                config,
                layers=layers,
                hidden=hidden,
                heads=max(1, round(size * config.heads)) if heads is None else heads,
                inner=max(1, round(size * config.inner_size)),
                embedding=None if config.embedding_size == hidden else config.embedding_size,
                next_sentence=False,
            )
        except ValueError as problem:
            raise ValueError(
                f"a generator of {size:g} of the sizes of hidden={config.hidden}, heads={config.heads} "
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
    """A number for each token, above 0 where it looks replaced: dense, activation, one output. A DeBERTa's reads a
    LayerNorm of the token and its sequence's [CLS] (as its authors' code has it,
    apps/models/replaced_token_detection_model.py)."""

    def __init__(self, config: BertConfig, cube: Cube) -> None:
        super().__init__()
        self.activation, self.cube = config.activation, cube
        self.norm = None
        if config.family == "deberta-v2":
            self.norm = LayerNorm3D(config.hidden, cube, eps=config.eps)
        self.dense = Linear3D(config.hidden, config.hidden, cube, "z", std=config.std)
        self.output = SmallHead3D(config.hidden, 1, cube, "y", std=config.std)

    def forward(self, h: Tensor, batch: PackedBatch) -> Tensor:
        """h to (M/xz,), fp32 at least: those of this rank's rows on face y, the same on all members of y."""
        if self.norm is not None:
            h = self.norm(h, spread_rows(select(h, batch.first, self.cube), owners(batch), self.cube))
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


class SeparateGenerator(nn.Module):
    """A masked language model with embeddings of its own, from which a DeBERTa's differ. Arguments as of
    `BertModel`."""

    def __init__(self, config: BertConfig, cube: Cube, **options: Any) -> None:
        super().__init__()
        self.config = config
        self.bert = BertModel(config, cube, **options)
        self.masked_lm = MaskedLMHead(config, cube)

    def forward(self, batch: PackedBatch, _: BertEmbeddings) -> Tensor:
        """As `Generator`, whatever the discriminator's embeddings are."""
        return self.masked_lm(self.bert(batch), batch.masked, self.bert.embeddings.tokens.weight)


class ElectraForPreTraining(nn.Module):
    """Discriminator and generator, which learn together. Every rank constructs it at the same time, after
    `cube.manual_seed`.

    A DeBERTa's discriminator has a table of tokens that is 0 at first, and looks tokens up in it and in the generator's
    (`FamilyTraits.disentangles_embeddings`): the first learns of its loss, the other one of the generator's alone.

    Args:
        config: the discriminator's.
        settings: what the generator is, and how much the discriminator's loss weighs.
        backend, recompute, reshard_after_forward: as in `BertModel`.

    Raises:
        ValueError: a family that does not learn so, or sizes that do not divide on the cube.
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
        self.generator = (SeparateGenerator if config.traits.disentangles_embeddings else Generator)(
            settings.generator(config),
            cube,
            backend=backend,
            recompute=recompute,
            reshard_after_forward=reshard_after_forward,
        )
        if config.traits.disentangles_embeddings:
            with torch.no_grad():
                local(self.bert.embeddings.tokens.weight).zero_()

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
        h = self.bert(replace(batch, ids=seen), self._of_generator(seen, planes_alike=batch.planes_alike))
        scores = self.replaced_tokens(h, batch)  # (M/xz,), copies over y
        counts, is_replaced = local_rows(owners(batch) >= 0, self.cube), local_rows(seen != original, self.cube)
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

    def _of_generator(self, ids: Tensor, *, planes_alike: bool) -> tuple[Tensor, ...]:
        """What the generator's table has for the tokens that the discriminator sees, where it has one: without a
        gradient. Whether there are such tokens, the discriminator's lookup says: without gradients a rank would raise
        alone."""
        if not isinstance(self.generator, SeparateGenerator):
            return ()
        with torch.no_grad():
            known = ids.clamp(0, self.config.vocab - 1)
            return (self.generator.bert.embeddings.tokens(known, planes_alike=planes_alike),)

    @torch.no_grad()
    def part_embeddings(self, *, has_generator: bool) -> None:
        """After `bert` has got the table of tokens of a whole model: where the generator has one of its own, takes that
        out of it, so that both add up to what was read. Otherwise nothing.

        Args:
            has_generator: whether the generator's was read too. Otherwise it becomes the model's.
        """
        if isinstance(self.generator, SeparateGenerator):
            own, of_generator = (local(each.embeddings.tokens.weight) for each in (self.bert, self.generator.bert))
            if not has_generator:
                of_generator.copy_(own)
            own.sub_(of_generator)

    def discriminator_alone(self) -> nn.Module:
        """The discriminator's parameters under their names, for folders to be read. It computes nothing."""
        alone = nn.Module()
        alone.add_module("bert", self.bert)
        alone.add_module("replaced_tokens", self.replaced_tokens)
        return alone

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
        if isinstance(self.generator, SeparateGenerator):
            return self.generator
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
