"""The next product's weight, or the weights of the next block (sharding/weight_slabs.py), gathered while this one is
computed.

Products follow one another in the same order in every step. The order of a pass, forward and backward, is written
down, and in the next one the weight that followed is gathered before it is asked for: in the forward pass the next
layer's, in the backward pass that of the layer before. Where another is asked for, that gather was in vain, no more are
issued ahead in this pass, and its order is the one that counts from then on: that is correct, only slower. The first
pass has nothing to go by and gathers nothing ahead. A lookup for which no weight travels has its place in the order all
the same, since what follows it must not be gathered before it, and so has a product whose weight was kept: what is
gathered long before its use fills memory.

What is gathered ahead was read from the weight at that moment, and edits in place are not always seen: `.data` and the
operators of foreach and fused optimisers leave the counters of a DTensor as they are. So nothing is gathered ahead
where weights may change: not into a forward pass or from one into a backward pass, also not for the first layer of a
second model, but only for what works on results of products before it. (What was ahead between the passes would also be
in memory beside the logits.) What remains are edits between two layers. One that is seen makes a gather in vain; it
must be made on all ranks, since those without it would not gather again. All else follows from the order of the calls
alone and never from what is still alive, so all ranks issue the same collectives in the same order; for it the weights
of the last two passes are held (`WeightPrefetcher.forget` lets them go).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Any, Literal

import torch
from torch import Tensor, nn

from tensor3d.distributed.autograd_graph import walk
from tensor3d.distributed.collectives import Axis, CommHandle
from tensor3d.torch_private import backward_pass, storage_id

Weights = Sequence[nn.Parameter]
Start = Callable[[Weights, Sequence[Axis], torch.dtype], CommHandle]
"""Issues one gather over x of weights, the rows of each cut over another axis, in a type."""
Local = Callable[[nn.Parameter], Tensor]
"""Gives this rank's part of a weight."""
Kind = Literal["product", "lookup"]


class PassPosition(Enum):
    """Where a use of a weight stands in the order of a pass."""

    FIRST = "first"
    """It works on nothing that others of the pass have computed."""
    FOLLOWING = "following"
    """It works on results of others in the pass."""
    UNORDERED = "unordered"
    """It has no place in the order of a step, since no backward pass follows."""


_Key = tuple[tuple[int, ...], bool, Kind, tuple[str, ...], torch.dtype]
_LONGEST = 10_000  # uses that are written down, should no backward pass ever end them


def follows(tensor: Tensor) -> bool:
    """Whether a product or a lookup on a cube is among what `tensor` was computed from, as far as autograd knows."""
    return any(getattr(node, "is_ordered", False) for node, _ in walk(tensor, lambda _: True))


@dataclass(frozen=True, kw_only=True)
class _WeightUse:
    """One use of a weight, or of some together, in a pass."""

    key: _Key
    weights: Weights
    rows: Sequence[Axis]
    dtype: torch.dtype
    follows: bool
    """Whether it works on what others have computed in the same direction."""
    gathers: bool
    """False: a lookup for which no weight travels (layers/embedding.py), or a product in backward whose weight was
    kept. It has its place in the order all the same: what comes after it follows on it and may not be gathered before
    it."""

    @property
    def is_backward(self) -> bool:
        return self.key[1]


@dataclass(frozen=True, kw_only=True)
class _InFlight:
    key: _Key
    version: tuple[int, ...]
    weights: Weights
    """Held, so that their ids in the key stay theirs."""
    gathering: CommHandle


