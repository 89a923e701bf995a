"""Several cubes of one size on the same processes: ten boxes of 8 ranks need 8 processes and not 80."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from functools import partial
from typing import Any, Concatenate, Generic, ParamSpec, TypeVar

import torch

from tensor3d import Cube, CubeShape, rendezvous
from tools.bench.groups import Group, LocalGroup, Session, World
from tools.bench.step import disconnect
from tools.cores import usable_cores

S = TypeVar("S", bound=Session)
R = TypeVar("R")
P = ParamSpec("P")


class Sharing(Generic[S]):
    """What lives on a rank: a session for each cube.

    Args:
        cube: the first of them.
        make: builds the session of a cube.
    """

    def __init__(self, cube: Cube, make: Callable[[Cube], S]) -> None:
        self._first, self._make = cube, make
        self._sessions: list[S] = []

    def join(self, shape: CubeShape) -> int:
        """Adds a cube of that shape; returns its number. Every rank does it at the same time."""
        cube = self._first
        if shape != cube.shape:
            cube = Cube(shape.x, shape.y, shape.z, shape.data, device=cube.device, wire=shape.wire)
        self._sessions.append(self._make(cube))
        return len(self._sessions) - 1

    def act(self, number: int, action: Callable[..., R], args: tuple[Any, ...], kwargs: dict[str, Any]) -> R:
        return action(self._sessions[number], *args, **kwargs)

    def close(self) -> None:
        for session in self._sessions:
            session.close()


class Part(Generic[S]):
    """One cube of a group of processes that hold several. The processes end with their group."""

    def __init__(self, group: Group[Sharing[S]], shape: CubeShape) -> None:
        self.shape = shape
        self._group = group
        self._number = group.call(Sharing.join, shape)[0]

    def call(self, action: Callable[Concatenate[S, P], R], *args: P.args, **kwargs: P.kwargs) -> list[R]:
        return self._group.call(Sharing.act, self._number, action, args, kwargs)

    def close(self) -> None:
        pass


def check_world(shapes: Sequence[CubeShape]) -> None:
    """Raises ValueError where cubes of different sizes are to share the processes that torchrun started."""
    if rendezvous.is_launched() and len({shape.ranks for shape in shapes}) > 1:
        needs = ", ".join(f"{shape} {shape.ranks}" for shape in shapes)
        raise ValueError(
            f"under torchrun all cubes share the same processes, and these need different numbers: {needs}. Name cubes "
            "of one size, or call python -m tools.bench itself, which starts what each cube needs on this machine."
        )


def start(shapes: Sequence[CubeShape], make: Callable[[Cube], S], stack: ExitStack) -> list[Part[S]]:
    """Every cube with its sessions, on processes of this machine or on those of torchrun; they end with the stack.

    Args:
        make: builds the session of a cube on each rank. Picklable.

    Raises:
        RankFailedError: a session could not be made.
    """
    if rendezvous.is_launched():
        stack.callback(disconnect)
    # All on GPUs or none: figures of different devices are no comparison.
    cuda = torch.cuda.device_count() >= max(shape.ranks for shape in shapes)
    groups: dict[int, Group[Sharing[S]]] = {}
    parts = []
    for shape in shapes:
        if shape.ranks not in groups:
            groups[shape.ranks] = _group(shape, partial(Sharing[S], make=make), cuda=cuda)
            stack.callback(groups[shape.ranks].close)
        parts.append(Part(groups[shape.ranks], shape))
    return parts


def _group(shape: CubeShape, make: Callable[[Cube], Sharing[S]], *, cuda: bool) -> Group[Sharing[S]]:
    if rendezvous.is_launched():
        return World(shape, make)
    return LocalGroup(shape, make, cuda=cuda, cores=usable_cores())
