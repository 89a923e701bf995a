"""`bench checkpoint`: how long a save holds training up, synchronous and asynchronous, and what it costs the steps."""

from __future__ import annotations

import dataclasses
import re
import statistics
import tempfile
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from time import perf_counter
from typing import ClassVar

import torch
import torch.distributed as dist

from models.bert import BertConfig, BertForPreTraining
from tensor3d import Cube, CubeShape, checkpoint, clip_grad_norm_
from tensor3d.checkpoint import Checkpoints, RankResult
from tools.bench.harness.benchmark import OWN_PROCESSES, Benchmark, Count, Report
from tools.bench.harness.processes import Trial, start
from tools.bench.vs_pytorch.work import Work, packed_batch
from tools.common.log import progress
from tools.common.machine import format_table

# --- A training on one rank that is saved while somebody holds a watch ------------------------------------------------

_LENGTH = 32  # tokens of the one sequence of a pack: steps as short as such a model has


@dataclass(frozen=True, kw_only=True)
class SyncSample:
    """A save that training waits for."""

    blocked: float
    bytes: int

    @classmethod
    def slowest(cls, ranks: Sequence[SyncSample]) -> SyncSample:
        return cls(blocked=max(rank.blocked for rank in ranks), bytes=ranks[0].bytes)


@dataclass(frozen=True, kw_only=True)
class AsideSample:
    """A save beside training."""

    blocked: float
    seconds: float
    """Until it was complete."""
    steps: tuple[float, ...]
    """Seconds of each step that began before it was."""

    @classmethod
    def slowest(cls, ranks: Sequence[AsideSample]) -> AsideSample:
        return cls(
            blocked=max(rank.blocked for rank in ranks),
            seconds=max(rank.seconds for rank in ranks),
            steps=tuple(max(step) for step in zip(*(rank.steps for rank in ranks), strict=True)),
        )


class SavingTrial(Trial):
    """Pre-training on one small batch of random ids, halted between calls."""

    def __init__(self, cube: Cube, config: BertConfig, directory: Path) -> None:
        self._cube = cube
        cube.manual_seed(0)
        self._model = BertForPreTraining(config, cube)
        self._optimizer = torch.optim.AdamW(self._model.parameters(), lr=1e-4, fused=True)
        # One sequence of random ids in each pack of the plane.
        self._work = Work(what="step", config=config, sequences=cube.shape.planes * cube.shape.z, length=_LENGTH)
        self._batch = packed_batch(self._work, cube)
        self._checkpoints = Checkpoints(directory, cube, keep_last=1)
        self._step = 0

    def prepare(self) -> int:
        """Two steps and a save, after which all memory is there; returns the number of parameters."""
        self.steps(2)
        self.save_and_wait()
        self.save_aside()
        return sum(parameter.numel() for parameter in self._model.parameters())

    def steps(self, number: int) -> list[float]:
        """Seconds of each."""
        return [self._train() for _ in range(number)]

    def save_and_wait(self) -> SyncSample:
        blocked = self._save(wait=True)
        return SyncSample(blocked=blocked, bytes=self._ended().bytes)

    def save_aside(self) -> AsideSample:
        """Saves and trains on until all ranks have heard that it is complete."""
        blocked = self._save(wait=False)
        steps: list[float] = []
        outcomes: list[RankResult] = []
        while not self._everywhere(bool(outcomes)):
            steps.append(self._train())
            outcomes += self._checkpoints.finished()
        return AsideSample(blocked=blocked, seconds=_good(outcomes).seconds, steps=tuple(steps))

    def close(self) -> None:
        self._checkpoints.close()

    def _save(self, *, wait: bool) -> float:
        if self._cube.mesh is not None:
            dist.barrier()  # so that none counts waiting for another's step
        return self._checkpoints.save(self._step, self._model, self._optimizer, {"benchmark": True}, wait=wait)

    def _ended(self) -> RankResult:
        return _good(self._checkpoints.finished())

    def _everywhere(self, flag: bool) -> bool:
        if self._cube.mesh is None:
            return flag
        found = torch.tensor([int(flag)], device=self._cube.device)
        dist.all_reduce(found, op=dist.ReduceOp.MIN)
        return bool(found.item())

    def _train(self) -> float:
        begin = perf_counter()
        targets = self._work.sequences * self._work.masked
        self._model(self._batch, targets, self._work.sequences).loss.backward()
        clip_grad_norm_(self._model.parameters(), 1.0, self._cube)
        self._optimizer.step()
        self._optimizer.zero_grad(set_to_none=True)
        if self._cube.device.type == "cuda":
            torch.cuda.synchronize(self._cube.device)
        self._step += 1
        return perf_counter() - begin


def _good(outcomes: Sequence[RankResult]) -> RankResult:
    outcome = outcomes[0]
    if outcome.error is not None:
        raise OSError(f"step {outcome.step} was not saved: {outcome.error}")
    return outcome


# --- `bench checkpoint` -----------------------------------------------------------------------------------------------

MOST_BLOCKED = 0.25
"""Of the time of a synchronous save, that an asynchronous one may hold training up."""
MOST_SLOWDOWN = 1.5
"""Of the median step, that steps may take while a checkpoint is being written."""
_VOCAB = 30522
_UNITS = {"": 1, "K": 10**3, "M": 10**6, "B": 10**9}


@dataclass(frozen=True, kw_only=True)
class CheckpointCommand(Benchmark[tuple[CubeShape, BertConfig]]):
    """Save a BERT in training on a cube of this machine's processes: while it waits, and while it goes on."""

    parameters: str = "100M"
    """About how many the model has: a number, or one with K, M or B."""
    cube: str = "2x2x2"
    """Sizes of the axes x, y and z, as XxYxZ."""
    data_parallel: int = 1
    """Copies of the cube."""
    rounds: Count = 3
    """Saves of each kind, in turns."""
    steps: Count = 5
    """Steps before each pair of saves, whose median is what a step takes."""
    directory: Path | None = None
    """Where to save; a folder of its own is made there and taken away. Default: the system's temporary folder."""

    launcher: ClassVar[str | None] = OWN_PROCESSES

    def plan(self) -> tuple[CubeShape, BertConfig]:
        """The cube and the model."""
        if self.directory is not None:
            checkpoint.check_writable(self.directory)
            if not self.directory.is_dir():
                raise ValueError(f"--directory must be a folder that exists. Got {self.directory}.")
        shape = CubeShape.parse(self.cube, self.data_parallel)
        config = config_of(count(self.parameters))
        config.check(shape)
        return shape, config

    def measure(self, plan: tuple[CubeShape, BertConfig]) -> Report:
        shape, config = plan
        with tempfile.TemporaryDirectory(prefix="tensor3d-", dir=self.directory, ignore_cleanup_errors=True) as folder:
            result = measure(self, shape, config, Path(folder))
        what = f"{result.parameters:,} parameters on {shape}, {self.rounds} saves of each kind"
        lines = [what, *format_table(HEADER, rows(result)), verdict(result)]
        return Report(lines=lines, content=dataclasses.asdict(result))


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
        (group,) = start([shape], partial(SavingTrial, config=config, directory=folder), stack)
        parameters = group.call(SavingTrial.prepare)[0]
        for _ in progress(range(command.rounds), unit="round"):
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
