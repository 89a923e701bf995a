"""Counts the bytes of all tensors that are alive, and the most at once."""

from __future__ import annotations

import weakref
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class LiveBytes(TorchDispatchMode):
    """Inside, follows every storage that an operator makes until nothing refers to it any more.

    Fake tensors count with the sizes that they pretend to have. What a kernel needs inside of itself is not seen.

    torch's own `torch.distributed._tools.mem_tracker.MemTracker` also sorts tensors by kind. It hooks modules,
    parameters and optimisers for that and takes gradients from the parameters' own hooks, which those that come by the
    cube's ledger do not run.
    """

    def __init__(self) -> None:
        super().__init__()
        self.now = 0
        """Bytes that are alive."""
        self.peak = 0
        """The most so far."""
        self._alive: dict[int, weakref.ref[torch.UntypedStorage]] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for each in tree_leaves(result):
            # A DTensor claims the whole of what it has a block of; on "meta" there are sizes and never any memory.
            if isinstance(each, Tensor) and not isinstance(each, DTensor) and each.device.type != "meta":
                self._follow(each.untyped_storage())
        return result

    def follow(self, tensor: Tensor) -> None:
        """Counts a tensor that was made before."""
        self._follow(tensor.untyped_storage())

    def _follow(self, storage: torch.UntypedStorage) -> None:
        address, size = storage._cdata, storage.nbytes()
        if address in self._alive:
            return

        def gone(_: object) -> None:
            del self._alive[address]
            self.now -= size

        self._alive[address] = weakref.ref(storage, gone)
        self.now += size
        self.peak = max(self.peak, self.now)
