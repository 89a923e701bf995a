"""Python's collector of garbage, kept away from what a program has loaded."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def loaded_objects_left_alone() -> Iterator[None]:
    """Within, collections pass over all objects that are there now.

    PyTorch and a model are some hundred thousand, which stay; a whole collection takes 0.2 s to look through them, and
    who makes many small objects, such as tags of words, has one every thousand texts.
    """
    frozen_before = gc.get_freeze_count() > 0
    gc.freeze()
    try:
        yield
    finally:
        if not frozen_before:  # else whoever froze those wants them so
            gc.unfreeze()


@contextmanager
def no_collections() -> Iterator[None]:
    """Within, nothing is collected: for work that makes many objects and no cycles of them, and lets go of all."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


_usual: list[tuple[int, int, int]] = []


def collect_seldom() -> None:
    """Until `collect_as_usual`: for what is loaded, which is no garbage, and takes a sixth longer with collections."""
    _usual[:] = [gc.get_threshold()]
    gc.set_threshold(1_000_000, 50, 50)


def collect_as_usual() -> None:
    """As before `collect_seldom`, if that was called."""
    while _usual:
        gc.set_threshold(*_usual.pop())
