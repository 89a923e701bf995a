"""A small recipe on a small text, for everything that trains."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.tools.runs import write_text

RECIPE = """
[data]
source = "{source}"
vocab_size = 67
held_out = 0.1
capacity = 32
max_length = 32
max_sequences = 4

[model]
layers = 1
hidden = 32
heads = 4
dropout = 0.1
attention_dropout = 0.1

[batch]
global_batch = 8

[run]
steps = 6
evaluate_every = 3
checkpoint_every = 3
"""


@pytest.fixture(scope="session")
def recipe(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A recipe file, with its text beside it."""
    folder = tmp_path_factory.mktemp("recipe")
    write_text(folder / "text.txt")
    (folder / "small.toml").write_text(RECIPE.format(source=folder / "text.txt"))
    return folder / "small.toml"
