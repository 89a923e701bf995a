"""Where the time of a step goes: its dearest operators, from a profile."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch.autograd import DeviceType
from torch.profiler import ProfilerActivity, profile

from tools.bench.machine import aligned
from tools.bench.peak import without_notes

HEADER = ("operator", "calls", "own ms", "share")


class Operator(NamedTuple):
    """All calls of one operator in a step."""

    name: str
    calls: int
    seconds: float
    """Without what other operators did inside of it: on a GPU that of its kernels, else that of the host."""
    share: float
    """Of all operators' seconds."""


def operators_of(device: torch.device, run: Callable[[], object], most: int) -> list[Operator]:
    """The operators of `run` that take longest, so many at most. The profiler slows `run` down: time another one."""
    gpu = device.type == "cuda"
    activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if gpu else [])]
    with without_notes(), profile(activities=activities, acc_events=True) as trace:
        run()
    # Kernels stand in the list too, and with the operators that launch them: once is enough.
    events: list[Any] = [event for event in trace.key_averages() if event.device_type == DeviceType.CPU]
    own = {event.key: (event.self_device_time_total if gpu else event.self_cpu_time_total) / 1e6 for event in events}
    whole = sum(own.values())
    calls = {event.key: event.count for event in events}
    dearest = sorted(own, key=lambda key: own[key], reverse=True)[:most]
    # A profiler that is kept from a GPU's kernels tells of none.
    shares = {key: own[key] / whole if whole else 0.0 for key in dearest}
    return [Operator(name=key, calls=calls[key], seconds=own[key], share=shares[key]) for key in dearest]


def table(operators: Sequence[Operator]) -> list[str]:
    rows = [(each.name, f"{each.calls:,}", f"{each.seconds * 1e3:,.1f}", f"{each.share:.1%}") for each in operators]
    return aligned(HEADER, rows)
