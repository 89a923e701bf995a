"""What `bench matmul` and `bench layer` have in common: cubes side by side, forward and backward."""

from __future__ import annotations

import dataclasses
import sys
from abc import abstractmethod
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Literal

import torch
import torch.distributed as dist

from tensor3d import CubeShape
from tools.bench.machine import Machine, aligned, check_output, heading, write_json
from tools.bench.pass_figures import HEADER, PassFigures, difference, figures, row
from tools.bench.passes import PassTrial
from tools.bench.shared import Part, check_world, start
from tools.bench.step import deal
from tools.bench.subcommand import Subcommand
from tools.bench.subjects import Layer, Product
from tools.bench.turns import in_turns

# Relative, of sums of squares: what rounding explains with a wide margin.
_TOLERANCE = {"fp32": 1e-4, "bf16": 2e-2}


@dataclass(frozen=True, kw_only=True)
class PassCommand(Subcommand):
    """Something that runs forward and backward on one cube or several."""

    cubes: str = "1x1x1"
    """Cubes to compare, as XxYxZ,XxYxZ,...; ratios are to the first."""
    data_parallel: int = 1
    """Copies of each cube."""
    type: Literal["fp32", "bf16"] = "fp32"
    """In which is computed and sent. Weights and their gradients are fp32."""
    keep_gathered: bool = False
    """Keep gathered operands for backward."""
    passes: int = 20
    """Forward and backward, timed, on each cube."""
    warmup: int = 3
    """Passes before that, at least 1."""
    rounds: int = 4
    """Turns that each cube gets, one cube after another; the passes are dealt out over them."""
    output: Path | None = None
    """JSON file for all figures."""

    @classmethod
    def defaults(cls, arguments: Sequence[str]) -> Any:
        return cls()

    @abstractmethod
    def subject(self) -> Product | Layer:
        """What is measured."""

    def run(self, arguments: Sequence[str]) -> int:
        shapes = self.check()
        machine = Machine.here()
        with ExitStack() as stack:
            compute = torch.bfloat16 if self.type == "bf16" else None
            make = partial(PassTrial, make=self.subject(), compute=compute, warmup=self.warmup)
            parts = start(shapes, make, stack)
            shown = not dist.is_initialized() or dist.get_rank() == 0
            results = self.measure(parts, shown=shown)
        wrong = self.faults(results)
        if shown:
            self.report(results, machine, arguments)
            for fault in wrong:
                print(f"tools.bench: {fault}", file=sys.stderr, flush=True)
        return 1 if wrong else 0

    def check(self) -> list[CubeShape]:
        """The cubes. Raises ValueError for what can be seen before any process is started."""
        for name in ("passes", "warmup", "rounds"):
            if getattr(self, name) < 1:
                raise ValueError(f"--{name} must be at least 1. Got {getattr(self, name)}.")
        shapes = [CubeShape.parse(text, self.data_parallel) for text in self.cubes.split(",")]
        for shape in shapes:
            self.subject().check(shape)
        check_world(shapes)
        check_output(self.output)
        return shapes

    def measure(self, parts: Sequence[Part[PassTrial]], *, shown: bool) -> list[PassFigures]:
        counts = deal(self.passes, self.rounds)
        names = [str(part.shape) for part in parts]
        turns = in_turns(names, len(counts), lambda i, n: parts[i].call(PassTrial.turn, counts[n]), shown=shown)
        flops = self.subject().flops
        return [
            figures(part.shape, mine, part.call(PassTrial.get_facts), turns[0], flops)
            for part, mine in zip(parts, turns, strict=True)
        ]

    def faults(self, results: Sequence[PassFigures]) -> list[str]:
        """What makes the figures wrong, in words."""
        found = [
            f"cube {cube.name}: counted traffic is not its closed form" for cube in results if not cube.traffic_equal
        ]
        if not difference(results) <= _TOLERANCE[self.type]:  # NaN too
            found.append("the cubes do not compute the same, so their times are no comparison")
        return found

    def report(self, results: Sequence[PassFigures], machine: Machine, arguments: Sequence[str]) -> None:
        """The table on the screen, and the JSON file."""
        print(f"{machine}\n{self.subject()}, {self.type}")
        print("\n".join(aligned(HEADER, [row(cube) for cube in results])))
        if len(results) > 1:
            print(
                f"largest relative difference of sums of squares: {difference(results):.1e}, "
                f"allowed is {_TOLERANCE[self.type]:g}"
            )
        if self.output is not None:
            content = {
                **heading(arguments, machine),
                "subject": dataclasses.asdict(self.subject()),
                "type": self.type,
                "warmup": self.warmup,
                "rounds": deal(self.passes, self.rounds),
                "difference": difference(results),
                "results": [dataclasses.asdict(cube) for cube in results],
            }
            write_json(self.output, content)
            print(f"written: {self.output}")
        sys.stdout.flush()
