"""`check_layer` passes right layers, and refuses what it cannot compare."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tensor3d import Cube, Embedding3D, LayerNorm3D, Linear3D, Sequences, TransformerLayer3D
from tensor3d.testing import CUBES, Report, on_face, per_row, whole
from tests.ranks import check_layer
from tests.testing import broken
from tests.testing.failing import HIDDEN, ROWS, TWO, matrix, uneven

# --- right layers --------------------------------------------------------------------------------------------------


def test_a_right_layer_passes_on_all_cubes_and_the_report_shows_it() -> None:
    report = check_layer(partial(broken.Scale3D, HIDDEN), partial(broken.Scale, HIDDEN), matrix(), ranks=None)
    assert report.passed
    assert {found.tensor for found in report.errors} == {"output", "input 0", "gain"}
    cubes = ["1x1x1", "2x2x2", "1x2x4", "4x2x1", "2*(1x2x2)"]
    assert [found.cube for found in report.errors if found.tensor == "gain"] == cubes
    lines = str(report).splitlines()
    assert lines[0].split() == cubes
    assert lines[3].startswith("gain")
    assert "!" not in str(report)
    assert {shape.ranks for shape in CUBES} == {8}


def squares(output: Tensor) -> Tensor:
    return output.square().sum()


@pytest.mark.parametrize(
    ("layer", "reference", "inputs", "options"),
    [
        (partial(Linear3D, 8, 12, face="y"), partial(nn.Linear, 8, 12), on_face(matrix(), "y"), {"returns": "z"}),
        (partial(LayerNorm3D, HIDDEN, face="y", eps=1e-5), partial(nn.LayerNorm, HIDDEN), matrix(), {"face": "y"}),
        (partial(broken.Head3D, HIDDEN, 3), partial(nn.Linear, HIDDEN, 3), matrix(), {"returns": "rows-z"}),
        (partial(Embedding3D, 7, HIDDEN), partial(nn.Embedding, 7, HIDDEN), per_row(torch.arange(ROWS) % 7), {}),
        (broken.Centre3D, broken.Centre, matrix(), {}),
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
            {"loss": squares},
        ),
    ],
    ids=["linear", "norm", "head", "embedding", "statistic", "loss", "transformer"],
)
def test_layers_of_every_kind_pass(layer: Any, reference: Any, inputs: Any, options: Any) -> None:
    assert check_layer(layer, reference, inputs, cubes=TWO, **options).worst.error < 1e-12


def test_parameters_may_have_another_name_in_the_reference() -> None:
    layer, reference = partial(broken.Scale3D, HIDDEN), partial(Weighted, HIDDEN)
    assert check_layer(layer, reference, matrix(), cubes=TWO[:1], rename={"gain": "weight"}).passed
    with pytest.raises(ValueError, match=r"\bgain in the layer.*weight in the reference.*rename="):
        check_layer(layer, reference, matrix())
    with pytest.raises(ValueError, match=r"rename.*gian.*\bgain\b"):
        check_layer(layer, reference, matrix(), rename={"gian": "weight"})


class Weighted(nn.Module):
    def __init__(self, hidden: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(hidden))

    def forward(self, h: Tensor) -> Tensor:
        return h * self.weight


# --- arguments that cannot be compared -----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("inputs", "options", "match"),
    [
        (matrix(12), {}, r"input 0 has 12 rows.*4x2x1.*divides by 8"),
        (matrix(16, 6), {}, "input 0.*6 columns.*z=4.*1x2x4"),
        (torch.arange(16), {}, r"input 0.*\(16,\).*torch.int64.*per_row"),
        (matrix(), {"returns": "x"}, "returns.*'y', 'z', 'rows-y', 'rows-z', 'scalar'.*'x'"),
        (matrix(), {"returns": "scalar"}, r"the reference returns shape \(16, 8\).*returns='scalar'"),
        (matrix(), {"face": "x"}, 'face must be "y" or "z"'),
        (matrix(), {"cubes": ()}, "cubes must name at least one shape"),
        (matrix(), {"cubes": ["2x2x2"]}, "cubes are CubeShapes, such as .*Got '2x2x2'"),
    ],
)
def test_arguments_that_cannot_be_compared_are_refused(inputs: Any, options: Any, match: str) -> None:
    with pytest.raises(ValueError, match=match):
        check_layer(partial(broken.Scale3D, HIDDEN), partial(broken.Scale, HIDDEN), inputs, **options)


def test_inputs_that_are_not_in_a_list_are_refused() -> None:
    with pytest.raises(ValueError, match=r"one list: check_layer\(layer, .*\b4 arguments"):
        check_layer(partial(broken.Loss3D, HIDDEN, 4), partial(broken.Loss, HIDDEN, 4), *uneven())


def test_a_reference_that_is_not_finite_is_refused() -> None:
    h = matrix()
    h[3] = 0
    with pytest.raises(ValueError, match=r"reference's.*gradient of input 0.*finite"):
        check_layer(broken.HalfCentre3D, broken.Unit, h)
    labels = torch.full((ROWS,), -100)
    with pytest.raises(ValueError, match=r"reference's own output.*finite"):
        check_layer(
            partial(broken.Loss3D, HIDDEN, 4),
            partial(broken.Loss, HIDDEN, 4),
            [matrix(), per_row(labels)],
            returns="scalar",
        )


def test_layers_and_references_that_cannot_be_compared_are_refused() -> None:
    scale = partial(broken.Scale3D, HIDDEN)
    with pytest.raises(ValueError, match=r"lambda>.*other processes"):
        check_layer(lambda cube: broken.Scale3D(HIDDEN, cube), None, matrix())
    with pytest.raises(ValueError, match=r"gain.*\(8,\).*\(4,\)"):
        check_layer(scale, partial(broken.Scale, 4), matrix())
    with pytest.raises(ValueError, match=r"another output.*second call"):
        check_layer(partial(TransformerLayer3D, 8, 4, dropout=0.1), None, [matrix(), Sequences.from_lengths([4] * 4)])
    with pytest.raises(ValueError, match=r"2x2x2 each of 4 groups of ranks.*some end at every 4 rows"):
        check_layer(partial(TransformerLayer3D, 8, 4), None, [matrix(), Sequences.from_lengths([16])])
    with pytest.raises(ValueError, match=r"a matrix.*of floating-point"):
        on_face(torch.arange(4), "z")
    with pytest.raises(ValueError, match="dim for the rows"):
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
