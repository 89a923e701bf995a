"""The log of the commands: plain lines, or with `--verbose` such as say when, where and how bad."""

from __future__ import annotations

import io
import logging
import re
import sys
from itertools import pairwise
from pathlib import Path

import pytest
from tqdm import tqdm

from tools.common import log
from tools.common.cli import run_main
from tools.common.log import INTERVAL, Lines, progress, start_logging, take_verbose


def test_verbose_stands_anywhere_before_the_end_of_the_options() -> None:
    assert take_verbose(["a", "--verbose", "--b", "--", "--verbose"]) == (["a", "--b", "--", "--verbose"], True)
    assert take_verbose(["a", "--", "--verbose"]) == (["a", "--", "--verbose"], False)


def test_lines_are_plain_unless_more_is_asked_for(capsys: pytest.CaptureFixture[str]) -> None:
    made = logging.getLogger("tools.common.test")
    for verbose in (False, True):
        start_logging(verbose=verbose, rank=3)
        made.info("done")
        made.debug("in detail")
    plain, *more = capsys.readouterr().err.splitlines()
    assert plain == "done"
    assert [line.split(" rank 3 ")[1] for line in more] == ["INFO done", "DEBUG in detail"]


def test_a_command_ends_with_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    def fail() -> int:
        raise ValueError("no such thing")

    assert run_main("tools.this", fail) == 2
    assert capsys.readouterr().err == "tools.this: no such thing\n"
    assert run_main("tools.this", fail, verbose=True) == 2
    assert capsys.readouterr().err.endswith(" rank 0 ERROR tools.this: no such thing\n")


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_a_log_gets_a_line_of_progress_every_ten_seconds_at_most(capsys: pytest.CaptureFixture[str]) -> None:
    """Whatever moves, nests, is told or ends; nothing that only a terminal understands."""
    now = [0.0]
    seen: list[float] = []
    lines = Lines(clock=lambda: now[0])
    with tqdm(total=1000, desc="work", file=lines, mininterval=0, leave=True) as bar:
        for step in range(1000):
            now[0] = step / 10
            bar.set_postfix_str(f"at {step}")
            with tqdm(total=2, desc="inner", file=lines, mininterval=0, leave=False) as inner:
                inner.update()
            bar.update()
            bar.refresh()
            told = capsys.readouterr().err
            seen += [now[0]] * told.count("\n")
            assert not set(told) & {"\r", "\x1b"}
            assert all(line.startswith(("work", "inner")) for line in told.splitlines())
    assert len(seen) == 9
    assert all(later - earlier >= INTERVAL for earlier, later in pairwise([0.0, *seen]))


@pytest.mark.parametrize("lines", [False, True])
def test_work_that_is_done_at_once_leaves_nothing_in_a_log(lines: bool, capsys: pytest.CaptureFixture[str]) -> None:
    assert list(progress(range(5), desc="five", lines=lines)) == list(range(5))
    with progress(total=5, unit="step", lines=lines) as bar:
        bar.set_postfix_str("here")
        bar.update(5)
    captured = capsys.readouterr()
    assert (captured.out, captured.err) == ("", "")


def test_a_terminal_has_a_bar_unless_it_is_not_to_be_shown(monkeypatch: pytest.MonkeyPatch) -> None:
    for shown in (True, False):
        monkeypatch.setattr(sys, "stderr", terminal := Terminal())
        assert list(progress(range(5), desc="five", shown=shown)) == list(range(5))
        assert ("five: 100%" in terminal.getvalue()) == shown


def test_all_tools_show_their_progress_in_one_way() -> None:
    """A bar that tqdm draws by itself would fill logs."""
    own = [
        f"{file.name}: {line.strip()}"
        for file in Path(log.__file__).parents[1].rglob("*.py")
        for line in file.read_text(encoding="utf-8").splitlines()
        if re.search(r"\b(tqdm|trange)\(", line) and file != Path(log.__file__)
    ]
    assert own == []
