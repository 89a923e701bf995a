"""launch/slurm.sbatch in a real Slurm of two nodes: it goes on after a requeue, or says why not, and leaves nothing."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.slow.kills import ROOT, losses, write_recipe
from tests.slurm import Cluster, slurm, until, why_not

pytestmark = [pytest.mark.slow, pytest.mark.skipif(why_not() is not None, reason=str(why_not()))]

STEPS = 40
SECTION = f"""
[run]
steps = {STEPS}
evaluate_every = 0
checkpoint_every = 0
stop_within = 60.0
"""


@pytest.fixture(scope="module")
def cluster() -> Iterator[Cluster]:
    with slurm(nodes=2, cpus=2) as cluster:
        yield cluster


@pytest.fixture
def place(tmp_path: Path) -> Path:
    write_recipe(tmp_path / "small.toml", SECTION)
    return tmp_path


def train(cluster: Cluster, place: Path, *more: str) -> str:
    """Submits a job of 2 nodes with 2 processes each, and returns its number. Its log is `place/job.log`."""
    options = ["--nodes=2", "--exclusive", f"--output={place}/job.log"]
    # All nodes are on this machine, whose own name may lead nowhere.
    arguments = ["--cpu", "--cube", "1x2x2", "--interface", "lo", "--no-doctor"]
    training = [str(place / "small.toml"), "--output", str(place / "job"), "--corpus", str(place / "corpus"), *more]
    return cluster.submit(*options, "launch/slurm.sbatch", *arguments, *training, cwd=ROOT)


def test_a_job_that_comes_back_twice_learns_what_one_machine_learns(
    cluster: Cluster, place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(cluster.environment, "OMP_NUM_THREADS", "1")
    alone = ["--output", f"{place}/alone", "--corpus", f"{place}/corpus"]
    subprocess.run(
        ["launch/local.sh", "--cpu", "--cube", "1x2x2", f"{place}/small.toml", *alone],
        cwd=ROOT,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        timeout=300,
        check=True,
    )

    job, log = train(cluster, place), place / "job.log"

    def comes_to(step: int) -> int:
        def last() -> int:
            return max((step for step, _ in losses(place / "job")), default=0)

        until(lambda: last() >= step or cluster.state(job) in {"FAILED", "COMPLETED"}, 180, log.read_text)
        return last()

    # Slurm ends it, as for an administrator or a job that counts for more: SIGTERM to every process.
    done = comes_to(3)
    assert cluster.run(["scontrol", "requeue", job]).returncode == 0
    # It is told to save, as before the end of its time, and asks for the requeue itself.
    done = comes_to(done + 8)
    assert cluster.run(["scancel", "--signal=USR1", "--batch", job]).returncode == 0
    assert cluster.wait(job, seconds=240) == "COMPLETED", log.read_text()

    said = log.read_text()
    assert done < STEPS, "the run was too fast to be interrupted"
    assert cluster.field(job, "Restarts") == "2", said
    assert cluster.field(job, "ExitCode") == "0:0"
    assert "saved; Slurm has ended the job" in said
    assert f"saved; job {job} asks to be requeued" in said
    assert said.count("goes on   after step ") == 2, said
    assert losses(place / "job") == losses(place / "alone")
    assert len(losses(place / "job")) == STEPS
    assert cluster.processes() == {}


def test_a_job_that_fails_says_why_and_leaves_nothing(cluster: Cluster, place: Path) -> None:
    job = train(cluster, place, "--model.heads", "3")
    assert cluster.wait(job, seconds=120) == "FAILED"
    assert cluster.field(job, "ExitCode") == "2:0"
    said = (place / "job.log").read_text()
    assert said.count("tools.pretrain: ") == 1, said
    assert "heads" in said
    assert "srun" not in said, "nothing was started on the nodes"
    assert cluster.processes() == {}


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    """A tree of its own, in which nothing is prepared. `launch/torchrun.sh` is the test's."""
    (tmp_path / "launch").mkdir()
    for name in ("common.sh", "slurm.sbatch"):
        shutil.copy(ROOT / "launch" / name, tmp_path / "launch")
    (tmp_path / "small.toml").touch()
    program(tmp_path / ".venv" / "bin" / "python", "exit 0")
    return tmp_path


