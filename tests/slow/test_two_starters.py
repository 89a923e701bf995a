"""Two whole runs that are started in one folder, on one machine and on two: always one run and one refusal."""

from __future__ import annotations

import ctypes
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import pytest

from tests.hosts import Host, hosts, why_not
from tests.slow.kills import ROOT, losses
from tests.slow.starters import MANNERS, STOPPED, check_round, recipe_in, rounds
from tools.common import files


@pytest.fixture
def network_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What runs here find the folder as one on a network file system, slow and without kernel locks."""
    if sys.platform != "linux" or (compiler := shutil.which("gcc") or shutil.which("cc")) is None:
        pytest.skip("a C compiler on Linux is needed")
    library, source = tmp_path / "network_folder.so", Path(__file__).with_name("network_folder.c")
    subprocess.run([compiler, "-shared", "-fPIC", "-o", library, source, "-ldl"], check=True)
    monkeypatch.setenv("LD_PRELOAD", str(library))
    monkeypatch.setenv("SLOW_FOLDER", str(tmp_path / "run"))


@pytest.mark.slow
def test_of_two_runs_in_a_network_folder_one_is_refused_also_after_a_kill(tmp_path: Path, network_folder: None) -> None:
    """Each checkpoint is whole, too."""
    check_round(tmp_path, "tools.pretrain", ("--resume", "auto", "after a kill"), 0.12)


@pytest.mark.long(reason="the same in a local folder, whose locks have fast tests: python -m tests.slow.starters")
def test_of_two_runs_one_is_refused_in_every_manner(tmp_path: Path) -> None:
    rounds(tmp_path, count=2 * len(MANNERS), seed=3)


@pytest.mark.long(reason="two more jobs; the lock of each training has a fast test")
def test_of_two_starters_of_fine_tuning_one_is_refused(tmp_path: Path) -> None:
    words = ["tools.finetune", "classify", "launch/recipes/finetune/embedded.toml"]
    call = [sys.executable, "-m", *words, "--output", str(tmp_path / "run")]
    runs = [
        subprocess.Popen(call, cwd=ROOT, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True) for _ in range(2)
    ]
    try:
        limit = time.monotonic() + 300
        while all(run.poll() is None for run in runs):
            assert time.monotonic() < limit, "two runs in one folder"
            time.sleep(0.02)
        refused, winner = sorted(runs, key=lambda run: run.poll() is None)
        assert refused.wait() == 2
        assert f"{tmp_path / 'run'} is in use by process {winner.pid} on " in refused.communicate()[1]
        assert winner.poll() is None
    finally:
        for run in runs:
            run.kill()
            run.wait()
            assert run.stderr is not None
            run.stderr.close()


def on_another_host(folder: Path, out: Callable[[str], None], seconds: float) -> None:
    """Takes the folder from a network name space of its own, in which no process of another one can be looked up."""
    if ctypes.CDLL(None, use_errno=True).unshare(0x40000000):  # CLONE_NEWNET
        out("no name space")
        os._exit(0)
    files.BEAT, files.SILENCE, files._LOOK = 0.3, 3.0, 0.05
    try:
        with files.lock_folder(folder):
            out("has it")
            time.sleep(seconds)
    except ValueError as refused:
        out(str(refused))


@pytest.mark.slow
@pytest.mark.parametrize(
    "seed", [0, *(pytest.param(seed, marks=pytest.mark.long(reason="each waits 45 s for the dead")) for seed in (1, 2))]
)
def test_of_two_hosts_one_gets_a_shared_folder_and_a_dead_one_loses_it(tmp_path: Path, seed: int) -> None:
    fork, draw = get_context("fork"), random.Random(seed)

    def host(seconds: float) -> tuple[Any, Any]:
        told, out = fork.Pipe(duplex=False)
        process = fork.Process(target=on_another_host, args=(tmp_path / "run", out.send, seconds), daemon=True)
        process.start()
        time.sleep(draw.uniform(0, 0.02))
        return told, process

    pair = [host(60.0), host(60.0)]
    said = [told.recv() for told, _ in pair]
    if "no name space" in said:
        pytest.skip("this user may make no network name spaces")
    assert said.count("has it") == 1
    owner = pair[said.index("has it")][1]
    assert f"is in use by process {owner.pid}" in said[1 - said.index("has it")]
    owner.kill()
    pair = [host(60.0), host(60.0)]
    said = [told.recv() for told, _ in pair]
    assert said.count("has it") == 1
    for _, process in pair:
        process.kill()


@pytest.mark.long(reason="a dead host is waited for 45 s; a slow test has the lock alone, between name spaces")
def test_of_launchers_on_two_hosts_one_trains_and_the_other_takes_over_from_the_dead(tmp_path: Path) -> None:
    if reason := why_not():
        pytest.skip(reason)
    run = tmp_path / "run"
    words = [recipe_in(tmp_path), "--output", run, "--corpus", tmp_path / "corpus", "--resume", "auto"]

    def start_on(host: Host) -> subprocess.Popen[Any]:
        command = [ROOT / "launch/local.sh", "--cpu", "--cube", "1x1x2", *words]
        log = (tmp_path / f"{host.name}.log").open("wb")
        with log:
            return host.popen(command, cwd=ROOT, stdout=log, stderr=log)

    def wait_until(condition: Callable[[], bool]) -> None:
        limit = time.monotonic() + 300
        while not condition():
            assert time.monotonic() < limit
            time.sleep(0.05)

    with hosts(2) as pair:
        jobs = {host.name: start_on(host) for host in pair}
        wait_until(lambda: any(job.poll() is not None for job in jobs.values()))
        refused, winner = sorted(pair, key=lambda host: jobs[host.name].poll() is None)
        assert jobs[refused.name].wait() == 2
        told = (tmp_path / f"{refused.name}.log").read_text()
        assert re.search(rf"{run} is in use by process \d+ on {winner.name} since .*Wait for its end", told)
        wait_until(lambda: len(losses(run)) >= 8)
        winner.close()  # all that runs there is killed
        done = len(losses(run))
        heir = start_on(refused)
        wait_until(lambda: len(losses(run)) > done + 5 or heir.poll() is not None)
        os.kill(heir.pid, signal.SIGTERM)
        assert heir.wait(120) == STOPPED
        steps = [step for step, _ in losses(run)]
        assert steps == list(range(1, len(steps) + 1)), "every step once"
