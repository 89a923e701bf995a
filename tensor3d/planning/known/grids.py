"""The ways that lay ranks in a square or a box: 2-D, 2.5-D and 3-D products of matrices.

M tokens, h hidden size, f inner size; q, p the edge of a square or cube, d the depth of 2.5-D; of a layer's four
products C = A B, all together:

    A  M (3h + f)    B  W = 4h² + 2hf    C  M (5h + f)      with f = 4h: 7 Mh, 12 h², 9 Mh
"""

from __future__ import annotations

import math
from typing import Literal

from tensor3d.planning.known.encoder import KnownWay, Move
from tensor3d.planning.known.question import Question
from tensor3d.shape import AxisName, CubeShape


def two_d(asked: Question) -> KnownWay:
    """Optimus: SUMMA on q x q ranks (Xu et al. 2021, arXiv 2104.05343, table 1; its public code's SUMMA_AB, ABT, ATB).

    A product takes q steps; in each, a block of A is broadcast along its row of the mesh and one of B along its column.
    dA = dC Bᵀ broadcasts B and reduces dA, dB = Aᵀ dC broadcasts A and reduces dB. So A and B travel once forward and
    twice backward: 3 (q-1)/q² (7 Mh + 12 h²) with f = 4h. The paper's table has log2(q)/q where this has (q-1)/q²: a
    tree of sends instead of a chain; `timed` does either. It takes 24 q broadcasts and reduces a layer.

    It is not the box (1, q, q), which leaves weights where they are and moves C instead.
    """
    P, q = asked.ranks, math.isqrt(asked.ranks)
    row = KnownWay(
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


def two_and_a_half_d(asked: Question) -> KnownWay:
    """Tesseract: d layers of q x q ranks, 1 < d <= q (Wang et al. 2021, arXiv 2105.14500; counted from its algorithm).

    A is cut into q d rows of blocks, B lies on every layer. Each layer runs SUMMA on its rows, and the gradient of B is
    summed over the layers: 3 (q-1)/q² (7 Mh/d + 12 h²) + 2 (d-1)/d 12 h²/q² with f = 4h. The deepest box with
    P = q² d is taken.
    """
    P = asked.ranks
    boxes = [(q, P // q**2) for q in range(2, math.isqrt(P) + 1) if P % q**2 == 0 and 1 < P // q**2 <= q]
    q, d = boxes[0] if boxes else (1, 1)
    row = KnownWay(
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


def _summa(asked: Question, row: KnownWay, q: int, d: int) -> KnownWay:
    """SUMMA on d layers of q x q ranks, whose rows of the mesh lie along z and whose columns lie along y."""
    block_a, block_b, calls = asked.inputs // (q * q * d), asked.encoder.weights // (q * q), 4 * q
    send_a = Move(kind="broadcast", axes=("z",), of="activations", elements=(q - 1) * block_a, calls=calls)
    send_b = Move(kind="broadcast", axes=("y",), of="weights", elements=(q - 1) * block_b, calls=calls)
    sum_a = Move(kind="reduce", axes=("z",), of="activations", elements=(q - 1) * block_a, calls=calls)
    sum_b = Move(kind="reduce", axes=("y",), of="gradients", elements=(q - 1) * block_b, calls=calls)
    over_layers = Move(
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


def three_d(asked: Question) -> KnownWay:
    """Matrices over all three axes of p x p x p ranks (Bian et al. 2021, arXiv 2105.14450, §3.1).

    A product gathers A and B, each along its axis, and reduce-scatters C along the third; backward gathers dC and
    reduce-scatters dA and dB: 2 (p-1)/p³ (16 Mh + 12 h²) with f = 4h. Unless gathered ones are kept, A and B are
    gathered again in backward: (p-1)/p³ (7 Mh + 12 h²) more. This is the box (p, p, p).
    """
    P, e = asked.ranks, asked.encoder
    p = next(p for p in range(1, P + 1) if p**3 >= P)
    row = KnownWay(
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
    held = Move(kind="all-gather", axes=("x",), of="weights", elements=(p - 1) * weights, calls=4, hidden=True)
    summed = Move(kind="reduce-scatter", axes=("x",), of="gradients", elements=(p - 1) * weights, calls=4, hidden=True)
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


def _moved(kind: Literal["all-gather", "reduce-scatter"], axis: AxisName, shard: int, members: int) -> Move:
    """Two collectives whose shards together have that many elements."""
    return Move(kind=kind, axes=(axis,), of="activations", elements=(members - 1) * shard, calls=2)
