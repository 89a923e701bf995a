"""Folders that are no BERT, or a damaged one: what is said, and that nothing has been changed."""

from __future__ import annotations

import json
import os
import pickle
import re
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from models.bert import BertForPreTraining, BertModel, open_weights
from models.bert.huggingface.config import config_from
from tensor3d import Cube
from tests.models.bert.huggingface.subject import original, same, settings_of, tensors_of, values, write
from tests.ranks import run_ranks

pytest.importorskip("transformers")

Tensors = dict[str, Tensor]
LAYER = "bert.encoder.layer.1.output.dense.weight"


@pytest.fixture(scope="module")
def model() -> Any:
    return original()


@pytest.fixture
def folder(model: Any, tmp_path: Path) -> Path:
    return write(tmp_path / "model", tensors_of(model), settings_of(model))


def told(folder: Path) -> str:
    """What loading says; the model must be as it was."""
    cube = Cube.single()
    try:
        weights = open_weights(folder)
    except ValueError as problem:
        return str(problem)
    model = BertForPreTraining(weights.config, cube)
    before = values(model)
    with pytest.raises(ValueError, match=r".") as problem:
        weights.fill(model, cube)
    assert same(values(model), before)
    return str(problem.value)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            {"model_type": "gpt2"},
            "is of another model: model_type 'gpt2'. The models that can be read are BERT (bert), R",
        ),
        ({"model_type": "xlnet"}, "model_type 'xlnet', and its attention has relative positions. The models"),
        ({"model_type": "deberta"}, "model_type 'deberta', and it is the first version, whose layers have weights"),
        ({"model_type": "albert"}, "model_type 'albert', and its layers share one set of weights. The models"),
        ({"model_type": "roberta"}, "says model_type 'roberta' and architectures ['BertForPreTraining'], of which"),
        (
            {"model_type": "roberta", "architectures": None},
            "config.json is of RoBERTa, and the names of the encoder begin with 'bert.', as BERT's do.",
        ),
        ({"model_type": None, "architectures": ["FunnelModel"]}, "another model: architectures ['FunnelModel']. The"),
        ({"model_type": None, "architectures": ["BertModel", "DistilBertModel"]}, "is of another model: architectures"),
        ({"is_decoder": True}, "is_decoder must be False, for a decoder sees no later tokens. Got True."),
        ({"add_cross_attention": True}, "add_cross_attention must be False"),
        ({"position_embedding_type": "relative_key"}, "position_embedding_type must be 'absolute'"),
        ({"quantization_config": {"bits": 4}}, "quantization_config must be None"),
        ({"per_layer_config": {"0": {"layer_norm_eps": 1e-3}}}, "per_layer_config must be None, for all layers have"),
        ({"transformers_weights": "other.safetensors"}, "transformers_weights must be None, for weights are read from"),
        ({"pruned_heads": {"0": [1]}}, "pruned_heads must be {}"),
        ({"hidden_act": "mish"}, "hidden_act must be one of gelu, "),
        ({"tie_word_embeddings": "no"}, "tie_word_embeddings must be true or false. Got 'no'."),
        ({"hidden_act": ["gelu"]}, "hidden_act must be one of gelu, "),
        ({"model_type": ["bert"]}, "is of another model: model_type ['bert']. The models"),
        ({"architectures": 5}, "architectures must be a list of names of classes. Got 5."),
        ({"architectures": "BertModel"}, "architectures must be a list of names of classes. Got 'BertModel'."),
        ({"num_hidden_layers": 1}, "the weights are of 2 layers, and config.json says num_hidden_layers 1."),
        ({"num_hidden_layers": ...}, "has no num_hidden_layers"),
        ({"vocab_size": "67"}, "vocab_size must be a whole number. Got '67'."),
        ({"layer_norm_eps": True}, "layer_norm_eps must be a number. Got True."),
        ({"num_attention_heads": 7}, "hidden_size must divide by num_attention_heads=7"),
        ({"vocab_size": 70}, "config.json says vocab_size 70, and the weights have 67 entries"),
        ({"num_hidden_layers": 3}, "the weights are of 2 layers, and config.json says num_hidden_layers 3"),
        ({"intermediate_size": 100}, "has shape (96, 64), and (100, 64) is needed"),
    ],
    ids=str,
)
def test_settings(model: Any, tmp_path: Path, change: dict[str, Any], message: str) -> None:
    settings = {name: value for name, value in {**settings_of(model), **change}.items() if value is not ...}
    assert message in told(write(tmp_path, tensors_of(model), settings))


