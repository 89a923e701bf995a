"""The work that `bench rivals` gives to all alike, as a rank of the plain model or of a cube holds it.

All sequences have full length, so nobody gains from packing.

B sequences, L tokens of each, H hidden size
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, NamedTuple

import numpy as np
import torch
from torch import Tensor

from models.bert import BertConfig
from tensor3d import Cube, CubeShape, shard
from tensor3d.batches.sequences import Sequences
from tensor3d.data.masking import MASKED_SHARE
from tensor3d.data.packed_batch import Pack, PackedBatch, check_rows, collate
from tools.bench.harness.benchmark import Count

What = Literal["step", "layer"]
"""A whole training step, or forward and backward of one transformer layer."""
Type = Literal["fp32", "bf16"]
_COMPUTE: dict[Type, torch.dtype | None] = {"fp32": None, "bf16": torch.bfloat16}


@dataclass(frozen=True, kw_only=True)
class Work:
    """One global batch, the same at every step."""

    what: What
    config: BertConfig
    sequences: int
    """B, of the global batch."""
    length: int
    """L: all sequences fill it."""
    type: Type = "fp32"
    """Of products and what travels between them; parameters and the sums of their gradients stay in fp32."""
    seed: int = 0
    """Of weights and batch."""

    @property
    def compute(self) -> torch.dtype | None:
        """The type of products. None: that of the parameters."""
        return _COMPUTE[self.type]

    @property
    def masked(self) -> int:
        """Masked tokens of a sequence."""
        return max(1, round(MASKED_SHARE * self.length))

    @property
    def tokens(self) -> int:
        """Of the global batch."""
        return self.sequences * self.length

    def check_cube(self, shape: CubeShape) -> None:
        """Raises ValueError where a cube cannot do it."""
        members = shape.planes * shape.z
        if self.sequences % members:
            raise ValueError(
                f"cube {shape}: --sequences must divide by data * x * z = {members}. Got {self.sequences}. Choose "
                "other sequences or another cube."
            )
        try:
            self.config.check(shape)
            check_rows(shape, self.sequences // members, self.length)
        except ValueError as problem:
            raise ValueError(f"cube {shape}: {problem}") from None


@dataclass(frozen=True, kw_only=True)
class Sizes:
    """Fields of a benchmark: sizes of a BERT and of its batches, whose sequences are all full."""

    hidden: int = 256
    """Columns of a hidden state."""
    layers: int = 4
    """Transformer layers."""
    heads: int = 8
    """Attention heads of a layer."""
    vocab: int = 8192
    """Entries of the vocabulary."""
    sequences: Count = 8
    """Of the global batch. All are full: nobody gains from packing."""
    length: Count = 128
    """Tokens of a sequence."""

    @property
    def work(self) -> Work:
        """Without dropout, so that all that is compared computes the same."""
        config = BertConfig(
            layers=self.layers,
            hidden=self.hidden,
            heads=self.heads,
            vocab=self.vocab,
            positions=max(512, self.length),
            dropout=0.0,
            attention_dropout=0.0,
        )
        what: What = getattr(self, "what", "step")  # which not every benchmark leaves open
        kind: Type = getattr(self, "type", "fp32")
        return Work(what=what, config=config, sequences=self.sequences, length=self.length, type=kind)


class PlainBatch(NamedTuple):
    """Arguments of `PlainBert.forward`."""

    ids: Tensor
    types: Tensor
    masked: Tensor
    masked_labels: Tensor
    next_labels: Tensor


def plain_batch(work: Work, first: int, last: int, device: torch.device) -> PlainBatch:
    """Sequences `first` to `last` of the global batch."""
    packs = _packs(work)[first:last]
    masked = [row * work.length + pack.masked for row, pack in enumerate(packs)]
    parts = (
        np.stack([pack.ids for pack in packs]),
        np.stack([pack.types for pack in packs]),
        np.concatenate(masked),
        np.concatenate([pack.masked_labels for pack in packs]),
        np.concatenate([pack.next_labels for pack in packs]),
    )
    return PlainBatch(*(torch.from_numpy(part).to(device) for part in parts))


def packed_batch(work: Work, cube: Cube) -> PackedBatch:
    """The same batch, a sequence in each pack, as this rank of a cube holds it."""
    shape = cube.shape
    count, plane = work.sequences // shape.planes, shape.plane_of(cube.rank)
    return collate(
        _packs(work)[plane * count : (plane + 1) * count],
        capacity=work.length,
        masked_per_pack=work.masked,
        max_sequences=1,
        shape=shape,
        rank=cube.rank,
        pad=0,
        planes_alike=True,
    ).to(cube.device)


def whole_hidden(work: Work) -> tuple[Tensor, Tensor]:
    """What one layer is given, and the gradient of what it gives: (B, L, H) both."""
    generator = torch.Generator().manual_seed(work.seed)
    size = (2, work.sequences, work.length, work.config.hidden)
    x, gradient = torch.randn(size, generator=generator, dtype=torch.float32).to(torch.get_default_dtype()).unbind(0)
    return x, gradient


def packed_hidden(work: Work, cube: Cube) -> tuple[Tensor, Tensor, Sequences]:
    """The same on face z of a cube, (M/xy, H/z) both, and the sequences of this rank's rows on face y."""
    x, gradient = (shard(whole.flatten(0, 1), cube, "z").to(cube.device) for whole in whole_hidden(work))
    own = work.sequences // (cube.shape.planes * cube.shape.z)
    return x, gradient, Sequences.from_lengths([work.length] * own, cube.device)


def _packs(work: Work) -> list[Pack]:
    """One sequence in each."""
    random = np.random.default_rng(work.seed)
    return [_pack(work, random) for _ in range(work.sequences)]


def _pack(work: Work, random: np.random.Generator) -> Pack:
    length, vocab = work.length, work.config.vocab
    return Pack(
        ids=random.integers(0, vocab, length),
        types=(np.arange(length) * 2 // length) % work.config.types,
        lengths=np.array([length]),
        masked=np.sort(random.choice(length, work.masked, replace=False)),
        masked_labels=random.integers(0, vocab, work.masked),
        next_labels=random.integers(0, 2, 1),
    )
