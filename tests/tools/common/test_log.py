"""The log of the commands: plain lines, or with `--verbose` such as say when, where and how bad."""

from __future__ import annotations

import logging

import pytest

from tools.common.cli import run_main
from tools.common.log import start_logging, take_verbose


def test_verbose_stands_anywhere_before_the_end_of_the_options() -> None:
    assert take_verbose(["a", "--verbose", "--b", "--", "--verbose"]) == (["a", "--b", "--", "--verbose"], True)
    assert take_verbose(["a", "--", "--verbose"]) == (["a", "--", "--verbose"], False)


def test_lines_are_plain_unless_more_is_asked_for(capsys: pytest.CaptureFixture[str]) -> None:
    log = logging.getLogger("tools.common.test")
    for verbose in (False, True):
        start_logging(verbose=verbose, rank=3)
        log.info("done")
        log.debug("in detail")
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
