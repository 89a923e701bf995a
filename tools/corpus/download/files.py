"""The files of a download as units of work."""

from __future__ import annotations

import dataclasses
import json
import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import requests

from tools.common.files import write_file
from tools.corpus.download.fetch import Partial, fetch
from tools.corpus.download.http import Retries, ask_size, connect, read_text
from tools.corpus.download.sources import DIGITS, LATEST, Download, Dump, FileUnit, Patience
from tools.corpus.pipeline import BadInput, Context

# --- Where the files of a Wikipedia dump lie, and their checksums -----------------------------------------------------
#
# A wiki's dumps lie in `MIRROR/enwiki/20261101/`, and each has a file of checksums that names every file that is ready:
# a dump that is still being made has names for some only.

_SUMS = ("sha1", "md5")


def find_files(dump: Dump, mirror: str, patience: Patience) -> list[Download]:
    """The files of a dump with their checksums, in the order of the pages.

    Raises:
        ValueError: no such wiki or dump, files that are not ready, or a server that cannot be reached.
    """
    with connect(Retries.of(patience)) as session:
        dates = [dump.date] if dump.date != LATEST else _dates(session, dump, mirror, patience)
        for date in dates:
            sums = dict(_sums(session, dump, date, mirror, patience))
            if names := choose(dump, date, sums):
                folder = f"{mirror.rstrip('/')}/{dump.wiki}/{date}"
                return [Download(url=f"{folder}/{name}", checksum=sums[name]) for name in names]
    tried = f"of {dump.date}" if dump.date != LATEST else f"({', '.join(dates) or 'none is there'})"
    raise ValueError(
        f"{mirror} has no {dump.content} of the {dump.wiki} dump {tried}, or it is not ready yet. Choose another "
        f"--date from those at {mirror.rstrip('/')}/{dump.wiki}/, or another --language or --content."
    )


def choose(dump: Dump, date: str, names: dict[str, str]) -> list[str]:
    """The file that is the content as a whole, or those of its parts in the order of the pages; none: not there."""
    begin = re.escape(f"{dump.wiki}-{date}-{dump.content}")
    whole = [name for name in names if re.fullmatch(rf"{begin}\.xml\.bz2", name)]
    numbered = [
        (found, name) for name in names if (found := re.fullmatch(rf"{begin}(\d+)\.xml(-p(\d+)p\d+)?\.bz2", name))
    ]
    parts = [name for found, name in sorted(numbered, key=lambda part: (int(part[0][1]), int(part[0][3] or 0)))]
    return (parts or whole) if dump.parts else (whole or parts)


def _dates(session: requests.Session, dump: Dump, mirror: str, patience: Patience) -> list[str]:
    """Dates that the wiki's folder lists, the newest first."""
    url = f"{mirror.rstrip('/')}/{dump.wiki}/"
    listing = read_text(session, url, patience)
    if listing is None:
        raise ValueError(
            f"there is no {url}. Check --language, or name a --date if the mirror does not list its folders."
        )
    return sorted(set(re.findall(r'href="(?:[^"]*/)?(\d{8})/?"', listing)), reverse=True)


def _sums(
    session: requests.Session, dump: Dump, date: str, mirror: str, patience: Patience
) -> Iterator[tuple[str, str]]:
    """File names and their checksums; none where the dump does not exist."""
    for kind in _SUMS:
        text = read_text(
            session, f"{mirror.rstrip('/')}/{dump.wiki}/{date}/{dump.wiki}-{date}-{kind}sums.txt", patience
        )
        if text is not None:
            for digits, name in re.findall(rf"^([0-9a-f]{{{DIGITS[kind]}}})\s+\*?(\S+)$", text, re.MULTILINE):
                yield name, f"{kind}:{digits}"
            return


# --- What workers do, one file each -----------------------------------------------------------------------------------

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


def find_once(scratch: Path, dump: Dump, mirror: str, patience: Patience) -> list[Download]:
    """The files of the dump. A killed run goes on with the dump that was the latest when it began, perhaps from another
    mirror."""
    kept, root = scratch / "files.json", mirror.rstrip("/")
    if not kept.exists():
        found = find_files(dump, root, patience)
        write_file(kept, json.dumps([[source.url.removeprefix(root), source.checksum] for source in found]))
    return [Download(url=root + path, checksum=checksum) for path, checksum in json.loads(kept.read_bytes())]


def sizes_of(sources: Sequence[Download], patience: Patience) -> list[int]:
    """Bytes of each file as far as that is easily known, for the progress bar."""
    with connect(Retries.of(dataclasses.replace(patience, retries=0))) as session:
        return [
            source.size if source.size is not None else ask_size(session, source.url, patience) if place < _ASKED else 0
            for place, source in enumerate(sources)
        ]
