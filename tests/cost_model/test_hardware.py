"""Clusters as numbers: what a collective costs inside a node and across, measured fits, files and presets."""

from __future__ import annotations

import dataclasses
import json
import math
from pathlib import Path
from typing import Any

import pytest

from tensor3d.cost_model.hardware import (
    CLUSTERS,
    GPUS,
    Cluster,
    Link,
    LinkFit,
    cluster,
    cluster_of,
    gpu,
    longhorn,
    read_cluster,
)
from tensor3d.distributed.cube_shape import AxisName, CubeShape
from tools.training.peak_flops import peak_of

PLAIN = Cluster(
    name="two nodes of four",
    nodes=2,
    per_node=4,
    flops={"bf16": 100.0},
    memory=1e9,
    memory_bandwidth=1e9,
    inside=Link(latency=1.0, bandwidth=8.0),
    across=Link(latency=10.0, bandwidth=0.5),
    efficiency=0.5,
)


def test_ranks_and_rate() -> None:
    assert PLAIN.ranks == 8
    assert PLAIN.rate("bf16") == 50.0
    with pytest.raises(ValueError, match=r"knows the FLOP/s of bf16. Got 'fp8'"):
        PLAIN.rate("fp8")


@pytest.mark.parametrize(
    "change, told",
    [
        ({"nodes": 0}, r"nodes.*\b1.*\b0"),
        ({"per_node": 2.0}, r"per_node must be a whole number"),
        ({"nodes": True}, r"nodes must be a whole number"),
        ({"memory": math.inf}, r"memory.*\b0.*inf"),
        ({"flops": {"fp32": -1.0}}, r"flops.*fp32.*\b0.*-1.0"),
        ({"flops": {}}, r"at least one type"),
        ({"inside": Link(latency=0.0, bandwidth=1.0)}, r"latency inside must be a number above 0"),
        ({"across": Link(latency=1.0, bandwidth=math.nan)}, r"bandwidth across must be a number above 0"),
        ({"efficiency": 1.5}, r"efficiency must be at most 1. Got 1.5"),
    ],
)
def test_numbers_that_cannot_be(change: dict[str, Any], told: str) -> None:
    with pytest.raises(ValueError, match=told):
        dataclasses.replace(PLAIN, **change)


@pytest.mark.parametrize(
    "box, axes, ring, tree, per_byte",
    [
        ("1x1x4", ("z",), 3.0, 4.0, 1 / 8),  # a node: three steps
        ("1x1x8", ("z",), 70.0, 60.0, 1 / 2),  # two nodes: one ring has all four shares of the wire
        ("1x2x4", ("y",), 10.0, 20.0, 2.0),  # four rings of one member a node: a share each
        ("2x2x2", ("x",), 10.0, 20.0, 2.0),
        ("2x2x2", ("y",), 1.0, 2.0, 1 / 8),
        ("2x2x2", ("x", "z"), 30.0, 40.0, 1.0),  # two members a node: two shares
        ("2x2x2", ("x", "y", "z"), 70.0, 60.0, 1 / 2),
        ("1x1x1", ("z",), 0.0, 0.0, 1 / 8),
    ],
)
def test_a_gather_and_a_sum_inside_and_across(
    box: str, axes: tuple[AxisName, ...], ring: float, tree: float, per_byte: float
) -> None:
    """A gather takes n - 1 steps, a sum goes up and down a tree."""
    shape = CubeShape.parse(box)
    assert PLAIN.collective(shape, axes, "all-gather") == (ring, per_byte)
    assert PLAIN.collective(shape, axes, "reduce-scatter") == (ring, per_byte)
    assert PLAIN.collective(shape, axes, "all-reduce") == (tree, per_byte)


def test_the_order_on_the_wire_decides_who_shares_a_node() -> None:
    shape = CubeShape(x=2, y=2, z=2, wire=("data", "z", "y", "x"))
    assert PLAIN.collective(shape, ("x",), "all-gather")[0] == 1.0
    assert PLAIN.collective(shape, ("z",), "all-gather")[0] == 10.0


def test_the_link_inside_bounds_a_ring_that_crosses() -> None:
    fast = dataclasses.replace(PLAIN, across=Link(latency=10.0, bandwidth=100.0))
    assert fast.collective(CubeShape(z=8), ("z",), "all-gather")[1] == 1 / 8
    assert fast.collective(CubeShape(y=2, z=4), ("y",), "all-gather")[1] == 1 / 100


