"""What the known ways are asked about, an encoder and its batch, and the form of their answer."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from typing import Literal

from tensor3d.distributed.comm_stats import Kind
from tensor3d.distributed.cube_shape import AxisName, CubeShape


@dataclass(frozen=True, kw_only=True)
class TransformerSpec:
    """A transformer encoder and the batch that all ranks work on together.

    Raises:
        ValueError: a number that is not whole or below 1; a hidden size that the heads do not divide.
    """

    sequences: int
    length: int
    """Tokens of a sequence."""
    hidden: int
    inner: int
    """Width inside the MLP."""
    heads: int
    layers: int = 1
    vocabulary: int = 0
    """Rows of the embedding table, which is also the head's weight; 0 for a bare encoder."""

    def __post_init__(self) -> None:
        for field in fields(self):
            value, least = getattr(self, field.name), 0 if field.name == "vocabulary" else 1
            if not isinstance(value, int) or isinstance(value, bool) or value < least:
                raise ValueError(
                    f"an encoder's {field.name} must be a whole number of at least {least}. Got {value!r}."
                )
        if self.hidden % self.heads:
            raise ValueError(f"an encoder's hidden size must divide by its {self.heads} heads. Got {self.hidden}.")

    @property
    def tokens(self) -> int:
        return self.sequences * self.length

    @property
    def weights(self) -> int:
        """Elements of a layer's matrices: QKV, output, up, down."""
        return 4 * self.hidden**2 + 2 * self.hidden * self.inner

    @property
    def flops(self) -> int:
        """Of a layer's forward pass: its four products, and q kᵀ and weights times v of whole sequences."""
        return self.tokens * (2 * self.weights + 4 * self.length * self.hidden)


@dataclass(frozen=True, kw_only=True)
class Collective:
    """Equal collectives of a layer."""

    kind: Kind | Literal["broadcast", "reduce"]
    axes: tuple[AxisName, ...]
    """Of the way's box."""
    of: Literal["activations", "weights", "gradients"]
    """What travels; gradients are those of weights."""
    elements: int
    """Received by a rank in all of them, in the ring model (distributed/comm_stats.py). A broadcast and a reduce are
    taken as chains in which every rank is first as often as the others: a rank receives (n - 1)/n of the blocks."""
    calls: int
    hidden: bool = False
    """Whether it can run under the layer's products: it waits for nothing that they make."""


@dataclass(frozen=True, kw_only=True)
class Method:
    """One way, on so many ranks. Counts of elements are those of one rank."""

    name: str
    ranks: int
    box: CubeShape
    """Its axes, laid on the wire as the box says."""
    forward: tuple[Collective, ...] = ()
    """Of a layer."""
    backward: tuple[Collective, ...] = ()
    """Of a layer, with the forward pass that it repeats first if activations are recomputed."""
    saved: int = 0
    """Elements of activations, and of weights that were gathered, that a layer keeps for its backward pass."""
    weights: int = 0
    """Elements of the whole model's matrices and of its table that the rank stores."""
    copied: str = ""
    """What other ranks hold or compute as well."""
    source: str = ""
    refused: str | None = None
    """Why the way does not exist for these ranks and sizes; all counts are then 0."""

    @property
    def moves(self) -> tuple[Collective, ...]:
        return self.forward + self.backward

    @property
    def elements(self) -> int:
        """Received for a layer, forward and backward."""
        return sum(move.elements for move in self.moves)

    @property
    def calls(self) -> int:
        """Collectives of a layer, forward and backward."""
        return sum(move.calls for move in self.moves)


# --- What a way is asked, and how its row is filled in: the part that all of them share -------------------------------


