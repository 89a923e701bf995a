"""Whose a folder of fine-tuning is: nothing of others is overwritten, and one table has seeds of one kind alone."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from models.bert import BertConfig
from models.bert.huggingface import write_model_json
from models.bert.tasks import BertForSequenceClassification
from tensor3d import Cube
from tensor3d.checkpoint import Checkpoints
from tests.ranks import run_ranks
from tools.corpus.tokenizers import install_tokenizer
from tools.finetune.__main__ import ClassifyCommand, RegressCommand, TextConfig
from tools.finetune.config import ModelSection
from tools.finetune.data import TextData
from tools.finetune.job import check_same_settings, drop_settings, keep_settings

VOCAB = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "good", "bad"]


def command(folder: Path, **model: str) -> ClassifyCommand:
    for name in ("train", "dev"):
        if not (folder / f"{name}.tsv").exists():
            (folder / f"{name}.tsv").write_text("sentence\tlabel\n" + "good\t1\nbad\t0\n" * 15_000)
    (folder / "vocab.txt").write_text("\n".join(VOCAB) + "\n")
    data = TextData(train=str(folder / "train.tsv"), dev=str(folder / "dev.tsv"))
    section = ModelSection(**(model or {"vocab": str(folder / "vocab.txt")}))
    return ClassifyCommand(recipe=Path("a.toml"), output=folder / "out", settings=TextConfig(data=data, model=section))


def model_in(folder: Path, *steps: int) -> Path:
    """A model of ours with checkpoints."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "vocab.txt").write_text("\n".join(VOCAB) + "\n")
    (folder / "tokenizer").mkdir(exist_ok=True)
    install_tokenizer("wordpiece", folder / "vocab.txt", folder / "tokenizer", lowercase=True)
    cube, config = Cube.single(), BertConfig(layers=1, hidden=8, heads=1, vocab=len(VOCAB), positions=128)
    cube.manual_seed(0)
    model = BertForSequenceClassification(config, 2, cube)
    write_model_json(folder, config=config, heads=("pooler", "classifier"), labels=("0", "1"), problem="classify")
    with Checkpoints(folder / "checkpoints", cube, keep_last=9, asynchronous=False) as checkpoints:
        for step in steps:
            torch.nn.init.constant_(model.classifier.weight, step)
            checkpoints.save(step, model, torch.optim.SGD(model.parameters(), lr=1.0), {})
    return folder


def begun(folder: Path) -> None:
    """As after the first step of a seed."""
    (folder / "out/seed-0").mkdir(parents=True, exist_ok=True)


def test_what_others_have_put_there_stays(tmp_path: Path) -> None:
    thesis = tmp_path / "out/seed-0/thesis.txt"
    thesis.parent.mkdir(parents=True)
    thesis.write_text("mine")
    with pytest.raises(ValueError, match=r"out.*finetune\.json, so.*seed-0"):
        keep_settings(command(tmp_path))
    assert thesis.read_text() == "mine"


def test_weights_are_not_taken_from_where_a_seed_is_written(tmp_path: Path) -> None:
    keep_settings(command(tmp_path))
    begun(tmp_path)
    model_in(tmp_path / "out/seed-0", 1)
    with pytest.raises(ValueError, match=r"seed-0 lies in.*out/seed-0"):
        keep_settings(command(tmp_path, start_from=str(tmp_path / "out/seed-0")))


