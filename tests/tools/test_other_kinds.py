"""A folder of another kind than a command takes: one line that says what it is, what is needed and what takes it."""

from __future__ import annotations

import json
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest

from models.folder_kinds import check_no_model, instead
from tensor3d import CubeShape
from tensor3d.checkpoint.directory import VERSION
from tensor3d.files import what_is_wrong

GPT_PROGRESS = {"version": VERSION, "step": 2, "ranks": 1, "cube": "1x1x1", "optimizer": "AdamW", "serial": 1}
# Files by folder, no more of them than tell what it is. A value that is no object stands in its file as it is.
KINDS: dict[str, dict[str, Any]] = {
    "bert": {"run.json": {"recipe": {"model": {"family": "bert"}}}, "tokenizer/tokenizer-settings.json": {}},
    "modern": {"run.json": {"recipe": {"model": {"family": "bert", "encoder": "modern"}}}},
    "electra": {"run.json": {"recipe": {"model": {"family": "electra"}}}},
    "gpt": {
        "run.json": {"command": {}, "model": {}},
        "checkpoints/step-00000002/progress.json": GPT_PROGRESS,
    },
    "finetuned": {"finetune.json": {}, "seed-0/model.json": {"heads": ["tags"]}},
    "vit": {"config.json": {"model_type": "vit"}},
    "tokenizer": {"vocab.txt": "[PAD]"},
    "corpus": {"corpus.json": {}},
    "step": {"step.json": {"step": "extract"}},
    "empty": {},
    "cut": {"run.json": '{"recipe": {', "tokenizer.model": ""},
    "list": {"run.json": "[1]", "config.json": "[1]", "model.json": "[1]"},
}
SAID = {
    "bert": "It is a run of tools.pretrain (bert): python -m tools.predict and tools.convert take it.",
    "modern": "It is a run of tools.pretrain (bert, modern encoder): ",
    "electra": "It is a run of tools.pretrain (electra): ",
    "gpt": "It is a run of tools.gpt (GPT): python -m tools.gpt generate takes it.",
    "gpt/checkpoints": "It is the folder of checkpoints of {folder}/gpt.",
    "gpt/checkpoints/step-00000002": "It is a checkpoint of {folder}/gpt, a run of tools.gpt (GPT): ",
    "finetuned": "It is a run of tools.finetune: {folder}/finetuned/seed-0 is a model of it.",
    "finetuned/seed-0": "It is a BERT of this project with the heads tags; ",
    "vit": "It is a folder of Hugging Face with a model of type 'vit'.",
    "tokenizer": "It is a tokenizer without a model.",
    "corpus": "It is a corpus that ",
    "step": "It is the output of python -m tools.corpus extract.",
    "empty": "It is an empty folder.",
    "vit/config.json": "It is a file.",
    "cut": "",
    "list": "",
    "nothing": "",
}
COMMANDS = {
    "generate": "tools.gpt.__main__ generate {} --prompt A",
    "embed": "tools.predict.__main__ embed {} text",
    "to-hf": "tools.convert.__main__ to-hf {} {out}",
    "inspect": "tools.checkpoint.__main__ inspect {}",
    "plot": "tools.plot {}",
    "report": "tools.report.__main__ {} --output {out}.html",
    "resume": "tools.pretrain launch/recipes/quickstart.toml --resume {}",
    "start-from": "tools.pretrain launch/recipes/quickstart.toml --start-from {} --output {out}",
}
OWN: dict[str, tuple[str, ...]] = {  # what a command takes, or knows better than this module
    "generate": ("gpt",),
    "plot": ("bert", "modern", "electra"),
    "report": ("bert", "modern", "electra", "gpt", "finetuned", "finetuned/seed-0", "vit/config.json"),
    "embed": ("vit", "finetuned", "finetuned/seed-0", "vit/config.json"),
    "inspect": ("gpt", "gpt/checkpoints", "gpt/checkpoints/step-00000002"),
    "resume": ("gpt/checkpoints",),
}
OWN["to-hf"], OWN["start-from"] = OWN["embed"], (*OWN["embed"], "gpt/checkpoints")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("kinds")
    for kind, files in KINDS.items():
        (root / kind).mkdir()
        for name, content in files.items():
            path = root / kind / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(content if isinstance(content, str) else json.dumps(content))
    return root


@pytest.mark.parametrize("name", SAID)
def test_what_a_folder_is(name: str, folder: Path) -> None:
    said, wanted = instead(folder / name), SAID[name].format(folder=folder)
    assert said.startswith(f" {wanted}") if wanted else said == ""


@pytest.mark.parametrize(
    "command",
    [pytest.param(name, marks=pytest.mark.slow) if name in ("resume", "start-from") else name for name in COMMANDS],
)
def test_a_folder_of_another_kind_is_one_line(
    command: str, folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    module, *words = COMMANDS[command].split()
    for name, wanted in SAID.items():
        given = [word.replace("{out}", str(tmp_path / "out")).replace("{}", str(folder / name)) for word in words]
        status, err = import_module(module).main(given), capsys.readouterr().err
        assert "Error" not in err
        if name in OWN.get(command, ()):
            continue
        assert (status, err.count("\n")) == (2, 1), name
        assert wanted.format(folder=folder).removeprefix("It is ") in err, name
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    "command",
    [
        "tools.pretrain launch/recipes/quickstart.toml",
        "tools.pretrain launch/recipes/quickstart.toml --resume auto",
        "tools.gpt.__main__ train",
    ],
)
@pytest.mark.parametrize("name", ["finetuned", "finetuned/seed-0"])
def test_a_model_is_not_written_over(command: str, name: str, folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    module, *words = command.split()
    assert import_module(module).main([*words, "--output", str(folder / name)]) == 2
    assert "and what lies beside it would be overwritten. It is a" in capsys.readouterr().err
    check_no_model(folder / "bert")  # which is refused as a run


def test_nor_is_another_run_gone_on_with(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Where its checkpoint has done as many steps, the run would be told to be at its end."""
    words = ["launch/recipes/quickstart.toml", "--resume", "auto", "--run.steps", "2", "--output"]
    assert import_module("tools.pretrain").main([*words, str(folder / "gpt")]) == 2
    assert "is no checkpoint of tools.pretrain, which alone can be resumed here. It is a" in capsys.readouterr().err


def test_what_is_wrong_with_an_entry_is_said_in_words() -> None:
    for read, wanted in (
        (lambda: json.loads("{}")["model"], "it has no 'model'"),
        (lambda: json.loads("{"), "it is no JSON: Expecting property name"),
        (lambda: len(json.loads("1")), "an entry is of another kind than it should be (object of type 'int'"),
        (lambda: int("a"), "invalid literal for int() with base 10: 'a'"),
        (lambda: CubeShape.parse("a"), "a cube is written XxYxZ with whole numbers of at least 1, like 2x2x2. Got 'a'"),
    ):
        with pytest.raises((KeyError, TypeError, ValueError)) as found:
            read()
        assert what_is_wrong(found.value).startswith(wanted)
        assert not what_is_wrong(found.value).endswith(".")


def test_a_damaged_run_is_not_said_to_be_one(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "run.json").write_text('{"recipe": {}, "cube": "a", "data_parallel": 1}')
    assert import_module("tools.plot").main([str(tmp_path)]) == 2
    assert "like 2x2x2. Got 'a'). Name a run" in capsys.readouterr().err
