"""Which gathered operands a BERT keeps for backward, without making one: as `keep_gathered` chooses them."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from itertools import pairwise

from models.bert.config import BertConfig
from tensor3d.cost_model.comm_volume import Kept, Side
from tensor3d.cost_model.kept_operands import GatheredOperands, GatheringProduct, KeptCount, gathered_bytes
from tensor3d.distributed.cube_shape import CubeShape
from tensor3d.layers.attention import Recompute


@dataclass(frozen=True, kw_only=True)
class KeptProducts:
    """What each product of the model keeps."""

    layers: tuple[KeptCount, ...]
    """Of QKV, output, up and down: how many layers, the last ones, keep an operand."""
    projection: Kept = False
    """Of narrower embeddings, or of a convolution beside the first layer."""
    dense: Kept = "weight"
    """In the masked-LM head; as of the pooler, a budget decides of it where x is 1: else its weight stays."""
    pooler: Kept = "weight"
    held_bytes: int = 0
    """Of what a budget has let stay, were all products of all rows."""

    def runs(self, layers: int) -> Iterator[tuple[range, tuple[Kept, ...]]]:
        """What QKV, output, up and down of a layer keep, with the layers, of so many, that keep it."""
        kept = {each for count in self.layers for each in (count.inputs, count.weights)}
        for first, end in pairwise(sorted({0, layers, *(max(0, layers - each) for each in kept)})):
            yield range(first, end), tuple(count.of(first, layers) for count in self.layers)


def layer_products(config: BertConfig) -> list[tuple[int, int, Side]]:
    """K, N and the face that is read: QKV, output, up (with the gate, if there is one) and down."""
    hidden, inner = config.hidden, config.inner_size
    return [
        (hidden, config.qkv_size, "z"),
        (config.mixed_size, hidden, "y"),
        (hidden, inner * (2 if config.has_gate else 1), "z"),
        (inner, hidden, "y"),
    ]


@lru_cache(256)
def kept_products(
    config: BertConfig,
    shape: CubeShape,
    rows: int,
    element: int,
    *,
    reshard_after_forward: bool = True,
    budget: int = 0,
    recompute: Recompute = "none",
    weight_group_bytes: int | None = None,
) -> KeptProducts:
    """
    Args:
        rows: tokens of a plane.
        element: bytes, of what is gathered.
        reshard_after_forward, recompute: as the model was made.
        budget: bytes for `keep_gathered`; 0: it was not called.
        weight_group_bytes: as of `ExecutionPolicy`.
    """
    every = config.layers * (not reshard_after_forward)
    plain = (KeptCount(inputs=every, weights=every),) * 4
    if not budget:
        return KeptProducts(layers=plain)
    chosen = _gathered(config, shape, rows, element, recompute, weight_group_bytes).within(budget)
    counts = dict(zip(_products(config, shape, element, recompute), chosen.counts, strict=True))
    layers = tuple(counts.get(f"layers.{number}", plain[number]) for number in range(4))
    alone: dict[str, Kept] = {
        name: counts[name].of(0, 1) for name in ("projection", "dense", "pooler") if name in counts
    }
    return KeptProducts(layers=layers, held_bytes=chosen.held_bytes, **alone)


def keepable_bytes(config: BertConfig, shape: CubeShape, rows: int, element: int, recompute: Recompute) -> int:
    """The budget that keeps all; arguments as of `kept_products`."""
    return gathered_bytes(list(_products(config, shape, element, recompute).values()), shape, rows)


def smaller_budgets(
    config: BertConfig, shape: CubeShape, rows: int, element: int, recompute: Recompute, budget: int
) -> list[range]:
    """`GatheredOperands.one_less`; arguments as of `kept_products`."""
    return _gathered(config, shape, rows, element, recompute, None).one_less(budget)


@lru_cache(256)
def _gathered(
    config: BertConfig,
    shape: CubeShape,
    rows: int,
    element: int,
    recompute: Recompute,
    weight_group_bytes: int | None,
) -> GatheredOperands:
    """From which a search takes many budgets; arguments as of `kept_products`."""
    products = list(_products(config, shape, element, recompute).values())
    return GatheredOperands.of(products, shape, rows, weight_group_bytes)


@lru_cache(256)
def _products(config: BertConfig, shape: CubeShape, element: int, recompute: Recompute) -> dict[str, GatheringProduct]:
    """By name. Those of layers that are computed again are left alone."""
    hidden, columns, after = config.hidden, config.embedding_size, 1 + 4 * config.layers

    def one(place: int, k: int, n: int) -> GatheringProduct:
        return GatheringProduct(k=k, n=n, element=element, places=range(place, place + 1))

    beside = config.product_beside_layers
    found = {} if beside is None else {"projection": one(0, beside, hidden)}
    if recompute != "layer":
        for number, (k, n, face) in enumerate(layer_products(config)):
            found[f"layers.{number}"] = GatheringProduct(
                k=k, n=n, face=face, element=element, places=range(1 + number, after, 4), block=0
            )
    if shape.x == 1:
        if not config.traits.decoder_alone:
            found["dense"] = one(after, hidden, columns)
        if config.next_sentence:
            found["pooler"] = one(after + 1, hidden, hidden)
    return found
