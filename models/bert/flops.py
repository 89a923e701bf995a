"""The floating-point operations of BERT in closed form: what a pack costs, and a whole step, for MFU.

L layers, h hidden size, f size inside the MLP, V vocabulary; T tokens, S sum of the squared lengths of all sequences,
R masked tokens, C sequences

A multiplication with an addition is two operations. Products of matrices alone are counted: LayerNorm, GELU, softmax
and biases do O(h) operations a token, where products do O(h²).

Forward, as in Narayanan et al. 2021 (arXiv 2104.04473, appendix on FLOPs) with their 4 B s² h of attention over full
rows replaced by the sum over the sequences, since packed attention crosses no boundary:

    QKV, output projection    2 (3h² + h²) T    a layer
    MLP                       2 · 2 h f T       a layer
    q kᵀ and weights · v      2 · 2 h S         a layer
    masked-LM head            2 (h² + h V) R
    pooler, next sentence     2 (h² + 2h) C

The backward pass of a product is two products of the same size, so a step is three times its forward pass. What is
computed again to save memory does not count: these are the FLOPs of the model, not of the hardware (Chowdhery et al.
2022, arXiv 2204.02311, appendix B).
"""

from __future__ import annotations

from models.bert.config import BertConfig
from tensor3d.packing.balance import Work

_PASSES = 3  # forward, and twice that backward
_NEXT_SENTENCE = 2  # classes


def work(config: BertConfig) -> Work:
    """FLOPs of the whole encoder, forward and backward, by tokens and by squared lengths: what packs are balanced by.

    Per token `6 L (4h² + 2hf)`, per squared length `12 L h`. The heads are left out: they go with the masked tokens,
    which are a fixed share of the tokens.
    """
    hidden = config.hidden
    return Work(
        per_token=2 * _PASSES * config.layers * (4 * hidden**2 + 2 * hidden * config.inner_size),
        per_square=4 * _PASSES * config.layers * hidden,
    )


def model_flops(config: BertConfig, tokens: int, squares: int, masked: int, sequences: int) -> int:
    """FLOPs of a pre-training step with its heads, forward and backward, over all ranks and micro-batches.

    Args:
        tokens: T, in sequences; unused slots of packs are no work that anybody asked for.
        squares: S.
        masked: R, positions that the masked-LM head predicts.
        sequences: C.

    Raises:
        ValueError: a number below 0.
    """
    for name, value in (("tokens", tokens), ("squares", squares), ("masked", masked), ("sequences", sequences)):
        if value < 0:
            raise ValueError(f"{name} must be at least 0. Got {value}.")
    hidden, encoder = config.hidden, work(config)
    head = 2 * _PASSES * hidden * (hidden + config.vocab)
    pooler = 2 * _PASSES * hidden * (hidden + _NEXT_SENTENCE)
    # In whole numbers: a long step has more FLOPs than a double has digits.
    return (
        int(encoder.per_token) * int(tokens)
        + int(encoder.per_square) * int(squares)
        + head * int(masked)
        + pooler * int(sequences)
    )
