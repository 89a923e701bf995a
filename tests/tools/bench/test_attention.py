"""`bench attention`: what it compares, by hand; what it refuses."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch

from tools.bench import attention
from tools.bench.__main__ import main
from tools.bench.attention import drawn, figures

SMALL = ["--tokens", "400", "--longest", "40", "--heads", "2", "--head-dim", "8", "--rounds", "2"]


def test_figures_by_hand() -> None:
    found = figures("grouped", [2.0, 4.0, 3.0], [8.0, 8.0, 9.0], [2.0, 2.0, 2.0], (5, 1.25), 6e9)
    assert (found.median, found.quartiles) == (3.0, (2.5, 3.5))
    assert (found.faster_than_padded, found.of_prediction) == (3.0, 1.5), "medians of the rounds' ratios"
    assert (found.calls, found.area, found.flops) == (5, 1.25, 2e9)


def test_lengths_follow_the_histogram() -> None:
    counts = np.zeros(31, dtype=np.int64)
    counts[[10, 30]] = 3, 1
    lengths = drawn(counts, 600)
    assert (sorted(set(lengths)), sum(lengths), lengths.count(30)) == ([10, 30], 600, 10)


def test_measures_and_writes(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file, threads = tmp_path / "figures.json", torch.get_num_threads()
    assert main(["attention", *SMALL, "--threads", "1", "--backends", "grouped,reference", "--output", str(file)]) == 0
    content = json.loads(file.read_text())
    assert (content["threads"], torch.get_num_threads()) == (1, threads)
    assert [each["name"] for each in content["results"]] == ["padded", "full", "grouped", "reference"]
    padded, full, grouped, reference = content["results"]
    squares = sum(length**2 for length in content["lengths"])
    assert padded["area"] == len(content["lengths"]) * 40**2 / squares
    assert reference["area"] == sum(content["lengths"]) ** 2 / squares
    assert grouped["area"] >= 1
    assert padded["faster_than_padded"] == 1
    assert full["of_prediction"] == pytest.approx(full["area"])
    assert grouped["flops"] == pytest.approx(12 * 2 * 8 * squares / grouped["median"])
    assert full["flops"] == pytest.approx(12 * 2 * 8 * squares * full["area"] / full["median"])
    assert all(len(each["seconds"]) == 2 for each in content["results"])
    assert "x of prediction" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["--backends", "grouped,flash"], "--backends must be some of"),
        (["--backends", "flex"], "flex cannot be measured here: it has no backward pass on cpu"),
        (["--flash-attention", "FA4"], "--flash-attention is for the backend varlen. Got --backends grouped"),
        (["--dropout", "1"], "--dropout must be at least 0 and below 1"),
        (["--head-dim", "0"], "--head-dim must be at least 1"),
        (["--threads", "0"], "--threads must be at least 1"),
        (["--longest", "4"], "--longest must be at least 5. Got 4"),
        (["--output", "/nowhere/at/all.json"], "folder that exists"),
    ],
)
def test_what_cannot_be_is_refused(options: list[str], said: str, capsys: pytest.CaptureFixture[str]) -> None:
    if "flex" in options and torch.cuda.is_available():
        pytest.skip("can be measured here")
    assert main(["attention", *SMALL, *options]) == 2
    assert said in capsys.readouterr().err


def test_it_is_one_process(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")
    assert main(["attention", *SMALL]) == 2
    assert "Call it without torchrun" in capsys.readouterr().err


def test_a_gpu_is_waited_for_once_a_turn(monkeypatch: pytest.MonkeyPatch) -> None:
    told: list[str] = []
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: told.append("wait"))
    assert attention._seconds(lambda: told.append("pass"), lambda: float(len(told)), gpu=True) == 1.1
    assert told == ["pass"] * 10 + ["wait"]
    told.clear()
    assert attention._seconds(lambda: told.append("pass"), lambda: float(len(told)), gpu=False) == 1
    assert told == ["pass"]
