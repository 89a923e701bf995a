"""Whether a recipe may go on from a checkpoint, or start from its weights."""

from __future__ import annotations

import dataclasses
import hashlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from models.bert import BertConfig, BertForPreTraining, ElectraForPreTraining
from models.bert.huggingface import WeightSource, open_generator, open_weights
from tensor3d import Cube, checkpoint
from tensor3d.checkpoint.directory import PROGRESS
from tensor3d.distributed.object_collectives import all_gather_object, run_on_all_ranks
from tensor3d.sharding.param_layout import local
from tools.common.files import read_file
from tools.corpus.tokenizers.huggingface import FoundTokenizer
from tools.corpus.tokenizers.model_dir import tokenizer_of, tokenizer_of_corpus, tokenizers_in
from tools.corpus.tokenizers.wordpiece import guess_accents
from tools.corpus.training_corpus import TrainingCorpus
from tools.training.config import MOST_OF_PACK, DataConfig, ModelConfig, TrainConfig, from_table, most_of_pack

# What may differ when a run goes on: where things lie, how long it takes, and what changes no result.
_FREE_DATA = ("source", "plans")
# Positions are compared as they come out.
_FREE_MODEL = ("recompute", "reshard_after_forward", "keep_budget", "positions")
# What must stay for weights to mean the same in another run.
_SIZES = (
    "family",
    "first_position",
    "types",
    "embedding",
    "tied",
    "encoder",
    "activation",
    "eps",
    "layers",
    "hidden",
    "heads",
    "key_heads",
    "head_size",
    "inner",
    "norm",
    "window",
    "global_every",
    "rotary_base",
    "local_rotary_base",
    "rotary_factor",
    "pooling",
    "conv_kernel",
)


_GENERATORS = ("family", "layers", "hidden", "heads", "inner_size", "vocab", "types", "activation", "tied", "eps")


def run_facts(recipe: TrainConfig, corpus: TrainingCorpus) -> dict[str, Any]:
    """What a checkpoint says of its run, for the two checks below."""
    return {
        "recipe": recipe.to_dict(),
        "corpus": corpus.info.fingerprint,
        "tokenizer": tokenizer_hash(corpus.tokenizer),
    }


def tokenizer_hash(path: Path) -> str:
    """Of the tokenizer's file: the same pieces with the same ids."""
    return hashlib.sha256(read_file(path)).hexdigest()


def ended(progress: dict[str, Any], recipe: TrainConfig) -> str | None:
    """Why the run of a checkpoint ended with it, if it did: further steps, which the recipe may have now, go on."""
    ending: str | None = progress.get("standing", {}).get("ending")
    key = {"target": "target_accuracy", "patience": "patience"}.get(ending or "")
    if key is not None and progress.get("recipe", {}).get("run", {}).get(key) == getattr(recipe.run, key):
        return ending
    return "steps" if progress["step"] >= recipe.run.steps and not _evaluation_due(progress) else None


def check_resume(progress: dict[str, Any], recipe: TrainConfig, corpus: TrainingCorpus) -> None:
    """Raises ValueError where a checkpoint belongs to another model, corpus or order of packs."""
    if progress.get("corpus") != corpus.info.fingerprint:
        raise ValueError(
            f"the checkpoint was trained on another corpus or tokenizer (fingerprint {progress.get('corpus')}, now "
            f"{corpus.info.fingerprint}). Resume with the source and data settings of that run."
        )
    before, now, default = progress.get("recipe", {}), recipe.to_dict(), TrainConfig().to_dict()
    for section, names in {
        "model": [name for name in now["model"] if name not in _FREE_MODEL],
        "data": [name for name in now["data"] if name not in _FREE_DATA],
        "batch": ["global_batch", "packing_rule", "multiple_of", "ramp_stages", "ramp_steps"],
        "optimizer": ["kind"],
        "run": ["seed"],
    }.items():
        for name in names:
            # A key that is younger than the checkpoint had the default's effect.
            old, new = before.get(section, {}).get(name, default[section][name]), now[section][name]
            if _as_held(old, before, name) != _as_held(new, now, name):
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
    if rows[0] != rows[1] and not recipe.model.config(recipe.data).has_rotary:
        raise ValueError(
            f"the checkpoint's position table has {rows[0]} rows, the recipe's {rows[1]}. Resume with the same, or "
            "begin a run with its weights: --start-from."
        )
    if progress["step"] >= recipe.run.steps and not _evaluation_due(progress):
        raise ValueError(
            f"the checkpoint has done {progress['step']} steps, and the recipe ends at {recipe.run.steps}. Raise run."
            "steps."
        )


