"""`python -m tools.finetune tag`: learns, measures and writes, the same on any cube."""

from __future__ import annotations

import dataclasses
import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tensor3d import Cube
from tests.ranks import run_ranks
from tests.single_device_reference import name_of, ranks_of
from tests.tools.finetune import small_tasks
from tests.tools.finetune.small_tasks import CONFIG
from tests.tools.squad.small import COLORS, DIGITS, write_vocab
from tools.corpus.tokenizers.wordpiece import WordPieceTokenizer
from tools.finetune.__main__ import TagConfig, main, parse
from tools.finetune.config import ModelSection, RunSection
from tools.finetune.tag_data import TagData
from tools.finetune.tag_task import TagTask
from tools.finetune.tasks import Evaluation
from tools.predict import load
from tools.tagging.schemes import tag_metrics
from tools.tagging.windows import WordTags

Shape = tuple[int, int, int, int]


def sentences(count: int, first: int = 0) -> str:
    """Colours with a number of one or two digits in them, and a word of several pieces."""
    found = []
    for number in range(first, first + count):
        rows = [f"{COLORS[(number * 7 + i * i * 3 + i) % len(COLORS)]} O" for i in range(3 + number % 9)]
        digits = [f"{DIGITS[(number * 3 + i) % 10]} {'I' if i else 'B'}-NUM" for i in range(1 + number % 2)]
        place = number * 5 % len(rows)
        found.append("\n".join([*rows[:place], *digits, *rows[place:], "uncommons B-ODD"]))
    return "\n\n".join(found) + "\n"


def recipe(folder: Path, **run: Any) -> Path:
    (folder / "train.conll").write_text(f"-DOCSTART- O\n\n{sentences(160)}")
    (folder / "dev.conll").write_text(sentences(30, 500))
    write_vocab(folder)
    settings = {"epochs": 2, "batch": 8, "tokens_per_rank": 512, "seeds": [0]} | run
    lines = [
        *("[data]", f'train = "{folder}/train.conll"', f'dev = "{folder}/dev.conll"', f'test = "{folder}/dev.conll"'),
        *("max_length = 12", "stride = 5"),
        *("[model]", f'vocab = "{folder}/vocab.txt"', "dropout = 0.0", "attention_dropout = 0.0"),
        *("[optimizer]", "lr = 3e-3", "[run]", *(f"{name} = {json.dumps(value)}" for name, value in settings.items())),
    ]
    (folder / "small.toml").write_text("\n".join(lines) + "\n")
    return folder / "small.toml"


def task_of(folder: Path, cube: Cube, **data: Any) -> TagTask:
    files = {"train": str(folder / "train.conll"), "dev": str(folder / "dev.conll")}
    section = TagData(**{**files, "max_length": 12, "stride": 5, **data})
    settings = TagConfig(data=section, model=ModelSection(vocab="vocab.txt"), run=RunSection(tokens_per_rank=64))
    return TagTask(section, settings, WordPieceTokenizer(folder / "vocab.txt", lowercase=True), cube)


