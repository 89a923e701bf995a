"""`bench precision`: its figures, its verdict, and a short run on real processes."""

from __future__ import annotations

import json
import math
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest

from tests.tools.refused import refused
from tools.bench import precision
from tools.bench.__main__ import main
from tools.bench.harness.figures import cells, header
from tools.bench.precision import compare, in_precision, on_the_way, verdict
from tools.training.config import TrainConfig, read_config
from tools.training.metrics import StepMetrics


def arguments(recipe: Path, *more: str) -> list[str]:
    return ["precision", str(recipe), "--data.packing", "lpfhp", "--corpus", str(recipe.parent / "corpus"), *more]


# Figures, by hand


def run_of(*losses: float) -> list[StepMetrics]:
    """Steps whose masked-LM loss is half of the whole."""
    values: dict[str, Any] = dict.fromkeys((field.name for field in fields(StepMetrics)), 0)
    return [StepMetrics(**values | {"seconds": 0.25, "loss": 2 * loss, "masked_lm_loss": loss}) for loss in losses]


def test_figures_by_hand() -> None:
    fp32, bf16 = compare({"fp32": run_of(9, 3, 5), "bf16": run_of(9, 4.1, 4.1)}, last=2)
    assert (fp32.loss, fp32.masked_lm_loss, fp32.difference) == (8.0, 4.0, 0.0)
    assert (bf16.loss, bf16.loss_difference, bf16.difference) == pytest.approx((8.2, 0.025, 0.025))
    # Means of two steps: 12 and 8 in fp32, 13.1 and 8.2 in bf16.
    assert cells(bf16) == ["bf16", "8.2000", "+2.500%", "4.1000", "+2.500%", "9.167%", "250.0"]
    assert header(type(bf16)) == [
        *("precision", "loss", "to fp32", "masked-LM loss", "to fp32", "largest on the way", "ms a step")
    ]
    lines = on_the_way({"fp32": run_of(*range(20)), "bf16": run_of(*[1] * 20)}, last=5)
    assert [line.split() for line in lines] == [
        ["to", "step", "6", "8", "10", "12", "14", "16", "18", "20"],
        ["fp32", *(f"{2 * (end - 3):.4f}" for end in range(6, 21, 2))],
        ["bf16", *["2.0000"] * 8],
    ]
    assert verdict([fp32, bf16], 0.03) == (
        "all precisions agree: bf16 differs most, by 2.500% of the loss of fp32, at most 3.000%"
    )
    assert "do NOT agree: bf16 differs most, by 2.500% of the loss of fp32, more than 2.000%" in verdict(
        [fp32, bf16], 0.02
    )


def test_a_lower_loss_differs_too_and_one_that_is_not_finite_most() -> None:
    _, lower, lost = compare({"fp32": run_of(4), "bf16": run_of(3), "fp16": run_of(math.nan)}, last=1)
    assert (lower.difference, lost.difference) == (0.25, math.inf)
    assert "fp16 differs most" in verdict([lower, lost], 0.5)


def test_only_the_type_of_computing_is_changed() -> None:
    recipe = TrainConfig()
    changed = in_precision(recipe, "bf16")
    assert changed.precision.compute == "bf16"
    assert in_precision(changed, recipe.precision.compute) == recipe
    rounded = in_precision(recipe, "fp8-tensorwise")
    assert (rounded.precision.compute, rounded.precision.fp8) == ("bf16", "tensorwise")
    assert in_precision(rounded, "bf16") == changed


# Real processes


@pytest.mark.slow
def test_a_short_run(recipe: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    output, plot = tmp_path / "precision.json", tmp_path / "precision.png"
    more = ["--steps", "3", "--last", "2", "--cube", "1x2x1", "--tolerance", "0.05"]
    quiet = ["--model.dropout", "0", "--model.attention-dropout", "0"]
    assert main(arguments(recipe, *more, *quiet, "--output", str(output), "--plot", str(plot))) == 0
    content = json.loads(output.read_text())
    assert (content["cube"], content["last"], content["agree"]) == ("1x2x1", 2, True)
    assert content["trained"]["run"]["steps"] == 3
    fp32, bf16 = (content["curves"][name]["loss"] for name in ("fp32", "bf16"))
    assert len(fp32) == len(bf16) == 3
    assert fp32 == pytest.approx(bf16, rel=0.05)
    assert fp32 != bf16, "both were computed in the same type"
    assert [result["precision"] for result in content["results"]] == ["fp32", "bf16"]
    assert plot.read_bytes().startswith(b"\x89PNG")
    assert "all precisions agree: bf16 differs most" in capsys.readouterr().out


def test_precisions_that_differ_are_exit_status_1(
    recipe: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(precision, "train", lambda *_: {"fp32": run_of(2), "bf16": run_of(2.1)})
    monkeypatch.setattr("tools.pretrain.prepare_corpus", lambda *_, **__: None)
    assert main(arguments(recipe, "--last", "1")) == 1
    assert "the precisions do NOT agree" in capsys.readouterr().out


def test_fp32_comes_first(recipe: Path) -> None:
    line = arguments(recipe, "--precisions", "fp16, fp32")
    command = precision.PrecisionCommand(
        recipe=recipe, settings=read_config(recipe), precisions="fp16, fp32", last=1, steps=9
    )
    precisions, _, settings = command.check(line)
    assert precisions == ["fp32", "fp16"]
    assert settings.run.steps == 9


@pytest.mark.parametrize(
    ("more", "message"),
    [
        (
            ["--precisions", "bf16"],
            "must be fp32 and some of bf16, fp16, fp8-rowwise, fp8-tensorwise, fp8-delayed. Got 'bf16'",
        ),
        (["--precisions", "fp32"], "Got 'fp32'"),
        (["--precisions", "fp32,fp8"], "Got 'fp32,fp8'"),
        (["--tolerance", "-1"], "--tolerance must be at least 0 and finite. Got -1.0"),
        (["--last", "0"], "--last must be at least 1. Got 0"),
        (["--last", "7"], "--last must be at most the steps of a run, 6. Got 7"),
        (["--steps", "0"], "run.steps must be at least 1"),
        (["--last", "1", "--cube", "2x2"], "Got '2x2'"),
        (["--last", "1", "--cube", "1x8x1"], "cube 1x8x1: heads must divide by y=8. Got 4."),
        (["--last", "1", "--plot", "missing/precision.png"], "--plot must be a file in a folder that exists"),
        (["--output", "missing/precision.json"], "a file in a folder that exists. Got missing/precision.json"),
    ],
)
def test_bad_calls_start_no_process(
    recipe: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], more: list[str], message: str
) -> None:
    monkeypatch.setattr(precision, "to_the_end", lambda *_, **__: pytest.fail("started processes"))
    error = refused(capsys, main, *arguments(recipe, *more))
    assert error.startswith("tools.bench: ")
    assert message in error
