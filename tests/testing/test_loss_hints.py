"""`check_layer` says of wrong losses what they were divided by, or over which axes they were added."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tensor3d import Cube, CubeShape, Embedding3D
from tensor3d.testing import per_row
from tests.ranks import check_layer
from tests.testing import broken
from tests.testing.failing import HIDDEN, ROWS, TWO, hint, matrix, message, uneven


def test_a_loss_divided_by_the_local_count_is_named() -> None:
    inputs = [matrix(), per_row(torch.arange(ROWS) % 4)]
    layer, reference = partial(broken.LocalMeanLoss3D, HIDDEN, 4), partial(broken.Loss, HIDDEN, 4)
    text = message(layer, reference, inputs, returns="scalar")
    assert hint(text, "output").startswith("x*z times the reference: the loss was divided by the number of this rank's")
    text = message(partial(broken.OwnRowsLoss3D, HIDDEN, 4), reference, inputs, returns="scalar")
    assert 'Sum them with all_reduce_replicated(part, cube.over("x", "z"))' in hint(text, "output")


@pytest.mark.parametrize(
    ("layer", "found"),
    [
        (broken.OwnCountLoss3D, "the loss was divided by the number of this rank's rows that count"),
        (broken.PlaneCountLoss3D, "the loss was divided by the number of this plane's rows that count"),
        (
            broken.OtherAxesLoss3D,
            "it was summed over y, whose members have the same, and not over z, whose members have",
        ),
        (broken.TwiceAddedLoss3D, "y times the reference, and the gradients are right: it was added over axes whose"),
    ],
)
def test_a_loss_with_uneven_labels_has_one_hint_that_finds_the_mistake(layer: Any, found: str) -> None:
    cubes = (CubeShape(x=2, y=2, z=2), CubeShape(x=2, y=1, z=2))
    text = message(partial(layer, HIDDEN, 4), partial(broken.Loss, HIDDEN, 4), uneven(), returns="scalar", cubes=cubes)
    assert text.count("HINT") == 1
    assert hint(text, "output").startswith(found)


def test_a_loss_counted_over_the_whole_step_passes() -> None:
    layer, reference = partial(broken.CountedLoss3D, HIDDEN, 4), partial(broken.Loss, HIDDEN, 4)
    assert check_layer(layer, reference, uneven(), returns="scalar", cubes=TWO).passed


def test_a_loss_whose_gradients_do_not_tell_is_asked_for_its_count_first() -> None:
    labels = uneven()[1]
    layer = partial(_Embedded, partial(broken.OwnCountLoss3D, HIDDEN, 4), Embedding3D)
    reference = partial(_Embedded.alone, partial(broken.Loss, HIDDEN, 4))
    text = message(layer, reference, [per_row(torch.arange(ROWS) % 7), labels], returns="scalar", cubes=TWO[:1])
    assert "First: is the divisor the count of the whole step (labels != -100" in hint(text, "output")


class _Embedded(nn.Module):
    """A loss of ids: no input has a gradient."""

    def __init__(self, loss: Callable[[Cube], nn.Module], embedding: Any, cube: Cube) -> None:
        super().__init__()
        self.embed, self.loss = embedding(7, HIDDEN, cube), loss(cube)

    @classmethod
    def alone(cls, loss: Callable[[], nn.Module]) -> _Embedded:
        return cls(lambda _: loss(), lambda rows, columns, _: nn.Embedding(rows, columns), Cube.single())

    def forward(self, ids: Tensor, labels: Tensor) -> Tensor:
        return self.loss(self.embed(ids), labels)
