"""The base of the library's autograd functions: torch's, with less work on the host for each call. And what
`torch.compile` makes of them: nothing.

Both shortcuts leave out what torch does for a use that these functions are not put to. A layer of a few rows takes as
long as its host needs, and a model calls dozens of functions a pass, twice.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import Any, Concatenate, ParamSpec, TypeVar

import torch
from torch.autograd.function import once_differentiable as guarded

from tensor3d.torch_private import is_there, keep_out_of_graphs, summed_by_ddp, under_transforms

_C = TypeVar("_C")
_P = ParamSpec("_P")
_R = TypeVar("_R")
_F = TypeVar("_F", bound=Callable[..., Any])

_NOT_TRACED = (
    "layers and functions of tensor3d are no part of compiled code: collectives are under way while others work, and "
    "the cube's ledger brings gradients to .grad. torch.compile compiles what lies between them; leave fullgraph=True "
    "off. ExecutionPolicy(compile=True) compiles what lies inside"
)


def out_of_graphs(function: _F) -> _F:
    """Decorates what works on a cube: within a model that `torch.compile` was given it runs as it always does.

    For whatever a user's forward may call, and free of cost where nothing is compiled: the function itself is marked.
    What it calls need not be.
    """
    keep_out_of_graphs(function, _NOT_TRACED)
    return function


class Function(torch.autograd.Function):
    """Torch's, whose `apply` takes two thirds of the time: it does not look through all arguments for what transforms
    of `torch.func` have left behind. Within one it raises ValueError.

    Raises ValueError for a parameter of a `DistributedDataParallel`, which hooks into what adds to `.grad` and so would
    never see the gradients that functions hand to a cube's ledger: it would sum zeros, or nothing, without a word.
    """

    def __init_subclass__(cls, **options: Any) -> None:
        super().__init_subclass__(**options)
        if "backward" in cls.__dict__:  # which torch.compile would trace beside a forward, and lose what is handed in
            out_of_graphs(cls.backward)

    @classmethod
    @out_of_graphs
    def apply(cls, *args: Any) -> Any:
        unseen = summed_by_ddp(args)
        if unseen is not None and torch.is_grad_enabled():
            raise ValueError(
                f"a parameter of shape {tuple(unseen.shape)} is used by a layer of tensor3d within "
                "DistributedDataParallel, which would not see its gradient: the cube's ledger brings that to .grad. "
                "Leave DistributedDataParallel out, and make the cube of all processes: Cube(..., data=N) sums over N "
                "copies."
            )
        if not is_there(under_transforms):
            return super().apply(*args)
        if under_transforms():
            raise ValueError(
                "a layer of tensor3d is used within a transform of torch.func (grad, vmap, jvp and the like), which "
                "cannot follow its collectives: each rank holds a part. Take gradients by backward() of a loss."
            )
        behind: Any = super(torch.autograd.Function, cls)
        return behind.apply(*args)


def once_differentiable(
    backward: Callable[Concatenate[_C, _P], _R],
) -> Callable[Concatenate[_C, _P], _R]:
    """Torch's decorator of that name: who differentiates the result a second time gets an error, and no wrong numbers.

    Torch's enters `no_grad` in every backward pass, which takes as long as a small operator. There is nothing to keep
    from a graph where the pass makes none, as it does unless it was asked for one (`create_graph=True`).
    """
    with_graph = guarded(backward)

    @wraps(backward)
    def once(ctx: _C, /, *args: _P.args, **kwargs: _P.kwargs) -> _R:
        if not torch.is_grad_enabled():
            return backward(ctx, *args, **kwargs)
        state: Any = ctx
        state.makes_graph = True  # for who is to hand in a parameter's gradient, which will have none
        try:
            return with_graph(ctx, *args, **kwargs)
        finally:
            del state.makes_graph

    return once
