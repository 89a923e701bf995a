"""How many sequences of each corpus are used, and which shard gets which: arithmetic on counts alone."""

from __future__ import annotations

import math
from collections.abc import Sequence


def targets(drawn: Sequence[int], weights: Sequence[float] | None) -> list[int]:
    """Sequences of each corpus to use, in the ratio of the weights: none fewer than it has, and one just these.

    Args:
        drawn: sequences of each corpus that have been drawn, above 0.
        weights: above 0. None: all that have been drawn.
    """
    if weights is None:
        return list(drawn)
    total = max(have / weight for have, weight in zip(drawn, weights, strict=True))
    return [max(have, round(total * weight)) for have, weight in zip(drawn, weights, strict=True)]


def cuts_missing(cuts: Sequence[int], target: int) -> int:
    """How often a corpus must be drawn again for its target, judging by the sequences of the `cuts` so far."""
    return max(0, math.ceil((target - sum(cuts)) * len(cuts) / sum(cuts)))


def kept(parts: Sequence[Sequence[int]], target: int) -> list[list[int]]:
    """Sequences of each part to use, so that they are `target`: of one cut after another all, of the last one those
    that are left to use, from all of its parts alike, and nothing of what comes behind.

    Args:
        parts: of each cut of a corpus, the sequences of its parts; `target` in all, at least.
    """
    left, result = target, []
    for cut in parts:
        size = sum(cut)
        share = min(left, size)
        before = 0
        here = []
        for count in cut:
            end = before + count
            here.append(end * share // size - before * share // size if size else 0)
            before = end
        result.append(here)
        left -= share
    assert left == 0, "fewer sequences than were to be used"
    return result


def deal(counts: Sequence[int], shards: int) -> list[list[tuple[int, int]]]:
    """Of each shard, where its sequences begin and end in each part.

    Sequence `g` of all parts together counts for shard `g % shards`; so shards differ by one sequence at most, also in
    what they have of a part. A shard takes its number of a part from consecutive places.

    Args:
        counts: sequences of each part, in order.
    """
    dealt: list[list[tuple[int, int]]] = [[] for _ in range(shards)]
    offset = 0
    for count in counts:
        begin = 0
        for shard in range(shards):
            own = _below(offset + count, shard, shards) - _below(offset, shard, shards)
            dealt[shard].append((begin, begin + own))
            begin += own
        offset += count
    return dealt


def _below(end: int, shard: int, shards: int) -> int:
    """Numbers below `end` that leave the remainder `shard`."""
    return (end - shard + shards - 1) // shards
