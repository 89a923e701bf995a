"""What is loaded is kept away from Python's collector, and given back to it only by whoever took it."""

from __future__ import annotations

import gc
from collections.abc import Iterator

import pytest

from tools.common.garbage import loaded_objects_left_alone


@pytest.fixture
def nothing_frozen() -> Iterator[None]:
    gc.unfreeze()
    yield
    gc.freeze()  # as the tests' own settings have it


@pytest.mark.usefixtures("nothing_frozen")
def test_within_collections_pass_over_what_was_there() -> None:
    with loaded_objects_left_alone():
        assert gc.get_freeze_count() > 0
    assert gc.get_freeze_count() == 0


@pytest.mark.usefixtures("nothing_frozen")
def test_what_others_keep_away_stays_away() -> None:
    gc.freeze()
    with loaded_objects_left_alone():
        pass
    assert gc.get_freeze_count() > 0
