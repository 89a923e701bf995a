"""What one rank does for `bench step`: it trains, a few steps at a time, and notes what each step took."""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from models.bert.traffic import read_slots, step_traffic
from tensor3d import Cube
from tensor3d.planning.traffic import Bytes, Wire
from tensor3d.traffic import Key
from tools.bench.memory import PeakMemory
from tools.bench.rank_memory import RankMemory, count_memory
from tools.corpus.training import open_corpus
from tools.feed import Feed
from tools.recipe import Recipe
from tools.trainer import Trainer

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

    def __init__(self, cube: Cube, recipe: Recipe, corpus: Path, warmup: int, *, peaks: bool = True) -> None:
        self._cube = cube
        memory = PeakMemory(cube.device)
        prepared = open_corpus(corpus)
        self._feed = Feed.of_corpus(recipe, cube, prepared)
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

    def _wire(self) -> Wire:
        trainer = self._trainer
        precision, parameter = trainer.cube.precision, next(trainer.model.parameters()).dtype
        return Wire(
            shape=self._cube.shape,
            rank=self._cube.rank,
            compute=precision.computed(parameter).itemsize,
            gradient=precision.reduced(parameter).itemsize,
            parameter=parameter.itemsize,
        )

    def _closed_form(self, wire: Wire) -> Bytes:
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
