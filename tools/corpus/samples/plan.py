"""The plan of packs, for all training sequences together."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tensor3d.packing import PLANNERS, fingerprint_of, save_plan
from tools.corpus.samples.options import SamplesOptions
from tools.corpus.work import draft

PLAN, HISTOGRAM = "plan.json", "histogram.json"


def write_plan(folder: Path, histogram: NDArray[np.int64], options: SamplesOptions) -> dict[str, Any]:
    """Plans the packs and writes the plan and the histogram of lengths; returns what there is to say of them."""
    limits = options.limits()
    plan = PLANNERS[options.packing](
        histogram, limits.capacity, limits.max_sequences, budget=limits.budget, costs=limits.costs
    )
    save_plan(plan, folder / PLAN, fingerprint_of(histogram, limits, options.packing))
    with draft(folder / HISTOGRAM) as file:
        file.write(json.dumps({"counts": histogram.tolist()}).encode() + b"\n")
    return {"packs": plan.packs, "efficiency": plan.efficiency, "sequences_per_pack": plan.packing_factor}
