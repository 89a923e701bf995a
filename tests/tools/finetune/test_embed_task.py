"""`python -m tools.finetune embed`: losses against plain PyTorch on one device, and a whole run with what it leaves."""

from __future__ import annotations

import json
import os
import shutil
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from models.bert.embedding import BertForSentenceEmbedding, DenseConfig, VectorLoss
from models.bert.text_batches import collate_texts
from tensor3d import Cube, gather
from tests.models.toy import toy_config
from tests.ranks import run_ranks
from tests.single_device_reference import error, gradient_errors, make_twins, name_of, ranks_of, worst
from tests.tools.runs import journal
from tests.tools.squad.small import COLORS, DIGITS, PIECES, write_vocab
from tools.convert.__main__ import main as convert
from tools.corpus.tokenizers.wordpiece import WordPieceTokenizer
from tools.finetune.__main__ import EmbedConfig, main
from tools.finetune.config import ModelSection, RunSection
from tools.finetune.embed_data import EmbedData
from tools.finetune.embed_task import EmbedTask, embed_task
from tools.finetune.gradient_cache import CachedGradients
from tools.finetune.trainer import TextObjective, TextStep, WholeStepObjective
from tools.predict import load
from tools.predict.sentence_folder import sentence_settings

CONFIG = toy_config(len(PIECES), hidden=16, heads=4, inner=32, layers=1)
Shape = tuple[int, int, int, int]


def rows(count: int, negatives: bool = False) -> list[dict[str, Any]]:
    """An anchor of colours, and a positive with the same colours and a digit. Each seventh positive is that of the row
    before, each fifth anchor that of three rows before, and some anchors are the positive of another row."""
    found: list[dict[str, Any]] = []
    for number in range(count):
        words = [COLORS[(number * 7 + i * i * 3 + i * number) % 5] for i in range(2 + number % 9)]
        row = {"anchor": " ".join([*words, DIGITS[number % 10]]), "positive": " ".join(["the", *words[::-1]])}
        if number % 7 == 6:
            row["positive"] = found[-1]["positive"]
        elif number % 5 == 4:
            row["anchor"] = found[-3]["anchor"]
        elif number % 11 == 10:
            row["anchor"] = found[-4]["positive"]
        row["score"] = (number * 3 % 11) / 10
        found.append(row)
    for number, row in enumerate(found if negatives else []):
        row["negatives"] = [f"a {DIGITS[number % 10]} house {each}" for each in COLORS[: 1 + number % 3]]
    return found


def write(path: Path, rows: list[dict[str, Any]]) -> Path:
    write_vocab(path.parent)
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def task_of(folder: Path, cube: Cube, **data: Any) -> EmbedTask:
    section = EmbedData(**{"train": str(folder / "train.jsonl"), "dev": str(folder / "train.jsonl"), **data})
    recipe = EmbedConfig(data=section, model=ModelSection(vocab="vocab.txt"), run=RunSection(tokens_per_rank=64))
    return embed_task(section, recipe, WordPieceTokenizer(folder / "vocab.txt", lowercase=True), cube)


# --- the loss, in whatever micro-batches and on any cube --------------------------------------------------------------


def plain_vectors(task: EmbedTask, model: Any, pooling: str) -> tuple[list[list[Tensor]], list[list[str]]]:
    """Of each example those of its texts, each computed alone, and what tells texts apart."""
    pooled = {"cls": lambda h: h[0], "mean": lambda h: h.mean(0), "max": lambda h: h.amax(0), "last": lambda h: h[-1]}
    vectors, names = [], []
    for example in task.train:
        own = []
        for text in example.texts:
            h = gather(model.bert(collate_texts([text], Cube.single()).batch), model.cube, "z")
            vector = pooled[pooling](h[: len(text.ids)])
            for layer in model.dense:
                vector = torch.tanh(F.linear(vector, layer.weight, layer.bias))
            own.append(vector)
        vectors.append(own)
        names.append([str(text.ids.tolist()) for text in example.texts])
    return vectors, names


