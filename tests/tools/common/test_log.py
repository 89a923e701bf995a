"""The log of the commands: plain lines, or with `--verbose` such as say when, where and how bad."""

from __future__ import annotations

import ast
import io
import logging
import os
import re
import subprocess
import sys
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from pathlib import Path

import pytest
from tqdm import tqdm

from tools.common import log
from tools.common.cli import run_main
from tools.common.log import INTERVAL, Lines, lasting_streams, progress, start_logging, take_verbose
from tools.common.parse import parse_options


def test_verbose_stands_anywhere_before_the_end_of_the_options() -> None:
    assert take_verbose(["a", "--verbose", "--b", "--", "--verbose"]) == (["a", "--b", "--", "--verbose"], True)
    assert take_verbose(["a", "--", "--verbose"]) == (["a", "--", "--verbose"], False)


def test_lines_are_plain_unless_more_is_asked_for(capsys: pytest.CaptureFixture[str]) -> None:
    made = logging.getLogger("tools.common.test")
    for verbose in (False, True):
        start_logging(verbose=verbose, rank=3)
        made.info("done")
        made.debug("in detail")
    plain, *more = capsys.readouterr().err.splitlines()
    assert plain == "done"
    assert [line.split(" rank 3 ")[1] for line in more] == ["INFO done", "DEBUG in detail"]


def test_a_command_ends_with_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    def fail() -> int:
        raise ValueError("no such thing")

    assert run_main("tools.this", fail) == 2
    assert capsys.readouterr().err == "tools.this: no such thing\n"
    assert run_main("tools.this", fail, verbose=True) == 2
    assert capsys.readouterr().err.endswith(" rank 0 ERROR tools.this: no such thing\n")


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_a_log_gets_a_line_of_progress_every_ten_seconds_at_most(capsys: pytest.CaptureFixture[str]) -> None:
    """Whatever moves, nests, is told or ends; nothing that only a terminal understands."""
    now = [0.0]
    seen: list[float] = []
    lines = Lines(clock=lambda: now[0])
    with tqdm(total=1000, desc="work", file=lines, mininterval=0, leave=True) as bar:
        for step in range(1000):
            now[0] = step / 10
            bar.set_postfix_str(f"at {step}")
            with tqdm(total=2, desc="inner", file=lines, mininterval=0, leave=False) as inner:
                inner.update()
            bar.update()
            bar.refresh()
            told = capsys.readouterr().err
            seen += [now[0]] * told.count("\n")
            assert not set(told) & {"\r", "\x1b"}
            assert all(line.startswith(("work", "inner")) for line in told.splitlines())
    assert len(seen) == 9
    assert all(later - earlier >= INTERVAL for earlier, later in pairwise([0.0, *seen]))


@pytest.mark.parametrize("lines", [False, True])
def test_work_that_is_done_at_once_leaves_nothing_in_a_log(lines: bool, capsys: pytest.CaptureFixture[str]) -> None:
    assert list(progress(range(5), desc="five", lines=lines)) == list(range(5))
    with progress(total=5, unit="step", lines=lines) as bar:
        bar.set_postfix_str("here")
        bar.update(5)
    captured = capsys.readouterr()
    assert (captured.out, captured.err) == ("", "")


def test_a_terminal_has_a_bar_unless_it_is_not_to_be_shown(monkeypatch: pytest.MonkeyPatch) -> None:
    for shown in (True, False):
        monkeypatch.setattr(sys, "stderr", terminal := Terminal())
        assert list(progress(range(5), desc="five", shown=shown)) == list(range(5))
        assert ("five: 100%" in terminal.getvalue()) == shown


