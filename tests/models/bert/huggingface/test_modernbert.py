"""ModernBERT's folders: both spellings of their settings, what is refused, and the way back to the bit on cubes."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from models.bert import BertConfig, BertForSequenceClassification, export_huggingface, open_weights
from models.bert.huggingface.config import CONFIG, config_from
from tensor3d import Cube
from tests.models.bert.huggingface.families import OURS, drawn
from tests.models.bert.huggingface.subject import same, saved, values
from tests.models.toy import Shape
from tests.ranks import run_ranks
from tools.convert.__main__ import parts_of

transformers = pytest.importorskip("transformers")

ONE: Shape = (1, 1, 1, 1)
# Of version 4 of the library, as in the folders of ModernBERT, Ettin and mmBERT.
FOUR: dict[str, Any] = {
    "architectures": ["ModernBertForMaskedLM"],
    "model_type": "modernbert",
    "vocab_size": 67,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 5,
    "num_attention_heads": 4,
    "max_position_embeddings": 8192,
    "position_embedding_type": "sans_pos",
    "hidden_activation": "gelu",
    "norm_eps": 1e-5,
    "norm_bias": False,
    "global_attn_every_n_layers": 3,
    "local_attention": 128,
    "global_rope_theta": 160000.0,
    "local_rope_theta": 10000.0,
    "attention_dropout": 0.0,
    "classifier_pooling": "mean",
    "decoder_bias": True,
    "sparse_prediction": False,
}
_ROPE = {"full_attention": 160000.0, "sliding_attention": 10000.0}
# Of version 5.
FIVE: dict[str, Any] = {
    **{name: value for name, value in FOUR.items() if not name.startswith("global") and "theta" not in name},
    "layer_types": [("full" if number % 3 == 0 else "sliding") + "_attention" for number in range(5)],
    "rope_parameters": {kind: {"rope_type": "default", "rope_theta": base} for kind, base in _ROPE.items()},
}


def read(**changes: Any) -> BertConfig:
    return config_from({**FOUR, **changes}, Path(CONFIG))


def test_both_spellings_say_the_same() -> None:
    config = read()
    assert config == config_from(FIVE, Path(CONFIG))
    assert (config.family, config.encoder, config.types, config.pooling) == ("modernbert", "modern", 0, "mean")
    assert [config.window_of(number) for number in range(5)] == [None, 65, 65, None, 65]
    assert [config.rotary_base_of(number) for number in (0, 1, 3)] == [160_000.0, 10_000.0, 160_000.0]
    assert (config.eps, config.dropout, config.attention_dropout, config.positions) == (1e-5, 0.0, 0.0, 8192)
    assert transformers.ModernBertConfig(**FOUR).layer_types == FIVE["layer_types"]


def test_what_is_not_said_has_the_librarys_defaults() -> None:
    names = ("norm_eps", "local_attention", "global_rope_theta", "local_rope_theta", "global_attn_every_n_layers")
    lean = {name: value for name, value in FOUR.items() if name not in names}
    assert config_from(lean, Path(CONFIG)) == read()
    whole = read(global_attn_every_n_layers=1)
    assert (whole.window, whole.global_every, whole.local_rotary_base) == (None, None, None)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"attention_bias": True}, "attention_bias must be False, for the modern encoder has biases where .* Got True"),
        ({"mlp_bias": True}, "mlp_bias must be False"),
        ({"norm_bias": True}, "norm_bias must be False"),
        ({"classifier_bias": True}, "classifier_bias must be False"),
        ({"decoder_bias": False}, "decoder_bias must be True"),
        ({"hidden_activation": "silu"}, "hidden_activation must be 'gelu'"),
        ({"classifier_activation": "relu"}, "classifier_activation must be 'gelu'"),
        ({"classifier_pooling": "max"}, "pooling must be one of cls, mean, last, score, late. Got 'max'"),
        ({"mlp_dropout": 0.1}, "mlp_dropout must be 0, for there is no dropout between an MLP's gate and its output"),
        ({"embedding_dropout": 0.1}, "embedding_dropout must be 0, for dropout of the embeddings comes with that of"),
        ({"attention_dropout": "0.1"}, "attention_dropout must be a number. Got '0.1'"),
        ({"rope_scaling": {"type": "yarn"}}, "rope_scaling must be None, for rotary positions are not scaled here"),
        ({"rope_parameters": {"full_attention": {"rope_type": "yarn"}}}, "rope_type .* 'yarn' of full_attention"),
        ({"rope_parameters": {"full_attention": {"type": "linear"}}}, "rope_type .* 'linear' of full_attention"),
        ({"sliding_window": 8}, "sliding_window 8 and local_attention 128 contradict, .* or make it 64"),
        ({"per_layer_config": {"0": {"norm_eps": 0.1}}}, "per_layer_config must be None, for all layers have the same"),
        ({"rope_parameters": {"full_attention": {"rope_theta": 5.0}}}, "global_rope_theta 160000 and .* 5 contradict"),
        ({"layer_types": ["full_attention"] * 5}, "layer_types must say .*global_attn_every_n_layers = 3. Got"),
        ({"global_attn_every_n_layers": None, "layer_types": ["sliding_attention"] * 5}, "layer_types must say"),
        (  # at once
            {"global_attn_every_n_layers": None, "num_hidden_layers": 10**15, "layer_types": ["sliding_attention"]},
            "layer_types must say",
        ),
        ({"global_attn_every_n_layers": 0}, "global_attn_every_n_layers must be at least 1. Got 0"),
        ({"hidden_size": None}, "hidden_size must be a whole number"),
    ],
    ids=str,
)
def test_what_it_does_not_have_here_is_refused_by_name(change: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        read(**change)


@pytest.mark.parametrize("kind", OURS)
def test_there_and_back_to_the_bit(tmp_path: Path, kind: str) -> None:
    name = f"ModernBert{kind}"
    saved(tmp_path / "there", name, **drawn("ModernBert", kind, ONE, 1))
    weights, cube = open_weights(tmp_path / "there"), Cube.single()
    model, filled = parts_of(weights, cube)
    assert filled.unused == ()
    told = export_huggingface(model, cube, tmp_path / "back", settings=weights.settings, labels=weights.labels)
    assert told.architecture == name
    theirs, ours = (load_file(tmp_path / folder / "model.safetensors") for folder in ("there", "back"))
    assert same(ours, theirs)
    before, after = (json.loads((tmp_path / folder / CONFIG).read_text()) for folder in ("there", "back"))
    assert {key: after.get(key) for key in before} == before
    _, report = getattr(transformers, name).from_pretrained(tmp_path / "back", output_loading_info=True)
    assert not any(report.values()), report
    assert config_from(after, Path(CONFIG)) == weights.config


def test_a_classifier_begins_with_the_head_of_the_masked_language_model(tmp_path: Path) -> None:
    """As the library's does, where both have the name `head`."""
    twin = saved(tmp_path, "ModernBertForMaskedLM", **drawn("ModernBert", "ForMaskedLM", ONE, 0))
    weights = open_weights(tmp_path)
    assert weights.heads == ("masked_lm", "prediction_head")
    model = BertForSequenceClassification(weights.config, 3, Cube.single())
    filled = weights.fill(model, Cube.single())
    assert (filled.found, filled.fresh) == (("prediction_head",), ("classifier",))
    assert filled.unused == ("decoder.bias",)
    assert torch.equal(values(model)["prediction_head.dense.weight"], twin.head.dense.weight)


