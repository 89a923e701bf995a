"""What the known ways are asked about, an encoder and its batch, and the form of their answer."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Literal

from tensor3d.shape import AxisName, CubeShape
from tensor3d.traffic import Kind


@dataclass(frozen=True, kw_only=True)
class Encoder:
    """A transformer encoder and the batch that all ranks work on together.

    Raises:
        ValueError: a number that is not whole or below 1; a hidden size that the heads do not divide.
    """

    sequences: int
    length: int
    """Tokens of a sequence."""
    hidden: int
    inner: int
    """Width inside the MLP."""
    heads: int
    layers: int = 1
    vocabulary: int = 0
    """Rows of the embedding table, which is also the head's weight; 0 for a bare encoder."""

    def __post_init__(self) -> None:
        for field in fields(self):
            value, least = getattr(self, field.name), 0 if field.name == "vocabulary" else 1
            if not isinstance(value, int) or isinstance(value, bool) or value < least:
                raise ValueError(
                    f"an encoder's {field.name} must be a whole number of at least {least}. Got {value!r}."
                )
        if self.hidden % self.heads:
            raise ValueError(f"an encoder's hidden size must divide by its {self.heads} heads. Got {self.hidden}.")

    @property
    def tokens(self) -> int:
        return self.sequences * self.length

    @property
    def weights(self) -> int:
        """Elements of a layer's matrices: QKV, output, up, down."""
        return 4 * self.hidden**2 + 2 * self.hidden * self.inner

    @property
    def flops(self) -> int:
        """Of a layer's forward pass: its four products, and q kᵀ and weights times v of whole sequences."""
        return self.tokens * (2 * self.weights + 4 * self.length * self.hidden)


@dataclass(frozen=True, kw_only=True)
class Move:
    """Equal collectives of a layer."""

    kind: Kind | Literal["broadcast", "reduce"]
    axes: tuple[AxisName, ...]
    """Of the way's box."""
    of: Literal["activations", "weights", "gradients"]
    """What travels; gradients are those of weights."""
    elements: int
    """Received by a rank in all of them, in the ring model (docs of `tensor3d.traffic`). A broadcast and a reduce are
    taken as chains in which every rank is first as often as the others: a rank receives (n - 1)/n of the blocks."""
    calls: int
    hidden: bool = False
    """Whether it can run under the layer's products: it waits for nothing that they make."""


@dataclass(frozen=True, kw_only=True)
class KnownWay:
    """One way, on so many ranks. Counts of elements are those of one rank."""

    name: str
    ranks: int
    box: CubeShape
    """Its axes, laid on the wire as the box says."""
    forward: tuple[Move, ...] = ()
    """Of a layer."""
    backward: tuple[Move, ...] = ()
    """Of a layer, with the forward pass that it repeats first if activations are recomputed."""
    saved: int = 0
    """Elements of activations, and of weights that were gathered, that a layer keeps for its backward pass."""
    weights: int = 0
    """Elements of the whole model's matrices and of its table that the rank stores."""
    copied: str = ""
    """What other ranks hold or compute as well."""
    source: str = ""
    refused: str | None = None
    """Why the way does not exist for these ranks and sizes; all counts are then 0."""

    @property
    def moves(self) -> tuple[Move, ...]:
        return self.forward + self.backward

    @property
    def elements(self) -> int:
        """Received for a layer, forward and backward."""
        return sum(move.elements for move in self.moves)

    @property
    def calls(self) -> int:
        """Collectives of a layer, forward and backward."""
        return sum(move.calls for move in self.moves)
