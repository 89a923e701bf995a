"""What pre-training shows: a progress line, metrics.jsonl and TensorBoard, and a table at the end."""

from __future__ import annotations

import logging
import math
import re
import statistics
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any

from tqdm import tqdm

from tensor3d import Cube
from tools.common.log import progress
from tools.common.units import in_bytes
from tools.training.metrics.jsonl import read_journal
from tools.training.metrics.records import EvaluationMetrics, MemoryMetrics, StepMetrics, peak_memory
from tools.training.metrics.run_log import CheckpointOutcome, RunLog
from tools.training.metrics.tensorboard import TensorBoardLogger
from tools.training.mlperf_log import MLPerfLog

# --- The table at the end of a run ------------------------------------------------------------------------------------

Rows = list[tuple[str, str]]
_NUMBER = re.compile(r"-?\d(?:[\d,]*\d)?(?:\.\d+)?%?")


def summary(
    history: Sequence[StepMetrics],
    evaluations: Sequence[EvaluationMetrics],
    entropy: float,
    memories: Sequence[MemoryMetrics] = (),
    *,
    first: Mapping[str, Any] | None = None,
    stalled: float = 0.0,
    more: Sequence[tuple[str, str]] = (),
) -> list[str]:
    """Lines of the closing table.

    Args:
        history: steps of this process; one that was resumed has not done the earlier ones, and none at all where an
            evaluation was all that was left.
        evaluations: its held-out evaluations.
        entropy: of the corpus' unigrams, nats.
        memories: its looks at memory.
        first: the first step in the run's journal, as a record. Default: that of the history.
        stalled: seconds that checkpoints have taken behind the last step, which no step tells.
        more: rows behind those that come from the metrics.
    """
    rows = [*_losses(history, entropy, vars(history[0]) if first is None else first)] if history else []
    if evaluations:
        held_out = evaluations[-1]
        rows.append(("held-out masked-LM loss", f"{held_out.masked_lm_loss:.3f} nats"))
        rows.append(("held-out masked-LM accuracy", f"{held_out.masked_lm_accuracy:.1%}"))
        if held_out.replaced_token_loss is not None:
            rows.append(("held-out replaced-token loss", f"{held_out.replaced_token_loss:.4f} nats"))
            rows.append(("held-out replaced-token accuracy", f"{held_out.replaced_token_accuracy:.1%}"))
    rows += _steps(history, stalled) if history else []
    if memories:
        rows.append(_memory(memories[-1].peak_bytes))
    return table([*rows, *more], numbers=True)


def _steps(history: Sequence[StepMetrics], stalled: float) -> Rows:
    return [
        ("fill of the packs", f"{statistics.fmean(m.fill for m in history):.2%}"),
        ("busiest rank over the mean", f"{statistics.fmean(m.imbalance for m in history):.4f} of the work"),
        *_speed(history, stalled),
        ("collectives a step", f"{history[-1].collectives}"),
        ("received a step by rank 0", in_bytes(history[-1].bytes_received)),
    ]


def table(rows: Sequence[tuple[str, str]], *, numbers: bool = False) -> list[str]:
    """Two columns, as lines. `numbers`: those that values begin with stand on the right of a column of their own."""
    width = max(len(name) for name, _ in rows)
    leading = [match[0] if numbers and (match := _NUMBER.match(value)) else "" for _, value in rows]
    column = max(map(len, leading))
    return [
        f"  {name:<{width}}  {number:>{column if number else 0}}{value.removeprefix(number)}"
        for (name, value), number in zip(rows, leading, strict=True)
    ]


def first_step(journal: Path) -> dict[str, Any] | None:
    """The first step in a journal, which is step 1 unless somebody has removed the file. None: it cannot be read, or no
    step of pre-training is in it, as in another tool's that was put in its place."""
    with suppress(OSError):
        return next((line for line in read_journal(journal) if line["kind"] == "step" and _has_losses(line)), None)
    return None


def _has_losses(step: Mapping[str, Any]) -> bool:
    """Numbers that are not finite are written as text."""
    try:
        for name in ("loss", "masked_lm_loss"):
            float(step[name])
    except (KeyError, TypeError, ValueError):
        return False
    return True


