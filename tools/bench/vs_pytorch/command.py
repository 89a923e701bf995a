"""`bench rivals`: the same BERT on a cube and by PyTorch's own parallelism, side by side in one run."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from typing import Annotated, Literal

from tools.bench.harness.benchmark import Benchmark, Count, Report, listed
from tools.bench.harness.figures import (
    Column,
    Times,
    as_json,
    deal,
    means,
    mebibytes,
    relative_difference,
    table,
    times,
)
from tools.bench.harness.processes import is_shown, start, take_case_turns
from tools.bench.vs_pytorch.trial import RIVALS, OwnName, RankFacts, RivalsTrial, copied_cube
from tools.bench.vs_pytorch.work import Sizes, Type, What, Work
from tools.common.bounds import AtLeast

# --- The figures of `bench rivals`, made of what all ranks noted in all rounds ----------------------------------------

Turn = list[list[float]]
"""Seconds of the steps of one turn, by rank and step."""
LOSS_TOLERANCE: dict[Type, float] = {"fp32": 1e-4, "bf16": 2e-2}
"""Relative difference of losses that each type can explain with a wide margin."""
_LARGE = {"hidden": 512, "vocab": 30522}


@dataclass(frozen=True, kw_only=True)
class RivalFigures(Times):
    """One contender. Its ratios are to our first cube."""

    name: Annotated[str, Column("who", before="seconds_median")]
    """One of PyTorch's own, or a cube of ours as `OwnName` has it."""
    ours: bool
    steps: int
    tokens_per_second: Annotated[float, Column("tokens/s", ",.0f")]
    """Over all ranks, by the median."""
    collectives: Annotated[int, Column("collectives")]
    """In a step, on the rank with the most."""
    calls: dict[str, int]
    """The same, by kind of collective."""
    bytes_received: Annotated[int, mebibytes("MiB received")]
    """In a step, by the rank that receives most, in the ring model."""
    received: dict[str, int]
    """The same, by kind of collective."""
    counts_equal: bool | None
    """Whether the cube's own counter says the same on every rank. None: not a cube."""
    rest_bytes: Annotated[int, mebibytes("rest MiB")]
    """Tensors between two steps (`RankFacts.rest`), on the rank with the most."""
    peak_bytes: Annotated[int, mebibytes("peak MiB")]
    """The most tensors at once in a step (`RankFacts.peak`), on the rank with the most."""
    resident_growth: int | None
    """Of the process with the most (`RankFacts.resident`); None where the system does not tell."""
    losses: Annotated[tuple[float, ...], Column("first loss", ".6f", of="first_loss")]
    """Of the first steps; of a layer, sums of squares of the gradient of its input."""

    @property
    def first_loss(self) -> float:
        return self.losses[0]


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
    rounds, base = ([means(turn) for turn in each] for each in (turns, first))
    timed = times(rounds, base)
    receives = max(facts, key=lambda fact: sum(fact.received.values()))
    calls = max(facts, key=lambda fact: sum(fact.calls.values()))
    resident = [fact.resident for fact in facts if fact.resident is not None]
    return RivalFigures(
        **timed,
        name=name,
        ours=ours,
        steps=sum(map(len, rounds)),
        tokens_per_second=tokens / timed["seconds_median"],
        bytes_received=sum(receives.received.values()),
        received=receives.received,
        collectives=sum(calls.calls.values()),
        calls=calls.calls,
        counts_equal=all(sum(f.received.values()) == f.counted_by_cube for f in facts) if ours else None,
        rest_bytes=max(fact.rest for fact in facts),
        peak_bytes=max(fact.peak for fact in facts),
        resident_growth=max(resident) if len(resident) == len(facts) else None,
        losses=facts[0].losses,
    )


def loss_difference(contenders: Sequence[RivalFigures], step: int = 0) -> float:
    """The largest relative difference between the losses of one step. NaN if one of them is."""
    return relative_difference([contender.losses[step] for contender in contenders])


def faults(contenders: Sequence[RivalFigures], tolerance: float = LOSS_TOLERANCE["fp32"]) -> list[str]:
    """What makes the figures no comparison, in words.

    Args:
        tolerance: relative difference that losses may have.
    """
    miscounted = [contender.name for contender in contenders if contender.counts_equal is False]
    found = [f"{name}: bytes received are not those that the cube itself counts" for name in miscounted]
    for step in range(len(contenders[0].losses)):
        difference = loss_difference(contenders, step)
        if not difference <= tolerance:  # NaN too
            told = ", ".join(f"{c.name} {c.losses[step]:.6f}" for c in contenders)
            found.append(
                f"not all compute the same: their losses differ by {difference:.1e} in step {step + 1}, allowed is "
                f"{tolerance:g} ({told})"
            )
            break
    return found


