"""The curves of runs: read off what tools.pretrain has written in their folders."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Set
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from models.bert import PRESETS
from tensor3d import CubeShape
from tools.metrics import JOURNAL, read_journal
from tools.metrics.records import BY_AXIS, EVALUATION_TAGS, STEP_TAGS

# Tag of training: tag of the same number on the held-out documents.
HELD_OUT = {
    "loss/total": "evaluation/loss",
    "loss/masked_lm": "evaluation/masked_lm_loss",
    "accuracy/masked_lm": "evaluation/masked_lm_accuracy",
    "accuracy/next_sentence": "evaluation/next_sentence_accuracy",
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
        ValueError: the folder is no run, nothing is logged yet, or the tag is not among what is logged.
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
    remedy = "A run is a folder that tools.pretrain has written."
    try:
        facts = json.loads(path.read_text(encoding="utf-8"))
        recipe = facts["recipe"]
        return RunFacts(
            name=folder.resolve().name,
            cube=str(CubeShape.parse(facts["cube"], facts["data_parallel"])),
            model=_model_name(recipe["model"]),
            vocab_size=int(recipe["data"]["vocab_size"]),
            unigram_entropy=float(facts["unigram_entropy"]),
        )
    except (FileNotFoundError, NotADirectoryError):
        raise ValueError(f"{folder} is no run: it has no run.json. {remedy}") from None
    except (ValueError, KeyError, TypeError) as problem:
        raise ValueError(f"{path} does not describe a run ({type(problem).__name__}: {problem}). {remedy}") from None


def _from_journal(path: Path, wanted: Set[str]) -> tuple[set[str], dict[str, Points]]:
    """Every tag that TensorBoard would have, and the points of those wanted."""
    logged: set[str] = set()
    points: dict[str, Points] = {}
    for record in read_journal(path):
        tagged = _tagged(record)
        logged |= tagged.keys()
        for tag in wanted & tagged.keys():
            points.setdefault(tag, {})[record["step"]] = float(tagged[tag])  # also of "NaN"
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
    from tensorboard.backend.event_processing.event_accumulator import (  # type: ignore[import-untyped]
        EventAccumulator,
    )

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
