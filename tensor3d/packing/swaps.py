"""Swaps between heavy and light bins: evens out what a good deal has left.

n items, b bins, k = n/b items of a bin, m objectives; in a pass h heavy bins meet p light ones each
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

# Together they bound the time: some 5 ms for one objective and 15 ms for two, whatever b and k.
_PASSES = 32
_SWAPS = 16384  # looked at in a pass
_IDLE = 4  # passes that find nothing, one after another, before the search ends
_PARTNERS = 4  # light bins for each heavy one, at least, where there are enough
_HEAVY = 0.75  # share of the largest excess over the mean above which a bin counts as heavy
_MOST_ITEMS = 128  # of a bin: with more, a good deal leaves next to nothing, and k*k swaps cost too much


def swap(weights: NDArray[np.float64], dealt: NDArray[np.int64]) -> None:
    """Swaps items of `dealt`, in place; what is the worst of all bins and objectives never gets worse.

    All objectives are evened out together first, by the worst of each bin. What then limits one of them (full packs
    limit the tokens) need not limit the others, so each goes on alone, and no bin exceeds what was the heaviest one in
    the others.

    Args:
        weights: (m, n): whole numbers with exact sums; all objectives have about the same total.
        dealt: (b, k): the items of each bin.
    """
    if dealt.shape[1] > _MOST_ITEMS:
        return
    objectives = len(weights)
    # `take` and not an index: numpy would lay the objectives out innermost, which is slow here and below.
    cost = weights.take(dealt, axis=1)  # (m, b, k)
    load = cost.sum(axis=2)  # (m, b)
    _search(cost, load, dealt, slice(0, objectives))
    if objectives > 1:
        for alone in range(objectives):
            _search(cost, load, dealt, slice(alone, alone + 1))


def _search(cost: NDArray[np.float64], load: NDArray[np.float64], dealt: NDArray[np.int64], judged: slice) -> None:
    """Makes the bins lighter that are heaviest by the judged objectives."""
    objectives, bins, count = cost.shape
    limit = max(1, _SWAPS // (count * count * objectives))
    mean = float(load[judged].sum(axis=1).max()) / bins
    turn = idle = 0
    for _ in range(_PASSES):
        heavy, light = meetings(load[judged].max(axis=0), mean, limit, turn)
        if not light.size or idle == _IDLE:
            return
        turn += light.size
        found, partner, give, take = _best_swaps(cost, load, heavy, light, judged)
        idle = 0 if found.any() else idle + 1
        one, other = heavy[found], light[found, partner[found]]
        give, take = give[found], take[found]
        dealt[one, give], dealt[other, take] = dealt[other, take], dealt[one, give]
        lighter = cost[:, one, give] - cost[:, other, take]  # exact, so loads stay the sums of their costs
        cost[:, one, give] -= lighter
        cost[:, other, take] += lighter
        load[:, one] -= lighter
        load[:, other] += lighter


def meetings(
    score: NDArray[np.float64], mean: float, limit: int, turn: int
) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Heavy bins (h,), heaviest first, and the other bins (h, p) that each meets in this pass, all different.

    Light bins take turns, so that a heavy one which found nothing meets others the next time.
    """
    bar = mean + _HEAVY * (float(score.max()) - mean)
    heavy = np.flatnonzero(score > bar)
    light = np.flatnonzero(score <= bar)
    count = min(len(heavy), len(light), max(1, limit // _PARTNERS))
    if not count:
        return heavy, np.empty((0, 0), dtype=np.int64)
    partners = max(1, min(len(light), limit) // count)
    heavy = heavy[np.argsort(-score[heavy], kind="stable")[:count]]
    return heavy, light.take(np.arange(turn, turn + count * partners), mode="wrap").reshape(partners, count).T


def _best_swaps(
    cost: NDArray[np.float64],
    load: NDArray[np.float64],
    heavy: NDArray[np.int64],
    light: NDArray[np.int64],
    judged: slice,
) -> tuple[NDArray[np.bool_], NDArray[np.int64], NDArray[np.int64], NDArray[np.int64]]:
    """For each heavy bin (h,): whether a swap makes it lighter, and its partner no heavier than it was; the partner,
    and the places of the items that the two give."""
    count = cost.shape[2]
    moved = cost.take(heavy, axis=1)[:, :, None, :, None] - cost.take(light, axis=1)[:, :, :, None, :]
    more, less = load.take(heavy, axis=1)[:, :, None, None, None], load.take(light, axis=1)[..., None, None]
    after = np.maximum(more - moved, less + moved)  # (m, h, p, k, k)
    worst = after[judged].max(axis=0)
    for kept in [*range(judged.start), *range(judged.stop, len(load))]:
        worst[after[kept] > load[kept].max()] = np.inf
    worst = worst.reshape(len(heavy), -1)
    best = worst.argmin(axis=1)
    found = worst[np.arange(len(heavy)), best] < load[judged][:, heavy].max(axis=0)
    partner, places = np.divmod(best, count * count)
    return found, partner, *np.divmod(places, count)
