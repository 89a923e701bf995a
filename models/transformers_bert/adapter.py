"""What transformers' BERT does with a padded batch, done with packed rows: attention, and the choice of [CLS].

All other code of the library runs as it is, on (1, rows, columns) of this rank. These two modules cannot: attention
must not cross from one sequence to the next, and there is no column 0 where all sequences begin. Their children keep
the library's names, so that a state_dict has them too.

M tokens of the cube, C [CLS] slots of the cube, H hidden size, d head dimension
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, TypeAlias

from torch import Tensor, nn

from tensor3d import Cube, Dropout3D, attention, select
from tensor3d.attention import Backend
from tensor3d.attention.backends import check_gpus
from tensor3d.data import PackedBatch
from tensor3d.parallelize import ModuleBuilder, ParallelRule, rules


class CurrentBatch:
    """The batch that a forward pass works on: the library's forward functions have no argument that would carry it."""

    def __init__(self) -> None:
        self._batch: PackedBatch | None = None

    @property
    def batch(self) -> PackedBatch:
        """Raises ValueError outside of `holding`."""
        if self._batch is None:
            raise ValueError(
                "no packed batch is held: the model was called outside of PackedBert, or recomputes a layer after it. "
                "Call PackedBert, or PackedBert.encode; enable gradient checkpointing before PackedBert is made."
            )
        return self._batch

    @contextmanager
    def holding(self, batch: PackedBatch) -> Iterator[None]:
        """Inside, `batch` is this one."""
        before, self._batch = self._batch, batch
        try:
            yield
        finally:
            self._batch = before

    def contexts(self) -> tuple[AbstractContextManager[None], AbstractContextManager[None]]:
        """For `torch.utils.checkpoint`: a layer is computed again with the batch of its first time."""
        return nullcontext(), self.holding(self.batch)


class PackedSelfAttention(nn.Module):
    """`BertSelfAttention` within packed sequences: face z to face y, where a rank holds whole packs and whole heads.

    Three products, as the library's names ask for: their input is gathered over y three times, where the fused QKV of
    `Attention3D` gathers it once.

    Args:
        query, key, value: `Linear3D` of H to H, reading face z.
        head_dim: d.
        dropout: of the attention probabilities.
    """

    def __init__(
        self,
        query: nn.Module,
        key: nn.Module,
        value: nn.Module,
        *,
        head_dim: int,
        dropout: Dropout3D,
        current: CurrentBatch,
        backend: Backend = "auto",
    ) -> None:
        super().__init__()
        if backend != "auto":
            check_gpus(backend, dropout.cube.least_capability)
        self.query, self.key, self.value, self.dropout = query, key, value, dropout
        self.head_dim, self.current, self.backend = head_dim, current, backend

    def forward(self, hidden_states: Tensor, *_: object, **__: object) -> tuple[Tensor, None]:
        """(1, M/xy, H/z) on face z to (1, M/xz, H/y) on face y, and no attention weights.

        The masks and caches that the library passes along have no meaning here: PackedBert gives it none.
        """
        q, k, v = (
            projected(hidden_states).squeeze(0).unflatten(1, (-1, self.head_dim))
            for projected in (self.query, self.key, self.value)
        )
        dropout = self.dropout.p if self.training else 0.0
        mixed = attention(q, k, v, self.current.batch.sequences, backend=self.backend, dropout=dropout)
        return mixed.flatten(1).unsqueeze(0), None

    def extra_repr(self) -> str:
        return f"head_dim={self.head_dim}, backend={self.backend}"


class PackedPooler(nn.Module):
    """`BertPooler` of packed sequences: one vector a sequence, from its [CLS], by dense and activation.

    Args:
        dense: `Linear3D` of H to H, reading face z.
    """

    def __init__(self, dense: nn.Module, activation: nn.Module, *, cube: Cube, current: CurrentBatch) -> None:
        super().__init__()
        self.dense, self.activation = dense, activation
        self.cube, self.current = cube, current

    def forward(self, hidden_states: Tensor) -> Tensor:
        """(1, M/xy, H/z) on face z to (C/xz, H/y) on face y."""
        first = select(hidden_states.squeeze(0), self.current.batch.first, self.cube)
        pooled: Tensor = self.activation(self.dense(first))
        return pooled


# --- The plan: which layer of transformers' BERT becomes which layer of the cube, and what cannot ---------------------

Build: TypeAlias = Callable[[Any, str, ModuleBuilder], nn.Module]
"""What `rules.replace` takes."""


def plan_for(model: nn.Module, current: CurrentBatch, backend: Backend = "auto") -> dict[str, ParallelRule]:
    """The plan of a `BertForPreTraining` or a `BertModel`, with or without its pooler.

    Args:
        current: holds the batch during a forward pass.
        backend: of the attention.
    """
    pretraining = hasattr(model, "cls")
    prefix = "bert." if pretraining else ""
    plan = {prefix + pattern: kind for pattern, kind in _encoder(current, backend).items()}
    if getattr(model.bert if pretraining else model, "pooler", None) is not None:
        plan[prefix + "pooler"] = rules.replace(_pooler(current))
    return plan | (_heads() if pretraining else {})


# The residual stream lies on face z, and every product changes the face: so products come in pairs, z to y and back.


def _encoder(current: CurrentBatch, backend: Backend) -> dict[str, ParallelRule]:
    return {
        "embeddings.word_embeddings": rules.embedding(),
        "embeddings.position_embeddings": rules.table(),
        "embeddings.token_type_embeddings": rules.table(),
        "embeddings.LayerNorm": rules.norm("z"),
        "encoder.layer.*.attention.self": rules.replace(_self_attention(current, backend)),  # z to y
        "encoder.layer.*.attention.output.dense": rules.linear("y"),
        "encoder.layer.*.attention.output.LayerNorm": rules.norm("z"),
        "encoder.layer.*.intermediate.dense": rules.linear("z"),
        "encoder.layer.*.output.dense": rules.linear("y"),
        "encoder.layer.*.output.LayerNorm": rules.norm("z"),
    }


def _heads() -> dict[str, ParallelRule]:
    return {
        # One product leads to face y, and the decoder, whose weight is the word embedding's, reads face z: a turn.
        "cls.predictions.transform.dense": rules.linear("z"),
        "cls.predictions.transform.LayerNorm": rules.norm("y"),
        "cls.predictions.decoder": rules.projection(turn=True),
        "cls.seq_relationship": rules.head("y"),  # reads the pooler's face
    }


# Parts of what is replaced are built by kinds too, under the names that the library gives them.


def _self_attention(current: CurrentBatch, backend: Backend) -> Build:
    def build(module: Any, name: str, workshop: ModuleBuilder) -> nn.Module:
        heads, y = module.num_attention_heads, workshop.cube.axis("y").size
        if heads % y:
            raise ValueError(f"heads must divide by y={y}. Got {heads} at {name!r}. Choose another cube.")
        linear = rules.linear("z")
        return PackedSelfAttention(
            *(linear.build(getattr(module, part), f"{name}.{part}", workshop) for part in ("query", "key", "value")),
            head_dim=module.attention_head_size,
            dropout=Dropout3D(module.dropout.p, workshop.cube),
            current=current,
            backend=backend,
        )

    return build


def _pooler(current: CurrentBatch) -> Build:
    def build(module: Any, name: str, workshop: ModuleBuilder) -> nn.Module:
        dense = rules.linear("z").build(module.dense, f"{name}.dense", workshop)
        activation = rules.keep().build(module.activation, f"{name}.activation", workshop)
        return PackedPooler(dense, activation, cube=workshop.cube, current=current)

    return build
