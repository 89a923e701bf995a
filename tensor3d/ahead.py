"""The next product's weight, gathered while this one is computed.

Products follow one another in the same order in every step. The order of a pass, forward and backward, is written
down, and in the next one the weight that followed is gathered before it is asked for: in the forward pass the next
layer's, in the backward pass that of the layer before. Where another is asked for, that gather was in vain, no more are
issued ahead in this pass, and its order is the one that counts from then on: that is correct, only slower. The first
pass has nothing to go by and gathers nothing ahead.

What is gathered ahead was read from the weight at that moment, and edits in place are not always seen: `.data` and the
operators of foreach and fused optimisers leave the counters of a DTensor as they are. So nothing is gathered ahead
where weights usually change: across the end of a backward pass, and where a second forward pass begins. An edit that is
seen makes a gather in vain. All of this follows from the order of the calls alone and never from what is still alive,
so all ranks issue the same collectives in the same order; for it the weights of the last two passes are held.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor, nn

from tensor3d.collectives import Pending

Start = Callable[[nn.Parameter], Pending]
"""Issues the gather of a weight."""
Kind = Literal["product", "lookup"]
_Key = tuple[int, bool, Kind, str, torch.dtype]
_LONGEST = 10_000  # uses that are written down, should no backward pass ever end them


@dataclass(frozen=True, kw_only=True)
class _Use:
    """One use of a weight in a pass."""

    key: _Key
    weight: nn.Parameter
    start: Start

    @property
    def is_forward(self) -> bool:
        return not self.key[1]


@dataclass(frozen=True, kw_only=True)
class _OnTheWay:
    key: _Key
    weight: nn.Parameter
    version: tuple[int, ...]
    gathering: Pending


class Ahead:
    """The order of the uses of weights, and the one gather that is ahead of them. One on each cube."""

    def __init__(self) -> None:
        self._order: list[_Use] = []
        self._now: list[_Use] = []
        self._seen: set[_Key] = set()
        self._astray = False
        self._pass = 0
        self._on_the_way: _OnTheWay | None = None
        self.used, self.dropped = 0, 0
        """Gathers ahead of their use that were used, and those that were in vain."""

    def __getstate__(self) -> dict[str, Any]:
        return {"used": self.used}  # a model that is stored takes its cube along, and no order

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(vars(Ahead()))

    def take(
        self, weight: nn.Parameter, block: Tensor, wanted: tuple[Kind, str, torch.dtype], passes: int, start: Start
    ) -> Pending:
        """The gather of `weight`: the one that is on its way, else one that is issued now.

        Args:
            block: this rank's part of the weight.
            wanted: what for, and the axis and the type in which it is gathered.
            passes: backward passes that have ended; with each, an order ends.
            start: issues the gather.
        """
        if passes != self._pass or len(self._now) == _LONGEST:
            self._order, self._astray, self._pass = self._now if passes != self._pass else [], False, passes
            self._now, self._seen = [], set()
        # What is computed again comes in the midst of a backward pass, and is another use than the first one.
        key: _Key = (id(weight), torch._C._current_graph_task_id() != -1, *wanted)
        place = len(self._now)
        if place < len(self._order) and self._order[place].key != key:
            self._astray = True
        self._now.append(_Use(key=key, weight=weight, start=start))
        self._seen.add(key)
        ahead, self._on_the_way = self._on_the_way, None
        if ahead is None:
            return start(weight)
        if ahead.key == key and ahead.weight is weight and ahead.version == _version(weight, block):
            self.used += 1
            return ahead.gathering
        self.dropped += 1
        ahead.gathering.wait()
        return start(weight)

    def go_on(self, local: Callable[[nn.Parameter], Tensor]) -> None:
        """Issues the gather that came next at this place of the pass before.

        Args:
            local: gives this rank's part of a weight.
        """
        if self._on_the_way is not None or self._astray or len(self._now) >= len(self._order):
            return
        following = self._order[len(self._now)]
        if following.is_forward and following.key in self._seen:
            return  # a second forward pass begins, and somebody may edit weights before it
        weight = following.weight
        version = _version(weight, local(weight))
        gathering = following.start(weight)
        self._on_the_way = _OnTheWay(key=following.key, weight=weight, version=version, gathering=gathering)


def _version(weight: nn.Parameter, block: Tensor) -> tuple[int, ...]:
    """Changes with the numbers in a weight: optimisers write to its block, others to the weight itself."""
    return weight._version, block._version, int(block.untyped_storage()._cdata), int(block.storage_offset())
