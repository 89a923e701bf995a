"""What is made of reports: versions, nodes, addresses, clocks, speeds, folders. No process is started."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path

import pytest

from tools.doctor.checks import State, judge_seen, judge_states, state_of
from tools.doctor.facts import MISSING, NodeFacts, hash_of, read_links
from tools.doctor.rules import (
    Finding,
    MemberNames,
    as_lines,
    judge_addresses,
    judge_calls,
    judge_clocks,
    judge_nodes,
    judge_products,
    judge_versions,
    numbers,
    odd_ones,
)

RANKS = MemberNames(kind="rank", per_node=2, hosts=("a", "a", "b", "b"))
NODES = MemberNames(kind="node", hosts=("a", "b", "c"))
NODE = NodeFacts(host="a", ranks=8, interfaces=("lo", "eth0"), address="10.0.0.1")


def nodes(*changes: dict[str, object]) -> list[NodeFacts]:
    """Nodes that differ from `NODE` in their host and in these."""
    return [replace(NODE, host="abc"[i], **change) for i, change in enumerate(changes)]  # type: ignore[arg-type]


def test_names() -> None:
    assert numbers([0, 1, 2, 5, 7, 8]) == "0-2, 5, 7-8"
    assert RANKS.one(3) == "rank 3 (node 1, b)"
    assert RANKS.many([3, 0, 1, 2]) == "ranks 0-3 (nodes 0-1, a, b)"
    assert NODES.many([0, 2]) == "nodes 0, 2 (a, c)"
    assert MemberNames(kind="node").one(4) == "node 4"
    many = MemberNames(kind="node", hosts=tuple(f"h{i}" for i in range(9)))
    assert many.many(range(9)) == "nodes 0-8 (h0, h1, h2, h3, h4, h5, 3 more hosts)"


def test_the_last_line_says_not_ready() -> None:
    slow, bad, worse = Finding(text="slow", warning=True), Finding(text="bad"), Finding(text="worse")
    assert as_lines([slow], "doctor") == "doctor: warning: slow"
    assert as_lines([slow, bad], "doctor") == "doctor: warning: slow\nnot ready: bad"
    assert as_lines([bad, worse], "doctor") == "doctor: bad\ndoctor: worse\nnot ready: 2 findings, above"


def test_equal_versions() -> None:
    assert judge_versions([{"torch": "2.13", "recipe r.toml": "ab"}] * 4, RANKS) == []


def test_what_differs_is_told_with_who_has_which() -> None:
    reports = [{"torch": "2.13", "numpy": "2"}, {"torch": "2.13", "numpy": "2"}, {"torch": "2.12"}, {"torch": "2.13"}]
    torch, numpy = judge_versions(reports, RANKS)
    assert torch.text == (
        "torch differs: 2.13 on ranks 0-1, 3 (nodes 0-1, a, b), 2.12 on rank 2 (node 1, b). Install the same "
        "everywhere."
    )
    assert torch.about == (2,)
    assert numpy.text.startswith("numpy differs: 2 on ranks 0-1 (node 0, a), none on ranks 2-3 (node 1, b).")
    assert numpy.about == (2, 3)


def test_recipes() -> None:
    (other,) = judge_versions([{"recipe r.toml": "ab"}, {"recipe r.toml": "cd"}], RANKS)
    assert other.text.endswith("Copy one of them to all nodes.")
    (lost,) = judge_versions([{"recipe r.toml": "ab"}, {"recipe r.toml": MISSING}], RANKS)
    assert lost == Finding(
        text="recipe r.toml cannot be read on rank 1 (node 0, a). Put the same file there on every node.", about=(1,)
    )


@pytest.mark.parametrize(
    ("values", "odd"),
    [("aaaa", ()), ("abaa", (1,)), ("baaa", (0,)), ("aabb", (2, 3)), ("bbaa", (2, 3)), ("abcd", (1, 2, 3))],
)
def test_who_is_the_odd_one(values: str, odd: tuple[int, ...]) -> None:
    assert odd_ones(values) == odd


def test_calls() -> None:
    assert judge_calls(["cube 1x2x2"] * 4, RANKS) == []
    (found,) = judge_calls(["cube 1x2x2", "cube 1x2x2", "cube 2x2x1", "cube 1x2x2"], RANKS)
    assert found.text.endswith("cube 2x2x1 on rank 2 (node 1, b). Give the same on every node.")


def test_nodes_alike() -> None:
    assert judge_nodes(nodes({}, {}, {}), NODES) == []


def test_different_numbers_of_ranks_and_gpus() -> None:
    two, one = ("H200", "H200"), ("H200",)
    ranks, gpus = judge_nodes(
        nodes({"ranks": 2, "gpus": two}, {"ranks": 1, "gpus": one}, {"ranks": 2, "gpus": two}), NODES
    )
    assert ranks.text.startswith(
        "nodes have different numbers of ranks: 2 ranks on nodes 0, 2 (a, c), 1 rank on node 1"
    )
    assert gpus.text.startswith(
        "nodes have different numbers of GPUs: 2 GPUs on nodes 0, 2 (a, c), 1 GPU on node 1 (b)."
    )
    assert (ranks.about, gpus.about) == ((1,), (1,))
    assert not ranks.warning
    assert not gpus.warning


def test_gpus() -> None:
    few = judge_nodes(nodes({"gpus": ("H200",) * 4}, {"gpus": ("H200",) * 4}), NODES)
    assert [(each.warning, each.about) for each in few] == [(True, (0,)), (True, (1,))]
    assert few[0].text == "node 0 (a) has 4 GPUs for 8 ranks: they use the CPU."
    (kinds,) = judge_nodes(nodes({"gpus": ("H200",) * 8}, {"gpus": ("A100",) * 8}), NODES)
    assert (kinds.warning, kinds.text) == (
        True,
        "GPUs differ: H200 on node 0 (a), A100 on node 1 (b). The slowest sets the pace.",
    )
    (broken,) = judge_nodes(nodes({}, {"gpu_error": "driver too old"}), NODES)
    assert (broken.warning, broken.text) == (False, "the GPUs of node 1 (b) cannot be used: driver too old")


@pytest.mark.parametrize("address", ["127.0.1.1", "::1", ""])
def test_a_host_name_that_leads_nowhere(address: str) -> None:
    """Debian gives a host's own name the address 127.0.1.1, where no other node reaches it."""
    (found,) = judge_addresses(nodes({}, {"address": address}), NODES)
    assert found.about == (1,)
    assert not found.warning
    assert found.text.startswith(
        "the host name of node 1 (b) " + (f"resolves to {address} " if address else "does not")
    )
    assert found.text.endswith("Give --interface (GLOO_SOCKET_IFNAME) one of lo, eth0.")
    assert judge_addresses(nodes({"address": address}), NODES) == [], "on one node it does not matter"
    assert judge_addresses(nodes({}, {"address": address, "interface": "eth0"}), NODES) == []


