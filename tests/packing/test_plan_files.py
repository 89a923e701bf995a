"""Plan files: what is written is read, and nothing else is."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tensor3d import files as atomic_files
from tensor3d.packing import Limits, PackingPlan, fingerprint_of, load_plan, lp, lpfhp, save_plan
from tensor3d.packing import plan as files

HISTOGRAM = np.bincount([7, 6, 4, 4, 3, 3, 2])
COSTS = [0, 1, 1, 1, 2, 2, 2, 2, 2, 2, 2]


@pytest.fixture
def path(tmp_path: Path) -> Path:
    path = tmp_path / "plan.json"
    save_plan(lpfhp(HISTOGRAM, 10, 3, budget=4, costs=COSTS), path, "mine")
    return path


def rewrite(path: Path, change: Callable[[dict[str, Any]], None]) -> None:
    """Changes the content of a file as someone would who makes its digest right again."""
    content = json.loads(path.read_text())
    change(content)
    signed = {key: value for key, value in content.items() if key not in ("format", "digest")}
    path.write_text(json.dumps({**content, "digest": files._digest(signed)}))


def test_a_plan_comes_back(path: Path) -> None:
    plan = load_plan(path, "mine")
    assert plan == lpfhp(HISTOGRAM, 10, 3, budget=4, costs=COSTS)
    assert plan.known_bound is None
    plan.check(HISTOGRAM)
    assert [file.name for file in path.parent.iterdir()] == ["plan.json"]


def test_a_bound_that_was_found_comes_back(path: Path) -> None:
    plan = lp(HISTOGRAM, 10)
    save_plan(plan, str(path), "mine")
    assert load_plan(str(path), "mine").known_bound == plan.lower_bound
    assert plan.lower_bound.kind == "lp"


def test_the_same_plan_gives_the_same_bytes(path: Path) -> None:
    before = path.read_bytes()
    save_plan(load_plan(path, "mine"), path, "mine")
    assert path.read_bytes() == before


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda content: content["strategies"][0].__setitem__(0, 1.0), "no whole number"),
        (lambda content: content["strategies"][0].__setitem__(1, True), "no whole number"),
        (lambda content: content.update(bound={"packs": -5, "kind": "lp"}), "is no lower bound"),
        (lambda content: content.update(bound={"packs": 1, "kind": "magic"}), "is no lower bound"),
    ],
)
def test_values_that_no_program_wrote(path: Path, change: Callable[[dict[str, Any]], None], message: str) -> None:
    rewrite(path, change)
    with pytest.raises(ValueError, match=rf"plan\.json holds no valid plan: .*{message}"):
        load_plan(path, "mine")


def test_nesting_without_end(path: Path) -> None:
    path.write_text("[" * 100_000)
    with pytest.raises(ValueError, match=r"plan\.json.*damaged or no plan file"):
        load_plan(path, "mine")


def test_a_plan_for_something_else(path: Path) -> None:
    with pytest.raises(ValueError, match=r"plan\.json.*other data.*is mine\b.*is yours\b"):
        load_plan(path, "yours")


def test_every_cut_is_noticed(path: Path) -> None:
    whole = path.read_bytes()
    # Without its last byte, a line's end, it is whole.
    for size in range(len(whole) - 1):
        path.write_bytes(whole[:size])
        with pytest.raises(ValueError, match=r"plan\.json is (damaged|no plan file)"):
            load_plan(path, "mine")


def test_every_changed_byte_is_noticed(path: Path) -> None:
    # The last byte is a line's end; with a blank in its place nothing is lost.
    whole = path.read_bytes()
    for position in range(len(whole) - 1):
        for changed in (whole[position] ^ 1, whole[position] ^ 64):
            path.write_bytes(whole[:position] + bytes([changed]) + whole[position + 1 :])
            with pytest.raises(ValueError, match=r"plan\.json (is|holds) "):
                load_plan(path, "mine")


@pytest.mark.parametrize("text", ["", "[]", "3", '"tensor3d packing plan"', "{}", '{"format": "other"}', "{]"])
def test_foreign_files(path: Path, text: str) -> None:
    path.write_text(text)
    with pytest.raises(ValueError, match=r"plan\.json is (damaged or )?no plan file|plan\.json is no plan file"):
        load_plan(path, "mine")


def test_a_file_of_bytes(path: Path) -> None:
    path.write_bytes(b"\x80\x04\x95\xff")
    with pytest.raises(ValueError, match=r"plan\.json.*damaged or no plan file"):
        load_plan(path, "mine")


@pytest.mark.parametrize("version", [0, 2, "1", None])
def test_other_versions(path: Path, version: Any) -> None:
    rewrite(path, lambda content: content.update(version=version))
    with pytest.raises(ValueError, match=r"plan\.json.*version .*reads 1\b"):
        load_plan(path, "mine")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda content: content["totals"].update(packs=9), "its strategies make .*'packs': 3.*it says .*'packs': 9"),
        (lambda content: content["strategies"].pop(), "its strategies make .*it says"),
        (lambda content: content.update(strategies=[]), "needs at least one strategy"),
        (lambda content: content.update(strategies=[[1]]), "longest first"),
        (lambda content: content.update(strategies=[[1, 6, 5]]), "11 tokens in a pack of 10 slots"),
        (lambda content: content.update(strategies=[["1", "x"]]), "holds no valid plan"),
        (lambda content: content.update(strategies=3), "holds no valid plan"),
        (lambda content: content["limits"].update(capacity=5), "in a pack of 5 slots"),
        (lambda content: content["limits"].pop("budget"), "holds no valid plan"),
        (lambda content: content["limits"].update(more=1), "holds no valid plan"),
        (
            lambda content: content.update(bound={"packs": 99, "kind": "lp"}),
            "3 packs, fewer than its lower bound of 99",
        ),
        (lambda content: content.update(bound={"packs": 1}), "holds no valid plan"),
    ],
)
def test_content_that_cannot_be(path: Path, change: Callable[[dict[str, Any]], None], message: str) -> None:
    rewrite(path, change)
    with pytest.raises(ValueError, match=message) as caught:
        load_plan(path, "mine")
    assert "plan.json" in str(caught.value)


def test_a_field_too_few_or_too_many(path: Path) -> None:
    for change in (lambda content: content.pop("bound"), lambda content: content.update(more=1)):
        save_plan(lpfhp(HISTOGRAM, 10), path, "mine")
        rewrite(path, change)
        with pytest.raises(ValueError, match=r"plan\.json is damaged"):
            load_plan(path, "mine")


def test_a_missing_file_is_no_damaged_one(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        load_plan(tmp_path / "plan.json", "mine")


@pytest.mark.parametrize("step", ["fsync", "replace"])
def test_a_failed_writing_leaves_the_old_file(step: str, path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*arguments: Any, **options: Any) -> None:
        raise OSError("disk full")

    monkeypatch.setattr(atomic_files.os, step, fail)
    before = path.read_bytes()
    with pytest.raises(OSError, match="disk full"):
        save_plan(lpfhp(HISTOGRAM, 10), path, "yours")
    assert path.read_bytes() == before
    assert [file.name for file in path.parent.iterdir()] == ["plan.json"]


def test_fingerprints_change_with_everything_a_plan_depends_on() -> None:
    limits = Limits.of(10, 3, budget=4, costs=COSTS)
    others = [
        (HISTOGRAM * 2, limits, "lp"),
        (np.bincount([7, 6, 4, 4, 3, 2, 2]), limits, "lp"),
        (HISTOGRAM, limits, "lpfhp"),
        (HISTOGRAM, Limits.of(11, 3, budget=4, costs=[*COSTS, 2]), "lp"),
        (HISTOGRAM, Limits.of(10, 4, budget=4, costs=COSTS), "lp"),
        (HISTOGRAM, Limits.of(10, 3, budget=5, costs=COSTS), "lp"),
        (HISTOGRAM, Limits.of(10, 3, budget=4, costs=[0] * 11), "lp"),
        (HISTOGRAM, Limits.of(10, 3), "lp"),
    ]
    first = fingerprint_of(HISTOGRAM, limits, "lp")
    assert len({first, *(fingerprint_of(*other) for other in others)}) == 1 + len(others)
    assert first == fingerprint_of(np.append(HISTOGRAM, [0, 0]).astype(np.int32), limits, "lp")
    assert len(first) == 64


def test_plans_with_millions_of_packs_are_small_files(path: Path) -> None:
    counts = np.full(129, 10**6)
    counts[0] = 0
    plan = lpfhp(counts, 128, 8)
    save_plan(plan, path, fingerprint_of(counts, plan.limits, "lpfhp"))
    assert path.stat().st_size < 20_000
    read: PackingPlan = load_plan(path, fingerprint_of(counts, plan.limits, "lpfhp"))
    assert read == plan
