"""launch/local.sh: what it understands, what it refuses, and that it is a good parent to the processes it starts.

It runs in a small tree of its own, with a stand-in for tools.pretrain, so that no training is needed.
"""

from __future__ import annotations

import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.programs import ran

SCRIPTS = [Path(__file__).parents[2] / "launch" / name for name in ("local.sh", "common.sh", "torchrun.py")]
TORCHRUN = "launch/torchrun.py --standalone --local-addr=127.0.0.1"


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    tmp_path = tmp_path.resolve()  # as the script, which prints its folder, sees it
    (tmp_path / "launch" / "recipes").mkdir(parents=True)
    (tmp_path / "tools").mkdir()
    for script in SCRIPTS:
        shutil.copy(script, tmp_path / "launch")
    (tmp_path / "launch" / "recipes" / "small.toml").write_text("")
    return tmp_path


def local(checkout: Path, arguments: str, /, cwd: str = ".", **variables: str) -> subprocess.CompletedProcess[str]:
    return ran(
        [checkout / "launch" / "local.sh", *shlex.split(arguments)],
        cwd=checkout / cwd,
        env={**clean_environment(), **variables},
    )


def clean_environment() -> dict[str, str]:
    kept = {name: value for name, value in os.environ.items() if name not in {"OMP_NUM_THREADS", "WORLD_SIZE"}}
    return {**kept, "MALLOC_MMAP_MAX_": "65536"}  # as it is anyway; so the launcher has nothing to add


def python_that(checkout: Path, body: str) -> None:
    """Makes `.venv/bin/python` a shell script, which is what the launcher then runs instead of an interpreter."""
    python = checkout / ".venv" / "bin" / "python"
    python.parent.mkdir(parents=True)
    python.write_text(f"#!/bin/sh\n{body}\n")
    python.chmod(0o755)


@pytest.mark.parametrize(
    ("arguments", "command"),
    [
        ("small.toml", "python3 -m tools.pretrain small.toml --cube 1x1x1 --data-parallel 1"),
        (
            "--cube 2x2x2 small.toml",
            f"python3 {TORCHRUN} --nproc-per-node=8 -m tools.pretrain small.toml --cube 2x2x2 --data-parallel 1",
        ),
        (
            "--cube=1x3x1 --data-parallel=2 small.toml --learning-rate 1e-3",
            f"python3 {TORCHRUN} --nproc-per-node=6 -m tools.pretrain small.toml --cube 1x3x1 --data-parallel 2 "
            "--learning-rate 1e-3",
        ),
        pytest.param(
            "small.toml --steps 5 --cube 1x1x10 --data-parallel 10",
            f"python3 {TORCHRUN} --nproc-per-node=100 -m tools.pretrain small.toml --cube 1x1x10 --data-parallel 10 "
            "--steps 5",
            marks=pytest.mark.slow,
        ),
        (
            "small.toml --name 'two words' -- --cube --dry-run",
            "python3 -m tools.pretrain small.toml --cube 1x1x1 --data-parallel 1 --name two\\ words --cube --dry-run",
        ),
        (
            "--cube 2x2x2 --max-restarts 3 small.toml --output runs/a",
            f"python3 {TORCHRUN} --nproc-per-node=8 --max-restarts=3 -m tools.pretrain small.toml --cube 2x2x2 "
            "--data-parallel 1 --output runs/a --resume auto",
        ),
        (
            "small.toml --max-restarts=3 --output runs/a --resume=auto",
            f"python3 {TORCHRUN} --nproc-per-node=1 --max-restarts=3 -m tools.pretrain small.toml --cube 1x1x1 "
            "--data-parallel 1 --output runs/a --resume=auto",
        ),
        (
            "small.toml --max-restarts 0 --output=runs/a",
            "python3 -m tools.pretrain small.toml --cube 1x1x1 --data-parallel 1 --output=runs/a",
        ),
        ("--cube 2x2x2 small.toml -h", "python3 -m tools.pretrain small.toml --cube 2x2x2 --data-parallel 1 -h"),
        (
            "--cube 2x2x2 small.toml --dry-run",
            "python3 -m tools.pretrain small.toml --cube 2x2x2 --data-parallel 1 --dry-run",
        ),
        (
            "--cube 2x2x2 small.toml --dry_run",
            "python3 -m tools.pretrain small.toml --cube 2x2x2 --data-parallel 1 --dry_run",
        ),
        (
            "--cube 2x2x2 small.toml --prepare-only",
            "python3 -m tools.pretrain small.toml --cube 2x2x2 --data-parallel 1 --prepare-only",
        ),
        ("small.toml --help", "python3 -m tools.pretrain small.toml --cube 1x1x1 --data-parallel 1 --help"),
    ],
)
def test_command(checkout: Path, arguments: str, command: str) -> None:
    result = local(checkout, f"--dry-run {arguments}", cwd="launch/recipes", OMP_NUM_THREADS="1")
    assert (result.returncode, result.stderr) == (0, "")
    # Called from elsewhere, the recipe is found there, and training still runs in the root.
    command = command.replace("small.toml", f"{checkout}/launch/recipes/small.toml")
    first, *ranks = result.stdout.splitlines()
    assert first == f"cd {checkout} && {command}"
    started = re.search(r"--nproc-per-node=(\d+)", command)
    assert len(ranks) == (int(started[1]) if started else 0)
    for rank, told in enumerate(ranks):
        variables = f"RANK={rank} LOCAL_RANK={rank} WORLD_SIZE={len(ranks)} LOCAL_WORLD_SIZE={len(ranks)} GROUP_RANK=0"
        assert told.startswith(f"cd {checkout} && {variables} MASTER_ADDR=127.0.0.1 MASTER_PORT=? python3 -m tools.pre")


