"""launch/slurm.sbatch: what it understands, what it refuses, and when it asks for a requeue.

It runs in a small tree of its own, with stand-ins for srun, scontrol and launch/torchrun.sh. tests/slow/test_slurm.py
submits it to a Slurm.
"""

from __future__ import annotations

import os
import re
import shlex
import shutil
import signal
import subprocess
import time
from pathlib import Path

import pytest

from tests.programs import ran

LAUNCH = Path(__file__).parents[2] / "launch"
SRUN = "srun --nodes={0} --ntasks={0} --ntasks-per-node=1 --relative=0 --cpu-bind=none --export=ALL "
SRUN += '--kill-on-bad-exit=0 --wait=60 bash -c \'exec launch/torchrun.sh --node-rank "$SLURM_NODEID" "$@"\' task'
JOB = {
    "SLURM_JOB_ID": "3007",
    "SLURM_JOB_NUM_NODES": "2",
    "SLURM_JOB_NODELIST": "a[1-2]",
    "SLURM_CPUS_ON_NODE": "8",
    "OMP_NUM_THREADS": "1",
}
SCONTROL = r"""#!/bin/sh
case "$*" in
"show hostnames a[1-2]") printf 'a1\na2\n' ;;
"show node a1") printf 'NodeName=a1 Arch=x86_64\n   NodeAddr=%s NodeHostName=a1 Version=22.05\n' "${ADDRESS:-a1}" ;;
"show job "*) printf 'JobId=3007 JobName=x\n   JobState=%s Reason=None\n   Command=%s\n' "$STATE" "$COMMAND" ;;
requeue*) echo "$*" >>"$CALLS" && exit "${REFUSED:-0}" ;;
esac
"""
SWEEP = """# NODES XxYxZ DATA
1 1x2x1 1

2 1x2x1 2  # twice as much
2 2x2x1 1"""


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    root = tmp_path.resolve() / "a checkout"
    (root / "launch" / "recipes").mkdir(parents=True)
    for name in ("common.sh", "slurm.sbatch"):
        shutil.copy(LAUNCH / name, root / "launch")
    (root / "launch" / "torchrun.sh").write_text("")
    (root / "launch" / "recipes" / "small.toml").write_text("")
    (root / "sweep").write_text(SWEEP)
    (root / "bin").mkdir()
    program(root, "scontrol", SCONTROL)
    program(root, "srun", '#!/bin/sh\necho srun >>"$CALLS" && exit "$STATUS"\n')
    program(root, "python3", '#!/bin/sh\necho "$*" >>"$CALLS" && exit "${PREPARED:-0}"\n')
    return root


def program(checkout: Path, name: str, text: str) -> None:
    path = checkout / "bin" / name
    path.write_text(text)
    path.chmod(0o755)


def environment(checkout: Path, **variables: str) -> dict[str, str]:
    own = {name: value for name, value in os.environ.items() if not name.startswith(("SLURM", "TORCH_ELASTIC"))}
    own |= {"PATH": f"{checkout}/bin:{own['PATH']}", "CALLS": str(checkout / "calls"), "STATE": "RUNNING"}
    return own | {"COMMAND": f"{checkout}/launch/slurm.sbatch --cube 1x2x2 x"} | variables


def call(checkout: Path, arguments: str, /, **variables: str) -> subprocess.CompletedProcess[str]:
    return ran(
        ["bash", "launch/slurm.sbatch", *shlex.split(arguments)], cwd=checkout, env=environment(checkout, **variables)
    )


def calls(checkout: Path) -> list[str]:
    """What was run, but for the preparation."""
    return [line for line in (checkout / "calls").read_text().splitlines() if "--prepare-only" not in line]


def test_help(checkout: Path) -> None:
    done = call(checkout, "--help")
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.startswith("usage: sbatch --nodes=N ")


