"""What packing changes for the optimiser."""

from __future__ import annotations

from typing import Any

import pytest

from tensor3d.packing import packed_betas, packs_per_step


@pytest.mark.parametrize(
    ("sequences", "factor", "multiple", "packs"),
    [
        (256, 2.0, 1, 128),
        (256, 1.0, 1, 256),
        (256, 2.0, 64, 128),
        (256, 1.95, 64, 128),  # 131.3
        (32_768, 2.0003, 1024, 16_384),  # 16,381.5
        (96, 2.0, 32, 64),  # 48 lies between: the larger one
        (90, 2.0, 32, 32),  # 45
        (4, 2.0, 32, 32),  # never nothing
        (1, 3.7, 1, 1),
    ],
)
def test_packs_of_as_many_sequences(sequences: int, factor: float, multiple: int, packs: int) -> None:
    assert packs_per_step(sequences, factor, multiple) == packs


def test_betas_forget_as_fast_per_sequence() -> None:
    assert packed_betas((0.9, 0.999), 2) == pytest.approx((0.81, 0.998001))
    assert packed_betas((0.9, 0.999), 1) == (0.9, 0.999)
    assert packed_betas((0.0, 0.5), 1.5) == pytest.approx((0.0, 0.5**1.5))
    # A gradient's weight after 1,200 sequences: 12 steps of 100, or 5 of 240.
    beta, _ = packed_betas((0.9, 0.999), 2.4)
    assert beta**5 == pytest.approx(0.9**12)


@pytest.mark.parametrize("factor", [0.0, 0.99, -2.0, float("nan"), float("inf")])
def test_a_factor_below_one_is_refused(factor: float) -> None:
    with pytest.raises(ValueError, match=f"packing_factor .* at least 1. Got {factor}"):
        packs_per_step(8, factor)
    with pytest.raises(ValueError, match=f"packing_factor .* at least 1. Got {factor}"):
        packed_betas((0.9, 0.999), factor)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((0, 2.0), r"sequences.*\b1.*\b0"),
        ((2.5, 2.0), r"sequences.*\b1.*\b2.5"),
        ((True, 2.0), r"sequences.*\b1.*True"),
        ((8, 2.0, 0), r"multiple_of.*\b1.*\b0"),
    ],
)
def test_bad_numbers_are_named(arguments: tuple[Any, ...], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        packs_per_step(*arguments)


@pytest.mark.parametrize("betas", [(1.0, 0.9), (0.9, -0.1), (0.9, float("nan")), (0.9,), (0.9, 0.9, 0.9)])
def test_bad_betas_are_named(betas: Any) -> None:
    with pytest.raises(ValueError, match="betas must be two rates"):
        packed_betas(betas, 2.0)
