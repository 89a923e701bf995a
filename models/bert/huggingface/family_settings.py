"""What families say in a config.json beside the sizes of all, and how it is written back."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from types import MappingProxyType
from typing import Any

from models.bert.config import BertConfig
from models.bert.families import FAMILIES
from models.bert.huggingface.architectures import ARCHITECTURES, Architecture
from models.bert.huggingface.setting_values import CONFIG, number, table

# ModernBERT's layers that see whole sequences and those that have a window, as version 5 of the library says it and, in
# brackets, version 4: a list of all (`global_attn_every_n_layers`), and rotary bases of both kinds (`global_rope_theta`
# and `local_rope_theta`). Version 5 reads both; both are written.
_GLOBAL, _LOCAL = "full_attention", "sliding_attention"
_BASES = {_GLOBAL: ("global_rope_theta", 160_000.0), _LOCAL: ("local_rope_theta", 10_000.0)}
_EVERY, _WINDOW, _NEAR = "global_attn_every_n_layers", "local_attention", "sliding_window"
_ATTENTION_DROPOUT = "attention_dropout"
_DEFAULT_BASE = 10_000.0
# With defaults that are ids of ModernBERT's own tokenizer; the tokenizer of a folder has its own.
OF_TOKENS = ("bos_token_id", "eos_token_id", "cls_token_id", "sep_token_id")


def _modern_fields(settings: Mapping[str, Any], architecture: Architecture, where: Path) -> dict[str, Any]:
    """What the modern encoder has beside the sizes of all."""
    fields: dict[str, Any] = {"encoder": "modern", "dropout": 0.0, "attention_dropout": 0.0}
    if settings.get(_ATTENTION_DROPOUT):  # the library's acts on attention's probabilities and on its output
        fields["attention_out_dropout"] = number(settings, _ATTENTION_DROPOUT, where, float)
    fields["eps"] = architecture.defaults["layer_norm_eps"]
    fields["pooling"] = settings.get("classifier_pooling", "cls")
    bases = {kind: _rotary_base(settings, kind, where) for kind in _BASES}
    fields["rotary_base"] = bases[_GLOBAL]
    every, near = _global_every(settings, where), number({_WINDOW: 128, **settings}, _WINDOW, where, int) // 2
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
    said = table(table(settings, "rope_parameters", where), kind, where)
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
    found = [number(each, name, where, float) for each, name in ((said, "rope_theta"), (settings, own)) if name in each]
    if len(set(found)) > 1:
        raise ValueError(
            f"{where}: {own} {found[1]:g} and rope_parameters {found[0]:g} contradict. Remove one of them."
        )
    return found[0] if found else default


def _global_every(settings: Mapping[str, Any], where: Path) -> int:
    """Layers 0, n, 2n, ... see whole sequences; 1: all."""
    layers = number(settings, "num_hidden_layers", where, int) if "num_hidden_layers" in settings else 0
    kinds, said = settings.get("layer_types"), settings.get(_EVERY)
    every = 3 if said is None else number(settings, _EVERY, where, int)
    if every < 1:
        raise ValueError(f"{where}: {_EVERY} must be at least 1. Got {every}.")
    if kinds is None:
        return every
    if (
        found := _every_of(kinds, layers, [every] if said is not None else chain([3], range(1, layers + 1)))
    ) is not None:
        return found
    raise ValueError(
        f"{where}: layer_types must say {_GLOBAL!r} of layers 0, n, 2n, ... of {layers} and {_LOCAL!r} of the others"
        f"{f', n = {_EVERY} = {said}' if said is not None else ''}. Got {kinds!r:.200}."
    )


def _layer_types(layers: int, every: int, last: int = 0) -> list[str]:
    """`last`: 1 where of each so many layers the last one sees whole sequences, and not the first."""
    return [_LOCAL if (number + last) % every else _GLOBAL for number in range(layers)]


def _every_of(kinds: Any, layers: int, wanted: Iterable[int], last: int = 0) -> int | None:
    """The first of `wanted` by which the layers are of these kinds."""
    if not isinstance(kinds, list) or len(kinds) != layers:  # of 10^9 layers no list is made
        return None
    return next((each for each in wanted if kinds == _layer_types(layers, each, last)), None)


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
        fields["kv_heads"] = number(settings, _KEY_HEADS, where, int)
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
    parameters = table(settings, "rope_parameters", where)
    fields["rotary_base"] = _agreed_base(parameters, settings, _THETA, _DEFAULT_BASE, where)
    return fields


def _check_head_dim(settings: Mapping[str, Any], where: Path) -> None:
    if settings.get(_HEAD_DIM) is None:
        return
    columns, heads = (
        number({name: 0, **settings}, name, where, int) for name in ("hidden_size", "num_attention_heads")
    )
    if heads > 0 and (found := number(settings, _HEAD_DIM, where, int)) * heads != columns:
        raise ValueError(
            f"{where}: {_HEAD_DIM} must be hidden_size / num_attention_heads = {columns / heads:g}. Got {found}."
        )


def _eurobert_settings(config: BertConfig, _: Mapping[str, Any]) -> dict[str, Any]:
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
SPARE = frozenset({*_OF_AUTHORS, *_OWN_THETA.values(), _OLD_SCALING, _THETA, "auto_map"})
"""Of these three: settings of code that is not needed."""


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
    said = {**table(settings, _OLD_SCALING, where), **table(settings, _ROPE, where)}
    kind, default = said.pop("rope_type", said.pop("type", "default")), FAMILIES[architecture.name].rotary_base
    assert default is not None
    base = _agreed_base(said, settings, own, default, where)
    if kind in ("linear", "ntk"):
        factor = number({_FACTOR: 0, **said}, _FACTOR, where, float)
        if not 0 < factor < math.inf:
            raise ValueError(f"{where}: {_FACTOR} of {_ROPE} must be above 0 and finite. Got {factor:g}.")
        if kind == "ntk":  # of GTE's authors, "fixed NTK": the base times the factor, and positions divided, too
            if said.get("mixed_b") is not None:
                raise ValueError(f"{where}: mixed_b of {_OLD_SCALING} must be null here. Got {said['mixed_b']!r:.60}.")
            columns, heads = (
                number({name: 0, **settings}, name, where, int) for name in ("hidden_size", "num_attention_heads")
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


def _rotary_settings(config: BertConfig, _: Mapping[str, Any]) -> dict[str, Any]:
    """The way back of `_rotary_fields`, as the library says it."""
    base = {"rope_theta": config.rotary_base_of(0)}
    if config.rotary_factor == 1.0:
        return {_ROPE: {"rope_type": "default", **base}}
    return {_ROPE: {"rope_type": "linear", _FACTOR: config.rotary_factor, **base}}


def named_as_today(settings: Mapping[str, Any], where: Path) -> Mapping[str, Any]:
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
    columns, key_heads, scale, near = (number(said, name, where, int) for name in _OF_GEMMA)
    if scale != columns:
        raise ValueError(
            f"{where}: {_SCALE} must be {_HEAD_DIM} = {columns}, for scores are divided by the root of that here. Got "
            f"{scale}."
        )
    fields: dict[str, Any] = {"encoder": "modern", "dropout": 0.0, "attention_dropout": 0.0}
    fields |= {"eps": architecture.defaults["layer_norm_eps"], "head_dim": columns, "kv_heads": key_heads}
    fields |= _score_fields({"pad_token_id": 0, **settings}, where)
    bases = {kind: _rotary_base(settings, kind, where, _GEMMA_BASES) for kind in _GEMMA_BASES}
    fields["rotary_base"] = bases[_GLOBAL]
    every = _gemma_every(settings, where)
    if every != 1:
        fields |= {"window": near // 2 + 1, "global_every": every, "local_rotary_base": bases[_LOCAL]}
    return fields


def _score_fields(settings: Mapping[str, Any], where: Path) -> dict[str, Any]:
    """What the classifiers of texts look at in families whose classes have `score` alone. The library passes over
    `pad_token_id`; where that is none, it takes one text at a time, without padding."""
    padding = None if settings.get("pad_token_id") is None else number(settings, "pad_token_id", where, int)
    return {"pooling": "score", "pad_id": None if padding is None or padding < 0 else padding}


def _gemma_every(settings: Mapping[str, Any], where: Path) -> int:
    """Layers n - 1, 2n - 1, ... see whole sequences; 1: all."""
    layers = number(settings, "num_hidden_layers", where, int) if "num_hidden_layers" in settings else 0
    kinds, own = settings.get("layer_types"), next((each for each in _GEMMA_EVERY if settings.get(each)), None)
    every = FAMILIES["gemma3_text"].global_every if own is None else number(settings, own, where, int)
    if every < 1:
        raise ValueError(f"{where}: {own} must be at least 1. Got {every}.")
    if kinds is None:
        return every
    if (found := _every_of(kinds, layers, chain([every], range(1, layers + 2)), 1)) is not None:
        return found
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


# Qwen3's. The library's layers see what came before alone, unless `is_causal` says otherwise.
_CAUSAL, _SEES_ALL = "is_causal", [_GLOBAL]
_OF_QWEN = {_HEAD_DIM: 128, _KEY_HEADS: 32}
"""The library's defaults."""