def _losses(history: Sequence[StepMetrics], entropy: float, first: Mapping[str, Any]) -> Rows:
    # A skipped step may have a loss that is not finite.
    last = [m.masked_lm_loss for m in history[-20:] if math.isfinite(m.masked_lm_loss)]
    ended, side = "not finite in any of the last steps", ""
    if last:
        end = statistics.fmean(last)
        ended = f"{end:.3f} nats"
        side = f"; the loss is {abs(end - entropy):.3f} {'below' if end < entropy else 'above'} it"
    begun, resumed = first["step"], history[0].step
    rows = [(f"masked-LM loss, step {begun}", f"{float(first['masked_lm_loss']):.3f} nats")]
    # All of the loss, as the page of tools.report begins with.
    if first.get("next_sentence_loss") is not None or first.get("replaced_token_loss") is not None:
        rows.insert(0, (f"loss, step {begun}", f"{float(first['loss']):.3f} nats"))
    if resumed != begun:
        rows.append((f"masked-LM loss, step {resumed} (resumed)", f"{history[0].masked_lm_loss:.3f} nats"))
    rows += [
        (f"masked-LM loss, mean of last {len(last)}" if last else "masked-LM loss", ended),
        ("unigram entropy of the corpus", f"{entropy:.3f} nats{side}"),
    ]
    newest, recent = history[-1], history[-20:]
    told = [m.replaced_token_loss for m in recent if m.replaced_token_loss is not None]
    if told and newest.replaced_token_accuracy is not None and newest.replaced_share is not None:
        rows.append((f"replaced-token loss, mean of last {len(told)}", f"{statistics.fmean(told):.4f} nats"))
        rows.append(
            (
                "replaced tokens, last step",
                f"{newest.replaced_share:.1%} of all; {newest.replaced_token_accuracy:.1%} of the tokens told right",
            )
        )
    if newest.skipped_steps:
        rows.append(
            ("skipped steps", f"{newest.skipped_steps}, gradients not finite; loss scale {newest.loss_scale:g}")
        )
    return rows


def _speed(history: Sequence[StepMetrics], stalled: float) -> Rows:
    total = sum(m.seconds for m in history)
    waited = sum(m.data_wait_seconds for m in history) / total
    stalled += sum(m.checkpoint_seconds for m in history)
    rows = [
        ("median step", f"{statistics.median(m.seconds for m in history):.3f} s"),
        ("waiting for data", f"{waited:.2%} of the time"),
        ("rest of the step", _split(history, total)),
        ("waiting for checkpoints", f"{stalled:.2f} s, {stalled / (total + stalled):.2%} of the time"),
        ("real tokens/s, median", f"{statistics.median(m.tokens_per_second for m in history):,.0f}"),
        ("model TFLOP/s a rank, median", f"{statistics.median(m.model_tflops for m in history):,.4g}"),
    ]
    known = [m.mfu for m in history if m.mfu is not None]
    if known:
        rows.append(("model FLOPs utilisation, median", f"{statistics.median(known):.1%} of the peak"))
    return rows


def _split(history: Sequence[StepMetrics], total: float) -> str:
    """Where the steps' time went, besides waiting for data."""
    shares = {
        "forward": sum(m.forward_seconds for m in history) / total,
        "backward": sum(m.backward_seconds for m in history) / total,
        "gradient sum": sum(m.gradient_sum_seconds for m in history) / total,
        "optimiser": sum(m.optimizer_seconds for m in history) / total,
    }
    return ", ".join(f"{name} {share:.1%}" for name, share in shares.items())


def _memory(peaks: Sequence[int]) -> tuple[str, str]:
    most = max(peaks)
    where = "" if len(peaks) == 1 else f" on rank {peaks.index(most)}; mean of {len(peaks)}: "
    mean = "" if len(peaks) == 1 else in_bytes(statistics.fmean(peaks))
    return ("peak memory of a rank", f"{in_bytes(most)}{where}{mean}")


# --- What a run shows while it trains ---------------------------------------------------------------------------------

_REMEMBERED = 10_000  # steps: of a run of months, enough for the table at its end


