"""Several labels a text: metrics as scikit-learn's, thresholds, files, and a whole run with what it predicts."""

from __future__ import annotations

import json
import random
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from models.bert import BertConfig
from tensor3d import Cube
from tools.convert.__main__ import main as convert
from tools.corpus.tokenizers import Tokenizer
from tools.corpus.tokenizers.folder import open_tokenizer
from tools.finetune.__main__ import TextConfig, main
from tools.finetune.config import OptimizerSection, RunSection
from tools.finetune.data import INNER_WORDS, TextData, embedded_rows
from tools.finetune.labels_task import LabelsTask, classify_task
from tools.finetune.metrics import LABEL_METRICS, class_metrics, fitted_thresholds, label_metrics, of_labels
from tools.finetune.tasks import ComparedTask, Evaluation
from tools.finetune.text_task import ClassifyTask, RegressTask
from tools.predict import load

WORDS = ["film", "actor", "plot", "scene", "the", "a", "very", "was"]
TELLS = {"fun": "laugh", "sad": "tears", "war": "guns"}
"""Label and the word that tells it."""
VOCAB = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *WORDS, *TELLS.values()]
SMALL = BertConfig(layers=1, hidden=8, heads=1, vocab=len(VOCAB), positions=128)


# --- metrics ----------------------------------------------------------------------------------------------------------


def drawn(seed: int, texts: int = 40) -> tuple[Any, Any]:
    """Probabilities, some of them equal, and labels: the last one holds nowhere, the one before everywhere."""
    draw = np.random.default_rng(seed)
    targets = draw.random((texts, 5)) < [0.5, 0.2, 0.7, 1.0, 0.0]
    chances = np.clip(draw.normal(0.3 + 0.3 * targets, 0.25), 0.01, 0.99).round(2).astype(np.float32)
    return chances, targets


@pytest.mark.parametrize("seed", range(5))
def test_metrics_are_scikit_learns(seed: int) -> None:
    from sklearn import metrics  # takes every process that collects tests half a second

    chances, targets = drawn(seed)
    thresholds = np.array([0.5, 0.4, 0.6, 0.5, 2.0])
    found, said = label_metrics(chances, targets, thresholds), chances >= thresholds
    assert found["micro_f1"] == pytest.approx(metrics.f1_score(targets, said, average="micro"))
    assert found["macro_f1"] == pytest.approx(metrics.f1_score(targets[:, :4], said[:, :4], average="macro"))
    assert found["auc"] == pytest.approx(metrics.roc_auc_score(targets[:, :3], chances[:, :3], average="macro"))
    wanted = metrics.average_precision_score(targets[:, :4], chances[:, :4], average="macro")
    assert found["average_precision"] == pytest.approx(wanted)
    assert found["accuracy"] == metrics.accuracy_score(targets, said)
    rows = of_labels(chances, targets, thresholds)
    assert [row["texts"] for row in rows] == targets.sum(0).tolist()
    assert rows[0]["precision"] == pytest.approx(metrics.precision_score(targets[:, 0], said[:, 0]))
    assert np.isnan([rows[4]["f1"], rows[4]["auc"], rows[4]["average_precision"], rows[3]["auc"]]).all()


@pytest.mark.parametrize("seed", range(5))
def test_thresholds_have_the_best_f1_there_is(seed: int) -> None:
    from sklearn import metrics  # takes every process that collects tests half a second

    chances, targets = drawn(seed)
    found = fitted_thresholds(chances, targets)
    assert found[4] == 0.5
    for label in range(4):
        own, holds = chances[:, label], targets[:, label]
        best = max(metrics.f1_score(holds, own >= least) for least in np.unique(own))
        assert metrics.f1_score(holds, own >= found[label]) == pytest.approx(best)
        assert not np.any(np.isclose(own, found[label], atol=1e-4)), "between two of them"


