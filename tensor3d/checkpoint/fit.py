"""Whether a checkpoint and a training belong together, told in the words of the model before anything is read."""

from __future__ import annotations

from collections.abc import Collection, Mapping

import torch
from torch import Tensor

from tensor3d.checkpoint.contents import Contents
from tensor3d.checkpoint.state import EXTRA, MODEL, OPTIMIZER, RANDOM

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
    contents: Contents,
    state: Mapping[str, Tensor],
    kinds: tuple[str, ...],
    grows: Collection[str] = (),
    *,
    any_type: bool = False,
    partial: bool = False,
) -> list[str]:
    """The names of tensors that have grown.

    Args:
        state: what is to be filled, of these kinds of tensors.
        kinds: the beginnings of their names.
        grows: names of parameters that may.
        any_type: types may differ.
        partial: there may be more tensors of the model than are to be filled.

    Raises:
        ValueError: names, shapes or types that differ.
    """
    stored = {name for name in contents.tensors if name.startswith(kinds)}
    if missing := sorted(state.keys() - stored):
        raise ValueError(f"{contents.folder} has no {_listed(missing)}, which is asked for. {_ANOTHER}")
    optional = (EXTRA, RANDOM, MODEL) if partial else (EXTRA, RANDOM)  # there may be more than are asked for
    if left := sorted(name for name in stored - state.keys() if not name.startswith(optional)):
        raise ValueError(f"{contents.folder} has {_listed(left)}, for which there is no place here. {_ANOTHER}")
    return [name for name, tensor in state.items() if _grown(contents, name, tensor, grows, any_type=any_type)]


def _grown(contents: Contents, name: str, tensor: Tensor, grows: Collection[str], *, any_type: bool) -> bool:
    """Whether a tensor has more rows than are stored of it. Raises ValueError where it differs in another way."""
    before, now = contents.tensors[name], tuple(tensor.shape)
    may_grow = _parameter(name) in grows and len(now) > 0
    grown = may_grow and now[1:] == before.shape[1:] and now[0] > before.shape[0]
    if now != before.shape and not grown:
        remedy = "It was written with another PyTorch: use that one." if name.startswith(RANDOM) else _ANOTHER
        raise ValueError(
            f"{contents.folder} has {name} of shape {before.shape}, and the shape {now} is needed. {remedy}"
        )
    if tensor.dtype != before.dtype and not any_type:
        raise ValueError(
            f"{contents.folder} has {name} of {before.dtype}, and {tensor.dtype} is needed. Resume with the type "
            "that it was trained in."
        )
    return grown


def chosen(tensors: Mapping[str, Tensor], only: Collection[str] | None) -> dict[str, Tensor]:
    """Of a model's tensors, those that are to be filled. Raises ValueError for a name that is none of the model's."""
    if only is None:
        return dict(tensors)
    if unknown := sorted(name for name in only if MODEL + name not in tensors):
        raise ValueError(f"only names {unknown[0]!r}, which is nothing of the model. Name it as the model does.")
    return {MODEL + name: tensors[MODEL + name] for name in only}


def check_grows(state: Mapping[str, Tensor], grows: Collection[str]) -> None:
    """Raises ValueError for a name that is no parameter of the model."""
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