@pytest.mark.parametrize(
    ("arguments", "variables", "nodes", "told", "training"),
    [
        (
            "--cube 1x2x2 RECIPE --run.steps 8",
            {},
            2,
            "--master a1:20028 --per-node 2 --prepared --cube 1x2x2 --data-parallel 1",
            "--output runs/slurm-3007 --resume auto --run.steps 8",
        ),
        (
            "RECIPE --cube=1x2x2 --data-parallel=2 --gpu --wait 60 --no-doctor --output 'my runs' -- --wait 5",
            {"ADDRESS": "10.0.0.1"},
            2,
            "--master 10.0.0.1:20028 --per-node 4 --wait 60 --no-doctor --gpu --prepared --cube 1x2x2 "
            "--data-parallel 2",
            "--output 'my runs' --resume auto --wait 5",
        ),
        (
            "--nodes 1 --cube 1x2x1 --master fe80::1 RECIPE -- --resume=auto --output=there",
            {},
            1,
            "--master '[fe80::1]:20028' --per-node 2 --prepared --cube 1x2x1 --data-parallel 1",
            "--resume=auto --output=there",
        ),
        (
            "--module tools.finetune --cube 1x2x1 --master b:77 RECIPE",
            {},
            2,
            "--master b:77 --per-node 1 --module tools.finetune --cube 1x2x1 --data-parallel 1",
            "",
        ),
        (
            "--cube 1x2x2 RECIPE --no-requeue --resume runs/a",
            {"SLURM_GPUS_ON_NODE": "2"},
            2,
            "--master a1:20028 --per-node 2 --prepared --cube 1x2x2 --data-parallel 1",
            "--resume runs/a",
        ),
        (
            "--cube 1x2x1 --per-node 1 RECIPE --output there",
            {"SLURM_GPUS_ON_NODE": "8"},
            2,
            "--master a1:20028 --per-node 1 --prepared --cube 1x2x1 --data-parallel 1",
            "--output there --resume auto",
        ),
    ],
)
def test_dry_run(
    checkout: Path, arguments: str, variables: dict[str, str], nodes: int, told: str, training: str
) -> None:
    recipe = "launch/recipes/small.toml"
    done = call(checkout, f"--dry-run {arguments.replace('RECIPE', recipe)}", **JOB, **variables)
    assert (done.returncode, done.stderr) == (0, "")
    *first, step = [shlex.split(line) for line in done.stdout.splitlines()[:-nodes]]
    save = "TORCH_ELASTIC_SHUTDOWN_TIMEOUT=110"
    passed = f"--hosts {'a1,a2'[: 3 * nodes - 1]} --nodes {nodes} {told} {recipe} -- {training}"
    assert step == shlex.split(f"{save} {SRUN.format(nodes)} {passed}")
    assert [shlex.split(line) for line in done.stdout.splitlines()[-nodes:]] == [
        shlex.split(f"on node {n} (a{n + 1}): {save} launch/torchrun.sh --node-rank {n} {passed}") for n in range(nodes)
    ]
    if "--module" in arguments:
        assert first == []
    else:
        cube = told[told.index("--cube") :]
        assert first == [shlex.split(f"{save} python3 -m tools.pretrain {recipe} {cube} {training} --prepare-only")]


def test_cpu_hides_the_gpus(checkout: Path) -> None:
    variables = JOB | {"SLURM_GPUS_ON_NODE": "8"}
    lines = call(checkout, "--dry-run --cpu --cube 1x2x1 launch/recipes/small.toml", **variables).stdout.splitlines()
    assert len(lines) == 4
    for line in lines:
        assert "CUDA_VISIBLE_DEVICES= " in line
    assert "--per-node 1 --cpu --prepared" in lines[1]


def test_dry_run_without_a_job(checkout: Path) -> None:
    done = call(checkout, "--dry-run --nodes 3 --cube 1x3x1 launch/recipes/small.toml")
    assert (done.returncode, done.stderr) == (0, "")
    assert "on node 2 (HOST2): " in done.stdout
    assert "--master HOST0:20000 --per-node 1 " in done.stdout
    assert "--output runs/slurm-JOBID --resume auto" in done.stdout


