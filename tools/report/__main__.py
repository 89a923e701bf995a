"""`python -m tools.report RUN [RUN...]`: one HTML page of runs, of plans and of scaling, that loads nothing."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from datetime import datetime, timezone
from pathlib import Path
from typing import Annotated

import tyro

from tools.common.cli import run_main
from tools.common.files import LOCK, SILENCE, WRONG_ENTRIES, check_output, check_suffix, what_is_wrong, write_file
from tools.common.log import take_verbose
from tools.common.parse import parse_options
from tools.common.plotting import COLOURS
from tools.common.units import in_bytes
from tools.report.file_sections import file_sections, scaling_section, seeds_section
from tools.report.page import PAGES, Page, Section, check_library, render
from tools.report.run_sections import run_sections
from tools.report.runs import REMEDY, RESULTS, Run, named_apart, read_json, read_runs
from tools.training.metrics import JOURNAL

_LEAST = 1.0  # seconds between two pages


@dataclass(frozen=True, kw_only=True)
class Command:
    """Make a page of runs: settings, curves, where the time of a step goes, memory, traffic, packs, events. Several are
    drawn side by side. The page is one file and asks no network."""

    runs: Annotated[tuple[Path, ...], tyro.conf.Positional]
    """Folders that tools.pretrain, tools.gpt, tools.finetune (all seeds, or one) or tools.scaling have written, and
    JSON files of tools.plan and of tools.bench strong or weak."""
    output: Path | None = None
    """HTML file. Default: report.html in the first folder, or a JSON file's name with .html."""
    refresh: float | None = None
    """Write the page again every so many seconds, until the runs have ended; it reloads itself as long."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Exit status: 0, or 2 for a bad call or a folder that is no run (one message on standard error)."""
    words, verbose = take_verbose(arguments)
    command = parse_options(Command, words, "python -m tools.report")
    return run_main("tools.report", lambda: run(command), verbose=verbose, options=Command)


def run(command: Command, sleep: Callable[[float], None] = time.sleep) -> int:
    """Raises ValueError for what cannot be shown."""
    if not command.runs:
        raise ValueError("name at least one run: a folder that a command has written.")
    if command.refresh is not None and not command.refresh >= _LEAST:  # also of NaN
        raise ValueError(f"--refresh must be at least {_LEAST:g} seconds. Got {command.refresh:g}.")
    first = command.runs[0]
    output = command.output or (first / "report.html" if first.is_dir() else first.with_suffix(".html"))
    # Of a folder its pages alone are written anew.
    inside = [each for folder in command.runs if folder.is_dir() for each in folder.iterdir() if each.suffix != ".html"]
    check_output(output, others=[*command.runs, *inside])
    check_suffix(output, PAGES)
    check_library("tools.report")
    before, quiet = _pulse(()), 0.0
    while True:
        # What is looked at first may be older than what the page shows, and is then looked at again.
        pulse = _pulse(command.runs)
        quiet = 0.0 if pulse != before else quiet + (command.refresh or 0.0)
        before = pulse
        page, ended = page_of(command.runs)
        over = command.refresh is None or ended or quiet > SILENCE
        write_file(output, render(page if over else replace(page, reload=command.refresh)))
        if over:
            break
        assert command.refresh is not None
        sleep(command.refresh)
    print(f"written: {output} ({in_bytes(output.stat().st_size)})")
    if command.refresh is not None and not ended:
        print(
            f"nothing has changed for {quiet:.0f} s: the page is not written again, though a run has not said its end"
        )
    return 0


def page_of(paths: Sequence[Path]) -> tuple[Page, bool]:
    """The page, and whether every run on it has ended.

    Raises:
        ValueError: a path that holds nothing to show; a run that is named twice.
    """
    runs, more = list[Run](), list[Section]()
    for path in paths:
        if not path.exists():
            raise ValueError(f"{path.absolute()} does not exist. Name a run's folder, or a JSON file.")
        scalings = [each for kind in ("strong", "weak") for each in sorted(path.glob(f"*/{kind}.json"))]
        if path.is_file():
            more += file_sections(path)
        elif scalings:
            with _naming(path):
                more += _scaling(scalings)
        else:
            runs += read_runs(path)
            if (path / RESULTS).is_file():
                results = read_json(path / RESULTS)
                with _naming(path / RESULTS):
                    more.append(seeds_section(f"Seeds of {path.resolve().name}", results))
    named = dict(zip(named_apart(runs), runs, strict=True))
    title = ", ".join([*named, *(path.name for path in paths if path.is_file())][:6]) or paths[0].resolve().name
    written = datetime.now(timezone.utc).strftime("%Y-%m-%d %H:%M:%S UTC")
    colours = [(name, COLOURS[place % len(COLOURS)]) for place, name in enumerate(named)]
    page = Page(
        title=title,
        subtitle=f"tensor3d, written {written}",
        sections=[*(run_sections(named) if named else []), *more],
        legend=colours if len(colours) > 1 else [],
    )
    return page, all(run.ended for run in runs)


@contextmanager
def _naming(path: Path) -> Iterator[None]:
    """Inside the block entries of a file, or of files in a folder, are read."""
    try:
        yield
    except WRONG_ENTRIES as problem:
        raise ValueError(f"{path} is damaged ({what_is_wrong(problem)}). {REMEDY}") from None


def _scaling(files: Sequence[Path]) -> list[Section]:
    """Of the runs of a sweep: those of one kind of scaling in the same pictures."""
    results = {kind: [read_json(path) for path in files if path.stem == kind] for kind in ("strong", "weak")}
    return [
        scaling_section(kind, [each for content in contents for each in content["results"]])
        for kind, contents in results.items()
        if contents
    ]


def _pulse(paths: Sequence[Path]) -> tuple[tuple[str, int, int], ...]:
    """What changes as long as a run is alive: the journals, and the locks that their owners renew."""
    places = [
        found for path in paths if path.is_dir() for name in (JOURNAL, LOCK) for found in sorted(path.rglob(name))
    ]
    return tuple((str(place), status.st_size, status.st_mtime_ns) for place in places if (status := place.stat()))


if __name__ == "__main__":
    sys.exit(main())
