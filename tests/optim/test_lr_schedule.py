"""Learning rates over a run, by hand."""

from __future__ import annotations

import math
from typing import Any

import pytest

from tensor3d.optim import LRSchedule


def make(**options: Any) -> LRSchedule:
    """With a peak of 2, 10 steps, and a linear rate, unless told otherwise."""
    values: dict[str, Any] = {"kind": "linear", "lr": 2.0, "steps": 10}
    return LRSchedule(**(values | options))


def rates(kind: str, **options: Any) -> list[float]:
    """Of a run of 10 steps with a peak of 2, 2 of them rising."""
    schedule = make(**({"kind": kind, "warmup_steps": 2} | options))
    return [schedule.at(step) for step in range(schedule.steps + 2)]


def test_linear_is_what_it_always_was() -> None:
    for steps in (1, 2, 7, 300, 7038):
        for share in (0.0, 0.1, 0.2843, 0.999):
            warmup, peak = max(1, round(share * steps)), 2e-3 / 3
            schedule = LRSchedule(kind="linear", lr=peak, steps=steps, warmup_steps=warmup)
            for step in range(steps + 3):
                wanted = peak * max(0.0, steps - step) / max(1, steps - warmup)
                if step < warmup:
                    wanted = peak * (step + 1) / warmup
                assert schedule.at(step) == wanted, "to the last bit"


def test_all_rise_to_the_peak() -> None:
    for kind in ("linear", "polynomial", "cosine", "wsd", "constant"):
        assert rates(kind)[:2] == [1.0, 2.0]
        assert rates(kind, warmup_steps=0)[0] == 2.0


def test_after_the_rise() -> None:
    assert rates("linear")[2:] == pytest.approx([2, 1.75, 1.5, 1.25, 1, 0.75, 0.5, 0.25, 0, 0])
    assert rates("constant")[2:] == [2.0] * 10
    cosine = [1 + math.cos(math.pi * n / 8) for n in range(9)]
    assert rates("cosine")[2:] == pytest.approx([*cosine, 0])
    assert rates("wsd", decay=0.4)[2:] == pytest.approx([2, 2, 2, 2, 2, 1.5, 1, 0.5, 0, 0])
    fast = [2 * (1 - share**0.5) for share in (0, 0.25, 0.5, 0.75, 1, 1)]
    assert rates("wsd", decay=0.4, decay_shape="sqrt")[2:] == pytest.approx([2, 2, 2, 2, *fast])


def test_a_floor_is_a_share_of_the_peak() -> None:
    assert rates("cosine", floor=0.1)[-2:] == [pytest.approx(0.2)] * 2
    assert rates("cosine", floor=0.1)[6] == pytest.approx(1.1)
    assert rates("wsd", floor=0.1, decay=0.4)[8:] == pytest.approx([1.1, 0.65, 0.2, 0.2])
    assert rates("polynomial", floor=0.1)[5:] == pytest.approx([1.1, 0.92, 0.74, 0.56, 0.38, 0.2, 0.2])
    assert rates("cosine", floor=1.0)[2:] == pytest.approx([2.0] * 10)


def test_the_polynomial_counts_from_the_begin_of_the_run() -> None:
    """Phase 1 of BERT-large with LAMB: warm-up of 28.43 %, then down from 84.6 % of the peak, as the reference does."""
    steps, warmup = 7038, round(0.2843 * 7038)
    schedule = LRSchedule(kind="polynomial", lr=6e-3, steps=steps, warmup_steps=warmup, power=0.5)
    assert warmup == 2001
    assert schedule.at(0) == pytest.approx(6e-3 / 2001)
    assert schedule.at(warmup - 1) == 6e-3
    assert schedule.at(warmup) == pytest.approx(6e-3 * math.sqrt(5037 / 7038))
    assert schedule.at(steps // 2) == pytest.approx(6e-3 * math.sqrt(0.5))
    assert schedule.at(steps - 1) == pytest.approx(6e-3 / math.sqrt(steps))
    assert schedule.at(steps) == 0.0


def test_a_run_of_one_step() -> None:
    for kind in ("linear", "polynomial", "cosine", "wsd", "constant"):
        assert rates(kind, steps=1, warmup_steps=1)[0] == 2.0


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"kind": "exponential"}, "kind.*'exponential'"),
        ({"lr": 0.0}, r"lr must be above 0 and finite\. Got 0\.0"),
        ({"lr": math.inf}, "lr must be above 0 and finite"),
        ({"steps": 0}, r"steps.*\b1.*\b0"),
        ({"steps": 2.5}, r"Got 2\.5"),
        ({"warmup_steps": -1}, r"warmup_steps.*\b0.*-1"),
        ({"warmup_steps": 11}, r"warmup_steps.*steps=10.*\b11"),
        ({"power": 0.0}, r"power.*\b0.*\b0\.0"),
        ({"floor": 1.5}, r"floor.*\b0.*\b1.*\b1\.5"),
        ({"floor": math.nan}, "floor must be a share"),
        ({"decay": 0.0}, r"decay.*\b0\.0"),
        ({"kind": "wsd", "warmup_steps": 5, "decay": 0.7}, "take 5 \\+ 7 steps; the run has 10"),
    ],
)
def test_what_cannot_be_is_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make(**options)


def test_there_is_no_step_before_the_first() -> None:
    with pytest.raises(ValueError, match=r"step.*0.*-1"):
        LRSchedule(kind="constant", lr=1.0, steps=10).at(-1)
