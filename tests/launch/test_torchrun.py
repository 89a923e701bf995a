"""launch/torchrun.sh: what it would run on each node, and what it refuses before anything is started."""

from __future__ import annotations

import os
import shlex
import shutil
import subprocess
from pathlib import Path

import pytest

from tests.programs import ran

LAUNCH = Path(__file__).parents[2] / "launch"
NODE = "launch/torchrun.py --nnodes=2 --nproc-per-node=4 --node-rank=1 --master-addr=127.0.0.1 --master-port={port} "
NODE += "--rdzv-conf=timeout=300 --local-addr=127.0.0.1"


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    (tmp_path / "launch").mkdir()
    for name in ("torchrun.sh", "common.sh", "torchrun.py", "net_interface.py"):
        shutil.copy(LAUNCH / name, tmp_path / "launch")
    (tmp_path / "small.toml").write_text("")
    return tmp_path.resolve()


def torchrun(checkout: Path, arguments: str, **variables: str) -> subprocess.CompletedProcess[str]:
    kept = {
        name: value for name, value in os.environ.items() if not name.endswith(("OMP_NUM_THREADS", "SOCKET_IFNAME"))
    }
    return ran(
        ["launch/torchrun.sh", *shlex.split(arguments)],
        cwd=checkout,
        env={**kept, "MALLOC_MMAP_MAX_": "65536", **variables},
    )


def test_the_commands_of_a_node_and_what_its_ranks_are_told(checkout: Path) -> None:
    call = "--nodes 2 --node-rank 1 --master 127.0.0.1:4000 --hosts a,b --cube 2x2x2 --dry-run "
    call += "small.toml --run.steps 3 --output out"
    lines = torchrun(checkout, call, OMP_NUM_THREADS="1").stdout.splitlines()
    interface = "GLOO_SOCKET_IFNAME=lo NCCL_SOCKET_IFNAME=lo python3"
    training = "-m tools.pretrain small.toml --cube 2x2x2 --data-parallel 1 --run.steps 3 --output out"
    assert lines[0] == (
        f"{interface} -m tools.doctor.nodes --nodes 2 --node-rank 1 --master 127.0.0.1:4001 --training-port 4000 "
        "--per-node 4 --wait 300 --recipe small.toml --hosts a\\,b --directory out"
    )
    assert lines[1] == (
        f"{interface} {NODE.format(port=4002)} -m tools.doctor --quick --cube 2x2x2 --data-parallel 1 --recipe "
        "small.toml --wait 300 --directory out"
    )
    assert lines[2] == f"{interface} {NODE.format(port=4000)} {training}"
    assert lines[3:] == [
        f"RANK={4 + local} LOCAL_RANK={local} WORLD_SIZE=8 LOCAL_WORLD_SIZE=4 GROUP_RANK=1 MASTER_ADDR=127.0.0.1 "
        f"MASTER_PORT=4000 {interface} {training}"
        for local in range(4)
    ]


def test_node_0_prepares_and_a_node_alone_calls_no_roll(checkout: Path) -> None:
    first, check, command, *ranks = torchrun(checkout, "--cube 1x2x1 --dry-run small.toml").stdout.splitlines()
    assert first.endswith("-m tools.pretrain small.toml --cube 1x2x1 --data-parallel 1 --prepare-only")
    assert "-m tools.doctor --quick" in check
    assert "--master-addr=127.0.0.1 --master-port=29500" in command
    assert len(ranks) == 2


def test_c10d_needs_no_number(checkout: Path) -> None:
    call = (
        "--nodes 2 --rendezvous c10d --master 127.0.0.1 --max-restarts 2 --no-doctor --dry-run --cube 2x1x1 small.toml"
    )
    command, rank = torchrun(checkout, f"{call} --output out").stdout.splitlines()
    assert "--rdzv-backend=c10d --rdzv-endpoint=127.0.0.1:29500 --rdzv-id=small-2x1x1-1" in command
    assert "--max-restarts=2" in command
    assert command.endswith("--output out --resume auto")
    assert rank.startswith("RANK=? LOCAL_RANK=0 WORLD_SIZE=2")


@pytest.mark.parametrize(
    ("master", "address", "port"),
    [("h:1", "h", "1"), ("h", "h", "29500"), ("[::1]:7", "::1", "7"), ("::1", "::1", "29500")],
)
def test_masters(checkout: Path, master: str, address: str, port: str) -> None:
    told = torchrun(checkout, f"--master {master} --no-doctor --dry-run small.toml").stdout
    assert f"--master-addr={address} --master-port={port} " in told


