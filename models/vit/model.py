"""A Vision Transformer (Dosovitskiy et al. 2021, arXiv 2010.11929) over packed images of different sizes.

M tokens of the cube, H hidden size, P values of a patch, C slots for class tokens of the cube
h is always on face z, (M/xy, H/z), unless a comment says otherwise
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from models.vit.config import VitConfig
from models.vit.patches import IGNORED, ImageBatch, pack_images
from tensor3d import (
    Cube,
    Dropout3D,
    LayerNorm3D,
    Linear3D,
    LookupEmbedding3D,
    SmallHead3D,
    TransformerLayer3D,
    all_reduce_replicated,
    constant,
    local_block,
    local_param,
    local_rows,
    select,
)
from tensor3d.sharding.param_layout import vector


@dataclass(frozen=True, kw_only=True)
class VitOutput:
    """Scalars of the whole cube, the same on every rank. Sums over micro-batches are those of the step."""

    loss: Tensor
    """Cross-entropy over the classes, in nats; the one to call `backward` on."""
    correct: Tensor
    """Images whose class is predicted right, a count; accuracy is this by the number of images."""


class VitEmbeddings(nn.Module):
    """Patches by a linear layer, their places by a table of rows and one of columns, and a learned class token."""

    def __init__(self, config: VitConfig, cube: Cube) -> None:
        super().__init__()
        self.cube = cube
        # Hidden states live on face z, and a product changes the face, so this one reads face y. The pixels come from
        # outside and every rank of the plane holds them: its block of them is a slice on either face, and there
        # is nothing to redistribute.
        self.patches = Linear3D(config.values, config.hidden, cube, face="y", std=config.std)
        self.rows = LookupEmbedding3D(config.grid, config.hidden, cube, std=config.std)
        self.columns = LookupEmbedding3D(config.grid, config.hidden, cube, std=config.std)
        # A parameter of one's own. `vector("z")`: cut over z as the columns of h are, and its gradient is summed over
        # the axes that cut the rows it is written to: data, x and y.
        self.class_token = constant((config.hidden,), vector("z"), cube, 0.0)
        self.dropout = Dropout3D(config.dropout, cube)

    def forward(self, batch: ImageBatch) -> Tensor:
        pixels = local_block(batch.patches, self.cube, "y")  # (M/xz, P/y) on face y
        h = self.patches(pixels) + self.rows(batch.row_numbers) + self.columns(batch.column_numbers)
        is_class = local_rows(batch.is_class, self.cube, "z").unsqueeze(1)  # (M/xy, 1)
        class_token = local_param(self.class_token, vector("z"), self.cube).to(h.dtype)  # (H/z,)
        return self.dropout(torch.where(is_class, class_token, h))


class Vit(nn.Module):
    """Images to classes. Every rank constructs it at the same time, after `cube.manual_seed`.

    Raises:
        ValueError: heads or an inner size that do not divide by y, a hidden size that does not by y and z, or values of
            a patch that do not divide by y.
    """

    def __init__(self, config: VitConfig, cube: Cube) -> None:
        super().__init__()
        self.config, self.cube = config, cube
        self.embeddings = VitEmbeddings(config, cube)
        self.layers = nn.ModuleList(
            TransformerLayer3D(
                config.hidden,
                config.heads,
                cube,
                config.inner,
                norm="pre",
                dropout=config.dropout,
                attention_dropout=config.attention_dropout,
                eps=config.eps,
                std=config.std,
            )
            for _ in range(config.layers)
        )
        self.final_norm = LayerNorm3D(config.hidden, cube, eps=config.eps)
        self.head = SmallHead3D(config.hidden, config.classes, cube, "z", std=config.std)

    def logits(self, batch: ImageBatch) -> Tensor:
        """One plane's images to (C/xy, classes), the rows of face z, copies over z; in the order of the images."""
        h = self.embeddings(batch)
        for layer in self.layers:
            h = layer(h, batch.sequences)
        # LayerNorm takes each row by itself, so the class tokens are chosen first and no other row is normed.
        return self.head(self.final_norm(select(h, batch.first, self.cube)))

    def forward(self, batch: ImageBatch, images: int) -> VitOutput:
        """The loss of one micro-batch as its part of a step.

        Args:
            images: those of the whole step, all planes and micro-batches; so the sum of the micro-batches' losses is
                the step's mean, whatever the accumulation and the cube.

        Raises:
            ValueError: fewer than one image.
        """
        if images < 1:
            raise ValueError(f"images must be at least 1, those of a step. Got {images}.")
        logits, labels = self.logits(batch), local_rows(batch.labels, self.cube, "z")
        loss = F.cross_entropy(logits, labels, ignore_index=IGNORED, reduction="sum") / images
        correct = (logits.argmax(1) == labels).sum()
        # Rows of face z lie over data, x and y, and are equal over z: one all-reduce for both numbers.
        sums = all_reduce_replicated(torch.stack([loss, correct.to(loss.dtype)]), self.cube.over("data", "x", "y"))
        return VitOutput(loss=sums[0], correct=sums[1].detach())

    def example(self, tokens: int) -> dict[str, Any]:
        """Arguments of `forward` for `tokens` tokens of the whole cube: black squares, the largest that fit.

        Raises:
            ValueError: packs of so many tokens do not divide among the cube, or hold no image of one patch.
        """
        config, shape = self.config, self.cube.shape
        slots = tokens // (shape.planes * shape.z)  # of each rank's pack on face y
        side = next((side for side in range(config.grid, 0, -1) if side * side < slots), 0)
        if tokens % (shape.planes * shape.z) or not side:
            raise ValueError(
                f"on {shape}, {tokens} tokens must divide by data*x*z = {shape.planes * shape.z} and be at least two "
                "for each of them: a class token and a patch."
            )
        count = shape.z * (slots // (1 + side * side))  # images of a plane
        pixels = (config.channels, side * config.patch, side * config.patch)
        images = [torch.zeros(pixels, dtype=self.head.weight.dtype)] * count
        batch = pack_images(images, torch.zeros(count, dtype=torch.int64), self.cube, config, capacity=slots)
        return {"batch": batch, "images": count * shape.planes}
