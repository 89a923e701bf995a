"""`bench extract`: the step `extract` on a dump, beside what only unpacks the same file."""

from __future__ import annotations

import bz2
import dataclasses
import shutil
import statistics
import subprocess
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from tools.bench.corpus import run_step
from tools.bench.harness.benchmark import Benchmark, Count, Report
from tools.common.machine import format_table
from tools.common.workers import usable_cores
from tools.corpus.pipeline import read_manifest

_BLOCK = 1 << 20
EXTRACT, BZCAT, PYTHON = "tools.corpus extract", "bzcat", "Python's bz2"
HEADER = ("", "seconds", "fastest", "MB/s packed", "MB/s XML", "ratio")


@dataclass(frozen=True, kw_only=True)
class ExtractCommand(Benchmark[None]):
    """Time `python -m tools.corpus extract`, the whole command, on a .bz2 file, and by turns `bzcat` and Python's bz2
    module, which only unpack it, on one core."""

    input: Path
    """A MediaWiki dump, packed with bzip2. Below some 20 MB the start of the processes tells most."""
    workers: Count | None = None
    """Of the step. Default: as many as there are cores."""
    rounds: Count = 3
    """Turns of each."""

    def measure(self, plan: None) -> Report:
        figures = measure(self.input, self.workers or usable_cores(), self.rounds)
        ratios = {way: figures.ratio(way) for way in figures.seconds}
        content = {"figures": {**dataclasses.asdict(figures), "ratios": ratios}}
        return Report(lines=[sentence(figures), *format_table(HEADER, rows(figures))], content=content)


@dataclass(frozen=True, kw_only=True)
class ExtractFigures:
    """All ways read the same file."""

    packed_bytes: int
    xml_bytes: int
    documents: int
    text_bytes: int
    """Of the files that the step has written."""
    workers: int
    seconds: dict[str, tuple[float, ...]]
    """By way and round; of the command from starting Python to the finished folder."""

    def median(self, way: str) -> float:
        return statistics.median(self.seconds[way])

    def ratio(self, way: str) -> float:
        """Rate over that of `bzcat`, or of Python's bz2 where there is no `bzcat`: above 1 is faster."""
        return self.median(BZCAT if BZCAT in self.seconds else PYTHON) / self.median(way)


def measure(file: Path, workers: int, rounds: int) -> ExtractFigures:
    """Every way once to warm up, then by turns.

    Raises:
        ValueError: a file that is no bzip2, or that the step cannot read.
    """
    xml_bytes = unpack(file)  # and the file is in memory for all
    with tempfile.TemporaryDirectory() as folder:
        manifest = None
        ways: dict[str, Callable[[Path], object]] = {EXTRACT: partial(run_extract, file, workers)}
        if shutil.which(BZCAT):
            ways[BZCAT] = lambda _: subprocess.run([BZCAT, str(file)], stdout=subprocess.DEVNULL, check=True)
        ways[PYTHON] = lambda _: unpack(file)
        seconds: dict[str, list[float]] = {way: [] for way in ways}
        for number in range(rounds + 1):
            for way, go in ways.items():
                output = Path(folder, f"round-{number}")
                start = time.perf_counter()
                go(output)
                seconds[way].append(time.perf_counter() - start)
            manifest = read_manifest(output, "extract")
            shutil.rmtree(output)
        assert manifest is not None
    return ExtractFigures(
        packed_bytes=file.stat().st_size,
        xml_bytes=xml_bytes,
        documents=manifest.counts["documents"],
        text_bytes=manifest.counts["bytes"],
        workers=workers,
        seconds={way: tuple(taken[1:]) for way, taken in seconds.items()},
    )


def unpack(file: Path) -> int:
    """Bytes that are packed in the file, read and forgotten."""
    size = 0
    try:
        with bz2.open(file) as stream:
            while block := stream.read(_BLOCK):
                size += len(block)
    except (OSError, EOFError) as error:
        raise ValueError(f"{file} is no whole bzip2 file ({error}). Give a dump as it is downloaded.") from error
    return size


def run_extract(file: Path, workers: int, output: Path) -> None:
    run_step("extract", file.absolute(), "--output", output, "--workers", workers)


def rows(figures: ExtractFigures) -> list[tuple[str, ...]]:
    """The table under `HEADER`."""
    return [
        (
            f"{way}, {figures.workers} workers" if way == EXTRACT else way,
            f"{figures.median(way):.2f}",
            f"{min(seconds):.2f}",
            f"{figures.packed_bytes / 1e6 / figures.median(way):.2f}",
            f"{figures.xml_bytes / 1e6 / figures.median(way):.2f}",
            f"{figures.ratio(way):.2f}",
        )
        for way, seconds in figures.seconds.items()
    ]


def sentence(figures: ExtractFigures) -> str:
    return (
        f"{figures.packed_bytes / 1e6:,.1f} MB packed, {figures.xml_bytes / 1e6:,.1f} MB of XML, "
        f"{figures.documents:,} documents of {figures.text_bytes / 1e6:,.1f} MB"
    )
