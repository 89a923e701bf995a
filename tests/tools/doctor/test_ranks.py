"""`python -m tools.doctor` on real ranks: what it finds, who tells it, and that all of them end alike."""

from __future__ import annotations

import json
import os
import re
import signal
from pathlib import Path
from typing import Any

import pytest
import torch

from tensor3d.distributed.collectives import Axis, CommHandle, reduce_scatter
from tests.tools.doctor.launched import Ended, doctors
from tools.doctor import __main__ as connected
from tools.doctor import collective_timing, facts
from tools.doctor.collective_checks import CollectiveChecks

QUICK = ["--quick", "--cube", "1x1x2", "--wait", "20"]


def told(ended: dict[int, Ended]) -> str:
    """What was printed on standard error, by one rank alone."""
    speakers = [rank for rank, each in ended.items() if each.err]
    assert len(speakers) == 1, ended
    return ended[speakers[0]].err


def test_all_is_well(tmp_path: Path) -> None:
    recipe = tmp_path / "recipe.toml"
    recipe.write_text("")
    shared, output = tmp_path / "not" / "yet", tmp_path / "out.json"
    arguments = [*QUICK, "--recipe", str(recipe), "--directory", str(shared), "--output", str(output)]
    ended = doctors(tmp_path, 2, arguments)
    assert {each.status for each in ended.values()} == {0}
    assert ended[1].out == ended[1].err == ""
    assert ended[0].out.splitlines()[-1] == "ready: 2 ranks on 1 node"
    assert f"directory {shared}: the same place on all nodes, writable" in ended[0].out
    rows = [line.split() for line in ended[0].out.splitlines() if line.startswith("z ")]
    assert [row[:4] for row in rows] == [["z", "2", "no", "all-gather"], ["z", "2", "no", "reduce-scatter"]]
    assert not shared.parent.exists(), "nothing is made"
    assert not list(tmp_path.glob(".tensor3d-doctor-*"))
    content = json.loads(output.read_text())
    assert content["ready"] is True
    assert [(each["axis"], each["kind"], each["sizes"]) for each in content["collectives"]] == [
        ("z", "all-gather", [1 << 10, 1 << 18]),
        ("z", "reduce-scatter", [1 << 10, 1 << 18]),
    ]
    assert len(content["product_seconds"]) == 2
    assert content["versions"]["recipe recipe.toml"] == facts.hash_of(recipe)


@pytest.mark.slow
def test_ranks_that_never_come_are_named(tmp_path: Path) -> None:
    ended = doctors(tmp_path, 4, ["--quick", "--wait", "3"], absent=(1, 3))
    assert {rank: each.status for rank, each in ended.items()} == {0: 2, 2: 2}
    came = f"ranks 0, 2 (nodes 0-1, {os.uname().nodename}) did"
    assert told(ended) == (
        f"not ready: ranks 1, 3 (nodes 0-1) did not come within 3 s; {came}. Look whether they were started, and for "
        "an error in their logs.\n"
    )


def test_rank_0_that_never_comes(tmp_path: Path) -> None:
    """No store is there to agree on one that tells it: the first rank of a node does."""
    ended = doctors(tmp_path, 4, ["--quick", "--wait", "0.5"], absent=(0, 1))
    assert {rank: each.status for rank, each in ended.items()} == {2: 2, 3: 2}
    assert re.search(r"the master 127\.0\.0\.1:\d+ did not answer within 0\.5 s \(Connection refused\)", told(ended))


def _other_versions(rank: int) -> None:
    if rank == 1:
        facts.torch.__version__ = torch.torch_version.TorchVersion("2.12.0")


def test_other_versions(tmp_path: Path) -> None:
    ended = doctors(tmp_path, 2, QUICK, prepare=_other_versions)
    assert {each.status for each in ended.values()} == {2}
    assert re.fullmatch(
        r"not ready: torch differs: \S+ on rank 0 \(node 0, \S+\), 2\.12\.0 on rank 1 \(node 0, \S+\)\. Install the "
        r"same everywhere\.\n",
        told(ended),
    )


def test_a_cube_of_another_size_is_told_once(tmp_path: Path) -> None:
    ended = doctors(tmp_path, 2, ["--quick", "--cube", "2x2x2"])
    assert {each.status for each in ended.values()} == {2}
    assert "the cube 2x2x2 needs 8 ranks (x*y*z*data), and 2 were started. Start 8" in told(ended)


def _wrong_on_rank_1(rank: int) -> None:
    if rank == 1:

        def one_too_many(parts: torch.Tensor, axis: Axis) -> CommHandle:
            return CommHandle(reduce_scatter(parts, axis).wait() + 1)

        collective_timing.reduce_scatter = one_too_many


def test_a_wrong_sum_is_told_with_its_rank(tmp_path: Path) -> None:
    ended = doctors(tmp_path, 2, QUICK, prepare=_wrong_on_rank_1)
    assert {each.status for each in ended.values()} == {2}
    lines = told(ended).splitlines()
    assert lines[0].startswith(
        "tools.doctor: rank 1, reduce-scatter of 256 elements over z: the result is wrong. Look at drivers"
    )
    assert lines[-1] == "not ready: 2 findings, above"


def _stops(number: signal.Signals, stopped: int, rank: int) -> None:
    def measure(self: CollectiveChecks, note: Any) -> list[float]:
        if rank == stopped:
            os.kill(os.getpid(), number)
        return original(self, note)

    original = CollectiveChecks.measure
    connected.CollectiveChecks.measure = measure  # type: ignore[method-assign]


def _stops_1(rank: int) -> None:
    _stops(signal.SIGSTOP, 1, rank)


def _kills_1(rank: int) -> None:
    _stops(signal.SIGKILL, 1, rank)


@pytest.mark.slow
def test_a_rank_that_goes_silent_is_named(tmp_path: Path) -> None:
    ended = doctors(tmp_path, 4, ["--quick", "--cube", "1x2x2", "--wait", "3"], lost=(1,), prepare=_stops_1)
    assert {each.status for each in ended.values()} == {2}
    assert re.search(r"no progress for \d+ s: rank 1 \(.*its process is stopped", told(ended))


@pytest.mark.slow
def test_a_rank_that_dies_is_named(tmp_path: Path) -> None:
    ended = doctors(tmp_path, 4, ["--quick", "--cube", "1x2x2", "--wait", "5"], lost=(1,), prepare=_kills_1)
    assert {each.status for each in ended.values()} == {2}
    assert re.search(r"not ready: rank 1 \(.*its process is gone", told(ended))
