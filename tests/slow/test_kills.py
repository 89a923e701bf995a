"""Deaths by kill -9 at random moments in one job: it learns the same as without them, bit for bit.

`python -m tests.slow.kills` is the same as one command.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.slow.kills import kill_test


@pytest.mark.slow
def test_a_run_that_is_killed_learns_the_same(tmp_path: Path) -> None:
    """Just after a start, after some steps, inside a save if it is met, and once more after a start."""
    story = kill_test(tmp_path, cube="1x2x1", steps=16, kills=4)
    print(story.summary())
    assert story.kills == 4
    assert story.before_training >= 1
    assert story.verified >= 1


@pytest.mark.long(reason="21 starts of eight ranks: four to six minutes")
def test_a_run_that_is_killed_again_and_again_learns_the_same(tmp_path: Path) -> None:
    story = kill_test(tmp_path, kills=20)
    print(story.summary())
    assert story.kills == 20
    assert story.inside_saves >= 3
    assert story.before_training >= 3
    assert story.verified >= 20
