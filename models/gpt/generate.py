"""Text from a GPT, token by token: the same on every cube.

n tokens so far, V vocabulary
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from models.gpt.causal_batch import Text, lay
from models.gpt.model import Gpt
from tensor3d import gather, select


@dataclass(frozen=True, kw_only=True)
class Sampling:
    """How the next token is chosen.

    Raises:
        ValueError: a number out of its range.
    """

    temperature: float = 1.0
    """Divides the logits; 0: always the likeliest token."""
    top_k: int | None = None
    """Only this many of the likeliest tokens are drawn from, of equally likely ones the first. None: all."""
    seed: int = 0
    """Of the draws; without effect at temperature 0."""

    def __post_init__(self) -> None:
        if not 0 <= self.temperature < math.inf:
            raise ValueError(f"temperature must be at least 0 and finite. Got {self.temperature}.")
        if self.top_k is not None and self.top_k < 1:
            raise ValueError(f"top_k must be at least 1, or None for all tokens. Got {self.top_k}.")
        if not -(2**63) <= self.seed < 2**64:
            raise ValueError(
                f"seed must be at least -2^63 and below 2^64, as torch's generators take it. Got {self.seed}."
            )


def generate(
    model: Gpt,
    prompt: Text,
    tokens: int,
    sampling: Sampling = Sampling(),  # frozen
    *,
    end: int | None = None,
) -> Iterator[int]:
    """Continues `prompt`, and yields each new token when it is chosen. Every rank of the cube calls it alike.

    Ends after `tokens` tokens, behind the token `end` (which is not yielded), or where the model's positions are used
    up. Draws are made on each rank from the logits of the last row, which all have alike, with a generator of their
    own: torch's stays as it was. Logits of different cubes differ by rounding, so their texts differ only where a draw
    falls within that.

    Nothing is remembered between tokens: each one costs a forward pass over all n before it (there is no cache of keys
    and values), and every plane and every slice of rows computes the same. That is for looking at a model; a server
    would do otherwise.

    Raises:
        ValueError: an empty prompt, one without room for another token, ids outside of the vocabulary, or less than one
            token; before any collective starts.
        FloatingPointError: logits that are not finite, of which a token would look like any other; on every rank.
    """
    config = model.config
    if not len(prompt):
        raise ValueError("the prompt has no token. Give at least one to begin with.")
    if len(prompt) >= config.positions:
        raise ValueError(
            f"a prompt must leave room within the model's {config.positions} positions. Got {len(prompt)} tokens. "
            "Shorten it."
        )
    if min(prompt) < 0 or max(prompt) >= config.vocab:
        raise ValueError(f"tokens lie from 0 to {config.vocab - 1}. Got {min(prompt)} to {max(prompt)}.")
    if tokens < 1:
        raise ValueError(f"tokens must be at least 1. Got {tokens}.")
    return _generated(model, list(prompt), min(tokens, config.positions - len(prompt)), sampling, end)


def _generated(model: Gpt, text: list[int], tokens: int, sampling: Sampling, end: int | None) -> Iterator[int]:
    generator = torch.Generator().manual_seed(sampling.seed)
    for _ in range(tokens):
        token = choose(next_logits(model, text), sampling, generator)
        if token == end:
            return
        yield token
        text.append(token)


@torch.no_grad()
def next_logits(model: Gpt, text: Text) -> Tensor:
    """Logits (V,) of what follows `text`, in fp64 on the host of every rank; without dropout.

    Each pack of the cube holds the same text. Of the plane's rows the text's last one alone is projected.
    """
    cube, was_training = model.cube, model.training
    shape = cube.shape
    capacity = -(-len(text) // shape.y) * shape.y  # the rows of a plane divide by y
    batch = lay([[text]] * (shape.planes * shape.z), capacity, cube)
    # The fewest rows that lie evenly on both faces; -1 is a row of zeros.
    rows = torch.full((math.lcm(shape.y, shape.z),), -1, device=cube.device)
    rows[0] = len(text) - 1
    model.eval()
    try:
        last = select(model.hidden(batch.ids, batch.sequences), rows, cube)
        logits = gather(model.head(last), cube, "y")
    finally:
        model.train(was_training)
    found = logits[0].cpu().double()
    if not found.isfinite().all():
        raise FloatingPointError("the model's logits are not finite: its weights are spoilt. Take another checkpoint.")
    return found


def choose(logits: Tensor, sampling: Sampling, generator: torch.Generator) -> int:
    """A token by its logit (V,), fp64 on the host.

    Drawn by inverting the distribution, in the order of the vocabulary: a logit that differs by rounding then moves the
    bounds between tokens by as much, and seldom the token.
    """
    if sampling.temperature == 0:
        return int(logits.argmax())
    logits = (logits - logits.max()) / sampling.temperature  # none above 0, however cold it is: no inf less inf
    if sampling.top_k is not None and sampling.top_k < len(logits):
        # A sort that is stable: `topk` says nothing of which it takes among equal ones.
        logits[logits.argsort(descending=True, stable=True)[sampling.top_k :]] = -math.inf
    below = logits.softmax(0).cumsum(0)
    drawn = torch.rand((), generator=generator, dtype=torch.float64) * below[-1]
    return int(torch.searchsorted(below, drawn, right=True).clamp(max=len(logits) - 1))