def differences(progress: dict[str, Any], recipe: TrainConfig) -> list[str]:
    """What a run that goes on does in another way than the checkpoint's, though it may."""
    before, now = progress.get("recipe", {}), recipe.to_dict()
    return [
        f"{section}.{name} = {value!r}, was {before[section][name]!r}"
        for section, values in now.items()
        for name, value in values.items()
        if name in before.get(section, {}) and before[section][name] != value
    ]


def check_start(progress: dict[str, Any], recipe: TrainConfig, corpus: TrainingCorpus) -> None:
    """Raises ValueError where a recipe cannot start from a checkpoint's weights: another model, or other pieces."""
    old, new = _sizes(progress.get("recipe", {})), _sizes(recipe.to_dict())
    for name in (*_SIZES, "vocab_size"):
        if old.get(name) != new[name] and not _may_change(name, new[name]):
            raise ValueError(
                f"the checkpoint's model has {name} = {old.get(name)!r}, the recipe's {new[name]!r}. Start from a "
                "checkpoint of the same sizes."
            )
    ours = recipe.model.config(recipe.data)
    _check_distances("the checkpoint's model", _resolved(progress.get("recipe", {}))[0], ours)
    default = TrainConfig().data.objective  # of checkpoints of before, which do not say
    objectives = [
        each.get("data", {}).get("objective", default) for each in (progress.get("recipe", {}), recipe.to_dict())
    ]
    if objectives[0] != objectives[1]:
        raise ValueError(
            f"the checkpoint was trained with data.objective = {objectives[0]!r}, the recipe says {objectives[1]!r}: "
            "its moments, which are taken over, are of other heads. Start with the same, or write its weights with "
            "python -m tools.convert to-hf and start with that folder."
        )
    generators = [_resolved(each)[1] for each in (progress.get("recipe", {}), recipe.to_dict())]
    told = [
        f"{each.layers} layers, hidden {each.hidden}, inner {each.inner_size}, {each.heads} heads"
        for each in generators
        if each is not None
    ]
    if len(set(told)) > 1:
        raise ValueError(
            f"the checkpoint's generator has {told[0]}, the recipe's {told[1]}. Start with the same "
            "model.generator_size, generator_heads and generator_layers."
        )
    kinds = [each.get("optimizer", {}).get("kind") for each in (progress.get("recipe", {}), recipe.to_dict())]
    if kinds[0] != kinds[1]:
        raise ValueError(
            f"the checkpoint was trained with optimizer.kind = {kinds[0]!r}, the recipe says {kinds[1]!r}, and its "
            "moments are taken over. Start with the same optimiser."
        )
    if not old["positions"] <= new["positions"] and ours.position_rows:
        raise ValueError(
            f"the checkpoint's position table has {old['positions']} rows, the recipe's {new['positions']}: a table "
            f"can only grow. Set model.positions = {old['positions']}."
        )
    if progress.get("tokenizer") != tokenizer_hash(corpus.tokenizer):
        raise ValueError(
            "the checkpoint was trained with another tokenizer: its ids mean other pieces. Prepare the corpus of this "
            "run with the tokenizer of that run."
        )


def _check_distances(told: str, theirs: BertConfig, ours: BertConfig) -> None:
    """Raises ValueError where a DeBERTa would take what was learnt of some distances for others."""
    old, new = theirs.distance_buckets, ours.distance_buckets
    if old != new and old is not None and new is not None:
        raise ValueError(
            f"{told} tells distances up to {old.farthest} apart in {old.span} buckets to each side, the recipe's up to "
            f"{new.farthest} in {new.span}. Set model.positions = {old.farthest} and model.position_buckets = "
            f"{old.span}."
        )


_ROTARY = ("rotary_base", "local_rotary_base")


