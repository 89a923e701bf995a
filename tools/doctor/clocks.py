"""By how much the clocks of nodes differ, from round trips through the job's store."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

import torch.distributed as dist


def ask(
    store: dist.Store, nodes: Sequence[int], trips: int, clock: Callable[[], float] = time.time
) -> dict[int, tuple[float, float]]:
    """Node 0's part: seconds by which the clock of each node is ahead of this one, and the error of that.

    Of several round trips the shortest counts: the other clock was read somewhere within it.
    """
    found = {}
    for node in nodes:
        best: tuple[float, float] | None = None
        for trip in range(trips):
            before, since = clock(), time.perf_counter()
            store.set(f"clock/{node}/ask/{trip}", "")
            theirs = float(store.get(f"clock/{node}/answer/{trip}"))
            half = (time.perf_counter() - since) / 2
            if best is None or half < best[1]:
                best = (theirs - before - half, half)
        assert best is not None, "at least one trip"
        found[node] = best
    return found


def answer(store: dist.Store, node: int, trips: int, clock: Callable[[], float] = time.time) -> None:
    """The part of any other node."""
    for trip in range(trips):
        store.get(f"clock/{node}/ask/{trip}")
        store.set(f"clock/{node}/answer/{trip}", repr(clock()))
