"""All steps on a small input that has something of everything, for the tests of the whole."""

from __future__ import annotations

import bz2
import json
import subprocess
import sys
from collections.abc import Iterator, Sequence
from itertools import islice
from pathlib import Path

from tools.bench.harness.synthetic_data import documents

ROOT = Path(__file__).parents[3]
MPIRUN = Path(sys.executable).with_name("mpirun")
FOLDERS = ("documents", "tokenizer", "ids", "samples")
PAGE = "<page><title>{title}</title><ns>{ns}</ns><id>{id}</id>{more}<revision><text>{text}</text></revision></page>\n"


def write_input(folder: Path, pages: int = 60) -> None:
    """A dump of several bzip2 streams with redirects and duplicates, and a file of JSON lines."""
    folder.mkdir()
    texts = list(islice(documents(0), 50))  # fewer than pages: some repeat others
    with (folder / "dump.xml.bz2").open("wb") as file:
        file.write(bz2.compress(b"<mediawiki>\n"))
        for start in range(0, pages, 20):
            file.write(
                bz2.compress("".join(_page(number, texts[number % 50]) for number in range(start, start + 20)).encode())
            )
        file.write(bz2.compress(b"</mediawiki>\n"))
    rows = [json.dumps({"text": text}) for text in islice(documents(7), pages)]
    (folder / "more.jsonl").write_text("\n".join([*rows, rows[0]]) + "\n")


def _page(number: int, text: str) -> str:
    if number % 17 == 3:
        return PAGE.format(
            title=f"Page {number}", ns=0, id=number, more='<redirect title="Page 0" />', text="#REDIRECT"
        )
    marked = f"'''{text[:9]}''' [[a|b]] {text[9:]}&lt;ref&gt;x&lt;/ref&gt;\n\n== References ==\n{{{{reflist}}}}"
    return PAGE.format(title=f"Page {number}", ns=4 if number % 13 == 5 else 0, id=number, more="", text=marked)


def steps(inputs: Path, output: Path) -> Iterator[list[str]]:
    """The options of each step, with small units, so that there are many."""
    docs, tokenizer, ids, samples = (str(output / name) for name in FOLDERS)
    yield ["extract", str(inputs), "--unit-megabytes", "0.02", "--output", docs]
    yield ["tokenizer", "--docs", docs, "--vocab-size", "500", "--output", tokenizer]
    yield ["tokenize", "--docs", docs, "--tokenizer", tokenizer, "--output", ids]
    more = ["--max-length", "64", "--shards", "3", "--duplicates", "2", "--run-tokens", "5000", "--held-out", "0.1"]
    yield ["samples", "--corpora", ids, *more, "--output", samples]


def command(arguments: Sequence[str], *, workers: int | None = None, ranks: int | None = None) -> list[str]:
    """How a step is called: with workers, or with ranks under mpirun."""
    launcher = [] if ranks is None else [str(MPIRUN), "-n", str(ranks)]
    return [
        *launcher,
        sys.executable,
        "-m",
        "tools.corpus",
        *arguments,
        *([] if workers is None else ["--workers", str(workers)]),
    ]


def run(arguments: Sequence[str], **how: int) -> subprocess.CompletedProcess[str]:
    """Runs a step to its end."""
    return subprocess.run(command(arguments, **how), cwd=ROOT, capture_output=True, text=True, timeout=300)


def prepare(inputs: Path, output: Path, **how: int) -> None:
    """Runs all steps; fails with what one has said."""
    for arguments in steps(inputs, output):
        done = run(arguments, **how)
        assert done.returncode == 0, f"{arguments}: {done.stdout}{done.stderr}"


def content(folder: Path) -> dict[str, bytes]:
    """Every file below a folder."""
    return {path.relative_to(folder).as_posix(): path.read_bytes() for path in folder.rglob("*") if path.is_file()}
