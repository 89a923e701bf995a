"""`python -m tools.packing report`: every planner at several limits on the sequences of a pack, side by side."""

from __future__ import annotations

import dataclasses
import json
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from tools.packing.histogram import Source
from tools.packing.measure import ALL, DEPTHS, Row, limit_text, measure, planners_of


@dataclass(frozen=True, kw_only=True)
class ReportCommand(Source):
    """Plan with every method and show how full the packs are, how long it took, and what no plan can beat."""

    method: str = ALL
    """One of padded, spfhp, lpfhp, nnlshp, lp; or all."""
    max_sequences: int | None = None
    """Sequences of a pack, at most. Default: several limits side by side."""
    json: bool = False
    """Print a list of JSON objects instead of the table."""
    plot: Path | None = None
    """PNG file to draw: fill against the limit on sequences."""

    def run(self) -> int:
        planners = planners_of(self.method)
        if self.plot is not None and (self.plot.is_dir() or not self.plot.parent.is_dir()):
            raise ValueError(f"--plot must be a file in a folder that exists. Got {self.plot}.")
        counts, capacity = self.lengths()
        depths = DEPTHS if self.max_sequences is None else (self.max_sequences,)
        rows = measure(counts, capacity, planners, depths, skip_refusals=self.method == ALL)
        if self.json:
            print(json.dumps([dataclasses.asdict(row) for row in rows], indent=2))
        else:
            print("\n".join(table(rows, counts, capacity)))
        if self.plot is not None:
            # matplotlib takes a second, for which nobody should wait who wants no picture.
            from tools.packing.chart import draw_report

            draw_report(rows, capacity, self.plot)
            print(f"written: {self.plot}", file=sys.stderr)
        return 0


def table(rows: Sequence[Row], counts: NDArray[np.int64], capacity: int) -> Iterator[str]:
    """Lines: what was packed, then a line a plan."""
    tokens = int(counts @ np.arange(len(counts)))
    yield f"{int(counts.sum()):,} sequences, {tokens:,} tokens, packs of {capacity}"
    yield ""
    yield f"{'sequences':>9}  {'method':<8}{'packs':>13}{'fill %':>10}{'factor':>9}{'seconds':>10}{'above bound':>19}"
    for index, row in enumerate(rows):
        if index and row.max_sequences != rows[index - 1].max_sequences:
            yield ""
        above = f"{row.packs - row.lower_bound_packs:+,} {row.lower_bound_kind}"
        yield (
            f"{limit_text(row.max_sequences):>9}  {row.method:<8}{row.packs:>13,}{100 * row.efficiency:>10.4f}"
            f"{row.packing_factor:>9.4f}{row.seconds:>10.3f}{above:>19}"
        )
    yield ""
    yield "factor: sequences per pack. above bound: packs more than the bound, which is that of a linear programme (lp)"
    yield "or, where that is too large, of the tokens (tokens)."
