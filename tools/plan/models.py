"""The models that the planner knows by name: BERT's presets, and encoders that nobody trains on one GPU."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

from models.bert import PRESETS, BertConfig
from models.bert.cost_model.param_shapes import held
from tensor3d import CubeShape

MODELS: Mapping[str, BertConfig] = MappingProxyType(
    {
        **PRESETS,
        # 12 L h² weights in L layers of h columns, with heads of 128.
        "10b": BertConfig(layers=50, hidden=4096, heads=32),
        "100b": BertConfig(layers=80, hidden=10240, heads=80),
    }
)
_MOST_LAYERS = 10_000  # each is gone through, for every box
_MOST = 10**15  # parameters: more than any cluster has memory for, and a slip of the finger


def model_of(
    name: str,
    *,
    layers: int | None = None,
    hidden: int | None = None,
    heads: int | None = None,
    inner: int | None = None,
    vocab: int | None = None,
    positions: int | None = None,
) -> BertConfig:
    """A preset with other sizes, where any are given.

    Raises:
        ValueError: an unknown preset, a size that cannot be, more parameters than anybody can hold.
    """
    if name not in MODELS:
        raise ValueError(f"--model must be one of {', '.join(MODELS)}, with sizes of your own beside it. Got {name!r}.")
    sizes = {"layers": layers, "hidden": hidden, "heads": heads, "inner": inner, "vocab": vocab, "positions": positions}
    given: dict[str, Any] = {key: value for key, value in sizes.items() if value is not None}
    for key, value in given.items():
        most = _MOST_LAYERS if key == "layers" else 10**9
        if not 1 <= value <= most:
            raise ValueError(f"--{key} must be a whole number from 1 to {most:,}. Got {value:,}.")
    config = dataclasses.replace(MODELS[name], **given)
    parameters = parameters_of(config)
    if parameters > _MOST:
        raise ValueError(f"the model has {parameters:.2g} parameters, and the planner stops at {_MOST:.0e}.")
    return config


def parameters_of(config: BertConfig) -> int:
    """Elements of all of them."""
    return held(config, CubeShape()).total
