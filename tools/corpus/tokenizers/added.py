"""Tokens that the transformers library keeps beside a vocabulary, in files of their own."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from tools.corpus.tokenizers.base import Tokenizer

CONFIG, SPECIAL_MAP, ADDED = "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json"
_ROLES = ("pad", "cls", "sep", "mask", "unk")
_EXTRA = ("additional_special_tokens", "extra_special_tokens")


def check_added(folder: Path, tokenizer: Tokenizer, file: Path, remedy: str) -> None:
    """A vocabulary by itself gives the library's ids where the files beside it name its own special tokens alone.

    Args:
        tokenizer: that of `file`.
        remedy: what to do, for the error.

    Raises:
        ValueError: a token is added to the vocabulary, or takes the place of one of its special tokens; or a damaged
            file.
    """
    ids = {**tokenizer.special_ids} | ({} if tokenizer.unknown is None else {"unk": tokenizer.unknown})
    names = dict(zip(ids, tokenizer.pieces(list(ids.values())), strict=True))
    own = {name: ids[role] for role, name in names.items()}
    for where, name, number in _added(folder):
        if name not in own or number not in (None, own[name]):
            raise ValueError(
                f"{where} adds the token {name!r}{'' if number is None else f' with the id {number}'}, which "
                f"{file.name} by itself does not have as such. {remedy}"
            )
    for where, role, name in _told(folder):
        if name != names.get(role, name):
            raise ValueError(f"{where} calls {role}_token {name!r}, and {file.name} has {names[role]!r}. {remedy}")


def check_named(folder: Path, tokenizer: Tokenizer, file: Path, remedy: str) -> None:
    """A tokenizer.json has the tokens that older files beside it add; the library takes those of both.

    Raises:
        ValueError: it lacks one, or a damaged file.
    """
    added = [(where, name, number) for where, name, number in _added(folder) if number is not None]
    known = set(tokenizer.pieces(range(tokenizer.vocab_size))) if added else set()
    for where, name, number in added:
        if name not in known:  # what is known keeps its id
            raise ValueError(
                f"{where} adds the token {name!r} with the id {number}, and {file.name} has no such token. {remedy}"
            )


def read_table(file: Path) -> dict[str, Any]:
    """Empty where there is none. Raises ValueError for one that is damaged."""
    if not file.is_file():
        return {}
    try:
        found = json.loads(file.read_bytes())
    except ValueError as error:
        raise ValueError(f"{file} is no JSON: {error}. Get the file again.") from error
    if not isinstance(found, dict):
        raise ValueError(f"{file} is no table of settings, but a {type(found).__name__}. Get the file again.")
    return found


def _added(folder: Path) -> Iterator[tuple[Path, str, int | None]]:
    """The file, the token and its id, where one is said."""
    for name, number in read_table(folder / ADDED).items():
        yield folder / ADDED, name, number
    decoder = read_table(folder / CONFIG).get("added_tokens_decoder") or {}
    for number, token in decoder.items() if isinstance(decoder, dict) else ():
        yield folder / CONFIG, _name(token), int(number) if str(number).isdecimal() else -1
    for where in (folder / CONFIG, folder / SPECIAL_MAP):
        table = read_table(where)
        for key in _EXTRA:
            tokens = table.get(key) or ()
            for token in tokens.values() if isinstance(tokens, dict) else tokens:
                yield where, _name(token), None


def _told(folder: Path) -> Iterator[tuple[Path, str, str]]:
    """The file, the role of a special token and its name."""
    for where in (folder / CONFIG, folder / SPECIAL_MAP):
        table = read_table(where)
        yield from ((where, role, _name(table[key])) for role in _ROLES if table.get(key := f"{role}_token"))


def _name(token: object) -> str:
    """Older files have the name alone."""
    return str(token.get("content")) if isinstance(token, dict) else str(token)
