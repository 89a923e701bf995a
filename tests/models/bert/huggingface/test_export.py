"""Folders that the transformers library loads, and the way there and back."""

from __future__ import annotations

import json
import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from models.bert import (
    BertConfig,
    BertForPreTraining,
    BertForQuestionAnswering,
    BertForSequenceClassification,
    BertForTokenClassification,
    BertModel,
    EncodedText,
    collate_texts,
    export_huggingface,
    open_weights,
)
from models.bert.huggingface import write_model_json
from models.bert.huggingface.reader import WEIGHT_FILES
from models.bert.model import MaskedLMHead, Pooler
from models.bert.tasks import class_logits, sentence_vectors, tag_logits
from tensor3d import Cube, files
from tests.models.bert.huggingface.subject import (
    checkpointed,
    loaded,
    original,
    same,
    saved,
    settings_of,
    tensors_of,
    texts,
    theirs,
    values,
    write,
)
from tests.models.toy import FAMILIES, toy_config
from tests.single_device_reference import error

transformers = pytest.importorskip("transformers")

OURS = {
    "BertForPreTraining": BertForPreTraining,
    "BertForSequenceClassification": BertForSequenceClassification,
    "BertForQuestionAnswering": BertForQuestionAnswering,
}


def back(folder: Path, kind: str, **options: Any) -> Any:
    """The library's model of a folder, for which nothing may be missing or too much."""
    model, told = getattr(transformers, kind).from_pretrained(folder, output_loading_info=True, **options)
    assert not any(told.values()), told
    return model.eval()


TYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


@pytest.mark.parametrize(
    ("kind", "dtype"),
    [  # each class and each type in the fast tier, together in the slow one
        pytest.param(kind, dtype, marks=() if i == j else pytest.mark.slow)
        for i, kind in enumerate(OURS)
        for j, dtype in enumerate(TYPES)
    ],
)
def test_there_and_back_to_the_bit(tmp_path: Path, kind: str, dtype: str) -> None:
    type_of = TYPES[dtype]
    model = original(kind).to(type_of)
    write(tmp_path / "a", tensors_of(model), {**settings_of(model), "task": "mine", "torch_dtype": "float64"})
    weights = open_weights(tmp_path / "a")
    assert weights.facts["dtype"] == dtype
    ours = loaded(tmp_path / "a", OURS[kind])
    options: dict[str, Any] = {"labels": weights.labels, "problem": weights.problem} if weights.labels else {}
    told = export_huggingface(ours, Cube.single(), tmp_path / "b", settings=weights.settings, dtype=dtype, **options)
    assert (told.architecture, told.note) == (kind, None)
    assert same(load_file(tmp_path / "b" / "model.safetensors"), tensors_of(model))
    settings = json.loads((tmp_path / "b" / "config.json").read_text())
    assert settings["task"] == "mine"
    assert {settings[name] for name in settings.keys() & {"torch_dtype", "dtype"}} == {str(type_of).partition(".")[2]}
    assert sorted(path.name for path in (tmp_path / "b").iterdir()) == ["config.json", "model.safetensors"]
    again = back(tmp_path / "b", kind)
    assert again.dtype == type_of
    assert same(again.state_dict(), model.state_dict())
    assert same(values(loaded(tmp_path / "b", OURS[kind])), values(ours))


@pytest.mark.parametrize("seed", [0, *(pytest.param(seed, marks=pytest.mark.slow) for seed in range(1, 6))])
def test_models_of_any_size(tmp_path: Path, seed: int) -> None:
    """Sizes, activation, classes and files by chance: the same logits, and the same bits on the way back."""
    random = np.random.default_rng(seed)
    heads, d = random.integers(1, 6, 2).tolist()
    model = original(
        "BertForSequenceClassification",
        vocab_size=int(random.integers(20, 90)),
        hidden_size=heads * d,
        num_attention_heads=heads,
        num_hidden_layers=int(random.integers(1, 4)),
        intermediate_size=int(random.integers(3, 40)),
        max_position_embeddings=int(random.integers(20, 40)),
        type_vocab_size=int(random.integers(2, 4)),
        hidden_act=str(random.choice(["gelu", "gelu_new", "gelu_pytorch_tanh", "relu", "silu", "swish"])),
        layer_norm_eps=float(random.choice([1e-12, 1e-5, 1e-2])),
        num_labels=int(random.integers(1, 5)),
    )
    tensors, settings = tensors_of(model), settings_of(model)
    write(tmp_path / "a", tensors, settings, str(random.choice(WEIGHT_FILES)))
    ours, found = loaded(tmp_path / "a", BertForSequenceClassification), open_weights(tmp_path / "a")
    given = texts(20)
    assert error(class_logits(ours, given), torch.cat([theirs(model, text).logits for text in given])) <= 1e-5
    export_huggingface(
        ours, Cube.single(), tmp_path / "b", settings=found.settings, labels=found.labels, problem=found.problem
    )
    assert same(load_file(tmp_path / "b" / "model.safetensors"), tensors)
    again = json.loads((tmp_path / "b" / "config.json").read_text())
    assert found.outputs is not None
    labels = {str(number): f"LABEL_{number}" for number in range(found.outputs)}
    named = {"id2label": labels, "label2id": {label: int(number) for number, label in labels.items()}}
    assert again == {**settings, **named, "dtype": "float32"}
    assert back(tmp_path / "b", "BertForSequenceClassification").config.num_labels == found.outputs