def test_a_sweep_shows_all_its_runs_and_an_array_takes_one(checkout: Path) -> None:
    sweep = "--sweep sweep --output out launch/recipes/small.toml --run.steps 8"
    done = call(checkout, f"--dry-run {sweep}")
    assert (done.returncode, done.stderr) == (0, "")
    commands = [line for line in done.stdout.splitlines() if "srun" in line]
    names = ["1-1x2x1-1", "2-1x2x1-2", "2-2x2x1-1"]
    assert [line.split("--output ")[1] for line in commands] == [f"out/{name} --run.steps 8" for name in names]
    for index, (nodes, words) in enumerate(
        [(1, "--cube 1x2x1 --data-parallel 1"), (2, "--cube 1x2x1 --data-parallel 2"), (2, "--cube 2x2x1")]
    ):
        array = {"SLURM_ARRAY_JOB_ID": "3000", "SLURM_ARRAY_TASK_ID": str(index)}
        chosen = call(checkout, f"--dry-run {sweep}", **JOB, **array).stdout.splitlines()
        assert len(chosen) == 2 + nodes
        assert f"srun --nodes={nodes} " in chosen[1]
        assert f"--nodes {nodes} --master a1:20028 --per-node 2 --module tools.scaling {words} " in chosen[1]
        assert "--resume" not in chosen[1]


@pytest.mark.parametrize(
    ("arguments", "variables", "message"),
    [
        ("--cube 1x2x1", JOB, "a recipe is needed"),
        ("--cube 1x2x1 missing.toml", JOB, "recipe 'missing.toml' does not exist"),
        ("--cube 1x2 RECIPE", JOB, "Got '1x2'"),
        ("--node-rank 1 RECIPE", JOB, "unknown option '--node-rank' before the recipe"),
        ("--resume auto RECIPE", JOB, "unknown option '--resume' before the recipe"),
        ("--cube 1x2x1 RECIPE --dry-run", JOB, "are for one process"),
        ("--cube 1x2x1 RECIPE", {}, "this is no job of Slurm. Submit it: sbatch --nodes=N"),
        ("--dry-run RECIPE", {}, "--dry-run without a job needs --nodes N"),
        ("--cube 1x3x1 RECIPE", JOB, "needs 3 processes, which 2 nodes cannot share evenly"),
        ("--cube 1x3x1 --per-node 2 RECIPE", JOB, "needs 3 processes, which 2 nodes of 2 cannot share evenly"),
        ("--cube 1x3x1 --nodes 3 RECIPE", JOB, "--nodes 3, and the job has 2. Ask sbatch for more: --nodes=3."),
        ("--per-node 0 RECIPE", JOB, "--per-node must be a whole number from 1 to 9999. Got '0'."),
        (
            "--cube 1x2x2 RECIPE",
            JOB | {"SLURM_GPUS_ON_NODE": "8"},
            "needs 4 processes, and 2 nodes with 8 GPUs each have 16. Choose another cube or --nodes; --per-node "
            "leaves GPUs idle, --cpu does without.",
        ),
        ("--cube 4x2x2 --per-node 8 RECIPE", JOB | {"SLURM_GPUS_ON_NODE": "4"}, "2 nodes with 4 GPUs each have 8"),
        ("--cube 1x2x1 RECIPE --resume runs/a", JOB, "after a requeue a named --resume would go back"),
        ("--cube 1x2x1 RECIPE", JOB | {"SLURM_JOB_NODELIST": "b1"}, "scontrol show hostnames b1 has named no host"),
        ("--sweep missing --output o RECIPE", JOB, "--sweep 'missing' does not exist (looked for in "),
        ("--sweep sweep RECIPE", JOB, "--sweep needs --output DIR"),
        ("--sweep sweep --output o RECIPE", JOB, "--sweep is for an array of jobs: submit it with --array=0-2."),
        ("--sweep sweep --output o --cube 2x1x1 RECIPE", JOB, "Leave out --cube and --data-parallel."),
        (
            "--sweep sweep --output o RECIPE",
            JOB | {"SLURM_ARRAY_TASK_ID": "3"},
            "index 3 of the array has no run: sweep has 3, from 0. Submit it with --array=0-2.",
        ),
        (
            "--sweep sweep --output o RECIPE",
            JOB | {"SLURM_JOB_NUM_NODES": "1", "SLURM_ARRAY_TASK_ID": "1"},
            "the run '2 1x2x1 2' needs 2 nodes, and the job has 1. Ask sbatch for more: --nodes=2.",
        ),
        (
            "--sweep bad --output o RECIPE",
            JOB,
            "line 2 of bad must be NODES XxYxZ DATA, like '2 2x2x2 1'. Got '2 2x2'.",
        ),
        ("--sweep empty --output o RECIPE", JOB, "empty has no run"),
    ],
)
def test_wrong_calls_are_refused_in_one_line(
    checkout: Path, arguments: str, variables: dict[str, str], message: str
) -> None:
    (checkout / "bad").write_text("1 1x1x1 1\n2 2x2\n")
    (checkout / "empty").write_text("# nothing\n")
    done = call(checkout, arguments.replace("RECIPE", "launch/recipes/small.toml"), **variables)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith("launch/slurm.sbatch: ")
    assert message in done.stderr
    assert done.stderr.count("\n") == 1


