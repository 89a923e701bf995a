"""What a job of each launcher opens to others, and what it leaves behind: nothing beyond the loopback of one machine,
and no folder after a kill."""

from __future__ import annotations

import base64
import os
import pickle
import shlex
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from datetime import timedelta
from pathlib import Path

import pytest
import torch.distributed as dist

from tests.listeners import READABLE, beyond_loopback, family, listeners
from tests.ports import free_port
from tests.strangers import strangers

ROOT = Path(__file__).parents[2]
MPIRUN = Path(sys.executable).with_name("mpirun")
# A rank of a real job, which says that all its sockets are open and stays.
RANK = """
import os, sys, time
from pathlib import Path
if "--prepare-only" in sys.argv:
    sys.exit()
import torch
import torch.distributed as dist
from tensor3d import Cube
from tensor3d.distributed.watchdog import Watchdog
cube = Cube.from_env(1, 1, 2)
for axis in cube.mesh.mesh_dim_names:
    dist.all_reduce(torch.ones(2), group=cube.mesh.get_group(axis))
with Watchdog(cube):
    Path("store").write_text(os.environ["MASTER_PORT"])
    Path(f"ready{cube.rank}-{os.environ.get('TORCHELASTIC_RESTART_COUNT', 0)}").write_text(str(os.getpid()))
    time.sleep(240)
"""
SSH = "sh -c 'shift; exec sh -c \"$*\"' ssh"

pytestmark = pytest.mark.skipif(not READABLE, reason="sockets of a process are read from /proc, which is Linux's")


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    """A repository whose training is a rank that waits."""
    shutil.copytree(ROOT / "launch", tmp_path / "launch")
    (tmp_path / "tools").mkdir()
    (tmp_path / "tools" / "__init__.py").touch()  # else the package of the same name behind it would be taken
    (tmp_path / "tools" / "pretrain.py").write_text(RANK)
    (tmp_path / "small.toml").write_text("")
    python = tmp_path / ".venv" / "bin" / "python"
    python.parent.mkdir(parents=True)
    python.write_text(f'#!/bin/sh\nexec {shlex.quote(sys.executable)} "$@"\n')
    python.chmod(0o755)
    (tmp_path / "temporary").mkdir()
    return tmp_path


@contextmanager
def running(checkout: Path, command: Sequence[str | Path]) -> Iterator[subprocess.Popen[bytes]]:
    """A job of two ranks, when both are connected."""
    variables = {name: value for name, value in os.environ.items() if not name.endswith("SOCKET_IFNAME")}
    variables |= {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "TMPDIR": str(checkout / "temporary")}
    # PyTorch keeps compiled code for the next process, in TMPDIR or where another test's first use of it has said.
    variables["TORCHINDUCTOR_CACHE_DIR"] = str(checkout / "compiled")
    log = checkout / "log"
    with open(log, "wb") as file:
        job = subprocess.Popen(command, cwd=checkout, env=variables, stdin=subprocess.PIPE, stdout=file, stderr=file)
    try:
        notes = [checkout / f"ready{rank}-0" for rank in range(2)]
        until(lambda: all(note.is_file() for note in notes) or job.poll() is not None, 180)
        assert job.poll() is None, log.read_text()
        yield job
    finally:
        for process in reversed(family(job.pid)):
            with suppress(ProcessLookupError):
                os.kill(process, signal.SIGKILL)
        assert job.stdin is not None
        job.stdin.close()
        job.wait()


def command(launcher: str, checkout: Path) -> list[str | Path]:
    words = ["--cpu", "--cube", "1x1x2", "small.toml"]
    match launcher:
        case "local":
            return ["launch/local.sh", "--max-restarts", "1", *words, "--output", "out"]
        case "torchrun.py":
            return [sys.executable, "launch/torchrun.py", "--nproc-per-node=2", "-m", "tools.pretrain"]
        case "torchrun":
            return ["launch/torchrun.sh", "--no-doctor", "--master", f"127.0.0.1:{free_port()}", *words]
        case "torchrun, c10d":
            port = free_port()
            return [
                "launch/torchrun.sh",
                "--no-doctor",
                "--rendezvous",
                "c10d",
                "--master",
                f"{os.uname().nodename}:{port}",
                *words,
            ]
        case "ssh":
            far = ["--ssh", SSH, "--repository", checkout, "--master", f"127.0.0.1:{free_port()}"]
            return [sys.executable, "launch/ssh.py", "--hosts", "a", *far, "--no-doctor", *words]
        case "ssh, two hosts":
            # As node 0 and node 1 of two, which are one machine and meet at its loopback.
            far = ["--ssh", SSH, "--repository", checkout, "--master", f"127.0.0.1:{free_port()}"]
            return [sys.executable, "launch/ssh.py", "--hosts", "a,b", *far, "--no-doctor", *words]
        case "mpirun":
            return ["launch/mpirun.sh", "--no-doctor", "--mpirun", MPIRUN, *words]
    raise AssertionError(launcher)


