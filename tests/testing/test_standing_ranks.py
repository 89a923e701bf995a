"""Standing ranks: each function finds them as new processes would be, and what cannot be put back is replaced."""

from __future__ import annotations

import gc
import logging
import os
import random
import signal
import sys
import threading
import time
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist

from tensor3d import Cube, Linear3D
from tensor3d.sharding import activation_layout
from tensor3d.testing import RankError, StandingRanks
from tensor3d.testing.standing_ranks import _open_store


@pytest.fixture(scope="module")
def standing() -> Iterator[StandingRanks]:
    with StandingRanks(packages=("tensor3d",)) as ranks:
        yield ranks


def processes() -> int:
    return os.getpid()


def total(value: int) -> tuple[int, int, float]:
    result = torch.tensor(float(value + dist.get_rank()))
    dist.all_reduce(result)
    return dist.get_rank(), torch.get_num_threads(), float(result)


def test_results_come_by_rank_from_one_thread_each(standing: StandingRanks) -> None:
    assert standing.run(3, total, 10) == [(0, 1, 33.0), (1, 1, 33.0), (2, 1, 33.0)]


def test_ranks_of_each_number_stay(standing: StandingRanks) -> None:
    pairs, triples = standing.run(2, processes), standing.run(3, processes)
    assert len({*pairs, *triples, os.getpid()}) == 6
    assert [standing.run(2, processes), standing.run(3, processes)] == [pairs, triples]


# --- what a function changed is put back --------------------------------------------------------------------------


def settings() -> dict[str, Any]:
    """What functions may change, as a function finds it."""
    return {
        "type": torch.get_default_dtype(),
        "device": str(torch.get_default_device()),
        "threads": torch.get_num_threads(),
        "gradients": torch.is_grad_enabled(),
        "anomalies": torch.is_anomaly_enabled(),
        "precision": torch.get_float32_matmul_precision(),
        "deterministic": torch.get_deterministic_debug_mode(),
        "autocast": torch.is_autocast_enabled("cpu"),
        "flash": torch.backends.cuda.flash_sdp_enabled(),
        "random": (random.random(), float(np.random.rand()), float(torch.rand(()))),
        "environment": os.environ.get("STANDING"),
        "folder": os.getcwd(),
        "argv": list(sys.argv),
        "path": list(sys.path),
        "recursion": sys.getrecursionlimit(),
        "collector": gc.isenabled(),
        "error output": sys.stderr is sys.__stderr__,
        "filters": list(warnings.filters),
        "alarm": (signal.getsignal(signal.SIGALRM), signal.getitimer(signal.ITIMER_REAL)),
        "blocked": signal.pthread_sigmask(signal.SIG_BLOCK, ()),
        "logging": (logging.root.level, list(logging.root.handlers), logging.root.manager.disable),
        "name": activation_layout.other.__name__,
        "new name": hasattr(activation_layout, "novelty"),
        "class": Cube.plane is not None,
        "compiler": torch._dynamo.config.verbose,
        "groups": len(dist.distributed_c10d._world.pg_map),
        "threads of Python": threading.active_count(),
    }


def change_settings() -> None:
    torch.set_default_dtype(torch.float64)
    torch.set_default_device("meta")
    torch.set_num_threads(2)
    torch.autograd.set_grad_enabled(False)
    torch.autograd.set_detect_anomaly(True)
    torch.set_float32_matmul_precision("medium")
    torch.use_deterministic_algorithms(True)
    torch.set_autocast_enabled("cpu", True)
    torch.backends.cuda.enable_flash_sdp(False)
    random.seed(3), np.random.seed(3), torch.manual_seed(3)
    os.environ["STANDING"] = "changed"
    os.chdir("/")
    sys.argv.append("changed")
    sys.path.insert(0, "/changed")
    sys.setrecursionlimit(2000)
    gc.disable()
    sys.stderr = open(os.devnull, "w")  # noqa: SIM115
    warnings.simplefilter("error")
    signal.signal(signal.SIGALRM, signal.SIG_IGN)
    signal.setitimer(signal.ITIMER_REAL, 1000)
    signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGUSR1])
    logging.basicConfig(level=1)
    logging.disable(logging.ERROR)
    activation_layout.other = change_settings  # type: ignore[assignment]
    activation_layout.novelty = 1  # type: ignore[attr-defined]
    Cube.plane = None  # type: ignore[method-assign, assignment]
    torch._dynamo.config.verbose = True
    dist.new_group()


def test_a_function_finds_what_a_new_process_would(standing: StandingRanks) -> None:
    before = standing.run(2, settings)
    standing.run(2, change_settings)
    after = standing.run(2, settings)
    for rank in range(2):
        assert {
            name: (after[rank][name], value) for name, value in before[rank].items() if after[rank][name] != value
        } == {}
    assert before[0]["groups"] == 1
    assert not [start for start in standing.starts if "left" in start]


def grows_a_table() -> int:
    from tensor3d.distributed.cube_shape import AXES  # a tuple: tables of the library are few

    table = sys.modules["tensor3d.testing.hints"].__dict__.setdefault("TABLE", [])
    table.append(len(AXES))
    return len(table)


def test_names_that_a_function_adds_to_a_module_are_gone(standing: StandingRanks) -> None:
    assert [standing.run(2, grows_a_table) for _ in range(2)] == [[1, 1], [1, 1]]


