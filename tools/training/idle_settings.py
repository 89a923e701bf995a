"""Settings that change nothing, since another one of the recipe leaves them no part: they are told, not refused, for a
recipe may be tried with another schedule or type without being written anew."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import MISSING, fields
from math import lcm
from typing import Any, NamedTuple

from tools.training.config import BatchConfig, OptimizerConfig, PrecisionConfig, RunConfig, TrainConfig

_FLOORS = ("cosine", "polynomial", "wsd")


class Rule(NamedTuple):
    """What keys of a section need."""

    section: str
    values: Any
    """A dataclass."""
    keys: tuple[str, ...]
    works: bool
    """Whether they change anything."""
    needs: str
    """What they do so with, in words."""


def told_of(rules: Iterable[Rule]) -> list[str]:
    """A line for each key that was set to another value than its default and changes nothing."""
    return [line for rule in rules if not rule.works for line in _lines(rule)]


def idle_settings(recipe: TrainConfig) -> list[str]:
    """A line for each key of a recipe of pre-training that was set and changes nothing."""
    data, batch, speed, run = recipe.data, recipe.batch, recipe.speed, recipe.run
    alone = data.packing in ("padded", "binned")
    several = not alone and data.max_sequences > 1
    kept = lcm(run.checkpoint_every, run.checkpoint_keep_every)  # 0 where one of them is
    return _late_ramp(batch, run) + told_of(
        (
            Rule("data", data, ("bin_width",), data.packing == "binned", "data.packing = 'binned'"),
            Rule("data", data, ("max_sequences",), not alone, "a packing of several sequences a pack"),
            *optimizer_rules(recipe.optimizer),
            *precision_rules(recipe.precision),
            Rule("speed", speed, ("shadow_weights",), recipe.precision.compute != "fp32", "another type than fp32"),
            Rule(
                "batch",
                batch,
                ("multiple_of",),
                batch.packing_rule == "sequences",
                "batch.packing_rule = 'sequences'",
            ),
            Rule(
                "batch",
                batch,
                ("packing_rule",),
                several or batch.packing_rule != "betas",
                "packs of several sequences",
            ),
            Rule(
                "run",
                run,
                ("checkpoint_keep_every",),
                kept <= run.steps or run.steps % run.checkpoint_keep_every == 0 or run.patience > 0,
                f"checkpoints whose step divides by it; of run.checkpoint_every = {run.checkpoint_every} none does",
            ),
            # The best evaluation is kept by patience; and after a signal all is saved at once, and once.
            Rule(
                "run",
                run,
                ("checkpoint_keep", "checkpoint_keep_every", "asynchronous"),
                run.checkpoint_every > 0 or run.patience > 0,
                "run.checkpoint_every above 0",
            ),
            *(
                Rule("run", run, (key,), data.held_out > 0 or not getattr(run, key), "data.held_out above 0")
                for key in ("evaluate_every", "evaluate_every_samples")
            ),
        )
    )


def _late_ramp(batch: BatchConfig, run: RunConfig) -> list[str]:
    if batch.ramp_stages == 1 or batch.ramp_steps < run.steps:
        return []
    return [
        f"batch.ramp_steps = {batch.ramp_steps} and run.steps = {run.steps}: the run ends before a step has all "
        f"packs of batch.global_batch = {batch.global_batch}."
    ]


def optimizer_rules(optimizer: OptimizerConfig) -> Iterator[Rule]:
    """Of the learning rate's schedule, and of LAMB."""
    needs = "optimizer.weight_decay above 0, without which its steps are AdamW's"
    yield Rule("optimizer", optimizer, ("kind",), optimizer.kind != "lamb" or optimizer.weight_decay > 0, needs)
    schedule = optimizer.schedule
    for keys, kinds in ((("power",), ("polynomial",)), (("decay", "decay_shape"), ("wsd",)), (("floor",), _FLOORS)):
        needs = f"optimizer.schedule = {' or '.join(map(repr, kinds))}, and it is {schedule!r}"
        yield Rule("optimizer", optimizer, keys, schedule in kinds, needs)


def precision_rules(precision: PrecisionConfig) -> Iterator[Rule]:
    """Of the loss scale."""
    compute = precision.compute
    needs = f"precision.compute = 'fp16', and it is {compute!r}"
    yield Rule("precision", precision, ("loss_scale", "growth_interval"), compute == "fp16", needs)


def _lines(rule: Rule) -> Iterator[str]:
    defaults = {each.name: each.default for each in fields(rule.values)}
    for key in rule.keys:
        value = getattr(rule.values, key)
        if defaults[key] is not MISSING and value != defaults[key]:
            yield f"{rule.section}.{key} = {value!r} changes nothing: it is for {rule.needs}."
