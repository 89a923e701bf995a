"""`python -m tools.doctor.nodes`: nodes that come, nodes that do not, and what is told on which of them."""

from __future__ import annotations

import contextlib
import os
import socket
import subprocess
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from pathlib import Path

import pytest
import torch.distributed as dist

from tests.ports import free_port
from tests.strangers import strangers
from tests.tools.doctor.launched import roll
from tools.doctor.nodes import main

ROOT = Path(__file__).parents[3]
HOST = os.uname().nodename


def called(nodes: int = 2, wait: float = 20, port: int | None = None) -> Callable[..., list[str]]:
    """The command of each node, with more words behind it."""
    master = f"127.0.0.1:{port or free_port()}"
    common = ["--nodes", str(nodes), "--master", master, "--wait", str(wait)]

    def arguments(node: int, *more: str) -> list[str]:
        return [*common, "--node-rank", str(node), *(() if "--per-node" in more else ("--per-node", "4")), *more]

    return arguments


def test_all_come(tmp_path: Path) -> None:
    recipe = tmp_path / "recipe.toml"
    recipe.write_text("")
    more = ["--recipe", str(recipe), "--directory", str(tmp_path / "runs"), "--training-port", str(free_port())]
    node = called()
    ended = roll(tmp_path, {0: node(0, *more), 1: node(1, *more)})
    assert [(each.status, each.err) for each in ended.values()] == [(0, ""), (0, "")]
    assert ended[0].out == f"ready: 2 nodes with 4 ranks each: {HOST}, {HOST}\n"
    assert ended[1].out == ""


@pytest.mark.slow
def test_nodes_that_never_come_are_named_on_those_that_did(tmp_path: Path) -> None:
    node = called(nodes=4, wait=3)
    ended = roll(tmp_path, {0: node(0, "--hosts", "a,b,c,d"), 2: node(2, "--hosts", "a,b,c,d")})
    message = (
        "not ready: nodes 1, 3 (b, d) did not come within 3 s; nodes 0, 2 (a, c) did. Look whether they were "
        "started, and for an error in their logs.\n"
    )
    assert {number: (each.status, each.err) for number, each in ended.items()} == {0: (2, message), 2: (2, message)}


def test_another_recipe_is_told_on_node_0_and_on_the_node(tmp_path: Path) -> None:
    recipes = [tmp_path / name / "small.toml" for name in "abc"]
    for recipe, text in zip(recipes, ("same", "other", "same"), strict=True):
        recipe.parent.mkdir()
        recipe.write_text(text)
    node = called(nodes=3)
    ended = roll(tmp_path, {number: node(number, "--recipe", str(recipes[number])) for number in range(3)})
    assert [each.status for each in ended.values()] == [2, 2, 2]
    assert ended[0].err.startswith("not ready: recipe small.toml differs: ")
    assert f" on nodes 0, 2 ({HOST}), " in ended[0].err
    assert ended[0].err.endswith(f" on node 1 ({HOST}). Copy one of them to all nodes.\n")
    assert ended[1].err == ended[0].err
    assert (ended[2].err, ended[2].out) == ("", f"not ready: node 0 ({HOST}) tells why\n")


def test_different_numbers_of_ranks(tmp_path: Path) -> None:
    node = called()
    ended = roll(tmp_path, {0: node(0), 1: node(1, "--per-node", "8")})
    assert [each.status for each in ended.values()] == [2, 2]
    assert ended[0].err == ended[1].err
    assert (
        f"nodes have different numbers of ranks: 4 ranks on node 0 ({HOST}), 8 ranks on node 1 ({HOST})."
        in ended[0].err
    )


def test_a_port_of_the_training_in_use(tmp_path: Path) -> None:
    with socket.create_server(("", 0)) as taken:
        port = taken.getsockname()[1]
        node = called()
        more = ["--training-port", str(port - 2)]
        ended = roll(tmp_path, {0: node(0, *more), 1: node(1, *more)})
    assert [each.status for each in ended.values()] == [2, 2]
    assert f"port {port} of the check before training is in use on node 0 ({HOST})." in ended[0].err


def test_the_port_of_the_roll_in_use(capfd: pytest.CaptureFixture[str]) -> None:
    with socket.create_server(("", 0)) as taken:
        port = taken.getsockname()[1]
        assert main(called(port=port)(0)) == 2
    out, err = capfd.readouterr()
    assert out == ""
    assert err.startswith(f"not ready: port {port} of the roll call (--master) is in use on node 0 ({HOST}). End what")


