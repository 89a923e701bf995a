"""JSON that somebody else has written."""

from __future__ import annotations

import json
from typing import Any


def parsed_json(text: str | bytes) -> Any:
    """The value of a text, or of its bytes in UTF-8.

    Raises:
        ValueError: no UTF-8, no JSON, or deeper than Python reads; the message tells which, to be put behind a name.
    """
    if isinstance(text, bytes):
        text = text.decode("utf-8")
    try:
        return json.loads(text)
    except RecursionError:
        raise ValueError("its lists or objects are too deep in one another") from None
