"""Hugging Face's config.json as a `BertConfig`, and back."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

from models.bert.config import BertConfig
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
_FIXED = {
    "is_decoder": (False, "a decoder sees no later tokens"),
    "add_cross_attention": (False, "there is no second input to attend to"),
    "position_embedding_type": ("absolute", "positions are a table here"),
    "pruned_heads": ({}, "all layers have the same heads here"),
    "quantization_config": (None, "weights are floating-point numbers here"),
}
CROSS_ENCODER, IDENTITY = "sentence_transformers", "torch.nn.modules.linear.Identity"
"""Of the config.json of a cross-encoder of sentence-transformers: {"activation_fn": the score's}."""
_TYPES = 2  # of tokens, where a config.json does not say: the library's default
_OF_CLASSES = ("id2label", "label2id", "num_labels", "_num_labels", "problem_type", "classifier_dropout")
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
        ValueError: another model than BERT, a setting that this BERT does not have, a size that is missing
    """
    _check_model(settings, where)
    for name, (needed, reason) in _FIXED.items():
        value = settings.get(name, needed)
        if value != needed and value is not None:
            raise ValueError(f"{where}: {name} must be {needed!r}, for {reason}. Got {value!r}.")
    activation = settings.get("hidden_act", "gelu")
    if not isinstance(activation, str) or activation not in _ACTIVATIONS:
        raise ValueError(f"{where}: hidden_act must be one of {', '.join(_ACTIVATIONS)}. Got {activation!r}.")
    fields: dict[str, Any] = {"activation": _ACTIVATIONS[activation]}
    for name, field in _SIZES.items():
        if name not in settings and field != "types":
            raise ValueError(f"{where} has no {name}, which says how large the model is. Add it.")
        fields[field] = _number(settings, name, where, int) if name in settings else _TYPES
    fields |= {field: _number(settings, name, where, float) for name, field in _NUMBERS.items() if name in settings}
    try:
        return BertConfig(**fields)
    except ValueError as problem:
        raise ValueError(f"{where}: {problem}") from None


def classifier_dropout_from(settings: Mapping[str, Any], where: Path) -> float | None:
    """None: as of hidden states."""
    if settings.get("classifier_dropout") is None:
        return None
    return _number(settings, "classifier_dropout", where, float)


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


def architectures_from(settings: Mapping[str, Any], where: Path) -> tuple[str, ...]:
    """The library's classes that the folder was saved from; none where it does not say."""
    names = settings.get("architectures")
    if names is None:
        return ()
    if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
        raise ValueError(f"{where}: architectures must be a list of names of classes. Got {names!r}.")
    return tuple(names)


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
) -> dict[str, Any]:
    """A config.json of an encoder.

    Args:
        architecture: the library's class that the folder is for.
        dtype: "fp32", "bf16" or "fp16".
        found: one that was imported: what it has besides is kept, but what it says of the classes of another model.
        labels, problem, classifier_dropout: of a classifier.
    """
    found = dict(found or {})
    same = architecture in (found.get("architectures") or ())
    if not same:
        found = {name: value for name, value in found.items() if name not in _OF_CLASSES}
    activation = found.get("hidden_act")
    if _ACTIVATIONS.get(str(activation)) != config.activation:
        activation = next(name for name, ours in _ACTIVATIONS.items() if ours == config.activation)
    sizes = {name: getattr(config, field) for name, field in (_SIZES | _NUMBERS).items()}
    sizes["intermediate_size"] = config.inner_size
    new: dict[str, Any] = {"architectures": [architecture], "model_type": "bert", "hidden_act": activation, **sizes}
    # Older versions of the library read the one name, newer ones both.
    new |= dict.fromkeys([name for name in ("torch_dtype", "dtype") if name in found] or ["dtype"], DTYPES[dtype])
    if labels is not None:
        new["id2label"] = {str(number): label for number, label in enumerate(labels)}
        new["label2id"] = {label: number for number, label in enumerate(labels)}
        new["classifier_dropout"] = classifier_dropout
        unsaid = same and "problem_type" not in found and problem == ("regress" if len(labels) == 1 else "classify")
        if problem == "rank":
            # What CrossEncoder of sentence-transformers does with the score; where nothing says so, a sigmoid.
            new[CROSS_ENCODER] = {**(found.get(CROSS_ENCODER) or {}), "activation_fn": IDENTITY}
        elif problem is not None and not unsaid:
            new["problem_type"] = {ours: theirs for theirs, ours in _PROBLEMS.items()}[problem]
        found = {name: value for name, value in found.items() if name not in ("num_labels", "_num_labels")}
    # The decoder's weight is not written, so it is tied whatever was found: what was loaded had equal ones.
    return {"pad_token_id": 0, **found, **new, "tie_word_embeddings": True}


def _check_model(settings: Mapping[str, Any], where: Path) -> None:
    kind = settings.get("model_type")
    names = architectures_from(settings, where)
    if kind is None and all(name.startswith("Bert") for name in names):  # of 2019, or of nobody but BERT
        return
    if kind != "bert":
        told = f"model_type {kind!r}" if kind is not None else f"architectures {list(names)!r}"
        raise ValueError(f"{where} is of another model: {told}. Only BERT (model_type 'bert') can be read.")


def _number(settings: Mapping[str, Any], name: str, where: Path, kind: type[T]) -> T:
    value = settings[name]
    wanted = (int,) if kind is int else (int, float)
    if not isinstance(value, wanted) or isinstance(value, bool) or (type(value) is int and abs(value) >= 1 << 63):
        told = "a whole number" if kind is int else "a number"
        raise ValueError(f"{where}: {name} must be {told}. Got {value!r:.60}.")
    return kind(value)
