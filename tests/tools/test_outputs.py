"""Every tool that writes an output says in one sentence what no output can be, before any work, and leaves nothing."""

from __future__ import annotations

import errno
import json
import os
import shutil
from collections.abc import Callable
from importlib import import_module
from pathlib import Path

import pytest

from tests.tools.runs import arguments
from tools import pretrain

CLASSIFY = ["launch/recipes/finetune/embedded.toml"]
# A command, and where the output stands in it.
COMMANDS: dict[str, list[str]] = {
    "pretrain": ["tools.pretrain", "{recipe}", "--corpus", "{corpus}", "--output", "{}"],
    "pretrain, resumed": ["tools.pretrain", "{recipe}", "--corpus", "{corpus}", "--resume", "auto", "--output", "{}"],
    "pretrain, its corpus": ["tools.pretrain", "{recipe}", "--output", "{new}", "--corpus", "{}"],
    "pretrain, prepare": ["tools.pretrain", "{recipe}", "--prepare-only", "--corpus", "{corpus}", "--output", "{}"],
    "finetune": ["tools.finetune.__main__", "classify", *CLASSIFY, "--output", "{}"],
    "gpt": ["tools.gpt.__main__", "train", "--corpus", "{corpus}", "--output", "{}"],
    "gpt, its corpus": ["tools.gpt.__main__", "train", "--output", "{new}", "--corpus", "{}"],
    "corpus prepare": ["tools.corpus.__main__", "prepare", "--output", "{}"],
    "corpus extract": ["tools.corpus.__main__", "extract", "--format", "text", "--output", "{}", "{recipe}"],
    "predict": ["tools.predict.__main__", "classify", "{new}", "text", "--output", "{}"],
    "plot": ["tools.plot", "{new}", "--output", "{}"],
    "squad": ["tools.squad.__main__", "random", "{new}", "--output", "{}"],
    "packing": ["tools.packing.__main__", "plan", "--output", "{}"],
    "plan": ["tools.plan.__main__", "--output", "{}"],
    "doctor": ["tools.doctor.__main__", "--quick", "--output", "{}"],
    "convert": ["tools.convert.__main__", "from-hf", "{new}", "{}"],
    "scaling": ["tools.scaling", "{recipe}", "--output", "{}"],
    "bench": ["tools.bench.__main__", "checkpoint", "--output", "{}"],
}


def not_utf8(folder: Path) -> Path:
    return folder / os.fsdecode(b"caf\xe9")


def below_not_utf8(folder: Path) -> Path:
    return folder / os.fsdecode(b"\xff\xfe") / "out"


def dangling(folder: Path) -> Path:
    (folder / "link").symlink_to(folder / "nowhere")
    return folder / "link"


def looping(folder: Path) -> Path:
    (folder / "loop").symlink_to(folder / "loop")
    return folder / "loop"


@pytest.mark.parametrize(
    ("command", "place"),
    [
        *((command, place) for command in COMMANDS for place in (not_utf8, dangling)),
        *((command, place) for command in ("pretrain", "predict") for place in (below_not_utf8, looping)),
    ],
)
def test_what_no_output_can_be_is_one_sentence(
    command: str, place: Callable[[Path], Path], recipe: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    output = place(tmp_path)
    before = sorted(os.listdir(os.fsencode(tmp_path)))
    module, *words = COMMANDS[command]
    known = {"{recipe}": str(recipe), "{corpus}": str(recipe.parent / "corpus"), "{new}": str(tmp_path / "new")}
    given = [str(output) if word == "{}" else known.get(word, word) for word in words]
    assert import_module(module).main(given) == 2
    said = capsys.readouterr().err.splitlines()
    wanted = "is not UTF-8" if place in (not_utf8, below_not_utf8) else "which is not there. Remove it or make that."
    (line,) = (each for each in said if wanted in each)
    assert "Traceback" not in "".join(said)
    assert sorted(os.listdir(os.fsencode(tmp_path))) == before, "nothing is left"
    assert line.isprintable()


# --- what a start reads, and what it writes into ---------------------------------------------------------------------

READ = ("recipe", "journal", "corpus", "checkpoint")


@pytest.fixture(scope="module")
def finished(recipe: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of three of its six steps."""
    run = tmp_path_factory.mktemp("finished") / "run"
    assert pretrain.main(arguments(recipe, run, "--run.steps", "3", "--run.evaluate-every", "0")) == 0
    return run


@pytest.mark.parametrize("what", READ)
def test_a_fifo_among_what_a_start_reads_is_refused_and_not_waited_for(
    what: str, recipe: Path, finished: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    shutil.copytree(finished, tmp_path / "run")
    shutil.copytree(recipe.parent / "corpus", tmp_path / "corpus")
    shutil.copyfile(recipe, tmp_path / "small.toml")
    path = {
        "recipe": tmp_path / "small.toml",
        "journal": tmp_path / "run" / "metrics.jsonl",
        "corpus": tmp_path / "corpus" / "corpus.json",
        "checkpoint": tmp_path / "run" / "checkpoints" / "step-00000003" / "tensors.json",
    }[what]
    path.unlink()
    os.mkfifo(path)
    given = arguments(tmp_path / "small.toml", tmp_path / "run", "--resume", str(tmp_path / "run"))
    assert pretrain.main([*given, "--run.steps", "4"]) == 2
    told = capsys.readouterr().err
    assert f"{path} c" in told or f"{path} is" in told
    assert "it is a FIFO, and a regular file is needed" in told
    assert not (tmp_path / "run" / "run.lock").exists()


def test_links_in_the_folder_of_a_run_keep_their_targets(recipe: Path, finished: Path, tmp_path: Path) -> None:
    run, secret = tmp_path / "run", tmp_path / "secret"
    secret.write_text("mine")
    shutil.copytree(finished / "checkpoints", run / "checkpoints")
    for name in ("run.json", "run.json.partial", "model.json", "metrics.jsonl", "metrics.jsonl.partial", "run.lock"):
        (run / name).symlink_to(secret)
    (run / "checkpoints" / "best.partial").symlink_to(secret)
    (run / "checkpoints" / "step-00000004.trash").symlink_to(tmp_path)
    assert pretrain.main(arguments(recipe, run, "--resume", str(run), "--run.steps", "4")) == 0
    assert secret.read_text() == "mine"
    assert json.loads((run / "run.json").read_text())["recipe"]["run"]["steps"] == 4
    assert (run / "metrics.jsonl").read_text().count('"kind": "step"') == 1


# --- accidents -------------------------------------------------------------------------------------------------------


def test_a_run_whose_disk_is_full_at_the_start_is_one_sentence(
    recipe: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device", str(tmp_path / "run" / "run.lock"))

    monkeypatch.setattr("tools.common.files._put", full)
    assert pretrain.main(arguments(recipe, tmp_path / "run")) == 2
    assert capsys.readouterr().err.endswith("run.lock cannot be read or written: No space left on device.\n")
    assert not (tmp_path / "run").exists()
