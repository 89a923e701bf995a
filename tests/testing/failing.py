"""Inputs for the tests of `check_layer`, and what it says of a layer that is wrong."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tensor3d import Cube, CubeShape
from tensor3d.testing import per_row
from tests.ranks import check_layer

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


def uneven() -> list[Any]:
    """Labels of which the ranks, and the planes, count different numbers."""
    labels = torch.arange(ROWS) % 4
    labels[[0, 3, 4, 5, 11]] = -100
    return [matrix(), per_row(labels)]
