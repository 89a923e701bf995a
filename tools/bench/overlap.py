"""`bench overlap`: a training step with collectives under products and without, side by side on the same ranks."""

from __future__ import annotations

import dataclasses
import statistics
import sys
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch.distributed as dist

from tensor3d import CubeShape
from tools.bench.machine import Machine, aligned, check_output, heading, write_json
from tools.bench.overlap_trial import SIDES, Facts, OverlapTrial, Sample, Side
from tools.bench.rivals_work import Work
from tools.bench.shared import Part, check_world, start
from tools.bench.sizes import Sizes
from tools.bench.step import deal
from tools.bench.subcommand import Subcommand
from tools.bench.turns import in_turns


@dataclass(frozen=True, kw_only=True)
class OverlapCommand(Sizes, Subcommand):
    """Time BERT steps with and without overlap, in turns, on the machine's own wire and on slower ones."""

    cube: str = "2x2x2"
    """XxYxZ."""
    data_parallel: int = 1
    """Copies of the cube."""
    latencies: str = "0,5,20"
    """Milliseconds that a collective takes at least, made by sleeping; with commas. 0: the machine's own wire."""
    steps: int = 10
    """Steps that are timed, of each side and latency."""
    warmup: int = 3
    """Steps before that, at least 2: the first one learns in which order weights are used."""
    rounds: int = 5
    """Turns that each gets; the steps are dealt out over them."""
    output: Path | None = None
    """JSON file for all figures."""

    @classmethod
    def defaults(cls, arguments: Sequence[str]) -> Any:
        return cls()

    def run(self, arguments: Sequence[str]) -> int:
        shape, latencies = self.check()
        machine = Machine.here()
        with ExitStack() as stack:
            make = partial(OverlapTrial, work=self.work, warmup=self.warmup, latencies=latencies)
            part = start([shape], make, stack)[0]
            shown = not dist.is_initialized() or dist.get_rank() == 0
            results, facts = self.measure(part, latencies, shown=shown)
        wrong = faults(facts)
        if shown:
            self.report(results, facts, machine, arguments)
            for fault in wrong:
                print(f"tools.bench: {fault}", file=sys.stderr, flush=True)
        return 1 if wrong else 0

    @property
    def work(self) -> Work:
        return Work(what="step", config=self.config, sequences=self.sequences, length=self.length)

    def check(self) -> tuple[CubeShape, list[float]]:
        """The cube, and the latencies in seconds. Raises ValueError for what can be seen before any process."""
        self.check_least(steps=1, warmup=2, rounds=1)
        try:
            latencies = [float(part) / 1e3 for part in self.latencies.split(",")]
        except ValueError:
            raise ValueError(f"--latencies must be milliseconds, such as 0,5,20. Got {self.latencies!r}.") from None
        if not all(0 <= latency <= 10 for latency in latencies) or 0.0 not in latencies:
            raise ValueError(
                f"--latencies must lie between 0 and 10000 ms, with 0 among them: predictions are made from it. Got "
                f"{self.latencies!r}."
            )
        shape = CubeShape.parse(self.cube, self.data_parallel)
        if shape.ranks < 2:
            raise ValueError(f"--cube must have at least 2 ranks: one alone sends nothing. Got {shape}.")
        self.work.check_cube(shape)
        check_world([shape])
        check_output(self.output)
        return shape, sorted(set(latencies))

    def measure(
        self, part: Part[OverlapTrial], latencies: Sequence[float], *, shown: bool
    ) -> tuple[list[LatencyFigures], list[dict[Side, Facts]]]:
        counts = deal(self.steps, self.rounds)
        cases = [(latency, side) for latency in latencies for side in SIDES]

        def turn(i: int, number: int) -> list[list[Sample]]:
            latency, side = cases[i]
            return part.call(OverlapTrial.turn, side, counts[number], latency)

        names = [f"{latency * 1e3:g} ms, {side}" for latency, side in cases]
        turns = dict(zip(cases, in_turns(names, len(counts), turn, shown=shown), strict=True))
        facts = part.call(OverlapTrial.get_facts)
        base = {side: turns[0.0, side] for side in SIDES}
        found = [
            latency_figures(latency, {side: turns[latency, side] for side in SIDES}, base) for latency in latencies
        ]
        return found, facts

    def report(
        self,
        results: Sequence[LatencyFigures],
        facts: Sequence[dict[Side, Facts]],
        machine: Machine,
        arguments: Sequence[str],
    ) -> None:
        """The tables on the screen, and the JSON file."""
        print(f"{machine}")
        print(
            f"cube {self.cube} x {self.data_parallel}: {self.layers} layers, hidden {self.hidden}, vocabulary "
            f"{self.vocab}, {self.sequences} sequences of {self.length} tokens; {self.steps} steps of each in "
            f"{len(deal(self.steps, self.rounds))} rounds"
        )
        print("\n".join(aligned(HEADER, [row(latency) for latency in results])))
        print("\n".join(aligned(FACTS_HEADER, [facts_row(side, [rank[side] for rank in facts]) for side in SIDES])))
        verdict = "the same bits" if all(rank[side].same_bits for rank in facts for side in SIDES) else "DIFFERENT"
        print(f"weights after all steps: {verdict}")
        if self.output is not None:
            content = {
                **heading(arguments, machine),
                "work": dataclasses.asdict(self.work),
                "results": [dataclasses.asdict(each) for each in results],
                "facts": [{side: dataclasses.asdict(fact) for side, fact in rank.items()} for rank in facts],
            }
            write_json(self.output, content)
            print(f"written: {self.output}")
        sys.stdout.flush()


