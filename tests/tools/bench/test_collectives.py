"""`bench collectives`: the line it fits, the collectives it takes, that it finds wrong ones, and the file for plans."""

from __future__ import annotations

import dataclasses
import json
import os
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from tensor3d import Cube, CubeShape
from tensor3d.cost_model.hardware import Cluster, Link, LinkFit, read_cluster
from tensor3d.distributed.collectives import Axis, CommHandle, all_gather
from tests.ranks import run_ranks
from tests.tools.refused import refused
from tools.bench import collectives
from tools.bench.__main__ import main
from tools.bench.collectives import PointFigures, SeriesFigures, fit_line, make_cluster, pooled, series_figures
from tools.doctor import collective_timing
from tools.doctor.collective_timing import (
    CollectingTrial,
    MemoryRate,
    ProductRate,
    Rates,
    Series,
    combined,
    points_of,
    series_of,
)

QUICK = ["--sizes", "8,4096", "--milliseconds", "1", "--rounds", "2", "--products", "16,32"]


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The file of one run on two cubes of two ranks."""
    output = tmp_path_factory.mktemp("bench") / "host.json"
    assert main(["collectives", "--cubes", "1x2x1,2x1x1", *QUICK, "--output", str(output)]) == 0
    return output


def test_the_planner_reads_it(written: Path) -> None:
    cluster = read_cluster(written)
    assert (cluster.nodes, cluster.per_node, cluster.overlaps) == (1, 2, False)
    assert [(fit.kind, fit.members, fit.stride) for fit in cluster.fits] == [
        ("all-gather", 2, 1),
        ("all-reduce", 2, 1),
        ("all-to-all", 2, 1),
        ("reduce-scatter", 2, 1),
    ]
    assert set(cluster.flops) == {"fp32"}
    assert 1e6 < cluster.flops["fp32"] < 1e13
    assert cluster.inside == cluster.across
    gather = cluster.fits[0]
    assert cluster.collective(CubeShape(z=2), ("z",), "all-gather") == (gather.latency, gather.seconds_per_byte)


def test_json_has_every_time(written: Path) -> None:
    content = json.loads(written.read_text())
    assert content["benchmark"] == "collectives"
    assert content["command"].startswith("python -m tools.bench collectives --cubes 1x2x1,2x1x1 --sizes 8,4096")
    taken = [(each["shape"]["y"], each["series"]["kind"]) for each in content["collectives"]]
    assert taken == [
        *[(2, kind) for kind in ("all-gather", "reduce-scatter", "all-reduce", "all-to-all")],
        *[(1, kind) for kind in ("all-gather", "reduce-scatter", "all-reduce")],
    ]
    for each in content["collectives"]:
        assert [point["size"] for point in each["points"]] == [8, 4096]
        for point in each["points"]:
            low, high = sorted(point["by_round"])
            assert point["seconds"] == pytest.approx((low + high) / 2)
            assert 2 <= point["calls"] <= 200
            assert low > 0
    rates = content["rates"]
    assert [(each["n"], each["type"]) for each in rates["products"]] == [(16, "fp32"), (32, "fp32")]
    assert [each["size"] for each in rates["sums"]] == [2**20, 2**22, 2**24]
    assert 0 < rates["launch"] < 1


def test_the_collectives_of_a_cube() -> None:
    found = [(s.name, s.kind, s.members, s.stride) for s in series_of(CubeShape(x=2, y=2, z=2))]
    each = ("all-gather", "reduce-scatter", "all-reduce")
    assert found == [
        *[("x", kind, 2, 4) for kind in each],
        *[("y", kind, 2, 2) for kind in each],
        *[("z", kind, 2, 1) for kind in each],
        ("x+y", "all-reduce", 4, 2),
        ("x+z", "all-reduce", 4, 1),
        ("x+y+z", "all-reduce", 8, 1),
        ("y+z", "all-to-all", 4, 1),
    ]
    # Sums over one axis and over all of them are the same here, and taken once.
    assert [s.name for s in series_of(CubeShape(z=4))] == ["z"] * 4
    assert [s.kind for s in series_of(CubeShape(data=2))] == ["all-gather", "reduce-scatter", "all-reduce"]


def test_sizes_are_bytes_that_a_rank_receives() -> None:
    points = points_of(CubeShape(y=4), [12, 13, 2400])
    sizes = {(point.series.kind, point.elements): point.size for point in points}
    # From three others; a sum also goes back. 12 and 13 bytes are one element of four bytes from each.
    assert sizes == {
        ("all-gather", 1): 12,
        ("all-gather", 200): 2400,
        ("reduce-scatter", 1): 12,
        ("reduce-scatter", 200): 2400,
        ("all-reduce", 1): 48,  # four numbers, which go another way
        ("all-reduce", 100): 2400,
        ("all-to-all", 1): 12,
        ("all-to-all", 200): 2400,
    }


def _checked() -> tuple[list[str], list[str]]:
    """Faults of collectives as they are, and with three that go wrong."""
    trial = CollectingTrial(Cube(1, 2, 1), [16, 256])
    good = trial.check()

    def in_another_order(shard: torch.Tensor, axis: Axis) -> CommHandle:
        return CommHandle(all_gather(shard, axis).wait().flip(0))

    def from_nobody(parts: torch.Tensor, axis: Axis) -> CommHandle:
        return CommHandle(parts[: len(parts) // axis.size])

    collective_timing.all_gather = in_another_order
    collective_timing.reduce_scatter = from_nobody
    return good, trial.check()


def test_wrong_results_and_wrong_counts_are_found() -> None:
    for rank, (good, wrong) in enumerate(run_ranks(2, _checked)):
        assert good == []
        assert f"rank {rank}, all-gather of 4 elements over y: the result is wrong" in wrong
        assert f"rank {rank}, reduce-scatter of 64 elements over y: the result is wrong" in wrong
        assert f"rank {rank}, reduce-scatter of 64 elements over y: 0 bytes were counted, and 256 travel" in wrong
        assert {fault.split(", ")[1].split()[0] for fault in wrong} == {"all-gather", "reduce-scatter"}


class Wrong:
    """A cube of which the second rank finds a fault."""

    shape = CubeShape(y=2)

    def call(self, action: Any) -> list[Any]:
        return [[], ["rank 1 got nothing"]] if action is CollectingTrial.check else ["here", "here"]


def test_wrong_results_are_exit_status_1(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    monkeypatch.setattr(collectives, "start", lambda *_: [Wrong()])
    assert main(["collectives", "--cubes", "1x2x1", *QUICK, "--output", str(tmp_path / "none.json")]) == 1
    captured = capsys.readouterr()
    assert captured.err == "tools.bench: rank 1 got nothing\n"
    assert captured.out == ""
    assert not (tmp_path / "none.json").exists()


def on_rank(output: Path) -> int:
    """`main` on a rank whose process group stands: from_env finds it and connects no other."""
    os.environ.update(WORLD_SIZE=str(dist.get_world_size()), RANK=str(dist.get_rank()), LOCAL_RANK="0")
    return main(["collectives", "--cubes", "2x2x1,1x1x4", *QUICK, "--output", str(output)])


@pytest.mark.slow
def test_under_torchrun_all_ranks_measure_together(tmp_path: Path) -> None:
    output = tmp_path / "world.json"
    assert run_ranks(4, on_rank, output) == [0] * 4
    assert read_cluster(output).ranks == 4


@pytest.mark.parametrize(
    ("more", "message"),
    [
        (["--cubes", "2x2"], "Got '2x2'"),
        (["--cubes", "1x1x1"], "a collective needs at least 2 ranks. Got --cubes 1x1x1."),
        (["--cubes", "1x2x1,2x2x2"], "all cubes must have the same number. Got 2, 8."),
        (["--sizes", "64"], "--sizes must be at least two different numbers of bytes"),
        (["--sizes", "64,64"], "Got '64,64'"),
        (["--sizes", "64,0"], "Got '64,0'"),
        (["--types", "fp32,fp8"], "--types must be some of fp32,bf16,fp16. Got 'fp32,fp8'."),
        (["--products", "0"], "--products must be whole numbers of at least 1 with commas. Got '0'."),
        (["--rounds", "0"], "--rounds must be at least 1. Got 0."),
        (["--milliseconds", "nan"], "--milliseconds must be a number above 0. Got nan."),
        (["--output", "missing/host.json"], "a file in a folder that exists. Got missing/host.json"),
    ],
)
def test_bad_calls_start_no_process(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], more: list[str], message: str
) -> None:
    monkeypatch.setattr(collectives, "start", lambda *_: pytest.fail("started processes"))
    error = refused(capsys, main, "collectives", *more)
    assert error.startswith("tools.bench: ")
    assert message in error


# Fits and clusters, by hand


def test_a_line_is_found_again() -> None:
    sizes = [64, 4096, 2**20, 2**24]
    line = fit_line(sizes, [1e-3 + size * 2e-9 for size in sizes])
    assert (line.latency, line.seconds_per_byte) == (pytest.approx(1e-3), pytest.approx(2e-9))
    assert line.error < 1e-9


def test_small_sizes_weigh_as_much_as_large_ones() -> None:
    """By absolute squares the last point alone would decide, and the latency be far off."""
    line = fit_line([0, 10**6, 10**9], [1e-3, 2e-3, 1.3])
    assert line.latency == pytest.approx(1e-3, rel=0.1)
    # A tenth too much and a tenth too little at one size: between them, and that is the error.
    line = fit_line([0, 0, 10**6, 10**6], [0.9, 1.1, 1.8, 2.2])
    assert line.latency == pytest.approx(1.0, rel=0.02)
    assert line.error == pytest.approx(0.1, rel=0.02)


def test_no_cost_is_negative() -> None:
    falling, convex = fit_line([10, 1000], [2.0, 1.0]), fit_line([10, 1000], [1e-3, 1.0])
    assert falling.seconds_per_byte == 0
    assert falling.latency == pytest.approx((1 / 2 + 1) / (1 / 4 + 1))
    assert convex.latency == 0
    assert convex.error > 0


def line_of(shape: CubeShape, latency: float, per_byte: float, **changes: Any) -> SeriesFigures:
    """A series whose times lie on a line."""
    series = dataclasses.replace(series_of(shape)[0], **changes)
    points = [
        PointFigures(size=size, calls=1, seconds=latency + size * per_byte, by_round=()) for size in (8, 1000, 10**6)
    ]
    return series_figures(shape, series, points)


RATES = Rates(
    products=(
        ProductRate(n=8, type="fp32", flops=2e9),
        ProductRate(n=16, type="fp32", flops=4e9),
        ProductRate(n=16, type="bf16", flops=8e9),
    ),
    sums=tuple(MemoryRate(size=size, bandwidth=size * 1e9) for size in (1, 2, 6)),
    launch=1e-5,
    memory=0,
    gpu=False,
)


def test_a_cluster_of_two_nodes() -> None:
    inside = line_of(CubeShape(x=2, z=4), 3e-3, 1e-9, axes=("z",), members=4, stride=1)
    smaller = line_of(CubeShape(x=2, y=2, z=2), 1e-3, 2e-9, axes=("z",), members=2, stride=1)
    # Two of the eight are on the first node: both ends of a ring that enters each node once.
    crossing = line_of(CubeShape(x=4, y=2), 6e-3, 4e-9, axes=("x",), members=4, stride=2)
    cluster = make_cluster("pair", ["a"] * 4 + ["b"] * 4, 5e9, [inside, smaller, crossing], RATES)
    assert (cluster.nodes, cluster.per_node, cluster.memory) == (2, 4, 5e9)
    assert cluster.flops == {"fp32": 4e9, "bf16": 8e9}
    assert cluster.efficiency == 1.0  # of 0.5, 1 and 1
    assert (cluster.memory_bandwidth, cluster.launch) == (2e9, 1e-5)
    assert cluster.inside.latency == pytest.approx(1e-3)
    assert cluster.inside.bandwidth == pytest.approx(5e8)
    assert cluster.across.latency == pytest.approx(2e-3)
    assert cluster.across.bandwidth == pytest.approx(2.5e8 / 2)
    # What was measured comes out again, from the fits and without them.
    plain = dataclasses.replace(cluster, fits=())
    for planned in (cluster, plain):
        found = planned.collective(CubeShape(x=4, y=2), ("x",), "all-gather")
        assert found == (pytest.approx(6e-3), pytest.approx(4e-9))


def test_one_node_has_one_link() -> None:
    cluster = make_cluster("one", ["a", "a"], 1e9, [line_of(CubeShape(z=2), 1e-3, 0.0)], RATES)
    assert cluster.inside == cluster.across == Link(latency=pytest.approx(1e-3), bandwidth=1e13)
    assert isinstance(cluster, Cluster)


@pytest.mark.parametrize("hosts", [["a", "b", "b"], ["a", "b", "a", "b"]])
def test_uneven_nodes_are_refused(hosts: list[str]) -> None:
    with pytest.raises(ValueError, match=r"same number of ranks.*\ba, b"):
        make_cluster("uneven", hosts, 1e9, [line_of(CubeShape(z=2), 1e-3, 1e-9)], RATES)


def test_groups_that_look_alike_share_a_fit() -> None:
    shapes = (CubeShape(x=2, z=2), CubeShape(x=2, y=2))
    one, two = (
        line_of(shape, 1e-3, each, axes=("x",), stride=2) for shape, each in zip(shapes, (1e-9, 3e-9), strict=True)
    )
    (fit,) = pooled([one, two])
    assert isinstance(fit, LinkFit)
    assert (fit.kind, fit.members, fit.stride) == ("all-gather", 2, 2)
    assert 1e-9 < fit.seconds_per_byte < 3e-9
    three = dataclasses.replace(two, series=dataclasses.replace(two.series, stride=1))
    assert [(each.stride, each.seconds_per_byte) for each in pooled([one, three])] == [
        (1, pytest.approx(3e-9)),
        (2, pytest.approx(1e-9)),
    ]


def test_rates_are_medians_of_means() -> None:
    def of(factor: float) -> Rates:
        return dataclasses.replace(
            RATES,
            launch=factor,
            products=tuple(dataclasses.replace(each, flops=factor * each.flops) for each in RATES.products),
            sums=tuple(dataclasses.replace(each, bandwidth=factor * each.bandwidth) for each in RATES.sums),
        )

    found = combined([[of(1), of(3)], [of(10), of(30)], [of(4), of(4)]])
    assert found.launch == 4
    assert [each.flops for each in found.products] == [8e9, 16e9, 32e9]
    assert [each.bandwidth for each in found.sums] == [4e9, 8e9, 24e9]


def test_series_have_the_name_of_their_axes() -> None:
    assert Series(axes=("x", "z"), kind="all-reduce", members=4, stride=1).name == "x+z"