@pytest.mark.parametrize(
    ("kind", "change", "message"),
    [
        ("RobertaForMaskedLM", {"pad_token_id": None}, "pad_token_id must be a whole number. Got None."),
        (
            "RobertaForMaskedLM",
            {"pad_token_id": 30},
            "must be more than pad_token_id + 1 = 31, for RoBERTa's positions",
        ),
        ("RobertaForMaskedLM", {"pad_token_id": -2}, "pad_token_id + 1 must be at least 1"),
        (
            "RobertaForMaskedLM",
            {"max_position_embeddings": 25},
            "position_embeddings.weight has shape (24, 64), and (25,",
        ),
        (
            "RobertaForMaskedLM",
            {"model_type": "bert", "architectures": None},
            "config.json is of BERT, and the names of",
        ),
        ("DistilBertForMaskedLM", {"n_layers": 3}, "the weights are of 2 layers, and config.json says n_layers 3."),
        ("DistilBertForMaskedLM", {"num_attention_heads": 4}, "num_attention_heads 4 and n_heads 8 contradict"),
        ("DistilBertForMaskedLM", {"dim": ...}, "has no dim, which says how large the model is."),
        ("DistilBertForMaskedLM", {"activation": "mish"}, "activation must be one of gelu, "),
        ("DistilBertForMaskedLM", {"sinusoidal_pos_embds": True}, "sinusoidal_pos_embds must be False, for positions"),
        ("ElectraForMaskedLM", {"embedding_size": ...}, "has no embedding_size, which says how large the model is."),
        (
            "ElectraForMaskedLM",
            {"embedding_size": 64},
            "says embedding_size 64, which is hidden_size, and the weights have electra.embeddings_project.bias",
        ),
        ("ElectraForMaskedLM", {"hidden_size": 128}, "electra.embeddings_project.weight has shape (64, 32), and (128,"),
        ("ModernBertForMaskedLM", {"intermediate_size": 80}, "mlp.Wi.weight (rows from 0) has shape (96, 64), and (80"),
        ("ModernBertForMaskedLM", {"rope_parameters": [1]}, "rope_parameters must be an object. Got [1]."),
        ("ModernBertForMaskedLM", {"rope_parameters": {"full_attention": 5}}, "full_attention must be an object. Got"),
        (
            "RobertaForSequenceClassification",
            {"classifier_dropout": 1.5},
            "classifier_dropout must be at least 0 and below 1. Got 1.5.",
        ),
    ],
    ids=str,
)
def test_settings_of_relatives(tmp_path: Path, kind: str, change: dict[str, Any], message: str) -> None:
    changes = {"embedding_size": 32} if kind.startswith("Electra") else {}
    model = original(kind, pad_token_id=1, **changes)
    settings = {name: value for name, value in {**settings_of(model), **change}.items() if value is not ...}
    with pytest.raises(ValueError, match=re.escape(message)):  # before a model of these sizes is made
        open_weights(write(tmp_path, tensors_of(model), settings))


def test_a_tensor_that_is_missing_has_its_own_name(tmp_path: Path) -> None:
    model = original("DistilBertForMaskedLM")
    name = "distilbert.transformer.layer.1.sa_layer_norm.weight"
    tensors = {key: value for key, value in tensors_of(model).items() if key != name}
    assert f"{name} is missing, which the model needs" in told(write(tmp_path / "a", tensors, settings_of(model)))
    decoder = tensors_of(model)["distilbert.embeddings.word_embeddings.weight"] + 1
    tensors = {**tensors_of(model), "vocab_projector.weight": decoder}
    message = (
        "vocab_projector.weight differs from distilbert.embeddings.word_embeddings.weight, and this DistilBERT has"
    )
    assert message in told(write(tmp_path / "b", tensors, settings_of(model)))


def renamed(tensors: Tensors) -> None:
    for name in list(tensors):
        tensors[name.replace("bert.", "model.bert.", 1)] = tensors.pop(name)


def without_embedding(tensors: Tensors) -> None:
    del tensors["bert.embeddings.word_embeddings.weight"]


def both_names(tensors: Tensors) -> None:
    tensors["bert.embeddings.LayerNorm.gamma"] = tensors["bert.embeddings.LayerNorm.weight"].clone()


