"""Where the sequences of the running forward pass lie, for modules whose own arguments cannot tell."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from tensor3d.sequences import Sequences


class PackedRows:
    """Holds the sequences of a rank's rows while a model runs, whose code knows nothing of packs.

        rows = PackedRows()
        model = parallelize(module, cube, {"layers.*.attention": kinds.attention(rows), ...})
        with rows.holding(sequences):
            loss = model(ids)

    One object serves all attention layers of a model, and the copies of the model too.
    """

    def __init__(self) -> None:
        self._held: Sequences | None = None

    @contextmanager
    def holding(self, sequences: Sequences) -> Iterator[None]:
        """Inside, attention runs within `sequences`: those of this rank's rows on face y."""
        before, self._held = self._held, sequences
        try:
            yield
        finally:
            self._held = before

    @property
    def sequences(self) -> Sequences:
        """Those held now.

        Raises:
            ValueError: none are held.
        """
        if self._held is None:
            raise ValueError(
                "attention needs to know where sequences begin and end, and no Sequences are held. Call the model "
                "inside `with rows.holding(sequences):` (the backward pass too, if it recomputes the forward pass)."
            )
        return self._held

    def __deepcopy__(self, memo: dict[int, Any]) -> PackedRows:
        return self  # whoever feeds the model feeds its copies

    def __repr__(self) -> str:
        return f"PackedRows({'nothing held' if self._held is None else f'{len(self._held.lengths)} sequences'})"
