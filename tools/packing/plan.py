"""`python -m tools.packing plan`: one plan, made once and kept as a file."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from pathlib import Path
from time import perf_counter

import numpy as np

from tensor3d.data.masking import masked_counts
from tensor3d.packing import PLANNERS, Limits, fingerprint_of, save_plan
from tools.packing.histogram import Source


@dataclass(frozen=True, kw_only=True)
class PlanCommand(Source):
    """Make a plan and write it to a file, which is read again only for the same lengths, limits and method."""

    output: Path
    """JSON file to write."""
    method: str = "lp"
    """One of padded, spfhp, lpfhp, nnlshp, lp."""
    max_sequences: int | None = None
    """Sequences of a pack, at most. Default: no limit."""
    masked_per_pack: int | None = None
    """Tokens to guess in a pack, at most, where 15 % of each sequence are guessed. Default: no limit."""

    def run(self) -> int:
        if self.method not in PLANNERS:
            raise ValueError(f"--method must be one of {', '.join(PLANNERS)}. Got {self.method}.")
        if self.output.is_dir() or not self.output.parent.is_dir():
            raise ValueError(f"--output must be a file in a folder that exists. Got {self.output}.")
        counts, capacity = self.lengths()
        costs = None if self.masked_per_pack is None else masked_counts(np.arange(max(capacity, 0) + 1))
        limits = Limits.of(capacity, self.max_sequences, budget=self.masked_per_pack, costs=costs)
        fingerprint = fingerprint_of(counts, limits, self.method)
        print(f"planning {int(counts.sum()):,} sequences by {self.method}", file=sys.stderr)
        start = perf_counter()
        plan = PLANNERS[self.method](counts, capacity, self.max_sequences, budget=self.masked_per_pack, costs=costs)
        seconds = perf_counter() - start
        save_plan(plan, self.output, fingerprint)
        print(f"{self.output}: {plan.packs:,} packs of {capacity} slots, planned in {seconds:.2f} s")
        print(f"  fill            {100 * plan.efficiency:.4f} %")
        print(f"  packing factor  {plan.packing_factor:.4f} sequences a pack")
        print(f"  fingerprint     {fingerprint}")
        return 0
