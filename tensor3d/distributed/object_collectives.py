"""Decisions that all ranks of a run take together: what one of them cannot do, none of them begins."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Mapping, Sequence
from datetime import timedelta
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from tensor3d.distributed.cube import Cube
from tensor3d.distributed.failure_detector import POLL
from tensor3d.distributed.host_all_to_all import PeerError
from tensor3d.torch_private import default_store

# ----------------------------------------------------------------------------------------------------------------------
# The ranks that write one checkpoint, on a process group of their own: a background thread may use it at any time.


class ObjectGroup:
    """Every rank makes one at the same point; it then makes the same calls in the same order, from one thread at a
    time. Objects travel over gloo, whatever the backend of the job; on a cube of one process nothing travels.

    Args:
        timeout: how long a call waits for a rank that neither comes nor fails.
    """

    def __init__(self, cube: Cube, timeout: timedelta) -> None:
        self.rank = cube.rank
        self.size = cube.shape.ranks if cube.mesh is not None else 1
        self._group: Any = None
        if cube.mesh is not None:
            self._group = dist.new_group(backend="gloo", timeout=timeout, group_desc="checkpoints")

    def gather(self, value: Any) -> list[Any]:
        """All values by rank, on rank 0; an empty list on the others."""
        if self._group is None:
            return [value]
        values: list[Any] = [None] * self.size if self.rank == 0 else []
        dist.gather_object(value, values if self.rank == 0 else None, dst=0, group=self._group)
        return values

    def scatter(self, values: Sequence[Any]) -> Any:
        """To each rank its own of the values that rank 0 has."""
        if self._group is None:
            return values[0]
        mine: list[Any] = [None]
        dist.scatter_object_list(mine, list(values) if self.rank == 0 else None, src=0, group=self._group)
        return mine[0]

    def broadcast(self, value: Any) -> Any:
        """Rank 0's value, on every rank."""
        if self._group is None:
            return value
        values = [value]
        dist.broadcast_object_list(values, src=0, group=self._group)
        return values[0]

    def any(self, flag: bool) -> bool:
        """Whether it is so on any rank."""
        if self._group is None:
            return flag
        found = torch.tensor([int(flag)])
        dist.all_reduce(found, op=dist.ReduceOp.MAX, group=self._group)
        return bool(found.item())

    def close(self) -> None:
        if self._group is not None and dist.is_initialized():
            dist.destroy_process_group(self._group)
        self._group = None


# --- Decisions that all ranks of a run take together ------------------------------------------------------------------

T = TypeVar("T")


def run_on_rank0(cube: Cube, action: Callable[[], T], *, any_time: bool = False) -> T:
    """The result of `action`, done on rank 0 alone; its ValueError or OSError is a ValueError on every rank.

    Args:
        any_time: it may take longer than the time-out of the process group.
    """
    outcome: list[Any] = [None, None]
    if cube.rank == 0:
        try:
            outcome[0] = action()
        except (ValueError, OSError) as problem:
            outcome[1] = format_error(problem)
    if cube.mesh is not None:
        if any_time:
            _wait_for_rank0(cube)
        dist.broadcast_object_list(outcome, device=cube.device)
    if outcome[1] is not None:
        raise ValueError(outcome[1])
    result: T = outcome[0]
    return result


def _wait_for_rank0(cube: Cube) -> None:
    """Returns on every rank when rank 0 has come here, however late: in the store no time-out runs, as it does in a
    collective. Where rank 0 ends instead, whoever has started the ranks ends them."""
    store = default_store()
    # Ranks count, each for itself and hence all alike, how often they have come here.
    number = store.add(f"tensor3d/waits for rank 0 of {cube.rank}", 1)
    key = f"tensor3d/rank 0 has come {number}"
    if cube.rank == 0:
        store.set(key, "")
    while not store.check([key]):
        time.sleep(POLL)


