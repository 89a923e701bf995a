"""`bench rivals`: the same BERT on a cube and by PyTorch's own parallelism, side by side in one run."""

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

import numpy as np
import torch
import torch.distributed as dist

from tensor3d import CubeShape
from tensor3d.distributed import process_group
from tools.bench.harness.command import Sizes, Subcommand
from tools.bench.harness.processes import Group, LocalGroup, TorchrunGroup, disconnect, interleave
from tools.bench.step import deal
from tools.bench.vs_pytorch.trial import RIVALS, RankFacts, RivalsTrial, What, Work
from tools.common.cpu import usable_cores
from tools.common.machine import Machine, check_output, format_table, heading, write_json

# --- The figures of `bench rivals`, made of what all ranks noted in all rounds ----------------------------------------

Turn = list[list[float]]
"""Seconds of the steps of one turn, by rank and step."""
LOSS_TOLERANCE = 1e-4
"""Relative difference that fp32 can explain with a wide margin."""


@dataclass(frozen=True, kw_only=True)
class RivalFigures:
    """One contender. Seconds of a step are the mean over the ranks: their sum is then the time that passed."""

    name: str
    """One of PyTorch's own, or a cube of ours as XxYxZ."""
    ours: bool
    steps: int
    seconds_median: float
    seconds_quartiles: tuple[float, float]
    ratio: float
    """Median of the steps over that of our first cube: above 1 is slower than ours."""
    ratio_range: tuple[float, float]
    """The lowest and the highest of the same ratio, taken in each round alone."""
    tokens_per_second: float
    """Over all ranks, by the median."""
    bytes_received: int
    """In a step, by the rank that receives most, in the ring model."""
    received: dict[str, int]
    """The same, by kind of collective."""
    collectives: int
    """In a step, on the rank with the most."""
    calls: dict[str, int]
    """The same, by kind of collective."""
    counts_equal: bool | None
    """Whether the cube's own counter says the same on every rank. None: not a cube."""
    rest_bytes: int
    """Tensors between two steps (`RankFacts.rest`), on the rank with the most."""
    peak_bytes: int
    """The most tensors at once in a step (`RankFacts.peak`), on the rank with the most."""
    resident_growth: int | None
    """Of the process with the most (`RankFacts.resident`); None where the system does not tell."""
    losses: tuple[float, ...]
    """Of the first steps; of a layer, sums of squares of the gradient of its input."""
    seconds: tuple[tuple[float, ...], ...]
    """Every step, by round."""


def figures(
    name: str, ours: bool, turns: Sequence[Turn], facts: Sequence[RankFacts], first: Sequence[Turn], tokens: int
) -> RivalFigures:
    """The figures of one contender.

    Args:
        turns: its turns, by round.
        facts: of its ranks.
        first: the turns of our first cube, in the same rounds.
        tokens: of a step, over all ranks.
    """
    rounds, base = ([seconds_of(turn) for turn in each] for each in (turns, first))
    steps = [second for seconds in rounds for second in seconds]
    low, median, high = (float(q) for q in np.quantile(steps, [0.25, 0.5, 0.75]))
    ratios = [statistics.median(mine) / statistics.median(theirs) for mine, theirs in zip(rounds, base, strict=True)]
    receives = max(facts, key=lambda fact: sum(fact.received.values()))
    calls = max(facts, key=lambda fact: sum(fact.calls.values()))
    resident = [fact.resident for fact in facts if fact.resident is not None]
    return RivalFigures(
        name=name,
        ours=ours,
        steps=len(steps),
        seconds_median=median,
        seconds_quartiles=(low, high),
        ratio=median / statistics.median(second for seconds in base for second in seconds),
        ratio_range=(min(ratios), max(ratios)),
        tokens_per_second=tokens / median,
        bytes_received=sum(receives.received.values()),
        received=receives.received,
        collectives=sum(calls.calls.values()),
        calls=calls.calls,
        counts_equal=all(sum(f.received.values()) == f.counted_by_cube for f in facts) if ours else None,
        rest_bytes=max(fact.rest for fact in facts),
        peak_bytes=max(fact.peak for fact in facts),
        resident_growth=max(resident) if len(resident) == len(facts) else None,
        losses=facts[0].losses,
        seconds=tuple(tuple(seconds) for seconds in rounds),
    )


