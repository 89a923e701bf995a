"""`bench loss`: its figures, its verdict, and short runs on real processes."""

from __future__ import annotations

import json
import math
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest

from tests.tools.refused import refused
from tools.bench import convergence
from tools.bench.__main__ import main
from tools.bench.convergence import ModeLoss, compare, figures, header, row
from tools.training.config import read_config
from tools.training.metrics import StepMetrics


def arguments(recipe: Path, *more: str) -> list[str]:
    return ["loss", str(recipe), "--data.packing", "lpfhp", "--corpus", str(recipe.parent / "corpus-2-shards"), *more]


# Figures, by hand


def run_of(*losses: float) -> list[StepMetrics]:
    values: dict[str, Any] = dict.fromkeys((field.name for field in fields(StepMetrics)), 0)
    values |= {"seconds": 2.0, "tokens_per_second": 50.0, "fill": 0.5}
    return [StepMetrics(**values | {"masked_lm_loss": value}) for value in losses]


def mode(name: str, *losses: float) -> ModeLoss:
    return figures(name, [run_of(value) for value in losses], 1)


def test_figures_by_hand() -> None:
    result = figures("packed", [run_of(9, 9, 3, 5), run_of(9, 9, 5, 7)], last=2)
    assert result.losses == (4.0, 6.0)
    assert (result.mean, result.deviation) == (5.0, math.sqrt(2))
    assert (result.tokens_per_step, result.fill, result.seconds_per_step) == (100.0, 0.5, 2.0)
    assert row(result) == ["packed", "4.0000", "6.0000", "5.0000", "1.4142", "100", "50.00%"]
    assert len(row(result)) == len(header([0, 1], 2))


def test_the_two_modes_that_differ_most_decide() -> None:
    # Variances 2, 2 and 8: pooled 4, so 2 nats a deviation, and means may differ by 4.
    verdict = compare([mode("a", 4, 6), mode("b", 8, 10), mode("c", 4, 8)])
    assert verdict.modes == ("a", "b")
    assert verdict.difference == 4.0
    assert verdict.deviation == pytest.approx(2.0)
    assert verdict.agree
    assert "all modes agree: the means that differ most, of a and b, do so by 4.0000 nats, at most 2 *" in str(verdict)
    apart = compare([mode("a", 4, 6), mode("b", 8.5, 10.5), mode("c", 4, 8)])
    assert not apart.agree
    assert "do NOT agree" in str(apart)


# Real processes


@pytest.mark.slow
def test_modes_of_the_same_recipe(recipe: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    output, plot = tmp_path / "loss.json", tmp_path / "loss.png"
    more = ["--modes", "packed,exchanged", "--seeds", "0,5", "--run.steps", "3", "--last", "2"]
    quiet = ["--model.dropout", "0", "--model.attention-dropout", "0"]
    assert main(arguments(recipe, *more, *quiet, "--output", str(output), "--plot", str(plot))) == 0
    content = json.loads(output.read_text())
    assert (content["seeds"], content["last"]) == ([0, 5], 2)
    assert content["trained"]["data"]["shards"] == 2
    assert content["trained"]["batch"]["packing_rule"] == "sequences"
    packed, exchanged = content["results"]
    # The same packs, on one rank or on two: only rounding differs. Another seed is another model.
    assert exchanged["losses"] == pytest.approx(packed["losses"], rel=1e-5)
    assert packed["losses"][0] != pytest.approx(packed["losses"][1], rel=1e-5)
    for name, result in (("packed", packed), ("exchanged", exchanged)):
        curves = content["curves"][name]
        assert [len(curve) for curve in curves] == [3, 3]
        assert result["losses"] == pytest.approx([sum(curve[-2:]) / 2 for curve in curves])
    assert plot.read_bytes().startswith(b"\x89PNG")
    out = capsys.readouterr().out
    assert "all modes agree" in out
    assert [line.split()[0] for line in out.splitlines() if line.endswith("%")] == ["packed", "exchanged"]


def test_all_modes_see_as_many_sequences(recipe: Path) -> None:
    settings = read_config(recipe)
    changed = convergence.comparable(settings)
    assert (changed.batch.packing_rule, changed.batch.global_batch, changed.batch.multiple_of) == ("sequences", 8, 2)
    assert changed.data.shards == 2
    assert (changed.model, changed.optimizer, changed.run) == (settings.model, settings.optimizer, settings.run)


def test_modes_that_differ_are_exit_status_1(
    recipe: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    curves = {"padded": [run_of(1), run_of(2)], "packed": [run_of(3), run_of(4)]}
    monkeypatch.setattr(convergence, "train", lambda *_: curves)
    monkeypatch.setattr("tools.pretrain.prepare_corpus", lambda *_, **__: None)
    assert main(arguments(recipe, "--modes", "padded,packed", "--seeds", "0,1", "--last", "1")) == 1
    assert "the modes do NOT agree" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("more", "message"),
    [
        (["--seeds", "1"], "at least two different whole numbers"),
        (["--seeds", "1,1"], "Got '1,1'"),
        (["--seeds", "1,-2"], "Got '1,-2'"),
        (["--modes", "packed"], "at least two of padded,binned,packed,exchanged. Got 'packed'"),
        (["--modes", "packed,sorted"], "Got 'packed,sorted'"),
        (["--last", "0"], "--last must be at least 1. Got 0"),
        (["--last", "7"], "--last must be at most run.steps=6. Got 7"),
        (["--last", "1", "--data.packing", "binned"], "must fill packs"),
        (["--last", "1", "--plot", "missing/loss.png"], "--plot must be a file in a folder that exists"),
        (["--output", "missing/loss.json"], "a file in a folder that exists. Got missing/loss.json"),
    ],
)
def test_bad_calls_start_no_process(
    recipe: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], more: list[str], message: str
) -> None:
    monkeypatch.setattr(convergence, "start", lambda *_, **__: pytest.fail("started processes"))
    error = refused(capsys, main, *arguments(recipe, *more))
    assert error.startswith("tools.bench: ")
    assert message in error
