"""Blocks of bytes between processes over gloo, with a wait that can be broken off."""

from __future__ import annotations

import re
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from datetime import timedelta
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray

_Bytes = NDArray[np.uint8]
_SLICE = 0.25
"""Seconds for which a transfer is waited for before asking whether to go on."""
_MARGIN = timedelta(seconds=5)
"""By this gloo's own time-out is later than ours, which says more."""


class TransferError(RuntimeError):
    """A transfer has failed; which peer is at fault is not known here."""

    def __init__(self, reason: str, *, late: bool = False) -> None:
        super().__init__(reason)
        self.late = late
        """Whether nothing broke and time ran out."""


class Links:
    """Connections between all members of a group, over which one thread at a time exchanges blocks.

    The group is a bare gloo one, unknown to `torch.distributed`'s registry: only its members make it, whatever backend
    the job has, and it goes when nobody holds it.

    Args:
        store: where the members find each other's addresses; theirs alone.
        index: this one's position among them.
        size: how many there are.
        timeout: how long an exchange waits, and this call.

    Raises:
        TransferError: a member cannot be reached.
    """

    def __init__(self, store: dist.Store, index: int, size: int, timeout: timedelta) -> None:
        self._timeout = timeout.total_seconds()
        with _named_errors():
            # Any: the collectives of a bare group have no stubs.
            self._group: Any = dist.ProcessGroupGloo(store, index, size, timeout + _MARGIN)

    def exchange(
        self, pieces: Sequence[Sequence[_Bytes]], coming: Sequence[int], broken_off: Callable[[], bool]
    ) -> list[_Bytes]:
        """Sends member i the concatenation of `pieces[i]` and returns the `coming[i]` bytes from each, by position.

        Nothing is sent between two members that expect nothing of each other. The blocks share a buffer.

        Args:
            pieces: for this member itself as many bytes as it expects.
            coming: where a member sends less, the rest of its block is undefined; where more, gloo ends the process.
            broken_off: asked a few times a second; when true, the exchange is given up.

        Raises:
            TransferError: gloo fails, the time is over, `broken_off`, or closed.
        """
        group = self._group
        if group is None:
            raise TransferError("the links are closed")
        sent = [sum(map(len, parts)) for parts in pieces]
        # Memory of torch, not of numpy: a thread of gloo may be the last to let go of it, and should not need Python.
        outgoing, incoming = (torch.empty(sum(sizes), dtype=torch.uint8) for sizes in (sent, coming))
        if len(outgoing):
            np.concatenate([piece for parts in pieces for piece in parts], out=outgoing.numpy())
        with _named_errors():
            work = group.alltoall_base(incoming, outgoing, list(coming), sent)
        try:
            self._wait(work, broken_off)
        except BaseException:
            self._group = None
            if not work.is_completed():
                threading.Thread(target=_outlive, args=(group, work), name="gloo-outlive", daemon=True).start()
            raise
        return np.split(incoming.numpy(), np.cumsum(coming)[:-1])

    def close(self) -> None:
        """Lets go of the connections, which breaks off whatever the others still wait for here."""
        self._group = None

    def _wait(self, work: dist.Work, broken_off: Callable[[], bool]) -> None:
        deadline = time.monotonic() + self._timeout
        while not work.is_completed():
            left = deadline - time.monotonic()
            if left <= 0:
                raise TransferError(f"it did not end within {self._timeout:g} s", late=True)
            if self._group is None or broken_off():
                raise TransferError("broken off")
            # Raises at the end of the slice as it does on failure; which of them, the next look at it shows. Less than
            # a millisecond would be taken for no limit at all.
            with suppress(RuntimeError):
                work.wait(timedelta(seconds=min(left + 0.001, _SLICE)))
        with _named_errors():
            work.wait()


def _outlive(group: Any, work: dist.Work) -> None:
    """Holds a group until its transfer is over: its destructor would hold the caller, or the end of the process."""
    while not work.is_completed():
        time.sleep(_SLICE)


@contextmanager
def _named_errors() -> Iterator[None]:
    """gloo's errors, without the place in its source and the advice that follows the first sentence."""
    try:
        yield
    except RuntimeError as error:
        line = re.sub(r"^\[[^\]]*\]\s*", "", (str(error).splitlines() or [""])[0])
        raise TransferError(f"gloo: {line.partition('. ')[0]}") from error
