"""The steps of the preparation wait for no torch: neither in the process that is started nor in its workers."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

from tests.programs import ran
from tests.tools.corpus.scripts import SCRIPTS, paragraph

ROOT = Path(__file__).parents[3]
SCRIPT = """
import sys
from tools.corpus.__main__ import main
from tools.corpus.tokenize import documents

documents.SMALLEST = documents.RANGE = 400  # more units than one, so that there are workers
assert main(sys.argv[1:]) == 0
print("torch" in sys.modules)
"""


@pytest.mark.slow
def test_no_step_imports_torch(tmp_path: Path) -> None:
    (tmp_path / "in.txt").write_text("\n\n".join(map(paragraph, SCRIPTS)), encoding="utf-8")
    # Whoever asks for torch finds this one first, workers too.
    (tmp_path / "blocked" / "torch").mkdir(parents=True)
    (tmp_path / "blocked" / "torch" / "__init__.py").write_text("raise RuntimeError('torch is imported')")
    search = os.pathsep.join([str(tmp_path / "blocked"), str(ROOT)])
    steps = (
        ("extract", "in.txt", "--output", "documents", "--unit-megabytes", "0.001"),
        ("tokenizer", "--docs", "documents", "--vocab-size", "450", "--output", "tokenizer"),
        ("tokenize", "--docs", "documents", "--tokenizer", "tokenizer", "--output", "ids"),
        ("samples", "--corpora", "ids", "--max-length", "32", "--held-out", "0", "--output", "samples"),
    )
    for step, *options in steps:
        done = ran(
            [sys.executable, "-c", SCRIPT, step, *options, "--workers", "2"],
            cwd=tmp_path,
            env={**os.environ, "PYTHONPATH": search},
        )
        assert done.stdout.endswith("False\n"), f"{step}: {done.stdout}{done.stderr}"
