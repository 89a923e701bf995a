"""`bench overlap`: a training step with collectives under products and without, side by side on the same ranks."""

from __future__ import annotations

import dataclasses
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Annotated, Any, ClassVar, Literal, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.profiler import record_function
from torch.profiler import ProfilerActivity, profile

from tensor3d import Cube, CubeShape, ExecutionPolicy, local
from tensor3d.distributed.comm_stats import Place
from tools.bench.harness.benchmark import Benchmark, Count, Report
from tools.bench.harness.figures import Column, as_json, deal, flat, means, milliseconds, ratios_of, spread, table
from tools.bench.harness.memory import counting_kept, peak_on
from tools.bench.harness.processes import Trial, check_world, is_shown, start, take_case_turns
from tools.bench.vs_pytorch.trial import Implementation, make_ours
from tools.bench.vs_pytorch.work import Sizes, Work
from tools.common.bounds import AtLeast
from tools.common.machine import format_table

# --- What one step of a rank was, collective by collective, and how long it would take on a slower wire ---------------

WAITING = "tensor3d: waits"
"""What the profiler shows where the host waits for a collective."""


@dataclass(frozen=True, kw_only=True)
class Event:
    """A moment of the host."""

    kind: Literal["issued", "waits", "has"]
    number: int
    """Of the collective."""
    at: float
    """Seconds."""


class Trace:
    """An observer of a cube's traffic that writes everything down, and can make each collective take longer.

    Args:
        latency: seconds that pass at least between the issue of a collective and its result. The host sleeps that long
            where it comes to wait earlier; what it does before that is time in which the collective travels unseen.
    """

    def __init__(self, latency: float = 0.0) -> None:
        self.latency = latency
        self.slept = 0.0
        """Seconds of latency that nothing has hidden."""
        self.events: list[Event] = []
        self._issued: dict[int, float] = {}
        self._waiting: record_function | None = None

    def issued(self, place: Place) -> None:
        self._issued[place[0]] = self._note("issued", place)

    def waits(self, place: Place) -> None:
        begin = self._note("waits", place)
        self._waiting = record_function(WAITING)
        self._waiting.__enter__()
        issued = self._issued.pop(place[0], None)  # None: for its second exchange, and the latency is that of both
        rest = 0.0 if issued is None else issued + self.latency - begin
        if self.latency and rest > 0:
            self.slept += rest
            time.sleep(rest)

    def has(self, place: Place) -> None:
        if self._waiting is not None:
            self._waiting.__exit__(None, None, None)
            self._waiting = None
        self._note("has", place)

    def _note(self, kind: Literal["issued", "waits", "has"], place: Place) -> float:
        now = time.perf_counter()
        self.events.append(Event(kind=kind, number=place[0], at=now))
        return now


class Replayed(NamedTuple):
    """A trace on a slower wire."""

    seconds: float
    """From the first to the last event."""
    slept: float
    """Seconds of latency that nothing has hidden."""


def replayed(events: Sequence[Event], latency: float) -> Replayed:
    """What would have been if no collective took less than `latency` seconds.

    The host's own work between two events takes as long as it did. A collective that it had to wait for takes what it
    took, or the latency if that is longer; one that was there when it was asked for takes the latency.
    """
    began: dict[int, float] = {}
    issued: dict[int, float] = {}
    asked = slept = 0.0
    now, before = 0.0, events[0].at if events else 0.0
    for event in events:
        if event.kind == "issued":
            now += event.at - before
            began[event.number], issued[event.number] = now, event.at
        elif event.kind == "waits":
            now += event.at - before
            asked = event.at
        elif event.number in began:
            took = event.at - issued[event.number] if event.at - asked > _AT_ONCE else 0.0
            begun = began.pop(event.number)
            slept += max(0.0, begun + latency - now)
            now = max(now, begun + max(took, latency))
        else:  # its second exchange, as long as it was
            now += event.at - before
        before = event.at
    return Replayed(now, slept)