def test_an_interface_that_is_not_there() -> None:
    (found,) = judge_addresses(nodes({"interface": "eth0"}, {"interface": "ib0"}), NODES)
    assert found.text.startswith("node 1 (b) has no network interface ib0 (GLOO_SOCKET_IFNAME). It has lo, eth0;")


def test_clocks_are_warned_of_when_they_are_surely_off() -> None:
    (found,) = judge_clocks({1: (-3.2, 0.1), 2: (1.05, 0.1)}, NODES)
    assert found.warning
    assert found.text.startswith("the clock of node 1 (b) is 3.2 s behind that of node 0")


def test_slow_ranks() -> None:
    assert judge_products([1.0, 1.9, 1.0, 1.0], RANKS) == []
    (found,) = judge_products([1.0, 1.0, 5.0, 1.0], RANKS)
    assert (found.warning, found.about) == (True, (2,))
    assert found.text.startswith("rank 2 (node 1, b) computed up to 5.0 x slower than the median rank")
    five = MemberNames(kind="rank", per_node=2, hosts=("a", "a", "b", "b", "c"))
    (found,) = judge_products([1.0, 1.0, 1.0, 3.0, 5.0], five)
    assert found.about == (3, 4)
    assert "up to 5.0 x slower" in found.text  # the slower of the two