def other_decoder(tensors: Tensors) -> None:
    tensors["cls.predictions.decoder.weight"] = tensors["bert.embeddings.word_embeddings.weight"] + 1


def other_bias(tensors: Tensors) -> None:
    tensors["cls.predictions.decoder.bias"] = tensors["cls.predictions.bias"] + 1


def short_decoder(tensors: Tensors) -> None:
    tensors["cls.predictions.decoder.weight"] = tensors["bert.embeddings.word_embeddings.weight"][:60].clone()


def whole_numbers(tensors: Tensors) -> None:
    tensors[LAYER] = tensors[LAYER].to(torch.int8)


def half_a_head(tensors: Tensors) -> None:
    del tensors["cls.predictions.transform.LayerNorm.bias"]


def without_layer(tensors: Tensors) -> None:
    del tensors[LAYER]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (without_layer, f"{LAYER} is missing, which the model needs; the names of its encoder begin with 'be"),
        (renamed, "the names of the encoder begin with 'model.bert.' instead of 'bert.', as wrappers"),
        (without_embedding, "it has no embedding of tokens, and its first tensor is bert.embeddings.LayerNorm.bias"),
        (half_a_head, "cls.predictions.transform.LayerNorm.bias is missing"),
        (both_names, "has bert.embeddings.LayerNorm.gamma and bert.embeddings.LayerNorm.weight, which are the same"),
        (other_decoder, "if the decoder has its own on purpose, say so in config.json: tie_word_embeddings = false"),
        (other_decoder, "cls.predictions.decoder.weight differs from bert.embeddings.word_embeddings.weight"),
        (other_bias, "cls.predictions.decoder.bias differs from cls.predictions.bias"),
        (short_decoder, "cls.predictions.decoder.weight has shape (60, 64), and (67, 64) is needed"),
        (whole_numbers, f"{LAYER} is of type I8, and one of F64, F32, BF16, F16 is needed"),
    ],
)
def test_tensors(model: Any, tmp_path: Path, change: Callable[[Tensors], Any], message: str) -> None:
    tensors = tensors_of(model)
    change(tensors)
    assert message in told(write(tmp_path, tensors, settings_of(model)))


def test_a_decoder_of_its_own_is_nothing_to_the_encoder(model: Any, tmp_path: Path) -> None:
    tensors = tensors_of(model)
    other_decoder(tensors)
    weights = open_weights(write(tmp_path, tensors, settings_of(model)))
    cube = Cube.single()
    assert "cls.predictions.decoder.weight" in weights.fill(BertModel(weights.config, cube), cube).unused


def cut(path: Path, size: int) -> None:
    path.write_bytes(path.read_bytes()[:size])


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (lambda whole: whole[:5], "is cut off or damaged"),
        (lambda whole: whole[:400], "is cut off or damaged"),
        (lambda whole: whole[:-1], "is cut off or damaged"),
        (lambda whole: b"", "is empty"),
        (lambda whole: b"version https://git-lfs.github.com/spec/v1\noid sha256:00\n", "is a Git LFS pointer"),
        (lambda whole: b"\n<!DOCTYPE html><html><body>404</body></html>", "is a web page instead of weights"),
    ],
)
@pytest.mark.parametrize("file", ["model.safetensors", "pytorch_model.bin"])
def test_files(model: Any, tmp_path: Path, file: str, content: Callable[[bytes], bytes], message: str) -> None:
    write(tmp_path, tensors_of(model), settings_of(model), file)
    whole = (tmp_path / file).read_bytes()
    (tmp_path / file).write_bytes(content(whole))
    said = told(tmp_path)
    assert message in said
    assert file in said


