"""The command of tools.pretrain that trains on a planned box."""

from __future__ import annotations

import dataclasses
import shlex
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from models.bert import PRESETS
from models.bert.config import types_of
from models.bert.cost_model.step_cost import BertCosts
from models.bert.families import having
from tensor3d.cost_model.hardware import Cluster
from tensor3d.cost_model.search import BoxPlan
from tensor3d.cost_model.step_time import Overlap
from tools.training.config import BatchConfig, ModelConfig, TrainConfig, read_config

ROOT = Path(__file__).parents[2]
_RECIPES = {"base": "bert-base-phase1", "large": "bert-large-phase1"}
_OF_FAMILIES = {
    **dict.fromkeys((each for each in having("behind_padding") if each != "mpnet"), "roberta-base"),
    "modernbert": "modernbert-base-phase1",
}
_KINDS = (
    *("family", "first_position", "embedding", "tied", "encoder", "activation", "eps", "norm", "pooling"),
    *("kv_heads", "head_dim", "window", "global_every", "rotary_base", "local_rotary_base", "rotary_factor"),
    *("position_buckets", "conv_kernel", "dropout", "attention_dropout", "attention_out_dropout"),
)
"""Settings of a model beside its sizes, as recipes call them."""
_ALWAYS = ("global_batch", "packs_per_rank")
"""Said even where the recipe says the same: they belong to the box."""


def run_command(plan: BoxPlan, costs: BertCosts, cluster: Cluster, *, preset: str | None, overlap: Overlap) -> str:
    """What trains the planned model on the planned box, as a shell reads it, from the root of the checkout.

    It names a shipped recipe, and all in which the plan differs from it. Text, steps and learning rate stay the
    recipe's.

    Args:
        preset: of the model; the sizes that differ from it are named. None: it has none.

    Raises:
        ValueError: training refuses what was planned, such as packs of 3 slots.
    """
    recipe = f"launch/recipes/{_OF_FAMILIES.get(costs.config.family, _RECIPES.get(preset or '', 'quickstart'))}.toml"
    start = "launch/local.sh" if cluster.nodes == 1 else "python launch/ssh.py --hostfile hosts"
    # Behind the recipe, where each launcher takes what is training's own.
    order = ["--wire", ",".join(plan.shape.wire)] if plan.shape.ranks > 1 else []
    overrides = _overrides(plan, costs, ROOT / recipe, preset, overlap)
    return shlex.join([*start.split(), *_box(plan), recipe, *order, *overrides])


def _box(plan: BoxPlan) -> list[str]:
    shape = plan.shape
    copies = ["--data-parallel", str(shape.data)] if shape.data > 1 else []
    return ["--cube", f"{shape.x}x{shape.y}x{shape.z}", *copies]


def _overrides(plan: BoxPlan, costs: BertCosts, recipe: Path, preset: str | None, overlap: Overlap) -> list[str]:
    before = read_config(recipe)
    after = _as_planned(before, plan, costs, preset, overlap)
    return [word for section in dataclasses.fields(after) for word in _changed(section.name, before, after)]


def _changed(section: str, before: TrainConfig, after: TrainConfig) -> Iterator[str]:
    there, here = getattr(before, section), getattr(after, section)
    for each in dataclasses.fields(here):
        value = getattr(here, each.name)
        if value == getattr(there, each.name) and each.name not in _ALWAYS:
            continue
        key = each.name.replace("_", "-")
        if isinstance(value, bool):
            yield f"--{section}.{'' if value else 'no-'}{key}"
        else:
            yield from (f"--{section}.{key}", str(value))


def _as_planned(
    recipe: TrainConfig, plan: BoxPlan, costs: BertCosts, preset: str | None, overlap: Overlap
) -> TrainConfig:
    """The recipe with the model, the batch and the choices of the plan."""
    config, batch, choice = costs.config, costs.batch, plan.choice
    longest = max(batch.lengths)
    table = (recipe.model.positions, None if config.positions == longest else config.positions)
    given: dict[str, Any] = {
        "data": {
            "objective": "masked-lm+next-sentence" if config.next_sentence else "masked-lm",
            "vocab_size": config.vocab,
            "capacity": batch.capacity,
            "max_length": longest,
            "max_sequences": max(recipe.data.max_sequences, len(batch.lengths)),
            "masked_share": batch.masked_share,
            # A recipe's own number is that of its own packs and share.
            "masked_per_pack": None,
        },
        "model": {
            **_sizes(costs, preset, recipe.model),
            **{name: getattr(config, name) for name in _KINDS},
            "types": None if config.types == types_of(config.family) else config.types,
            "positions": table[table[0] != config.positions],
            "recompute": choice.recompute,
            "reshard_after_forward": choice.reshard_after_forward,
            "keep_budget": choice.keep_budget // 2**20,
        },
        "optimizer": {"kind": costs.optimizer, "shard_over_data": costs.shard_over_data},
        "precision": {"compute": costs.compute, "reduce": costs.reduce, "fp8": costs.fp8 or "off"},
        "speed": {"overlap": overlap != "none", "shadow_weights": costs.shadow_weights, "compile": costs.compile},
        "batch": {
            "global_batch": batch.packs,
            "packs_per_rank": batch.packs // (plan.shape.planes * plan.shape.z * choice.micro_batches),
            "packing_rule": "none",
            "multiple_of": BatchConfig.multiple_of,  # which counts by a rule alone
            "ramp_stages": 1,
            "ramp_steps": 0,
        },
    }
    sections = {name: dataclasses.replace(getattr(recipe, name), **values) for name, values in given.items()}
    return dataclasses.replace(recipe, **sections)


def _sizes(costs: BertCosts, preset: str | None, model: ModelConfig) -> dict[str, Any]:
    """The preset, and the sizes that differ from its."""
    name = preset if preset in PRESETS else "large" if costs.config.family == "bert" else model.preset
    sizes = ("layers", "hidden", "heads", "inner")
    config, plain = costs.config, PRESETS[name]
    changed = {key: getattr(config, key) for key in sizes if getattr(config, key) != getattr(plain, key)}
    return {"preset": name, **dict.fromkeys(sizes), **changed}