def test_biases_that_the_settings_do_not_tell_of(tmp_path: Path) -> None:
    saved(tmp_path, "ModernBertModel", **drawn("ModernBert", "Model", ONE, 1))
    path = tmp_path / "model.safetensors"
    save_file({**load_file(path), "layers.0.attn.Wqkv.bias": torch.ones(3)}, path, metadata={"format": "pt"})
    with pytest.raises(ValueError, match=r"in its encoder that no ModernBERT has: layers\.0\.attn\.Wqkv\.bias"):
        open_weights(tmp_path)


def on_a_cube(folder: Path, shape: Shape) -> None:
    cube = Cube(*shape)
    weights = open_weights(folder / "there")
    model, _ = parts_of(weights, cube)
    alone, _ = parts_of(weights, Cube.single())
    assert same(values(model, cube), values(alone))
    export_huggingface(model, cube, folder / f"back {shape}", settings=weights.settings)


@pytest.mark.parametrize("shape", [(1, 2, 1, 1), pytest.param((2, 2, 2, 1), marks=pytest.mark.slow)], ids=str)
def test_bits_on_cubes(tmp_path: Path, shape: Shape) -> None:
    saved(tmp_path / "there", "ModernBertForMaskedLM", **drawn("ModernBert", "ForMaskedLM", shape, 1))
    run_ranks(shape[0] * shape[1] * shape[2] * shape[3], on_a_cube, tmp_path, shape)
    theirs = load_file(tmp_path / "there" / "model.safetensors")
    assert same(load_file(tmp_path / f"back {shape}" / "model.safetensors"), theirs)


def test_a_modern_encoder_that_is_no_modernbert_is_not_exported(tmp_path: Path) -> None:
    config = BertConfig(layers=1, hidden=32, heads=4, vocab=67, encoder="modern")
    with pytest.raises(ValueError, match=r'"modernbert", "eurobert", "gemma3_text", "qwen3" can be exported'):
        export_huggingface(OURS["Model"](config, Cube.single()), Cube.single(), tmp_path / "out")


@pytest.mark.parametrize(
    ("ours", "written", "note"),
    [
        ((0.1, 0.2, None), 0.0, "says nothing of dropout 0.1, .*; attention_dropout .* is 0, .* had 0.2 and 0.1"),
        ((0.0, 0.0, 0.1), 0.0, "^attention_dropout of config.json is 0, .* here they had 0 and 0.1$"),
        ((0.0, 0.1, 0.1), 0.1, None),
        ((0.0, 0.0, None), 0.0, None),
    ],
    ids=str,
)
def test_dropout_goes_as_far_as_the_library_has_it(
    tmp_path: Path, ours: tuple[float, float, float | None], written: float, note: str | None
) -> None:
    sizes: dict[str, Any] = {"layers": 1, "hidden": 32, "heads": 4, "vocab": 67, "encoder": "modern", "types": 0}
    sizes |= dict(zip(("dropout", "attention_dropout", "attention_out_dropout"), ours, strict=True))
    model = OURS["Model"](BertConfig(family="modernbert", **sizes), Cube.single())
    told = export_huggingface(model, Cube.single(), tmp_path / "out")
    assert told.note is None if note is None else re.search(note, told.note or "")
    settings = json.loads((tmp_path / "out" / CONFIG).read_text())
    assert {name: settings[name] for name in settings if "dropout" in name} == {
        **{"attention_dropout": written, "embedding_dropout": 0, "mlp_dropout": 0}
    }
    theirs = transformers.ModernBertModel(transformers.ModernBertConfig(**settings)).layers[0].attn
    back = config_from(settings, Path(CONFIG))
    assert (back.dropout, back.attention_dropout, back.out_dropout) == (0.0, written, written)
    assert (theirs.attention_dropout, getattr(theirs.out_drop, "p", 0.0)) == (written, written)