class Harm:
    """Makes a file when it is unpickled."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, (str(self.path),)


@pytest.mark.parametrize("zipped", [True, False])
def test_no_pickle_is_run(model: Any, tmp_path: Path, zipped: bool) -> None:
    write(tmp_path, tensors_of(model), settings_of(model), "pytorch_model.bin")
    harm = tmp_path / "harm"
    torch.save({"a": Harm(harm)}, tmp_path / "pytorch_model.bin", _use_new_zipfile_serialization=zipped)
    assert "nothing in it is run" in told(tmp_path)
    (tmp_path / "pytorch_model.bin").write_bytes(pickle.dumps(Harm(harm), protocol=2))
    assert "is no file of weights alone" in told(tmp_path)
    assert not harm.exists()


def test_a_bin_that_holds_a_training(model: Any, tmp_path: Path) -> None:
    write(tmp_path, {}, settings_of(model))
    (tmp_path / "model.safetensors").unlink()
    torch.save({"state_dict": tensors_of(model), "epoch": 3}, tmp_path / "pytorch_model.bin")
    assert "holds something else than tensors by name" in told(tmp_path)


def nested(value: Tensor) -> Tensor:
    return torch.nested.nested_tensor([*value])


@pytest.mark.parametrize(
    "change",
    [
        lambda value: value.to("meta"),
        lambda value: torch.zeros(1).expand(value.shape),  # one number for all: as large as it says it is
        # torch 2.11 and 2.15 warn of what they read themselves.
        pytest.param(
            lambda value: value.to_sparse(),
            marks=[
                pytest.mark.filterwarnings("ignore:Sparse invariant checks are implicitly disabled:UserWarning"),
                pytest.mark.filterwarnings("ignore:Validating sparse tensor invariants:UserWarning"),
            ],
        ),
        pytest.param(nested, marks=pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors:UserWarning")),
    ],
)
def test_a_bin_of_tensors_without_their_numbers(model: Any, tmp_path: Path, change: Callable[[Tensor], Tensor]) -> None:
    tensors = tensors_of(model)
    write(tmp_path, {}, settings_of(model))
    (tmp_path / "model.safetensors").unlink()
    torch.save({**tensors, LAYER: change(tensors[LAYER])}, tmp_path / "pytorch_model.bin")
    # Since 2.15 torch reads no nested tensor without unpickling.
    others = ("holds something else than tensors by name", "is no file of weights alone")
    assert any(each in told(tmp_path) for each in others[: 1 + (change is nested)])
    torch.save({**tensors, 1: tensors[LAYER]}, tmp_path / "pytorch_model.bin")
    assert "holds something else than tensors by name" in told(tmp_path)


def test_a_bin_whose_parts_are_compressed(model: Any, tmp_path: Path) -> None:
    """PyTorch maps them, and takes their bytes for numbers; what is to be unpickled may unpack without end."""
    write(tmp_path, tensors_of(model), settings_of(model), "pytorch_model.bin")
    path = tmp_path / "pytorch_model.bin"
    with zipfile.ZipFile(path) as whole:
        parts = {part.filename: whole.read(part) for part in whole.infolist()}
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as packed:
        for name, content in parts.items():
            packed.writestr(name, content)
    assert f"{path} is cut off or damaged: its part " in told(tmp_path)


def test_shards(model: Any, tmp_path: Path) -> None:
    index = "model.safetensors.index.json"
    write(tmp_path, tensors_of(model), settings_of(model), index)
    content = json.loads((tmp_path / index).read_text())
    for change, message in (
        ({"weight_map": None}, "has no weight_map"),
        ({"weight_map": {"a": "../a.safetensors"}}, "names '../a.safetensors', which is no file of its folder"),
        ({"weight_map": {**content["weight_map"], "more": "model-00001-of-00003.safetensors"}}, "has no more, which"),
    ):
        (tmp_path / index).write_text(json.dumps({**content, **change}))
        assert message in told(tmp_path)
    (tmp_path / index).write_text(json.dumps(content))
    (tmp_path / "model-00002-of-00003.safetensors").unlink()
    assert "model-00002-of-00003.safetensors is missing: model.safetensors.index.json says" in told(tmp_path)


def test_files_that_changed_since_they_were_opened(folder: Path) -> None:
    weights, cube = open_weights(folder), Cube.single()
    cut(folder / "model.safetensors", 400)
    with pytest.raises(ValueError, match=r"model.safetensors: .* cannot be read"):
        weights.fill(BertModel(weights.config, cube), cube)


def test_folders(folder: Path, tmp_path: Path) -> None:
    assert "bert-base-uncased is not there: a model is a folder. Nothing is downloaded" in told(
        tmp_path / "bert-base-uncased"
    )
    assert "is a file: a model is a folder" in told(folder / "config.json")
    (tmp_path / "empty").mkdir()
    assert "has neither model.json (a model of this project, a run) nor config.json" in told(tmp_path / "empty")
    (folder / "model.safetensors").unlink()
    assert "has no weights. It needs one of model.safetensors, model.safetensors.index.json, pytor" in told(folder)
    for content, message in (("{", "config.json is no JSON"), ("[]", "must hold a JSON object. Got a list")):
        (folder / "config.json").write_text(content)
        assert message in told(folder)


@pytest.mark.parametrize(
    ("names", "message"),
    [
        (
            (
                "model-00001-of-00003.safetensors",
                "model-00002-of-00003.safetensors",
                "model-00003-of-00003.safetensors",
            ),
            "00003.safetensors and 1 more, parts of weights without their model.safetensors.index.json: get that, too.",
        ),
        (("pytorch_model-00001-of-00002.bin",), "parts of weights without their pytorch_model.bin.index.json: get"),
        (("adapter_config.json", "adapter_model.safetensors"), "It has an adapter alone. Merge that into the model"),
        (
            ("tf_model.h5", "flax_model.msgpack"),
            "It has flax_model.msgpack, tf_model.h5, which is not looked into: get",
        ),
        (("model.fp16.safetensors",), "It has model.fp16.safetensors, which is not looked into: get the weights as mo"),
        (("README.md",), "pytorch_model.bin.index.json."),
    ],
)
def test_what_is_there_in_place_of_weights(folder: Path, names: tuple[str, ...], message: str) -> None:
    (folder / "model.safetensors").unlink()
    for name in names:
        (folder / name).write_bytes(b"x")
    said = told(folder)
    assert "has no weights. It needs one of model.safetensors" in said
    assert message in said
    assert said.endswith("index.json.") == (names == ("README.md",))


@pytest.mark.parametrize("name", ["model.safetensors", "config.json"])
def test_links_to_nothing(folder: Path, name: str) -> None:
    """What is left of a cache of the library where its blobs were not copied."""
    (folder / name).unlink()
    (folder / name).symlink_to("../../blobs/4d7a")
    assert told(folder).endswith(
        f" {name} is there as a link to ../../blobs/4d7a, which is not: copy what the links name, too (cp -rL)."
    )


def test_a_byte_order_mark(folder: Path) -> None:
    """Editors of Windows put it there; what follows is read."""
    before = open_weights(folder).config
    (folder / "config.json").write_bytes(b"\xef\xbb\xbf" + (folder / "config.json").read_bytes())
    assert open_weights(folder).config == before


@pytest.mark.parametrize("dtype", [torch.int8, torch.float8_e4m3fn], ids=str)
def test_quantised_weights(model: Any, tmp_path: Path, dtype: torch.dtype) -> None:
    tensors = tensors_of(model)
    write(tmp_path, {**tensors, LAYER: tensors[LAYER].to(dtype)}, settings_of(model))
    assert told(tmp_path).endswith(
        "one of F64, F32, BF16, F16 is needed. Get the model as it was before it was quantised, or write its weights "
        "in one of these."
    )


def test_a_bin_of_a_module_says_what_it_holds(model: Any, tmp_path: Path) -> None:
    write(tmp_path, {}, settings_of(model))
    (tmp_path / "model.safetensors").unlink()
    torch.save(torch.nn.Linear(2, 2), tmp_path / "pytorch_model.bin")
    said = told(tmp_path)
    assert "nothing in it is run: Unsupported global: GLOBAL torch.nn.modules.linear.Linear was not an allowed" in said
    assert "can still be loaded" not in said
    assert said.endswith("Get the weights as safetensors.")


def test_a_bin_of_another_pickle_warns_of_nothing(model: Any, tmp_path: Path) -> None:
    """PyTorch's warning, of the protocol, would be an error here."""
    write(tmp_path, {}, settings_of(model))
    (tmp_path / "model.safetensors").unlink()
    (tmp_path / "pytorch_model.bin").write_bytes(pickle.dumps(None, protocol=4))
    assert told(tmp_path).endswith("file?. Get it again.")


