"""Samples as training opens them: packed, masked, evaluated."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from models.bert import BertConfig, BertForPreTraining
from tensor3d import Cube, CubeShape
from tensor3d.data import Loader, PretrainingData, StoredSamples, masked_count
from tests.data.samples import files_to_open
from tests.tools.corpus.sampled import FIRST, content, made, training, unique_ids, write_ids
from tools.corpus.samples.reader import Samples, open_samples, read_step, sample_shard_names
from tools.corpus.training_corpus import open_corpus
from tools.packing.histogram import read_histogram
from tools.training.arguments import parse
from tools.training.data import TrainData
from tools.training.pretraining import PretrainTrainer, held_out_means

PIECES = 900


@pytest.fixture(scope="module")
def ids(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_ids(tmp_path_factory.mktemp("corpus") / "ids", unique_ids(40), pieces=PIECES, every_third_goes_on=True)


@pytest.fixture(scope="module")
def folder(ids: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Samples in three shards, with stored masks."""
    output = tmp_path_factory.mktemp("samples") / "samples"
    made(output, ids, shards=3, masking="static", whole_words=True, max_length=24, capacity=32)
    return output


def packed(opened: Samples, *, held_out: bool = False) -> PretrainingData:
    shards = [opened.held_out] if held_out else opened.shards
    return PretrainingData(
        StoredSamples(shards, max_length=opened.max_length),
        opened.special,
        capacity=opened.limits.capacity,
        max_length=opened.max_length,
        max_sequences=opened.limits.max_sequences,
        masked_per_pack=opened.limits.budget,
        seed=7,
        method=opened.packing,
        plan=opened.plan(),
        continuations=opened.continuations,
    )


def test_what_training_needs_is_there(folder: Path) -> None:
    opened = open_samples(folder)
    assert (opened.vocab_size, opened.max_length, opened.single, opened.static) == (FIRST + PIECES, 24, False, True)
    assert (opened.special.pad, opened.special.cls, opened.special.sep, opened.special.mask) == (0, 2, 3, 4)
    assert opened.continuations is not None
    assert opened.continuations[6:8].tolist() == [True, False]
    assert (folder / "tokenizer" / "vocab.txt").is_file()
    assert len(opened.fingerprint) == 32


def test_the_plan_is_of_all_training_sequences(folder: Path) -> None:
    opened = open_samples(folder)
    counts = read_histogram(folder / "histogram.json")
    lengths = np.concatenate([shard.lengths for shard in opened.shards if shard is not None])
    assert counts.tolist() == np.bincount(lengths, minlength=25).tolist()
    plan = opened.plan()
    assert plan.sequences == len(lengths) == opened.counts["sequences"]
    assert plan.tokens == lengths.sum() == opened.counts["tokens"]
    said = opened.counts["packing"]
    assert (said["packs"], said["efficiency"]) == (plan.packs, plan.efficiency)
    assert said["sequences_per_pack"] == plan.packing_factor > 1
    data = packed(opened)
    assert data.epochs.plan(0, 0, lengths) is data.rules.plan
    assert len(data.epochs[0].packs) == plan.packs


def test_what_is_trained_on_is_what_was_stored(folder: Path) -> None:
    opened = open_samples(folder)
    data = packed(opened)
    stored = {}
    for shard in opened.shards:
        assert shard is not None
        found = shard.segments(np.arange(len(shard)))
        assert found.masks is not None
        tokens = found.tokens(opened.special)
        seen = found.masks.apply(tokens.ids, found.lengths).ids
        ends = np.cumsum(found.lengths)[:-1]
        for before, after in zip(np.split(tokens.ids, ends), np.split(seen, ends), strict=True):
            stored[tuple(before.tolist())] = after.tolist()
    for epoch in (0, 5):
        met = {}
        for pack in data.packs(epoch, range(len(data.epochs[epoch].packs))):
            before = pack.ids.copy()
            before[pack.masked] = pack.masked_labels
            ends = np.cumsum(pack.lengths)[:-1]
            for one, other in zip(np.split(before, ends), np.split(pack.ids, ends), strict=True):
                met[tuple(one.tolist())] = other.tolist()
        assert met == stored


