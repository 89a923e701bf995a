"""What a rank does for `bench overlap`: the same model with and without overlap, in the same process, in turns."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor
from torch.profiler import ProfilerActivity, profile

from tensor3d import Cube, Speed, local
from tools.bench.kept import counting_kept
from tools.bench.overlap_trace import WAITING, Trace, replayed
from tools.bench.peak import peak_on
from tools.bench.rivals_contender import Contender, make_ours
from tools.bench.rivals_work import Work

Side = Literal["overlap", "none"]
SIDES: tuple[Side, ...] = ("overlap", "none")


@dataclass(frozen=True, kw_only=True)
class Sample:
    """One step on one rank."""

    seconds: float
    predicted: dict[float, float]
    """Seconds that the same step would take if each collective took at least so many seconds (`replayed`)."""


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


class OverlapTrial:
    """Both sides on one rank, halted between calls.

    Args:
        warmup: steps of each at the start, at least 2: the first one learns the order.
        latencies: seconds to predict for.
    """

    def __init__(self, cube: Cube, work: Work, warmup: int, latencies: Sequence[float]) -> None:
        self._cube, self._latencies = cube, tuple(latencies)
        cubes = {"overlap": cube, "none": cube.computing(speed=Speed(overlap=False))}
        self._sides: dict[Side, Contender] = {side: make_ours(work, cubes[side]) for side in SIDES}
        self._losses: dict[Side, list[float]] = {side: [] for side in SIDES}
        for side in SIDES:
            for _ in range(warmup):
                self._losses[side].append(float(self._sides[side].step()))

    def turn(self, side: Side, steps: int, latency: float) -> list[Sample]:
        """Steps, timed, on a wire that is as slow as that. One more goes first and counts for nothing."""
        return [self._sample(side, latency) for _ in range(1 + steps)][1:]

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

    def close(self) -> None:
        """Nothing is open."""

    def _sample(self, side: Side, latency: float) -> Sample:
        with self._tracing(latency) as trace:
            dist.barrier()
            begin = time.perf_counter()
            self._losses[side].append(float(self._sides[side].step()))
            seconds = time.perf_counter() - begin
        # What is before the first and after the last collective is the host's own.
        between = trace.events[-1].at - trace.events[0].at
        predicted = {each: seconds - between + replayed(trace.events, each) for each in self._latencies}
        return Sample(seconds=seconds, predicted=predicted)

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
        with self._tracing(0.0), profile(activities=[ProfilerActivity.CPU]) as profiled:
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
