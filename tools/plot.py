"""Draws the curves of runs: `python -m tools.plot RUN [RUN...] [--tag loss/masked_lm] [--output FILE.png]`.

A RUN is a folder that tools.pretrain has written. The thin line is every logged step, the bold one a running mean.
"""

from __future__ import annotations

import math
import os
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import tyro
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from numpy.typing import NDArray

from tools.curves import Curve, read_run
from tools.metrics.records import BY_AXIS

MASKED_LM = "loss/masked_lm"
AXIS_LABELS = {
    "loss/total": "masked-LM + next-sentence loss (nats)",
    MASKED_LM: "masked-LM loss (nats per masked token)",
    "loss/next_sentence": "next-sentence loss (nats per pair)",
    "accuracy/masked_lm": "masked-LM accuracy (share of masked tokens)",
    "accuracy/next_sentence": "next-sentence accuracy (share of pairs)",
    "optimizer/learning_rate": "learning rate",
    "optimizer/gradient_norm": "gradient norm before clipping",
    "optimizer/loss_scale": "loss scale",
    "optimizer/skipped_steps": "steps skipped so far",
    "speed/step_seconds": "time of a step (s)",
    "speed/tokens_per_second": "real tokens/s",
    "speed/model_tflops": "model TFLOP/s a rank",
    "speed/mfu": "model FLOPs utilisation (share of the peak)",
    "time/forward_seconds": "forward, rank 0 (s)",
    "time/backward_seconds": "backward, rank 0 (s)",
    "time/gradient_sum_seconds": "sum of gradients, rank 0 (s)",
    "time/optimizer_seconds": "optimiser, rank 0 (s)",
    "time/checkpoint_seconds": "waiting for checkpoints, rank 0 (s)",
    "data/fill": "fill of the packs (share of token slots)",
    "data/imbalance": "busiest rank over the mean of all (share of the work)",
    "data/wait_seconds": "waiting for the batch, rank 0 (s)",
    "traffic/bytes_received": "received in a step by rank 0 (bytes)",
    "traffic/collectives": "collectives in a step",
}
# Okabe and Ito's colours, which colour-blind readers can tell apart.
COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9")
# Runs on different cubes often have the same curve: under dashes the other one stays visible.
DASHES: tuple[Any, ...] = ("-", (0, (4, 3)), (0, (1, 1.5)), (0, (6, 2, 1, 2)))


@dataclass(frozen=True, kw_only=True)
class Command:
    """Draw what runs have logged, as a PNG."""

    runs: Annotated[tuple[Path, ...], tyro.conf.Positional]
    """Folders that tools.pretrain has written."""
    output: Path | None = None
    """PNG file. Default: loss.png in the folder of the first run, or a name after another tag."""
    tag: str = MASKED_LM
    """Which of the logged numbers."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Exit status: 0, or 2 for a bad call or a folder that is no run (one message on standard error)."""
    command = tyro.cli(Command, args=arguments, prog="python -m tools.plot")
    try:
        if not command.runs:
            raise ValueError("name at least one run: a folder that tools.pretrain has written.")
        curves = [read_run(folder, command.tag) for folder in command.runs]
        output = command.output or command.runs[0] / default_name(command.tag)
        save(draw(curves, command.tag), output)
    except (ValueError, OSError) as problem:
        print(f"tools.plot: {problem}", file=sys.stderr, flush=True)
        return 2
    for curve in curves:
        print(f"{curve.run.name} on {curve.run.cube}: {len(curve.values)} points, last {curve.values[-1]:.4g}")
    print(f"written: {output}")
    return 0


def default_name(tag: str) -> str:
    """A picture of another tag does not replace that of the loss."""
    return "loss.png" if tag == MASKED_LM else tag.replace("/", "-") + ".png"


