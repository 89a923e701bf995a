"""`bench layer` on real processes: its counts equal the closed form, and every cube computes the same."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tools.bench import layer
from tools.bench.__main__ import main

SIZES = ["--hidden", "16", "--heads", "4", "--inner", "32", "--sequences", "8", "--length", "4", "--warmup", "1"]


def measured(tmp_path: Path, *more: str) -> list[dict[str, Any]]:
    output = tmp_path / "layer.json"
    assert main(["layer", *SIZES, "--passes", "2", "--rounds", "1", *more, "--output", str(output)]) == 0
    content = json.loads(output.read_text())
    assert content["benchmark"] == "layer"
    assert content["subject"]["sequences"] == 8
    results: list[dict[str, Any]] = content["results"]
    assert all(cube["traffic_equal"] for cube in results)
    assert content["difference"] < 1e-5
    return results


@pytest.mark.slow
def test_the_same_layer_on_all_cubes(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    one, plane, boxes = measured(tmp_path, "--cubes", "1x1x1,1x2x2,4x1x1")
    assert [cube["collectives"] for cube in (one, plane, boxes)] == [0, 27, 5]
    # Weights of the box, in bytes: gathered twice and scattered once, three quarters of each; and the sums of 128
    # elements of vectors, 3H + I on face y and 6H on face z, in one bucket; two numbers that tell which were used.
    vectors = 2 * 3 * 4 * (48 + 32 + 96) // 4
    assert boxes["bytes_received"] == 3 * 3 * 4 * (4 * 16 * 16 + 2 * 16 * 32) // 4 + vectors + 2 * 3 * 8
    # 12 states: five of attention, two of I = 2H in the MLP, what it and the norms read. A norm keeps two
    # numbers a row too, or eight where two members' statistics were gathered; attention one a row and head.
    assert one["saved_bytes"] == 4 * (12 * 32 * 16 + 2 * 2 * 32 + 4 * 32)
    assert plane["saved_bytes"] == 4 * (12 * 32 * 16 // 4 + 2 * 8 * 16 + 2 * 16)
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in lines if "equal" in line] == ["1x1x1", "1x2x2", "4x1x1"]


@pytest.mark.slow
@pytest.mark.parametrize("recompute", ["layer", "attention"])
def test_recomputed_and_with_copies(tmp_path: Path, recompute: str) -> None:
    more = ["--cubes", "1x1x1,1x2x1,1x1x2", "--data-parallel", "2", "--recompute", recompute]
    for cube in measured(tmp_path, *more):
        assert cube["collectives"] > 0
        if recompute == "layer":
            assert cube["saved_bytes"] == 4 * 32 * 16 // cube["ranks"]  # the input alone


@pytest.mark.parametrize(
    ("more", "message"),
    [
        (["--cubes", "1x8x1"], "cube 1x8x1: --heads must be a multiple of 8. Got 4."),
        (["--cubes", "1x1x3"], "cube 1x1x3: --hidden must be a multiple of 3. Got 16."),
        (["--cubes", "16x1x1"], "cube 16x1x1: --sequences must be a multiple of 16. Got 8."),
        (["--inner", "30", "--cubes", "1x4x1"], "cube 1x4x1: --inner must be a multiple of 4. Got 30."),
        (["--heads", "3"], "--hidden must be a multiple of 3. Got 16."),
        (["--heads", "0"], "--heads must be a multiple of 1. Got 0."),
        (["--length", "0"], "--sequences times --length must be a multiple of 1. Got 0."),
    ],
)
def test_bad_calls_start_no_process(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], more: list[str], message: str
) -> None:
    monkeypatch.setattr(layer, "start", lambda *_: pytest.fail("started processes"))
    assert main(["layer", *SIZES, *more]) == 2
    assert message in capsys.readouterr().err
