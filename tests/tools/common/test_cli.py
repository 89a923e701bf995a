"""The frame of commands: what is said of an option that is none, how the settings in a message
are typed, and how missing files are named."""

from __future__ import annotations

import importlib
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated

import pytest
import torch.distributed as dist
import tyro

from tensor3d import Cube, CubeShape
from tools.common import cli
from tools.common.cli import cube_of, refuse_empty
from tools.common.option_names import with_options
from tools.common.parse import check_home, parse_options

ROOT = Path(__file__).parents[3]


@pytest.mark.parametrize(
    ("module", "words", "meant"),
    [
        ("tools.predict", ["fill-mask", "M", "a", "--kk", "3"], "--k INT"),
        ("tools.predict", ["score", "M", "a", "--top", "3"], ""),
        ("tools.convert", ["from-hf", "A", "B", "--heds", "x"], ""),
        ("tools.checkpoint", ["inspect", "A", "--al"], ""),
        ("tools.gpt", ["generate", "A", "--prompt", "a", "--steps", "3"], ""),
        ("tools.squad", ["score", "--top"], ""),
    ],
)
def test_hints_are_about_the_same_command_as_it_is_typed(
    module: str, words: list[str], meant: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as left:
        importlib.import_module(f"{module}.__main__").main(words)
    told = capsys.readouterr().err
    assert left.value.code == 2
    assert f"python -m {module} {words[0]} --help" in " ".join(told.replace("│", "").split())
    assert "in python" not in told, "an option of another command, and no command that can be typed"
    assert meant in told


def test_fill_mask_takes_the_option_of_its_neighbours() -> None:
    from tools.predict.__main__ import FillMaskCommand

    assert tyro.cli(FillMaskCommand, args=["M", "a", "--top", "3"]).k == 3


# --- Settings in messages, as they are typed --------------------------------------------------------------------------


@dataclass(frozen=True)
class Data:
    vocab_size: int = 0
    shards: int = 0


@dataclass(frozen=True)
class Recipe:
    data: Data = field(default_factory=Data)
    eps: float = 0.0


@dataclass(frozen=True)
class Options:
    settings: Annotated[Recipe, tyro.conf.arg(name="")] = field(default_factory=Recipe)
    max_length: int = 0


@pytest.mark.parametrize(
    ("told", "typed"),
    [
        ("Lower vocab_size or add text.", "--data.vocab-size"),
        ("too long: max_length=3. Raise the shards.", "--data.shards, --max-length"),
        ("Raise data.vocab_size.", None),
        ("Raise --data.vocab-size: vocab_size is small.", None),
        ("runs/max_length/vocab_size.txt, max_length.txt: 3 shards are there", None),
    ],
)
def test_a_setting_is_told_as_it_is_typed(told: str, typed: str | None) -> None:
    assert with_options(told, Options) == (told if typed is None else f"{told} (To be typed: {typed}.)")
    assert with_options(told, None) == told


# --- Files that are not there -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "words",
    [
        "tools.pretrain none.toml",
        "tools.pretrain launch/recipes/quickstart.toml --data.source none --prepare-only --corpus corpus",
        "tools.predict.__main__ fill-mask none a",
        "tools.plot none",
        "tools.convert.__main__ from-hf none out",
        "tools.checkpoint.__main__ inspect none",
        "tools.corpus.__main__ prepare --source none --output out",
    ],
)
def test_a_missing_file_is_named_from_the_root(
    words: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Launchers go to another folder first: nobody knows what a relative path was relative to."""
    (tmp_path / "launch").symlink_to(ROOT / "launch")
    monkeypatch.chdir(tmp_path)
    module, *arguments = words.split()
    assert importlib.import_module(module).main(arguments) == 2
    assert str(tmp_path / "none") in capsys.readouterr().err


@pytest.mark.parametrize(
    "words",
    [
        ("tools.pretrain", "launch/recipes/quickstart.toml", "--output", ""),
        ("tools.pretrain", "launch/recipes/quickstart.toml", "--data.source=", "--prepare-only"),
        ("tools.finetune.__main__", "classify", "launch/recipes/finetune/embedded.toml", "--output", ""),
        ("tools.gpt.__main__", "train", "--output="),
    ],
)
def test_an_empty_folder_is_not_the_current_one(
    words: tuple[str, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """`--output "$RUN"` with a variable that is not set would write there, and `--data.source` read all of it."""
    (tmp_path / "launch").symlink_to(ROOT / "launch")
    monkeypatch.chdir(tmp_path)
    module, *arguments = words
    assert importlib.import_module(module).main(arguments) == 2
    assert "must name a file or a folder. Got ''" in capsys.readouterr().err
    assert [path.name for path in tmp_path.iterdir()] == ["launch"]


@pytest.mark.parametrize(
    "words",
    [
        ("tools.pretrain", "launch/recipes/quickstart.toml", "--output=~/run"),
        ("tools.pretrain", "launch/recipes/quickstart.toml", "--data.source=~/text.txt", "--prepare-only"),
        ("tools.plan.__main__", "--output=~/plan.json"),
        ("tools.plot", "~/run"),
        ("tools.plot", "~root/run"),
        ("tools.scaling", "launch/recipes/quickstart.toml", "--output=~/run"),
        ("tools.scaling", "--collect=~/run"),
    ],
)
def test_a_tilde_that_the_shell_left_is_no_folder(
    words: tuple[str, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A folder named ~ would be made, and whoever removes it by its name removes another one."""
    (tmp_path / "launch").symlink_to(ROOT / "launch")
    monkeypatch.chdir(tmp_path)
    module, *arguments = words
    with pytest.raises(SystemExit) as left:
        raise SystemExit(importlib.import_module(module).main(arguments))
    assert left.value.code == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert "is no home folder" in line
    assert [path.name for path in tmp_path.iterdir()] == ["launch"]


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (
            ("tools.corpus.__main__", "extract", "--input", "a.txt", "--output", "out"),
            "extract: there is no option --input",
        ),
        (("tools.convert.__main__", "from-hf", "--source=DIR", "OUT"), "from-hf: there is no option --source"),
        (("tools.squad.__main__", "windows", "f.json", "--vocab"), None),
    ],
)
def test_a_value_that_has_no_name_is_given_alone(
    words: tuple[str, ...], told: str | None, capsys: pytest.CaptureFixture[str]
) -> None:
    module, *arguments = words
    with pytest.raises(SystemExit) as left:
        raise SystemExit(importlib.import_module(module).main(arguments))
    assert left.value.code == 2
    last = capsys.readouterr().err.splitlines()[-1]
    assert last.endswith(f"{told}: write its value alone, without a name") if told else "there is no option" not in last


