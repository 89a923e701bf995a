"""Dealing packs, or whole sequences, to ranks: each gets as many, and as much work.

What a global batch contains does not change, only who works on what.

n items, b bins (ranks, or slots of ranks), k = n/b items of a bin, m objectives
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Callable
from dataclasses import dataclass
from types import MappingProxyType
from typing import Literal

import numpy as np
from numpy.typing import ArrayLike, NDArray

# --- Swaps between heavy and light bins: evens out what a good deal has left ------------------------------------------
#
# n items, b bins, k = n/b items of a bin, m objectives; in a pass h heavy bins meet p light ones each

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
        heavy, light = exchange_schedule(load[judged].max(axis=0), mean, limit, turn)
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


def exchange_schedule(
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


# --- Dealing packs, or whole sequences, to ranks ----------------------------------------------------------------------

Method = Literal["order", "deal", "snake", "lpt", "kk", "refined"]


@dataclass(frozen=True, kw_only=True)
class Work:
    """What a pack costs: linear layers go with its tokens, attention with the squares of its sequences' lengths.

    Raises:
        ValueError: a cost that is negative or not finite, or nothing that costs anything.
    """

    per_token: float
    """FLOPs of a token."""
    per_square: float
    """FLOPs of a squared length: of one query with one key."""
    per_near: float = 0.0
    """FLOPs of one query with one key less than `window` apart: of what attends to its neighbours alone."""
    window: int | None = None
    """Tokens, with `per_near`."""

    def __post_init__(self) -> None:
        for name in ("per_token", "per_square", "per_near"):
            value = getattr(self, name)
            if not (math.isfinite(value) and value >= 0):
                raise ValueError(f"{name} must be a finite number of at least 0. Got {value}.")
        if self.per_token == self.per_square == 0:
            raise ValueError("per_token and per_square are both 0; at least one of them must cost something.")
        if (self.per_near > 0) != (self.window is not None):
            raise ValueError(f"per_near and window belong together. Got {self.per_near} and {self.window}.")

    def of(self, tokens: ArrayLike, squares: ArrayLike, near: ArrayLike | None = None) -> NDArray[np.float64]:
        """float64 (packs,): the work of packs.

        Args:
            tokens: (packs,): tokens of each pack.
            squares: (packs,): sums of the squared lengths of the sequences in each pack.
            near: (packs,): sums of what `attended` says of them, where there is a window.

        Raises:
            ValueError: shapes that differ; a window, and no `near`.
        """
        tokens, squares = np.asarray(tokens, dtype=np.float64), np.asarray(squares, dtype=np.float64)
        if tokens.shape != squares.shape:
            raise ValueError(
                f"tokens and squares are of the same packs. Got shapes {tokens.shape} and {squares.shape}."
            )
        cost = np.asarray(self.per_token * tokens + self.per_square * squares)
        if self.window is None:
            return cost
        if near is None or np.shape(near) != tokens.shape:
            got = "none" if near is None else f"shape {np.shape(near)}"
            raise ValueError(f"work with window={self.window} needs near, of shape {tokens.shape}. Got {got}.")
        return np.asarray(cost + self.per_near * np.asarray(near, dtype=np.float64))


def attended(lengths: ArrayLike, window: int | None = None) -> NDArray[np.int64]:
    """int64, of the shape of `lengths`: pairs of a query and a key in a sequence that are less than `window` apart."""
    lengths = np.asarray(lengths, dtype=np.int64)
    # Further apart than that, to either side, are 1 + 2 + ... + beyond pairs.
    beyond = np.zeros_like(lengths) if window is None else np.maximum(lengths - window, 0)
    return np.asarray(lengths * lengths - beyond * (beyond + 1))


def deal(costs: ArrayLike, bins: int, method: Method = "refined") -> NDArray[np.int64]:
    """Deals items to bins, the same number to each, so that the heaviest bin is light.

    The result depends on the arguments alone, also from one machine to another: costs are turned into whole numbers
    whose sums are exact, and ties go by index. So every rank can compute it for itself.

    Args:
        costs: (n,) or, for several objectives, (n, m): finite, at least 0. Each objective is measured in shares of its
            own mean; methods that sort do so by their sum, and of a bin the worst one counts. What is less than some
            2^-30 of the largest cost is lost.
        bins: b.
        method: `"order"`: as they come. `"deal"`: sorted and dealt out in turns (Zeng et al. 2022, arXiv 2208.08124,
            section on load balance). `"snake"`: the same, every second turn backwards. `"lpt"`: longest first, into the
            lightest bin with room (a Python loop: slow above some ten thousand items). `"kk"`: balanced largest
            differencing (Karmarkar and Karp 1982; with equal counts Michiels et al. 2003, "Performance ratios for the
            differencing method applied to the balanced number partitioning problem": at most 2 - 1/b times the optimum,
            4/3 for k = 3, the optimum itself for k = 2). `"refined"`: `"kk"`, then swaps between heavy and light bins;
            never worse than `"order"`.

    Returns:
        int64 (b, k): the items of each bin, ascending.

    Raises:
        ValueError: no item, items that do not divide by bins, bins below 1, costs that are negative or not finite, an
            unknown method.
    """
    costs = _checked(costs)
    items = len(costs)
    if method not in _METHODS:
        raise ValueError(f"method must be one of {', '.join(_METHODS)}. Got {method!r}.")
    if bins < 1:
        raise ValueError(f"bins must be at least 1. Got {bins}.")
    if not items or items % bins:
        near = sorted({max(1, items // bins) * bins, -(-items // bins) * bins} - {0})
        raise ValueError(
            f"{items} items cannot be dealt to {bins} bins in equal numbers. "
            f"Take {' or '.join(map(str, near))} items, or another number of bins."
        )
    if bins in (1, items):  # nothing to choose
        return np.arange(items, dtype=np.int64).reshape(bins, -1)
    return np.sort(_METHODS[method](_whole(costs), bins), axis=1)


def imbalance(costs: ArrayLike, assignment: NDArray[np.integer]) -> float:
    """The heaviest bin over the mean of all bins: 1 is even. Of several objectives, the worst.

    Args:
        costs: (n,) or (n, m), as for `deal`.
        assignment: (b, k): the items of each bin.

    Raises:
        ValueError: an assignment that is no table, or costs as `deal` refuses them.
    """
    assignment = np.asarray(assignment)
    if assignment.ndim != 2 or not assignment.size:
        raise ValueError(f"an assignment has the shape (bins, items of a bin). Got {assignment.shape}.")
    loads = _checked(costs)[assignment].sum(axis=1)
    means = loads.mean(axis=0)
    return float(max((peak / mean for peak, mean in zip(loads.max(axis=0), means, strict=True) if mean), default=1.0))


def _checked(costs: ArrayLike) -> NDArray[np.float64]:
    """float64 (n, m)."""
    table = np.asarray(costs, dtype=np.float64)
    if table.ndim not in (1, 2) or (table.ndim == 2 and not table.shape[1]):
        raise ValueError(f"costs must have the shape (items,) or (items, objectives). Got {table.shape}.")
    bad = ~(np.isfinite(table) & (table >= 0))
    if bad.any():
        place = int(np.argwhere(bad)[0][0])
        raise ValueError(f"costs must be finite and at least 0. Got {table[bad][0]} for item {place}.")
    return table if table.ndim == 2 else table[:, None]


def _whole(costs: NDArray[np.float64]) -> NDArray[np.float64]:
    """float64 (m, n): whole numbers, all objectives with the same total (but for rounding) or 0.

    Sums over any items and objectives stay below 2^53, so they are exact in any order. Only `max`, which is exact too,
    and operations on single elements lead there: machines that sum in different orders get the same numbers.
    """
    items, objectives = costs.shape
    costs = np.ascontiguousarray(costs.T)
    peaks = costs.max(axis=1, keepdims=True)
    scale = 2.0 ** (51 - items.bit_length() - objectives.bit_length())
    scaled = np.rint(costs / np.where(peaks > 0, peaks, 1.0) * scale)
    totals = scaled.sum(axis=1, keepdims=True)
    return np.asarray(np.rint(scaled * (totals.max() / np.maximum(totals, 1.0))))


def _turns(weights: NDArray[np.float64], bins: int) -> NDArray[np.int64]:
    """int64 (k, b): the items, heaviest first."""
    return np.argsort(-weights.sum(axis=0), kind="stable").reshape(-1, bins)


def _order(weights: NDArray[np.float64], bins: int) -> NDArray[np.int64]:
    return np.arange(weights.shape[1], dtype=np.int64).reshape(bins, -1)


def _sorted_and_dealt(weights: NDArray[np.float64], bins: int) -> NDArray[np.int64]:
    return _turns(weights, bins).T


def _snake(weights: NDArray[np.float64], bins: int) -> NDArray[np.int64]:
    turns = _turns(weights, bins)
    turns[1::2] = turns[1::2, ::-1]
    return turns.T


def _longest_first(weights: NDArray[np.float64], bins: int) -> NDArray[np.int64]:
    turns, values = _turns(weights, bins), weights.sum(axis=0)
    members: list[list[int]] = [[] for _ in range(bins)]
    room = [(0.0, number) for number in range(bins)]
    for item in turns.ravel().tolist():
        load, lightest = heapq.heappop(room)
        members[lightest].append(item)
        if len(members[lightest]) < len(turns):
            heapq.heappush(room, (load + float(values[item]), lightest))
    return np.array(members, dtype=np.int64)


def _differenced(weights: NDArray[np.float64], bins: int) -> NDArray[np.int64]:
    """Each turn is a partial deal, one item a bin. The two of the widest spread are folded, the heaviest bin of one
    onto the lightest of the other, until one deal is left."""
    turns = _turns(weights, bins)
    count = len(turns)
    loads = dict(enumerate(weights.sum(axis=0)[turns]))  # each (b,), descending
    widest = [(float(load[-1] - load[0]), number) for number, load in loads.items()]
    heapq.heapify(widest)
    folds = []
    for folded in range(count, 2 * count - 1):
        (_, one), (_, other) = heapq.heappop(widest), heapq.heappop(widest)
        load = loads.pop(one) + loads.pop(other)[::-1]
        places = np.argsort(-load, kind="stable")
        loads[folded] = load[places]
        folds.append((one, other, places))
        heapq.heappush(widest, (float(loads[folded][-1] - loads[folded][0]), folded))
    # Back from the last fold to the turns: which place of each partial deal went into which bin.
    source = np.empty((2 * count - 1, bins), dtype=np.int64)
    source[-1] = np.arange(bins)
    for folded, (one, other, places) in reversed(list(enumerate(folds, start=count))):
        source[one] = places[source[folded]]
        source[other] = bins - 1 - source[one]
    return np.take_along_axis(turns, source[:count], axis=1).T


def _refined(weights: NDArray[np.float64], bins: int) -> NDArray[np.int64]:
    order, dealt = _order(weights, bins), _differenced(weights, bins).copy()
    swap(weights, dealt)
    heaviest = [float(weights[:, each].sum(axis=2).max()) for each in (dealt, order)]
    return dealt if heaviest[0] <= heaviest[1] else order


_METHODS: MappingProxyType[str, Callable[[NDArray[np.float64], int], NDArray[np.int64]]] = MappingProxyType(
    {
        "order": _order,
        "deal": _sorted_and_dealt,
        "snake": _snake,
        "lpt": _longest_first,
        "kk": _differenced,
        "refined": _refined,
    }
)
