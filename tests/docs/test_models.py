"""The code of docs/models.md runs."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch

PAGE = (Path(__file__).parents[2] / "docs" / "models.md").read_text()


@pytest.mark.parametrize("code", re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL), ids=["bert", "causal_lm"])
def test_the_blocks_about_transformers_leave_the_original_as_it_was(code: str) -> None:
    pytest.importorskip("transformers")
    before, after = code.split("original.load_state_dict")
    names: dict[str, Any] = {}
    exec(compile(before, "docs/models.md", "exec"), names)
    weights = {name: value.clone() for name, value in names["original"].state_dict().items()}
    exec(compile("found = original.load_state_dict" + after, "docs/models.md", "exec"), names)
    assert not names["found"].missing_keys
    assert not names["found"].unexpected_keys
    for name, value in names["original"].state_dict().items():
        assert torch.equal(value, weights[name]), name
