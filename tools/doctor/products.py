"""How fast a rank is: a fixed product, while all other ranks compute the same."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable

import torch

_TURNS = 4


def product_seconds(device: torch.device, seconds: float, together: Callable[[], None]) -> float:
    """Seconds of one product of square matrices: the best of some turns, of which each is a median. A rank that once
    waits for a core is not slow; one that always does is.

    Args:
        seconds: of all turns together.
        together: waits until all ranks have come there.
    """
    cuda = device.type == "cuda"
    n = 4096 if cuda else 384
    a, b = (torch.ones(n, n, device=device) for _ in range(2))

    def once() -> float:
        before = time.perf_counter()
        a @ b
        if cuda:
            torch.cuda.synchronize(device)
        return time.perf_counter() - before

    def turn() -> float:
        together()
        until, taken = time.perf_counter() + seconds / _TURNS, list[float]()
        while not taken or time.perf_counter() < until:
            taken.append(once())
        return statistics.median(taken)

    once()  # which also makes what the library needs
    return min(turn() for _ in range(_TURNS))
