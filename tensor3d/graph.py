"""The autograd graph behind a tensor, for finding mistakes that its values do not show."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from torch import Tensor

_FARTHEST = 2000  # nodes looked at; two layers are seldom ten apart
# What a sum may pass through on its way to other ranks without being divided.
_CARRIERS = ("Add", "Cat", "Clone", "Reshape", "Squeeze", "Stack", "ToCopy", "Unsqueeze", "View")
_MEAN = 1  # torch's number for reduction="mean"


def walk(tensor: Tensor, goes_on: Callable[[Any], bool]) -> Iterator[Any]:
    """Nodes of the graph from `tensor` back, each once; behind a node only if `goes_on` says so."""
    waiting, seen = [tensor.grad_fn], {tensor.grad_fn}
    while waiting and len(seen) < _FARTHEST:
        node = waiting.pop()
        if node is None:
            continue
        yield node
        if goes_on(node):
            new = [before for before, _ in node.next_functions if before not in seen]
            seen.update(new)
            waiting.extend(new)


def check_summed(part: Tensor) -> None:
    """Raises ValueError where what is about to be summed over ranks is a mean over the rows of each."""
    if any(_is_mean(node) for node in walk(part, _carries)):
        raise ValueError(
            "a mean over the rows of this rank was passed to a sum over ranks: its gradient would be too large by the "
            "number of ranks, and wrong where their numbers of rows differ. Divide the sum by the number of the whole "
            "step: sum_copies(losses.sum() / count, ...)."
        )


def _carries(node: Any) -> bool:
    return str(node.name()).startswith(_CARRIERS)


def _is_mean(node: Any) -> bool:
    return node.name() == "MeanBackward0" or getattr(node, "_saved_reduction", None) == _MEAN
