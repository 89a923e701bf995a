"""The regions of `bench compile`, each alone, forward and backward: as a layer calls them, eager and compiled.

M tokens, R masked ones, H hidden size, I inner size, V vocabulary
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from tensor3d import Cube, LayerNorm3D, constant, cross_entropy
from tensor3d.activation import activated
from tensor3d.dropping import drop
from tensor3d.layers.fused_block import add_bias_and_activate, add_dropped
from tensor3d.layout import local, vector
from tools.bench.compile_trial import COMPUTE, SIDES, Case, Type, cube_of, lock_bars_here, now
from tools.bench.rivals_work import Work


@dataclass(frozen=True, kw_only=True)
class RegionFacts:
    """A region on one side."""

    elements: int
    """Of its largest input."""
    first: float
    """Seconds of its first call in each direction, which compiles it."""


@dataclass(frozen=True, kw_only=True)
class _Region:
    elements: int
    call: Callable[[], None]


class RegionTrial:
    """All regions of a model's sizes on one rank, halted between calls."""

    def __init__(self, cube: Cube, work: Work, types: Sequence[Type]) -> None:
        lock_bars_here()
        self._device = cube.device
        self._regions: dict[tuple[str, Case], _Region] = {}
        self._facts: dict[tuple[str, Case], RegionFacts] = {}
        for case in [(kind, side) for kind in types for side in SIDES]:
            own = cube_of(cube, case)
            own.manual_seed(work.seed)
            for name, region in regions(work, own, COMPUTE[case[0]] or torch.float32).items():
                self._regions[name, case] = region
                self._facts[name, case] = RegionFacts(elements=region.elements, first=self._timed(region))

    def turn(self, name: str, case: Case, calls: int) -> list[float]:
        """Seconds of each call. One more goes first and counts for nothing."""
        return [self._timed(self._regions[name, case]) for _ in range(1 + calls)][1:]

    def get_facts(self) -> dict[tuple[str, Case], RegionFacts]:
        return self._facts

    def close(self) -> None:
        """Nothing is open."""

    def _timed(self, region: _Region) -> float:
        begin = now(self._device)
        region.call()
        return now(self._device) - begin


def regions(work: Work, cube: Cube, dtype: torch.dtype) -> dict[str, _Region]:
    """Each of them on a cube of one rank, by name."""
    c, rows, masked = work.config, work.tokens, work.sequences * work.masked
    compiled, p = cube.speed.compile, c.dropout
    norm = LayerNorm3D(c.hidden, cube, eps=c.eps)
    bias = constant((c.inner_size,), vector("y"), cube, 0.1)
    labels = torch.randint(0, c.vocab, (masked,), device=cube.device)
    hidden = [_leaf(rows, c.hidden, cube, dtype) for _ in range(3)]
    a, b, _ = hidden

    def with_bias(x: Tensor) -> Tensor:
        if compiled:
            return add_bias_and_activate(x, bias, c.activation, cube, "y")
        return activated(_Biased.apply(x, bias, cube), c.activation)

    def dropped() -> Tensor:
        return norm(a, b, dropout=p)

    inner, logits = _leaf(rows, c.inner_size, cube, dtype), _leaf(masked, c.vocab, cube, dtype)
    found: dict[str, tuple[Callable[[], Tensor], list[Tensor]]] = {
        f"bias + {c.activation}": (lambda: with_bias(inner), [inner]),
        "LayerNorm": (lambda: norm(a), [a]),
        "residual + LayerNorm": (lambda: norm(a, b), [a, b]),
        "embedding sum + LayerNorm": (lambda: norm(*hidden), hidden),
        "cross-entropy": (lambda: cross_entropy(logits, labels, c.vocab, cube)[0], [logits]),
    }
    if p:
        found["dropout + residual + LayerNorm"] = (dropped, [a, b])
        found["dropout + residual"] = (
            lambda: add_dropped(a, b, p, cube, "z") if compiled else a + drop(b, p),
            [a, b],
        )
    return {name: _region(forward, leaves) for name, (forward, leaves) in found.items()}


class _Biased(torch.autograd.Function):
    """x + bias, with the gradients of both, as a product has it."""

    @staticmethod
    def forward(ctx: object, x: Tensor, bias: nn.Parameter, cube: Cube) -> Tensor:
        return x + local(bias).to(x.dtype)

    @staticmethod
    def backward(ctx: object, dy: Tensor) -> tuple[Tensor, None, None]:
        dy.sum(0, dtype=torch.float32)
        return dy, None, None


def _leaf(rows: int, columns: int, cube: Cube, dtype: torch.dtype) -> Tensor:
    return torch.randn(rows, columns, device=cube.device).to(dtype).requires_grad_()


def _region(forward: Callable[[], Tensor], leaves: list[Tensor]) -> _Region:
    arriving: list[Tensor] = []  # made once, at the first call

    def call() -> None:
        for leaf in leaves:
            leaf.grad = None
        result = forward()
        if not arriving:
            arriving.append(torch.ones_like(result))
        result.backward(arriving[0])

    return _Region(elements=max(leaf.numel() for leaf in leaves), call=call)