def _may_change(name: str, now: Any) -> bool:
    """Whether a run may begin with weights of another value: no weight is shaped by rotary bases, which phases with
    longer sequences raise, but one that was forgotten would be a mistake. So the recipe has to name them."""
    return name in _ROTARY and now is not None


def _evaluation_due(progress: dict[str, Any]) -> bool:
    """Whether a signal came in the last evaluation, which is then still to be done."""
    return bool(progress.get("standing", {}).get("evaluation_due", False))


def _as_held(count: Any, recipe: dict[str, Any], name: str) -> Any:
    """A value; of a limit for a pack, what there can be of it at most. Runs of before could ask for more, which recipes
    may not any more, and whose packs are the same."""
    capacity = recipe.get("data", {}).get("capacity", DataConfig.capacity)
    limited = name in MOST_OF_PACK and type(count) is int and type(capacity) is int
    return min(count, most_of_pack(name, capacity)) if limited else count


def _resolved(recipe: dict[str, Any]) -> tuple[BertConfig, BertConfig | None]:
    """The sizes of a recipe's model, and of its generator, if it has one. The rest of it is not looked at: a checkpoint
    may have numbers that recipes could have when it was written."""
    try:
        model = from_table(ModelConfig, recipe.get("model", {}), "model")
        data = from_table(DataConfig, recipe.get("data", {}), "data")
        config, settings = model.config(data), model.replaced_tokens(data)
        return config, None if settings is None else settings.generator(config)
    except ValueError as problem:
        raise ValueError(f"the checkpoint's own recipe cannot be read: {problem}") from None


def _sizes(recipe: dict[str, Any]) -> dict[str, Any]:
    """The sizes that a recipe comes to, presets resolved."""
    config, _ = _resolved(recipe)
    sizes: dict[str, Any] = {name: getattr(config, name) for name in (*_SIZES, "positions")}
    return sizes | {"inner": config.inner_size, "vocab_size": config.vocab}


# --- Pre-training that begins with what another run has learnt, or another model --------------------------------------

POSITIONS = "bert.embeddings.positions.weight"
_OF_PRETRAINING = {"recipe", "corpus", "tokenizer"}
# Of a configuration, and the key of the recipe that says it.
_KEYS = {
    "family": "model.family",
    "first_position": "model.first_position",
    "types": "model.types",
    "embedding": "model.embedding",
    "tied": "model.tied",
    "encoder": "model.encoder",
    "layers": "model.layers",
    "hidden": "model.hidden",
    "heads": "model.heads",
    "key_heads": "model.kv_heads",
    "head_size": "model.head_dim",
    "inner_size": "model.inner",
    "positions": "model.positions",
    "norm": "model.norm",
    "window": "model.window",
    "global_every": "model.global_every",
    "rotary_base": "model.rotary_base",
    "local_rotary_base": "model.local_rotary_base",
    "rotary_factor": "model.rotary_factor",
    "pooling": "model.pooling",
    "conv_kernel": "model.conv_kernel",
    "activation": "model.activation",
    "eps": "model.eps",
}


def has_optimizer_state(folder: Path) -> bool:
    """Whether this is a checkpoint of pre-training, whose moments can be taken over too.

    Raises:
        ValueError: a damaged checkpoint.
    """
    return (folder / PROGRESS).is_file() and checkpoint.read_progress(folder).keys() >= _OF_PRETRAINING


def begin_with(
    folder: Path,
    model: BertForPreTraining | ElectraForPreTraining,
    optimizer: torch.optim.Optimizer,
    recipe: TrainConfig,
    corpus: TrainingCorpus,
    cube: Cube,
    generator: Path | None = None,
) -> str:
    """Fills a model that has not been trained yet. Every rank calls it.

    Of a checkpoint of pre-training, such as the first phase of two, weights and moments are taken; the position table
    may have grown: further rows are new. Of the folder of another model the weights alone are taken, and heads that it
    does not have stay as they are.

    Args:
        generator: the folder of the one that has learnt with that other model. Default: it stays as it is, but for
            embeddings that are the model's.

    Returns:
        What was taken, in words, and which settings are others than they were.

    Raises:
        ValueError: `folder` is no checkpoint and no model, is damaged, or one of another model or tokenizer.
    """
    run_on_all_ranks(cube, lambda: check_begin(folder, recipe, corpus, generator))
    if has_optimizer_state(folder):
        grows = (POSITIONS,) if model.config.position_rows else ()
        old = run_on_all_ranks(cube, lambda: _sizes(checkpoint.read_progress(folder).get("recipe", {})))
        checkpoint.load(folder, model, optimizer, cube, grows=grows)
        return f"{folder}: weights and moments are loaded{_changed(old, model.config)}"
    weights = run_on_all_ranks(cube, lambda: open_weights(folder))
    if isinstance(model, ElectraForPreTraining):
        told = _fill_both(model, weights, generator, cube)
    else:
        told = f"{folder}: {weights.fill(model, cube).in_words()}"
    return f"{told}; the optimiser's moments begin at 0" + _changed(dataclasses.asdict(weights.config), model.config)


