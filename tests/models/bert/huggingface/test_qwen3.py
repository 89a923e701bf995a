"""Qwen3's folders, as published for sentence vectors and as encoders that see both sides; what is refused by name."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file

from models.bert import (
    BertConfig,
    BertForPreTraining,
    BertForSequenceClassification,
    BertModel,
    collate_texts,
    export_huggingface,
    open_weights,
)
from models.bert.huggingface.config import config_from, settings_of
from models.bert.tasks import class_logits
from tensor3d import Cube, gather
from tests.models.bert.huggingface.families import LENGTHS, of_tokens_of, texts_for
from tests.models.bert.huggingface.subject import same, values, write
from tests.models.toy import FAMILIES, Shape, toy_config
from tests.ranks import run_ranks
from tests.single_device_reference import TOLERANCE, error, gradient_errors, make_twins, ranks_of, worst

# What the config.json of the published model of 0.6 billion parameters says.
PUBLISHED: dict[str, Any] = {
    "architectures": ["Qwen3ForCausalLM"],
    "attention_bias": False,
    "attention_dropout": 0.0,
    "bos_token_id": 151643,
    "eos_token_id": 151643,
    "head_dim": 128,
    "hidden_act": "silu",
    "hidden_size": 1024,
    "initializer_range": 0.02,
    "intermediate_size": 3072,
    "max_position_embeddings": 32768,
    "max_window_layers": 28,
    "model_type": "qwen3",
    "num_attention_heads": 16,
    "num_hidden_layers": 28,
    "num_key_value_heads": 8,
    "rms_norm_eps": 1e-06,
    "rope_scaling": None,
    "rope_theta": 1000000,
    "sliding_window": None,
    "tie_word_embeddings": True,
    "use_cache": True,
    "use_sliding_window": False,
    "vocab_size": 151669,
}
CAUSAL = {**FAMILIES["qwen"], "causal": True, "pooling": "last"}


def read(**changes: Any) -> BertConfig:
    return config_from({**PUBLISHED, **changes}, Path("config.json"))


def test_the_published_settings_are_read_and_kept() -> None:
    config = read()
    assert config == BertConfig(
        **{"layers": 28, "hidden": 1024, "heads": 16, "kv_heads": 8, "head_dim": 128, "inner": 3072, "vocab": 151669},
        **{"positions": 32768, "types": 0, "dropout": 0.0, "attention_dropout": 0.0, "activation": "silu"},
        **{"family": "qwen3", "encoder": "modern", "eps": 1e-6, "rotary_base": 1_000_000.0},  # type: ignore[arg-type]
        **{"causal": True, "pooling": "score"},  # type: ignore[arg-type]
    )
    written = settings_of(config, "Qwen3Model", "fp32", found=PUBLISHED)
    kept = {name: value for name, value in PUBLISHED.items() if value is not None and name != "architectures"}
    assert written.items() >= kept.items()
    assert "is_causal" not in written, "the library's default"
    assert config_from(written, Path("config.json")) == config


@pytest.mark.parametrize(
    ("changes", "same_as"),
    [
        ({"rope_theta": None, "rope_parameters": {"rope_type": "default", "rope_theta": 1_000_000.0}}, {}),
        ({"layer_types": ["full_attention"] * 28, "is_causal": True}, {}),
        ({"is_causal": False}, {"causal": False}),
        ({"head_dim": None, "num_key_value_heads": None, "num_attention_heads": 32}, {"heads": 32, "kv_heads": 32}),
        ({"tie_word_embeddings": None}, {"tied": False}),
    ],
    ids=["version-5", "told", "sees-all", "defaults", "own-decoder"],
)
def test_other_spellings(changes: dict[str, Any], same_as: dict[str, Any]) -> None:
    given = {name: value for name, value in {**PUBLISHED, **changes}.items() if value is not None}
    config = config_from(given, Path("config.json"))
    assert config == replace(read(), **same_as)
    written = settings_of(config, "Qwen3ForCausalLM", "fp32", found=given)
    assert config_from(written, Path("config.json")) == config
    assert written.items() >= given.items()


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"is_causal": "no"}, "is_causal must be true or false. Got 'no'"),
        ({"use_sliding_window": True}, "use_sliding_window must be False, for all layers see whole sequences here"),
        ({"layer_types": ["full_attention"] * 27 + ["sliding_attention"]}, "layer_types must say 'full_attention' of"),
        ({"attention_bias": True}, "attention_bias must be False"),
        ({"rope_scaling": {"rope_type": "yarn", "factor": 4.0}}, "rope_scaling must be None"),
        ({"rope_parameters": {"rope_type": "yarn", "factor": 4.0}}, "rope_type of rope_parameters must be 'default'"),
        ({"rope_parameters": {"rope_theta": 5.0}}, "rope_theta 1e.06 and rope_parameters 5 contradict"),
        ({"hidden_act": "relu"}, "has a gate of silu or gelu. Got hidden_act='relu'"),
        ({"num_key_value_heads": 3}, "num_key_value_heads must divide num_attention_heads=16. Got 3"),
        ({"head_dim": 127}, "so head_dim must be even. Got 127"),
    ],
    ids=str,
)
def test_what_it_does_not_have_here_is_refused_by_name(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        read(**changes)


def test_a_token_sees_what_came_before_it_alone() -> None:
    texts = texts_for({"vocab_size": 67})[:1]
    other = replace(texts[0], ids=np.append(texts[0].ids[:-1], 5))
    for causal in (True, False):
        model = BertModel(toy_config(67, **{**CAUSAL, "causal": causal}), Cube.single())
        first, second = (model(collate_texts([text], model.cube).batch)[: LENGTHS[0] - 1] for text in (texts[0], other))
        assert torch.equal(first, second) == causal


def test_a_model_that_sees_no_later_tokens_learns_no_masked_ones(tmp_path: Path) -> None:
    config, cube = toy_config(67, **CAUSAL), Cube.single()
    with pytest.raises(ValueError, match=r"this encoder sees no later tokens. Got causal=True. Set it to false"):
        BertForPreTraining(config, cube)
    bare = BertModel(config, cube)
    export_huggingface(bare, cube, tmp_path / "bare")
    # As published: a decoder's class, and the names of an encoder alone; and with the decoder beside it.
    weights = values(bare)
    tensors = load_file(tmp_path / "bare" / "model.safetensors")
    settings = settings_of(config, "Qwen3ForCausalLM", "fp32")
    write(tmp_path / "published", tensors, settings)
    own = {"lm_head.weight": torch.ones(67, 64), **{f"model.{name}": each for name, each in tensors.items()}}
    write(tmp_path / "decoder", own, {**settings, "tie_word_embeddings": False})
    for name, unused in (("bare", ()), ("published", ()), ("decoder", ("lm_head.weight",))):
        found = open_weights(tmp_path / name)
        assert (found.config.causal, found.heads) == (True, ())
        model = BertModel(found.config, cube)
        assert unused == tuple(found.fill(model, cube).unused)
        assert same(values(model), weights)


def test_what_sees_both_sides_says_which_versions_of_the_library_do(tmp_path: Path) -> None:
    cube, config = Cube.single(), toy_config(67, **FAMILIES["qwen"])
    told = export_huggingface(BertForPreTraining(config, cube), cube, tmp_path)
    assert told.architecture == "Qwen3ForCausalLM"
    assert told.note == "by is_causal = false of config.json the library from 5.2 on sees both sides; older ones do not"
    assert (open_weights(tmp_path).config.causal, open_weights(tmp_path).heads) == (False, ("masked_lm",))


def test_what_has_no_class_is_refused_with_what_is_there(tmp_path: Path) -> None:
    """A classifier with a dense layer, which is no way out; what else has none is in test_scores.py."""
    cube = Cube.single()
    model = BertForSequenceClassification(toy_config(67, **CAUSAL), 3, cube)
    with pytest.raises(
        ValueError, match=r"no Qwen3 of the library has exactly the heads pooler. Export .* of: none\.$"
    ):
        export_huggingface(model, cube, tmp_path, heads=("pooler",))
    assert export_huggingface(model, cube, tmp_path, heads=()).architecture == "Qwen3Model"


@pytest.mark.parametrize("family", ["qwen", "gemma"])
def test_a_head_that_is_the_embedding_has_no_other_decoder(tmp_path: Path, family: str) -> None:
    """Where the folder holds both, they must be the same, unless the head is not taken."""
    config, cube = toy_config(67, **FAMILIES[family]), Cube.single()
    model = BertForPreTraining(config, cube)
    export_huggingface(model, cube, tmp_path)
    tensors, settings = load_file(tmp_path / "model.safetensors"), json.loads((tmp_path / "config.json").read_text())
    embedding = tensors["model.embed_tokens.weight"]
    twice = open_weights(write(tmp_path, {**tensors, "lm_head.weight": embedding.clone()}, settings))
    assert twice.fill(model, cube).unused == ()
    other = open_weights(write(tmp_path, {**tensors, "lm_head.weight": embedding + 1}, settings))
    assert other.only(()).fill(BertModel(config, cube), cube).unused == ("lm_head.weight",)
    with pytest.raises(ValueError, match=r"lm_head.weight differs from model.embed_tokens.weight, and this .* has one"):
        other.fill(model, cube)


# --- What classifiers look at -----------------------------------------------------------------------------------------


def _last(shape: Shape) -> dict[str, float]:
    """A classifier on the cube beside one that is given each text's last hidden state by hand."""
    config = toy_config(67, **CAUSAL)
    cube, model, single, twin = make_twins(lambda c: BertForSequenceClassification(config, 3, c), shape)
    texts = texts_for({"vocab_size": 67})
    labels = torch.arange(len(texts)) % 3
    laid = collate_texts(texts, cube)
    loss = model(laid.batch, laid.spread(labels, -100), len(texts))
    loss.backward()
    alone = collate_texts(texts, single)
    h = of_tokens_of(alone, gather(twin.bert(alone.batch), single, "z"))
    last = h[torch.tensor(LENGTHS).cumsum(0) - 1]
    logits = twin.classifier(twin.pooler.of_rows(last))
    wanted = F.cross_entropy(logits, labels)
    wanted.backward()
    found = {"loss": error(loss, wanted), "logits": error(class_logits(model, texts), logits)}
    return found | gradient_errors(model, twin)


@pytest.mark.parametrize("shape", [(1, 2, 2, 1), pytest.param((2, 2, 2, 2), marks=pytest.mark.slow)], ids=str)
def test_a_classifier_reads_the_last_token_of_each_text(shape: Shape) -> None:
    name, value = worst(run_ranks(ranks_of(shape), _last, shape))
    assert value <= TOLERANCE[torch.float32], f"{name} differs by {value}"
