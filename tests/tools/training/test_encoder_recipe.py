"""The modern encoder in a recipe: what belongs to it, what the dry run says, a run, and who may go on from it."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from models.bert.cost_model.param_shapes import parameters
from tensor3d import CubeShape
from tests.models.toy import FAMILIES, toy_config
from tests.tools.runs import arguments, losses
from tools import pretrain
from tools.training import estimate, resume
from tools.training.config import BatchConfig, DataConfig, ModelConfig, TrainConfig, read_config
from tools.training.estimate import _encoder, expect, report
from tools.training.resume import check_resume, check_start

MODERN = ["--model.encoder", "modern", "--model.layers", "3", "--model.window", "9"]


def test_a_recipe_resolves_to_its_encoder() -> None:
    config = ModelConfig(encoder="modern", window=33, global_every=4, rotary_base=160_000.0).config(DataConfig())
    assert (config.encoder, config.window, config.global_every, config.rotary_base) == ("modern", 33, 4, 160_000.0)
    assert ModelConfig().config(DataConfig()).encoder == "classic"


@pytest.mark.parametrize(
    ("model", "message"),
    [
        ({"window": 8}, 'window belongs to encoder="modern"'),
        ({"encoder": "modern", "norm": "pre"}, 'norm belongs to encoder="classic"'),
        ({"encoder": "modern", "positions": 16}, r"model.positions=16 is less than sequences of data.max_length=128"),
        ({"encoder": "modern", "global_every": 2}, "there is no window"),
    ],
)
def test_a_recipe_refuses_options_of_the_other_encoder(model: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        TrainConfig(model=ModelConfig(**model))


def test_a_recipe_tells_whose_norms_and_gate_it_has() -> None:
    gemma = toy_config(67, **{**FAMILIES["gemma"], "window": None, "global_every": None, "local_rotary_base": None})
    told = (
        "modern: rotary positions, GeGLU by tanh, RMSNorm before and after each block, and of queries and keys, no bias"
    )
    assert _encoder(gemma) == told


def test_the_dry_run_tells_the_encoder(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(estimate, "_SECONDS", 0.01)
    recipe = TrainConfig(model=ModelConfig(encoder="modern", preset="mini", window=33))
    text, whole = report(recipe, CubeShape(x=2, y=2, z=2)), replace(recipe, model=replace(recipe.model, window=None))
    assert "modern: rotary positions, GeGLU, LayerNorm before each block, no bias; 2 of 4 layers see less" in text
    assert ", positions" not in text
    expected, dearer = expect(recipe, CubeShape()), expect(whole, CubeShape())
    assert expected.parameters == sum(p.elements for p in parameters(expected.config)) == dearer.parameters
    # Two of four layers of hidden size 256; sequences of 128 tokens, of which 95 lie beyond the window of 33.
    pairs = expected.tokens * (95 * 96) // 128
    assert dearer.flops - expected.flops == pytest.approx(12 * 2 * 256 * pairs, rel=1e-6)


def test_it_trains_from_the_command_line(recipe: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    assert pretrain.main([*arguments(recipe, run), *MODERN]) == 0
    logged = losses(run)
    assert sorted(logged) == [1, 2, 3, 4, 5, 6]
    assert logged[6] < logged[1]


def test_roberta_in_small_trains_and_is_one(recipe: Path, tmp_path: Path) -> None:
    shipped = Path(__file__).parents[3] / "launch" / "recipes" / "roberta-tiny.toml"
    text = ["--data.source", str(recipe.parent / "text.txt"), "--data.vocab-size", "67", "--batch.global-batch", "2"]
    steps = ["--run.steps", "3", "--run.evaluate-every", "3", "--optimizer.warmup", "0"]
    words = arguments(shipped, tmp_path / "run", *text, *steps, corpus=tmp_path / "corpus")
    assert pretrain.main(words) == 0
    logged = losses(tmp_path / "run")
    assert logged[3] < logged[1]
    written = (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()
    assert [json.loads(line)["next_sentence_loss"] for line in written if '"kind": "step"' in line] == [None] * 3
    config = json.loads((tmp_path / "run" / "model.json").read_text())["config"]
    assert (config["family"], config["types"], config["first_position"], config["positions"]) == ("roberta", 1, 1, 64)
    assert config["next_sentence"] is False


def _checkpoint_of(recipe: TrainConfig) -> dict[str, Any]:
    return {"recipe": recipe.to_dict(), "corpus": "same", "tokenizer": None, "step": 3}


class _Corpus:
    tokenizer = None

    class info:  # noqa: N801
        fingerprint = "same"


@pytest.mark.parametrize(
    ("changes", "what"),
    [
        ({"encoder": "classic", "window": None, "rotary_base": None}, r"encoder = 'modern'"),
        ({"window": 5}, r"window = 9"),
        ({"global_every": 2}, r"global_every = None"),
        ({"rotary_base": None}, r"rotary_base = 20000.0"),
    ],
)
def test_a_checkpoint_knows_its_encoder(changes: dict[str, Any], what: str) -> None:
    before = TrainConfig(model=ModelConfig(encoder="modern", window=9, rotary_base=2e4))
    now, corpus = replace(before, model=replace(before.model, **changes)), _Corpus()
    check_resume(_checkpoint_of(before), before, corpus)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=f"was trained with model.{what}"):
        check_resume(_checkpoint_of(before), now, corpus)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=f"the checkpoint's model has {what}"):
        check_start(_checkpoint_of(before), now, corpus)  # type: ignore[arg-type]


def test_another_phase_may_turn_otherwise_and_be_shorter(monkeypatch: pytest.MonkeyPatch) -> None:
    """A rotary base that is named may be another one, and there is no table of positions that could not shrink."""
    monkeypatch.setattr(resume, "tokenizer_hash", lambda _: None)
    before = TrainConfig(model=ModelConfig(encoder="modern", window=9, rotary_base=2e4, positions=512))
    now, corpus = replace(before, model=ModelConfig(encoder="modern", window=9, rotary_base=5e4)), _Corpus()
    check_start(_checkpoint_of(before), now, corpus)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"was trained with model.rotary_base = 20000.0"):
        check_resume(_checkpoint_of(before), now, corpus)  # type: ignore[arg-type]


def test_a_checkpoint_older_than_these_keys_is_of_the_classic_encoder(recipe: Path) -> None:
    now = read_config(recipe)
    old = _checkpoint_of(now)
    for name in ("encoder", "window", "global_every", "rotary_base"):
        del old["recipe"]["model"][name]
    check_resume(old, now, _Corpus())  # type: ignore[arg-type]
    modern = replace(now, model=replace(now.model, encoder="modern"))
    with pytest.raises(ValueError, match=r"trained.*model.encoder = 'classic'.*'modern'"):
        check_resume(old, modern, _Corpus())  # type: ignore[arg-type]


def test_how_the_batch_rises_stays_when_a_run_goes_on() -> None:
    """Or other packs would follow."""
    before = TrainConfig(batch=BatchConfig(global_batch=24, ramp_stages=3, ramp_steps=10))
    now = replace(before, batch=BatchConfig(global_batch=24))
    with pytest.raises(ValueError, match=r"was trained with batch.ramp_stages = 3, the recipe says 1"):
        check_resume(_checkpoint_of(before), now, _Corpus())  # type: ignore[arg-type]


def test_the_shipped_phases_are_as_long_as_modernberts_in_tokens() -> None:
    recipes = Path(__file__).parents[3] / "launch" / "recipes"
    found = [expect(read_config(recipes / f"modernbert-base-phase{phase}.toml"), CubeShape()) for phase in (1, 2, 3)]
    tokens = [each.whole_steps * each.packs * each.load.rows / each.packs_per_rank for each in found]
    assert tokens == pytest.approx([1.719e12, 250e9, 50e9], rel=1e-4)
    assert [each.packs_per_rank * each.micro_batches for each in found] == [4608, 576, 576]
