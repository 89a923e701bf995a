"""docs/finetuning.md and docs/inference.md: commands that newcomers copy do what the pages say."""

from __future__ import annotations

import csv
import json
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from tools.finetune.__main__ import parse
from tools.finetune.config import OptimizerSection

ROOT = Path(__file__).parents[2]


def test_own_files_are_learnt_without_a_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    page = (ROOT / "docs/finetuning.md").read_text(encoding="utf-8")
    section = page.partition("### Without a model and without a network")[2].partition("###")[0]
    (command,) = re.findall(r"```bash\n(.*?)```", section, re.DOTALL)
    words = shlex.split(command.replace("\\\n", " "))
    assert words[:3] == ["python", "-m", "tools.finetune"]
    monkeypatch.chdir(tmp_path)
    for name in ("train.csv", "dev.csv"):
        Path(name).write_text("sentence,label\n")
    asked = parse([str(ROOT / word) if word.endswith(".toml") else word for word in words[3:]])
    asked.check()
    settings = asked.settings
    assert (settings.model.start_from, settings.model.vocab) == (None, "embedded")
    assert (settings.data.text, settings.data.label) == ("sentence", "label")
    assert settings.optimizer.lr == 1e-3
    assert OptimizerSection().lr == 5e-5
    assert "The recipe has `lr = 1e-3`. The default of `optimizer.lr`, 5e-5," in section


def test_a_column_becomes_lines_of_json(tmp_path: Path) -> None:
    page = (ROOT / "docs/inference.md").read_text(encoding="utf-8")
    (command,) = re.findall(r"^ {4}python (-c .*) > my.jsonl$", page, re.MULTILINE)
    texts = ['a "fox", old', "two\nlines"]
    with (tmp_path / "my.csv").open("w", newline="", encoding="utf-8") as file:
        csv.writer(file).writerows([("label", "sentence"), *(("good", text) for text in texts)])
    made = subprocess.run(
        [sys.executable, *shlex.split(command)], cwd=tmp_path, capture_output=True, text=True, check=True, timeout=60
    )
    assert [json.loads(line) for line in made.stdout.splitlines()] == [{"text": text} for text in texts]
