"""A folder with a tokenizer in it: how it is written, and how it is opened."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

from tools.common.files import make_folder, parsed_json, read_file, what_is_wrong, write_file
from tools.corpus.tokenizers.base import FILES, SETTINGS, Kind, TextLayout, Tokenizer
from tools.corpus.tokenizers.sentencepiece import SentencePieceTokenizer
from tools.corpus.tokenizers.tokenizer_json import JsonTokenizer
from tools.corpus.tokenizers.wordpiece import WordPieceTokenizer


def open_tokenizer(
    kind: Kind, file: Path, *, lowercase: bool = False, strip_accents: bool | None = None, any_case: bool = False
) -> Tokenizer:
    """A tokenizer by its file. Only a WordPiece vocabulary needs to be told whether it lowercases and drops accents,
    and is asked whether its pieces look like that, unless they may be of `any_case`."""
    if kind == "sentencepiece":
        return SentencePieceTokenizer(file)
    if kind == "wordpiece":
        return WordPieceTokenizer(file, lowercase=lowercase, strip_accents=strip_accents, any_case=any_case)
    return JsonTokenizer(file)


def install_tokenizer(
    kind: Kind,
    file: Path,
    folder: Path,
    *,
    lowercase: bool = False,
    strip_accents: bool | None = None,
    any_case: bool = False,
    layout: TextLayout | None = None,
) -> Tokenizer:
    """Checks a tokenizer's file and copies it into `folder`, with its settings; `load_tokenizer` opens it there.

    Args:
        layout: where it is not BERT's.

    Raises:
        ValueError: the file is missing, damaged or lacks a special token.
    """
    tokenizer = open_tokenizer(kind, file, lowercase=lowercase, strip_accents=strip_accents, any_case=any_case)
    settings: dict[str, Any] = {"kind": kind, "file": FILES[kind], "fingerprint": tokenizer.fingerprint}
    if kind == "wordpiece":
        settings["lowercase"] = lowercase
        settings["strip_accents"] = lowercase if strip_accents is None else strip_accents
    tokenizer.layout = layout or TextLayout()
    if tokenizer.layout != TextLayout():
        settings["layout"] = asdict(tokenizer.layout)
    write_file(folder / FILES[kind], read_file(file))
    write_file(folder / SETTINGS, json.dumps(settings, indent=1, sort_keys=True) + "\n")
    return tokenizer


def load_tokenizer(folder: Path) -> Tokenizer:
    """The tokenizer of a folder that the step `tokenizer` has written, or of a copy of it.

    Raises:
        ValueError: there is none, it is damaged, or its file is not the one that was put there.
    """
    kind, settings = read_settings(folder)
    # Its case was looked at when it was put there.
    tokenizer = open_tokenizer(kind, folder / FILES[kind], **case_of(settings), any_case=True)
    if tokenizer.fingerprint != settings["fingerprint"]:
        raise ValueError(
            f"{folder / FILES[kind]} is not the file that {SETTINGS} speaks of: it has been changed. Run "
            "`python -m tools.corpus tokenizer` again, and the steps after it."
        )
    try:
        # Folders of before were read as BERT's, and what was fine-tuned with them goes on so.
        tokenizer.layout = TextLayout(**settings.get("layout", {}))
    except TypeError as error:
        raise ValueError(f"{folder / SETTINGS} has a layout that is not known here: {error}.") from error
    return tokenizer


def copy_tokenizer(source: Path, folder: Path) -> None:
    """Copies a tokenizer from one folder into another, which is made where it is not there."""
    kind, _ = read_settings(source)
    make_folder(folder)
    for name in (FILES[kind], SETTINGS):
        write_file(folder / name, read_file(source / name))


def case_of(settings: dict[str, Any]) -> dict[str, bool]:
    """`lowercase` and `strip_accents` of a folder's settings; folders of before do not name the second."""
    lowercase = bool(settings.get("lowercase", False))
    return {"lowercase": lowercase, "strip_accents": bool(settings.get("strip_accents", lowercase))}


def read_settings(folder: Path) -> tuple[Kind, dict[str, Any]]:
    """The make of the folder's tokenizer, and all that its settings say."""
    path, inside = folder / SETTINGS, folder.absolute() / "tokenizer"
    try:
        settings = parsed_json(read_file(path))
        kind: Kind = settings["kind"]
        if kind not in FILES or not isinstance(settings["fingerprint"], str):
            raise ValueError(f"its kind must be one of {', '.join(FILES)}, beside a fingerprint; got {kind!r}")
    except (FileNotFoundError, NotADirectoryError) as error:
        raise ValueError(
            f"{folder.absolute()} holds no tokenizer: there is no {SETTINGS}. "
            + (f"Name {inside}." if (inside / SETTINGS).exists() else "Make one: python -m tools.corpus tokenizer.")
        ) from error
    except (ValueError, KeyError, TypeError) as error:
        raise ValueError(
            f"{path} is damaged: {what_is_wrong(error)}. Make the folder again: python -m tools.corpus tokenizer."
        ) from error
    return kind, settings
