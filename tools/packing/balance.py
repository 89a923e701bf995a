"""How evenly sequences or packs can be dealt to ranks: every method on the same random batches."""

from __future__ import annotations

import dataclasses
import json
import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from time import perf_counter
from typing import Literal, get_args

import numpy as np
from numpy.typing import NDArray

from models.bert import PRESETS
from models.bert.cost_model.flops import work
from tensor3d.packing import PLANNERS, PackingPlan
from tensor3d.packing.balance import Method, Work, deal, imbalance
from tools.common.idle_options import IdleRule
from tools.common.log import progress
from tools.common.machine import format_table
from tools.common.plotting import COLOURS, DASHES, MARKERS, check_picture, mark, new_figure, plain, plain_numbers, save
from tools.packing.histogram import HistogramSource

_log = logging.getLogger(__name__)
METHODS: tuple[Method, ...] = get_args(Method)
Even = Literal["both", "flops", "tokens"]
LEAST_SHOWN = 1e-5  # of a picture, in percent: an even deal has no place on a logarithmic axis
# (random generator, items) -> tokens and sums of squared lengths of that many random items
Draw = Callable[[np.random.Generator, int], tuple[NDArray[np.int64], NDArray[np.int64]]]


@dataclass(frozen=True, kw_only=True)
class BalanceFigures:
    """One method on the batches of one size. Imbalance is the most loaded rank over the mean: 1 is even."""

    packed: bool
    """Packs were dealt, not sequences."""
    ranks: int
    per_rank: int
    """Sequences or packs of a rank."""
    method: str
    tokens_mean: float
    """Imbalance of the tokens, mean over the batches."""
    tokens_worst: float
    """The same in the worst batch."""
    flops_mean: float
    """Imbalance of matrix and attention FLOPs, mean over the batches."""
    flops_worst: float
    """The same in the worst batch."""
    milliseconds: float
    """Of a deal, median over the batches."""


@dataclass(frozen=True, kw_only=True)
class BalanceCommand(HistogramSource):
    """Compare how evenly sequences or packs can be dealt to ranks, each method on the same random batches."""

    packed: bool = True
    """Deal packs, or whole sequences (--no-packed)."""
    max_sequences: int | None = None
    """Sequences of a pack, at most. Default: no limit."""
    method: str = "lp"
    """Planner of the packs."""
    ranks: str = "1,8,64,256"
    """Numbers of ranks, with commas between them."""
    per_rank: str = "8"
    """Sequences or packs of a rank; several numbers with commas between them."""
    model: str = "large"
    """Preset of BERT whose FLOPs are balanced."""
    even: Even = "both"
    """What is evened out: FLOPs, tokens, or both at once."""
    batches: int = 20
    """Random ones of each size."""
    seed: int = 0
    """Draws the batches, and the pairs of a corpus."""
    json: bool = False
    """Print a list of JSON objects instead of tables."""
    plot: Path | None = None
    """PNG file of imbalance against ranks."""

    def idle_rules(self) -> Sequence[IdleRule]:
        # Its seed draws batches, too.
        return (IdleRule(("method", "max_sequences"), self.packed, "packs, and with --no-packed sequences are dealt"),)

    def run(self) -> int:
        """Measures and prints; returns the exit status.

        Raises:
            ValueError: an option that cannot be, or a histogram that cannot be read or packed.
        """
        sizes = check(self)
        figures = measure(self, draw_of(self), sizes)
        if self.json:
            print(json.dumps([dataclasses.asdict(each) for each in figures], indent=2))
        else:
            print("\n".join(tables(figures, self.batches)))
        if self.plot is not None:
            plot(figures, self.plot)
            _log.info("written: %s", self.plot)
        return 0


def check(command: BalanceCommand) -> list[tuple[int, int]]:
    """The sizes to measure, (ranks, per rank). Raises ValueError for what can be seen before any work."""
    if command.model not in PRESETS:
        raise ValueError(f"--model must be one of {', '.join(PRESETS)}. Got {command.model!r}.")
    if command.packed and command.method not in PLANNERS:
        raise ValueError(f"--method must be one of {', '.join(PLANNERS)}. Got {command.method!r}.")
    if command.batches < 1:
        raise ValueError(f"--batches must be at least 1. Got {command.batches}.")
    if command.seed < 0:
        raise ValueError(f"--seed must be at least 0. Got {command.seed}.")
    check_picture(command.plot, others=[command.histogram])
    ranks, counts = numbers("--ranks", command.ranks), numbers("--per-rank", command.per_rank)
    if command.plot is not None and max(ranks) == 1:
        raise ValueError("--plot needs a number of ranks above 1: one rank has nothing to share.")
    return [(number, count) for count in counts for number in ranks]


def numbers(option: str, text: str) -> list[int]:
    """Whole numbers of at least 1 from "1,8,64"; ValueError for anything else."""
    parts = [part.strip() for part in text.split(",")]
    if not all(part.isdecimal() and int(part) >= 1 for part in parts):
        raise ValueError(f"{option} must be whole numbers of at least 1 with commas between them. Got {text!r}.")
    return [int(part) for part in parts]


def draw_of(command: BalanceCommand) -> Draw:
    """How to draw items of the asked kind."""
    histogram, capacity = command.lengths()
    if not command.packed:
        return draw_sequences(histogram)
    return draw_packs(PLANNERS[command.method](histogram, capacity, command.max_sequences))