def test_a_master_that_cannot_be_reached(capfd: pytest.CaptureFixture[str]) -> None:
    port = free_port()
    assert main(called(port=port, wait=0.3)(1)) == 2
    out, err = capfd.readouterr()  # of the process: PyTorch's warnings would show
    assert out == ""
    assert err.startswith(f"not ready: the master 127.0.0.1:{port} did not answer within 0.3 s (Connection refused).")
    assert err.count("\n") == 1


def test_a_master_that_nobody_knows(capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    def unknown(*_: object, **__: object) -> list[object]:
        raise socket.gaierror(socket.EAI_NONAME, "Name or service not known")

    monkeypatch.setattr(socket, "getaddrinfo", unknown)
    call = ["--nodes", "2", "--node-rank", "1", "--master", "nowhere.invalid:9", "--per-node", "1", "--wait", "100"]
    assert main(call) == 2
    assert capfd.readouterr().err == (
        "not ready: the master's name 'nowhere.invalid' cannot be resolved: Name or service not known. Give a name "
        "that every node knows, or an address.\n"
    )


def test_the_same_number_twice(tmp_path: Path) -> None:
    """The roll stays open for both, because node 2 comes when one of them has been sent away."""
    node = called(nodes=3)
    ended = roll(tmp_path, {0: node(0), 1: node(1), 2: node(1), 3: node(2)}, last_after=(1, 2))
    twins = sorted((ended[1], ended[2]), key=lambda each: each.status == 0)
    assert "another process has come as node 1. Give each node a --node-rank of its own." in twins[0].err
    assert [twins[0].status, twins[1].status, ended[0].status, ended[3].status] == [2, 0, 0, 0]


@pytest.mark.slow
def test_strangers_take_no_place_and_hold_nobody(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One counts node 1's number up, as nodes once did; others set what nodes do, say nothing, or talk nonsense, of
    which two a gigabyte."""
    port = free_port()
    node = called(port=port, wait=120)
    words = {number: node(number) for number in range(2)}
    monkeypatch.setenv("TENSOR3D_SECRET", "of this job alone")
    with contextlib.ExitStack() as stack, ThreadPoolExecutor() as pool:
        command = [sys.executable, "-m", "tools.doctor.nodes"]
        first = subprocess.Popen([*command, *words[0]], cwd=ROOT, text=True, stdout=subprocess.PIPE)
        stack.callback(first.kill)
        store = pool.submit(dist.TCPStore, "127.0.0.1", port, timeout=timedelta(seconds=60)).result()
        store.add("tensor3d/number/1", 1)
        for key in ("number/1", "meeting/1", "versions/1", "machines/0", "meeting/verdict", "versions/verdict", "told"):
            store.set(f"tensor3d/nodes/{key}", '{"findings": [], "data": ["a", "b"]}')
        stack.enter_context(strangers(port, idle=200))
        second = subprocess.Popen([*command, *words[1]], cwd=ROOT)
        stack.callback(second.kill)
        assert (second.wait(200), first.wait(200)) == (0, 0)
        assert first.stdout is not None
        assert first.stdout.read() == f"ready: 2 nodes with 4 ranks each: {HOST}, {HOST}\n"
        first.stdout.close()


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"--nodes": "0"}, "--nodes must be at least 1. Got 0."),
        ({"--per-node": "0"}, "--per-node must be at least 1. Got 0."),
        ({"--node-rank": "2"}, "--node-rank must be from 0 to 1. Got 2."),
        ({"--master": "node0"}, "--master must be HOST:PORT with a port from 1 to 65535, like node0:29501."),
        ({"--master": ":29501"}, "Got ':29501'."),
        ({"--master": "a:65536"}, "Got 'a:65536'."),
        ({"--wait": "nan"}, "--wait must be a number of seconds above 0. Got nan."),
        ({"--training-port": "65534"}, "--training-port must be from 1 to 65533. Got 65534."),
        ({"--hosts": "a"}, "--hosts must name all 2 nodes with commas between them. Got 'a'."),
    ],
)
def test_bad_calls(changed: dict[str, str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    options = {"--nodes": "2", "--node-rank": "0", "--master": "a:29501", "--per-node": "1"} | changed
    assert main([word for pair in options.items() for word in pair]) == 2
    assert message in capsys.readouterr().err
