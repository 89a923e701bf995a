"""Calls of commands that must be refused."""

from __future__ import annotations

from collections.abc import Callable

import pytest


def refused(capsys: pytest.CaptureFixture[str], main: Callable[[list[str]], int], *arguments: object) -> str:
    """The one line that a command says of a call, on standard error alone, before it ends with status 2."""
    assert main([str(argument) for argument in arguments]) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.count("\n") == 1
    return captured.err
