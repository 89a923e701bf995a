"""`python -m tools.packing report --histogram FILE.json`, and the same way `plan`, `stream` and `balance`."""

from __future__ import annotations

import json
import logging
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from time import perf_counter
from types import MappingProxyType

import numpy as np

from tensor3d.data.masking import MASKED_SHARE, MaskingRules, masked_counts
from tensor3d.packing import PLANNERS, Limits, StreamPacker, fingerprint_of, save_plan
from tools.common.cli import run_command
from tools.common.files import check_output
from tools.common.idle_options import IdleRule
from tools.common.log import progress
from tools.packing.balance import BalanceCommand
from tools.packing.histogram import HistogramSource
from tools.packing.report import ReportCommand

_log = logging.getLogger("tools.packing")

# --- `python -m tools.packing plan`: one plan, made once and kept as a file -------------------------------------------


@dataclass(frozen=True, kw_only=True)
class PlanCommand(HistogramSource):
    """Make a plan and write it to a file, which is read again only for the same lengths, limits and method."""

    output: Path
    """JSON file to write."""
    method: str = "lp"
    """One of padded, spfhp, lpfhp, nnlshp, lp."""
    max_sequences: int | None = None
    """Sequences of a pack, at most. Default: no limit."""
    masked_per_pack: int | None = None
    """Tokens to guess in a pack, at most, where --masked-share of each sequence are guessed. Default: no limit."""
    masked_share: float = MASKED_SHARE
    """Share of the tokens that are guessed, at most 0.8."""

    def idle_rules(self) -> Sequence[IdleRule]:
        return (
            *super().idle_rules(),
            IdleRule(("masked_share",), self.masked_per_pack is not None, "the limit of --masked-per-pack"),
        )

    def run(self) -> int:
        if self.method not in PLANNERS:
            raise ValueError(f"--method must be one of {', '.join(PLANNERS)}. Got {self.method}.")
        check_output(self.output, others=[self.histogram])
        counts, capacity = self.lengths()
        share = MaskingRules(share=self.masked_share).most
        costs = None if self.masked_per_pack is None else masked_counts(np.arange(max(capacity, 0) + 1), share)
        limits = Limits.of(capacity, self.max_sequences, budget=self.masked_per_pack, costs=costs)
        fingerprint = fingerprint_of(counts, limits, self.method)
        _log.info("planning %s sequences by %s", f"{int(counts.sum()):,}", self.method)
        start = perf_counter()
        plan = PLANNERS[self.method](counts, capacity, self.max_sequences, budget=self.masked_per_pack, costs=costs)
        seconds = perf_counter() - start
        save_plan(plan, self.output, fingerprint)
        print(f"{self.output}: {plan.packs:,} packs of {capacity} slots, planned in {seconds:.2f} s")
        print(f"  fill            {100 * plan.efficiency:.4f} %")
        print(f"  packing factor  {plan.packing_factor:.4f} sequences a pack")
        print(f"  fingerprint     {fingerprint}")
        return 0


# --- `python -m tools.packing stream`: how full and how fast sequences are packed as they come ------------------------

_CHUNK = 50_000


@dataclass(frozen=True, kw_only=True)
class StreamCommand(HistogramSource):
    """Draw sequences with the lengths of a histogram, pack them as they come, and show how full the packs are."""

    max_sequences: int | None = None
    """Sequences of a pack, at most. Default: no limit."""
    window: int = 4096
    """Sequences that wait, at most."""
    sequences: int = 1_000_000
    """To draw; --seed chooses them."""
    json: bool = False
    """Print a JSON object instead of text."""

    def idle_rules(self) -> Sequence[IdleRule]:
        return ()  # its seed draws sequences, too

    def run(self) -> int:
        if self.sequences < 1:
            raise ValueError(f"--sequences must be at least 1. Got {self.sequences}.")
        counts, capacity = self.lengths()
        drawn = np.random.default_rng(self.seed).choice(len(counts), size=self.sequences, p=counts / counts.sum())
        packer = StreamPacker(capacity, self.max_sequences, window=self.window)
        packs = tokens = 0
        seconds = 0.0
        for start in progress(range(0, self.sequences, _CHUNK), leave=False):
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


# --- The command ------------------------------------------------------------------------------------------------------


COMMANDS: Mapping[str, type] = MappingProxyType(
    {"report": ReportCommand, "plan": PlanCommand, "stream": StreamCommand, "balance": BalanceCommand}
)


def main(arguments: Sequence[str] | None = None) -> int:
    """Exit status: 0, or 2 for a bad call or a file that cannot be used (one message on standard error)."""
    return run_command(
        "tools.packing",
        COMMANDS,
        arguments,
        "Packing: how full packs are, plans as files, and how evenly packs are dealt.",
        refused=(MemoryError,),
    )


if __name__ == "__main__":
    sys.exit(main())
