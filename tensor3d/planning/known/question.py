"""What a way is asked, and how its row is filled in: the part that all of them share."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from tensor3d.planning.known.encoder import Encoder, KnownWay, Move


@dataclass(frozen=True, kw_only=True)
class Question:
    """An encoder, the ranks, and what stays for the backward pass."""

    encoder: Encoder
    ranks: int
    kept: bool = False
    """Gathered operands stay for backward (`reshard_after_forward=False`)."""
    recomputed: bool = False
    """A layer keeps its input alone and repeats its forward pass in backward (Chen et al. 2016, arXiv 1604.06174)."""

    @property
    def activations(self) -> int:
        """Numbers that a layer keeps, all ranks together: M (8h + 2f)."""
        return self.encoder.tokens * (8 * self.encoder.hidden + 2 * self.encoder.inner)

    @property
    def states(self) -> int:
        """Numbers of one hidden state: M h."""
        return self.encoder.tokens * self.encoder.hidden

    @property
    def inputs(self) -> int:
        """Numbers of the inputs of a layer's four products: M (3h + f)."""
        return self.encoder.tokens * (3 * self.encoder.hidden + self.encoder.inner)

    def refusal(self, **parts: int) -> str | None:
        """The first size of the encoder that does not divide by its parts, or None."""
        for name, number in parts.items():
            value = getattr(self.encoder, name)
            if value % number:
                return f"{name} {value} does not divide by {number}"
        return None

    def answer(
        self,
        row: KnownWay,
        *,
        forward: Sequence[Move],
        backward: Sequence[Move],
        saved: int,
        stored: int,
        split: int,
    ) -> KnownWay:
        """The row with its counts.

        Args:
            saved: elements that a layer keeps.
            stored: elements of the layer's input on this rank, all that is kept of it when activations are recomputed.
            split: into how many parts the weights are cut.
        """
        model = self.encoder.layers * self.encoder.weights + self.encoder.vocabulary * self.encoder.hidden
        again = tuple(forward) if self.recomputed else ()
        return replace(
            row,
            forward=tuple(forward),
            backward=again + tuple(backward),
            saved=stored if self.recomputed else saved,
            weights=-(-model // split),
        )