def test_one_label_has_the_f1_of_what_holds() -> None:
    from sklearn import metrics  # takes every process that collects tests half a second

    chances, targets = drawn(0)
    said = chances[:, 1] >= 0.4
    found = label_metrics(chances[:, 1:2], targets[:, 1:2], np.array([0.4]))
    wanted = metrics.f1_score(targets[:, 1], said)
    assert wanted != pytest.approx(metrics.accuracy_score(targets[:, 1], said))
    assert (found["micro_f1"], found["macro_f1"]) == pytest.approx((wanted, wanted))


def test_nothing_right_is_no_nan() -> None:
    none = np.zeros((3, 2), dtype=np.float32)
    assert label_metrics(none, none > 1, np.full(2, 0.5)) == dict.fromkeys(LABEL_METRICS, 0.0) | {"accuracy": 1.0}


# --- files ------------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    file = tmp_path_factory.mktemp("vocab") / "vocab.txt"
    file.write_text("\n".join(VOCAB) + "\n")
    return open_tokenizer("wordpiece", file, lowercase=True)


def task_of(path: Path, tokenizer: Tokenizer, **changes: Any) -> Any:
    data = TextData(**{"train": str(path), "dev": str(path), "multi_label": True, **changes})
    return classify_task(data, TextConfig(data=data, run=RunSection()), tokenizer, Cube.single())


@pytest.mark.parametrize(
    ("name", "text", "changes"),
    [
        ("a.tsv", "sentence\tlabel\na film\tsad, fun\nplot\t\nscene\tfun\n", {}),
        ("a.csv", 'sentence,label\na film,"fun,sad"\nplot,""\nscene,fun\n', {}),
        ("a.tsv", "sentence\tlabel\na film\tsad|fun\nplot\t\nscene\tfun\n", {"separator": "|"}),
        (
            "a.jsonl",
            '{"sentence": "a film", "label": ["sad", "fun"]}\n{"sentence": "plot", "label": []}\n'
            '{"sentence": "scene", "label": "fun"}\n',
            {},
        ),
    ],
)
def test_labels_of_files(tmp_path: Path, tokenizer: Tokenizer, name: str, text: str, changes: dict[str, Any]) -> None:
    (tmp_path / name).write_text(text)
    task = task_of(tmp_path / name, tokenizer, **changes)
    assert isinstance(task, LabelsTask)
    assert task.labels == ("fun", "sad")
    assert [example.target.tolist() for example in task.train] == [[1, 1], [0, 0], [1, 0]]
    assert {example.targets for example in task.train} == {1.0}
    skipping = task_of(tmp_path / name, tokenizer, bad="skip", **changes)
    assert len(skipping.train) == 3, "a text of no label is a text"


@pytest.mark.parametrize(
    ("text", "changes", "message"),
    [
        ("sentence\tlabel\na\tfun,,sad\n", {}, r"a\.tsv line 2: labels must be different, and none of them empty"),
        ("sentence\tlabel\na\tfun,fun\n", {}, r"a\.tsv line 2: labels must be different"),
        ("sentence\tlabel\na\t\n", {}, r"a\.tsv has no label in the column 'label'"),
        ("sentence\tlabel\na\tfun,odd\n", {"labels": ("fun", "sad")}, r"line 2: the label 'odd' is none of.*fun, sad"),
        ("sentence\tlabel\na\tfun\n", {"separator": " "}, r"data\.separator must be a mark that is no space"),
        ("sentence\tlabel\na\tfun\n", {"labels": ("a,b", "c")}, r"data\.separator.*'a,b'"),
        ("sentence\tlabel\na\tfun\n", {"label_smoothing": 1.0}, r"label_smoothing.*below 1\. Got 1\.0"),
    ],
)
def test_what_no_labels_are(
    tmp_path: Path, tokenizer: Tokenizer, text: str, changes: dict[str, Any], message: str
) -> None:
    (tmp_path / "a.tsv").write_text(text)
    with pytest.raises(ValueError, match=message):
        task_of(tmp_path / "a.tsv", tokenizer, **changes)


