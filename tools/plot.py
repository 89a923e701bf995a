"""Draws the curves of runs: `python -m tools.plot RUN [RUN...] [--tag loss/masked_lm] [--output FILE.png]`.

A RUN is a folder that tools.pretrain has written. The thin line is every logged step, the bold one a running mean.
"""

from __future__ import annotations

import logging
import math
import sys
from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import numpy as np
import tyro
from numpy.typing import NDArray

from models.bert import PRESETS
from models.folder_kinds import instead, is_gpt_run
from tensor3d import CubeShape
from tools.common.cli import run_main
from tools.common.files import WRONG_ENTRIES, check_output, check_suffix, parsed_json, read_file, what_is_wrong
from tools.common.log import take_verbose
from tools.common.parse import parse_options
from tools.common.plotting import PICTURES, new_figure, plain, running_mean, save, style, window_of
from tools.training.metrics import JOURNAL, read_journal
from tools.training.metrics.records import BY_AXIS, EVALUATION_TAGS, STEP_TAGS

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_log = logging.getLogger("tools.plot")

# --- The curves of runs: read off what tools.pretrain has written in their folders ------------------------------------

# Tag of training: tag of the same number on the held-out documents.
HELD_OUT = {
    "loss/total": "evaluation/loss",
    "loss/masked_lm": "evaluation/masked_lm_loss",
    "accuracy/masked_lm": "evaluation/masked_lm_accuracy",
    "accuracy/next_sentence": "evaluation/next_sentence_accuracy",
    "loss/replaced_tokens": "evaluation/replaced_token_loss",
    "accuracy/replaced_tokens": "evaluation/replaced_token_accuracy",
}
Points = dict[int, float]  # by step
MEMORY_TAGS = ("memory/peak_bytes_most", "memory/peak_bytes_mean")


@dataclass(frozen=True, kw_only=True)
class RunFacts:
    """What a run says of itself."""

    name: str
    """Of its folder."""
    cube: str
    model: str
    vocab_size: int
    unigram_entropy: float
    """Of the corpus, nats a piece: the loss of a model that knows the frequencies only."""


@dataclass(frozen=True, kw_only=True, eq=False)
class Curve:
    """One number of one run."""

    run: RunFacts
    steps: NDArray[np.int64]
    """int64 (points,), ascending."""
    values: NDArray[np.float64]
    """float64 (points,)"""
    held_out_steps: NDArray[np.int64]
    """int64 (evaluations,): empty where the tag has no held-out counterpart or nothing was evaluated."""
    held_out_values: NDArray[np.float64]
    """float64 (evaluations,)"""


def read_run(folder: Path, tag: str) -> Curve:
    """The logged points of one tag, with what the run says of itself.

    From metrics.jsonl, which has every step and all digits; where an older run has none, from TensorBoard's files.
    Where a resumed run logged a step again, the later point counts.

    Raises:
        ValueError: the folder is no run, nothing is logged yet, or the tag is not among what is logged, or has not one
            finite number.
    """
    facts = read_facts(folder)
    held_out = HELD_OUT.get(tag, "")
    journal = folder / JOURNAL
    place, read = (journal, _from_journal) if journal.is_file() else (folder / "tensorboard", _from_tensorboard)
    logged, points = read(place, {tag, held_out})
    if not logged:
        raise ValueError(f"{folder} has logged nothing yet (no points in {place}).")
    if tag not in logged:
        raise ValueError(f"{folder} has no tag {tag!r}. There are: {', '.join(sorted(logged))}.")
    steps, values = _arrays(points[tag])
    if not len(steps):
        raise ValueError(
            f"{folder} has no finite number of {tag!r}: all {len(points[tag]):,} of it are NaN or infinite."
        )
    held_out_steps, held_out_values = _arrays(points.get(held_out, {}))
    return Curve(
        run=facts,
        steps=steps,
        values=values,
        held_out_steps=held_out_steps,
        held_out_values=held_out_values,
    )


def read_facts(folder: Path) -> RunFacts:
    """Raises ValueError unless the folder holds a run's run.json."""
    path = folder / "run.json"
    remedy = (
        "Name a run that tools.pretrain has written; tools.report draws those of tools.gpt and tools.finetune, too."
    )
    try:
        facts = parsed_json(read_file(path))
        recipe = facts["recipe"]
        return RunFacts(
            name=folder.resolve().name,
            cube=str(CubeShape.parse(facts["cube"], facts["data_parallel"])),
            model=_model_name(recipe["model"]),
            vocab_size=int(recipe["data"]["vocab_size"]),
            unigram_entropy=float(facts["unigram_entropy"]),
        )
    except (FileNotFoundError, NotADirectoryError):
        raise ValueError(f"{folder.absolute()} is no run: it has no run.json.{instead(folder)} {remedy}") from None
    except WRONG_ENTRIES as problem:
        kind = instead(folder) if is_gpt_run(folder) else ""  # not that it is what it should be
        raise ValueError(f"{path} does not describe a run ({what_is_wrong(problem)}).{kind} {remedy}") from None