class WeightPrefetcher:
    """The order of the uses of weights, and the one gather that is ahead of them. One on each cube."""

    def __init__(self) -> None:
        self._order: list[_WeightUse] = []
        self._now: list[_WeightUse] = []
        self._astray = False
        self._on_the_way: _InFlight | None = None
        self.used, self.dropped = 0, 0
        """Gathers ahead of their use that were used, and those that were in vain."""

    def __getstate__(self) -> dict[str, Any]:
        return {"used": self.used}  # a model that is stored takes its cube along, and no order

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(vars(WeightPrefetcher()))

    def take(
        self,
        weights: Weights,
        local: Local,
        kind: Kind,
        rows: Sequence[Axis],
        dtype: torch.dtype,
        following: bool,
        start: Start,
    ) -> CommHandle:
        """The gather of `weights`: the one that is on its way, else one that is issued now.

        Args:
            kind: what for.
            rows, dtype: see `Start`.
            following: in a forward pass, whether this use works on what others have computed.
            start: issues the gather.
        """
        key = self._note(weights, kind, rows, dtype, following, gathers=True)
        ahead = self._on_the_way
        if ahead is None:
            return start(weights, rows, dtype)
        if ahead.key == key and ahead.version == _version(weights, local):
            self.used, self._on_the_way = self.used + 1, None
            return ahead.gathering
        self._drop()
        return start(weights, rows, dtype)

    def pass_lookup(self, weight: nn.Parameter, rows: Axis, dtype: torch.dtype, following: bool) -> None:
        """A lookup that needs no gather has its place in the order, too; arguments as of `take`."""
        self._note([weight], "lookup", [rows], dtype, following, gathers=False)
        self._drop()  # what is ahead now was for another use

    def _note(
        self,
        weights: Weights,
        kind: Kind,
        rows: Sequence[Axis],
        dtype: torch.dtype,
        following: bool,
        *,
        gathers: bool,
    ) -> _Key:
        """Writes a use down at its place of the pass."""
        if len(self._now) == _LONGEST:
            self._order, self._now = [], []
        # What is computed again comes in the midst of a backward pass, and is another use than the first one.
        backward = backward_pass() != -1
        key: _Key = (tuple(map(id, weights)), backward, kind, tuple(axis.name for axis in rows), dtype)
        place = len(self._now)
        if place < len(self._order) and (self._order[place].key, self._order[place].gathers) != (key, gathers):
            self._astray = True
        if backward:
            following = bool(self._now) and self._now[-1].is_backward
        self._now.append(
            _WeightUse(key=key, weights=weights, rows=rows, dtype=dtype, follows=following, gathers=gathers)
        )
        return key

    def pass_kept(self, weight: nn.Parameter, rows: Axis, dtype: torch.dtype) -> None:
        """A product of a backward pass uses a weight that was kept gathered. It has its place in the order, too: what
        comes after it works on its results, and is not gathered until it is its turn, to lie in memory no earlier."""
        self._note([weight], "product", [rows], dtype, following=True, gathers=False)
        self._drop()

    def go_on(self, local: Local, start: Start) -> None:
        """Issues the gather that came next at this place of the pass before, by `start`."""
        if self._on_the_way is not None or self._astray or len(self._now) >= len(self._order):
            return
        following = self._order[len(self._now)]
        if not (following.follows and following.gathers):
            return
        weights = following.weights
        version = _version(weights, local)
        gathering = start(weights, following.rows, following.dtype)
        self._on_the_way = _InFlight(key=following.key, version=version, weights=weights, gathering=gathering)

    def end(self) -> None:
        """A backward pass has ended, and with it an order."""
        self._drop()
        self._order, self._now, self._astray = self._now, [], False

    def forget(self) -> None:
        """Lets go of all weights: for a model that is given up while its cube lives on. On all ranks alike. The next
        pass is a first one."""
        self._drop()
        self._order, self._now, self._astray = [], [], False

    def _drop(self) -> None:
        ahead, self._on_the_way = self._on_the_way, None
        if ahead is not None:
            self.dropped += 1
            ahead.gathering.wait()


def _version(weights: Weights, local: Local) -> tuple[int, ...]:
    """Changes with the numbers in a weight: optimisers write to its block, others to the weight itself."""
    found: list[int] = []
    for weight in weights:
        block = local(weight)
        found += [weight._version, block._version, storage_id(block), int(block.storage_offset())]
    return tuple(found)
