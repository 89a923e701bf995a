"""`bench checkpoint`: how long a save holds training up, synchronous and asynchronous, and what it costs the steps."""

from __future__ import annotations

import dataclasses
import re
import statistics
import sys
import tempfile
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch
from tqdm import tqdm

from models.bert import BertConfig
from tensor3d import CubeShape, checkpoint, rendezvous
from tools.bench.groups import LocalGroup
from tools.bench.machine import Machine, aligned, check_output, heading, write_json
from tools.bench.saving import AsideSample, SavingTrial, SyncSample
from tools.bench.subcommand import Subcommand
from tools.cores import usable_cores

MOST_BLOCKED = 0.25
"""Of the time of a synchronous save, that an asynchronous one may hold training up."""
MOST_SLOWDOWN = 1.5
"""Of the median step, that steps may take while a checkpoint is being written."""
_VOCAB = 30522
_UNITS = {"": 1, "K": 10**3, "M": 10**6, "B": 10**9}


@dataclass(frozen=True, kw_only=True)
class CheckpointCommand(Subcommand):
    """Save a BERT in training on a cube of this machine's processes: while it waits, and while it goes on."""

    parameters: str = "100M"
    """About how many the model has: a number, or one with K, M or B."""
    cube: str = "2x2x2"
    """Sizes of the axes x, y and z, as XxYxZ."""
    data_parallel: int = 1
    """Copies of the cube."""
    rounds: int = 3
    """Saves of each kind, in turns."""
    steps: int = 5
    """Steps before each pair of saves, whose median is what a step takes."""
    directory: Path | None = None
    """Where to save; a folder of its own is made there and taken away. Default: the system's temporary folder."""
    output: Path | None = None
    """JSON file for all figures."""

    @classmethod
    def defaults(cls, arguments: Sequence[str]) -> CheckpointCommand:
        return cls()

    def run(self, arguments: Sequence[str]) -> int:
        shape, config = self.check()
        machine = Machine.here()
        with tempfile.TemporaryDirectory(prefix="tensor3d-", dir=self.directory, ignore_cleanup_errors=True) as folder:
            result = measure(self, shape, config, Path(folder))
        print(f"{machine}\n{result.parameters:,} parameters on {shape}, {self.rounds} saves of each kind")
        print("\n".join(aligned(HEADER, rows(result))))
        print(verdict(result))
        if self.output is not None:
            head = heading(arguments, machine)
            write_json(self.output, head | dataclasses.asdict(result))
            print(f"written: {self.output}")
        sys.stdout.flush()
        return 0

    def check(self) -> tuple[CubeShape, BertConfig]:
        """The cube and the model. Raises ValueError for what can be seen before any process."""
        if rendezvous.is_launched():
            raise ValueError("this benchmark starts its processes itself. Call it without torchrun, srun or mpirun.")
        for name in ("rounds", "steps"):
            if getattr(self, name) < 1:
                raise ValueError(f"--{name} must be at least 1. Got {getattr(self, name)}.")
        check_output(self.output)
        if self.directory is not None:
            checkpoint.check_writable(self.directory)
            if not self.directory.is_dir():
                raise ValueError(f"--directory must be a folder that exists. Got {self.directory}.")
        shape = CubeShape.parse(self.cube, self.data_parallel)
        config = config_of(count(self.parameters))
        config.check(shape)
        return shape, config


@dataclass(frozen=True, kw_only=True)
class Figures:
    """Of all rounds. Seconds are those of the slowest rank."""

    cube: str
    parameters: int
    bytes: int
    """Of one checkpoint, with all its files."""
    blocked_sync: float
    """Seconds that a synchronous save holds training up, median."""
    blocked_async: float
    """The same of an asynchronous save."""
    blocked_ratio: float
    """Asynchronous to synchronous."""
    write_seconds: float
    """From the call of an asynchronous save until the checkpoint is complete, median."""
    step_seconds: float
    """Median of the steps while nothing is written."""
    step_seconds_writing: float
    """Median of the steps of which any part fell into the writing."""
    slowdown: float
    """Of the two."""
    slowdown_worst: float
    """Of the slowest step while writing, to the median step while nothing is written."""
    sync: tuple[float, ...]
    aside: tuple[float, ...]
    quiet_steps: tuple[float, ...]
    writing_steps: tuple[float, ...]

    @property
    def bytes_per_second_sync(self) -> float:
        return self.bytes / self.blocked_sync

    @property
    def bytes_per_second_async(self) -> float:
        return self.bytes / self.write_seconds