def test_stored_masks_of_another_share_train_with_that_share_alone(ids: Path, tmp_path: Path) -> None:
    chosen = {"masked_share": 0.4, "mask_replace": 1.0, "random_replace": 0.0, "masked_spans": True}
    opened = made(tmp_path / "samples", ids, masking="static", max_length=24, capacity=32, **chosen)
    assert opened.limits.budget == 14  # 0.4 of 32 slots, and one half of four sequences
    shard = opened.shards[0]
    assert shard is not None
    masks = shard.segments(np.arange(len(shard))).masks
    assert masks is not None
    assert masks.counts.tolist() == [masked_count(length, 0.4) for length in shard.lengths.tolist()]
    assert (masks.seen == opened.special.mask).all()
    (tmp_path / "recipe.toml").write_text(RECIPE)

    def feed(**settings: float) -> TrainData:
        flags = [f"--data.{name}" for name, value in settings.items() if value is True]
        numbers = {name: value for name, value in settings.items() if value is not True}
        options = [*flags, *(word for name, value in numbers.items() for word in (f"--data.{name}", str(value)))]
        source = ["--data.source", str(tmp_path / "samples")]
        recipe = parse([str(tmp_path / "recipe.toml"), *source, *options]).settings
        return TrainData.of_corpus(recipe, Cube.single(), open_corpus(tmp_path / "samples"))

    with feed(**chosen) as same, same.loader(0, 1) as loader:
        step = next(loader)
    assert step.targets == int((step.batches[0].masked_labels >= 0).sum())
    for other in ({}, {"masked_share": 0.4}, {**chosen, "masked_share_end": 0.2}):
        with pytest.raises(
            ValueError, match=r"masked_share = 0.4, mask_replace = 1, random_replace = 0 and masked_spans = True. Give"
        ):
            feed(**other)
    with pytest.raises(ValueError, match=r"stored masks are not those of masking with a share of 0.15"):
        packed(opened).pack(0, 0)


@pytest.mark.parametrize("single", [False, True])
def test_training_and_evaluation_on_samples(ids: Path, tmp_path: Path, single: bool) -> None:
    opened = made(tmp_path / "samples", ids, single_texts=single, max_length=24, capacity=32)
    config = BertConfig(layers=1, hidden=16, heads=2, vocab=opened.vocab_size, positions=24, dropout=0.0)
    cube = Cube.single()
    model = BertForPreTraining(config, cube)
    place: dict[str, Any] = {"shape": CubeShape(), "rank": 0}
    with Loader(packed(opened), global_batch=4, end_step=1, **place) as loader:
        step = next(loader)
    output = model(step.batches[0], step.targets, step.sequences)
    output.loss.backward()
    assert all(parameter.grad is None or parameter.grad.isfinite().all() for parameter in model.parameters())
    assert output.mlm_loss == pytest.approx(np.log(opened.vocab_size), rel=0.05)
    assert output.nsp_loss == (0 if single else pytest.approx(np.log(2), rel=0.05))
    assert output.loss == output.mlm_loss + output.nsp_loss
    means = held_out_means(model, packed(opened, held_out=True), cube, 2, lambda batch: True)
    assert means is not None
    assert torch.tensor(list(means.values())).isfinite().all()
    assert means["masked_lm_loss"] == pytest.approx(np.log(opened.vocab_size), rel=0.05)
    assert ("next_sentence_accuracy" in means) is not single
    if single:
        assert means["loss"] == means["masked_lm_loss"]


RECIPE = """
[data]
capacity = 32
max_length = 24
[model]
layers = 1
hidden = 16
heads = 2
[batch]
global_batch = 4
[run]
steps = 1
"""