@pytest.mark.parametrize(
    ("heads", "kind"),
    [
        (None, "BertForPreTraining"),
        (("masked_lm",), "BertForMaskedLM"),
        (("pooler", "next_sentence"), "BertForNextSentencePrediction"),
        (("pooler",), "BertModel"),
        ((), "BertModel"),
    ],
    ids=str,
)
def test_heads(tmp_path: Path, heads: tuple[str, ...] | None, kind: str) -> None:
    cube = Cube.single()
    cube.manual_seed(1)
    ours = BertForPreTraining(toy_config(67, activation="gelu_tanh", eps=1e-6), cube)
    told = export_huggingface(ours, cube, tmp_path, heads=heads)
    assert told.architecture == kind
    assert (told.note is None) == (heads != ())
    assert (told.note is None) or "add_pooling_layer=False" in told.note
    model = back(tmp_path, kind, **({"add_pooling_layer": False} if heads == () else {}))
    assert model.config.architectures == [kind]
    weights = open_weights(tmp_path)
    assert weights.config == ours.config
    assert weights.heads == (("pooler", "masked_lm", "next_sentence") if heads is None else heads)
    expected = torch.cat([theirs(model.base_model, text).last_hidden_state.mean(1) for text in texts(67)])
    assert error(sentence_vectors(ours.bert, texts(67)), expected) <= 1e-5


def test_a_bare_encoder_says_what_it_lacks_and_warns_of_nothing_else(tmp_path: Path) -> None:
    cube = Cube.single()
    told = export_huggingface(BertModel(toy_config(67), cube), cube, tmp_path)
    assert told.note is not None
    _, info = transformers.BertModel.from_pretrained(tmp_path, output_loading_info=True)
    assert info["missing_keys"] == {"pooler.dense.weight", "pooler.dense.bias"}


def test_a_pooler_beside_answers_is_left_out(tmp_path: Path) -> None:
    """As older versions of the library saved them."""
    model = original("BertForQuestionAnswering")
    pooler = {"bert.pooler.dense.weight": torch.ones(64, 64), "bert.pooler.dense.bias": torch.ones(64)}
    write(tmp_path / "a", {**tensors_of(model), **pooler}, settings_of(model))
    cube, weights = Cube.single(), open_weights(tmp_path / "a")
    assert weights.heads == ("pooler", "answers")
    both = BertForQuestionAnswering(weights.config, cube)
    both.pooler = Pooler(weights.config, cube)
    weights.fill(both, cube)
    told = export_huggingface(both, cube, tmp_path / "b")
    assert told.note == "pooler was left out, which the library's BertForQuestionAnswering does not have"
    assert same(back(tmp_path / "b", "BertForQuestionAnswering").state_dict(), model.state_dict())
    both.masked_lm = MaskedLMHead(weights.config, cube)
    with pytest.raises(ValueError, match=r"heads.*masked_lm"):
        export_huggingface(both, cube, tmp_path / "c")


def test_classes(tmp_path: Path) -> None:
    cube = Cube.single()
    cube.manual_seed(2)
    ours = BertForSequenceClassification(toy_config(67), 3, cube, dropout=0.25)
    export_huggingface(
        ours, cube, tmp_path, labels=["no", "perhaps", "yes"], problem="classify", settings={"num_labels": 2}
    )
    model = back(tmp_path, "BertForSequenceClassification")
    assert model.config.id2label == {0: "no", 1: "perhaps", 2: "yes"}
    assert model.config.label2id == {"no": 0, "perhaps": 1, "yes": 2}
    assert (model.config.problem_type, model.config.classifier_dropout) == ("single_label_classification", 0.25)
    assert error(class_logits(ours, texts(67)), torch.cat([theirs(model, text).logits for text in texts(67)])) <= 1e-5


