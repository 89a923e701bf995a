"""Small models to be asked: folders with random weights and a vocabulary of some words."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import nn

from models.bert import BertConfig, BertForPreTraining
from models.bert.huggingface import write_model_json
from models.bert.tasks import BertForQuestionAnswering, BertForSequenceClassification, BertForTokenClassification
from tensor3d import Cube, checkpoint
from tests.tools.corpus.tokenized import PIECES, write_vocabulary
from tools.corpus.tokenizers import install_tokenizer

# Weights so large that results differ from text to text.
CONFIG = BertConfig(layers=2, hidden=32, heads=4, vocab=len(PIECES) + 3, positions=24, std=0.3)
LABELS = ("no", "perhaps", "yes")
TAGS = ("O", "B-PER", "I-PER", "B-LOC")
TEXTS = [
    "A fox",
    "the fox went to the hill in the morning",
    "stories",
    "The story tells of a fox, of a hill, and of the morning!",
    "a a a a a",
    "hill",
]
MASKED = ["the [MASK] went to the hill", "a fox", "[MASK]", "a [MASK] in the [MASK]"]
QUESTIONS = [
    {"question": "who went?", "context": "a fox went to the hill"},
    {"question": "where", "context": "the story tells of a fox. " * 6 + "the fox went to the hill in the morning."},
]


def write_model(folder: Path, model: nn.Module, heads: tuple[str, ...], **told: Any) -> Path:
    """A model folder, as tools write it."""
    (folder / "tokenizer").mkdir(parents=True)
    file = write_vocabulary(folder / "vocab.txt")
    install_tokenizer("wordpiece", file, folder / "tokenizer", lowercase=True)
    nothing = torch.optim.SGD(model.parameters(), lr=1.0)
    checkpoint.save(folder / "checkpoints", 0, model, nothing, Cube.single(), {})
    write_model_json(folder, config=CONFIG, heads=heads, **told)
    return folder


def write_models(folder: Path) -> Path:
    """Folders of all kinds: `language`, `classes`, `number`, `answers`, `tags` and `ranks`."""
    cube = Cube.single()
    cube.manual_seed(7)
    heads = ("pooler", "masked_lm", "next_sentence")
    write_model(folder / "language", BertForPreTraining(CONFIG, cube), heads)
    classes, number = (BertForSequenceClassification(CONFIG, outputs, cube) for outputs in (3, 1))
    of_classes = ("pooler", "classifier")
    write_model(folder / "classes", classes, of_classes, labels=LABELS, problem="classify")
    write_model(folder / "number", number, of_classes, problem="regress", facts={"max_length": 8})
    write_model(folder / "answers", BertForQuestionAnswering(CONFIG, cube), ("answers",), problem="answer")
    tags = BertForTokenClassification(CONFIG, len(TAGS), cube)
    facts = {"max_length": 12, "tag": {"scheme": "iob2", "stride": 4}}
    write_model(folder / "tags", tags, ("tags",), labels=TAGS, problem="tag", facts=facts)
    scores = BertForSequenceClassification(CONFIG, 1, cube)
    write_model(folder / "ranks", scores, of_classes, problem="rank", facts={"max_length": 20})
    return folder
