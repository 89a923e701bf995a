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


_SELDOM = 100_000
"""By which thresholds are multiplied: none is reached while a command is loaded."""


def collect_seldom() -> None:
    """Until `collect_as_usual`: for what is loaded, which is no garbage, and takes a sixth longer with collections."""
    first, *others = gc.get_threshold()
    gc.set_threshold(first * _SELDOM, *others)


def collect_as_usual() -> None:
    """As before `collect_seldom`, if that was called; nobody else has thresholds that are so high."""
    first, *others = gc.get_threshold()
    if first >= 100 * _SELDOM:
        gc.set_threshold(first // _SELDOM, *others)
