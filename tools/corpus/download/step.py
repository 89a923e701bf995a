"""`python -m tools.corpus download`: the files of a Wikipedia dump, or of any URLs."""

from __future__ import annotations

import dataclasses
import functools
import logging
import threading
from collections import Counter
from collections.abc import Callable, Sequence
from concurrent.futures import FIRST_EXCEPTION, ThreadPoolExecutor, wait
from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated, Any

import tyro

from tools.corpus.download.sources import LATEST, Download, Dump, FileUnit, Patience, check_names, read_list
from tools.corpus.pipeline import Manifest, Options, Stage, Team
from tools.corpus.pipeline.units import Outcome, Unit, WorkItem
from tools.corpus.pipeline.workers import LocalTeam, MpiTeam, do_unit

# --- Workers that wait for servers rather than compute: threads, so that one progress bar sees every byte -------------

_log = logging.getLogger(__name__)
OF_ONE_SERVER = 2
"""Files of one server that are fetched at once: what Wikimedia allows an address."""


class _StoppedError(Exception):
    """Another unit has failed."""


class ThreadTeam(LocalTeam):
    """Threads of this process. Units of a server begin in their order; when one fails, the others stop within a second
    or so. But where a server cannot be reached, the others are fetched first: the next run has that much less to do."""

    def do(self, task: WorkItem, units: Sequence[Unit], seen: Callable[[int], None]) -> dict[str, Outcome]:
        outcomes: dict[str, Outcome] = {}
        unreached: list[ConnectionError] = []
        stopped, turn = threading.Event(), threading.Condition()
        left, busy = list(units), Counter[str]()

        def tell(size: int) -> None:
            if stopped.is_set():
                raise _StoppedError
            with turn:
                seen(size)

        def next_unit() -> Unit | None:
            """The first whose server is not busy with others; waits where all are."""
            with turn:
                while left and not stopped.is_set():
                    for unit in left:
                        if busy[_server(unit)] < OF_ONE_SERVER:
                            left.remove(unit)
                            busy[_server(unit)] += 1
                            return unit
                    turn.wait()
            return None

        def work() -> None:
            while (unit := next_unit()) is not None:
                try:
                    outcomes[unit.name] = do_unit(task, unit, tell)
                except ConnectionError as error:
                    unreached.append(error)
                finally:
                    with turn:
                        busy[_server(unit)] -= 1
                        turn.notify_all()

        with ThreadPoolExecutor(self.workers) as pool:
            try:
                done, _ = wait([pool.submit(work) for _ in range(self.workers)], return_when=FIRST_EXCEPTION)
            finally:
                stopped.set()  # after an interruption too: leaving the pool waits for its threads
                with turn:
                    turn.notify_all()
        for future in done:
            future.result()
        if unreached:
            raise unreached[0]
        return outcomes


class FirstRankTeam(MpiTeam):
    """Ranks of an MPI job of which the first fetches, by its threads: a server is asked by no more than these."""

    def __init__(self, ranks: MpiTeam, threads: ThreadTeam) -> None:
        super().__init__(ranks._world)
        self._threads = threads

    def do(self, task: WorkItem, units: Sequence[Unit], seen: Callable[[int], None]) -> dict[str, Outcome]:
        return self.on_first(lambda: self._threads.do(task, units, seen))


def _server(unit: Unit) -> str:
    return unit.source.server if isinstance(unit, FileUnit) else ""


# --- The command ------------------------------------------------------------------------------------------------------

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
            _log.warning("of one server at most %d files are fetched at once", OF_ONE_SERVER)
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
    with Stage.open(options, "download", settings, team) as step:
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


def requested(options: DownloadOptions) -> list[Download]:
    """The URLs that are asked for by themselves.

    Raises:
        ValueError: none though no dump is asked for either, both, or two of one file name.
    """
    if options.language is None:
        sources = [Download(url=url) for url in options.urls]
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
    Download(url=f"{options.mirror}/a")  # its complaint about the URL
    return Dump(language=options.language, date=options.date, content=options.content, parts=options.parts)
