"""Parameters of every layout, with gradients that any cube and one device get alike."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from tensor3d import Cube, distribute, local
from tensor3d.optim import AdamW, Lamb, StableAdamW, decay_groups
from tensor3d.sharding.param_layout import Layout, copies, matrix, narrow, table, vector
from tests.single_device_reference import fused

KINDS: dict[str, type[Any]] = {"adamw": AdamW, "lamb": Lamb, "stable_adamw": StableAdamW}
BETAS, EPS = (0.8, 0.95), 1e-6

# Rows that divide by nothing: of the last three some ranks of every cube with y = 4 or x = 8 hold an empty block.
LAYOUTS: dict[str, tuple[Layout, tuple[int, ...]]] = {
    "up": (matrix("z"), (12, 8)),
    "down": (matrix("y"), (8, 12)),
    "vocabulary": (matrix("z"), (13, 8)),
    "zero": (matrix("z"), (5, 8)),
    "still": (matrix("y"), (5, 8)),
    "positions": (table("z"), (3, 8)),
    "head": (narrow("y"), (3, 8)),
    "bias": (vector("y"), (5,)),
    "gain": (vector("z"), (8,)),
    "head_bias": (copies("y"), (3,)),
}


class Zoo(nn.Module):
    """One parameter of each layout."""

    up: nn.Parameter
    down: nn.Parameter
    gain: nn.Parameter

    def __init__(self, cube: Cube) -> None:
        super().__init__()
        for name, (layout, _) in LAYOUTS.items():
            self.register_parameter(name, distribute(first_values()[name], layout, cube))


def first_values() -> dict[str, Tensor]:
    """Full tensors. "zero" begins at 0 (no norm of the weight), "still" also gets no gradient (no norm of either)."""
    values = _drawn(0)
    for name in ("zero", "still"):
        values[name].zero_()
    values["up"][0, 0] = -0.0
    return values


def gradients_of(step: int) -> dict[str, Tensor]:
    """Full tensors, of very different sizes from tensor to tensor."""
    values = _drawn(step + 1)
    for number, value in enumerate(values.values()):
        value.mul_(10.0 ** (number % 5 - 3))
    values["still"].zero_()
    return values


def give(zoo: nn.Module, cube: Cube, gradients: dict[str, Tensor]) -> None:
    """Each rank its blocks."""
    for name, parameter in zoo.named_parameters():
        # DTensor's `detach` of each shape would be planned anew on each cube.
        parameter.grad = distribute(gradients[name], LAYOUTS[name][0], cube).requires_grad_(False)


def spoiled(step: int) -> dict[str, Tensor]:
    """Gradients with a nan in every element of one tensor and an inf in every one of the others."""
    return {
        name: torch.full_like(value, math.nan if name == "up" else math.inf)
        for name, value in gradients_of(step).items()
    }


def make(
    kind: str, shape: tuple[int, int, int, int], weight_decay: float = 0.1, regions: bool = False, **options: Any
) -> tuple[Cube, Zoo, AdamW | Lamb | StableAdamW]:
    """
    Args:
        regions: the steps that a compiling cube has, as they are written.
    """
    cube = fused(Cube(*shape)) if regions else Cube(*shape)
    zoo = Zoo(cube)
    groups = decay_groups(zoo, weight_decay)
    return cube, zoo, KINDS[kind](groups, cube, lr=rate(0), betas=BETAS, eps=EPS, **options)


def rate(step: int) -> float:
    return 0.02 / (step + 1)


def run(optimizer: AdamW | Lamb | StableAdamW, zoo: Zoo, cube: Cube, steps: range) -> None:
    for step in steps:
        give(zoo, cube, gradients_of(step))
        for group in optimizer.param_groups:
            group["lr"] = rate(step)
        optimizer.step()


def _drawn(seed: int) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return {name: torch.randn(size, generator=generator) for name, (_, size) in LAYOUTS.items()}


Optimizer = AdamW | Lamb | StableAdamW


def bits(zoo: Zoo, optimizer: Optimizer) -> list[Tensor]:
    """This rank's blocks of all weights and states, as whole numbers: 0.0 is not -0.0 here."""
    states = [optimizer.state[p][key] for p in zoo.parameters() for key in ("exp_avg", "exp_avg_sq", "step")]
    views = {4: torch.int32, 8: torch.int64}
    return [local(t).detach().view(views[t.element_size()]).clone() for t in [*zoo.parameters(), *states]]


def same(first: list[Tensor], second: list[Tensor]) -> bool:
    return all(torch.equal(a, b) for a, b in zip(first, second, strict=True))


class NoWaiting(TorchDispatchMode):
    """Refuses what reads a number of the device on the host, and what sends one there."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.overloadpacket.__name__
        assert name not in ("_local_scalar_dense", "is_nonzero", "equal", "nonzero", "_to_copy", "lift_fresh"), name
        return func(*args, **(kwargs or {}))
