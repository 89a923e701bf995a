"""Folders of the transformers library in all the shapes in which they are found."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from models.bert import (
    BertForPreTraining,
    BertForQuestionAnswering,
    BertForSequenceClassification,
    BertForTokenClassification,
    BertModel,
    open_weights,
)
from models.bert.huggingface.param_names import rows_of_part
from models.bert.huggingface.reader import WEIGHT_FILES
from models.bert.tasks import class_logits, sentence_vectors, span_logits, tag_logits
from tensor3d import Cube
from tests.models.bert.huggingface.subject import (
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
from tests.single_device_reference import error

pytest.importorskip("transformers")

Tensors = dict[str, Tensor]


@pytest.fixture(scope="module")
def model() -> Any:
    return original()


@pytest.fixture(scope="module")
def wanted(model: Any, tmp_path_factory: pytest.TempPathFactory) -> Tensors:
    """Our parameters, from the plain folder; that they are right is what parity shows."""
    return values(loaded(write(tmp_path_factory.mktemp("plain"), tensors_of(model), settings_of(model))))


def old_names(tensors: Tensors) -> Tensors:
    parts = (("LayerNorm.weight", "LayerNorm.gamma"), ("LayerNorm.bias", "LayerNorm.beta"))
    renamed = {}
    for name, value in tensors.items():
        for new, old in parts:
            name = name.replace(new, old)
        renamed[name] = value
    return renamed


def with_buffers_and_decoder(tensors: Tensors) -> Tensors:
    decoder = {"cls.predictions.decoder.weight": tensors["bert.embeddings.word_embeddings.weight"].clone()}
    decoder["cls.predictions.decoder.bias"] = tensors["cls.predictions.bias"].clone()
    return {**tensors, **decoder, "bert.embeddings.position_ids": torch.arange(24).unsqueeze(0)}


def decoder_bias_alone(tensors: Tensors) -> Tensors:
    renamed = dict(tensors)
    renamed["cls.predictions.decoder.bias"] = renamed.pop("cls.predictions.bias")
    return renamed


def decoder_for_both(tensors: Tensors) -> Tensors:
    renamed = dict(tensors)
    renamed["cls.predictions.decoder.weight"] = renamed.pop("bert.embeddings.word_embeddings.weight")
    return renamed


def without_prefix(tensors: Tensors) -> Tensors:
    return {name.removeprefix("bert."): value for name, value in tensors.items()}


CHANGES = (old_names, with_buffers_and_decoder, decoder_bias_alone, without_prefix, decoder_for_both)


@pytest.mark.parametrize(
    ("file", "change"),
    [  # each file and each change in the fast tier, together in the slow one
        pytest.param(file, change, marks=() if i == j or (i, j) == (0, 4) else pytest.mark.slow)
        for i, file in enumerate(WEIGHT_FILES)
        for j, change in enumerate(CHANGES)
    ],
)
def test_files_and_names(
    model: Any, wanted: Tensors, tmp_path: Path, file: str, change: Callable[[Tensors], Tensors]
) -> None:
    folder = write(tmp_path, change(tensors_of(model)), settings_of(model), file)
    assert open_weights(folder).heads == ("pooler", "masked_lm", "next_sentence")
    cube = Cube.single()
    ours = BertForPreTraining(open_weights(folder).config, cube)
    filled = open_weights(folder).fill(ours, cube)
    assert same(values(ours), wanted)
    assert (set(filled.found), filled.fresh, filled.unused) == (set(open_weights(folder).heads), (), ())


def test_a_bin_of_2019(model: Any, wanted: Tensors, tmp_path: Path) -> None:
    write(tmp_path, {}, settings_of(model))
    (tmp_path / "model.safetensors").unlink()
    torch.save(tensors_of(model), tmp_path / "pytorch_model.bin", _use_new_zipfile_serialization=False)
    assert same(values(loaded(tmp_path)), wanted)


@pytest.mark.parametrize(("kind", "name"), [(torch.bfloat16, "bf16"), (torch.float16, "fp16"), (torch.float64, "fp64")])
def test_types_of_files(model: Any, tmp_path: Path, kind: torch.dtype, name: str) -> None:
    tensors = {key: value.to(kind) for key, value in tensors_of(model).items()}
    write(tmp_path / "narrow", tensors, settings_of(model))
    write(tmp_path / "wide", {key: value.float() for key, value in tensors.items()}, settings_of(model))
    assert open_weights(tmp_path / "narrow").facts["dtype"] == name
    ours = values(loaded(tmp_path / "narrow"))
    assert all(value.dtype == torch.float32 for value in ours.values())
    assert same(ours, values(loaded(tmp_path / "wide")))


LIKEWISE = [pytest.param(name, marks=pytest.mark.slow) for name in ("gelu_python", "gelu_new", "gelu_pytorch_tanh")]


@pytest.mark.parametrize("activation", ["gelu", "gelu_fast", "swish", *LIKEWISE])
def test_classes_of_any_activation(tmp_path: Path, activation: str) -> None:
    named = {"id2label": {0: "no", 1: "perhaps", 2: "yes"}, "classifier_dropout": 0.3}
    model = saved(tmp_path, "BertForSequenceClassification", hidden_act=activation, **named)
    weights = open_weights(tmp_path)
    assert (weights.labels, weights.problem) == (("no", "perhaps", "yes"), "classify")
    ours = loaded(tmp_path, BertForSequenceClassification)
    assert ours.dropout.p == 0.3
    given = texts(model.config.vocab_size)
    expected = torch.cat([theirs(model, text).logits for text in given])
    assert error(class_logits(ours, given), expected) <= 1e-5


def test_answers(tmp_path: Path) -> None:
    model = saved(tmp_path, "BertForQuestionAnswering", hidden_act="relu", vocab_size=30)
    assert open_weights(tmp_path).problem == "answer"
    ours = loaded(tmp_path, BertForQuestionAnswering)
    for text, got in zip(texts(30), span_logits(ours, texts(30)), strict=True):
        expected = theirs(model, text)
        assert error(got, torch.stack([expected.start_logits[0], expected.end_logits[0]], 1)) <= 1e-5


def test_an_encoder_alone(tmp_path: Path) -> None:
    model = saved(tmp_path, "BertModel")
    ours = loaded(tmp_path, BertModel)
    expected = torch.cat([theirs(model, text).last_hidden_state.mean(1) for text in texts(67)])
    assert error(sentence_vectors(ours, texts(67)), expected) <= 1e-5


def test_regression_has_one_output_and_no_labels(tmp_path: Path) -> None:
    saved(tmp_path, "BertForSequenceClassification", num_labels=1)
    weights = open_weights(tmp_path)
    assert (weights.outputs, weights.labels, weights.problem) == (1, None, "regress")
    assert loaded(tmp_path, BertForSequenceClassification).outputs == 1


@pytest.mark.parametrize(("told", "problem"), [("multi_label_classification", "labels"), ("ranking", None)])
def test_what_a_classifier_is_for(tmp_path: Path, told: str, problem: str | None) -> None:
    saved(tmp_path, "BertForSequenceClassification", num_labels=3)
    path = tmp_path / "config.json"  # by hand: not every version of the library writes any word
    path.write_text(json.dumps({**json.loads(path.read_text()), "problem_type": told}))
    assert open_weights(tmp_path).problem == problem


def test_a_new_classifier_on_a_pretrained_encoder(model: Any, wanted: Tensors, tmp_path: Path) -> None:
    write(tmp_path, tensors_of(model), settings_of(model))
    cube = Cube.single()
    with pytest.raises(ValueError, match=r"has no classifier\. Say how many outputs"):
        BertForSequenceClassification.from_pretrained(tmp_path, cube)
    cube.manual_seed(4)
    fresh = BertForSequenceClassification(open_weights(tmp_path).config, 3, cube)
    cube.manual_seed(4)
    with pytest.warns(UserWarning, match="as initialised: classifier"):
        ours = BertForSequenceClassification.from_pretrained(tmp_path, cube, outputs=3)
    assert torch.equal(ours.classifier.weight, fresh.classifier.weight)
    assert all(torch.equal(value, wanted[name]) for name, value in values(ours).items() if "classifier" not in name)
    told = open_weights(tmp_path).fill(ours, cube)
    assert (told.fresh, told.declined) == (("classifier",), ())
    assert "cls.seq_relationship.weight" in told.unused
    assert told.in_words().startswith("loaded: encoder, pooler; not in the folder, so as initialised: classifier; in")


def test_a_classifier_of_another_number_of_classes(tmp_path: Path) -> None:
    saved(tmp_path, "BertForSequenceClassification")
    weights, cube = open_weights(tmp_path), Cube.single()
    cube.manual_seed(4)
    fresh = BertForSequenceClassification(weights.config, 3, cube)
    with pytest.raises(ValueError, match=r"classifier.*2.*3"):
        weights.fill(fresh, cube)
    cube.manual_seed(4)
    with pytest.warns(UserWarning, match=r"encoder, pooler;.*as initialised: classifier"):
        ours = BertForSequenceClassification.from_pretrained(tmp_path, cube, outputs=3)
    assert torch.equal(ours.classifier.weight, fresh.classifier.weight)
    known = loaded(tmp_path, BertForSequenceClassification)
    assert same(values(ours.bert), values(known.bert))
    assert same(values(ours.pooler), values(known.pooler))
    less = weights.only(["pooler"])
    assert (less.heads, less.outputs, less.labels, less.problem) == (("pooler",), None, None, None)
    assert weights.heads == ("pooler", "classifier")
    with pytest.raises(ValueError, match=r"head.*'answers'\. It"):
        weights.only(["answers"])


@pytest.mark.parametrize(
    "name",
    [
        "bert.embeddings.adapter.weight",
        "bert.encoder.layer.0.attention.output.adapters.one.adapter_down.0.weight",
        "bert.encoder.layer.1.attention.self.query.lora_A.default.weight",
        "bert.encoder.layer.0.attention.self.distance_embedding.weight",
        "bert.encoder.layer.0.crossattention.self.query.weight",
    ],
)
def test_what_a_bert_does_not_have_in_its_encoder_is_refused(model: Any, tmp_path: Path, name: str) -> None:
    """Without it the model would say something else."""
    write(tmp_path, {**tensors_of(model), name: torch.ones(2)}, settings_of(model))
    with pytest.raises(ValueError, match=rf"tensors in its encoder that no BERT has: {re.escape(name)}\. Adapters"):
        open_weights(tmp_path)


def test_token_types_are_two_where_nothing_is_said(model: Any, wanted: Tensors, tmp_path: Path) -> None:
    settings = {name: value for name, value in settings_of(model).items() if name != "type_vocab_size"}
    assert same(values(loaded(write(tmp_path, tensors_of(model), settings))), wanted)


def test_whose_classifier_it_is_the_class_says(tmp_path: Path) -> None:
    model = saved(tmp_path / "tags", "BertForTokenClassification", num_labels=5)
    weights = open_weights(tmp_path / "tags")
    assert (weights.heads, weights.outputs, weights.problem) == (("tags",), 5, "tag")
    assert weights.labels == tuple(f"LABEL_{number}" for number in range(5))
    ours = loaded(tmp_path / "tags", BertForTokenClassification)
    for text, logits in zip(texts(67), tag_logits(ours, texts(67)), strict=True):
        assert error(logits, theirs(model, text).logits[0]) <= 1e-5
    cube = Cube.single()
    with pytest.raises(ValueError, match="has no classifier"):
        BertForSequenceClassification.from_pretrained(tmp_path / "tags", cube)

    saved(tmp_path / "choices", "BertForMultipleChoice")
    weights = open_weights(tmp_path / "choices")
    assert weights.heads == ("pooler",)
    unused = ("bert.pooler.dense.bias", "bert.pooler.dense.weight", "classifier.bias", "classifier.weight")
    assert weights.fill(BertModel(weights.config, cube), cube).unused == unused


def test_a_config_of_2019_names_no_model_type(model: Any, wanted: Tensors, tmp_path: Path) -> None:
    settings = {name: value for name, value in settings_of(model).items() if name != "model_type"}
    assert same(values(loaded(write(tmp_path, tensors_of(model), settings))), wanted)


def test_an_untied_decoder_has_a_weight_and_a_bias_of_its_own(model: Any, wanted: Tensors, tmp_path: Path) -> None:
    """Of two biases the library adds the decoder's."""
    tensors = with_buffers_and_decoder(tensors_of(model))
    decoder = {name: tensors[f"cls.predictions.decoder.{name}"] + 1 for name in ("weight", "bias")}
    own = {f"masked_lm.projection.{name}": value for name, value in decoder.items()}
    changed = tensors | {f"cls.predictions.decoder.{name}": value for name, value in decoder.items()}
    folder = write(tmp_path, changed, {**settings_of(model), "tie_word_embeddings": False})
    ours = loaded(folder)
    assert same(values(ours), wanted | own)
    weights = open_weights(folder)
    assert (weights.config.tied, weights.fill(ours, Cube.single()).unused) == (False, ("cls.predictions.bias",))
    tied = BertForPreTraining(replace(weights.config, tied=True), Cube.single())
    with pytest.raises(ValueError, match=r"decoder.weight differs from .*tie_word_embeddings"):
        weights.fill(tied, Cube.single())


