"""The tests pass whoever starts them: `nohup`, or a script that ignores signals and so do all its children."""

from __future__ import annotations

import signal
import subprocess
import sys

import pytest

SIGNALS = ("HUP", "INT", "QUIT", "TERM", "USR1", "USR2")


@pytest.mark.parametrize("name", SIGNALS)
def test_a_shell_can_trap_the_signal(name: str) -> None:
    """A shell that was started with a signal ignored cannot."""
    script = f"trap 'exit 7' {name}; kill -{name} $$; exit 1"
    assert subprocess.run(["sh", "-c", script], check=False).returncode == 7


def _ignore() -> None:
    for name in SIGNALS:
        signal.signal(getattr(signal, f"SIG{name}"), signal.SIG_IGN)


@pytest.mark.slow
def test_tests_whose_starter_ignores_signals_pass_all_the_same() -> None:
    tests = f"{__file__}::{test_a_shell_can_trap_the_signal.__name__}"
    call = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", tests]
    done = subprocess.run(call, preexec_fn=_ignore, capture_output=True, text=True, check=False)
    assert f"{len(SIGNALS)} passed" in done.stdout, done.stdout