def test_numbers_of_another_job_reach_no_process(checkout: Path) -> None:
    python_that(checkout, 'echo "<${WORLD_SIZE-}${RANK-}${MASTER_PORT-}>"')
    result = local(checkout, "launch/recipes/small.toml", WORLD_SIZE="4", RANK="9", MASTER_PORT="1")
    assert (result.returncode, result.stdout) == (0, "<>\n")


@pytest.mark.skipif(shutil.which("dash") is None, reason="a shell that is no bash")
@pytest.mark.parametrize("script", ["corpus.sh", "gpu_hour.sh", "local.sh", "mpirun.sh", "slurm.sbatch", "torchrun.sh"])
def test_another_shell_is_told_so(script: str) -> None:
    done = subprocess.run(["dash", SCRIPTS[0].parent / script], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr == f"launch/{script} needs bash. Start it by its name alone, or by bash.\n"


def test_called_in_the_root_paths_stay_as_they_are(checkout: Path) -> None:
    result = local(checkout, "--dry-run launch/recipes/small.toml", OMP_NUM_THREADS="1")
    assert result.stdout.startswith("python3 -m tools.pretrain launch/recipes/small.toml --cube")


def test_threads_share_the_cores(checkout: Path) -> None:
    python_that(checkout, "exit 0")
    nproc = checkout / "bin" / "nproc"
    nproc.parent.mkdir()
    nproc.write_text("#!/bin/sh\necho 12\n")
    nproc.chmod(0o755)
    path = f"{nproc.parent}:{os.environ['PATH']}"
    recipe = "--dry-run launch/recipes/small.toml"
    for cube, threads in {"1x1x1": 12, "5x1x1": 2, "5x5x1": 1}.items():
        stdout = local(checkout, f"{recipe} --cube {cube}", PATH=path).stdout
        assert stdout.startswith(f"OMP_NUM_THREADS={threads} .venv/bin/python ")
    assert local(checkout, recipe, PATH=path, OMP_NUM_THREADS="7").stdout.startswith(".venv/bin/python -m ")


def test_memory_is_kept_on_cpus_unless_told_otherwise(checkout: Path) -> None:
    kept = "MALLOC_MMAP_MAX_=0 MALLOC_TRIM_THRESHOLD_=17179869184 "
    call = "--dry-run launch/recipes/small.toml"
    nothing = {"OMP_NUM_THREADS": "1", "MALLOC_MMAP_MAX_": ""}
    assert local(checkout, call, **nothing).stdout.startswith(f"{kept}python3 -m ")
    assert local(checkout, f"--cpu {call}", **nothing).stdout.startswith(f"CUDA_VISIBLE_DEVICES= {kept}python3 -m ")
    assert local(checkout, call, **{**nothing, "MALLOC_TRIM_THRESHOLD_": "1"}).stdout.startswith("python3 -m ")
    python_that(checkout, "echo 4")
    assert local(checkout, f"--gpu {call}", **nothing).stdout.startswith(".venv/bin/python -m ")


def test_cpu_hides_the_gpus(checkout: Path) -> None:
    stdout = local(checkout, "--cpu --dry-run launch/recipes/small.toml", OMP_NUM_THREADS="1").stdout
    assert stdout.startswith("CUDA_VISIBLE_DEVICES= python3 -m tools.pretrain ")


def test_gpu_wants_one_for_each_process(checkout: Path) -> None:
    python_that(checkout, "echo 4")
    recipe = "--dry-run --gpu launch/recipes/small.toml"
    assert local(checkout, f"{recipe} --cube 1x2x2").returncode == 0
    refused = local(checkout, f"{recipe} --cube 1x2x2 --data-parallel 2")
    assert refused.returncode == 2
    assert "needs one GPU for each of the 8 processes. Got 4." in refused.stderr


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("", "a recipe is needed"),
        ("--cube 2x2x2", "a recipe is needed"),
        ("missing.toml", "recipe 'missing.toml' does not exist"),
        ("launch/recipes", "recipe 'launch/recipes' does not exist"),
        ("--cube", "--cube needs a value"),
        ("launch/recipes/small.toml --data-parallel", "--data-parallel needs a value"),
        ("--cube 2x2 launch/recipes/small.toml", "Got '2x2'"),
        ("--cube 2x0x2 launch/recipes/small.toml", "Got '2x0x2'"),
        ("--cube 2X2X2 launch/recipes/small.toml", "Got '2X2X2'"),
        ("--cube 2x2x99999 launch/recipes/small.toml", "Got '2x2x99999'"),
        ("--cube '' launch/recipes/small.toml", "Got ''"),
        ("--data-parallel -1 launch/recipes/small.toml", "--data-parallel must be a whole number"),
        ("--data-parallel 1.5 launch/recipes/small.toml", "Got '1.5'"),
        ("--max-restarts", "--max-restarts needs a value"),
        ("--max-restarts -1 launch/recipes/small.toml", "--max-restarts must be a whole number from 0 to 9999"),
        ("--max-restarts 2 launch/recipes/small.toml", "--max-restarts needs --output DIR"),
        ("--max-restarts 2 launch/recipes/small.toml --resume runs/a", "would go back to the same checkpoint"),
        ("--max-restarts 2 launch/recipes/small.toml --resume=runs/a", "would go back to the same checkpoint"),
        ("--cpu --gpu launch/recipes/small.toml", "--cpu and --gpu exclude each other"),
        ("--cubes 2x2x2 launch/recipes/small.toml", "unknown option '--cubes' before the recipe"),
    ],
)
def test_wrong_calls_are_refused_in_one_line(checkout: Path, arguments: str, message: str) -> None:
    result = local(checkout, arguments)
    assert (result.returncode, result.stdout) == (2, "")
    assert result.stderr.startswith("launch/local.sh: ")
    assert message in result.stderr
    assert result.stderr.count("\n") == 1