def draw_sequences(histogram: NDArray[np.int64]) -> Draw:
    """Sequences with the lengths of the histogram."""
    share = histogram / histogram.sum()

    def draw(random: np.random.Generator, count: int) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        tokens = random.choice(len(share), size=count, p=share)
        return tokens, tokens**2

    return draw


def draw_packs(plan: PackingPlan) -> Draw:
    """Packs of the plan, each as often as the plan has it."""
    share = np.array([strategy.repeat for strategy in plan.strategies]) / plan.packs
    tokens = np.array([sum(strategy.lengths) for strategy in plan.strategies])
    squares = np.array([sum(length**2 for length in strategy.lengths) for strategy in plan.strategies])

    def draw(random: np.random.Generator, count: int) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        chosen = random.choice(len(share), size=count, p=share)
        return tokens[chosen], squares[chosen]

    return draw


def measure(command: BalanceCommand, draw: Draw, sizes: Sequence[tuple[int, int]]) -> list[BalanceFigures]:
    """Every size and method. A size has the same batches whatever else is measured."""
    cost, figures = work(PRESETS[command.model]), []
    with progress(total=len(sizes) * command.batches, unit="batch") as bar:
        for ranks, count in sizes:
            random = np.random.default_rng([command.seed, ranks, count])
            samples: dict[Method, list[tuple[float, float, float]]] = {method: [] for method in METHODS}
            for _ in range(command.batches):
                tokens, squares = draw(random, ranks * count)
                for method in METHODS:
                    samples[method].append(one_deal(tokens, squares, cost, ranks, method, command.even))
                bar.update()
            figures += [summary(command.packed, ranks, count, method, samples[method]) for method in METHODS]
    return figures


def one_deal(
    tokens: NDArray[np.int64], squares: NDArray[np.int64], cost: Work, ranks: int, method: Method, even: Even
) -> tuple[float, float, float]:
    """Imbalance of the tokens and of the FLOPs, and the seconds it took."""
    flops = cost.of(tokens, squares)
    costs = {"both": np.stack([tokens.astype(np.float64), flops], axis=1), "flops": flops, "tokens": tokens}[even]
    start = perf_counter()
    dealt = deal(costs, ranks, method)
    seconds = perf_counter() - start
    return imbalance(tokens, dealt), imbalance(flops, dealt), seconds


def summary(
    packed: bool, ranks: int, count: int, method: Method, samples: Sequence[tuple[float, float, float]]
) -> BalanceFigures:
    table = np.array(samples)
    tokens, flops, _ = table.mean(axis=0)
    tokens_worst, flops_worst, _ = table.max(axis=0)
    return BalanceFigures(
        packed=packed,
        ranks=ranks,
        per_rank=count,
        method=method,
        tokens_mean=float(tokens),
        tokens_worst=float(tokens_worst),
        flops_mean=float(flops),
        flops_worst=float(flops_worst),
        milliseconds=float(np.median(table[:, 2]) * 1e3),
    )


def tables(figures: Sequence[BalanceFigures], batches: int) -> list[str]:
    """Lines: tokens, FLOPs and time, a row for each size and a column for each method."""
    unit = "packs" if figures[0].packed else "sequences"
    evenness = f"most over mean of the ranks, mean of {batches} batches (worst)"
    lines: list[str] = []
    for title, cell in (
        (f"tokens: {evenness}", lambda f: f"{f.tokens_mean:.4f} ({f.tokens_worst:.4f})"),
        (f"FLOPs: {evenness}", lambda f: f"{f.flops_mean:.4f} ({f.flops_worst:.4f})"),
        ("milliseconds of a deal", lambda f: f"{f.milliseconds:.2f}"),
    ):
        rows: dict[str, list[str]] = {}
        for each in figures:
            rows.setdefault(f"{each.ranks} x {each.per_rank}", []).append(cell(each))
        lines += ["", title] if lines else [title]
        lines += format_table([f"ranks x {unit}", *METHODS], [[name, *cells] for name, cells in rows.items()])
    return lines


def plot(figures: Sequence[BalanceFigures], path: Path) -> None:
    """Imbalance against ranks: a colour for each method, a dash for each number of items, a panel for each measure."""
    shown = [each for each in figures if each.ranks > 1]  # one rank is even, for which a logarithm has no place
    ranks, counts = sorted({each.ranks for each in shown}), sorted({each.per_rank for each in shown})
    unit = "packs" if shown[0].packed else "sequences"
    figure = new_figure(11.0, 4.8)
    panels = figure.subplots(1, 2, sharey=True)
    for axes, name, field in zip(panels, ("tokens", "FLOPs"), ("tokens_mean", "flops_mean"), strict=True):
        for number, method in enumerate(METHODS):
            for dash, count in enumerate(counts):
                mine = [each for each in shown if (each.method, each.per_rank) == (method, count)]
                axes.plot(
                    [each.ranks for each in mine],
                    [max(100 * (getattr(each, field) - 1), LEAST_SHOWN) for each in mine],
                    color=COLOURS[number % len(COLOURS)],
                    marker=MARKERS[number % len(MARKERS)],
                    linestyle=DASHES[dash % len(DASHES)],
                    label=f"{method}, {count} {unit} a rank",
                )
        axes.set(xscale="log", yscale="log", xlabel="ranks", title=name)
        mark(axes, ranks)
        plain_numbers(axes)
        plain(axes)
    panels[0].set_ylabel("most loaded rank above the mean (%)")
    panels[1].legend(fontsize=8, frameon=False, handlelength=3, loc="center left", bbox_to_anchor=(1.0, 0.5))
    save(figure, path)
