"""The plan: which layer of transformers' BERT becomes which layer of the cube, and what cannot."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeAlias

from torch import nn

from models.transformers_bert.adapter import CurrentBatch, PackedPooler, PackedSelfAttention
from tensor3d import Dropout3D
from tensor3d.attention import Backend
from tensor3d.parallel import Kind, Workshop, kinds

Build: TypeAlias = Callable[[Any, str, Workshop], nn.Module]
"""What `kinds.replace` takes."""


def plan_for(model: nn.Module, current: CurrentBatch, backend: Backend = "auto") -> dict[str, Kind]:
    """The plan of a `BertForPreTraining` or a `BertModel`, with or without its pooler.

    Args:
        current: holds the batch during a forward pass.
        backend: of the attention.
    """
    pretraining = hasattr(model, "cls")
    prefix = "bert." if pretraining else ""
    plan = {prefix + pattern: kind for pattern, kind in _encoder(current, backend).items()}
    if getattr(model.bert if pretraining else model, "pooler", None) is not None:
        plan[prefix + "pooler"] = kinds.replace(_pooler(current))
    return plan | (_heads() if pretraining else {})


# The residual stream lies on face z, and every product changes the face: so products come in pairs, z to y and back.


def _encoder(current: CurrentBatch, backend: Backend) -> dict[str, Kind]:
    return {
        "embeddings.word_embeddings": kinds.embedding(),
        "embeddings.position_embeddings": kinds.table(),
        "embeddings.token_type_embeddings": kinds.table(),
        "embeddings.LayerNorm": kinds.norm("z"),
        "encoder.layer.*.attention.self": kinds.replace(_self_attention(current, backend)),  # z to y
        "encoder.layer.*.attention.output.dense": kinds.linear("y"),
        "encoder.layer.*.attention.output.LayerNorm": kinds.norm("z"),
        "encoder.layer.*.intermediate.dense": kinds.linear("z"),
        "encoder.layer.*.output.dense": kinds.linear("y"),
        "encoder.layer.*.output.LayerNorm": kinds.norm("z"),
    }


def _heads() -> dict[str, Kind]:
    return {
        # One product leads to face y, and the decoder, whose weight is the word embedding's, reads face z: a turn.
        "cls.predictions.transform.dense": kinds.linear("z"),
        "cls.predictions.transform.LayerNorm": kinds.norm("y"),
        "cls.predictions.decoder": kinds.projection(turn=True),
        "cls.seq_relationship": kinds.head("y"),  # reads the pooler's face
    }


# Parts of what is replaced are built by kinds too, under the names that the library gives them.


def _self_attention(current: CurrentBatch, backend: Backend) -> Build:
    def build(module: Any, name: str, workshop: Workshop) -> nn.Module:
        heads, y = module.num_attention_heads, workshop.cube.axis("y").size
        if heads % y:
            raise ValueError(f"heads must divide by y={y}. Got {heads} at {name!r}. Choose another cube.")
        linear = kinds.linear("z")
        return PackedSelfAttention(
            *(linear.build(getattr(module, part), f"{name}.{part}", workshop) for part in ("query", "key", "value")),
            head_dim=module.attention_head_size,
            dropout=Dropout3D(module.dropout.p, workshop.cube),
            current=current,
            backend=backend,
        )

    return build


def _pooler(current: CurrentBatch) -> Build:
    def build(module: Any, name: str, workshop: Workshop) -> nn.Module:
        dense = kinds.linear("z").build(module.dense, f"{name}.dense", workshop)
        activation = kinds.keep().build(module.activation, f"{name}.activation", workshop)
        return PackedPooler(dense, activation, cube=workshop.cube, current=current)

    return build
