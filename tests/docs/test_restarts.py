"""Seconds, intervals and exit statuses that docs/restarts.md tells are those of the code."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch.distributed as dist

from tensor3d.distributed.failure_detector import BEATS_A_SECOND, LOOKERS, FailureDetector
from tensor3d.distributed.rank_status import RankStatus
from tensor3d.distributed.watchdog import HANG, ORPHANED, PREEMPTED
from tools.common.files import BEAT, SILENCE
from tools.pretrain import UNSAVED
from tools.training.config import RunConfig

PAGE = (Path(__file__).parents[2] / "docs" / "restarts.md").read_text()
ROW = re.compile(r"^\| (?:to )?([\d,]+) \| ([\d.]+) s \| ([\d.]+) s(?:, [a-z ]+)? \| ([\d.]+) s \|$", re.MULTILINE)
ROWS = ROW.findall(PAGE)


@pytest.mark.parametrize(("ranks", "interval", "silence", "deaf"), ROWS)
def test_intervals_of_many_ranks(ranks: str, interval: str, silence: str, deaf: str) -> None:
    names = [""] * int(ranks.replace(",", ""))
    watch = FailureDetector(dist.HashStore(), names, 0, grace=3.0, note=RankStatus, woken=lambda: None)  # not started
    assert (f"{watch.interval:.2g}", f"{watch.grace:.2g}", f"{watch.deaf:.2g}") == (interval, silence, deaf)


def test_there_are_rows() -> None:
    assert len(ROWS) == 4


def test_seconds_and_statuses() -> None:
    flat = " ".join(PAGE.split())
    for told in (
        f"{BEATS_A_SECOND:,} heartbeats a second",
        f"more than 200 ranks {LOOKERS} look",
        f"renews it every {BEAT:g} s",
        f"looks on for up to {SILENCE:g} s",
        f"`run.hang_after` seconds ({RunConfig.hang_after:g})",
        f"`run.stop_within` ({RunConfig.stop_within:g} s)",
        f"leaves with status {HANG}:",
        f"within 3 s with status {ORPHANED} and",
        f"| {PREEMPTED}: start it again",
        f"| {UNSAVED} | the last checkpoint could not be written |",
    ):
        assert told in flat, told