def _fill_both(model: ElectraForPreTraining, weights: WeightSource, generator: Path | None, cube: Cube) -> str:
    """Fills the discriminator and, if there is a folder of it, the generator; says with what. Embeddings that they
    share are the discriminator's."""
    told, read = [], None
    table = model.bert.embeddings.tokens.weight
    if generator is not None:
        beside = run_on_all_ranks(cube, lambda: open_generator(generator))
        told.append(f"generator: {generator}: {beside.fill(model.generator_alone(), cube).in_words()}")
        read = local(table).detach().clone()
    told.insert(0, f"{weights.folder}: {weights.fill(model.discriminator_alone(), cube).in_words()}")
    if model.config.traits.disentangles_embeddings:
        model.part_embeddings(has_generator=generator is not None)
    elif read is not None and not all(all_gather_object(cube, read.equal(local(table)))):
        told.append("the embeddings, which both have in common, are the model's, and the generator's were others")
    if generator is None:
        own = " but for its embeddings of tokens, which are the model's" * model.config.traits.disentangles_embeddings
        told.append(f"the generator is as initialised{own}")
    return "; ".join(told)


def _changed(old: dict[str, Any], new: BertConfig) -> str:
    """What a run does in another way than the model that it begins with, though it may, in words."""
    names = [name for name in _ROTARY if old[name] != getattr(new, name)]
    told = [f"model.{name} = {getattr(new, name)!r}, was {old[name]!r}" for name in names]
    if new.has_rotary and new.positions < old["positions"]:
        told.append(
            f"the folder of the run will say that it takes {new.positions} tokens, and this one says "
            f"{old['positions']}: model.positions = {old['positions']} keeps that"
        )
    return "".join(f"; {each}" for each in told)


def check_begin(folder: Path, recipe: TrainConfig, corpus: TrainingCorpus, generator: Path | None = None) -> None:
    """Raises ValueError for what `begin_with` would refuse before it reads weights."""
    if has_optimizer_state(folder):
        check_start(checkpoint.read_progress(folder), recipe, corpus)
    else:
        weights_for(folder, recipe, corpus)
    if generator is not None:
        generator_for(generator, folder, recipe)


def generator_for(folder: Path, beside: Path, recipe: TrainConfig) -> WeightSource:
    """The weights of a folder, after a look at whether the recipe's generator can begin with them.

    Args:
        beside: what the model begins with.

    Raises:
        ValueError: another objective, no masked language model, other sizes, or a checkpoint beside it that has its own
            generator.
    """
    ours = recipe.generator
    if ours is None:
        raise ValueError(
            "--start-generator-from belongs to data.objective = 'replaced-tokens'. Got "
            f"{recipe.data.objective!r}. Leave it out, or set the objective."
        )
    if has_optimizer_state(beside):
        raise ValueError(
            f"{beside} has a generator, with its moments, and --start-generator-from names another one: {folder}. Drop "
            "it, or write that model with python -m tools.convert to-hf and start with its folder."
        )
    weights = open_generator(folder)
    if "masked_lm" not in weights.heads:
        raise ValueError(f"the model in {folder} has no masked-LM head: it is no generator. Name another folder.")
    theirs = {name: getattr(weights.config, name) for name in (*_GENERATORS, "position_rows", "embedding_size")}
    for name, value in theirs.items():
        if value != getattr(ours, name):
            raise ValueError(
                f"the generator in {folder} has {name} = {value!r}, the recipe's {getattr(ours, name)!r}. Set "
                "model.generator_size, generator_heads and generator_layers so that they agree, or name another folder."
            )
    return weights


