"""What boxes are called in the field, and the best plan of each kind."""

from __future__ import annotations

from collections.abc import Iterable

from tensor3d import CubeShape
from tensor3d.planning.search import Plan

DATA, SHARDED, ONE, TWO, CUBE, OTHER = "data", "fully sharded", "1-D", "2-D", "cube", "other"
KINDS = (DATA, SHARDED, ONE, TWO, CUBE, OTHER)
"""Data parallel alone; (P,1,1); (1,P,1), Megatron's; (1,q,q); (q,q,q); any other box. Each but the first also in copies
over `data`."""


def kind_of(shape: CubeShape) -> str:
    x, y, z = shape.x, shape.y, shape.z
    if x == y == z:
        return DATA if x == 1 else CUBE
    if y == z:
        return SHARDED if y == 1 else TWO if x == 1 else OTHER
    return ONE if x == 1 and 1 in (y, z) else OTHER


def best_of_kinds(plans: Iterable[Plan]) -> dict[str, Plan]:
    """The fastest plan of each kind that has one, in the order of `KINDS`."""
    found: dict[str, Plan] = {}
    for plan in sorted(plans, key=lambda plan: plan.time.total):
        found.setdefault(kind_of(plan.shape), plan)
    return {kind: found[kind] for kind in KINDS if kind in found}
