"""launch/torchrun.py forks its ranks: they are as if each had been started by itself."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

TORCHRUN = Path(__file__).parents[2] / "launch" / "torchrun.py"
# Says what a process can see of itself, and waits until it is told to go on.
JOB = """
import json, os, signal, sys, time
from pathlib import Path
import job.heavy

def life(folder, rank):
    told = folder / f"{rank}.json"
    return json.loads(told.read_text())["environment"]["TORCHELASTIC_RESTART_COUNT"] if told.exists() else None

def main():
    folder, rank = Path(sys.argv[1]), os.environ["RANK"]
    names = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "OMP_NUM_THREADS", "TORCHELASTIC_RESTART_COUNT", "OF_THE_CALLER")
    facts = {
        "process": os.getpid(), "parent": os.getppid(), "session": os.getsid(0), "words": sys.argv[2:],
        "environment": {name: os.environ.get(name) for name in names}, "path": sys.path[0],
        "files": sorted(int(file) for file in os.listdir("/proc/self/fd"))[:-1],
        "blocked": sorted(signal.pthread_sigmask(signal.SIG_BLOCK, ())),
        "signals": {name: repr(signal.getsignal(getattr(signal, name))) for name in ("SIGINT", "SIGTERM", "SIGUSR1")},
        "name": __name__, "module": sys.modules["__main__"].__spec__.name,
        "unbuffered": (sys.stdout.write_through, sys.stderr.write_through),
        "importer": job.heavy.PROCESS, "secret": os.environ["TENSOR3D_SECRET"],
    }
    (folder / f"{rank}.partial").write_text(json.dumps(facts))
    os.rename(folder / f"{rank}.partial", folder / f"{rank}.json")
    # torchrun ends a rank with the first that fails: not before both have said what they see in this life.
    while life(folder, "0") != life(folder, "1") or not (folder / "go").exists():
        time.sleep(0.02)
    sys.exit(3 * int(rank))