def weights_for(folder: Path, recipe: TrainConfig, corpus: TrainingCorpus | None) -> WeightSource:
    """The weights of a folder that `open_weights` takes, after a look at whether the recipe's model can begin with
    them.

    Args:
        corpus: None: what the model's tokenizer is compared with is not there yet.

    Raises:
        ValueError: no such folder, other sizes, no tokenizer, or another one.
    """
    weights = open_weights(folder)
    _ = tokenizer_of(folder).special  # is there, belongs to the model, and has what pre-training needs
    _check_sizes(folder, weights.config, recipe)
    has_none = not weights.config.traits.next_sentence and "next_sentence" not in weights.heads
    if not recipe.data.single and has_none:
        raise ValueError(
            f"the model in {folder} has no head for next sentences, as no model of the family "
            f"{weights.config.family!r} has, and data.objective = {recipe.data.objective!r} learns one. Set "
            'data.objective = "masked-lm".'
        )
    if corpus is not None:
        # Another file of the model's may be the one that the corpus was made with, if the ids mean the same pieces.
        mark, found = tokenizer_of_corpus(corpus.tokenizer).fingerprint, tokenizers_in(folder)
        if all(each.open().fingerprint != mark for each in found):
            raise ValueError(_other_tokenizer(folder, found))
        rows, pieces = weights.config.vocab, corpus.info.vocab_size
        if rows != recipe.model.config(recipe.data).vocab:
            raise ValueError(
                f"the model in {folder} has {rows} rows in its embedding, and its tokenizer {pieces} pieces. Set "
                f"model.vocab_rows = {rows}."
            )
    return weights


def _check_sizes(folder: Path, theirs: BertConfig, recipe: TrainConfig) -> None:
    ours, longest = recipe.model.config(recipe.data), recipe.data.max_length
    if theirs.causal:
        raise ValueError(
            f"the model in {folder} sees no later tokens, and masked tokens are told by both sides. Write "
            '"is_causal": false into the config.json of its Hugging Face folder (before tools.convert from-hf, where '
            "it is imported), so that it sees all from here on, or begin with another model."
        )
    _check_distances(f"the model in {folder}", theirs, ours)
    has_table = not (theirs.has_rotary or ours.has_rotary)
    if has_table and theirs.positions < longest:
        raise ValueError(
            f"the model in {folder} has positions for sequences of {theirs.positions} tokens, and data.max_length = "
            f"{longest}. Lower data.max_length to {theirs.positions}, with model.positions = {theirs.positions}, or "
            "begin with another model."
        )
    sizes = {name: (getattr(theirs, name), getattr(ours, name)) for name in _KEYS if name != "positions" or has_table}
    others = {name: old for name, (old, new) in sizes.items() if old != new and not _may_change(name, new)}
    if not others:
        return
    name, old = next(iter(others.items()))
    wanted = ", ".join(f"{_KEYS[each]} = {value!r}" for each, value in others.items())
    raise ValueError(
        f"the model in {folder} has {name} = {old!r}, the recipe's {sizes[name][1]!r}. Set {wanted}, or begin with "
        "another model."
    )


def _other_tokenizer(folder: Path, found: Sequence[FoundTokenizer]) -> str:
    told = f"the corpus was made with another tokenizer than the model in {folder}: its ids mean other pieces. "
    # The one that the script takes, if there is one.
    best = next((each for each in found if each.kind == "wordpiece"), found[0])
    if best.kind == "wordpiece":
        option = f"--vocab-file {best.file}{'' if best.lowercase else ' --cased'}"
        strips = best.lowercase if best.strip_accents is None else best.strip_accents
        if strips != (guess_accents(best.file)[0] if best.lowercase else False):
            option += f" --tokenizer.strip-accents {strips}"
        made = f"launch/corpus.sh --output DIR {option} TEXT"
    elif best.kind == "json":
        made = f"launch/corpus.sh --output DIR --tokenizer-file {best.file} TEXT"
    else:
        made = (
            f"python -m tools.corpus tokenizer --model-file {best.file} --output DIR/tokenizer, and the steps after it"
        )
    return f"{told}Make one with the model's: {made}; then set data.source = DIR/samples."
