"""Which packs of a global batch a rank works on."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class BatchLayout:
    """A rank's place in a cube, and how packs are dealt to it.

    A micro-batch is `data * x * z * k` packs. Its planes, in the order (data, x), take `z * k` consecutive packs each.
    The members of a plane share their tokens, and member `z` owns the `k` packs that its attention works on. All planes
    take what is theirs from one list, so that a step has the same packs on any cube.

    Raises:
        ValueError: sizes below 1, an index outside its axis, or rows that do not divide among the members of y.
    """

    cube_shape: tuple[int, int, int, int]
    """Sizes of the axes data, x, y, z."""
    data_index: int
    x_index: int
    z_index: int
    packs_per_rank: int
    """k: packs on each face-y row slice."""
    capacity: int
    """Token slots of a pack."""

    def __post_init__(self) -> None:
        _check_shape(self.cube_shape)
        data, x, y, z = self.cube_shape
        for name, index, size in (("data", self.data_index, data), ("x", self.x_index, x), ("z", self.z_index, z)):
            if not 0 <= index < size:
                raise ValueError(f"{name}_index must lie between 0 and {size - 1}. Got {index}.")
        if self.packs_per_rank < 1:
            raise ValueError(f"packs_per_rank must be at least 1. Got {self.packs_per_rank}.")
        check_rows(packs_per_rank=self.packs_per_rank, z=z, capacity=self.capacity, y=y)

    @property
    def micro_batch(self) -> int:
        """Packs of a micro-batch, over all planes."""
        data, x, _, _ = self.cube_shape
        return data * x * self.plane_packs

    @property
    def plane_packs(self) -> int:
        """Packs of a micro-batch on one plane."""
        return self.cube_shape[3] * self.packs_per_rank

    @property
    def plane_start(self) -> int:
        """First pack of this rank's plane within a micro-batch."""
        return (self.data_index * self.cube_shape[1] + self.x_index) * self.plane_packs


def check_rows(*, packs_per_rank: int, z: int, capacity: int, y: int) -> None:
    """Raises ValueError unless the rows of a plane divide among the members of y."""
    rows = packs_per_rank * z * capacity
    if rows % y:
        raise ValueError(
            f"a plane of {packs_per_rank} packs per rank * z={z} * capacity {capacity} has {rows} rows, "
            f"which do not divide by y={y}. Change packs_per_rank, the capacity or the cube."
        )


def fit_packs_per_rank(global_batch: int, cube_shape: tuple[int, int, int, int], packs_per_rank: int | None) -> int:
    """The number of packs per rank: the given one, or the largest that makes the global batch one micro-batch.

    Raises:
        ValueError: the global batch is not a whole number of micro-batches, or a number is below 1.
    """
    _check_shape(cube_shape)
    data, x, _, z = cube_shape
    if global_batch < 1 or (packs_per_rank is not None and packs_per_rank < 1):
        raise ValueError(
            f"global_batch and packs_per_rank must be at least 1. Got {global_batch} and {packs_per_rank}."
        )
    unit = data * x * z * (packs_per_rank or 1)
    if global_batch % unit:
        per_rank = "" if packs_per_rank is None else f" * packs_per_rank={packs_per_rank}"
        near = sorted({max(unit, global_batch // unit * unit), -(-global_batch // unit) * unit})
        raise ValueError(
            f"a global batch of {global_batch} packs does not divide by data={data} * x={x} * z={z}{per_rank} "
            f"= {unit}. Take {' or '.join(map(str, near))} packs, or another cube."
        )
    return packs_per_rank or global_batch // unit


def _check_shape(cube_shape: tuple[int, int, int, int]) -> None:
    if min(cube_shape) < 1:
        raise ValueError(f"the sizes (data, x, y, z) of a cube must be at least 1. Got {cube_shape}.")
