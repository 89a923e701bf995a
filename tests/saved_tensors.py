"""What autograd keeps for backward, to the byte."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from tensor3d import local
from tensor3d.distributed.collectives import CommHandle


def saved_bytes(run: Callable[[], Tensor], parameters: Iterable[nn.Parameter] = ()) -> int:
    """Bytes of all storages that autograd keeps for the backward of `run()`, each counted once and whole; without those
    of these parameters."""
    kept: dict[int, Tensor] = {}  # holds the tensors, so that no address is used twice

    def note(tensor: Tensor) -> Tensor:
        own = tensor.to_local() if isinstance(tensor, DTensor) else tensor.detach()
        kept[own.untyped_storage().data_ptr()] = own
        if isinstance(tensor, DTensor) and tensor.is_leaf:
            return tensor  # a parameter, whose `detach` DTensor would make a plan for
        return tensor.detach()  # itself, where it is a result, would tie the graph to itself for good

    with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
        result = run()
    check_nothing_is_hidden(result)
    without = {local(parameter).untyped_storage().data_ptr() for parameter in parameters}
    return sum(tensor.untyped_storage().nbytes() for place, tensor in kept.items() if place not in without)


def check_nothing_is_hidden(result: Tensor) -> None:
    """A tensor tied to a node as an attribute would stay alive, and the hooks would not see it."""
    nodes, seen = [result.grad_fn], set()
    while nodes:
        node: Any = nodes.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        nodes.extend(following for following, _ in node.next_functions)
        hidden = [name for name, value in getattr(node, "__dict__", {}).items() if is_hidden(value)]
        assert not hidden, f"{node.name()} keeps {hidden}"


def is_hidden(value: object) -> bool:
    return isinstance(value, CommHandle) or (isinstance(value, Tensor) and not isinstance(value, nn.Parameter))