_AT_ONCE = 20e-6  # seconds in which a wait ends that had nothing to wait for


# ----------------------------------------------------------------------------------------------------------------------
# What a rank does for `bench overlap`: the same model with and without overlap, in the same process, in turns.

Side = Literal["overlap", "none"]
SIDES: tuple[Side, ...] = ("overlap", "none")


@dataclass(frozen=True, kw_only=True)
class Sample:
    """One step on one rank."""

    seconds: float
    predicted: dict[float, float]
    """Seconds that the same step would take if each collective took at least so many seconds (`replayed`)."""
    hidden: float
    """Share of the latencies of its collectives in which the host did not sleep; 0 without latency."""
    hidden_predicted: dict[float, float]
    """The same if each took at least so many seconds."""


@dataclass(frozen=True, kw_only=True)
class Facts:
    """One side on one rank."""

    threads: int
    losses: tuple[float, ...]
    received: int
    """Bytes, in a step."""
    collectives: int
    """In a step."""
    saved: int
    """Bytes that autograd keeps for backward, without parameters."""
    peak: int
    """The most bytes of tensors at once in a step, above those that stay."""
    travelling: float
    """Seconds in which collectives of a step were on their way, added up; by the profiler."""
    hidden: float
    """Of these, seconds in which the host did something else."""
    same_bits: bool
    """Whether all weights after the last step are those of the other side, to the bit."""


class OverlapTrial(Trial):
    """Both sides on one rank, halted between calls.

    Args:
        warmup: steps of each at the start, at least 2: the first one learns the order.
        latencies: seconds to predict for.
    """

    def __init__(self, cube: Cube, work: Work, warmup: int, latencies: Sequence[float]) -> None:
        self._cube, self._latencies = cube, tuple(latencies)
        cubes = {"overlap": cube, "none": cube.with_policy(speed=ExecutionPolicy(overlap=False))}
        self._sides: dict[Side, Implementation] = {side: make_ours(work, cubes[side]) for side in SIDES}
        self._losses: dict[Side, list[float]] = {side: [] for side in SIDES}
        for side in SIDES:
            for _ in range(warmup):
                self._losses[side].append(float(self._sides[side].step()))

    def get_facts(self) -> dict[Side, Facts]:
        """Takes further steps to find them out, the same number on both sides."""
        found = {side: self._observe(side) for side in SIDES}
        pairs = zip(*(self._sides[side].model.parameters() for side in SIDES), strict=True)
        same = all(torch.equal(local(ours), local(theirs)) for ours, theirs in pairs)
        return {
            side: Facts(
                threads=torch.get_num_threads(), losses=tuple(self._losses[side]), same_bits=same, **found[side]
            )
            for side in SIDES
        }

    def sample(self, side: Side, latency: float) -> Sample:
        """A step on a wire that is as slow as that."""
        with self._tracing(latency) as trace:
            dist.barrier()
            begin = time.perf_counter()
            self._losses[side].append(float(self._sides[side].step()))
            seconds = time.perf_counter() - begin
        # What is before the first and after the last collective is the host's own.
        between = trace.events[-1].at - trace.events[0].at
        slower = {each: replayed(trace.events, each) for each in self._latencies}
        collectives = sum(event.kind == "issued" for event in trace.events)
        return Sample(
            seconds=seconds,
            predicted={each: seconds - between + slower[each].seconds for each in slower},
            hidden=1 - trace.slept / (latency * collectives) if latency else 0.0,
            hidden_predicted={each: 1 - slower[each].slept / (each * collectives) for each in slower if each},
        )

    @contextmanager
    def _tracing(self, latency: float) -> Iterator[Trace]:
        self._cube.traffic.observer = trace = Trace(latency)
        try:
            yield trace
        finally:
            self._cube.traffic.observer = None

    def _observe(self, side: Side) -> dict[str, Any]:
        contender = self._sides[side]

        def step() -> Tensor:
            return contender.step()

        with self._cube.traffic.counting() as traffic, counting_kept(contender.model) as passes:
            step()
        with self._tracing(0.0), profile(activities=[ProfilerActivity.CPU], acc_events=True) as profiled:
            dist.barrier()
            step()
        travelling, hidden = _hidden(profiled)
        return {
            "received": traffic.total_bytes,
            "collectives": traffic.total_calls,
            "saved": passes[0].kept,
            "peak": peak_on(self._cube.device, contender.step),
            "travelling": travelling,
            "hidden": hidden,
        }


