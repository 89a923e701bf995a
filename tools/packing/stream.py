"""`python -m tools.packing stream`: how full and how fast sequences are packed as they come."""

from __future__ import annotations

import json
import sys
from dataclasses import dataclass
from time import perf_counter

import numpy as np
from tqdm import tqdm

from tensor3d.packing import StreamPacker
from tools.packing.histogram import Source

_CHUNK = 50_000


@dataclass(frozen=True, kw_only=True)
class StreamCommand(Source):
    """Draw sequences with the lengths of a histogram, pack them as they come, and show how full the packs are."""

    max_sequences: int | None = None
    """Sequences of a pack, at most. Default: no limit."""
    window: int = 4096
    """Sequences that wait, at most."""
    sequences: int = 1_000_000
    """To draw; --seed chooses them."""
    json: bool = False
    """Print a JSON object instead of text."""

    def run(self) -> int:
        if self.sequences < 1:
            raise ValueError(f"--sequences must be at least 1. Got {self.sequences}.")
        counts, capacity = self.lengths()
        drawn = np.random.default_rng(self.seed).choice(len(counts), size=self.sequences, p=counts / counts.sum())
        packer = StreamPacker(capacity, self.max_sequences, window=self.window)
        packs = tokens = 0
        seconds = 0.0
        for start in tqdm(range(0, self.sequences, _CHUNK), disable=None, file=sys.stderr, leave=False):
            chunk = drawn[start : start + _CHUNK]
            begun = perf_counter()
            finished = packer.feed(chunk)
            seconds += perf_counter() - begun
            packs += len(finished)
            tokens += sum(int(drawn[pack].sum()) for pack in finished)
        last = packer.waiting
        all_packs = packs + len(packer.flush())
        figures = {
            "packs": all_packs,
            "efficiency": int(drawn.sum()) / (all_packs * capacity),
            # Of an endless stream nothing is left over.
            "steady_efficiency": tokens / (packs * capacity) if packs else None,
            "left_over": last,
            "sequences_per_second": self.sequences / seconds,
        }
        print(json.dumps(figures, indent=2) if self.json else "\n".join(_lines(figures, capacity)))
        return 0


def _lines(figures: dict[str, float | None], capacity: int) -> list[str]:
    steady = figures["steady_efficiency"]
    return [
        f"{figures['packs']:,} packs of {capacity} slots, {figures['sequences_per_second']:,.0f} sequences/s",
        f"  fill             {100 * (figures['efficiency'] or 0):.4f} %",
        f"  before the end   {'no pack was finished' if steady is None else f'{100 * steady:.4f} %'}; "
        f"{figures['left_over']:,} sequences were left over",
    ]
