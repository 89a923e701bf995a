"""What the folder of a run says: what was asked for, where it ran, and what the model is."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

from models.bert.pretrained import write_model_json
from tools.command import Command
from tools.corpus.training import CorpusFacts, TrainingCorpus
from tools.model_folder import keep_tokenizer_of_corpus

_HEADS = ("pooler", "masked_lm", "next_sentence")


def write_facts(command: Command, info: CorpusFacts, around: dict[str, Any], folder: Path) -> None:
    """Puts what was asked for, and where it runs, into the folder of the run."""
    facts = {
        "recipe": command.settings.to_dict(),
        "cube": command.cube,
        "data_parallel": command.data_parallel,
        "unigram_entropy": info.unigram_entropy,
        "environment": around,
    }
    draft = folder / "run.json.partial"
    draft.write_text(json.dumps(facts, indent=2) + "\n")
    os.replace(draft, folder / "run.json")


def write_model(command: Command, corpus: TrainingCorpus, folder: Path) -> None:
    """Puts what the model is, and its tokenizer, into the folder of the run: what reads models reads runs too."""
    recipe = command.settings
    facts = {"source": str(command.recipe), "max_length": recipe.data.max_length}
    keep_tokenizer_of_corpus(corpus.tokenizer, folder)
    write_model_json(folder, config=recipe.model.config(recipe.data), heads=_HEADS, facts=facts)
