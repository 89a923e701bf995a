"""`bench compile`: a training step with compiled regions and without, side by side, and each region alone."""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Literal, cast, get_args

import torch.distributed as dist
import tyro

from models.bert import PRESETS, BertConfig
from tensor3d import CubeShape, rendezvous
from tools.bench.compile_figures import (
    HEADER,
    REGION_HEADER,
    RegionFigures,
    StepFigures,
    faults,
    region_figures,
    region_row,
    row,
    step_figures,
)
from tools.bench.compile_regions import RegionTrial
from tools.bench.compile_trial import SIDES, CompileTrial, Type
from tools.bench.machine import Machine, aligned, check_output, heading, write_json
from tools.bench.rivals_work import Work
from tools.bench.shared import check_world, start
from tools.bench.step import deal
from tools.bench.subcommand import Subcommand
from tools.bench.turns import in_turns
from tools.recipe import read_recipe

Preset = Literal["tiny", "mini", "small", "base", "large"]


@dataclass(frozen=True, kw_only=True)
class CompileCommand(Subcommand):
    """Time BERT steps with compiled regions and without, in turns in the same processes, and each region alone."""

    recipe: tyro.conf.Positional[Path | None] = None
    """TOML file whose model is measured, in place of a preset."""
    preset: Preset = "small"
    """Sizes of the model."""
    cubes: str = "1x1x1"
    """Cubes to measure, as XxYxZ,XxYxZ,..."""
    types: str = "fp32"
    """In which is computed: fp32, bf16, or both with a comma."""
    dropout: float | None = None
    """Of hidden states; attention has none. Default: that of the model."""
    sequences: int = 8
    """Of the global batch. All are full."""
    length: int = 128
    """Tokens of a sequence."""
    steps: int = 10
    """Steps that are timed, of each side; and calls of each region."""
    warmup: int = 2
    """Steps before that, at least 1. The first one compiles."""
    rounds: int = 5
    """Turns that each side gets; the steps are dealt out over them."""
    regions: bool = True
    """Measure each region alone, too, on one rank. Not under torchrun."""
    output: Path | None = None
    """JSON file for all figures."""

    @classmethod
    def defaults(cls, arguments: Sequence[str]) -> Any:
        return cls()

    def run(self, arguments: Sequence[str]) -> int:
        shapes, types = self.check()
        work, machine = self.work(), Machine.here()
        (steps, shown), regions = self.measure_steps(shapes, types, work), list[RegionFigures]()
        if self.regions:
            regions = self.measure_regions(types, work)
        wrong = faults(steps)
        if shown:
            self.report(steps, regions, machine, arguments)
            for fault in wrong:
                print(f"tools.bench: {fault}", file=sys.stderr, flush=True)
        return 1 if wrong else 0

    def config(self) -> BertConfig:
        """The model's sizes."""
        found = PRESETS[self.preset]
        if self.recipe is not None:
            recipe = read_recipe(self.recipe)
            found = recipe.model.config(recipe.data)
        dropout = found.dropout if self.dropout is None else self.dropout
        positions = max(found.positions, self.length)
        return dataclasses.replace(found, dropout=dropout, attention_dropout=0.0, positions=positions)

    def work(self) -> Work:
        return Work(what="step", config=self.config(), sequences=self.sequences, length=self.length)

    def check(self) -> tuple[list[CubeShape], list[Type]]:
        """Cubes and types. Raises ValueError for what can be seen before any process is started."""
        for name in ("sequences", "length", "steps", "warmup", "rounds"):
            if getattr(self, name) < 1:
                raise ValueError(f"--{name} must be at least 1. Got {getattr(self, name)}.")
        types = list(dict.fromkeys(text.strip() for text in self.types.split(",")))
        if not types or not set(types) <= set(get_args(Type)):
            raise ValueError(f"--types must be some of {', '.join(get_args(Type))}. Got {self.types!r}.")
        shapes = [CubeShape.parse(text) for text in self.cubes.split(",")]
        for shape in shapes:
            self.work().check_cube(shape)
        check_world(shapes)
        if self.regions and rendezvous.is_launched():
            raise ValueError(
                "regions are measured in one process of their own, and torchrun, srun or mpirun has started all there "
                "are. Add --no-regions, or call python -m tools.bench itself."
            )
        check_output(self.output)
        return shapes, cast("list[Type]", types)

    def measure_steps(
        self, shapes: Sequence[CubeShape], types: Sequence[Type], work: Work
    ) -> tuple[list[StepFigures], bool]:
        """The figures, and whether this process is the one that shows them: under torchrun, rank 0."""
        counts, cases = deal(self.steps, self.rounds), [(kind, side) for kind in types for side in SIDES]
        found, shown = list[StepFigures](), True
        for shape in shapes:
            with ExitStack() as stack:
                part = start([shape], partial(CompileTrial, work=work, types=types, warmup=self.warmup), stack)[0]
                # Asked for here: when the stack is left, nobody has a rank any more.
                shown = not dist.is_initialized() or dist.get_rank() == 0
                names = [f"{shape}, {kind}, {side}" for kind, side in cases]
                turns = in_turns(
                    names,
                    len(counts),
                    lambda i, n, part=part: part.call(CompileTrial.turn, cases[i], counts[n]),  # type: ignore[misc]
                    shown=shown,
                )
                facts = part.call(CompileTrial.get_facts)
            by_case = dict(zip(cases, turns, strict=True))
            found += [step_figures(shape, kind, by_case, facts) for kind in types]
        return found, shown

    def measure_regions(self, types: Sequence[Type], work: Work) -> list[RegionFigures]:
        counts = deal(self.steps, self.rounds)
        with ExitStack() as stack:
            part = start([CubeShape()], partial(RegionTrial, work=work, types=types), stack)[0]
            facts = part.call(RegionTrial.get_facts)[0]
            turns = in_turns(
                [f"{name}, {kind}, {side}" for name, (kind, side) in facts],
                len(counts),
                lambda i, n: part.call(RegionTrial.turn, *list(facts)[i], counts[n])[0],
            )
        by_case = dict(zip(facts, turns, strict=True))
        names = list(dict.fromkeys(name for name, _ in facts))
        return [region_figures(name, kind, by_case, facts) for kind in types for name in names]

    def report(
        self,
        steps: Sequence[StepFigures],
        regions: Sequence[RegionFigures],
        machine: Machine,
        arguments: Sequence[str],
    ) -> None:
        """The tables on the screen, and the JSON file."""
        config = self.config()
        print(f"{machine}")
        print(
            f"{config.layers} layers, hidden {config.hidden}, vocabulary {config.vocab}, dropout {config.dropout:g}; "
            f"{self.sequences} sequences of {self.length} tokens; {self.steps} steps of each side in "
            f"{len(deal(self.steps, self.rounds))} rounds; ratios are compiled over eager"
        )
        print("\n".join(aligned(HEADER, [row(each) for each in steps])))
        if regions:
            print("\n".join(aligned(REGION_HEADER, [region_row(each) for each in regions])))
        if self.output is not None:
            content = {
                **heading(arguments, machine),
                "model": dataclasses.asdict(config),
                "rounds": deal(self.steps, self.rounds),
                "steps": [dataclasses.asdict(each) for each in steps],
                "regions": [dataclasses.asdict(each) for each in regions],
            }
            write_json(self.output, content)
            print(f"written: {self.output}")
        sys.stdout.flush()