def running_mean(values: NDArray[np.float64], window: int) -> NDArray[np.float64]:
    """The mean of `window` points around each; near the ends of as many as there are, the same on both sides.

    Taken around the point and not before it, because a loss that falls would otherwise be shown too high.
    """
    sums = np.concatenate([[0.0], np.cumsum(values)])
    points = np.arange(len(values))
    half = np.minimum(window // 2, np.minimum(points, len(values) - 1 - points))
    means: NDArray[np.float64] = (sums[points + half + 1] - sums[points - half]) / (2 * half + 1)
    return means


def window_of(points: int) -> int:
    """An odd number of points for the running mean: a twelfth of them, from 1 to 101."""
    return min(101, points // 12 // 2 * 2 + 1)


def draw(curves: Sequence[Curve], tag: str) -> Figure:
    """All runs in one picture."""
    figure = Figure(figsize=(9.0, 5.4), layout="constrained")
    axes = figure.add_subplot()
    names = labels(curves)
    for number, (curve, name) in enumerate(zip(curves, names, strict=True)):
        _draw_curve(axes, curve, name, number)
    if tag == MASKED_LM:
        _draw_references(axes, curves)
    axes.set_xlabel("step of the optimiser", fontsize=12)
    axes.set_ylabel(axis_label(tag), fontsize=12)
    axes.set_title(title(curves), fontsize=13, loc="left")
    axes.tick_params(labelsize=11)
    axes.margins(x=0.01)
    axes.grid(color="0.9")
    axes.set_axisbelow(True)
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(fontsize=10.5, frameon=False)
    return figure


def axis_label(tag: str) -> str:
    """What is drawn, with its unit."""
    if tag.startswith(BY_AXIS):
        return f"received in a step by rank 0 along {tag.removeprefix(BY_AXIS)} (bytes)"
    return AXIS_LABELS.get(tag, tag)


def title(curves: Sequence[Curve]) -> str:
    """The model and the cubes, as far as a line holds them."""
    models = list(dict.fromkeys(curve.run.model for curve in curves))
    cubes = list(dict.fromkeys(curve.run.cube for curve in curves))
    return f"{models[0] if len(models) == 1 else 'BERT'}, on {', '.join(cubes) if len(cubes) <= 4 else 'several cubes'}"


def labels(curves: Sequence[Curve]) -> list[str]:
    """What tells the runs apart: the folder, the cube, and the model where it differs."""
    same = len({curve.run.model for curve in curves}) == 1
    return [f"{curve.run.name} on {curve.run.cube}" + ("" if same else f", {curve.run.model}") for curve in curves]


def save(figure: Figure, output: Path) -> None:
    """Writes beside `output` and renames.

    Raises:
        ValueError: there is no such folder.
    """
    if output.is_dir() or not output.parent.is_dir():
        raise ValueError(f"--output must be a file in a folder that exists. Got {output}.")
    draft = output.with_name(output.name + ".partial")
    figure.savefig(draft, format="png", dpi=150)
    os.replace(draft, output)


def _draw_curve(axes: Axes, curve: Curve, name: str, number: int) -> None:
    colour, window = COLOURS[number % len(COLOURS)], window_of(len(curve.values))
    axes.plot(curve.steps, curve.values, color=colour, linewidth=0.9, alpha=0.45)
    # Up to the last whole window: the mean of the few points behind it would look like a turn of the loss.
    whole = max(1, len(curve.values) - window // 2)
    axes.plot(
        curve.steps[:whole],
        running_mean(curve.values, window)[:whole],
        color=colour,
        linewidth=2.6,
        linestyle=DASHES[number % len(DASHES)],
        label=f"{name}, mean of {window} points" if window > 1 else name,
    )
    if len(curve.held_out_steps):
        axes.plot(
            curve.held_out_steps,
            curve.held_out_values,
            linestyle="none",
            marker="o",
            # Points of one place lie around each other, the first filled.
            markersize=7 + 4 * number,
            markerfacecolor=colour if number == 0 else "none",
            markeredgecolor=colour,
            markeredgewidth=1.6,
            label=f"{name}, held out",
            zorder=3,
            clip_on=False,
        )


def _draw_references(axes: Axes, curves: Sequence[Curve]) -> None:
    """What a model reaches that knows the frequencies of the pieces, and one that knows nothing."""
    for entropy in dict.fromkeys(curve.run.unigram_entropy for curve in curves):
        axes.axhline(entropy, color="0.25", linestyle="--", linewidth=1.3, label=f"unigram entropy, {entropy:.2f}")
    for size in dict.fromkeys(curve.run.vocab_size for curve in curves):
        label = f"ln(vocabulary of {size:,}), {math.log(size):.2f}"
        axes.axhline(math.log(size), color="0.6", linestyle="--", linewidth=1.3, label=label)


if __name__ == "__main__":
    sys.exit(main())
