"""What `tools.corpus` says of errors of the system."""

from __future__ import annotations

import errno
import os

import pytest

from tools.corpus import __main__ as command
from tools.corpus.__main__ import in_words


@pytest.mark.parametrize(
    ("error", "told"),
    [
        (OSError(errno.ENOSPC, "No space left on device", "a/b"), "no space left on the disk (a/b). Free some and "),
        (OSError(errno.EDQUOT, "Disk quota exceeded"), "no space left on the disk. Free some"),
        (OSError(errno.EROFS, os.strerror(errno.EROFS), "/a/b"), "/a/b: Read-only file system. What is done is kept."),
        (PermissionError(errno.EACCES, "Permission denied", b"/a/\xff"), "/a/\udcff: Permission denied."),
        (ValueError("a sentence."), "a sentence."),
    ],
)
def test_errors_of_the_system_in_words(error: Exception, told: str) -> None:
    assert in_words(error).startswith(told)


@pytest.mark.parametrize(
    ("step", "told"),
    [("prepare", "begins afresh"), ("inspect", "begins afresh"), ("extract", "goes on from here")],
)
def test_an_interrupt_says_what_the_same_command_does(
    step: str, told: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def interrupted(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(command, "run", interrupted)
    assert command.main([step]) == 130
    assert capsys.readouterr().err == f"interrupted; the same command {told}\n"
