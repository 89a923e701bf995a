"""docs/training.md says how keys are written on a command line as they are read."""

from __future__ import annotations

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
