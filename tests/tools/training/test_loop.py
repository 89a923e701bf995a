"""What every run tells between its steps, whatever it learns."""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from tensor3d import Cube, Linear3D, MixedPrecisionPolicy
from tensor3d.checkpoint import Checkpoints
from tensor3d.optim import AdamW, LRSchedule
from tools.training.loop import LoopSchedule, TrainLoop
from tools.training.metrics import RunLog
from tools.training.step import PendingStep, StepScalars
from tools.training.trainer import Trainer


@dataclass(frozen=True)
class Batch:
    index: int
    size: float
    sequences: int = 1


@dataclass(frozen=True)
class Metrics:
    step: int

    def record(self) -> dict[str, Any]:
        return vars(self)


class Log(RunLog[Metrics, Any]):
    def in_words(self, metrics: Metrics) -> str:
        return ""


class Mean:
    sums, are_parts = 1, False

    def __init__(self, layer: Linear3D) -> None:
        self._layer = layer

    def parts(self, batch: Batch) -> list[float]:
        return [batch.size]

    def loss(self, batch: Batch, part: float) -> tuple[Tensor, Tensor]:
        loss = self._layer(torch.full((4, 32), part)).float().mean()
        return loss, loss.detach().reshape(1)


class Small(Trainer[Batch, Metrics]):
    """A linear layer, of inputs of some sizes."""

    evaluates = False  # type: ignore[assignment]

    def __init__(self, cube: Cube, sizes: list[float]) -> None:
        self._sizes = sizes
        layer = Linear3D(32, 32, cube, bias=False)
        rate = LRSchedule(kind="constant", lr=1e-6, steps=len(sizes), warmup_steps=1)
        super().__init__(layer, AdamW(layer.parameters(), cube, lr=0.0), None, cube, Mean(layer), rate=rate, clip=1.0)

    def batches(self) -> AbstractContextManager[Iterable[Batch]]:
        return nullcontext(Batch(*each) for each in enumerate(self._sizes))

    def metrics(self, taken: PendingStep[Batch], numbers: StepScalars) -> Metrics:
        return Metrics(taken.step.index + 1)

    def evaluate(self) -> None:
        raise AssertionError("there is nothing to evaluate on")

    def save(self, checkpoints: Checkpoints, *, wait: bool = False) -> None:
        raise AssertionError("no checkpoint is asked for")


def test_what_fp8_has_cut_off_is_told_by_every_run_to_its_end(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """The one after another on a cube, as seeds of fine-tuning are: each tells its own."""
    cube = Cube.single(precision=MixedPrecisionPolicy(compute=torch.bfloat16, fp8="delayed"))
    told = []
    for name, sizes in (("a", [1.0, 1e3]), ("b", [1.0, 1.0]), ("c", [1.0, 1e3, 1e7])):
        caplog.clear()
        schedule = LoopSchedule(steps=len(sizes))
        with (
            caplog.at_level("INFO"),
            Log(directory=tmp_path / name, steps=len(sizes), shown=True) as log,
            Checkpoints(tmp_path / name / "checkpoints", cube, keep_last=None) as checkpoints,
        ):
            TrainLoop(Small(cube, sizes), log, checkpoints, schedule).to_the_end()
        told.append([record.message for record in caplog.records])
    said = "FP8: something was too large for its scale, and cut off, in {} more matrices of a pass"
    assert told == [[said.format(1)], [], [said.format(2)]]
