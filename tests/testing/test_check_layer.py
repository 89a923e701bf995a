"""`check_layer` passes right layers, and says of wrong ones which tensor is wrong, where, and what to do."""

from __future__ import annotations

import re
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tensor3d import Cube, CubeShape, Embedding3D, LayerNorm3D, Layout, Linear3D, Sequences, TransformerLayer3D
from tensor3d.layout import vector
from tensor3d.testing import CUBES, RankError, Report, check_layer, on_face, per_row, whole
from tests.testing import broken

ROWS, HIDDEN = 16, 8
# Two boxes tell all three axes apart: y is 2 and 1, z 2 and 4, x 2 and 1.
TWO = (CubeShape(x=2, y=2, z=2), CubeShape(x=1, y=1, z=4))


def matrix(rows: int = ROWS, columns: int = HIDDEN) -> Tensor:
    return torch.randn(rows, columns, generator=torch.Generator().manual_seed(3))


def message(layer: Callable[[Cube], nn.Module], reference: Any, inputs: Any, **options: Any) -> str:
    with pytest.raises(AssertionError) as caught:
        check_layer(layer, reference, inputs, **{"cubes": TWO, **options})
    return str(caught.value)


def hint(text: str, tensor: str) -> str:
    """The hint for one tensor."""
    (found,) = re.findall(rf"^HINT (?:.*, )?{re.escape(tensor)}(?:, [^:]*)?: (.*)$", text, re.MULTILINE)
    return str(found)


# --- right layers --------------------------------------------------------------------------------------------------


def test_a_right_layer_passes_on_all_cubes_and_the_report_shows_it() -> None:
    report = check_layer(partial(broken.Scale3D, HIDDEN), partial(broken.Scale, HIDDEN), matrix())
    assert report.passed
    assert {found.tensor for found in report.errors} == {"output", "input 0", "gain"}
    cubes = ["1x1x1", "2x2x2", "1x2x4", "4x2x1", "2*(1x2x2)"]
    assert [found.cube for found in report.errors if found.tensor == "gain"] == cubes
    lines = str(report).splitlines()
    assert lines[0].split() == cubes
    assert lines[3].startswith("gain")
    assert "!" not in str(report)
    assert {shape.ranks for shape in CUBES} == {8}


@pytest.mark.parametrize(
    ("layer", "reference", "inputs", "options"),
    [
        (partial(Linear3D, 8, 12, face="y"), partial(nn.Linear, 8, 12), on_face(matrix(), "y"), {"returns": "z"}),
        (partial(LayerNorm3D, HIDDEN, face="y", eps=1e-5), partial(nn.LayerNorm, HIDDEN), matrix(), {"face": "y"}),
        (partial(broken.Head3D, HIDDEN, 3), partial(nn.Linear, HIDDEN, 3), matrix(), {"returns": "rows-z"}),
        (partial(Embedding3D, 7, HIDDEN), partial(nn.Embedding, 7, HIDDEN), per_row(torch.arange(ROWS) % 7), {}),
        (
            partial(broken.Loss3D, HIDDEN, 4),
            partial(broken.Loss, HIDDEN, 4),
            [matrix(), per_row(torch.arange(ROWS) % 4)],
            {"returns": "scalar"},
        ),
        (
            partial(TransformerLayer3D, HIDDEN, 4, causal=True),
            None,
            [matrix(), Sequences.from_lengths([1, 3, 4, 2, 2, 4])],
            {"loss": torch.Tensor.square},
        ),
    ],
    ids=["linear", "norm", "head", "embedding", "loss", "transformer"],
)
def test_layers_of_every_kind_pass(layer: Any, reference: Any, inputs: Any, options: Any) -> None:
    if "loss" in options:
        options = {"loss": _squares}
    assert check_layer(layer, reference, inputs, cubes=TWO, **options).worst.error < 1e-12


def _squares(output: Tensor) -> Tensor:
    return output.square().sum()


def test_parameters_may_have_another_name_in_the_reference() -> None:
    layer, reference = partial(broken.Scale3D, HIDDEN), partial(Weighted, HIDDEN)
    assert check_layer(layer, reference, matrix(), cubes=TWO[:1], rename={"gain": "weight"}).passed
    with pytest.raises(ValueError, match=r"Got gain in the layer and weight in the reference. Say which is which"):
        check_layer(layer, reference, matrix())
    with pytest.raises(ValueError, match=r"rename names gian, which the layer does not have. It has gain"):
        check_layer(layer, reference, matrix(), rename={"gian": "weight"})


class Weighted(nn.Module):
    def __init__(self, hidden: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(hidden))

    def forward(self, h: Tensor) -> Tensor:
        return h * self.weight


# --- wrong layers --------------------------------------------------------------------------------------------------


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
    assert 'sum_copies(part, cube.over("z"))' in hint(text, "output")


def _without_bias(layer: Callable[[Cube], nn.Module], cube: Cube) -> nn.Module:
    return _NoBias(layer(cube))


class _NoBias(nn.Module):
    """A head whose bias adds nothing and is none of its parameters."""

    def __init__(self, head: Any) -> None:
        super().__init__()
        self.weight, self.heads = head.weight, (head,)

    def forward(self, h: Tensor) -> Tensor:
        return self.heads[0](h)


def test_a_loss_divided_by_the_local_count_is_named() -> None:
    inputs = [matrix(), per_row(torch.arange(ROWS) % 4)]
    layer, reference = partial(broken.LocalMeanLoss3D, HIDDEN, 4), partial(broken.Loss, HIDDEN, 4)
    text = message(layer, reference, inputs, returns="scalar")
    assert hint(text, "output").startswith("x*z times the reference: the loss was divided by the number of this rank's")
    text = message(partial(broken.OwnRowsLoss3D, HIDDEN, 4), reference, inputs, returns="scalar")
    assert 'Sum them with sum_copies(part, cube.over("x", "z"))' in hint(text, "output")