def test_a_tilde_before_nobody_is_a_name() -> None:
    check_home([Path("~$report.txt"), Path("a~root"), Path("~no-such-user/run")])


def test_texts_may_begin_with_a_tilde() -> None:
    from tools.gpt.generate import GenerateCommand

    assert (
        parse_options(GenerateCommand, ["run", "--prompt", "~/ is home"], "python -m tools.gpt").prompt == "~/ is home"
    )


def test_an_option_with_something_behind_it_is_none_of_these() -> None:
    refuse_empty(["--output", ".", "--k", "", "text", ""], "--output", "--corpus")
    with pytest.raises(ValueError, match="--corpus must name"):
        refuse_empty(["--output", ".", "--corpus", ""], "--output", "--corpus")


@pytest.mark.parametrize(
    ("error", "backend", "wanted"),
    [
        (RuntimeError("CUDA out of memory"), "nccl", ["ends with 1 where Python does"]),
        (OSError("no space"), "nccl", ["ends with 2 where Python does"]),
        (ValueError("bad input"), "nccl", ["ends the groups"]),
        (RuntimeError("out of memory"), "gloo", ["ends the groups"]),
    ],
)
def test_a_rank_that_fails_alone_waits_for_nobody(
    error: Exception, backend: str, wanted: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """NCCL's groups are ended by all ranks together, after all that they have begun; gloo's by each."""
    done: list[str] = []
    monkeypatch.setattr(Cube, "from_env", lambda *sizes, **options: Cube.single())
    for name, value in (("is_initialized", True), ("get_world_size", 2), ("get_backend", backend)):
        monkeypatch.setattr(dist, name, lambda value=value: value)
    monkeypatch.setattr(dist, "destroy_process_group", lambda: done.append("ends the groups"))
    monkeypatch.setattr(cli.atexit, "register", lambda _, status: done.append(f"ends with {status} where Python does"))
    with pytest.raises(type(error)), cube_of(CubeShape()):
        raise error
    assert done == wanted


@pytest.mark.parametrize("asked", [False, True])
def test_where_a_command_was_interrupted(
    asked: bool, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A person knows it; who reads the log of a stage of `bench gpu`, which asks Python to tell of faults, does not."""

    def action() -> int:
        raise KeyboardInterrupt

    monkeypatch.setattr(cli.faulthandler, "is_enabled", lambda: asked)
    monkeypatch.setattr(cli.signal, "signal", lambda *_: None)
    assert cli.run_main("tools.bench", action) == 130
    told = capsys.readouterr().err
    assert ("in action" in told and told.endswith("KeyboardInterrupt\n")) if asked else told == ""
