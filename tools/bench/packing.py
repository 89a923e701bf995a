"""`bench packing`: every planner on random histograms, or the time and memory of dealing sequences to packs."""

from __future__ import annotations

import multiprocessing
import statistics
import time
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from typing import Annotated, ClassVar

import numpy as np
import torch
from numpy.typing import NDArray

from tensor3d.packing import PLANNERS, PackingPlan, assign, lpfhp
from tensor3d.packing.planners import count_partitions
from tools.bench.harness.benchmark import Benchmark, Natural, Report
from tools.bench.harness.figures import Column, as_json, milliseconds, table
from tools.bench.harness.memory import PeakMemory
from tools.bench.harness.synthetic_data import Case, draw_case, exponential_histogram, faults
from tools.common.log import progress

_CAPACITY = 512
_MOST_PARTITIONS = 20_000
"""Of a case that nnlshp is given: more take it seconds each."""


@dataclass(frozen=True, kw_only=True)
class PackingCommand(Benchmark[None]):
    """Check and time every planner on random histograms, and time how sequences are put into packs."""

    histograms: Natural = 1000
    """Random histograms; 0: none."""
    sequences: Natural = 0
    """Put so many sequences, and ten times as many, into packs of 512; 0: none. 16279552 is an English Wikipedia."""
    seed: Natural = 0
    """Of the histograms."""

    at_once: ClassVar[bool] = True

    def plan(self) -> None:
        if not self.histograms and not self.sequences:
            raise ValueError("nothing to measure: --histograms and --sequences are both 0.")

    def measure(self, plan: None) -> Report:
        results, problems = check_planners(self.histograms, self.seed)
        if results:
            print("\n".join(table(results)), flush=True)
        dealt = [measure_apart(count) for count in (self.sequences, 10 * self.sequences) if count]
        content = {"planners": as_json(results), "assign": as_json(dealt), "problems": problems}
        return Report(lines=[sentence(figures) for figures in dealt], content=content, faults=problems)


# Planners


@dataclass(frozen=True, kw_only=True)
class PlannerFigures:
    """One planner on all histograms that it was given."""

    planner: Annotated[str, Column("planner")]
    histograms: Annotated[int, Column("histograms")]
    failures: Annotated[int, Column("failures")]
    """Histograms whose plan broke a limit, lost a sequence, or was below the bound."""
    seconds_median: Annotated[float, milliseconds("median ms", ".2f")]
    seconds_worst: Annotated[float, Column("worst s", ".3f")]
    efficiency: Annotated[float, Column("efficiency", ".3%")]
    """Mean."""
    gap: Annotated[float, Column("over the bound", ".3%")]
    """Packs above the bound, as a share of it: mean."""
    packs_over: Annotated[int, Column("most packs over", ",")]
    """Packs above the bound: the most."""


@dataclass(frozen=True, kw_only=True)
class Trial:
    """One plan."""

    seconds: float
    efficiency: float
    packs_over: int
    gap: float
    faults: tuple[str, ...]


def check_planners(histograms: int, seed: int) -> tuple[list[PlannerFigures], list[str]]:
    """Figures of every planner, and what is wrong with their plans."""
    trials: dict[str, list[Trial]] = {name: [] for name in PLANNERS}
    problems = []
    for number in progress(range(histograms), unit="histogram"):
        for name, trial in try_all(draw_case(np.random.default_rng([seed, number]))).items():
            trials[name].append(trial)
            problems += [f"{name}, histogram {number} of seed {seed}: {fault}" for fault in trial.faults]
    return [figures_of(name, mine) for name, mine in trials.items() if mine], problems


def try_all(case: Case) -> dict[str, Trial]:
    """Every planner on one case. The bound is that of `lp`, which knows the best one."""
    plans: dict[str, tuple[PackingPlan, float]] = {}
    for name, planner in PLANNERS.items():
        if name == "nnlshp" and _partitions(case) > _MOST_PARTITIONS:
            continue
        start = time.perf_counter()
        plan = planner(case.histogram, case.capacity, case.max_sequences, budget=case.budget, costs=case.costs)
        plans[name] = plan, time.perf_counter() - start
    bound = plans["lp"][0].lower_bound
    trials = {}
    for name, (plan, seconds) in plans.items():
        found = faults(plan, case, bound)
        if name == "lp" and plan.packs > plans["lpfhp"][0].packs:
            found.append(f"{plan.packs} packs, and lpfhp needs {plans['lpfhp'][0].packs}")
        trials[name] = Trial(
            seconds=seconds,
            efficiency=plan.efficiency,
            packs_over=plan.packs - bound.packs,
            gap=plan.packs / bound.packs - 1,
            faults=tuple(found),
        )
    return trials


def _partitions(case: Case) -> int:
    depth = case.capacity if case.max_sequences is None else case.max_sequences
    return count_partitions(case.capacity, depth, _MOST_PARTITIONS)


def figures_of(planner: str, trials: Sequence[Trial]) -> PlannerFigures:
    return PlannerFigures(
        planner=planner,
        histograms=len(trials),
        failures=sum(bool(trial.faults) for trial in trials),
        seconds_median=statistics.median(trial.seconds for trial in trials),
        seconds_worst=max(trial.seconds for trial in trials),
        efficiency=statistics.fmean(trial.efficiency for trial in trials),
        gap=statistics.fmean(trial.gap for trial in trials),
        packs_over=max(trial.packs_over for trial in trials),
    )


# Sequences to packs


@dataclass(frozen=True, kw_only=True)
class AssignFigures:
    """Putting shuffled sequences into the packs of a plan."""

    sequences: int
    packs: int
    seconds: float
    peak_memory_bytes: int | None
    """Growth above the process with the lengths."""


def measure_apart(sequences: int) -> AssignFigures:
    """In a process of its own, whose memory nobody has used before."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload([__name__])
    with ProcessPoolExecutor(1, mp_context=context) as pool:
        return pool.submit(measure_assign, sequences).result()


def measure_assign(sequences: int) -> AssignFigures:
    histogram = _histogram(sequences)
    lengths = np.repeat(np.arange(len(histogram), dtype=np.int16), histogram)
    np.random.default_rng(0).shuffle(lengths)
    plan = lpfhp(histogram, _CAPACITY)
    memory = PeakMemory(torch.device("cpu"))
    start = time.perf_counter()
    packs = assign(plan, lengths, np.random.default_rng(1))
    return AssignFigures(
        sequences=sequences,
        packs=len(packs),
        seconds=time.perf_counter() - start,
        peak_memory_bytes=memory.growth(),
    )


def _histogram(sequences: int) -> NDArray[np.int64]:
    """(capacity + 1,): exactly so many sequences, of exponential lengths."""
    weights = exponential_histogram(_CAPACITY)
    ends = np.rint(np.cumsum(weights / weights.sum()) * sequences).astype(np.int64)
    return np.diff(ends, prepend=0)


def sentence(figures: AssignFigures) -> str:
    memory = figures.peak_memory_bytes
    return (
        f"{figures.sequences:,} sequences into {figures.packs:,} packs: {figures.seconds:.2f} s, "
        f"{'unknown' if memory is None else f'{memory / 2**20:,.0f} MiB'} at the most"
    )