def plain_in_batch(vectors: list[list[Tensor]], names: list[list[str]], size: int | None, symmetric: bool) -> Tensor:
    """One anchor after another, by the definition."""
    unit = [[F.normalize(vector[:size], dim=0) for vector in own] for own in vectors]
    candidates = [own[1] for own in unit] + [each for own in unit for each in own[2:]]
    of_candidates = [own[1] for own in names] + [each for own in names for each in own[2:]]
    count, losses, back = len(unit), [], []

    def counts(i: int, j: int) -> bool:
        belongs = {own[1] for own in names if own[0] == names[i][0]} | {names[i][0]}
        return i == j or of_candidates[j] not in belongs

    for i in range(count):
        scores = {j: unit[i][0] @ candidates[j] / 0.05 for j in range(len(candidates)) if counts(i, j)}
        losses.append(torch.stack(list(scores.values())).logsumexp(0) - scores[i])
        scores = {j: unit[j][0] @ candidates[i] / 0.05 for j in range(count) if counts(j, i)}
        back.append(torch.stack(list(scores.values())).logsumexp(0) - scores[i])
    there = torch.stack(losses).mean()
    return (there + torch.stack(back).mean()) / 2 if symmetric else there


def taken(task: EmbedTask, model: Any, slots: int, kind: type[TextObjective]) -> tuple[Tensor, int]:
    """The loss of a step of all examples, and its micro-batches; gradients are left on the model."""
    objective = kind(task, model, model.cube, slots=slots, padded=False)  # type: ignore[arg-type]
    step, total = TextStep(index=0, examples=task.train), torch.zeros(1)
    parts = objective.parts(step)
    for part in parts:
        loss, sums = objective.loss(step, part)
        loss.backward()
        total += sums
    return total[0], len(parts)


def in_batch_errors(folder: Path, shape: Shape, pooling: str, slots: int, **data: Any) -> dict[str, float]:
    task = task_of(folder, Cube(*shape), pooling=pooling, **data)
    _, model, _, twin = make_twins(lambda cube: task.make_model(CONFIG, cube), shape)
    loss, parts = taken(task, model, slots, WholeStepObjective)
    assert parts == 1 if slots > 10**4 else parts > 1
    vectors, names = plain_vectors(task, twin, pooling)
    sizes = [None, *task._loss.sizes]
    wanted = torch.stack([plain_in_batch(vectors, names, size, task._loss.symmetric) for size in sizes]).mean()
    wanted.backward()
    return {"loss": error(loss, wanted)} | gradient_errors(model, twin)


def cosine_errors(folder: Path, shape: Shape) -> dict[str, float]:
    cube = Cube(*shape)
    task = task_of(folder, cube, loss="cosine", pooling="mean", sizes=(4,))
    _, model, _, twin = make_twins(lambda cube: task.make_model(CONFIG, cube), shape)
    loss, parts = taken(task, model, 120, TextObjective)
    assert parts > 1
    vectors, _ = plain_vectors(task, twin, "mean")
    errors = [
        F.cosine_similarity(a[:size], b[:size], dim=0) - example.target
        for (a, b), example in zip(vectors, task.train, strict=True)
        for size in (4, 16)
    ]
    wanted = torch.stack(errors).square().mean()
    wanted.backward()
    return {"loss": error(loss, wanted)} | gradient_errors(model, twin)


def all_errors(folder: Path, shape: Shape) -> dict[str, float]:
    torch.set_default_dtype(torch.float64)
    of_lists: dict[str, Any] = {"negatives": ("negatives",), "train": str(folder / "triplets.jsonl")}
    found = {
        "cached": in_batch_errors(folder, shape, "mean", 120),
        "symmetric": in_batch_errors(folder, shape, "cls", 10**5, symmetric=True, sizes=(4, 8)),
        "triplets": in_batch_errors(folder, shape, "max", 120, **of_lists),
        "cosine": cosine_errors(folder, shape),
        "dense": in_batch_errors(folder, shape, "last", 120, dense=(12, 7), sizes=(3,)),
    }
    return {f"{what}: {name}": value for what, errors in found.items() for name, value in errors.items()}


