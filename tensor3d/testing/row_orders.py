"""Whether a layer that differs on one device would not, were the rows of a fused weight in another order.

Libraries stack q, k and v (gate and up) one after another; layers here have them group by group (`fused_rows`). Sizes
are the same, and every number is wrong: so the orders that are usual are tried.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from itertools import chain, islice

import torch
from torch import Tensor, nn

from tensor3d.layers.attention import Attention3D
from tensor3d.layers.mlp import GatedMLP3D
from tensor3d.sharding.fused_rows import from_fused_rows, to_fused_rows
from tensor3d.testing.compare import Expected

# What the parts and groups of a weight of three or two parts usually are.
_PARTS, _GROUPS = {3: "q/k/v", 2: "gate/up"}, {3: "head", 2: "unit"}

# Runs of a layer that has failed: each is as long as the one that was asked for.
_MOST = 64


@dataclass(frozen=True)
class FusedOrder:
    """Rows of the reference are ordered (part, group, d) and the layer's (group, part, d); `back`: the other way."""

    parts: int | tuple[int, ...]
    """As of `to_fused_rows`."""
    groups: int
    back: bool = False

    @property
    def number(self) -> int:
        """Of parts."""
        return self.parts if isinstance(self.parts, int) else len(self.parts)

    def of(self, rows: int) -> Tensor:
        """int64 (rows,): of each row of the layer's the reference's."""
        convert = from_fused_rows if self.back else to_fused_rows
        return convert(torch.arange(rows), parts=self.parts, groups=self.groups)

    def code(self, rows: int) -> str:
        """As the user writes it."""
        name = "from_fused_rows" if self.back else "to_fused_rows"
        return f"tensor3d.{name}(torch.arange({rows}), parts={self.parts}, groups={self.groups})"


Orders = Mapping[str, FusedOrder]


def reordered(expected: Expected, orders: Mapping[str, Tensor]) -> Expected:
    """What the reference gives, with rows of these parameters and of their gradients in the layer's order."""
    parameters, gradients = dict(expected.parameters), dict(expected.gradients)
    for name, order in orders.items():
        parameters[name] = parameters[name][order]
        gradient = gradients[name]
        gradients[name] = None if gradient is None else gradient[order]
    return replace(expected, parameters=parameters, gradients=gradients)


def check_orders(orders: Mapping[str, Tensor], model: nn.Module) -> None:
    """Raises ValueError unless each is a permutation of the rows of one of the layer's parameters."""
    parameters = dict(model.named_parameters())
    for name, order in orders.items():
        if name not in parameters:
            raise ValueError(f"rows names {name}, which the layer does not have. It has {', '.join(parameters)}.")
        high = parameters[name].shape[0] if parameters[name].dim() else 0
        if not isinstance(order, Tensor) or not torch.equal(order.sort().values, torch.arange(high)):
            raise ValueError(
                f"rows must give for each of the {high} rows of {name} the number of the reference's, each once, such "
                f"as tensor3d.to_fused_rows(torch.arange({high}), parts=3, groups=heads). Got {order}."
            )


def order_hint(model: nn.Module, expected: Expected, passes: Callable[[Expected], bool]) -> str:
    """What is to be said of a layer that is right as soon as rows are in another order; empty where none does it.

    Args:
        passes: whether the layer agrees with this, on one device.
    """
    rows = {name: value.shape[0] for name, value in expected.parameters.items() if value.dim()}
    for orders in islice(chain(_of_known_layers(model, rows), _of_any(rows)), _MOST):
        if passes(reordered(expected, {name: order.of(rows[name]) for name, order in orders.items()})):
            return _in_words(orders, rows)
    return ""


def _of_known_layers(model: nn.Module, rows: Mapping[str, int]) -> Iterator[Orders]:
    """Those of the library's own fused layers: all of them, then of one kind."""
    by_parts: dict[int, dict[str, FusedOrder]] = {3: {}, 2: {}}
    for prefix, module in model.named_modules():
        if isinstance(module, Attention3D):
            asking = module.heads // module.kv_heads
            order, fused = FusedOrder(3 if asking == 1 else (asking, 1, 1), module.kv_heads), "qkv"
        elif isinstance(module, GatedMLP3D):
            order, fused = FusedOrder(2, module.down.in_features), "gate_up"
        else:
            continue
        names = (".".join(filter(None, (prefix, fused, each))) for each in ("weight", "bias"))
        by_parts[order.number].update({name: order for name in names if name in rows})
    found = [orders for orders in by_parts.values() if orders]
    if len(found) == 2:
        yield found[0] | found[1]
    yield from found


def _of_any(rows: Mapping[str, int]) -> Iterator[Orders]:
    """Parameters of as many rows, as a weight and its bias, in each order of three or two parts, either way."""
    for high in dict.fromkeys(rows.values()):
        names = [name for name, each in rows.items() if each == high]
        for parts in (3, 2):
            for groups in range(2, high // parts + 1):
                if high % (parts * groups) == 0:
                    for back in (False, True):
                        yield dict.fromkeys(names, FusedOrder(parts, groups, back))


def _in_words(orders: Orders, rows: Mapping[str, int]) -> str:
    by_order: dict[str, list[str]] = {}
    for name, order in orders.items():
        by_order.setdefault(order.code(rows[name]), []).append(name)
    written = " | ".join(f"dict.fromkeys({names!r}, {code})" for code, names in by_order.items())
    stacked = " and ".join(f"({_PARTS[p]}, {_GROUPS[p]}, d)" for p in dict.fromkeys(o.number for o in orders.values()))
    fused = " and ".join(f"({_GROUPS[p]}, {_PARTS[p]}, d)" for p in dict.fromkeys(o.number for o in orders.values()))
    theirs, ours = (fused, stacked) if next(iter(orders.values())).back else (stacked, fused)
    return (
        f"{', '.join(orders)}: right as soon as the rows are in another order. The reference's are ordered {theirs}, "
        f"the layer's {ours}. Say check_layer(..., rows={written}); to_fused_rows and from_fused_rows carry weights "
        "over and back."
    )
