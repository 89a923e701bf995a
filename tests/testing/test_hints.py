"""`check_layer` says of wrong layers which tensor is wrong, where, and what to do."""

from __future__ import annotations

import re
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
from torch import Tensor, nn

from tensor3d import Cube, CubeShape, LayerNorm3D, Layout, Linear3D
from tensor3d.sharding.param_layout import copies, vector
from tensor3d.testing import RankError
from tests.ranks import check_layer
from tests.testing import broken
from tests.testing.failing import HIDDEN, TWO, hint, matrix, message


@pytest.mark.parametrize(
    ("sum_over", "missing"),
    [(("data", "x"), "y"), ((), "x and y")],
)
def test_a_missing_sum_is_named(sum_over: tuple[Any, ...], missing: str) -> None:
    layout = Layout(cut=(("z", 0),), sum_over=sum_over)
    text = message(partial(broken.Scale3D, HIDDEN, layout=layout), partial(broken.Scale, HIDDEN), matrix())
    assert f"its sum over {missing} is missing" in hint(text, "gain")
    assert f"name {missing} in the `sum_over` of its layout" in hint(text, "gain")
    assert re.search(r"^gain +0\.0e\+00 .* !", text, re.MULTILINE), "right on one device, wrong on the cube"
    assert not re.search(r"^(output|input 0).*!", text, re.MULTILINE)


def test_a_missing_sum_over_data_is_named() -> None:
    layout = Layout(cut=(("z", 0),), sum_over=("x", "y"))
    cubes = (CubeShape(data=2, x=1, y=2, z=2), TWO[0])
    text = message(partial(broken.Scale3D, HIDDEN, layout=layout), partial(broken.Scale, HIDDEN), matrix(), cubes=cubes)
    assert "its sum over data is missing" in hint(text, "gain")


def test_a_sum_too_many_is_named() -> None:
    layer = partial(broken.Head3D, HIDDEN, 3, bias=Layout(sum_over=("data", "x", "y", "z")))
    text = message(layer, partial(nn.Linear, HIDDEN, 3), matrix(), returns="rows-z")
    assert hint(text, "bias").startswith("z times the reference: it was summed over z too often. Leave z out")


@pytest.mark.parametrize(
    ("sum_over", "wanted"),
    [
        (
            copies("y").sum_over,
            "summed over z, whose members have the same, and not over y, whose members have parts of it. Name y in "
            'place of z: copies("z"), over data, x and y, is for what meets rows on face z; copies("y"), over data, x ',
        ),
        (("z",), "Name x and y in place of z."),
    ],
    ids=["copies", "z"],
)
def test_a_sum_over_other_axes_is_named_with_those_that_fit(sum_over: tuple[Any, ...], wanted: str) -> None:
    layer = partial(broken.Head3D, HIDDEN, 3, bias=Layout(sum_over=sum_over))
    text = message(layer, partial(nn.Linear, HIDDEN, 3), matrix(), returns="rows-z")
    assert hint(text, "bias").startswith("the `sum_over` of its layout does not fit.")
    assert wanted in hint(text, "bias")
    assert text.count("HINT") == 1


def test_copies_of_the_other_face_are_named_where_rows_lie_on_face_y() -> None:
    layer = partial(broken.Head3D, HIDDEN, 3, bias=copies("z"), face="y")
    text = message(layer, partial(nn.Linear, HIDDEN, 3), matrix(), face="y", returns="rows-y")
    assert 'Name z in place of y: copies("y"), over data, x and z, is for what meets rows on face y' in hint(
        text, "bias"
    )


def test_a_backward_that_sums_copies_again_is_named() -> None:
    text = message(
        partial(broken.TwiceSummedHead3D, HIDDEN, 3), partial(nn.Linear, HIDDEN, 3), matrix(), returns="rows-z"
    )
    assert "z times the reference: it was summed over z too often" in hint(text, "input 0")
    assert "If the output and the inputs are wrong too, look there first" in hint(text, "weight")


def test_a_result_that_was_not_summed_is_named() -> None:
    layer = partial(broken.ForgetfulHead3D, HIDDEN, 3)
    text = message(partial(_without_bias, layer), partial(nn.Linear, HIDDEN, 3, bias=False), matrix(), returns="rows-z")
    assert "its sum over z is missing" in hint(text, "output")
    assert 'all_reduce_replicated(part, cube.over("z"))' in hint(text, "output")


def _without_bias(layer: Callable[[Cube], nn.Module], cube: Cube) -> nn.Module:
    return _NoBias(layer(cube))


class _NoBias(nn.Module):
    """A head whose bias adds nothing and is none of its parameters."""

    def __init__(self, head: Any) -> None:
        super().__init__()
        self.weight, self.heads = head.weight, (head,)

    def forward(self, h: Tensor) -> Tensor:
        return self.heads[0](h)


def test_faces_mixed_in_arithmetic_are_named_where_only_numbers_and_where_sizes_differ() -> None:
    cubes = (CubeShape(x=1, y=2, z=2), CubeShape(x=1, y=1, z=4))
    text = message(partial(broken.MixedFaces3D, HIDDEN), partial(broken.Gated, HIDDEN), matrix(), cubes=cubes)
    assert "HINT sizes that fit where y = z, and not here: a matrix on face y meets one on face z" in text
    assert text.count("HINT") == 1, "the numbers of the first cube have no other cause"
    assert re.search(r"Before that:\n +1x1x1 +1x2x2\noutput.*!", text)


