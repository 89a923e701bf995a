"""`bench gpu`: which stages there are, and their commands; `bench profile`."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from tools.bench import gpu, gpu_facts
from tools.bench.__main__ import main, parse
from tools.bench.gpu import GpuCommand
from tools.bench.profile import Kernel, ProfileCommand, table

ROOT = Path(__file__).parents[3]


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


@pytest.mark.parametrize(("cores", "processes"), [(2, "0"), (8, "4"), (15, "4"), (16, "8"), (64, "8")])
def test_tests_share_the_cores_test_by_test(
    cores: int, processes: str, monkeypatch: pytest.MonkeyPatch, pytestconfig: pytest.Config
) -> None:
    """File by file, one with FlexAttention's kernels would go on long after the others."""
    monkeypatch.setattr(gpu, "usable_cores", lambda: cores)
    (tests,) = GpuCommand(output=Path("results"), stages="tests").chosen()
    words = tests.command
    assert (words[words.index("-n") + 1], words[words.index("--dist") + 1]) == (processes, "worksteal")
    plugins = pytestconfig.pluginmanager.get_plugins()
    ours = [each for each in plugins if Path(getattr(each, "__file__", None) or "").parent == ROOT / "tests"]
    (hook,) = [each.pytest_xdist_make_scheduler for each in ours if hasattr(each, "pytest_xdist_make_scheduler")]
    assert hook(SimpleNamespace(getvalue=lambda _: "worksteal"), None) is None


def test_what_may_lack_memory_has_a_smaller_stage() -> None:
    """Of half the packs, once, under a name and with an output of its own."""
    stages = {each.name: each for each in GpuCommand(output=Path("results"), packs="8,64").chosen()}
    smaller = {name: each.smaller for name, each in stages.items() if each.smaller is not None}
    assert {name: each.name for name, each in smaller.items()} == {"packs-64": "packs-32", "fp8": "fp8-32"}
    for each in smaller.values():
        read = parse(each.command[2:])
        assert (read.packs, read.output) == (32, Path(f"results/{each.name}.json"))  # type: ignore[attr-defined]
        assert each.smaller is None


@pytest.mark.parametrize("has_gpu", [False, True])
def test_cuda_graphs_are_asked_of_a_gpu_alone(has_gpu: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: has_gpu)
    stages = GpuCommand(output=Path("results"), packs="4,8").chosen()
    graphed = [each.name for each in stages if any("ours-graph" in word for word in each.command)]
    assert graphed == (["graph-8", "library"] if has_gpu else [])
    names = [each.name for each in stages]
    assert not has_gpu or names.index("graph-8") == names.index("packs-8") + 1


def test_a_large_model_is_refused_where_no_gpu_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    """A lent machine whose driver does not fit would spend its time on the CPU."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(ValueError, match=r"sees no GPU.*take --preset tiny"):
        GpuCommand(output=Path("nowhere")).run([])


def test_a_fact_that_cannot_be_found_takes_no_other_along(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def lost() -> str:
        raise RuntimeError("CUDA error: out of memory")

    monkeypatch.setattr(gpu_facts, "_facts", lambda: {"copies": lost, "machine": lambda: "a GPU"})
    assert gpu_facts.main() == 1
    assert capsys.readouterr().out.splitlines() == ["copies: RuntimeError: CUDA error: out of memory", "machine: a GPU"]


def test_the_state_of_a_gpu_is_what_nvidia_smi_says(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tool = tmp_path / "nvidia-smi"
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    tool.write_text("#!/bin/sh\necho 'driver_version, clocks.current.sm [MHz]'\necho '580.1, 1980 MHz'\n")
    tool.chmod(0o755)
    assert gpu_facts._state() == "driver_version 580.1, clocks.current.sm [MHz] 1980 MHz"
    tool.write_text("#!/bin/sh\necho 'Field \"pstate\" is not valid'; exit 2\n")
    assert gpu_facts._state() == 'Field "pstate" is not valid'
    monkeypatch.setenv("PATH", str(tmp_path / "elsewhere"))
    assert gpu_facts._state() == "no nvidia-smi is here"


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
    facts = (tmp_path / "facts.log").read_text()
    assert "\nversions: python" in facts
    assert "\ncommit: " in facts
    assert json.loads((tmp_path / "profile.json").read_text())["results"]["launches"] > 100
    assert (tmp_path / "trace.json.gz").stat().st_size > 1000
