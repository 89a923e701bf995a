"""EmbeddingGemma's folders: settings of both spellings, what is refused by name, a head that is the embedding."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from models.bert import BertConfig, BertForPreTraining, BertModel, export_huggingface, open_weights
from models.bert.huggingface.config import CONFIG, config_from, settings_of
from tensor3d import Cube
from tests.models.bert.huggingface.subject import same, values
from tests.models.toy import FAMILIES, Shape, toy_config
from tests.ranks import run_ranks
from tests.single_device_reference import ranks_of

# What the config.json of the published model of 300 million parameters says.
PUBLISHED: dict[str, Any] = {
    "_sliding_window_pattern": 6,
    "architectures": ["Gemma3TextModel"],
    "attention_bias": False,
    "attention_dropout": 0.0,
    "attn_logit_softcapping": None,
    "bos_token_id": 2,
    "dtype": "float32",
    "eos_token_id": 1,
    "final_logit_softcapping": None,
    "head_dim": 256,
    "hidden_activation": "gelu_pytorch_tanh",
    "hidden_size": 768,
    "initializer_range": 0.02,
    "intermediate_size": 1152,
    "layer_types": ["full_attention" if number % 6 == 5 else "sliding_attention" for number in range(24)],
    "max_position_embeddings": 2048,
    "model_type": "gemma3_text",
    "num_attention_heads": 3,
    "num_hidden_layers": 24,
    "num_key_value_heads": 1,
    "pad_token_id": 0,
    "query_pre_attn_scalar": 256,
    "rms_norm_eps": 1e-06,
    "rope_local_base_freq": 10000.0,
    "rope_scaling": None,
    "rope_theta": 1000000.0,
    "sliding_window": 512,
    "use_bidirectional_attention": True,
    "use_cache": True,
    "vocab_size": 262144,
}


def read(**changes: Any) -> BertConfig:
    return config_from({**PUBLISHED, **changes}, Path("config.json"))


def test_the_published_settings_are_read_and_kept() -> None:
    config = read()
    assert config == BertConfig(
        **{"layers": 24, "hidden": 768, "heads": 3, "kv_heads": 1, "head_dim": 256, "inner": 1152, "vocab": 262144},
        **{"positions": 2048, "types": 0, "dropout": 0.0, "attention_dropout": 0.0, "activation": "gelu_tanh"},
        **{"family": "gemma3_text", "encoder": "modern", "eps": 1e-6, "window": 257, "global_every": 6},  # type: ignore[arg-type]
        **{"rotary_base": 1_000_000.0, "local_rotary_base": 10_000.0},  # type: ignore[arg-type]
        **{"pooling": "score", "pad_id": 0},  # type: ignore[arg-type]
    )
    assert [number for number in range(24) if config.window_of(number) is None] == [5, 11, 17, 23]
    assert config.local_layers == 20
    assert {config.rotary_base_of(number) for number in (5, 23)} == {1_000_000.0}
    assert {config.rotary_base_of(number) for number in (0, 4, 22)} == {10_000.0}
    written = settings_of(config, "Gemma3TextModel", "fp32", found=PUBLISHED)
    assert written.items() >= {name: value for name, value in PUBLISHED.items() if value is not None}.items()
    assert config_from(written, Path("config.json")) == config


@pytest.mark.parametrize(
    ("changes", "same_as"),
    [
        ({"layer_types": None}, {}),
        ({"layer_types": None, "_sliding_window_pattern": None, "sliding_window_pattern": 6}, {}),
        ({"sliding_window": 513}, {}),
        (
            {
                **dict.fromkeys(("rope_theta", "rope_local_base_freq")),
                "rope_parameters": {
                    "full_attention": {"rope_type": "default", "rope_theta": 1_000_000.0},
                    "sliding_attention": {"rope_type": "default", "rope_theta": 10_000.0},
                },
            },
            {},
        ),
        ({"layer_types": ["full_attention"] * 24}, {"window": None, "global_every": None, "local_rotary_base": None}),
        ({"layer_types": ["sliding_attention"] * 24}, {"global_every": 25}),
        ({"head_dim": None, "num_key_value_heads": None, "num_attention_heads": 4}, {"heads": 4, "kv_heads": 4}),
    ],
    ids=["pattern", "old-pattern", "odd-window", "version-5", "all-global", "all-local", "defaults"],
)
def test_other_spellings(changes: dict[str, Any], same_as: dict[str, Any]) -> None:
    given = {name: value for name, value in {**PUBLISHED, **changes}.items() if value is not None}
    config = config_from(given, Path("config.json"))
    assert config == replace(read(), **same_as)
    written = settings_of(config, "Gemma3TextModel", "fp32", found=given)
    assert config_from(written, Path("config.json")) == config
    assert written.items() >= given.items()


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"use_bidirectional_attention": None}, "use_bidirectional_attention must be true, for .* Got None"),
        ({"use_bidirectional_attention": False}, "use_bidirectional_attention must be true, for .* Got False"),
        ({"query_pre_attn_scalar": 168}, "query_pre_attn_scalar must be head_dim = 256, for .* Got 168"),
        ({"attention_bias": True}, "attention_bias must be False"),
        ({"attn_logit_softcapping": 50.0}, "attn_logit_softcapping must be None, for scores"),
        ({"final_logit_softcapping": 30.0}, "final_logit_softcapping must be None, for logits"),
        ({"rope_scaling": {"rope_type": "linear", "factor": 8.0}}, "rope_scaling must be None"),
        ({"hidden_activation": "silu"}, "has a gate of gelu_tanh. Got hidden_activation='silu'"),
        ({"layer_types": ["full_attention"] + ["sliding_attention"] * 23}, "layer_types must say 'full_attention' of"),
        ({"num_hidden_layers": 10**15}, "layer_types must say 'full_attention' of layers"),  # at once
        ({"layer_types": None, "_sliding_window_pattern": -1}, "_sliding_window_pattern must be at least 1. Got -1"),
        ({"sliding_window": "many"}, "sliding_window must be a whole number. Got 'many'"),
        ({"num_key_value_heads": 2}, "num_key_value_heads must divide num_attention_heads=3. Got 2"),
        ({"head_dim": 0, "query_pre_attn_scalar": 0}, "head_dim must be at least 1. Got 0"),
        (
            {"rope_local_base_freq": 5.0, "rope_parameters": {"sliding_attention": {"rope_theta": 9.0}}},
            "5 .*contradict",
        ),
    ],
    ids=str,
)
def test_what_it_does_not_have_here_is_refused_by_name(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        read(**changes)


def _there_and_back(folder: Path, shape: Shape) -> None:
    cube = Cube(*shape) if ranks_of(shape) > 1 else Cube.single()
    config = toy_config(67, **FAMILIES["gemma"])
    cube.manual_seed(2)
    model = BertForPreTraining(config, cube)
    told = export_huggingface(model, cube, folder)
    assert (told.architecture, told.note) == ("Gemma3ForCausalLM", None)
    alone, again = (BertModel.from_pretrained(folder, each) for each in (Cube.single(), cube))
    assert same(values(again, cube), values(alone))
    assert same(values(again, cube), values(model.bert, cube))


@pytest.mark.parametrize("shape", [(1, 1, 1, 1), pytest.param((2, 2, 2, 1), marks=pytest.mark.slow)], ids=str)
def test_bits_on_cubes(tmp_path: Path, shape: Shape) -> None:
    run_ranks(ranks_of(shape), _there_and_back, tmp_path, shape)


def test_whether_a_folder_has_the_head_its_class_says(tmp_path: Path) -> None:
    """The head is the embedding, so that no tensor tells."""
    cube, config = Cube.single(), toy_config(67, **FAMILIES["gemma"])
    export_huggingface(BertForPreTraining(config, cube), cube, tmp_path / "language")
    weights = open_weights(tmp_path / "language")
    assert weights.heads == ("masked_lm",)
    assert weights.fill(BertForPreTraining(config, cube), cube).in_words() == "loaded: encoder, masked_lm"
    told = export_huggingface(BertModel(config, cube), cube, tmp_path / "bare")
    assert (told.architecture, open_weights(tmp_path / "bare").heads) == ("Gemma3TextModel", ())
    filled = open_weights(tmp_path / "bare").fill(BertForPreTraining(config, cube), cube)
    assert (filled.in_words(), filled.fresh) == ("loaded: encoder", ()), "nothing of it is as initialised"
    settings = json.loads((tmp_path / "language" / CONFIG).read_text())
    assert (settings["sliding_window"], settings["layer_types"][1]) == (6, "full_attention")
