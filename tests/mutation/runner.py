"""Runs mutations: each in a copy of the tree, by its tests, several beside each other."""

from __future__ import annotations

import compileall
import json
import os
import py_compile
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from tests.mutation import child
from tests.mutation.mutation import ROOT, Mutation

Verdict = Literal["caught", "hang", "SURVIVED", "no import", "broken", "stale", "error"]
GOOD: tuple[Verdict, ...] = ("caught", "hang")
_COMPILED = ("tensor3d", "models", "tools", "tests")
_CHUNKS = 4  # of the tests without a mutation, by job: short enough to share out, long enough to pay the start


@dataclass(frozen=True)
class Result:
    """How a mutation ended.

    caught: a test failed. hang: none had within the limit. SURVIVED: all passed. no import: the mutated module cannot
    be imported, which says nothing. broken: the tests do not pass without it. stale: it does not fit the code. error:
    pytest ran no test.
    """

    mutation: Mutation
    verdict: Verdict
    seconds: float
    detail: str = ""


@dataclass(frozen=True)
class Task:
    """Tests to run in a copy, with a mutation or without."""

    tests: tuple[str, ...]
    mutation: Mutation | None = None


@dataclass(frozen=True)
class Ending:
    """Of a task: pytest's exit status (None: it was ended at the limit), its node ids by outcome, its last lines."""

    status: int | None
    outcomes: dict[str, list[str]]
    tail: str
    seconds: float


def audit(
    mutations: Sequence[Mutation], *, jobs: int, limit: float, tell: Callable[[Result], None]
) -> tuple[list[Result], float]:
    """Runs the tests of the mutations once without any, then each mutation. The results, and the seconds of the former.

    Args:
        limit: seconds that the tests of a mutation may take.
        tell: is called with each result as it comes.
    """
    results: list[Result] = []

    def done(result: Result) -> None:
        results.append(result)
        tell(result)

    fitting = []
    for mutation in mutations:
        if problems := mutation.problems():
            done(Result(mutation, "stale", 0.0, "; ".join(problems)))
        else:
            fitting.append(mutation)
    with copies(jobs) as folders:
        start = time.monotonic()
        failures = _without_mutation(fitting, folders, limit)
        baseline = time.monotonic() - start
        ready = []
        for mutation in fitting:
            if why := next((failures[test] for test in mutation.tests if test in failures), None):
                done(Result(mutation, "broken", 0.0, why))
            else:
                ready.append(Task(mutation.tests, mutation))
        for task, ending in run(ready, folders, limit):
            assert task.mutation is not None
            verdict, detail = _judged(ending, limit)
            done(Result(task.mutation, verdict, ending.seconds, detail))
    return results, baseline


def _judged(ending: Ending, limit: float) -> tuple[Verdict, str]:
    if ending.status is None:
        return "hang", f"ended after {limit:.0f} s"
    if ending.status == child._NO_IMPORT or (ending.outcomes.get("uncollected") and not ending.outcomes["failed"]):
        return "no import", ending.tail
    if ending.status == 1 and ending.outcomes.get("failed"):
        return "caught", ending.outcomes["failed"][0]
    if ending.status == 0:
        return "SURVIVED", ""
    return "error", f"exit status {ending.status}: {ending.tail}"


# --- without a mutation ----------------------------------------------------------------------------------------------