def test_an_untied_decoder_that_is_missing(model: Any, wanted: Tensors, tmp_path: Path) -> None:
    """The library draws a new one, and says so."""
    write(tmp_path, tensors_of(model), {**settings_of(model), "tie_word_embeddings": False})
    with pytest.raises(ValueError, match=r"decoder\.weight is missing.*leave the head masked_lm out"):
        loaded(tmp_path)
    weights, cube = open_weights(tmp_path), Cube.single()
    encoder = BertModel(weights.config, cube)
    weights.fill(encoder, cube)
    assert same(values(encoder), {name[5:]: value for name, value in wanted.items() if name.startswith("bert.")})


@pytest.mark.parametrize("parts", [2, 3])
@pytest.mark.parametrize("seed", range(8))
def test_parts_of_any_rows_of_qkv_and_of_gates(seed: int, parts: int) -> None:
    random = np.random.default_rng(seed)
    heads, d = random.integers(1, 6, 2).tolist()
    # The library's row of each of ours.
    order = torch.arange(parts * heads * d).view(parts, heads, d).transpose(0, 1).flatten()
    start, stop = sorted(random.integers(0, parts * heads * d + 1, 2).tolist())
    rows = torch.full((stop - start,), -1)
    for part in range(parts):
        there, places = rows_of_part(slice(start, stop), (d,) * parts, part)
        rows[places] = part * heads * d + torch.arange(there.start, there.stop)
    assert torch.equal(rows, order[start:stop])


