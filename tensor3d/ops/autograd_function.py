"""The base of the library's autograd functions: torch's, with less work on the host for each call.

Both shortcuts leave out what torch does for a use that these functions are not put to. A layer of a few rows takes as
long as its host needs, and a model calls dozens of functions a pass, twice.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import Any, Concatenate, ParamSpec, TypeVar

import torch
from torch.autograd.function import once_differentiable as guarded

from tensor3d.torch_private import is_there, keep_out_of_graphs, summed_by_ddp, under_transforms, within_compiled

_C = TypeVar("_C")
_P = ParamSpec("_P")
_R = TypeVar("_R")

_COMPILED = (
    "a layer of tensor3d is used within torch.compile, whose code would leave its gradients out: the cube's ledger "
    "brings them to .grad. Compile what lies between such layers, or all of that by ExecutionPolicy(compile=True); "
    "torch.compiler.disable keeps a part of a compiled model out."
)


class Function(torch.autograd.Function):
    """Torch's, whose `apply` takes two thirds of the time: it does not look through all arguments for what transforms
    of `torch.func` have left behind. Within one it raises ValueError.

    Raises ValueError for a parameter of a `DistributedDataParallel`, which hooks into what adds to `.grad` and so would
    never see the gradients that functions hand to a cube's ledger: it would sum zeros, or nothing, without a word. And
    within a model that `torch.compile` was given, whose compiled backward hands nothing to a ledger.
    """

    def __init_subclass__(cls, **options: Any) -> None:
        super().__init_subclass__(**options)
        if "backward" in cls.__dict__:  # forward may be compiled, where nothing is to learn
            keep_out_of_graphs(cls.backward, _COMPILED)

    @classmethod
    def apply(cls, *args: Any) -> Any:
        if within_compiled() and torch.is_grad_enabled() and any(map(_is_to_learn, args)):
            raise ValueError(_COMPILED)
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


def _is_to_learn(given: Any) -> bool:
    return isinstance(given, torch.Tensor) and given.requires_grad


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
        return with_graph(ctx, *args, **kwargs) if torch.is_grad_enabled() else backward(ctx, *args, **kwargs)

    return once
