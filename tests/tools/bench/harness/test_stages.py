"""Stages end at their limits, none stops the next, and whatever happens a page tells how each has ended."""

from __future__ import annotations

import json
import os
import re
import signal
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from tools.bench.harness import stages as module
from tools.bench.harness.stages import Stage, run_stage, run_stages

SLEEPS = "import time; print('begun', flush=True); time.sleep(60)"


def stage(name: str, code: str, seconds: int = 60) -> Stage:
    return Stage(name=name, why=f"what {name} shows", command=("-c", code), seconds=seconds)


def page_of(folder: Path) -> str:
    return (folder / "report.md").read_text()


def until(found: Callable[[], bool]) -> None:
    end = time.monotonic() + 60
    while not found():
        assert time.monotonic() < end, "it did not come"
        time.sleep(0.01)


def is_gone(process: int) -> bool:
    try:
        os.kill(process, 0)
    except ProcessLookupError:
        return True
    return Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0] == "Z"


def test_a_stage_ends_with_its_status_and_its_output_stays(tmp_path: Path) -> None:
    outcome = run_stage(stage("good", "print('seen')"), tmp_path, 60)
    assert (outcome.status, outcome.ended, str(outcome)) == (0, "itself", "passed")
    assert "seen" in (tmp_path / "good.log").read_text()
    assert str(run_stage(stage("bad", "raise SystemExit(3)"), tmp_path, 60)) == "failed (exit status 3)"
    died = run_stage(stage("died", "import os; os.kill(os.getpid(), 9)"), tmp_path, 60)
    assert str(died) == "ended by signal 9"


@pytest.mark.parametrize(("own", "left"), [pytest.param(1, 60, marks=pytest.mark.slow), (60, 0.4)])
def test_at_its_limit_a_stage_tells_where_it_was(own: int, left: float, tmp_path: Path) -> None:
    outcome = run_stage(stage("long", SLEEPS, own), tmp_path, left)
    assert outcome.ended == "limit"
    assert not outcome.passed
    assert min(own, left) <= outcome.seconds < 30
    log = (tmp_path / "long.log").read_text()
    assert "begun" in log
    assert "KeyboardInterrupt" in log


def test_a_stage_that_does_not_listen_tells_where_it_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As one that waits in a library for ever: all of its threads."""
    monkeypatch.setitem(module._GRACE, "signal", 0.1)
    log, caught = tmp_path / "deaf.log", []
    code = (
        "import signal, threading, time; signal.signal(signal.SIGINT, signal.SIG_IGN)\n"
        "def waits(): time.sleep(60)\n"
        "threading.Thread(target=waits, daemon=True).start(); print('begun', flush=True); time.sleep(60)"
    )

    def interrupt() -> None:
        until(lambda: log.exists() and "begun\n" in log.read_text())
        caught.append(signal.SIGTERM)

    thread = threading.Thread(target=interrupt)
    thread.start()
    outcome = run_stage(stage("deaf", code), tmp_path, 60, caught)
    thread.join()
    assert (outcome.ended, outcome.status) == ("signal", -signal.SIGABRT)
    told = log.read_text()
    assert "Fatal Python error: Aborted" in told
    assert re.search(r"line 2 in waits\n(.*\n)*.*line 3 in <module>", told)


@pytest.mark.slow
def test_nothing_of_a_stage_is_left(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither of one that ends by itself, nor of one that does not listen."""
    monkeypatch.setitem(module._GRACE, "limit", 0.5)
    begins = "import subprocess as s, sys; print(s.Popen(['sleep', '60']).pid, flush=True); "
    deaf = "import signal, time; signal.signal(signal.SIGINT, signal.SIG_IGN); time.sleep(60)"
    for name, end in (("ended", "pass"), ("deaf", deaf)):
        run_stage(stage(name, begins + end, seconds=1), tmp_path, 60)
        child = int((tmp_path / f"{name}.log").read_text().splitlines()[1])
        until(lambda child=child: is_gone(child))  # type: ignore[misc]


def test_the_page_has_each_outcome_and_the_end_of_its_output(tmp_path: Path) -> None:
    looks = f"print(open({str(tmp_path / 'report.md')!r}).read())"
    all_of_them = [stage("one", looks), stage("two", "print('second'); raise SystemExit(1)"), stage("three", "")]
    assert run_stages(all_of_them, tmp_path, 60, ["one", "two", "three"]) == 1
    page = page_of(tmp_path)
    assert "| one | passed |" in page
    assert "| two | failed (exit status 1) |" in page
    assert "| three | passed |" in page
    assert "second" in page
    assert "| one | **running** when this was written |" in (tmp_path / "one.log").read_text()
    assert "| three | not begun |" in (tmp_path / "one.log").read_text()
    assert json.loads((tmp_path / "outcomes.json").read_text())["two"]["status"] == 1


