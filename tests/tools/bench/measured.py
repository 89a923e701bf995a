"""Numbers of steps and evaluations, made up."""

from __future__ import annotations

import dataclasses
from collections import Counter
from pathlib import Path
from typing import Any

from tensor3d.cost_model.comm_volume import Bytes
from tools.bench.harness.memory import RankMemory
from tools.bench.harness.step_trial import RankFacts, StepSample
from tools.training.metrics import EvaluationMetrics, StepMetrics

STEP = StepMetrics(
    step=1,
    loss=0.1 + 0.2,
    masked_lm_loss=6.0,
    next_sentence_loss=0.5,
    masked_lm_accuracy=0.25,
    next_sentence_accuracy=0.5,
    learning_rate=1e-3,
    gradient_norm=2.0,
    loss_scale=1.0,
    skipped=False,
    skipped_steps=0,
    seconds=2.0,
    tokens_per_second=1000.0,
    model_tflops=0.5,
    mfu=None,
    data_wait_seconds=0.1,
    forward_seconds=0.5,
    backward_seconds=0.8,
    gradient_sum_seconds=0.4,
    optimizer_seconds=0.2,
    checkpoint_seconds=0.0,
    fill=0.98,
    masked_share=0.15,
    imbalance=1.01,
    bytes_received=3 * 2**20,
    collectives=7,
    traffic={"y": 2**20, "data+x+z": 2**21},
)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Outcome:
    step: int = 2
    path: Path | None = Path("run/checkpoints/step-00000002")
    seconds: float = 1.5
    bytes: int = 4096
    error: str | None = None


def step(number: int, **values: Any) -> StepMetrics:
    return dataclasses.replace(STEP, step=number, **values)


def evaluation(number: int, loss: float) -> EvaluationMetrics:
    return EvaluationMetrics(
        step=number,
        samples=10 * number,
        loss=loss,
        masked_lm_loss=loss - 0.5,
        masked_lm_accuracy=0.3,
        next_sentence_accuracy=0.6,
    )


def sample(seconds: float, received: int = 0) -> StepSample:
    return StepSample(
        seconds=seconds,
        tokens=100,
        loss=1.0,
        received=Counter({("y", "all-gather"): received}),
        calls=Counter({("y", "all-gather"): 3}),
        flops=1000,
    )


def facts(first_loss: float = 5.0, expected: int = 0) -> RankFacts:
    form: Bytes = Counter({("y", "all-gather"): expected})
    memory = RankMemory(
        held=30 + expected,
        held_closed_form=38,
        saved=20 + expected,
        peak=60 + expected,
    )
    calls = Counter({("y", "all-gather"): 3})
    return RankFacts(
        device="cpu",
        threads=1,
        closed_form=form,
        calls_closed_form=calls,
        first_loss=first_loss,
        peak_memory=expected,
        memory=memory,
    )