def program(path: Path, body: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f"#!/bin/bash\n{body}\n")
    path.chmod(0o755)


SAVES = """
echo "node $SLURM_NODEID, restart $SLURM_RESTART_COUNT" >>job.log
[ "$SLURM_RESTART_COUNT" != 1 ] || exit 0
save() { sleep $((2 * SLURM_NODEID)) && exit 75; }
trap save USR1
trap 'exit 143' TERM
while :; do sleep 0.1; done
"""


def test_a_node_that_is_slower_to_save_is_waited_for(cluster: Cluster, checkout: Path) -> None:
    program(checkout / "launch" / "torchrun.sh", SAVES.replace("$SLURM_RESTART_COUNT", "${SLURM_RESTART_COUNT:-0}"))
    options = ["--nodes=2", "--exclusive", f"--output={checkout}/job.log"]
    job = cluster.submit(*options, "launch/slurm.sbatch", "--cube", "1x2x1", "small.toml", cwd=checkout)
    log = checkout / "job.log"
    until(lambda: log.exists() and log.read_text().count(", restart 0\n") == 2, 60, lambda: cluster.state(job))
    assert cluster.run(["scancel", "--signal=USR1", "--batch", job]).returncode == 0
    assert cluster.wait(job, seconds=60) == "COMPLETED", log.read_text()
    assert cluster.field(job, "Restarts") == "1"
    assert cluster.processes() == {}


def test_what_is_cancelled_saves_and_stays_away(cluster: Cluster, checkout: Path) -> None:
    program(checkout / "launch" / "torchrun.sh", "trap 'exit 75' TERM USR1; touch waits\nwhile :; do sleep 0.1; done")
    options = ["--nodes=1", "--exclusive", f"--output={checkout}/job.log"]
    job = cluster.submit(*options, "launch/slurm.sbatch", "small.toml", cwd=checkout)
    log = checkout / "job.log"
    until((checkout / "waits").exists, 60, lambda: cluster.state(job))
    assert cluster.run(["scancel", job]).returncode == 0
    assert cluster.wait(job, seconds=60) == "CANCELLED"
    until(lambda: "saved; Slurm has ended the job (" in log.read_text(), 30, log.read_text)
    until(lambda: cluster.processes() == {}, 30, log.read_text)
    assert cluster.state(job) == "CANCELLED"


TELLS = """
echo "$SLURMD_NODENAME $*" >>"told-$SLURM_ARRAY_TASK_ID"
case $* in *2x2x1*) exit $((3 * SLURM_NODEID)) ;; esac
"""


def test_an_array_takes_a_run_of_a_sweep_for_each_of_its_jobs(cluster: Cluster, checkout: Path) -> None:
    program(checkout / "launch" / "torchrun.sh", TELLS)
    (checkout / "sweep").write_text("1 1x2x1 1  # fewer nodes than the job has\n2 1x2x1 2\n2 2x2x1 1\n")
    options = ["--nodes=2", "--exclusive", "--array=0-3", f"--output={checkout}/%a.log"]
    arguments = ["--sweep", "sweep", "--output", "out", "--master", "here:77", "small.toml"]
    array = cluster.submit(*options, "launch/slurm.sbatch", *arguments, cwd=checkout)
    states = [cluster.wait(f"{array}_{index}", seconds=60) for index in range(4)]
    assert states == ["COMPLETED", "COMPLETED", "FAILED", "FAILED"]
    assert [cluster.field(f"{array}_{index}", "ExitCode") for index in (2, 3)] == ["3:0", "2:0"]
    runs = [(1, "1x2x1", 1), (2, "1x2x1", 2), (2, "2x2x1", 1)]
    for index, (nodes, cube, data) in enumerate(runs):
        assert sorted((checkout / f"told-{index}").read_text().splitlines()) == [
            f"node{node} --node-rank {node} --hosts {'node0,node1'[: 6 * nodes - 1]} --nodes {nodes} --master here:77 "
            f"--per-node 2 --module tools.scaling --cube {cube} --data-parallel {data} small.toml -- "
            f"--output out/{nodes}-{cube}-{data}"
            for node in range(nodes)
        ]
    assert "index 3 of the array has no run: sweep has 3, from 0." in (checkout / "3.log").read_text()
    assert cluster.processes() == {}