def seconds_of(turn: Turn) -> list[float]:
    """Seconds of each step of a turn."""
    return [statistics.fmean(step) for step in zip(*turn, strict=True)]


def loss_difference(contenders: Sequence[RivalFigures], step: int = 0) -> float:
    """The largest relative difference between the losses of one step. NaN if one of them is."""
    losses = np.array([contender.losses[step] for contender in contenders])
    return float((losses.max() - losses.min()) / abs(losses.min()))


def faults(contenders: Sequence[RivalFigures]) -> list[str]:
    """What makes the figures no comparison, in words."""
    miscounted = [contender.name for contender in contenders if contender.counts_equal is False]
    found = [f"{name}: bytes received are not those that the cube itself counts" for name in miscounted]
    for step in range(len(contenders[0].losses)):
        difference = loss_difference(contenders, step)
        if not difference <= LOSS_TOLERANCE:  # NaN too
            told = ", ".join(f"{c.name} {c.losses[step]:.6f}" for c in contenders)
            found.append(
                f"not all compute the same: their losses differ by {difference:.1e} in step {step + 1}, allowed is "
                f"{LOSS_TOLERANCE:g} ({told})"
            )
            break
    return found


HEADER = (
    "who",
    "step ms",
    "quartiles",
    "ratio",
    "by round",
    "tokens/s",
    "collectives",
    "MiB received",
    "rest MiB",
    "peak MiB",
    "first loss",
)


def row(contender: RivalFigures) -> tuple[str, ...]:
    """What the table shows of a contender, under `HEADER`."""
    low, high = contender.seconds_quartiles
    least, most = contender.ratio_range
    return (
        contender.name,
        f"{contender.seconds_median * 1e3:.1f}",
        f"{low * 1e3:.1f}-{high * 1e3:.1f}",
        f"{contender.ratio:.2f}",
        f"{least:.2f}-{most:.2f}",
        f"{contender.tokens_per_second:,.0f}",
        str(contender.collectives),
        f"{contender.bytes_received / 2**20:.2f}",
        f"{contender.rest_bytes / 2**20:.2f}",
        f"{contender.peak_bytes / 2**20:.2f}",
        f"{contender.losses[0]:.6f}",
    )


