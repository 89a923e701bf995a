"""Short runs of tools.pretrain, in this process or on ranks, and what they logged."""

from __future__ import annotations

import json
import os
import random
from pathlib import Path
from typing import Any

import torch
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from tensor3d import checkpoint
from tools import pretrain
from tools.training.config import TrainConfig, from_table


def arguments(recipe: Path, output: Path, *more: str, corpus: Path | None = None) -> list[str]:
    """A command line; the corpus lies beside the recipe unless another folder is given."""
    where = [] if "--resume" in more else ["--output", str(output)]  # a resumed run has its folder
    return [str(recipe), *where, "--corpus", str(corpus or recipe.parent / "corpus"), *more]


def on_rank(recipe: Path, output: Path, more: list[str], corpus: Path | None = None) -> int:
    """`main` on a rank whose process group stands: from_env finds it and connects no other."""
    world, rank = torch.distributed.get_world_size(), torch.distributed.get_rank()
    os.environ.update(WORLD_SIZE=str(world), RANK=str(rank), LOCAL_RANK=str(rank))
    return pretrain.main(arguments(recipe, output, *more, corpus=corpus))


def losses(run: Path, tag: str = "loss/total") -> dict[int, float]:
    """What a run logged, by step."""
    events = EventAccumulator(str(run / "tensorboard"))
    events.Reload()
    return {event.step: event.value for event in events.Scalars(tag)}


def journal(run: Path, kind: str | None = None) -> list[dict[str, Any]]:
    """The lines of a run's metrics.jsonl, all or those of a kind."""
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return [line for line in lines if kind is None or line["kind"] == kind]


def resolved(run: Path) -> TrainConfig:
    return from_table(TrainConfig, json.loads((run / "run.json").read_text())["recipe"])


def newest(run: Path) -> Path:
    found = checkpoint.latest(run / "checkpoints")
    assert found is not None
    return found


WORDS = [
    "cube",
    "axis",
    "plane",
    "face",
    "shard",
    "pack",
    "token",
    "rank",
    "gather",
    "scatter",
    "reduce",
    "product",
    "weight",
    "column",
    "row",
    "sum",
]


def write_text(path: Path, documents: int = 60) -> None:
    """Sentences of random words, the same at every call."""
    draw = random.Random(4)

    def sentence() -> str:
        return " ".join(draw.choices(WORDS, k=draw.randint(3, 9))).capitalize() + "."

    texts = ["\n".join(sentence() for _ in range(draw.randint(3, 12))) for _ in range(documents)]
    path.write_text("\n\n".join(texts) + "\n")
