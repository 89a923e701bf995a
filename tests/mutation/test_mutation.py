"""The table of mutations fits the code, and those that are quick are caught."""

from __future__ import annotations

import dataclasses
import subprocess
import sys

import pytest

from tests.mutation.mutation import ROOT, Mutation
from tests.mutation.table import MUTATIONS

QUICK = [mutation for mutation in MUTATIONS if mutation.quick]


@pytest.mark.parametrize("mutation", MUTATIONS, ids=lambda mutation: mutation.name)
def test_it_fits_the_code(mutation: Mutation) -> None:
    assert mutation.problems() == []


def test_there_are_enough_and_in_every_folder() -> None:
    assert len(MUTATIONS) >= 80
    assert len({mutation.name for mutation in MUTATIONS}) == len(MUTATIONS)
    assert {mutation.file.partition("/")[0] for mutation in MUTATIONS} == {"tensor3d", "models", "tools", "launch"}
    assert 12 <= len(QUICK) <= 24


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        ({"old": "no such text"}, "exactly once. It has it 0 times"),
        ({"old": "\n"}, "exactly once"),
        ({"file": "tensor3d/nothing.py"}, "there is no file"),
        ({"new": "return ("}, "no Python"),
        ({"tests": ()}, "no test is named"),
        ({"tests": ("tests/distributed/test_cube_shape.py::test_nothing",)}, "has no test_nothing"),
        ({"tests": ("tests/test_nothing.py",)}, "no test file"),
    ],
)
def test_one_that_no_longer_fits_is_named(change: dict[str, object], problem: str) -> None:
    (mutation,) = (each for each in MUTATIONS if each.name == "shape-ranks-without-data")
    assert problem in "; ".join(dataclasses.replace(mutation, **change).problems())  # type: ignore[arg-type]


@pytest.mark.slow
def test_the_quick_ones_are_caught() -> None:
    """In a process of its own, for each break is tried in a fork: one of this process, with all that earlier tests have
    imported, takes twenty seconds instead of two. The controls must have other verdicts."""
    command = [sys.executable, "-m", "tests.mutation", "--quick", "--controls", "--limit", "120"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=800, check=False)
    lines = [line for line in done.stdout.splitlines() if not line.startswith("    ")]
    verdicts = {line.rpartition("  ")[2]: line.partition("  ")[0] for line in lines[:-1]}
    assert (verdicts.pop("harmless"), verdicts.pop("fatal")) == ("SURVIVED", "no import"), done.stdout + done.stderr
    assert verdicts.keys() == {mutation.name for mutation in QUICK}
    assert set(verdicts.values()) <= {"caught", "caught by hang"}, done.stdout
    assert done.returncode == 1
