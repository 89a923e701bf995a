"""`tools.scaling`: one box on a launcher's ranks, and one table and picture of many such runs."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

from tensor3d import CubeShape
from tests.ranks import run_ranks
from tests.tools.bench.measured import facts, sample
from tools.bench.harness.step_trial import figures
from tools.bench.scaling import Point, to_json
from tools.scaling import main, point_of


def point(shape: CubeShape, seconds: float) -> Point:
    turns = [[[sample(seconds)]] * shape.ranks]
    step = figures(shape, turns, [facts(5.0)] * shape.ranks, turns)
    return Point(kinds=("1d",), global_batch=8, hidden=32, step=step)


def written(folder: Path, *points: Point) -> None:
    """A run for each, as its ranks would have left it."""
    for each in points:
        run = folder / f"{each.step.ranks}-{each.step.cube}"
        run.mkdir()
        content = {"benchmark": "strong", "results": to_json([each])}
        (run / "strong.json").write_text(json.dumps(content))


def test_a_point_comes_back_from_its_file() -> None:
    one = point(CubeShape(y=2), 0.5)
    again = point_of(json.loads(json.dumps(to_json([one])))[0])
    assert to_json([again]) == json.loads(json.dumps(to_json([one])))


def test_runs_are_collected_in_one_table_and_picture(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Efficiency is to the fewest ranks of all runs, and not of each by itself."""
    written(tmp_path, point(CubeShape(y=4), 2.0), point(CubeShape(), 4.0), point(CubeShape(y=2), 2.5))
    (tmp_path / "notes").mkdir()  # no run
    assert main(["--collect", str(tmp_path)]) == 0
    rows = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert [row[0] for row in rows[2:5]] == ["1x1x1", "1x2x1", "1x4x1"]
    assert [row[8] for row in rows[2:5]] == ["1.00", "0.80", "0.50"]
    page = (tmp_path / "scaling.md").read_text()
    assert page.startswith("## strong scaling, efficiency to 1x1x1\n")
    assert page.count("\n| 1x") == 3
    assert (tmp_path / "strong.png").stat().st_size > 10_000


@pytest.mark.parametrize(
    ("entry", "value", "message"),
    [
        ("ranks", "2", "a file that tools.bench strong or weak has written by --output is needed"),
        ("seconds_median", -1, "a file that tools.bench strong or weak has written by --output is needed"),
        ("kinds", None, "a file that tools.bench strong or weak has written by --output is needed"),
        ("cube", 5, "a file that tools.bench strong or weak has written by --output is needed"),
        ("first_loss", "low", "strong.json is damaged ("),
    ],
)
def test_a_damaged_run_is_named(
    entry: str, value: Any, message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    written(tmp_path, point(CubeShape(), 4.0))
    (file,) = tmp_path.glob("*/strong.json")
    content = json.loads(file.read_text())
    content["results"][0][entry] = value
    file.write_text(json.dumps(content))
    assert main(["--collect", str(tmp_path)]) == 2
    told = capsys.readouterr().err
    assert message in told
    assert str(file) in told


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--collect", "."], "holds no run. One is a folder in it with strong.json or weak.json"),
        (["recipe.toml"], "a recipe and --output DIR are needed, or --collect DIR"),
        (["--output", "here"], "a recipe and --output DIR are needed, or --collect DIR"),
    ],
)
def test_bad_calls(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    arguments: list[str],
    message: str,
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(arguments) == 2
    assert message in capsys.readouterr().err


def on_rank(recipe: Path, output: Path) -> int:
    os.environ.update(WORLD_SIZE=str(dist.get_world_size()), RANK=str(dist.get_rank()), LOCAL_RANK="0")
    box = ["--cube", "1x2x1", "--corpus", str(recipe.parent / "corpus"), "--output", str(output)]
    return main([str(recipe), *box, "--steps", "1", "--rounds", "1", "--warmup", "1"])


@pytest.mark.slow
def test_one_box_on_ranks_that_a_launcher_started(recipe: Path, tmp_path: Path) -> None:
    assert run_ranks(2, on_rank, recipe, tmp_path / "new" / "run") == [0, 0]
    (result,) = json.loads((tmp_path / "new" / "run" / "strong.json").read_text())["results"]
    assert (result["cube"], result["data_parallel"], result["traffic_equal"]) == ("1x2x1", 1, True)
