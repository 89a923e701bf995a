"""`bench gpu`: stages end at their limits, none stops the next, and a page tells how each ended; `bench profile`."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from tools.bench.__main__ import main, parse
from tools.bench.gpu import GpuCommand, Outcome, Stage, run_stage, write_page
from tools.bench.profile import Kernel, ProfileCommand, table


def stage(name: str, code: str, seconds: int = 60) -> Stage:
    return Stage(name=name, why=f"what {name} shows", command=("-c", code), seconds=seconds)


def test_a_stage_ends_with_its_status_and_its_output_stays(tmp_path: Path) -> None:
    outcome = run_stage(stage("good", "print('seen')"), tmp_path, 60)
    assert (outcome.status, outcome.timed_out, str(outcome)) == (0, False, "passed")
    assert "seen" in (tmp_path / "good.log").read_text()
    outcome = run_stage(stage("bad", "raise SystemExit(3)"), tmp_path, 60)
    assert str(outcome) == "failed (exit status 3)"


@pytest.mark.parametrize(("own", "left"), [(1, 60), (60, 1.0)])
def test_a_stage_is_stopped_with_its_children(own: int, left: float, tmp_path: Path) -> None:
    code = "import subprocess, sys; print('begun', flush=True); subprocess.run(['sleep', '60'])"
    outcome = run_stage(stage("long", code, own), tmp_path, left)
    assert outcome.timed_out
    assert 1 <= outcome.seconds < 20
    assert "begun" in (tmp_path / "long.log").read_text()


def test_what_has_no_time_is_not_begun(tmp_path: Path) -> None:
    outcome = run_stage(stage("late", "print(1)"), tmp_path, 0.5)
    assert (outcome.status, str(outcome)) == (None, "not begun: no time was left")
    assert not (tmp_path / "late.log").exists()


def test_the_page_has_each_outcome_and_the_end_of_its_output(tmp_path: Path) -> None:
    stages = [
        stage("one", "print('first result')"),
        stage("two", "print('second'); raise SystemExit(1)"),
        stage("three", ""),
    ]
    outcomes = [run_stage(each, tmp_path, 60) for each in stages[:2]]
    outcomes.append(Outcome(name="three", status=None, seconds=0.0))
    write_page(tmp_path, stages, outcomes)
    page = (tmp_path / "report.md").read_text()
    assert "| one | passed |" in page
    assert "first result" in page
    assert "| two | failed (exit status 1) |" in page
    assert "| three | not begun: no time was left | 0 |" in page
    assert json.loads((tmp_path / "outcomes.json").read_text())["two"]["status"] == 1


def test_stages_are_chosen_in_the_order_of_their_worth() -> None:
    command = GpuCommand(output=Path("nowhere"), stages="library,facts", packs="4,8")
    assert [each.name for each in command.chosen()] == ["facts", "library"]
    names = [each.name for each in GpuCommand(output=Path("nowhere"), packs="4,8").chosen()]
    assert names == ["facts", "tests", "profile", "packs-8", "library", "fp8", "attention", "sorted", "doctor"]
    names = [each.name for each in GpuCommand(output=Path("nowhere"), packs="4,8,16,2").chosen()]
    assert names[3:7] == ["packs-16", "library", "packs-8", "packs-2"]
    names = [each.name for each in GpuCommand(output=Path("nowhere"), packs="4", precision="fp32").chosen()]
    assert "fp8" not in names, "which is beside bf16 alone"


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"stages": "facts,nothing"}, r"--stages must be some of facts,.* Got 'facts,nothing'"),
        ({"packs": "8,x"}, r"--packs must be whole numbers.* Got '8,x'"),
        ({"packs": "0"}, r"--packs must be whole numbers.* Got '0'"),
        ({"seconds": 0}, r"--seconds must be at least 1\. Got 0"),
    ],
)
def test_bad_options_are_refused(options: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        GpuCommand(output=Path("nowhere"), **options).chosen()  # type: ignore[arg-type]


def test_every_command_of_the_stages_can_be_read() -> None:
    """The options of other benchmarks change; a stage that gives an old one would fail on a lent machine."""
    commands = [each.command for each in GpuCommand(output=Path("results"), packs="4,8").chosen()]
    read = [type(parse(command[2:])).__name__ for command in commands if command[:2] == ("-m", "tools.bench")]
    assert read == ["ProfileCommand", *["LibraryCommand"] * 3, "AttentionCommand", "LibraryCommand"]
    with pytest.raises(SystemExit):
        parse(["library", "--no-such-option", "1"])


@pytest.mark.parametrize("has_gpu", [False, True])
def test_cuda_graphs_are_asked_of_a_gpu_alone(has_gpu: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: has_gpu)
    stages = GpuCommand(output=Path("results"), packs="4,8").chosen()
    graphed = [each.name for each in stages if any("ours-graph" in word for word in each.command)]
    assert graphed == (["library"] if has_gpu else [])


@pytest.mark.parametrize(
    ("options", "message"),
    [({"preset": "huge"}, "--preset must be some of tiny"), ({"packs": 0}, "--packs must be at least 1. Got 0")],
)
def test_a_bad_profile_is_refused(options: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        ProfileCommand(**options).check()  # type: ignore[arg-type]


def test_shares_of_kernels_are_of_all() -> None:
    kernels = [Kernel(name="a", calls=2, seconds=0.03), Kernel(name="b", calls=1, seconds=0.01)]
    assert [line.split() for line in table(kernels, 0.04)[1:]] == [
        ["a", "2", "30.00", "75.0%"],
        ["b", "1", "10.00", "25.0%"],
    ]


@pytest.mark.slow
def test_a_rehearsal_on_a_cpu(tmp_path: Path) -> None:
    """Two stages end to end; the others are commands with tests of their own."""
    pytest.importorskip("transformers")
    arguments = [
        "gpu",
        "--output",
        str(tmp_path),
        "--preset",
        "tiny",
        "--layers",
        "1",
        "--vocab",
        "2000",
        "--length",
        "64",
    ]
    arguments += ["--packs", "2", "--precision", "fp32", "--stages", "facts,profile"]
    assert main(arguments) == 0, (tmp_path / "report.md").read_text()
    assert "torch" in (tmp_path / "facts.log").read_text()
    assert json.loads((tmp_path / "profile.json").read_text())["results"]["launches"] > 100
    assert (tmp_path / "trace.json").stat().st_size > 1000
