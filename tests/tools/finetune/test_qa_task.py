"""`python -m tools.finetune answer`: learns, measures as SQuAD's scripts do, and writes their files."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from models.bert.text_batches import collate_texts
from tensor3d import Cube
from tests.dtensors import LocalSGD
from tests.ranks import run_ranks
from tests.tools.finetune.small_tasks import CONFIG
from tests.tools.squad.small import digit_questions, entry, squad, write, write_vocab
from tools.convert.__main__ import main as convert
from tools.corpus.tokenizers.wordpiece import WordPieceTokenizer
from tools.finetune.__main__ import AnswerConfig, main
from tools.finetune.config import ModelSection, RunSection
from tools.finetune.qa_task import AnswerData, AnswerTask
from tools.squad import AnswerSettings
from tools.squad.__main__ import main as squad_main
from tools.squad.dataset import read_questions
from tools.squad.scoring import score
from tools.training.config import read_recipe


def recipe(folder: Path, *, impossible: bool = False, **run: Any) -> Path:
    """A recipe of a small model that is to learn to find digits among colours."""
    write(folder / "train.json", digit_questions(240, impossible=impossible))
    write(folder / "dev.json", digit_questions(40, impossible=impossible, first=500))
    write_vocab(folder)
    settings = {"epochs": 3, "batch": 8, "tokens_per_rank": 512, "evaluate_every": 90, "seeds": [0]} | run
    lines = [
        *("[data]", f'train = "{folder}/train.json"', f'dev = "{folder}/dev.json"', f'test = "{folder}/dev.json"'),
        *("max_length = 24", "stride = 4", "question_length = 8", "answer_length = 3", "n_best = 5"),
        *("[model]", f'vocab = "{folder}/vocab.txt"', "dropout = 0.0", "attention_dropout = 0.0"),
        *("[optimizer]", "lr = 1e-3", "[run]", *(f"{name} = {json.dumps(value)}" for name, value in settings.items())),
    ]
    (folder / "small.toml").write_text("\n".join(lines) + "\n", encoding="utf-8")
    return folder / "small.toml"


def task_of(folder: Path, cube: Cube, **data: Any) -> AnswerTask:
    section = AnswerData(
        train=str(folder / "train.json"),
        dev=str(folder / "dev.json"),
        **({"max_length": 24, "stride": 4, "question_length": 8} | data),
    )
    settings = AnswerConfig(data=section, model=ModelSection(vocab="vocab.txt"), run=RunSection(tokens_per_rank=64))
    return AnswerTask(section, settings, WordPieceTokenizer(folder / "vocab.txt", lowercase=True), cube)


@pytest.mark.slow
def test_it_learns_and_writes_what_the_scripts_read(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    output = tmp_path / "out"
    assert main(["answer", str(recipe(tmp_path)), "--output", str(output)]) == 0
    told = capsys.readouterr()
    assert "train: 240 questions of 240, 2" in told.err
    assert " windows to train on, " in told.err
    assert f'next      python -m tools.predict answer {output}/seed-0 "QUESTION" "CONTEXT"' in told.out
    folder = output / "seed-0"
    result = json.loads((folder / "result.json").read_text())
    assert result["metric"] == "f1"
    assert result["metrics"]["f1"] > 90, "guessing gives less than 20"

    predictions = folder / "predictions" / "predictions.json"
    assert squad_main(["score", str(tmp_path / "dev.json"), str(predictions)]) == 0
    assert json.loads(capsys.readouterr().out) == pytest.approx(result["metrics"]), "what it says it scores"
    best = json.loads((folder / "predictions" / "nbest_predictions.json").read_text())
    for number, text in json.loads(predictions.read_text()).items():
        assert best[number][0]["text"] == text
        assert set(best[number][0]) == {"text", "probability", "start_logit", "end_logit"}
        assert sum(answer["probability"] for answer in best[number]) == pytest.approx(1.0)
    assert (folder / "predictions" / "test-predictions.json").read_text() == predictions.read_text()
    assert not (folder / "predictions" / "null_odds.json").exists()

    facts = json.loads((folder / "model.json").read_text())
    assert (facts["problem"], facts["heads"]) == ("answer", ["answers"])
    wanted = AnswerSettings(max_length=24, stride=4, question_length=8, answer_length=3)
    assert AnswerSettings.from_facts(facts["facts"]) == wanted
    capsys.readouterr()
    assert convert(["to-hf", str(folder), str(tmp_path / "hf")]) == 0
    assert "answers of at most 3 tokens, in windows of 24 that begin every 4, questions of at most 8: these stay" in (
        capsys.readouterr().out
    )


@pytest.mark.slow
def test_it_learns_that_there_may_be_no_answer(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    output = tmp_path / "out"
    path = recipe(tmp_path, impossible=True)
    assert main(["answer", str(path), "--output", str(output)]) == 0
    folder = output / "seed-0" / "predictions"
    metrics = json.loads((output / "seed-0" / "result.json").read_text())["metrics"]
    assert metrics["best_f1"] == metrics["f1"]
    assert metrics["best_f1"] > 90, "silence gives a third"
    capsys.readouterr()
    files = [str(tmp_path / "dev.json"), str(folder / "predictions.json")]
    assert squad_main(["score", *files, "--null-odds", str(folder / "null_odds.json"), "--threshold", "1e9"]) == 0
    scores = json.loads(capsys.readouterr().out)
    assert {name: metrics[name] for name in ("exact", "f1", "HasAns_f1", "NoAns_f1")} == pytest.approx(
        {name: scores[name] for name in ("exact", "f1", "HasAns_f1", "NoAns_f1")}
    )
    facts = json.loads((output / "seed-0" / "model.json").read_text())["facts"]
    assert AnswerSettings.from_facts(facts).no_answer
    assert AnswerSettings.from_facts(facts).null_threshold == metrics["best_f1_thresh"]


def steps_on(folder: Path, shape: tuple[int, int, int]) -> tuple[list[float], dict[str, float]]:
    return steps_of(folder, Cube(*shape))


def steps_of(folder: Path, cube: Cube) -> tuple[list[float], dict[str, float]]:
    """Losses of a few steps, and scores, without a loop around them."""
    task = task_of(folder, cube)
    cube.manual_seed(0)
    model = task.make_model(CONFIG, cube)
    optimizer = LocalSGD(model.parameters(), lr=0.5)
    losses = []
    for step in range(3):
        examples = [task.train[(step * 5 + place) % len(task.train)] for place in range(7)]
        loss = task.loss(model, collate_texts([example.text for example in examples], cube), examples, len(examples))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(loss.detach()))
    return losses, task.evaluate(model).metrics


@pytest.mark.slow
@pytest.mark.parametrize(
    "shape",
    [(1, 2, 1), pytest.param((2, 2, 2), marks=pytest.mark.long(reason="eight ranks train what two do"))],
    ids=str,
)
def test_steps_and_scores_do_not_depend_on_the_cube(shape: tuple[int, int, int], tmp_path: Path) -> None:
    recipe(tmp_path)
    world = shape[0] * shape[1] * shape[2]
    results = run_ranks(world, steps_on, tmp_path, shape)
    losses, scores = steps_of(tmp_path, Cube.single())
    assert losses[0] > losses[-1]
    for found, measured in results:
        assert found == pytest.approx(losses, abs=1e-5)
        assert measured == pytest.approx(scores)


def test_subsets_and_what_cannot_be_used(tmp_path: Path) -> None:
    cube = Cube.single()
    recipe(tmp_path)
    few = task_of(tmp_path, cube, max_train_questions=20, max_dev_questions=3)
    assert 20 <= len(few.train) < 60
    assert [len(text.text.ids) for text in few.train[1:3]] == [len(few.train[place].text.ids) for place in (1, 2)]

    lost = entry("q1", "what?", (" ", 3))
    lost["answers"] = [{"text": "\u0001", "answer_start": 3}]
    write(tmp_path / "train.json", squad(("red \u0001 blue", [lost, entry("q2", "what?", ("red", 0))])))
    assert len(task_of(tmp_path, cube).train) == 1, "no token has a character of the first answer"

    write(tmp_path / "train.json", digit_questions(6, impossible=True))
    with pytest.raises(ValueError, match=r"train\.json is SQuAD v2\.0 .*dev\.json is v1\.1"):
        task_of(tmp_path, cube)
    write(tmp_path / "dev.json", digit_questions(6, impossible=True))
    check_the_found_threshold(task_of(tmp_path, cube), tmp_path, cube)


def check_the_found_threshold(task: AnswerTask, folder: Path, cube: Cube) -> None:
    """What is delivered has the scores that are told, also where it is known no better than by silence."""
    cube.manual_seed(0)
    found = task.evaluate(task.make_model(CONFIG, cube))
    assert found.metrics[task.best] == found.metrics["f1"] == found.metrics["best_f1"] >= 100 / 3
    settings = AnswerSettings.from_facts(found.facts)
    assert settings.null_threshold == found.metrics["best_f1_thresh"] != 0.0
    task.write_predictions(found, folder)
    said = json.loads((folder / "predictions.json").read_text())
    scores = score(read_questions(folder / "dev.json").questions, said, impossible=True).summary(impossible=True)
    assert (scores["f1"], scores["exact"]) == (found.metrics["f1"], found.metrics["exact"])
    assert not [name for name in found.metrics if name.endswith("total")]
    given = task_of(folder, cube, null_threshold=-0.5)
    facts = given.evaluate(given.make_model(CONFIG, cube)).facts
    assert AnswerSettings.from_facts(facts).null_threshold == -0.5


@pytest.mark.parametrize("name", ["squad.toml", "squad-small.toml"])
def test_the_shipped_recipes_are_those_of_the_paper(name: str) -> None:
    found = read_recipe(AnswerConfig, Path(__file__).parents[3] / "launch" / "recipes" / "finetune" / name)
    assert found.data.settings(no_answer=False) == AnswerSettings()
    assert (found.data.max_train_questions > 0) == (name == "squad-small.toml")


def test_a_bad_recipe_is_refused_in_words(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = recipe(tmp_path)
    output = ["--output", str(tmp_path / "out")]
    for more, message in (
        (["--data.dev", ""], "data.dev must name a file of SQuAD"),
        (["--data.max-length", "11"], "data.max_length must be at least question_length=8"),
        (["--data.n-best", "0"], "data.n_best must be at least 1. Got 0"),
        (["--run.metric", "accuracy"], "run.metric of answer is one of f1, exact_match here. Got 'accuracy'"),
        (["--data.train", str(tmp_path / "none.json")], "none.json"),
    ):
        try:
            status = main(["answer", str(path), *output, *more])
        except SystemExit as ended:  # tyro's own refusal
            status = int(ended.code or 0)
        assert status == 2, more
        assert message in " ".join(capsys.readouterr().err.replace("│", " ").split()), more


def test_answers_that_no_window_holds_as_a_whole_are_told(tmp_path: Path) -> None:
    """Windows one behind another, of which the second begins inside of the first answer."""
    recipe(tmp_path)
    context = f"{'the ' * 19}red blue green house {'the ' * 20}"
    answers = ("red blue green house", "house")
    asked = [entry(f"q{n}", "what", (answer, context.index(answer))) for n, answer in enumerate(answers)]
    write(tmp_path / "train.json", squad((context, asked)))
    for stride, told in ((24, "train: 1 answers lie in no window as a whole, and"), (10, "")):
        notes = task_of(tmp_path, Cube.single(), stride=stride).notes
        assert [note.startswith(told) for note in notes[2:]] == ([True] if told else [])


def test_what_the_tokenizer_does_not_know_of_contexts_is_told(tmp_path: Path) -> None:
    """A context counts once, however many questions it has."""
    recipe(tmp_path)
    asked = [entry(f"l{n}", "red x", ("7", 4)) for n in range(2)]
    write(tmp_path / "dev.json", squad(("red " + "7" * 104, asked)))
    train, dev, *_ = task_of(tmp_path, Cube.single()).notes
    assert dev.startswith("dev: 2 questions of 2, 2 windows; 106 of 118 characters are unknown to the tokenizer, 104 ")
    assert "unknown" not in train
