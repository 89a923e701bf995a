"""A small model with one weight used three times, and the same in plain torch, which knows no cube and no ledger."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from tensor3d import (
    Cube,
    Embedding3D,
    LayerNorm3D,
    Linear3D,
    Projection3D,
    SmallHead3D,
    all_reduce_replicated,
    cross_entropy,
    local,
    redistribute,
)
from tests.single_device_reference import error, full, make_twins

Shape = tuple[int, int, int, int]
VOCAB, HIDDEN = 13, 8


class Fail(torch.autograd.Function):
    """The identity, whose backward breaks off on every rank."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        raise ArithmeticError("on purpose")


class Tied(nn.Module):
    """One weight used three times and one bias twice; vectors on both faces; a narrow head."""

    def __init__(self, cube: Cube) -> None:
        super().__init__()
        self.cube = cube
        self.tokens = Embedding3D(VOCAB, HIDDEN, cube, std=0.5)
        self.on_z = LayerNorm3D(HIDDEN, cube, "z")
        self.dense = Linear3D(HIDDEN, HIDDEN, cube, std=0.5)
        self.on_y = LayerNorm3D(HIDDEN, cube, "y")
        self.projection = Projection3D(HIDDEN, VOCAB, cube, bias=True, holds_weight=False)
        self.head = SmallHead3D(HIDDEN, 3, cube, "y", std=0.5)

    def forward(self, number: int, fail: bool = False, head: bool = True) -> Tensor:
        """The loss of micro-batch `number` of the whole job, the same on every rank."""
        cube, weight = self.cube, self.tokens.weight
        plane = cube.shape.plane_of(cube.rank)
        ids, labels = (t.chunk(cube.shape.planes)[plane] for t in micro_batch(number))
        own = labels.chunk(cube.shape.z)[cube.coordinate["z"]]
        x = self.on_z(self.tokens(ids))
        # The failure lies between: what is above has handed in its gradients when it strikes.
        hidden = self.on_y(self.dense(Fail.apply(x) if fail else x))
        first, _ = cross_entropy(self.projection(redistribute(hidden, cube, "z"), weight), own, VOCAB, cube)
        second, _ = cross_entropy(self.projection(x * x, weight), own, VOCAB, cube)
        loss = first.sum() + 0.5 * second.sum()
        if head:
            loss = loss + F.cross_entropy(self.head(hidden), own % 3, reduction="sum")
        return all_reduce_replicated(loss, cube.over("data", "x", "z"))


def micro_batch(number: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(number)
    ids, labels = torch.randint(0, VOCAB, (2, 16), generator=generator)
    return ids, labels


def truth(weights: dict[str, Tensor], *numbers: int, head: bool = True) -> dict[str, Tensor]:
    """The sum of the micro-batches' gradients."""
    w = {name: weight.detach().clone().requires_grad_() for name, weight in weights.items()}
    for number in numbers:
        ids, labels = micro_batch(number)
        tokens, bias = w["tokens.weight"], w["projection.bias"]
        x = F.layer_norm(F.embedding(ids, tokens), (HIDDEN,), w["on_z.weight"], w["on_z.bias"], 1e-12)
        dense = F.linear(x, w["dense.weight"], w["dense.bias"])
        hidden = F.layer_norm(dense, (HIDDEN,), w["on_y.weight"], w["on_y.bias"], 1e-12)
        loss = F.cross_entropy(F.linear(hidden, tokens, bias), labels, reduction="sum")
        loss = loss + 0.5 * F.cross_entropy(F.linear(x * x, tokens, bias), labels, reduction="sum")
        logits = F.linear(hidden, w["head.weight"], w["head.bias"])
        (loss + F.cross_entropy(logits, labels % 3, reduction="sum") * head).backward()
    return {name: weight.grad for name, weight in w.items() if weight.grad is not None}


class Trial:
    """A model on the cube, with the same numbers on one device beside it."""

    def __init__(self, shape: Shape) -> None:
        torch.set_default_dtype(torch.float64)
        self.cube, self.model, _, twin = make_twins(Tied, shape)
        self.weights = {name: parameter.detach() for name, parameter in twin.named_parameters()}

    def error(self, *numbers: int, times: float = 1.0, model: nn.Module | None = None) -> float:
        """The distance of all gradients from the truth. Clears them."""
        module = model or self.model
        wanted = truth(self.weights, *numbers)
        worst = max(error(full(p.grad), times * wanted[name], name) for name, p in module.named_parameters())
        module.zero_grad()
        return worst

    def snapshot(self) -> list[Tensor]:
        """This rank's blocks of all gradients. Clears them."""
        held = [local(p.grad).clone() for p in self.model.parameters() if p.grad is not None]
        self.model.zero_grad()
        return held

    def fail(self, number: int) -> None:
        with pytest.raises(ArithmeticError, match="on purpose"):
            self.model(number, fail=True).backward()