LAUNCHERS = ["local", "torchrun.py", "torchrun", "torchrun, c10d", "ssh", "ssh, two hosts", "mpirun"]


@pytest.mark.slow
@pytest.mark.parametrize("launcher", LAUNCHERS)
def test_one_machine_opens_its_loopback_alone_and_leaves_no_folder_when_it_is_killed(
    launcher: str, checkout: Path
) -> None:
    if launcher == "mpirun" and not MPIRUN.exists():
        pytest.skip("PyPI's mpich is not installed: make .venv")
    with running(checkout, command(launcher, checkout)) as job:
        assert len(listeners(job.pid)) >= 3, "a store and two ranks"
        assert beyond_loopback(job.pid) == []
        if launcher == "local":  # a restart opens nothing more
            os.kill(int((checkout / "ready1-0").read_text()), signal.SIGKILL)
            until(lambda: all((checkout / f"ready{rank}-1").is_file() for rank in range(2)), 180)
            assert beyond_loopback(job.pid) == []
    left = list((checkout / "temporary").iterdir())
    if launcher == "mpirun":  # whose folder the next one removes
        assert all(folder.name.startswith("tensor3d-mpirun-") for folder in left)
        subprocess.run(
            [*command(launcher, checkout), "--prepare-only"],
            cwd=checkout,
            env={**os.environ, "TMPDIR": str(checkout / "temporary")},
            stdin=subprocess.DEVNULL,
            capture_output=True,
            check=False,
        )
        left = list((checkout / "temporary").iterdir())
    assert left == []


class Harm:
    """Makes a file when it is unpickled."""

    def __init__(self, file: Path) -> None:
        self._file = file

    def __reduce__(self) -> tuple[Callable[..., object], tuple[object, ...]]:
        return os.mkdir, (str(self._file),)


@pytest.mark.slow
@pytest.mark.parametrize("launcher", ["local", "mpirun"])
def test_what_another_user_of_the_machine_sets_in_the_store_runs_nothing_and_ends_no_rank(
    launcher: str, checkout: Path
) -> None:
    """A pickle in the place of all that is there, as PyTorch's elastic rendezvous reads it within 5 s; a verdict, the
    news of a failure, and nonsense, then an old heartbeat, in the place of each; also what is no message at all."""
    if launcher == "mpirun" and not MPIRUN.exists():
        pytest.skip("PyPI's mpich is not installed: make .venv")
    pickled = base64.b64encode(pickle.dumps(Harm(checkout / "ran")))
    with running(checkout, command(launcher, checkout)) as job, ExitStack() as stack:
        # Of the agent each port is a store's; the ranks under MPI say where theirs is.
        held = {port for (_, port), who in listeners(job.pid).items() if job.pid in who and launcher == "local"}
        for port in held | {int((checkout / "store").read_text())}:
            stack.enter_context(strangers(port))
            store = dist.TCPStore("127.0.0.1", port, timeout=timedelta(seconds=30))
            keys = store.list_keys()
            old = {key: store.get(key) for key in keys if "/beat/" in key}
            for key in (*keys, "torch.rendezvous.none"):
                store.set(key, pickled)  # type: ignore[arg-type]  # bytes too
            for part in {key.partition("/beat/")[0] for key in keys if "/beat/" in key}:
                store.set(f"{part}/verdict", "rank 1 is to blame")
                store.set(f"{part}/failure", "rank 1 is to blame")
            time.sleep(3)  # some heartbeats
            for key, beat in old.items():
                store.set(key, beat)  # type: ignore[arg-type]
        time.sleep(5)  # a rank that heeds the verdict leaves at once
        assert job.poll() is None, (checkout / "log").read_text()
        ranks = [(checkout / f"ready{rank}-0").read_text() for rank in range(2)]
        assert all(Path(f"/proc/{rank}/exe").exists() for rank in ranks), (checkout / "log").read_text()
        assert not (checkout / "ran").exists()


def until(condition: Callable[[], bool], seconds: float) -> None:
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "the job did not reach the expected state"
        time.sleep(0.02)
