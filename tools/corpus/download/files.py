"""The files of a download as units of work."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tools.corpus.download.dump import Dump
from tools.corpus.download.fetch import fetch
from tools.corpus.download.partial import Partial
from tools.corpus.download.patience import Patience
from tools.corpus.download.server import ask_size, connect
from tools.corpus.download.source import FileUnit, Source
from tools.corpus.download.wikipedia import find_files
from tools.corpus.work import BadInput, Context, draft

_ASKED = 100
"""Files whose size is asked for beforehand; a longer list would take longer than the bar is worth."""


def fetch_unit(unit: FileUnit, context: Context, *, patience: Patience) -> dict[str, Any]:
    """Fetches one file; `files`, `bytes` and `checked` (against a checksum) are what it adds to the counts."""
    target = context.folder / unit.source.name
    # There already if a run was killed before it could note that the unit is done: it appears only when it is right.
    if not target.exists():
        try:
            partial = Partial(context.scratch / unit.name, unit.source.public_url)
            fetch(unit.source, target, partial, patience, context.progress)
        except BadInput as error:
            context.bad(error)
            return {"files": 0, "bytes": 0, "checked": 0}
    return {"files": 1, "bytes": target.stat().st_size, "checked": int(bool(unit.source.checksum))}


def find_once(scratch: Path, dump: Dump, mirror: str, patience: Patience) -> list[Source]:
    """The files of the dump. A killed run goes on with the dump that was the latest when it began, perhaps from another
    mirror."""
    kept, root = scratch / "files.json", mirror.rstrip("/")
    if not kept.exists():
        found = find_files(dump, root, patience)
        with draft(kept) as file:
            file.write(json.dumps([[source.url.removeprefix(root), source.checksum] for source in found]).encode())
    return [Source(url=root + path, checksum=checksum) for path, checksum in json.loads(kept.read_bytes())]


def sizes_of(sources: Sequence[Source], patience: Patience) -> list[int]:
    """Bytes of each file as far as that is easily known, for the progress bar."""
    with connect(patience) as session:
        return [
            source.size if source.size is not None else ask_size(session, source.url, patience) if place < _ASKED else 0
            for place, source in enumerate(sources)
        ]
