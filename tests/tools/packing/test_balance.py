"""`python -m tools.packing balance` on a small histogram: what it draws, counts, prints and refuses."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from models.bert import PRESETS
from models.bert.cost_model.flops import work
from tensor3d.packing import lpfhp
from tools.packing.balance import METHODS, BalanceCommand, draw_packs, draw_sequences, numbers, one_deal, summary

LARGE = work(PRESETS["large"])


@pytest.fixture
def histogram(tmp_path: Path) -> Path:
    """Lengths up to 64: short ones and many of the longest."""
    counts = [0, 0, 0, 0, 0, *range(60, 1, -1), 400]
    path = tmp_path / "lengths.json"
    path.write_text(json.dumps({"counts": counts}))
    return path


def measured(command: BalanceCommand, capsys: pytest.CaptureFixture[str]) -> list[dict[str, Any]]:
    assert command.run() == 0
    figures: list[dict[str, Any]] = json.loads(capsys.readouterr().out)
    return figures


@pytest.mark.parametrize("packed", [True, False])
def test_every_method_on_every_size(histogram: Path, capsys: pytest.CaptureFixture[str], packed: bool) -> None:
    command = BalanceCommand(
        histogram=histogram, method="lpfhp", packed=packed, ranks="1,4,16", per_rank="2,8", batches=5, json=True
    )
    figures = measured(command, capsys)
    places = [(each["ranks"], each["per_rank"], each["method"]) for each in figures]
    assert places == [(ranks, count, method) for count in (2, 8) for ranks in (1, 4, 16) for method in METHODS]
    for each in figures:
        assert each["packed"] is packed
        assert 1 <= each["tokens_mean"] <= each["tokens_worst"]
        assert 1 <= each["flops_mean"] <= each["flops_worst"]
        assert each["milliseconds"] > 0
        assert each["ranks"] > 1 or each["flops_worst"] == each["tokens_worst"] == 1
    by = {place: each["flops_mean"] for place, each in zip(places, figures, strict=True)}
    assert by[16, 8, "refined"] - 1 < (by[16, 8, "order"] - 1) / 3


def test_a_size_has_the_same_batches_whatever_else_is_measured(
    histogram: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def flops(ranks: str, seed: int = 0) -> dict[tuple[int, str], float]:
        command = BalanceCommand(
            histogram=histogram, method="lpfhp", ranks=ranks, per_rank="4", batches=3, seed=seed, json=True
        )
        return {(each["ranks"], each["method"]): each["flops_mean"] for each in measured(command, capsys)}

    both, alone, other = flops("3,8"), flops("8"), flops("8", seed=1)
    assert alone.items() <= both.items()
    assert alone[8, "order"] != other[8, "order"]


def test_sequences_are_drawn_as_often_as_the_histogram_has_them() -> None:
    tokens, squares = draw_sequences(np.array([0, 3, 0, 1]))(np.random.default_rng(0), 4000)
    assert set(tokens.tolist()) == {1, 3}
    assert (tokens == 1).mean() == pytest.approx(3 / 4, abs=0.03)
    np.testing.assert_array_equal(squares, tokens**2)


def test_packs_are_drawn_as_often_as_the_plan_has_them() -> None:
    plan = lpfhp(np.bincount([6] * 3 + [4] * 3 + [10]), 10, 2)  # three packs (6, 4) and one (10,)
    tokens, squares = draw_packs(plan)(np.random.default_rng(0), 4000)
    assert set(zip(tokens.tolist(), squares.tolist(), strict=True)) == {(10, 52), (10, 100)}
    assert (squares == 52).mean() == pytest.approx(3 / 4, abs=0.03)


def test_one_deal_by_hand() -> None:
    tokens, squares = np.array([10, 10, 8, 8]), np.array([100, 52, 64, 32])
    in_tokens, in_flops, seconds = one_deal(tokens, squares, LARGE, 2, "order", "both")
    flops = LARGE.of(tokens, squares)
    assert in_tokens == 20 / 18
    assert in_flops == pytest.approx((flops[0] + flops[1]) / (flops.sum() / 2))
    assert seconds > 0
    # By tokens alone the pairs are (0, 3) and (1, 2); in FLOPs those are uneven, but less than in order.
    in_tokens, by_tokens, _ = one_deal(tokens, squares, LARGE, 2, "refined", "tokens")
    assert in_tokens == 1
    assert 1 < by_tokens < in_flops


def test_figures_are_means_and_the_worst() -> None:
    figures = summary(True, 4, 8, "kk", [(1.0, 1.5, 0.001), (1.5, 1.0, 0.002), (2.0, 2.0, 0.009)])
    assert (figures.tokens_mean, figures.tokens_worst) == (1.5, 2.0)
    assert (figures.flops_mean, figures.flops_worst) == (1.5, 2.0)
    assert figures.milliseconds == pytest.approx(2.0)


def test_tables_show_every_size_and_method(histogram: Path, capsys: pytest.CaptureFixture[str]) -> None:
    command = BalanceCommand(histogram=histogram, packed=False, ranks="4,16", per_rank="2", batches=2)
    assert command.run() == 0
    lines = capsys.readouterr().out.splitlines()
    titles = [line for line in lines if line.startswith(("tokens:", "FLOPs:", "milliseconds"))]
    assert len(titles) == 3
    assert titles[0].endswith("mean of 2 batches (worst)")
    assert [line.split()[:3] for line in lines if line[:1].isdigit()] == [["4", "x", "2"], ["16", "x", "2"]] * 3
    header = next(line for line in lines if line.startswith("ranks x sequences"))
    assert header.split()[3:] == list(METHODS)


def test_a_picture_is_written_and_stdout_stays_json(histogram: Path, capsys: pytest.CaptureFixture[str]) -> None:
    picture = histogram.parent / "balance.png"
    command = BalanceCommand(
        histogram=histogram, packed=False, ranks="1,4", per_rank="2,4", batches=2, json=True, plot=picture
    )
    assert len(measured(command, capsys)) == 4 * len(METHODS)
    assert picture.read_bytes().startswith(b"\x89PNG")
    assert [path.name for path in sorted(histogram.parent.iterdir())] == ["balance.png", "lengths.json"]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"ranks": "8,x"}, r"--ranks.*\b1.*'8,x'"),
        ({"ranks": "0"}, "--ranks must be .* Got '0'"),
        ({"per_rank": ""}, "--per-rank must be .* Got ''"),
        ({"per_rank": "-2"}, "--per-rank must be .* Got '-2'"),
        ({"model": "huge"}, "--model.*'huge'"),
        ({"method": "magic"}, "--method.*lpfhp.*'magic'"),
        ({"batches": 0}, "--batches must be at least 1. Got 0"),
        ({"seed": -1}, "--seed must be at least 0. Got -1"),
        ({"plot": Path("nowhere/at/all.png")}, "--plot must be a file in a folder that exists"),
        ({"plot": Path("one.png"), "ranks": "1"}, "--plot needs a number of ranks above 1"),
        ({"histogram": None}, "--histogram.*--corpus"),
        ({"corpus": Path("corpus")}, "--histogram.*--corpus"),
        ({"capacity": 20, "method": "lpfhp"}, "64 tokens does not fit a capacity of 20"),
    ],
)
def test_options_that_cannot_be(histogram: Path, options: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        BalanceCommand(**{"histogram": histogram, "method": "lpfhp", **options}).run()  # type: ignore[arg-type]


def test_numbers_between_commas() -> None:
    assert numbers("--ranks", "1, 8,64") == [1, 8, 64]
