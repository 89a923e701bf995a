"""The makes of tokenizers, their files, and what is kept beside them."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from types import MappingProxyType
from typing import Any, Literal

Kind = Literal["sentencepiece", "wordpiece", "json"]
SETTINGS = "tokenizer-settings.json"
FILES: MappingProxyType[Kind, str] = MappingProxyType(
    {"sentencepiece": "tokenizer.model", "wordpiece": "vocab.txt", "json": "tokenizer.json"}
)
"""The file of each, in a folder that the step `tokenizer` has written."""


def fingerprint(kind: Kind, content: bytes, **settings: Any) -> str:
    """A hash of all that decides the ids."""
    head = json.dumps([kind, settings], sort_keys=True).encode()
    return hashlib.blake2b(head + b"\0" + content, digest_size=16).hexdigest()


def read(file: Path) -> bytes:
    """Raises ValueError where there is no such file."""
    try:
        return file.read_bytes()
    except (FileNotFoundError, IsADirectoryError, NotADirectoryError) as error:
        raise ValueError(f"there is no tokenizer file {file}; name one that exists.") from error


def missing(package: str, error: ImportError) -> ValueError:
    """For a package that this make of tokenizer needs."""
    return ValueError(f"this tokenizer needs the package {package} ({error}): pip install 'tensor3d[corpus]'")