def _qwen_fields(settings: Mapping[str, Any], architecture: Architecture, where: Path) -> dict[str, Any]:
    """What a Qwen3 has beside the sizes of all."""
    causal, kinds = settings.get(_CAUSAL, True), settings.get("layer_types")
    if not isinstance(causal, bool):
        raise ValueError(f"{where}: {_CAUSAL} must be true or false. Got {causal!r:.60}.")
    if kinds is not None and (not isinstance(kinds, list) or any(kind != _GLOBAL for kind in kinds)):
        raise ValueError(f"{where}: layer_types must say {_GLOBAL!r} of all layers here. Got {kinds!r:.200}.")
    said = {name: settings[name] if settings.get(name) is not None else each for name, each in _OF_QWEN.items()}
    columns, key_heads = (number(said, name, where, int) for name in _OF_QWEN)
    base = _agreed_base(table(settings, _ROPE, where), settings, _THETA, _DEFAULT_BASE, where)
    return {
        **{"encoder": "modern", "dropout": 0.0, "attention_dropout": 0.0, "causal": causal},
        **{"eps": architecture.defaults["layer_norm_eps"], "head_dim": columns, "kv_heads": key_heads},
        **{"rotary_base": base, **_score_fields(settings, where)},
    }


def _qwen_settings(config: BertConfig, found: Mapping[str, Any]) -> dict[str, Any]:
    """The way back of `_qwen_fields`, in both spellings."""
    base = config.rotary_base_of(0)
    return {
        **({} if config.causal and _CAUSAL not in found else {_CAUSAL: config.causal}),
        _HEAD_DIM: config.head_size,
        _KEY_HEADS: config.key_heads,
        _THETA: base,
        _ROPE: {"rope_type": "default", "rope_theta": base},
        "layer_types": [_GLOBAL] * config.layers,
        **{name: needed for name, (needed, _) in ARCHITECTURES["qwen3"].fixed.items() if needed is not None},
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
    kernel = number({_KERNEL: 0, **settings}, _KERNEL, where, int)
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
    fields["position_buckets"] = number({_BUCKETS: -1, **settings}, _BUCKETS, where, int)
    longest, farthest = settings.get("max_position_embeddings"), settings.get(_FARTHEST, -1)
    if farthest not in (-1, longest):
        raise ValueError(
            f"{where}: {_FARTHEST} must be -1 or max_position_embeddings = {longest}. Got {farthest!r:.60}."
        )
    columns, heads = (
        number({name: 0, **settings}, name, where, int) for name in ("hidden_size", "num_attention_heads")
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


@dataclass(frozen=True, kw_only=True)
class FamilySettings:
    """Of a family."""

    read: Callable[[Mapping[str, Any], Architecture, Path], dict[str, Any]]
    """From the settings of a file, by whose name messages begin, to fields of `BertConfig`.

    Raises ValueError for what it does not have here.
    """
    write: Callable[[BertConfig, Mapping[str, Any]], dict[str, Any]]
    """The way back, beside the settings of a file that was imported."""


FAMILY_SETTINGS: Mapping[str, FamilySettings] = MappingProxyType(
    {
        "modernbert": FamilySettings(read=_modern_fields, write=_modern_settings),
        "eurobert": FamilySettings(read=_eurobert_fields, write=_eurobert_settings),
        "gemma3_text": FamilySettings(read=_gemma_fields, write=_gemma_settings),
        "qwen3": FamilySettings(read=_qwen_fields, write=_qwen_settings),
        "deberta-v2": FamilySettings(read=_deberta_fields, write=_deberta_settings),
        **{
            name: FamilySettings(read=_rotary_fields, write=_rotary_settings)
            for name, each in ARCHITECTURES.items()
            if each.rotary
        },
    }
)
"""By `model_type`, of those that say more than sizes."""


def settings_of_fields(architecture: Architecture) -> dict[str, str]:
    """Of fields of `BertConfig` that are none of the sizes, what an architecture's file calls them."""
    names = {
        **{"conv_kernel": _KERNEL, "kv_heads": _KEY_HEADS, "pooling": _POOLING, "rotary_factor": _FACTOR},
        **{"window": f"{_WINDOW} / 2 + 1", "global_every": _EVERY, "attention_out_dropout": _ATTENTION_DROPOUT},
        "rotary_base": _OWN_THETA.get(architecture.name, _THETA),
    }
    bases = {"modernbert": _BASES, "gemma3_text": _GEMMA_BASES}.get(architecture.name)
    if bases is not None:
        names |= {"rotary_base": bases[_GLOBAL][0], "local_rotary_base": bases[_LOCAL][0]}
    if architecture.name == "gemma3_text":
        names |= {"window": f"{_NEAR} / 2 + 1", "global_every": _GEMMA_EVERY[0]}
    return names