def test_tags(tmp_path: Path) -> None:
    cube = Cube.single()
    cube.manual_seed(2)
    ours = BertForTokenClassification(toy_config(67), 3, cube, dropout=0.25)
    told = export_huggingface(ours, cube, tmp_path, labels=["O", "B-X", "I-X"], problem="tag")
    assert (told.architecture, told.note) == ("BertForTokenClassification", None)
    model = back(tmp_path, "BertForTokenClassification")
    assert (model.config.label2id, model.config.problem_type) == ({"O": 0, "B-X": 1, "I-X": 2}, None)
    assert model.config.classifier_dropout == 0.25
    for text, logits in zip(texts(67), tag_logits(ours, texts(67)), strict=True):
        assert error(logits, theirs(model, text).logits[0]) <= 1e-5
    again = BertForTokenClassification.from_pretrained(tmp_path, cube)
    assert (again.outputs, again.dropout.p) == (3, 0.25)
    assert same(values(again), values(ours))


@pytest.mark.parametrize(
    ("family", "setting"),
    [
        (
            {"family": "distilbert", "types": 0, "next_sentence": False},
            "seq_classif_dropout",
        ),
        (FAMILIES["deberta-v2"], "cls_dropout"),
    ],
    ids=["distilbert", "deberta"],
)
def test_dropout_of_tags_that_the_library_has_no_setting_for(
    tmp_path: Path, family: dict[str, Any], setting: str
) -> None:
    """Its setting is that of the class for texts alone."""
    cube = Cube.single()
    for dropout, note in ((None, None), (0.3, "config.json says nothing of dropout 0.3 of what the head reads")):
        ours = BertForTokenClassification(toy_config(67, **family), 3, cube, dropout=dropout)
        assert export_huggingface(ours, cube, tmp_path / str(dropout)).note == note
        assert setting not in json.loads((tmp_path / str(dropout) / "config.json").read_text())


@pytest.mark.parametrize(
    ("family", "name", "attention"), [("DistilBert", "qa_dropout", 0.0), ("ModernBert", "classifier_dropout", None)]
)
def test_dropout_of_answers(tmp_path: Path, family: str, name: str, attention: float | None) -> None:
    """Where the library's class drops out what the head reads; and DistilBERT drops none of attention's output."""
    model = original(f"{family}ForQuestionAnswering", pad_token_id=0, **{name: 0.4})
    settings = {**settings_of(model), **({"dropout": 0.1} if attention == 0.0 else {})}
    write(tmp_path / "theirs", tensors_of(model), settings)
    cube = Cube.single()
    cube.manual_seed(2)
    ours = BertForQuestionAnswering.from_pretrained(tmp_path / "theirs", cube)
    assert ours.dropout.p == 0.4
    assert getattr(ours.bert.layers[1].attention_out_dropout, "p", None) == attention
    export_huggingface(ours, cube, tmp_path / "back")
    assert json.loads((tmp_path / "back" / "config.json").read_text())[name] == 0.4
    assert BertForQuestionAnswering(toy_config(67), cube).dropout.p == 0.0, "BERT's head has none"


def test_the_largest_xlm_roberta_drops_none_of_its_mlps_and_norms_no_embeddings() -> None:
    model = BertModel(toy_config(67, family="xlm-roberta-xl", norm="pre", first_position=2, dropout=0.3), Cube.single())
    assert (model.embeddings.norm, model.embeddings.dropout.p) == (None, 0.3)
    for layer in model.layers:
        assert (layer.attention_out_dropout.p, layer.dropout.p) == (0.3, 0.0)