def _from_journal(path: Path, wanted: Set[str]) -> tuple[set[str], dict[str, Points]]:
    """Every tag that TensorBoard would have, and the points of those wanted. Lines that are damaged are counted, and
    told."""
    logged: set[str] = set()
    points: dict[str, Points] = {}
    damaged = list[None]()
    for record in read_journal(path, lambda: damaged.append(None)):
        try:
            tagged = _tagged(record)
            values = {tag: float(tagged[tag]) for tag in wanted & tagged.keys()}  # also of "NaN"
        except WRONG_ENTRIES:
            damaged.append(None)
            continue
        logged |= tagged.keys()
        for tag, value in values.items():
            points.setdefault(tag, {})[record["step"]] = value
    if damaged:
        _log.warning("%s: left out, lines that are damaged: %s", path, f"{len(damaged):,}")
    return logged, points


def _tagged(record: Mapping[str, Any]) -> dict[str, Any]:
    """The numbers of one line, by tag."""
    if record["kind"] == "memory":
        peaks = record["peak_bytes"]
        return dict(zip(MEMORY_TAGS, (max(peaks), sum(peaks) / len(peaks)), strict=True))
    tags = {"step": STEP_TAGS, "evaluation": EVALUATION_TAGS}.get(record["kind"], {})
    found = {tag: record[name] for tag, name in tags.items() if record.get(name) is not None}
    axes = {BY_AXIS + name.partition("/")[2]: record[name] for name in record if name.startswith("bytes_received/")}
    return found | axes


def _from_tensorboard(folder: Path, wanted: Set[str]) -> tuple[set[str], dict[str, Points]]:
    # Imported here: it takes a second, and newer runs do without.
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator  # type: ignore[import-untyped]

    # 0: all points; otherwise a sample of 10,000 is kept.
    events = EventAccumulator(str(folder), size_guidance={"scalars": 0})
    events.Reload()
    logged = set(events.Tags()["scalars"])
    return logged, {tag: {event.step: event.value for event in events.Scalars(tag)} for tag in wanted & logged}


def _arrays(points: Points) -> tuple[NDArray[np.int64], NDArray[np.float64]]:
    # What is not finite (the loss of a step that was skipped) has no place in a picture.
    steps = sorted(step for step, value in points.items() if math.isfinite(value))
    return np.array(steps, dtype=np.int64), np.array([points[step] for step in steps], dtype=np.float64)


def _model_name(model: dict[str, Any]) -> str:
    preset = PRESETS[model["preset"]]
    sizes = {name: model.get(name) or getattr(preset, name) for name in ("layers", "hidden", "heads")}
    kind = "modern BERT" if model.get("encoder") == "modern" else "BERT"
    return f"{kind}, {sizes['layers']} layers, hidden {sizes['hidden']}, {sizes['heads']} heads"


# --- Draws the curves of runs -----------------------------------------------------------------------------------------

MASKED_LM = "loss/masked_lm"
AXIS_LABELS = {
    "loss/total": "loss (nats)",  # of the objective, whichever that is
    MASKED_LM: "masked-LM loss (nats per masked token)",
    "loss/next_sentence": "next-sentence loss (nats per pair)",
    "loss/replaced_tokens": "replaced-token loss (nats per token)",
    "accuracy/replaced_tokens": "replaced-token accuracy (share of tokens)",
    "data/replaced_share": "tokens that are replaced (share)",
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
    "data/masked_share": "guessed tokens (share of all)",
    "data/imbalance": "busiest rank over the mean of all (share of the work)",
    "data/wait_seconds": "waiting for the batch, rank 0 (s)",
    "traffic/bytes_received": "received in a step by rank 0 (bytes)",
    "traffic/collectives": "collectives in a step",
}


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
    words, verbose = take_verbose(arguments)
    command = parse_options(Command, words, "python -m tools.plot")
    return run_main("tools.plot", lambda: run(command), verbose=verbose, options=Command)


def run(command: Command) -> int:
    """Raises ValueError for what cannot be drawn, OSError for a file that cannot be read or written."""
    if not command.runs:
        raise ValueError("name at least one run: a folder that tools.pretrain has written.")
    output = command.output or command.runs[0] / default_name(command.tag)
    if command.output is not None:
        # Of a folder its pictures alone are drawn anew.
        inside = [each for folder in command.runs if folder.is_dir() for each in folder.iterdir()]
        check_output(output, others=[each for each in inside if each.suffix != ".png"])
        check_suffix(output, PICTURES)
    curves = [read_run(folder, command.tag) for folder in command.runs]
    save(draw(curves, command.tag), output)
    for curve in curves:
        print(f"{curve.run.name} on {curve.run.cube}: {len(curve.values)} points, last {curve.values[-1]:.4g}")
    print(f"written: {output}")
    return 0


def default_name(tag: str) -> str:
    """A picture of another tag does not replace that of the loss."""
    return "loss.png" if tag == MASKED_LM else tag.replace("/", "-") + ".png"


def draw(curves: Sequence[Curve], tag: str) -> Figure:
    """All runs in one picture."""
    figure = new_figure()
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
    plain(axes)
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


def _draw_curve(axes: Axes, curve: Curve, name: str, number: int) -> None:
    own, window = style(number), window_of(len(curve.values))
    colour = own["color"]
    axes.plot(curve.steps, curve.values, color=colour, linewidth=0.9, alpha=0.45)
    # Up to the last whole window: the mean of the few points behind it would look like a turn of the loss.
    whole = max(1, len(curve.values) - window // 2)
    axes.plot(
        curve.steps[:whole],
        running_mean(curve.values, window)[:whole],
        **own,
        linewidth=2.6,
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