def test_lists_of_json(tmp_path: Path, tokenizer: Tokenizer) -> None:
    for value, message in (('["a", "b,c"]', "'b,c'"), ('["a", " "]', "an empty label|' '"), ('[["a"]]', "a text or a")):
        (tmp_path / "a.jsonl").write_text(f'{{"sentence": "film", "label": {value}}}\n')
        with pytest.raises(ValueError, match=message):
            task_of(tmp_path / "a.jsonl", tokenizer)
    (tmp_path / "a.jsonl").write_text('{"sentence": "film", "label": ["a"]}\n')
    with pytest.raises(ValueError, match="'label' must be a text or a number"):
        task_of(tmp_path / "a.jsonl", tokenizer, multi_label=False)


def test_one_label_of_several_that_may_hold(tmp_path: Path, tokenizer: Tokenizer) -> None:
    (tmp_path / "a.tsv").write_text("sentence\tlabel\nfilm\tfun\nplot\t\n")
    task = task_of(tmp_path / "a.tsv", tokenizer, labels=("fun",))
    assert (task.labels, [example.target.tolist() for example in task.train]) == (("fun",), [[1], [0]])


@pytest.mark.parametrize("multi_label", [True, False])
def test_scores_that_are_none_are_no_class_either(tmp_path: Path, tokenizer: Tokenizer, multi_label: bool) -> None:
    """Of nan the largest is the first class, and accuracy would be a number."""
    (tmp_path / "a.tsv").write_text("sentence\tlabel\nfilm\tfun\nplot\tsad\n")
    task = task_of(tmp_path / "a.tsv", tokenizer, multi_label=multi_label)
    model = task.make_model(SMALL, Cube.single())
    torch.nn.init.constant_(model.classifier.bias, torch.nan)
    with pytest.raises(FloatingPointError, match=r"scores of texts are not finite.*Lower optimizer\.lr"):
        task.evaluate(model)


def test_metrics_that_are_missing_are_missed_before_training(
    tmp_path: Path, tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "a.tsv").write_text("sentence\tlabel\nfilm\tfun\n")
    monkeypatch.setitem(sys.modules, "sklearn", None)
    with pytest.raises(ValueError, match="needs scikit-learn"):
        task_of(tmp_path / "a.tsv", tokenizer)


def test_balanced_classes(tmp_path: Path, tokenizer: Tokenizer) -> None:
    (tmp_path / "a.tsv").write_text("sentence\tlabel\nfilm\ta\nplot\tb\nscene\tb\nactor\tb\n")
    single = task_of(tmp_path / "a.tsv", tokenizer, multi_label=False, class_weights="balanced")
    assert isinstance(single, ClassifyTask)
    assert single.weights is not None
    assert single.weights.tolist() == pytest.approx([2.0, 2 / 3]), "texts over classes times texts of the class"
    assert [example.targets for example in single.train] == pytest.approx([2.0, 2 / 3, 2 / 3, 2 / 3])
    several = task_of(tmp_path / "a.tsv", tokenizer, class_weights="balanced")
    assert several.weights.tolist() == pytest.approx([3.0, 1 / 3])
    named = ("a", "b", "never")
    single = task_of(tmp_path / "a.tsv", tokenizer, multi_label=False, class_weights="balanced", labels=named)
    assert single.weights.tolist() == pytest.approx([2.0, 2 / 3, 0.0]), "smoothing teaches no class without a text"
    (tmp_path / "b.tsv").write_text("sentence\tlabel\nfilm\ta,all\nplot\tall\nscene\tall\n")
    several = task_of(tmp_path / "b.tsv", tokenizer, class_weights="balanced", labels=("a", "all", "never"))
    assert several.weights.tolist() == pytest.approx([2.0, 1.0, 1.0])
    for changes in ({"multi_label": True}, {"class_weights": "balanced"}, {"label_smoothing": 0.1}):
        data = TextData(train=str(tmp_path / "a.tsv"), dev=str(tmp_path / "a.tsv"), **changes)
        with pytest.raises(ValueError, match="are for classes, and regression has none"):
            RegressTask(data, TextConfig(data=data), tokenizer, Cube.single())


