"""MPNet's folders: settings, what is refused by name, tensors beside those that are read, dropout, far distances."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from models.bert import (
    BertConfig,
    BertForPreTraining,
    BertForSequenceClassification,
    BertModel,
    EncodedText,
    collate_texts,
    export_huggingface,
    open_weights,
)
from models.bert.cost_model.param_shapes import parameters
from models.bert.huggingface.config import CONFIG, config_from, settings_of
from tensor3d import Cube
from tests.models.bert.huggingface.families import MPNET, OURS, check_bits_on_a_cube, drawn
from tests.models.bert.huggingface.subject import saved
from tests.models.toy import FAMILIES, Shape, lay, totals, toy_config, toy_packs
from tools.finetune.trainer import depth_of
from tools.training.config import ModelConfig, SpeedConfig, TrainConfig
from tools.training.factory import check_attention

pytest.importorskip("transformers")

ONE: Shape = (1, 1, 1, 1)
# What the config.json of the published model says.
PUBLISHED: dict[str, Any] = {
    "architectures": ["MPNetForMaskedLM"],
    "attention_probs_dropout_prob": 0.1,
    "bos_token_id": 0,
    "eos_token_id": 2,
    "hidden_act": "gelu",
    "hidden_dropout_prob": 0.1,
    "hidden_size": 768,
    "initializer_range": 0.02,
    "intermediate_size": 3072,
    "layer_norm_eps": 1e-05,
    "max_position_embeddings": 514,
    "model_type": "mpnet",
    "num_attention_heads": 12,
    "num_hidden_layers": 12,
    "pad_token_id": 1,
    "relative_attention_num_buckets": 32,
    "vocab_size": 30527,
}
MPNET_BASE = BertConfig(
    **{"layers": 12, "hidden": 768, "heads": 12, "inner": 3072, "vocab": 30527, "positions": 512, "eps": 1e-5},  # type: ignore[arg-type]
    **{"family": "mpnet", "first_position": 2, "types": 0},  # type: ignore[arg-type]
)
SMALL = replace(MPNET_BASE, layers=1, hidden=32, heads=4, inner=48, vocab=67)


def test_the_published_settings_are_read_and_kept() -> None:
    config = config_from(PUBLISHED, Path(CONFIG))
    assert config == MPNET_BASE
    assert settings_of(config, "MPNetForMaskedLM", "fp32", found=PUBLISHED).items() >= PUBLISHED.items()
    fresh = settings_of(config, "MPNetForMaskedLM", "fp32")
    assert config_from(fresh, Path(CONFIG)) == config
    assert (fresh["pad_token_id"], fresh["relative_attention_num_buckets"]) == (1, 32)
    assert "type_vocab_size" not in fresh
    del (older := dict(PUBLISHED))["layer_norm_eps"], older["relative_attention_num_buckets"], older["pad_token_id"]
    assert config_from(older, Path(CONFIG)) == replace(config, eps=1e-12)


def test_the_published_size() -> None:
    """Weights of MPNetForMaskedLM of the transformers library."""
    assert sum(each.elements for each in parameters(replace(MPNET_BASE, next_sentence=False))) == 109_518_527


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"pad_token_id": 0}, "pad_token_id must be 1, for the library numbers positions behind the id 1, .*Got 0"),
        (
            {"relative_attention_num_buckets": 16},
            "relative_attention_num_buckets must be 32, for the library takes 32, whatever is said. Got 16",
        ),
        ({"max_position_embeddings": 2}, "max_position_embeddings must be more than pad_token_id . 1 = 2"),
        ({"architectures": ["RobertaForMaskedLM"]}, "model_type 'mpnet' .* RobertaForMaskedLM is another model's"),
    ],
    ids=str,
)
def test_other_settings_are_refused_by_name(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        config_from(PUBLISHED | changes, Path(CONFIG))


@pytest.mark.slow
@pytest.mark.parametrize("shape", [(1, 2, 1, 1)], ids=str)
def test_bits_on_cubes(tmp_path: Path, shape: Shape) -> None:
    check_bits_on_a_cube(tmp_path, MPNET, shape)
    assert "mpnet.encoder.relative_attention_bias.weight" in load_file(tmp_path / "there" / "model.safetensors")


def test_what_else_a_file_may_have_and_may_not(tmp_path: Path) -> None:
    """Positions' numbers of older versions; none of RoBERTa's types, and no BERT has this bias."""
    for family in (MPNET, "Roberta"):
        saved(tmp_path / family, f"{family}Model", **drawn(family, "Model", ONE, 0))

    def changed(family: str, **more: Tensor) -> Path:
        path = tmp_path / family / "model.safetensors"
        save_file({**load_file(path), **more}, path, metadata={"format": "pt"})
        return path.parent

    changed(MPNET, **{"embeddings.position_ids": torch.arange(32).unsqueeze(0)})
    model = BertModel.from_pretrained(tmp_path / MPNET, Cube.single())
    assert model.relative_bias is not None
    bias = load_file(tmp_path / MPNET / "model.safetensors")["encoder.relative_attention_bias.weight"]
    assert torch.equal(model.relative_bias.weight, bias)
    with pytest.raises(ValueError, match=r"no RoBERTa has: encoder\.relative_attention_bias\.weight"):
        open_weights(changed("Roberta", **{"encoder.relative_attention_bias.weight": bias}))
    with pytest.raises(ValueError, match=r"relative_attention_bias.weight has shape .*, and \(32, \d+\) is needed"):
        open_weights(changed(MPNET, **{"encoder.relative_attention_bias.weight": bias[:16].clone()}))


def test_far_tokens(tmp_path: Path) -> None:
    """Beyond the farthest bucket, and with a padded one beside it."""
    length = 300
    settings = drawn(MPNET, "Model", ONE, 0) | {"max_position_embeddings": length + 2, "num_attention_heads": 2}
    settings["hidden_size"] = 16
    twin = saved(tmp_path, f"{MPNET}Model", **settings).double()
    cube = Cube.single()
    model = BertModel.from_pretrained(tmp_path, cube).double().eval()
    random = torch.Generator().manual_seed(3)
    ids = torch.randint(3, settings["vocab_size"], (2, length), generator=random)
    mask = torch.ones_like(ids)
    ids[1, 200:], mask[1, 200:] = 1, 0
    texts = [
        EncodedText(ids=row[:n].numpy(), types=np.zeros(n, dtype=np.int64))
        for row, n in zip(ids, (length, 200), strict=True)
    ]
    laid = collate_texts(texts, cube)
    with torch.no_grad():
        found = laid.of_tokens(model(laid.batch))
        wanted = twin(input_ids=ids, attention_mask=mask).last_hidden_state
    torch.testing.assert_close(found[0], wanted[0], rtol=1e-9, atol=1e-9)
    torch.testing.assert_close(found[1], wanted[1, :200], rtol=1e-9, atol=1e-9)


MEGATRON = toy_config(67, family="megatron-bert", norm="pre", dropout=0.1)


@pytest.mark.parametrize(
    ("config", "dropout", "note"),
    [
        (SMALL, None, None),
        (SMALL, 0.3, "config.json says nothing of dropout 0.3 of what the head reads"),
        (MEGATRON, 0.3, "config.json says nothing of dropout 0.3 of what the head reads"),
    ],
    ids=["mpnet", "mpnet-0.3", "megatron-bert-0.3"],
)
def test_a_head_drops_out_as_much_as_all_do(
    tmp_path: Path, config: BertConfig, dropout: float | None, note: str | None
) -> None:
    """The library has no setting of its own for it, and reads none."""
    cube = Cube.single()
    model = BertForSequenceClassification(config, 3, cube, dropout=dropout)
    assert export_huggingface(model, cube, tmp_path / "out").note == note
    settings = json.loads((tmp_path / "out" / CONFIG).read_text())
    assert "classifier_dropout" not in settings
    (tmp_path / "out" / CONFIG).write_text(json.dumps(settings | {"classifier_dropout": 0.7}))
    assert BertForSequenceClassification.from_pretrained(tmp_path / "out", cube).dropout.p == 0.1


def test_one_bias_of_all_layers() -> None:
    model = OURS["ForMaskedLM"](SMALL, Cube.single())
    names = [name for name, _ in model.named_parameters() if "relative" in name]
    assert names == ["bert.relative_bias.weight"]
    assert depth_of(names[0], SMALL.layers) == 0, "with the embeddings, where learning rates fall with depth"


@pytest.mark.parametrize(
    "made", [{"recompute": "layer"}, {"recompute": "attention"}, {"read_rows_only": True}], ids=str
)
def test_the_bias_is_learnt_however_layers_work(made: dict[str, Any]) -> None:
    cube, packs = Cube.single(), toy_packs(67, 3)
    found: list[dict[str, Tensor]] = []
    for options in ({}, made):
        cube.manual_seed(3)
        model = BertForPreTraining(toy_config(67, **FAMILIES["mpnet"]), cube, **options).double()
        model(lay(packs, cube, with_read_rows=True), *totals(packs)).loss.backward()
        found.append({name: each.grad for name, each in model.named_parameters() if each.grad is not None})
    assert found[0]["bert.relative_bias.weight"].abs().max() > 1e-4
    for name, gradient in found[0].items():
        torch.testing.assert_close(found[1][name], gradient, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("backend", ["varlen", "flex"])
def test_backends_without_relative_positions_are_refused_before_a_run(backend: Any) -> None:
    recipe = TrainConfig(model=ModelConfig(family="mpnet", first_position=2), speed=SpeedConfig(attention=backend))
    with pytest.raises(ValueError, match="it has no relative positions"):
        check_attention(recipe, "cuda")
