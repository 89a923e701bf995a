"""tools.finetune: learns on any cube with the same losses, keeps the best weights, goes on, and refuses in words."""

from __future__ import annotations

import json
import os
import random
import shutil
from itertools import chain
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch

from models.bert.huggingface import open_weights
from models.bert.tasks import BertForSequenceClassification
from tensor3d import Cube
from tests.ranks import run_ranks
from tests.single_device_reference import name_of, ranks_of
from tests.tools.asked import write_models
from tests.tools.relatives import modernbert, roberta, roberta_tokenizer
from tests.tools.runs import journal
from tools.common import plotting
from tools.convert.__main__ import main as convert
from tools.corpus.tokenizers.model_dir import tokenizer_of
from tools.finetune import pictures, seed_sweep
from tools.finetune.__main__ import main
from tools.finetune.text_task import RegressTask
from tools.finetune.trainer import depth_of, epoch_order, steps_of
from tools.predict import load
from tools.training.metrics import run_log

WORDS = ["film", "actor", "plot", "scene", "music", "ending", "the", "a", "very", "was"]
GOOD, BAD = ["good", "great", "fine"], ["bad", "poor", "dull"]
RECIPE = """
[data]
train = "{folder}/train.tsv"
dev = "{folder}/dev.tsv"
test = "{folder}/test.tsv"
max_length = 32

[model]
vocab = "{folder}/vocab.txt"
preset = "tiny"
std = 0.05
dropout = 0.0
attention_dropout = 0.0

[optimizer]
lr = 2e-3

[run]
epochs = 1
batch = 16
seeds = [0]
evaluate_every = 4
"""


LONGER = ("--run.epochs", "4", "--run.evaluate-every", "8")