@dataclass(frozen=True, kw_only=True)
class MethodQuery:
    """An encoder, the ranks, and what stays for the backward pass."""

    encoder: TransformerSpec
    ranks: int
    kept: bool = False
    """Gathered operands stay for backward (`reshard_after_forward=False`)."""
    recomputed: bool = False
    """A layer keeps its input alone and repeats its forward pass in backward (Chen et al. 2016, arXiv 1604.06174)."""

    @property
    def activations(self) -> int:
        """Numbers that a layer keeps, all ranks together: M (8h + 2f)."""
        return self.encoder.tokens * (8 * self.encoder.hidden + 2 * self.encoder.inner)

    @property
    def states(self) -> int:
        """Numbers of one hidden state: M h."""
        return self.encoder.tokens * self.encoder.hidden

    @property
    def inputs(self) -> int:
        """Numbers of the inputs of a layer's four products: M (3h + f)."""
        return self.encoder.tokens * (3 * self.encoder.hidden + self.encoder.inner)

    def refusal(self, **parts: int) -> str | None:
        """The first size of the encoder that does not divide by its parts, or None."""
        for name, number in parts.items():
            value = getattr(self.encoder, name)
            if value % number:
                return f"{name} {value} does not divide by {number}"
        return None

    def answer(
        self,
        row: Method,
        *,
        forward: Sequence[Collective],
        backward: Sequence[Collective],
        saved: int,
        stored: int,
        split: int,
    ) -> Method:
        """The row with its counts.

        Args:
            saved: elements that a layer keeps.
            stored: elements of the layer's input on this rank, all that is kept of it when activations are recomputed.
            split: into how many parts the weights are cut.
        """
        model = self.encoder.layers * self.encoder.weights + self.encoder.vocabulary * self.encoder.hidden
        again = tuple(forward) if self.recomputed else ()
        return replace(
            row,
            forward=tuple(forward),
            backward=again + tuple(backward),
            saved=stored if self.recomputed else saved,
            weights=-(-model // split),
        )


# --- The ways that lay ranks in a line: 1-D tensor parallelism and fully sharded data parallelism ---------------------
#
# M tokens, h hidden size, f inner size, P ranks; W = 4h² + 2hf the weights of a layer


def one_d(asked: MethodQuery) -> Method:
    """Megatron's split of heads and of the MLP's columns (Shoeybi et al. 2019, arXiv 1909.08053, §3).

    Two all-reduces of M h forward, two backward: 8 (P-1)/P Mh received, which Narayanan et al. 2021 (arXiv 2104.04473,
    §3.2) count too. What lies between the all-reduces is copied on every rank: 4h of the 8h + 2f numbers that a token
    keeps (Korthikanti et al. 2022, arXiv 2205.05198, eq. 2).
    """
    P = asked.ranks
    row = Method(
        name="1-D",
        ranks=P,
        box=CubeShape(y=P),
        copied="hidden states between blocks; LayerNorm, dropout and residuals are computed on every rank",
        source="Shoeybi et al. 2019, §3",
        refused=asked.refusal(heads=P, inner=P),
    )
    if row.refused:
        return row
    elements = 2 * 2 * (P - 1) * -(-asked.states // P)
    sums = [Collective(kind="all-reduce", axes=("y",), of="activations", elements=elements, calls=2)]
    saved = 4 * asked.states + (asked.activations - 4 * asked.states) // P
    return asked.answer(row, forward=sums, backward=sums, saved=saved, stored=asked.states, split=P)


def one_d_sequence(asked: MethodQuery) -> Method:
    """1-D with sequence parallelism (Korthikanti et al. 2022, §4.2.2).

    Each all-reduce becomes a reduce-scatter and an all-gather, and no hidden state is copied: again 8 (P-1)/P Mh. The
    inputs of QKV and of up are kept as shards and gathered once more in backward, 2 (P-1)/P Mh, unless gathered ones
    are kept. This is the box (1, P, 1).
    """
    P = asked.ranks
    row = Method(
        name="1-D, sequence",
        ranks=P,
        box=CubeShape(y=P),
        copied="no hidden state; the parameters of LayerNorm and the biases after it",
        source="Korthikanti et al. 2022, §4.2.2",
        refused=asked.refusal(heads=P, inner=P, tokens=P),
    )
    if row.refused:
        return row
    shard = asked.states // P
    gathers = Collective(kind="all-gather", axes=("y",), of="activations", elements=2 * (P - 1) * shard, calls=2)
    passing = [gathers, replace(gathers, kind="reduce-scatter")]
    return asked.answer(
        row,
        forward=passing,
        # The second gather of an input comes under the product for its gradient.
        backward=passing if asked.kept else [replace(gathers, hidden=True), *passing],
        saved=asked.activations // P + (2 * (P - 1) * shard if asked.kept else 0),
        stored=shard,
        split=P,
    )


def fully_sharded(asked: MethodQuery) -> Method:
    """Data parallelism with weights, gradients and moments in P parts.

    ZeRO-3 (Rajbhandari et al. 2020, arXiv 1910.02054, §7.2.2), PyTorch's FSDP (Zhao et al. 2023, arXiv 2304.11277). A
    layer's weights are gathered for forward and, unless kept, again for backward, and their gradient is
    reduce-scattered, each as one flat tensor: 2 or 3 (P-1)/P W. This is the box (P, 1, 1), where a layer's four
    matrices travel together, too.
    """
    P, W = asked.ranks, asked.encoder.weights
    row = Method(
        name="fully sharded",
        ranks=P,
        box=CubeShape(x=P),
        copied="nothing between steps; a whole layer's weights while it works",
        source="Rajbhandari et al. 2020, §7.2.2",
        refused=asked.refusal(sequences=P),
    )
    if row.refused:
        return row
    gather = Collective(
        kind="all-gather", axes=("x",), of="weights", elements=(P - 1) * -(-W // P), calls=1, hidden=True
    )
    scatter = replace(gather, kind="reduce-scatter", of="gradients")
    return asked.answer(
        row,
        forward=[gather],
        backward=[scatter] if asked.kept else [gather, scatter],
        saved=asked.activations // P + (W if asked.kept else 0),
        stored=asked.states // P,
        split=P,
    )


# --- The ways that lay ranks in a square or a box: 2-D, 2.5-D and 3-D products of matrices ----------------------------
#
# M tokens, h hidden size, f inner size; q, p the edge of a square or cube, d the depth of 2.5-D; of a layer's four
# products C = A B, all together:
#
#     A  M (3h + f)    B  W = 4h² + 2hf    C  M (5h + f)      with f = 4h: 7 Mh, 12 h², 9 Mh


def two_d(asked: MethodQuery) -> Method:
    """Optimus: SUMMA on q x q ranks (Xu et al. 2021, arXiv 2104.05343, table 1; its public code's SUMMA_AB, ABT, ATB).

    A product takes q steps; in each, a block of A is broadcast along its row of the mesh and one of B along its column.
    dA = dC Bᵀ broadcasts B and reduces dA, dB = Aᵀ dC broadcasts A and reduces dB. So A and B travel once forward and
    twice backward: 3 (q-1)/q² (7 Mh + 12 h²) with f = 4h. The paper's table has log2(q)/q where this has (q-1)/q²: a
    tree of sends instead of a chain; `timed` does either. It takes 24 q broadcasts and reduces a layer.

    It is not the box (1, q, q), which leaves weights where they are and moves C instead.
    """
    P, q = asked.ranks, math.isqrt(asked.ranks)
    row = Method(
        name="2-D",
        ranks=P,
        box=CubeShape(y=q, z=q),
        copied="no matrix",
        source="Xu et al. 2021, table 1",
        refused=f"{P} ranks are no square of a number of at least 2"
        if q < 2 or q * q != P
        else asked.refusal(sequences=q, heads=q, inner=q),
    )
    return row if row.refused else _summa(asked, row, q, 1)


def two_and_a_half_d(asked: MethodQuery) -> Method:
    """Tesseract: d layers of q x q ranks, 1 < d <= q (Wang et al. 2021, arXiv 2105.14500; counted from its algorithm).

    A is cut into q d rows of blocks, B lies on every layer. Each layer runs SUMMA on its rows, and the gradient of B is
    summed over the layers: 3 (q-1)/q² (7 Mh/d + 12 h²) + 2 (d-1)/d 12 h²/q² with f = 4h. The deepest box with
    P = q² d is taken.
    """
    P = asked.ranks
    boxes = [(q, P // q**2) for q in range(2, math.isqrt(P) + 1) if P % q**2 == 0 and 1 < P // q**2 <= q]
    q, d = boxes[0] if boxes else (1, 1)
    row = Method(
        name="2.5-D",
        ranks=P,
        box=CubeShape(x=d, y=q, z=q),
        copied=f"weights, on {d} layers of ranks",
        source="Wang et al. 2021",
        refused=asked.refusal(sequences=q * d, heads=q, inner=q)
        if boxes
        else f"{P} ranks are no q x q x d with 1 < d <= q",
    )
    return row if row.refused else _summa(asked, row, q, d)


def _summa(asked: MethodQuery, row: Method, q: int, d: int) -> Method:
    """SUMMA on d layers of q x q ranks, whose rows of the mesh lie along z and whose columns lie along y."""
    block_a, block_b, calls = asked.inputs // (q * q * d), asked.encoder.weights // (q * q), 4 * q
    send_a = Collective(kind="broadcast", axes=("z",), of="activations", elements=(q - 1) * block_a, calls=calls)
    send_b = Collective(kind="broadcast", axes=("y",), of="weights", elements=(q - 1) * block_b, calls=calls)
    sum_a = Collective(kind="reduce", axes=("z",), of="activations", elements=(q - 1) * block_a, calls=calls)
    sum_b = Collective(kind="reduce", axes=("y",), of="gradients", elements=(q - 1) * block_b, calls=calls)
    over_layers = Collective(
        kind="all-reduce", axes=("x",), of="gradients", elements=2 * (d - 1) * -(-block_b // d), calls=4, hidden=True
    )
    return asked.answer(
        row,
        forward=[send_a, send_b],
        backward=[send_b, sum_a, send_a, sum_b, *([over_layers] if d > 1 else [])],
        saved=asked.activations // (q * q * d),
        stored=asked.states // (q * q * d),
        split=q * q,
    )


def three_d(asked: MethodQuery) -> Method:
    """Matrices over all three axes of p x p x p ranks (Bian et al. 2021, arXiv 2105.14450, §3.1).

    A product gathers A and B, each along its axis, and reduce-scatters C along the third; backward gathers dC and
    reduce-scatters dA and dB: 2 (p-1)/p³ (16 Mh + 12 h²) with f = 4h. Unless gathered ones are kept, A and B are
    gathered again in backward: (p-1)/p³ (7 Mh + 12 h²) more. This is the box (p, p, p).
    """
    P, e = asked.ranks, asked.encoder
    p = next(p for p in range(1, P + 1) if p**3 >= P)
    row = Method(
        name="3-D",
        ranks=P,
        box=CubeShape(x=p, y=p, z=p),
        copied="no matrix",
        source="Bian et al. 2021, §3.1",
        refused=f"{P} ranks are no cube of a number of at least 2"
        if p < 2 or p**3 != P
        else asked.refusal(sequences=p * p, heads=p, hidden=p * p, inner=p * p),
    )
    if row.refused:
        return row
    shard = asked.states // P  # of a hidden state
    wide = e.tokens * e.inner // P  # of one inside the MLP
    weights = e.weights // P
    # QKV and up read face z, so that A is gathered over y and C scattered over z; the other two the other way round.
    read = [_moved("all-gather", "y", 2 * shard, p), _moved("all-gather", "z", shard + wide, p)]
    scattered = [_moved("reduce-scatter", "z", 3 * shard + wide, p), _moved("reduce-scatter", "y", 2 * shard, p)]
    gathered_back = [_moved("all-gather", "z", 3 * shard + wide, p), _moved("all-gather", "y", 2 * shard, p)]
    read_back = [_moved("reduce-scatter", "y", 2 * shard, p), _moved("reduce-scatter", "z", shard + wide, p)]
    held = Collective(kind="all-gather", axes=("x",), of="weights", elements=(p - 1) * weights, calls=4, hidden=True)
    summed = Collective(
        kind="reduce-scatter", axes=("x",), of="gradients", elements=(p - 1) * weights, calls=4, hidden=True
    )
    operands = [*read, held]
    # What is gathered replaces the shards of three inputs; attention keeps its output, the fourth, as it is.
    gathered = p * (3 * shard + wide + weights) - (2 * shard + wide)
    return asked.answer(
        row,
        forward=[*operands, *scattered],
        backward=[*([] if asked.kept else operands), *gathered_back, *read_back, summed],
        saved=asked.activations // P + (gathered if asked.kept else 0),
        stored=shard,
        split=P,
    )


def _moved(kind: Literal["all-gather", "reduce-scatter"], axis: AxisName, shard: int, members: int) -> Collective:
    """Two collectives whose shards together have that many elements."""
    return Collective(kind=kind, axes=(axis,), of="activations", elements=(members - 1) * shard, calls=2)
