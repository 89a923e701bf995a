"""The gradient of a function of ours is right once, and refuses to be differentiated again; transforms are torch's."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from tensor3d.ops.autograd_function import Function, once_differentiable


class _Cube(Function):
    """x^3, whose backward pass says whether it would make a graph."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, graphs: list[bool]) -> Tensor:
        ctx.save_for_backward(x)
        ctx.graphs = graphs
        return x**3

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        ctx.graphs.append(torch.is_grad_enabled())
        (x,) = ctx.saved_tensors
        return 3 * x**2 * gradient, None


@pytest.mark.parametrize("create_graph", [False, True])
def test_a_backward_pass_makes_no_graph_and_is_not_differentiated(create_graph: bool) -> None:
    x, graphs = torch.tensor(2.0, requires_grad=True), list[bool]()
    above = torch.tensor(1.0, requires_grad=True)
    (first,) = torch.autograd.grad(_Cube.apply(x, graphs), x, above, create_graph=create_graph)
    assert first.item() == 12
    assert graphs == [False]
    assert first.requires_grad is create_graph
    if create_graph:
        with pytest.raises(RuntimeError, match="differentiate twice"):
            first.backward()


def test_within_a_transform_it_refuses() -> None:
    with pytest.raises(ValueError, match=r"within a transform of torch\.func"):
        torch.func.grad(lambda x: _Cube.apply(x, []))(torch.tensor(2.0))
