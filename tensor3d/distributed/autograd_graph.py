"""The autograd graph behind a tensor: which gradients a pass is asked for, and mistakes that values do not show."""

from __future__ import annotations

import math
import re
from collections import deque
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn

from tensor3d.torch_private import averaged_sizes, saved_reduction, will_execute

_FARTHEST = 2000  # nodes looked at; two layers are seldom ten apart
# What a sum may pass through on its way to other ranks without being divided, or multiplied: who scales it, knows.
_CARRIERS = ("Add", "Cat", "Clone", "ReshapeAlias", "Squeeze", "Stack", "ToCopy", "UnsafeView", "Unsqueeze", "View")
_CARRYING = re.compile(rf"({'|'.join(_CARRIERS)})Backward\d*")
_MEAN = 1  # torch's number for reduction="mean"


def walk(tensor: Tensor, goes_on: Callable[[Any], bool]) -> Iterator[tuple[Any, int]]:
    """Nodes of the graph from `tensor` back, with the number of the result by which each was reached; nearest first,
    each once, and behind a node only if `goes_on` says so."""
    first = (tensor.grad_fn, tensor.output_nr)
    waiting, seen = deque([first]), {first}
    while waiting and len(seen) < _FARTHEST:
        node, number = waiting.popleft()
        if node is None:
            continue
        yield node, number
        if goes_on(node):
            new = [each for each in node.next_functions if each not in seen]
            seen.update(new)
            waiting.extend(new)


def check_summed(part: Tensor) -> None:
    """Raises ValueError where what is about to be summed over ranks is a mean over the rows of each."""
    if any(_is_mean(node) for node, _ in walk(part, lambda node: _CARRYING.fullmatch(node.name()) is not None)):
        raise ValueError(
            "a mean over the rows of this rank was passed to a sum over ranks: its gradient would be too large by the "
            "number of ranks, and wrong where their numbers of rows differ. Divide the sum by the number of the whole "
            "step: all_reduce_replicated(losses.sum() / count, ...)."
        )


def _is_mean(node: Any) -> bool:
    if node.name() == "MeanBackward0":
        return math.prod(averaged_sizes(node)) > 1
    return saved_reduction(node) == _MEAN


def asked_for(ctx: Any, *parameters: nn.Parameter | None) -> list[bool]:
    """For each parameter used by a function, whether the backward pass that runs now is to compute its gradient.

    `ctx.needs_input_grad` says what the forward pass knew. `backward(inputs=...)` and `torch.autograd.grad` ask for
    some gradients alone, and the `.grad` of a parameter that they do not name must stay as it is; as must that of one
    that was frozen since (torch's own node adds nothing to it then either), whose hooks are not called.

    Args:
        ctx: of the function, with its `cube`.

    Raises:
        ValueError: `torch.autograd.grad` asks for a parameter's gradient, which is not there before the pass has ended;
            or `create_graph=True` asks for one that can be differentiated.
    """
    asked: dict[int, bool] = {}
    wanted = {id(each): each for each in parameters if each is not None}
    for node, _ in reversed(ctx.next_functions):  # parameters come last most often
        if len(asked) == len(wanted):
            break
        each = wanted.get(id(node.variable)) if hasattr(node, "variable") else None
        if each is None or id(each) in asked:
            continue
        is_executed = _is_executed(node)
        asked[id(each)] = is_executed and each.requires_grad
        if is_executed and not each.requires_grad:
            ctx.cube.ledger.pass_by(each)
    if getattr(ctx, "makes_graph", False) and any(asked.values()):
        raise ValueError(
            "backward(create_graph=True) asks for gradients that can be differentiated again, and those of parameters "
            "on a cube are sums over ranks, of which there is no graph: what is computed from them would count as "
            "constant. Leave create_graph=True out."
        )
    return [asked.get(id(each), False) for each in parameters]


def _is_executed(accumulation: torch.autograd.graph.Node) -> bool:
    try:
        return will_execute(accumulation)
    except RuntimeError:  # torch's way to say that autograd.grad wants this very gradient
        raise ValueError(
            "torch.autograd.grad cannot return the gradient of a parameter on a cube, which is complete only at the "
            "end of the pass. Call backward (with inputs=[...] for some parameters alone) and read `.grad`."
        ) from None
