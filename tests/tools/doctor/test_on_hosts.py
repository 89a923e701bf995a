"""The doctor on two hosts with two ranks each: what it says of folders, of their wire, and of a cut cable."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

from tests.hosts import INTERFACE, Host, hosts, why_not

pytestmark = pytest.mark.slow
ROOT = Path(__file__).parents[3]
PORT = 29500


@pytest.fixture(scope="module")
def own(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of which each host has its own version."""
    return tmp_path_factory.mktemp("own")


@pytest.fixture(scope="module")
def pair(own: Path) -> Iterator[tuple[Host, ...]]:
    if reason := why_not():
        pytest.skip(reason)
    with hosts(2, own=[own]) as made:
        yield made


def both(pair: Sequence[Host], *more: str) -> list[tuple[int, str, str]]:
    """Status and output of torchrun on each host."""
    variables = {**os.environ, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": INTERFACE}
    started = [
        host.popen(
            [
                *(
                    sys.executable,
                    "launch/torchrun.py",
                    "--nnodes=2",
                    "--nproc-per-node=2",
                    f"--node-rank={host.number}",
                ),
                *(f"--master-addr={pair[0].address}", f"--master-port={PORT}", f"--local-addr={host.address}"),
                *("-m", "tools.doctor", "--quick", "--wait", "60", *more),
            ],
            env=variables,
            cwd=ROOT,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for host in pair
    ]
    outputs = [process.communicate(timeout=120) for process in started]
    return [(process.returncode, *output) for process, output in zip(started, outputs, strict=True)]


def test_a_folder_that_is_not_shared(pair: tuple[Host, ...], own: Path, tmp_path: Path) -> None:
    ended = both(pair, "--cube", "1x2x2", "--directory", str(tmp_path), str(own))
    assert [status for status, _, _ in ended] == [2, 2]
    told = [line for _, _, err in ended for line in err.splitlines() if line.startswith("not ready: ")]
    assert told == [
        f"not ready: directory {own} is another place on node 1 (node1) than on node 0 (node0): a file written on this "
        "one is not seen there. Checkpoints need one place for all nodes; choose one that they share."
    ]
    assert [list(host.owned(own).iterdir()) for host in pair] == [[], []]


def test_a_slow_wire_and_what_to_do(pair: tuple[Host, ...]) -> None:
    for host in pair:
        host.slow("20mbit")
    (status, out, err), (other, quiet, _) = both(pair, "--cube", "2x1x2", "--wire", "z,data,y,x")
    assert (status, other, quiet) == (0, 0, ""), err
    assert out.splitlines()[-1] == "ready: 4 ranks on 2 nodes"
    assert re.search(r"axis z is \d+ x slower than x; it crosses nodes: place it inside \(--wire data,x,y,z\)\.", out)
    crosses = {row[0]: row[2] for line in out.splitlines() if len(row := line.split()) >= 7 and row[0] in "xz"}
    assert crosses == {"x": "no", "z": "yes"}


def test_a_master_out_of_reach(pair: tuple[Host, ...]) -> None:
    call = [sys.executable, "-m", "tools.doctor.nodes", "--nodes", "2", "--per-node", "2", "--wait", "5"]
    pair[0].cut()
    ended = [
        host.popen(
            [*call, "--node-rank", str(host.number), "--master", f"{pair[0].address}:{PORT}"],
            cwd=ROOT,
            stderr=subprocess.PIPE,
            text=True,
        )
        for host in pair
    ]
    told = [process.communicate(timeout=60)[1] for process in ended]
    pair[0].mend()
    assert [process.returncode for process in ended] == [2, 2]
    # PyTorch may warn before it that a name cannot be found out.
    told = [err.splitlines()[-1] for err in told]
    assert told[0].startswith("not ready: node 1 did not come within 5 s; node 0 (node0) did.")
    assert told[1].startswith(f"not ready: the master {pair[0].address}:{PORT} did not answer within 5 s (")
