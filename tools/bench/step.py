"""`bench step`: the training step on several cubes, side by side in one run."""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import torch
import torch.distributed as dist
import tyro
from tqdm import tqdm

from tensor3d import Cube, CubeShape
from tensor3d.distributed import process_group
from tensor3d.distributed.object_collectives import run_on_rank0
from tools import pretrain
from tools.bench.harness.command import Subcommand, recipe_among
from tools.bench.harness.processes import Group, LocalGroup, TorchrunGroup, disconnect
from tools.bench.harness.step_trial import (
    HEADER,
    LOSS_TOLERANCE,
    CubeFigures,
    StepTrial,
    Turn,
    figures,
    loss_difference,
    row,
)
from tools.common.cpu import usable_cores
from tools.common.machine import Machine, check_output, format_table, heading, write_json
from tools.training.arguments import Command, resolve
from tools.training.config import TrainConfig, read_config
from tools.training.run_plan import RunPlan


@dataclass(frozen=True, kw_only=True)
class StepCommand(Subcommand):
    """Time pre-training steps on one cube or several, in turns, and count what they send."""

    recipe: tyro.conf.Positional[Path]
    """TOML file; shipped ones lie in launch/recipes."""
    cubes: str | None = None
    """Cubes to compare, as XxYxZ,XxYxZ,...; ratios are to the first."""
    cube: str | None = None
    """A single one. Default: 1x1x1."""
    data_parallel: int = 1
    """Copies of each cube."""
    steps: int = 20
    """Steps that are timed, on each cube."""
    warmup: int = 3
    """Steps before that, at least 1."""
    rounds: int = 4
    """Turns that each cube gets, one cube after another; the steps are dealt out over them."""
    corpus: Path | None = None
    """Folder of the prepared corpus, made if missing. Default: runs/corpora/SOURCE-VOCABULARY."""
    output: Path | None = None
    """JSON file for all figures."""
    settings: Annotated[TrainConfig, tyro.conf.arg(name="")] = field(default_factory=TrainConfig)
    """The recipe's values, each of which can be given here."""

    @classmethod
    def defaults(cls, arguments: Sequence[str]) -> Any:
        path = recipe_among(arguments)
        # Without a recipe tyro says what is missing, or prints the help.
        return cls(recipe=tyro.MISSING, settings=TrainConfig() if path is None else read_config(path))

    def run(self, arguments: Sequence[str]) -> int:
        if self.recipe != recipe_among(arguments):
            raise ValueError(f"a recipe is a file *.toml; shipped ones lie in launch/recipes. Got {self.recipe}.")
        shapes = parse_shapes(self)
        check(self, shapes)
        machine = Machine.here()
        with ExitStack() as stack:
            groups = join_world(self, shapes, stack) if process_group.is_launched() else start_here(self, shapes, stack)
            shown = not dist.is_initialized() or dist.get_rank() == 0
            results = measure(groups, deal(self.steps, self.rounds), shown=shown)
        if shown:
            report(self, results, machine, arguments)
        if losses_agree(self, results):
            return 0
        print("tools.bench: the cubes do not compute the same, so their times are no comparison.", file=sys.stderr)
        return 1


def parse_shapes(command: StepCommand) -> list[CubeShape]:
    """The cubes, in the order in which they are named."""
    if command.cube is not None and command.cubes is not None:
        raise ValueError(
            f"--cube {command.cube} and --cubes {command.cubes} exclude each other. Name all cubes in --cubes."
        )
    texts = (command.cubes or command.cube or "1x1x1").split(",")
    return [CubeShape.parse(text, command.data_parallel) for text in texts]


def check(command: StepCommand, shapes: Sequence[CubeShape]) -> None:
    """Raises ValueError for what can be seen before any process is started."""
    for name in ("steps", "warmup", "rounds"):
        if getattr(command, name) < 1:
            raise ValueError(f"--{name} must be at least 1. Got {getattr(command, name)}.")
    for shape in shapes:
        try:
            as_training(command, shape).check()
        except ValueError as problem:
            raise ValueError(f"cube {shape}: {problem}") from None
    if process_group.is_launched() and len({shape.ranks for shape in shapes}) > 1:
        needs = ", ".join(f"{shape} {shape.ranks}" for shape in shapes)
        raise ValueError(
            f"under torchrun all cubes share the same processes, and these need different numbers: {needs}. Name cubes "
            "of one size, or call python -m tools.bench itself, which starts what each cube needs on this machine."
        )
    check_output(command.output)


