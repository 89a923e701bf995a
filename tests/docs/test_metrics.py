"""The commands of docs/metrics.md, and of the README about it, can be called as they stand there."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest
import tyro

from tools.plan.__main__ import PlanCommand
from tools.report.__main__ import Command

ROOT = Path(__file__).parents[2]
TEXT = (ROOT / "README.md").read_text() + (ROOT / "docs" / "metrics.md").read_text()
COMMANDS = {"report": Command, "plan": PlanCommand}
CALLS = re.findall(r"(?:^ {4}|`)python -m tools\.(report|plan) ([^`\n]*)", TEXT, re.MULTILINE)


@pytest.mark.parametrize(("name", "line"), dict.fromkeys(CALLS))
def test_commands_are_understood(name: str, line: str) -> None:
    tyro.cli(COMMANDS[name], args=shlex.split(line))


def test_there_are_commands() -> None:
    assert {name for name, _ in CALLS} == set(COMMANDS)
    assert any("--refresh" in line for _, line in CALLS)
    assert any("--html" in line for _, line in CALLS)
