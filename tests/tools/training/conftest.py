"""The small recipe's corpus."""

from __future__ import annotations

from pathlib import Path

import pytest

from tools.corpus.quick.prepare import prepare
from tools.training.config import read_config


@pytest.fixture(scope="session")
def corpus(recipe: Path) -> Path:
    folder = recipe.parent / "corpus"
    data = read_config(recipe).data
    prepare(data.source, folder, vocab_size=data.vocab_size, held_out=data.held_out, seed=0)
    return folder
