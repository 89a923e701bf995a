"""What the benchmarks of training share: a recipe on the command line, and trainings that work in turns."""

from __future__ import annotations

import dataclasses
import statistics
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any

import torch
import tyro
from tqdm import tqdm

from tensor3d import Cube, CubeShape, rendezvous
from tools import pretrain
from tools.bench.groups import Group, LocalGroup
from tools.bench.machine import Machine, check_output, heading, write_json
from tools.bench.step import recipe_among
from tools.bench.subcommand import Subcommand
from tools.cores import usable_cores
from tools.feed import Feed
from tools.metrics import StepMetrics
from tools.recipe import Recipe, read_recipe
from tools.trainer import Trainer

PACKED, PADDED, BINNED = "packed", "padded", "binned"
"""Kinds of packs: as the recipe fills them, one sequence in each, and one of like length in each pack of a step."""
Turn = list[list[StepMetrics]]
"""What the steps of one turn took, by rank and step."""


@dataclass(frozen=True, kw_only=True)
class RecipeCommand(Subcommand):
    """A measurement of what a recipe trains, in processes of its own on this machine."""

    recipe: tyro.conf.Positional[Path]
    """TOML file; shipped ones lie in launch/recipes."""
    output: Path | None = None
    """JSON file for all figures."""
    settings: Annotated[Recipe, tyro.conf.arg(name="")] = field(default_factory=Recipe)
    """The recipe's values, each of which can be given here."""

    @classmethod
    def defaults(cls, arguments: Sequence[str]) -> Any:
        path = recipe_among(arguments)
        # Without a recipe tyro says what is missing, or prints the help.
        return cls(recipe=tyro.MISSING, settings=Recipe() if path is None else read_recipe(path))

    def check_call(self, arguments: Sequence[str], *at_least_1: str) -> None:
        """Raises ValueError for what is wrong with any such call.

        Args:
            at_least_1: names of fields.
        """
        if self.recipe != recipe_among(arguments):
            raise ValueError(f"a recipe is a file *.toml; shipped ones lie in launch/recipes. Got {self.recipe}.")
        if rendezvous.is_launched():
            raise ValueError(
                "this benchmark starts its processes itself, on one machine. Call it without torchrun, srun or mpirun."
            )
        for name in at_least_1:
            if getattr(self, name) < 1:
                raise ValueError(f"--{name.replace('_', '-')} must be at least 1. Got {getattr(self, name)}.")
        check_output(self.output)

    def as_training(self, settings: Recipe, **options: Any) -> pretrain.Command:
        """The same as a command of tools.pretrain, which knows where a corpus lies and what must fit together."""
        return pretrain.Command(recipe=self.recipe, settings=settings, **options)

    def write(self, arguments: Sequence[str], machine: Machine, **content: Any) -> None:
        """The JSON file, if one is asked for: what was measured, and how and where."""
        if self.output is not None:
            head = {
                **heading(arguments, machine),
                "recipe": self.settings.to_dict(),
            }
            write_json(self.output, head | content)
            print(f"written: {self.output}")


class Training:
    """Pre-training on one rank, halted between calls.

    Args:
        make_feed: makes its data; the feed is closed with the training.
    """

    def __init__(self, cube: Cube, recipe: Recipe, make_feed: Callable[[Recipe, Cube], Feed]) -> None:
        self.feed = make_feed(recipe, cube)
        self.trainer = Trainer(recipe, cube, self.feed, None)
        self.loader = self.trainer.loader()
        self._steps = self.trainer.steps(self.loader)

    def turn(self, steps: int) -> list[StepMetrics]:
        return [next(self._steps) for _ in range(steps)]

    def close(self) -> None:
        self.loader.close()
        self.feed.close()


def in_mode(recipe: Recipe, mode: str) -> Recipe:
    """The recipe with packs of that kind; as it fills them for any other word than "padded" and "binned"."""
    data = recipe.data
    if mode == PADDED:
        data = dataclasses.replace(data, packing="padded")
    elif mode == BINNED:
        data = dataclasses.replace(data, packing="binned")
    return dataclasses.replace(recipe, data=data)


def check_planned(recipe: Recipe) -> None:
    """Raises ValueError unless packs of the recipe can be compared with padded and binned ones."""
    data = recipe.data
    if data.packing in (PADDED, BINNED) or data.groups > 1:
        raise ValueError(
            f"the recipe must fill packs, in one group. Got data.packing={data.packing!r} and "
            f"data.groups={data.groups}. Set data.packing to a planner such as lpfhp, and data.groups to 1."
        )


def check_cube(training: pretrain.Command, shape: CubeShape) -> None:
    """Raises ValueError where a cube cannot train a recipe."""
    try:
        pretrain.check(training, shape)
    except ValueError as problem:
        raise ValueError(f"cube {shape}: {problem}") from None


def start(
    shape: CubeShape, make: Callable[[Cube], Training], stack: ExitStack, *, cuda: bool | None = None
) -> LocalGroup[Training]:
    """Processes of this machine that train on a cube; they end with the stack.

    Args:
        cuda: a GPU for each rank. Default: if there are enough.
    """
    if cuda is None:
        cuda = torch.cuda.device_count() >= shape.ranks
    group = LocalGroup(shape, make, cuda=cuda, cores=usable_cores())
    stack.callback(group.close)
    return group


def alternate(
    groups: Mapping[str, Group[Training]], counts: Sequence[int], *, skip: int, warmup: int = 0
) -> dict[str, list[Turn]]:
    """Lets groups train in turns and returns the turns of each, by round.

    Whatever else slows the machine down meets all groups alike. Every second round runs backwards, so that no group
    always follows the same one.

    Args:
        counts: steps of a turn, for each round.
        skip: steps at the begin of each turn that are no part of the counts; they are returned too.
        warmup: steps of each group before all turns, of which nobody hears.
    """
    turns: dict[str, list[Turn]] = {name: [] for name in groups}
    with tqdm(total=len(counts) * len(groups), unit="turn", disable=None) as bar:
        for name, group in groups.items():
            bar.set_postfix_str(f"{name}, warming up")
            group.call(Training.turn, warmup)
        for number, steps in enumerate(counts):
            for name in groups if number % 2 == 0 else reversed(list(groups)):
                bar.set_postfix_str(name)
                turns[name].append(groups[name].call(Training.turn, skip + steps))
                bar.update()
    return turns


def timed(turns: Sequence[Turn], skip: int) -> list[Turn]:
    """The turns without their first steps."""
    return [[rank[skip:] for rank in turn] for turn in turns]


def seconds_of(turn: Turn) -> list[float]:
    """Seconds of each step: the mean over the ranks, so that their sum is the time that passed."""
    return [statistics.fmean(metrics.seconds for metrics in step) for step in zip(*turn, strict=True)]
