"""DeBERTa's folders: published settings, what is refused by name, the masked-LM head under both names."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from models.bert import BertConfig, BertForPreTraining, BertModel, EncodedText, export_huggingface, open_weights
from models.bert.huggingface import open_generator
from models.bert.huggingface.config import config_from, settings_of
from models.bert.huggingface.reader import HFWeights
from models.bert.tasks import piece_losses
from tensor3d import Cube, local
from tests.models.bert.huggingface.families import DEBERTA, drawn
from tests.models.bert.huggingface.subject import original, saved, tensors_of, write
from tests.models.bert.huggingface.subject import settings_of as settings_of_original
from tests.models.toy import FAMILIES, Shape, toy_config
from tools.convert.__main__ import parts_of
from tools.finetune.trainer import depth_of

pytest.importorskip("transformers")
ONE: Shape = (1, 1, 1, 1)
# What the config.json of the smallest published model of the third version says.
PUBLISHED: dict[str, Any] = {
    "model_type": "deberta-v2",
    "attention_probs_dropout_prob": 0.1,
    "hidden_act": "gelu",
    "hidden_dropout_prob": 0.1,
    "hidden_size": 384,
    "initializer_range": 0.02,
    "intermediate_size": 1536,
    "layer_norm_eps": 1e-07,
    "max_position_embeddings": 512,
    "max_relative_positions": -1,
    "norm_rel_ebd": "layer_norm",
    "num_attention_heads": 6,
    "num_hidden_layers": 12,
    "pos_att_type": "p2c|c2p",
    "position_biased_input": False,
    "position_buckets": 256,
    "relative_attention": True,
    "share_att_key": True,
    "type_vocab_size": 0,
    "vocab_size": 128100,
}


def read(**changes: Any) -> BertConfig:
    return config_from({**PUBLISHED, **changes}, Path("config.json"))


def test_the_published_settings_are_read_and_kept() -> None:
    config = read()
    assert config == BertConfig(
        **{"layers": 12, "hidden": 384, "heads": 6, "inner": 1536, "vocab": 128100, "positions": 512, "types": 0},
        **{"eps": 1e-7, "family": "deberta-v2", "position_buckets": 256},  # type: ignore[arg-type]
    )
    written = settings_of(config, "DebertaV2ForMaskedLM", "fp32", found=PUBLISHED)
    assert written.items() >= PUBLISHED.items()
    assert config_from(written, Path("config.json")) == config
    assert read(attention_head_size=64, pooler_hidden_size=384) == config
    as_list = read(pos_att_type=["c2p", "p2c"], max_relative_positions=512)
    assert as_list == config


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"relative_attention": False}, "relative_attention must be True, for scores hang on distances here. Got Fal"),
        ({"position_biased_input": True}, "position_biased_input must be False, for there is no table of positions"),
        ({"share_att_key": False}, "share_att_key must be True, for distances have the weights of tokens here"),
        ({"norm_rel_ebd": "none"}, "norm_rel_ebd must be 'layer_norm'"),
        ({"pos_att_type": "c2p"}, "pos_att_type must be 'p2c|c2p', both products. Got 'c2p'"),
        ({"pos_att_type": ["c2p", "p2c", "p2p"]}, "pos_att_type must be"),
        ({"pos_att_type": None}, "pos_att_type must be .* Got None"),
        ({"position_buckets": -1}, "position_buckets must be at least 1. Got -1"),
        (
            {"position_buckets": 255},
            "position_buckets=255 with max_position_embeddings=512: buckets to each side must be even",
        ),
        (
            {"max_position_embeddings": 100},
            "position_buckets=256 with max_position_embeddings=100: the farthest distance must be",
        ),
        ({"max_relative_positions": 128}, "max_relative_positions must be -1 or max_position_embeddings = 512. Got 1"),
        ({"conv_kernel_size": 3}, "conv_act must be 'gelu', for .* Got 'tanh', the library's default"),
        ({"conv_kernel_size": 3, "conv_act": "gelu", "conv_groups": 2}, "conv_groups must be 1, for .* Got 2"),
        ({"conv_kernel_size": 4, "conv_act": "gelu"}, "conv_kernel_size must be odd and at least 3. Got 4"),
        ({"type_vocab_size": 2}, "type_vocab_size must be 0"),
        ({"pooler_dropout": 0.1}, "pooler_dropout must be 0, for .* behind the pooler alone here. Got 0.1"),
        ({"pooler_hidden_act": "tanh"}, "pooler_hidden_act must be 'gelu'"),
        ({"embedding_size": 128}, "embedding_size must be 384 here. Got 128"),
        ({"pooler_hidden_size": 96}, "pooler_hidden_size must be 384 here. Got 96"),
        ({"attention_head_size": 32}, "attention_head_size must be 64 here. Got 32"),
        ({"hidden_size": "wide"}, "hidden_size must be a whole number. Got 'wide'"),
    ],
    ids=str,
)
def test_what_it_does_not_have_here_is_refused_by_name(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message.replace("|", r"\|")):
        read(**changes)


@pytest.mark.parametrize(
    "name", ["relative_attention", "position_biased_input", "share_att_key", "norm_rel_ebd", "pos_att_type"]
)
def test_what_is_not_said_is_as_the_library_has_it(name: str) -> None:
    """Which is the first version's, without distances."""
    settings = {key: value for key, value in PUBLISHED.items() if key != name}
    with pytest.raises(ValueError, match=f"{name} must be"):
        config_from(settings, Path("config.json"))


