"""tools.bench causal: what the sides are given, what its figures mean, and that all of them learn the same."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tools.bench.__main__ import main
from tools.bench.vs_transformers.causal import (
    OURS,
    PADDED,
    SIDES,
    CausalCommand,
    StepFigures,
    dealt,
    faults,
    figures,
    library_packs,
    padded_batches,
    texts_of,
    told,
)

TEXTS = [[5, 6, 7], [8, 9], [3, 3, 3, 3], [4]]


def test_texts_have_the_lengths_of_the_histogram() -> None:
    texts = texts_of(np.array([0, 0, 1, 0, 3]), 200, 9, (0, 1))
    assert {len(text) for text in texts} == {2, 4}
    assert np.mean([len(text) == 4 for text in texts]) == pytest.approx(0.75, abs=0.1)
    assert {token for text in texts for token in text} == set(range(9))
    assert texts == texts_of(np.array([0, 0, 1, 0, 3]), 200, 9, (0, 1))
    assert texts != texts_of(np.array([0, 0, 1, 0, 3]), 200, 9, (0, 2))


def test_padded_batches_are_as_wide_as_their_longest_text() -> None:
    first, second = padded_batches(TEXTS, 2, by_length=False, masked=True)
    assert first.ids.tolist() == [[5, 6, 7], [8, 9, 0]]
    assert first.labels.tolist() == [[-100, 6, 7], [-100, 9, -100]]
    assert first.mask is not None
    assert first.mask.tolist() == [[1, 1, 1], [1, 1, 0]]
    assert second.ids.tolist() == [[3, 3, 3, 3], [4, 0, 0, 0]]
    short, long = padded_batches(TEXTS, 2, by_length=True, masked=False)
    assert short.ids.tolist() == [[4, 0], [8, 9]]
    assert long.labels.tolist() == [[-100, 6, 7, -100], [-100, 3, 3, 3]]
    assert short.mask is long.mask is None


def test_positions_of_the_librarys_packs_start_again_in_each_text() -> None:
    (batch,) = library_packs([[[5, 6, 7], [8, 9]], [[3, 3, 3, 3]]], 6, 2)
    assert batch.positions is not None
    assert batch.ids.tolist() == [[5, 6, 7, 8, 9, 0], [3, 3, 3, 3, 0, 0]]
    assert batch.positions.tolist() == [[0, 1, 2, 0, 1, 0], [0, 1, 2, 3, 0, 1]]
    assert batch.labels.tolist() == [[-100, 6, 7, -100, 9, -100], [-100, 3, 3, 3, -100, -100]]
    assert batch.mask is None  # by which the library would not look at positions


def test_micro_batches_are_few_and_even() -> None:
    assert [len(part) for part in dealt(range(9), 4)] == [3, 3, 3]
    assert [len(part) for part in dealt(range(10), 8, 2)] == [6, 4]
    assert [each for part in dealt(range(7), 3) for each in part] == list(range(7))


def step(seconds: float, tokens: int = 100, slots: int = 125, loss: float = 2.0) -> StepFigures:
    return StepFigures(seconds=seconds, tokens=tokens, slots=slots, loss=loss)


def side(name: str, *rounds: list[StepFigures], first: float = 2.5, norm: float = 4.0) -> Any:
    padded = [[step(0.4), step(0.4)], [step(0.2, tokens=50), step(0.6)]]
    return figures(name, rounds or padded, padded, first_loss=first, first_gradient_norm=norm)


def test_figures_by_hand() -> None:
    found = side(OURS, [step(0.2), step(0.2)], [step(0.1, tokens=50), step(0.1)])
    assert found.steps == 4
    assert found.seconds_median == pytest.approx(0.15)
    assert found.tokens_per_second == pytest.approx((500 + 750) / 2)
    assert found.fill == pytest.approx(350 / 500)
    assert found.speed_up == pytest.approx((2 + 4) / 2)
    assert found.speed_up_range == (pytest.approx(2), pytest.approx(4))
    assert (found.first_loss, found.last_loss) == (2.5, 2.0)


def test_the_fastest_of_the_library_is_what_ours_is_told_against() -> None:
    ours = side(OURS, [step(0.2), step(0.2)], [step(0.1, tokens=50), step(0.1)])
    fast = side(SIDES[3], [step(0.1), step(0.1)], [step(0.1, tokens=50), step(0.3)])
    last = told([side(PADDED), fast, ours], CausalCommand().plan().shape)[-1]
    assert last == "ours over transformers-packed, the fastest of the library: 1.250 (0.50-2.00 by round)"


@pytest.mark.parametrize(
    ("loss", "first", "norm", "well"),
    [
        (2.0001, 2.5, 4.0, True),
        (2.0003, 2.5, 4.0, False),
        (2.0, 2.501, 4.0, False),
        (2.0, 2.5, 4.01, False),
        (math.nan, 2.5, 4.0, False),
        (2.0, 2.5, math.nan, False),
    ],
)
def test_sides_that_learn_different_things_are_a_fault(loss: float, first: float, norm: float, well: bool) -> None:
    other = side(OURS, [step(0.2), step(0.2)], [step(0.2, loss=loss), step(0.2)], first=first, norm=norm)
    assert (not faults([side(PADDED), other])) == well
    assert (not faults([other, side(PADDED)])) == well


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"sides": "ours"}, f"--sides must be at least two .*{PADDED} among them"),
        ({"heads": 3}, "--heads must divide --hidden"),
        ({"kv_heads": 3}, "kv-heads divide --heads"),
        ({"cube": "1x8x1"}, "heads must divide by y=8"),
        ({"cube": "2x1x2", "batch": 6}, r"--batch must divide by 4"),
        ({"steps": 0}, "--steps must be at least 1"),
        ({"output": Path("/none/there/a.json")}, "--output must be a file"),
    ],
)
def test_bad_calls_are_refused(options: dict[str, Any], message: str) -> None:
    pytest.importorskip("transformers")
    with pytest.raises(ValueError, match=message):
        CausalCommand(**options).check()


SMALL = [*("--layers", "2", "--hidden", "32", "--inner", "64", "--vocab", "64", "--length", "32", "--texts", "12")]
SMALL += [*("--batch", "4", "--steps", "4", "--rounds", "2", "--threads", "1")]


@pytest.mark.slow
@pytest.mark.parametrize("cube", [[], ["--cube", "1x2x1", "--sides", f"{PADDED},{OURS}"]], ids=["one", "cube"])
def test_all_sides_learn_the_same_of_the_same_texts(tmp_path: Path, cube: list[str]) -> None:
    pytest.importorskip("transformers")
    output = tmp_path / "figures.json"
    assert main(["causal", *SMALL, *cube, "--operators", "2", "--output", str(output)]) == 0
    results = {result["side"]: result for result in json.loads(output.read_text())["results"]}
    assert list(results) == ([PADDED, OURS] if cube else list(SIDES))
    for result in results.values():
        assert result["losses"] == pytest.approx(results[PADDED]["losses"], rel=1e-5)
        assert result["first_gradient_norm"] == pytest.approx(results[PADDED]["first_gradient_norm"], rel=1e-5)
        assert len(result["operators"]) == 2
    assert len(set(results[OURS]["losses"])) == 4
    assert results[OURS]["fill"] > results[PADDED]["fill"]
    assert results[PADDED]["speed_up"] == 1.0
