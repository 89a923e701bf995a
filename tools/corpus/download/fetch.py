"""One file, from its server to the disk: resumed where it was cut, checked, and tried again."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import os
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import closing, suppress
from dataclasses import dataclass
from pathlib import Path

import requests
from urllib3.exceptions import HTTPError, MaxRetryError
from urllib3.util import Retry

from tools.common.files import append, parsed_json, read_file, write_file
from tools.corpus.download.http import PASSING, Retries, connect, content_length, describe, status_of
from tools.corpus.download.sources import Download, Patience
from tools.corpus.pipeline.units import BadInput

# --- A file on its way: what has come of it, and which version of which file that is ----------------------------------

_HASH_BLOCK = 1 << 20


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
            with suppress(ValueError, TypeError):  # a damaged record tells nothing of the part
                self.version = Version(**parsed_json(read_file(self._record)))
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
        write_file(self._record, json.dumps(dataclasses.asdict(version)))
        self.path.touch()
        self.version = version

    def append(self, blocks: Iterable[bytes]) -> Iterable[int]:
        """Writes what comes, and tells the bytes of each block.

        Raises:
            OSError: the disk is full or failing; the message names the file.
        """
        with append(self.path) as file:
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
            while block := file.read(_HASH_BLOCK):
                digest.update(block)
        return digest.hexdigest()

    def publish(self, target: Path) -> None:
        """Gives the file its name, once its bytes are on disk."""
        with self.path.open("rb") as file:
            os.fsync(file.fileno())
        os.replace(self.path, target)
        self._record.unlink(missing_ok=True)


# --- One file, from its server to the disk ----------------------------------------------------------------------------

_BLOCK = 1 << 16  # what a cut may cost: urllib3 drops the block that it was filling
_CHECK_URL = "Check the URL in a browser"
_WHOLE_TRIES = 2
"""A file that came whole but wrong is fetched once more."""


class _CutError(Exception):
    """A body that ended before its time: the rest may come later."""


def fetch(
    source: Download, target: Path, partial: Partial, patience: Patience, progress: Callable[[int], None]
) -> None:
    """Fetches a file. What has come of it stays in `partial` when this fails, unless it is known to be wrong.

    Args:
        source: where it is, and what is known of it.
        target: where it goes; appears when the file is whole and right.
        progress: hears the bytes that have come, of earlier runs too; fewer than none where they were thrown away.

    Raises:
        BadInput: the server refuses, or sends what is not expected.
        OSError: the server cannot be reached or fails for too long, which says nothing of the file; or the disk is full
            or failing.
    """
    progress(partial.size)
    for attempt in range(_WHOLE_TRIES):
        _bring(source, partial, patience, progress)
        wrong = _wrong(source, partial)
        if not wrong:
            partial.publish(target)
            return
        size = partial.size
        partial.clear()
        if attempt + 1 < _WHOLE_TRIES:
            progress(-size)
    raise BadInput(
        source.public_url,
        f"byte {size}",
        f"{wrong}, in {_WHOLE_TRIES} attempts; the file was removed",
        "The file on the server, or what is expected of it, has changed or is damaged: correct the one that is wrong",
    )


def _bring(source: Download, partial: Partial, patience: Patience, progress: Callable[[int], None]) -> None:
    """Adds to the partial file until it is whole, over as many connections as it takes.

    What gives no answer is asked again by the session; a body that is cut counts among the same failures in a row.
    """
    fresh: Retry = Retries.of(patience, progress)
    retries, furthest = fresh, partial.size
    while not partial.is_whole:
        try:
            with connect(retries) as session, closing(_ask(session, source, partial, patience)) as answer:
                retries = answer.raw.retries or retries
                if _take(answer, source, partial, progress):
                    return
        except _CutError as cut:
            # Beyond where it ever was: else a server without ranges that always cuts would never be given up.
            if partial.size > furthest:
                retries, furthest = fresh, partial.size
            try:
                retries = retries.increment("GET", source.public_url, error=cut)
            except MaxRetryError:
                raise _given_up(source, partial, str(cut), patience) from cut
            retries.sleep()


def _ask(session: requests.Session, source: Download, partial: Partial, patience: Patience) -> requests.Response:
    """The answer to a request for what is missing.

    Raises:
        BadInput: the server has no such file for us.
        ConnectionError: it gives no answer, or is too busy, as often as is put up with.
    """
    headers = _range_headers(source, partial)
    try:
        answer = session.get(source.url, headers=headers, stream=True, timeout=patience.timeout)
    except (requests.ConnectionError, requests.Timeout) as error:
        raise _given_up(source, partial, describe(error), patience) from error
    except requests.RequestException as error:
        raise BadInput(source.public_url, "", describe(error), _CHECK_URL) from error
    if answer.status_code in (200, 206, 416):
        return answer
    answer.close()
    told = f"the server says {status_of(answer)}"
    if answer.status_code in PASSING:
        raise _given_up(source, partial, told, patience)
    raise BadInput(source.public_url, "", told, _CHECK_URL)


def _given_up(source: Download, partial: Partial, reason: str, patience: Patience) -> ConnectionError:
    # No BadInput: with the network down, --skip-bad would leave out whatever was not there yet.
    return ConnectionError(
        f"{source.public_url}, byte {partial.size}: {reason}, {patience.retries + 1} times in a row. Check the network "
        "and the URL, and run the same command again: it goes on from this byte if the server lets it."
    )


def _take(answer: requests.Response, source: Download, partial: Partial, progress: Callable[[int], None]) -> bool:
    """Adds a body: True when it brought the file to its end, False when the partial file had to be thrown away, because
    it is not of what the server has now.

    Raises:
        _CutError: it ended before.
    """
    if answer.status_code != 200 and not _continues(answer, partial):
        if "Range" not in answer.request.headers:
            raise _CutError(f"the server answers {answer.status_code} to a request for the whole file")
        progress(-partial.size)
        partial.clear()
        return False
    if answer.status_code == 200:
        progress(-partial.size)
        partial.begin(Version.of(source.public_url, answer.headers, content_length(answer.headers)))
    _check_size(source, partial)
    for size in partial.append(_blocks(answer)):
        progress(size)
    total = partial.version.total if partial.version else None
    if total is not None and partial.size != total:
        raise _CutError(f"the connection ended after {partial.size} of {total} bytes")
    return True


def _range_headers(source: Download, partial: Partial) -> dict[str, str]:
    """What asks for the rest; nothing where the bytes here could belong to another version and nobody would notice."""
    tag = partial.version.tag if partial.version else ""
    if partial.size == 0 or not (tag or source.checksum):
        return {}
    return {"Range": f"bytes={partial.size}-", **({"If-Range": tag} if tag else {})}


def _continues(answer: requests.Response, partial: Partial) -> bool:
    """Whether a 206 goes on where the partial file ends, with the same version. Not every server looks at If-Range."""
    found = re.fullmatch(r"bytes (\d+)-\d+/(\d+|\*)", answer.headers.get("Content-Range", "").strip())
    if answer.status_code != 206 or found is None or partial.version is None:
        return False
    total = None if found[2] == "*" else int(found[2])
    now, before = Version.of(partial.version.url, answer.headers, total), partial.version
    # A 206 need not repeat what an earlier answer said.
    same = all(
        not new or not old or new == old
        for new, old in ((now.etag, before.etag), (now.modified, before.modified), (now.total, before.total))
    )
    return same and int(found[1]) == partial.size


def _blocks(answer: requests.Response) -> Iterator[bytes]:
    """The body as it is sent: a file that is compressed stays so."""
    try:
        yield from answer.raw.stream(_BLOCK, decode_content=False)
    except HTTPError as error:
        raise _CutError(describe(error)) from error


def _check_size(source: Download, partial: Partial) -> None:
    """Before gigabytes of the wrong file have come."""
    total = partial.version.total if partial.version else None
    if source.size is not None and total is not None and total != source.size:
        partial.clear()
        raise BadInput(
            source.public_url, "", f"the server has {total} bytes where {source.size} are expected", _CHECK_URL
        )


def _wrong(source: Download, partial: Partial) -> str:
    """What is wrong with a file that has come to its end; "" if nothing is."""
    if source.size is not None and partial.size != source.size:
        return f"{partial.size} bytes came where {source.size} are expected"
    if source.checksum:
        kind, _, expected = source.checksum.partition(":")
        found = partial.digest(kind)
        if found != expected:
            return f"its {kind} is {found} where {expected} is expected"
    return ""
