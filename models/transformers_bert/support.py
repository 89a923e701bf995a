"""Which of transformers' models can be put on a cube here."""

from __future__ import annotations

from typing import Any

from torch import nn

_ENCODER = "in packed rows each sequence attends to all of itself and to nothing else"
# A setting, the value that it must have, and why; the last one is of the heads for pre-training.
_SETTINGS: tuple[tuple[str, Any, str], ...] = (
    ("is_decoder", False, _ENCODER),
    ("add_cross_attention", False, _ENCODER),
    ("position_embedding_type", "absolute", "positions come from the table alone"),
    ("chunk_size_feed_forward", 0, "a rank has its share of the rows already, and works on them in one piece"),
    ("pruned_heads", {}, "all layers have the same heads, which are dealt to the ranks of y"),
    ("tie_word_embeddings", True, "the bias of the predictions is the decoder's, and would go untrained beside it"),
)


def check_supported(model: nn.Module) -> None:
    """Raises ValueError unless PackedBert can take the model: `BertForPreTraining` or `BertModel`, as an encoder.

    Refused are cross-attention, relative positions, a chunked feed-forward and pruned heads too, and all models where
    transformers is not installed.
    """
    try:
        from transformers import BertForPreTraining, BertModel
    except ImportError as missing:
        raise ValueError(
            "PackedBert puts models of the transformers library on a cube, and it is not installed. Run "
            "pip install '.[transformers]'."
        ) from missing
    if not isinstance(model, (BertForPreTraining, BertModel)):
        raise ValueError(
            f"PackedBert takes a transformers BertForPreTraining or BertModel. Got a {type(model).__name__}. For "
            "another head, give it the BertModel inside and put the head on its result. For another model, plan "
            "for tensor3d.parallel.parallelize as models/transformers_bert/plan.py does."
        )
    for setting, wanted, why in _SETTINGS if hasattr(model, "cls") else _SETTINGS[:-1]:
        found = getattr(model.config, setting, wanted)  # versions of the library differ in which of these they have
        if found != wanted:
            raise ValueError(
                f"PackedBert needs config.{setting}={wanted!r}: {why}. Got {found!r}. Make the model with "
                f"{setting}={wanted!r}."
            )
