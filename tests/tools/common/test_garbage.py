"""What is loaded is kept away from Python's collector, and given back to it only by whoever took it."""

from __future__ import annotations

import gc
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tools.common.cli import run_main
from tools.common.garbage import collect_as_usual, collect_seldom, loaded_objects_left_alone, no_collections


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


def test_what_is_put_off_comes_again_as_it_was() -> None:
    for enabled in (True, False):
        (gc.enable if enabled else gc.disable)()
        try:
            with no_collections():
                assert not gc.isenabled()
            assert gc.isenabled() is enabled
        finally:
            gc.enable()


def test_a_command_collects_seldom_until_it_is_loaded() -> None:
    code = "import gc, sys; sys.argv[0] = {!r}; import tools; print(gc.get_threshold()[0])"
    command, other = (
        int(subprocess.check_output([sys.executable, "-c", code.format(name)], cwd=Path(__file__).parents[3]))
        for name in ("-m", "-c")
    )
    assert command > 100 * other, "and in nobody's process that imports a part of it"
    usual, seen = gc.get_threshold(), []
    collect_seldom()
    try:
        assert gc.get_threshold()[0] == command
        assert run_main("tools.test", lambda: seen.append(gc.get_threshold()) or 0) == 0  # type: ignore[func-returns-value]
    finally:
        collect_as_usual()
    assert seen == [usual]