def test_weights_that_are_not_finite_are_told(model: Any, tmp_path: Path) -> None:
    tensors = tensors_of(model)
    spoilt = tensors[LAYER].clone()
    spoilt[0, 0] = torch.nan
    weights, cube = open_weights(write(tmp_path, {**tensors, LAYER: spoilt}, settings_of(model))), Cube.single()
    report = weights.fill(BertModel(weights.config, cube), cube)
    assert report.spoilt == ("bert.layers.1.mlp.down.weight",)
    assert "NOT FINITE in the folder, of which the model is useless: bert.layers.1.mlp" in report.in_words()
    weights = open_weights(write(tmp_path, tensors, settings_of(model)))
    assert weights.fill(BertModel(weights.config, cube), cube).spoilt == ()


def _filled_on_hosts(folder: Path, cases: list[str]) -> list[str]:
    cube = Cube(1, 2, 1)
    told = []
    for case in cases:
        weights = open_weights(folder / case / f"host{cube.rank}")
        try:
            weights.fill(BertModel(weights.config, cube), cube)
        except ValueError as refusal:
            told.append(str(refusal))
    return told


def test_folders_of_machines_that_differ(model: Any, tmp_path: Path) -> None:
    """Each rank reads its own parts: a model of two others would say something, and nothing would say so."""
    tensors, norm = tensors_of(model), "bert.encoder.layer.1.output.LayerNorm.weight"
    one_number = tensors[norm].clone()
    one_number[1] += 1
    cases = {
        "matrix": ({LAYER: tensors[LAYER] * 2}, f"{LAYER} of rank 1 differ from those of rank 0. "),
        # A number that is not among the samples, of which ranks hold copies.
        "vector": ({norm: one_number}, "copies of bert.layers.1.mlp_norm.weight on ranks 0 and 1 differ. "),
    }
    for case, (change, _) in cases.items():
        write(tmp_path / case / "host0", tensors, settings_of(model))
        write(tmp_path / case / "host1", {**tensors, **change}, settings_of(model))
    for told in run_ranks(2, _filled_on_hosts, tmp_path, list(cases)):
        for said, (_, message) in zip(told, cases.values(), strict=True):
            assert f"is not the same for all ranks: {message}" in said
            assert said.endswith("Put one folder on all machines.")