def test_a_size_that_is_missing_is_named() -> None:
    settings = {key: value for key, value in PUBLISHED.items() if key != "hidden_size"}
    for more in ({}, {"pooler_hidden_size": 384}):
        with pytest.raises(ValueError, match="has no hidden_size, which says how large"):
            config_from({**settings, **more}, Path("config.json"))


def test_the_head_under_its_other_names(tmp_path: Path) -> None:
    """As published files have it."""
    twin = saved(tmp_path / "there", f"{DEBERTA}ForMaskedLM", **drawn(DEBERTA, "ForMaskedLM", ONE, 0))
    path = tmp_path / "there" / "model.safetensors"
    renamed = {
        name.replace("cls.predictions.transform.", "lm_predictions.lm_head.").replace(
            "cls.predictions.bias", "lm_predictions.lm_head.bias"
        ): value
        for name, value in load_file(path).items()
        if "decoder" not in name
    }
    assert sum(name.startswith("lm_predictions.lm_head.") for name in renamed) == 5
    save_file(renamed, path, metadata={"format": "pt"})
    weights, cube = open_weights(tmp_path / "there"), Cube.single()
    assert isinstance(weights, HFWeights)
    assert weights.heads == ("masked_lm",)
    cube.manual_seed(0)
    with pytest.warns(UserWarning, match=r"next_sentence|pooler"):
        model = BertForPreTraining.from_pretrained(tmp_path / "there", cube)
    ids, masked, hidden = np.arange(3, 9), np.array([2]), np.array([5])
    text = EncodedText(ids=ids, types=np.zeros(6, dtype=np.int64), masked=masked, hidden=hidden)
    loss, _ = piece_losses(model, [text])
    logits = twin(torch.from_numpy(ids)[None]).logits[0, 2]
    assert torch.allclose(loss[0], -logits.log_softmax(-1)[5], atol=1e-5)
    export_huggingface(model, cube, tmp_path / "back", heads=("masked_lm",), settings=weights.settings)
    assert not [name for name in load_file(tmp_path / "back" / "model.safetensors") if name.startswith("lm_pred")]


@pytest.mark.parametrize("last", ["classifier", "classifer"])
def test_the_head_by_which_the_third_version_has_learnt(tmp_path: Path, last: str) -> None:
    """Beside that of masked tokens, as in published files, and under the name of earlier code; the library takes the
    other one from what is written."""
    twin = saved(tmp_path / "there", f"{DEBERTA}ForMaskedLM", **drawn(DEBERTA, "ForMaskedLM", ONE, 0))
    path, h = tmp_path / "there" / "model.safetensors", twin.config.hidden_size
    shapes = {"LayerNorm.weight": (h,), "LayerNorm.bias": (h,), "dense.weight": (h, h), "dense.bias": (h,)}
    shapes |= {f"{last}.weight": (1, h), f"{last}.bias": (1,)}
    head = {f"mask_predictions.{name}": torch.randn(shape) for name, shape in shapes.items()}
    save_file({**load_file(path), **head}, path, metadata={"format": "pt"})
    weights, cube = open_weights(tmp_path / "there"), Cube.single()
    assert weights.heads == ("masked_lm", "replaced_tokens")
    model, filled = parts_of(weights, cube)
    assert (filled.unused, filled.fresh) == ((), ())
    back = export_huggingface(model, cube, tmp_path / "back", settings=weights.settings)
    assert back.architecture == "DebertaV2ForMaskedLM"
    assert "DebertaV2ForMaskedLM does not read it" in (back.note or "")
    written = load_file(tmp_path / "back" / "model.safetensors")
    for name, value in head.items():
        assert written[name.replace(last, "classifier")].equal(value)
    _, wrong = type(twin).from_pretrained(tmp_path / "back", output_loading_info=True)
    assert not any(wrong.values())  # the library's class knows that published files have it


