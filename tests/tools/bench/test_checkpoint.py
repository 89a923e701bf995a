"""`bench checkpoint`: its figures, its verdict, and one run on real processes."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tools.bench.__main__ import main
from tools.bench.checkpoint import HEADER, AsideSample, SyncSample, config_of, count, figures, rows, slowest, verdict


def test_figures_by_hand() -> None:
    sync = [SyncSample(blocked=2.0, bytes=8_000_000), SyncSample(blocked=4.0, bytes=8_000_000)]
    aside = [
        AsideSample(blocked=0.5, seconds=4.0, steps=(1.2, 1.4)),
        AsideSample(blocked=0.7, seconds=6.0, steps=(1.3, 3.0)),
    ]
    result = figures("1x2x1", 7, [1.0, 0.9, 1.1], sync, aside)
    assert (result.blocked_sync, result.blocked_async) == (3.0, 0.6)
    assert result.blocked_ratio == pytest.approx(0.2)
    assert (result.step_seconds, result.slowdown_worst) == (1.0, 3.0)
    assert result.step_seconds_writing == result.slowdown == pytest.approx(1.35)
    assert result.bytes_per_second_sync == pytest.approx(8e6 / 3)
    assert result.bytes_per_second_async == pytest.approx(8e6 / 5)
    table = rows(result)
    assert [len(row) for row in table] == [len(HEADER)] * 3
    assert table[1][:5] == ("synchronous", "3.000", "3.000", "8", "3")
    assert table[2] == ("asynchronous", "0.600", "5.000", "8", "2", "1350", "3000")
    assert "20.0% (at most 25%: holds)" in verdict(result)
    assert "1.35, worst 3.00 (median at most 1.5: holds)" in verdict(result)
    slow = figures("1x2x1", 7, [0.5], sync[:1], aside)
    assert verdict(slow).count("does NOT hold") == 2


def test_the_slowest_rank_counts() -> None:
    assert slowest([[1.0, 5.0], [2.0, 3.0]]) == [2.0, 5.0]
    ranks = [
        AsideSample(blocked=1.0, seconds=3.0, steps=(1.0, 2.0)),
        AsideSample(blocked=2.0, seconds=2.0, steps=(2.0, 1.0)),
    ]
    assert AsideSample.slowest(ranks) == AsideSample(blocked=2.0, seconds=3.0, steps=(2.0, 2.0))


@pytest.mark.parametrize(("text", "parameters"), [("100M", 10**8), ("0.3b", 3 * 10**8), ("2500k", 2_500_000)])
def test_a_model_of_about_so_many(text: str, parameters: int) -> None:
    assert count(text) == parameters
    config = config_of(parameters)
    size = (config.vocab + 512) * config.hidden + (2 + 12 * config.layers) * config.hidden**2
    assert abs(size / parameters - 1) < 0.15


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (["--parameters", "many"], "--parameters must be a number of at least 2M"),
        (["--parameters", "1M"], "at least 2M"),
        (["--rounds", "0"], "--rounds must be at least 1. Got 0"),
        (["--cube", "1x5x1"], "heads must divide by y=5"),
        (["--directory", "/nowhere/at/all"], "/nowhere/at/all"),
    ],
)
def test_a_bad_call(call: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["checkpoint", *call]) == 2
    assert message in capsys.readouterr().err


@pytest.mark.slow
def test_a_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    output = tmp_path / "figures.json"
    call = ["--parameters", "2M", "--cube", "1x2x1", "--rounds", "1", "--steps", "2", "--directory", str(tmp_path)]
    assert main(["checkpoint", *call, "--output", str(output)]) == 0
    out = capsys.readouterr().out
    assert "parameters on 1x2x1, 1 saves of each kind" in out
    assert "blocked, asynchronous to synchronous:" in out
    content = json.loads(output.read_text())
    assert content["benchmark"] == "checkpoint"
    assert content["bytes"] > 12 * content["parameters"]
    assert len(content["quiet_steps"]) == 2
    assert content["writing_steps"]
    assert content["blocked_async"] > 0
    assert [path.name for path in tmp_path.iterdir()] == ["figures.json"]
