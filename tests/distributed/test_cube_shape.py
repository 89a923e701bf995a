"""The cube's shape as plain numbers."""

from __future__ import annotations

from dataclasses import replace
from itertools import combinations, permutations
from typing import Any

import pytest

from tensor3d import CubeShape
from tensor3d.distributed.cube_shape import AXES, AxisName

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
    with pytest.raises(ValueError, match=r"cube.*XxYxZ"):
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


@pytest.mark.parametrize(
    ("cube", "per_node", "order", "words"),
    [
        ("2x2x2", 8, "data,x,y,z", "all on one node"),
        ("2x2x2", 4, "data,x,y,z", "2 nodes of 4: y and z inside, x across"),
        ("4x2x1", 4, "data,x,y,z", "2 nodes of 4: y inside, 2 of x together, x across"),
        # The larger one goes inside where only one fits: a member of 8 receives from 7, one of 2 from 1.
        ("1x8x2", 8, "data,x,z,y", "2 nodes of 8: y inside, z across"),
        ("1x2x8", 8, "data,x,y,z", "2 nodes of 8: z inside, y across"),
        # Nodes of 2 cannot hold groups of 3.
        ("2x2x3", 2, "data,x,z,y", "6 nodes of 2: y inside, x and z across"),
    ],
)
def test_y_and_z_lie_inside_nodes(cube: str, per_node: int, order: str, words: str) -> None:
    placed = CubeShape.parse(cube).placed(per_node)
    assert ",".join(placed.wire) == order
    assert placed.placement(per_node) == words


@pytest.mark.parametrize("per_node", [1, 2, 3, 4, 6, 12, 24])
def test_no_order_has_less_of_y_and_z_across(per_node: int) -> None:
    """Counted by going through the groups, and not by the closed form that the choice uses."""

    def across(shape: CubeShape) -> int:
        crossing = 0
        for axis in ("y", "z"):
            groups = shape.groups((axis,))
            if any(rank // per_node != group[0] // per_node for group in groups for rank in group):
                crossing += shape.size(axis) - 1
        return crossing

    shape = CubeShape(data=1, x=2, y=4, z=3)
    least = min(across(replace(shape, wire=wire)) for wire in permutations(AXES))
    assert across(shape.placed(per_node)) == least


def test_a_node_needs_ranks() -> None:
    with pytest.raises(ValueError, match=r"at least 1 rank\. Got 0"):
        CubeShape(x=2).placed(0)