def relabelled(folder: Path) -> None:
    """In the midst of the file, with the same size."""
    rows = bytearray((folder / "train.tsv").read_bytes())
    assert len(rows) > 180_000, "longer than a sample at its begin and one at its end"
    place = rows.index(b"\t1\n", len(rows) // 2)
    rows[place + 1 : place + 2] = b"0"
    (folder / "train.tsv").write_bytes(rows)


def other_weights(folder: Path) -> None:
    model_in(folder / "model", 2)


def other_pieces(folder: Path) -> None:
    file = folder / "swapped.txt"
    file.write_text("\n".join([*VOCAB[:5], "bad", "good"]) + "\n")
    install_tokenizer("wordpiece", file, folder / "model/tokenizer", lowercase=True)


@pytest.mark.parametrize(
    ("change", "told"),
    [
        (relabelled, r"train\.tsv has another content now"),
        (other_weights, "the weights were those of step-00000001 there and are those of step-00000002 now"),
        (other_pieces, r"weights\.tokenizer, a hash of the files, is another one now"),
    ],
)
def test_other_content_is_refused(change: Callable[[Path], None], told: str, tmp_path: Path) -> None:
    folder = model_in(tmp_path / "model", 1)
    given = command(tmp_path, start_from=str(folder))
    assert keep_settings(given) == keep_settings(given) == str(folder / "checkpoints/step-00000001")
    begun(tmp_path)
    change(tmp_path)
    with pytest.raises(ValueError, match=rf"holds results of other settings: [^ ]*{told}\."):
        keep_settings(given)


def test_another_task_is_named_as_on_the_command_line(tmp_path: Path) -> None:
    given = command(tmp_path)
    keep_settings(given)
    begun(tmp_path)
    with pytest.raises(ValueError, match=r"task was 'classify'.*'regress'"):
        keep_settings(RegressCommand(recipe=given.recipe, output=given.output, settings=given.settings))


def test_a_claim_without_a_seed_keeps_nobody_out(tmp_path: Path) -> None:
    keep_settings(command(tmp_path))
    (tmp_path / "out/tokenizer").mkdir()
    model = model_in(tmp_path / "model", 1)
    keep_settings(command(tmp_path, start_from=str(model)))
    assert not (tmp_path / "out/tokenizer").exists(), "it was that of the other vocabulary"
    drop_settings(tmp_path / "out")
    assert not list((tmp_path / "out").iterdir())
    keep_settings(command(tmp_path))
    begun(tmp_path)
    drop_settings(tmp_path / "out")
    assert (tmp_path / "out/finetune.json").exists(), "there is a seed"


def test_another_vocabulary_is_refused(tmp_path: Path) -> None:
    given = command(tmp_path)
    assert keep_settings(given) is None
    begun(tmp_path)
    (tmp_path / "vocab.txt").write_text("\n".join([*VOCAB[:5], "bad", "good"]) + "\n")
    with pytest.raises(ValueError, match=r"other settings: weights\.tokenizer"):
        keep_settings(given)


def _told_on_hosts(folders: dict[str, Path]) -> list[str]:
    """What ranks say whose machines have folders of their own, and the same command."""
    cube, here, told = Cube(data=2), Path.cwd(), []
    try:
        for what, folder in folders.items():
            os.chdir(folder / f"host{cube.rank}")
            more = {"dropout": 0.1} if what == "recipe" and cube.rank == 1 else {}
            try:
                check_same_settings(command(Path(), **{"vocab": "vocab.txt", **more}), None, cube)  # type: ignore[arg-type]
                told.append("")
            except ValueError as refusal:
                told.append(str(refusal))
    finally:
        os.chdir(here)
    return told


def test_machines_with_other_files_are_told_before_a_step(tmp_path: Path) -> None:
    """Each rank reads for itself, and lays out steps from what it has read: they would meet in unlike collectives."""
    folders = {what: tmp_path / what for what in ("alike", "dev", "unreadable", "recipe")}
    for folder in folders.values():
        for host in ("host0", "host1"):
            (folder / host).mkdir(parents=True)
            command(folder / host)
    with (folders["dev"] / "host1/dev.tsv").open("a") as file:
        file.write("good\t0\n")
    (folders["unreadable"] / "host1/train.tsv").unlink()
    (folders["unreadable"] / "host1/train.tsv").mkdir()
    one, other = run_ranks(2, _told_on_hosts, folders)
    assert one == other
    alike, dev, unreadable, recipe = one
    assert alike == ""
    assert dev.startswith("the content of dev.tsv differs between ranks: rank 1 has ")
    assert dev.endswith("on all machines.")
    assert unreadable.startswith("rank 1: ")
    assert "train.tsv cannot be read or written: Is a directory" in unreadable
    assert recipe.startswith("the recipe, with the options differs between ranks: rank 1 has ")