def cube_of_two() -> tuple[float, int]:
    cube = Cube(2, 1, 1)
    value = torch.ones(1)
    dist.all_reduce(value, group=cube.axis("x").group)
    return float(value), len(dist.distributed_c10d._world.pg_map)


def test_process_groups_of_cubes_do_not_add_up(standing: StandingRanks) -> None:
    found = [standing.run(2, cube_of_two) for _ in range(3)]
    assert found[0][0][0] == 2.0
    assert found[0][0][1] > 1
    assert found == [found[0]] * 3


def threads_before_a_whole_tensor() -> int:
    """Threads that stand when the function begins. It then lets DTensor plan, whose caches hold the mesh."""
    threads = len(os.listdir("/proc/self/task"))
    Linear3D(8, 8, Cube(2, 1, 1)).weight.full_tensor()  # type: ignore[attr-defined]
    return threads


def test_threads_of_process_groups_end_although_dtensor_caches_meshes(standing: StandingRanks) -> None:
    standing.run(2, total, 0)
    time.sleep(0.1)  # each group ends some milliseconds after the function
    found = []
    for _ in range(4):
        found.append(standing.run(2, threads_before_a_whole_tensor))
        time.sleep(0.1)
    assert max(found[-1]) <= max(found[0])
    assert not [start for start in standing.starts if "mesh" in start]


def where() -> str:
    return os.getcwd()


def test_the_folder_of_the_caller_is_taken_along(
    standing: StandingRanks, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert standing.run(2, where) == [str(tmp_path)] * 2


# --- ranks that are replaced --------------------------------------------------------------------------------------


def raises() -> None:
    if dist.get_rank() == 1:
        raise KeyError("the second rank's own trouble")
    dist.barrier()


def dies() -> None:
    if dist.get_rank() == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    dist.barrier()


def hangs() -> None:
    if dist.get_rank() == 1:
        time.sleep(60)


@pytest.mark.parametrize(
    ("body", "named"),
    [
        (raises, r"(?s)rank 1 failed:.*second rank's own trouble"),
        (dies, r"rank \d (died with exit code -9|failed)"),
        (hangs, r"ranks \[(0, )?1\].*\b1.0 s"),
    ],
)
def test_a_failure_is_raised_and_the_next_function_has_new_ranks(
    standing: StandingRanks, body: Callable[[], None], named: str
) -> None:
    before = standing.run(2, processes)
    with pytest.raises(RankError, match=named):
        standing.run(2, body, timeout=1.0)
    after = standing.run(2, processes)
    assert not set(before) & set(after)
    assert standing.run(2, total, 0)[1] == (1, 1, 1.0)


def leaves_a_thread() -> None:
    threading.Thread(target=time.sleep, args=(60,), daemon=True, name="heart").start()


@pytest.mark.slow
def test_ranks_that_keep_a_thread_are_replaced_and_the_reason_is_told(standing: StandingRanks) -> None:
    before = standing.run(2, processes)
    standing.run(2, leaves_a_thread)
    assert not set(before) & set(standing.run(2, processes))
    assert "rank 0 left thread heart" in standing.starts[-1]


def leaves_the_group() -> None:
    dist.barrier()
    dist.destroy_process_group()


def issues_one_more() -> None:
    if dist.get_rank() == 0:
        dist.all_reduce(torch.ones(1), async_op=True)


@pytest.mark.parametrize("body", [leaves_the_group, issues_one_more])
def test_ranks_without_a_sound_group_get_another(standing: StandingRanks, body: Callable[[], None]) -> None:
    before = standing.run(2, processes)
    standing.run(2, body)
    assert standing.run(2, total, 0) == [(0, 1, 1.0), (1, 1, 1.0)]
    assert standing.run(2, processes) == before


def waits_in_vain() -> str:
    if dist.get_rank() == 1:
        time.sleep(1)
        return "slept"
    try:
        dist.all_reduce(torch.ones(1))
    except RuntimeError:
        return "timed out"
    return "came"


@pytest.mark.slow
def test_a_collective_waits_as_long_as_the_call_says(standing: StandingRanks) -> None:
    standing.run(2, total, 0)
    # The first result lets the clock of the whole function begin anew, so that the collective's ends first.
    assert standing.run(2, waits_in_vain, timeout=1.5) == ["timed out", "slept"]
    assert standing.run(2, total, 0)[0] == (0, 1, 1.0)


# --- refusals and the store ---------------------------------------------------------------------------------------


def test_what_cannot_be_sent_is_refused_before_anything_starts() -> None:
    with StandingRanks() as ranks:
        with pytest.raises(ValueError, match=r"functools\.partial"):
            ranks.run(2, lambda: None)
        with pytest.raises(ValueError, match=r"at least 1.*\b0\b"):
            ranks.run(0, processes)
        assert ranks.starts == []


def test_closed_ranks_are_gone() -> None:
    with StandingRanks() as ranks:
        pids = ranks.run(2, processes)
    for pid in pids:
        with pytest.raises(ProcessLookupError):
            os.kill(pid, 0)


def test_the_store_listens_on_loopback_alone() -> None:
    store, port = _open_store()
    rows = [row.split() for kind in ("tcp", "tcp6") for row in Path(f"/proc/self/net/{kind}").read_text().splitlines()]
    listening = [row[1] for row in rows if row[3] == "0A"]
    assert [address for address in listening if address.endswith(f":{port:04X}") and store] == [f"0100007F:{port:04X}"]
