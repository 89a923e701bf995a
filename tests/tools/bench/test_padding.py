"""`bench padding`: its random data, its figures, and one run on real processes."""

from __future__ import annotations

import json
from dataclasses import fields
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tensor3d import CubeShape
from tests.tools.refused import refused
from tools.bench import padding
from tools.bench.__main__ import main
from tools.bench.harness.figures import cells, header
from tools.bench.harness.synthetic_data import RandomPairs, exponential_histogram
from tools.bench.padding import ModeFigures, figures
from tools.corpus.quick.sentencepiece_tokenizer import special_tokens
from tools.training.metrics import StepMetrics

SPECIAL = special_tokens(67)


def arguments(recipe: Path, *more: str) -> list[str]:
    return ["padding", str(recipe), "--data.packing", "lpfhp", *more]


# Random pairs


def test_lengths_follow_the_histogram() -> None:
    # Nothing is shorter than [CLS] A [SEP] B [SEP]: 2 counts as 5.
    source = RandomPairs(np.array([0, 0, 1, 0, 0, 1, 0, 2]), 8, special=SPECIAL, seed=3)
    drawings = [source.draw(epoch) for epoch in range(2)]
    for drawing in drawings:
        assert sorted(drawing.lengths.tolist()) == [5, 5, 5, 5, 7, 7, 7, 7]
        assert drawing.offsets.tolist() == [0, 8]
        assert drawing.segments(np.arange(8)).lengths.tolist() == drawing.lengths.tolist()
    assert drawings[0].lengths.tolist() != drawings[1].lengths.tolist()


def test_lengths_are_as_near_to_a_histogram_as_whole_numbers_can_be() -> None:
    histogram = np.concatenate([np.zeros(5, dtype=np.int64), np.random.default_rng(1).integers(0, 99, size=60)])
    drawn = np.bincount(RandomPairs(histogram, 1000, special=SPECIAL, seed=0).draw(0).lengths, minlength=65)
    assert np.abs(drawn - 1000 * histogram / histogram.sum()).max() < 1


def test_a_pair_is_a_function_of_seed_epoch_and_number() -> None:
    histogram = exponential_histogram(64)
    source = RandomPairs(histogram, 50, special=SPECIAL, seed=1)
    again = RandomPairs(histogram, 50, special=SPECIAL, seed=1)
    other = RandomPairs(histogram, 50, special=SPECIAL, seed=2)
    whole = source.draw(4).segments(np.arange(50))
    picked = again.draw(4).segments(np.array([7, 3, 3]))
    for name in ("a_length", "b_length", "label", "ids"):
        assert getattr(picked, name).tolist() == getattr(whole.take(np.array([7, 3, 3])), name).tolist()
    for different in (other.draw(4), source.draw(5)):
        text = different.segments(np.arange(50)).ids
        assert len(text) == len(whole.ids)
        assert np.mean(text == whole.ids) < 0.1


def test_pairs_are_whole() -> None:
    pairs = RandomPairs(exponential_histogram(64), 400, special=SPECIAL, seed=0).draw(0).segments(np.arange(400))
    assert pairs.a_length.min() == pairs.b_length.min() == 1
    assert set(pairs.ids.tolist()) == set(SPECIAL.ordinary.tolist())
    assert pairs.label.sum() == pytest.approx(200, abs=60)


def test_the_formula_is_an_exponential_that_is_cut() -> None:
    share = exponential_histogram(512) / exponential_histogram(512).sum()
    assert len(share) == 513
    assert share[:5].tolist() == [0] * 5
    # exp(-1/320) from one length to the next, and exp(-507/320) that would be longer than the longest but one.
    assert share[101] / share[100] == pytest.approx(np.exp(-1 / 320), rel=1e-6)
    assert share[512] == pytest.approx(np.exp(-507 / 320), rel=1e-6)
    with pytest.raises(ValueError, match=r"at least 5 tokens\. Got 4"):
        exponential_histogram(4)


