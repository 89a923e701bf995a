"""The headline numbers of a step, from a step that is made up: tokens/s, model TFLOP/s, MFU and what stands beside."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from tensor3d import CommStats, Cube, CubeShape
from tensor3d.data import TrainBatch
from tests.tools.runs import arguments, journal
from tools import pretrain
from tools.training import pretraining
from tools.training.config import read_config
from tools.training.metrics import StepMetrics
from tools.training.pretraining import PretrainSums, PretrainTrainer
from tools.training.profiling import StepTimes
from tools.training.step import AsyncScalars, PendingStep

FLOPS = 48e12  # of the made-up step, on all ranks together
SUMS = PretrainSums(
    loss=7.5, masked_lm_loss=7.0, next_sentence_loss=0.5, masked_lm_correct=30.0, next_sentence_correct=9.0
)
NORM, FOUND_INF, LOSS_SCALE, STOP_FLAGS = 2.25, 0.0, 1.0, 0.0


class At:
    """A moment, in seconds."""

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds

    def synchronize(self) -> None:
        pass

    def elapsed_time(self, end: At) -> float:
        return 1e3 * (end._seconds - self._seconds)


@pytest.fixture
def metrics(monkeypatch: pytest.MonkeyPatch) -> StepMetrics:
    """Of a step of 3 s and 6,000 tokens on 4 ranks whose peak is 10 TFLOP/s each."""
    monkeypatch.setattr(pretraining, "step_flops", lambda config, step, read_rows_only: FLOPS)
    lap = StepTimes(
        ("data", "forward", "backward", "gradient_sum", "optimizer"), [At(t) for t in (0.0, 0.25, 1.0, 2.5, 2.75, 3.0)]
    )
    step = TrainBatch(
        index=6,
        batches=[],
        targets=120,
        sequences=12,
        tokens=6000,
        squares=0,
        lengths=np.zeros(1, dtype=np.int64),
        fill=0.9375,
        imbalance=1.5,
    )
    traffic = CommStats(
        received=Counter({("y", "all-gather"): 1000, ("x", "all-gather"): 24}), calls=Counter({("y", "all-gather"): 5})
    )
    numbers = [*SUMS, NORM, FOUND_INF, LOSS_SCALE, STOP_FLAGS]
    taken = PendingStep(
        step=step,
        learning_rate=1e-3,
        lap=lap,
        traffic=traffic,
        norm=None,  # type: ignore[arg-type]
        numbers=AsyncScalars(torch.tensor(numbers, dtype=torch.float64)),
        stall=0.125,
    )
    of_a_run: Any = SimpleNamespace(
        state=SimpleNamespace(skipped_steps=3),
        stop_if=lambda stop: None,
        metrics=lambda taken, numbers: PretrainTrainer.metrics(of_a_run, taken, numbers),
        _judge=lambda taken, numbers: None,
        model=SimpleNamespace(config=SimpleNamespace(next_sentence=True)),
        recipe=SimpleNamespace(speed=SimpleNamespace(read_rows_only=False)),
        cube=SimpleNamespace(shape=CubeShape(y=2, z=2)),
        _peak=10e12,
    )
    return PretrainTrainer._read(of_a_run, taken)


def test_tokens_a_second_are_those_of_the_whole_job(metrics: StepMetrics) -> None:
    assert metrics.tokens_per_second == pytest.approx(6000 / 3)


def test_flops_are_those_of_one_rank(metrics: StepMetrics) -> None:
    """48 TFLOP in 3 s by 4 ranks are 4 TFLOP/s each, of 10."""
    assert metrics.model_tflops == pytest.approx(4.0)
    assert metrics.mfu == pytest.approx(0.4)


def test_what_the_device_found_is_told_as_it_is(metrics: StepMetrics) -> None:
    assert (metrics.step, metrics.loss, metrics.masked_lm_loss, metrics.next_sentence_loss) == (7, 7.5, 7.0, 0.5)
    assert metrics.masked_lm_accuracy == 30 / 120
    assert metrics.next_sentence_accuracy == 9 / 12
    assert (metrics.learning_rate, metrics.gradient_norm, metrics.loss_scale) == (1e-3, 2.25, 1.0)
    assert (metrics.skipped, metrics.skipped_steps) == (False, 3)
    assert (metrics.fill, metrics.imbalance, metrics.masked_share) == (0.9375, 1.5, 120 / 6000)


def test_times_and_traffic_are_those_of_the_step(metrics: StepMetrics) -> None:
    assert metrics.seconds == pytest.approx(3.0)
    times = (metrics.data_wait_seconds, metrics.forward_seconds, metrics.backward_seconds)
    assert times == pytest.approx((0.25, 0.75, 1.5))
    assert (metrics.gradient_sum_seconds, metrics.optimizer_seconds) == pytest.approx((0.25, 0.25))
    assert metrics.checkpoint_seconds == 0.125
    assert (metrics.bytes_received, metrics.collectives) == (1024, 5)
    assert metrics.traffic == {"y": 1000, "x": 24}


def test_a_run_tells_the_same_of_a_real_step(recipe: Path, tmp_path: Path) -> None:
    """Tokens are the share of slots that are filled; MFU is of the peak that the recipe states."""
    more = ["--run.steps", "2", "--run.peak-tflops", "0.5", "--run.evaluate-every", "0", "--run.checkpoint-every", "0"]
    assert pretrain.main(arguments(recipe, tmp_path / "run", *more)) == 0
    steps = journal(tmp_path / "run", "step")
    settings = read_config(recipe)
    slots = settings.batch.global_batch * settings.data.capacity
    assert len(steps) == 2
    for step in steps:
        tokens = step["tokens_per_second"] * step["seconds"]
        assert tokens == pytest.approx(step["fill"] * slots, rel=1e-6)
        assert step["mfu"] == pytest.approx(step["model_tflops"] / 0.5)
        assert step["mfu"] > 0


class Judged:
    """A model that always finds the same sums: of losses and of what is right, over 10 targets and 4 pairs a batch."""

    bert = SimpleNamespace(read_rows_only=False)

    def eval(self) -> None: ...

    def train(self) -> None: ...

    def __call__(self, *_: object) -> SimpleNamespace:
        return SimpleNamespace(sums=torch.tensor([0.0, 60.0, 2.0, 5.0, 3.0]))


def test_an_evaluation_is_over_all_batches(monkeypatch: pytest.MonkeyPatch) -> None:
    batches = [SimpleNamespace(batches=[None], targets=targets, sequences=4, tokens=99) for targets in (10, 30)]
    monkeypatch.setattr(pretraining, "evaluation_batches", lambda *_, **__: iter(batches))
    data: Any = None
    model: Any = Judged()
    means = pretraining.held_out_means(model, data, Cube.single(), 1, lambda batch: True)
    assert means == pytest.approx(
        {
            "loss": 120 / 40 + 4 / 8,
            "masked_lm_loss": 120 / 40,
            "masked_lm_accuracy": 10 / 40,
            "next_sentence_accuracy": 6 / 8,
        }
    )