def test_a_parameter_without_use_is_named() -> None:
    text = message(partial(broken.UnusedScale3D, HIDDEN), partial(broken.Scale, HIDDEN), matrix(), cubes=TWO[1:])
    assert "HINT a parameter was used as it is. Take it into your arithmetic with tensor3d.local_param" in text


def test_a_wrong_face_is_named() -> None:
    layer, reference = partial(Linear3D, HIDDEN, HIDDEN), partial(nn.Linear, HIDDEN, HIDDEN)
    text = message(layer, reference, matrix(), cubes=TWO[:1])
    assert hint(text, "output").startswith('it lies on face y. If that is meant, say check_layer(..., returns="y")')
    # The same where the local shapes tell.
    assert "it lies on face y" in hint(message(layer, reference, matrix(), cubes=TWO[1:]), "output")
    with pytest.raises(ValueError, match=r"reads face y\b.*on face z\b"):
        check_layer(partial(Linear3D, HIDDEN, HIDDEN, face="y"), reference, matrix(), returns="z")


def test_a_shape_that_is_no_part_of_the_result_is_described() -> None:
    text = message(partial(broken.Head3D, HIDDEN, 4), partial(nn.Linear, HIDDEN, 4), matrix(), cubes=TWO[:1])
    assert "the local shape is (4, 4). Of (16, 4), which the reference returns, a rank of 2x2x2 holds (4, 2)" in text
    assert "wrong shape !" in text


def test_what_needs_the_other_ranks_is_told_by_the_cubes_it_fails_on() -> None:
    cubes = (CubeShape(x=2, y=2, z=1), CubeShape(x=1, y=1, z=4))
    text = message(broken.HalfCentre3D, broken.Centre, matrix(), cubes=cubes)
    assert "wrong exactly on the cubes with z > 1" in hint(text, "output")
    text = message(
        broken.HalfCentre3D, broken.Centre, matrix(), cubes=(CubeShape(x=1, y=2, z=1), CubeShape(x=2, y=1, z=2))
    )
    assert "wrong exactly on the cubes with x or z > 1" in hint(text, "output")
    text = message(broken.HalfCentre3D, broken.Centre, matrix(), cubes=(CubeShape(x=1, y=2, z=2),))
    assert "wrong on every cube that ran (1x2x2), all with y and z > 1, which tells no axis apart" in hint(
        text, "output"
    )


def test_a_gradient_that_columns_do_not_add_up_is_told_what_adds_it() -> None:
    text = message(broken.OwnGradientCentre3D, broken.Centre, matrix(), cubes=(CubeShape(x=1, y=2, z=1), TWO[1]))
    assert "added over z: tensor3d.sum_gradient(value, axis) does that" in hint(text, "input 0")


def test_axes_that_explain_a_factor_alike_are_all_named() -> None:
    layer = partial(broken.Head3D, HIDDEN, 3, bias=Layout(sum_over=("data", "x", "y", "z")))
    text = message(layer, partial(nn.Linear, HIDDEN, 3), matrix(), returns="rows-z", cubes=[CubeShape(x=1, y=2, z=2)])
    assert hint(text, "bias").startswith("y or z times the reference: it was summed over y or z too often")


def test_a_parameter_that_gets_no_gradient_is_named() -> None:
    text = message(partial(broken.DetachedScale3D, HIDDEN), partial(broken.Scale, HIDDEN), matrix())
    assert "no gradient arrived. A parameter must be read with tensor3d.local_param" in hint(text, "gain")
    assert "2x2x2" not in text, "one device was enough"


def test_a_plain_parameter_is_named() -> None:
    text = message(partial(broken.PlainScale3D, HIDDEN), partial(broken.Scale, HIDDEN), matrix(), cubes=TWO[:1])
    assert "a plain tensor on a cube of several ranks" in hint(text, "gain")


def test_what_is_wrong_on_one_device_starts_no_ranks() -> None:
    text = message(partial(LayerNorm3D, HIDDEN, eps=0.1), partial(nn.LayerNorm, HIDDEN), matrix())
    assert "wrong on one device already" in text
    assert "2x2x2" not in text


def test_a_layer_that_raises_on_a_cube_tells_what_was_found_before() -> None:
    layer = partial(broken.Scale3D, HIDDEN, layout=vector("y"))
    with pytest.raises(ValueError, match="the input of check_layer"):
        check_layer(partial(_Chain, layer), None, matrix())
    with pytest.raises(RankError, match=r"(?s)cube 1x1x4; rank \d failed.*Before that.*!"):
        check_layer(layer, partial(broken.Scale, HIDDEN), matrix(), cubes=TWO)


class _Chain(nn.Module):
    """A product that reads face y, of an input on face z."""

    def __init__(self, layer: Callable[[Cube], nn.Module], cube: Cube) -> None:
        super().__init__()
        self.project = Linear3D(HIDDEN, HIDDEN, cube, "y")

    def forward(self, h: Tensor) -> Tensor:
        return self.project(h)