@dataclass(kw_only=True)
class ConsoleLogger(RunLog[StepMetrics, EvaluationMetrics]):
    """Shows the metrics of pre-training, with TensorBoard and MLPerf's lines. With `shown=False` it only remembers
    them."""

    log_every: int
    """Steps between two points in TensorBoard; metrics.jsonl has them all."""
    mllog: MLPerfLog = field(default_factory=lambda: MLPerfLog(shown=False))
    history: list[StepMetrics] = field(default_factory=list)
    """The first step, and the last 10,000 or more."""
    evaluations: list[EvaluationMetrics] = field(default_factory=list)
    memories: list[MemoryMetrics] = field(default_factory=list)

    def __enter__(self) -> ConsoleLogger:
        self._board: TensorBoardLogger | None = None
        super().__enter__()
        return self

    def open_files(self) -> None:
        super().open_files()
        if self._board is not None:
            self._board.close()
        self._board = TensorBoardLogger(self.directory / "tensorboard", first_step=self._done, say=self.say)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if self._board is not None:
            self._board.close()
        super().__exit__(kind, error, traceback)

    def bar(self) -> tqdm[Any]:
        return progress(
            total=self.steps, initial=self.first_step, unit="step", mininterval=0.2, shown=self.shown, lines=True
        )

    def in_words(self, metrics: StepMetrics) -> str:
        skipped = f", {metrics.skipped_steps} skipped" if metrics.skipped_steps else ""
        speed = f"{metrics.tokens_per_second:,.0f} tokens/s"
        # Where it is all of the loss, it is not said twice.
        alone = metrics.next_sentence_loss is None and metrics.replaced_token_loss is None
        parts = "" if alone else f", mlm {metrics.masked_lm_loss:.3f}"
        if metrics.replaced_token_loss is not None:
            parts += f", replaced {metrics.replaced_token_loss:.4f}"
        return f"loss {metrics.loss:.3f}{parts}, {speed}{skipped}"

    def ready(self, samples: int) -> None:
        self.mllog.ready(samples)

    def step(self, metrics: StepMetrics) -> None:
        self.history.append(metrics)
        if len(self.history) > 2 * _REMEMBERED:
            del self.history[1:-_REMEMBERED]
        super().step(metrics)
        if metrics.step % self.log_every == 0 or metrics.step == self.steps:
            self._plot(metrics.scalars(), metrics.step)

    def evaluating(self, samples: int) -> None:
        self.mllog.evaluating(samples)

    def evaluation(self, metrics: EvaluationMetrics, *, best: bool = False, goes_on: bool = True) -> None:
        self.evaluations.append(metrics)
        super().evaluation(metrics, best=best, goes_on=goes_on)
        self._plot(metrics.scalars(), metrics.step)
        self.say(
            f"step {metrics.step}: held-out masked-LM loss {metrics.masked_lm_loss:.3f}, accuracy "
            f"{metrics.masked_lm_accuracy:.1%}{_told_of_replaced(metrics)}"
        )
        self.mllog.evaluated(metrics.samples, metrics.masked_lm_accuracy, goes_on=goes_on)

    def boundary(self, step: int, cube: Cube) -> None:
        self.memory(MemoryMetrics(step=step, peak_bytes=peak_memory(cube)))

    def memory(self, metrics: MemoryMetrics) -> None:
        """Memory was looked at, on all ranks."""
        self.memories.append(metrics)
        self._note("memory", metrics.record())
        self._plot(metrics.scalars(), metrics.step)

    def checkpoint(self, outcome: CheckpointOutcome) -> None:
        record = {
            "step": outcome.step,
            "path": None if outcome.path is None else str(outcome.path),
            "seconds": outcome.seconds,
            "bytes": outcome.bytes,
            "error": outcome.error,
        }
        self._note("checkpoint", record)
        super().checkpoint(outcome)
        if outcome.path is not None:
            self._plot(
                {"checkpoint/write_seconds": outcome.seconds, "checkpoint/bytes": float(outcome.bytes)}, outcome.step
            )
        else:
            why = (outcome.error or "").rstrip(".")
            self.say(
                f"step {outcome.step}: NO CHECKPOINT: {why}. Weights and the checkpoints before stay as they are.",
                logging.WARNING,
            )

    def flush(self) -> None:
        if self._board is not None:
            self._board.sync()
        super().flush()

    def stopped(self, samples: int, *, reached: bool) -> None:
        self.mllog.stopped(samples, reached=reached)

    def _plot(self, scalars: Mapping[str, float], step: int) -> None:
        if self._board is not None:
            self._board.write(scalars, step)


def _told_of_replaced(metrics: EvaluationMetrics) -> str:
    if metrics.replaced_token_loss is None:
        return ""
    return f"; replaced-token loss {metrics.replaced_token_loss:.4f}, accuracy {metrics.replaced_token_accuracy:.1%}"