def test_a_wrong_face_is_named() -> None:
    layer, reference = partial(Linear3D, HIDDEN, HIDDEN), partial(nn.Linear, HIDDEN, HIDDEN)
    text = message(layer, reference, matrix(), cubes=TWO[:1])
    assert hint(text, "output").startswith('it lies on face y. If that is meant, say check_layer(..., returns="y")')
    # The same where the local shapes tell.
    assert "it lies on face y" in hint(message(layer, reference, matrix(), cubes=TWO[1:]), "output")
    with pytest.raises(ValueError, match=r"reads face y. Got what lies on face z"):
        check_layer(partial(Linear3D, HIDDEN, HIDDEN, face="y"), reference, matrix(), returns="z")


def test_a_shape_that_is_no_part_of_the_result_is_described() -> None:
    text = message(partial(broken.Head3D, HIDDEN, 4), partial(nn.Linear, HIDDEN, 4), matrix(), cubes=TWO[:1])
    assert "the local shape is (4, 4). Of (16, 4), which the reference returns, a rank of 2x2x2 holds (4, 2)" in text
    assert "wrong shape !" in text


def test_what_needs_the_other_ranks_is_told_by_the_cubes_it_fails_on() -> None:
    cubes = (CubeShape(x=2, y=2, z=1), CubeShape(x=1, y=1, z=4))
    text = message(broken.HalfCentre3D, broken.Centre, matrix(), cubes=cubes)
    assert "wrong exactly on the cubes with z > 1" in hint(text, "output")


def test_a_parameter_that_gets_no_gradient_is_named() -> None:
    text = message(partial(broken.DetachedScale3D, HIDDEN), partial(broken.Scale, HIDDEN), matrix())
    assert "no gradient arrived. A parameter must be read with tensor3d.use" in hint(text, "gain")
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
    with pytest.raises(RankError, match=r"(?s)did not come through on the cube 1x1x4; rank \d failed.*Before that.*!"):
        check_layer(layer, partial(broken.Scale, HIDDEN), matrix(), cubes=TWO)


class _Chain(nn.Module):
    """A product that reads face y, of an input on face z."""

    def __init__(self, layer: Callable[[Cube], nn.Module], cube: Cube) -> None:
        super().__init__()
        self.project = Linear3D(HIDDEN, HIDDEN, cube, "y")

    def forward(self, h: Tensor) -> Tensor:
        return self.project(h)


# --- arguments that cannot be compared -----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("inputs", "options", "match"),
    [
        (matrix(12), {}, r"input 0 has 12 rows.*4x2x1.*divides by 8"),
        (matrix(16, 6), {}, r"input 0 has 6 columns, which must divide by z=4 on the cube 1x2x4. 4 does"),
        (torch.arange(16), {}, r"input 0 is a tensor of shape \(16,\) and type torch.int64.*per_row"),
        (matrix(), {"returns": "x"}, "returns must be one of 'y', 'z', 'rows-y', 'rows-z', 'scalar'. Got 'x'"),
        (matrix(), {"returns": "scalar"}, r"the reference returns shape \(16, 8\).*returns='scalar'"),
        (matrix(), {"face": "x"}, 'face must be "y" or "z"'),
        (matrix(), {"cubes": ()}, "cubes must name at least one shape"),
        (matrix(), {"cubes": ["2x2x2"]}, "cubes are CubeShapes, such as .*Got '2x2x2'"),
    ],
)
def test_arguments_that_cannot_be_compared_are_refused(inputs: Any, options: Any, match: str) -> None:
    with pytest.raises(ValueError, match=match):
        check_layer(partial(broken.Scale3D, HIDDEN), partial(broken.Scale, HIDDEN), inputs, **options)


def test_layers_and_references_that_cannot_be_compared_are_refused() -> None:
    scale = partial(broken.Scale3D, HIDDEN)
    with pytest.raises(ValueError, match=r"lambda> cannot be sent to other processes"):
        check_layer(lambda cube: broken.Scale3D(HIDDEN, cube), None, matrix())
    with pytest.raises(ValueError, match=r"gain has shape \(8,\) in the layer and \(4,\) in the reference"):
        check_layer(scale, partial(broken.Scale, 4), matrix())
    with pytest.raises(ValueError, match="gives another output at a second call"):
        check_layer(partial(TransformerLayer3D, 8, 4, dropout=0.1), None, [matrix(), Sequences.from_lengths([4] * 4)])
    with pytest.raises(ValueError, match=r"2x2x2 each of 4 groups of ranks.*some end at every 4 rows"):
        check_layer(partial(TransformerLayer3D, 8, 4), None, [matrix(), Sequences.from_lengths([16])])
    with pytest.raises(ValueError, match=r"a matrix .* of floating-point numbers. Got a tensor of shape"):
        on_face(torch.arange(4), "z")
    with pytest.raises(ValueError, match="need a dim for the rows"):
        per_row(torch.tensor(1))


def test_what_is_passed_whole_reaches_every_rank() -> None:
    report = check_layer(Shifted, Shifted.alone, [matrix(), whole(torch.tensor(2.0)), 3], cubes=TWO[:1])
    assert isinstance(report, Report)
    assert report.passed


class Shifted(nn.Module):
    def __init__(self, cube: Cube) -> None:
        super().__init__()

    @classmethod
    def alone(cls) -> Shifted:
        return cls(Cube.single())

    def forward(self, h: Tensor, shift: Tensor, times: int) -> Tensor:
        return h + shift * times
