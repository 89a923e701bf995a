"""Boxes of 27 and of 64 ranks: the same layer, the same numbers, and how long the cube takes to stand."""

from __future__ import annotations

import time

import pytest
import torch

from tensor3d import Cube, Sequences, TransformerLayer3D
from tests.ranks import run_ranks
from tests.twins import compare, worst

LENGTHS = (5, 1, 6)  # of the sequences in each pack of 12


def _built(side: int) -> float:
    """Seconds to construct the cube and every group that a layer needs."""
    start = time.perf_counter()
    cube = Cube(side, side, side)
    TransformerLayer3D(12 * side, 2 * side, cube)
    return time.perf_counter() - start


def _layer(side: int) -> tuple[dict[str, float], float]:
    seconds = _built(side)
    width = 12 * side
    errors = compare(
        lambda cube: TransformerLayer3D(width, 2 * side, cube, 24 * side, std=0.2),
        (side, side, side, 1),
        rows=side * side * sum(LENGTHS),  # a pack for each of the x*z slices
        columns=width,
        face_in="z",
        face_out="z",
        dtype=torch.float64,
        call=lambda layer, x, cube: layer(
            x, Sequences.from_lengths(LENGTHS * (side * side // (cube.shape.x * cube.shape.z)))
        ),
    )
    return errors, seconds


@pytest.mark.slow
@pytest.mark.parametrize("side", [3, 4])
def test_a_transformer_layer_on_many_ranks(side: int) -> None:
    start = time.perf_counter()
    results = run_ranks(side**3, _layer, side, timeout=540)
    name, value = worst([errors for errors, _ in results])
    print(
        f"{side}x{side}x{side}: cube and layer stood after {max(seconds for _, seconds in results):.2f} s, all done "
        f"after {time.perf_counter() - start:.1f} s; worst error {value:.1e} ({name})"
    )
    assert value <= 1e-9, name
