"""launch/gpu_hour.sh on a bare machine: wheels are found by what runs, with pip and without."""

from __future__ import annotations

import os
import shutil
import sys
import zipfile
from pathlib import Path

import pytest

from tests.programs import ran

SCRIPT = Path(__file__).parents[2] / "launch" / "gpu_hour.sh"


def lay(folder: Path, *, pip: bool) -> Path:
    """A repository whose `bench` needs a wheel, and a Python with or without pip. Returns the wheels' folder."""
    bench, wheels, programs = folder / "repo" / "tools" / "bench", folder / "wheels", folder / "bin"
    for each in (bench, wheels, programs, folder / "repo" / "launch"):
        each.mkdir(parents=True)
    shutil.copy(SCRIPT, folder / "repo" / "launch")
    for package in (bench.parent, bench):
        (package / "__init__.py").touch()
    (bench / "__main__.py").write_text("import sys, lacking; print(lacking.NAME, sys.argv[1:])")
    with zipfile.ZipFile(wheels / "lacking-1.0-py3-none-any.whl", "w") as wheel:
        wheel.writestr("lacking.py", "NAME = 'it is there'")
    python = programs / "python3"
    installs = f'mkdir -p "${{10}}" && exec {sys.executable} -m zipfile -e "${{11}}" "${{10}}"'
    python.write_text(
        f'#!/bin/sh\nif [ "$2" = pip ]; then {installs if pip else "exit 1"}; fi\nexec {sys.executable} "$@"\n'
    )
    python.chmod(0o755)
    return wheels


@pytest.mark.parametrize("pip", [True, False])
def test_wheels_are_found(pip: bool, tmp_path: Path) -> None:
    wheels = lay(tmp_path, pip=pip)
    environment = {**os.environ, "PATH": f"{tmp_path / 'bin'}:{os.environ['PATH']}", "TMPDIR": str(tmp_path)}
    done = ran(
        ["bash", str(tmp_path / "repo" / "launch" / SCRIPT.name), "--wheels", wheels.name, "--seconds", "5"],
        cwd=tmp_path,
        env=environment,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == "it is there ['gpu', '--seconds', '5']"
    assert not list(tmp_path.glob("tmp.*")), "what was unpacked is gone"


def test_what_any_stage_needs_is_missed_first(tmp_path: Path) -> None:
    """With the packages' names, by which pip knows them, and by a Python that has none of them."""
    lay(tmp_path, pip=True)
    python = tmp_path / "bin" / "python3"
    python.write_text(f'#!/bin/sh\nexec {sys.executable} -I -S "$@"\n')
    done = ran(
        ["bash", str(tmp_path / "repo" / "launch" / SCRIPT.name), "--seconds", "5"],
        env={**os.environ, "PATH": f"{tmp_path / 'bin'}:{os.environ['PATH']}"},
    )
    assert done.returncode == 2
    assert done.stdout == ""
    needed = (
        "torch transformers numpy safetensors sentencepiece tqdm pytest pytest-timeout pytest-xdist hypothesis tyro"
    )
    command = f"  python -m pip download --no-deps -d wheels {needed} docstring_parser typeguard"
    assert done.stderr.splitlines()[-1] == command
