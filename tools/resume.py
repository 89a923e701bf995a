"""Whether a recipe may go on from a checkpoint, or start from its weights."""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Any

from tools.corpus.training import TrainingCorpus
from tools.recipe import Recipe
from tools.typed_table import from_table

# What may differ when a run goes on: where things lie, how long it takes, and what changes no result.
_FREE_DATA = ("source", "plans")
_FREE_MODEL = ("recompute", "keep_gathered", "positions")  # positions are compared as they come out
# What must stay for weights to mean the same in another run.
_SIZES = (
    "encoder",
    "activation",
    "eps",
    "layers",
    "hidden",
    "heads",
    "inner",
    "norm",
    "window",
    "global_every",
    "rotary_base",
)


def facts_of(recipe: Recipe, corpus: TrainingCorpus) -> dict[str, Any]:
    """What a checkpoint says of its run, for the two checks below."""
    return {
        "recipe": recipe.to_dict(),
        "corpus": corpus.info.fingerprint,
        "tokenizer": tokenizer_hash(corpus.tokenizer),
    }


def tokenizer_hash(path: Path) -> str:
    """Of the tokenizer's file: the same pieces with the same ids."""
    return hashlib.sha256(path.read_bytes()).hexdigest()


def ended(progress: dict[str, Any], recipe: Recipe) -> str | None:
    """Why the run of a checkpoint ended with it, if it did: further steps, which the recipe may have now, go on."""
    ending: str | None = progress.get("standing", {}).get("ending")
    key = {"target": "target_accuracy", "patience": "patience"}.get(ending or "")
    if key is not None and progress.get("recipe", {}).get("run", {}).get(key) == getattr(recipe.run, key):
        return ending
    return "steps" if progress["step"] >= recipe.run.steps and not _evaluation_due(progress) else None


def check_resume(progress: dict[str, Any], recipe: Recipe, corpus: TrainingCorpus) -> None:
    """Raises ValueError where a checkpoint belongs to another model, corpus or order of packs."""
    if progress.get("corpus") != corpus.info.fingerprint:
        raise ValueError(
            f"the checkpoint was trained on another corpus or tokenizer (fingerprint {progress.get('corpus')}, now "
            f"{corpus.info.fingerprint}). Resume with the source and data settings of that run."
        )
    before, now, default = progress.get("recipe", {}), recipe.to_dict(), Recipe().to_dict()
    for section, names in {
        "model": [name for name in now["model"] if name not in _FREE_MODEL],
        "data": [name for name in now["data"] if name not in _FREE_DATA],
        "batch": ["global_batch", "packing_rule", "multiple_of"],
        "optimizer": ["kind"],
        "run": ["seed"],
    }.items():
        for name in names:
            # A key that is younger than the checkpoint had the default's effect.
            old, new = before.get(section, {}).get(name, default[section][name]), now[section][name]
            if old != new:
                raise ValueError(
                    f"the checkpoint was trained with {section}.{name} = {old!r}, the recipe says {new!r}. Resume with "
                    "the same, or start a run of its own."
                )
    computes = [each.get("precision", {}).get("compute") for each in (before, now)]
    if computes[1] == "fp16" != computes[0]:
        raise ValueError(
            f"the checkpoint was trained with precision.compute = {computes[0]!r} and has no loss scale, which the "
            "recipe's 'fp16' needs. Resume with the same, or begin a run with its weights: --start-from."
        )
    rows = [_sizes(each)["positions"] for each in (before, now)]
    if rows[0] != rows[1]:
        raise ValueError(
            f"the checkpoint's position table has {rows[0]} rows, the recipe's {rows[1]}. Resume with the same, or "
            "begin a run with its weights: --start-from."
        )
    if progress["step"] >= recipe.run.steps and not _evaluation_due(progress):
        raise ValueError(
            f"the checkpoint has done {progress['step']} steps, and the recipe ends at {recipe.run.steps}. Raise run."
            "steps."
        )


def differences(progress: dict[str, Any], recipe: Recipe) -> list[str]:
    """What a run that goes on does in another way than the checkpoint's, though it may."""
    before, now = progress.get("recipe", {}), recipe.to_dict()
    return [
        f"{section}.{name} = {value!r}, was {before[section][name]!r}"
        for section, values in now.items()
        for name, value in values.items()
        if name in before.get(section, {}) and before[section][name] != value
    ]


def check_start(progress: dict[str, Any], recipe: Recipe, corpus: TrainingCorpus) -> None:
    """Raises ValueError where a recipe cannot start from a checkpoint's weights: another model, or other pieces."""
    old, new = _sizes(progress.get("recipe", {})), _sizes(recipe.to_dict())
    for name in (*_SIZES, "vocab_size"):
        if old.get(name) != new[name]:
            raise ValueError(
                f"the checkpoint's model has {name} = {old.get(name)!r}, the recipe's {new[name]!r}. Start from a "
                "checkpoint of the same sizes."
            )
    kinds = [each.get("optimizer", {}).get("kind") for each in (progress.get("recipe", {}), recipe.to_dict())]
    if kinds[0] != kinds[1]:
        raise ValueError(
            f"the checkpoint was trained with optimizer.kind = {kinds[0]!r}, the recipe says {kinds[1]!r}, and its "
            "moments are taken over. Start with the same optimiser."
        )
    if not old["positions"] <= new["positions"]:
        raise ValueError(
            f"the checkpoint's position table has {old['positions']} rows, the recipe's {new['positions']}: a table "
            f"can only grow. Set model.positions = {old['positions']}."
        )
    if progress.get("tokenizer") != tokenizer_hash(corpus.tokenizer):
        raise ValueError(
            "the checkpoint was trained with another tokenizer: its ids mean other pieces. Prepare the corpus of this "
            "run with the tokenizer of that run."
        )


def _evaluation_due(progress: dict[str, Any]) -> bool:
    """Whether a signal came in the last evaluation, which is then still to be done."""
    return bool(progress.get("standing", {}).get("evaluation_due", False))


def _sizes(recipe: dict[str, Any]) -> dict[str, Any]:
    """The sizes that a recipe comes to, presets resolved."""
    try:
        resolved = from_table(Recipe, recipe)
    except ValueError as problem:
        raise ValueError(f"the checkpoint's own recipe cannot be read: {problem}") from None
    config = resolved.model.config(resolved.data)
    sizes: dict[str, Any] = {name: getattr(config, name) for name in (*_SIZES, "positions")}
    return sizes | {"inner": config.inner_size, "vocab_size": config.vocab}