def run_on_all_ranks(cube: Cube, action: Callable[[], T], *, kept: type[ValueError] = ValueError) -> T:
    """The result of `action`, done on each rank; the ValueError or OSError of any is a ValueError on all of them, which
    names the rank, unless all of them say the same.

    The action itself must not wait for other ranks, unless by `HostAllToAll`, which end when one of them gives up.

    Args:
        kept: an error of this class is raised as one on all ranks.
    """
    result, problem, follows, keeps = None, None, False, False
    try:
        result = action()
    except (ValueError, OSError) as error:
        problem, keeps = format_error(error), isinstance(error, kept)
    except PeerError as error:
        problem, follows = format_error(error), True
    outcomes = all_gather_object(cube, (problem, follows, keeps))
    failed = [(follows, rank, told) for rank, (told, follows, _) in enumerate(outcomes) if told is not None]
    if failed:
        _, rank, told = min(failed)  # one that failed for a reason of its own
        kind = kept if outcomes[rank][2] else ValueError
        if len(failed) == len(outcomes) and len({told for *_, told in failed}) == 1:
            raise kind(told)
        several = len(failed) - 1
        others = f" ({several} other rank{'s' if several > 1 else ''} failed too)" if several else ""
        raise kind(f"rank {rank}: {told}{others}")
    return result  # type: ignore[return-value]  # no problem, so there is a result


def check_same_on_all_ranks(cube: Cube, what: str, value: str) -> None:
    """Raises ValueError on every rank unless all ranks have the same value."""
    check_all_same_on_all_ranks(cube, {what: value})


def check_all_same_on_all_ranks(cube: Cube, values: Mapping[str, str]) -> None:
    """The same of several values by what they are, of which ranks may have others: the first that differs is named."""
    by_rank = all_gather_object(cube, dict(values))
    for what in dict.fromkeys(name for each in by_rank for name in each):
        found = [each.get(what, "nothing") for each in by_rank]
        different = [rank for rank, other in enumerate(found) if other != found[0]]
        if different:
            raise ValueError(
                f"{what} differs between ranks: rank {different[0]} has {found[different[0]][:16]}, rank 0 "
                f"{found[0][:16]}. Use the same files, and the same versions of Python, numpy and scipy, on all "
                "machines."
            )


def check_copies(tensors: Mapping[str, Tensor], cube: Cube) -> None:
    """Compares what ranks hold copies of: parameters over `data`, vectors over the rows of their face too. Nothing
    brings copies together again that began apart: each rank trains its own, and a checkpoint keeps one of them.

    Reads all of this rank's blocks once, and sends a few bytes. Every rank calls it alike, with the same names. The
    first backward pass of a parameter does it by itself, and so does each save of a checkpoint.

    Args:
        tensors: by name, such as `dict(model.named_parameters())`. What is no DTensor is passed over.

    Raises:
        ValueError: copies that differ in a bit, by name; on every rank.
    """
    if cube.ledger.agreement is not None and not cube.traffic.is_dry:
        cube.ledger.agreement.check_copies(tensors)


def format_error(problem: Exception) -> str:
    """One line for the user, also of what the operating system refuses."""
    if isinstance(problem, OSError) and problem.filename is not None:
        # Absolute: who reads a log does not know where relative paths began.
        name = os.path.abspath(os.fsdecode(problem.filename)) if isinstance(problem.filename, str | bytes) else None
        return f"{name or problem.filename} cannot be read or written: {problem.strerror}."
    return str(problem)


def first_names(names: Sequence[str], at_most: int) -> str:
    """The first of them, in words, and how many more there are."""
    more = f" and {len(names) - at_most} more" if len(names) > at_most else ""
    return ", ".join(names[:at_most]) + more


def all_gather_object(cube: Cube, value: Any) -> list[Any]:
    """What each rank has, by rank."""
    if cube.mesh is None:
        return [value]
    values: list[Any] = [None] * cube.shape.ranks
    dist.all_gather_object(values, value)
    return values
