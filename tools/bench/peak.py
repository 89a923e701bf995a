"""The most tensor memory that a piece of code holds at once."""

from __future__ import annotations

import os
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
from torch.profiler import ProfilerActivity, profile

_STANDARD_ERROR = 2


def peak_bytes(run: Callable[[], object]) -> int:
    """The most bytes that `run` holds at once of what it takes from torch's allocator of the CPU, above what was held
    before.

    Exact, and the same each time, where one thread allocates. Gloo's threads free their buffers when they get to it, so
    that with collectives it differs a little from run to run. It slows `run` down: time another one.
    """
    with without_notes(), profile(activities=[ProfilerActivity.CPU], profile_memory=True, acc_events=True) as trace:
        run()
    events = [event for event in trace.profiler.kineto_results.events() if event.name() == "[memory]"]
    held = most = 0
    for event in sorted(events, key=lambda event: event.start_ns()):
        held += event.nbytes()
        most = max(most, held)
    return most


def peak_on(device: torch.device, run: Callable[[], object]) -> int:
    """The same on any device; on a GPU by the counters of its allocator, at no cost."""
    if device.type != "cuda":
        return peak_bytes(run)
    torch.cuda.synchronize(device)
    before = torch.cuda.memory_allocated(device)
    torch.cuda.reset_peak_memory_stats(device)
    run()
    torch.cuda.synchronize(device)
    return torch.cuda.max_memory_allocated(device) - before


@contextmanager
def without_notes() -> Iterator[None]:
    """Leaves out what the profiler of torch 2.13 writes to standard error about its own start and end, and that there
    was memory before; an environment variable alone could stop it. Whatever else is written meanwhile comes at the end.
    """
    sys.stderr.flush()
    before = os.dup(_STANDARD_ERROR)
    with tempfile.TemporaryFile() as written:
        os.dup2(written.fileno(), _STANDARD_ERROR)
        try:
            yield
        finally:
            sys.stderr.flush()
            os.dup2(before, _STANDARD_ERROR)
            os.close(before)
            written.seek(0)
            for line in written:
                if not line.startswith(b"USDT:") and b"before the profiling started" not in line:
                    os.write(_STANDARD_ERROR, line)
