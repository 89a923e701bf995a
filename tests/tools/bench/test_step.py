"""`bench step` on real processes: what it counts, compares and refuses, and that it leaves nobody behind."""

from __future__ import annotations

import dataclasses
import json
import os
import re
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

from tensor3d import Cube, CubeShape
from tests.ranks import run_ranks
from tests.tools.bench.measured import facts, sample
from tests.tools.refused import refused
from tools.bench import step
from tools.bench.__main__ import main
from tools.bench.harness.figures import deal, table
from tools.bench.harness.step_trial import figures, loss_difference
from tools.bench.step import StepCommand
from tools.common.machine import format_table

QUIET = ["--model.dropout", "0", "--model.attention-dropout", "0"]


def arguments(recipe: Path, *more: str) -> list[str]:
    return ["step", str(recipe), "--corpus", str(recipe.parent / "corpus"), *more]


@pytest.fixture(scope="module")
def measured(recipe: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """The JSON of one run on three cubes, of one process and of two."""
    output = tmp_path_factory.mktemp("bench") / "step.json"
    more = ["--cubes", "1x1x1,2x1x1,1x1x2", "--steps", "5", "--rounds", "2", "--warmup", "1", "--output", str(output)]
    assert main(arguments(recipe, *more, *QUIET)) == 0
    assert [path.name for path in output.parent.iterdir()] == ["step.json"]
    content: dict[str, Any] = json.loads(output.read_text())
    return content


@pytest.mark.slow
def test_json_says_what_was_measured_where(measured: dict[str, Any], recipe: Path) -> None:
    assert measured["benchmark"] == "step"
    assert measured["command"].startswith(f"python -m tools.bench step {recipe} --corpus ")
    assert measured["recipe"]["model"]["hidden"] == 32
    assert measured["recipe"]["model"]["dropout"] == 0
    assert (measured["warmup"], measured["rounds"]) == (1, [3, 2])
    machine = measured["machine"]
    assert machine["cores"] >= 1
    assert machine["cpu"]
    assert re.match(r"\d+\.\d+", machine["torch"])
    assert [(cube["cube"], cube["ranks"], cube["steps"]) for cube in measured["results"]] == [
        ("1x1x1", 1, 5),
        ("2x1x1", 2, 5),
        ("1x1x2", 2, 5),
    ]
    for cube in measured["results"]:
        assert cube["device"] == "cpu"
        assert cube["threads"] == max(1, machine["cores"] // cube["ranks"])


def test_times_are_those_of_the_steps(measured: dict[str, Any]) -> None:
    for cube in measured["results"]:
        assert [len(seconds) for seconds in cube["seconds"]] == [3, 2]
        steps = sorted(second for seconds in cube["seconds"] for second in seconds)
        assert cube["seconds_median"] == steps[2] > 0
        assert cube["seconds_quartiles"] == [steps[1], steps[3]]
        assert cube["ratio"] == pytest.approx(steps[2] / measured["results"][0]["seconds_median"])
        # At most 8 packs of 32 tokens, almost full.
        assert 0.5 * 256 < cube["tokens_per_second"] * cube["seconds_median"] < 1.5 * 256
    assert measured["results"][0]["ratio"] == 1
    assert measured["results"][0]["ratio_range"] == [1, 1]


def test_traffic_is_counted_and_equals_the_closed_form(measured: dict[str, Any]) -> None:
    alone, *others = measured["results"]
    assert (alone["collectives"], alone["bytes_received"], alone["bytes_closed_form"]) == (0, 0, 0)
    assert alone["traffic_equal"]
    for cube in others:
        assert cube["collectives"] > 10
        assert cube["bytes_received"] == cube["bytes_closed_form"] > 10_000
        assert cube["traffic_equal"]
    for cube in measured["results"]:
        assert cube["collectives_equal"]
        assert cube["collectives"] == cube["collectives_closed_form"]


def test_memory_is_counted(measured: dict[str, Any]) -> None:
    alone, *others = measured["results"]
    for cube in measured["results"]:
        assert cube["held_bytes"] == cube["held_closed_form"]
        assert cube["held_equal"]
        assert cube["saved_bytes"] > 0
        assert cube["held_bytes"] + cube["saved_bytes"] < cube["peak_tensor_bytes"]
    for cube in others:
        assert cube["saved_bytes"] < 0.6 * alone["saved_bytes"]
        assert cube["held_bytes"] < 0.6 * alone["held_bytes"]


def test_all_cubes_compute_the_same(measured: dict[str, Any]) -> None:
    losses = [cube["first_loss"] for cube in measured["results"]]
    assert losses == pytest.approx([losses[0]] * 3, rel=1e-5)
    assert losses[0] == pytest.approx(4.2 + 0.7, abs=0.5)  # ln 67 and ln 2: a model that knows nothing yet
    assert measured["loss_difference"] == pytest.approx((max(losses) - min(losses)) / min(losses))


@pytest.mark.slow
def test_the_table_shows_each_cube(recipe: Path, capsys: pytest.CaptureFixture[str]) -> None:
    more = ["--cube", "1x2x1", "--data-parallel", "2", "--steps", "1", "--warmup", "1"]
    known = ["--optimizer.shard-over-data", "gradients", "--model.keep-budget", "1"]  # of which closed forms know
    known += ["--precision.compute", "bf16", "--speed.shadow-weights"]
    assert main(arguments(recipe, *more, *known)) == 0
    out = capsys.readouterr().out
    (line,) = [line for line in out.splitlines() if line.startswith("2*(1x2x1)")]
    assert line.split()[1:3] == ["4", "1"]  # ranks and threads
    assert line.count("equal") == 3
    assert "first losses are not compared: dropout" in out  # which the recipe has
    assert "written" not in out


def on_rank(recipe: Path, output: Path) -> int:
    """`main` on a rank whose process group stands: from_env finds it and connects no other."""
    os.environ.update(WORLD_SIZE=str(dist.get_world_size()), RANK=str(dist.get_rank()), LOCAL_RANK="0")
    more = ["--cubes", "2x2x1,1x1x4", "--steps", "2", "--rounds", "2", "--warmup", "1", "--output", str(output)]
    return main(arguments(recipe, *more, *QUIET))


@pytest.mark.slow
def test_under_torchrun_the_cubes_share_the_processes(recipe: Path, tmp_path: Path) -> None:
    output = tmp_path / "world.json"
    assert run_ranks(4, on_rank, recipe, output) == [0] * 4
    content = json.loads(output.read_text())
    assert [(cube["cube"], cube["ranks"]) for cube in content["results"]] == [("2x2x1", 4), ("1x1x4", 4)]
    assert all(cube["traffic_equal"] and cube["bytes_received"] for cube in content["results"])
    assert content["loss_difference"] < 1e-5


@pytest.mark.parametrize(
    ("more", "message"),
    [
        (["--cubes", "1x1x1,2x2"], "Got '2x2'"),
        (["--cubes", "1x1x1,"], "Got ''"),
        (["--cubes", "1x1x1,3x1x1"], "cube 3x1x1: a global batch of 8 packs does not divide"),
        (["--cubes", "1x1x1,1x8x1"], "cube 1x8x1: heads must divide by y=8. Got 4."),
        (["--cube", "1x1x1", "--cubes", "1x1x1"], "exclude each other"),
        (["--data-parallel", "0"], "cube axis data must be a whole number of at least 1. Got 0"),
        (["--steps", "0"], "--steps must be at least 1. Got 0"),
        (["--warmup", "0"], "--warmup must be at least 1. Got 0"),
        (["--rounds", "-1"], "--rounds must be at least 1. Got -1"),
        (["--output", "missing/step.json"], "a file in a folder that exists. Got missing/step.json"),
        (["--batch.global-batch", "0"], "global_batch must be at least 1. Got 0"),
    ],
)
def test_bad_calls_start_no_process(
    recipe: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], more: list[str], message: str
) -> None:
    monkeypatch.setattr(step, "start_on_corpus", lambda *_, **__: pytest.fail("started processes"))
    error = refused(capsys, main, *arguments(recipe, *more))
    assert error.startswith("tools.bench: ")
    assert message in error


def test_a_folder_that_cannot_be_made_is_one_line(recipe: Path, capsys: pytest.CaptureFixture[str]) -> None:
    error = refused(capsys, main, "step", recipe, "--corpus", recipe / "below" / "a file")
    assert error.startswith("tools.bench: ")


def test_under_torchrun_cubes_of_different_sizes_are_refused(
    recipe: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("WORLD_SIZE", "4")
    assert main(arguments(recipe, "--cubes", "2x2x1,2x1x1")) == 2
    assert "need different numbers: 2x2x1 4, 2x1x1 2" in capsys.readouterr().err


def test_missing_recipes_are_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["step", str(tmp_path / "none.toml")]) == 2
    assert "none.toml does not exist" in capsys.readouterr().err
    assert main(["step", str(tmp_path)]) == 2
    assert "a recipe is a file *.toml" in capsys.readouterr().err


def trial_that_fails(cube: Cube, **_: Any) -> None:
    raise FloatingPointError(f"no numbers on rank {cube.rank}")


def test_a_failing_rank_is_exit_status_1(
    recipe: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(step, "StepTrial", trial_that_fails)
    assert main(arguments(recipe)) == 1
    error = capsys.readouterr().err
    assert "tools.bench: rank 0 of 1x1x1 failed:\nTraceback" in error
    assert "FloatingPointError: no numbers on rank 0" in error


# Figures, by hand


def test_figures_by_hand() -> None:
    base = [[[sample(1.0), sample(1.0)]], [[sample(2.0), sample(2.0)]]]
    # Two ranks, two rounds of two steps; the seconds of a step are the mean of both ranks.
    turns = [
        [[sample(2.0, 8), sample(4.0, 8)], [sample(4.0, 6), sample(4.0, 6)]],
        [[sample(5.0, 8), sample(6.0, 8)], [sample(5.0, 6), sample(6.0, 6)]],
    ]
    cube = figures(CubeShape(y=2), turns, [facts(expected=8), facts(expected=6)], base)
    assert cube.seconds == ((3.0, 4.0), (5.0, 6.0))
    assert (cube.seconds_median, cube.seconds_quartiles) == (4.5, (3.75, 5.25))
    assert cube.ratio == 4.5 / 1.5
    assert cube.ratio_range == (5.5 / 2.0, 3.5 / 1.0)
    assert cube.tokens_per_second == pytest.approx((100 / 4 + 100 / 5) / 2)
    assert (cube.collectives, cube.bytes_received, cube.bytes_closed_form) == (3, 8, 8)
    assert cube.traffic_equal
    assert cube.flops_per_second == pytest.approx((1000 / 4 + 1000 / 5) / 2)
    assert (cube.collectives_closed_form, cube.collectives_equal) == (3, True)
    assert cube.peak_memory_bytes == 8
    assert (cube.held_bytes, cube.held_closed_form, cube.held_equal) == (38, 38, False)  # the other rank holds 36
    assert (cube.saved_bytes, cube.peak_tensor_bytes) == (28, 68)
    # The rank that receives less is off by a byte.
    assert not figures(CubeShape(y=2), turns, [facts(expected=8), facts(expected=7)], base).traffic_equal
    even = figures(CubeShape(y=2), turns, [facts(expected=8), facts(expected=8)], base)
    assert even.held_equal
    other = [
        dataclasses.replace(facts(), calls_closed_form=Counter({("y", "all-gather"): number})) for number in (3, 2)
    ]
    assert not figures(CubeShape(y=2), turns, other, base).collectives_equal


def test_a_model_without_closed_forms() -> None:
    """As an ELECTRA with its generator: what is counted is shown, and compared with nothing."""
    none = {"closed_form": None, "calls_closed_form": None}
    known = facts(expected=8)
    electra = dataclasses.replace(known, **none, memory=dataclasses.replace(known.memory, held_closed_form=None))
    turns = [[[sample(2.0, 8)]]]
    cube = figures(CubeShape(), turns, [electra], turns)
    assert (cube.collectives, cube.bytes_received, cube.held_bytes) == (3, 8, 38)
    for name in ("collectives", "bytes", "held"):
        assert getattr(cube, f"{name}_closed_form") is None
    assert {cube.collectives_equal, cube.traffic_equal, cube.held_equal} == {None}
    assert table([cube])[1].split().count("-") == 3


def test_cubes_that_compute_something_else_are_found() -> None:
    turns = [[[sample(1.0)]]]
    good = figures(CubeShape(), turns, [facts(5.0)], turns)
    bad = dataclasses.replace(good, first_loss=5.01)
    assert loss_difference([good, bad, good]) == pytest.approx(0.002)
    command = StepCommand(recipe=Path("any.toml"))
    quiet = dataclasses.replace(command.settings.model, dropout=0.0, attention_dropout=0.0)
    compared = dataclasses.replace(command, settings=dataclasses.replace(command.settings, model=quiet))
    assert compared.agree([good, good])
    assert not compared.agree([good, bad])
    assert command.agree([good, bad])  # it has dropout
    modern = dataclasses.replace(quiet, encoder="modern", attention_out_dropout=0.1)
    assert dataclasses.replace(command, settings=dataclasses.replace(command.settings, model=modern)).has_dropout


def test_steps_are_dealt_out_over_rounds() -> None:
    assert deal(20, 4) == [5, 5, 5, 5]
    assert deal(5, 3) == [2, 2, 1]
    assert deal(2, 4) == [1, 1]


def test_columns_are_aligned() -> None:
    turns = [[[sample(0.5)]]]
    lines = table([figures(CubeShape(), turns, [facts()], turns)])
    assert len({line.index(text) + len(text) for line, text in zip(lines, ("tokens/s", "200"), strict=True)}) == 1
    assert format_table(["a", "bb"], [["long", "1"]]) == ["a     bb", "long   1"]
