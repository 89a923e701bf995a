"""What transformers' models call for attention, on a cube: `attn_implementation="tensor3d"`."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch.nn.functional as F
from torch import Tensor, nn

from tensor3d.parallelize import AttentionCode3D, attend_packed

IMPLEMENTATION = "tensor3d"
"""The name by which the library finds it. It makes no masks for a name that it has none for."""

# What the library passes along that has no say in the attention of whole sequences.
_WITHOUT_MEANING = frozenset(
    ["position_ids", "use_cache", "cache_position", "output_attentions", "output_hidden_states", "return_dict"]
)


def packed_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    scaling: float | None = None,
    dropout: float = 0.0,
    sliding_window: int | None = None,
    is_causal: bool | None = None,
    **more: Any,
) -> tuple[Tensor, None]:
    """(1, heads, rows, d) of this rank to (1, rows, heads, d), within its sequences; the library's interface.

    On a model that is not on a cube, such as the example's run by which `propose_plan` reads it, attention is torch's.

    Raises:
        ValueError: a mask, or something that scores would need beside their scale: a cap, sinks.
    """
    strange = {name: each for name, each in more.items() if each is not None and name not in _WITHOUT_MEANING}
    if attention_mask is not None or strange:
        given = ", ".join(f"{name}={each!r}" for name, each in strange.items()) or "an attention mask"
        raise ValueError(
            "attention on a cube is the softmax of scaled scores within whole sequences, of all that came before or of "
            f"a window. {type(module).__name__} asks for {given}. Choose another model, or rows that are packed."
        )
    causal = bool(getattr(module, "is_causal", True)) if is_causal is None else is_causal
    if sliding_window is not None and not causal:
        raise ValueError(
            f"{type(module).__name__} has a window of {sliding_window} tokens on both sides, which the library counts "
            "otherwise in each model. Models of this project have such windows (models/bert)."
        )
    if isinstance(module, AttentionCode3D):
        mixed = attend_packed(
            module, query, key, value, causal=causal, window=sliding_window, scale=scaling, dropout=dropout
        )
    else:
        mixed = F.scaled_dot_product_attention(query, key, value, is_causal=causal, scale=scaling, enable_gqa=True)
    return mixed.transpose(1, 2).contiguous(), None


def register() -> None:
    """Tells the library of `packed_attention`; as often as one likes."""
    from transformers import AttentionInterface

    AttentionInterface.register(IMPLEMENTATION, packed_attention)


@contextmanager
def asked_of(model: nn.Module) -> Iterator[None]:
    """Inside, the model's own configs name it, and outside what they named before."""
    configs = {id(config): config for config in configs_of(model)}
    before = {each: config._attn_implementation for each, config in configs.items()}
    try:
        for config in configs.values():
            config._attn_implementation = IMPLEMENTATION
        yield
    finally:
        for each, config in configs.items():
            config._attn_implementation = before[each]


def configs_of(model: nn.Module) -> list[Any]:
    """The library's configs that the modules hold."""
    held = [getattr(module, "config", None) for module in model.modules()]
    return [config for config in held if hasattr(config, "_attn_implementation")]
