"""The public runner: results by rank, failures with their traceback, and refusals before anything starts."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from tensor3d.testing import RankError, run_ranks
from tests.programs import ran


def _sum(value: int) -> tuple[int, int, float]:
    total = torch.tensor(float(value + dist.get_rank()))
    dist.all_reduce(total)
    return dist.get_rank(), torch.get_num_threads(), float(total)


def test_results_come_by_rank_from_one_thread_each() -> None:
    assert run_ranks(3, _sum, 10) == [(0, 1, 33.0), (1, 1, 33.0), (2, 1, 33.0)]


def _fails_on_one() -> None:
    if dist.get_rank() == 1:
        raise KeyError("the second rank's own trouble")
    dist.barrier()


def test_the_first_failing_rank_is_named_with_its_traceback() -> None:
    with pytest.raises(RankError, match=r"(?s)rank \b1\b failed.*_fails_on_one.*the"):
        run_ranks(2, _fails_on_one)


def _dies() -> None:
    os._exit(7)


def test_a_rank_that_dies_is_named_with_its_exit_code() -> None:
    with pytest.raises(RankError, match=r"rank \b0\b.*7"):
        run_ranks(1, _dies)


def _one_sleeps() -> None:
    if dist.get_rank() == 1:
        time.sleep(60)


@pytest.mark.slow
def test_ranks_that_hang_are_named_and_ended() -> None:
    with pytest.raises(RankError, match=r"ranks \[(0, )?1\].*2 s.*same"):
        run_ranks(2, _one_sleeps, timeout=2)


def test_what_cannot_be_sent_is_refused_before_anything_starts() -> None:
    def inner() -> None: ...

    for body in (lambda: None, inner):
        with pytest.raises(ValueError, match=r"cannot be sent to other processes.*functools\.partial"):
            run_ranks(2, body)
    with pytest.raises(ValueError, match="_sum and its arguments"):
        run_ranks(2, _sum, lambda: None)
    with pytest.raises(ValueError, match=r"number.*1.*0"):
        run_ranks(0, _sum, 1)


SCRIPT = """
import torch.distributed as dist
from tensor3d.testing import run_ranks

def body():
    return dist.get_rank()

"""


def run_script(folder: Path, code: str, *, typed: bool = False) -> subprocess.CompletedProcess[str]:
    path = folder / "script.py"
    path.write_text(code)
    arguments = ["-"] if typed else [str(path)]
    return ran(
        [sys.executable, *arguments],
        env={**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])},
        input=code if typed else None,
    )


@pytest.mark.slow
def test_a_plain_script_runs_ranks(tmp_path: Path) -> None:
    done = run_script(tmp_path, SCRIPT + 'if __name__ == "__main__":\n    print(run_ranks(2, body))\n')
    assert done.stdout == "[0, 1]\n", done.stderr


@pytest.mark.slow
def test_a_rank_that_a_signal_kills_says_where_it_was(tmp_path: Path) -> None:
    breaks = "import ctypes\n" + SCRIPT.replace("return dist.get_rank()", "return ctypes.string_at(0)")
    done = run_script(tmp_path, breaks + 'if __name__ == "__main__":\n    print(run_ranks(1, body))\n')
    assert "rank 0 died with exit code -11" in done.stderr
    assert re.search(r"line \d+ in body\b", done.stderr)


@pytest.mark.slow
def test_a_script_without_the_guard_is_told_so(tmp_path: Path) -> None:
    done = run_script(tmp_path, SCRIPT + "print(run_ranks(2, body))\n")
    assert done.returncode == 1
    assert "this one would start ranks while it is imported" in done.stderr
    assert re.search(r"RankError: rank \d died with exit code 1", done.stderr)


@pytest.mark.slow
def test_functions_of_an_interactive_session_are_refused(tmp_path: Path) -> None:
    done = run_script(tmp_path, SCRIPT + "print(run_ranks(2, body))\n", typed=True)
    assert "ValueError: body comes from an interactive session" in done.stderr