def test_of_a_failed_stage_more_is_shown(tmp_path: Path) -> None:
    lines = "[print('line', i) for i in range(100)]"
    run_stages([stage("good", lines), stage("bad", lines + "; raise SystemExit(1)")], tmp_path, 60, ["good", "bad"])
    good, bad = page_of(tmp_path).split("## ")[1:]
    assert "line 60\n" in good
    assert "line 59\n" not in good
    assert "line 0\n" in bad


def test_what_has_no_time_is_not_begun(tmp_path: Path) -> None:
    assert run_stages([stage("late", "print(1)")], tmp_path, 0.5, ["late"]) == 1
    assert "| late | not begun |" in page_of(tmp_path)
    assert not (tmp_path / "late.log").exists()


def test_earlier_stages_stay_on_the_page_in_the_order_of_all(tmp_path: Path) -> None:
    order = ["a", "b", "c"]
    assert run_stages([stage("c", "print('of c')"), stage("b", "raise SystemExit(1)")], tmp_path, 60, order) == 1
    assert run_stages([stage("b", "print('again')"), stage("a", "")], tmp_path, 60, order) == 0
    page = page_of(tmp_path)
    assert [line.split()[1] for line in page.splitlines() if line.startswith("| ")][2:] == order
    assert "of c" in page
    assert "SystemExit" not in page
    assert "SystemExit(1)" in (tmp_path / "b.log").read_text(), "but in the log"


@pytest.mark.parametrize("told", ["torch.OutOfMemoryError: CUDA out of memory", "CUBLAS_STATUS_ALLOC_FAILED"])
def test_after_a_stage_without_memory_a_smaller_one_runs(
    told: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    fails = f"print({told!r}); raise SystemExit(1)"
    small = stage("small", "print('fits')")
    assert run_stages([replace(stage("large", fails), smaller=small)], tmp_path, 60, ["large"]) == 1
    assert "large ran out of memory: small is next" in capsys.readouterr().out
    rows = [line.split("|")[1:3] for line in page_of(tmp_path).splitlines() if line.startswith("| ")][2:]
    assert [(name.strip(), how.strip()) for name, how in rows] == [
        ("large", "failed (exit status 1)"),
        ("small", "passed"),
    ]


def test_no_smaller_stage_runs_without_need(tmp_path: Path) -> None:
    """Neither after one that has failed otherwise, nor where it is to run anyway."""
    small = stage("small", "print('fits')")
    other = replace(stage("other", "raise SystemExit(1)"), smaller=small)
    run_stages([other], tmp_path, 60, [])
    assert not (tmp_path / "small.log").exists()
    run_stages([replace(other, command=("-c", "exit('out of memory')")), small], tmp_path, 60, [])
    assert (tmp_path / "small.log").read_text().count("\nfits\n") == 1


def test_a_page_of_another_kind_is_said(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "outcomes.json").write_text('{"one": {"status": 0}}')
    assert run_stages([stage("two", "")], tmp_path, 60, ["one", "two"]) == 0
    assert "outcomes.json is of no use" in capsys.readouterr().out


def test_a_signal_ends_the_stage_and_the_page_is_written(tmp_path: Path) -> None:
    def interrupt() -> None:
        log = tmp_path / "long.log"
        until(lambda: log.exists() and "begun\n" in log.read_text())
        os.kill(os.getpid(), signal.SIGTERM)

    before = signal.getsignal(signal.SIGTERM)
    thread = threading.Thread(target=interrupt)
    thread.start()
    both = [stage("long", SLEEPS), stage("next", "")]
    assert run_stages(both, tmp_path, 60, ["long", "next"]) == 128 + signal.SIGTERM
    thread.join()
    assert signal.getsignal(signal.SIGTERM) is before
    page = page_of(tmp_path)
    assert "| long | broken off by a signal after" in page
    assert "KeyboardInterrupt" in page
    assert "| next | not begun |" in page


@pytest.mark.skipif(sys.platform != "linux", reason="needs a file system that is always full")
def test_on_a_full_disk_all_goes_to_the_screen(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    def full(path: Path, content: object) -> None:
        raise OSError(28, "No space left on device", str(path))

    monkeypatch.setattr(module, "write_json", full)
    (tmp_path / "one.log").symlink_to("/dev/full")
    assert (
        run_stages([stage("one", "print('result')"), stage("two", "print('more')")], tmp_path, 60, ["one", "two"]) == 0
    )
    told = capfd.readouterr().out
    assert "report.md cannot be written: [Errno 28] No space left" in told
    assert "\nresult\n" in told
    assert "\nmore\n" in told
    assert "written: " not in told.replace("cannot be written: ", "")
