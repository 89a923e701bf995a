"""`bench exchange`: its figures, its verdict, and one run on real processes."""

from __future__ import annotations

import json
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import pytest

from tests.tools.refused import refused
from tools.bench import shard_exchange
from tools.bench.__main__ import main
from tools.bench.harness.figures import cells
from tools.bench.shard_exchange import ExchangeCommand, RankExchange, figures, judge, loss_difference, waiting
from tools.training.config import TrainConfig
from tools.training.metrics import StepMetrics


def arguments(recipe: Path, *more: str) -> list[str]:
    corpus = str(recipe.parent / "corpus-2-shards")
    return ["exchange", str(recipe), "--data.packing", "lpfhp", "--corpus", corpus, "--data-parallel", "2", *more]


# Figures, by hand


def step(seconds: float = 1.0, waited: float = 0.0, loss: float = 2.0) -> StepMetrics:
    values: dict[str, Any] = dict.fromkeys((field.name for field in fields(StepMetrics)), 0)
    return StepMetrics(**values | {"seconds": seconds, "data_wait_seconds": waited, "loss": loss})


def test_figures_by_hand() -> None:
    # Two rounds on two ranks.
    reading = [
        [[step(), step()], [step(), step()]],
        [[step(2.0), step(2.0)], [step(2.0), step(2.0)]],
    ]
    turns = [
        [[step(1.0, 0.5), step(1.0)], [step(1.0), step(1.0)]],
        [[step(2.0), step(4.0)], [step(2.0), step(4.0, 1.0)]],
    ]
    noted = [RankExchange(rounds=5, received=4000, seconds=1.0), RankExchange(rounds=5, received=2000, seconds=2.0)]
    group = figures("exchange", turns, reading, noted, every=2)
    assert group.seconds == ((1.0, 1.0), (2.0, 4.0))
    assert (group.steps, group.seconds_median) == (4, 1.5)
    assert (group.ratio, group.ratio_range) == (1.25, (1.0, 1.5))
    # Rank 0 waited 0.5 of 8 seconds, rank 1 waited 1.
    assert (group.wait_share, group.wait_share_worst) == (0.75 / 8, 1 / 8)
    assert group.wait_share_range == ((1 / 6) / 2, (0.5 / 2) / 2)
    assert (group.bytes_per_step, group.bytes_per_step_worst) == (300.0, 400.0)
    assert group.rounds == 5
    assert group.exchange_seconds == pytest.approx(0.3)
    base = figures("all shards", reading, reading, [RankExchange()] * 2, every=2)
    assert (base.ratio, base.wait_share, base.bytes_per_step, base.rounds) == (1.0, 0.0, 0.0, 0)
    assert "+9.38% of a step on average, +12.50% on the worst rank" in waiting(base, group)
    assert cells(group)[:5] == ["exchange", "1500.0", "1.250", "1.00-1.50", "9.38%"]


def test_a_different_loss_is_found_wherever_it_is() -> None:
    turns = [[[step(), step()], [step(), step()]]]
    other = [[[step(), step()], [step(), step(loss=2.0 + 2**-51)]]]
    assert loss_difference(turns, turns) == 0.0
    assert loss_difference(turns, other) == 2**-52


def test_the_verdict() -> None:
    recipe = TrainConfig()
    quiet = replace(recipe, model=replace(recipe.model, dropout=0.0, attention_dropout=0.0))
    assert judge(0.0, recipe, False) == (True, "losses of all steps are equal bit for bit")
    assert judge(1e-16, recipe, False)[0] is False
    # Packs on other ranks: sums round differently, and dropout cannot be compared at all.
    assert judge(1e-7, quiet, True)[0] is True
    assert judge(1e-3, quiet, True)[0] is False
    assert judge(1e-3, recipe, True)[0] is True


def test_what_was_built_in_the_pause_is_left_out() -> None:
    command = ExchangeCommand(recipe=Path("any.toml"), every=3, rounds=2)
    assert command.skip == 8
    assert ExchangeCommand.defaults(["exchange"]).every == 4


# Real processes


@pytest.mark.slow
def test_both_groups_compute_the_same(recipe: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    output = tmp_path / "exchange.json"
    assert main(arguments(recipe, "--every", "1", "--rounds", "2", "--output", str(output))) == 0
    content = json.loads(output.read_text())
    assert content["losses_agree"]
    assert content["loss_difference"] == 0.0
    assert (content["shards"], content["every"], content["within"]) == (2, 1, None)
    reading, exchanging = content["results"]
    assert (reading["name"], exchanging["name"]) == ("all shards", "exchange")
    for group in (reading, exchanging):
        assert (group["ranks"], group["steps"]) == (2, 8)
        assert [len(seconds) for seconds in group["seconds"]] == [4, 4]
        assert 0 <= group["wait_share"] <= group["wait_share_worst"] < 1
    assert (reading["rounds"], reading["bytes_per_step"], reading["ratio"]) == (0, 0.0, 1.0)
    # Each turn has 4 steps that do not count and 4 that do; rounds are begun two ahead, and may not all be over.
    assert 16 <= exchanging["rounds"] <= 18
    # At most 8 packs of 32 tokens, two bytes each, of which about half lie on the other rank, and half a step for each.
    assert 20 < exchanging["bytes_per_step"] < 8 * 32 * 2 / 2
    assert exchanging["exchange_seconds"] > 0
    assert "equal bit for bit" in capsys.readouterr().out


def test_groups_that_differ_are_exit_status_1(
    recipe: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    group = figures("exchange", [[[step()]]], [[[step()]]], [RankExchange()], every=1)
    monkeypatch.setattr(shard_exchange, "measure", lambda *_: ([group, group], 1e-9))
    monkeypatch.setattr("tools.pretrain.prepare_corpus", lambda *_, **__: None)
    assert main(arguments(recipe)) == 1
    captured = capsys.readouterr()
    assert "NOT equal: they differ by up to 1.0e-09" in captured.out
    assert "do not compute the same" in captured.err


@pytest.mark.parametrize(
    ("more", "message"),
    [
        (["--cube", "2x2"], "Got '2x2'"),
        (["--data-parallel", "3"], "cube 3*(1x1x1): a global batch of 8 packs does not divide"),
        (["--data-parallel", "1"], "needs at least two data ranks. Got --data-parallel 1"),
        (["--shards", "3"], "3 shards do not divide among data=2"),
        (["--shards", "0"], "data.shards must be at least 1. Got 0"),
        (["--every", "0"], "every and within must be at least 1. Got 0 and None"),
        (["--within", "1"], "needs a number of groups"),
        (["--steps", "20", "--rounds", "2"], "--steps must be at least 4 * every=4 * rounds=2 = 32"),
        (["--rounds", "0"], "--rounds must be at least 1. Got 0"),
        (["--output", "missing/exchange.json"], "a file in a folder that exists. Got missing/exchange.json"),
    ],
)
def test_bad_calls_start_no_process(
    recipe: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], more: list[str], message: str
) -> None:
    monkeypatch.setattr(shard_exchange, "start_trainings", lambda *_: pytest.fail("started processes"))
    error = refused(capsys, main, *arguments(recipe, *more))
    assert error.startswith("tools.bench: ")
    assert message in error
