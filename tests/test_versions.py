"""Too old a Python or PyTorch is refused before anything else is imported; what is claimed is said in one way."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from tensor3d.versions import LEAST_PYTHON, LEAST_TORCH, check_versions, installed_torch
from tests import versions
from tests.programs import ran
from tests.versions import ROWS

ROOT = Path(__file__).parent.parent


@pytest.mark.parametrize("version", ["2.11.0", "2.11.0a0+git70d99e9", "2.15.0+cu132", "3.0", "of our own", ""])
def test_a_version_that_may_work_is_taken(version: str) -> None:
    check_versions(torch=version)


@pytest.mark.parametrize("version", ["2.10.0+cpu", "2.9.1", "1.13.1", "2.0"])
def test_an_old_pytorch_is_refused(version: str) -> None:
    with pytest.raises(ImportError, match=rf"PyTorch 2\.11 or newer\. torch {re.escape(version)} .* 'torch>=2\.11'"):
        check_versions(torch=version)


def test_an_old_python_is_refused() -> None:
    with pytest.raises(ImportError, match=r"Python 3\.10 or newer\. This is Python 3\.9\."):
        check_versions(torch="2.11", python=(3, 9))


def test_the_installed_one_is_read() -> None:
    assert installed_torch() == torch.__version__


@pytest.mark.parametrize(
    ("text", "refused"), [('__version__ = "2.9.0"', True), ("__version__: str = '2.9'", True), ("", False)]
)
def test_it_is_seen_before_torch_is_imported(tmp_path: Path, text: str, refused: bool) -> None:
    (tmp_path / "torch").mkdir()
    (tmp_path / "torch" / "__init__.py").write_text("raise SystemExit('torch is imported')")
    (tmp_path / "torch" / "version.py").write_text(text)
    done = ran(
        [sys.executable, "-c", "import tensor3d"], env={**os.environ, "PYTHONPATH": f"{tmp_path}{os.pathsep}{ROOT}"}
    )
    assert (done.returncode, "ImportError: tensor3d needs PyTorch 2.11" in done.stderr) == (int(refused), refused)


def test_without_a_pytorch_the_import_is_left_to_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tensor3d.versions.find_spec", lambda name: None)
    assert installed_torch() is None
    check_versions()


def test_setup_and_readme_say_the_same() -> None:
    setup, readme = ((ROOT / name).read_text(encoding="utf-8") for name in ("setup.py", "README.md"))
    least_python, least_torch = (".".join(map(str, version)) for version in (LEAST_PYTHON, LEAST_TORCH))
    claimed = re.search(r'python_requires=">=([\d.]+),<3\.(\d+)"', setup)
    assert claimed is not None
    newest_python = f"3.{int(claimed[2]) - 1}"
    assert claimed[1] == least_python
    assert f"range({LEAST_PYTHON[1]}, {claimed[2]})" in setup, "the classifiers"
    assert f'"torch>={least_torch}"' in setup
    assert f"(Python {least_python} to {newest_python}, PyTorch {least_torch} or newer)" in readme


def test_the_readme_has_the_versions_that_were_tried() -> None:
    pinned = dict(re.findall(r"^(torch|transformers)==(\S+)$", (ROOT / "constraints.txt").read_text(), re.MULTILINE))
    claimed = re.findall(
        r"^\| (\w+) \| ([\d.]+) \| ([\d.]+) \| ([\d.]+) \|$", (ROOT / "README.md").read_text(), re.MULTILINE
    )
    rows = {name: rest for name, *rest in claimed}
    assert rows.pop("development")[1:] == [pinned["torch"], pinned["transformers"]]
    assert rows == {row.name: [row.python, row.torch, row.transformers] for row in ROWS}
    oldest = ROWS[0]
    assert (oldest.python, oldest.torch) == tuple(
        ".".join(map(str, each)) for each in (LEAST_PYTHON, (*LEAST_TORCH, 0))
    )
    bounds = re.findall(r'"(transformers|safetensors)>=([\d.]+)"', (ROOT / "setup.py").read_text())
    assert {f"{name}=={f'{bound}.0.0'[:5]}" for name, bound in bounds} <= set(oldest.pins)


def test_a_row_without_its_python_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    monkeypatch.setattr(versions, "find_python", lambda version: None)
    assert versions.main(["oldest", "newest", "--folder", str(tmp_path / "new")]) == 1
    table = (tmp_path / "new" / "results.md").read_text()
    assert "| oldest | 3.10 | 2.11.0 | 5.0.0 | not run: no Python 3.10 on this machine |" in table
    assert table in capsys.readouterr().out
    assert versions.main(["another"]) == 2
    assert "no row is named another; there are oldest, newest" in capsys.readouterr().err


def test_a_row_is_installed_without_the_constraints_of_pips_settings(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[dict[str, Any]] = []

    def run(command: list[Any], **options: Any) -> Any:
        calls.append(options)
        (tmp_path / "environment").mkdir(exist_ok=True)
        return subprocess.CompletedProcess(command, 0)

    monkeypatch.setattr(versions.subprocess, "run", run)
    monkeypatch.setenv("PIP_CONSTRAINT", "torch-below-this.txt")
    assert versions._install(ROWS[-1], Path(sys.executable), tmp_path / "environment", tmp_path / "log") == ""
    environment = calls[-1]["env"]
    assert Path(environment["PIP_CONSTRAINT"]).read_text() == ""
    assert environment["PATH"] == os.environ["PATH"]


def test_an_interpreter_and_what_came_of_tests() -> None:
    here = ".".join(map(str, sys.version_info[:2]))
    assert versions.find_python(here) is not None
    assert versions.find_python("2.0") is None
    assert versions.told_of("3 passed\n== 2 failed, 2246 passed, 102 skipped in 527.67s (0:08:47) ==\n", 1) == (
        "2 failed, 2246 passed, 102 skipped"
    )
    assert versions.told_of("usage: pytest", 4) == "pytest ended with status 4"


def test_the_tests_of_the_tier_are_there() -> None:
    assert [name for name in versions.TIER if not (ROOT / "tests" / name).exists()] == []
