"""MLPerf's log lines, ":::MLLOG {...}", so that its checkers and plots read a run.

The format is that of MLPerf's logging library (github.com/mlcommons/logging, mllog). The library itself is not used: to
print a line of JSON it would bring pandas along. With the lines that a submission adds by hand (submission_org,
submission_platform, submission_division, cache_clear) its compliance checker accepts these for BERT, ruleset 4.1.0.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, Literal

from tools.training.config import OptimizerConfig

Event = Literal["INTERVAL_START", "INTERVAL_END", "POINT_IN_TIME"]


def line(key: str, value: Any, event: Event, metadata: Mapping[str, Any], time_ms: int) -> str:
    """One line. `time_ms`: since 1970."""
    facts = {
        "namespace": "",
        "time_ms": time_ms,
        "event_type": event,
        "key": key,
        "value": value,
        "metadata": dict(metadata),
    }
    return f":::MLLOG {json.dumps(facts)}"


def _to_stdout(text: str) -> None:
    with suppress(OSError):  # a log on a full disk ends no training
        print(text, flush=True)


@dataclass(kw_only=True)
class MLPerfLog:
    """The lines of one run in their order: the start, settings, training, evaluations, the end.

    Samples are sequences trained on; they stand for BERT's epochs, as in the submissions.
    """

    shown: bool
    """False on every rank but 0, and where nobody asked for these lines."""
    write: Callable[[str], None] = _to_stdout

    def starting(self) -> None:
        """Before the model is made."""
        self._log("submission_benchmark", "bert")
        self._log("init_start", None, "INTERVAL_START")

    def settings(self, values: Mapping[str, Any]) -> None:
        """What the run is made of; see the function of this name."""
        for key, value in values.items():
            self._log(key, value)

    def ready(self, samples: int) -> None:
        """Everything is set up, and the first step begins; so does MLPerf's time."""
        self._log("init_stop", None, "INTERVAL_END")
        self._log("run_start", None, "INTERVAL_START")
        self._training(samples)

    def evaluating(self, samples: int) -> None:
        """Before an evaluation."""
        self._log("block_stop", None, "INTERVAL_END", _epoch(samples, "first_epoch_num"))
        self._log("eval_start", None, "INTERVAL_START", _epoch(samples, "epoch_num"))

    def evaluated(self, samples: int, accuracy: float, *, goes_on: bool) -> None:
        """After it. `goes_on`: the run trains on."""
        self._log("eval_accuracy", accuracy, metadata=_epoch(samples, "epoch_num"))
        self._log("eval_stop", None, "INTERVAL_END", _epoch(samples, "epoch_num"))
        if goes_on:
            self._training(samples)

    def stopped(self, samples: int, *, reached: bool) -> None:
        """The end. `reached`: the target accuracy was."""
        self._log(
            "run_stop", None, "INTERVAL_END", {"status": "success" if reached else "aborted", "samples_count": samples}
        )

    def _training(self, samples: int) -> None:
        self._log("block_start", None, "INTERVAL_START", _epoch(samples, "first_epoch_num") | {"epoch_count": 1})

    def _log(
        self, key: str, value: Any, event: Event = "POINT_IN_TIME", metadata: Mapping[str, Any] | None = None
    ) -> None:
        if self.shown:
            self.write(line(key, value, event, metadata or {}, time_ms=time.time_ns() // 1_000_000))


def settings(
    optimizer: OptimizerConfig,
    *,
    betas: tuple[float, float],
    seed: int,
    steps: int,
    global_batch: int,
    accumulation: int,
    train_samples: int,
    eval_samples: int,
) -> dict[str, Any]:
    """What MLPerf's rules ask of BERT, under its keys.

    Args:
        betas: as the optimiser has them, which packing may have changed.
        global_batch: sequences of a step, on average.
        train_samples, eval_samples: sequences of the training and of the held-out documents.
    """
    rises = max(1, round(optimizer.warmup * steps))
    name = f"opt_{optimizer.kind}"
    decay = f"{name}_weight_decay" + ("_rate" if optimizer.kind == "lamb" else "")
    values: dict[str, Any] = {
        "seed": seed,
        "global_batch_size": global_batch,
        "gradient_accumulation_steps": accumulation,
        "train_samples": train_samples,
        "eval_samples": eval_samples,
        "opt_name": optimizer.kind,
        "opt_base_learning_rate": optimizer.lr,
        "opt_end_learning_rate": optimizer.lr * optimizer.floor,
        "opt_learning_rate_training_steps": steps,
        "opt_learning_rate_warmup_steps": rises,
        "num_warmup_steps": rises,
        "start_warmup_step": 0,
        "opt_learning_rate_decay_schedule": optimizer.schedule,
        f"{name}_beta_1": betas[0],
        f"{name}_beta_2": betas[1],
        f"{name}_epsilon": optimizer.eps,
        decay: optimizer.weight_decay,
        "opt_gradient_clip_norm": optimizer.clip,
    }
    if optimizer.schedule == "polynomial":
        values["opt_lamb_learning_rate_decay_poly_power"] = optimizer.power
    return values


def _epoch(samples: int, name: str) -> dict[str, int]:
    return {name: samples, "samples_count": samples}