@pytest.mark.parametrize(("family", "name"), [("megatron-bert", "MegatronBert"), ("ernie", "Ernie")])
def test_pre_training_of_other_families_with_next_sentences(tmp_path: Path, family: str, name: str) -> None:
    """Both heads are written, and the library's class has the same logits with them."""
    cube, norm = Cube.single(), "pre" if family == "megatron-bert" else "post"
    cube.manual_seed(3)
    model = BertForPreTraining(toy_config(67, family=family, norm=norm), cube).eval()
    written = export_huggingface(model, cube, tmp_path)
    assert (written.architecture, written.note) == (f"{name}ForPreTraining", None)
    twin = back(tmp_path, written.architecture)
    text = EncodedText(ids=np.arange(3, 12), types=np.arange(9) // 5, masked=np.arange(0), hidden=np.arange(0))
    laid = collate_texts([text], cube)
    states, start = model.bert(laid.batch), int(laid.starts[0])
    word_embedding = model.bert.embeddings.tokens.weight
    with torch.no_grad():
        found = twin(torch.arange(3, 12)[None], token_type_ids=torch.arange(9)[None] // 5)
        rows = torch.arange(start, start + 9)
        mine = model.masked_lm(states, rows, word_embedding)
        pairs = model.next_sentence(model.pooler(states, rows[:1]))
    assert torch.allclose(found.prediction_logits[0], mine, atol=1e-5)
    assert torch.allclose(found.seq_relationship_logits, pairs, atol=1e-5)


def test_a_number(tmp_path: Path) -> None:
    cube = Cube.single()
    export_huggingface(BertForSequenceClassification(toy_config(67), 1, cube), cube, tmp_path, problem="regress")
    model = back(tmp_path, "BertForSequenceClassification")
    assert (model.config.num_labels, model.config.problem_type) == (1, "regression")
    assert (open_weights(tmp_path).outputs, open_weights(tmp_path).problem) == (1, "regress")


@pytest.mark.parametrize(
    ("change", "options", "message"),
    [
        ({"encoder": "modern"}, {}, r'has no encoder="modern": this model has rotary positions'),
        ({"norm": "pre"}, {}, r'BERT has no norm="pre": this model has norms before its blocks.*"megatron-bert"'),
        ({}, {"dtype": "fp8"}, "dtype.*fp32, bf16, fp16.*'fp8'"),
        ({}, {"types": {"a.weight": "fp8"}}, "types.*fp32, bf16, fp16.*'fp8'.*a.weight"),
        ({}, {"heads": ["classifier"]}, "the model has no head 'classifier'"),
        ({}, {"heads": ["pooler", "masked_lm"]}, "masked_lm.*Export one"),
    ],
    ids=str,
)
def test_refusals(tmp_path: Path, change: dict[str, Any], options: dict[str, Any], message: str) -> None:
    cube = Cube.single()
    ours = BertForPreTraining(replace(toy_config(67), **change), cube)
    with pytest.raises(ValueError, match=message):
        export_huggingface(ours, cube, tmp_path / "out", **options)
    assert not (tmp_path / "out").exists()


def test_labels_that_do_not_fit(tmp_path: Path) -> None:
    cube = Cube.single()
    ours = BertForSequenceClassification(toy_config(67), 2, cube)
    for labels in (["a"], ["a", "a"]):
        with pytest.raises(ValueError, match="labels must be 2 different names"):
            export_huggingface(ours, cube, tmp_path, labels=labels)
    with pytest.raises(ValueError, match=r"problem.*or None..*'answer'"):
        export_huggingface(ours, cube, tmp_path, problem="answer")


def test_names_of_outputs(tmp_path: Path) -> None:
    """The library's own names of a model that comes back as it was; nothing of them where there is no classifier."""
    similar = {"id2label": {"0": "similarity"}, "label2id": {"similarity": 0}}
    saved(tmp_path / "a", "BertForSequenceClassification", num_labels=1, **similar)
    weights, cube = open_weights(tmp_path / "a"), Cube.single()
    assert (weights.labels, weights.problem) == (None, "regress")
    ours = loaded(tmp_path / "a", BertForSequenceClassification)
    export_huggingface(ours, cube, tmp_path / "b", settings=weights.settings, problem=weights.problem)
    again = json.loads((tmp_path / "b" / "config.json").read_text())
    assert {name: again[name] for name in similar} == similar
    assert "problem_type" not in again
    export_huggingface(ours, cube, tmp_path / "c", settings=weights.settings, heads=["pooler"])
    assert not {*similar, "problem_type"} & json.loads((tmp_path / "c" / "config.json").read_text()).keys()
    with_two = BertForSequenceClassification(weights.config, 2, cube)
    export_huggingface(with_two, cube, tmp_path / "d", settings=weights.settings)
    assert open_weights(tmp_path / "d").labels == ("LABEL_0", "LABEL_1")
    assert open_weights(tmp_path / "d").problem == "classify"


@pytest.mark.parametrize("file", ["model.safetensors", "pytorch_model.bin"])
def test_each_tensor_keeps_its_type(tmp_path: Path, file: str) -> None:
    model = original(hidden_size=16, num_attention_heads=2)
    tensors = {
        name: value if "LayerNorm" in name else value.bfloat16() if "key" in name else value.half()
        for name, value in tensors_of(model).items()
    }
    wide = "cls.seq_relationship.weight"
    tensors[wide] = tensors[wide].double()
    write(tmp_path / "a", tensors, settings_of(model), file)
    weights, cube = open_weights(tmp_path / "a"), Cube.single()
    assert (weights.facts["dtype"], weights.facts["types"][wide]) == ("fp16", "fp64")
    ours = BertForPreTraining(weights.config, cube)
    filled = weights.fill(ours, cube)
    assert filled.rounded == (wide,)
    assert f"; fp64 in the folder, so rounded: {wide}" in filled.in_words()
    export_huggingface(ours, cube, tmp_path / "b", dtype=weights.facts["dtype"], types=weights.facts["types"])
    tensors[wide] = tensors[wide].float()
    got = load_file(tmp_path / "b" / "model.safetensors")
    assert {name: value.dtype for name, value in got.items()} == {name: t.dtype for name, t in tensors.items()}
    assert same(got, tensors)


class Mine(torch.nn.Module):
    """A model with a module of its own on the encoder."""

    def __init__(self, config: BertConfig, cube: Cube) -> None:
        super().__init__()
        self.scale = torch.nn.Parameter(torch.ones(()))
        self.bert = BertModel(config, cube)
        self.scorer = torch.nn.Linear(config.hidden, 5)


def test_a_model_with_a_module_of_its_own(tmp_path: Path) -> None:
    model = saved(tmp_path / "a", "BertModel")
    cube, weights = Cube.single(), open_weights(tmp_path / "a")
    mine = Mine(weights.config, cube)
    before = {name: value for name, value in values(mine).items() if not name.startswith("bert.")}
    told = weights.fill(mine, cube)
    assert (told.found, told.fresh) == ((), ("scale", "scorer"))
    after = values(mine)
    assert same({name: after[name] for name in before}, before)
    exported = export_huggingface(mine, cube, tmp_path / "b")
    assert exported.note is not None
    assert exported.note.startswith(
        "scale, scorer was left out, which the library's BertModel does not have; the model"
    )
    written = load_file(tmp_path / "b" / "model.safetensors")
    assert same(written, {name: t for name, t in tensors_of(model).items() if not name.startswith("pooler.")})
    checkpointed(mine, cube, tmp_path / "c")
    write_model_json(tmp_path / "c", config=weights.config, heads=[])
    again = Mine(weights.config, cube)
    assert open_weights(tmp_path / "c").fill(again, cube).fresh == ("scale", "scorer")
    assert same(values(again.bert), values(mine.bert))
    mine.pooler = Pooler(weights.config, cube)
    mine.classifier = torch.nn.Sequential(torch.nn.Linear(64, 2))
    with pytest.raises(ValueError, match=r"classifier.0.weight has no .* whose classifier is classifier.weight, cla"):
        export_huggingface(mine, cube, tmp_path / "d")


def test_nothing_is_overwritten(tmp_path: Path) -> None:
    saved(tmp_path)
    before = {path.name: path.read_bytes() for path in tmp_path.iterdir()}
    cube = Cube.single()
    with pytest.raises(ValueError, match=r"has a config.json"):
        export_huggingface(BertForPreTraining(toy_config(67), cube), cube, tmp_path)
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == before


def test_what_a_type_cannot_hold(tmp_path: Path) -> None:
    cube = Cube.single()
    ours = BertModel(toy_config(67), cube)
    ours.layers[1].mlp.up.weight.data[3, 4] = 1e6
    with pytest.raises(ValueError, match=r"bert.layers.1.mlp.up.weight has values that fp16 cannot hold"):
        export_huggingface(ours, cube, tmp_path, dtype="fp16")
    assert not list(tmp_path.iterdir())


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs a device that is full")
@pytest.mark.parametrize("file", ["model.safetensors", "config.json"])
def test_a_full_disk_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, file: str) -> None:
    """The error is the operating system's own, which does not say with which file."""

    real = os.open

    def full(path: Any, flags: int, *more: Any, **options: Any) -> int:
        if Path(os.fspath(path)).name.startswith(file) and flags & os.O_CREAT:
            os.close(real(path, flags, *more, **options))
            return real("/dev/full", os.O_RDWR)
        return real(path, flags, *more, **options)

    monkeypatch.setattr(files.os, "open", full)
    cube = Cube.single()
    with pytest.raises(ValueError, match=rf"out/{file} cannot be written: No space left on device. .* Make room"):
        export_huggingface(BertModel(toy_config(67), cube), cube, tmp_path / "out")
    assert not list((tmp_path / "out").glob(f"{file}*"))
    assert not (tmp_path / "out" / "config.json").exists()  # without which it is no model
