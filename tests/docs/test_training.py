"""docs/training.md says how keys are written on a command line as they are read, and its tables agree."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tools.training.arguments import parse

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs/training.md").read_text(encoding="utf-8")


@pytest.mark.parametrize(
    ("words", "section", "key", "value"),
    [
        ("--model.no-reshard-after-forward", "model", "reshard_after_forward", False),
        ("--model.reshard-after-forward", "model", "reshard_after_forward", True),
        ("--data.masked-per-pack None", "data", "masked_per_pack", None),
    ],
)
def test_keys_on_the_command_line(words: str, section: str, key: str, value: object) -> None:
    assert f"`{words}`" in PAGE
    for typed in (words, words.replace("-per-", "_per_").replace("-after-", "_after_")):
        settings = parse([str(ROOT / "launch/recipes/bert-large-phase1.toml"), *typed.split()]).settings
        assert getattr(getattr(settings, section), key) is value


def test_a_value_behind_a_switch_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="2"):
        parse([str(ROOT / "launch/recipes/quickstart.toml"), "--model.reshard-after-forward", "false"])
    assert "Unrecognized options: false" in capsys.readouterr().err


def rows_below(header: str) -> dict[str, list[float]]:
    """The numbers of a table of the page, by the first cell of their row; 0 where there is none."""
    (table,) = re.findall(rf"^\| {header} \|.*\n\|[ |-]+\n((?:\|.*\n)+)", PAGE, re.MULTILINE)
    rows = [
        [cell.strip().strip(" %").replace("−", "-") for cell in line.strip("|").split("|")]
        for line in table.split("\n")
    ]
    return {name: [float(cell or 0) for cell in cells] for name, *cells in rows if name}


def test_the_losses_of_the_page_agree_with_one_another() -> None:
    """Not that they are what was measured, which takes an hour."""
    ends, way = rows_below("precision"), rows_below("to step")
    reference, masked_reference = ends["fp32"][0], ends["fp32"][2]
    assert list(ends) == list(way)
    for name, (loss, difference, masked, masked_difference, largest) in ends.items():
        assert way[name][-1] == loss
        # Losses are rounded to 1e-4, which is 0.0016 % of them, and shares to 0.001 %.
        assert difference == pytest.approx(100 * (loss / reference - 1), abs=3e-3), name
        assert masked_difference == pytest.approx(100 * (masked / masked_reference - 1), abs=3e-3), name
        seen = [100 * abs(own / other - 1) for own, other in zip(way[name], way["fp32"], strict=True)]
        assert largest >= max(seen) - 3e-3, name
