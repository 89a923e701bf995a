"""Eight deaths, kill -9 at random moments, in one job of eight ranks: it learns the same as without them, bit for bit.

`python -m tests.slow.kills` is the same as one command, with twenty of them.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.slow.kills import kill_test


@pytest.mark.slow
def test_a_run_that_is_killed_again_and_again_learns_the_same(tmp_path: Path) -> None:
    story = kill_test(tmp_path, steps=20, kills=8)
    print(story.summary())
    assert story.kills == 8
    assert story.inside_saves >= 1
    assert story.before_training >= 2
    assert story.verified >= 4
