"""Whether a checkpoint and a training belong together, told in the words of the model before anything is read."""

from __future__ import annotations

from collections.abc import Collection, Mapping

import torch
from torch import Tensor

from tensor3d.checkpoint.contents import Contents
from tensor3d.checkpoint.state import EXTRA, MODEL, OPTIMIZER

_ANOTHER = "It belongs to another model: resume with the recipe of its run."


def check_optimizer(contents: Contents, optimizer: torch.optim.Optimizer) -> None:
    """Raises ValueError unless the optimiser is of the kind that was saved: its memory is of no use to another."""
    before, now = contents.progress.get("optimizer"), type(optimizer).__name__
    if before != now:
        raise ValueError(
            f"{contents.folder} was written with the optimiser {before}, and this one is {now}. Resume with {before}, "
            "or load the weights alone."
        )


def check_fits(
    contents: Contents, state: Mapping[str, Tensor], grows: Collection[str], *, weights_alone: bool
) -> list[str]:
    """The names of tensors that have grown.

    Args:
        state: what is to be filled, without random streams.
        grows: names of parameters that may.
        weights_alone: types may differ, and what is stored of an optimiser is left out.

    Raises:
        ValueError: names, shapes or types that differ.
    """
    kinds = (MODEL,) if weights_alone else (MODEL, OPTIMIZER)
    stored = {name for name in contents.tensors if name.startswith((*kinds, EXTRA))}
    _check_grows(state, grows)
    if missing := sorted(state.keys() - stored):
        raise ValueError(f"{contents.folder} has no {_listed(missing)}, which is asked for. {_ANOTHER}")
    if left := sorted(name for name in stored - state.keys() if not name.startswith(EXTRA)):
        raise ValueError(f"{contents.folder} has {_listed(left)}, for which there is no place here. {_ANOTHER}")
    grown = []
    for name, tensor in state.items():
        before = contents.tensors[name]
        now = tuple(tensor.shape)
        may_grow = _parameter(name) in grows and len(now) > 0
        if may_grow and now[1:] == before.shape[1:] and now[0] > before.shape[0]:
            grown.append(name)
        elif now != before.shape:
            raise ValueError(
                f"{contents.folder} has {name} of shape {before.shape}, and the shape {now} is needed. {_ANOTHER}"
            )
        if tensor.dtype != before.dtype and not weights_alone:
            raise ValueError(
                f"{contents.folder} has {name} of {before.dtype}, and {tensor.dtype} is needed. Resume with the type "
                "that it was trained in."
            )
    return grown


def _check_grows(state: Mapping[str, Tensor], grows: Collection[str]) -> None:
    unknown = sorted(name for name in grows if MODEL + name not in state)
    if unknown:
        raise ValueError(f"grows names {unknown[0]!r}, which is no parameter of the model. Name it as the model does.")


def _parameter(name: str) -> str:
    """The parameter that a stored tensor belongs to."""
    if name.startswith(OPTIMIZER):
        return name.removeprefix(OPTIMIZER).rpartition(".")[0]
    return name.removeprefix(MODEL)


def _listed(names: Collection[str]) -> str:
    first, *more = names
    return f"{first} (and {len(more)} more)" if more else first
