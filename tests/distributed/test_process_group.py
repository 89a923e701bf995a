"""How started processes find each other: the variables, and a restart on a store that remembers the dead."""

from __future__ import annotations

import contextlib
import functools
import gc
import os
import re
import socket
import threading
import time
from collections.abc import Callable
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from torch import nn

from tensor3d import Cube
from tensor3d.distributed.cube_shape import AxisName
from tensor3d.distributed.job_store import KeyedStore, host_store
from tensor3d.distributed.process_group import connect, place
from tensor3d.live_objects import objects_of
from tests.listeners import READABLE, listeners
from tests.ranks import RankError, run_ranks

# A port at which nobody answers: whoever tries to connect before looking at the other variables is found out.
GOOD = {"WORLD_SIZE": "2", "RANK": "1", "LOCAL_RANK": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "9"}


@pytest.mark.parametrize("name", ["RANK", "LOCAL_RANK", "MASTER_PORT"])
@pytest.mark.parametrize("value", [None, "", "two", "1.0"])
def test_missing_and_malformed_numbers(name: str, value: str | None) -> None:
    environment = {key: text for key, text in GOOD.items() if key != name} | ({} if value is None else {name: value})
    with pytest.raises(ValueError, match=f"{name} must be a whole number, as torchrun sets it\\. Got {value!r}"):
        connect(2, environment=environment)
    assert not dist.is_initialized()


def test_the_address_of_rank_0_is_needed() -> None:
    with pytest.raises(ValueError, match="MASTER_ADDR is not set"):
        connect(2, environment={key: text for key, text in GOOD.items() if key != "MASTER_ADDR"})


@pytest.mark.parametrize("world", ["x", "-"])
def test_a_malformed_world_size(world: str) -> None:
    with pytest.raises(ValueError, match="WORLD_SIZE must be a whole number"):
        connect(2, environment=GOOD | {"WORLD_SIZE": world})


@pytest.mark.parametrize("rank", ["2", "-1"])
def test_a_rank_outside_of_the_world(rank: str) -> None:
    with pytest.raises(ValueError, match=rf"RANK must be at least 0 and below WORLD_SIZE=2\. Got {rank}"):
        connect(2, environment=GOOD | {"RANK": rank})


def test_another_number_of_processes_than_the_cube_needs() -> None:
    with pytest.raises(ValueError, match=r"needs \b8\b processes.*WORLD_SIZE=2\. Start \b8\b.*2"):
        connect(8, environment=GOOD)


def test_without_variables_only_one_process_is_possible() -> None:
    with pytest.raises(ValueError, match=r"8 processes are needed, and WORLD_SIZE is not set\. Start them"):
        connect(8, environment={})
    assert connect(1, environment={}).type in ("cpu", "cuda")
    assert not dist.is_initialized()


def test_a_cube_from_the_environment_checks_its_sizes_first(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in GOOD.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(ValueError, match="WORLD_SIZE=2"):
        Cube.from_env(2, 2, 2)
    with pytest.raises(ValueError, match=r"axis x.*whole number"):
        Cube.from_env(0)
    monkeypatch.delenv("WORLD_SIZE")
    assert Cube.from_env().mesh is None


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("MASTER_PORT", "0", "MASTER_PORT must be from 1 to 65535, the same for all ranks. Got 0"),
        ("MASTER_PORT", "70000", "Got 70000"),
        ("MASTER_ADDR", "", "MASTER_ADDR must be the host name or the address of rank 0. Got ''"),
        ("MASTER_ADDR", "tcp://node0", "Got 'tcp://node0'"),
        ("MASTER_ADDR", "node0 ", "Got 'node0 '"),
    ],
)
def test_where_nobody_can_meet(name: str, value: str, message: str) -> None:
    with pytest.raises(ValueError, match=re.escape(message)):
        connect(2, environment=GOOD | {name: value})


def test_the_place_of_a_rank() -> None:
    assert place({}) is None
    own = place(GOOD | {"WORLD_SIZE": "8", "RANK": "5", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "4"})
    assert own is not None
    assert (own.rank, own.world, own.local_rank, own.per_node, own.node) == (5, 8, 1, 4, 1)
    assert (own.address, own.port, own.hosted) == ("127.0.0.1", 9, False)
    hosted = place(GOOD | {"TORCHELASTIC_USE_AGENT_STORE": "True"})
    assert hosted is not None
    assert hosted.hosted
    with pytest.raises(ValueError, match=r"LOCAL_RANK.*0 and below LOCAL_WORLD_SIZE=2.*2"):
        place(GOOD | {"LOCAL_RANK": "2", "LOCAL_WORLD_SIZE": "2"})
    with pytest.raises(ValueError, match=r"MASTER_ADDR is not set"):
        place({key: text for key, text in GOOD.items() if key != "MASTER_ADDR"})


