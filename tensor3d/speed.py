"""How a model's work is done, where the results are the same: what runs under what, and which kernels."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class Speed:
    """Switches of one cube, read by all of its layers."""

    overlap: bool = True
    """Collectives travel under products: gathers are issued early, the next product's weight is gathered ahead, sums
    are waited for late. Not: each is waited for where it is issued. The results are the same bits. One thing to know:
    between two layers of one pass, a weight must not be edited in place in a way that its version counter does not show
    (`.data`, foreach and fused operators on a DTensor), nor on some ranks alone; before, between and after passes it
    may. The weights of the last two backward passes are held; `cube.ahead.forget()` lets go of them."""
    compile: bool = False
    """Chains of small operators between products are compiled (`tensor3d.fusion`). The results differ by rounding, and
    by what dropout draws."""