@pytest.mark.parametrize("seed", range(8))
def test_parts_of_any_rows_of_fewer_heads_of_keys(seed: int) -> None:
    random = np.random.default_rng(seed)
    groups, each, d = random.integers(1, 5, 3).tolist()
    of_turn = (each * d, d, d)
    first = (0, groups * each * d, groups * (each + 1) * d)  # the library's tensors one after another
    turns = [(group, part, width) for group in range(groups) for part, width in enumerate(of_turn)]
    order = torch.cat([torch.arange(width) + first[part] + group * width for group, part, width in turns])
    start, stop = sorted(random.integers(0, len(order) + 1, 2).tolist())
    rows = torch.full((stop - start,), -1)
    for part in range(3):
        there, places = rows_of_part(slice(start, stop), of_turn, part)
        rows[places] = first[part] + torch.arange(there.start, there.stop)
    assert torch.equal(rows, order[start:stop])


def test_a_classifier_of_an_older_roberta(tmp_path: Path) -> None:
    """Beside its dense layer there is a pooler that nobody asks, and positions that are counted."""
    model = original("RobertaForSequenceClassification", pad_token_id=1, type_vocab_size=1)
    tensors, buffer = tensors_of(model), "roberta.embeddings.position_ids"
    more = {f"roberta.pooler.dense.{name}": torch.ones(64, *sizes) for name, sizes in (("weight", (64,)), ("bias", ()))}
    write(tmp_path, {**tensors, **more, buffer: torch.arange(24).unsqueeze(0)}, settings_of(model))
    weights, cube = open_weights(tmp_path), Cube.single()
    assert (weights.heads, weights.config.positions) == (("pooler", "classifier"), 22)
    ours = BertForSequenceClassification(weights.config, 2, cube)
    filled = weights.fill(ours, cube)
    assert (filled.fresh, sorted(filled.unused)) == ((), sorted(more))
    assert torch.equal(values(ours)["pooler.dense.weight"], tensors["classifier.dense.weight"])


def test_a_masked_lm_of_an_older_roberta(tmp_path: Path) -> None:
    """With a decoder that is the embedding, and its bias twice; without `model_type`, as in 2019."""
    model = original("RobertaForMaskedLM", pad_token_id=1, type_vocab_size=1)
    tensors = tensors_of(model)
    twice = {"lm_head.decoder.weight": tensors["roberta.embeddings.word_embeddings.weight"].clone()}
    twice["lm_head.decoder.bias"] = tensors["lm_head.bias"].clone()
    settings = {name: value for name, value in settings_of(model).items() if name != "model_type"}
    weights, cube = open_weights(write(tmp_path, {**tensors, **twice}, settings)), Cube.single()
    assert (weights.heads, weights.config.family) == (("masked_lm",), "roberta")
    assert weights.fill(BertForPreTraining(weights.config, cube), cube).unused == ()
