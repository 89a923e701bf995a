"""Settings for every test, the ranks that tests share, and where the time of a run went."""

from __future__ import annotations

import signal
from collections import defaultdict
from types import FrameType

import pytest
import torch
from hypothesis import settings

from tests.ranks import STANDING

# The same examples in every run, nothing stored between runs, and no deadline: the machine may be busy elsewhere.
settings.register_profile("tensor3d", derandomize=True, database=None, deadline=None)
settings.load_profile("tensor3d")
# Models here are small: threads that wait for each other on a busy machine made them ten times slower.
torch.set_num_threads(1)


def _nothing(number: int, frame: FrameType | None) -> None:
    """Handles a signal that whoever started the tests had ignored, as `nohup` does."""


# What is ignored stays ignored in every child, and a shell cannot even trap it; what is handled is its default there.
for _signal in (signal.SIGHUP, signal.SIGINT, signal.SIGQUIT, signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2):
    if signal.getsignal(_signal) is signal.SIG_IGN:
        signal.signal(_signal, _nothing)


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--folder-times", action="store_true", help="print the seconds of each folder of tests, and starts of ranks"
    )


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    if not config.getoption("--folder-times"):
        return
    seconds: dict[str, float] = defaultdict(float)
    for reports in terminalreporter.stats.values():
        for report in reports:
            if isinstance(report, pytest.TestReport):
                seconds[report.nodeid.partition("::")[0].rpartition("/")[0]] += report.duration
    terminalreporter.section("seconds by folder")
    for folder, taken in sorted(seconds.items(), key=lambda item: -item[1]):
        terminalreporter.line(f"{taken:8.1f}  {folder}")
    terminalreporter.section("starts of standing ranks")
    for start in STANDING.starts:
        terminalreporter.line(start)


def pytest_unconfigure() -> None:
    STANDING.close()
