"""Rows of JSON, one a line."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

from tools.corpus.extract.chunks import Place
from tools.corpus.extract.reading import Document, Reading, row_document
from tools.corpus.extract.records import cut_lines


def read_jsonl(reading: Reading) -> Iterator[Document]:
    """An object a line, its text under the name that --text-field says. A line with nothing in it is passed over."""
    window = reading.window()
    for line in cut_lines(window, first=not reading.piece.begin, largest=reading.largest):
        if not line.owned:
            return
        if line.data is None:
            if line.begun:
                reading.report(window.place(line.start), f"the line that begins here {line.reason}", line.remedy)
            continue
        if not line.data.strip():
            continue
        place = window.place(line.start)
        row = _parse(line.data, place, reading)
        document = row_document(row, place, reading) if row is not None else None
        if document is not None:
            yield document


def _parse(data: bytes, place: Place, reading: Reading) -> dict[str, Any] | None:
    text = reading.decode(data, place)
    if text is None:
        return None
    try:
        row = json.loads(text.removeprefix("\ufeff"))
    except (ValueError, RecursionError) as error:
        reading.report(place, f"the line that begins here is no JSON ({error})", "Mend the line")
        return None
    if not isinstance(row, dict):
        reading.report(place, "the line that begins here is no JSON object", "Write {...} with the text in a field")
        return None
    return row
