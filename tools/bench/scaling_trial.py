"""What one rank does for `bench strong` and `bench weak`: it trains on several boxes of the same ranks, in turns."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Concatenate, ParamSpec, TypeVar

from tensor3d import Cube, CubeShape
from tools.bench.groups import Group
from tools.bench.trial import StepTrial
from tools.recipe import Recipe

P = ParamSpec("P")
R = TypeVar("R")


_PROFILED = 16  # ranks on one machine, up to which profilers of all of them are affordable


class BoxTrials:
    """A training on each of several boxes. Processes are dear, and all boxes of so many ranks can share them.

    Args:
        cube: of one of the shapes.
        corpus: folder of the prepared corpus.
        warmup: steps of each at the start, at least 1.
    """

    def __init__(self, cube: Cube, recipe: Recipe, corpus: Path, warmup: int, shapes: Sequence[CubeShape]) -> None:
        peaks = cube.shape.ranks <= _PROFILED
        self._trials = [StepTrial(_cube(shape, cube), recipe, corpus, warmup, peaks=peaks) for shape in shapes]

    def on(
        self, number: int, action: Callable[Concatenate[StepTrial, P], R], /, *args: P.args, **kwargs: P.kwargs
    ) -> R:
        """`action` of one of the trainings."""
        return action(self._trials[number], *args, **kwargs)

    def close(self) -> None:
        for trial in self._trials:
            trial.close()


class BoxGroup:
    """One of the boxes of a group, as a group of its own."""

    def __init__(self, ranks: Group[BoxTrials], number: int, shape: CubeShape) -> None:
        self.shape, self._ranks, self._number = shape, ranks, number

    def call(self, action: Callable[Concatenate[StepTrial, P], R], *args: P.args, **kwargs: P.kwargs) -> list[R]:
        """As `Group.call`."""
        return self._ranks.call(BoxTrials.on, self._number, action, *args, **kwargs)

    def close(self) -> None:
        """Nothing: the ranks belong to all boxes."""


def _cube(shape: CubeShape, like: Cube) -> Cube:
    placed = shape if like.ranks_per_node is None else shape.placed(like.ranks_per_node)
    if placed == like.shape:
        return like
    return Cube(shape.x, shape.y, shape.z, shape.data, device=like.device, wire=placed.wire)
