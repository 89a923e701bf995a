"""Talking to servers: who we say we are, and which answers are worth another try."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from importlib import metadata
from typing import Any

import requests
from requests.adapters import HTTPAdapter
from urllib3 import BaseHTTPResponse
from urllib3.exceptions import InvalidHeader
from urllib3.util import Retry

from tools.corpus.download.sources import Patience

PASSING = frozenset({408, 425, 429, 500, 502, 503, 504})
"""Statuses that may be different in a while."""
_LONGEST_WAIT = 60
_LONGEST_ASKED_WAIT = 3600


class Retries(Retry):
    """urllib3's, which waits before the second attempt too, and for as long as the server has asked at least.

    Args:
        beat: hears of no bytes every second of a wait, so that whoever wants to stop it can do so.
    """

    def __init__(self, *args: Any, beat: Callable[[int], None], **options: Any) -> None:
        super().__init__(*args, **options)
        self._beat = beat

    @classmethod
    def of(cls, patience: Patience, beat: Callable[[int], None] = lambda size: None) -> Retries:
        return cls(
            patience.retries,
            beat=beat,
            backoff_factor=patience.first_wait,
            backoff_max=_LONGEST_WAIT,
            status_forcelist=PASSING,
            raise_on_status=False,  # the last answer says more than that there were too many
        )

    def new(self, **changes: Any) -> Retries:
        return super().new(beat=self._beat, **changes)

    def get_backoff_time(self) -> float:
        return min(self.backoff_factor * 2.0 ** (len(self.history) - 1), self.backoff_max)

    def get_retry_after(self, response: BaseHTTPResponse) -> float:
        try:
            return min(super().get_retry_after(response) or 0.0, _LONGEST_ASKED_WAIT)
        except InvalidHeader:  # it says nothing, then
            return 0.0

    def sleep(self, response: BaseHTTPResponse | None = None) -> None:
        asked = 0.0 if response is None else self.get_retry_after(response)
        end = time.monotonic() + max(self.get_backoff_time(), asked)
        while (left := end - time.monotonic()) > 0:
            self._beat(0)
            time.sleep(min(left, 1.0))


_LARGEST_TEXT = 64 << 20  # bytes: the sums of the largest dump have 0.1 MB


def connect(retries: Retry) -> requests.Session:
    """A session that names this tool, as Wikimedia asks for, and asks again where no answer or a passing error comes.
    A body that is cut is resumed by whoever reads it."""
    session = requests.Session()
    session.headers["User-Agent"] = f"{_tool()} (preparing a corpus for pre-training)"
    # A range is one of the bytes of the file, not of a compressed form of it.
    session.headers["Accept-Encoding"] = "identity"
    for scheme in ("http://", "https://"):
        session.mount(scheme, HTTPAdapter(max_retries=retries))
    return session


def read_text(session: requests.Session, url: str, patience: Patience) -> str | None:
    """A small text; None where there is no such file.

    Raises:
        ValueError: the server cannot be reached, answers with an error, or sends more than 64 MiB, also unpacked.
    """
    content = bytearray()
    try:
        with session.get(url, timeout=patience.timeout, stream=True) as answer:
            if answer.status_code == 404:
                return None
            if answer.status_code != 200:
                raise ValueError(f"{url} cannot be fetched: the server says {status_of(answer)}.")
            for piece in answer.iter_content(1 << 16):
                content += piece
                if len(content) > _LARGEST_TEXT:
                    raise ValueError(f"{url} is no list of files: it has more than {_LARGEST_TEXT >> 20} MiB.")
    except requests.RequestException as error:
        raise ValueError(f"{url} cannot be fetched: {describe(error)}. Check the network and the URL.") from error
    return content.decode("utf-8", errors="replace")


def ask_size(session: requests.Session, url: str, patience: Patience) -> int:
    """Bytes that a server promises; 0 where it does not say, or not at once. Good enough for a progress bar."""
    try:
        answer = session.head(url, timeout=min(10.0, patience.timeout), allow_redirects=True)
        return content_length(answer.headers) or 0 if answer.status_code == 200 else 0
    except requests.RequestException:
        return 0


def status_of(answer: requests.Response) -> str:
    return f"{answer.status_code} {answer.reason or ''}".strip()


def content_length(headers: Mapping[str, Any]) -> int | None:
    value = str(headers.get("Content-Length", ""))
    return int(value) if value.isdecimal() else None


def describe(error: BaseException) -> str:
    """What went wrong, without the layers of wrapping that the libraries put around it."""
    inner: Any = error
    while (reason := getattr(inner, "reason", None) or (inner.args[0] if inner.args else None)) is not None:
        if not isinstance(reason, BaseException):
            break
        inner = reason
    # Of several arguments the first is the message, except in errors of the system.
    message = inner.args[0] if inner.args and isinstance(inner.args[0], str) else inner
    return " ".join(str(message).split()) or type(inner).__name__


def _tool() -> str:
    try:
        return f"tensor3d/{metadata.version('tensor3d')}"
    except metadata.PackageNotFoundError:  # run from a checkout that is not installed
        return "tensor3d"
