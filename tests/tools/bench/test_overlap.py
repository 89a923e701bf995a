"""`bench overlap`: what it predicts of a trace, what it refuses, and a run."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from tools.bench.__main__ import main
from tools.bench.harness.figures import cells, header
from tools.bench.overlap import Event, Facts, Sample, Side, Trace, far_off, faults, latency_figures, replayed

# One collective is issued, a second of work is done, then its result is waited for, which takes half a second more;
# another one is waited for at once and takes a quarter.
TRACE = [
    Event(kind="issued", number=1, at=10.0),
    Event(kind="waits", number=1, at=11.0),
    Event(kind="has", number=1, at=11.5),
    Event(kind="issued", number=2, at=12.0),
    Event(kind="waits", number=2, at=12.0),
    Event(kind="has", number=2, at=12.25),
]


@pytest.mark.parametrize(
    ("latency", "seconds", "slept"),
    [
        (0.0, 2.25, 0.0),  # as it was
        (0.2, 2.25, 0.2),  # less than both took
        (0.5, 2.5, 0.5),  # of the second, a quarter more
        (1.5, 3.5, 2.0),
        (3.0, 6.5, 5.0),  # 3 from the first issue, half a second of work, 3 more; a second of work hides one
    ],
)
def test_a_trace_on_a_slower_wire(latency: float, seconds: float, slept: float) -> None:
    assert replayed(TRACE, latency) == pytest.approx((seconds, slept))


def test_what_has_arrived_before_it_is_asked_for_takes_the_latency() -> None:
    hidden = [
        Event(kind="issued", number=1, at=0.0),
        Event(kind="waits", number=1, at=2.0),
        Event(kind="has", number=1, at=2.0),
    ]
    assert [replayed(hidden, latency).seconds for latency in (0.0, 1.0, 2.0, 5.0)] == [2.0, 2.0, 2.0, 5.0]


def test_the_second_exchange_of_a_sum_takes_as_long_as_it_did() -> None:
    twice = [
        *TRACE,
        Event(kind="waits", number=2, at=12.5),
        Event(kind="has", number=2, at=13.5),
    ]
    for latency in (0.0, 0.5, 3.0):
        assert replayed(twice, latency).seconds == pytest.approx(replayed(TRACE, latency).seconds + 1.25)


def test_a_trace_makes_a_collective_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    slept: list[float] = []
    now = iter([0.0, 3.0, 3.0, 10.0, 20.0, 20.0, 21.0, 22.0])
    monkeypatch.setattr("time.perf_counter", lambda: next(now))
    monkeypatch.setattr("time.sleep", slept.append)
    trace = Trace(latency=5.0)
    for number in (1, 2):
        place = (number, "x", "all-gather")
        trace.issued(place)  # type: ignore[arg-type]
        trace.waits(place)  # type: ignore[arg-type]
        trace.has(place)  # type: ignore[arg-type]
    trace.waits(place)  # type: ignore[arg-type]
    trace.has(place)  # type: ignore[arg-type]
    assert trace.slept == 2.0
    assert slept == [2.0], "the second one had traveled long enough, and its second exchange has no latency of its own"
    assert [event.kind for event in trace.events] == [*["issued", "waits", "has"] * 2, "waits", "has"]


def test_figures_by_hand() -> None:
    """One step in a round, on two ranks; what is measured without latency is no prediction."""

    def taken(seconds: float, slow: float, hidden: float) -> list[list[list[Sample]]]:
        return [
            [
                [
                    Sample(
                        seconds=seconds,
                        predicted={0.0: seconds, 0.02: slow + rank},
                        hidden=hidden + rank / 5,
                        hidden_predicted={0.02: hidden + rank / 10},
                    )
                ]
                for rank in (-0.5, 0.5)
            ]
        ]

    base: dict[Side, list[list[list[Sample]]]] = {"overlap": taken(1.0, 2.0, 0.5), "none": taken(1.25, 4.0, 0.25)}
    turns: dict[Side, list[list[list[Sample]]]] = {"overlap": taken(2.5, 0.0, 0.75), "none": taken(4.25, 0.0, 0.0)}
    quick, slow = latency_figures(0.0, base, base), latency_figures(0.02, turns, base)
    assert (quick.gain, quick.gain_predicted) == (0.25, None)
    assert cells(quick) == ["0", "1000.0", "1250.0", "0.800", "0.80-0.80", "250.0", "-", "-", "-"]
    assert (slow.gain, slow.gain_predicted, slow.hidden, slow.hidden_predicted) == (1.75, 2.0, 0.75, 0.5)
    assert cells(slow)[-4:] == ["1750.0", "2000.0", "75.0%", "50.0%"]
    assert len(cells(slow)) == len(header(type(slow)))
    assert far_off([quick, slow], 0.0) == far_off([quick, slow], 0.26) == []
    assert far_off([quick, slow], 0.24) == [
        "at 20 ms overlap hides 75.0% of the latencies, and 50.0% were predicted: allowed is a difference of 24.0%"
    ]


SAME = Facts(
    threads=1, losses=(1.0,), received=5, collectives=3, saved=7, peak=9, travelling=1.0, hidden=0.5, same_bits=True
)


@pytest.mark.parametrize("change", [{"losses": (2.0,)}, {"received": 6}, {"collectives": 4}, {"saved": 8}])
def test_what_must_not_differ(change: dict[str, object]) -> None:
    assert faults([{"overlap": SAME, "none": replace(SAME, peak=10, hidden=0.1)}]) == []
    other = replace(SAME, **change)  # type: ignore[arg-type]
    assert len(faults([{"overlap": SAME, "none": SAME}, {"overlap": other, "none": SAME}])) == 1


def test_other_bits_are_a_fault() -> None:
    other = replace(SAME, same_bits=False)
    assert faults([{"overlap": other, "none": other}]) == [
        "overlap changes the weights after some steps, which it must not"
    ]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--cube", "1x1x1"], "at least 2 ranks"),
        (["--latencies", "5,20"], "with 0 among them"),
        (["--latencies", "0,fast"], "must be milliseconds"),
        (["--warmup", "1"], "--warmup must be at least 2"),
        (["--tolerance", "-0.1"], "--tolerance must be at least 0. Got -0.1"),
        (["--sequences", "3"], "must divide by"),
    ],
)
def test_refusals(options: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["overlap", *options]) == 2
    assert message in capsys.readouterr().err


@pytest.mark.slow
def test_a_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    output = tmp_path / "overlap.json"
    sizes = ["--hidden", "32", "--layers", "2", "--heads", "4", "--vocab", "64", "--length", "16"]
    command = ["overlap", "--cube", "2x1x2", "--latencies", "0,20", "--steps", "4", "--rounds", "2", *sizes]
    assert main([*command, "--output", str(output)]) == 0
    assert "the same bits" in capsys.readouterr().out
    found = json.loads(output.read_text())
    quick, slow = found["results"]
    assert quick["gain_predicted"] is None
    assert slow["gain"] > 0, "collectives of 20 ms that travel together and under products are not slower than in turn"
    assert slow["gain_predicted"] > 0
    for rank in found["facts"]:
        assert rank["overlap"]["received"] == rank["none"]["received"] > 0
        assert rank["overlap"]["travelling"] > 0