def state(base: str, error: str = "", folder: str = "/data/runs") -> list[State]:
    return [{"folder": folder, "base": base, "error": error}]


def test_directories() -> None:
    assert judge_states([state("/data")] * 3, NODES) == []
    (lost,) = judge_states([state("/data/runs"), state("/data/runs"), state("/")], NODES)
    assert lost.about == (2,)
    assert lost.text.startswith("directory /data/runs is missing on node 2 (c) and there on nodes 0-1 (a, b).")
    (parent,) = judge_states([state("/"), state("/data"), state("/data")], NODES)
    assert parent.text.startswith("directory /data, for /data/runs, is missing on node 0 (a) and there on nodes 1-2")
    (refused,) = judge_states([state("/data"), state("/data", "Read-only file system"), state("/data")], NODES)
    assert refused.text == "directory /data/runs cannot be written on node 1 (b): /data: Read-only file system."
    (paths,) = judge_states([state("/"), state("/", folder="/home/runs")], NODES)
    assert paths.text.startswith("a directory has different paths: /data/runs on node 0 (a), /home/runs on node 1 (b).")


def test_links_to_nothing_are_no_folders_to_be_made(tmp_path: Path) -> None:
    (tmp_path / "runs").symlink_to("gone")
    (tmp_path / "ring").symlink_to("ring")
    for folder, target in ((tmp_path / "runs" / "one", "gone"), (tmp_path / "ring", "ring")):
        assert state_of(folder)["error"] == f"is a link to {target!r}, which is not there"
    assert state_of(tmp_path / "a" / "b") == {"folder": f"{tmp_path}/a/b", "base": str(tmp_path), "error": ""}


def test_a_recipe_that_is_a_fifo_or_a_device_is_read_by_nobody(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "a.toml")
    assert {hash_of(path) for path in (tmp_path / "a.toml", Path("/dev/zero"), tmp_path)} == {MISSING}


def test_another_place_of_the_same_name() -> None:
    folders = [Path("/data"), Path("/scratch")]
    assert judge_seen([[True, True]] * 2, folders, NODES) == []
    (found,) = judge_seen([[True, True], [True, False]], folders, NODES)
    assert found.text.startswith("directory /scratch is another place on node 1 (b) than on node 0 (a): a file written")


TOPOLOGY = """
\t\x1b[4mGPU0\tGPU1\tGPU2\tNIC0\tCPU Affinity\tNUMA Affinity\x1b[0m
GPU0\t X \tNV18\tNV18\tPIX\t0-55\t0
GPU1\tNV18\t X \tSYS\tSYS\t0-55\t0
GPU2\tNV18\tSYS\t X \tSYS\t0-55\t0
NIC0\tPIX\tSYS\tSYS\t X

Legend:

  X    = Self
"""


def test_links_between_gpus() -> None:
    assert read_links(TOPOLOGY) == ("NV18", "SYS")
    assert read_links("no devices were found") == ()


def test_a_gpu_for_each_rank_may_be_asked_for() -> None:
    nodes = [NodeFacts(host=host, ranks=2, gpus=("H100",), address="10.0.0.1") for host in "ab"]
    names = MemberNames(kind="node", hosts=("a", "b"))
    assert all(finding.warning for finding in judge_nodes(nodes, names))
    found = judge_nodes(nodes, names, gpu=True)
    assert [finding.text for finding in found] == [
        "node 0 (a) has 1 GPU for 2 ranks, and --gpu needs one for each.",
        "node 1 (b) has 1 GPU for 2 ranks, and --gpu needs one for each.",
    ]
    assert not any(finding.warning for finding in found)
    none = [NodeFacts(host=host, ranks=2, address="10.0.0.1") for host in "ab"]
    assert len(judge_nodes(none, names, gpu=True)) == 2
