"""Traces of chosen steps: which files there are, and what is in them."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

import pytest
import torch

from tools.training import profiling
from tools.training.profiling import ProfileSchedule, StepProfiler


def train(tracer: StepProfiler, steps: range) -> None:
    weight = torch.ones(8, 8, requires_grad=True)
    for step in steps:
        tracer.begin(step)
        (weight @ weight).sum().backward()
        tracer.end(step)


def trace(path: Path) -> list[dict[str, Any]]:
    events: list[dict[str, Any]] = json.loads(gzip.decompress(path.read_bytes()))["traceEvents"]
    return events


@pytest.mark.parametrize(
    ("text", "windows"),
    [
        ("5", ((5, 5),)),
        ("10-12", ((10, 12),)),
        ("10,11", ((10, 11),)),
        ("50, 3,10-12", ((3, 3), (10, 12), (50, 50))),
        ("1-4,3-9,10", ((1, 10),)),
        ("1-9,2-3", ((1, 9),)),
    ],
)
def test_steps_are_read(text: str, windows: tuple[tuple[int, int], ...]) -> None:
    assert ProfileSchedule.parse(text).windows == windows


@pytest.mark.parametrize("text", ["", "0", "12-10", "3-", "a", "1,,2", "-3", "1.5"])
def test_other_words_are_refused(text: str) -> None:
    with pytest.raises(ValueError, match=r'written "10-12" or "3,10-12".*Got '):
        ProfileSchedule.parse(text)


def test_chosen_steps_are_in_the_trace(tmp_path: Path) -> None:
    with StepProfiler(ProfileSchedule.parse("3-4,7"), tmp_path, rank=0) as tracer:
        train(tracer, range(1, 10))
    names = ["trace-rank0-step7.json.gz", "trace-rank0-steps3-4.json.gz"]
    assert sorted(path.name for path in tmp_path.iterdir()) == names
    assert sorted(path.name for path in tracer.written) == names
    events = trace(tmp_path / "trace-rank0-steps3-4.json.gz")
    seen = {event.get("name") for event in events}
    assert {"step 3", "step 4", "aten::mm"} <= seen
    assert not {"step 2", "step 5", "step 7"} & seen
    products = [event for event in events if event.get("name") == "aten::mm"]
    assert len(products) == 2 * 3, "one forward and two backward, in each of two steps"


def test_a_window_that_is_left_early_is_written_as_far_as_it_came(tmp_path: Path) -> None:
    def interrupted() -> None:
        with StepProfiler(ProfileSchedule.parse("2-9"), tmp_path, rank=0) as tracer:
            train(tracer, range(1, 4))
            tracer.begin(4)
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        interrupted()
    assert [path.name for path in tmp_path.iterdir()] == ["trace-rank0-steps2-3.json.gz"]


def test_a_run_that_resumes_inside_of_a_window_traces_its_rest(tmp_path: Path) -> None:
    with StepProfiler(ProfileSchedule.parse("2-5"), tmp_path, rank=0) as tracer:
        train(tracer, range(4, 8))
    assert [path.name for path in tmp_path.iterdir()] == ["trace-rank0-steps4-5.json.gz"]


def test_other_ranks_and_other_steps_pay_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(profiling.torch.profiler, "profile", lambda **_: pytest.fail("a profiler was made"))
    monkeypatch.setattr(profiling.torch.profiler, "record_function", lambda _: pytest.fail("a range was made"))
    train(StepProfiler(ProfileSchedule.parse("2"), tmp_path, rank=1), range(1, 4))
    train(StepProfiler(ProfileSchedule.parse("9"), tmp_path, rank=0), range(1, 4))
    train(StepProfiler(None, tmp_path, rank=0), range(1, 4))
    assert list(tmp_path.iterdir()) == []


def test_a_chosen_rank_writes_its_own_file(tmp_path: Path) -> None:
    with StepProfiler(ProfileSchedule.parse("1"), tmp_path, rank=5, ranks=(0, 5)) as tracer:
        train(tracer, range(1, 3))
    assert [path.name for path in tmp_path.iterdir()] == ["trace-rank5-step1.json.gz"]