def _hidden(profiled: profile) -> tuple[float, float]:
    """Seconds in which collectives of gloo travelled, added up, and of these those in which the host did not wait."""
    events = list(profiled.events() or [])
    waits = [(e.time_range.start, e.time_range.end) for e in events if e.name == WAITING]
    travelling = waited = 0.0
    for event in events:
        if not event.name.startswith("gloo:") or event.name.startswith("gloo:barrier"):
            continue
        start, end = event.time_range.start, event.time_range.end
        travelling += end - start
        waited += sum(max(0.0, min(end, last) - max(start, first)) for first, last in waits)
    return travelling * 1e-6, (travelling - waited) * 1e-6


# --- `bench overlap` --------------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class OverlapCommand(Sizes, Benchmark[tuple[CubeShape, list[float]]]):
    """Time BERT steps with and without overlap, in turns, on the machine's own wire and on slower ones."""

    cube: str = "2x2x2"
    """XxYxZ."""
    data_parallel: int = 1
    """Copies of the cube."""
    latencies: str = "0,5,20"
    """Milliseconds that a collective takes at least, made by sleeping; with commas. 0: the machine's own wire."""
    steps: Count = 10
    """Steps that are timed, of each side and latency."""
    warmup: Annotated[int, AtLeast(2)] = 3
    """Steps before that, at least 2: the first one learns in which order weights are used."""
    rounds: Count = 5
    """Turns that each gets; the steps are dealt out over them."""
    tolerance: Annotated[float, AtLeast(0)] = 0.0
    """Largest difference of the predicted and the measured share that overlap hides at which the status is still 0. 0:
    any."""

    def plan(self) -> tuple[CubeShape, list[float]]:
        """The cube, and the latencies in seconds."""
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
        return shape, sorted(set(latencies))

    def measure(self, plan: tuple[CubeShape, list[float]]) -> Report:
        shape, latencies = plan
        counts = deal(self.steps, self.rounds)
        cases = [(side, latency) for latency in latencies for side in SIDES]
        names = {f"{latency * 1e3:g} ms, {side}": (side, latency) for side, latency in cases}
        with ExitStack() as stack:
            make = partial(OverlapTrial, work=self.work, warmup=self.warmup, latencies=latencies)
            (part,) = start([shape], make, stack)
            shown = is_shown()
            turns = dict(zip(cases, take_case_turns(part, names, counts, shown=shown), strict=True))
            facts = part.call(OverlapTrial.get_facts)
        base = {side: turns[side, 0.0] for side in SIDES}
        results = [
            latency_figures(latency, {side: turns[side, latency] for side in SIDES}, base) for latency in latencies
        ]
        same = all(rank[side].same_bits for rank in facts for side in SIDES)
        lines = [
            f"cube {self.cube} x {self.data_parallel}: {self.layers} layers, hidden {self.hidden}, vocabulary "
            f"{self.vocab}, {self.sequences} sequences of {self.length} tokens; {self.steps} steps of each in "
            f"{len(counts)} rounds",
            *table(results),
            *format_table(FACTS_HEADER, [facts_row(side, [rank[side] for rank in facts]) for side in SIDES]),
            f"weights after all steps: {'the same bits' if same else 'DIFFERENT'}",
        ]
        content = {
            "work": dataclasses.asdict(self.work),
            "results": as_json(results),
            "facts": [{side: dataclasses.asdict(fact) for side, fact in rank.items()} for rank in facts],
        }
        found = [*faults(facts), *far_off(results, self.tolerance)]
        return Report(lines=lines, content=content, faults=found, shown=shown)


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
    hidden: float | None
    """Share of the latencies of all collectives of a step that overlap hides: in which the host did something else. The
    median; None without latency."""
    hidden_predicted: float | None
    """The same, from the steps without latency."""
    steps: dict[Side, tuple[float, ...]]

    COLUMNS: ClassVar[tuple[Column, ...]] = (
        Column("latency ms", "g", 1e3, of="latency"),
        milliseconds("overlap ms", of="seconds.overlap"),
        milliseconds("none ms", of="seconds.none"),
        Column("ratio", ".3f", of="ratio"),
        Column("by round", ".2f", of="ratio_range"),
        milliseconds("gain ms", of="gain"),
        milliseconds("predicted ms", of="gain_predicted"),
        Column("hidden", ".1%", of="hidden"),
        Column("predicted", ".1%", of="hidden_predicted"),
    )


