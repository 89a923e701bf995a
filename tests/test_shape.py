"""The cube's shape as plain numbers."""

from __future__ import annotations

from itertools import combinations, permutations
from typing import Any

import pytest

from tensor3d import CubeShape
from tensor3d.shape import AXES, AxisName

SIZES: dict[str, Any] = {"x": 2, "y": 3, "z": 4, "data": 5}


@pytest.mark.parametrize("axis", AXES)
@pytest.mark.parametrize("size", [0, -1, 2.0, True, "2", None])
def test_bad_sizes_are_named(axis: AxisName, size: object) -> None:
    with pytest.raises(ValueError, match=rf"axis {axis} must be a whole number of at least 1\. Got {size!r}"):
        CubeShape(**{axis: size})  # type: ignore[arg-type]


@pytest.mark.parametrize("wire", [("x", "y", "z"), ("data", "x", "y", "y"), ("data", "x", "y", "w"), ()])
def test_bad_wires_are_refused(wire: Any) -> None:
    with pytest.raises(ValueError, match="wire must name each of"):
        CubeShape(wire=wire)


@pytest.mark.parametrize("text", ["2x2", "2x2x0", "02x2x2", "2*2*2", "2x2x2x2", " 2x2x2", "2x2x2\n", "-2x2x2", ""])
def test_bad_texts_are_refused(text: str) -> None:
    with pytest.raises(ValueError, match="a cube is written XxYxZ"):
        CubeShape.parse(text)


def test_parse_and_print() -> None:
    assert CubeShape.parse("2x3x10") == CubeShape(x=2, y=3, z=10)
    assert str(CubeShape.parse("2x3x10", data=4)) == "4*(2x3x10)"
    assert str(CubeShape(x=1, y=8)) == "1x8x1"


def test_numbers_of_ranks_and_planes() -> None:
    shape = CubeShape(**SIZES)
    assert (shape.ranks, shape.planes) == (120, 10)


def test_by_default_z_lies_inside_and_data_outside() -> None:
    shape = CubeShape(x=2, y=2, z=2, data=2)
    assert shape.coordinate(1) == {"data": 0, "x": 0, "y": 0, "z": 1}
    assert shape.coordinate(8) == {"data": 1, "x": 0, "y": 0, "z": 0}


@pytest.mark.parametrize("wire", list(permutations(AXES)), ids="-".join)
def test_each_rank_has_one_place_and_ranks_ascend_along_every_axis(wire: Any) -> None:
    shape = CubeShape(**SIZES, wire=wire)
    places = [shape.coordinate(rank) for rank in range(shape.ranks)]
    assert [shape.rank(place) for place in places] == list(range(shape.ranks))
    for rank, place in enumerate(places):
        for axis in AXES:
            assert 0 <= place[axis] < shape.size(axis)
            members = shape.members((axis,), rank)
            # DTensor gathers in the order of the coordinate, process groups in the order of the rank.
            assert [places[member][axis] for member in members] == list(range(shape.size(axis)))
            assert all({**places[member], axis: place[axis]} == place for member in members)


def test_members_along_several_axes() -> None:
    shape = CubeShape(x=2, y=2, z=2)
    assert shape.members(("y", "z"), 5) == (4, 5, 6, 7)
    assert shape.members(("x", "z"), 2) == shape.members(("z", "x"), 7) == (2, 3, 6, 7)
    assert shape.members((), 3) == (3,)
    assert shape.members(AXES, 3) == tuple(range(8))


def test_groups_are_all_the_different_members() -> None:
    shape = CubeShape(**SIZES, wire=("x", "z", "data", "y"))
    for count in range(len(AXES) + 1):
        for axes in combinations(AXES, count):
            assert shape.groups(axes) == sorted({shape.members(axes, rank) for rank in range(shape.ranks)})