def test_a_line_of_the_log_stands_above_a_bar(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stderr", terminal := Terminal())
    start_logging()
    for _ in progress(range(2), desc="two", mininterval=0):
        logging.getLogger("tools.common.test").info("a line")
    assert re.findall(r"\r +\ra line\n", terminal.getvalue()) != [], "the bar is cleared, and drawn again"


def test_all_tools_show_their_progress_in_one_way() -> None:
    """A bar that tqdm draws by itself would fill logs."""
    own = [
        f"{file.name}: {line.strip()}"
        for file in Path(log.__file__).parents[1].rglob("*.py")
        for line in file.read_text(encoding="utf-8").splitlines()
        if re.search(r"\b(tqdm|trange)\(", line) and file != Path(log.__file__)
    ]
    assert own == []


def test_nothing_but_the_log_writes_to_standard_error() -> None:
    """What is no result of a command has its time, rank and level where these are asked for."""
    folder = Path(log.__file__).parents[2]
    files = [file for room in ("tools", "models") for file in (folder / room).rglob("*.py")]
    own = [
        f"{file}, line {node.lineno}"
        for file in files
        if file != Path(log.__file__) and "stderr" in (text := file.read_text(encoding="utf-8"))
        for node in ast.walk(ast.parse(text))
        if isinstance(node, ast.Call) and ast.unparse(node.func) == "print" and "file=sys.stderr" in ast.unparse(node)
    ]
    assert own == []


# --- standard streams that are closed, or cannot be written -----------------------------------------------------------

ROOT = Path(log.__file__).parents[2]
KINDS = {"a closed pipe": "Broken pipe", "a full disk": "No space left on device"}


def open_failing(kind: str) -> io.TextIOWrapper:
    """A stream that cannot be written, but for what it buffers."""
    if kind == "a full disk":
        return open("/dev/full", "w", encoding="utf-8")
    reader, writer = os.pipe()
    os.close(reader)
    return open(writer, "w", encoding="utf-8")


def test_what_was_closed_before_the_start_is_nobodys_file(tmp_path: Path) -> None:
    """Else a library's words to standard error would lie in the midst of a checkpoint."""
    code = (
        "import os, sys; from tools.common.log import open_streams; open_streams(); file = open(sys.argv[1], 'wb');"
        "os.write(1, b'noise'), os.write(2, b'noise'), print('noise', flush=True), print('noise', file=sys.stderr);"
        "assert os.read(0, 1) == b''; assert sys.stdin.read() == ''; assert all(map(os.get_inheritable, range(3)));"
        "file.write(b'weights')"
    )
    command = ["bash", "-c", 'exec "$@" <&- >&- 2>&-', "-", sys.executable, "-c", code, str(tmp_path / "file")]
    assert subprocess.run(command, cwd=ROOT, check=False).returncode == 0
    assert (tmp_path / "file").read_bytes() == b"weights"


def test_what_the_locale_cannot_show_is_shown_escaped() -> None:
    code = "from tools.common.log import open_streams; open_streams(); print('Z\\xfcrich \\u6771')"
    plain = {**os.environ, "LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, env=plain, capture_output=True, check=True)
    assert done.stdout == b"Z\\xfcrich \\u6771\n"


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", ["stdout", "stderr"])
def test_a_training_outlives_its_streams_and_tells_the_other_one_once(
    kind: str, name: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    told = "standard output" if name == "stdout" else "standard error"
    with open_failing(kind) as stream:
        monkeypatch.setattr(sys, name, stream)
        with lasting_streams():
            for _ in range(3):
                print("lost" * 5000, file=getattr(sys, name), flush=True)
            print("lost", file=getattr(sys, name))
        assert getattr(sys, name) is stream
        stream.flush()  # as the interpreter does at its end
    monkeypatch.undo()
    shown = capsys.readouterr()
    assert shown.out + shown.err == f"{told} cannot be written ({KINDS[kind]}): the run goes on, lines are missing.\n"


@pytest.mark.parametrize("kind", KINDS)
def test_nobody_reads_a_result_any_more_or_it_cannot_be_written(
    kind: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    done: list[int] = []

    def result(size: int) -> int:
        print("x" * size, flush=True)  # of a small one the buffer takes all, but for the flush
        done.append(size)  # such as a file that is written behind it
        return status

    for status, size in ((0, 10), (0, 100_000), (1, 10)):
        with open_failing(kind) as stream:
            monkeypatch.setattr(sys, "stdout", stream)
            ended = run_main("tools.this", partial(result, size))
        monkeypatch.undo()
        told = "" if kind == "a closed pipe" else f"tools.this: standard output cannot be written: {KINDS[kind]}.\n"
        assert (ended, capsys.readouterr().err) == (status if kind == "a closed pipe" else 2, told)
    assert done == [10, 100_000, 10]


@pytest.mark.parametrize("kind", KINDS)
def test_nobody_reads_what_comes_one_after_another(
    kind: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """As `tools.predict` tells its results, of which there may be hours to come."""

    def results() -> int:
        for _ in range(3):
            try:
                sys.stdout.buffer.write(b"x")
                sys.stdout.buffer.flush()
            except BrokenPipeError:  # for whoever has something to tell yet
                assert kind == "a closed pipe"
                raise
        raise AssertionError("to the end")

    with open_failing(kind) as stream:
        monkeypatch.setattr(sys, "stdout", stream)
        ended = run_main("tools.this", results)
    monkeypatch.undo()
    told = "" if kind == "a closed pipe" else f"tools.this: standard output cannot be written: {KINDS[kind]}.\n"
    assert (ended, capsys.readouterr().err) == (0 if kind == "a closed pipe" else 2, told)


@dataclass(frozen=True)
class Options:
    k: int = 1
    """How many."""


@pytest.mark.parametrize("kind", [*KINDS, "closed"])
@pytest.mark.parametrize("inside", [False, True])
def test_nobody_reads_a_page_of_help(
    kind: str, inside: bool, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Whether the options are read before `run_main` or in it."""

    def read() -> int:
        parse_options(Options, ["--help"], "python -m tools.this")
        return 0

    with nullcontext() if kind == "closed" else open_failing(kind) as stream:
        monkeypatch.setattr(sys, "stdout", stream)
        try:
            status = run_main("tools.this", read) if inside else read()
        except SystemExit as end:
            status = int(end.code or 0)
        if stream is None:
            sys.stdout.close()  # the /dev/null in its place
    monkeypatch.undo()
    told = f"tools.this: standard output cannot be written: {KINDS[kind]}.\n" if kind == "a full disk" else ""
    assert (status, capsys.readouterr().err) == (2 if told else 0, told)


def test_all_tools_read_their_options_in_one_way() -> None:
    """Else a page of help that nobody reads is a traceback."""
    tools = Path(log.__file__).parents[1]
    files = {file.relative_to(tools).as_posix(): file.read_text(encoding="utf-8") for file in tools.rglob("*.py")}
    assert [name for name, text in files.items() if re.search(r"tyro\.cli\(", text)] == ["common/parse.py"]
    # What has no run_main has it around its parser, or a line of its own for what it prints.
    commands = [name for name in files if name.endswith("__main__.py") or 'if __name__ == "__main__":' in files[name]]
    plain = {name for name in commands if not re.search(r"\brun_(main|command)\(", files[name])}
    assert plain == {"corpus/__main__.py", "training/config_docs.py"}


def test_a_real_pipe_ends_a_command_quietly() -> None:
    script = '"$1" -m tools.corpus --help | true; echo "${PIPESTATUS[0]}"'
    done = subprocess.run(["bash", "-c", script, "-", sys.executable], cwd=ROOT, capture_output=True, text=True)
    assert (done.stdout, done.stderr) == ("0\n", "")


def test_an_error_that_cannot_be_told_has_its_status(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail() -> int:
        raise ValueError("no such thing")

    with open_failing("a closed pipe") as stream:
        monkeypatch.setattr(sys, "stderr", stream)
        assert run_main("tools.this", fail) == 2
        log._end(stream)
    monkeypatch.undo()
