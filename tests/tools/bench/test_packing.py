"""`bench packing`: its random histograms, what it finds wrong, and what it writes."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tensor3d.packing import PLANNERS, Limits, LowerBound, PackingPlan, PackPattern, lpfhp
from tools.bench import packing
from tools.bench.__main__ import main
from tools.bench.harness.figures import cells, header
from tools.bench.harness.synthetic_data import Case, draw_case, faults
from tools.bench.packing import PlannerFigures, check_planners, measure_assign, sentence

CASE = Case(
    histogram=np.bincount([6, 6, 4, 3]),
    capacity=10,
    max_sequences=2,
    budget=4,
    costs=np.array([0, 1, 1, 1, 2, 2, 2, 2, 2, 2, 2]),
)


def test_histograms_are_of_all_kinds_and_can_be_packed() -> None:
    cases = [draw_case(np.random.default_rng([0, number])) for number in range(100)]
    for case in cases:
        limits = Limits.of(case.capacity, case.max_sequences, budget=case.budget, costs=case.costs)
        assert sum(limits.counts(case.histogram).values()) >= 1
    assert {case.max_sequences is None for case in cases} == {True, False}
    assert {case.budget is None for case in cases} == {True, False}
    assert len({case.capacity for case in cases}) > 20
    again = draw_case(np.random.default_rng([0, 3]))
    assert (again.histogram == cases[3].histogram).all()


def some_plan(*packs: tuple[int, ...]) -> PackingPlan:
    # Limits that allow anything: a plan would refuse to break its own.
    free = Limits.of(100)
    return PackingPlan(limits=free, strategies=tuple(PackPattern(lengths=pack, repeat=1) for pack in packs))


@pytest.mark.parametrize(
    ("packs", "bound", "message"),
    [
        ([(6, 4), (6, 3)], 2, None),
        ([(6, 4), (6, 3)], 3, "2 packs, below the bound of"),
        ([(6, 4), (6,)], 2, r"other sequences than given, at lengths \[3\]"),
        ([(6, 6), (4, 3)], 2, "over the capacity"),
        ([(6,), (6,), (4, 3), ()], 2, None),
        ([(4, 3, 3), (6,), (6,)], 2, "too many sequences"),
    ],
)
def test_faults_of_plans(packs: list[Any], bound: int, message: str | None) -> None:
    plan = some_plan(*(pack for pack in packs if pack))
    found = faults(plan, CASE, LowerBound(packs=bound, kind="lp"))
    if message is None:
        assert found == []
    else:
        with pytest.raises(AssertionError, match=message):
            raise AssertionError("\n".join(found))


def test_a_plan_over_the_budget_is_found() -> None:
    case = dataclasses.replace(CASE, budget=2)
    assert len(faults(some_plan((6, 4), (6, 3)), case, LowerBound(packs=1, kind="lp"))) == 2


def test_a_run_on_few_histograms(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    output = tmp_path / "packing.json"
    command = ["packing", "--histograms", "12", "--sequences", "1000", "--output", str(output)]
    assert main(command) == 0
    content = json.loads(output.read_text())
    assert content["command"] == f"python -m tools.bench {' '.join(command)}"
    assert content["problems"] == []
    planners = {figures["planner"]: figures for figures in content["planners"]}
    assert set(planners) == set(PLANNERS)
    assert planners["lp"]["histograms"] == 12
    assert 0 < planners["nnlshp"]["histograms"] <= 12
    assert planners["lp"]["gap"] <= planners["lpfhp"]["gap"] <= planners["padded"]["gap"]
    assert [figures["sequences"] for figures in content["assign"]] == [1000, 10_000]
    shown = capsys.readouterr().out
    assert "1,000 sequences into" in shown
    assert all(column in shown for column in header(PlannerFigures))


def test_a_planner_that_fails_is_named(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    def loses_one(histogram: np.ndarray, *limits: Any, **more: Any) -> PackingPlan:
        plan = lpfhp(histogram, *limits, **more)
        first, *others = plan.strategies
        shorter = dataclasses.replace(first, repeat=first.repeat + 1)
        return dataclasses.replace(plan, strategies=(shorter, *others))

    monkeypatch.setattr(packing, "PLANNERS", {**PLANNERS, "spfhp": loses_one})
    results, problems = check_planners(3, seed=5)
    assert [figures.failures for figures in results if figures.planner == "spfhp"] == [3]
    assert sum(figures.failures for figures in results) == 3
    assert problems[0].startswith("spfhp, histogram 0 of seed 5: other sequences than given")
    assert main(["packing", "--histograms", "2"]) == 1
    assert "tools.bench: spfhp, histogram 0 of seed 0" in capsys.readouterr().err


def test_rows_and_sentences_are_readable() -> None:
    results, _ = check_planners(2, seed=1)
    assert all(len(cells(figures)) == len(header(type(figures))) for figures in results)
    figures = measure_assign(500)
    assert figures.sequences == 500
    assert sentence(dataclasses.replace(figures, peak_memory_bytes=None, seconds=1.0, packs=260)) == (
        "500 sequences into 260 packs: 1.00 s, unknown at the most"
    )


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--histograms", "-1"], "--histograms must be at least 0. Got -1"),
        (["--sequences", "-1"], "--sequences must be at least 0. Got -1"),
        (["--seed", "-1"], "--seed must be at least 0. Got -1"),
        (["--histograms", "0"], "nothing to measure"),
        (["--output", "nowhere/packing.json"], "--output must be a file in a folder that exists"),
    ],
)
def test_bad_calls(options: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["packing", *options]) == 2
    assert message in capsys.readouterr().err
