"""Decisions that all ranks of a run take together: what one of them cannot do, none of them begins."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import torch.distributed as dist

from tensor3d.cube import Cube
from tensor3d.peers import PeerError

T = TypeVar("T")


def on_first_rank(cube: Cube, action: Callable[[], T]) -> T:
    """The result of `action`, done on rank 0 alone; its ValueError or OSError is a ValueError on every rank."""
    outcome: list[Any] = [None, None]
    if cube.rank == 0:
        try:
            outcome[0] = action()
        except (ValueError, OSError) as problem:
            outcome[1] = in_words(problem)
    if cube.mesh is not None:
        dist.broadcast_object_list(outcome, device=cube.device)
    if outcome[1] is not None:
        raise ValueError(outcome[1])
    result: T = outcome[0]
    return result


def on_every_rank(cube: Cube, action: Callable[[], T]) -> T:
    """The result of `action`, done on each rank; the ValueError or OSError of any is a ValueError on all of them, which
    names the rank, unless all of them say the same.

    The action itself must not wait for other ranks, unless by `Peers`, which end when one of them gives up.
    """
    result, problem, follows = None, None, False
    try:
        result = action()
    except (ValueError, OSError) as error:
        problem = in_words(error)
    except PeerError as error:
        problem, follows = in_words(error), True
    outcomes = gathered(cube, (problem, follows))
    failed = [(follows, rank, told) for rank, (told, follows) in enumerate(outcomes) if told is not None]
    if failed:
        _, rank, told = min(failed)  # one that failed for a reason of its own
        if len(failed) == len(outcomes) and len({told for *_, told in failed}) == 1:
            raise ValueError(told)
        several = len(failed) - 1
        others = f" ({several} other rank{'s' if several > 1 else ''} failed too)" if several else ""
        raise ValueError(f"rank {rank}: {told}{others}")
    return result  # type: ignore[return-value]  # no problem, so there is a result


def check_equal(cube: Cube, what: str, value: str) -> None:
    """Raises ValueError on every rank unless all ranks have the same value."""
    values = gathered(cube, value)
    different = [rank for rank, other in enumerate(values) if other != values[0]]
    if different:
        raise ValueError(
            f"{what} differs between ranks: rank {different[0]} has {values[different[0]][:16]}, rank 0 "
            f"{values[0][:16]}. Use the same files, and the same versions of Python, numpy and scipy, on all machines."
        )


def in_words(problem: Exception) -> str:
    """One line for the user, also of what the operating system refuses."""
    if isinstance(problem, OSError) and problem.filename is not None:
        return f"{problem.filename} cannot be read or written: {problem.strerror}."
    return str(problem)


def gathered(cube: Cube, value: Any) -> list[Any]:
    """What each rank has, by rank."""
    if cube.mesh is None:
        return [value]
    values: list[Any] = [None] * cube.shape.ranks
    dist.all_gather_object(values, value)
    return values