def as_training(command: StepCommand, shape: CubeShape) -> RunPlan:
    """The same as a run of tools.pretrain, which knows what a cube and a recipe must fulfil."""
    training = Command(recipe=command.recipe, corpus=command.corpus, settings=command.settings)
    return dataclasses.replace(resolve(training), shape=shape)


def start_here(command: StepCommand, shapes: Sequence[CubeShape], stack: ExitStack) -> list[Group[StepTrial]]:
    """A group of processes on this machine for each cube; they end with the stack."""
    training = as_training(command, shapes[0])
    pretrain.prepare_corpus(training, shown=True)
    make = partial(
        StepTrial,
        recipe=command.settings,
        corpus=training.corpus,
        warmup=command.warmup,
    )
    # All on GPUs or none: figures of different devices are no comparison.
    cuda = torch.cuda.device_count() >= max(shape.ranks for shape in shapes)
    groups: list[Group[StepTrial]] = []
    for shape in shapes:
        group = LocalGroup(shape, make, cuda=cuda, cores=usable_cores())
        stack.callback(group.close)
        groups.append(group)
    return groups


def join_world(command: StepCommand, shapes: Sequence[CubeShape], stack: ExitStack) -> list[Group[StepTrial]]:
    """All cubes on the processes that torchrun started."""

    def make(cube: Cube) -> StepTrial:
        training = as_training(command, cube.shape)
        shown = cube.rank == 0
        run_on_rank0(cube, lambda: pretrain.prepare_corpus(training, shown=shown))
        return StepTrial(cube, command.settings, training.corpus, command.warmup)

    stack.callback(disconnect)
    groups: list[Group[StepTrial]] = []
    for shape in shapes:
        group = TorchrunGroup(shape, make)
        stack.callback(group.close)
        groups.append(group)
    return groups


def measure(groups: Sequence[Group[StepTrial]], counts: Sequence[int], *, shown: bool) -> list[CubeFigures]:
    """All turns of all groups. Whatever else slows the machine down meets all cubes alike.

    Every second round runs backwards, so that no cube always follows the same one.

    Args:
        counts: steps of a turn, for each round.
        shown: with a bar on the screen.
    """
    turns: list[list[Turn]] = [[] for _ in groups]
    with tqdm(total=len(counts) * len(groups), unit="turn", disable=None if shown else True) as bar:
        for number, steps in enumerate(counts):
            order = range(len(groups)) if number % 2 == 0 else reversed(range(len(groups)))
            for i in order:
                bar.set_postfix_str(str(groups[i].shape))
                turns[i].append(groups[i].call(StepTrial.turn, steps))
                bar.update()
    return [
        figures(group.shape, mine, group.call(StepTrial.get_facts), turns[0])
        for group, mine in zip(groups, turns, strict=True)
    ]


def deal(steps: int, rounds: int) -> list[int]:
    """Steps of each round, as even as can be, at least one: never more rounds than steps."""
    rounds = min(rounds, steps)
    return [steps // rounds + (number < steps % rounds) for number in range(rounds)]


def has_dropout(command: StepCommand) -> bool:
    model = command.settings.model
    return model.dropout > 0 or model.attention_dropout > 0


def losses_agree(command: StepCommand, results: Sequence[CubeFigures]) -> bool:
    """Whether the cubes computed the same thing. With dropout there is no telling: every rank draws for itself."""
    return has_dropout(command) or loss_difference(results) <= LOSS_TOLERANCE


def report(command: StepCommand, results: Sequence[CubeFigures], machine: Machine, arguments: Sequence[str]) -> None:
    """The table on the screen, and the JSON file."""
    print(f"{machine}")
    print(
        f"{command.recipe}: {command.steps} steps a cube in {min(command.rounds, command.steps)} rounds, "
        f"after {command.warmup} to warm up"
    )
    print("\n".join(format_table(HEADER, [row(cube) for cube in results])))
    difference = loss_difference(results)
    if has_dropout(command):
        print("first losses are not compared: dropout differs from cube to cube (0 compares them)")
    elif len(results) > 1:
        verdict = "equal" if losses_agree(command, results) else f"NOT equal, allowed is {LOSS_TOLERANCE:g}"
        print(f"largest relative difference of first losses: {difference:.1e} ({verdict})")
    if command.output is not None:
        content = {
            **heading(arguments, machine),
            "recipe": command.settings.to_dict(),
            "warmup": command.warmup,
            "rounds": deal(command.steps, command.rounds),
            "loss_difference": None if has_dropout(command) else difference,
            "results": [dataclasses.asdict(cube) for cube in results],
        }
        write_json(command.output, content)
        print(f"written: {command.output}")
    sys.stdout.flush()
