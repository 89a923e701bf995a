"""What `explain` finds, with its sums, as a table or as JSON."""

from __future__ import annotations

import json
from collections import Counter
from dataclasses import dataclass

from tensor3d.explain.row import Row, by_axis, folded, named
from tensor3d.explain.table import table
from tensor3d.traffic import Key


@dataclass(frozen=True, kw_only=True, repr=False)
class Explanation:
    """One forward and backward pass of a model on one rank. Printed, it is a table."""

    model: str
    """The model's class."""
    cube: str
    """Sizes of the cube."""
    rank: int
    ranks: int
    tokens: int | None
    """Tokens of the whole cube, if they were told."""
    rows: tuple[Row, ...]
    """Every layer that has parameters or that sends or keeps something; then the loss and the sums of gradients."""

    @property
    def received(self) -> Counter[Key]:
        """Bytes received by (axis, kind of collective): what `cube.traffic.counting()` shows of such a step."""
        return sum((row.received for row in self.rows), Counter())

    @property
    def received_by_axis(self) -> Counter[str]:
        """Bytes received by axis; `"x+z"` for axes taken together."""
        return by_axis(self.received)

    @property
    def saved(self) -> int:
        """Bytes kept for backward, each storage once, parameters left out."""
        return sum(row.saved for row in self.rows)

    @property
    def parameters(self) -> int:
        """Elements of all parameters of the model."""
        return sum(row.parameters for row in self.rows)

    @property
    def parameters_here(self) -> int:
        """Elements of the blocks that this rank holds."""
        return sum(row.parameters_here for row in self.rows)

    @property
    def folded(self) -> tuple[Row, ...]:
        """The rows, with equal layers that follow each other in a stack as one."""
        return tuple(folded(self.rows))

    def row(self, name: str) -> Row:
        """The row of one layer, by its name in `named_modules`.

        Raises:
            ValueError: there is none.
        """
        for row in self.rows:
            if row.name == name:
                return row
        names = ", ".join(row.name for row in self.rows)
        raise ValueError(f"no row is named {name!r}. Rows are: {names}.")

    def json(self, indent: int | None = None) -> str:
        """The rows of the table and their sums as JSON, in elements and bytes; collectives as `"y all-gather"`."""
        return json.dumps(
            {
                "model": self.model,
                "cube": self.cube,
                "rank": self.rank,
                "ranks": self.ranks,
                "tokens": self.tokens,
                "rows": [row.plain() for row in self.folded],
                "total": {
                    "parameters": self.parameters,
                    "parameters_here": self.parameters_here,
                    "received": named(self.received),
                    "received_by_axis": dict(self.received_by_axis),
                    "saved": self.saved,
                },
            },
            indent=indent,
        )

    def __repr__(self) -> str:
        tokens = "" if self.tokens is None else f", {self.tokens} tokens"
        title = f"{self.model} on {self.cube}, rank {self.rank} of {self.ranks}{tokens}: one forward and backward pass"
        return "\n".join([title, "", *table(self.folded)])