@pytest.mark.slow
@pytest.mark.parametrize("shape", [(1, 2, 1, 2), (2, 2, 2, 1)], ids=name_of)
def test_negatives_come_from_the_whole_cube(shape: Shape, tmp_path: Path) -> None:
    write(tmp_path / "train.jsonl", rows(15))
    write(tmp_path / "triplets.jsonl", rows(8, negatives=True))
    name, value = worst(run_ranks(ranks_of(shape), all_errors, tmp_path, shape))
    assert value < 1e-9, name


def test_a_step_without_cache_is_one_micro_batch(tmp_path: Path) -> None:
    write(tmp_path / "train.jsonl", rows(8))
    for cache, parts in ((False, 1), (True, 8)):
        task = task_of(tmp_path, Cube.single(), cache=cache)
        objective = WholeStepObjective(task, torch.nn.Linear(1, 1), Cube.single(), slots=1, padded=False)  # type: ignore[arg-type]
        assert len(objective.parts(TextStep(index=0, examples=task.train))) == parts


def test_vectors_that_are_none_have_no_metrics(tmp_path: Path) -> None:
    write(tmp_path / "train.jsonl", rows(8))
    task = task_of(tmp_path, Cube.single())
    model = task.make_model(CONFIG, Cube.single())
    with torch.no_grad():
        next(model.parameters()).fill_(torch.nan)
    with pytest.raises(FloatingPointError, match="vectors are not finite"):
        task.evaluate(model)


def test_what_the_tokenizer_does_not_know_is_told(tmp_path: Path) -> None:
    pairs = [{"anchor": "red", "positive": "blue"}, {"anchor": "green", "positive": "red" * 34}]
    write(tmp_path / "train.jsonl", pairs)
    write(tmp_path / "dev.jsonl", pairs[:1] * 2)
    told = task_of(tmp_path, Cube.single(), dev=str(tmp_path / "dev.jsonl")).notes[-1]
    assert told.startswith("102 of 1")
    assert "are unknown to the tokenizer, 102 of them in words of more than 100 characters" in told


def test_dropout_is_the_same_in_both_passes() -> None:
    weight = torch.ones(5, 3, requires_grad=True)
    seen: list[Tensor] = []

    def vectors(part: int) -> Tensor:
        seen.append(F.dropout(weight * part, 0.5))
        return seen[-1]

    state = torch.get_rng_state()
    cached = CachedGradients.of([1, 2], vectors, lambda found: found.square().sum(), torch.device("cpu"))
    for index, part in enumerate((1, 2)):
        cached.surrogate(index, part, vectors).backward()
    assert not torch.equal(seen[0], seen[1] / 2), "each part has a mask of its own"
    assert torch.equal(seen[0], seen[2])
    assert torch.equal(seen[1], seen[3])
    torch.set_rng_state(state)
    alone = torch.ones(5, 3, requires_grad=True)
    torch.cat([F.dropout(alone * part, 0.5) for part in (1, 2)]).square().sum().backward()
    assert weight.grad is not None
    torch.testing.assert_close(weight.grad, alone.grad)


def test_the_loss_by_eye() -> None:
    """Two anchors on the axes, their positives at 60 degrees and on the axis; one candidate is left out."""
    anchors = torch.tensor([[2.0, 0.0], [0.0, 1.0]])
    positives = torch.tensor([[1.0, 3.0**0.5], [0.0, 5.0]])
    allowed = torch.ones(2, 2, dtype=torch.bool)
    loss = VectorLoss(temperature=1.0).in_batch(anchors, positives, allowed)
    firsts = np.log(np.exp(0.5) + 1) - 0.5  # cosines 0.5 and 0
    seconds = np.log(np.exp(0.75**0.5) + np.e) - 1  # cosines sin 60 and 1
    assert float(loss) == pytest.approx((firsts + seconds) / 2, abs=1e-6)
    allowed[1, 0] = False
    assert float(VectorLoss(temperature=1.0).in_batch(anchors, positives, allowed)) == pytest.approx(
        firsts / 2, abs=1e-6
    )


# --- a whole run ------------------------------------------------------------------------------------------------------

RECIPE = """
[data]
train = "{folder}/train.jsonl"
dev = "{folder}/dev.jsonl"
test = "{folder}/dev.jsonl"
eval_score = "score"
max_length = 16
sizes = [32]
pooling = "cls"
[model]
{start}
dropout = 0.1
frozen_layers = 1
[optimizer]
lr = 2e-3
layer_decay = 0.9
[run]
epochs = 4
batch = 16
tokens_per_rank = 200
seeds = [0]
patience = 5
evaluate_every = 4
"""