def measure(command: CheckpointCommand, shape: CubeShape, config: BertConfig, folder: Path) -> Figures:
    """Trains and saves, in processes of its own."""
    quiet: list[float] = []
    sync: list[SyncSample] = []
    aside: list[AsideSample] = []
    with ExitStack() as stack:
        cuda = torch.cuda.device_count() >= shape.ranks
        make = partial(SavingTrial, config=config, directory=folder)
        group: LocalGroup[SavingTrial] = LocalGroup(shape, make, cuda=cuda, cores=usable_cores())
        stack.callback(group.close)
        parameters = group.call(SavingTrial.prepare)[0]
        for _ in tqdm(range(command.rounds), unit="round", disable=None):
            quiet += slowest(group.call(SavingTrial.steps, command.steps))
            sync.append(SyncSample.slowest(group.call(SavingTrial.save_and_wait)))
            group.call(SavingTrial.steps, 1)  # caches are the training's again
            aside.append(AsideSample.slowest(group.call(SavingTrial.save_aside)))
    return figures(str(shape), parameters, quiet, sync, aside)


def figures(
    cube: str, parameters: int, quiet: Sequence[float], sync: Sequence[SyncSample], aside: Sequence[AsideSample]
) -> Figures:
    writing = [seconds for sample in aside for seconds in sample.steps]
    blocked_sync = statistics.median(sample.blocked for sample in sync)
    blocked_async = statistics.median(sample.blocked for sample in aside)
    step, step_writing = statistics.median(quiet), statistics.median(writing)
    return Figures(
        cube=cube,
        parameters=parameters,
        bytes=sync[0].bytes,
        blocked_sync=blocked_sync,
        blocked_async=blocked_async,
        blocked_ratio=blocked_async / blocked_sync,
        write_seconds=statistics.median(sample.seconds for sample in aside),
        step_seconds=step,
        step_seconds_writing=step_writing,
        slowdown=step_writing / step,
        slowdown_worst=max(writing) / step,
        sync=tuple(sample.blocked for sample in sync),
        aside=tuple(sample.blocked for sample in aside),
        quiet_steps=tuple(quiet),
        writing_steps=tuple(writing),
    )


HEADER = ("save", "blocked s", "on disk s", "MB", "MB/s", "step ms", "worst ms")


def rows(result: Figures) -> list[tuple[str, ...]]:
    """What the table shows, under `HEADER`."""
    size = f"{result.bytes / 1e6:,.0f}"
    return [
        ("none", "", "", "", "", f"{result.step_seconds * 1e3:.0f}", f"{max(result.quiet_steps) * 1e3:.0f}"),
        (
            "synchronous",
            f"{result.blocked_sync:.3f}",
            f"{result.blocked_sync:.3f}",
            size,
            f"{result.bytes_per_second_sync / 1e6:,.0f}",
            "",
            "",
        ),
        (
            "asynchronous",
            f"{result.blocked_async:.3f}",
            f"{result.write_seconds:.3f}",
            size,
            f"{result.bytes_per_second_async / 1e6:,.0f}",
            f"{result.step_seconds_writing * 1e3:.0f}",
            f"{max(result.writing_steps) * 1e3:.0f}",
        ),
    ]


def verdict(result: Figures) -> str:
    """Both promises, and whether they hold."""
    blocked = "holds" if result.blocked_ratio <= MOST_BLOCKED else "does NOT hold"
    slowed = "holds" if result.slowdown <= MOST_SLOWDOWN else "does NOT hold"
    return (
        f"blocked, asynchronous to synchronous: {result.blocked_ratio:.1%} (at most {MOST_BLOCKED:.0%}: {blocked})\n"
        f"steps during the write, to the median step: {result.slowdown:.2f}, worst {result.slowdown_worst:.2f} "
        f"(median at most {MOST_SLOWDOWN:g}: {slowed})"
    )


def slowest(seconds: Sequence[Sequence[float]]) -> list[float]:
    """Of each step, the rank that took longest."""
    return [max(step) for step in zip(*seconds, strict=True)]


def count(text: str) -> int:
    """A number such as 100M. Raises ValueError for what is none, or too small for a model."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?)([KMB]?)", text.strip().upper())
    number = round(float(match[1]) * _UNITS[match[2]]) if match else 0
    if number < 2 * 10**6:
        raise ValueError(f"--parameters must be a number of at least 2M, such as 100M or 0.3B. Got {text!r}.")
    return number


def config_of(parameters: int) -> BertConfig:
    """A BERT of about so many parameters: as wide as leaves room for four layers, as deep as comes nearest."""
    fitting = [width for width in (64, 128, 256, 512, 768, 1024, 1600, 2560) if _size(width, 4) <= parameters]
    hidden = max(fitting, default=64)
    layers = max(1, round((parameters - _size(hidden, 0)) / (_size(hidden, 1) - _size(hidden, 0))))
    return BertConfig(layers=layers, hidden=hidden, heads=hidden // 16 if hidden < 512 else hidden // 64, vocab=_VOCAB)


def _size(hidden: int, layers: int) -> int:
    """Of the matrices: the tables, the heads, 12 squares a layer."""
    return (_VOCAB + 512) * hidden + 2 * hidden**2 + layers * 12 * hidden**2
