"""How far a layer is from one device, by tensor and cube, as records and as a table."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from tensor3d.distributed.cube_shape import CubeShape
from tensor3d.testing.compare import Block, Expected


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """What the ranks of one cube got, by rank and name of the tensor."""

    shape: CubeShape
    ranks: Sequence[dict[str, Block]]


@dataclass(frozen=True, kw_only=True)
class TensorError:
    """One tensor on one cube."""

    cube: str
    tensor: str
    """`"output"`, `"input 0"` and so on (its gradient), or a parameter's name (its gradient)."""
    error: float
    """The largest of all ranks: max|got - reference| / max|reference|; inf where there is nothing to compare."""
    problem: str = ""
    """`"no gradient"` or `"wrong shape"`, where there is nothing to compare."""


@dataclass(frozen=True, kw_only=True)
class Report:
    """What `check_layer` found. `str` gives a table: a line for each tensor, a column for each cube."""

    errors: tuple[TensorError, ...]
    tolerance: float

    @property
    def worst(self) -> TensorError:
        """The largest error of all tensors and cubes."""
        return max(self.errors, key=lambda found: found.error)

    @property
    def passed(self) -> bool:
        """Whether no error is above the tolerance."""
        return self.worst.error <= self.tolerance

    def fails(self, tensor: str, cube: str | None = None) -> bool:
        """Whether the tensor is wrong on the cube; None: on any."""
        return any(
            found.tensor == tensor and not found.error <= self.tolerance and cube in (None, found.cube)
            for found in self.errors
        )

    def __str__(self) -> str:
        cubes = list(dict.fromkeys(found.cube for found in self.errors))
        names = list(dict.fromkeys(found.tensor for found in self.errors))
        texts = {(found.tensor, found.cube): self._text(found) for found in self.errors}
        table = [["", *cubes], *([name, *(texts.get((name, cube), "") for cube in cubes)] for name in names)]
        widths = [max(len(row[column]) for row in table) for column in range(len(table[0]))]
        lines = ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)) for row in table]
        return "\n".join(line.rstrip() for line in lines)

    def _text(self, found: TensorError) -> str:
        text = found.problem or f"{found.error:.1e}"
        return text if found.error <= self.tolerance else f"{text} !"


def measure(outcomes: Sequence[Outcome], expected: Expected, tolerance: float) -> Report:
    """The errors of everything that came back."""
    errors = []
    for outcome in outcomes:
        for name in outcome.ranks[0]:
            wanted = wanted_of(name, expected)
            error, problem = _error([blocks.get(name) for blocks in outcome.ranks], wanted)
            errors.append(TensorError(cube=str(outcome.shape), tensor=name, error=error, problem=problem))
    return Report(errors=tuple(errors), tolerance=tolerance)


def wanted_of(name: str, expected: Expected) -> Tensor | None:
    """The reference's full tensor; None for a gradient that it does not have either."""
    return expected.output if name == "output" else expected.gradients[name]


def _error(blocks: Sequence[Block | None], wanted: Tensor | None) -> tuple[float, str]:
    largest = 0.0
    for block in blocks:
        if block is None:  # no backward on this rank, whose output has the wrong shape
            return math.inf, "no gradient"
        if block.values is None and wanted is not None:
            return math.inf, "no gradient"
        if block.values is None:
            continue
        target = torch.zeros_like(block.values) if wanted is None else wanted[block.place]
        if block.values.shape != target.shape:
            return math.inf, "wrong shape"
        largest = max(largest, largest_difference(block.values, target))
    scale = 1.0 if wanted is None or not wanted.numel() else float(wanted.abs().max())
    return largest / (scale if scale > 1e-12 else 1.0), ""


def largest_difference(got: Tensor, wanted: Tensor) -> float:
    """max|got - wanted|, inf where that is no number."""
    if not got.numel():
        return 0.0
    difference = float((got - wanted).abs().max())
    return difference if math.isfinite(difference) else math.inf