def test_help(checkout: Path) -> None:
    result = local(checkout, "--help")
    assert result.returncode == 0
    assert result.stdout.startswith("usage: launch/local.sh ")


def test_one_process_passes_on_its_status(checkout: Path) -> None:
    python_that(checkout, 'echo "$OMP_NUM_THREADS $@"; exit 7')
    result = local(checkout, "launch/recipes/small.toml", OMP_NUM_THREADS="3")
    assert result.returncode == 7
    assert result.stdout == "3 -m tools.pretrain launch/recipes/small.toml --cube 1x1x1 --data-parallel 1\n"
    assert result.stderr == f".venv/bin/python {result.stdout[2:]}"


TRAINING = """
import os, pathlib, signal, sys, time
if "--prepare-only" in sys.argv:
    pathlib.Path("prepared").write_text(" ".join(sys.argv[1:]))
    sys.exit(2 if "--bad" in sys.argv else 0)
rank = os.environ["RANK"]
note = pathlib.Path(f"rank{rank}.new")
note.write_text(f"{os.getpid()} {os.environ['OMP_NUM_THREADS']} {' '.join(sys.argv[1:])}")
for argument in sys.argv:
    if argument.startswith("--answer="):  # to a signal, one status for each rank
        answer = int(argument.removeprefix("--answer=").split(",")[int(rank)])
        for number in (signal.SIGTERM, signal.SIGUSR1):
            signal.signal(number, lambda number, frame: sys.exit(answer))
if "--die" in sys.argv and rank == "1" and os.environ["TORCHELASTIC_RESTART_COUNT"] == "0":
    os.kill(os.getpid(), signal.SIGKILL)
if "--saved" in sys.argv:
    with open(f"lives{rank}", "a") as lives:
        lives.write("x")
    if rank == "0":  # slow to leave: torchrun ends it
        time.sleep(5)
    sys.exit(75)
note.rename(f"rank{rank}")
if "--wait" in sys.argv:
    time.sleep(60)
if "--fail" in sys.argv and rank == "1":
    while not pathlib.Path("rank0").is_file():  # torchrun ends the others as soon as one fails
        time.sleep(0.01)
    sys.exit(3)
"""


