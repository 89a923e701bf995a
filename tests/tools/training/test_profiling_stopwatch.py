"""Phases of a step: what is counted to which, and that nothing waits for the device."""

from __future__ import annotations

import time

import pytest
import torch

from tensor3d import Cube, Linear3D
from tests.ranks import run_ranks
from tools.training.profiling import Phase, PhaseTimer, StepTimes

CPU = torch.device("cpu")


class Clock:
    """A device whose clock stands at `at` milliseconds, and which notes who waits for it."""

    def __init__(self) -> None:
        self.at, self.waits = 0.0, 0

    def now(self) -> Moment:
        return Moment(self)


class Moment:
    def __init__(self, clock: Clock) -> None:
        self.clock, self.at = clock, clock.at

    def synchronize(self) -> None:
        self.clock.waits += 1

    def elapsed_time(self, end: Moment) -> float:
        return end.at - self.at


def test_phases_that_alternate_are_added_up() -> None:
    clock = Clock()
    watch = PhaseTimer(CPU, now=clock.now)
    watch.begin()
    for phase, milliseconds in (
        ("data", 5),
        ("forward", 10),
        ("backward", 20),
        ("forward", 30),
        ("backward", 40),
        ("optimizer", 7),
    ):
        watch.mark(phase)  # type: ignore[arg-type]
        clock.at += milliseconds
    lap = watch.end()
    clock.at += 1000
    assert clock.waits == 0, "marking waits for nothing"
    assert lap.seconds() == pytest.approx(
        {"other": 0.0, "data": 0.005, "forward": 0.04, "backward": 0.06, "optimizer": 0.007}
    )
    assert clock.waits == 1, "reading waits for the last moment alone"


def test_the_sum_of_gradients_interrupts_the_backward_pass() -> None:
    clock = Clock()
    watch = PhaseTimer(CPU, now=clock.now)
    watch.begin()
    watch.mark("backward")
    clock.at += 10
    watch.observe("sum")
    clock.at += 3
    watch.observe("summed")
    clock.at += 5
    assert watch.end().seconds() == pytest.approx({"other": 0.0, "backward": 0.015, "gradient_sum": 0.003})


def test_outside_of_a_lap_nothing_is_noted() -> None:
    clock = Clock()
    watch = PhaseTimer(CPU, now=clock.now)
    watch.mark("forward")
    watch.observe("sum")
    watch.observe("summed")
    watch.begin()
    clock.at += 2
    watch.begin()  # the step before was given up
    clock.at += 1
    assert watch.end().seconds() == {"other": 0.001}
    with pytest.raises(AssertionError, match="without begin"):
        watch.end()


def test_laps_do_not_disturb_one_another() -> None:
    clock = Clock()
    watch = PhaseTimer(CPU, now=clock.now)
    laps: list[StepTimes] = []
    for milliseconds in (1, 2, 3):
        watch.begin()
        watch.mark("forward")
        clock.at += milliseconds
        laps.append(watch.end())
    assert [lap.seconds()["forward"] for lap in laps] == pytest.approx([0.001, 0.002, 0.003])


def test_real_time_on_the_cpu() -> None:
    watch = PhaseTimer(CPU)
    watch.begin()
    watch.mark("data")
    time.sleep(0.02)
    watch.mark("forward")
    seconds = watch.end().seconds()
    assert 0.02 <= seconds["data"] < 1.0
    assert seconds["forward"] < seconds["data"]


def _observed() -> dict[Phase, float]:
    """A step with a bias, whose gradient is summed over ranks."""
    cube = Cube(2, 1, 1)
    cube.manual_seed(0)
    layer = Linear3D(8, 8, cube, face="z")
    watch = PhaseTimer(cube.device)
    cube.ledger.observer = watch.observe
    layer(torch.ones(4, 8)).sum().backward()  # outside of a lap
    watch.begin()
    watch.mark("forward")
    output = layer(torch.ones(4, 8)).sum()
    watch.mark("backward")
    output.backward()
    watch.mark("optimizer")
    return watch.end().seconds()


def test_the_ledger_tells_when_it_sums() -> None:
    for seconds in run_ranks(2, _observed):
        assert list(seconds) == ["other", "forward", "backward", "gradient_sum", "optimizer"]
        assert seconds["gradient_sum"] > 0