@pytest.fixture(scope="module")
def recipe(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A recipe with its files beside it: reviews with one word that tells, and the number of their words."""
    folder = tmp_path_factory.mktemp("finetune")
    draw = random.Random(5)

    def table(count: int) -> str:
        lines = ["sentence\tlabel\tnumber"]
        for _ in range(count):
            label = draw.randrange(2)
            words = draw.choices(WORDS, k=draw.randint(2, 14))
            words.insert(draw.randrange(len(words)), draw.choice(GOOD if label else BAD))
            lines.append(f"{' '.join(words)}\t{'praise' if label else 'blame'}\t{len(words) / 10}")
        return "\n".join(lines) + "\n"

    for name, count in (("train", 120), ("dev", 40), ("test", 10)):
        (folder / f"{name}.tsv").write_text(table(count))
    special = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
    (folder / "vocab.txt").write_text("\n".join([*special, *WORDS, *GOOD, *BAD]) + "\n")
    (folder / "small.toml").write_text(RECIPE.format(folder=folder))
    return folder / "small.toml"


def run(recipe: Path, output: Path, *more: str, task: str = "classify") -> int:
    """`main` here, or on a rank whose process group stands."""
    if torch.distributed.is_initialized():
        world, rank = torch.distributed.get_world_size(), torch.distributed.get_rank()
        os.environ.update(WORLD_SIZE=str(world), RANK=str(rank), LOCAL_RANK=str(rank))
    return main([task, str(recipe), "--output", str(output), *more])


def losses(seed: Path) -> list[float]:
    return [record["loss"] for record in journal(seed, "step")]


@pytest.fixture(scope="module")
def done(recipe: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a run of four epochs on one device."""
    folder = tmp_path_factory.mktemp("runs") / "done"
    assert run(recipe, folder, *LONGER) == 0
    return folder


def test_it_learns_and_leaves_a_model(done: Path, recipe: Path) -> None:
    found = json.loads((done / "results.json").read_text())
    seed = done / found["best"]
    assert found["mean"]["accuracy"] > 0.9, "one word tells"
    assert found["deviation"] == dict.fromkeys(found["mean"]), "one seed has none"
    assert seed_sweep.table(found).splitlines()[-1].split() == ["deviation"] + ["-"] * len(found["mean"])
    assert losses(seed)[0] == pytest.approx(0.69, abs=0.15)
    weights = open_weights(seed)
    assert (weights.labels, weights.problem) == (("blame", "praise"), "classify")
    assert weights.facts["max_length"] == 32
    assert tokenizer_of(seed).vocab_size == weights.config.vocab
    card = (seed / "README.md").read_text()
    assert card.startswith('---\nlibrary_name: tensor3d\ntags: [bert, classify]\nmetrics: ["accuracy", ')
    for line in (
        f"# small, seed {seed.name[5:]}",
        "| task | classify: blame, praise |",
        "| begun with | random weights, preset tiny |",
        "| trained on | 120 texts, 4 epochs in batches of 16 |",
        f"| accuracy | {found['mean']['accuracy']:.4f} |",
        '    python -m tools.predict classify FOLDER "TEXT"',
    ):
        assert line in card.splitlines()
    assert f"| {recipe.parent}/train.tsv | " in card
    for name, count in (("dev", 40), ("test", 10)):
        rows = [line.split("\t") for line in (seed / "predictions" / f"{name}.tsv").read_text().splitlines()]
        assert rows[0] == ["index", "prediction"]
        assert [row[0] for row in rows[1:]] == [str(number) for number in range(count)]
        labels = [line.split("\t")[1] for line in (recipe.parent / f"{name}.tsv").read_text().splitlines()[1:]]
        right = sum(row[1] == label for row, label in zip(rows[1:], labels, strict=True)) / count
        if name == "dev":
            assert right == pytest.approx(found["mean"]["accuracy"]), "of the weights that are kept"


def test_the_confusion_and_the_curves_are_there(done: Path, recipe: Path) -> None:
    folder = done / "seed-0"
    table = [line.split("\t") for line in (folder / "predictions/dev-confusion.tsv").read_text().splitlines()]
    assert table[0] == ["label", "blame", "praise"]
    said = [line.split("\t")[1] for line in (folder / "predictions/dev.tsv").read_text().splitlines()[1:]]
    labels = [line.split("\t")[1] for line in (recipe.parent / "dev.tsv").read_text().splitlines()[1:]]
    pairs = list(zip(labels, said, strict=True))
    for label, *counts in table[1:]:
        assert counts == [str(pairs.count((label, other))) for other in table[0][1:]]
    for name in ("curves.png", "predictions/dev-confusion.png"):
        assert (folder / name).read_bytes()[:8] == b"\x89PNG\r\n\x1a\n", name
    files = json.loads((folder / "result.json").read_text())["predictions"]
    assert files == [
        f"predictions/{name}" for name in ("dev.tsv", "test.tsv", "dev-confusion.tsv", "dev-confusion.png")
    ]


def test_pictures_are_left_out_with_a_word(
    done: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(plotting, "find_spec", lambda name: None)
    assert not pictures.draw_confusion(tmp_path / "a.png", ["x", "y"], np.eye(2, dtype=np.int64))
    shutil.copy(done / "seed-0/metrics.jsonl", tmp_path)
    pictures.draw_curves(tmp_path, "accuracy")
    assert [path.name for path in tmp_path.iterdir()] == ["metrics.jsonl"]
    assert "no picture is drawn: a picture needs the package matplotlib: pip install matplotlib" in caplog.text


def test_the_best_evaluation_is_kept(done: Path) -> None:
    evaluations = journal(done / "seed-0", "evaluation")
    best = max(evaluations, key=lambda record: record["accuracy"])  # the first of equals
    result = json.loads((done / "seed-0/result.json").read_text())
    assert result["best_step"] == best["step"]
    assert result["metrics"]["accuracy"] == pytest.approx(best["accuracy"])
    assert [path.name for path in (done / "seed-0/checkpoints").glob("step-*")] == [f"step-{best['step']:08d}"]


def test_it_goes_on_and_refuses_other_settings(
    done: Path, recipe: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    before = (done / "seed-0/result.json").stat().st_mtime_ns
    monkeypatch.setattr(seed_sweep, "SeedRun", None)  # nothing is to be trained
    assert run(recipe, done, *LONGER) == 0
    assert "seed 0 is done already" in capsys.readouterr().err
    assert (done / "seed-0/result.json").stat().st_mtime_ns == before
    assert run(recipe, done, *LONGER, "--optimizer.lr", "3e-3") == 2
    assert "optimizer.lr was 0.002 there and is 0.003 now" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("changed", "told"),
    [
        ({"seed": 1}, "it is that of seed 1"),
        ({"metrics": {}}, "it has no 'accuracy'"),
        ({"metrics": {"accuracy": "0.5"}}, "a number is of another kind"),
        ({"best_step": None}, "a number is of another kind"),
        (None, "an entry is of another kind"),
        ("cut", "it is no JSON"),
        ("weights", "the weights are gone"),
    ],
)
def test_a_damaged_seed_is_not_done(changed: Any, told: str, done: Path, tmp_path: Path, caplog: Any) -> None:
    seed = tmp_path / "seed-0"
    (seed / "checkpoints").mkdir(parents=True)
    if changed != "weights":
        (seed / "checkpoints" / "step-00000004").mkdir()
    result = json.loads((done / "seed-0" / "result.json").read_text())
    content = json.dumps({**result, **changed} if isinstance(changed, dict) else None if changed is None else result)
    (seed / "result.json").write_text(content[:-5] if changed == "cut" else content)
    assert seed_sweep._read_result(seed, 0, "accuracy") is None
    assert f"seed 0: {seed / 'result.json'} is damaged ({told}" in caplog.text
    assert "it is trained again" in caplog.text


@pytest.fixture(scope="module")
def one(recipe: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a seed of one epoch on one device, its batches in one piece."""
    folder = tmp_path_factory.mktemp("runs") / "one"
    assert run(recipe, folder) == 0
    return folder / "seed-0"


def trained(shape: tuple[int, int, int, int], recipe: Path, output: Path, *more: str) -> int:
    x, y, z, data = shape
    more = [*more, "--cube", f"{x}x{y}x{z}", "--data-parallel", str(data), "--run.tokens-per-rank", "24"]
    return run(recipe, output, *more)


@pytest.mark.slow
@pytest.mark.parametrize("shape", [(2, 2, 2, 1), (1, 1, 2, 2)], ids=name_of)
def test_a_cube_has_the_same_losses(shape: tuple[int, int, int, int], recipe: Path, one: Path, tmp_path: Path) -> None:
    assert run_ranks(ranks_of(shape), trained, shape, recipe, tmp_path / "cube") == [0] * ranks_of(shape)
    cube = tmp_path / "cube/seed-0"
    assert len(losses(one)) == 8
    assert losses(cube) == pytest.approx(losses(one), abs=2e-4)
    for name in ("dev", "test"):
        texts = [(seed / f"predictions/{name}.tsv").read_text() for seed in (one, cube)]
        assert texts[0] == texts[1]


@pytest.mark.slow
def test_padding_on_a_cube_changes_no_loss(recipe: Path, one: Path, tmp_path: Path) -> None:
    assert run_ranks(4, trained, (1, 2, 2, 1), recipe, tmp_path / "cube", "--run.padding", "padded") == [0] * 4
    assert losses(tmp_path / "cube/seed-0") == pytest.approx(losses(one), abs=2e-4)


@pytest.mark.slow
def test_micro_batches_and_padding_change_no_loss(recipe: Path, one: Path, tmp_path: Path) -> None:
    variants = {"parts": ["--run.tokens-per-rank", "40"], "padded": ["--run.padding", "padded"]}
    for name, more in variants.items():
        assert run(recipe, tmp_path / name, "--run.evaluate-every", "0", *more) == 0
        assert losses(tmp_path / name / "seed-0") == pytest.approx(losses(one), abs=1e-4)


def without_journal(recipe: Path, output: Path) -> int:
    def full(*arguments: Any, **options: Any) -> None:
        raise OSError(28, "No space left on device", "metrics.jsonl")

    run_log.JsonlLogger = full  # type: ignore[assignment,misc]
    return trained((1, 1, 2, 1), recipe, output)


@pytest.mark.slow
def test_a_journal_that_cannot_be_opened_ends_all_ranks(recipe: Path, tmp_path: Path) -> None:
    assert run_ranks(2, without_journal, recipe, tmp_path / "run") == [2, 2]


@pytest.mark.slow
def test_an_interrupted_seed_starts_again_and_a_new_one_is_added(recipe: Path, one: Path, tmp_path: Path) -> None:
    folder = tmp_path / "run"
    shutil.copytree(one.parent, folder)
    (folder / "seed-0/result.json").unlink()
    (folder / "seed-0/checkpoints/step-00000001.partial").mkdir()
    assert run(recipe, folder, "--run.seeds", "0", "1") == 0
    assert losses(folder / "seed-0") == losses(one), "the same to the last bit"
    assert losses(folder / "seed-1") != losses(one)
    found = json.loads((folder / "results.json").read_text())
    values = [seed["metrics"]["accuracy"] for seed in found["seeds"]]
    assert found["mean"]["accuracy"] == pytest.approx(sum(values) / 2)
    assert found["deviation"]["accuracy"] == pytest.approx(abs(values[0] - values[1]) / 2**0.5)
    assert found["best"] == f"seed-{values.index(max(values))}"


@pytest.mark.slow
def test_patience_ends_a_seed(recipe: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    hopeless = ["--optimizer.lr", "1e-12", "--run.patience", "1", "--run.epochs", "3"]
    assert run(recipe, tmp_path / "run", *hopeless) == 0
    seed = tmp_path / "run/seed-0"
    assert [record["best"] for record in journal(seed, "evaluation")] == [True, False]
    assert json.loads((seed / "result.json").read_text())["best_step"] == 4
    assert "seed 0: warning: " in capsys.readouterr().err


def weights_in(seed: Path) -> dict[str, torch.Tensor]:
    """Of the checkpoint of a seed."""
    source, cube = open_weights(seed), Cube.single()
    model = BertForSequenceClassification(source.config, 2, cube)
    source.fill(model, cube)
    return {name: parameter.detach() for name, parameter in model.named_parameters()}


@pytest.mark.slow
def test_steps_that_fp16_skips_are_told(recipe: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    fp16 = ["--precision.compute", "fp16", "--precision.loss-scale", str(2**24), "--optimizer.floor", "0.5"]
    assert run(recipe, tmp_path / "run", *fp16, "--run.batch", "60", "--run.evaluate-every", "0") == 0
    steps = journal(tmp_path / "run/seed-0", "step")
    assert [(step["skipped"], step["loss_scale"]) for step in steps] == [(True, 2.0**24), (True, 2.0**23)]
    told = capsys.readouterr().err
    assert "seed 0: 2 of 2 steps changed nothing: a gradient was not finite in fp16" in told
    assert "optimizer.floor = 0.5 changes nothing" in told


ONE_STEP = ("--run.epochs", "1", "--run.batch", "500", "--optimizer.weight-decay", "0", "--optimizer.clip", "1e9")


def test_lower_layers_learn_less_and_frozen_ones_nothing(
    recipe: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Adam's first step is the learning rate, whatever the gradient is."""
    still = ("--optimizer.lr", "1e-30")
    assert run(recipe, tmp_path / "still", *ONE_STEP, *still) == 0
    assert run(recipe, tmp_path / "decay", *ONE_STEP, "--optimizer.layer-decay", "0.5") == 0
    assert run(recipe, tmp_path / "frozen", *ONE_STEP, "--model.frozen-layers", "1") == 0
    before, decay, frozen = (weights_in(tmp_path / name / "seed-0") for name in ("still", "decay", "frozen"))
    layers = open_weights(tmp_path / "still/seed-0").config.layers
    seen = set()
    for name, start in before.items():
        depth = depth_of(name, layers)
        moved, held = ((other[name] - start).abs().max() for other in (decay, frozen))
        if moved > 1e-20:  # the bias of keys has no gradient but rounding
            assert float(moved) == pytest.approx(2e-3 * 0.5 ** (layers + 1 - depth), rel=0.05), name
            seen.add(depth)
        assert (held < 1e-20) == (depth <= 1 or moved < 1e-20), name
    assert seen == set(range(layers + 2))
    capsys.readouterr()
    assert run(recipe, tmp_path / "all", "--model.frozen-layers", "3") == 2
    assert "model.frozen_layers must be at most 2, the model's layers. Got 3" in capsys.readouterr().err


@pytest.mark.slow
def test_frozen_layers_on_a_cube(recipe: Path, tmp_path: Path) -> None:
    more = ("--model.frozen-layers", "1", "--optimizer.layer-decay", "0.7")
    assert run(recipe, tmp_path / "one", *more) == 0
    kept = (*more, "--model.keep-budget", "1")
    assert run_ranks(4, trained, (2, 1, 2, 1), recipe, tmp_path / "cube", *kept) == [0] * 4
    assert losses(tmp_path / "cube/seed-0") == pytest.approx(losses(tmp_path / "one/seed-0"), abs=2e-4)


def test_numbers_are_learnt_and_weights_go_on(
    recipe: Path, done: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (done / "seed-0/huggingface").mkdir()
    (done / "seed-0/huggingface/config.json").write_text('{"num_labels": 3, "more": "kept"}')
    passes = mock.Mock(wraps=RegressTask.outputs)
    monkeypatch.setattr(RegressTask, "outputs", lambda *arguments: passes(*arguments))
    start = ["--model.start-from", str(done / "seed-0"), "--model.vocab", "None"]
    more = ["--data.label", "number", "--run.epochs", "3", "--run.evaluate-every", "12", *start]
    assert run(recipe, tmp_path / "run", *more, task="regress") == 0
    found = json.loads((tmp_path / "run/results.json").read_text())
    assert found["metric"] == "pearson_spearman"
    assert found["mean"]["pearson"] > 0.8, "the number of words"
    evaluations = len(journal(tmp_path / "run/seed-0", "evaluation"))
    assert [call.args[2] for call in passes.mock_calls] == ["dev"] * evaluations + ["test"]
    assert open_weights(tmp_path / "run/seed-0").settings == {"more": "kept"}, "without those of another head"
    last = (tmp_path / "run/seed-0/predictions/test.tsv").read_text().splitlines()[-1]
    assert float(last.split("\t")[1]) == pytest.approx(1, abs=2)


def test_a_modernbert_learns_from_its_language_models_head_and_goes_back(
    recipe: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    transformers = pytest.importorskip("transformers")
    modernbert(tmp_path / "library", "ModernBertForMaskedLM", classifier_pooling="mean")
    start = ["--model.start-from", str(tmp_path / "library"), "--model.vocab", "None"]
    assert run(recipe, tmp_path / "run", *ONE_STEP, *start) == 0
    assert (
        "loaded: encoder, prediction_head; not in the folder, so as initialised: classifier" in capsys.readouterr().err
    )
    capsys.readouterr()
    assert convert(["to-hf", str(tmp_path / "run/seed-0"), str(tmp_path / "back")]) == 0
    assert "at most 32 tokens of a text or pair: these stay here" in capsys.readouterr().out
    kind = transformers.ModernBertForSequenceClassification
    model, told = kind.from_pretrained(tmp_path / "back", output_loading_info=True)
    assert not any(told.values()), told
    assert model.config.classifier_pooling == "mean"
    (found,) = load(tmp_path / "run/seed-0", "classify").predict(["the hill"])
    ids = transformers.AutoTokenizer.from_pretrained(tmp_path / "back")("the hill", return_tensors="pt")
    with torch.no_grad():
        wanted = model.eval()(**ids).logits[0].softmax(0)
    assert list(found.as_json()["probabilities"].values()) == pytest.approx(wanted.tolist(), abs=1e-5)


def test_a_roberta_learns_and_goes_back(recipe: Path, tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    roberta(tmp_path / "library", "RobertaForMaskedLM", roberta_tokenizer([" ".join([*WORDS, *GOOD, *BAD])] * 3))
    start = ["--model.start-from", str(tmp_path / "library"), "--model.vocab", "None"]
    assert run(recipe, tmp_path / "run", *ONE_STEP, *start) == 0
    assert convert(["to-hf", str(tmp_path / "run/seed-0"), str(tmp_path / "back")]) == 0
    kind = transformers.RobertaForSequenceClassification
    model, told = kind.from_pretrained(tmp_path / "back", output_loading_info=True)
    assert not any(told.values()), told
    assert model.config.id2label == {0: "blame", 1: "praise"}
    (found,) = load(tmp_path / "run/seed-0", "classify").predict(["a great film"])
    ids = transformers.AutoTokenizer.from_pretrained(tmp_path / "back")("a great film", return_tensors="pt")
    with torch.no_grad():
        wanted = model.eval()(**ids).logits[0].softmax(0)
    assert list(found.as_json()["probabilities"].values()) == pytest.approx(wanted.tolist(), abs=1e-5)


def test_bad_calls_end_with_a_message(
    recipe: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    for more, message in (
        (["--optimizer.lr", "1e30", "--optimizer.clip", "1e30"], "the loss of step"),
        (["--data.dev", str(tmp_path / "none.tsv")], "none.tsv is no file. Correct data.dev in the recipe, or give"),
        (["--data.dev", "none.tsv"], f"{Path('none.tsv').absolute()} is no file."),
        (["--cube", "1x1x2"], "the cube needs 2 processes"),
        (["--data.text", "words"], "has no column 'words'"),
    ):
        assert run(recipe, tmp_path / "bad", *more) == 2, message
        assert message in capsys.readouterr().err
        refused = not (tmp_path / "bad/seed-0").exists()
        assert refused != (message == "the loss of step")
        assert not refused or not list(tmp_path.glob("bad/*")), "what is corrected may have the folder"
        shutil.rmtree(tmp_path / "bad", ignore_errors=True)
    start = ["--model.vocab", "None", "--model.start-from"]
    model = str(write_models(tmp_path / "models") / "language")
    for more, message in (
        ([*start, str(tmp_path)], "is no folder of a model"),
        ([*start, model, "--data.max-length", "25"], "data.max_length=25 is more than the 24 positions of the model"),
    ):
        with monkeypatch.context() as alone:  # before any process is connected
            alone.setattr("tools.finetune.__main__.cube_of", None)
            assert run(recipe, tmp_path / "bad", *more) == 2
        assert message in capsys.readouterr().err
        assert not (tmp_path / "bad").exists()
    with pytest.raises(SystemExit):
        run(recipe, tmp_path / "bad", "--run.epochs", "0")
    told = capsys.readouterr().err
    assert "run.epochs must be at least 1. Got 0." in told
    assert "tyro" not in told
    assert "python -m tools.finetune classify --help" in told


@pytest.mark.slow
def test_a_refused_command_leaves_nothing_on_ranks(recipe: Path, tmp_path: Path) -> None:
    """Looked at when both have ended: the first rank is the last to leave the folder."""
    assert run_ranks(2, trained, (1, 2, 1, 1), recipe, tmp_path / "run", "--data.text", "words") == [2, 2]
    assert list((tmp_path / "run").glob("*")) == []


def test_the_order_of_texts() -> None:
    steps = list(steps_of(10, 4, seed=3, epochs=2))
    assert [len(step) for step in steps] == [4, 4, 2, 4, 4, 2]
    first, second = ([*chain(*steps[epoch * 3 : epoch * 3 + 3])] for epoch in (0, 1))
    assert sorted(first) == sorted(second) == list(range(10))
    assert first != second
    assert first == epoch_order(10, 3, 0) != epoch_order(10, 4, 0)


@pytest.mark.slow
def test_the_embedded_task_needs_no_file(tmp_path: Path) -> None:
    recipe = Path(__file__).parents[3] / "launch/recipes/finetune/embedded.toml"
    assert run(recipe, tmp_path / "run", "--run.epochs", "3") == 0
    found = json.loads((tmp_path / "run/results.json").read_text())
    assert found["mean"]["accuracy"] > 0.7, "the commonest of the four words alone would be right in 41 %"
