"""`python -m tests.versions`: the tests with the oldest and the newest versions that README.md claims.

For each row an environment of its own is made, a tier of the fast tests is run in it, and it is removed: PyTorch for
GPUs takes 6 GB of disk. Standard library alone: it needs no environment itself.
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parent.parent


@dataclass(frozen=True, kw_only=True)
class Versions:
    """What stands in one environment."""

    name: str
    python: str
    torch: str
    transformers: str
    others: tuple[str, ...] = ()
    """More pins, as pip takes them; whatever else is needed is the newest that fits."""

    @property
    def pins(self) -> tuple[str, ...]:
        return f"torch=={self.torch}", f"transformers=={self.transformers}", *self.others


# The oldest have the lower bounds of setup.py; README.md, under Install, has this table.
ROWS = (
    Versions(name="oldest", python="3.10", torch="2.11.0", transformers="5.0.0", others=("safetensors==0.5.0",)),
    Versions(name="newest", python="3.13", torch="2.15.0", transformers="5.24.0"),
)
SHOWN = ("torch", "transformers", "numpy", "safetensors", "tokenizers")
EXTRAS = "pretrain,corpus,dev"
# What depends on those libraries, in at most ten minutes on two cores.
TIER = (
    *("attention", "batches", "checkpoint", "cost_model", "data", "distributed", "explain", "layers", "models", "ops"),
    *("optim", "packing", "parallelize", "sharding", "testing", "launch/test_local.py"),
    *("test_dtensors.py", "test_imports.py", "test_torch_private.py", "test_versions.py"),
    *("tools/bench/test_kernels.py", "tools/common/test_quick_help.py", "tools/convert", "tools/corpus/tokenizers"),
    *("tools/finetune", "tools/gpt", "tools/predict", "tools/training"),
)
SELECTION = ("-m", "not slow and not long", "-n2", "--dist=loadscope", "--timeout=300", "-q", "--durations=60")


@dataclass(frozen=True, kw_only=True)
class Result:
    versions: Versions
    found: str
    """What pip has installed."""
    told: str
    """What came of the tests, or why there were none."""
    passed: bool
    seconds: float = 0.0

    def __str__(self) -> str:
        row = self.versions
        cells = (row.name, row.python, row.torch, row.transformers, self.told, f"{self.seconds:.0f} s", self.found)
        return f"| {' | '.join(cells)} |"


HEAD = "| | Python | PyTorch | transformers | tests | time | found |\n| --- | --- | --- | --- | --- | --- | --- |"


def main(arguments: Sequence[str] | None = None) -> int:
    """Exit status: 0 if all tests of all rows pass, 1 if not, 2 for a wrong command line."""
    options = _parser().parse_args(arguments)
    known = {row.name: row for row in ROWS}
    if wrong := [name for name in options.names if name not in known]:
        print(f"no row is named {wrong[0]}; there are {', '.join(known)}", file=sys.stderr)
        return 2
    options.folder.mkdir(parents=True, exist_ok=True)
    results: list[Result] = []
    for row in [known[name] for name in options.names] or ROWS:
        results.append(_tried(row, options.folder / row.name, limit=60 * options.minutes, keep=options.keep))
        table = "\n".join([HEAD, *map(str, results)])
        (options.folder / "results.md").write_text(f"{table}\n", encoding="utf-8")
    print(f"{table}\n\n{options.folder}/results.md has this table, and the folder each row's logs.")
    return 0 if all(result.passed for result in results) else 1


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m tests.versions",
        description="Runs tests with the oldest and the newest versions of Python, PyTorch and transformers.",
    )
    parser.add_argument(
        "names", nargs="*", metavar="NAME", help=f"rows: {', '.join(row.name for row in ROWS)}; default all"
    )
    parser.add_argument("--minutes", type=float, default=10.0, metavar="N", help="for the tests of a row (default 10)")
    parser.add_argument(
        "--folder", type=Path, default=ROOT / "build" / "versions", help="of environments, logs and the table"
    )
    parser.add_argument("--keep", action="store_true", help="leave the environments, and use those that are there")
    return parser


def _tried(row: Versions, folder: Path, *, limit: float, keep: bool) -> Result:
    python = find_python(row.python)
    if python is None:
        told = f"not run: no Python {row.python} on this machine"
        return Result(versions=row, found="", told=told, passed=False)
    folder.mkdir(exist_ok=True)
    environment, ready = folder / "environment", folder / "environment" / "ready"
    try:
        if not (keep and ready.exists()):
            shutil.rmtree(environment, ignore_errors=True)
            _say(f"{row.name}: making an environment of Python {row.python}, {', '.join(row.pins)}")
            if refused := _install(row, python, environment, folder / "install.log"):
                return Result(versions=row, found="", told=refused, passed=False)
            ready.touch()
        own = environment / "bin" / "python"
        found = _output([own, "-m", "pip", "list", "--format", "freeze", "--disable-pip-version-check"])
        shown = ", ".join(line for line in found.splitlines() if line.partition("==")[0] in SHOWN)
        _say(f"{row.name}: running tests, {folder}/tests.log")
        began = time.monotonic()
        told, passed = _tests(own, folder / "tests.log", limit)
        _say(f"{row.name}: {told}")
        return Result(versions=row, found=shown, told=told, passed=passed, seconds=time.monotonic() - began)
    finally:
        if not keep:
            shutil.rmtree(environment, ignore_errors=True)


def _install(row: Versions, python: Path, environment: Path, log: Path) -> str:
    """Why it could not be done; nothing if it is."""
    subprocess.run([python, "-m", "venv", environment], check=True)
    command = ["-m", "pip", "install", "--no-cache-dir", "--disable-pip-version-check", *row.pins, f".[{EXTRAS}]"]
    none = environment / "no-constraints.txt"  # in place of pip's own settings', which may cap what the row pins
    none.touch()
    with log.open("w") as output:
        done = subprocess.run(
            [environment / "bin" / "python", *command],
            cwd=ROOT,
            env={**os.environ, "PIP_CONSTRAINT": str(none)},
            stdout=output,
            stderr=subprocess.STDOUT,
            check=False,
        )
    if done.returncode == 0:
        return ""
    errors = [line for line in log.read_text().splitlines() if line.startswith("ERROR")]
    return f"not run: pip says {errors[0] if errors else f'status {done.returncode}'} ({log.name})"


def _tests(python: Path, log: Path, limit: float) -> tuple[str, bool]:
    """What came of them, and whether all passed."""
    command = [python, "-m", "pytest", "-p", "no:cacheprovider", *SELECTION, *(f"tests/{name}" for name in TIER)]
    with (
        log.open("w") as output,
        subprocess.Popen(command, cwd=ROOT, stdout=output, stderr=subprocess.STDOUT) as running,
    ):
        try:
            status = running.wait(limit)
        except subprocess.TimeoutExpired:
            running.send_signal(signal.SIGINT)  # it says what has failed so far
            try:
                running.wait(60)
            except subprocess.TimeoutExpired:
                running.kill()
            return f"no end after {limit / 60:g} minutes: {told_of(log.read_text(), 2)}", False
    return told_of(log.read_text(), status), status == 0


def told_of(log: str, status: int) -> str:
    """The counts of pytest's last line, or its exit status where it wrote none."""
    counts = [found for line in log.splitlines() if (found := re.findall(r"\d+ (?:failed|passed|skipped|error)", line))]
    return ", ".join(counts[-1]) if counts else f"pytest ended with status {status}"


def find_python(version: str) -> Path | None:
    """An interpreter of `version` ("3.12"): on the path, of pyenv, or the one that runs this."""
    for candidate in _candidates(version):
        try:
            found = _output([candidate, "-c", "import sys; print('%d.%d' % sys.version_info[:2])"])
        except (OSError, subprocess.SubprocessError):  # pyenv's names on the path answer only for chosen versions
            continue
        if found.strip() == version:
            return candidate
    return None


def _candidates(version: str) -> Iterator[Path]:
    on_path = shutil.which(f"python{version}")
    if on_path is not None:
        yield Path(on_path)
    yield from sorted((Path.home() / ".pyenv" / "versions").glob(f"{version}.*/bin/python"))
    yield Path(sys.executable)


def _output(command: Sequence[str | Path]) -> str:
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


if __name__ == "__main__":
    sys.exit(main())
