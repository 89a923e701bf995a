"""Talking to servers: who we say we are, and which answers are worth another try."""

from __future__ import annotations

import email.utils
import time
from collections.abc import Mapping
from importlib import metadata
from typing import Any

import requests
from requests.adapters import HTTPAdapter
from urllib3.util import Retry

from tools.corpus.download.sources import LONGEST_WAIT, Patience

PASSING = frozenset({408, 425, 429, 500, 502, 503, 504})
"""Statuses that may be different in a while."""


class CutError(Exception):
    """An attempt that failed and may succeed later."""

    def __init__(self, reason: str, wait: float = 0.0) -> None:
        super().__init__(reason)
        self.wait = wait
        """Seconds that the server asks for."""


def connect(patience: Patience, *, persistent: bool = False) -> requests.Session:
    """A session that names this tool, as Wikimedia asks for.

    Args:
        persistent: small requests are tried again by themselves; long ones are resumed by whoever reads them.
    """
    session = requests.Session()
    session.headers["User-Agent"] = f"{_tool()} (preparing a corpus for pre-training)"
    # A range is one of the bytes of the file, not of a compressed form of it.
    session.headers["Accept-Encoding"] = "identity"
    if persistent:
        retry = Retry(
            total=patience.retries,
            backoff_factor=patience.first_wait,
            backoff_max=LONGEST_WAIT,
            status_forcelist=PASSING,
            raise_on_status=False,
        )
        for scheme in ("http://", "https://"):
            session.mount(scheme, HTTPAdapter(max_retries=retry))
    return session


def read_text(session: requests.Session, url: str, patience: Patience) -> str | None:
    """A small text; None where there is no such file.

    Raises:
        ValueError: the server cannot be reached, or answers with an error.
    """
    try:
        answer = session.get(url, timeout=patience.timeout)
    except requests.RequestException as error:
        raise ValueError(f"{url} cannot be fetched: {describe(error)}. Check the network and the URL.") from error
    if answer.status_code == 404:
        return None
    if answer.status_code != 200:
        raise ValueError(f"{url} cannot be fetched: the server says {status_of(answer)}.")
    return answer.content.decode("utf-8", errors="replace")


def ask_size(session: requests.Session, url: str, patience: Patience) -> int:
    """Bytes that a server promises; 0 where it does not say, or not at once. Good enough for a progress bar."""
    try:
        answer = session.head(url, timeout=min(10.0, patience.timeout), allow_redirects=True)
        return content_length(answer.headers) or 0 if answer.status_code == 200 else 0
    except requests.RequestException:
        return 0


def judge(answer: requests.Response) -> str:
    """Why a file cannot be had; "" where the answer is the file. Raises CutError for what may pass."""
    status = answer.status_code
    if status in PASSING:
        raise CutError(f"the server says {status_of(answer)}", retry_after(answer.headers.get("Retry-After", "")))
    return "" if status in (200, 206, 416) else f"the server says {status_of(answer)}"


def status_of(answer: requests.Response) -> str:
    return f"{answer.status_code} {answer.reason or ''}".strip()


def retry_after(value: str) -> float:
    """Seconds that a Retry-After header asks for, which may name a date instead; 0 if it says nothing."""
    if value.strip().isdecimal():
        return float(value)
    try:
        return max(0.0, email.utils.parsedate_to_datetime(value).timestamp() - time.time())
    except (TypeError, ValueError, OverflowError):
        return 0.0


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