@dataclass(frozen=True, kw_only=True)
class LatencyFigures:
    """Both sides on one wire. Seconds of a step are the mean over the ranks."""

    latency: float
    """Seconds that a collective took at least."""
    seconds: dict[Side, float]
    """Of a step: median."""
    ratio: float
    """Time with overlap over time without: median of the rounds."""
    ratio_range: tuple[float, float]
    """Lowest and highest round."""
    gain: float
    """Seconds that overlap saves in a step: median of the rounds."""
    gain_predicted: float | None
    """The same, from the steps without latency: what the order of issues and waits lets travel unseen. None for these
    steps themselves."""
    steps: dict[Side, tuple[float, ...]]


def latency_figures(
    latency: float, turns: dict[Side, list[list[list[Sample]]]], base: dict[Side, list[list[list[Sample]]]]
) -> LatencyFigures:
    """
    Args:
        turns: by side and round: of each rank, its steps.
        base: the same without latency.
    """
    rounds = {side: [_mean_seconds(turn) for turn in turns[side]] for side in SIDES}
    pairs = [
        (statistics.median(on), statistics.median(off)) for on, off in zip(*(rounds[s] for s in SIDES), strict=True)
    ]
    ratios = [on / off for on, off in pairs]
    steps = {side: tuple(second for seconds in rounds[side] for second in seconds) for side in SIDES}
    return LatencyFigures(
        latency=latency,
        seconds={side: statistics.median(steps[side]) for side in SIDES},
        ratio=statistics.median(ratios),
        ratio_range=(min(ratios), max(ratios)),
        gain=statistics.median(off - on for on, off in pairs),
        gain_predicted=_predicted(base["none"], latency) - _predicted(base["overlap"], latency) if latency else None,
        steps=steps,
    )


def _predicted(rounds: list[list[list[Sample]]], latency: float) -> float:
    """Seconds of a step on that wire: of each step, the mean over the ranks; of these, the median."""
    return statistics.median(
        statistics.fmean(sample.predicted[latency] for sample in samples)
        for turn in rounds
        for samples in zip(*turn, strict=True)
    )


def _mean_seconds(turn: list[list[Sample]]) -> list[float]:
    """Of each step, over the ranks."""
    return [statistics.fmean(sample.seconds for sample in samples) for samples in zip(*turn, strict=True)]


def faults(facts: Sequence[dict[Side, Facts]]) -> list[str]:
    """What must not differ between the sides, in words."""
    found = []
    for what in ("losses", "received", "collectives", "saved"):
        if any(getattr(rank["overlap"], what) != getattr(rank["none"], what) for rank in facts):
            found.append(f"overlap changes {what}, which it must not")
    if not all(fact.same_bits for rank in facts for fact in rank.values()):
        found.append("overlap changes the weights after some steps, which it must not")
    return found


HEADER = ("latency ms", "overlap ms", "none ms", "ratio", "by round", "gain ms", "predicted ms")


def row(figures: LatencyFigures) -> tuple[str, ...]:
    """What the table shows, under `HEADER`."""
    low, high = figures.ratio_range
    return (
        f"{figures.latency * 1e3:g}",
        f"{figures.seconds['overlap'] * 1e3:.1f}",
        f"{figures.seconds['none'] * 1e3:.1f}",
        f"{figures.ratio:.3f}",
        f"{low:.2f}-{high:.2f}",
        f"{figures.gain * 1e3:.1f}",
        "-" if figures.gain_predicted is None else f"{figures.gain_predicted * 1e3:.1f}",
    )


FACTS_HEADER = ("side", "MiB received", "collectives", "saved MiB", "peak MiB", "travelling ms", "hidden")


def facts_row(side: Side, ranks: Sequence[Facts]) -> tuple[str, ...]:
    """One side: bytes of the rank with the most, times over all ranks."""
    travelling = statistics.fmean(rank.travelling for rank in ranks)
    hidden = statistics.fmean(rank.hidden for rank in ranks)
    return (
        side,
        f"{max(rank.received for rank in ranks) / 2**20:.2f}",
        f"{max(rank.collectives for rank in ranks)}",
        f"{max(rank.saved for rank in ranks) / 2**20:.2f}",
        f"{max(rank.peak for rank in ranks) / 2**20:.2f}",
        f"{travelling * 1e3:.1f}",
        f"{hidden / travelling:.0%}" if travelling else "-",
    )
