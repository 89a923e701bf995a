"""What the benchmarks of training share: a recipe on the command line, and trainings that work in turns."""

from __future__ import annotations

import dataclasses
import math
import statistics
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import torch
import tyro
from tqdm import tqdm

from models.bert.cost_model.comm_volume import read_slots, step_traffic
from tensor3d import Cube, CubeShape
from tensor3d.cost_model.comm_volume import Bytes, CommModel
from tensor3d.distributed import process_group
from tensor3d.distributed.comm_stats import Key
from tools import pretrain
from tools.bench.harness.command import Subcommand, recipe_among
from tools.bench.harness.memory import PeakMemory, RankMemory, count_memory
from tools.bench.harness.processes import Group, LocalGroup
from tools.common.cpu import usable_cores
from tools.common.machine import Machine, check_output, heading, write_json
from tools.corpus.training_corpus import open_corpus
from tools.training.config import TrainConfig, read_config
from tools.training.data import TrainData
from tools.training.metrics import StepMetrics
from tools.training.trainer import Trainer

# --- What one rank does for `bench step`: it trains, a few steps at a time, and notes what each step took -------------

Calls = Counter[Key]


@dataclass(frozen=True, kw_only=True)
class StepSample:
    """One step as one rank saw it."""

    seconds: float
    tokens: int
    """Real tokens of the whole step, over all ranks."""
    loss: float
    received: Bytes
    """Bytes received by this rank, by axis and kind."""
    calls: Calls
    """Collectives issued by this rank, by axis and kind."""
    flops: int
    """Of the model, over all ranks, without what is computed again."""


@dataclass(frozen=True, kw_only=True)
class RankFacts:
    """What does not change from step to step."""

    device: str
    threads: int
    closed_form: Bytes
    """Bytes this rank should receive in a step, by axis and kind."""
    calls_closed_form: Calls
    """Collectives it should issue."""
    first_loss: float
    """Of the very first step: weights and packs are then the same on every cube."""
    peak_memory: int | None
    """Growth over the process before the model, after the warm-up, bytes."""
    memory: RankMemory
    """Of the step after the warm-up."""


