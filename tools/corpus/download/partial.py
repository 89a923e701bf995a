"""A file on its way: what has come of it, and which version of which file that is."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

from tools.corpus.download.server import content_length
from tools.corpus.work.files import draft

_BLOCK = 1 << 20


@dataclass(frozen=True, kw_only=True)
class Version:
    """What a server says of the file that it sends."""

    url: str
    etag: str
    """Empty where there is none; weak ones (W/) do not promise equal bytes and are left out."""
    modified: str
    total: int | None
    """Bytes of the whole."""

    @classmethod
    def of(cls, url: str, headers: Mapping[str, str], total: int | None) -> Version:
        etag = headers.get("ETag", "")
        modified = headers.get("Last-Modified", "")
        return cls(url=url, etag="" if etag.startswith("W/") else etag, modified=modified, total=total)

    @classmethod
    def of_whole(cls, url: str, headers: Mapping[str, str]) -> Version:
        return cls.of(url, headers, content_length(headers))

    @property
    def tag(self) -> str:
        """What If-Range can hold; empty: the server gives nothing to tell two versions apart by."""
        return self.etag or self.modified


class Partial:
    """PATH.part, and PATH.part.json, which says what it is a part of. Both outlive a killed run.

    Args:
        path: without the endings.
        url: where it comes from; the part of another URL is thrown away.
    """

    def __init__(self, path: Path, url: str) -> None:
        self.path = path.with_name(f"{path.name}.part")
        self._record = path.with_name(f"{path.name}.part.json")
        self.version: Version | None = None
        if self._record.exists():
            self.version = Version(**json.loads(self._record.read_bytes()))
        if self.version is None or self.version.url != url:
            self.clear()

    @property
    def size(self) -> int:
        return self.path.stat().st_size if self.path.exists() else 0

    @property
    def is_whole(self) -> bool:
        return self.version is not None and self.version.total is not None and self.size == self.version.total

    def clear(self) -> None:
        """Back to nothing. The bytes go first: a record without them does no harm, they without it would."""
        self.path.unlink(missing_ok=True)
        self._record.unlink(missing_ok=True)
        self.version = None

    def begin(self, version: Version) -> None:
        """Throws away what is there, for a file from its first byte on."""
        self.clear()
        with draft(self._record) as file:
            file.write(json.dumps(dataclasses.asdict(version)).encode())
        self.path.touch()
        self.version = version

    def append(self, blocks: Iterable[bytes]) -> Iterable[int]:
        """Writes what comes, and tells the bytes of each block.

        Raises:
            OSError: the disk is full or failing; the message names the file.
        """
        with self.path.open("ab") as file:
            for block in blocks:
                try:
                    file.write(block)
                    file.flush()
                except OSError as error:
                    raise OSError(error.errno, error.strerror, str(self.path)) from error
                yield len(block)

    def digest(self, kind: str) -> str:
        """Hexadecimal checksum of what is on disk."""
        digest = hashlib.new(kind, usedforsecurity=False)
        with self.path.open("rb") as file:
            while block := file.read(_BLOCK):
                digest.update(block)
        return digest.hexdigest()

    def publish(self, target: Path) -> None:
        """Gives the file its name, once its bytes are on disk."""
        with self.path.open("rb") as file:
            os.fsync(file.fileno())
        os.replace(self.path, target)
        self._record.unlink(missing_ok=True)
