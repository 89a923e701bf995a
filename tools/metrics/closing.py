"""The table at the end of a run."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence

from tools.metrics.records import EvaluationMetrics, MemoryMetrics, StepMetrics

Rows = list[tuple[str, str]]


def summary(
    history: Sequence[StepMetrics],
    evaluations: Sequence[EvaluationMetrics],
    entropy: float,
    memories: Sequence[MemoryMetrics] = (),
) -> list[str]:
    """Lines of the closing table that come from the metrics. `entropy`: of the corpus' unigrams, nats."""
    rows = [*_losses(history, entropy)]
    if evaluations:
        held_out = evaluations[-1]
        rows.append(("held-out masked-LM loss", f"{held_out.masked_lm_loss:.3f} nats"))
        rows.append(("held-out masked-LM accuracy", f"{held_out.masked_lm_accuracy:.1%}"))
    rows += [
        ("fill of the packs", f"{statistics.fmean(m.fill for m in history):.2%}"),
        ("busiest rank over the mean", f"{statistics.fmean(m.imbalance for m in history):.4f} of the work"),
        *_speed(history),
        ("collectives a step", f"{history[-1].collectives}"),
        ("received a step by rank 0", f"{history[-1].bytes_received / 2**20:.2f} MiB"),
    ]
    if memories:
        rows.append(_memory(memories[-1].peak_bytes))
    return table(rows)


def table(rows: Sequence[tuple[str, str]]) -> list[str]:
    """Two columns, as lines."""
    width = max(len(name) for name, _ in rows)
    return [f"  {name:<{width}}  {value}" for name, value in rows]


def _losses(history: Sequence[StepMetrics], entropy: float) -> Rows:
    # A skipped step may have a loss that is not finite.
    last = [m.masked_lm_loss for m in history[-20:] if math.isfinite(m.masked_lm_loss)]
    end = statistics.fmean(last) if last else math.nan
    side = "below" if end < entropy else "above"
    rows = [
        ("masked-LM loss, first step", f"{history[0].masked_lm_loss:.3f} nats"),
        (f"masked-LM loss, mean of last {len(last)}", f"{end:.3f} nats"),
        ("unigram entropy of the corpus", f"{entropy:.3f} nats; the loss is {abs(end - entropy):.3f} {side} it"),
    ]
    newest = history[-1]
    if newest.skipped_steps:
        rows.append(
            ("skipped steps", f"{newest.skipped_steps}, gradients not finite; loss scale {newest.loss_scale:g}")
        )
    return rows


def _speed(history: Sequence[StepMetrics]) -> Rows:
    total = sum(m.seconds for m in history)
    waited = sum(m.data_wait_seconds for m in history) / total
    stalled = sum(m.checkpoint_seconds for m in history)
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
    mean = "" if len(peaks) == 1 else f"{statistics.fmean(peaks) / 2**20:,.0f} MiB"
    return ("peak memory of a rank", f"{most / 2**20:,.0f} MiB{where}{mean}")
