"""What the benchmarks of training share: a recipe on the command line, and trainings that work in turns."""

from __future__ import annotations

import dataclasses
import math
import statistics
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Annotated, Any, ClassVar, TypeVar

import torch
import tyro

from models.bert.cost_model.comm_volume import STEP_NUMBERS, read_slots, step_traffic
from models.bert.cost_model.param_shapes import held
from tensor3d import Cube, CubeShape
from tensor3d.cost_model.comm_volume import Bytes, CommModel
from tensor3d.distributed import process_group
from tensor3d.distributed.comm_stats import Key
from tensor3d.distributed.object_collectives import run_on_rank0
from tools import pretrain
from tools.bench.harness.benchmark import OWN_PROCESSES, Benchmark
from tools.bench.harness.figures import Column, Times, flat, means, mebibytes, relative_difference, times
from tools.bench.harness.memory import PeakMemory, RankMemory, count_memory, nonzero, wire_of
from tools.bench.harness.processes import CubeHandle, Group, Trial, Worker, interleave, start
from tools.common.cli import recipe_among
from tools.corpus.training_corpus import open_corpus
from tools.training.arguments import Command, resolve
from tools.training.config import TrainConfig, read_config
from tools.training.data import TrainData
from tools.training.factory import set_kernels
from tools.training.metrics import StepMetrics
from tools.training.pretraining import PretrainTrainer
from tools.training.run_plan import RunPlan

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
    closed_form: Bytes | None
    """Bytes this rank should receive in a step, by axis and kind. None: of this model no formula says it."""
    calls_closed_form: Calls | None
    """Collectives it should issue."""
    first_loss: float
    """Of the very first step: weights and packs are then the same on every cube."""
    peak_memory: int | None
    """Growth over the process before the model, after the warm-up, bytes."""
    memory: RankMemory
    """Of the step after the warm-up."""


class StepTrial(Trial):
    """Pre-training on one rank, halted between calls.

    Args:
        corpus: folder of the prepared corpus.
        warmup: steps at the start, at least 1.
        peaks: also measure the peak of tensors, which takes a step under the profiler.
    """

    def __init__(self, cube: Cube, recipe: TrainConfig, corpus: Path, warmup: int, *, peaks: bool = True) -> None:
        self._cube = cube
        set_kernels(recipe, cube)
        memory = PeakMemory(cube.device)
        prepared = open_corpus(corpus)
        self._feed = TrainData.of_corpus(recipe, cube, prepared)
        self._trainer = PretrainTrainer(recipe, cube, self._feed, prepared)
        self._loader = self._trainer.loader()
        self._steps = self._trainer.steps(self._loader)
        # The first step also makes the optimiser's state, after which memory does not grow any more.
        first, *_ = [self.sample() for _ in range(warmup)]
        growth = memory.growth()
        wire = wire_of(self._trainer.cube, next(self._trainer.model.parameters()).dtype)  # the types of the recipe
        self.facts = RankFacts(
            device=cube.device.type,
            threads=torch.get_num_threads(),
            closed_form=self._closed_form(wire),
            calls_closed_form=self._closed_form(replace(wire, unit="calls")),
            first_loss=first.loss,
            peak_memory=growth,
            memory=count_memory(self._trainer, wire, lambda: next(self._steps), peaks=peaks),
        )

    def sample(self) -> StepSample:
        with self._cube.traffic.counting() as traffic:
            metrics = next(self._steps)
        return StepSample(
            seconds=metrics.seconds,
            tokens=round(metrics.tokens_per_second * metrics.seconds),
            loss=metrics.loss,
            received=nonzero(traffic.received),
            calls=traffic.calls,
            flops=round(metrics.model_tflops * 1e12 * metrics.seconds * self._cube.shape.ranks),
        )

    def close(self) -> None:
        self._loader.close()
        self._feed.close()

    def _closed_form(self, wire: CommModel) -> Bytes | None:
        trainer, layout, shape = self._trainer, self._loader.layout, self._cube.shape
        if trainer.recipe.replaced_tokens is not None:
            return None
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
            norm=STEP_NUMBERS,
            reduce_loss=False,
            reshard_after_forward=trainer.recipe.model.reshard_after_forward,
            keep_budget=trainer.recipe.model.keep_bytes,
            recompute=trainer.recipe.model.recompute,
            read=read_slots(layout.plane_packs, budget, wire) if only_read else None,
            summed=held(trainer.model.config, shape).summed(trainer.recipe.optimizer.kind),
            shard_over_data=trainer.recipe.optimizer.shard_over_data,
        )
        return nonzero(expected)


# --- The figures of `bench step`, made of what all ranks noted in all rounds ------------------------------------------

Turn = list[list[StepSample]]
"""The samples of one turn, by rank and step."""
LOSS_TOLERANCE = 1e-4
"""Relative difference of first losses that fp32 can explain with a wide margin."""


