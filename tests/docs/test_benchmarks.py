"""Tables of docs/benchmarks.md that can be counted, and the list of its subcommands."""

from __future__ import annotations

import dataclasses
import re
from pathlib import Path

import pytest

from tensor3d import CubeShape
from tools.bench.__main__ import SUBCOMMANDS
from tools.training.config import read_config
from tools.training.dry_step import dry_step
from tools.training.estimate import expect

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "benchmarks.md").read_text()
STEPS = re.findall(r"^\| (\d+)x(\d+)x(\d+) \| \d+ \|.*\| ([\d,]+) \| ([\d.]+) \| equal \|", PAGE, re.MULTILINE)


def test_every_subcommand_is_listed() -> None:
    rows = re.findall(r"^\| (`\w+`(?:, `\w+`)*) \|", PAGE.partition("Exit status")[0], re.MULTILINE)
    assert {name for row in rows for name in re.findall(r"\w+", row)} == set(SUBCOMMANDS)


@pytest.mark.parametrize(
    ("x", "y", "z", "collectives", "mib"),
    [step if step[:3] == ("1", "1", "1") else pytest.param(*step, marks=pytest.mark.slow) for step in STEPS],
)
def test_the_step_of_the_quickstart_sends_what_the_table_says(
    x: str, y: str, z: str, collectives: str, mib: str
) -> None:
    recipe = read_config(ROOT / "launch" / "recipes" / "quickstart.toml")
    recipe = dataclasses.replace(recipe, model=dataclasses.replace(recipe.model, heads=8))
    shape = CubeShape(x=int(x), y=int(y), z=int(z))
    config, load = recipe.model.config(recipe.data), expect(recipe, shape).load
    counted = [dry_step(config, shape, load, rank=rank) for rank in range(min(2, shape.ranks))]  # one has the most
    calls, received = ([getattr(step, what).total() for step in counted] for what in ("calls", "received"))
    assert (max(calls), f"{max(received) / 2**20:.2f}") == (int(collectives), mib)


def test_there_are_steps() -> None:
    assert len(STEPS) == 4
