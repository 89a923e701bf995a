"""Figures of collectives, the sentence on the slowest axis, clocks over a store, and folders as they are."""

from __future__ import annotations

import os
import threading
from dataclasses import replace
from pathlib import Path

import pytest
import torch.distributed as dist

from tensor3d import CubeShape
from tools.doctor import checks
from tools.doctor.checks import probe_of, probes, sees, state_of
from tools.doctor.collective_checks import HEADER, TimingBudget, WireFigures, figures, series_for, slowest_axis
from tools.doctor.collective_timing import points_of
from tools.doctor.facts import source
from tools.doctor.network import address_of, is_own

SIZES = (1 << 10, 1 << 20)


def measured(shape: CubeShape, slow: dict[tuple[str, int], float]) -> list[list[float]]:
    """Seconds by rank and point: 1 ms, and times a factor for (axis, rank) at the largest size."""
    points = points_of(shape, SIZES, series_for(shape))
    return [
        [1e-3 * (slow.get((point.series.name, rank), 1.0) if point.size > 10_000 else 0.1) for point in points]
        for rank in range(shape.ranks)
    ]


def test_each_axis_and_all_together() -> None:
    names = [(each.name, each.kind) for each in series_for(CubeShape(y=2, data=2))]
    both = ("all-gather", "reduce-scatter")
    assert names == [(axis, kind) for axis in ("data", "y", "data+y") for kind in both]
    assert {each.name for each in series_for(CubeShape(z=4))} == {"z"}
    assert series_for(CubeShape()) == []


def test_figures_are_those_of_the_slowest_group() -> None:
    shape = CubeShape(y=2, z=2)  # ranks 0-1 on node 0, 2-3 on node 1
    found = figures(shape, 2, SIZES, measured(shape, {("z", 2): 4.0, ("z", 3): 4.0}))
    rows = {(each.axis, each.kind): each for each in found}
    z, y, both = (rows[axis, "all-gather"] for axis in ("z", "y", "y+z"))
    assert (z.crosses, y.crosses, both.crosses) == (False, True, True)
    assert (z.slowest, z.groups) == ((2, 3), 2)
    assert z.latency == pytest.approx(1e-4)
    assert z.bandwidth == pytest.approx((1 << 20) / 4e-3)
    assert dict(zip(HEADER, z.row(), strict=True))["slowest ranks"] == "2-3"
    assert dict(zip(HEADER, both.row(), strict=True))["slowest ranks"] == "one group"
    assert len(z.row()) == len(HEADER)


def axes(shape: CubeShape, per_node: int, slow: str) -> list[WireFigures]:
    everywhere = {(slow, rank): 14.0 for rank in range(shape.ranks)}
    return figures(shape, per_node, SIZES, measured(shape, everywhere))


def test_an_axis_that_belongs_inside_a_node() -> None:
    shape = CubeShape(y=2, z=2, data=2, wire=("y", "x", "data", "z"))
    assert slowest_axis(shape, 4, axes(shape, 4, "y")) == (
        "axis y is 14 x slower than data; it crosses nodes: place it inside (--wire data,x,y,z)."
    )


def test_no_advice_where_there_is_none() -> None:
    # y crosses nodes because it must: a node has two ranks.
    shape = CubeShape(y=2, z=2)
    assert slowest_axis(shape, 2, axes(shape, 2, "y")) == "axis y is 14 x slower than z; it crosses nodes."
    # All on one node.
    assert slowest_axis(shape, 4, axes(shape, 4, "y")) == "axis y is 14 x slower than z."
    # The slow axis is the one that crosses no nodes.
    assert slowest_axis(shape, 2, axes(shape, 2, "z")) == "axis z is 14 x slower than y."
    # None stands out, or there is none to compare with.
    assert slowest_axis(shape, 2, axes(shape, 2, "none")) == ""
    alone = CubeShape(z=2)
    assert slowest_axis(alone, 2, axes(alone, 2, "z")) == ""


def test_advice_is_about_the_wire_that_training_would_take() -> None:
    shape = CubeShape(y=2, z=2, data=2, wire=("y", "x", "data", "z"))
    placed = shape.placed(4)
    assert placed.neighbours(4)["y"] == 2
    assert slowest_axis(placed, 4, axes(placed, 4, "y")) == "axis y is 14 x slower than data."
    assert replace(placed, wire=shape.wire) == shape


def test_clocks() -> None:
    store = dist.HashStore()
    others = [
        threading.Thread(target=checks.answer, args=(store, node, 3, lambda ahead=ahead: 1000.0 + ahead))
        for node, ahead in {1: 5.0, 2: -7.0}.items()
    ]
    for other in others:
        other.start()
    found = checks.ask(store, [1, 2], 3, clock=lambda: 1000.0)
    for other in others:
        other.join()
    for node, ahead in {1: 5.0, 2: -7.0}.items():
        offset, error = found[node]
        assert abs(offset - ahead) <= 2 * error
        assert 0 < error < 5


def test_probes_are_seen_and_removed(tmp_path: Path) -> None:
    folders = [tmp_path, tmp_path / "not" / "yet"]
    with probes(folders) as (word, problem):
        assert problem == ""
        assert sees(folders, word, wait=0) == [True, True]
        assert sees([tmp_path.parent], word, wait=0.1) == [False]
        assert probe_of(folders[1], word) == probe_of(tmp_path, word)
    assert list(tmp_path.iterdir()) == []
    with pytest.raises(KeyError), probes(folders):
        raise KeyError
    assert list(tmp_path.iterdir()) == []


def test_states_of_folders(tmp_path: Path) -> None:
    there = tmp_path / "file"
    there.write_text("")
    assert state_of(tmp_path / "a" / "b") == {"folder": f"{tmp_path}/a/b", "base": str(tmp_path), "error": ""}
    assert state_of(there)["error"] == "is a file"
    assert list(tmp_path.iterdir()) == [there]
    if os.geteuid() != 0:  # root writes everywhere
        tmp_path.chmod(0o500)
        assert state_of(tmp_path)["error"] == "Permission denied"


@pytest.mark.parametrize(
    ("once", "calls", "rounds"),
    [(0.01, 5, 7), (1.0, 5, 7), (3.0, 2, 7), (8.0, 1, 7), (20.0, 1, 3), (100.0, 1, 1)],
)
def test_slow_wires_get_fewer_calls(once: float, calls: int, rounds: int) -> None:
    effort = TimingBudget().within(once)
    assert (effort.calls, effort.rounds) == (calls, rounds)
    assert effort.sizes == TimingBudget().sizes


def test_a_change_of_any_source_is_seen(tmp_path: Path) -> None:
    (tmp_path / "b").mkdir()
    files = [tmp_path / "a.py", tmp_path / "b" / "c.py"]
    for file in files:
        file.write_text("x = 1\n")
    seen = {source(tmp_path)}
    (tmp_path / "notes.txt").write_text("no source")
    assert source(tmp_path) in seen
    files[1].write_text("x = 2\n")
    seen.add(source(tmp_path))
    files[1].rename(tmp_path / "b" / "d.py")
    seen.add(source(tmp_path))
    assert len(seen) == 3


def test_addresses() -> None:
    assert address_of("node0:29501") == ("node0", 29501)
    assert address_of("[fe80::1]:80") == ("fe80::1", 80)
    assert address_of("fe80::1:80") == ("fe80::1", 80)
    assert is_own("127.0.0.1")
    assert not is_own("192.0.2.1")  # for documents alone: no machine has it