def _attempt(port: int, restart: int) -> float:
    """One attempt of a job of two whose store is hosted elsewhere, as torchrun's agent does; a sum over both."""
    rank = dist.get_rank()
    dist.destroy_process_group()
    time.sleep(0.5 * rank)  # rank 0 is there first and finds in the store what was left by the rank 1 before
    environment = {
        "WORLD_SIZE": "2",
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "LOCAL_WORLD_SIZE": "1000",  # more than there are devices anywhere: gloo
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "TORCHELASTIC_USE_AGENT_STORE": "True",
        # As on two nodes: the agent of rank 0 saw its rank die and counts it, that of rank 1 does not.
        "TORCHELASTIC_RESTART_COUNT": str(restart * (1 - rank)),
    }
    device = connect(2, timeout=timedelta(seconds=10), environment=environment)
    assert device.type == "cpu"
    total = torch.tensor([rank + 1.0])
    dist.all_reduce(total, group=Cube(1, 2, 1, device="cpu").axis("y").group)
    return float(total)


def test_a_restart_does_not_wait_for_the_dead() -> None:
    """The ranks of `run_ranks` leave without a farewell, so their addresses stay in the store, as after kill -9."""
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    known = []
    for restart in (0, 1):
        assert run_ranks(2, _attempt, store.port, restart, timeout=60) == [3.0, 3.0]
        known.append(store.num_keys())
    assert known[1] > known[0], "the second attempt had no keys of its own"


def _leave(_: int) -> tuple[float, bool]:
    """Rank 1 comes late: how long this rank was held, and whether a process group is left."""
    cube = Cube(1, 2, 1)
    cube._has_connected = True  # as from_env's, with which the process group ends
    time.sleep(1.0 * cube.rank)
    before = time.monotonic()
    cube.close()
    held = time.monotonic() - before
    cube.close()  # a second time nothing happens
    return held, dist.is_initialized()


@pytest.mark.slow
def test_nobody_leaves_before_all_are_done() -> None:
    (first, left_open), (_, _) = run_ranks(2, _leave, 0)
    assert first > 0.5, "rank 0 left while rank 1 was at work"
    assert not left_open


def _leave_alone(_: int) -> float:
    """Rank 1 never comes."""
    cube = Cube(1, 2, 1)
    cube._has_connected = True  # as from_env's
    before = time.monotonic()
    if cube.rank == 0:
        cube.close(timedelta(seconds=1))
    return time.monotonic() - before


@pytest.mark.slow
def test_who_never_comes_is_not_waited_for_without_end() -> None:
    assert 0.9 < run_ranks(2, _leave_alone, 0)[0] < 10


def _laid_on_nodes(per_node: list[int], wire: tuple[AxisName, ...] | None) -> str:
    rank = dist.get_rank()
    variables = {"WORLD_SIZE": str(len(per_node)), "RANK": str(rank), "LOCAL_WORLD_SIZE": str(per_node[rank])}
    os.environ.update(variables)
    cube = Cube.from_env(1, 1, 2, 2, wire=wire)
    return f"{','.join(cube.shape.wire)} {cube.ranks_per_node} {cube.axis('z').ranks}"


def test_axes_are_laid_on_the_nodes_that_there_are() -> None:
    assert run_ranks(4, _laid_on_nodes, [2] * 4, None)[3] == "data,x,y,z 2 (2, 3)"
    opposite: tuple[AxisName, ...] = ("z", "y", "x", "data")
    assert run_ranks(4, _laid_on_nodes, [2] * 4, opposite)[3] == "z,y,x,data 2 (1, 3)"
    assert run_ranks(4, _laid_on_nodes, [3, 3, 3, 1], opposite)[3] == "z,y,x,data None (1, 3)"


def test_nodes_with_different_numbers_of_ranks() -> None:
    with pytest.raises(RankError, match=r"nodes.*1 to \b3\b ranks"):
        run_ranks(4, _laid_on_nodes, [3, 3, 3, 1], None)


# --- what strangers set, and who reaches a store ------------------------------------------------------------------

SECRET = b"of this job alone"


@pytest.fixture
def store() -> dist.TCPStore:
    return dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)


def _sealed(store: dist.Store, part: str, key: str, value: str, secret: bytes = SECRET) -> bytes:
    """What the store holds after a member of a job has set it, read as anybody can."""
    KeyedStore(store, part, secret).set(key, value)
    return dist.PrefixStore(part, store).get(key)


