"""What a rank does to show what crosses between hosts: a few training steps, with the bytes that its host received, and
its collectives.

launch/torchrun.sh --module tests.steps_across_hosts ... RECIPE --corpus FOLDER --steps N --output FILE.json
    [--wire data,x,y,z]
"""

from __future__ import annotations

import argparse
import json
from collections import Counter
from dataclasses import replace
from pathlib import Path
from statistics import median
from typing import Any

import torch.distributed as dist

from tensor3d import Cube, CubeShape
from tests.hosts import INTERFACE
from tools.bench.harness.step_trial import StepTrial
from tools.training.config import read_config


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("recipe", type=Path)
    parser.add_argument("--cube", required=True)
    parser.add_argument("--data-parallel", type=int, required=True)
    parser.add_argument("--corpus", type=Path, required=True)
    parser.add_argument("--steps", type=int, required=True)
    parser.add_argument("--output", type=Path, required=True)
    parser.add_argument("--wire")
    asked = parser.parse_args()
    shape = CubeShape.parse(asked.cube, asked.data_parallel)
    wire = None if asked.wire is None else tuple(asked.wire.split(","))
    cube = Cube.from_env(shape.x, shape.y, shape.z, shape.data, wire=wire)
    recipe = read_config(asked.recipe)
    # Each rank draws its own masks: where ranks lie in another order, dropout is another one.
    recipe = replace(recipe, model=replace(recipe.model, dropout=0.0, attention_dropout=0.0))
    trial = StepTrial(cube, recipe, asked.corpus, 1, peaks=False)
    dist.barrier()
    before = received_by_host()
    samples = trial.turn(asked.steps)  # and one more, which is not timed
    dist.barrier()
    crossed = received_by_host() - before
    counted, calls = (
        Counter({f"{axis} {kind}": (asked.steps + 1) * number for (axis, kind), number in each.items()})
        for each in (samples[0].received, samples[0].calls)
    )
    everyone: list[Any] = [None] * shape.ranks
    dist.all_gather_object(everyone, (crossed, counted, calls))
    if cube.rank == 0:
        content = {
            "wire": ",".join(cube.shape.wire),
            "placement": cube.shape.placement(shape.ranks // 2),
            "milliseconds": [round(1e3 * sample.seconds, 2) for sample in samples],
            "median": round(1e3 * median(sample.seconds for sample in samples), 1),
            "loss": samples[-1].loss,
            "crossed": [each[0] for each in everyone],
            "counted": [each[1] for each in everyone],
            "calls": [each[2] for each in everyone],
        }
        asked.output.write_text(json.dumps(content))
    trial.close()
    cube.close()


def received_by_host() -> int:
    return int(Path(f"/sys/class/net/{INTERFACE}/statistics/rx_bytes").read_text())


if __name__ == "__main__":
    main()
