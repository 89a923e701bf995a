"""Images of any size as packed patches: each image is a sequence, and none is cropped, scaled or filled up.

NaViT (Dehghani et al. 2023, arXiv 2307.06304). B images of a plane, S tokens of its largest, P values of a patch,
M/x rows of the plane
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from models.vit.config import VitConfig
from tensor3d import Cube, Sequences, pack_padded
from tensor3d.sharding.redistribute import raise_on_every_rank

IGNORED = -100
"""The label of no image, as PyTorch has it."""


@dataclass(frozen=True, kw_only=True, eq=False)
class ImageBatch:
    """One plane's images as packed rows. All but `sequences` is the same on all members of the plane."""

    patches: Tensor
    """(M/x, P): the values of each patch; zeros for class tokens and unused slots."""
    row_numbers: Tensor
    """int64 (M/x,): how many patches lie above in the image; 0 for class tokens."""
    column_numbers: Tensor
    """int64 (M/x,): how many lie to the left."""
    is_class: Tensor
    """bool (M/x,): whether the row is a class token, the first of its image."""
    sequences: Sequences
    """The images of this rank's rows on face y; the unused tail of a pack is one more."""
    first: Tensor
    """int64 (C,): plane row of each image's class token, in the order of the images; -1 in slots to spare."""
    labels: Tensor
    """int64 (C,): class of each image; -100 in slots to spare."""


def pack_images(
    images: Sequence[Tensor], labels: Tensor, cube: Cube, config: VitConfig, capacity: int | None = None
) -> ImageBatch:
    """Cuts the images of this rank's plane into patches and packs them, a class token before each.

    It makes padded tensors, as one would on one device, and lets `pack_padded` do the rest: ids (here what kind of
    token it is), mask, and what belongs to each token beside them.

    Args:
        images: (channels, height, width) each, of any height and width that divide by the patch; the same on each rank
            of the plane. `local_shard` takes them from the images of all planes.
        labels: int64 (B,), the class of each.
        capacity: token slots of a pack, as in `pack_padded`.

    Raises:
        ValueError: no images, labels that are no classes or not one for each, or an image that does not fit, named;
            with gradients, where other planes have other images, at the end of the backward pass. Until then all
            images of the plane are nan.
    """
    try:
        _check(images, labels, config, capacity)
    except ValueError as problem:
        raise_on_every_rank(str(problem), cube, alike=cube.shape.planes == 1, a_pass_follows=torch.is_grad_enabled())
        images, labels = _spoilt(images, config)
    cut = [cut_patches(image, config.patch) for image in images]
    grids = [(image.shape[1] // config.patch, image.shape[2] // config.patch) for image in images]
    places = [torch.cartesian_prod(torch.arange(high), torch.arange(wide)) for high, wide in grids]
    one_more = (0, 0, 1, 0)  # a row of zeros before the patches: the class token's
    patches = pad_sequence([F.pad(each, one_more) for each in cut], batch_first=True)  # (B, S, P)
    numbers = pad_sequence([F.pad(each, one_more) for each in places], batch_first=True)  # (B, S, 2)
    mask = pad_sequence([torch.ones(1 + len(each), dtype=torch.int64) for each in cut], batch_first=True)  # (B, S)
    kinds = torch.zeros_like(mask)
    kinds[:, 0] = 1

    packs = pack_padded(kinds, mask, cube, capacity=capacity)
    row_numbers, column_numbers = packs.pack(numbers).unbind(1)  # (M/x,) each
    return ImageBatch(
        patches=packs.pack(patches),
        row_numbers=row_numbers,
        column_numbers=column_numbers,
        is_class=packs.ids == 1,
        sequences=packs.sequences,
        first=packs.first,
        labels=F.pad(labels.to(packs.first), (0, len(packs.first) - len(labels)), value=IGNORED),
    )


def cut_patches(image: Tensor, patch: int) -> Tensor:
    """(channels, height, width) to (patches, P), row by row; a patch's values in the order (channel, row, column)."""
    squares = image.unfold(1, patch, patch).unfold(2, patch, patch)  # (channels, high, wide, patch, patch)
    return squares.permute(1, 2, 0, 3, 4).reshape(-1, image.shape[0] * patch * patch)


def _spoilt(images: Sequence[Tensor], config: VitConfig) -> tuple[list[Tensor], Tensor]:
    """As many images, of one patch and of nothing that is a number, and their labels: so that the ranks of a plane that
    was given others than can be packed come to the end of the step, where all raise."""
    dtype = next((image.dtype for image in images if image.is_floating_point()), torch.get_default_dtype())
    image = torch.full((config.channels, config.patch, config.patch), math.nan, dtype=dtype)
    count = max(1, len(images))
    return [image] * count, torch.zeros(count, dtype=torch.int64)


def _check(images: Sequence[Tensor], labels: Tensor, config: VitConfig, capacity: int | None) -> None:
    if not len(images) or labels.shape != (len(images),):
        raise ValueError(
            f"each image needs a label, and a plane an image. Got {len(images)} images and labels of shape "
            f"{tuple(labels.shape)}."
        )
    if labels.is_floating_point() or labels.is_complex():
        raise ValueError(f"labels must be whole numbers, of type int64. Got {labels.dtype}.")
    if labels.min() < 0 or labels.max() >= config.classes:
        raise ValueError(
            f"labels must be at least 0 and below {config.classes}. Got values from {int(labels.min())} to "
            f"{int(labels.max())}."
        )
    longest = config.grid * config.patch
    for number, image in enumerate(images):
        sides = image.shape[1:]
        if image.dim() != 3 or image.shape[0] != config.channels or any(side % config.patch for side in sides):
            raise ValueError(
                f"images must have the shape ({config.channels}, height, width), both sides divisible by the patch of "
                f"{config.patch} pixels. Got {tuple(image.shape)} for image {number}. Crop or scale it."
            )
        if min(sides) < 1 or max(sides) > longest:
            raise ValueError(
                f"the sides of an image must be at least {config.patch} and at most grid * patch = {longest} pixels. "
                f"Got {tuple(image.shape)} for image {number}. Scale it, or choose a larger grid."
            )
        if not image.is_floating_point():
            raise ValueError(f"images must be of a floating type, bytes scaled. Got {image.dtype} for image {number}.")
        tokens = 1 + image.shape[1] * image.shape[2] // config.patch**2
        if capacity is not None and tokens > capacity:
            raise ValueError(
                f"image {number} of shape {tuple(image.shape)} has {tokens} tokens with its class token, more than the "
                f"capacity of {capacity}. Scale it, or raise the capacity."
            )
