"""What a run shows while it trains: a progress line, TensorBoard, and a table at the end. On rank 0 alone."""

from __future__ import annotations

import statistics
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType

from tqdm import tqdm


@dataclass(frozen=True, kw_only=True)
class StepMetrics:
    """One step of the optimiser, over the whole cube."""

    step: int
    """Steps done, this one included."""
    loss: float
    """Masked-LM plus next-sentence loss, nats."""
    masked_lm_loss: float
    """Nats."""
    next_sentence_loss: float
    """Nats."""
    masked_lm_accuracy: float
    """0 to 1."""
    next_sentence_accuracy: float
    """0 to 1."""
    learning_rate: float
    gradient_norm: float
    """Before clipping."""
    seconds: float
    """From the end of the step before, without evaluation and checkpoints."""
    tokens_per_second: float
    """Real tokens: unused slots of packs do not count."""
    fill: float
    """Share of the token slots that hold a token."""
    imbalance: float
    """Most over mean work of a rank, in the micro-batch where that is worst."""
    data_wait_seconds: float
    """How long this rank waited for the batch."""
    bytes_received: int
    """By this rank, in the ring model, in which every rank sends about as many."""
    collectives: int
    """Issued by this rank."""

    def scalars(self) -> dict[str, float]:
        """Under the names that TensorBoard shows."""
        return {
            "loss/total": self.loss,
            "loss/masked_lm": self.masked_lm_loss,
            "loss/next_sentence": self.next_sentence_loss,
            "accuracy/masked_lm": self.masked_lm_accuracy,
            "accuracy/next_sentence": self.next_sentence_accuracy,
            "optimizer/learning_rate": self.learning_rate,
            "optimizer/gradient_norm": self.gradient_norm,
            "speed/step_seconds": self.seconds,
            "speed/tokens_per_second": self.tokens_per_second,
            "data/fill": self.fill,
            "data/imbalance": self.imbalance,
            "data/wait_seconds": self.data_wait_seconds,
            "traffic/bytes_sent": float(self.bytes_received),
            "traffic/collectives": float(self.collectives),
        }


@dataclass(frozen=True, kw_only=True)
class EvaluationMetrics:
    """All held-out packs, over the whole cube."""

    step: int
    loss: float
    masked_lm_loss: float
    masked_lm_accuracy: float
    next_sentence_accuracy: float

    def scalars(self) -> dict[str, float]:
        return {
            "evaluation/loss": self.loss,
            "evaluation/masked_lm_loss": self.masked_lm_loss,
            "evaluation/masked_lm_accuracy": self.masked_lm_accuracy,
            "evaluation/next_sentence_accuracy": self.next_sentence_accuracy,
        }


@dataclass(kw_only=True)
class Display:
    """Shows a run's metrics. With `shown=False` (every rank but 0) it only remembers them."""

    directory: Path
    """Where TensorBoard's files go."""
    steps: int
    first_step: int
    shown: bool
    log_every: int
    history: list[StepMetrics] = field(default_factory=list)
    evaluations: list[EvaluationMetrics] = field(default_factory=list)

    def __enter__(self) -> Display:
        self._bar = tqdm(
            total=self.steps,
            initial=self.first_step,
            disable=not self.shown,
            unit="step",
            # A terminal is redrawn in place; a log file gets a line now and then.
            mininterval=0.2 if sys.stderr.isatty() else 10.0,
        )
        if self.shown:
            # Imported here: it takes a second, and seven of eight ranks do without.
            from torch.utils.tensorboard import SummaryWriter

            self._writer = SummaryWriter(str(self.directory))
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._bar.close()
        if self.shown:
            self._writer.close()

    def step(self, metrics: StepMetrics) -> None:
        self.history.append(metrics)
        self._bar.set_postfix_str(
            f"loss {metrics.loss:.3f}, mlm {metrics.masked_lm_loss:.3f}, {metrics.tokens_per_second:,.0f} tokens/s",
            refresh=False,
        )
        self._bar.update()
        if metrics.step % self.log_every == 0 or metrics.step == self.steps:
            self._write(metrics.scalars(), metrics.step)

    def evaluation(self, metrics: EvaluationMetrics) -> None:
        self.evaluations.append(metrics)
        self._write(metrics.scalars(), metrics.step)
        self.say(
            f"step {metrics.step}: held-out masked-LM loss {metrics.masked_lm_loss:.3f}, accuracy "
            f"{metrics.masked_lm_accuracy:.1%}"
        )

    def flush(self) -> None:
        """Puts all points on disk: with a checkpoint, so that a run killed after it resumes without a gap."""
        if self.shown:
            self._writer.flush()

    def say(self, line: str) -> None:
        """One line above the progress bar."""
        if self.shown:
            tqdm.write(line)

    def _write(self, scalars: dict[str, float], step: int) -> None:
        if self.shown:
            for name, value in scalars.items():
                self._writer.add_scalar(name, value, step)


def summary(history: Sequence[StepMetrics], evaluations: Sequence[EvaluationMetrics], entropy: float) -> list[str]:
    """Lines of the closing table that come from the metrics."""
    last = history[-20:]
    end = statistics.fmean(m.masked_lm_loss for m in last)
    side = "below" if end < entropy else "above"
    waited = sum(m.data_wait_seconds for m in history) / sum(m.seconds for m in history)
    typical = statistics.median(m.seconds for m in history)
    rows = [
        ("masked-LM loss, first step", f"{history[0].masked_lm_loss:.3f} nats"),
        (f"masked-LM loss, mean of last {len(last)}", f"{end:.3f} nats"),
        ("unigram entropy of the corpus", f"{entropy:.3f} nats; the loss is {abs(end - entropy):.3f} {side} it"),
    ]
    if evaluations:
        held_out = evaluations[-1]
        rows.append(("held-out masked-LM loss", f"{held_out.masked_lm_loss:.3f} nats"))
        rows.append(("held-out masked-LM accuracy", f"{held_out.masked_lm_accuracy:.1%}"))
    rows += [
        ("fill of the packs", f"{statistics.fmean(m.fill for m in history):.2%}"),
        ("busiest rank over the mean", f"{statistics.fmean(m.imbalance for m in history):.4f} of the work"),
        ("median step", f"{typical:.3f} s"),
        ("waiting for data", f"{waited:.2%} of the time"),
        ("real tokens/s, median", f"{statistics.median(m.tokens_per_second for m in history):,.0f}"),
        ("collectives a step", f"{history[-1].collectives}"),
        ("received a step by rank 0", f"{history[-1].bytes_received / 2**20:.2f} MiB"),
    ]
    return table(rows)


def table(rows: Sequence[tuple[str, str]]) -> list[str]:
    """Two columns, as lines."""
    width = max(len(name) for name, _ in rows)
    return [f"  {name:<{width}}  {value}" for name, value in rows]
