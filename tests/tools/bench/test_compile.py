"""`bench compile`: its figures by hand, what it refuses, and a short run on real processes."""

from __future__ import annotations

import json
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from tensor3d import CubeShape
from tools.bench import compile as compile_
from tools.bench.__main__ import main
from tools.bench.compile import (
    Case,
    CompileCommand,
    CompileTrial,
    Facts,
    RegionFacts,
    faults,
    region_figures,
    step_figures,
)
from tools.bench.harness.figures import cells, header

EAGER: Case = ("fp32", "eager")
COMPILED: Case = ("fp32", "compiled")


def facts(**changes: Any) -> Facts:
    values: dict[str, Any] = {"device": "cpu", "threads": 1, "warmup": 2.0, "loss": 8.0, "saved": 2**20, "peak": 2**21}
    return Facts(**values | changes)


def test_figures_by_hand() -> None:
    # Two rounds of a step each, on two ranks: the mean of the ranks counts.
    turns = {EAGER: [[[1.0], [3.0]], [[4.0], [4.0]]], COMPILED: [[[1.0], [1.0]], [[3.0], [3.0]]]}
    ranks = [
        {EAGER: facts(), COMPILED: facts(warmup=9.0, loss=8.0004, saved=2**19)},
        {EAGER: facts(), COMPILED: facts()},
    ]
    found = step_figures(CubeShape(z=2), "fp32", turns, ranks)
    assert found.seconds == {"eager": 3.0, "compiled": 2.0}
    assert (found.ratio, found.ratio_range) == (0.625, (0.5, 0.75))
    assert found.warmup == {"eager": 2.0, "compiled": 9.0}
    assert found.saved == {"eager": 2**20, "compiled": 2**20}
    assert found.loss_difference == pytest.approx(5e-5)
    assert faults([found]) == []
    assert cells(found)[:7] == ["1x1x2", "fp32", "1", "3000.0", "2000.0", "0.625", "0.50-0.75"]
    assert len(cells(found)) == len(header(type(found))) == 14


def test_losses_that_differ_are_a_fault() -> None:
    turns = {EAGER: [[[1.0]]], COMPILED: [[[1.0]]]}
    for loss in (8.1, float("nan")):
        found = step_figures(CubeShape(), "fp32", turns, [{EAGER: facts(), COMPILED: facts(loss=loss)}])
        assert "the losses of both sides differ by" in faults([found])[0]


def test_a_region_by_hand() -> None:
    turns = {("chain", EAGER): [[2.0], [4.0]], ("chain", COMPILED): [[1.0], [1.0]]}
    of_region = {key: RegionFacts(elements=6_000_000, first=1.5) for key in turns}
    found = region_figures("chain", "fp32", turns, of_region)
    assert cells(found) == ["chain", "fp32", "6,000,000", "2.0", "6.0", "0.375", "0.25-0.50", "1.5"]
    assert len(cells(found)) == len(header(type(found)))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--types", "fp16"], "--types must be some of fp32,bf16. Got 'fp16'"),
        (["--steps", "0"], "--steps must be at least 1. Got 0"),
        (["--cubes", "4x1x1", "--sequences", "2"], "--sequences must divide by data * x * z = 4. Got 2"),
    ],
)
def test_bad_calls_are_refused(arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["compile", *arguments]) == 2
    assert message in capsys.readouterr().err


def test_regions_need_processes_of_their_own(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")
    assert main(["compile", "--cubes", "1x1x2"]) == 2
    assert "Add --no-regions" in capsys.readouterr().err
    CompileCommand(cubes="1x1x2", regions=False).check()


@pytest.mark.parametrize("rank", [0, 1])
def test_one_rank_tells(
    rank: int, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """As under torchrun: the ranks know their numbers until the processes part."""
    connected = [False]

    class OnTwo:
        def call(self, action: Callable[..., Any], *args: Any) -> list[Any]:
            assert connected[0]
            return [[1.0]] * 2 if action is CompileTrial.turn else [{EAGER: facts(), COMPILED: facts()}] * 2

    def start(shapes: object, make: object, stack: ExitStack) -> list[OnTwo]:
        connected[0] = True
        stack.callback(lambda: connected.__setitem__(0, False))
        return [OnTwo()]

    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setattr(compile_, "start", start)
    monkeypatch.setattr(compile_.dist, "is_initialized", lambda: connected[0])
    monkeypatch.setattr(compile_.dist, "get_rank", lambda: rank)
    output = tmp_path / "compile.json"
    given = ["--cubes", "1x1x2", "--no-regions", "--steps", "1", "--rounds", "1", "--output", str(output)]
    assert main(["compile", *given]) == 0
    assert output.exists() == (rank == 0)
    assert bool(capsys.readouterr().out) == (rank == 0)


@pytest.mark.parametrize(
    "regions",
    [
        pytest.param(False, marks=pytest.mark.slow),
        pytest.param(True, marks=pytest.mark.long(reason="every region is compiled alone, in processes of its own")),
    ],
)
def test_a_short_run(tmp_path: Path, capsys: pytest.CaptureFixture[str], regions: bool) -> None:
    output = tmp_path / "compile.json"
    sizes = ["--preset", "tiny", "--sequences", "2", "--length", "16", "--steps", "2", "--rounds", "1", "--warmup", "1"]
    more = [] if regions else ["--no-regions"]
    assert main(["compile", *sizes, *more, "--cubes", "1x1x2", "--output", str(output)]) == 0
    content = json.loads(output.read_text())
    (step,) = content["steps"]
    assert (step["cube"], step["ranks"], step["type"]) == ("1x1x2", 2, "fp32")
    assert step["saved"]["compiled"] < step["saved"]["eager"]
    assert len(step["rounds"]["compiled"][0]) == 2
    names = {region["region"] for region in content["regions"] or []}
    wanted = {"LayerNorm", "cross-entropy", "bias + gelu", "dropout + residual + LayerNorm"}
    assert wanted <= names if regions else names == set()
    assert "ratios are compiled over eager" in capsys.readouterr().out
