"""`bench corpus`: every step of the preparation on one input: time, rate and memory."""

from __future__ import annotations

import shlex
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from time import perf_counter
from typing import Annotated, Literal

from tools.bench.harness.benchmark import Benchmark, Count, Report
from tools.bench.harness.figures import Column, as_json, mebibytes, table
from tools.bench.harness.memory import TreeMemory
from tools.bench.harness.synthetic_data import write_dump, write_jsonl

_ROOT = Path(__file__).resolve().parents[2]


@dataclass(frozen=True, kw_only=True)
class CorpusCommand(Benchmark[None]):
    """Prepare a corpus step by step, each in a process of its own, and watch its memory."""

    input: tuple[Path, ...] = ()
    """Files or folders that `extract` can read. Default: generated text."""
    megabytes: Count = 200
    """Of generated text."""
    kind: Literal["jsonl", "dump"] = "jsonl"
    """Of generated text: JSON lines, or a MediaWiki dump in bzip2."""
    vocab_file: Path | None = None
    """A WordPiece vocabulary. Default: a tokenizer of 8,192 pieces is trained."""
    workers: int | None = None
    """Of each step. Default: as many as there are cores."""
    shards: int = 4
    directory: Path | None = None
    """Where to work; a folder of its own is made there and taken away. Default: the system's temporary folder."""

    def measure(self, plan: None) -> Report:
        with tempfile.TemporaryDirectory(prefix="tensor3d-", dir=self.directory, ignore_cleanup_errors=True) as name:
            folder = Path(name)
            inputs = self.input or (self._generate(folder),)
            measured = [measure(step, size_of(path), folder / out) for step, path, out in self._steps(folder, inputs)]
        return Report(lines=["", *table(measured)], content={"steps": as_json(measured)})

    def _generate(self, folder: Path) -> Path:
        if self.kind == "jsonl":
            path = folder / "generated.jsonl"
            write_jsonl(path, self.megabytes * 10**6)
        else:
            path = folder / "generated.xml.bz2"
            write_dump(path, self.megabytes * 10**6)
        return path

    def _steps(self, folder: Path, inputs: Sequence[Path]) -> list[tuple[list[str], Sequence[Path], str]]:
        """Command, what it reads, and the name of its folder."""
        docs, vocabulary, ids, samples = (str(folder / name) for name in ("docs", "tokenizer", "ids", "samples"))
        learnt = ["--docs", docs, "--vocab-size", "8192"]
        taken = ["--vocab-file", str(self.vocab_file)]
        steps: list[tuple[list[str], Sequence[Path], str]] = [
            (["extract", *map(str, inputs), "--output", docs], inputs, "docs"),
            (
                ["tokenizer", *(learnt if self.vocab_file is None else taken), "--output", vocabulary],
                [folder / "docs"],
                "tokenizer",
            ),
            (["tokenize", "--docs", docs, "--tokenizer", vocabulary, "--output", ids], [folder / "docs"], "ids"),
            (
                ["samples", "--corpora", ids, "--shards", str(self.shards), "--output", samples],
                [folder / "ids"],
                "samples",
            ),
        ]
        workers = [] if self.workers is None else ["--workers", str(self.workers)]
        return [([*command, *workers], reads, name) for command, reads, name in steps]


@dataclass(frozen=True, kw_only=True)
class Measured:
    """What a step took."""

    step: Annotated[str, Column("step")]
    input_bytes: Annotated[int, Column("input MB", ",.1f", 1e-6)]
    output_bytes: Annotated[int, Column("output MB", ",.1f", 1e-6)]
    seconds: Annotated[float, Column("seconds", ",.1f")]
    megabytes_per_second: Annotated[float, Column("MB/s", ",.2f")] = field(init=False)
    """Of input."""
    peak_bytes: Annotated[int, mebibytes("peak MiB", ",.0f")]
    """Of all its processes together."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "megabytes_per_second", self.input_bytes / 1e6 / self.seconds)


def measure(arguments: Sequence[str], input_bytes: int, output: Path) -> Measured:
    """Runs a step. Raises ValueError, with what it said, where it fails."""
    start = perf_counter()
    command = [sys.executable, "-m", "tools.corpus", *arguments]
    with subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True) as process:
        with TreeMemory(process.pid) as memory:
            assert process.stderr is not None
            said = process.stderr.read()
        status = process.wait()
    seconds = perf_counter() - start
    if status:
        raise ValueError(f"{shlex.join(command)} ended with status {status}:\n{said.strip()}")
    return Measured(
        step=arguments[0],
        input_bytes=input_bytes,
        output_bytes=size_of([output]),
        seconds=seconds,
        peak_bytes=memory.peak,
    )


def size_of(paths: Sequence[Path]) -> int:
    """Bytes of the files, and of all files below the folders."""
    files = [file for path in paths for file in (path.rglob("*") if path.is_dir() else [path])]
    return sum(file.stat().st_size for file in files if file.is_file())


def run_step(name: str, *arguments: object) -> None:
    """One step as a command. Raises ValueError with what it has said where it fails."""
    parts = [sys.executable, "-m", "tools.corpus", name, *map(str, arguments)]
    done = subprocess.run(parts, cwd=_ROOT, capture_output=True, text=True, check=False)
    if done.returncode:
        raise ValueError(f"the step failed:\n{done.stderr.strip()}")