@pytest.mark.parametrize(
    ("said", "changes", "told"),
    [
        ([1, 1, 1, 1], {}, "all 4 predictions of dev are 'b': it tells no classes apart. It began with random weights"),
        ([1, 0, 1, 1], {}, "accuracy of dev is 0.5000, no more than 0.7500 for one who always says 'b'"),
        ([0, 1, 1, 0], {"metric": "f1"}, "f1 of dev is 0.8000, no more than 0.8571 for one who always says 'b'"),
        ([0, 1, 1, 1], {}, None),
        ([0, 0, 1, 1], {"metric": "matthews"}, None),
        ([1, 1, 1, 1], {"lr": 1e-3}, "tells no classes apart. See that labels and columns are right; then try more of"),
    ],
)
def test_a_model_that_tells_no_classes_apart_is_told(
    tmp_path: Path, tokenizer: Tokenizer, said: list[int], changes: dict[str, Any], told: str | None
) -> None:
    path = tmp_path / "a.tsv"
    path.write_text("sentence\tlabel\nfilm\ta\nplot\tb\nscene\tb\nactor\tb\n")
    data = TextData(train=str(path), dev=str(path))
    optimizer = OptimizerSection(**{key: value for key, value in changes.items() if key == "lr"})
    recipe = TextConfig(data=data, run=RunSection(metric=changes.get("metric", "")), optimizer=optimizer)
    task = ClassifyTask(data, recipe, tokenizer, Cube.single())
    assert isinstance(task, ComparedTask)
    targets, predicted = np.array([0, 1, 1, 1]), np.array(said)
    best = Evaluation(metrics=class_metrics(predicted, targets, 2), outputs={"dev": predicted})
    found = " ".join(task.doubts(best))
    assert found == "" if told is None else told in found


def test_numbers_that_are_all_the_same_are_told(tmp_path: Path, tokenizer: Tokenizer) -> None:
    (tmp_path / "a.tsv").write_text("sentence\tlabel\nfilm\t1\nplot\t4\n")
    data = TextData(train=str(tmp_path / "a.tsv"), dev=str(tmp_path / "a.tsv"))
    task = RegressTask(data, TextConfig(data=data), tokenizer, Cube.single())
    for said, doubted in (([0.1, 0.1001], True), ([1.0, 2.0], False)):
        numbers = np.array(said, dtype=np.float32)
        doubts = task.doubts(Evaluation(metrics={"pearson_spearman": 0.0}, outputs={"dev": numbers}))
        assert bool(doubts) is doubted
        assert not doubted or "all 2 predictions of dev are about 0.100" in doubts[0]
        assert not task.doubts(Evaluation(metrics={"pearson_spearman": 0.9}, outputs={"dev": numbers}))


@pytest.mark.slow
def test_the_embedded_task_has_every_label() -> None:
    rows = list(embedded_rows("dev", ","))
    seen = {label for _, _, labels in rows for label in labels.split(",")}
    assert seen == {*INNER_WORDS, ""}, "and texts without any"
    assert any("," in labels for _, _, labels in rows)
    assert not any(word in text.split() for _, text, _ in rows for word in INNER_WORDS)


@pytest.mark.slow
def test_the_shipped_recipe_needs_no_file(tmp_path: Path) -> None:
    recipe = Path(__file__).parents[3] / "launch/recipes/finetune/embedded-labels.toml"
    assert main(["classify", str(recipe), "--output", str(tmp_path / "run"), "--run.epochs", "1"]) == 0
    found = json.loads((tmp_path / "run/results.json").read_text())["mean"]
    assert found["auc"] > 0.6, "it has learnt something: chance has 0.5"


# --- a whole run ------------------------------------------------------------------------------------------------------

RECIPE = """
[data]
train = "{folder}/train.tsv"
dev = "{folder}/dev.tsv"
test = "{folder}/dev.tsv"
test_labels = true
max_length = 32
multi_label = true
class_weights = "balanced"
label_smoothing = 0.02
[model]
vocab = "{folder}/vocab.txt"
std = 0.05
dropout = 0.0
attention_dropout = 0.0
[optimizer]
lr = 2e-3
[run]
epochs = 6
batch = 16
seeds = [0]
"""


