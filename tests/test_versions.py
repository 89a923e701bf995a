"""Too old a Python or PyTorch is refused before anything else is imported; what is claimed is said in one way."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from tensor3d.versions import LEAST_PYTHON, LEAST_TORCH, check_versions, installed_torch

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
    done = subprocess.run(
        [sys.executable, "-c", "import tensor3d"],
        env={**os.environ, "PYTHONPATH": f"{tmp_path}{os.pathsep}{ROOT}"},
        capture_output=True,
        text=True,
        check=False,
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