def published(folder: Path, *, says_generator: bool) -> tuple[Any, Any]:
    """A folder as the third version's: the model with what its embeddings differ by from the generator's, and the files
    of that one. Both as the library makes them."""
    settings = {**drawn(DEBERTA, "ForMaskedLM", ONE, 0), "num_hidden_layers": 4}
    model = saved(folder, f"{DEBERTA}ForMaskedLM", **settings)
    beside = original(f"{DEBERTA}ForMaskedLM", **settings | {"num_hidden_layers": 2})
    own, table = tensors_of(model), "deberta.embeddings.word_embeddings"
    learnt = tensors_of(beside)
    positions = torch.ones(settings["max_position_embeddings"], settings["hidden_size"])
    own |= {f"{table}._weight": own[f"{table}.weight"] - learnt[f"{table}.weight"]}
    for name in ("_weight", "weight"):  # of a decoder that is not here
        own[f"deberta.embeddings.position_embeddings.{name}"] = positions
    learnt["deberta.embeddings.position_embeddings.weight"] = positions
    (folder / "model.safetensors").unlink()
    torch.save(own, folder / "pytorch_model.bin")
    torch.save(learnt, folder / "pytorch_model.generator.bin")
    if says_generator:  # no more than sizes, as the authors' code has it
        (folder / "generator_config.json").write_text(json.dumps({"num_hidden_layers": 2}))
    return model, beside


@pytest.mark.parametrize("says_generator", [False, True])
def test_a_folder_with_its_generator_beside_it(tmp_path: Path, *, says_generator: bool) -> None:
    model, beside = published(tmp_path, says_generator=says_generator)
    weights, generator = open_weights(tmp_path), open_generator(tmp_path)
    assert [each.config.layers for each in (weights, generator)] == [4, 2]
    cube = Cube.single()
    for source, twin in ((weights, model), (generator, beside)):
        found, filled = parts_of(source, cube, ("masked_lm",))
        assert filled.fresh == ()
        wanted = twin.deberta.embeddings.word_embeddings.weight
        assert local(found.bert.embeddings.tokens.weight).equal(wanted)
        assert len(filled.unused) == (3 if source is weights else 1)
    assert open_generator(saved_alone(tmp_path / "alone")).config.layers == 1


def saved_alone(folder: Path) -> Path:
    """A folder that is a model and no more."""
    saved(folder, f"{DEBERTA}ForMaskedLM", **{**drawn(DEBERTA, "ForMaskedLM", ONE, 0), "num_hidden_layers": 1})
    return folder


def test_a_difference_without_its_sum_is_refused(tmp_path: Path) -> None:
    """As some published folders have it, of which the library makes a model with embeddings by chance."""
    published(tmp_path, says_generator=False)
    tensors = torch.load(tmp_path / "pytorch_model.bin")
    del tensors["deberta.embeddings.word_embeddings.weight"]
    torch.save(tensors, tmp_path / "pytorch_model.bin")
    with pytest.raises(ValueError, match=r"word_embeddings._weight is what it differs by .* write the sum of both"):
        parts_of(open_weights(tmp_path), Cube.single(), ())


def test_a_convolution_belongs_to_the_first_layer() -> None:
    """Where learning rates fall with depth, or first layers stay as they are."""
    config = toy_config(67, **FAMILIES["deberta-v2"], conv_kernel=3)
    names = [name for name, _ in BertModel(config, Cube.single()).named_parameters() if "convolution" in name]
    assert {depth_of(f"bert.{name}", config.layers) for name in names} == {1}
    assert len(names) == 4


@pytest.mark.parametrize("shape", [(64, 64, 5), (64, 32, 6), (64, 192)], ids=str)
def test_a_convolution_of_another_shape_is_refused_by_that_of_the_file(tmp_path: Path, shape: tuple[int, ...]) -> None:
    """One in groups has as many numbers as another that is not."""
    sizes = {"hidden_size": 64, "num_attention_heads": 4}
    model = original("DebertaV2Model", **{**drawn(DEBERTA, "Model", ONE, 0), **sizes})
    settings, name = settings_of_original(model), "encoder.conv.conv.weight"
    write(tmp_path, tensors_of(model) | {name: torch.zeros(shape)}, settings)
    with pytest.raises(ValueError, match=rf"{name} has shape {re.escape(str(shape))}, and \(64, 64, 3\) is needed"):
        open_weights(tmp_path)