def write_table(path: Path, count: int, seed: int) -> None:
    draw, lines = random.Random(seed), ["sentence\tlabel"]
    for _ in range(count):
        some = [label for label in TELLS if draw.random() < 0.4]
        words = draw.choices(WORDS, k=draw.randint(2, 6)) + [TELLS[label] for label in some]
        draw.shuffle(words)
        lines.append(f"{' '.join(words)}\t{','.join(some)}")
    path.write_text("\n".join(lines) + "\n")


@pytest.mark.slow
def test_labels_are_learnt_and_predicted(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_table(tmp_path / "train.tsv", 160, 1)
    write_table(tmp_path / "dev.tsv", 40, 2)
    (tmp_path / "vocab.txt").write_text("\n".join(VOCAB) + "\n")
    (tmp_path / "labels.toml").write_text(RECIPE.format(folder=tmp_path))
    call = ["classify", str(tmp_path / "labels.toml"), "--output", str(tmp_path / "run")]
    assert main(call) == 0
    found = json.loads((tmp_path / "run/results.json").read_text())
    assert found["metric"] == "micro_f1"
    assert found["mean"]["micro_f1"] > 0.9, "words tell"
    assert set(found["mean"]) == {*LABEL_METRICS, *(f"test_{name}" for name in LABEL_METRICS)}
    for name in LABEL_METRICS:
        assert found["mean"][f"test_{name}"] == pytest.approx(found["mean"][name]), "the same texts and thresholds"
    seed = tmp_path / "run/seed-0"
    told = json.loads((seed / "model.json").read_text())
    assert (told["problem"], told["labels"]) == ("labels", ["fun", "sad", "war"])
    head, *rows = (line.split("\t") for line in (seed / "predictions/dev.tsv").read_text().splitlines())
    assert head == ["index", "prediction", "fun", "sad", "war"]
    texts = [line.split("\t")[0] for line in (tmp_path / "dev.tsv").read_text().splitlines()[1:]]
    said: Any = load(seed, "classify").predict(texts)
    assert [",".join(one.labels) for one in said] == [row[1] for row in rows]
    for one, row in zip(said, rows, strict=True):
        assert list(one.probabilities.values()) == pytest.approx([float(value) for value in row[2:]], abs=2e-6)
        assert list(one.as_json()) == ["labels", "probabilities"]
    head, *rows = (line.split("\t") for line in (seed / "predictions/dev-labels.tsv").read_text().splitlines())
    assert head == ["label", "threshold", "precision", "recall", "f1", "auc", "average_precision", "texts"]
    assert [float(row[1]) for row in rows] == pytest.approx(told["facts"]["thresholds"], abs=1e-6)
    assert np.mean([float(row[4]) for row in rows]) == pytest.approx(found["mean"]["macro_f1"], abs=1e-5)

    # What did not exist when a folder was made is as it is where nobody names it.
    noted = json.loads((tmp_path / "run/finetune.json").read_text())
    del noted["data"]["separator"]
    (tmp_path / "run/finetune.json").write_text(json.dumps(noted))
    capsys.readouterr()
    assert main(call) == 0
    assert "seed 0 is done already" in capsys.readouterr().err
    assert main([*call, "--data.separator", "|"]) == 2
    assert "data.separator was ',' there and is '|' now" in capsys.readouterr().err

    # The library reads it as what it is.
    assert convert(["to-hf", str(seed), str(tmp_path / "hf")]) == 0
    assert (
        f"thresholds of the labels stay here, as the library has no place for them: {told['facts']['thresholds']}"
        in (capsys.readouterr().out)
    )
    config = json.loads((tmp_path / "hf/config.json").read_text())
    assert config["problem_type"] == "multi_label_classification"
    told["facts"]["thresholds"] = [0.5]
    (seed / "model.json").write_text(json.dumps(told))
    with pytest.raises(ValueError, match=r"facts\.thresholds of its model\.json must be 3 numbers"):
        load(seed, "classify")
    assert torch.get_default_dtype() == torch.float32
