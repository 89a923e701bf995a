"""`bench profile`: where a training step of our BERT spends its time on one device, kernel by kernel."""

from __future__ import annotations

import dataclasses
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, NamedTuple

import torch
from torch.autograd import DeviceType
from torch.profiler import ProfilerActivity, profile

from models.bert import PRESETS
from tensor3d.attention.backends import Backend
from tensor3d.distributed import process_group
from tools.bench.harness.command import Subcommand
from tools.bench.harness.memory import without_notes
from tools.bench.vs_transformers.contenders import (
    CONTENDERS,
    ROWS_COMPILED,
    Implementation,
    make_sides,
    with_sizes,
    write_model,
)
from tools.bench.vs_transformers.data import PADDED, Work, works
from tools.bench.vs_transformers.pretrain import histogram_of
from tools.common.machine import Machine, check_output, format_table, heading, write_json
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
class ProfileCommand(Subcommand):
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
    length: int = 512
    """Tokens of the longest sequence, and slots of a pack."""
    packs: int = 8
    """Of a micro-batch; a step has one."""
    layers: int | None = None
    """Transformer layers, instead of the preset's."""
    dropout: float = 0.1
    """Probability, of hidden states."""
    attention_dropout: float = 0.0
    """That of attention weights."""
    vocab: int = 30522
    """Entries of the vocabulary."""
    backend: Backend = "auto"
    """Of our attention."""
    kernels: int = 25
    """How many, the dearest, are told."""
    seed: int = 0
    """Of weights, sequences and masks."""
    trace: Path | None = None
    """JSON file for the trace, of Chrome's format."""
    output: Path | None = None
    """JSON file for the figures."""

    @classmethod
    def defaults(cls, arguments: Sequence[str]) -> Any:
        return cls()

    def run(self, arguments: Sequence[str]) -> int:
        self.check()
        machine = Machine.here()
        device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
        side, steps = self._made(device)
        found, trace = profiled(side, steps, device)
        print(f"{machine}\n{self.contender}, BERT-{self.preset}, {self.precision}, {self.packs} packs: {found}")
        print("\n".join(table(found.kernels[: self.kernels], found.busy_seconds)), flush=True)
        if self.trace is not None:
            trace.export_chrome_trace(str(self.trace))
            print(f"written: {self.trace}")
        if self.output is not None:
            write_json(self.output, {**heading(arguments, machine), "results": dataclasses.asdict(found)})
            print(f"written: {self.output}")
        return 0

    def check(self) -> None:
        """Raises ValueError for what can be seen before all work."""
        if process_group.is_launched():
            raise ValueError("this benchmark is one process. Call it without torchrun, srun or mpirun.")
        for name in ("packs", "kernels", "length"):
            if getattr(self, name) < 1:
                raise ValueError(f"--{name} must be at least 1. Got {getattr(self, name)}.")
        if self.preset not in PRESETS:
            raise ValueError(f"--preset must be one of {', '.join(PRESETS)}. Got {self.preset!r}.")
        if self.contender not in CONTENDERS:
            raise ValueError(f"--contender must be one of {', '.join(CONTENDERS)}. Got {self.contender!r}.")
        check_output(self.output)
        check_output(self.trace)

    def _made(self, device: torch.device) -> tuple[Implementation, list[Work]]:
        lengths, source = histogram_of(self.histogram, self.length)
        print(f"lengths: {source}", flush=True)
        config = with_sizes(
            PRESETS[self.preset], layers=self.layers, dropout=self.dropout, attention_dropout=self.attention_dropout
        )
        config = dataclasses.replace(config, vocab=self.vocab)
        compute = None if self.precision == "fp32" else TYPES[self.precision]
        with tempfile.TemporaryDirectory() as folder:
            write_model(config, Path(folder), self.seed)
            sides = make_sides(
                [self.contender], config, Path(folder), compute, device, self.backend, capacity=self.length
            )
        side = sides[self.contender]
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
