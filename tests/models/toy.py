"""Small packs of very different sequences, laid on any cube, and the same sequences one by one."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor

from models.bert import BertConfig, BertForPreTraining
from tensor3d import Cube, local
from tensor3d.data import Pack, PackedBatch, collate

CAPACITY = 24
MASKED_PER_PACK = 8
MAX_SEQUENCES = 5
# One long sequence, many short ones, odd mixtures with an unused tail, and an empty pack.
LENGTHS = [[24], [4, 4, 4, 4, 5], [13, 7], [3, 21], [9, 8, 7], [23], [], [5, 5, 5, 5, 4], [17]]
Shape = tuple[int, int, int, int]
FAMILIES: dict[str, dict[str, Any]] = {
    "bert": {},
    "roberta": {"family": "roberta", "first_position": 2, "types": 1, "next_sentence": False},
    "mpnet": {"family": "mpnet", "first_position": 2, "types": 0, "next_sentence": False},
    "electra": {"family": "electra", "embedding": 24, "next_sentence": False},
    "modernbert": {
        **{"family": "modernbert", "encoder": "modern", "types": 0, "next_sentence": False, "eps": 1e-5},
        **{"layers": 3, "window": 4, "global_every": 2, "rotary_base": 160_000.0, "local_rotary_base": 10_000.0},
    },
    "gemma": {
        **{"family": "gemma3_text", "encoder": "modern", "types": 0, "next_sentence": False, "eps": 1e-6},
        **{"layers": 3, "window": 4, "global_every": 2, "rotary_base": 1_000_000.0, "local_rotary_base": 10_000.0},
        **{"activation": "gelu_tanh", "head_dim": 12, "kv_heads": 4},
    },
    "qwen": {
        **{"family": "qwen3", "encoder": "modern", "types": 0, "next_sentence": False, "eps": 1e-6},
        **{"activation": "silu", "head_dim": 12, "kv_heads": 4, "rotary_base": 1_000_000.0},
    },
    "jina": {"family": "jina_embeddings_v3", "types": 1, "next_sentence": False, "rotary_factor": 1.5},
    "nomic": {"family": "nomic_bert", "activation": "silu", "next_sentence": False},
    "gte": {"family": "gte", "types": 1, "next_sentence": False},
    "deberta-v2": {"family": "deberta-v2", "types": 0, "next_sentence": False, "position_buckets": 8, "eps": 1e-7},
}
"""Of `toy_config`: what holds for a BERT holds for each of them."""


def toy_config(vocab: int, **changes: object) -> BertConfig:
    sizes: dict[str, object] = {"layers": 2, "hidden": 64, "heads": 8, "inner": 96, "positions": CAPACITY}
    quiet = {"dropout": 0.0, "attention_dropout": 0.0, "std": 0.15}
    return BertConfig(vocab=vocab, **{**sizes, **quiet, **changes})  # type: ignore[arg-type]


def toy_packs(vocab: int, count: int, seed: int = 3) -> list[Pack]:
    """Packs with random ids, among them the last of the vocabulary, which lies on the shortest slice."""
    random = np.random.default_rng(seed)
    return [_pack(LENGTHS[i % len(LENGTHS)], vocab, random) for i in range(count)]


def _pack(lengths: list[int], vocab: int, random: np.random.Generator) -> Pack:
    total = sum(lengths)
    ids = random.integers(5, vocab, total)
    starts = np.cumsum([0, *lengths])[:-1]
    masked: list[int] = []
    for start, length in zip(starts, lengths, strict=True):
        chosen = random.choice(np.arange(start + 1, start + length), max(1, round(0.15 * length)), replace=False)
        masked += sorted(int(i) for i in chosen)
    labels = random.integers(5, vocab, len(masked))
    if masked:
        labels[0] = vocab - 1
        ids[-1] = vocab - 1
    halves = [np.arange(length) * 2 // length for length in lengths]
    return Pack(
        ids=ids.astype(np.int64),
        types=np.concatenate(halves).astype(np.int64) if halves else np.empty(0, np.int64),
        lengths=np.array(lengths, dtype=np.int64),
        masked=np.array(masked, dtype=np.int64),
        masked_labels=labels.astype(np.int64),
        next_labels=random.integers(0, 2, len(lengths)).astype(np.int64),
    )


def one_by_one(packs: list[Pack]) -> list[Pack]:
    """Each sequence in a pack of its own."""
    singles = []
    for pack in packs:
        ends = np.cumsum(pack.lengths)
        for i, end in enumerate(ends):
            start = end - pack.lengths[i]
            mine = (pack.masked >= start) & (pack.masked < end)
            singles.append(
                Pack(
                    ids=pack.ids[start:end],
                    types=pack.types[start:end],
                    lengths=pack.lengths[i : i + 1],
                    masked=pack.masked[mine] - start,
                    masked_labels=pack.masked_labels[mine],
                    next_labels=pack.next_labels[i : i + 1],
                )
            )
    return singles


def totals(packs: list[Pack]) -> tuple[int, int]:
    """Targets and sequences of the step."""
    return sum(len(pack.masked) for pack in packs), sum(len(pack.lengths) for pack in packs)


def lay(packs: list[Pack], cube: Cube, capacity: int = CAPACITY, *, with_read_rows: bool = False) -> PackedBatch:
    """This rank's part of one micro-batch of all `packs`."""
    shape = cube.shape
    count, plane = len(packs) // shape.planes, shape.plane_of(cube.rank)
    assert count * shape.planes == len(packs)
    return collate(
        packs[plane * count : (plane + 1) * count],
        capacity=capacity,
        masked_per_pack=MASKED_PER_PACK,
        max_sequences=MAX_SEQUENCES,
        shape=shape,
        rank=cube.rank,
        pad=0,
        with_read_rows=with_read_rows,
        planes_alike=True,
    )


def sums_and_gradients(cube: Cube, changes: dict[str, Any], made: dict[str, Any]) -> dict[str, Tensor]:
    """What a BERT with `changes` of its configuration, made so, gives on a cube, with vectors that hide nothing."""
    config = toy_config(67, **changes)
    cube.manual_seed(3)
    model = BertForPreTraining(config, cube, **made)
    for name, parameter in model.named_parameters():
        if parameter.dim() == 1:  # biases of 0 and gains of 1 would hide much
            torch.manual_seed(len(name))
            local(parameter).data.add_(0.3 * torch.randn(local(parameter).shape))
    step = toy_packs(config.vocab, 16)
    result = model(lay(step, cube), *totals(step))
    result.loss.backward()
    gradients = {name: local(parameter.grad) for name, parameter in model.named_parameters()}  # type: ignore[arg-type]
    return {"sums": result.sums, **gradients}