GUARD
"""
GUARD = 'if __name__ == "__main__":\n    main()\n'

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(sys.platform != "linux", reason="processes are forked on Linux alone"),
]


class Job:
    """torchrun with two ranks, which have said what they see."""

    def __init__(self, folder: Path, *, guard: str = GUARD, threads: str | None = "1", restarts: int = 0) -> None:
        (folder / "job").mkdir(parents=True)
        (folder / "job" / "__init__.py").touch()
        (folder / "job" / "heavy.py").write_text("import os\nPROCESS = os.getpid()\n")
        (folder / "job" / "main.py").write_text(JOB.replace("GUARD\n", guard))
        self.folder = folder
        command = [sys.executable, TORCHRUN, "--standalone", "--nproc-per-node=2", f"--max-restarts={restarts}"]
        command += ["-m", "job.main", folder, "a word"]
        environment = {**os.environ, "OMP_NUM_THREADS": threads, "CUDA_VISIBLE_DEVICES": "", "OF_THE_CALLER": "ö"}
        self.launcher = subprocess.Popen(
            command,
            cwd=folder,
            env={name: value for name, value in environment.items() if value is not None},
            stdin=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
        )
        deadline = time.monotonic() + 100
        while not all((folder / f"{rank}.json").exists() for rank in range(2)):
            assert self.launcher.poll() is None, self.launcher.communicate()
            assert time.monotonic() < deadline
            time.sleep(0.05)
        self.ranks = self.told()

    def told(self) -> list[dict[str, Any]]:
        """What each rank has said last."""
        return [json.loads((self.folder / f"{rank}.json").read_text()) for rank in range(2)]

    def end(self) -> str:
        """Lets the ranks end; what was said."""
        (self.folder / "go").touch()
        return self.launcher.communicate(timeout=60)[1]

    def __enter__(self) -> Job:
        return self

    def __exit__(self, *_: object) -> None:
        (self.folder / "go").touch()
        self.launcher.kill()
        self.launcher.communicate()


def children(parent: int) -> dict[int, str]:
    """What runs below a process, each with its command."""
    found = {}
    for path in Path("/proc").glob("[0-9]*/stat"):
        state, above = path.read_text().rpartition(")")[2].split()[:2]
        if int(above) == parent and state != "Z":
            found[int(path.parent.name)] = (path.parent / "cmdline").read_text()
    return found


def is_there(process: int) -> bool:
    try:
        return Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def test_ranks_are_as_if_each_had_been_started_by_itself(tmp_path: Path) -> None:
    # Of the second, torchrun says with how many threads its libraries are to be loaded.
    with Job(tmp_path / "forked") as forked, Job(tmp_path / "usual", threads=None) as usual:
        jobs = {"forked": forked, "usual": usual}
        for name, job in jobs.items():
            ranks = job.ranks
            assert [rank["parent"] for rank in ranks] == [job.launcher.pid] * 2
            like_ranks = [number for number, said in children(job.launcher.pid).items() if "job.main" in said]
            assert sorted(like_ranks) == sorted(rank["process"] for rank in ranks), name
            assert all(rank["session"] == rank["process"] for rank in ranks)
            assert [rank["environment"]["RANK"] for rank in ranks] == ["0", "1"]
        own = ("process", "parent", "session", "importer", "path", "secret")
        same = [[{k: v for k, v in rank.items() if k not in own} for rank in job.ranks] for job in jobs.values()]
        assert same[0] == same[1]
        assert [rank["path"] for job in jobs.values() for rank in job.ranks] == [
            str(tmp_path / name) for name in ("forked", "forked", "usual", "usual")
        ]
        secrets = [{rank["secret"] for rank in job.ranks} for job in jobs.values()]
        assert all(re.fullmatch("[0-9a-f]{32}", each) for (each,) in secrets), "one for the ranks of a job"
        assert secrets[0] != secrets[1]
        # One process has imported it for both, and is neither of them.
        assert len({rank["importer"] for rank in forked.ranks}) == 1
        assert forked.ranks[0]["importer"] not in {rank["process"] for rank in forked.ranks}
        assert [rank["importer"] for rank in usual.ranks] == [rank["process"] for rank in usual.ranks]
        for job in jobs.values():
            assert "exitcode: 3" in job.end().replace("exitcode  :", "exitcode:")
            assert job.launcher.returncode == 3
    assert not is_there(forked.ranks[0]["importer"])


def test_a_module_that_runs_when_it_is_imported_runs_in_the_ranks_alone(tmp_path: Path) -> None:
    with Job(tmp_path / "job", guard="main()\n") as job:
        assert [rank["name"] for rank in job.ranks] == ["__main__"] * 2
        assert [rank["importer"] for rank in job.ranks] == [rank["process"] for rank in job.ranks]


def test_a_killed_rank_is_told_and_ends_the_others(tmp_path: Path) -> None:
    with Job(tmp_path / "job") as job:
        os.kill(job.ranks[1]["process"], signal.SIGKILL)
        said = job.launcher.communicate(timeout=60)[1]
        assert job.launcher.returncode == 128 + signal.SIGKILL, said
        assert "Signal 9 (SIGKILL)" in said
        assert not any(is_there(rank["process"]) for rank in job.ranks)


def test_nothing_stays_of_a_killed_launcher_but_its_ranks(tmp_path: Path) -> None:
    with Job(tmp_path / "job") as job:
        job.launcher.kill()
        job.launcher.wait()
        deadline = time.monotonic() + 20
        while is_there(job.ranks[0]["importer"]):
            assert time.monotonic() < deadline
            time.sleep(0.05)
        assert all(is_there(rank["process"]) for rank in job.ranks)


def test_without_the_process_that_forks_ranks_are_started_by_themselves(tmp_path: Path) -> None:
    """It is killed in the first life of the job, of which the ranks fail."""
    with Job(tmp_path / "job", restarts=1) as job:
        os.kill(job.ranks[0]["importer"], signal.SIGKILL)
        said = job.end()
        assert said.count("a rank cannot be forked and is started by itself") == 2
        assert job.launcher.returncode == 3, said
        assert [rank["environment"]["TORCHELASTIC_RESTART_COUNT"] for rank in job.told()] == ["1", "1"]
        assert [rank["importer"] for rank in job.told()] == [rank["process"] for rank in job.told()]