Turns = dict[Side, list[list[list[Sample]]]]
"""By side and round: of each rank, its steps."""


def latency_figures(latency: float, turns: Turns, base: Turns) -> LatencyFigures:
    """
    Args:
        turns: on that wire.
        base: without latency.
    """
    rounds = {side: [means(turn, lambda sample: sample.seconds) for turn in turns[side]] for side in SIDES}
    ratios = ratios_of(rounds["overlap"], rounds["none"])
    steps = {side: tuple(flat(rounds[side])) for side in SIDES}
    return LatencyFigures(
        latency=latency,
        seconds={side: statistics.median(steps[side]) for side in SIDES},
        ratio=statistics.median(ratios),
        ratio_range=spread(ratios),
        gain=_gain(turns, lambda sample: sample.seconds),
        gain_predicted=_gain(base, lambda sample: sample.predicted[latency]) if latency else None,
        hidden=_median(turns, lambda sample: sample.hidden) if latency else None,
        hidden_predicted=_median(base, lambda sample: sample.hidden_predicted[latency]) if latency else None,
        steps=steps,
    )


def _gain(turns: Turns, seconds: Callable[[Sample], float]) -> float:
    """Seconds less of a step with overlap, of the mean over the ranks: the median of the rounds, whose steps share what
    else the machine does."""
    rounds = {side: [statistics.median(means(turn, seconds)) for turn in turns[side]] for side in SIDES}
    return statistics.median(off - on for on, off in zip(rounds["overlap"], rounds["none"], strict=True))


def _median(turns: Turns, share: Callable[[Sample], float]) -> float:
    """Of the steps with overlap; of a step, the mean over the ranks."""
    return statistics.median(flat([means(turn, share) for turn in turns["overlap"]]))


def faults(facts: Sequence[dict[Side, Facts]]) -> list[str]:
    """What must not differ between the sides, in words."""
    found = []
    for what in ("losses", "received", "collectives", "saved"):
        if any(getattr(rank["overlap"], what) != getattr(rank["none"], what) for rank in facts):
            found.append(f"overlap changes {what}, which it must not")
    if not all(fact.same_bits for rank in facts for fact in rank.values()):
        found.append("overlap changes the weights after some steps, which it must not")
    return found


def far_off(results: Sequence[LatencyFigures], tolerance: float) -> list[str]:
    """Where what is hidden was predicted worse than `tolerance` (0: any way at all), in words."""
    return [
        f"at {each.latency * 1e3:g} ms overlap hides {each.hidden:.1%} of the latencies, and "
        f"{each.hidden_predicted:.1%} were predicted: allowed is a difference of {tolerance:.1%}"
        for each in results
        if tolerance and each.hidden is not None and each.hidden_predicted is not None
        if abs(each.hidden - each.hidden_predicted) > tolerance
    ]


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