# --- `bench rivals` ---------------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class RivalsCommand(Sizes, Subcommand):
    """Time BERT on cubes and by PyTorch's own parallelism, in turns, and count what they send and hold.

    All of them live in the same processes: N copies of the whole model and its optimiser (ddp), and the rest.
    """

    cubes: str = "2x2x2,1x8x1,8x1x1"
    """Ours, as XxYxZ,XxYxZ,...; ratios are to the first."""
    rivals: str = ",".join(RIVALS)
    """PyTorch's, some of tp, fsdp2, tp+fsdp2 and ddp."""
    what: What = "step"
    """A training step (forward, backward, clipping, AdamW), or forward and backward of one transformer layer."""
    processes: int = 8
    """N: ranks of each cube and of each rival."""
    tensor_parallel: int = 2
    """Ranks of tp in tp+fsdp2."""
    steps: int = 20
    """Steps that are timed, of each."""
    warmup: int = 3
    """Steps before that, at least 1, whose losses must agree."""
    rounds: int = 5
    """Turns that each gets, one after another; the steps are dealt out over them."""
    output: Path | None = None
    """JSON file for all figures."""

    @classmethod
    def defaults(cls, arguments: Sequence[str]) -> Any:
        return cls()

    def run(self, arguments: Sequence[str]) -> int:
        names = self.check()
        machine = Machine.here()
        with ExitStack() as stack:
            group = self.start(names, stack)
            shown = not process_group.is_launched() or dist.get_rank() == 0
            results = self.measure(group, names, shown=shown)
        wrong = faults(results)
        if shown:
            self.report(results, machine, arguments)
            for fault in wrong:
                print(f"tools.bench: {fault}", file=sys.stderr, flush=True)
        return 1 if wrong else 0

    @property
    def work(self) -> Work:
        return Work(what=self.what, config=self.config, sequences=self.sequences, length=self.length)

    def check(self) -> list[str]:
        """All contenders, our first cube first. Raises ValueError for what can be seen before any process."""
        self.check_least(steps=1, warmup=1, rounds=1)
        if self.processes < 2:
            raise ValueError(f"--processes must be at least 2: one alone splits nothing. Got {self.processes}.")
        work = self.work
        shapes = [CubeShape.parse(text) for text in dict.fromkeys(self.cubes.split(","))]
        for shape in shapes:
            if shape.ranks != self.processes:
                raise ValueError(
                    f"cube {shape} has {shape.ranks} ranks, and --processes is {self.processes}. Name cubes of that "
                    "size, or other --processes."
                )
            work.check_cube(shape)
        rivals = list(dict.fromkeys(self.rivals.split(",")))
        if not set(rivals) <= set(RIVALS):
            raise ValueError(f"--rivals must be some of {','.join(RIVALS)}. Got {self.rivals!r}.")
        for rival in rivals:
            check_rival(rival, work, self.processes, self.tensor_parallel)
        check_output(self.output)
        return [*map(str, shapes), *rivals]

    def start(self, names: Sequence[str], stack: ExitStack) -> Group[RivalsTrial]:
        """Processes that hold all contenders; they end with the stack."""
        make = partial(RivalsTrial, work=self.work, names=names, tensor_size=self.tensor_parallel, warmup=self.warmup)
        shape = CubeShape.parse(names[0])
        group: Group[RivalsTrial]
        if process_group.is_launched():
            stack.callback(disconnect)
            group = TorchrunGroup(shape, make)
        else:
            cuda = torch.cuda.device_count() >= self.processes
            group = LocalGroup(shape, make, cuda=cuda, cores=usable_cores())
        stack.callback(group.close)
        return group

    def measure(self, group: Group[RivalsTrial], names: Sequence[str], *, shown: bool) -> list[RivalFigures]:
        """All turns of all contenders."""
        counts = deal(self.steps, self.rounds)

        def turn(i: int, number: int) -> list[list[float]]:
            return group.call(RivalsTrial.turn, names[i], counts[number])

        turns = interleave(names, len(counts), turn, shown=shown)
        facts = group.call(RivalsTrial.get_facts)
        return [
            figures(name, name not in RIVALS, mine, [rank[name] for rank in facts], turns[0], self.work.tokens)
            for name, mine in zip(names, turns, strict=True)
        ]

    def report(self, results: Sequence[RivalFigures], machine: Machine, arguments: Sequence[str]) -> None:
        """The table on the screen, and the JSON file."""
        what = f"{self.layers} layers, vocabulary {self.vocab}" if self.what == "step" else "one layer"
        print(f"{machine}")
        print(
            f"{self.what}: {what}, hidden {self.hidden}, {self.heads} heads, {self.sequences} sequences of "
            f"{self.length} tokens, {self.processes} processes; {self.steps} steps of each in "
            f"{len(deal(self.steps, self.rounds))} rounds, after {self.warmup} to warm up"
        )
        print("\n".join(format_table(HEADER, [row(contender) for contender in results])))
        difference = loss_difference(results)
        print(f"largest relative difference of first losses: {difference:.1e} (allowed is {LOSS_TOLERANCE:g})")
        if self.output is not None:
            content = {
                **heading(arguments, machine),
                "work": {**dataclasses.asdict(self.work), "masked": self.work.masked, "tokens": self.work.tokens},
                "processes": self.processes,
                "tensor_parallel": self.tensor_parallel,
                "warmup": self.warmup,
                "rounds": deal(self.steps, self.rounds),
                "loss_differences": [loss_difference(results, step) for step in range(self.warmup)],
                "results": [dataclasses.asdict(contender) for contender in results],
            }
            write_json(self.output, content)
            print(f"written: {self.output}")
        sys.stdout.flush()


def check_rival(name: str, work: Work, processes: int, tensor_size: int) -> None:
    """Raises ValueError where one of PyTorch's own cannot split the work."""
    if name == "tp+fsdp2" and (not 1 < tensor_size < processes or processes % tensor_size):
        raise ValueError(
            f"--tensor-parallel must lie between 1 and --processes={processes} and divide it. Got {tensor_size}. Set "
            "another, or leave tp+fsdp2 out of --rivals."
        )
    members = {"tp": processes, "tp+fsdp2": tensor_size}.get(name, 1)
    for what, number, divisor in (
        ("--heads", work.config.heads, members),
        ("--length", work.length, members),
        ("--sequences", work.sequences, processes // members),
    ):
        if number % divisor:
            raise ValueError(
                f"{name} needs {what} that divide by {divisor}. Got {number}. Choose others, or leave {name} out of "
                "--rivals."
            )
