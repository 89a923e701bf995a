"""`bench matmul` on real processes: what it counts and compares, what it refuses, and the loop that it shares."""

from __future__ import annotations

import dataclasses
import json
import os
from collections import Counter
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from tensor3d import Cube, CubeShape
from tests.ranks import run_ranks
from tests.tools.refused import refused
from tools.bench import layer
from tools.bench.__main__ import main
from tools.bench.harness import processes
from tools.bench.harness.figures import cells, header, table
from tools.bench.harness.memory import peak_bytes
from tools.bench.harness.processes import interleave
from tools.bench.layer import MatmulCommand, PassFacts, PassFigures, PassSample, difference, figures

SIZES = ["--rows", "32", "--inputs", "8", "--outputs", "16", "--passes", "3", "--rounds", "2", "--warmup", "1"]


@pytest.fixture(scope="module")
def measured(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """The JSON of one run on one process, and on four of which two cubes make use in turn."""
    output = tmp_path_factory.mktemp("bench") / "matmul.json"
    assert main(["matmul", "--cubes", "1x1x1,1x2x2,2x1x2", *SIZES, "--output", str(output)]) == 0
    content: dict[str, Any] = json.loads(output.read_text())
    return content


def test_json_says_what_was_measured(measured: dict[str, Any]) -> None:
    assert measured["benchmark"] == "matmul"
    assert measured["command"].startswith("python -m tools.bench matmul --cubes 1x1x1,1x2x2,2x1x2 --rows 32")
    assert measured["subject"] == {"rows": 32, "k": 8, "n": 16, "face": "z", "reshard_after_forward": True}
    assert (measured["type"], measured["rounds"], measured["warmup"]) == ("fp32", [2, 1], 1)
    for cube in measured["results"]:
        assert [len(seconds) for seconds in cube["seconds"]] == [2, 1]
        assert cube["seconds_median"] == sorted(second for turn in cube["seconds"] for second in turn)[1]
        assert cube["flops_per_second"] == pytest.approx(6 * 32 * 8 * 16 / cube["seconds_median"])
        assert cube["device"] == "cpu"
    assert measured["results"][0]["ratio"] == 1


def test_counts_by_hand(measured: dict[str, Any]) -> None:
    """A (16, 4) elements on each of y and z, C (16, 8): A' twice and dA, C and dC', each from one other member. On
    x and z A (16, 4) needs no gather, W (8, 4) is gathered twice and scattered once, C and dC' are (16, 16) / 2."""
    found = [(cube["collectives"], cube["bytes_received"], cube["saved_bytes"]) for cube in measured["results"]]
    a, w, c = 4 * 16 * 4, 4 * 8 * 4, 4 * 16 * 8
    used = 2 * 3 * 8  # ranks compare which parameters they have used: 16 bytes, summed over four
    assert found == [(0, 0, 4 * 32 * 8), (6, 3 * a + 2 * c + used, a), (6, 3 * w + 2 * c + used, a)]
    assert all(cube["traffic_equal"] for cube in measured["results"])
    assert [cube["bytes_closed_form"] for cube in measured["results"]] == [sent for _, sent, _ in found]
    # At least the gathered A' and dC', and dA before it is scattered.
    assert measured["results"][1]["peak_bytes"] > 2 * 2 * a + 2 * c
    # On one device exactly the result, which dies, then dA and dW.
    assert measured["results"][0]["peak_bytes"] == 4 * (32 * 16 + 32 * 8 + 16 * 8)


def test_all_cubes_compute_the_same(measured: dict[str, Any]) -> None:
    assert 0 < measured["difference"] < 1e-6
    result, inputs, weights = measured["results"][0]["squares"]
    # Of N(0, 1) rows times weights of variance 1/K, and of gradients N(0, 1).
    assert result == pytest.approx(32 * 16, rel=0.5)
    assert inputs == pytest.approx(32 * 8 * 16 / 8, rel=0.5)
    assert weights == pytest.approx(16 * 8 * 32, rel=0.5)


def test_gathers_are_kept_and_half_the_bytes_travel_in_bf16(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    output = tmp_path / "kept.json"
    more = ["--cubes", "1x2x2", "--face", "y", "--no-reshard-after-forward", "--type", "bf16", "--output", str(output)]
    assert main(["matmul", *more, *SIZES]) == 0
    (cube,) = json.loads(output.read_text())["results"]
    a, w, c = 2 * 16 * 4, 2 * 8 * 4, 2 * 16 * 8
    assert (cube["collectives"], cube["bytes_received"], cube["traffic_equal"]) == (5, 2 * a + 2 * c + 48, True)
    assert cube["saved_bytes"] == 2 * a + w  # A' of two members, and W in bf16
    captured = capfd.readouterr()
    (line,) = [line for line in captured.out.splitlines() if line.startswith("1x2x2")]
    assert "equal" in line
    assert captured.err == ""  # the profiler's notes among others


def on_rank(output: Path) -> int:
    """`main` on a rank whose process group stands: from_env finds it and connects no other."""
    os.environ.update(WORLD_SIZE=str(dist.get_world_size()), RANK=str(dist.get_rank()), LOCAL_RANK="0")
    return main(["matmul", "--cubes", "2x2x1,1x1x4", *SIZES, "--output", str(output)])


@pytest.mark.slow
def test_under_torchrun_the_cubes_share_the_processes(tmp_path: Path) -> None:
    output = tmp_path / "world.json"
    assert run_ranks(4, on_rank, output) == [0] * 4
    content = json.loads(output.read_text())
    assert [(cube["cube"], cube["ranks"]) for cube in content["results"]] == [("2x2x1", 4), ("1x1x4", 4)]
    assert all(cube["traffic_equal"] and cube["bytes_received"] for cube in content["results"])
    assert content["difference"] < 1e-6


class Whereabouts:
    """A session that knows its process and its cube."""

    def __init__(self, cube: Cube) -> None:
        self.cube = cube

    def where(self) -> tuple[int, str, int]:
        return os.getpid(), str(self.cube.shape), self.cube.rank

    def close(self) -> None:
        pass


def test_cubes_of_one_size_share_their_processes() -> None:
    shapes = [CubeShape(y=2), CubeShape(), CubeShape(z=2)]
    with ExitStack() as stack:
        found = [part.call(Whereabouts.where) for part in processes.start(shapes, Whereabouts, stack)]
    first, single, second = ([process for process, _, _ in part] for part in found)
    assert first == second
    assert len({*first, *single}) == 3
    assert [part[0][1] for part in found] == [str(shape) for shape in shapes]
    assert [rank for _, _, rank in found[2]] == [0, 1]


def test_every_second_round_runs_backwards() -> None:
    order: list[tuple[int, int]] = []
    results = interleave(["a", "b"], 3, lambda i, number: order.append((i, number)) or 10 * i + number, shown=False)
    assert order == [(0, 0), (1, 0), (1, 1), (0, 1), (0, 2), (1, 2)]
    assert results == [[0, 1, 2], [10, 11, 12]]


def test_peak_is_of_what_is_alive_at_once(capfd: pytest.CaptureFixture[str]) -> None:
    before = torch.zeros(1000)  # no part of it

    def run() -> None:
        first = before + 1  # 4000 bytes
        second = torch.cat([first, first])  # and 8000
        del first
        third = second[:500] + 1  # 2000, when 4000 are gone
        os.write(2, b"said meanwhile\n")
        del third

    assert peak_bytes(run) == 12_000
    assert capfd.readouterr().err.startswith("said meanwhile\n")  # a build for GPUs may say that there are none


@pytest.mark.parametrize(
    ("more", "message"),
    [
        (["--cubes", "1x1x1,2x2"], "Got '2x2'"),
        (["--cubes", "2x3x1"], "cube 2x3x1: --rows must be a multiple of 6. Got 32."),
        (["--cubes", "1x1x16", "--rows", "64"], "cube 1x1x16: --inputs must be a multiple of 16. Got 8."),
        (["--cubes", "1x1x16", "--rows", "64", "--face", "y", "--outputs", "8"], "--outputs must be a multiple of 16"),
        (["--data-parallel", "64"], "--rows must be a multiple of 64. Got 32."),
        (["--rows", "0"], "--rows must be a multiple of 1. Got 0."),
        (["--passes", "0"], "--passes must be at least 1. Got 0."),
        (["--output", "missing/matmul.json"], "a file in a folder that exists. Got missing/matmul.json"),
    ],
)
def test_bad_calls_start_no_process(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], more: list[str], message: str
) -> None:
    monkeypatch.setattr(layer, "start", lambda *_: pytest.fail("started processes"))
    error = refused(capsys, main, "matmul", *SIZES, *more)
    assert error.startswith("tools.bench: ")
    assert message in error


def test_under_torchrun_cubes_of_different_sizes_are_refused(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("WORLD_SIZE", "4")
    assert main(["matmul", "--cubes", "2x2x1,2x1x1", *SIZES]) == 2
    assert "need different numbers: 2x2x1 4, 2x1x1 2" in capsys.readouterr().err


# Figures, by hand


def facts(received: int = 8, expected: int = 8, calls: int = 3) -> PassFacts:
    key: Any = ("y", "all-gather")
    return PassFacts(
        device="cpu",
        threads=1,
        received=Counter({key: received}),
        closed_form=Counter({key: expected}),
        calls=Counter({key: calls}),
        closed_form_calls=Counter({key: 3}),
        saved=received,
        peak=2 * received,
        squares=(1.0, 2.0, 4.0),
    )


def sample(forward: float) -> PassSample:
    return PassSample(forward=forward, backward=2 * forward)


def made(*found: PassFacts) -> PassFigures:
    # Two ranks, two rounds of two passes; the seconds of a pass are the mean of both ranks.
    turns = [[[sample(2.0), sample(4.0)], [sample(4.0), sample(4.0)]], [[sample(5.0), sample(6.0)]] * 2]
    base = [[[sample(1.0)] * 2] * 2, [[sample(2.0)] * 2] * 2]
    return figures(CubeShape(y=2), turns, found, base, flops=270)


def test_figures_by_hand() -> None:
    cube = made(facts(8, 8), facts(6, 6))
    assert cube.seconds == ((9.0, 12.0), (15.0, 18.0))
    assert (cube.forward_seconds, cube.backward_seconds, cube.seconds_median) == (4.5, 9.0, 13.5)
    assert cube.seconds_quartiles == (11.25, 15.75)
    assert cube.ratio == 13.5 / 4.5
    assert cube.ratio_range == (16.5 / 6, 10.5 / 3)
    assert cube.flops_per_second == 20
    assert (cube.collectives, cube.bytes_received, cube.bytes_closed_form) == (3, 8, 8)
    assert (cube.saved_bytes, cube.peak_bytes) == (8, 16)
    assert cube.squares == (2.0, 4.0, 8.0)
    assert cube.traffic_equal
    start, times = ["1x2x1", "2", "1", "4500.0", "9000.0", "13500.0"], ["11250.0-15750.0", "3.00", "2.75-3.50"]
    assert cells(cube) == [*start, *times, "0.0", "3", "0.00", "equal", "0.00", "0.00"]
    assert header(PassFigures)[3:6] == ["forward ms", "backward ms", "pass ms"]
    assert len(table([cube])) == 2


def test_what_is_wrong_is_found() -> None:
    command, good = MatmulCommand(), made(facts())
    assert command.faults([good, good]) == []
    # The rank that receives less is off by a byte; and by a call.
    pair = made(facts(8, 8), facts(6, 6))
    for wrong in (made(facts(8, 8), facts(6, 7)), made(facts(), facts(calls=4))):
        assert command.faults([pair, wrong]) == ["cube 1x2x1: counted traffic is not its closed form"]
    for squares in ((1.0, 2.0, 4.1), (1.0, float("nan"), 4.0)):
        other = dataclasses.replace(good, squares=squares)
        (fault,) = command.faults([good, other])
        assert "do not compute the same" in fault
    assert difference([good, dataclasses.replace(good, squares=(1.0, 2.0, 5.0))]) == 0.25
