"""The commands of README and docs about the preparation can be called as they stand there."""

from __future__ import annotations

import re
import shlex
import shutil
from importlib import import_module
from pathlib import Path

import pytest
import tyro

from tests.programs import ran
from tools.corpus.__main__ import STEPS

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]


def commands(start: str) -> list[str]:
    """Lines of code that begin so, without what follows, once each."""
    found = [
        line[len(start) :].partition("  #")[0].strip()
        for page in PAGES
        for line in re.findall(r"^ {4}(.*)$", page.read_text(), re.MULTILINE)
        if line.startswith(start)
    ]
    return list(dict.fromkeys(found))


@pytest.mark.parametrize("line", commands("python -m tools.corpus "))
def test_steps_understand_their_options(line: str) -> None:
    name, *arguments = shlex.split(line)
    options = getattr(import_module(STEPS[name].module), STEPS[name].options)
    tyro.cli(options, args=arguments)


@pytest.mark.parametrize("line", commands("launch/corpus.sh "))
def test_the_script_understands_its_options(line: str, tmp_path: Path) -> None:
    (tmp_path / "launch").mkdir()
    for script in ("corpus.sh", "common.sh"):
        shutil.copy(ROOT / "launch" / script, tmp_path / "launch")
    (tmp_path / "more").mkdir()
    (tmp_path / "DIR").mkdir()
    files = ("my-dump.xml.bz2", "my-text.txt", "more/a.jsonl", "more/b.jsonl", "vocab.txt", "DIR/tokenizer.json")
    for name in files:
        (tmp_path / name).write_text("")
    done = ran(["bash", "-c", f"launch/corpus.sh --dry-run {line}"], cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    for step in re.findall(r"-m tools.corpus (.*)", done.stdout):
        name, *arguments = shlex.split(step)
        tyro.cli(getattr(import_module(STEPS[name].module), STEPS[name].options), args=arguments)


def test_every_step_is_documented() -> None:
    text = (ROOT / "docs" / "corpus.md").read_text()
    assert [name for name in STEPS if name != "prepare" and f"\n## {name}\n" not in text] == []