@pytest.mark.parametrize(
    ("status", "state", "arguments", "requeued", "message"),
    [
        (0, "RUNNING", "", False, ""),
        (2, "RUNNING", "", False, ""),
        (75, "RUNNING", "", True, "saved; job 3007 asks to be requeued"),
        (75, "RUNNING", "--no-requeue", False, ""),
        (75, "RUNNING", "--module tools.scaling", False, ""),
        # Slurm is ending it, by scancel for example
        (75, "COMPLETING", "", False, "saved; Slurm has ended the job (COMPLETING)"),
    ],
)
def test_who_has_saved_comes_back(
    checkout: Path, status: int, state: str, arguments: str, requeued: bool, message: str
) -> None:
    done = call(checkout, f"{arguments} --cube 1x2x1 launch/recipes/small.toml", **JOB, STATUS=str(status), STATE=state)
    assert done.returncode == status
    assert message in done.stderr
    assert calls(checkout) == ["srun", *(["requeue 3007"] if requeued else [])]


def test_what_the_first_process_refuses_starts_no_other(checkout: Path) -> None:
    done = call(checkout, "--cube 1x2x1 launch/recipes/small.toml", **JOB, STATUS="0", PREPARED="2")
    assert done.returncode == 2
    assert (checkout / "calls").read_text() == (
        "-m tools.pretrain launch/recipes/small.toml --cube 1x2x1 --data-parallel 1 --output runs/slurm-3007 "
        "--resume auto --prepare-only\n"
    )


def test_a_task_of_an_array_asks_for_itself_alone(checkout: Path) -> None:
    array = {"SLURM_ARRAY_JOB_ID": "3000", "SLURM_ARRAY_TASK_ID": "5"}
    done = call(checkout, "--cube 1x2x1 launch/recipes/small.toml", **JOB, **array, STATUS="75")
    assert done.returncode == 75
    assert calls(checkout) == ["srun", "requeue 3000_5"]
    assert "--output runs/slurm-3007 " in done.stderr


def test_where_slurm_will_not_requeue_it_says_how_to_go_on(checkout: Path) -> None:
    done = call(checkout, "--cube 1x2x1 launch/recipes/small.toml", **JOB, STATUS="75", REFUSED="1")
    assert done.returncode == 75
    assert (
        "Slurm will not requeue it (above). Go on by the same command with --output and --resume auto." in done.stderr
    )


def test_the_secret_of_the_job_is_in_the_environment_alone(checkout: Path) -> None:
    program(checkout, "srun", '#!/bin/sh\necho "$*" >>"$CALLS"\necho "$TENSOR3D_SECRET" >>"$CALLS.secret"\n')
    secrets = []
    for _ in range(2):
        done = call(checkout, "--cube 1x2x2 launch/recipes/small.toml", **JOB)
        assert done.returncode == 0, done.stderr
        (secret,) = set((checkout / "calls.secret").read_text().split())
        (checkout / "calls.secret").unlink()
        assert re.fullmatch("[0-9a-f]{32}", secret)
        assert secret not in done.stdout + done.stderr + (checkout / "calls").read_text()
        secrets.append(secret)
    assert secrets[0] != secrets[1], "each job has its own"


