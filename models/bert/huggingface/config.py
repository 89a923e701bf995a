"""Hugging Face's config.json as a `BertConfig`, and back."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from models.bert.config import BertConfig, types_of
from models.bert.families import FAMILIES
from models.bert.huggingface.architectures import ARCHITECTURES, Architecture, architecture_of
from models.bert.huggingface.family_settings import (
    FAMILY_SETTINGS,
    OF_TOKENS,
    SPARE,
    named_as_today,
    settings_of_fields,
)
from models.bert.huggingface.setting_values import CONFIG as CONFIG
from models.bert.huggingface.setting_values import number, table
from tensor3d.ops.activations import Activation

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
        settings = named_as_today(settings, where)
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
    if found.name in FAMILY_SETTINGS:
        fields |= FAMILY_SETTINGS[found.name].read(settings, found, where)
    elif FAMILIES[found.name].norms == ("pre",):
        fields["norm"] = "pre"
    for field, own in _named(found, _SIZES):
        if own not in settings and field != "types":
            raise ValueError(f"{where} has no {own}, which says how large the model is. Add it.")
        fields[field] = number(settings, own, where, int) if own in settings else types_of(fields["family"])
    numbers = _named(found, _NUMBERS)
    fields |= {field: number(settings, own, where, float) for field, own in numbers if own in settings}
    if found.settings.get("type_vocab_size", "") is None:
        fields["types"] = 0
    if _NARROW in found.settings:
        if _NARROW not in settings:
            raise ValueError(f"{where} has no {_NARROW}, which says how large the model is. Add it.")
        columns = number(settings, _NARROW, where, int)
        fields["embedding"] = None if columns == fields["hidden"] else columns
    if _PAD in found.defaults and not found.rotary:
        fields["first_position"] = number({**found.defaults, **settings}, _PAD, where, int) + 1
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
        **{"first_position": f"{_PAD} + 1", **settings_of_fields(architecture)},
    }
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
    if found.settings.get(setting, "") is None or (head == "classifier" and found.scores):
        return None
    own, default = found.settings.get(setting), found.defaults.get(setting)
    if (head == "answers" and own is None) or (head == "tags" and own is not None):
        return None
    name = own or setting
    value = default if settings.get(name) is None else number(settings, name, where, float)
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
        count = number(settings, "num_labels", where, int) if "num_labels" in settings else 2
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
    if kind.name in FAMILY_SETTINGS:
        new |= FAMILY_SETTINGS[kind.name].write(config, found)
    if config.encoder == "modern":
        found = {**dict.fromkeys(OF_TOKENS), **found}
    elif kind.rotary:
        found = {_PAD: kind.defaults.get(_PAD, 0)} | {name: each for name, each in found.items() if name not in SPARE}
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
            new[CROSS_ENCODER] = {**table(found, CROSS_ENCODER, Path(CONFIG)), "activation_fn": IDENTITY}
        elif problem is not None and not unsaid:
            new["problem_type"] = {ours: theirs for theirs, ours in _PROBLEMS.items()}[problem]
        found = {name: value for name, value in found.items() if name not in ("num_labels", "_num_labels")}
    if kind.scores and architecture.endswith("ForSequenceClassification"):
        new[_PAD] = config.pad_id
    return {_PAD: config.pad_id if kind.scores else 0, **found, **new, _TIED: config.tied}


def says_head_dropout(kind: Architecture, architecture: str) -> bool:
    """Whether the config.json of a classifier says the dropout of what its head reads; else it is that of hidden
    states. A setting with a name and a default of its own is that of the class for texts."""
    own, of_texts = kind.settings.get(_DROPOUT, _DROPOUT), architecture.endswith("ForSequenceClassification")
    if own is None or (kind.scores and of_texts):
        return False
    return own == _DROPOUT or _DROPOUT not in kind.defaults or of_texts
