"""Pre-training that begins with what another run has learnt, or another model."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import torch

from models.bert import BertConfig, BertForPreTraining
from models.bert.pretrained import Weights, open_weights
from tensor3d import Cube, checkpoint
from tensor3d.agree import on_every_rank
from tensor3d.checkpoint.folders import PROGRESS
from tools.corpus.tokenizers.huggingface import FoundTokenizer
from tools.corpus.training import TrainingCorpus
from tools.model_folder import tokenizer_of, tokenizer_of_corpus, tokenizers_in
from tools.recipe import Recipe
from tools.resume import check_start

POSITIONS = "bert.embeddings.positions.weight"
_OF_PRETRAINING = {"recipe", "corpus", "tokenizer"}
# Of a configuration, and the key of the recipe that says it.
_KEYS = {
    "encoder": "model.encoder",
    "layers": "model.layers",
    "hidden": "model.hidden",
    "heads": "model.heads",
    "inner_size": "model.inner",
    "positions": "model.positions",
    "norm": "model.norm",
    "window": "model.window",
    "global_every": "model.global_every",
    "rotary_base": "model.rotary_base",
    "activation": "model.activation",
    "eps": "model.eps",
}
_NO_KEYS = ("types",)  # a recipe's models have the default


def has_moments(folder: Path) -> bool:
    """Whether this is a checkpoint of pre-training, whose moments can be taken over too.

    Raises:
        ValueError: a damaged checkpoint.
    """
    return (folder / PROGRESS).is_file() and checkpoint.read_progress(folder).keys() >= _OF_PRETRAINING


def begin_with(
    folder: Path,
    model: BertForPreTraining,
    optimizer: torch.optim.Optimizer,
    recipe: Recipe,
    corpus: TrainingCorpus,
    cube: Cube,
) -> str:
    """Fills a model that has not been trained yet. Every rank calls it.

    Of a checkpoint of pre-training, such as the first phase of two, weights and moments are taken; the position table
    may have grown: further rows are new. Of the folder of another model the weights alone are taken, and heads that it
    does not have stay as they are.

    Returns:
        What was taken, in words.

    Raises:
        ValueError: `folder` is no checkpoint and no model, is damaged, or one of another model or tokenizer.
    """
    on_every_rank(cube, lambda: check_begin(folder, recipe, corpus))
    if has_moments(folder):
        grows = (POSITIONS,) if model.config.encoder == "classic" else ()
        checkpoint.load(folder, model, optimizer, cube, grows=grows)
        return f"{folder}: weights and moments are loaded"
    filled = on_every_rank(cube, lambda: open_weights(folder)).fill(model, cube)
    return f"{folder}: {filled.in_words()}; the optimiser's moments begin at 0"


def check_begin(folder: Path, recipe: Recipe, corpus: TrainingCorpus) -> None:
    """Raises ValueError for what `begin_with` would refuse before it reads weights."""
    if has_moments(folder):
        check_start(checkpoint.read_progress(folder), recipe, corpus)
    else:
        weights_for(folder, recipe, corpus)


def weights_for(folder: Path, recipe: Recipe, corpus: TrainingCorpus | None) -> Weights:
    """The weights of a folder that `open_weights` takes, after a look at whether the recipe's model can begin with
    them.

    Args:
        corpus: None: its tokenizer is not looked at.

    Raises:
        ValueError: no such folder, other sizes, or another tokenizer.
    """
    weights = open_weights(folder)
    _check_sizes(folder, weights.config, recipe)
    if corpus is not None:
        tokenizer_of(folder)  # is there and belongs to the model
        # Another file of the model's may be the one that the corpus was made with, if the ids mean the same pieces.
        mark, found = tokenizer_of_corpus(corpus.tokenizer).fingerprint, tokenizers_in(folder)
        if all(each.open().fingerprint != mark for each in found):
            raise ValueError(_other_tokenizer(folder, found))
        if weights.config.vocab != corpus.info.vocab_size:
            raise ValueError(
                f"the model in {folder} has {weights.config.vocab} rows in its embedding, and its tokenizer "
                f"{corpus.info.vocab_size} pieces; pre-training has a row for each piece. Cut the embedding with the "
                f"library that wrote it: model.resize_token_embeddings({corpus.info.vocab_size})."
            )
    return weights


def _check_sizes(folder: Path, theirs: BertConfig, recipe: Recipe) -> None:
    ours = recipe.model.config(recipe.data)
    for name, key in _KEYS.items():
        old, new = getattr(theirs, name), getattr(ours, name)
        if old != new:
            raise ValueError(
                f"the model in {folder} has {name} = {old!r}, the recipe's {new!r}. Set {key} = {old!r}, or begin with "
                "another model."
            )
    for name in _NO_KEYS:
        old, new = getattr(theirs, name), getattr(ours, name)
        if old != new:
            raise ValueError(
                f"the model in {folder} has {name} = {old!r}, and what a recipe trains has {new!r}. Begin with another "
                "model."
            )


def _other_tokenizer(folder: Path, found: Sequence[FoundTokenizer]) -> str:
    told = f"the corpus was made with another tokenizer than the model in {folder}: its ids mean other pieces. "
    # The one that the script takes, if there is one.
    best = next((each for each in found if each.kind == "wordpiece"), found[0])
    if best.kind == "wordpiece":
        option = f"--vocab-file {best.file}{'' if best.lowercase else ' --cased'}"
        made = f"launch/corpus.sh --output DIR {option} TEXT"
    else:
        option = f"{'--model-file' if best.kind == 'sentencepiece' else '--tokenizer-file'} {best.file}"
        made = f"python -m tools.corpus tokenizer {option} --output DIR/tokenizer, and the steps after it"
    return f"{told}Make one with the model's: {made}; then set data.source = DIR/samples."
