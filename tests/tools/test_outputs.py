"""Every tool that writes an output says in one sentence what no output can be, before any work, and leaves nothing."""

from __future__ import annotations

import errno
import json
import os
import re
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest

import tensor3d.files
from tensor3d import checkpoint
from tests.tools.runs import arguments, journal
from tools import pretrain
from tools.common.files import lock_folder
from tools.finetune import __main__ as finetune
from tools.gpt import __main__ as gpt
from tools.training.loop import TrainLoop

ROOT = Path(pretrain.__file__).parents[1]
TORCHRUN = ["launch/torchrun.py", "--standalone", "--local-addr=127.0.0.1", "--nproc-per-node=2"]
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


@pytest.mark.parametrize(
    "command",
    [
        "predict classify {folder} --file {file} --output {file}",
        "predict embed {folder} --top 1 --against {file} --output {file} text",
        "plot {folder} --output {file}",
        "report {folder} --output {file}",
        "report {file} --output {file}",
        "packing plan --histogram {file} --output {file}",
        "packing report --histogram {file} --plot {file}",
        "squad random {file} --output {file}",
        "squad windows {file} --vocab {folder} --histogram {file}",
        "plan --cluster {file} --html {file}",
        "plan --output {new} --html {new}",
        "bench precision launch/recipes/quickstart.toml --output {new} --plot {new}",
    ],
)
def test_no_input_is_written_over(command: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "metrics.jsonl"
    file.write_text("{}\n")
    module, *words = command.format(folder=tmp_path, file=file, new=tmp_path / "new").split()
    name = f"tools.{module}" if module == "plot" else f"tools.{module}.__main__"
    assert import_module(name).main(words) == 2
    assert "is another file of this command, too, and would be lost. Name a new one" in capsys.readouterr().err
    assert file.read_text() == "{}\n"
    assert [path.name for path in tmp_path.iterdir()] == ["metrics.jsonl"]


@pytest.mark.parametrize(
    ("command", "kind"),
    [
        ("plot {folder}/run --output {file}", "PNG"),
        ("report {folder}/run --output {file}", "HTML"),
        ("plan --model tiny --gpu H100 --ranks 8 --plot {file}", "PNG"),
        ("plan --model tiny --gpu H100 --html {file}", "HTML"),
        ("packing report --histogram {folder}/h.json --plot {file}", "PNG"),
        ("bench precision launch/recipes/quickstart.toml --plot {file}", "PNG"),
    ],
)
def test_no_file_is_called_what_it_is_not(
    command: str, kind: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "notes.txt"
    file.write_text("mine")
    module, *words = command.format(folder=tmp_path, file=file).split()
    name = f"tools.{module}" if module == "plot" else f"tools.{module}.__main__"
    assert import_module(name).main(words) == 2
    assert f"is written as {kind}, and {file} is called otherwise. Name it " in capsys.readouterr().err
    assert file.read_text() == "mine"


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

FINETUNE = """
[data]
train = "{folder}/train.tsv"
dev = "{folder}/train.tsv"
max_length = 16
[model]
vocab = "{folder}/vocab.txt"
preset = "tiny"
[run]
epochs = 1
batch = 4
seeds = [0]
evaluate_every = 2
"""
"""Eight texts, so that it saves at step 2, its last."""


@pytest.fixture(scope="module")
def calls(recipe: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Callable[[Path], list[str]]]:
    """The words of each training, of two steps, by its name and the folder of the run."""
    folder = tmp_path_factory.mktemp("trainings")
    (folder / "train.tsv").write_text("sentence\tlabel\n" + "good film\t1\nbad film\t0\n" * 4)
    (folder / "vocab.txt").write_text("\n".join(["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "film", "good", "bad"]))
    (folder / "finetune.toml").write_text(FINETUNE.format(folder=folder))
    sizes = ["--vocab-size", "67", "--length", "32", "--batch", "8", "--steps", "2"]
    places = ["--source", str(recipe.parent / "text.txt"), "--corpus", str(recipe.parent / "gpt-corpus")]
    two = ["--run.steps", "2", "--run.checkpoint-every", "1", "--run.evaluate-every", "0"]
    return {
        "pretrain": lambda run: arguments(recipe, run, *two),
        "gpt": lambda run: ["train", *sizes, *places, "--output", str(run)],
        "finetune": lambda run: ["classify", str(folder / "finetune.toml"), "--output", str(run)],
    }


@pytest.fixture(scope="module")
def trainings(calls: dict[str, Callable[[Path], list[str]]]) -> dict[str, Callable[[Path], int]]:
    """Each training in this process."""
    return {
        "pretrain": lambda run: pretrain.main(calls["pretrain"](run)),
        "gpt": lambda run: gpt.main(calls["gpt"](run)),
        "finetune": lambda run: finetune.main(calls["finetune"](run)),
    }


def checkpoints_of(training: str, run: Path) -> Path:
    return run / ("seed-0" if training == "finetune" else "") / "checkpoints"


def check_no_half_file(run: Path) -> None:
    """Every checkpoint that is there is whole, and no draft and no lock is left."""
    assert not [path for path in run.rglob("*") if path.name.endswith((".tmp", ".lock"))]
    for folder in run.rglob("step-*"):
        assert checkpoint.verify(folder) == []


@pytest.mark.parametrize("training", ["pretrain", "gpt", "finetune"])
def test_a_run_whose_disk_is_full_at_the_start_is_one_sentence(
    training: str,
    trainings: dict[str, Callable[[Path], int]],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device", str(tmp_path / "run" / "run.lock"))

    monkeypatch.setattr("tools.common.files._put", full)
    assert trainings[training](tmp_path / "run") == 2
    assert capsys.readouterr().err.endswith("run.lock cannot be read or written: No space left on device.\n")
    assert not (tmp_path / "run").exists()


BEGUN = {
    "pretrain": ["tokenizer-settings.json", "model.json", "metrics.jsonl"],
    "gpt": ["run.json", "metrics.jsonl"],
    "finetune": ["finetune.json", "metrics.jsonl"],
}


@pytest.mark.parametrize(("training", "full"), [(training, name) for training in BEGUN for name in BEGUN[training]])
def test_of_a_run_that_could_not_begin_nothing_keeps_the_next_one_out(
    training: str,
    full: str,
    trainings: dict[str, Callable[[Path], int]],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    real = tensor3d.files._not_through_links

    def refuse(name: str, flags: int) -> int:
        if Path(name).name.startswith(full):
            raise OSError(errno.ENOSPC, "No space left on device", name)
        return real(name, flags)

    run = tmp_path / "run"
    with monkeypatch.context() as patch:
        patch.setattr("tensor3d.files._not_through_links", refuse)
        assert trainings[training](run) == 2
    assert "No space left on device" in capsys.readouterr().err.splitlines()[-1]
    assert training == "finetune" or not run.exists()
    assert trainings[training](run) == 0
    check_no_half_file(run)


def begin_to_fail(monkeypatch: pytest.MonkeyPatch, step: int, accident: Callable[[], object]) -> None:
    """The accident happens before what is done after this step."""
    after = TrainLoop._boundary

    def boundary(loop: TrainLoop) -> Any:
        if loop._trainer.state.step == step:
            loop._checkpoints.wait()
            accident()
        return after(loop)

    monkeypatch.setattr(TrainLoop, "_boundary", boundary)


OTHERS = [pytest.param(n, marks=pytest.mark.slow) for n in (errno.ENOSPC, errno.EACCES, errno.EIO, errno.EMFILE)]


@pytest.mark.parametrize("number", [errno.EDQUOT, errno.EROFS, *OTHERS])
def test_when_nothing_can_be_written_any_more_the_run_goes_on_and_what_was_saved_stays(
    number: int, recipe: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def refuse(name: str, _: int) -> int:
        raise OSError(number, os.strerror(number), name)

    begin_to_fail(monkeypatch, 2, lambda: monkeypatch.setattr("tensor3d.files._not_through_links", refuse))
    run, more = tmp_path / "run", ["--run.checkpoint-every", "1", "--run.steps", "4", "--run.evaluate-every", "0"]
    assert pretrain.main(arguments(recipe, run, *more)) == 74
    told = capsys.readouterr()
    assert os.strerror(number) in told.err
    assert "its last checkpoint could not be written" in told.err.splitlines()[-1]
    saved = checkpoint.latest(run / "checkpoints")
    assert saved == run / "checkpoints" / "step-00000001"
    assert checkpoint.verify(saved) == []
    steps = [json.loads(line)["step"] for line in (run / "metrics.jsonl").read_text().splitlines() if '"step"' in line]
    assert sorted({*steps}) == [1, 2, 3, 4], "the run went on"


def test_a_folder_that_is_removed_while_the_run_goes_on_is_made_again(
    recipe: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    run, more = tmp_path / "run", ["--run.checkpoint-every", "1", "--run.steps", "4", "--run.evaluate-every", "0"]
    begin_to_fail(monkeypatch, 2, lambda: shutil.rmtree(run))
    assert pretrain.main(arguments(recipe, run, *more)) == 0
    assert "metrics.jsonl was removed: it begins anew after step 2." in capsys.readouterr().err
    saved = checkpoint.latest(run / "checkpoints")
    assert saved is not None
    assert (saved.name, checkpoint.verify(saved)) == ("step-00000004", [])
    there = {path.name for path in run.iterdir()}
    assert {"run.json", "model.json", "tokenizer", "metrics.jsonl", "tensorboard"} <= there
    assert "run.lock" not in there


@pytest.mark.parametrize("training", ["gpt", "finetune"])
def test_a_training_whose_folder_is_removed_under_it_leaves_a_whole_one(
    training: str, trainings: dict[str, Callable[[Path], int]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = tmp_path / "run"
    trainings[training](tmp_path / "other")
    begin_to_fail(monkeypatch, 2, lambda: shutil.rmtree(run))
    assert trainings[training](run) == 0
    check_no_half_file(run)
    wanted, there = ({str(path.relative_to(each)) for path in each.rglob("*")} for each in (tmp_path / "other", run))
    assert there == wanted - {"seed-0/curves.png"}, "of which the journal knows no more"


def test_a_clock_that_is_set_back_changes_no_measure(
    recipe: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def set_back() -> None:
        for place in ("time.time", "tensor3d.files.time", "tensor3d.checkpoint.directory.time"):
            monkeypatch.setattr(place, lambda now=time.time: now() - 3600)

    run, more = tmp_path / "run", ["--run.checkpoint-every", "1", "--run.steps", "4"]
    begin_to_fail(monkeypatch, 2, set_back)
    assert pretrain.main(arguments(recipe, run, *more)) == 0
    lines = journal(run)
    assert lines[0]["time"] - lines[-1]["time"] > 3000, "it was"
    assert all(0 < line["seconds"] < 600 for line in lines if "seconds" in line)
    assert "-" not in re.findall(r"time and samples +(\S)", capsys.readouterr().out)
    assert checkpoint.latest(run / "checkpoints") == run / "checkpoints" / "step-00000004"
    assert not (run / "run.lock").exists()


@pytest.mark.slow
@pytest.mark.parametrize("training", ["pretrain", "gpt", "finetune"])
def test_two_ranks_in_poor_surroundings(
    training: str, calls: dict[str, Callable[[Path], list[str]]], tmp_path: Path
) -> None:
    """Few files, no home, no folder for temporary files, an ASCII locale, a reader that goes, no standard error."""
    call = [*TORCHRUN, "-m", f"tools.{training}", *calls[training](tmp_path / "a run")]
    script = 'ulimit -n 64; "$@" 2>&- | head -1 >"$FIRST"; exit "${PIPESTATUS[0]}"'
    around = {name: value for name, value in os.environ.items() if name not in ("HOME", "PYTHONUTF8", "LANG")}
    around |= {"TMPDIR": f"{tmp_path}/not there", "LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}
    around |= {"FIRST": str(tmp_path / "first"), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        ["bash", "-c", script, "-", sys.executable, *call, "--cube", "2x1x1"],
        cwd=ROOT,
        env=around,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0
    assert (tmp_path / "first").read_text().count("\n") == 1
    saved = checkpoint.latest(checkpoints_of(training, tmp_path / "a run"))
    assert saved is not None
    assert saved.name == "step-00000002"
    check_no_half_file(tmp_path / "a run")


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EDQUOT])
@pytest.mark.parametrize("training", ["gpt", "finetune"])
def test_a_training_that_must_save_and_cannot_is_one_sentence(
    training: str,
    number: int,
    trainings: dict[str, Callable[[Path], int]],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    def refuse(name: str, _: int) -> int:
        raise OSError(number, os.strerror(number), name)

    run = tmp_path / "run"
    with monkeypatch.context() as patch:
        begin_to_fail(patch, 2, lambda: patch.setattr("tensor3d.files._not_through_links", refuse))
        assert trainings[training](run) == 2
    last, place = capsys.readouterr().err.splitlines()[-1], checkpoints_of(training, run)
    assert last.startswith(f"tools.{training}: rank 0: {os.strerror(number)}: {place}/step-00000002")
    check_no_half_file(run)
    assert checkpoint.latest(place) is None


@pytest.mark.parametrize("begun", [False, True])
def test_a_second_starter_of_any_training_is_told_who_has_the_folder(
    begun: bool, recipe: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """And not that there is a run, which could be removed, when the first one has begun."""
    run = str(tmp_path / "run")
    text = ["--source", str(recipe.parent / "text.txt"), "--vocab-size", "67", "--steps", "2"]
    trainings: dict[str, tuple[Callable[[list[str]], int], list[str]]] = {
        "tools.pretrain": (pretrain.main, arguments(recipe, Path(run))),
        "tools.gpt": (gpt.main, ["train", *text, "--corpus", str(recipe.parent / "gpt-corpus"), "--output", run]),
        "tools.finetune": (finetune.main, ["classify", *CLASSIFY, "--output", run]),
    }
    with lock_folder(tmp_path / "run"):
        if begun:
            (tmp_path / "run" / "run.json").write_text("{}")
        for name, (main, call) in trainings.items():
            assert main(call) == 2
            told = f"{name}: {run} is in use by process {os.getpid()} on {socket.gethostname()} since "
            assert capsys.readouterr().err.splitlines()[-1].startswith(told)
        assert {path.name for path in (tmp_path / "run").iterdir()} - {"run.json"} == {"run.lock"}
