"""EuroBERT's folders: settings of both spellings, what is refused by name, fewer heads of keys on cubes, dropout."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from models.bert import BertConfig, export_huggingface, open_weights
from models.bert.huggingface.config import CONFIG, config_from, settings_of
from tensor3d import Cube
from tests.models.bert.huggingface.families import EUROBERT, OURS, check_bits_on_a_cube, drawn
from tests.models.bert.huggingface.subject import saved
from tests.models.toy import Shape

transformers = pytest.importorskip("transformers")
WITH_EUROBERT = pytest.mark.skipif(
    not hasattr(transformers, "EuroBertConfig"), reason="this version of transformers has no EuroBERT"
)
ONE: Shape = (1, 1, 1, 1)
# What the config.json of the published model of 2.1 billion parameters says, as its authors wrote it.
PUBLISHED: dict[str, Any] = {
    "architectures": ["EuroBertForMaskedLM"],
    "attention_bias": False,
    "attention_dropout": 0.0,
    "bos_token_id": 128000,
    "eos_token_id": 128001,
    "pad_token_id": 128001,
    "mask_token_id": 128002,
    "hidden_act": "silu",
    "hidden_dropout": 0.0,
    "hidden_size": 2304,
    "initializer_range": 0.02,
    "intermediate_size": 6144,
    "max_position_embeddings": 8192,
    "model_type": "eurobert",
    "num_attention_heads": 18,
    "num_hidden_layers": 32,
    "num_key_value_heads": 6,
    "pretraining_tp": 1,
    "rms_norm_eps": 1e-05,
    "rope_scaling": None,
    "rope_theta": 250000,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
    "vocab_size": 128256,
    "is_decoder": False,
}
SMALL: dict[str, Any] = {
    **PUBLISHED,
    **{"hidden_size": 32, "num_attention_heads": 4, "num_key_value_heads": 2, "intermediate_size": 48},
    **{"num_hidden_layers": 1, "vocab_size": 67},
}


def read(**changes: Any) -> BertConfig:
    return config_from({**SMALL, **changes}, Path("config.json"))


def test_the_published_settings_are_read_and_kept() -> None:
    config = config_from(PUBLISHED, Path("config.json"))
    assert config == BertConfig(
        **{"layers": 32, "hidden": 2304, "heads": 18, "kv_heads": 6, "inner": 6144, "vocab": 128256, "positions": 8192},
        **{"types": 0, "dropout": 0.0, "attention_dropout": 0.0, "activation": "silu", "eps": 1e-5, "tied": False},
        **{"family": "eurobert", "encoder": "modern", "rotary_base": 250_000.0, "pooling": "late"},  # type: ignore[arg-type]
    )
    written = settings_of(config, "EuroBertForMaskedLM", "bf16", found=PUBLISHED)
    assert written.items() >= PUBLISHED.items()
    assert (written["head_dim"], written["rope_parameters"]["rope_theta"]) == (128, 250_000.0)
    assert config_from(written, Path("config.json")) == config


@pytest.mark.parametrize(
    ("changes", "pooling"),
    [
        ({"clf_pooling": "mean"}, "mean"),
        ({"classifier_pooling": "bos", "clf_pooling": "bos"}, "cls"),
        ({"classifier_pooling": None, "clf_pooling": "late"}, "late"),
        ({}, "late"),
    ],
    ids=str,
)
def test_what_classifiers_look_at_under_both_names(changes: dict[str, Any], pooling: str) -> None:
    assert read(**changes).pooling == pooling


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"attention_bias": True}, "attention_bias must be False, for .* biases where logits come out alone. Got True"),
        ({"mlp_bias": True}, "mlp_bias must be False"),
        ({"is_decoder": True}, "is_decoder must be False, for a decoder sees no later tokens"),
        ({"is_causal": True}, "is_causal must be False"),
        ({"hidden_dropout": 0.1}, "hidden_dropout must be 0, for .*. Got 0.1"),
        ({"rope_scaling": {"type": "linear", "factor": 2.0}}, "rope_scaling must be None"),
        ({"rope_parameters": {"rope_type": "yarn", "rope_theta": 250000}}, "rope_type .* must be 'default'.* 'yarn'"),
        ({"rope_parameters": {"rope_theta": 5.0}}, "rope_theta 250000 and rope_parameters 5 contradict"),
        ({"hidden_act": "relu"}, "config.json: family=\"eurobert\" has a gate of silu or gelu. Got hidden_act='relu'"),
        ({"tie_word_embeddings": True}, "a decoder of its own and nothing else. Got tied=True"),
        ({"head_dim": 16}, "head_dim must be hidden_size / num_attention_heads = 8. Got 16"),
        ({"num_key_value_heads": 3}, "num_key_value_heads must divide num_attention_heads=4. Got 3"),
        ({"num_key_value_heads": 0}, "num_key_value_heads must be at least 1. Got 0"),
        ({"classifier_pooling": "late", "clf_pooling": "mean"}, "'late' and clf_pooling 'mean' contradict"),
        ({"classifier_pooling": "cls"}, "classifier_pooling must be 'bos', 'mean' or 'late'. Got 'cls'"),
        ({"classifier_pooling": "max"}, "pooling must be one of cls, mean, last, score, late. Got 'max'"),
        ({"sliding_window": 64}, "sliding_window must be None"),
    ],
    ids=str,
)
def test_what_it_does_not_have_here_is_refused_by_name(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        read(**changes)


@WITH_EUROBERT
@pytest.mark.parametrize("shape", [(1, 2, 1, 1), pytest.param((2, 2, 2, 1), marks=pytest.mark.slow)], ids=str)
def test_bits_on_cubes(tmp_path: Path, shape: Shape) -> None:
    check_bits_on_a_cube(tmp_path, EUROBERT, shape)
    assert open_weights(tmp_path / "there").config.pooling == "late"


@WITH_EUROBERT
def test_biases_that_the_settings_do_not_tell_of(tmp_path: Path) -> None:
    saved(tmp_path, f"{EUROBERT}Model", **drawn(EUROBERT, "Model", ONE, 1))
    path = tmp_path / "model.safetensors"
    more = {"layers.0.self_attn.q_proj.bias": torch.ones(3), "norm.bias": torch.ones(3)}
    save_file({**load_file(path), **more}, path, metadata={"format": "pt"})
    with pytest.raises(ValueError, match=r"no EuroBERT has: layers\.0\.self_attn\.q_proj\.bias and 1 more"):
        open_weights(tmp_path)


@pytest.mark.parametrize(
    ("ours", "note"),
    [
        ((0.1, 0.2, None), "config.json says nothing of dropout 0.1, of embeddings and MLPs' outputs"),
        ((0.0, 0.2, 0.3), "config.json says nothing of dropout 0.3, of attention's output"),
        ((0.0, 0.2, None), None),
    ],
    ids=str,
)
def test_dropout_goes_as_far_as_the_library_has_it(
    tmp_path: Path, ours: tuple[float, float, float | None], note: str | None
) -> None:
    dropped = dict(zip(("dropout", "attention_dropout", "attention_out_dropout"), ours, strict=True))
    config = BertConfig(
        **{"layers": 1, "hidden": 32, "heads": 4, "vocab": 67, "encoder": "modern", "types": 0, "tied": False},  # type: ignore[arg-type]
        **{"family": "eurobert", **dropped},  # type: ignore[arg-type]
    )
    told = export_huggingface(OURS["Model"](config, Cube.single()), Cube.single(), tmp_path / "out")
    assert told.note == note
    settings = json.loads((tmp_path / "out" / CONFIG).read_text())
    assert (settings["attention_dropout"], settings["hidden_dropout"]) == (0.2, 0)
    assert config_from(settings, Path(CONFIG)).attention_dropout == 0.2
