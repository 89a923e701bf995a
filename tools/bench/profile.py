"""`bench profile`: where a training step of our BERT spends its time on one device, kernel by kernel."""

from __future__ import annotations

import dataclasses
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch.autograd import DeviceType
from torch.profiler import ProfilerActivity, profile

from models.bert import PRESETS
from tensor3d.attention.backends import Backend
from tools.bench.harness.benchmark import ONE_PROCESS, Benchmark, Count, Natural, NewFile, Report, listed
from tools.bench.harness.memory import without_notes
from tools.bench.harness.synthetic_data import SHORTEST, lengths_of
from tools.bench.vs_transformers.contenders import (
    CONTENDERS,
    ROWS_COMPILED,
    Implementation,
    SideMaker,
    check_fp8,
    with_sizes,
    write_model,
)
from tools.bench.vs_transformers.data import PADDED, Work, works
from tools.common.bounds import AtLeast
from tools.common.machine import format_table
from tools.corpus.quick.sentencepiece_tokenizer import special_tokens
from tools.training.factory import TYPES

HEADER = ("kernel", "calls", "ms", "share")


class Kernel(NamedTuple):
    """All calls of one kernel in a step; on a CPU, of one operator without what others did inside of it."""

    name: str
    calls: int
    seconds: float


@dataclass(frozen=True, kw_only=True)
class StepProfile:
    """One step, followed by PyTorch's profiler, and others that were not."""

    step_seconds: float
    """Of a step without the profiler, the median of five."""
    busy_seconds: float
    """Of all kernels together; streams that work beside one another count twice."""
    launches: int
    operators: int
    """Calls of PyTorch's operators on the host, those inside of others included."""
    kernels: tuple[Kernel, ...]
    """The dearest first."""

    def __str__(self) -> str:
        idle = max(0.0, 1 - self.busy_seconds / self.step_seconds)
        return (
            f"a step: {self.step_seconds * 1e3:,.1f} ms; kernels {self.busy_seconds * 1e3:,.1f} ms in "
            f"{self.launches:,} launches, so the device idles for {idle:.1%}; {self.operators:,} operators on the host"
        )


@dataclass(frozen=True, kw_only=True)
class ProfileCommand(Benchmark[tuple[NDArray[np.int64], str]]):
    """Follow one training step with PyTorch's profiler: the dearest kernels, launches, time without a kernel, and a
    trace for Perfetto."""

    preset: str = "large"
    """Size of BERT."""
    precision: Literal["fp32", "bf16", "fp16"] = "bf16"
    """Type of the products."""
    contender: str = ROWS_COMPILED
    """One of `bench library`'s."""
    histogram: Path | None = None
    """JSON file: an object with `counts`, whose entry i counts the sequences of length i. Default: a formula."""
    length: Annotated[int, AtLeast(SHORTEST)] = 512
    """Tokens of the longest sequence, and slots of a pack."""
    packs: Count = 8
    """Of a micro-batch; a step has one."""
    layers: Count | None = None
    """Transformer layers, instead of the preset's."""
    dropout: float = 0.1
    """Probability, of hidden states."""
    attention_dropout: float = 0.0
    """That of attention weights."""
    vocab: int = 30522
    """Entries of the vocabulary."""
    backend: Backend = "auto"
    """Of our attention."""
    kernels: Count = 25
    """How many, the dearest, are told."""
    seed: Natural = 0
    """Of weights, sequences and masks."""
    trace: Annotated[Path | None, NewFile()] = None
    """JSON file for the trace, of Chrome's format; compressed where its name ends in .gz."""

    launcher: ClassVar[str | None] = ONE_PROCESS

    def plan(self) -> tuple[NDArray[np.int64], str]:
        """The lengths of sequences, and what to say of them."""
        listed("--preset", self.preset, PRESETS)
        listed("--contender", self.contender, CONTENDERS)
        check_fp8([self.contender], [self.precision])
        return lengths_of(self.histogram, self.length, f"--length {self.length}. Raise that")

    def measure(self, plan: tuple[NDArray[np.int64], str]) -> Report:
        lengths, source = plan
        device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
        found, trace = profiled(*self._made(lengths, device), device)
        lines = [
            f"lengths: {source}",
            f"{self.contender}, BERT-{self.preset}, {self.precision}, {self.packs} packs: {found}",
            *table(found.kernels[: self.kernels], found.busy_seconds),
        ]
        if self.trace is not None:
            try:  # it is large, and not worth the figures
                trace.export_chrome_trace(str(self.trace))
                lines.append(f"written: {self.trace}")
            except (OSError, RuntimeError) as problem:
                lines.append(f"no trace: {problem}")
        return Report(lines=lines, content={"results": dataclasses.asdict(found)})

    def _made(self, lengths: NDArray[np.int64], device: torch.device) -> tuple[Implementation, list[Work]]:
        config = with_sizes(
            PRESETS[self.preset], layers=self.layers, dropout=self.dropout, attention_dropout=self.attention_dropout
        )
        config = dataclasses.replace(config, vocab=self.vocab)
        compute = None if self.precision == "fp32" else TYPES[self.precision]
        with tempfile.TemporaryDirectory() as folder:
            write_model(config, Path(folder), self.seed)
            make = SideMaker(config, Path(folder), compute, device, self.backend, capacity=self.length)
            side = make(self.contender)
        steps = works(
            PADDED,
            lengths,
            steps=9,
            sequences=self.packs,
            micro_batch=self.packs,
            packs=self.packs,
            longest=self.length,
            special=special_tokens(self.vocab),
            seed=self.seed,
            device=device,
        )
        return side, steps


def profiled(side: Implementation, steps: Sequence[Work], device: torch.device) -> tuple[StepProfile, Any]:
    """Three steps to warm up, five whose time is taken, and the last under the profiler."""
    gpu = device.type == "cuda"
    seconds = []
    for number, work in enumerate(steps[:-1]):
        fresh = side.prepared(work)
        begin = time.perf_counter()
        side.step(fresh)
        if number >= 3:
            seconds.append(time.perf_counter() - begin)
    last = side.prepared(steps[-1])
    activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if gpu else [])]
    with without_notes(), profile(activities=activities, acc_events=True) as trace:
        side.step(last)
    wanted = DeviceType.CUDA if gpu else DeviceType.CPU
    totals: dict[str, list[float]] = {}
    operators = 0
    for event in trace.events():
        operators += event.device_type == DeviceType.CPU and event.name.startswith("aten::")
        if event.device_type == wanted and not event.is_user_annotation:
            spent = event.self_device_time_total if gpu else event.self_cpu_time_total
            calls = totals.setdefault(event.name, [0, 0.0])
            calls[0] += 1
            calls[1] += spent / 1e6
    kernels = [Kernel(name=name, calls=int(calls), seconds=spent) for name, (calls, spent) in totals.items()]
    found = StepProfile(
        step_seconds=sorted(seconds)[len(seconds) // 2],
        busy_seconds=sum(each.seconds for each in kernels),
        launches=sum(each.calls for each in kernels),
        operators=operators,
        kernels=tuple(sorted(kernels, key=lambda each: each.seconds, reverse=True)),
    )
    return found, trace


def table(kernels: Sequence[Kernel], whole: float) -> list[str]:
    rows = [
        (each.name[:110], f"{each.calls:,}", f"{each.seconds * 1e3:,.2f}", f"{each.seconds / whole:.1%}")
        for each in kernels
    ]
    return format_table(HEADER, rows)
