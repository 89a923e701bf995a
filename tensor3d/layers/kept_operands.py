"""Which gathered operands a model keeps for backward, within a budget of memory.

A product gathers its input and its weight, and by default again in backward (`sharding.matmul`). Each of the two that
is kept costs its memory until backward and spares its gather there, a collective. Weights of a block that travel
together (`gather_together`) stay or go together.

M tokens of the cube, K input features, N output features
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import nn

from tensor3d.distributed.cube import Cube
from tensor3d.distributed.cube_shape import travel_together
from tensor3d.layers.linear import Linear3D
from tensor3d.layers.transformer import Block3D
from tensor3d.sharding.activation_layout import other
from tensor3d.sharding.matmul import Reshard


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


@dataclass(frozen=True, kw_only=True)
class _Operand:
    """What a product gathers from `members`, or the products of a block together, as it is then."""

    layers: tuple[str, ...]
    is_weight: bool
    members: int
    bytes: int

    @property
    def order(self) -> tuple[int, int]:
        """Most is spared for a byte where many members take part; small ones spare as many collectives."""
        return -self.members, self.bytes


def keep_gathered(model: nn.Module, cube: Cube, tokens: int, budget: int) -> KeptOperands:
    """Sets `reshard_after_forward` of every `Linear3D` in `model` so that what they keep fits in `budget` bytes.

    Input and weight of every product are looked at alone, but for weights that travel together; taken are those that
    spare most for a byte, then the smallest. It goes by sizes that all ranks know, so all choose alike. Losses and
    gradients are the same bits in any case.

    Left as they are: layers made with "input" or "weight", as those of heads are (`kept_for_heads`), and blocks with
    recompute="layer", whose products run again in backward.

    Args:
        tokens: M, of the largest micro-batch, all planes together.
        budget: bytes on each rank, beside what a model holds that keeps nothing. 0 keeps nothing.

    Raises:
        ValueError: fewer than 1 token, or a budget below 0.
    """
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
    operands = [operand for name, layer in layers.items() for operand in _gathered(name, layer, cube, tokens)]
    names = {id(layer): name for name, layer in layers.items()}
    for block in blocks:
        inside = [names[id(part)] for part in block.modules() if id(part) in names]
        operands = _together(operands, inside, cube)
    kept: dict[str, set[bool]] = {name: set() for name in layers}
    held = spared = collectives = 0
    for operand in sorted(operands, key=lambda each: each.order):
        if held + operand.bytes <= budget:
            for name in operand.layers:
                kept[name].add(operand.is_weight)
            held += operand.bytes
            spared += operand.bytes // operand.members * (operand.members - 1)
            collectives += 1
    for name, layer in layers.items():
        layer.reshard_after_forward = _reshard(kept[name])
    return KeptOperands(
        kept={name: layer.reshard_after_forward for name, layer in layers.items() if kept[name]},
        held_bytes=held,
        spared_bytes=spared,
        spared_collectives=collectives,
    )


def _together(operands: list[_Operand], names: list[str], cube: Cube) -> list[_Operand]:
    """The weights of these layers as one, where they travel as one."""
    mine = [operand for operand in operands if operand.is_weight and set(operand.layers) <= set(names)]
    size = sum(operand.bytes for operand in mine)
    if len(mine) < 2 or not travel_together(cube.shape, size, cube.speed.weight_group_bytes):
        return operands
    layers = tuple(name for operand in mine for name in operand.layers)
    one = _Operand(layers=layers, is_weight=True, members=mine[0].members, bytes=size)
    return [operand for operand in operands if operand not in mine] + [one]


def _gathered(name: str, layer: Linear3D, cube: Cube, tokens: int) -> list[_Operand]:
    """A' (M/planes, K/columns) and W' (N/rows, K/columns), where they come from more than one member."""
    x, rows, columns = cube.axis("x").size, cube.axis(other(layer.face)).size, cube.axis(layer.face).size
    size = cube.precision.computed(layer.weight.dtype).itemsize
    inputs = -(-tokens // cube.shape.planes) * (layer.in_features // columns) * size
    chunk = -(-(layer.out_features // rows) // x)  # shards travel padded to one size
    weight = x * chunk * (layer.in_features // columns) * size
    found = [
        _Operand(layers=(name,), is_weight=False, members=rows, bytes=inputs),
        _Operand(layers=(name,), is_weight=True, members=x, bytes=weight),
    ]
    return [operand for operand in found if operand.members > 1]


def _reshard(kept: set[bool]) -> Reshard:
    """Of a layer that keeps its input (False), its weight (True), both or none."""
    if len(kept) == 2:
        return False
    if not kept:
        return True
    return "input" if True in kept else "weight"