def test_a_measured_fit_stands_in_for_the_links() -> None:
    fits = tuple(
        LinkFit(kind="all-gather", members=2, stride=stride, latency=float(stride), seconds_per_byte=0.1)
        for stride in (1, 4)
    )
    measured = dataclasses.replace(PLAIN, fits=fits)
    shape = CubeShape(x=2, y=2, z=2)
    assert measured.collective(shape, ("z",), "all-gather") == (1.0, 0.1)
    assert measured.collective(shape, ("x",), "all-gather") == (4.0, 0.1)
    assert measured.collective(shape, ("y",), "all-gather") == (1.0, 0.1)  # stride 2: the nearest
    assert measured.collective(shape, ("z",), "reduce-scatter") == (1.0, 1 / 8)  # not measured
    assert measured.collective(CubeShape(z=4), ("z",), "all-gather") == (3.0, 1 / 8)


def test_a_file_gives_the_cluster_back(tmp_path: Path) -> None:
    fit = LinkFit(kind="all-reduce", members=4, stride=2, latency=1.0, seconds_per_byte=2.0)
    wanted = dataclasses.replace(PLAIN, fits=(fit,))
    for content, told in (
        (wanted.to_json(), wanted),
        ({"machine": "a", "cluster": wanted.to_json()}, wanted),
        (longhorn().to_json(), longhorn()),
    ):
        (tmp_path / "machine.json").write_text("\ufeff" + json.dumps(content))  # as editors of Windows begin
        assert read_cluster(tmp_path / "machine.json") == told


@pytest.mark.parametrize(
    "content, told",
    [
        ("{", r"is no cluster"),
        ("[1]", r"is no cluster: a cluster has the fields"),
        (json.dumps({**PLAIN.to_json(), "speed": 1}), r"is no cluster: a cluster has the fields .*speed"),
        (json.dumps({k: v for k, v in PLAIN.to_json().items() if k != "inside"}), r"'inside' is missing"),
        (json.dumps({**PLAIN.to_json(), "nodes": 0}), r"machine.json is no cluster: .*nodes"),
        (json.dumps({**PLAIN.to_json(), "inside": {"latency": 1.0}}), r"is no cluster: .*bandwidth"),
    ],
)
def test_a_file_that_is_no_cluster(tmp_path: Path, content: str, told: str) -> None:
    (tmp_path / "machine.json").write_text(content)
    with pytest.raises(ValueError, match=told):
        read_cluster(tmp_path / "machine.json")


@pytest.mark.parametrize("name", GPUS)
def test_presets_have_the_peaks_that_mfu_is_measured_by(name: str) -> None:
    device = {"V100": "Tesla V100-SXM2", "A100": "NVIDIA A100-SXM4", "H100": "NVIDIA H100", "H200": "NVIDIA H200"}
    for kind in ("fp32", "fp16", "bf16"):
        assert gpu(name).flops.get(kind) == peak_of(device[name[:4]], kind)


def test_products_in_fp8_came_with_hopper() -> None:
    assert {name for name in GPUS if "fp8" in gpu(name).flops} == {"H100", "H200"}
    assert cluster_of("H100").rate("fp8") == pytest.approx(2 * cluster_of("H100").rate("bf16"), rel=1e-3)
    with pytest.raises(ValueError, match=r"A100-80GB knows the FLOP/s of fp32, fp16, bf16. Got 'fp8'"):
        cluster_of("A100-80GB").rate("fp8")


def test_a_preset_by_its_name() -> None:
    assert gpu("a100-80gb").name == "A100-80GB"
    assert cluster("LONGHORN") == longhorn()
    with pytest.raises(ValueError, match=r"V100-16GB, .*H200. Got 'H300'\. Did you mean H200 or H100\?"):
        gpu("H300")
    with pytest.raises(ValueError, match=r"Got 'a100'\. Did you mean A100-40GB or A100-80GB\?"):
        gpu("a100")
    with pytest.raises(ValueError, match=r"Got ''\. Any other one: measure it"):
        gpu("")
    with pytest.raises(ValueError, match=r"ready-made clusters are 8xV100-16GB, .*longhorn. Got '9xH100'"):
        cluster("9xH100")


def test_a_cluster_of_a_preset() -> None:
    found = cluster_of("H100", nodes=4, launch=1e-5)
    assert (found.name, found.ranks, found.launch) == ("4 x 8 H100", 32, 1e-5)
    assert found.inside.bandwidth > found.across.bandwidth
    assert found.inside.latency < found.across.latency
    # Half as many GPUs share the same ports.
    half = cluster_of("H100", nodes=4, per_node=4)
    assert half.across.bandwidth == 2 * found.across.bandwidth
    assert half.inside == found.inside
    with pytest.raises(ValueError, match=r"fields name, .*\bspeed\b"):
        cluster_of("H100", speed=1)
    with pytest.raises(ValueError, match=r"per_node.*1.*0"):
        cluster_of("H100", per_node=0)


def test_ready_made_clusters() -> None:
    assert longhorn().ranks == CLUSTERS["longhorn"].ranks == 64
    assert {found.ranks for name, found in CLUSTERS.items() if name != "longhorn"} == {64}
    assert "bf16" not in longhorn().flops