def test_few_cores_are_told(checkout: Path) -> None:
    variables = JOB | {"SLURM_CPUS_ON_NODE": "1", "STATUS": "0"}
    said = call(checkout, "--cube 1x2x2 launch/recipes/small.toml", **variables).stderr
    assert "a node has fewer cores for this job (1) than processes (2). Ask sbatch for --exclusive" in said


def signalled(checkout: Path, number: int) -> tuple[int, str]:
    """Sends a signal to a job when a stand-in has made the file `waits`; its exit status, and what it said."""
    job = subprocess.Popen(
        ["bash", "launch/slurm.sbatch", "--cube", "1x2x1", "launch/recipes/small.toml"],
        cwd=checkout,
        env=environment(checkout, **JOB),
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        end = time.monotonic() + 30
        while not (checkout / "waits").exists():
            assert time.monotonic() < end
            time.sleep(0.01)
        job.send_signal(number)
        _, said = job.communicate(timeout=30)
    finally:
        job.kill()
        job.wait()
    return job.returncode, said


@pytest.mark.parametrize("number", [signal.SIGUSR1, signal.SIGTERM])
def test_a_signal_goes_to_srun_as_sigusr1(checkout: Path, number: int) -> None:
    body = "trap 'echo came >>came; sleep 0.2; exit 75' USR1\ntouch waits\nfor n in $(seq 600); do sleep 0.05; done"
    program(checkout, "srun", f"#!/bin/bash\n{body}\n")
    status, said = signalled(checkout, number)
    assert status == 75, said
    assert (checkout / "came").read_text() == "came\n"
    assert f"{signal.Signals(number).name}: the ranks are told to save and leave" in said
    assert calls(checkout) == ["requeue 3007"]


def test_a_signal_before_training_ends_the_job(checkout: Path) -> None:
    program(checkout, "python3", "#!/bin/sh\ntouch waits && exec sleep 30\n")
    status, said = signalled(checkout, signal.SIGUSR1)
    assert status == 143, said
    assert "ended by a signal before training: nothing is to be saved, and no requeue asked for" in said
    assert not (checkout / "calls").exists()


@pytest.mark.parametrize("place", ["command", "submitted"])
def test_a_copy_in_the_spool_finds_the_repository(checkout: Path, place: str, tmp_path: Path) -> None:
    spool = tmp_path / "spool" / "job3007"
    spool.mkdir(parents=True)
    shutil.copy(checkout / "launch" / "slurm.sbatch", spool / "slurm_script")
    where = {"SLURM_SUBMIT_DIR": str(checkout if place == "submitted" else tmp_path)}
    if place == "submitted":
        where["COMMAND"] = "/home/somebody/my.sbatch"
    recipe = checkout / "launch" / "recipes" / "small.toml"
    done = ran(
        ["bash", str(spool / "slurm_script"), "--dry-run", "--cube", "1x2x1", str(recipe)],
        cwd=tmp_path,
        env=environment(checkout, **JOB, **where),
    )
    assert (done.returncode, done.stderr) == (0, "")
    assert shlex.split(done.stdout.splitlines()[0])[:2] == ["cd", str(checkout)]


def test_a_copy_that_finds_no_repository_says_where_it_looked(checkout: Path, tmp_path: Path) -> None:
    shutil.copy(checkout / "launch" / "slurm.sbatch", tmp_path / "slurm_script")
    variables = JOB | {"SLURM_SUBMIT_DIR": "/somewhere", "COMMAND": "/home/somebody/my.sbatch"}
    done = ran(["bash", tmp_path / "slurm_script"], env=environment(checkout, **variables))
    assert done.returncode == 2
    assert done.stderr == (
        "launch/slurm.sbatch: launch/torchrun.sh is neither beside the submitted script (/home/somebody/my.sbatch) nor "
        "in /somewhere. Submit launch/slurm.sbatch itself, or from the repository's root.\n"
    )
