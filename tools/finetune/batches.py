"""Which texts meet in a step: the same ones on any cube."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from tensor3d.data.chance import random_bits
from tensor3d.seeds import mix


def epoch_order(examples: int, seed: int, epoch: int) -> list[int]:
    """The order of the examples in an epoch, from 0: a function of its arguments alone."""
    bits = random_bits(mix(seed, epoch), np.arange(examples))
    order: list[int] = np.argsort(bits, kind="stable").tolist()
    return order


def steps_of(examples: int, batch: int, seed: int, epochs: int) -> Iterator[list[int]]:
    """The examples of each step of all epochs. The last step of an epoch may have fewer."""
    for epoch in range(epochs):
        order = epoch_order(examples, seed, epoch)
        for start in range(0, examples, batch):
            yield order[start : start + batch]


def count_steps(examples: int, batch: int, epochs: int) -> int:
    return epochs * -(-examples // batch)
