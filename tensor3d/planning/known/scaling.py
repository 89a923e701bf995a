"""The known ways on growing numbers of ranks, and where one overtakes another."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from itertools import combinations, pairwise

from tensor3d.planning.cluster import Cluster
from tensor3d.planning.known.encoder import Encoder
from tensor3d.planning.known.seconds import Broadcasts, Timed, timed
from tensor3d.planning.known.ways import ways


@dataclass(frozen=True, kw_only=True)
class Crossing:
    """One way is faster than another from here on, where it was not before."""

    faster: str
    slower: str
    after: int
    """Ranks at which it was not faster yet: the last count before `at` that both can use."""
    at: int
    """Ranks at which it is."""


def scaled(
    encoder_at: Callable[[int], Encoder],
    cluster_at: Callable[[int], Cluster],
    ranks: Iterable[int],
    *,
    kept: bool = False,
    recomputed: bool = False,
    compute: str = "bf16",
    element: int = 2,
    gradient: int = 4,
    broadcasts: Broadcasts = "chain",
) -> dict[int, tuple[Timed, ...]]:
    """Every way's step at each number of ranks, in the order of `ranks`.

    Args:
        encoder_at: the encoder and batch for so many ranks: always the same for strong scaling, growing for weak.
        cluster_at: a cluster of at least so many ranks.
        kept, recomputed: as in `ways`.
        compute, element, gradient, broadcasts: as in `timed`.

    Raises:
        ValueError: what `ways` and `timed` refuse.
    """
    found: dict[int, tuple[Timed, ...]] = {}
    for count in ranks:
        encoder, cluster = encoder_at(count), cluster_at(count)
        found[count] = tuple(
            timed(
                way,
                encoder,
                cluster,
                compute=compute,
                element=element,
                gradient=gradient,
                recomputed=recomputed,
                broadcasts=broadcasts,
            )
            for way in ways(encoder, count, kept=kept, recomputed=recomputed)
        )
    return found


def crossings(table: Mapping[int, tuple[Timed, ...]]) -> tuple[Crossing, ...]:
    """Where the order of two ways changes, by ascending ranks; only counts that both can use are compared."""
    seconds: dict[str, dict[int, float]] = {}
    for count in sorted(table):
        for row in table[count]:
            if row.way.refused is None:
                seconds.setdefault(row.way.name, {})[count] = row.seconds
    found = []
    for one, two in combinations(seconds, 2):
        shared = [count for count in seconds[one] if count in seconds[two]]
        for before, at in pairwise(shared):
            for faster, slower in ((one, two), (two, one)):
                if seconds[faster][at] < seconds[slower][at] and seconds[faster][before] >= seconds[slower][before]:
                    found.append(Crossing(faster=faster, slower=slower, after=before, at=at))
    return tuple(sorted(found, key=lambda crossing: crossing.at))
