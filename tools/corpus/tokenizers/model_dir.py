"""The tokenizer of a folder with a model in it, whoever wrote the folder.

model.json                    what the model is (models/bert/huggingface)
tokenizer/                    the tokenizer, for `load_tokenizer`
tokenizer/huggingface/        what an imported folder had of its tokenizer, byte for byte
checkpoints/step-NNNNNNNN/    the weights
huggingface/config.json       of an imported folder
"""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path

from models.bert.huggingface import model_folder_of
from tools.common.files import make_folder, parsed_json, read_file, write_file
from tools.corpus.tokenizers import FILES, SETTINGS, Tokenizer, copy_tokenizer, install_tokenizer, load_tokenizer
from tools.corpus.tokenizers.base import no_special
from tools.corpus.tokenizers.folder import case_of, open_tokenizer, read_settings
from tools.corpus.tokenizers.huggingface import (
    FoundTokenizer,
    find_tokenizer,
    layout_of,
    padding_in,
    read_config,
    tokenizer_files,
    with_same_ids,
)
from tools.corpus.tokenizers.tokenizer_json import JsonTokenizer

MODEL, TOKENIZER, CHECKPOINTS = "model.json", "tokenizer", "checkpoints"
CONFIG, HUGGINGFACE = "config.json", "huggingface"
"""Names in such a folder; the last one also inside of `TOKENIZER`."""


def tokenizer_of(folder: Path | str, *, bare: bool = False) -> Tokenizer:
    """The tokenizer of a folder that `open_weights` of models.bert takes: one of ours, a checkpoint in it, or a
    Hugging Face folder.

    Args:
        bare: whether it may put nothing around a text; one of a classifier of texts always may.

    Raises:
        ValueError: there is none, it is damaged, it has more pieces than the model has rows for, or settings beside it
            give other ids or another layout than can be had here.
    """
    root = model_folder_of(Path(folder))
    tokenizer = load_tokenizer(root / TOKENIZER) if _is_ours(root) else _imported(root, bare or _is_classifier(root))
    rows = _embedding_rows(root)
    if rows is not None and rows < tokenizer.vocab_size:
        raise ValueError(
            f"the tokenizer in {root} has ids up to {tokenizer.vocab_size - 1}, and the model's embedding has {rows} "
            f"rows, for ids up to {rows - 1}: they do not belong together. Put the files of the tokenizer that the "
            "model was trained with there, or give the embedding the missing rows with the library that wrote it "
            "(model.resize_token_embeddings)."
        )
    return tokenizer


def padding_of(folder: Path, tokenizer: Tokenizer) -> int:
    """The id that the library pads with: of the token that the files beside an imported tokenizer name, else padding's
    here."""
    root = model_folder_of(folder)
    name = padding_in(root / TOKENIZER / HUGGINGFACE if _is_ours(root) else root)
    told = tokenizer.library.token_to_id(name) if name is not None and isinstance(tokenizer, JsonTokenizer) else None
    return tokenizer.special_ids["pad"] if told is None else told


def _imported(root: Path, bare: bool) -> Tokenizer:
    found = find_tokenizer(root)
    tokenizer = found.open()
    if not tokenizer.behind and not bare:
        raise no_special(found.file, "cls")
    tokenizer.layout = layout_of(root, tokenizer)
    return tokenizer


def tokenizers_in(folder: Path) -> list[FoundTokenizer]:
    """What the folder of a model has for its ids: what `tokenizer_of` reads, and other files that give the same ids.

    Raises:
        ValueError: the first one is missing or damaged.
    """
    root = model_folder_of(folder)
    if _is_ours(root):
        kind, settings = read_settings(root / TOKENIZER)
        first = FoundTokenizer(kind=kind, file=root / TOKENIZER / FILES[kind], **case_of(settings))
        rest = root / TOKENIZER / HUGGINGFACE
    else:
        first, rest = find_tokenizer(root), root
    return [first, *with_same_ids(first, rest)]


def keep_tokenizer(source: Path, folder: Path) -> None:
    """Copies what `tokenizer_of(source)` reads, with the files of an imported folder, into `folder`/tokenizer.

    Raises:
        ValueError: see `tokenizer_of`.
    """
    root, target = model_folder_of(source), folder / TOKENIZER
    layout = tokenizer_of(source, bare=True).layout
    make_folder(target)
    if _is_ours(root):
        copy_tokenizer(root / TOKENIZER, target)
        files = tokenizer_files(root / TOKENIZER / HUGGINGFACE)
    else:
        find_tokenizer(root).install(target, layout)
        files = tokenizer_files(root)
    if files:
        make_folder(target / HUGGINGFACE)
    for file in files:
        copy_file(file, target / HUGGINGFACE / file.name)


def tokenizer_of_corpus(file: Path) -> Tokenizer:
    """By the file that decides what an id means in a corpus: one in a folder of the step `tokenizer`, or the bare
    sentencepiece model of a corpus that was prepared in one go."""
    return load_tokenizer(file.parent) if (file.parent / SETTINGS).is_file() else open_tokenizer("sentencepiece", file)


def keep_tokenizer_of_corpus(file: Path, folder: Path) -> None:
    """The same as `keep_tokenizer`, of a corpus."""
    target = folder / TOKENIZER
    make_folder(target)
    if (file.parent / SETTINGS).is_file():
        copy_tokenizer(file.parent, target)
    else:
        install_tokenizer("sentencepiece", file, target)


def keep_tokenizer_of_run(file: Path, folder: Path, start_from: Path | None) -> None:
    """The tokenizer of a run on a corpus: that of the model that it begins with, for it also says how texts become
    sequences and has the library's files; else that of the corpus.

    Args:
        file: what decides the ids of the corpus.
        folder: of the run. A tokenizer that is there and gives these ids stays.
        start_from: the model, a checkpoint of one, or a checkpoint alone, which has no tokenizer.
    """
    mark = tokenizer_of_corpus(file).fingerprint
    for source in (folder, *([] if start_from is None else [start_from])):
        with suppress(ValueError):  # there is none
            if any(each.open().fingerprint == mark for each in tokenizers_in(source)):
                if source != folder:
                    keep_tokenizer(source, folder)
                return
    keep_tokenizer_of_corpus(file, folder)


def copy_file(source: Path, target: Path) -> None:
    """Byte for byte; it appears whole or not at all."""
    write_file(target, read_file(source))


def _is_ours(root: Path) -> bool:
    """Whether the folder holds a tokenizer as this toolkit writes it. One without a tokenizer is no Hugging Face
    folder either, so that the error speaks of what the folder should have."""
    return (root / TOKENIZER / SETTINGS).is_file() or ((root / MODEL).is_file() and not (root / CONFIG).is_file())


def _is_classifier(root: Path) -> bool:
    """Whether a Hugging Face folder was saved from a classifier of texts."""
    names = read_config(root / CONFIG).get("architectures")
    return isinstance(names, list) and any(str(name).endswith("ForSequenceClassification") for name in names)


def _embedding_rows(root: Path) -> int | None:
    """As many ids as the model knows; None where the folder does not tell."""
    for name, path in ((MODEL, ("config", "vocab")), (CONFIG, ("vocab_size",))):
        if (root / name).is_file():
            with suppress(ValueError, KeyError, TypeError):  # reading the model will tell
                value = parsed_json(read_file(root / name))
                for key in path:
                    value = value[key]
                return int(value)
    return None
