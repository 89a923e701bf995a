"""What all seeds begin with: the model's sizes, its weights if there are any, and the tokenizer."""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory

from models.bert import PRESETS, BertConfig
from models.bert.huggingface import WeightSource, open_weights
from models.bert.huggingface.config import CROSS_ENCODER
from tensor3d import Cube, CubeShape
from tensor3d.distributed.object_collectives import run_on_all_ranks, run_on_rank0
from tensor3d.files import make_folder
from tools.common.machine import write_json
from tools.corpus.quick.sentencepiece_tokenizer import train_tokenizer
from tools.corpus.tokenizers import SETTINGS, Tokenizer, copy_tokenizer, install_tokenizer, load_tokenizer
from tools.corpus.tokenizers.base import Kind
from tools.corpus.tokenizers.model_dir import CONFIG, HUGGINGFACE, TOKENIZER, keep_tokenizer, padding_of, tokenizer_of
from tools.corpus.tokenizers.wordpiece import guess_accents
from tools.finetune.config import ModelSection
from tools.finetune.data import EMBEDDED, embedded_sentences
from tools.predict.text_encoder import check_types

_EMBEDDED_PIECES = 2048
# Of config.json: of a head that was there before. Left in, other classes would be read into the new one.
_OF_A_HEAD = (
    *("id2label", "label2id", "num_labels", "_num_labels", "problem_type", CROSS_ENCODER),
    "sbert_ce_default_activation_function",
)
_log = logging.getLogger(__name__)
_KINDS: dict[str, Kind] = {".txt": "wordpiece", ".json": "json", ".model": "sentencepiece"}


@dataclass(frozen=True, kw_only=True, eq=False)
class InitModel:
    """Where a seed begins. The same on every rank."""

    config: BertConfig
    weights: WeightSource | None
    """None: random ones."""
    tokenizer: Tokenizer
    tokenizer_folder: Path
    """Where it lies."""
    install: Callable[[], None] = lambda: None
    """Puts it there, unless it is there."""

    def keep(self, folder: Path) -> None:
        """Copies into the folder of a model what stays as it is: the tokenizer, and settings of an imported folder."""
        if self.weights is None:
            copy_tokenizer(self.tokenizer_folder, folder / TOKENIZER)
            return
        keep_tokenizer(self.tokenizer_folder, folder)
        if self.weights.settings is not None:
            make_folder(folder / HUGGINGFACE)
            kept = {name: value for name, value in self.weights.settings.items() if name not in _OF_A_HEAD}
            write_json(folder / HUGGINGFACE / CONFIG, kept)


def open_start(model: ModelSection, max_length: int, output: Path, cube: Cube, *, pairs: bool) -> InitModel:
    """Every rank calls it.

    Args:
        max_length: tokens of the longest sequence.
        pairs: whether sequences are of two texts.
        output: a folder, in whose `tokenizer` that of a model with random weights is kept.

    Raises:
        ValueError: no weights or no tokenizer there, sizes that do not divide on the cube, fewer positions than the
            longest sequence has, fewer types than pairs have.
    """
    if model.start_from is not None:
        folder = Path(model.start_from)
        weights = run_on_all_ranks(cube, lambda: open_weights(folder))
        tokenizer = run_on_all_ranks(cube, lambda: tokenizer_of(folder, bare=True))  # tasks say what they need
        config = model.changed(weights.config)
        if config.pooling == "score" and "classifier" not in weights.heads:
            # Which the library's new classifier would pass over, too.
            config = dataclasses.replace(config, pad_id=run_on_all_ranks(cube, lambda: padding_of(folder, tokenizer)))
        start = InitModel(config=config, weights=weights, tokenizer=tokenizer, tokenizer_folder=folder)
    else:
        folder = output / TOKENIZER
        run_on_rank0(cube, lambda: _install(model, folder))
        tokenizer = run_on_all_ranks(cube, lambda: load_tokenizer(folder))
        config = dataclasses.replace(
            PRESETS[model.preset], vocab=tokenizer.vocab_size, positions=max_length, std=model.std
        )
        start = InitModel(
            config=model.changed(config),
            weights=None,
            tokenizer=tokenizer,
            tokenizer_folder=folder,
            install=partial(_install, model, folder),
        )
    _check(start.config, start.tokenizer, max_length, cube.shape, str(model.start_from), pairs=pairs)
    return start


def check_start_folder(folder: Path, max_length: int, shape: CubeShape, *, pairs: bool) -> None:
    """Raises ValueError for what `open_start` would refuse of a folder with weights. No process needs to be
    connected."""
    config = open_weights(folder).config
    _check(config, tokenizer_of(folder, bare=True), max_length, shape, str(folder), pairs=pairs)


def _check(
    config: BertConfig, tokenizer: Tokenizer, max_length: int, shape: CubeShape, name: str, *, pairs: bool
) -> None:
    if not config.has_rotary and config.positions < max_length:
        raise ValueError(
            f"data.max_length={max_length} is more than the {config.positions} positions of the model in {name}. Lower "
            "it."
        )
    if pairs:
        check_types(config, tokenizer, name)
    config.check(shape)


def _install(model: ModelSection, folder: Path) -> None:
    """Puts the tokenizer of a model with random weights into a folder, if it is not there yet."""
    if (folder / SETTINGS).exists():
        return
    assert model.vocab is not None, "checked by the section"
    make_folder(folder)
    if model.vocab == EMBEDDED:
        with TemporaryDirectory(dir=folder) as passing:
            file = Path(passing) / "tokenizer.model"
            train_tokenizer(embedded_sentences("train"), file, vocab_size=_EMBEDDED_PIECES)
            install_tokenizer("sentencepiece", file, folder)
        return
    source = Path(model.vocab)
    if source.is_dir():
        copy_tokenizer(source, folder)
        return
    if source.suffix not in _KINDS:
        raise ValueError(
            f"model.vocab must be a vocab.txt, a tokenizer.json, a sentencepiece *.model or a folder. Got {source}."
        )
    kind, strip_accents = _KINDS[source.suffix], model.strip_accents
    if kind == "wordpiece" and model.lowercase and strip_accents is None:
        strip_accents, told = guess_accents(source)
        _log.info("%s; model.strip_accents says otherwise", told)
    install_tokenizer(kind, source, folder, lowercase=model.lowercase, strip_accents=strip_accents)