@pytest.mark.slow
@pytest.mark.parametrize(("arguments", "status"), [("", 0), ("--fail", 3)])
def test_several_processes(checkout: Path, arguments: str, status: int) -> None:
    python_that(checkout, f'exec {shlex.quote(sys.executable)} "$@"')
    (checkout / "tools" / "pretrain.py").write_text(TRAINING)
    result = local(checkout, f"--cube 1x2x1 launch/recipes/small.toml {arguments}", OMP_NUM_THREADS="1")
    assert result.returncode == status, result.stderr
    expected = ["1", "launch/recipes/small.toml", "--cube", "1x2x1", "--data-parallel", "1", *arguments.split()]
    for rank in range(2):
        assert (checkout / f"rank{rank}").read_text().split()[1:] == expected
    assert (checkout / "prepared").read_text().split() == [*expected[1:], "--prepare-only"]


@pytest.mark.slow
def test_ranks_that_have_saved_are_not_started_again(checkout: Path) -> None:
    """A signal that came to a rank and not to torchrun: what they answer is no failure to be mended."""
    python_that(checkout, f'exec {shlex.quote(sys.executable)} "$@"')
    (checkout / "tools" / "pretrain.py").write_text(TRAINING)
    arguments = "--cube 1x2x1 --max-restarts 3 launch/recipes/small.toml --output out --saved"
    result = local(checkout, arguments, OMP_NUM_THREADS="1")
    assert result.returncode == 75, result.stderr
    assert [(checkout / f"lives{rank}").read_text() for rank in range(2)] == ["x", "x"]


def test_what_the_first_process_refuses_starts_no_other(checkout: Path) -> None:
    python_that(checkout, f'exec {shlex.quote(sys.executable)} "$@"')
    (checkout / "tools" / "pretrain.py").write_text(TRAINING)
    result = local(checkout, "--cube 1x2x1 launch/recipes/small.toml --bad", OMP_NUM_THREADS="1")
    assert result.returncode == 2
    assert (checkout / "prepared").is_file()
    assert not (checkout / "rank0").exists()
    assert "torchrun" not in result.stderr


@pytest.mark.slow
@pytest.mark.parametrize(
    ("number", "answers", "status"),
    [
        (signal.SIGTERM, "", 143),  # nobody minds the signal
        (signal.SIGTERM, "75,75", 75),
        (signal.SIGUSR1, "75,75", 75),
        (signal.SIGUSR1, "0,75", 75),
        (signal.SIGTERM, "75,138", 138),
    ],
)
def test_a_signal_reaches_every_process_and_their_status_comes_back(
    checkout: Path, number: int, answers: str, status: int
) -> None:
    python_that(checkout, f'exec {shlex.quote(sys.executable)} "$@"')
    (checkout / "tools" / "pretrain.py").write_text(TRAINING)
    arguments = ["--cube", "2x1x1", "launch/recipes/small.toml", "--wait"]
    launcher = subprocess.Popen(
        [checkout / "launch" / "local.sh", *arguments, *([f"--answer={answers}"] if answers else [])],
        cwd=checkout,
        env=clean_environment(),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    try:
        notes = [checkout / "rank0", checkout / "rank1"]
        wait_until(lambda: all(note.is_file() for note in notes))
        children = [int(note.read_text().split()[0]) for note in notes]
        launcher.send_signal(number)
        assert launcher.wait(timeout=30) == status
        wait_until(lambda: not any(alive(child) for child in children))
    finally:
        launcher.kill()
        launcher.wait()


@pytest.mark.slow
@pytest.mark.parametrize(("restarts", "status"), [(0, 137), (1, 0)])
def test_a_dead_process_is_started_again(checkout: Path, restarts: int, status: int) -> None:
    python_that(checkout, f'exec {shlex.quote(sys.executable)} "$@"')
    (checkout / "tools" / "pretrain.py").write_text(TRAINING)
    recipe = "launch/recipes/small.toml --output runs/a --die"
    result = local(checkout, f"--cube 2x1x1 --max-restarts {restarts} {recipe}")
    assert result.returncode == status, result.stderr
    assert (checkout / "rank1").exists() == bool(restarts)


def alive(process: int) -> bool:
    try:
        os.kill(process, 0)
    except ProcessLookupError:
        return False
    return True


def wait_until(condition: Callable[[], bool], seconds: float = 30.0) -> None:
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "the processes did not reach the expected state"
        time.sleep(0.05)
