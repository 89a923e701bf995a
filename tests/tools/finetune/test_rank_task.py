"""`python -m tools.finetune rank`: learns, measures and writes, the same on any cube."""

from __future__ import annotations

import json
import math
from contextlib import redirect_stderr, redirect_stdout
from io import StringIO
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from models.bert.huggingface import open_weights
from models.bert.text_batches import collate_texts
from tensor3d import Cube
from tests.ranks import run_ranks
from tests.single_device_reference import ranks_of
from tests.tools.finetune import small_tasks
from tests.tools.finetune.small_tasks import CONFIG
from tests.tools.squad.small import COLORS, DIGITS, small_tokenizer, write_vocab
from tools.convert.__main__ import main as convert
from tools.finetune import rank_data
from tools.finetune.__main__ import RankConfig, main
from tools.finetune.config import ModelSection, RunSection
from tools.finetune.data import embedded_rows
from tools.finetune.rank_data import RankData
from tools.finetune.rank_task import RankTask
from tools.finetune.ranking_metrics import in_rank_order, ranking_metrics
from tools.predict import load

Shape = tuple[int, int, int, int]


def rows(count: int, first: int = 0) -> str:
    """The passages with more digits are the better ones: a grade is their number."""
    found = []
    for number in range(first, first + count):
        passages, grades = [], []
        for place in range(2 + number % 4):
            words = [COLORS[(number * 7 + place * 3 + i * i) % len(COLORS)] for i in range(2 + (number + place) % 4)]
            digits = (number + place) % 3
            words[1:1] = [DIGITS[(number + 3 * i) % 10] for i in range(digits)]
            passages.append(" ".join(words))
            grades.append(digits)
        found.append(json.dumps({"query": "what number", "passages": passages, "grades": grades}) + "\n")
    return "".join(found)


def recipe(folder: Path, **run: Any) -> Path:
    (folder / "train.jsonl").write_text(rows(120))
    (folder / "dev.jsonl").write_text(rows(12, 500) + json.dumps({"query": "the", "passages": ["red"], "grades": [0]}))
    write_vocab(folder)
    settings = {"epochs": 2, "batch": 8, "tokens_per_rank": 512, "seeds": [0]} | run
    lines = [
        *("[data]", f'train = "{folder}/train.jsonl"', f'dev = "{folder}/dev.jsonl"', f'test = "{folder}/dev.jsonl"'),
        *('loss = "listnet"', "max_length = 24", "[model]", f'vocab = "{folder}/vocab.txt"', "std = 0.05"),
        *("dropout = 0.0", "attention_dropout = 0.0", "[optimizer]", "lr = 3e-3"),
        *("[run]", *(f"{name} = {json.dumps(value)}" for name, value in settings.items())),
    ]
    (folder / "small.toml").write_text("\n".join(lines) + "\n")
    return folder / "small.toml"


def task_of(folder: Path, cube: Cube, tokens: int = 64, **data: Any) -> RankTask:
    section = RankData(
        **{
            "train": str(folder / "train.jsonl"),
            "dev": str(folder / "dev.jsonl"),
            "bad": "skip",
            "max_length": 24,
            **data,
        }
    )
    settings = RankConfig(data=section, model=ModelSection(vocab="vocab.txt"), run=RunSection(tokens_per_rank=tokens))
    return RankTask(section, settings, small_tokenizer(folder), cube)


@pytest.fixture(scope="module")
def done(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str, str]:
    """The folder of a whole run, with what it told."""
    folder = tmp_path_factory.mktemp("rank")
    with redirect_stdout(StringIO()) as out, redirect_stderr(StringIO()) as err:
        assert main(["rank", str(recipe(folder)), "--output", str(folder / "out")]) == 0
    return folder, out.getvalue(), err.getvalue()


def test_it_learns_and_what_it_writes_can_be_asked(done: tuple[Path, str, str]) -> None:
    folder, out, err = done
    assert "dev: 13 queries with 43 passages; 1 without a relevant passage, which no metric counts\n" in err
    seed = folder / "out/seed-0"
    assert f'next      python -m tools.predict rank {seed} "QUERY" "PASSAGE" "PASSAGE"' in out
    result = json.loads((seed / "result.json").read_text())
    assert (result["metric"], result["metrics"]["ndcg@10"] > 0.9) == ("ndcg@10", True)
    assert result["metrics"]["test_mrr@10"] == result["metrics"]["mrr@10"], "of the same file"
    assert "| task | rank |" in (seed / "README.md").read_text()

    table = [line.split("\t") for line in (seed / "predictions/dev.tsv").read_text().splitlines()]
    assert table[0] == ["query", "passage", "rank", "score", "grade"]
    grades = [np.array([float(row[4]) for row in table[1:] if row[0] == str(query)]) for query in range(13)]
    found = ranking_metrics([(own, own) for own in grades], gain="linear").metrics
    assert found["ndcg@10"] == pytest.approx(result["metrics"]["ndcg@10"], abs=1e-9), "in the order that is written"
    assert [row[2] for row in table[1:3]] == ["1", "2"]

    facts = json.loads((seed / "model.json").read_text())
    assert (facts["problem"], facts["heads"], facts["labels"]) == ("rank", ["pooler", "classifier"], None)
    queries = [json.loads(line) for line in (folder / "dev.jsonl").read_text().splitlines()]
    answers = load(seed, "rank").predict(queries)
    said = {(str(query), str(each.index)): each.score for query, one in enumerate(answers) for each in one.passages}
    assert said == pytest.approx({(row[0], row[1]): float(row[3]) for row in table[1:]}, abs=1e-4)


