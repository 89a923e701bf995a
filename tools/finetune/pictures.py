"""Pictures of a fine-tuned model: how it learnt, and which classes it takes for which. Where matplotlib is missing they
are left out, with a word."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from tools.common.plotting import COLOURS, check_drawing, new_figure, plain, running_mean, save, window_of
from tools.training.metrics import JOURNAL
from tools.training.metrics.jsonl import read_journal

CURVES = "curves.png"
_MOST = 40  # classes of a picture: more could not be read
_log = logging.getLogger(__name__)


def draw_curves(folder: Path, metric: str) -> None:
    """CURVES beside a seed's metrics.jsonl: the loss of each step with its running mean, and the metric on dev with the
    best evaluation marked. None where the journal has neither, as it was removed, or could not be written."""
    if not _can_draw():
        return
    records = list(read_journal(folder / JOURNAL)) if (folder / JOURNAL).exists() else []
    steps, evaluations = ([each for each in records if each["kind"] == kind] for kind in ("step", "evaluation"))
    if not (steps and evaluations):
        _log.warning("%s is not drawn: %s does not have the whole training.", folder / CURVES, JOURNAL)
        return
    losses, places = np.array([each["loss"] for each in steps]), [each["step"] for each in steps]
    figure = new_figure(8.0, 4.0)
    axes = figure.subplots()
    plain(axes)
    axes.plot(places, losses, color=COLOURS[0], alpha=0.3, linewidth=0.8)
    axes.plot(places, running_mean(losses, window_of(len(losses))), color=COLOURS[0])
    axes.set_xlabel("step")
    axes.set_ylabel("loss", color=COLOURS[0])
    other = axes.twinx()
    other.plot([each["step"] for each in evaluations], [each[metric] for each in evaluations], "o-", color=COLOURS[1])
    for best in [each for each in evaluations if each["best"]][-1:]:
        other.plot(best["step"], best[metric], "*", color=COLOURS[1], markersize=14)
    other.set_ylabel(f"{metric} on dev", color=COLOURS[1])
    save(figure, folder / CURVES, dpi=100)


def draw_confusion(path: Path, labels: Sequence[str], table: NDArray[np.int64]) -> bool:
    """How many texts of each label (rows) are predicted as which (columns). Whether it was drawn.

    Args:
        table: (labels, labels).
    """
    if len(labels) > _MOST or not _can_draw():
        return False
    size = 3.0 + 0.45 * len(labels)
    figure = new_figure(size + 1.0, size)
    axes = figure.subplots()
    shares = table / np.maximum(table.sum(1, keepdims=True), 1)  # of a row, so that seldom labels can be seen too
    axes.imshow(shares, cmap="Blues", vmin=0, vmax=1)
    for row, column in np.ndindex(table.shape):
        colour = "white" if shares[row, column] > 0.5 else "black"
        axes.text(column, row, f"{table[row, column]:,}", ha="center", va="center", color=colour, fontsize=8)
    axes.set_xticks(range(len(labels)), labels, rotation=45, ha="right")
    axes.set_yticks(range(len(labels)), labels)
    axes.set_xlabel("predicted")
    axes.set_ylabel("label")
    save(figure, path, dpi=100)
    return True


def _can_draw() -> bool:
    try:
        check_drawing("a picture")
    except ValueError as problem:
        _log.warning("no picture is drawn: %s", problem)
        return False
    return True
