"""Which gathered operands a model keeps for backward, within a budget of memory.

A product gathers its input and its weight, and by default again in backward (`sharding.matmul`). Each of the two that
is kept costs its memory until backward and spares its gather there, a collective. Weights of a block that travel
together (`gather_together`) stay or go together. Which they are follows from sizes alone
(`cost_model/kept_operands.py`).

M tokens of the cube
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import nn

from tensor3d.cost_model.comm_volume import Kept
from tensor3d.cost_model.kept_operands import GatheringProduct, choose_kept
from tensor3d.distributed.collectives import largest
from tensor3d.distributed.cube import Cube
from tensor3d.distributed.cube_shape import AXES
from tensor3d.layers.linear import Linear3D
from tensor3d.layers.transformer import Block3D
from tensor3d.sharding.activation_layout import Face
from tensor3d.sharding.matmul import Reshard

_RESHARD: dict[Kept, Reshard] = {True: False, False: True, "input": "weight", "weight": "input"}
"""What is gathered again of a product that keeps both, none, or the one that is named."""


@dataclass(frozen=True, kw_only=True)
class KeptOperands:
    """What `keep_gathered` has chosen. All figures are of one rank, forward and backward of one micro-batch."""

    kept: dict[str, Reshard]
    """`reshard_after_forward` of each linear layer that keeps something, by the name of the module."""
    held_bytes: int
    """Of what is kept, at most the budget."""
    spared_bytes: int
    """Received less."""
    spared_collectives: int


def keep_gathered(model: nn.Module, cube: Cube, tokens: int, budget: int) -> KeptOperands:
    """Sets `reshard_after_forward` of every `Linear3D` in `model` so that what they keep fits in `budget` bytes.

    Input and weight of every product are looked at alone, but for weights that travel together; taken are those that
    spare most for a byte, then the smallest, then the last in the model: where backward begins, memory is fullest, and
    the first layers gather again when the last ones have let go of theirs. It goes by sizes that all ranks know, so all
    choose alike. Losses and gradients are the same bits in any case.

    Left as they are: layers made with "input" or "weight", as those of heads are (`kept_for_heads`), and blocks with
    recompute="layer", whose products run again in backward.

    Args:
        tokens: M, of the largest micro-batch, all planes together.
        budget: bytes on each rank, beside what a model holds that keeps nothing. 0 keeps nothing.

    Raises:
        ValueError: fewer than 1 token, a budget below 0, or other numbers on some rank.
    """
    for what, number in (("tokens", tokens), ("budget", budget)):
        most, least = (sign * largest(sign * number, cube.over(*AXES)) for sign in (1, -1))
        if most != least:
            raise ValueError(
                f"{what} must be the same on all ranks, which would keep different operands and wait for one another. "
                f"Got {least} to {most}. Of what each rank has free, take the least."
            )
    if tokens < 1:
        raise ValueError(f"tokens must be at least 1. Got {tokens}.")
    if budget < 0:
        raise ValueError(f"budget must be at least 0 bytes. Got {budget}.")
    blocks = [block for block in model.modules() if isinstance(block, Block3D)]
    recomputed = {id(part) for block in blocks if block.recompute == "layer" for part in block.modules()}
    layers = {
        name: layer
        for name, layer in model.named_modules()
        if isinstance(layer, Linear3D) and not layer.is_decided and id(layer) not in recomputed
    }
    block_of = {id(part): number for number, block in enumerate(blocks) for part in block.modules()}
    holders: dict[str, int] = {}  # of layers that are with others: blocks too
    multiplied: dict[tuple[str, Face | None], list[str]] = {}  # by one product: names of its layers
    for name, layer in layers.items():
        holder = name.rpartition(".")[0]
        if layer.is_with_others:
            block_of[id(layer)] = holders.setdefault(holder, len(blocks) + len(holders))
        multiplied.setdefault((holder, layer.face) if layer.is_with_others else (name, None), []).append(name)
    products = [
        GatheringProduct(
            k=(first := layers[names[0]]).in_features,
            n=sum(layers[name].out_features for name in names),
            face=first.face,
            element=cube.precision.computed(first.weight.dtype).itemsize,
            places=range(place, place + 1),
            block=block_of.get(id(first)),
        )
        for place, names in enumerate(multiplied.values())
    ]
    chosen = choose_kept(products, cube.shape, -(-tokens // cube.shape.planes), budget, cube.speed.weight_group_bytes)
    kept: dict[str, Reshard] = {}
    for names, count in zip(multiplied.values(), chosen.counts, strict=True):
        for name in names:
            layers[name].reshard_after_forward = _RESHARD[count.of(0, 1)]
            if count.of(0, 1):
                kept[name] = layers[name].reshard_after_forward
    return KeptOperands(
        kept=kept,
        held_bytes=chosen.held_bytes,
        spared_bytes=chosen.spared_bytes,
        spared_collectives=chosen.spared_collectives,
    )
