"""Settings that change nothing are told."""

from __future__ import annotations

from pathlib import Path

import pytest

from tools.finetune.__main__ import COMMANDS
from tools.training.arguments import parse, resolve
from tools.training.config import read_config
from tools.training.idle_settings import idle_settings

RECIPES = Path(__file__).parents[3] / "launch" / "recipes"


@pytest.mark.parametrize(
    ("words", "told"),
    [
        ("--optimizer.floor 0.1", "optimizer.floor = 0.1 changes nothing: it is for optimizer.schedule = 'cosine' or"),
        ("--optimizer.floor 0.1 --optimizer.schedule cosine", None),
        (
            "--optimizer.power 0.5",
            "optimizer.power = 0.5 changes nothing: it is for optimizer.schedule = 'polynomial',",
        ),
        ("--optimizer.decay 0.5 --optimizer.schedule wsd", None),
        ("--optimizer.decay-shape sqrt", "optimizer.decay_shape = 'sqrt' changes nothing"),
        (
            "--precision.loss-scale 8",
            "precision.loss_scale = 8.0 changes nothing: it is for precision.compute = 'fp16'",
        ),
        ("--precision.growth-interval 8 --precision.compute fp16", None),
        ("--speed.shadow-weights", "speed.shadow_weights = True changes nothing"),
        ("--batch.multiple-of 3", "batch.multiple_of = 3 changes nothing: it is for batch.packing_rule = 'sequences'."),
        ("--data.bin-width 3", "data.bin_width = 3 changes nothing"),
        ("--data.max-sequences 3 --data.packing padded", "data.max_sequences = 3 changes nothing"),
        ("--run.checkpoint-every 0 --run.checkpoint-keep 5", "run.checkpoint_keep = 5 changes nothing"),
        ("--run.checkpoint-every 0 --run.checkpoint-keep-every 5", "run.checkpoint_keep_every = 5 changes nothing"),
        ("--run.checkpoint-every 0 --run.no-asynchronous", "run.asynchronous = False changes nothing"),
        ("--run.checkpoint-every 0 --run.checkpoint-keep 5 --run.patience 2", None),
        ("--run.checkpoint-keep-every 70 --run.steps 350", None),  # the last step has one, too
        ("--run.checkpoint-keep-every 70", "run.checkpoint_keep_every = 70 changes nothing: it is for checkpoints"),
        ("--run.checkpoint-keep-every 70 --run.steps 700", None),
        ("--optimizer.kind lamb", None),
        ("--optimizer.kind lamb --optimizer.weight-decay 0", "optimizer.kind = 'lamb' changes nothing: it is for opt"),
        ("--batch.packing-rule betas", None),
        ("--batch.packing-rule betas --data.packing padded", "batch.packing_rule = 'betas' changes nothing"),
        ("--batch.ramp-stages 2 --batch.ramp-steps 399", None),
        ("--batch.ramp-stages 2 --batch.ramp-steps 400", "batch.ramp_steps = 400 and run.steps = 400: the run ends"),
        ("--data.held-out 0 --run.evaluate-every 7", "run.evaluate_every = 7 changes nothing: it is for data.held_out"),
        ("--data.held-out 0 --run.evaluate-every 0", None),
    ],
)
def test_what_changes_nothing_is_told(words: str, told: str | None) -> None:
    found = idle_settings(parse([str(RECIPES / "quickstart.toml"), *words.split()]).settings)
    assert [line[: len(told or "")] for line in found] == ([] if told is None else [told])


@pytest.mark.parametrize(
    ("words", "told"),
    [
        ("--profile-ranks 0,0", "--profile-ranks are those of a trace. Add --profile"),
        ("--profile 3,401-402", "--profile asks for steps 401 to 402, and the run has run.steps = 400"),
    ],
)
def test_a_trace_that_would_not_be_written_is_refused(words: str, told: str) -> None:
    with pytest.raises(ValueError, match=told):
        resolve(parse([str(RECIPES / "quickstart.toml"), *words.split()])).check()


def test_shipped_recipes_have_no_such_setting() -> None:
    for path in RECIPES.glob("*.toml"):
        assert idle_settings(read_config(path)) == []


def test_of_fine_tuning_too() -> None:
    for task, words, told in (
        (
            "rank",
            ["--data.margin", "2"],
            "data.margin = 2.0 changes nothing: it is for data.loss = 'margin', and it is",
        ),
        ("rank", ["--data.margin", "2", "--data.loss", "margin"], None),
        ("classify", ["--data.separator", ";"], "data.separator = ';' changes nothing"),
        ("classify", ["--optimizer.floor", "0.1"], "optimizer.floor = 0.1 changes nothing"),
        ("classify", ["--model.start-from", "x", "--model.vocab", "None"], "model.std = 0.04 changes nothing"),
    ):
        kind = COMMANDS[task]
        name = "embedded-rank.toml" if task == "rank" else "embedded.toml"
        from tools.finetune.__main__ import parse as parse_task

        found = parse_task([task, str(RECIPES / "finetune" / name), *words]).idle_settings()
        assert [line[: len(told or "")] for line in found] == ([] if told is None else [told]), kind
