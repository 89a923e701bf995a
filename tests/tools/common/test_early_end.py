"""Ctrl-C before a command stands: status 130 and no traceback; of all other errors nothing is kept back."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]


@pytest.mark.parametrize(
    ("program", "problem", "status", "told"),
    [
        ("-m", "KeyboardInterrupt", 130, ""),
        ("-m", "ValueError(7)", 1, "ValueError: 7"),
        ("a.py", "KeyboardInterrupt", -2, "KeyboardInterrupt"),  # whoever imports `tools` decides himself
    ],
)
def test_ctrl_c_among_imports(program: str, problem: str, status: int, told: str) -> None:
    code = f"import sys; sys.argv[0] = {program!r}; import tools; raise {problem}"
    ended = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=False)
    assert ended.returncode == status
    assert ended.stderr.splitlines()[-1:] == ([told] if told else [])


def test_ctrl_c_among_imports_of_who_is_to_tell_of_faults() -> None:
    code = "import sys; sys.argv[0] = '-m'; import tools; raise KeyboardInterrupt"
    command = [sys.executable, "-X", "faulthandler", "-c", code]
    ended = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert ended.returncode == 130
    assert ended.stderr.startswith("Traceback (most recent call last):")
    assert ended.stderr.splitlines()[-1] == "KeyboardInterrupt"