@pytest.mark.parametrize("single", [False, True])
def test_a_step_on_single_texts_has_no_next_sentence_accuracy(ids: Path, tmp_path: Path, single: bool) -> None:
    made(tmp_path / "samples", ids, single_texts=single, max_length=24, capacity=32)
    (tmp_path / "recipe.toml").write_text(RECIPE)
    recipe = parse([str(tmp_path / "recipe.toml"), "--data.source", str(tmp_path / "samples")]).settings
    corpus, cube = open_corpus(tmp_path / "samples"), Cube.single()
    with TrainData.of_corpus(recipe, cube, corpus) as feed, feed.loader(0, 1) as loader:
        (metrics,) = PretrainTrainer(recipe, cube, feed, corpus).steps(loader)
    assert (metrics.next_sentence_accuracy is None) is single
    assert ("accuracy/next_sentence" in metrics.scalars()) is not single
    assert metrics.next_sentence_loss == (0 if single else pytest.approx(np.log(2), rel=0.05))


def test_a_machine_may_lack_shards(folder: Path, tmp_path: Path) -> None:
    copy = shutil.copytree(folder, tmp_path / "copy")
    for file in copy.glob("samples-00001-of-00003.*"):
        file.unlink()
    opened = open_samples(copy)
    assert [shard is None for shard in opened.shards] == [False, True, False]
    assert content(opened.shards[2]) == content(open_samples(folder).shards[2])
    assert opened.fingerprint == open_samples(folder).fingerprint
    for file in copy.glob("samples-*"):
        file.unlink()
    with pytest.raises(ValueError, match=r"\b3\b.*samples-00000-of-00003.bin and .idx"):
        open_samples(copy)


@pytest.mark.parametrize(
    "name", ["samples-00002-of-00003.labels.npy", "samples-00000-of-00003.idx", "heldout.bin", "plan.json"]
)
def test_a_file_that_is_missing_or_cut_short_is_named(folder: Path, tmp_path: Path, name: str) -> None:
    copy = shutil.copytree(folder, tmp_path / "copy")
    size = (copy / name).stat().st_size
    (copy / name).write_bytes((copy / name).read_bytes()[:-1])
    with pytest.raises(ValueError, match=f"{name} has {size - 1} bytes where step.json speaks of {size} bytes"):
        open_samples(copy)
    (copy / name).unlink()
    with pytest.raises(ValueError, match=f"{name} is missing"):
        open_samples(copy)


def test_what_is_no_folder_of_samples_is_named(ids: Path, folder: Path, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"samples.*step.json"):
        open_samples(tmp_path)
    with pytest.raises(ValueError, match=r"output.*'tokenize'"):
        open_samples(ids)
    copy = shutil.copytree(folder, tmp_path / "copy")
    values = json.loads((copy / "step.json").read_text())
    (copy / "step.json").write_text(json.dumps(values)[:-9])
    with pytest.raises(ValueError, match=r"step.json is damaged"):
        open_samples(copy)


@pytest.mark.parametrize(
    ("part", "name", "words"),
    [
        ("version", None, "is damaged: it has no 'version'"),
        ("settings", None, "is damaged: it lacks settings"),
        ("counts", None, "is damaged: it lacks counts"),
        ("settings", "single_texts", "is damaged: it lacks single_texts"),
        ("counts", "corpora", "is damaged: it lacks corpora"),
    ],
)
def test_what_a_record_lacks_is_named(folder: Path, tmp_path: Path, part: str, name: str | None, words: str) -> None:
    values = json.loads((folder / "step.json").read_text())
    del (values if name is None else values[part])[name or part]
    (tmp_path / "step.json").write_text(json.dumps(values))
    with pytest.raises(ValueError, match=f"step.json {words}"):
        read_step(tmp_path)


def test_a_record_of_another_version_is_refused(folder: Path, tmp_path: Path) -> None:
    values = json.loads((folder / "step.json").read_text())
    (tmp_path / "step.json").write_text(json.dumps(values | {"version": 77}))
    with pytest.raises(ValueError, match=r"step.json has version \b77\b.*\d+"):
        read_step(tmp_path)


def test_opening_raises_the_limit_of_open_files(folder: Path) -> None:
    with files_to_open(6):  # of 16 that it takes
        opened = open_samples(folder)
        assert len(training(opened)) == opened.counts["sequences"]


def test_names_of_shards() -> None:
    assert sample_shard_names(2) == ["samples-00000-of-00002", "samples-00001-of-00002"]