STRANGERS: dict[str, Callable[[dist.Store], bytes]] = {
    "plain": lambda store: b"node 7 is to blame",
    "empty": lambda store: b"",
    "no text": lambda store: b"\xff\xfe" * 50,
    "a seal alone": lambda store: b"0" * 64,
    "another secret": lambda store: _sealed(store, "watch 1", "verdict", "theirs", b"of another job"),
    "of another key": lambda store: _sealed(store, "watch 1", "beat/1", "theirs"),
    "of another part": lambda store: _sealed(store, "watch 2", "verdict", "theirs"),
    "cut off": lambda store: _sealed(store, "watch 1", "beat/1", "theirs")[:-1],
    "another value behind the seal": lambda store: _sealed(store, "watch 1", "beat/1", "t")[:64] + b"theirs",
    # Part and key end elsewhere.
    "of a longer part": lambda store: _sealed(store, "watch 1/", "verdict"[1:], "theirs"),
}


@pytest.mark.parametrize("forge", STRANGERS.values(), ids=STRANGERS)
def test_what_a_stranger_sets_counts_as_not_there(forge: Callable[[dist.Store], bytes], store: dist.TCPStore) -> None:
    forged = forge(store)
    for strict in (True, False):
        ours = KeyedStore(store, "watch 1", SECRET, strict=strict)
        dist.PrefixStore("watch 1", store).set("verdict", forged)  # type: ignore[arg-type]  # bytes too
        assert ours.check(["verdict"]) == (not strict)
        assert ours.get("verdict") == b""
        assert ours.multi_get(["verdict"]) == [b""]
        refused = pytest.raises(dist.DistStoreError, match="verdict holds what no process of this job has set")
        with refused if strict else contextlib.nullcontext():
            ours.wait(["verdict"], timedelta(seconds=0.1))
        assert ours.compare_set("verdict", "", "ours") == b"ours", "the first of the job's own, whatever stood there"
        assert ours.compare_set("verdict", "", "late") == b"ours"
        assert (ours.check(["verdict"]), ours.get("verdict")) == (True, b"ours")
        store.delete_key("watch 1/verdict")


def test_without_a_secret_values_stay_as_they_are(store: dist.TCPStore) -> None:
    ours = KeyedStore(store, "part", b"")
    ours.set("key", "value")
    assert dist.PrefixStore("part", store).get("key") == b"value"
    assert ours.compare_set("first", "", "") == b""
    dist.PrefixStore("part", store).set("other", "theirs")
    assert ours.get("other") == b"theirs"


@pytest.mark.skipif(not READABLE, reason="sockets of a process are read from /proc, which is Linux's")
@pytest.mark.parametrize(
    "host", ["127.0.0.1", "localhost", "127.0.0.2", "0.0.0.0", "192.0.2.77", "no.such.host.invalid"]
)
def test_a_store_for_this_machine_alone_listens_at_its_loopback(host: str) -> None:
    before = set(listeners(os.getpid()))
    hosted = host_store(host, 0, alone=True, timeout=timedelta(seconds=10))
    opened = [address for address in listeners(os.getpid()) if address not in before]
    assert [(str(address).startswith("127.0.0."), port) for address, port in opened] == [(True, hosted.port)]
    hosted.set("key", "value")
    assert hosted.get("key") == b"value"


@pytest.mark.skipif(not READABLE, reason="sockets of a process are read from /proc, which is Linux's")
@pytest.mark.parametrize(
    ("host", "address"), [("127.0.0.1", "127.0.0.1"), ("localhost", "127.0.0.1"), ("192.0.2.77", "0.0.0.0")]
)
def test_a_store_for_others_listens_where_they_come_in(host: str, address: str) -> None:
    before = set(listeners(os.getpid()))
    hosted = host_store(host, 0, alone=False, timeout=timedelta(seconds=10))
    assert [str(own) for own, _ in set(listeners(os.getpid())) - before] == [address]
    hosted.set("key", "value")


def test_a_port_in_use_is_an_error_of_the_store() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken, pytest.raises(dist.DistNetworkError, match="Address already"):
        host_store("127.0.0.1", taken.getsockname()[1], alone=True, timeout=timedelta(seconds=10))


@pytest.mark.slow
def test_looking_for_objects_disturbs_no_other_thread() -> None:
    """`tuple(...)` of a generator fails while somebody else holds it, as a list of all objects does."""
    gc.unfreeze()  # the tests' own settings hide almost all there is
    ended = threading.Event()

    def look() -> None:
        while not ended.is_set():
            assert objects_of(functools._lru_cache_wrapper)
            time.sleep(0.001)

    thread = threading.Thread(target=look)
    thread.start()
    until = time.monotonic() + 0.3
    try:
        while time.monotonic() < until:
            assert len(tuple(number for number in range(300))) == 300
    finally:
        ended.set()
        thread.join()
    known = [each for each in gc.get_objects() if type(each) is functools._lru_cache_wrapper]
    assert {id(each) for each in objects_of(functools._lru_cache_wrapper)} >= {id(each) for each in known}
    made = nn.Sequential(nn.Linear(2, 2))
    assert {id(made), id(made[0])} <= {id(each) for each in objects_of(nn.Module, subclasses=True)}
    gc.freeze()