# --- `bench rivals` ---------------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class RivalsCommand(Sizes, Benchmark[list[str]]):
    """Time BERT on cubes and by PyTorch's own parallelism, in turns, and count what they send and hold.

    All of them live in the same processes: N copies of the whole model and its optimiser (ddp), and the rest.
    """

    cubes: str = "2x2x2,1x8x1,8x1x1"
    """Ours, as XxYxZ,XxYxZ+kept,...; ratios are to the first. One of fewer ranks is copied over data until all have
    work (1x1x1: copies alone); +kept: its layers keep gathered operands for backward, +keptN: N MiB of them
    (keep_gathered); +zero: its copies over data share the optimiser's state out, +zero2: and gradients (not for --what
    layer)."""
    rivals: str = ",".join(RIVALS)
    """PyTorch's, some of tp (tensor parallel with sequence parallelism), fsdp2 (fully_shard), fsdp2-prefetch (with two
    layers gathered ahead each way), tp+fsdp2 (both), ddp (copies) and ddp+zero (with ZeroRedundancyOptimizer; of a
    layer, which has no optimiser, it is left out)."""
    what: What = "step"
    """A training step (forward, backward, clipping, AdamW), or forward and backward of one transformer layer."""
    size: Literal["small", "large"] = "small"
    """small is hidden 256 and a vocabulary of 8,192, or what --hidden and --vocab say; large is 512 and 30,522."""
    type: Type = "fp32"
    """Of products, on all sides: by MixedPrecisionPolicy on cubes and in fully_shard, by autocast elsewhere.
    Parameters, and sums of their gradients, stay in fp32."""
    processes: Annotated[int, AtLeast(2, why=": one alone splits nothing")] = 8
    """N: ranks of each cube and of each rival."""
    tensor_parallel: int = 2
    """Ranks of tp in tp+fsdp2."""
    steps: Count = 20
    """Steps that are timed, of each."""
    warmup: Count = 3
    """Steps before that, at least 1, whose losses must agree."""
    rounds: Count = 5
    """Turns that each gets, one after another; the steps are dealt out over them."""

    @property
    def work(self) -> Work:
        """As of `Sizes`, of the chosen size.

        Raises:
            ValueError: one beside sizes of one's own.
        """
        if self.size == "small":
            return super().work
        given = [f"--{name}" for name in _LARGE if getattr(self, name) != getattr(Sizes, name)]
        if given:
            raise ValueError(f"--size large says what {' and '.join(given)} would. Leave one of the two out.")
        sized = dataclasses.replace(self, hidden=_LARGE["hidden"], vocab=_LARGE["vocab"], size="small")
        return sized.work

    def plan(self) -> list[str]:
        """All contenders, our first cube first."""
        work = self.work
        cubes = list(dict.fromkeys(self.cubes.split(",")))
        for text in cubes:
            work.check_cube(copied_cube(text, self.processes))
            if OwnName.parse(text).zero and self.what == "layer":
                raise ValueError(f"--what layer has no optimiser whose state {text} could share. Leave it out.")
        rivals = listed("--rivals", self.rivals, RIVALS)
        if self.what == "layer":
            rivals = [rival for rival in rivals if rival != "ddp+zero"]
        for rival in rivals:
            check_rival(rival, work, self.processes, self.tensor_parallel)
        return [*cubes, *rivals]

    def measure(self, plan: list[str]) -> Report:
        counts, work = deal(self.steps, self.rounds), self.work
        make = partial(RivalsTrial, work=work, names=plan, tensor_size=self.tensor_parallel, warmup=self.warmup)
        with ExitStack() as stack:
            (part,) = start([copied_cube(plan[0], self.processes)], make, stack)
            shown = is_shown()
            turns = take_case_turns(part, {name: (name,) for name in plan}, counts, shown=shown)
            facts = part.call(RivalsTrial.get_facts)
        results = [
            figures(name, name not in RIVALS, mine, [rank[name] for rank in facts], turns[0], work.tokens)
            for name, mine in zip(plan, turns, strict=True)
        ]
        return self.report(results, counts, shown=shown)

    def report(self, results: Sequence[RivalFigures], counts: Sequence[int], *, shown: bool) -> Report:
        work, tolerance = self.work, LOSS_TOLERANCE[self.type]
        what = f"{self.layers} layers, vocabulary {work.config.vocab}" if self.what == "step" else "one layer"
        difference = loss_difference(results)
        lines = [
            f"{self.what}: {what}, hidden {work.config.hidden}, {self.heads} heads, {self.sequences} sequences of "
            f"{self.length} tokens, {self.type}, {self.processes} processes; {self.steps} steps of each in "
            f"{len(counts)} rounds, after {self.warmup} to warm up",
            *table(results),
            f"largest relative difference of first losses: {difference:.1e} (allowed is {tolerance:g})",
        ]
        content = {
            "work": {**dataclasses.asdict(work), "masked": work.masked, "tokens": work.tokens},
            "processes": self.processes,
            "tensor_parallel": self.tensor_parallel,
            "warmup": self.warmup,
            "rounds": counts,
            "loss_differences": [loss_difference(results, step) for step in range(self.warmup)],
            "results": as_json(results),
        }
        return Report(lines=lines, content=content, faults=faults(results, tolerance), shown=shown)


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