@pytest.fixture(scope="module")
def done(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run on pairs with scores for dev, in micro-batches of a few texts."""
    folder = tmp_path_factory.mktemp("run")
    write(folder / "train.jsonl", rows(32))
    write(folder / "dev.jsonl", rows(40)[10:])
    (folder / "small.toml").write_text(RECIPE.format(folder=folder, start=f'vocab = "{folder}/vocab.txt"'))
    assert main(["embed", str(folder / "small.toml"), "--output", str(folder / "out")]) == 0
    return folder


def vectors_of(folder: Path, **options: Any) -> Any:
    texts = [row["positive"] for row in rows(12)]
    return np.stack([each.vector for each in load(folder, "embed", **options).predict(texts)])


def test_it_learns_and_what_it_writes_can_be_asked(done: Path, capsys: pytest.CaptureFixture[str]) -> None:
    seed = done / "out/seed-0"
    result = json.loads((seed / "result.json").read_text())
    assert result["metric"] == "spearman"
    assert set(result["metrics"]) >= {"spearman", "pearson", "spearman_32", "test_spearman", "test_pearson_32"}
    losses = [record["loss"] for record in journal(seed, "step")]
    assert len(losses) == 8
    assert losses[-1] < losses[0]
    found = load(seed, "embed").predict([text for row in rows(40)[10:] for text in (row["anchor"], row["positive"])])
    cosines = [float(a.vector @ b.vector) for a, b in zip(found[::2], found[1::2], strict=True)]
    table = [line.split("\t") for line in (seed / "predictions/dev.tsv").read_text().splitlines()]
    assert table[0] == ["index", "prediction"]
    assert [float(row[1]) for row in table[1:]] == pytest.approx(cosines, abs=1e-5), "of length 1, by [CLS]"
    facts = json.loads((seed / "model.json").read_text())
    assert (facts["problem"], facts["heads"], facts["facts"]["sizes"]) == ("embed", [], [32])
    card = (seed / "README.md").read_text()
    assert "tags: [bert, embed]" in card
    assert '    python -m tools.predict embed FOLDER "TEXT"' in card.splitlines()
    assert main(["embed", str(done / "small.toml"), "--output", str(done / "out")]) == 0
    assert "seed 0 is done already" in capsys.readouterr().err


@pytest.mark.slow
def test_an_interrupted_seed_has_the_same_weights_again(done: Path, tmp_path: Path) -> None:
    shutil.copytree(done / "out", tmp_path / "out")
    (tmp_path / "out/seed-0/result.json").unlink()
    assert main(["embed", str(done / "small.toml"), "--output", str(tmp_path / "out")]) == 0
    np.testing.assert_array_equal(vectors_of(tmp_path / "out/seed-0"), vectors_of(done / "out/seed-0"))


def test_a_folder_of_sentence_transformers_goes_out_and_comes_in(done: Path, tmp_path: Path) -> None:
    seed, exported = done / "out/seed-0", tmp_path / "exported"
    assert convert(["to-hf", str(seed), str(exported)]) == 0
    assert [each["type"].rpartition(".")[2] for each in json.loads((exported / "modules.json").read_text())] == [
        *("Transformer", "Pooling", "Normalize")
    ]
    pooling = json.loads((exported / "1_Pooling/config.json").read_text())
    assert (pooling["word_embedding_dimension"], pooling["pooling_mode_cls_token"]) == (128, True)
    assert sentence_settings(exported).max_length == 16  # type: ignore[union-attr]
    np.testing.assert_allclose(vectors_of(exported), vectors_of(seed), atol=1e-5)
    # A long text is cut as in training.
    long = " ".join(["red"] * 40)
    (one,), (other,) = (load(each, "embed").predict([long]) for each in (exported, seed))
    np.testing.assert_allclose(one.vector, other.vector, atol=1e-5)

    # The start of another one: its pooling, length and normalisation hold, its encoder may lie in a folder of its own.
    modules = json.loads((exported / "modules.json").read_text())
    modules[0]["path"] = "0_Transformer"
    (exported / "0_Transformer").mkdir()
    for file in [path for path in exported.iterdir() if path.is_file()]:
        file.rename(exported / "0_Transformer" / file.name)
    (exported / "modules.json").write_text(json.dumps(modules[:2]))
    text = RECIPE.format(folder=done, start=f'start_from = "{exported}"').replace('pooling = "cls"\n', "")
    text = text.replace("max_length = 16\n", "").replace("epochs = 4", "epochs = 1").replace("every = 4", "every = 0")
    (tmp_path / "next.toml").write_text(text + "\n")
    assert main(["embed", str(tmp_path / "next.toml"), "--output", str(tmp_path / "next")]) == 0
    settings = sentence_settings(tmp_path / "next/seed-0")
    assert settings is not None
    assert (settings.pooling, settings.max_length, settings.normalize) == ("cls", 16, False)
    firsts = [(each / "seed-0/metrics.jsonl").read_text().splitlines()[0] for each in (done / "out", tmp_path / "next")]
    losses = [json.loads(first)["loss"] for first in firsts]
    assert losses[1] < losses[0], "it goes on from what was learnt"


class OfDense:
    """Runs whose rate is so low that vectors stay as they begin."""

    def __init__(self, done: Path, folder: Path) -> None:
        self.folder = folder
        text = RECIPE.format(folder=done, start=f'vocab = "{done}/vocab.txt"').replace("epochs = 4", "epochs = 1")
        for old, new in (("every = 4", "every = 0"), ("lr = 2e-3", "lr = 1e-9"), ('pooling = "cls"\n', "")):
            text = text.replace(old, new)
        (folder / "dense.toml").write_text(text)

    def words(self, name: str, start: Path | None, *more: str) -> list[str]:
        begin = [] if start is None else ["--model.vocab", "None", "--model.start-from", str(start)]
        return ["embed", str(self.folder / "dense.toml"), "--output", str(self.folder / name), *begin, *more]

    def run(self, name: str, start: Path | None, *more: str) -> Path:
        assert main(self.words(name, start, *more)) == 0
        return self.folder / name / "seed-0"


@pytest.fixture(scope="module")
def dense(done: Path, tmp_path_factory: pytest.TempPathFactory) -> OfDense:
    runs = OfDense(done, tmp_path_factory.mktemp("dense"))
    first = runs.run(
        "first", None, "--data.dense", "48", "40", "--data.dense-activation", "silu", "--data.pooling", "last"
    )
    assert convert(["to-hf", str(first), str(runs.folder / "exported")]) == 0
    return runs


def test_dense_layers_are_learnt_kept_and_gone_on_with(dense: OfDense, capsys: pytest.CaptureFixture[str]) -> None:
    first, exported = dense.folder / "first/seed-0", dense.folder / "exported"
    wanted = vectors_of(first)
    assert wanted.shape[1] == 40
    assert set(json.loads((first / "result.json").read_text())["metrics"]) >= {"spearman", "spearman_32"}
    np.testing.assert_allclose(vectors_of(exported), wanted, atol=1e-6)
    layers = [DenseConfig(outputs=outputs, activation="silu") for outputs in (48, 40)]
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # nothing is as initialised
        model = BertForSentenceEmbedding.from_pretrained(first, Cube.single(), pooling="last", dense=layers)
    laid = collate_texts([*load(first, "embed").task.reader.texts([rows(12)[0]["positive"]])], Cube.single())
    np.testing.assert_allclose(F.normalize(model.eval()(laid)).detach().numpy()[0], wanted[0], atol=1e-6)
    capsys.readouterr()
    np.testing.assert_allclose(vectors_of(dense.run("next", exported)), wanted, atol=1e-4)
    said = capsys.readouterr().err
    assert "vectors: pooling last, dense to 48 (silu), dense to 40 (silu), at most 16 tokens, length 1" in said
    assert "loaded: encoder, dense" in said
    settings = json.loads((dense.folder / "next/finetune.json").read_text())
    assert str(exported / "3_Dense/model.safetensors") in settings["files"], "another content is another start"


def test_dense_layers_of_another_shape_are_refused(
    dense: OfDense, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Before anything is trained."""
    first = tmp_path / "first"
    shutil.copytree(dense.folder / "first/seed-0", first)
    settings = json.loads((first / "3_Dense/config.json").read_text())
    (first / "3_Dense/config.json").write_text(json.dumps({**settings, "out_features": 36}))
    assert main(dense.words("other", first)) == 2
    refused = "has (40, 48) as the shape of dense.1.weight, and the modules.json of"
    assert refused in capsys.readouterr().err
    with pytest.raises(ValueError, match=r"dense\.1\.weight, and the modules\.json of .* asks for \(36, 48\)"):
        load(first, "embed")


@pytest.mark.slow
def test_dense_layers_of_a_checkpoint_and_new_ones(dense: OfDense, capsys: pytest.CaptureFixture[str]) -> None:
    first, exported = dense.folder / "first/seed-0", dense.folder / "exported"
    capsys.readouterr()
    np.testing.assert_allclose(vectors_of(dense.run("again", first)), vectors_of(first), atol=1e-4)
    assert "loaded: encoder, dense" in capsys.readouterr().err
    fresh = dense.run("fresh", exported, "--data.dense", "33")
    assert "not taken from the folder, so as initialised: dense" in capsys.readouterr().err
    assert vectors_of(fresh).shape[1] == 33
    none = dense.run("none", first, "--data.dense", "--data.sizes", "64")
    assert "in the folder, but not of this model: dense.0.bias" in capsys.readouterr().err
    assert vectors_of(none).shape[1] == 128


@pytest.mark.slow
def test_the_shipped_recipe_needs_no_file(tmp_path: Path) -> None:
    recipe = Path(__file__).parents[3] / "launch/recipes/finetune/embedded-pairs.toml"
    assert main(["embed", str(recipe), "--output", str(tmp_path / "run"), "--run.epochs", "1"]) == 0
    found = json.loads((tmp_path / "run/results.json").read_text())["mean"]
    assert found["recall@10"] > 0.1, "it has learnt something: chance has 0.03"


def losses_of(folder: Path, shape: Shape, output: Path, options: list[str]) -> tuple[list[float], list[float]]:
    """And rank correlations, of the command, here or on a rank whose process group stands."""
    if torch.distributed.is_initialized():
        world, rank = torch.distributed.get_world_size(), torch.distributed.get_rank()
        os.environ.update(WORLD_SIZE=str(world), RANK=str(rank), LOCAL_RANK=str(rank))
    x, y, z, data = shape
    more = ["--cube", f"{x}x{y}x{z}", "--data-parallel", str(data), "--model.dropout", "0", "--run.epochs", "2"]
    more += ["--model.attention-dropout", "0", "--run.evaluate-every", "0"]
    if data > 1:  # with frozen layers and rates by depth
        more += ["--optimizer.shard-over-data", "gradients" if options else "state"]
    assert main(["embed", str(folder / "small.toml"), "--output", str(output), *more, *options]) == 0
    records = journal(output / "seed-0")
    losses = [record["loss"] for record in records if record["kind"] == "step"]
    return losses, [record["spearman"] for record in records if record["kind"] != "step"]


@pytest.mark.slow
@pytest.mark.parametrize("options", [[], ["--data.dense", "48", "35"]], ids=["encoder", "dense"])
def test_a_cube_has_the_same_losses_and_metrics(done: Path, tmp_path: Path, options: list[str]) -> None:
    losses, correlations = losses_of(done, (1, 1, 1, 1), tmp_path / "alone", options)
    assert len(losses) + len(correlations) == 6
    for found in run_ranks(4, losses_of, done, (1, 1, 2, 2), tmp_path / "cube", options):
        assert found[0] == pytest.approx(losses, abs=2e-3)
        assert found[1] == pytest.approx(correlations, abs=1e-2)  # texts that are nearly as alike may change places
    texts = [(tmp_path / name / "seed-0/predictions/test.tsv").read_text().split() for name in ("alone", "cube")]
    assert [float(each) for each in texts[1][2::2]] == pytest.approx([float(each) for each in texts[0][2::2]], abs=2e-3)