def test_it_learns_and_what_it_writes_can_be_asked(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    output = tmp_path / "out"
    assert main(["tag", str(recipe(tmp_path)), "--output", str(output)]) == 0
    told = capsys.readouterr()
    assert "tags of the scheme iob2: O, B-NUM, B-ODD, I-NUM\n" in told.err
    assert "train: 160 sentences; 1 lines -DOCSTART- are passed over\n" in told.err
    assert f'next      python -m tools.predict tag {output}/seed-0 "TEXT"' in told.out
    seed = output / "seed-0"
    result = json.loads((seed / "result.json").read_text())
    assert (result["metric"], result["metrics"]["f1"] > 0.9) == ("f1", True)
    first = json.loads((seed / "metrics.jsonl").read_text().splitlines()[0])
    assert first["loss"] == pytest.approx(math.log(4), abs=0.4), "the mean over words, of which each has four tags"
    assert result["metrics"]["test_f1"] == result["metrics"]["f1"], "of the same file"

    blocks = (seed / "predictions/dev.conll").read_text().rstrip("\n").split("\n\n")
    rows = [[line.split("\t") for line in block.split("\n")] for block in blocks]
    tags, said = ([[row[column] for row in of_text] for of_text in rows] for column in (1, 2))
    assert tag_metrics(said, tags, "iob2")[0]["f1"] == pytest.approx(result["metrics"]["f1"])
    assert "".join(f"{row[0]} {row[1]}\n" for row in rows[0]) == sentences(1, 500)
    table = (seed / "predictions/dev-labels.tsv").read_text().splitlines()
    assert [line.split("\t")[0] for line in table] == ["label", "NUM", "ODD"]
    assert (seed / "predictions/test.conll").read_bytes() == (seed / "predictions/dev.conll").read_bytes()

    facts = json.loads((seed / "model.json").read_text())
    assert (facts["problem"], facts["heads"], facts["labels"]) == ("tag", ["tags"], ["O", "B-NUM", "B-ODD", "I-NUM"])
    found = load(seed, "tag").predict([{"tokens": [row[0] for row in of_text]} for of_text in rows])
    assert [list(each.tags) for each in found] == said


def steps_on(folder: Path, shape: Shape) -> tuple[list[float], dict[str, float]]:
    return steps_of(folder, Cube(*shape))


def steps_of(folder: Path, cube: Cube, padded: bool = False) -> tuple[list[float], dict[str, float]]:
    """The micro-batches have different numbers of labels."""
    task = task_of(folder, cube)
    return small_tasks.steps_of(task, cube, lambda window: [window.text], steps=3, micro_batches=(3, 6), padded=padded)


def test_padding_changes_nothing(tmp_path: Path) -> None:
    recipe(tmp_path)
    losses, metrics = steps_of(tmp_path, Cube.single())
    padded, same = steps_of(tmp_path, Cube.single(), padded=True)
    assert losses[0] > losses[-1]
    assert padded == pytest.approx(losses, abs=1e-5)
    assert same == pytest.approx(metrics)


@pytest.mark.slow
@pytest.mark.parametrize("shape", [(2, 2, 2, 1), (1, 1, 2, 2)], ids=name_of)
def test_steps_and_metrics_do_not_depend_on_the_cube(shape: Shape, tmp_path: Path) -> None:
    recipe(tmp_path)
    losses, metrics = steps_of(tmp_path, Cube.single())
    for found, measured in run_ranks(ranks_of(shape), steps_on, tmp_path, shape):
        assert found == pytest.approx(losses, abs=1e-5)
        assert measured == pytest.approx(metrics)


def test_the_loss_is_the_mean_over_labelled_words(tmp_path: Path) -> None:
    recipe(tmp_path)
    cube = Cube.single()
    task = task_of(tmp_path, cube)
    words = (tmp_path / "train.conll").read_text().count(" ") - 1  # of -DOCSTART-
    assert sum(example.targets for example in task.train) == words, "each word in one window"
    every = task_of(tmp_path, cube, label_pieces="all")
    assert sum(example.targets for example in every.train) == words + 2 * 160, "the later pieces of uncommons too"


def test_what_cannot_be_used(tmp_path: Path) -> None:
    recipe(tmp_path)
    cube = Cube.single()
    (tmp_path / "other.conll").write_text("red O\n\n7 B-DATE\n")
    with pytest.raises(ValueError, match=r"other\.conll line 3: the tag 'B-DATE' is none of those that are learnt: O"):
        task_of(tmp_path, cube, test=str(tmp_path / "other.conll"))
    labels = ("O", "B-NUM", "I-NUM", "B-ODD", "B-DATE")
    assert task_of(tmp_path, cube, test=str(tmp_path / "other.conll"), labels=labels).labels == labels
    (tmp_path / "other.conll").write_text("\u200b O\n")
    with pytest.raises(ValueError, match=r"other\.conll line 1: no word has a token"):
        task_of(tmp_path, cube, test=str(tmp_path / "other.conll"))
    (tmp_path / "other.conll").write_text("red O\n\u200b O\n[SEP] O\n")
    notes = task_of(tmp_path, cube, test=str(tmp_path / "other.conll")).notes[-1]
    assert notes.startswith("test: 1 sentences; 1 words have no token")
    assert "1 texts have the names of special tokens" in notes
    (tmp_path / "other.conll").write_text(f"red O\n{'red' * 34} O\n")
    notes = task_of(tmp_path, cube, test=str(tmp_path / "other.conll")).notes[-1]
    assert "102 of 106 characters are unknown to the tokenizer, 102 of them in words of more than 100" in notes
    (tmp_path / "other.conll").write_text("red O\n")
    with pytest.raises(ValueError, match=r"has 1 different tags, and two are needed. Got \['O'\]"):
        task_of(tmp_path, cube, train=str(tmp_path / "other.conll"))


def test_a_file_without_tags_is_tagged(tmp_path: Path) -> None:
    recipe(tmp_path)
    (tmp_path / "words.conll").write_text("red\n\u200b\n\n7\n")
    cube = Cube.single()
    cube.manual_seed(0)
    task = task_of(tmp_path, cube, test=str(tmp_path / "words.conll"), test_tags=False)
    model = task.make_model(CONFIG, cube)
    found = task.evaluate(model)
    assert (task.parts, list(found.outputs)) == (("dev", "test"), ["dev"])
    best = dataclasses.replace(found, outputs={**found.outputs, "test": task.outputs(model, "test")})
    files = task.write_predictions(best, tmp_path)
    assert [path.name for path in files] == ["dev.conll", "dev-labels.tsv", "test.conll"]
    rows = [line.split("\t") for line in files[-1].read_text().split("\n")]
    assert [row[0] for row in rows] == ["red", "\u200b", "", "7", ""]
    assert rows[1] == ["\u200b", "O"]
    assert rows[0][1] in task.labels


def test_plain_tags_are_measured_by_accuracy(tmp_path: Path) -> None:
    recipe(tmp_path)
    for name in ("train", "dev"):
        text = (tmp_path / f"{name}.conll").read_text()
        (tmp_path / f"{name}.conll").write_text(text.replace("B-", "").replace("I-", "").replace(" O\n", " COLOR\n"))
    task = task_of(tmp_path, Cube.single())
    assert (task.best, task.labels) == ("accuracy", ("COLOR", "NUM", "ODD"))
    known = task._parts["dev"].tags
    assert known is not None
    for odd, doubted in ((0, True), (1, False)):
        tags = [
            WordTags(
                numbers=np.zeros(len(each), np.int64),
                probabilities=np.ones(len(each), np.float32),
                shared=np.zeros(len(each), np.bool_),
            )
            for each in known
        ]
        tags[0].numbers[0] = odd
        doubts = task.doubts(Evaluation(metrics={}, outputs={"dev": tags}))
        assert bool(doubts) is doubted
        assert not doubted or doubts[0].startswith("all words of dev are tagged 'COLOR'.")


@pytest.mark.slow
def test_the_embedded_task_needs_no_file(tmp_path: Path) -> None:
    recipe = Path(__file__).parents[3] / "launch/recipes/finetune/embedded-tags.toml"
    assert parse(["tag", str(recipe)]).settings.data.train == "embedded"
    assert main(["tag", str(recipe), "--output", str(tmp_path / "run"), "--run.epochs", "1"]) == 0
    found = json.loads((tmp_path / "run/results.json").read_text())["mean"]
    assert found["f1"] > 0.3, "what is tagged nowhere has 0"
