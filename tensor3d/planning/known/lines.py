"""The ways that lay ranks in a line: 1-D tensor parallelism and fully sharded data parallelism.

M tokens, h hidden size, f inner size, P ranks; W = 4h² + 2hf the weights of a layer
"""

from __future__ import annotations

from dataclasses import replace

from tensor3d.planning.known.encoder import KnownWay, Move
from tensor3d.planning.known.question import Question
from tensor3d.shape import CubeShape


def one_d(asked: Question) -> KnownWay:
    """Megatron's split of heads and of the MLP's columns (Shoeybi et al. 2019, arXiv 1909.08053, §3).

    Two all-reduces of M h forward, two backward: 8 (P-1)/P Mh received, which Narayanan et al. 2021 (arXiv 2104.04473,
    §3.2) count too. What lies between the all-reduces is copied on every rank: 4h of the 8h + 2f numbers that a token
    keeps (Korthikanti et al. 2022, arXiv 2205.05198, eq. 2).
    """
    P = asked.ranks
    row = KnownWay(
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
    sums = [Move(kind="all-reduce", axes=("y",), of="activations", elements=elements, calls=2)]
    saved = 4 * asked.states + (asked.activations - 4 * asked.states) // P
    return asked.answer(row, forward=sums, backward=sums, saved=saved, stored=asked.states, split=P)


def one_d_sequence(asked: Question) -> KnownWay:
    """1-D with sequence parallelism (Korthikanti et al. 2022, §4.2.2).

    Each all-reduce becomes a reduce-scatter and an all-gather, and no hidden state is copied: again 8 (P-1)/P Mh. The
    inputs of QKV and of up are kept as shards and gathered once more in backward, 2 (P-1)/P Mh, unless gathered ones
    are kept. This is the box (1, P, 1).
    """
    P = asked.ranks
    row = KnownWay(
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
    gathers = Move(kind="all-gather", axes=("y",), of="activations", elements=2 * (P - 1) * shard, calls=2)
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


def fully_sharded(asked: Question) -> KnownWay:
    """Data parallelism with weights, gradients and moments in P parts.

    ZeRO-3 (Rajbhandari et al. 2020, arXiv 1910.02054, §7.2.2), PyTorch's FSDP (Zhao et al. 2023, arXiv 2304.11277). A
    layer's weights are gathered for forward and, unless kept, again for backward, and their gradient is
    reduce-scattered, each as one flat tensor: 2 or 3 (P-1)/P W. This is the box (P, 1, 1), which takes the four
    matrices one by one and so needs four times the calls.
    """
    P, W = asked.ranks, asked.encoder.weights
    row = KnownWay(
        name="fully sharded",
        ranks=P,
        box=CubeShape(x=P),
        copied="nothing between steps; a whole layer's weights while it works",
        source="Rajbhandari et al. 2020, §7.2.2",
        refused=asked.refusal(sequences=P),
    )
    if row.refused:
        return row
    gather = Move(kind="all-gather", axes=("x",), of="weights", elements=(P - 1) * -(-W // P), calls=1, hidden=True)
    scatter = replace(gather, kind="reduce-scatter", of="gradients")
    return asked.answer(
        row,
        forward=[gather],
        backward=[scatter] if asked.kept else [gather, scatter],
        saved=asked.activations // P + (W if asked.kept else 0),
        stored=asked.states // P,
        split=P,
    )
