"""`python -m tools.corpus download`: the files of a Wikipedia dump, or of any URLs."""

from __future__ import annotations

import dataclasses
import functools
import sys
from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated, Any

import tyro

from tools.corpus.download.dump import LATEST, Dump
from tools.corpus.download.patience import Patience
from tools.corpus.download.source import FileUnit, Source, check_names, read_list
from tools.corpus.download.threads import OF_ONE_SERVER, FirstRankTeam, ThreadTeam
from tools.corpus.work import Manifest, Options, Step, Team
from tools.corpus.work.mpi import MpiTeam

WIKIMEDIA = "https://dumps.wikimedia.org"


@dataclass(frozen=True, kw_only=True)
class DownloadOptions(Options):
    """Fetch a Wikipedia dump (--language en --date 20261101), or files of any URLs."""

    urls: tyro.conf.Positional[tuple[str, ...]] = ()
    """http(s) URLs of files."""
    listed: Annotated[Path | None, tyro.conf.arg(name="list")] = None
    """A file that lists them: one URL a line, then perhaps its size in bytes and a checksum such as sha256:HEX (or md5,
    sha1, sha512). What follows a # is left out."""
    language: str | None = None
    """Language of a Wikipedia, as in its address."""
    date: str = LATEST
    """Date of its dump, YYYYMMDD, or "latest"."""
    content: str = "pages-articles-multistream"
    """What of the dump."""
    parts: bool = False
    """Fetch that in the several files that Wikimedia also offers of a large wiki, instead of one."""
    mirror: str = WIKIMEDIA
    """Where dumps lie."""
    workers: int | None = None
    """Files fetched at once; default: 2. More serve for a list of several servers: of one server there are never more
    than 2, which is what Wikimedia allows. Under mpirun the first rank fetches for all."""
    patience: Annotated[Patience, tyro.conf.arg(name="")] = field(default_factory=Patience)

    def team(self) -> Team:
        """Threads, under mpirun those of the first rank.

        Raises:
            ValueError: less than one worker, or workers of a rank.
        """
        ranks = super().team()
        workers = self.workers or OF_ONE_SERVER
        if workers > OF_ONE_SERVER:
            print(f"of one server at most {OF_ONE_SERVER} files are fetched at once", file=sys.stderr)
        return FirstRankTeam(ranks, ThreadTeam(workers)) if isinstance(ranks, MpiTeam) else ThreadTeam(workers)


def download(options: DownloadOptions, team: Team) -> Manifest:
    """Fetches files as they are into `options.output`, each whole and checked against what is known of it.

    Raises:
        ValueError: nothing to fetch or too much of it, two URLs of one file name, a dump that is not there; a file that
            cannot be had, or is not what it should be (BadInput, unless such are to be left out).
    """
    if find_spec("requests") is None:
        raise ValueError("download needs the package requests: pip install 'tensor3d[corpus]'.")
    # Imported here, where it is known that they can be.
    from tools.corpus.download.files import fetch_unit, find_once, sizes_of

    # Every rank reads the options, one reads the list: the others may not see it.
    sources = team.on_first(lambda: requested(options))
    dump = dump_of(options)
    settings: dict[str, Any] = {"dump": None if dump is None else dataclasses.asdict(dump)}
    if dump is None:
        settings["files"] = [{**dataclasses.asdict(source), "url": source.public_url} for source in sources]
    with Step.open(options, "download", settings, team) as step:
        if step.done:
            return step.manifest
        if dump is not None:
            found = dump
            sources = step.on_first(lambda: find_once(step.scratch, found, options.mirror, options.patience))
        sizes = step.on_first(lambda: sizes_of(sources, options.patience))
        units = [
            FileUnit(name=f"{number:05d}", size=size, source=source)
            for number, (source, size) in enumerate(zip(sources, sizes, strict=True))
        ]
        results = step.run("fetch", units, functools.partial(fetch_unit, patience=options.patience))
        return step.finish({name: sum(result[name] for result in results) for name in ("files", "bytes", "checked")})


def requested(options: DownloadOptions) -> list[Source]:
    """The URLs that are asked for by themselves.

    Raises:
        ValueError: none though no dump is asked for either, both, or two of one file name.
    """
    if options.language is None:
        sources = [Source(url=url) for url in options.urls]
        sources += [] if options.listed is None else read_list(options.listed)
        if not sources:
            raise ValueError("there is nothing to fetch: name URLs, --list FILE, or --language en for a Wikipedia.")
        check_names(sources)
        return sources
    if options.urls or options.listed is not None:
        raise ValueError("--language fetches a dump, and URLs or --list other files: use one folder for each.")
    return []


def dump_of(options: DownloadOptions) -> Dump | None:
    """The dump that is asked for. Raises ValueError for one that cannot be."""
    if options.language is None:
        return None
    Source(url=f"{options.mirror}/a")  # its complaint about the URL
    return Dump(language=options.language, date=options.date, content=options.content, parts=options.parts)
