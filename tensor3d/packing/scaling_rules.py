"""What packing changes for the optimiser (Krell et al., 2021, arXiv 2107.02027, on hyperparameters).

A pack holds `p` sequences, p the packing factor, where a padded row holds one. At the same number of rows a step is
then `p` times larger, for which no learning rate was tuned. Either the step is made as large as it was, with fewer
packs (`packs_per_step`), or, where that many packs must stay, the optimiser's moving averages are made to forget as
fast per sequence as they did (`packed_betas`).
"""

from __future__ import annotations

import math


def packs_per_step(sequences: int, packing_factor: float, multiple_of: int = 1) -> int:
    """Packs that hold as many sequences, on average, as a padded global batch has: `sequences / packing_factor`.

    All of the recipe (learning rate, warm-up, steps) can then stay as it is. What shrinks is the accumulation, or the
    number of ranks that are needed.

    Args:
        sequences: of the padded global batch, at least 1.
        packing_factor: sequences of a pack, on average, at least 1 (`Plan.packing_factor`).
        multiple_of: the result is rounded to the nearest multiple of this, of two as near to the larger one, and is at
            least once this. The cube and its micro-batch ask for `data * x * z * packs_per_rank`.

    Raises:
        ValueError: an argument out of range.
    """
    _check_factor(packing_factor)
    for name, value in (("sequences", sequences), ("multiple_of", multiple_of)):
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise ValueError(f"{name} must be a whole number, at least 1. Got {value!r}.")
    return max(1, math.floor(sequences / packing_factor / multiple_of + 0.5)) * multiple_of


def packed_betas(betas: tuple[float, float], packing_factor: float) -> tuple[float, float]:
    """Decay rates for steps that are `packing_factor` times larger: `beta ** packing_factor`.

    A moving average that is multiplied by beta in each step keeps `beta ** (n / B)` of a gradient after `n` sequences
    in batches of `B`. In batches of `p * B` a rate of `beta ** p` keeps the same share after the same sequences. That
    is so for the moments of Adam and LAMB alike. The step is still the larger one, and an epoch has fewer: learning
    rate and warm-up are the user's to choose for it.

    Args:
        betas: rates of the first and the second moment, 0 to below 1.
        packing_factor: sequences of a pack, on average, at least 1 (`Plan.packing_factor`).

    Raises:
        ValueError: an argument out of range.
    """
    _check_factor(packing_factor)
    if len(betas) != 2 or not all(0 <= beta < 1 for beta in betas):
        raise ValueError(f"betas must be two rates, each at least 0 and below 1. Got {betas}.")
    first, second = betas
    return float(first**packing_factor), float(second**packing_factor)


def _check_factor(packing_factor: float) -> None:
    if not (math.isfinite(packing_factor) and packing_factor >= 1):
        raise ValueError(
            f"packing_factor is the mean number of sequences of a pack, at least 1. Got {packing_factor}. "
            "Take it from a plan: Plan.packing_factor."
        )
