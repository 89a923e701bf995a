"""Recipes: every shipped one is valid, and what is wrong with one is told with its key."""

from __future__ import annotations

import sys
from dataclasses import fields, replace
from pathlib import Path
from typing import get_type_hints

import pytest

from tools.training import config_docs
from tools.training.arguments import parse
from tools.training.config import DataConfig, ModelConfig, TrainConfig, from_table, read_config

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

LAUNCH = Path(__file__).parents[3] / "launch" / "recipes"
SHIPPED = sorted(LAUNCH.glob("*.toml"))


@pytest.mark.parametrize("path", SHIPPED, ids=lambda path: path.name)
def test_shipped_recipes_are_valid(path: Path) -> None:
    assert read_config(path).run.steps >= 1


def test_a_byte_order_mark_and_line_ends_of_windows_are_no_part_of_a_recipe(tmp_path: Path) -> None:
    (tmp_path / "a.toml").write_bytes(b"\xef\xbb\xbf[run]\r\nsteps = 7\r\n")
    assert read_config(tmp_path / "a.toml").run.steps == 7


def test_what_a_recipe_leaves_out_has_its_default(tmp_path: Path) -> None:
    path = tmp_path / "r.toml"
    path.write_text("[optimizer]\nlr = 1\n[run]\nsteps = 7\n")
    recipe = read_config(path)
    assert (recipe.optimizer.lr, recipe.run.steps, recipe.data) == (1.0, 7, TrainConfig().data)
    assert isinstance(recipe.optimizer.lr, float)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[data]\ncapcity = 128", "unknown.*data.capcity. Known here.*vocab_size,"),
        ("[datta]\ncapacity = 128", "unknown.*datta.*Known here: data"),
        ("steps = 5", r"unknown key steps"),
        ("run = 5", r"run must be a table. Got 5"),
        ("[run]\nsteps = '5'", "run.steps.*'5'"),
        ("[run]\nsteps = 5.0", r"run.steps.*\b5.0"),
        ("[run]\nsteps = true", "run.steps.*True"),
        ("[optimizer]\nlr = 'high'", "optimizer.lr.*'high'"),
        ("[model]\npreset = 'huge'", "model.preset.*tiny.*'huge'"),
        ("[model]\nlayers = 'two'", "model.layers.*'two'"),
        ("[model]\nheads = 3", r"hidden must divide by heads=3. Got 128"),
        ("[run]\nsteps = 0", r"run.steps.*\b1.*\b0"),
        ("[optimizer]\nlr = 0", r"optimizer.lr.*\b0.*\b0.0"),
        ("[optimizer]\nclip = inf", r"optimizer.clip.*\b0.*inf"),
        ("[optimizer]\neps = nan", r"optimizer.eps.*\b0.*nan"),
        ("[optimizer]\nbeta1 = 1", r"optimizer.beta1.*\b0.*\b1.*\b1.0"),
        ("[optimizer]\nwarmup = 1.0", r"optimizer.warmup.*\b0.*\b1.*\b1.0"),
        ("[data]\nmax_length = 129", "data.max_length=129.*data.capacity=128"),
        ("[optimizer]\neps = 0", r"optimizer.eps.*\b0.*\b0.0"),
        ("[optimizer]\nweight_decay = inf", "optimizer.weight_decay.*inf"),
        ("[optimizer]\nkind = 'sgd'", "optimizer.kind.*adamw.*lamb.*'sgd'"),
        ("[optimizer]\npower = 0", r"optimizer.power.*\b0.*\b0.0"),
        ("[optimizer]\nfloor = 1", r"optimizer.floor.*\b0.*\b1.*\b1.0"),
        (
            "[batch]\nramp_stages = 3",
            "batch.ramp_stages=3 and batch.ramp_steps=0 belong together",
        ),
        (
            "[data]\npacking = 'binned'\n[batch]\nramp_stages = 3\nramp_steps = 4",
            "data.packing = 'binned' orders sequences for steps of one size",
        ),
        ("[optimizer]\nschedule = 'wsd'\ndecay = 1.1", "optimizer.decay must be at least 0 and at most 1. Got 1.1"),
        (
            "[optimizer]\nschedule = 'wsd'\nwarmup = 0.6\ndecay = 0.5",
            "optimizer.warmup=0.6.*optimizer.decay=0.5",
        ),
        ("[precision]\ncompute = 'fp8'", "precision.compute.*bf16.*'fp8'"),
        ("[precision]\nreduce = 'fp16'", r"precision.reduce = 'fp16' needs precision.compute = 'fp16'.*Got 'fp32'"),
        ("[precision]\nfp8 = 'rowwise'", r"precision.fp8 = 'rowwise' needs precision.compute = 'bf16'.*Got 'fp32'"),
        (
            "[precision]\ncompute = 'bf16'\nfp8 = 'rowwise'\nfp8_history = 8",
            r"precision.fp8_history = 8 is of precision.fp8 = 'delayed' alone. Got fp8 = 'rowwise'",
        ),
        ("[precision]\nfp8_history = 0", r"precision.fp8_history must be at least 1\. Got 0"),
        ("[precision]\ncompute = 'bf16'\nfp8 = 'blocks'", r"precision.fp8.*rowwise.*tensorwise.*'blocks'"),
        ("[precision]\nloss_scale = 0", r"precision.loss_scale.*\b0.*\b0.0"),
        ("[precision]\nloss_scale = 1e9", r"precision.loss_scale must be .* at most 16777216.0. Got 1000000000.0"),
        ("[precision]\ngrowth_interval = 0", r"precision.growth_interval.*\b1.*\b0"),
        ("[model]\npositions = 64", "model.positions=64.*data.max_length=128"),
        ("[model]\nrecompute = 'all'", "model.recompute.*layer.*'all'"),
        ("[model]\nkeep_budget = -1", r"model.keep_budget.*at least 0. Got -1"),
        ("[model]\nkeep_budget = 1.5", r"model.keep_budget must be of type int. Got 1.5"),
        (
            "[model]\nkeep_budget = 8\nreshard_after_forward = false",
            r"model.keep_budget=8 and reshard_after_forward=false exclude each other",
        ),
        (
            "[run]\nevaluate_every_samples = 64",
            "run.evaluate_every=100.*run.evaluate_every_samples=64.*Set one",
        ),
        ("[run]\nevaluate_every = 0\npatience = 2", "run.patience=2.*Set run.evaluate_every"),
        ("[data]\nheld_out = 0\n[run]\ntarget_accuracy = 0.5", r"run.target_accuracy=0.5 needs evaluations"),
        ("[run]\ntarget_accuracy = 72", r"run.target_accuracy.*\b0.*\b1.*\b72.0"),
        ("[run]\ncheckpoint_keep = 0", r"run.checkpoint_keep.*\b1.*\b0"),
        ("[data]\ncapacity = 1_000_000_000", r"data.capacity.*\b5.*\b1048576.*\b1000000000"),
        ("[data]\nmax_sequences = 129", "data.max_sequences=129 is more than the data.capacity=128 tokens"),
        ("[data]\nmasked_per_pack = 129", "data.masked_per_pack=129 is more than the data.capacity=128 tokens"),
        ("[model]\nlayers = 1_000_000_000", r"model.layers.*\b10000.*\b1000000000"),
        ("[run]\nhang_after = 0", r"run.hang_after.*\b0.*\b0.0"),
        ("[data\n", r"is not valid TOML"),
        pytest.param("[data]\nsource = " + "[" * 9000, "is not valid TOML: it is nested too deeply", id="deep"),
        pytest.param(f"[run]\nsteps = {'9' * 5000}", "is not valid TOML: .*limit", id="digits"),
        pytest.param(f"[run]\nsteps = 0x{'f' * 5000}", "run.steps must be .* 64 bits. Got one of 20000", id="hex"),
        pytest.param(f"[optimizer]\nlr = {'9' * 400}", "optimizer.lr must be .* of at most 64 bits", id="float"),
        ("[run]\nsteps = 9223372036854775808", "run.steps must be a whole number of at most 64 bits. Got one of 64"),
    ],
)
def test_a_bad_recipe_is_named_with_its_key(tmp_path: Path, text: str, message: str) -> None:
    path = tmp_path / "bad.toml"
    path.write_text(text)
    with pytest.raises(ValueError, match=message) as problem:
        read_config(path)
    assert "bad.toml" in str(problem.value)


