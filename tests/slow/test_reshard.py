"""One run, stopped and resumed on one cube after another, in fp64: it is the run that never stopped."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest
import torch
from torch import Tensor

from tensor3d import Cube, CubeShape, checkpoint
from tensor3d.checkpoint import Checkpoints
from tests.ranks import run_ranks
from tests.single_device_reference import error, full
from tests.tools.runs import write_text
from tools.corpus.quick.prepare import prepare
from tools.corpus.training_corpus import open_corpus
from tools.training.config import BatchConfig, DataConfig, ModelConfig, OptimizerConfig, RunConfig, TrainConfig
from tools.training.data import TrainData
from tools.training.pretraining import PretrainTrainer

CHAIN = ("2x2x2", "1x1x1", "1x4x2", "2x2x1 x2")  # the last with two copies
STEPS = 10  # on each cube


def recipe_of(kind: str) -> TrainConfig:
    return TrainConfig(
        data=DataConfig(vocab_size=67, capacity=64, max_length=64),
        model=ModelConfig(layers=2, hidden=64, heads=8, inner=96, dropout=0.0, attention_dropout=0.0, std=0.1),
        optimizer=OptimizerConfig(kind=kind, lr=3e-3, warmup=0.1),  # type: ignore[arg-type]
        batch=BatchConfig(global_batch=8),
        run=RunConfig(steps=STEPS * len(CHAIN), evaluate_every=0),
    )


def trained(shape: str, kind: str, corpus_folder: Path, run: Path, first: int, last: int) -> tuple[list[float], Tensor]:
    """Losses of the steps from `first` to `last`, resumed if there is something to resume; and a weight at the end."""
    torch.set_default_dtype(torch.float64)
    sizes, _, copies = shape.partition(" x")
    box = CubeShape.parse(sizes, int(copies or 1))
    cube = Cube(box.x, box.y, box.z, box.data)
    corpus, recipe = open_corpus(corpus_folder), recipe_of(kind)
    with TrainData.of_corpus(recipe, cube, corpus) as feed:
        trainer = PretrainTrainer(recipe, cube, feed, corpus)
        found = checkpoint.latest(run)
        if found is not None:
            trainer.resume(found)
        assert trainer.state.step == first
        with feed.loader(first, last) as loader, Checkpoints(run, cube) as checkpoints:
            losses = [metrics.loss for metrics in trainer.steps(loader)]
            trainer.save(checkpoints)
    return losses, full(trainer.model.bert.layers[1].mlp.up.weight)


@pytest.mark.slow
@pytest.mark.parametrize(
    "kind", ["adamw", pytest.param("lamb", marks=pytest.mark.long(reason="its norms have fast tests on cubes"))]
)
def test_a_chain_of_cubes_trains_as_one(kind: str, tmp_path: Path) -> None:
    corpus, text = tmp_path / "corpus", tmp_path / "text.txt"
    recipe = recipe_of(kind)
    write_text(text)
    prepare(str(text), corpus, vocab_size=recipe.data.vocab_size, held_out=0.02, seed=0)
    wanted, weight = run_ranks(1, trained, "1x1x1", kind, corpus, tmp_path / "whole", 0, recipe.run.steps)[0]
    assert dataclasses.asdict(recipe)["run"]["steps"] == len(wanted)
    losses: list[float] = []
    for number, shape in enumerate(CHAIN):
        ranks = {"1x1x1": 1}.get(shape, 8)
        results = run_ranks(
            ranks, trained, shape, kind, corpus, tmp_path / "chain", number * STEPS, (number + 1) * STEPS
        )
        assert all(result[0] == results[0][0] for result in results), "ranks see different losses"
        losses += results[0][0]
        end = results[0][1]
    worst = max(abs(a / b - 1) for a, b in zip(losses, wanted, strict=True))
    print(f"{kind}: largest relative difference of a loss {worst:.1e}, of a weight {error(end, weight):.1e}")
    assert worst <= 1e-9
    assert error(end, weight) <= 1e-9
