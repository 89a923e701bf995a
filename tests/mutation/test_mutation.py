"""The table of mutations fits the code, and those that are quick are caught."""

from __future__ import annotations

import dataclasses

import pytest

from tests.mutation import child
from tests.mutation.mutation import Mutation
from tests.mutation.runner import GOOD, Result, audit
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


def audited(mutations: list[Mutation]) -> dict[str, Result]:
    child.preload()
    results, _ = audit(mutations, jobs=2, limit=120.0, tell=lambda result: None)
    return {result.mutation.name: result for result in results}


@pytest.mark.slow
def test_the_quick_ones_are_caught() -> None:
    """And the verdicts can differ: a break that changes nothing survives, and one that no import survives is told."""
    (sound,) = (each for each in MUTATIONS if each.name == "shape-ranks-without-data")
    harmless = dataclasses.replace(sound, name="harmless", new="return self.data * self.x * self.y * self.z")
    first = "from __future__ import annotations\n"
    fatal = dataclasses.replace(sound, name="fatal", old=first, new=f"{first}raise RuntimeError\n")
    found = audited([*QUICK, harmless, fatal])
    assert found.pop("harmless").verdict == "SURVIVED"
    assert found.pop("fatal").verdict == "no import"
    assert {name: result for name, result in found.items() if result.verdict not in GOOD} == {}
