"""The boxes that scaling compares: for a number of ranks, one of each known kind."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from itertools import product

from tensor3d import CubeShape


def cube(ranks: int) -> CubeShape:
    """The box nearest to a cube; the smallest side is x, the largest y (Bian et al. 2021 for equal sides)."""
    sides = [s for s in product(_divisors(ranks), repeat=2) if ranks % math.prod(s) == 0]
    boxes = [(x, y, ranks // (x * y)) for x, y in sides]
    x, y, z = min((box for box in boxes if box[0] <= box[2] <= box[1]), key=lambda box: (sum(box), box))
    return CubeShape(x=x, y=y, z=z)


def one_dimensional(ranks: int) -> CubeShape:
    """Megatron's tensor parallelism, with sequence parallelism: (1, P, 1)."""
    return CubeShape(y=ranks)


def two_dimensional(ranks: int) -> CubeShape:
    """(1, q, q). Raises ValueError where the number is no square."""
    side = math.isqrt(ranks)
    if side**2 != ranks:
        raise ValueError(f"{ranks} ranks are no square.")
    return CubeShape(y=side, z=side)


def fully_sharded(ranks: int) -> CubeShape:
    """Every rank has a part of each weight and gathers what it needs: (P, 1, 1)."""
    return CubeShape(x=ranks)


def copies(ranks: int) -> CubeShape:
    """Data parallelism: P copies of one rank."""
    return CubeShape(data=ranks)


KINDS: Mapping[str, Callable[[int], CubeShape]] = {
    "cube": cube,
    "1d": one_dimensional,
    "2d": two_dimensional,
    "fsdp": fully_sharded,
    "data": copies,
}
"""Kinds of boxes by name; each makes the box of so many ranks, or raises ValueError where there is none."""
OTHER = "other"


def kinds_of(shape: CubeShape) -> tuple[str, ...]:
    """All the kinds that a box is of. With few ranks several kinds are the same box."""
    found = []
    for name, make in KINDS.items():
        try:
            found += [name] if make(shape.ranks) == shape else []
        except ValueError:
            continue
    return tuple(found) or (OTHER,)


def _divisors(number: int) -> list[int]:
    return [each for each in range(1, number + 1) if number % each == 0]
