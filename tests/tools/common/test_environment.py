"""What a run says of where it ran."""

from __future__ import annotations

import json
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
import torch

from tensor3d import Cube
from tests.ranks import run_ranks
from tools.common import machine as module
from tools.common.machine import commit, environment


def _environment() -> dict[str, Any]:
    return environment(Cube(1, 2, 1))


def test_every_rank_knows_the_same() -> None:
    first, second = run_ranks(2, _environment)
    assert first == second
    assert json.loads(json.dumps(first)) == first
    assert first["torch"] == torch.__version__
    assert first["backend"] == "gloo"
    assert list(first["hosts"].values()) == [2]
    assert first["devices"] == {"CPU": 2}
    assert first["cores"] >= 1
    assert first["nccl"] is None
    assert first["command"]


def test_one_process_has_no_backend() -> None:
    facts = environment(Cube.single())
    assert facts["backend"] is None
    assert list(facts["hosts"].values()) == [1]


@pytest.mark.skipif(shutil.which("git") is None, reason="git is not installed")
def test_the_commit_and_changes(tmp_path: Path) -> None:
    def git(*arguments: str) -> None:
        author = ["-c", "user.name=a", "-c", "user.email=a@example.org", "-c", "commit.gpgsign=false"]
        subprocess.run(["git", "-C", str(tmp_path), *author, *arguments], check=True, capture_output=True)

    assert commit(tmp_path) is None
    git("init")
    assert commit(tmp_path) is None, "nothing is committed yet"
    (tmp_path / "file").write_text("one")
    (tmp_path / "folder").mkdir()
    git("add", "file")
    git("commit", "-m", "one")
    clean = commit(tmp_path)
    assert clean is not None
    assert len(clean) == 40
    (tmp_path / "untracked").write_text("one")
    assert commit(tmp_path) == clean
    (tmp_path / "file").write_text("two")
    assert commit(tmp_path) == f"{clean}+changes"
    assert commit(tmp_path / "folder") is None, "a folder inside of somebody's checkout"


def test_without_git_or_in_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def slow(*_: Any, **options: Any) -> None:
        assert options["timeout"] <= 5
        raise subprocess.TimeoutExpired("git", options["timeout"])

    def missing(*_: Any, **__: Any) -> None:
        raise FileNotFoundError("git")

    for run in (slow, missing):
        monkeypatch.setattr(module.subprocess, "run", run)
        assert commit(tmp_path) is None