@dataclass(frozen=True, kw_only=True)
class CubeFigures(Times):
    """One cube."""

    cube: Annotated[str, Column("cube", of="name", before="seconds_median")]
    """XxYxZ"""
    data_parallel: int
    ranks: Annotated[int, Column("ranks", before="seconds_median")]
    device: str
    threads: Annotated[int, Column("threads", before="seconds_median")]
    """Of each rank."""
    steps: int
    tokens_per_second: Annotated[float, Column("tokens/s", ",.0f")]
    """Real tokens, over all ranks; median of the steps."""
    flops_per_second: float
    """Of the model, over all ranks; median of the steps."""
    collectives: Annotated[int, Column("collectives")]
    """In a step, on the rank with the most."""
    collectives_closed_form: Annotated[int | None, Column("closed form", equal="collectives_equal")]
    """What that rank should issue by the formulas. None here and below: there are none, as of an ELECTRA's step."""
    collectives_equal: bool | None
    """Whether count and formulas agree on every rank, in every step, for each axis and kind."""
    bytes_received: Annotated[int, mebibytes("MiB received")]
    """In a step, by the rank that receives most, in the ring model."""
    bytes_closed_form: Annotated[int | None, mebibytes("closed form", equal="traffic_equal")]
    """What that rank should receive by the formulas."""
    traffic_equal: bool | None
    """Whether count and formulas agree to the byte on every rank, in every step, for each axis and kind."""
    saved_bytes: Annotated[int, mebibytes("saved MiB")]
    """What autograd keeps for the backward pass of a micro-batch, beside parameters, on the rank with the most."""
    held_bytes: Annotated[int, mebibytes("held MiB")]
    """Weights and the optimiser's state, counted, on the rank with the most."""
    held_closed_form: Annotated[int | None, mebibytes("closed form", equal="held_equal")]
    """What that rank should hold by the formulas."""
    held_equal: bool | None
    """Whether count and formulas agree to the byte on every rank."""
    peak_memory_bytes: Annotated[int | None, mebibytes("peak MiB", ".0f")]
    """Of the rank that needs most, above the process before the model was made."""
    peak_tensor_bytes: int | None
    """The most tensor memory at once in that step, with what is held and its batches, on the rank with the most. None
    where it was not measured."""
    first_loss: Annotated[float, Column("first loss", ".6f")]
    """Of the very first step, nats."""

    @property
    def name(self) -> str:
        return self.cube if self.data_parallel == 1 else f"{self.data_parallel}*({self.cube})"


def figures(shape: CubeShape, turns: Sequence[Turn], facts: Sequence[RankFacts], first: Sequence[Turn]) -> CubeFigures:
    """The figures of one cube.

    Args:
        turns: its turns, by round.
        facts: of its ranks.
        first: the turns of the cube to compare with, in the same rounds.
    """
    rounds, base = ([means(turn, lambda sample: sample.seconds) for turn in each] for each in (turns, first))
    steps = flat(rounds)
    tokens = [sample.tokens for turn in turns for sample in turn[0]]
    flops = [sample.flops for turn in turns for sample in turn[0]]
    samples = [(rank, sample) for turn in turns for rank, mine in enumerate(turn) for sample in mine]
    worst, busiest = max(samples, key=lambda pair: pair[1].received.total())
    chattiest, most = max(samples, key=lambda pair: pair[1].calls.total())
    resident = [fact.peak_memory for fact in facts if fact.peak_memory is not None]
    memory = [fact.memory for fact in facts]
    is_known = facts[0].closed_form is not None
    holds, saves, peaks = (
        max(memory, key=lambda of: of.held),
        max(memory, key=lambda of: of.saved),
        max(memory, key=lambda of: of.peak or 0),
    )
    return CubeFigures(
        **times(rounds, base),
        cube=f"{shape.x}x{shape.y}x{shape.z}",
        data_parallel=shape.data,
        ranks=shape.ranks,
        device=facts[0].device,
        threads=facts[0].threads,
        steps=len(steps),
        tokens_per_second=statistics.median(count / second for count, second in zip(tokens, steps, strict=True)),
        flops_per_second=statistics.median(count / second for count, second in zip(flops, steps, strict=True)),
        collectives=most.calls.total(),
        collectives_closed_form=_total(facts[chattiest].calls_closed_form),
        collectives_equal=all(sample.calls == facts[rank].calls_closed_form for rank, sample in samples)
        if is_known
        else None,
        bytes_received=busiest.received.total(),
        bytes_closed_form=_total(facts[worst].closed_form),
        traffic_equal=all(sample.received == facts[rank].closed_form for rank, sample in samples) if is_known else None,
        first_loss=facts[0].first_loss,
        peak_memory_bytes=max(resident) if len(resident) == len(facts) else None,
        held_bytes=holds.held,
        held_closed_form=holds.held_closed_form,
        held_equal=all(of.held == of.held_closed_form for of in memory) if is_known else None,
        saved_bytes=saves.saved,
        peak_tensor_bytes=peaks.peak,
    )


def _total(closed_form: Bytes | None) -> int | None:
    return None if closed_form is None else closed_form.total()


def loss_difference(cubes: Sequence[CubeFigures]) -> float:
    """The largest relative difference between first losses."""
    return relative_difference([cube.first_loss for cube in cubes])


# --- What the benchmarks of training share ----------------------------------------------------------------------------

