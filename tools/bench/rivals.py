"""`bench rivals`: the same BERT on a cube and by PyTorch's own parallelism, side by side in one run."""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from tensor3d import CubeShape, rendezvous
from tools.bench.groups import Group, LocalGroup, World
from tools.bench.machine import Machine, aligned, check_output, heading, write_json
from tools.bench.rivals_contender import RIVALS
from tools.bench.rivals_figures import HEADER, LOSS_TOLERANCE, RivalFigures, faults, figures, loss_difference, row
from tools.bench.rivals_trial import RivalsTrial
from tools.bench.rivals_work import What, Work
from tools.bench.sizes import Sizes
from tools.bench.step import deal, disconnect
from tools.bench.subcommand import Subcommand
from tools.bench.turns import in_turns
from tools.cores import usable_cores


@dataclass(frozen=True, kw_only=True)
class RivalsCommand(Sizes, Subcommand):
    """Time BERT on cubes and by PyTorch's own parallelism, in turns, and count what they send and hold.

    All of them live in the same processes: N copies of the whole model and its optimiser (ddp), and the rest.
    """

    cubes: str = "2x2x2,1x8x1,8x1x1"
    """Ours, as XxYxZ,XxYxZ,...; ratios are to the first."""
    rivals: str = ",".join(RIVALS)
    """PyTorch's, some of tp, fsdp2, tp+fsdp2 and ddp."""
    what: What = "step"
    """A training step (forward, backward, clipping, AdamW), or forward and backward of one transformer layer."""
    processes: int = 8
    """N: ranks of each cube and of each rival."""
    tensor_parallel: int = 2
    """Ranks of tp in tp+fsdp2."""
    steps: int = 20
    """Steps that are timed, of each."""
    warmup: int = 3
    """Steps before that, at least 1, whose losses must agree."""
    rounds: int = 5
    """Turns that each gets, one after another; the steps are dealt out over them."""
    output: Path | None = None
    """JSON file for all figures."""

    @classmethod
    def defaults(cls, arguments: Sequence[str]) -> Any:
        return cls()

    def run(self, arguments: Sequence[str]) -> int:
        names = self.check()
        machine = Machine.here()
        with ExitStack() as stack:
            group = self.start(names, stack)
            shown = not rendezvous.is_launched() or dist.get_rank() == 0
            results = self.measure(group, names, shown=shown)
        wrong = faults(results)
        if shown:
            self.report(results, machine, arguments)
            for fault in wrong:
                print(f"tools.bench: {fault}", file=sys.stderr, flush=True)
        return 1 if wrong else 0

    @property
    def work(self) -> Work:
        return Work(what=self.what, config=self.config, sequences=self.sequences, length=self.length)

    def check(self) -> list[str]:
        """All contenders, our first cube first. Raises ValueError for what can be seen before any process."""
        self.check_least(steps=1, warmup=1, rounds=1)
        if self.processes < 2:
            raise ValueError(f"--processes must be at least 2: one alone splits nothing. Got {self.processes}.")
        work = self.work
        shapes = [CubeShape.parse(text) for text in dict.fromkeys(self.cubes.split(","))]
        for shape in shapes:
            if shape.ranks != self.processes:
                raise ValueError(
                    f"cube {shape} has {shape.ranks} ranks, and --processes is {self.processes}. Name cubes of that "
                    "size, or other --processes."
                )
            work.check_cube(shape)
        rivals = list(dict.fromkeys(self.rivals.split(",")))
        if not set(rivals) <= set(RIVALS):
            raise ValueError(f"--rivals must be some of {','.join(RIVALS)}. Got {self.rivals!r}.")
        for rival in rivals:
            check_rival(rival, work, self.processes, self.tensor_parallel)
        check_output(self.output)
        return [*map(str, shapes), *rivals]

    def start(self, names: Sequence[str], stack: ExitStack) -> Group[RivalsTrial]:
        """Processes that hold all contenders; they end with the stack."""
        make = partial(RivalsTrial, work=self.work, names=names, tensor_size=self.tensor_parallel, warmup=self.warmup)
        shape = CubeShape.parse(names[0])
        group: Group[RivalsTrial]
        if rendezvous.is_launched():
            stack.callback(disconnect)
            group = World(shape, make)
        else:
            cuda = torch.cuda.device_count() >= self.processes
            group = LocalGroup(shape, make, cuda=cuda, cores=usable_cores())
        stack.callback(group.close)
        return group

    def measure(self, group: Group[RivalsTrial], names: Sequence[str], *, shown: bool) -> list[RivalFigures]:
        """All turns of all contenders."""
        counts = deal(self.steps, self.rounds)

        def turn(i: int, number: int) -> list[list[float]]:
            return group.call(RivalsTrial.turn, names[i], counts[number])

        turns = in_turns(names, len(counts), turn, shown=shown)
        facts = group.call(RivalsTrial.get_facts)
        return [
            figures(name, name not in RIVALS, mine, [rank[name] for rank in facts], turns[0], self.work.tokens)
            for name, mine in zip(names, turns, strict=True)
        ]

    def report(self, results: Sequence[RivalFigures], machine: Machine, arguments: Sequence[str]) -> None:
        """The table on the screen, and the JSON file."""
        what = f"{self.layers} layers, vocabulary {self.vocab}" if self.what == "step" else "one layer"
        print(f"{machine}")
        print(
            f"{self.what}: {what}, hidden {self.hidden}, {self.heads} heads, {self.sequences} sequences of "
            f"{self.length} tokens, {self.processes} processes; {self.steps} steps of each in "
            f"{len(deal(self.steps, self.rounds))} rounds, after {self.warmup} to warm up"
        )
        print("\n".join(aligned(HEADER, [row(contender) for contender in results])))
        difference = loss_difference(results)
        print(f"largest relative difference of first losses: {difference:.1e} (allowed is {LOSS_TOLERANCE:g})")
        if self.output is not None:
            content = {
                **heading(arguments, machine),
                "work": {**dataclasses.asdict(self.work), "masked": self.work.masked, "tokens": self.work.tokens},
                "processes": self.processes,
                "tensor_parallel": self.tensor_parallel,
                "warmup": self.warmup,
                "rounds": deal(self.steps, self.rounds),
                "loss_differences": [loss_difference(results, step) for step in range(self.warmup)],
                "results": [dataclasses.asdict(contender) for contender in results],
            }
            write_json(self.output, content)
            print(f"written: {self.output}")
        sys.stdout.flush()


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
