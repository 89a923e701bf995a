"""What every benchmark is built on: rules of options, and what is told, written and returned."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, ClassVar

import pytest
import tyro

from tools.bench.harness.benchmark import (
    OWN_PROCESSES,
    Benchmark,
    Count,
    Natural,
    PictureFile,
    Report,
    cubes_of,
    listed,
)
from tools.common.bounds import AtLeast, Share
from tools.common.log import start_logging


@dataclass(frozen=True, kw_only=True)
class Some(Benchmark[int]):
    """Nothing is measured."""

    steps: Count = 3
    """Of a turn."""
    few_threads: Count | None = None
    seed: Natural = 0
    dropout: Annotated[float, Share()] = 0.0
    pairs: Annotated[int, AtLeast(2, why=": one alone is none")] = 2
    plot: PictureFile = None

    launcher: ClassVar[str | None] = OWN_PROCESSES

    def plan(self) -> int:
        return 2 * self.steps

    def measure(self, plan: int) -> Report:
        return Report(lines=[f"{plan} steps"], content={"steps": plan})


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"steps": 0}, r"--steps must be at least 1\. Got 0"),
        ({"few_threads": -1}, r"--few-threads must be at least 1\. Got -1"),
        ({"seed": -1}, r"--seed must be at least 0\. Got -1"),
        ({"dropout": 1.0}, r"--dropout must be at least 0 and below 1\. Got 1\.0"),
        ({"dropout": float("nan")}, "--dropout must be at least 0 and below 1. Got nan"),
        ({"pairs": 1}, r"--pairs must be at least 2: one alone is none\. Got 1"),
        ({"output": Path("/nowhere/at/all.json")}, "--output must be a file in a folder that exists"),
        ({"plot": Path("/nowhere/at/all.png")}, "--plot must be a file in a folder that exists"),
    ],
)
def test_options_keep_the_rules_of_their_types(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Some(**options).check()
    assert Some().check() == 6


def test_it_refuses_a_launcher(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(ValueError, match="starts its processes itself"):
        Some().check()


def test_rules_are_no_part_of_the_command_line() -> None:
    asked = tyro.cli(Some, args=["--steps", "4", "--few-threads", "2", "--seed", "1"])
    assert (asked.steps, asked.few_threads, asked.seed) == (4, 2, 1)


def reporting(report: Callable[[], Report], **options: Any) -> Benchmark[None]:
    class Reporting(Benchmark[None]):
        def measure(self, plan: None) -> Report:
            return report()

    return Reporting(**options)


def test_figures_are_told_and_written(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    output = tmp_path / "some.json"
    assert Some(output=output).run(["some", "--steps", "3"]) == 0
    machine, line, written = capsys.readouterr().out.splitlines()
    assert "cores of" in machine
    assert (line, written) == ("6 steps", f"written: {output}")
    content = json.loads(output.read_text())
    assert (content["benchmark"], content["steps"]) == ("some", 6)
    assert content["command"] == "python -m tools.bench some --steps 3"


def test_faults_are_exit_status_1(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    start_logging()  # as the command has done
    output = tmp_path / "some.json"
    wrong = reporting(lambda: Report(lines=["a line"], content={}, faults=["they differ"]), output=output)
    assert wrong.run(["some"]) == 1
    captured = capsys.readouterr()
    assert captured.err == "tools.bench: they differ\n"
    assert captured.out.splitlines()[1:] == ["a line", f"written: {output}"]
    assert reporting(lambda: Report(content={}, well=False)).run(["some"]) == 1


def test_without_figures_nothing_but_faults_is_told(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    start_logging()  # as the command has done
    output = tmp_path / "some.json"
    assert reporting(lambda: Report(content=None, faults=["all wrong"]), output=output).run(["some"]) == 1
    captured = capsys.readouterr()
    assert (captured.out, captured.err) == ("", "tools.bench: all wrong\n")
    assert not output.exists()


def test_one_rank_tells(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    output = tmp_path / "some.json"
    quiet = reporting(lambda: Report(content={}, faults=["they differ"], shown=False), output=output)
    assert quiet.run(["some"]) == 1
    assert capsys.readouterr() == ("", "")
    assert not output.exists()


def test_names_of_an_option() -> None:
    assert listed("--modes", "b, a,b", "abc", needs="a") == ["b", "a"]
    for text in ("a,d", "b", ""):
        with pytest.raises(ValueError, match=f"--modes must be some of a,b,c, a among them. Got {text!r}"):
            listed("--modes", text, "abc", needs="a")
    with pytest.raises(ValueError, match="must be at least two of a,b,c"):
        listed("--modes", "a,a", "abc", least=2)
    assert [str(shape) for shape in cubes_of("1x2x1,2x2x2", 2)] == ["2*(1x2x1)", "2*(2x2x2)"]
