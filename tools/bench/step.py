"""`bench step`: the training step on several cubes, side by side in one run."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import ClassVar

from tensor3d import CubeShape
from tools.bench.harness.benchmark import Count, Report, cubes_of
from tools.bench.harness.figures import as_json, deal, table
from tools.bench.harness.processes import Group, check_world, is_shown, take_turns
from tools.bench.harness.step_trial import (
    LOSS_TOLERANCE,
    CubeFigures,
    RecipeBenchmark,
    StepTrial,
    check_cube,
    figures,
    loss_difference,
    prepare_here,
    start_on_corpus,
)


@dataclass(frozen=True, kw_only=True)
class StepCommand(RecipeBenchmark):
    """Time pre-training steps on one cube or several, in turns, and count what they send."""

    cubes: str | None = None
    """Cubes to compare, as XxYxZ,XxYxZ,...; ratios are to the first."""
    cube: str | None = None
    """A single one. Default: 1x1x1."""
    data_parallel: int = 1
    """Copies of each cube."""
    steps: Count = 20
    """Steps that are timed, on each cube."""
    warmup: Count = 3
    """Steps before that, at least 1."""
    rounds: Count = 4
    """Turns that each cube gets, one cube after another; the steps are dealt out over them."""
    corpus: Path | None = None
    """Folder of the prepared corpus, made if missing. Default: runs/corpora/SOURCE-VOCABULARY."""

    launcher: ClassVar[str | None] = None

    def plan(self) -> list[CubeShape]:
        """The cubes, in the order in which they are named."""
        if self.cubes is not None and self.cube is not None:
            raise ValueError(
                f"--cube {self.cube} and --cubes {self.cubes} exclude each other. Name all cubes in --cubes."
            )
        shapes = cubes_of(self.cubes or self.cube or "1x1x1", self.data_parallel)
        for shape in shapes:
            check_cube(self.as_training(self.settings, corpus=self.corpus), shape)
        check_world(shapes)
        return shapes

    def measure(self, plan: list[CubeShape]) -> Report:
        counts, training = deal(self.steps, self.rounds), self.as_training(self.settings, corpus=self.corpus)
        prepare_here(training)
        make = partial(StepTrial, recipe=self.settings, warmup=self.warmup)
        with ExitStack() as stack:
            parts = start_on_corpus(training, plan, make, stack, shared=False)
            shown = is_shown()
            results = measure(parts, counts, shown=shown)
        difference = loss_difference(results)
        rounds = f"{self.steps} steps a cube in {len(counts)} rounds, after {self.warmup} to warm up"
        lines = [f"{self.recipe}: {rounds}", *table(results)]
        if self.has_dropout:
            lines.append("first losses are not compared: dropout differs from cube to cube (0 compares them)")
        elif len(results) > 1:
            verdict = "equal" if self.agree(results) else f"NOT equal, allowed is {LOSS_TOLERANCE:g}"
            lines.append(f"largest relative difference of first losses: {difference:.1e} ({verdict})")
        content = {
            "warmup": self.warmup,
            "rounds": counts,
            "loss_difference": None if self.has_dropout else difference,
            "results": as_json(results),
        }
        fault = "the cubes do not compute the same, so their times are no comparison."
        return Report(lines=lines, content=content, faults=[] if self.agree(results) else [fault], shown=shown)

    def agree(self, results: Sequence[CubeFigures]) -> bool:
        """Whether the cubes computed the same thing. With dropout there is no telling."""
        return self.has_dropout or loss_difference(results) <= LOSS_TOLERANCE


def measure(parts: Sequence[Group[StepTrial]], counts: Sequence[int], *, shown: bool) -> list[CubeFigures]:
    """All turns of all cubes.

    Args:
        counts: steps of a turn, for each round.
        shown: with a bar on the screen.
    """
    turns = take_turns(parts, counts, shown=shown)
    return [
        figures(part.shape, mine, part.call(StepTrial.get_facts), turns[0])
        for part, mine in zip(parts, turns, strict=True)
    ]
