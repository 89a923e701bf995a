"""launch/corpus.sh: the commands that it runs, what it refuses, and that it stops where a step fails."""

from __future__ import annotations

import shlex
import shutil
import subprocess
from pathlib import Path

import pytest

from tests.programs import ran

SCRIPT = Path(__file__).parents[2] / "launch" / "corpus.sh"


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    """A tree with the script, two inputs, a vocabulary, and a Python that only tells how it was called."""
    tmp_path = tmp_path.resolve()
    (tmp_path / "launch").mkdir()
    for script in (SCRIPT, SCRIPT.with_name("common.sh")):
        shutil.copy(script, tmp_path / "launch")
    python = tmp_path / ".venv" / "bin" / "python"
    python.parent.mkdir(parents=True)
    python.write_text('#!/bin/sh\n[ "$3" != "$FAILS" ] || exit 7\necho "called: $*"\n')
    python.chmod(0o755)
    (tmp_path / "work").mkdir()
    for name in ("dump.xml.bz2", "my books", "vocab.txt"):
        (tmp_path / "work" / name).write_text("")
    return tmp_path


def corpus(checkout: Path, arguments: str, fails: str = "none") -> subprocess.CompletedProcess[str]:
    command = [checkout / "launch" / "corpus.sh", *shlex.split(arguments)]
    return ran(command, cwd=checkout / "work", env={"PATH": "/usr/bin:/bin", "FAILS": fails})


def commands(checkout: Path, arguments: str) -> list[str]:
    """What `--dry-run` prints, without the interpreter and with the working folder as W."""
    done = corpus(checkout, f"{arguments} --dry-run")
    assert done.returncode == 0, done.stderr
    lines = done.stdout.replace(str(checkout / "work"), "W").replace(f"{checkout}/.venv/bin/", "").splitlines()
    return [line.replace("python -m tools.corpus ", "") for line in lines]


def test_the_steps_follow_one_another(checkout: Path) -> None:
    assert commands(checkout, "--output out dump.xml.bz2 'my books' --vocab-file vocab.txt --shards 4 --workers 2") == [
        r"extract W/dump.xml.bz2 W/my\ books --output W/out/documents --workers 2",
        "tokenizer --vocab-file W/vocab.txt --output W/out/tokenizer --workers 2",
        "tokenize --docs W/out/documents --tokenizer W/out/tokenizer --output W/out/ids --workers 2",
        "samples --corpora W/out/ids --max-length 512 --shards 4 --output W/out/samples --workers 2",
        "inspect W/out/samples",
        "train on it: launch/local.sh RECIPE --data.source W/out/samples --data.max-length 512 --data.capacity 512",
    ]


def test_a_download_comes_first_where_it_is_asked_for(checkout: Path) -> None:
    download, extract, tokenizer, tokenize, *_ = commands(
        checkout, "--output out --wikipedia de/20261101 --vocab-size 8000"
    )
    assert download == "download --language de --date 20261101 --output W/out/download"
    assert extract == "extract W/out/download --output W/out/documents"
    assert tokenizer == "tokenizer --docs W/out/documents --vocab-size 8000 --language de --output W/out/tokenizer"
    assert tokenize.endswith("--output W/out/ids --language de")
    simple = commands(checkout, "--output out --wikipedia simple")
    assert simple[0].startswith("download --language simple --date latest")
    assert not any("--language" in line for line in simple[1:]), "it is no code of a language"


def test_the_language_of_the_text_reaches_the_steps_that_know_it(checkout: Path) -> None:
    extract, tokenizer, tokenize, samples, *_ = commands(checkout, "--output out dump.xml.bz2 --language hi")
    assert extract.endswith("--output W/out/documents --language hi")
    assert "--language hi" in tokenizer
    assert "--language hi" in tokenize
    assert "--language" not in samples
    download, extract, _, tokenize, *_ = commands(checkout, "--output out --wikipedia simple --language en")
    assert download.startswith("download --language simple")
    assert extract.endswith("--language en")
    assert tokenize.endswith("--language en")
    _, tokenizer, tokenize, *_ = commands(checkout, "--output out dump.xml.bz2 --language hi --vocab-file vocab.txt")
    assert "--language" not in tokenizer, "a vocabulary that is there is not trained"
    assert tokenize.endswith("--language hi")


