"""The floating-point operations of BERT in closed form: what a pack costs, and a whole step, for MFU.

L layers, h hidden size, e that of the embeddings, f size inside the MLP, V vocabulary; T tokens, S sum of the squared
lengths of all sequences, R masked tokens, C sequences; with windows, L' local layers and N pairs of tokens less than a
window apart

A multiplication with an addition is two operations. Products of matrices alone are counted: LayerNorm, GELU, softmax
and biases do O(h) operations a token, where products do O(h²).

Forward, as in Narayanan et al. 2021 (arXiv 2104.04473, appendix on FLOPs) with their 4 B s² h of attention over full
rows replaced by the sum over the sequences, since packed attention crosses no boundary:

    QKV, output projection    2 (3h² + h²) T    a layer; of q columns of QKV and m of all heads 2 (h q + m h) T
    MLP                       2 · 2 h f T       a layer
    with a gate               2 · 3 h f T       a layer
    q kᵀ and weights · v      2 · 2 m S         a layer; 2 · 2 m N a local one; 2 · 2 m (S + T) / 2 of a causal encoder
    distances                 2 · 2 h S         a layer of DeBERTa: queries and keys meet each their own vector of it
    masked-LM head            2 (h e + e V) R; a decoder alone 2 h V R
    projected embeddings      2 e h T           where they are narrower
    convolution               2 k h² T          where there is one, of k tokens
    pooler, next sentence     2 (h² + 2h) C     if the model has them

Where a token sees what came before it alone, n (n + 1) / 2 of the n² pairs of a sequence count. A kernel passes over
blocks of keys of which all come later, and computes more than that where blocks are long beside sequences: PyTorch's on
a CPU took 1.0 of the time of all pairs at 512 tokens, 0.77 at 1,024 and 0.65 at 2,048 (forward and backward).

A last layer that computes the read rows alone does its output projection and MLP for R + C tokens.

The backward pass of a product is two products of the same size, so a step is three times its forward pass. What is
computed again to save memory does not count: these are the FLOPs of the model, not of the hardware (Chowdhery et al.
2022, arXiv 2204.02311, appendix B). Nor do DeBERTa's keys and queries by distance, which a micro-batch makes once a
layer, however many tokens it has.
"""

from __future__ import annotations

import numpy as np

from models.bert.config import BertConfig
from tensor3d.data import TrainBatch
from tensor3d.packing.balance import Work, attended

_PASSES = 3  # forward, and twice that backward
_NEXT_SENTENCE = 2  # classes


def work(config: BertConfig) -> Work:
    """FLOPs of the whole encoder, forward and backward, by tokens and attending pairs: what packs are balanced by.

    Per token `6 L (h q + m h + 2hf)`, q = 3h columns of QKV and m = h of all heads, with gates `6 L (h q + m h + 3hf)`;
    per squared length `12 (L - L') m`, twice as many where distances count, and per pair within the window `12 L' m`.
    The heads are left out: they go with the masked tokens, which are a fixed share of the tokens.
    """
    hidden, mixed, local = config.hidden, config.mixed_size, config.local_layers
    matrices = 3 if config.has_gate else 2
    pairs = attention_flops(config, 0, 2, 0)  # of two, for half of them is seen where it is causal
    return Work(
        per_token=attention_flops(config, 1, 0, 0)
        + 2 * _PASSES * config.layers * hidden * (config.qkv_size + mixed + matrices * config.inner_size),
        per_square=pairs // 2,
        per_near=attention_flops(config, 0, 0, 1),
        window=config.window if local else None,
    )


def attention_flops(config: BertConfig, tokens: int, squares: int, near: int) -> int:
    """FLOPs of all attention, forward and backward, without its projections.

    Args:
        tokens: T, which count where a token sees what came before it alone: each sees itself.
        squares, near: S and N.
    """
    local, one = config.local_layers, _PASSES * config.mixed_size
    whole = _of_pairs(config) * one * (config.layers - local)
    seen = whole // 2 * (squares + tokens) if config.causal else whole * squares
    return seen + 4 * one * local * near


def model_flops(
    config: BertConfig,
    tokens: int,
    squares: int,
    masked: int,
    sequences: int,
    near: int | None = None,
    *,
    read_rows_only: bool = False,
) -> int:
    """FLOPs of a pre-training step with its heads, forward and backward, over all ranks and micro-batches.

    Args:
        tokens: T, in sequences; unused slots of packs are no work that anybody asked for.
        squares: S.
        masked: R, positions that the masked-LM head predicts.
        sequences: C.
        near: N, the sum of `attended(length, config.window)`; needed where there are local layers.
        read_rows_only: the last layer computes only the R + C rows that heads read. Of its attention their share is
            counted, as if they were spread evenly.

    Raises:
        ValueError: a number below 0; local layers, and no `near`.
    """
    given = {"tokens": tokens, "squares": squares, "masked": masked, "sequences": sequences, "near": near or 0}
    for name, value in given.items():
        if value < 0:
            raise ValueError(f"{name} must be at least 0. Got {value}.")
    if config.local_layers and near is None:
        raise ValueError(f"layers with window={config.window} need near: the pairs of tokens within it. Got none.")
    hidden, encoder = config.hidden, work(config)
    head = 2 * _PASSES * config.embedding_size * (hidden * (not config.traits.decoder_alone) + config.vocab)
    projection = 2 * _PASSES * (config.product_beside_layers or 0) * hidden
    pooler = 2 * _PASSES * hidden * (hidden + _NEXT_SENTENCE) if config.next_sentence else 0
    spared = _spared(config, int(tokens), int(squares), int(masked + sequences), near) if read_rows_only else 0
    # In whole numbers: a long step has more FLOPs than a double has digits.
    return (
        (int(encoder.per_token) + projection) * int(tokens)
        + int(encoder.per_square) * int(squares)
        + int(encoder.per_near) * int(near or 0)
        + head * int(masked)
        + pooler * int(sequences)
        - spared
    )


def _spared(config: BertConfig, tokens: int, squares: int, read: int, near: int | None) -> int:
    """What the last layer does not compute for the rows that nobody reads: all but QKV."""
    hidden, others = config.hidden, max(0, tokens - read)
    matrices = 3 if config.has_gate else 2
    whole = (squares + tokens) // 2 if config.causal else squares
    pairs = whole if config.window_of(config.layers - 1) is None else int(near or 0)
    products = 2 * _PASSES * hidden * (config.mixed_size + matrices * config.inner_size) * others
    return products + _of_pairs(config) * _PASSES * config.mixed_size * pairs * others // max(1, tokens)


def _of_pairs(config: BertConfig) -> int:
    """FLOPs of a layer's attention forward, for each pair of tokens and column: two products, with distances four."""
    return 4 if config.distance_buckets is None else 8


def step_flops(config: BertConfig, step: TrainBatch, *, read_rows_only: bool = False) -> int:
    """`model_flops` of a step that a loader has made."""
    near = int(attended(np.arange(len(step.lengths)), config.window) @ step.lengths)
    return model_flops(
        config, step.tokens, step.squares, step.targets, step.sequences, near, read_rows_only=read_rows_only
    )
