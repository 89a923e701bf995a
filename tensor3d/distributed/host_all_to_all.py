"""Host memory between processes, from a background thread while the device trains.

    all_to_all   parts[i] (n_i,) to peer i  ->  an array (m_i,) from each peer i; sizes differ as they like
    all_gather   array (n,) to every peer   ->  the same

It travels over gloo, whatever the backend of the job: to each peer a block, which is a header and an array.

    header   32 bytes: number of the round, elements, type, call; by it a peer that is out of step is found out
    array    its own bytes, filled up to a multiple of 16, so that every array that arrives is aligned
"""

from __future__ import annotations

import re
import threading
import time
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from datetime import timedelta
from types import TracebackType
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray

from tensor3d.distributed.cube import Cube
from tensor3d.distributed.cube_shape import AxisName
from tensor3d.distributed.failure_detector import PeerMonitor
from tensor3d.distributed.job_store import KeyedStore
from tensor3d.distributed.process_group import job_secret
from tensor3d.torch_private import default_store

# --- Blocks of bytes between processes over gloo, with a wait that can be broken off ----------------------------------

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


class GlooLinks:
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


# --- Host memory between processes, from a background thread while the device trains ----------------------------------

_Array = NDArray[Any]
_HEADER = np.dtype([("round", "<i8"), ("elements", "<i8"), ("dtype", "S8"), ("call", "S8")])
_ALIGNMENT = 16
_TO_ALL, _GATHER = b"to all", b"gather"
_CALLS = {_TO_ALL: "all_to_all", _GATHER: "all_gather"}


class PeerError(RuntimeError):
    """A peer died, is stopped, gave up or is out of step; the message names it. Its peers are of no more use."""


