"""What autograd keeps for the backward passes of a model while it trains, counted."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from models.bert.saved import Load
from tensor3d import local
from tensor3d.data import PackedBatch


@dataclass(frozen=True, kw_only=True)
class KeptPass:
    """One forward pass."""

    kept: int
    """Bytes of all storages that its backward will need, each counted once and whole, without those of parameters."""
    batch: PackedBatch
    """What went in first."""


@contextmanager
def counting_kept(model: nn.Module) -> Iterator[list[KeptPass]]:
    """Inside, every forward pass of `model` adds its count to the list.

    What is made of the model's output, such as the product with a loss scale, is not in it.
    """
    passes: list[KeptPass] = []
    weights = {local(parameter).untyped_storage().data_ptr() for parameter in model.parameters()}
    kept: dict[int, Tensor] = {}  # holds the tensors, so that no address is used twice

    def note(tensor: Tensor) -> Tensor:
        with torch.no_grad():
            own = local(tensor).detach()
        kept[own.untyped_storage().data_ptr()] = own
        return tensor

    hooks = torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor)

    def begin(module: nn.Module, args: Any) -> None:
        hooks.__enter__()

    def end(module: nn.Module, args: Any, output: Any) -> None:
        hooks.__exit__()
        if output is None:  # it failed
            kept.clear()
            return
        total = sum(tensor.untyped_storage().nbytes() for place, tensor in kept.items() if place not in weights)
        kept.clear()
        passes.append(KeptPass(kept=total, batch=args[0]))

    # Always: an exception would leave the hooks of autograd behind.
    handles = [model.register_forward_pre_hook(begin), model.register_forward_hook(end, always_call=True)]
    try:
        yield passes
    finally:
        for handle in handles:
            handle.remove()


def load_of(batch: PackedBatch) -> Load:
    """What a micro-batch gives this rank, with the lengths that its sequences really have."""
    rows, masked, first = (tensor.shape[0] for tensor in (batch.ids, batch.masked, batch.first))
    return Load(rows=rows, masked=masked, first=first, lengths=batch.sequences.lengths)