def test_labels(tmp_path: Path) -> None:
    model = original("BertForSequenceClassification")
    settings = settings_of(model)
    for named, message in (
        ({"0": "a", "2": "b"}, "id2label must name the classes 0, 1, ... one by one"),
        ({"0": "a", "1": "b", "2": "c"}, "names 3 labels, and the classifier has 2 outputs"),
        ({"0": "a", "1": "a"}, "id2label must give each class a name of its own"),
    ):
        assert message in told(write(tmp_path, tensors_of(model), {**settings, "id2label": named}))
    assert "problem_type must be a name" in told(write(tmp_path, tensors_of(model), {**settings, "problem_type": [1]}))


@pytest.mark.parametrize("change", [{"encoder": "modern"}, {"norm": "pre"}], ids=str)
def test_another_encoder_gets_none_of_these_weights(folder: Path, change: dict[str, Any]) -> None:
    from dataclasses import replace

    weights, cube = open_weights(folder), Cube.single()
    model = BertModel(replace(weights.config, **change), cube)
    before = values(model)
    with pytest.raises(ValueError, match=r"has no counterpart in Hugging Face's BERT|is missing|has shape"):
        weights.fill(model, cube)
    assert same(values(model), before)


SETTINGS = {
    **{"model_type": "bert", "vocab_size": 30, "hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 4},
    **{"intermediate_size": 32, "max_position_embeddings": 20, "type_vocab_size": 2},
}
DEBERTA = {
    **{"model_type": "deberta-v2", "type_vocab_size": 0, "relative_attention": True, "position_biased_input": False},
    **{"share_att_key": True, "norm_rel_ebd": "layer_norm", "pos_att_type": "p2c|c2p", "position_buckets": 4},
    **{"conv_kernel_size": 3, "conv_act": "gelu"},
}


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"num_attention_heads": 3}, r"config.json: hidden_size must divide by num_attention_heads=3\. Got 16\."),
        ({"type_vocab_size": 0}, r"config.json: type_vocab_size must be at least 1, but of the families \"mpnet\""),
        ({"hidden_dropout_prob": 1.5}, r"config.json: hidden_dropout_prob must be at least 0 and below 1"),
        ({"model_type": "electra", "embedding_size": 0}, r"config.json: embedding_size must be at least 1\. Got 0"),
        (
            {"model_type": "roberta", "pad_token_id": -1},
            r"config.json: pad_token_id \+ 1 must be at least 1, the id of",
        ),
        ({**DEBERTA, "conv_kernel_size": 4}, r"config.json: conv_kernel_size must be odd and at least 3\. Got 4"),
        (
            {**DEBERTA, "num_hidden_layers": 1},
            r"conv_kernel_size=3 needs at least 2 layers, for the .* Got num_hidden_layers=1\.",
        ),
    ],
)
def test_a_setting_that_cannot_be_has_its_name_in_the_file(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        config_from({**SETTINGS, **changes}, Path("config.json"))