@pytest.mark.parametrize("kept", [True, False])
def test_a_recipe_and_an_option_of_before_say_whether_gathered_weights_are_kept(tmp_path: Path, kept: bool) -> None:
    recipe = tmp_path / "recipe.toml"
    recipe.write_text(f"[model]\nkeep_gathered = {str(kept).lower()}\n")
    assert read_config(recipe).model.reshard_after_forward is not kept
    option = "--model.keep_gathered" if not kept else "--model.no-keep-gathered"
    assert parse([str(recipe), option]).settings.model.reshard_after_forward is kept
    recipe.write_text("[model]\nkeep_gathered = true\nreshard_after_forward = true\n")
    with pytest.raises(ValueError, match=r"unknown key model\.keep_gathered"):
        read_config(recipe)


def test_what_lies_in_shares_over_data_is_said_by_a_flag_or_a_word(tmp_path: Path) -> None:
    recipe, option = tmp_path / "recipe.toml", "--optimizer.shard-over-data"
    for text, wanted in (("true", True), ("false", False), ('"state"', "state"), ('"gradients"', "gradients")):
        recipe.write_text(f"[optimizer]\nshard_over_data = {text}\n")
        assert read_config(recipe).optimizer.shard_over_data == wanted
    for words, wanted in (
        ([option], True),
        ([option, "--optimizer.lr", "0.1"], True),
        ([option, "gradients"], "gradients"),
        (["--optimizer.no-shard-over-data"], False),
        ([], "gradients"),
    ):
        assert parse([str(recipe), *words]).settings.optimizer.shard_over_data == wanted
    recipe.write_text('[optimizer]\nshard_over_data = "weights"\n')
    with pytest.raises(
        ValueError, match=r"optimizer\.shard_over_data must be of type bool or .*'gradients'.*'weights'"
    ):
        read_config(recipe)


