"""docs/huggingface.md: its recipes for further pre-training have the sizes of the models that they name."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path

import pytest

from models.bert.cost_model.param_shapes import parameters
from tools.training.config import TrainConfig, from_table, tomllib

PAGE = (Path(__file__).parents[2] / "docs" / "huggingface.md").read_text(encoding="utf-8")


# Weights of BertForPreTraining, RobertaForMaskedLM and ModernBertForMaskedLM of version 5 of the library.
@pytest.mark.parametrize(
    ("name", "vocab", "weights"),
    [("BERT", 30522, 110_106_428), ("RoBERTa", 50265, 124_697_433), ("ModernBERT", 50368, 149_655_232)],
)
def test_recipes_have_the_sizes_of_their_models(name: str, vocab: int, weights: int) -> None:
    behind = PAGE.split(f"For a {name}-base", 1)[1].split("\n\n", 1)[1]
    block = re.match(r"(?: {4}.*\n|\n)+", behind)
    assert block is not None
    recipe = from_table(TrainConfig, tomllib.loads(block[0]))
    config = recipe.model.config(replace(recipe.data, vocab_size=vocab))
    assert sum(each.elements for each in parameters(config)) == weights
