"""The turns of `bench library`."""

from __future__ import annotations

import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch
from tqdm import tqdm

from models.bert import BertConfig
from tensor3d.attention.support import Backend
from tools.bench.library_data import Work
from tools.bench.library_figures import HEADER, Sample, SideFigures, figures, row, verdict
from tools.bench.library_operators import operators_of, table
from tools.bench.library_sides import MASKED, Checked, Side, make_sides, write_model
from tools.bench.machine import aligned
from tools.bench.peak import peak_on
from tools.bench.rates import product_rate
from tools.bench.turns import in_turns
from tools.building import TYPES

_SECONDS = 1.0  # of products of each size


@dataclass(frozen=True, kw_only=True)
class Turns:
    """How often everything is done."""

    rounds: int
    """Turns of each contender."""
    steps: int
    """Of a turn, each on other sequences."""
    warmup: int
    """Steps of each contender before, at least 1: the first one makes the optimiser's state, and compiles."""
    memory: bool
    """Whether one more step is followed by a profiler."""
    operators: int
    """How many, the dearest of one more step, are told."""


def measure(
    preset: str,
    config: BertConfig,
    precisions: Sequence[str],
    contenders: Sequence[str],
    steps: Mapping[str, Sequence[Work]],
    turns: Turns,
    seed: int,
    device: torch.device,
    backend: Backend = "auto",
) -> Iterator[SideFigures]:
    """All precisions and kinds of input of one preset; prints the table of each as soon as it is there.

    Args:
        backend: of our attention.
        steps: by kind of input; the first is for the check, for warming up and for the peak, the others are timed.
    """
    with tempfile.TemporaryDirectory() as folder:
        write_model(config, Path(folder), seed)
        for precision in precisions:
            products = _fastest_product(device, precision)
            compute = None if precision == "fp32" else TYPES[precision]
            sides = make_sides(contenders, config, Path(folder), compute, device, backend)
            checks: dict[str, dict[str, Checked]] = {}
            for kind, mine in steps.items():  # before any of them has learnt something
                shown = _shown(sides, f"BERT-{preset}, {precision}, {kind}: first losses")
                checks[kind] = {name: side.check(mine[0]) for name, side in shown}
            for kind, mine in steps.items():
                place = (preset, precision, kind)
                yield from _on_input(place, sides, checks[kind], mine, turns, products, device)
            sides.clear()  # the models of the next precision need the room


def _on_input(
    place: tuple[str, str, str],
    sides: Mapping[str, Side],
    checks: Mapping[str, Checked],
    steps: Sequence[Work],
    turns: Turns,
    products: float,
    device: torch.device,
) -> list[SideFigures]:
    """All contenders in turns, on one kind of input."""
    first, *timed = steps
    names = list(sides)
    print("BERT-{}, {}, {}".format(*place), flush=True)
    for _ in range(turns.warmup):
        for _, side in _shown(sides, "warming up"):
            side.step(side.prepared(first))

    def turn(number: int, round_: int) -> list[Sample]:
        mine = timed[round_ * turns.steps : (round_ + 1) * turns.steps]
        return [_timed(sides[names[number]], work) for work in mine]

    rounds = dict(zip(names, in_turns(names, turns.rounds, turn), strict=True))
    once_more = {name: partial(side.step, side.prepared(first)) for name, side in sides.items()}
    peaks = {name: peak_on(device, run) if turns.memory else None for name, run in once_more.items()}
    dearest = {
        name: operators_of(device, run, turns.operators) if turns.operators else None for name, run in once_more.items()
    }
    found = [
        figures(
            place,
            name,
            rounds[name],
            rounds[MASKED],
            fill=_fill(side, timed),
            products=products,
            checked=checks[name],
            peak=peaks[name],
            operators=dearest[name],
        )
        for name, side in sides.items()
    ]
    print("\n".join(aligned(HEADER, [row(side) for side in found])))
    print(verdict(found), flush=True)
    for name, operators in dearest.items():
        if operators is not None:
            print("\n".join([f"{name}, one step:", *table(operators)]), flush=True)
    return found


def _fastest_product(device: torch.device, precision: str) -> float:
    """FLOP/s, of square matrices of the size that is fastest here."""
    sizes = (2048, 4096, 8192) if device.type == "cuda" else (512, 1024, 2048)
    best = max((product_rate(device, precision, n, _SECONDS) for n in sizes), key=lambda rate: rate.flops)
    told = f"products of {best.n:,} rows and columns, {precision}: {best.flops / 1e9:,.0f} GFLOP/s"
    print(f"{told}, by which MFU is measured", flush=True)
    return best.flops


def _shown(sides: Mapping[str, Side], doing: str) -> Iterator[tuple[str, Side]]:
    """One contender after another, with a bar: a step of a large model takes minutes on a few cores."""
    with tqdm(sides.items(), desc=doing, unit="step", disable=None, leave=False) as bar:
        for name, side in bar:
            bar.set_postfix_str(name)
            yield name, side


def _timed(side: Side, work: Work) -> Sample:
    fresh = side.prepared(work)
    begin = time.perf_counter()
    side.step(fresh)
    seconds = time.perf_counter() - begin
    return Sample(seconds=seconds, tokens=work.step.tokens, sequences=work.step.sequences, flops=side.flops(work))


def _fill(side: Side, steps: Sequence[Work]) -> float:
    """Share of the slots that hold a token, over all of them."""
    return sum(work.step.tokens for work in steps) / sum(side.slots(work) for work in steps)