def test_positions_are_as_many_as_asked_for_or_needed() -> None:
    data = DataConfig(max_length=64)
    assert ModelConfig().config(data).positions == 64
    assert ModelConfig(positions=512).config(data).positions == 512


def test_what_a_recipe_resolves_to_can_be_read_again() -> None:
    for path in SHIPPED:
        recipe = read_config(path)
        assert from_table(TrainConfig, recipe.to_dict()) == recipe


def test_bert_large_has_the_numbers_of_nvidia() -> None:
    """Of the two phases of DeepLearningExamples, in NVIDIA's units: shares and sequences."""
    one, two = (read_config(LAUNCH / f"bert-large-phase{phase}.toml") for phase in (1, 2))
    assert [(r.data.max_length, r.run.steps, r.optimizer.lr, r.optimizer.warmup) for r in (one, two)] == [
        (128, 7038, 6e-3, 0.2843),
        (512, 1563, 4e-3, 0.128),
    ]
    assert [(r.batch.global_batch, r.batch.packing_rule) for r in (one, two)] == [
        (65536, "sequences"),
        (32768, "sequences"),
    ]
    for recipe in (one, two):
        assert (recipe.optimizer.kind, recipe.optimizer.schedule, recipe.optimizer.power) == ("lamb", "polynomial", 0.5)
        assert recipe.model.config(recipe.data).positions == 512
    # 20 and 80 predictions a sequence, in packs of as many tokens
    assert one.data.masked_per_pack == 20 * one.data.capacity // one.data.max_length
    assert two.data.masked_per_pack == 80


@pytest.mark.parametrize("name", ["bert-large", "bert-base", "tiny"])
def test_phase_2_can_follow_phase_1(name: str) -> None:
    """The same model, text and tokenizer; longer sequences, and a table that has not shrunk."""
    one, two = (read_config(LAUNCH / f"{name}-phase{phase}.toml") for phase in (1, 2))
    assert two.data.max_length > one.data.max_length
    assert two.model.config(two.data).positions >= one.model.config(one.data).positions
    assert replace(two.model, positions=None) == replace(one.model, positions=None)
    for key in ("source", "vocab_size", "held_out", "shards"):
        assert getattr(one.data, key) == getattr(two.data, key)
    assert one.run.seed == two.run.seed
    assert one.optimizer.kind == two.optimizer.kind


def test_the_tiny_phases_have_the_structure_of_the_large_ones() -> None:
    for phase in (1, 2):
        tiny, large = (tomllib.loads((LAUNCH / f"{n}-phase{phase}.toml").read_text()) for n in ("tiny", "bert-large"))
        assert set(tiny) == set(large)
        for key in ("kind", "schedule", "power", "beta1", "beta2", "eps", "weight_decay", "clip", "warmup"):
            assert tiny["optimizer"][key] == large["optimizer"][key], key
        assert tiny["precision"] == large["precision"]
        assert tiny["batch"]["packing_rule"] == large["batch"]["packing_rule"]


@pytest.mark.parametrize(
    ("tiny", "large"),
    [
        ("roberta-tiny", "roberta-base"),
        *((f"modernbert-tiny-phase{n}", f"modernbert-base-phase{n}") for n in (1, 2, 3)),
    ],
)
def test_the_tiny_encoders_have_the_structure_of_the_large_ones(tiny: str, large: str) -> None:
    small, whole = (tomllib.loads((LAUNCH / f"{name}.toml").read_text()) for name in (tiny, large))
    assert set(small["optimizer"]) == set(whole["optimizer"])
    for key in ("objective", "masked_share", "short_probability"):
        assert small["data"][key] == whole["data"][key], key
    for key in ("kind", "schedule", "beta1", "beta2", "eps", "clip", "decay", "decay_shape", "floor"):
        assert small["optimizer"].get(key) == whole["optimizer"].get(key), key
    for key in set(whole["model"]) - {"preset", "layers", "hidden", "heads", "inner", "positions", "window"}:
        same = key not in ("dropout", "attention_dropout", "first_position")
        assert key in small["model"], key
        assert not same or small["model"][key] == whole["model"][key], key


def test_every_key_is_explained_in_the_document() -> None:
    text = config_docs.DOCUMENT.read_text()
    assert text == config_docs.with_tables(text), "run python -m tools.training.config_docs"
    for section in get_type_hints(TrainConfig).values():
        said = config_docs.meanings(section)
        for key in fields(section):
            assert said[key.name].endswith((".", '}".')), f"{section.__name__}.{key.name} needs a sentence under it"
            assert f"| {key.name} | " in text


def test_every_shipped_recipe_is_in_the_document() -> None:
    text = config_docs.DOCUMENT.read_text()
    for path in SHIPPED:
        assert path.name in text or path.name.replace("phase2.toml", "phase1.toml, -phase2.toml") in text


def test_a_missing_recipe() -> None:
    with pytest.raises(ValueError, match=r"nowhere.toml does not exist"):
        read_config(Path("nowhere.toml"))