class HostAllToAll:
    """Processes that pass arrays to one another, in rounds. Made by `along`.

    All peers make the same calls in the same order, one at a time, each from a thread of its choice; the main thread
    may use any other process group meanwhile. `abort` and `close` may be called from any thread.

    A peer that dies is named within about two seconds of the round that misses it; one that is stopped or stays away,
    when the timeout is over. From then on every call raises that `PeerError`, on all peers.

    A context manager: leaving it closes, and leaving it by an error aborts first.
    """

    index: int
    """This process's position among its peers."""
    ranks: tuple[int, ...]
    """Global ranks of the peers, ascending."""
    rounds: int
    """Calls that have ended well."""
    received_bytes: int
    """Bytes of the arrays that came from others."""

    def __init__(
        self, ranks: Sequence[int], index: int, *, names: Sequence[str], store: Any, timeout: timedelta
    ) -> None:
        self.index, self.ranks = index, tuple(ranks)
        self.rounds = self.received_bytes = 0
        self._names, self._name = tuple(names), names[index]
        self._closed = False
        self._failure = ""
        self._roll: PeerMonitor | None = None
        self._links: GlooLinks | None = None
        if store is not None:
            self._connect(store, timeout)

    @classmethod
    def along(
        cls, cube: Cube, axis: AxisName, *, within: int | None = None, timeout: timedelta = timedelta(minutes=5)
    ) -> HostAllToAll:
        """The peers of this process along an axis of the cube.

        Every rank of the job calls it at the same point, with the same arguments. With one member nothing is
        connected, and no process group is needed.

        Args:
            cube: arranges the ranks.
            axis: its members are the peers.
            within: cuts the axis into blocks of so many consecutive members, peers among themselves: those of a node,
                say. Default: the whole axis.
            timeout: how long a round, or this call, waits for a peer that neither comes nor fails.

        Raises:
            ValueError: a `within` that does not divide the axis, or a timeout that is not positive.
            PeerError: a peer has not come.
        """
        members = cube.axis(axis)
        block = members.size if within is None else within
        if block < 1 or members.size % block:
            raise ValueError(f"within must divide the {members.size} members along {axis}. Got {within}; omit it.")
        if timeout <= timedelta(0):
            raise ValueError(f"timeout must be positive. Got {timeout.total_seconds():g} s.")
        first = members.index // block * block
        ranks = members.ranks[first : first + block]
        names = [f"rank {rank} ({axis} {first + i} of {members.size})" for i, rank in enumerate(ranks)]
        store = _store(cube.rank, ranks) if block > 1 else None
        return cls(ranks, members.index - first, names=names, store=store, timeout=timeout)

    def _connect(self, store: Any, timeout: timedelta) -> None:
        # A connection of its own: what blocks in the main thread's, a new process group say, does not block this one.
        roll = PeerMonitor(KeyedStore(store.clone(), "failures", job_secret(), strict=False), self._names, self.index)
        if missing := roll.muster(timeout):
            raise PeerError(f"{missing}; every rank of the job must call Peers.along at the same point.")
        self._roll = roll
        # Also when nobody closes: at exit a thread in the middle of a call to the store could not end in good order.
        weakref.finalize(self, roll.close)
        try:
            self._links = GlooLinks(dist.PrefixStore("gloo", store), self.index, self.size, timeout)
        except TransferError as error:
            raise self._failed(error) from error

    @property
    def size(self) -> int:
        return len(self.ranks)

    # --- rounds ---------------------------------------------------------------------------------------------------

    def all_to_all(self, parts: Sequence[_Array], *, sizes: Sequence[int] | None = None) -> list[_Array]:
        """Sends `parts[i]` to peer i and returns what each peer sent here, by position.

        Args:
            parts: one array (n_i,) for each peer, this one included, of any type without objects; the same type on all
                peers.
            sizes: elements that come from each peer, if known; else they travel first. They must be right: of a peer
                that sends more, gloo ends this process.

        Returns:
            arrays (m_i,), writable. Those of others share one buffer.

        Raises:
            ValueError: arguments that cannot be sent. On this rank alone, before anything is sent (see `abort`).
            PeerError: a peer has failed, or sent something else.
        """
        return self._exchange(_TO_ALL, list(parts), sizes)

    def all_gather(self, array: _Array, *, sizes: Sequence[int] | None = None) -> list[_Array]:
        """Returns every peer's array, by position. Arguments and errors are those of `all_to_all`. A copy for each peer
        is made, so sending takes about the memory of what comes."""
        return self._exchange(_GATHER, [array] * self.size, sizes)

    def _exchange(self, call: bytes, parts: list[_Array], sizes: Sequence[int] | None) -> list[_Array]:
        dtype = _check_arguments(parts, sizes, members=self.size, index=self.index)
        with self._round() as number:
            own = np.array(parts[self.index])
            if self._links is None:
                return [own]
            headers = np.zeros(self.size, dtype=_HEADER)
            headers["round"], headers["dtype"], headers["call"] = number, dtype.str.encode(), call
            headers["elements"] = [len(part) for part in parts]
            if sizes is None:
                came, _ = self._swap(headers, [part[:0] for part in parts], [0] * self.size)
                sizes = came["elements"].tolist()
                self._check_headers(came, headers, sizes)
            came, arrays = self._swap(headers, parts, sizes)
            self._check_headers(came, headers, sizes)
            arrays[self.index] = own
            self.received_bytes += sum(array.nbytes for array in arrays) - own.nbytes
            return arrays

    @contextmanager
    def _round(self) -> Iterator[int]:
        if self._closed:
            raise ValueError("the peers are closed. Make others with Peers.along, on every rank.")
        if self.failure:
            raise PeerError(self.failure)
        number = self.rounds + 1
        if self._roll:
            self._roll.note(number, inside=True)
        yield number
        self.rounds = number
        if self._roll:
            self._roll.note(number, inside=False)

    def _swap(self, headers: _Array, parts: Sequence[_Array], sizes: Sequence[int]) -> tuple[_Array, list[_Array]]:
        """Sends every other peer its header and its part; returns headers (size,) and arrays as they came."""
        links, roll = self._links, self._roll
        assert links is not None
        assert roll is not None
        itemsize = parts[0].itemsize
        pieces: list[list[NDArray[np.uint8]]] = [[] for _ in parts]
        coming = [0] * self.size
        others = [peer for peer in range(self.size) if peer != self.index]
        for peer in others:
            content = np.ascontiguousarray(parts[peer]).view(np.uint8)
            fill = np.zeros(-len(content) % _ALIGNMENT, dtype=np.uint8)
            pieces[peer] = [headers[peer : peer + 1].view(np.uint8), content, fill]
            coming[peer] = _HEADER.itemsize + -(-sizes[peer] * itemsize // _ALIGNMENT) * _ALIGNMENT
        try:
            blocks = links.exchange(pieces, coming, broken_off=lambda: bool(roll.broken))
        except TransferError as error:
            raise self._failed(error) from error
        came, arrays = headers.copy(), [part[:0] for part in parts]
        for peer in others:
            head, rest = np.split(blocks[peer], [_HEADER.itemsize])
            came[peer] = head.view(_HEADER)[0]
            arrays[peer] = rest[: sizes[peer] * itemsize].view(parts[0].dtype)
        return came, arrays

    def _check_headers(self, came: _Array, own: _Array, sizes: Sequence[int]) -> None:
        for peer, size in enumerate(sizes):
            number, _, dtype, call = own[peer].item()
            theirs, due = came[peer].item(), (number, size, dtype, call)
            if peer != self.index and theirs != due:
                self.abort(f"{self._names[peer]} sent {_told(theirs)} where {_told(due)} was due")
                raise PeerError(self.failure)

    # --- the end --------------------------------------------------------------------------------------------------

    @property
    def failure(self) -> str:
        """Why no round is possible any more, the sentence of the `PeerError`; empty as long as all is well."""
        return (self._roll.broken if self._roll else "") or self._failure

    def abort(self, message: str) -> None:
        """Tells the peers that this rank cannot go on: bad data, say. They raise `PeerError` with the message and this
        rank's name, those who wait for it at once, the others at their next call; so does this rank.

        Returns when they have heard it, after about two seconds at most. After a failure or `close` it does nothing.
        """
        if self._closed or self.failure:
            return
        self._failure = f"{self._name} gave up after round {self.rounds}: {message}"
        if self._roll and self._links:
            self._roll.give_up(message)
            self._links.close()

    def blame(self, problem: str) -> PeerError:
        """Finds out which peer is to blame for something that failed elsewhere: a collective of the main thread, say,
        whose error names no rank. Takes up to some two seconds; no round is possible after it.
        """
        return self._failed(TransferError(problem))

    def close(self) -> None:
        """Leaves the peers; a second call does nothing. A round that another thread is in ends with `PeerError`, here
        and on the peers, which cannot end it either."""
        self._closed = True
        if self._roll and self._links:
            self._roll.close()
            self._links.close()

    def __enter__(self) -> HostAllToAll:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if error is not None:
            self.abort(f"{type(error).__name__}: {error}")
        self.close()

    def _failed(self, error: TransferError) -> PeerError:
        """Finds out why a transfer failed."""
        if self._closed:
            return PeerError("the peers were closed while a round was under way")
        if not self.failure and self._roll:
            self._failure = self._roll.fail(str(error), late=error.late)
        if self._links:
            self._links.close()
        return PeerError(self.failure)

    def __repr__(self) -> str:
        return f"Peers({self._name}, {self.index} of ranks {list(self.ranks)}, {self.rounds} rounds)"


def _store(rank: int, ranks: Sequence[int]) -> Any:
    """The peers' own part of the job's store. They must not find the addresses that others, or they, left before, so
    ranks count, each for itself and hence all alike, how many peers they have made."""
    default = default_store()
    number = default.add(f"tensor3d/peers of {rank}", 1)
    return dist.PrefixStore(f"tensor3d/peers {number} from {ranks[0]}", default)


def _check_arguments(
    parts: Sequence[_Array], sizes: Sequence[int] | None, *, members: int, index: int
) -> np.dtype[Any]:
    """The type of the arrays. Raises ValueError for what cannot be sent."""
    if len(parts) != members:
        raise ValueError(f"an array for each of the {members} peers is needed. Got {len(parts)}.")
    dtype = parts[0].dtype
    if dtype.hasobject or not dtype.itemsize:
        raise ValueError(f"arrays of {dtype} cannot be sent; convert them to numbers or bytes.")
    for part in parts:
        if part.ndim != 1 or part.dtype != dtype:
            raise ValueError(
                f"arrays for peers have one dim and all the same type, {dtype}. Got {part.shape} of {part.dtype}."
            )
    own = len(parts[index])
    if sizes is not None and (len(sizes) != members or min(sizes) < 0 or sizes[index] != own):
        raise ValueError(
            f"sizes are {members} numbers of elements, the one at {index}, this rank's own, {own}. Got {list(sizes)}."
        )
    return dtype


def _told(header: tuple[int, int, bytes, bytes]) -> str:
    number, elements, dtype, call = header
    return f"{elements} elements of {dtype.decode()} for {_CALLS.get(call, 'another call')} in round {number}"
