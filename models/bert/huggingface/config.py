"""Hugging Face's config.json as a `BertConfig`, and back."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

from models.bert.config import BertConfig, types_of
from models.bert.families import FAMILIES
from models.bert.huggingface.architectures import ARCHITECTURES, Architecture, architecture_of
from tensor3d.ops.activations import Activation

T = TypeVar("T", int, float)

CONFIG = "config.json"
DTYPES = {"fp32": "float32", "bf16": "bfloat16", "fp16": "float16"}
"""Types of weights and what config.json calls them."""
# The first name of each is the one that is written. "gelu_fast" is the same formula as "gelu_new".
_ACTIVATIONS: dict[str, Activation] = {
    "gelu": "gelu",
    "gelu_pytorch_tanh": "gelu_tanh",
    "relu": "relu",
    "silu": "silu",
    "gelu_python": "gelu",
    "gelu_new": "gelu_tanh",
    "gelu_fast": "gelu_tanh",
    "swish": "silu",
}
_SIZES = {
    "vocab_size": "vocab",
    "hidden_size": "hidden",
    "num_hidden_layers": "layers",
    "num_attention_heads": "heads",
    "intermediate_size": "inner",
    "max_position_embeddings": "positions",
    "type_vocab_size": "types",
}
_NUMBERS = {
    "hidden_dropout_prob": "dropout",
    "attention_probs_dropout_prob": "attention_dropout",
    "initializer_range": "std",
    "layer_norm_eps": "eps",
}
# Settings that change what the model computes: the value that it has here, and what another one means.
_OF_ALL: dict[str, tuple[Any, str]] = {
    "quantization_config": (None, "weights are floating-point numbers here"),
    "per_layer_config": (None, "all layers have the same settings here"),
    "transformers_weights": (None, "weights are read from files of the library's usual names here"),
}
_FIXED: dict[str, tuple[Any, str]] = {
    "is_decoder": (False, "a decoder sees no later tokens"),
    "add_cross_attention": (False, "there is no second input to attend to"),
    "position_embedding_type": ("absolute", "positions are a table here"),
    "pruned_heads": ({}, "all layers have the same heads here"),
    "sinusoidal_pos_embds": (False, "positions are a table that is trained here"),
}
CROSS_ENCODER, IDENTITY = "sentence_transformers", "torch.nn.modules.linear.Identity"
"""Of the config.json of a cross-encoder of sentence-transformers: {"activation_fn": the score's}."""
_PAD, _NARROW, _DROPOUT, _TIED = "pad_token_id", "embedding_size", "classifier_dropout", "tie_word_embeddings"
_ANSWERS_DROPOUT = "answers_dropout"
_OF_CLASSES = ("id2label", "label2id", "num_labels", "_num_labels", "problem_type", _DROPOUT)
_PROBLEMS = {
    "single_label_classification": "classify",
    "multi_label_classification": "labels",
    "regression": "regress",
}


def config_from(settings: Mapping[str, Any], where: Path) -> BertConfig:
    """The encoder that a config.json describes.

    Args:
        where: the file, for messages.

    Raises:
        ValueError: an architecture that is not there, a setting that it does not have here, a size that is missing
    """
    found = architecture_of(settings, where)
    if found.name == "nomic_bert":
        settings = _named_as_today(settings, where)
    for name, (needed, reason) in (_OF_ALL | dict(found.fixed or _FIXED)).items():
        value = settings.get(name, needed)
        if value != needed and value is not None:
            raise ValueError(f"{where}: {name} must be {needed!r}, for {reason}. Got {value!r}.")
    _check_aliases(settings, found, where)
    own = found.settings.get("hidden_act", "hidden_act")
    activation = settings.get(str(own), found.defaults.get("hidden_act", "gelu"))
    if not isinstance(activation, str) or activation not in _ACTIVATIONS:
        raise ValueError(f"{where}: {own} must be one of {', '.join(_ACTIVATIONS)}. Got {activation!r}.")
    fields: dict[str, Any] = {"family": found.name, "activation": _ACTIVATIONS[activation]}
    fields["tied"] = settings.get(_TIED, found.defaults.get(_TIED, True))
    if not isinstance(fields["tied"], bool):
        raise ValueError(f"{where}: {_TIED} must be true or false. Got {fields['tied']!r:.60}.")
    if found.name == "modernbert":
        fields |= _modern_fields(settings, found, where)
    elif found.name == "eurobert":
        fields |= _eurobert_fields(settings, found, where)
    elif found.name == "gemma3_text":
        fields |= _gemma_fields(settings, found, where)
    elif found.rotary:
        fields |= _rotary_fields(settings, found, where)
    elif FAMILIES[found.name].norms == ("pre",):
        fields["norm"] = "pre"
    elif found.name == "deberta-v2":
        fields |= _deberta_fields(settings, found, where)
    for field, own in _named(found, _SIZES):
        if own not in settings and field != "types":
            raise ValueError(f"{where} has no {own}, which says how large the model is. Add it.")
        fields[field] = _number(settings, own, where, int) if own in settings else types_of(fields["family"])
    numbers = _named(found, _NUMBERS)
    fields |= {field: _number(settings, own, where, float) for field, own in numbers if own in settings}
    if found.settings.get("type_vocab_size", "") is None:
        fields["types"] = 0
    if _NARROW in found.settings:
        if _NARROW not in settings:
            raise ValueError(f"{where} has no {_NARROW}, which says how large the model is. Add it.")
        columns = _number(settings, _NARROW, where, int)
        fields["embedding"] = None if columns == fields["hidden"] else columns
    if _PAD in found.defaults and not found.rotary:
        fields["first_position"] = _number({**found.defaults, **settings}, _PAD, where, int) + 1
        if fields["positions"] <= fields["first_position"]:
            raise ValueError(
                f"{where}: max_position_embeddings must be more than {_PAD} + 1 = {fields['first_position']}, for "
                f"{found.title}'s positions begin there. Got {fields['positions']}."
            )
        fields["positions"] -= fields["first_position"]
    try:
        return BertConfig(**fields)
    except ValueError as problem:
        raise ValueError(f"{where}: {_by_names_of_file(str(problem), found)}") from None


def _by_names_of_file(told: str, architecture: Architecture) -> str:
    """What is wrong with fields, which stand at the beginning of the message or beside a value, by the settings of this
    architecture that they come from."""
    own = {
        **dict([*_named(architecture, _SIZES), *_named(architecture, _NUMBERS)]),
        **{"activation": architecture.settings.get("hidden_act", "hidden_act"), "embedding": _NARROW},
        **{"first_position": f"{_PAD} + 1", "conv_kernel": _KERNEL, "kv_heads": _KEY_HEADS, "pooling": _POOLING},
        **{"window": f"{_WINDOW} / 2 + 1", "global_every": _EVERY, "attention_out_dropout": _ATTENTION_DROPOUT},
        **{"rotary_base": _OWN_THETA.get(architecture.name, _THETA), "rotary_factor": _FACTOR},
    }
    if architecture.name == "modernbert":
        own |= {"rotary_base": _BASES[_GLOBAL][0], "local_rotary_base": _BASES[_LOCAL][0]}
    elif architecture.name == "gemma3_text":
        own |= {"window": f"{_NEAR} / 2 + 1", "global_every": _GEMMA_EVERY[0]}
        own |= {"rotary_base": _GEMMA_BASES[_GLOBAL][0], "local_rotary_base": _GEMMA_BASES[_LOCAL][0]}
    fields = "|".join(own)
    return re.sub(rf"^({fields})\b|\b({fields})(?= ?[=/])|(?<=/ )({fields})\b", lambda at: str(own[at[0]]), told)


def _check_aliases(settings: Mapping[str, Any], architecture: Architecture, where: Path) -> None:
    """Raises ValueError where the library would take a setting from another name than the one that is read here."""
    for name in architecture.aliases:
        own = str(architecture.settings[name])
        if name in settings and own in settings and settings[name] != settings[own]:
            raise ValueError(
                f"{where}: {name} {settings[name]!r} and {own} {settings[own]!r} contradict, for {architecture.title} "
                "has one setting for both. Remove the one that is wrong."
            )


# ModernBERT's layers that see whole sequences and those that have a window, as version 5 of the library says it and, in
# brackets, version 4: a list of all (`global_attn_every_n_layers`), and rotary bases of both kinds (`global_rope_theta`
# and `local_rope_theta`). Version 5 reads both; both are written.
_GLOBAL, _LOCAL = "full_attention", "sliding_attention"
_BASES = {_GLOBAL: ("global_rope_theta", 160_000.0), _LOCAL: ("local_rope_theta", 10_000.0)}
_EVERY, _WINDOW, _NEAR = "global_attn_every_n_layers", "local_attention", "sliding_window"
_ATTENTION_DROPOUT = "attention_dropout"
_DEFAULT_BASE = 10_000.0
# With defaults that are ids of ModernBERT's own tokenizer; the tokenizer of a folder has its own.
_OF_TOKENS = ("bos_token_id", "eos_token_id", "cls_token_id", "sep_token_id")


def _modern_fields(settings: Mapping[str, Any], architecture: Architecture, where: Path) -> dict[str, Any]:
    """What the modern encoder has beside the sizes of all."""
    fields: dict[str, Any] = {"encoder": "modern", "dropout": 0.0, "attention_dropout": 0.0}
    if settings.get(_ATTENTION_DROPOUT):  # the library's acts on attention's probabilities and on its output
        fields["attention_out_dropout"] = _number(settings, _ATTENTION_DROPOUT, where, float)
    fields["eps"] = architecture.defaults["layer_norm_eps"]
    fields["pooling"] = settings.get("classifier_pooling", "cls")
    bases = {kind: _rotary_base(settings, kind, where) for kind in _BASES}
    fields["rotary_base"] = bases[_GLOBAL]
    every, near = _global_every(settings, where), _number({_WINDOW: 128, **settings}, _WINDOW, where, int) // 2
    if every != 1 and settings.get(_NEAR, near) not in (near, None):  # of version 5: a second name of `local_attention`
        raise ValueError(
            f"{where}: {_NEAR} {settings[_NEAR]!r} and {_WINDOW} {settings.get(_WINDOW, 128)} contradict, for a token "
            f"sees {_WINDOW} / 2 others on each side. Remove {_NEAR}, or make it {near}."
        )
    if every != 1:
        fields |= {"window": near + 1, "global_every": every, "local_rotary_base": bases[_LOCAL]}
    return fields


def _attention_dropout(config: BertConfig) -> float:
    """`attention_dropout` of a ModernBERT's config.json, which has one for attention's probabilities and its output;
    0 where they have two, as of the published ones, whose output alone was dropped out."""
    return config.attention_dropout if config.attention_dropout == config.out_dropout else 0.0


def _rotary_base(
    settings: Mapping[str, Any], kind: str, where: Path, bases: Mapping[str, tuple[str, float]] = _BASES
) -> float:
    own, default = bases[kind]
    said = _table(_table(settings, "rope_parameters", where), kind, where)
    return _agreed_base(said, settings, own, default, where, f" of {kind}")


def _agreed_base(
    said: Mapping[str, Any], settings: Mapping[str, Any], own: str, default: float, where: Path, of: str = ""
) -> float:
    """The base that `rope_parameters` (`said`) and the setting `own` of version 4 of the library agree on."""
    scaled = said.get("rope_type", said.get("type", "default"))  # of version 4 of the library
    if scaled != "default":
        raise ValueError(
            f"{where}: rope_type of rope_parameters must be 'default', for rotary positions are not scaled here. Got "
            f"{scaled!r}{of}."
        )
    found = [
        _number(each, name, where, float) for each, name in ((said, "rope_theta"), (settings, own)) if name in each
    ]
    if len(set(found)) > 1:
        raise ValueError(
            f"{where}: {own} {found[1]:g} and rope_parameters {found[0]:g} contradict. Remove one of them."
        )
    return found[0] if found else default


def _global_every(settings: Mapping[str, Any], where: Path) -> int:
    """Layers 0, n, 2n, ... see whole sequences; 1: all."""
    layers = _number(settings, "num_hidden_layers", where, int) if "num_hidden_layers" in settings else 0
    kinds, said = settings.get("layer_types"), settings.get(_EVERY)
    every = 3 if said is None else _number(settings, _EVERY, where, int)
    if every < 1:
        raise ValueError(f"{where}: {_EVERY} must be at least 1. Got {every}.")
    if kinds is None:
        return every
    wanted = [every] if said is not None else [3, *range(1, layers + 1)]
    for each in wanted:
        if kinds == _layer_types(layers, each):
            return each
    raise ValueError(
        f"{where}: layer_types must say {_GLOBAL!r} of layers 0, n, 2n, ... of {layers} and {_LOCAL!r} of the others"
        f"{f', n = {_EVERY} = {said}' if said is not None else ''}. Got {kinds!r:.200}."
    )


def _layer_types(layers: int, every: int, last: int = 0) -> list[str]:
    """`last`: 1 where of each so many layers the last one sees whole sequences, and not the first."""
    return [_LOCAL if (number + last) % every else _GLOBAL for number in range(layers)]


def _modern_settings(config: BertConfig, found: Mapping[str, Any]) -> dict[str, Any]:
    """The way back of `_modern_fields`, in both spellings."""
    every = 1 if config.window is None else config.global_every or 3
    # Without layers that have a window, what was said of them says nothing, and stays.
    local = _rotary_base(found, _LOCAL, Path(CONFIG)) if config.window is None else config.local_rotary_base
    bases = {_GLOBAL: config.rotary_base_of(0), _LOCAL: local or config.rotary_base_of(0)}
    near = found.get(_WINDOW, 128) // 2 if config.window is None else config.window - 1
    return {
        "layer_types": _layer_types(config.layers, every),
        _EVERY: every,
        _WINDOW: found[_WINDOW] if found.get(_WINDOW, -1) // 2 == near else 2 * near,
        "rope_parameters": {kind: {"rope_type": "default", "rope_theta": base} for kind, base in bases.items()},
        **{_BASES[kind][0]: base for kind, base in bases.items()},
        "classifier_pooling": config.pooling,
        _ATTENTION_DROPOUT: _attention_dropout(config),
        **{name: needed for name, (needed, _) in ARCHITECTURES["modernbert"].fixed.items() if needed is not None},
    }


# EuroBERT's: what classifiers look at as its authors' code and the library call it, and rotary positions as versions 4
# and 5 of the library say them.
_POOLING, _OLD_POOLING, _BOS = "classifier_pooling", "clf_pooling", "bos"
_KEY_HEADS, _HEAD_DIM, _THETA = "num_key_value_heads", "head_dim", "rope_theta"


def _eurobert_fields(settings: Mapping[str, Any], architecture: Architecture, where: Path) -> dict[str, Any]:
    """What a EuroBERT has beside the sizes of all."""
    fields: dict[str, Any] = {"encoder": "modern", "dropout": 0.0, "attention_dropout": 0.0}
    fields["eps"] = architecture.defaults["layer_norm_eps"]
    if settings.get(_KEY_HEADS) is not None:
        fields["kv_heads"] = _number(settings, _KEY_HEADS, where, int)
    _check_head_dim(settings, where)
    said, pooling = settings.get(_POOLING), settings.get(_OLD_POOLING)
    if said is not None and pooling is not None and said != pooling:
        raise ValueError(
            f"{where}: {_POOLING} {said!r} and {_OLD_POOLING} {pooling!r} contradict. Remove the one that is wrong."
        )
    told = said or pooling or "late"
    fields["pooling"] = "cls" if told == _BOS else told
    if told == "cls":
        raise ValueError(f"{where}: {_POOLING} must be {_BOS!r}, 'mean' or 'late'. Got 'cls'.")
    parameters = _table(settings, "rope_parameters", where)
    fields["rotary_base"] = _agreed_base(parameters, settings, _THETA, _DEFAULT_BASE, where)
    return fields


def _check_head_dim(settings: Mapping[str, Any], where: Path) -> None:
    if settings.get(_HEAD_DIM) is None:
        return
    columns, heads = (
        _number({name: 0, **settings}, name, where, int) for name in ("hidden_size", "num_attention_heads")
    )
    if heads > 0 and (found := _number(settings, _HEAD_DIM, where, int)) * heads != columns:
        raise ValueError(
            f"{where}: {_HEAD_DIM} must be hidden_size / num_attention_heads = {columns / heads:g}. Got {found}."
        )


def _eurobert_settings(config: BertConfig) -> dict[str, Any]:
    """The way back of `_eurobert_fields`, in both spellings."""
    base = config.rotary_base_of(0)
    return {
        _KEY_HEADS: config.key_heads,
        _HEAD_DIM: config.head_size,
        _POOLING: _BOS if config.pooling == "cls" else config.pooling,
        _THETA: base,
        "rope_parameters": {"rope_type": "default", "rope_theta": base},
        **{name: needed for name, (needed, _) in ARCHITECTURES["eurobert"].fixed.items() if needed is not None},
    }


# Rotary positions in BERT's layers: Jina's third embedding model, NomicBERT and GTE, as the library says them
# (`rope_parameters`), and as their authors' code did (`rope_theta` and `rope_scaling`, `rotary_emb_base`).
_ROPE, _OLD_SCALING, _FACTOR = "rope_parameters", "rope_scaling", "factor"
_OWN_THETA = {"jina_embeddings_v3": "rotary_emb_base", "nomic_bert": "rotary_emb_base"}
_INNER_ACTIVATION = "activation_function"
_OF_AUTHORS = {
    "n_embd": "hidden_size",
    "n_layer": "num_hidden_layers",
    "n_head": "num_attention_heads",
    "n_inner": "intermediate_size",
    "max_trained_positions": "max_position_embeddings",
    "layer_norm_epsilon": "layer_norm_eps",
    "resid_pdrop": "hidden_dropout_prob",
    "embd_pdrop": "hidden_dropout_prob",
    "attn_pdrop": "attention_probs_dropout_prob",
    _INNER_ACTIVATION: "hidden_act",
}
_GATES = {"swiglu": "silu", "geglu": "gelu"}


def _rotary_fields(settings: Mapping[str, Any], architecture: Architecture, where: Path) -> dict[str, Any]:
    """What those three have beside the sizes of all."""
    fields: dict[str, Any] = {}
    if "layer_norm_eps" in architecture.defaults:
        fields["eps"] = architecture.defaults["layer_norm_eps"]
    if architecture.name != "jina_embeddings_v3":
        fields["attention_dropout"] = 0.0
    if architecture.name == "nomic_bert":
        fields["dropout"] = 0.0
    _check_head_dim(settings, where)
    own = _OWN_THETA.get(architecture.name, _THETA)
    said = {**_table(settings, _OLD_SCALING, where), **_table(settings, _ROPE, where)}
    kind, default = said.pop("rope_type", said.pop("type", "default")), FAMILIES[architecture.name].rotary_base
    assert default is not None
    base = _agreed_base(said, settings, own, default, where)
    if kind in ("linear", "ntk"):
        factor = _number({_FACTOR: 0, **said}, _FACTOR, where, float)
        if not 0 < factor < math.inf:
            raise ValueError(f"{where}: {_FACTOR} of {_ROPE} must be above 0 and finite. Got {factor:g}.")
        if kind == "ntk":  # of GTE's authors, "fixed NTK": the base times the factor, and positions divided, too
            if said.get("mixed_b") is not None:
                raise ValueError(f"{where}: mixed_b of {_OLD_SCALING} must be null here. Got {said['mixed_b']!r:.60}.")
            columns, heads = (
                _number({name: 0, **settings}, name, where, int) for name in ("hidden_size", "num_attention_heads")
            )
            base, factor = base * factor, factor ** (2 * heads / max(1, columns))
        fields["rotary_factor"] = factor
    elif kind != "default":
        raise ValueError(
            f"{where}: rope_type of {_ROPE} must be 'default', 'linear', or 'ntk' of GTE's authors, for rotary "
            f"positions are scaled in no other way here. Got {kind!r:.60}."
        )
    fields["rotary_base"] = None if base == default else base
    return fields


def _rotary_settings(config: BertConfig) -> dict[str, Any]:
    """The way back of `_rotary_fields`, as the library says it."""
    base = {"rope_theta": config.rotary_base_of(0)}
    if config.rotary_factor == 1.0:
        return {_ROPE: {"rope_type": "default", **base}}
    return {_ROPE: {"rope_type": "linear", _FACTOR: config.rotary_factor, **base}}


def _named_as_today(settings: Mapping[str, Any], where: Path) -> Mapping[str, Any]:
    """A NomicBERT's settings under the library's names: those of its authors' files are GPT-2's."""
    named = {name: value for name, value in settings.items() if name not in _OF_AUTHORS}
    if settings.get(_INNER_ACTIVATION) is not None:
        activation = settings[_INNER_ACTIVATION]
        if activation not in _GATES:
            raise ValueError(
                f"{where}: {_INNER_ACTIVATION} must be one of {', '.join(_GATES)}, for its MLP has a gate. Got "
                f"{activation!r:.60}."
            )
        settings = {**settings, _INNER_ACTIVATION: _GATES[activation]}
    for old, new in _OF_AUTHORS.items():
        if settings.get(old) is None:
            continue
        if named.setdefault(new, settings[old]) != settings[old]:
            raise ValueError(
                f"{where}: {old} {settings[old]!r} and {new} {named[new]!r} contradict. Remove the one that is wrong."
            )
    return named


# EmbeddingGemma's, in the spelling of both versions of the library. Its window counts both sides; layers with one come
# first of each so many.
_GEMMA_BASES = {_GLOBAL: (_THETA, 1_000_000.0), _LOCAL: ("rope_local_base_freq", 10_000.0)}
_SEES_BOTH_SIDES, _SCALE = "use_bidirectional_attention", "query_pre_attn_scalar"
_GEMMA_EVERY = ("_sliding_window_pattern", "sliding_window_pattern")
_OF_GEMMA = {_HEAD_DIM: 256, _KEY_HEADS: 4, _SCALE: 256, _NEAR: 4096}
"""The library's defaults."""


def _gemma_fields(settings: Mapping[str, Any], architecture: Architecture, where: Path) -> dict[str, Any]:
    """What an EmbeddingGemma has beside the sizes of all."""
    if settings.get(_SEES_BOTH_SIDES) is not True:
        raise ValueError(
            f"{where}: {_SEES_BOTH_SIDES} must be true, for a decoder sees no later tokens. Got "
            f"{settings.get(_SEES_BOTH_SIDES)!r:.60}. Of Gemma 3 those that see both sides can be read, as "
            "EmbeddingGemma does."
        )
    said = {name: settings[name] if settings.get(name) is not None else each for name, each in _OF_GEMMA.items()}
    columns, key_heads, scale, near = (_number(said, name, where, int) for name in _OF_GEMMA)
    if scale != columns:
        raise ValueError(
            f"{where}: {_SCALE} must be {_HEAD_DIM} = {columns}, for scores are divided by the root of that here. Got "
            f"{scale}."
        )
    fields: dict[str, Any] = {"encoder": "modern", "dropout": 0.0, "attention_dropout": 0.0}
    fields |= {"eps": architecture.defaults["layer_norm_eps"], "head_dim": columns, "kv_heads": key_heads}
    bases = {kind: _rotary_base(settings, kind, where, _GEMMA_BASES) for kind in _GEMMA_BASES}
    fields["rotary_base"] = bases[_GLOBAL]
    every = _gemma_every(settings, where)
    if every != 1:
        fields |= {"window": near // 2 + 1, "global_every": every, "local_rotary_base": bases[_LOCAL]}
    return fields


def _gemma_every(settings: Mapping[str, Any], where: Path) -> int:
    """Layers n - 1, 2n - 1, ... see whole sequences; 1: all."""
    layers = _number(settings, "num_hidden_layers", where, int) if "num_hidden_layers" in settings else 0
    kinds, own = settings.get("layer_types"), next((each for each in _GEMMA_EVERY if settings.get(each)), None)
    every = FAMILIES["gemma3_text"].global_every if own is None else _number(settings, own, where, int)
    if every < 1:
        raise ValueError(f"{where}: {own} must be at least 1. Got {every}.")
    if kinds is None:
        return every
    for each in (every, *range(1, layers + 2)):
        if kinds == _layer_types(layers, each, 1):
            return each
    raise ValueError(
        f"{where}: layer_types must say {_GLOBAL!r} of layers n - 1, 2n - 1, ... of {layers} and {_LOCAL!r} of the "
        f"others. Got {kinds!r:.200}."
    )


def _gemma_settings(config: BertConfig, found: Mapping[str, Any]) -> dict[str, Any]:
    """The way back of `_gemma_fields`, in both spellings."""
    every = 1 if config.window is None else config.global_every or FAMILIES[config.family].global_every
    # Without layers that have a window, what was said of them says nothing, and stays.
    local = _rotary_base(found, _LOCAL, Path(CONFIG), _GEMMA_BASES) if config.window is None else None
    bases = {_GLOBAL: config.rotary_base_of(0 if config.window is None else every - 1)}
    bases[_LOCAL] = local or config.local_rotary_base or bases[_GLOBAL]
    near = found.get(_NEAR, _OF_GEMMA[_NEAR])
    if config.window is not None and near // 2 + 1 != config.window:
        near = 2 * (config.window - 1)
    types = _layer_types(config.layers, every, 1)
    if types == found.get("layer_types"):  # which the library goes by, whatever is said beside them
        every = found.get(_GEMMA_EVERY[0], every)
    return {
        _SEES_BOTH_SIDES: True,
        _HEAD_DIM: config.head_size,
        _KEY_HEADS: config.key_heads,
        _SCALE: config.head_size,
        _NEAR: near,
        "layer_types": types,
        _GEMMA_EVERY[0]: every,
        "rope_parameters": {kind: {"rope_type": "default", "rope_theta": base} for kind, base in bases.items()},
        **{_GEMMA_BASES[kind][0]: base for kind, base in bases.items()},
        **{name: needed for name, (needed, _) in ARCHITECTURES["gemma3_text"].fixed.items() if needed is not None},
    }


# What DeBERTa's attention is like, as the second and third version have it: the value that is needed, the library's
# default, and what another one means.
_DISENTANGLED: dict[str, tuple[Any, Any, str]] = {
    "relative_attention": (True, False, "scores hang on distances here"),
    "position_biased_input": (False, True, "there is no table of positions in front of the layers here"),
    "share_att_key": (True, False, "distances have the weights of tokens here"),
    "norm_rel_ebd": ("layer_norm", "none", "the table of distances has a LayerNorm here"),
}
# The same of the convolution of the two largest of the second version.
_CONVOLVED: dict[str, tuple[Any, Any, str]] = {
    "conv_act": ("gelu", "tanh", "what the convolution beside the first layer gives goes through GELU here"),
    "conv_groups": (1, 1, "the convolution beside the first layer reads all columns here"),
}
_KERNEL = "conv_kernel_size"
_PRODUCTS, _BUCKETS, _FARTHEST = "pos_att_type", "position_buckets", "max_relative_positions"
_BOTH_PRODUCTS = ("p2c", "c2p")


def _deberta_fields(settings: Mapping[str, Any], architecture: Architecture, where: Path) -> dict[str, Any]:
    """What a DeBERTa has beside the sizes of all."""
    kernel = _number({_KERNEL: 0, **settings}, _KERNEL, where, int)
    for name, (needed, default, reason) in (_DISENTANGLED | (_CONVOLVED if kernel > 0 else {})).items():
        value = settings.get(name, default)
        if value != needed:
            said = "" if name in settings else ", the library's default"
            raise ValueError(f"{where}: {name} must be {needed!r}, for {reason}. Got {value!r}{said}.")
    told = settings.get(_PRODUCTS)
    parts = [part.strip().lower() for part in told.split("|")] if isinstance(told, str) else told
    if not isinstance(parts, list) or sorted(map(str, parts)) != sorted(_BOTH_PRODUCTS):
        raise ValueError(f"{where}: {_PRODUCTS} must be {'|'.join(_BOTH_PRODUCTS)!r}, both products. Got {told!r:.60}.")
    fields: dict[str, Any] = {"eps": architecture.defaults["layer_norm_eps"]}
    fields["conv_kernel"] = kernel if kernel > 0 else None
    fields["position_buckets"] = _number({_BUCKETS: -1, **settings}, _BUCKETS, where, int)
    longest, farthest = settings.get("max_position_embeddings"), settings.get(_FARTHEST, -1)
    if farthest not in (-1, longest):
        raise ValueError(
            f"{where}: {_FARTHEST} must be -1 or max_position_embeddings = {longest}. Got {farthest!r:.60}."
        )
    columns, heads = (
        _number({name: 0, **settings}, name, where, int) for name in ("hidden_size", "num_attention_heads")
    )
    for name, needed in (
        ("embedding_size", columns),
        ("pooler_hidden_size", columns),
        ("attention_head_size", columns / max(1, heads)),
    ):
        if columns and settings.get(name, needed) != needed:  # a size that is missing is named below
            raise ValueError(f"{where}: {name} must be {needed:g} here. Got {settings[name]!r:.60}.")
    return fields


def _deberta_settings(config: BertConfig, found: Mapping[str, Any]) -> dict[str, Any]:
    """The way back of `_deberta_fields`. `legacy`: that the masked-LM head has BERT's names."""
    assert config.distance_buckets is not None
    return {
        **{name: needed for name, (needed, _, _) in _DISENTANGLED.items()},
        **{name: needed for name, (needed, _) in ARCHITECTURES["deberta-v2"].fixed.items()},
        _KERNEL: config.conv_kernel or 0,
        **({name: needed for name, (needed, _, _) in _CONVOLVED.items()} if config.conv_kernel else {}),
        _PRODUCTS: found.get(_PRODUCTS, "|".join(_BOTH_PRODUCTS)),
        _BUCKETS: config.distance_buckets.span,
        _FARTHEST: found.get(_FARTHEST, -1),
        "pooler_hidden_size": config.hidden,
        "legacy": True,
    }


def _named(architecture: Architecture, names: Mapping[str, str]) -> list[tuple[str, str]]:
    """Fields here and the settings of this architecture, without those that it does not have."""
    found = ((field, architecture.settings.get(name, name)) for name, field in names.items())
    return [(field, own) for field, own in found if own is not None]


def head_dropout_from(settings: Mapping[str, Any], where: Path, head: str) -> float | None:
    """Of what a head of fine-tuning reads. None: as of hidden states, or, of answers, none.

    Args:
        head: "classifier", "tags" or "answers". DistilBERT has a setting for that of texts alone, and one for answers.
    """
    found = architecture_of(settings, where)
    setting = _ANSWERS_DROPOUT if head == "answers" else _DROPOUT
    if found.settings.get(setting, "") is None:
        return None
    own, default = found.settings.get(setting), found.defaults.get(setting)
    if (head == "answers" and own is None) or (head == "tags" and own is not None):
        return None
    name = own or setting
    value = default if settings.get(name) is None else _number(settings, name, where, float)
    if value is not None and not 0 <= value < 1:
        raise ValueError(f"{where}: {name} must be at least 0 and below 1. Got {value}.")
    return value


def labels_from(settings: Mapping[str, Any], where: Path) -> tuple[str, ...]:
    """Names of the classes in their order; LABEL_0, LABEL_1 where there are none, as the library has it.

    Raises:
        ValueError: numbers that do not run from 0 on, or a name that two classes have.
    """
    named = settings.get("id2label")
    if named is None:
        count = _number(settings, "num_labels", where, int) if "num_labels" in settings else 2
        return tuple(f"LABEL_{i}" for i in range(count))
    try:
        by_number = {int(number): str(label) for number, label in named.items()}
        labels = tuple(by_number[number] for number in range(len(named)))
    except (AttributeError, ValueError, KeyError):
        raise ValueError(f"{where}: id2label must name the classes 0, 1, ... one by one. Got {named!r}.") from None
    if len(set(labels)) != len(labels):
        raise ValueError(f"{where}: id2label must give each class a name of its own. Got {named!r}.")
    return labels


def problem_from(settings: Mapping[str, Any], outputs: int, where: Path) -> str | None:
    """What a classifier is for: "classify", "labels" (any number may hold), "regress", or None for anything else."""
    told = settings.get("problem_type")
    if told is None:
        return "regress" if outputs == 1 else "classify"
    if not isinstance(told, str):
        raise ValueError(f"{where}: problem_type must be a name. Got {told!r}.")
    return _PROBLEMS.get(told)


def settings_of(
    config: BertConfig,
    architecture: str,
    dtype: str,
    *,
    found: Mapping[str, Any] | None = None,
    labels: Sequence[str] | None = None,
    problem: str | None = None,
    classifier_dropout: float | None = None,
    answers_dropout: float | None = None,
) -> dict[str, Any]:
    """A config.json of an encoder.

    Args:
        architecture: the library's class that the folder is for.
        dtype: "fp32", "bf16" or "fp16".
        found: one that was imported: what it has besides is kept, but what it says of the classes of another model.
        labels, problem, classifier_dropout: of a classifier.
        answers_dropout: of the head that finds answers, where the library has a setting for it.
    """
    kind, found = ARCHITECTURES[config.family], dict(found or {})
    same = architecture in (found.get("architectures") or ())
    dropout = kind.settings.get(_DROPOUT) or _DROPOUT
    if not same:
        found = {name: value for name, value in found.items() if name not in (*_OF_CLASSES, dropout)}
    act = kind.settings.get("hidden_act") or "hidden_act"
    activation = found.get(act)
    if _ACTIVATIONS.get(str(activation)) != config.activation:
        activation = next(name for name, ours in _ACTIVATIONS.items() if ours == config.activation)
    sizes = {own: getattr(config, field) for field, own in _named(kind, _SIZES | _NUMBERS)}
    sizes[kind.settings.get("intermediate_size") or "intermediate_size"] = config.inner_size
    sizes["max_position_embeddings"] = config.position_rows or config.positions
    if _NARROW in kind.settings:
        sizes[_NARROW] = config.embedding_size
    if config.first_position:
        sizes[_PAD] = config.first_position - 1
    new: dict[str, Any] = {"architectures": [architecture], "model_type": kind.name, act: activation, **sizes}
    # Older versions of the library read the one name, newer ones both.
    new |= dict.fromkeys([name for name in ("torch_dtype", "dtype") if name in found] or ["dtype"], DTYPES[dtype])
    if kind.name == "modernbert":
        new |= _modern_settings(config, found)
        found = {**dict.fromkeys(_OF_TOKENS), **found}
    elif kind.name == "eurobert":
        new |= _eurobert_settings(config)
        found = {**dict.fromkeys(_OF_TOKENS), **found}
    elif kind.name == "gemma3_text":
        new |= _gemma_settings(config, found)
        found = {**dict.fromkeys(_OF_TOKENS), **found}
    elif kind.name == "deberta-v2":
        new |= _deberta_settings(config, found)
    elif kind.rotary:
        new |= _rotary_settings(config)
        spare = {*_OF_AUTHORS, *_OWN_THETA.values(), _OLD_SCALING, _THETA, "auto_map"}  # of code that is not needed
        found = {_PAD: kind.defaults.get(_PAD, 0)} | {name: each for name, each in found.items() if name not in spare}
    if answers_dropout is not None and (name := kind.settings.get(_ANSWERS_DROPOUT)) is not None:
        new[name] = answers_dropout
    if kind.name == "mpnet":
        new |= {name: needed for name, (needed, _) in kind.fixed.items()}
    if kind.tasks is not None:
        new[kind.tasks] = False
    if labels is not None:
        new["id2label"] = {str(number): label for number, label in enumerate(labels)}
        new["label2id"] = {label: number for number, label in enumerate(labels)}
        if says_head_dropout(kind, architecture):
            own = config.dropout if classifier_dropout is None else classifier_dropout
            new[dropout] = own if _DROPOUT in kind.defaults else classifier_dropout
        unsaid = same and "problem_type" not in found and problem == ("regress" if len(labels) == 1 else "classify")
        if problem == "rank":
            # What CrossEncoder of sentence-transformers does with the score; where nothing says so, a sigmoid.
            new[CROSS_ENCODER] = {**_table(found, CROSS_ENCODER, Path(CONFIG)), "activation_fn": IDENTITY}
        elif problem is not None and not unsaid:
            new["problem_type"] = {ours: theirs for theirs, ours in _PROBLEMS.items()}[problem]
        found = {name: value for name, value in found.items() if name not in ("num_labels", "_num_labels")}
    return {"pad_token_id": 0, **found, **new, _TIED: config.tied}


def says_head_dropout(kind: Architecture, architecture: str) -> bool:
    """Whether the config.json of a classifier says the dropout of what its head reads; else it is that of hidden
    states. A setting with a name and a default of its own is that of the class for texts."""
    own = kind.settings.get(_DROPOUT, _DROPOUT)
    if own is None:
        return False
    return own == _DROPOUT or _DROPOUT not in kind.defaults or architecture.endswith("ForSequenceClassification")


def _table(settings: Mapping[str, Any], name: str, where: Path) -> Mapping[str, Any]:
    """A setting that has settings of its own; empty where it is not there."""
    value = settings.get(name) or {}
    if not isinstance(value, dict):
        raise ValueError(f"{where}: {name} must be an object. Got {value!r:.60}.")
    return value


def _number(settings: Mapping[str, Any], name: str, where: Path, kind: type[T]) -> T:
    value = settings[name]
    wanted = (int,) if kind is int else (int, float)
    if not isinstance(value, wanted) or isinstance(value, bool) or (type(value) is int and abs(value) >= 1 << 63):
        told = "a whole number" if kind is int else "a number"
        raise ValueError(f"{where}: {name} must be {told}. Got {value!r:.60}.")
    return kind(value)
