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
from tools.bench.library_data import Work
from tools.bench.library_figures import HEADER, Sample, SideFigures, figures, row, verdict
from tools.bench.library_sides import MASKED, Checked, Side, make_sides, write_model
from tools.bench.machine import aligned
from tools.bench.peak import peak_on
from tools.bench.turns import in_turns
from tools.building import TYPES


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


def measure(
    preset: str,
    config: BertConfig,
    precisions: Sequence[str],
    contenders: Sequence[str],
    steps: Mapping[str, Sequence[Work]],
    turns: Turns,
    seed: int,
    device: torch.device,
) -> Iterator[SideFigures]:
    """All precisions and kinds of input of one preset; prints the table of each as soon as it is there.

    Args:
        steps: by kind of input; the first is for the check, for warming up and for the peak, the others are timed.
    """
    with tempfile.TemporaryDirectory() as folder:
        write_model(config, Path(folder), seed)
        for precision in precisions:
            compute = None if precision == "fp32" else TYPES[precision]
            sides = make_sides(contenders, Path(folder), compute, device)
            checks: dict[str, dict[str, Checked]] = {}
            for kind, mine in steps.items():  # before any of them has learnt something
                shown = _shown(sides, f"BERT-{preset}, {precision}, {kind}: first losses")
                checks[kind] = {name: side.check(mine[0]) for name, side in shown}
            for kind, mine in steps.items():
                yield from _on_input((preset, precision, kind), sides, checks[kind], mine, turns, device)
            sides.clear()  # the models of the next precision need the room


def _on_input(
    place: tuple[str, str, str],
    sides: Mapping[str, Side],
    checks: Mapping[str, Checked],
    steps: Sequence[Work],
    turns: Turns,
    device: torch.device,
) -> list[SideFigures]:
    """All contenders in turns, on one kind of input."""
    first, *timed = steps
    names = list(sides)
    print("BERT-{}, {}, {}".format(*place), flush=True)
    for _ in range(turns.warmup):
        for _, side in _shown(sides, "warming up"):
            side.step(first)

    def turn(number: int, round_: int) -> list[Sample]:
        mine = timed[round_ * turns.steps : (round_ + 1) * turns.steps]
        return [_timed(sides[names[number]], work) for work in mine]

    rounds = dict(zip(names, in_turns(names, turns.rounds, turn), strict=True))
    peaks = {name: peak_on(device, partial(side.step, first)) if turns.memory else None for name, side in sides.items()}
    found = [
        figures(
            place, name, rounds[name], rounds[MASKED], fill=_fill(side, timed), checked=checks[name], peak=peaks[name]
        )
        for name, side in sides.items()
    ]
    print("\n".join(aligned(HEADER, [row(side) for side in found])))
    print(verdict(found), flush=True)
    return found


def _shown(sides: Mapping[str, Side], doing: str) -> Iterator[tuple[str, Side]]:
    """One contender after another, with a bar: a step of a large model takes minutes on a few cores."""
    with tqdm(sides.items(), desc=doing, unit="step", disable=None, leave=False) as bar:
        for name, side in bar:
            bar.set_postfix_str(name)
            yield name, side


def _timed(side: Side, work: Work) -> Sample:
    begin = time.perf_counter()
    side.step(work)
    return Sample(seconds=time.perf_counter() - begin, tokens=work.step.tokens)


def _fill(side: Side, steps: Sequence[Work]) -> float:
    """Share of the slots that hold a token, over all of them."""
    return sum(work.step.tokens for work in steps) / sum(side.slots(work) for work in steps)