def test_options_of_one_step_reach_it_alone(checkout: Path) -> None:
    more = "--samples.whole-words --extract.min-characters 200 --extract.language-characters a b --inspect.plot p.png"
    extract, tokenizer, _, samples, inspect, _ = commands(checkout, f"--output out --skip-bad dump.xml.bz2 {more}")
    assert extract.endswith("--output W/out/documents --skip-bad --min-characters 200 --language-characters a b")
    assert tokenizer.endswith("--output W/out/tokenizer --skip-bad")
    assert samples.endswith("--skip-bad --whole-words")
    assert inspect == "inspect W/out/samples --plot p.png"


def test_every_step_but_the_last_runs_under_mpi(checkout: Path) -> None:
    arguments = "--output out dump.xml.bz2 --mpi 4 --mpi-options '--hostfile hosts'"
    lines = commands(checkout, arguments)
    assert all(line.startswith("mpirun -n 4 --hostfile hosts ") for line in lines[:4])
    assert lines[4] == "inspect W/out/samples"


def test_the_steps_are_run(checkout: Path) -> None:
    done = corpus(checkout, "--output out dump.xml.bz2")
    assert done.returncode == 0
    called = [line.split()[3] for line in done.stdout.splitlines() if line.startswith("called: ")]
    assert called == ["extract", "tokenizer", "tokenize", "samples", "inspect"]


def test_a_step_that_fails_is_the_last_and_gives_its_status(checkout: Path) -> None:
    done = corpus(checkout, "--output out dump.xml.bz2", fails="tokenize")
    assert done.returncode == 7
    called = [line.split()[3] for line in done.stdout.splitlines() if line.startswith("called: ")]
    assert called == ["extract", "tokenizer"]


@pytest.mark.parametrize(
    "arguments, message",
    [
        ("dump.xml.bz2", "--output DIR is needed"),
        ("--output out", "an INPUT is needed, or --wikipedia LANG"),
        ("--output out nowhere.xml", "input 'nowhere.xml' does not exist"),
        ("--output out dump.xml.bz2 --wikipedia en", "--wikipedia and INPUT exclude each other"),
        ("--output out dump.xml.bz2 --shards 0", "--shards must be a whole number of at least 1. Got '0'"),
        ("--output out dump.xml.bz2 --mpi two", "--mpi must be a whole number of at least 1. Got 'two'"),
        ("--output out dump.xml.bz2 --mpi 2 --workers 2", "--workers and --mpi exclude each other"),
        ("--output out dump.xml.bz2 --cased", "--cased is about a --vocab-file"),
        ("--output out dump.xml.bz2 --tokenizer-file no.json", "--tokenizer-file 'no.json' does not exist"),
        ("--output out dump.xml.bz2 --tokenizer-file a --vocab-file b", "exclude each other"),
        ("--output out dump.xml.bz2 --vocab-file no.txt", "--vocab-file 'no.txt' does not exist"),
        ("--output out dump.xml.bz2 --fast", "unknown option '--fast'"),
        ("--output out dump.xml.bz2 --shards", "--shards needs a value"),
    ],
)
def test_wrong_calls_run_nothing(checkout: Path, arguments: str, message: str) -> None:
    done = corpus(checkout, arguments)
    assert done.returncode == 2
    assert message in done.stderr
    assert "called" not in done.stdout


def test_help_names_every_option(checkout: Path) -> None:
    done = corpus(checkout, "--help")
    assert done.returncode == 0
    assert "usage: launch/corpus.sh" in done.stdout