@pytest.mark.parametrize(
    ("call", "message"),
    [
        ("small.toml --nodes 2 --master h", "--node-rank is needed: which of the 2 nodes this is, from 0"),
        ("small.toml --nodes 2 --node-rank 2 --master h", "from 0 to 1. Got '2'"),
        ("small.toml --nodes 2 --node-rank 0", "--master HOST[:PORT] is needed"),
        ("small.toml --nodes 0", "--nodes must be a whole number from 1 to 9999. Got '0'"),
        ("small.toml --nodes 2 --node-rank 0 --master h --cube 3x1x1", "needs 3 processes, which 2 nodes cannot share"),
        (
            "small.toml --nodes 2 --node-rank 0 --master h --cube 2x2x2 --per-node 2",
            "needs 8 processes, and 2 nodes of 2 are 4",
        ),
        ("small.toml --master h:0", "from 1 to 65533, and the two above it free. Got '0'"),
        ("small.toml --master h:65534", "Got '65534'"),
        ("small.toml --master :1", "has no host"),
        ("small.toml --rendezvous etcd", "must be static or c10d. Got 'etcd'"),
        ("small.toml --numa all", "Got 'all'"),
        ("small.toml --max-restarts 1", "--max-restarts needs --output DIR"),
        ("small.toml --dry-run", "for one process: run them with launch/local.sh"),
        ("--nodes", "--nodes needs a value"),
        ("--interfaces lo small.toml", "unknown option '--interfaces' before the recipe"),
        ("", "a recipe is needed: launch/torchrun.sh [OPTIONS] RECIPE"),
        ("other.toml", "recipe 'other.toml' does not exist"),
        (
            "--nodes 2 --node-rank 0 --master 127.0.0.1 --interface nowhere --cube 2x1x1 small.toml",
            "has no interface 'nowhere' with an IPv4 address. It has lo",
        ),
    ],
)
def test_bad_calls(checkout: Path, call: str, message: str) -> None:
    done = torchrun(checkout, call)
    assert done.returncode == 2
    assert message in done.stderr
    assert len(done.stderr.splitlines()) == 1


@pytest.mark.parametrize(
    ("content", "mode", "message"),
    [
        ("a secret of the job\nmore\n", 0o600, ""),
        ("without an end of line", 0o400, ""),
        ("a secret of the job\n", 0o644, "can be read by others (-rw-r--r--): chmod 600 'secret'"),
        ("a secret of the job\n", 0o620, "can be read by others (-rw--w----)"),
        ("short\n", 0o600, "must have 16 letters or more. Got 5."),
        ("\na secret of the job\n", 0o600, "Got 0."),
        (None, 0o600, "--secret-file 'secret' does not exist, or cannot be read"),
    ],
)
def test_secret_files(checkout: Path, content: str | None, mode: int, message: str) -> None:
    if content is not None:
        (checkout / "secret").write_text(content)
        (checkout / "secret").chmod(mode)
    done = torchrun(checkout, "--secret-file secret --no-doctor --dry-run small.toml")
    assert message in done.stderr
    assert done.returncode == (2 if message else 0), done.stderr
    assert "a secret of" not in done.stdout + done.stderr


def test_what_is_open_to_others_is_said(checkout: Path) -> None:
    python = checkout / ".venv" / "bin" / "python"
    python.parent.mkdir(parents=True)
    python.write_text('#!/bin/sh\n[ "$1" != launch/net_interface.py ] || echo lo 127.0.0.1\n')
    python.chmod(0o755)
    call = "--nodes 2 --node-rank 1 --master 127.0.0.1 --no-doctor --cube 2x1x1 small.toml"
    assert "the job has no secret: whoever reaches 127.0.0.1:29500 can end it." in torchrun(checkout, call).stderr
    assert "secret" not in torchrun(checkout, call, TENSOR3D_SECRET="a word of the job").stderr
    told = torchrun(checkout, f"--rendezvous c10d {call}", TENSOR3D_SECRET="a word of the job").stderr
    assert "--rendezvous c10d is PyTorch's own, which unpickles what it is sent" in told


def test_a_master_that_nobody_knows(checkout: Path) -> None:
    done = torchrun(checkout, "--nodes 2 --node-rank 1 --master no.such.host.invalid --wait 1 --cube 2x1x1 small.toml")
    assert done.returncode == 2
    assert "the master 'no.such.host.invalid' is unknown here" in done.stderr