@pytest.mark.slow
def test_a_start_from_an_exported_folder_takes_its_head(done: tuple[Path, str, str], tmp_path: Path) -> None:
    folder, *_ = done
    assert convert(["to-hf", str(folder / "out/seed-0"), str(tmp_path / "hf")]) == 0
    more = ["--model.start-from", str(tmp_path / "hf"), "--model.vocab", "None", "--run.epochs", "1"]
    more += ["--run.batch", "100", "--optimizer.lr", "1e-9", "--output", str(tmp_path / "more")]
    assert main(["rank", str(folder / "small.toml"), *more]) == 0
    before, after = (
        json.loads((each / "seed-0/result.json").read_text())["metrics"] for each in (folder / "out", tmp_path / "more")
    )
    assert after == pytest.approx(before, abs=1e-6)
    assert open_weights(tmp_path / "more/seed-0").problem == "rank"


def steps_on(folder: Path, shape: Shape) -> tuple[list[float], dict[str, float]]:
    return steps_of(folder, Cube(*shape))


def steps_of(folder: Path, cube: Cube, padded: bool = False) -> tuple[list[float], dict[str, float]]:
    task = task_of(folder, cube, loss="ranknet")
    return small_tasks.steps_of(task, cube, lambda query: query.texts, steps=2, micro_batches=(2, 3), padded=padded)


def test_padding_changes_nothing(tmp_path: Path) -> None:
    recipe(tmp_path)
    losses, metrics = steps_of(tmp_path, Cube.single())
    padded, same = steps_of(tmp_path, Cube.single(), padded=True)
    assert padded == pytest.approx(losses, abs=1e-5)
    assert same == pytest.approx(metrics)


@pytest.mark.slow
@pytest.mark.parametrize(
    "shape",
    [
        (1, 1, 2, 2),
        pytest.param((2, 2, 2, 1), marks=pytest.mark.long(reason="test_rank_losses.py has its gradients on 2x2x2")),
    ],
)
def test_steps_and_metrics_do_not_depend_on_the_cube(shape: Shape, tmp_path: Path) -> None:
    recipe(tmp_path)
    losses, metrics = steps_of(tmp_path, Cube.single())
    for found, measured in run_ranks(ranks_of(shape), steps_on, tmp_path, shape):
        assert found == pytest.approx(losses, abs=1e-5)
        assert measured == pytest.approx(metrics)


def test_what_the_loss_is_the_mean_of_and_what_is_told(tmp_path: Path) -> None:
    recipe(tmp_path)
    cube = Cube.single()
    task = task_of(tmp_path, cube, tokens=32)
    passages = sum(len(json.loads(line)["passages"]) for line in (tmp_path / "train.jsonl").read_text().splitlines())
    assert sum(example.targets for example in task.train) == passages
    assert max(example.target.max() for example in task.train) == 1, "a share of the highest grade"
    assert any("grades are learnt as shares of the highest one, 2" in note for note in task.notes)
    large = sum(example.tokens > 32 for example in task.train)
    assert f"train: {large:,} queries have more tokens than a micro-batch of 32" in task.notes[-1]
    of_lists = task_of(tmp_path, cube, loss="softmax")
    assert {example.targets for example in of_lists.train} == {1}
    cube.manual_seed(0)
    model = task.make_model(CONFIG, cube)
    loss = task.loss(model, collate_texts(task.train[0].texts, cube), task.train[:1], task.train[0].targets)
    assert float(loss.detach()) == pytest.approx(math.log(2), abs=0.7)


def test_a_model_that_says_always_the_same_is_not_good(tmp_path: Path) -> None:
    recipe(tmp_path)
    cube = Cube.single()
    task = task_of(tmp_path, cube)
    model = task.make_model(CONFIG, cube)
    torch.nn.init.zeros_(model.classifier.weight)
    lowest = [in_rank_order(np.zeros(len(own)), own) for own in task._parts["dev"].grades or ()]
    worst = ranking_metrics([(own, own) for own in lowest]).metrics
    assert task.evaluate(model).metrics == pytest.approx(worst)
    torch.nn.init.constant_(model.classifier.bias, math.nan)
    with pytest.raises(FloatingPointError, match="scores of passages are not finite"):
        task.evaluate(model)


def test_what_cannot_be_used(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = recipe(tmp_path)
    (tmp_path / "none.jsonl").write_text('{"query": "the", "passages": ["red"], "grades": [0]}\n')
    with pytest.raises(ValueError, match=r"none\.jsonl has no query with a relevant passage"):
        task_of(tmp_path, Cube.single(), dev=str(tmp_path / "none.jsonl"))
    assert main(["rank", str(path), "--run.metric", "f1", "--output", str(tmp_path / "out")]) == 2
    assert "run.metric of rank is one of ndcg@10, mrr@10. Got 'f1'" in capsys.readouterr().err
    assert not (tmp_path / "out/finetune.json").exists()
    without = task_of(tmp_path, Cube.single(), test=str(tmp_path / "none.jsonl"), test_grades=False)
    assert without.parts == ("dev", "test")


@pytest.mark.slow
def test_the_embedded_task_needs_no_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rank_data, "embedded_rows", lambda part: list(embedded_rows(part))[::8])
    path = Path(__file__).parents[3] / "launch/recipes/finetune/embedded-rank.toml"
    assert main(["rank", str(path), "--output", str(tmp_path / "run")]) == 0
    found = json.loads((tmp_path / "run/results.json").read_text())["mean"]
    assert found["mrr@10"] > 0.3, "what is always in the worst order has a quarter"
    (train,) = {tuple(each.grades) for each in rank_data.read_candidates(RankData(), "train")}
    assert train == (1, 0, 0, 0)
