"""Work in parts of about the same size, how many cores there are for it, and worker processes, which never outlive the
process that they work for.

It imports nothing heavy: steps of the preparation start without torch.
"""

from __future__ import annotations

import heapq
import multiprocessing
import os
import signal
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from multiprocessing import connection, resource_tracker


def split(lengths: Sequence[int], slots: int, *, padded: bool = False) -> list[slice]:
    """Consecutive texts in parts of about `slots` token slots each, at most, and at least a text: see `split_groups`.

    Args:
        lengths: tokens of each text.
    """
    return split_groups([[length] for length in lengths], slots, padded=padded)


def split_groups(groups: Sequence[Sequence[int]], slots: int, *, padded: bool = False) -> list[slice]:
    """Consecutive groups of texts in parts of about `slots` token slots each, at most, and at least a group.

    Args:
        groups: tokens of the texts of each.
        padded: every text counts with the length of its part's longest.
    """
    parts: list[slice] = []
    start, total, longest, texts = 0, 0, 0, 0
    for place, lengths in enumerate(groups):
        size, most = sum(lengths), max(lengths)
        total, longest, texts = total + size, max(longest, most), texts + len(lengths)
        needed = longest * texts if padded else total
        if needed > slots and place > start:
            parts.append(slice(start, place))
            start, total, longest, texts = place, size, most, len(lengths)
    return [*parts, slice(start, len(groups))]


def deal(sizes: Sequence[int], parts: int) -> list[int]:
    """The part of each piece: the largest first, each to the part with the least so far (Graham, 1969).

    So no part is ahead of another by more than its own smallest piece.
    """
    dealt = [0] * len(sizes)
    filled = [(0, part) for part in range(parts)]
    for piece in sorted(range(len(sizes)), key=lambda piece: -sizes[piece]):
        total, part = filled[0]
        dealt[piece] = part
        heapq.heapreplace(filled, (total + sizes[piece], part))
    return dealt


def usable_cores() -> int:
    """Cores of this process: a container or a batch system may give it fewer than there are."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


@contextmanager
def starting_workers() -> Iterator[None]:
    """Inside, Ctrl-C is kept for the end of the block, and processes that begin there do not see it before
    `begin_worker`: halfway they would answer with a traceback, and one that its parent does not know of yet would be
    left alone."""
    before = signal.getsignal(signal.SIGINT)
    if threading.current_thread() is not threading.main_thread() or not callable(before):
        yield
        return
    came: list[int] = []
    resource_tracker.ensure_running()  # in the block it would let the signal in again
    signal.signal(signal.SIGINT, lambda number, _: came.append(number))  # which another thread may get
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})  # which children take over
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})
        signal.signal(signal.SIGINT, before)
        if came:
            signal.raise_signal(signal.SIGINT)


def begin_worker() -> None:
    """A worker goes when it is interrupted or when the process that it works for is gone, however that ended."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})  # `starting_workers`
    parent = multiprocessing.parent_process()
    assert parent is not None, "workers are children"
    threading.Thread(target=_leave_with, args=(parent.sentinel,), daemon=True).start()


def _leave_with(sentinel: int) -> None:
    connection.wait([sentinel])
    os._exit(1)