PACKED, PADDED, BINNED = "packed", "padded", "binned"
"""Kinds of packs: as the recipe fills them, one sequence in each, and one of like length in each pack of a step."""
TrainingTurn = list[list[StepMetrics]]
"""What the steps of one turn took, by rank and step."""


S = TypeVar("S", bound=Worker)


@dataclass(frozen=True, kw_only=True)
class RecipeBenchmark(Benchmark[Any]):
    """A measurement of what a recipe trains, in processes of its own on this machine."""

    recipe: tyro.conf.Positional[Path]
    """TOML file; shipped ones lie in launch/recipes."""
    settings: Annotated[TrainConfig, tyro.conf.arg(name="")] = field(default_factory=TrainConfig)
    """The recipe's values, each of which can be given here."""

    launcher: ClassVar[str | None] = OWN_PROCESSES

    @classmethod
    def defaults(cls, arguments: Sequence[str]) -> Any:
        path = recipe_among(arguments)
        # Without a recipe tyro says what is missing, or prints the help.
        return cls(recipe=tyro.MISSING, settings=TrainConfig() if path is None else read_config(path))

    def check(self, arguments: Sequence[str] = ()) -> Any:
        if self.recipe != recipe_among(arguments):
            raise ValueError(f"a recipe is a file *.toml; shipped ones lie in launch/recipes. Got {self.recipe}.")
        return super().check(arguments)

    def settled(self) -> Mapping[str, Any]:
        return {"recipe": self.settings.to_dict()}

    @property
    def has_dropout(self) -> bool:
        """Every rank draws for itself: with it cubes cannot be compared by their losses."""
        return self.settings.model.has_dropout

    def as_training(self, settings: TrainConfig, **options: Any) -> RunPlan:
        """The same as a run of tools.pretrain, which knows where a corpus lies and what must fit together."""
        return resolve(Command(recipe=self.recipe, settings=settings, **options))


def prepare_here(training: RunPlan) -> None:
    """The corpus, unless the processes of torchrun do it (`start_on_corpus`)."""
    if not process_group.is_launched():
        pretrain.prepare_corpus(training, shown=True)


def start_on_corpus(
    training: RunPlan,
    shapes: Sequence[CubeShape],
    make: Callable[..., S],
    stack: ExitStack,
    **options: Any,
) -> list[CubeHandle[S]]:
    """The cubes, as `processes.start` has them, on the corpus of a training that `prepare_here` has had.

    Args:
        make: builds the session of a cube, and is told the `corpus`.
        options: of `processes.start`.
    """
    make = partial(make, corpus=training.corpus)
    return start(shapes, partial(_on_corpus, make=make, training=training), stack, **options)


def _on_corpus(cube: Cube, *, make: Callable[[Cube], S], training: RunPlan) -> S:
    if process_group.is_launched():
        run_on_rank0(cube, lambda: pretrain.prepare_corpus(training, shown=cube.rank == 0), any_time=True)
    return make(cube)


class Training:
    """Pre-training on one rank, halted between calls.

    Args:
        make_feed: makes its data; the feed is closed with the training.
    """

    def __init__(self, cube: Cube, recipe: TrainConfig, make_feed: Callable[[TrainConfig, Cube], TrainData]) -> None:
        set_kernels(recipe, cube)
        self.feed = make_feed(recipe, cube)
        self.trainer = PretrainTrainer(recipe, cube, self.feed, None)
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


def check_cube(training: RunPlan, shape: CubeShape) -> None:
    """Raises ValueError where a cube cannot train a recipe."""
    try:
        replace(training, shape=shape).check()
    except ValueError as problem:
        raise ValueError(f"cube {shape}: {problem}") from None


def start_trainings(
    shape: CubeShape, ways: Mapping[str, Callable[[Cube], Training]], stack: ExitStack
) -> dict[str, Group[Training]]:
    """Processes of this machine for each way of training on a cube; they end with the stack."""
    return {name: start([shape], make, stack)[0] for name, make in ways.items()}


def alternate(
    groups: Mapping[str, Group[Training]], counts: Sequence[int], *, skip: int, warmup: int = 0
) -> dict[str, list[TrainingTurn]]:
    """Lets groups train in turns and returns the turns of each, by round.

    Args:
        counts: steps of a turn, for each round.
        skip: steps at the begin of each turn that are no part of the counts; they are returned too.
        warmup: steps of each group before all turns, of which nobody hears.
    """
    parts = list(groups.values())
    for part in parts:
        part.call(Training.turn, warmup)
    turns = interleave(list(groups), len(counts), lambda i, number: parts[i].call(Training.turn, skip + counts[number]))
    return dict(zip(groups, turns, strict=True))


def timed(turns: Sequence[TrainingTurn], skip: int) -> list[TrainingTurn]:
    """The turns without their first steps."""
    return [[rank[skip:] for rank in turn] for turn in turns]


def training_seconds(turn: TrainingTurn) -> list[float]:
    """Seconds of each step: the mean over the ranks, so that their sum is the time that passed."""
    return means(turn, lambda metrics: metrics.seconds)
