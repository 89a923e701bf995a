"""The objects of a type that are alive in this process."""

from __future__ import annotations

import gc
from typing import Any


def objects_of(kind: type, *, subclasses: bool = False) -> list[Any]:
    """All objects of a type in this process that the collector knows.

    An object refers to its type, so those are asked for. `gc.get_objects()` would hold every object for a while, also
    what a `tuple(...)` of a generator is filling in another thread, which then fails there ("SystemError: bad argument
    to internal function"). Objects are judged by type(): to ask a foreign one for its `__class__` may run anything.
    """
    kinds = {kind}
    left = [kind] if subclasses else []
    while left:
        fresh: set[type] = set(type.__subclasses__(left.pop())) - kinds
        kinds |= fresh
        left += fresh
    return [each for each in gc.get_referrers(*kinds) if type(each) in kinds]
