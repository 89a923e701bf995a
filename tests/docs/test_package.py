"""What `pip install` gets, the library and its licence, from a source archive that builds the same; how to cite it."""

from __future__ import annotations

import os
import re
import shutil
import sys
import tarfile
import zipfile
from email.parser import Parser
from pathlib import Path

import pytest
import yaml

import tensor3d
from tests.programs import ran

ROOT = Path(__file__).parents[2]


def test_the_citation_is_of_this_version() -> None:
    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text())
    assert citation["version"] == tensor3d.__version__
    readme = (ROOT / "README.md").read_text()
    assert [each["url"] for each in citation["references"] if each["url"] not in readme] == []


def test_programs_that_import_tools_need_the_checkout(tmp_path: Path) -> None:
    code = "from importlib.util import find_spec; print([bool(find_spec(name)) for name in ('tools', 'models')])"
    for path, found in (("", False), (str(ROOT), True)):
        assert run([sys.executable, "-c", code], tmp_path, PYTHONPATH=path) == f"{[found, found]}\n"
    for page in ("README.md", "docs/inference.md", "docs/tutorial-finetune.md"):
        assert "`PYTHONPATH=/path/to/checkout`" in (ROOT / page).read_text(encoding="utf-8")


@pytest.mark.slow
def test_the_wheel_is_the_library_and_the_readmes_model_runs_from_it(tmp_path: Path) -> None:
    source, target, elsewhere = tmp_path / "source", tmp_path / "target", tmp_path / "elsewhere"
    source.mkdir()
    elsewhere.mkdir()
    for name in ("setup.py", "pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, source)
    for package in ("tensor3d", "models", "tools"):
        shutil.copytree(ROOT / package, source / package, ignore=shutil.ignore_patterns("__pycache__"))
    # The source archive, and the wheel out of it.
    run([sys.executable, "-m", "build", "--no-isolation", "--outdir", tmp_path / "dist", source], tmp_path)
    (archive,), (wheel,) = (tmp_path / "dist").glob("*.tar.gz"), (tmp_path / "dist").glob("*.whl")
    files = {str(path.relative_to(source)) for path in (source / "tensor3d").rglob("*") if path.is_file()}
    packed = set(zipfile.ZipFile(wheel).namelist())
    about = next(name for name in packed if name.endswith(".dist-info/METADATA"))
    assert {name for name in packed if ".dist-info/" not in name} == files
    assert any(name.endswith("LICENSE") for name in packed)
    with tarfile.open(archive) as opened:
        assert {name.partition("/")[2] for name in opened.getnames()} >= files | {"LICENSE", "README.md"}
    metadata = Parser().parsestr(zipfile.ZipFile(wheel).read(about).decode())
    assert metadata["Version"] == tensor3d.__version__
    assert set(metadata["Requires-Python"].split(",")) == {">=3.10", "<3.14"}
    assert metadata["License-Expression"] == "Apache-2.0"

    run([sys.executable, "-m", "pip", "install", "--no-deps", "--target", target, wheel], tmp_path)
    (code,) = re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text(), re.DOTALL)
    code = code.replace("from_env(2, 2, 2)", "from_env(1, 1, 1)")
    told = run([sys.executable, "-c", f"{code}\nprint(t3d.__file__)"], elsewhere, PYTHONPATH=str(target))
    assert Path(told.strip()).is_relative_to(target)


def run(command: list[str | Path], folder: Path, **environment: str) -> str:
    done = ran(command, cwd=folder, env={**os.environ, **environment}, timeout=300)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    return done.stdout
