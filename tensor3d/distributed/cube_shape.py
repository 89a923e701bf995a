"""The cube's shape as plain numbers: coordinates and members without any process. The planner uses it as it is."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable
from dataclasses import dataclass, replace
from itertools import permutations
from typing import Literal, get_args

AxisName = Literal["data", "x", "y", "z"]
AXES: tuple[AxisName, ...] = get_args(AxisName)
# The order of DTensor's placements, in which several axes cut one dim. y and z before x, so that a weight cut by y (or
# z) and then by x is contiguous; data last, so that it cuts the block that a rank holds (distributed/data_shares.py).
MESH_AXES: tuple[AxisName, ...] = ("y", "z", "x", "data")


def check_axes(names: Iterable[str]) -> None:
    """Raises ValueError for a name that is not an axis: a sum over it would silently be left out."""
    for name in names:
        if name not in AXES:
            raise ValueError(f"the axes of a cube are {AXES}. Got {name!r}.")


def chunk_bounds(size: int, parts: int, index: int) -> tuple[int, int]:
    """Where chunk `index` of `parts` starts and ends: ceil(size/parts) each, the last ones shorter or empty."""
    step = -(-size // parts)
    return min(index * step, size), min((index + 1) * step, size)


@dataclass(frozen=True, kw_only=True)
class CubeShape:
    """Sizes of the four axes, and the order in which ranks are dealt to them.

    Raises:
        ValueError: a size below 1, or a `wire` that does not name each axis once.
    """

    x: int = 1
    y: int = 1
    z: int = 1
    data: int = 1
    wire: tuple[AxisName, ...] = AXES
    """Axes from the slowest to the fastest change of the rank. Consecutive ranks are neighbours on the wire, so the
    last axes lie inside a node: z and y carry the blocking traffic."""

    def __post_init__(self) -> None:
        for name in AXES:
            size = getattr(self, name)
            if not isinstance(size, int) or isinstance(size, bool) or size < 1:
                raise ValueError(f"cube axis {name} must be a whole number of at least 1. Got {size!r}.")
        if sorted(self.wire) != sorted(AXES):
            raise ValueError(f"wire must name each of {AXES} once, slowest first. Got {self.wire!r}.")

    @classmethod
    def parse(cls, text: str, data: int = 1) -> CubeShape:
        """Reads `"2x2x2"` (x, y, z)."""
        if not re.fullmatch(r"[1-9]\d*x[1-9]\d*x[1-9]\d*", text):
            raise ValueError(f"a cube is written XxYxZ with whole numbers of at least 1, like 2x2x2. Got {text!r}.")
        x, y, z = map(int, text.split("x"))
        return cls(x=x, y=y, z=z, data=data)

    @property
    def ranks(self) -> int:
        return self.x * self.y * self.z * self.data

    @property
    def planes(self) -> int:
        """Planes work on different tokens; the `y*z` ranks of one plane share theirs."""
        return self.data * self.x

    @property
    def is_undivided(self) -> bool:
        """Whether each rank holds the whole model, and its rows whole: x, y and z are 1."""
        return self.x == self.y == self.z == 1

    def size(self, axis: AxisName) -> int:
        size: int = getattr(self, axis)
        return size

    def check_block(self, *, heads: int, hidden: int, inner: int, kv_heads: int | None = None) -> None:
        """Raises ValueError where the sizes of a transformer block do not divide: what its layers would say, before any
        process. `kv_heads`: of keys and values, where they are fewer."""
        sizes: tuple[tuple[str, int, AxisName], ...] = (
            ("heads", heads, "y"),
            ("kv_heads", heads if kv_heads is None else kv_heads, "y"),
            ("hidden", hidden, "y"),
            ("hidden", hidden, "z"),
            ("inner", inner, "y"),
        )
        for what, number, axis in sizes:
            size = self.size(axis)
            if number % size:
                raise ValueError(f"{what} must divide by {axis}={size}. Got {number}. Change {what} or the cube.")

    def coordinate(self, rank: int) -> dict[AxisName, int]:
        """Where a rank stands on each axis. Raises ValueError for a rank that the cube does not have."""
        if not 0 <= rank < self.ranks:
            raise ValueError(f"a rank of {self} must lie between 0 and {self.ranks - 1}. Got {rank}.")
        place: dict[AxisName, int] = {}
        for axis in reversed(self.wire):
            rank, place[axis] = divmod(rank, self.size(axis))
        return place

    def rank(self, place: dict[AxisName, int]) -> int:
        """The inverse of `coordinate`."""
        rank = 0
        for axis in self.wire:
            rank = rank * self.size(axis) + place[axis]
        return rank

    def plane_of(self, rank: int) -> int:
        """The index of a rank's plane, in the order (data, x)."""
        place = self.coordinate(rank)
        return place["data"] * self.x + place["x"]

    def members(self, axes: tuple[AxisName, ...], rank: int) -> tuple[int, ...]:
        """The ranks that agree with `rank` on every axis outside `axes`, ascending."""
        place = self.coordinate(rank)
        found = [place]
        for axis in axes:
            found = [{**other, axis: i} for other in found for i in range(self.size(axis))]
        return tuple(sorted(self.rank(other) for other in found))

    def groups(self, axes: tuple[AxisName, ...]) -> list[tuple[int, ...]]:
        """All the different `members` along the axes, in the order of their first ranks."""
        rest = tuple(axis for axis in AXES if axis not in axes)
        return [self.members(axes, first) for first in self.members(rest, 0)]

    def neighbours(self, per_node: int) -> dict[AxisName, int]:
        """On each axis, the size of the largest blocks of consecutive members that all lie within nodes of `per_node`
        ranks: 1 for groups of 3 on nodes of 8, some of which lie on two nodes."""
        inner, found = 1, dict.fromkeys(AXES, 1)
        for axis in reversed(self.wire):
            size = self.size(axis)
            if per_node % inner == 0:
                found[axis] = math.gcd(size, per_node // inner)
            inner *= size
        return found

    def placed(self, per_node: int) -> CubeShape:
        """The same box with the order of axes that crosses nodes of `per_node` ranks least: of y and z first, whose
        traffic blocks, then of x, then of data. Unchanged where nothing is gained.

        Raises:
            ValueError: nodes without ranks.
        """
        if per_node < 1:
            raise ValueError(f"a node needs at least 1 rank. Got {per_node}.")

        def crossing(wire: tuple[AxisName, ...]) -> tuple[int, int, int]:
            together = replace(self, wire=wire).neighbours(per_node)
            # A member receives from all others of its group but itself.
            outside = {axis: (size - 1) * (together[axis] < size) for axis in AXES if (size := self.size(axis))}
            return outside["y"] + outside["z"], outside["x"], outside["data"]

        return replace(self, wire=min([self.wire, *permutations(AXES)], key=crossing))

    def placement(self, per_node: int) -> str:
        """In words, which axes lie inside a node of `per_node` ranks."""
        nodes = -(-self.ranks // per_node)
        if nodes <= 1:
            return "all on one node"
        together = self.neighbours(per_node)
        split: list[AxisName] = [axis for axis in self.wire if self.size(axis) > 1]
        inside = [axis for axis in split if together[axis] == self.size(axis)]
        halves = [f"{together[axis]} of {axis} together" for axis in split if 1 < together[axis] < self.size(axis)]
        across = [axis for axis in split if together[axis] < self.size(axis)]
        parts = [f"{' and '.join(inside)} inside" if inside else "", *halves, f"{' and '.join(across)} across"]
        return f"{nodes} nodes of {per_node}: " + ", ".join(part for part in parts if part)

    def __str__(self) -> str:
        box = f"{self.x}x{self.y}x{self.z}"
        return box if self.data == 1 else f"{self.data}*({box})"


# --- Weights of a block -----------------------------------------------------------------------------------------------

_MOST_TOGETHER = 64 * 2**20  # bytes


def travel_together(shape: CubeShape, gathered: int, limit: int | None = None) -> bool:
    """Whether the weights of a block travel over x together (sharding/weight_slabs.py).

    Args:
        gathered: bytes that a rank gathers of them.
        limit: `ExecutionPolicy.weight_group_bytes`.
    """
    if limit is None:
        limit = _MOST_TOGETHER if shape.y * shape.z == 1 else 0
    return shape.x > 1 and gathered <= limit