def _without_mutation(mutations: Sequence[Mutation], folders: Sequence[Path], limit: float) -> dict[str, str]:
    """Of the tests that do not pass as the tree is: why."""
    tests = sorted({test for mutation in mutations for test in mutation.tests})
    if not tests:
        return {}
    size = -(-len(tests) // (_CHUNKS * len(folders)))
    tasks = [Task(tuple(tests[first : first + size])) for first in range(0, len(tests), size)]
    failures = {}
    for task, ending in run(tasks, folders, limit * len(tests)):
        for test in task.tests:
            if why := _failure(test, ending):
                failures[test] = why
    return failures


def _failure(test: str, ending: Ending) -> str | None:
    """Why a test does not count as one that passes; None if it does."""

    def of_it(outcome: str) -> list[str]:
        return [n for n in ending.outcomes.get(outcome, []) if n == test or n.startswith((f"{test}[", f"{test}::"))]

    if failed := of_it("failed"):
        return f"{failed[0]} fails without the mutation"
    if not of_it("passed"):
        return f"{test} did not run without the mutation: {ending.tail}"
    return None


# --- processes -------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Running:
    pid: int
    task: Task
    scratch: Path
    start: float


def run(tasks: Sequence[Task], folders: Sequence[Path], limit: float) -> Iterator[tuple[Task, Ending]]:
    """Runs the tasks, one at a time in each copy, and gives their endings as they come."""
    waiting, running = list(reversed(tasks)), dict[Path, _Running]()
    try:
        while waiting or running:
            for folder in folders:
                if folder not in running and waiting:
                    running[folder] = _started(waiting.pop(), folder)
            time.sleep(0.02)
            for folder, process in list(running.items()):
                pid, status = os.waitpid(process.pid, os.WNOHANG)
                late = time.monotonic() - process.start > limit
                if pid or late:
                    del running[folder]
                    yield process.task, _ended(process, folder, os.waitstatus_to_exitcode(status) if pid else None)
    finally:
        for folder, process in running.items():
            _ended(process, folder, None)


def _started(task: Task, folder: Path) -> _Running:
    mutation, module = task.mutation, None
    if mutation is not None:
        _write(folder / mutation.file, mutation.mutated((folder / mutation.file).read_text(encoding="utf-8")))
        if mutation.file.endswith(".py") and not mutation.file.startswith("launch/"):
            module = mutation.file.removesuffix(".py").removesuffix("/__init__").replace("/", ".")
    scratch = folder.with_name(f"{folder.name}s")
    shutil.rmtree(scratch, ignore_errors=True)
    scratch.mkdir()
    sys.stdout.flush()
    sys.stderr.flush()
    start = time.monotonic()
    if (pid := os.fork()) == 0:
        child.run(folder, scratch, task.tests, module, all_of_them=mutation is None)
    return _Running(pid, task, scratch, start)


def _ended(process: _Running, folder: Path, status: int | None) -> Ending:
    """Ends whatever the task has left running, and puts the file back."""
    seconds = time.monotonic() - process.start
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    if status is None:
        os.waitpid(process.pid, 0)
    if (mutation := process.task.mutation) is not None:
        _write(folder / mutation.file, mutation.path.read_text(encoding="utf-8"))
    log, report = process.scratch / "log.txt", process.scratch / "report.json"
    tail = log.read_text(encoding="utf-8", errors="replace").strip()[-600:] if log.is_file() else ""
    outcomes = json.loads(report.read_text(encoding="utf-8")) if report.is_file() else {}
    shutil.rmtree(process.scratch, ignore_errors=True)
    return Ending(status, outcomes, tail, seconds)


def _write(path: Path, text: str) -> None:
    path.write_text(text, encoding="utf-8")


# --- copies ----------------------------------------------------------------------------------------------------------


@contextmanager
def copies(count: int) -> Iterator[list[Path]]:
    """Copies of the tree: tracked files and new ones, with a link to .venv."""
    # A short name: sockets whose path is long cannot be made.
    parent = Path(tempfile.mkdtemp(prefix="mut"))
    try:
        first = parent / "0"
        first.mkdir()
        listed = subprocess.run(
            ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"],
            cwd=ROOT,
            check=True,
            capture_output=True,
            text=True,
        )
        for name in filter(None, listed.stdout.split("\0")):
            if (ROOT / name).is_file() and not (ROOT / name).is_symlink():
                (first / name).parent.mkdir(parents=True, exist_ok=True)
                shutil.copy2(ROOT / name, first / name)
        if (ROOT / ".venv").exists():
            (first / ".venv").symlink_to((ROOT / ".venv").resolve())
        for name in _COMPILED:
            # By the hash of the source: by its time, a file changed twice within a second would look unchanged.
            mode = py_compile.PycInvalidationMode.CHECKED_HASH
            compileall.compile_dir(str(first / name), quiet=2, invalidation_mode=mode)
        for number in range(1, count):
            shutil.copytree(first, parent / str(number), symlinks=True)
        yield [parent / str(number) for number in range(count)]
    finally:
        shutil.rmtree(parent, ignore_errors=True)