@pytest.mark.parametrize(
    ("histogram", "more", "message"),
    [
        ([0, 0], {}, "not all of them 0"),
        ([3, -1], {}, "at least 0"),
        ([[1]], {}, "a row of weights"),
        ([1], {"sequences": 0}, "Got 0 and 0"),
        ([1], {"seed": -1}, "Got 1 and -1"),
    ],
)
def test_impossible_pairs_are_refused(histogram: Any, more: dict[str, int], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        RandomPairs(np.array(histogram), special=SPECIAL, **{"sequences": 1, "seed": 0, **more})


# Figures, by hand


def step(seconds: float, tokens: int, fill: float) -> StepMetrics:
    values: dict[str, Any] = dict.fromkeys((field.name for field in fields(StepMetrics)), 0)
    return StepMetrics(**values | {"seconds": seconds, "tokens_per_second": tokens / seconds, "fill": fill})


def test_figures_by_hand() -> None:
    # Two ranks, 100 slots a step. Padded: steps of 1 s, then of 2 s, whichever tokens they happened to have.
    padded = [[[step(1.0, 40, 0.4)], [step(1.0, 40, 0.4)]], [[step(2.0, 60, 0.6)], [step(2.0, 60, 0.6)]]]
    # Packed: 1.25 s, the mean of both ranks, then 2 s.
    packed = [[[step(1.0, 99, 0.99)], [step(1.5, 99, 0.99)]], [[step(2.0, 98, 0.98)], [step(2.0, 98, 0.98)]]]
    base = figures(CubeShape(x=2), "padded", padded, padded, 0.5, 0.5)
    mode = figures(CubeShape(x=2), "packed", packed, padded, 1.0, 0.5)
    assert (base.slots_per_second, base.tokens_per_second) == (75.0, 37.5)
    assert (base.padding_ratio, base.speed_up, base.efficiency) == (1.0, 1.0, 1.0)
    assert mode.seconds == ((1.25,), (2.0,))
    assert (mode.steps, mode.ranks, mode.seconds_median) == (2, 2, 1.625)
    assert mode.slots_per_second == mode.tokens_per_second == pytest.approx((80 + 50) / 2)
    assert mode.padding_ratio == 2.0
    assert [mode.efficiency, *mode.efficiency_range] == pytest.approx([0.9, 0.8, 1.0])
    assert [mode.speed_up, *mode.speed_up_range] == pytest.approx([1.8, 1.6, 2.0])
    start, times, ratios = (
        ("packed", "1625.0", "100.00%", "65"),
        ("2.000", "1.800", "1.60-2.00"),
        ("0.900", "0.80-1.00"),
    )
    assert cells(mode)[1:] == [*start, *times, *ratios]
    assert len(cells(mode)) == len(header(ModeFigures))


# Real processes


@pytest.mark.slow
def test_all_modes_on_two_processes(recipe: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    # Half a pack each, and in the second bin the fullest that it can be.
    (tmp_path / "lengths.json").write_text(json.dumps({"counts": [0, 0, 0, 0, 0] + [0] * 11 + [5]}))
    output = tmp_path / "padding.json"
    options = ["--histogram", str(tmp_path / "lengths.json"), "--cubes", "1x2x1", "--steps", "2", "--rounds", "2"]
    more = [*options, "--warmup", "1", "--sequences", "64", "--data.bin-width", "8", "--output", str(output)]
    assert main(arguments(recipe, *more)) == 0
    content = json.loads(output.read_text())
    assert (content["benchmark"], content["lengths"]) == ("padding", str(tmp_path / "lengths.json"))
    packed, padded, binned = content["results"]
    assert [mode["mode"] for mode in content["results"]] == ["packed", "padded", "binned"]
    assert (packed["fill"], padded["fill"], binned["fill"]) == (1.0, 0.5, 1.0)
    assert (packed["padding_ratio"], padded["padding_ratio"]) == (2.0, 1.0)
    for mode in content["results"]:
        assert (mode["cube"], mode["ranks"], mode["steps"]) == ("1x2x1", 2, 2)
        assert [len(seconds) for seconds in mode["seconds"]] == [1, 1]
        assert mode["speed_up"] == pytest.approx(mode["padding_ratio"] * mode["efficiency"])
    slots = 8 * 32
    assert packed["slots_per_second"] == pytest.approx(np.mean([slots / seconds[0] for seconds in packed["seconds"]]))
    out = capsys.readouterr().out
    assert f"written: {output}" in out
    assert [line.split()[1] for line in out.splitlines() if line.startswith("1x2x1")] == ["packed", "padded", "binned"]


def test_what_is_said_of_lengths(recipe: Path, tmp_path: Path) -> None:
    path = tmp_path / "lengths.json"
    path.write_text(json.dumps({"counts": [0, 0, 7, 0, 1, 0, 0, 9, 0, 0]}))
    command = padding.PaddingCommand.defaults(arguments(recipe))
    assert command.lengths()[1] == "exponential with mean 20, cut at 32"
    named = padding.PaddingCommand(recipe=recipe, settings=command.settings, histogram=path)
    histogram, words = named.lengths()
    assert histogram.tolist() == [0, 0, 7, 0, 1, 0, 0, 9]
    assert words == f"{path} (8 shorter than 5 tokens taken as 5)"


@pytest.mark.parametrize(
    ("more", "message"),
    [
        (["--cubes", "1x1x1,2x2"], "Got '2x2'"),
        (["--cubes", "3x1x1"], "cube 3x1x1: a global batch of 8 packs does not divide"),
        (["--cubes", "1x8x1"], "cube 1x8x1: heads must divide by y=8. Got 4."),
        (["--modes", "packed,binned"], "padded among them. Got 'packed,binned'"),
        (["--modes", "padded,full"], "must be some of packed,padded,binned"),
        (["--data.packing", "padded"], "must fill packs, in one group. Got data.packing='padded'"),
        (["--batch.packing-rule", "sequences"], "all modes have the same slots a step"),
        (["--data-parallel", "0"], "cube axis data must be a whole number of at least 1. Got 0"),
        (["--steps", "0"], "--steps must be at least 1. Got 0"),
        (["--sequences", "0"], "--sequences must be at least 1. Got 0"),
        (["--histogram", "missing.json"], f"there is no histogram file {Path('missing.json').absolute()}"),
        (["--output", "missing/padding.json"], "a file in a folder that exists. Got missing/padding.json"),
        (["--data.bin-width", "1", "--batch.packs-per-rank", "1", "--cubes", "1x2x1"], "binned with data.bin_width=1"),
    ],
)
def test_bad_calls_start_no_process(
    recipe: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], more: list[str], message: str
) -> None:
    monkeypatch.setattr(padding, "start_trainings", lambda *_: pytest.fail("started processes"))
    error = refused(capsys, main, *arguments(recipe, *more))
    assert error.startswith("tools.bench: ")
    assert message in error


def test_sequences_longer_than_the_recipe_allows_are_refused(
    recipe: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "lengths.json"
    path.write_text(json.dumps({"counts": [0] * 33 + [1]}))
    assert main(arguments(recipe, "--histogram", str(path))) == 2
    assert "sequences of 33 tokens, more than data.max_length=32" in capsys.readouterr().err


def test_under_a_launcher_it_is_refused(
    recipe: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("WORLD_SIZE", "4")
    assert main(arguments(recipe)) == 2
    assert "Call it without torchrun" in capsys.readouterr().err