class StepTrial:
    """Pre-training on one rank, halted between calls.

    Args:
        corpus: folder of the prepared corpus.
        warmup: steps at the start, at least 1.
        peaks: also measure the peak of tensors, which takes a step under the profiler.
    """

    def __init__(self, cube: Cube, recipe: TrainConfig, corpus: Path, warmup: int, *, peaks: bool = True) -> None:
        self._cube = cube
        memory = PeakMemory(cube.device)
        prepared = open_corpus(corpus)
        self._feed = TrainData.of_corpus(recipe, cube, prepared)
        self._trainer = Trainer(recipe, cube, self._feed, prepared)
        self._loader = self._trainer.loader()
        self._steps = self._trainer.steps(self._loader)
        # The first step also makes the optimiser's state, after which memory does not grow any more.
        first = self._advance(warmup)[0]
        growth, wire = memory.growth(), self._wire()
        self.facts = RankFacts(
            device=cube.device.type,
            threads=torch.get_num_threads(),
            closed_form=self._closed_form(wire),
            calls_closed_form=self._closed_form(replace(wire, unit="calls")),
            first_loss=first.loss,
            peak_memory=growth,
            memory=count_memory(self._trainer, wire, lambda: next(self._steps), peaks=peaks),
        )

    def turn(self, steps: int) -> list[StepSample]:
        """`steps` samples. One more step goes first and counts for nothing: others had the caches in between."""
        return self._advance(1 + steps)[1:]

    def get_facts(self) -> RankFacts:
        return self.facts

    def close(self) -> None:
        self._loader.close()
        self._feed.close()

    def _advance(self, steps: int) -> list[StepSample]:
        samples = []
        for _ in range(steps):
            with self._cube.traffic.counting() as traffic:
                metrics = next(self._steps)
            samples.append(
                StepSample(
                    seconds=metrics.seconds,
                    tokens=round(metrics.tokens_per_second * metrics.seconds),
                    loss=metrics.loss,
                    received=Counter({key: size for key, size in traffic.received.items() if size}),
                    calls=traffic.calls,
                    flops=round(metrics.model_tflops * 1e12 * metrics.seconds * self._cube.shape.ranks),
                )
            )
        return samples

    def _wire(self) -> CommModel:
        trainer = self._trainer
        precision, parameter = trainer.cube.precision, next(trainer.model.parameters()).dtype
        return CommModel(
            shape=self._cube.shape,
            rank=self._cube.rank,
            compute=precision.computed(parameter).itemsize,
            gradient=precision.reduced(parameter).itemsize,
            parameter=parameter.itemsize,
        )

    def _closed_form(self, wire: CommModel) -> Bytes:
        trainer, layout, shape = self._trainer, self._loader.layout, self._cube.shape
        recipe, groups = trainer.recipe.optimizer, trainer.optimizer.param_groups
        multiple = math.lcm(shape.y, shape.z)
        masked, first = (
            -(-layout.plane_packs * budget // multiple) * multiple
            for budget in (self._feed.data.masked_per_pack, self._feed.data.max_sequences)
        )
        budget = self._feed.data.masked_per_pack + self._feed.data.max_sequences
        only_read = trainer.recipe.speed.read_rows_only
        expected = step_traffic(
            trainer.model.config,
            wire,
            layout.plane_packs * layout.capacity,
            masked,
            first,
            micro_batches=self._feed.global_batch // layout.micro_batch,
            norm=3,  # the norm, the ranks that want to stop, and those whose loss is not finite
            keep_gathered=trainer.recipe.model.keep_gathered,
            recompute=trainer.recipe.model.recompute,
            read=read_slots(layout.plane_packs, budget, wire) if only_read else None,
            lamb=sum(len(g["params"]) for g in groups if g["weight_decay"] > 0) if recipe.kind == "lamb" else 0,
        )
        return Counter({key: size for key, size in expected.items() if size})


# --- The figures of `bench step`, made of what all ranks noted in all rounds ------------------------------------------

Turn = list[list[StepSample]]
"""The samples of one turn, by rank and step."""
LOSS_TOLERANCE = 1e-4
"""Relative difference of first losses that fp32 can explain with a wide margin."""


@dataclass(frozen=True, kw_only=True)
class CubeFigures:
    """One cube. Seconds of a step are the mean over the ranks: their sum is then the time that passed."""

    cube: str
    """XxYxZ"""
    data_parallel: int
    ranks: int
    device: str
    threads: int
    """Of each rank."""
    steps: int
    seconds_median: float
    seconds_quartiles: tuple[float, float]
    ratio: float
    """Median of the steps over that of the first cube: above 1 is slower."""
    ratio_range: tuple[float, float]
    """The lowest and the highest of the same ratio, taken in each round alone."""
    tokens_per_second: float
    """Real tokens, over all ranks; median of the steps."""
    flops_per_second: float
    """Of the model, over all ranks; median of the steps."""
    collectives: int
    """In a step, on the rank with the most."""
    collectives_closed_form: int
    """What that rank should issue by the formulas."""
    collectives_equal: bool
    """Whether count and formulas agree on every rank, in every step, for each axis and kind."""
    bytes_received: int
    """In a step, by the rank that receives most, in the ring model."""
    bytes_closed_form: int
    """What that rank should receive by the formulas."""
    traffic_equal: bool
    """Whether count and formulas agree to the byte on every rank, in every step, for each axis and kind."""
    first_loss: float
    """Of the very first step, nats."""
    peak_memory_bytes: int | None
    """Of the rank that needs most, above the process before the model was made."""
    held_bytes: int
    """Weights and the optimiser's state, counted, on the rank with the most."""
    held_closed_form: int
    """What that rank should hold by the formulas."""
    held_equal: bool
    """Whether count and formulas agree to the byte on every rank."""
    saved_bytes: int
    """What autograd keeps for the backward pass of a micro-batch, beside parameters, on the rank with the most."""
    peak_tensor_bytes: int | None
    """The most tensor memory at once in that step, with what is held and its batches, on the rank with the most. None
    where it was not measured."""
    seconds: tuple[tuple[float, ...], ...]
    """Every step, by round."""

    @property
    def name(self) -> str:
        return self.cube if self.data_parallel == 1 else f"{self.data_parallel}*({self.cube})"


def seconds_of(turn: Turn) -> list[float]:
    """Seconds of each step of a turn."""
    return [statistics.fmean(sample.seconds for sample in step) for step in zip(*turn, strict=True)]


def figures(shape: CubeShape, turns: Sequence[Turn], facts: Sequence[RankFacts], first: Sequence[Turn]) -> CubeFigures:
    """The figures of one cube.

    Args:
        turns: its turns, by round.
        facts: of its ranks.
        first: the turns of the cube to compare with, in the same rounds.
    """
    rounds = [seconds_of(turn) for turn in turns]
    base = [seconds_of(turn) for turn in first]
    steps = [second for seconds in rounds for second in seconds]
    low, median, high = (float(q) for q in np.quantile(steps, [0.25, 0.5, 0.75]))
    ratios = [statistics.median(mine) / statistics.median(theirs) for mine, theirs in zip(rounds, base, strict=True)]
    tokens = [sample.tokens for turn in turns for sample in turn[0]]
    flops = [sample.flops for turn in turns for sample in turn[0]]
    samples = [(rank, sample) for turn in turns for rank, mine in enumerate(turn) for sample in mine]
    worst, busiest = max(samples, key=lambda pair: pair[1].received.total())
    chattiest, most = max(samples, key=lambda pair: pair[1].calls.total())
    resident = [fact.peak_memory for fact in facts if fact.peak_memory is not None]
    memory = [fact.memory for fact in facts]
    holds, saves, peaks = (
        max(memory, key=lambda of: of.held),
        max(memory, key=lambda of: of.saved),
        max(memory, key=lambda of: of.peak or 0),
    )
    return CubeFigures(
        cube=f"{shape.x}x{shape.y}x{shape.z}",
        data_parallel=shape.data,
        ranks=shape.ranks,
        device=facts[0].device,
        threads=facts[0].threads,
        steps=len(steps),
        seconds_median=median,
        seconds_quartiles=(low, high),
        ratio=median / statistics.median(second for seconds in base for second in seconds),
        ratio_range=(min(ratios), max(ratios)),
        tokens_per_second=statistics.median(count / second for count, second in zip(tokens, steps, strict=True)),
        flops_per_second=statistics.median(count / second for count, second in zip(flops, steps, strict=True)),
        collectives=most.calls.total(),
        collectives_closed_form=facts[chattiest].calls_closed_form.total(),
        collectives_equal=all(sample.calls == facts[rank].calls_closed_form for rank, sample in samples),
        bytes_received=busiest.received.total(),
        bytes_closed_form=facts[worst].closed_form.total(),
        traffic_equal=all(sample.received == facts[rank].closed_form for rank, sample in samples),
        first_loss=facts[0].first_loss,
        peak_memory_bytes=max(resident) if len(resident) == len(facts) else None,
        held_bytes=holds.held,
        held_closed_form=holds.held_closed_form,
        held_equal=all(of.held == of.held_closed_form for of in memory),
        saved_bytes=saves.saved,
        peak_tensor_bytes=peaks.peak,
        seconds=tuple(tuple(seconds) for seconds in rounds),
    )


def loss_difference(cubes: Sequence[CubeFigures]) -> float:
    """The largest relative difference between first losses."""
    losses = np.array([cube.first_loss for cube in cubes])
    # numpy's pass on a loss that is not a number; Python's may lose it.
    return float((losses.max() - losses.min()) / abs(losses.min()))


HEADER = (
    "cube",
    "ranks",
    "threads",
    "step ms",
    "quartiles",
    "ratio",
    "by round",
    "tokens/s",
    "collectives",
    "closed form",
    "MiB received",
    "closed form",
    "saved MiB",
    "held MiB",
    "closed form",
    "peak MiB",
    "first loss",
)


def counted(number: int, closed_form: int, equal: bool) -> tuple[str, str]:
    """A count of bytes in MiB, and "equal" or what the formulas say, where they say something else on any rank."""
    return f"{number / 2**20:.2f}", "equal" if equal else f"{closed_form / 2**20:.2f}"


def row(cube: CubeFigures) -> tuple[str, ...]:
    """What the table shows of a cube, under `HEADER`."""
    low, high = cube.seconds_quartiles
    least, most = cube.ratio_range
    memory = cube.peak_memory_bytes
    return (
        cube.name,
        str(cube.ranks),
        str(cube.threads),
        f"{cube.seconds_median * 1e3:.1f}",
        f"{low * 1e3:.1f}-{high * 1e3:.1f}",
        f"{cube.ratio:.2f}",
        f"{least:.2f}-{most:.2f}",
        f"{cube.tokens_per_second:,.0f}",
        str(cube.collectives),
        "equal" if cube.collectives_equal else str(cube.collectives_closed_form),
        *counted(cube.bytes_received, cube.bytes_closed_form, cube.traffic_equal),
        f"{cube.saved_bytes / 2**20:.2f}",
        *counted(cube.held_bytes, cube.held_closed_form, cube.held_equal),
        "-" if memory is None else f"{memory / 2**20:.0f}",
        f"{cube.first_loss:.6f}",
    )


# --- What the benchmarks of training share ----------------------------------------------------------------------------

PACKED, PADDED, BINNED = "packed", "padded", "binned"
"""Kinds of packs: as the recipe fills them, one sequence in each, and one of like length in each pack of a step."""
TrainingTurn = list[list[StepMetrics]]
"""What the steps of one turn took, by rank and step."""


@dataclass(frozen=True, kw_only=True)
class RecipeCommand(Subcommand):
    """A measurement of what a recipe trains, in processes of its own on this machine."""

    recipe: tyro.conf.Positional[Path]
    """TOML file; shipped ones lie in launch/recipes."""
    output: Path | None = None
    """JSON file for all figures."""
    settings: Annotated[TrainConfig, tyro.conf.arg(name="")] = field(default_factory=TrainConfig)
    """The recipe's values, each of which can be given here."""

    @classmethod
    def defaults(cls, arguments: Sequence[str]) -> Any:
        path = recipe_among(arguments)
        # Without a recipe tyro says what is missing, or prints the help.
        return cls(recipe=tyro.MISSING, settings=TrainConfig() if path is None else read_config(path))

    def check_call(self, arguments: Sequence[str], *at_least_1: str) -> None:
        """Raises ValueError for what is wrong with any such call.

        Args:
            at_least_1: names of fields.
        """
        if self.recipe != recipe_among(arguments):
            raise ValueError(f"a recipe is a file *.toml; shipped ones lie in launch/recipes. Got {self.recipe}.")
        if process_group.is_launched():
            raise ValueError(
                "this benchmark starts its processes itself, on one machine. Call it without torchrun, srun or mpirun."
            )
        for name in at_least_1:
            if getattr(self, name) < 1:
                raise ValueError(f"--{name.replace('_', '-')} must be at least 1. Got {getattr(self, name)}.")
        check_output(self.output)

    def as_training(self, settings: TrainConfig, **options: Any) -> pretrain.Command:
        """The same as a command of tools.pretrain, which knows where a corpus lies and what must fit together."""
        return pretrain.Command(recipe=self.recipe, settings=settings, **options)

    def write(self, arguments: Sequence[str], machine: Machine, **content: Any) -> None:
        """The JSON file, if one is asked for: what was measured, and how and where."""
        if self.output is not None:
            head = {
                **heading(arguments, machine),
                "recipe": self.settings.to_dict(),
            }
            write_json(self.output, head | content)
            print(f"written: {self.output}")


class Training:
    """Pre-training on one rank, halted between calls.

    Args:
        make_feed: makes its data; the feed is closed with the training.
    """

    def __init__(self, cube: Cube, recipe: TrainConfig, make_feed: Callable[[TrainConfig, Cube], TrainData]) -> None:
        self.feed = make_feed(recipe, cube)
        self.trainer = Trainer(recipe, cube, self.feed, None)
        self.loader = self.trainer.loader()
        self._steps = self.trainer.steps(self.loader)

    def turn(self, steps: int) -> list[StepMetrics]:
        return [next(self._steps) for _ in range(steps)]

    def close(self) -> None:
        self.loader.close()
        self.feed.close()


def in_mode(recipe: TrainConfig, mode: str) -> TrainConfig:
    """The recipe with packs of that kind; as it fills them for any other word than "padded" and "binned"."""
    data = recipe.data
    if mode == PADDED:
        data = dataclasses.replace(data, packing="padded")
    elif mode == BINNED:
        data = dataclasses.replace(data, packing="binned")
    return dataclasses.replace(recipe, data=data)


def check_planned(recipe: TrainConfig) -> None:
    """Raises ValueError unless packs of the recipe can be compared with padded and binned ones."""
    data = recipe.data
    if data.packing in (PADDED, BINNED) or data.groups > 1:
        raise ValueError(
            f"the recipe must fill packs, in one group. Got data.packing={data.packing!r} and "
            f"data.groups={data.groups}. Set data.packing to a planner such as lpfhp, and data.groups to 1."
        )


def check_cube(training: pretrain.Command, shape: CubeShape) -> None:
    """Raises ValueError where a cube cannot train a recipe."""
    try:
        pretrain.check(training, shape)
    except ValueError as problem:
        raise ValueError(f"cube {shape}: {problem}") from None


def start(
    shape: CubeShape, make: Callable[[Cube], Training], stack: ExitStack, *, cuda: bool | None = None
) -> LocalGroup[Training]:
    """Processes of this machine that train on a cube; they end with the stack.

    Args:
        cuda: a GPU for each rank. Default: if there are enough.
    """
    if cuda is None:
        cuda = torch.cuda.device_count() >= shape.ranks
    group = LocalGroup(shape, make, cuda=cuda, cores=usable_cores())
    stack.callback(group.close)
    return group


def alternate(
    groups: Mapping[str, Group[Training]], counts: Sequence[int], *, skip: int, warmup: int = 0
) -> dict[str, list[TrainingTurn]]:
    """Lets groups train in turns and returns the turns of each, by round.

    Whatever else slows the machine down meets all groups alike. Every second round runs backwards, so that no group
    always follows the same one.

    Args:
        counts: steps of a turn, for each round.
        skip: steps at the begin of each turn that are no part of the counts; they are returned too.
        warmup: steps of each group before all turns, of which nobody hears.
    """
    turns: dict[str, list[TrainingTurn]] = {name: [] for name in groups}
    with tqdm(total=len(counts) * len(groups), unit="turn", disable=None) as bar:
        for name, group in groups.items():
            bar.set_postfix_str(f"{name}, warming up")
            group.call(Training.turn, warmup)
        for number, steps in enumerate(counts):
            for name in groups if number % 2 == 0 else reversed(list(groups)):
                bar.set_postfix_str(name)
                turns[name].append(groups[name].call(Training.turn, skip + steps))
                bar.update()
    return turns


def timed(turns: Sequence[TrainingTurn], skip: int) -> list[TrainingTurn]:
    """The turns without their first steps."""
    return [[rank[skip:] for rank in turn] for turn in turns]


def training_seconds(turn: TrainingTurn) -> list[float]:
    """Seconds of each step: the mean over the ranks, so that their sum is the time that passed."""
    return [statistics.fmean(metrics.seconds for metrics in step) for step in zip(*turn, strict=True)]
