"""Folders with a model.json: of runs, of imports, and parts of them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from models.bert import (
    BertConfig,
    BertForPreTraining,
    BertForQuestionAnswering,
    BertForSequenceClassification,
    BertModel,
    open_weights,
)
from models.bert.huggingface import read_model_json, write_model_json
from tensor3d import Cube
from tests.models.bert.huggingface.subject import checkpointed, same, values
from tests.models.toy import toy_config

HEADS = ("pooler", "masked_lm", "next_sentence")


def run(folder: Path, **changes: Any) -> BertForPreTraining:
    """A folder as pre-training leaves it."""
    cube = Cube.single()
    cube.manual_seed(1)
    model = BertForPreTraining(toy_config(67, **changes), cube)
    checkpointed(model, cube, folder)
    write_model_json(folder, config=model.config, heads=HEADS)
    return model


@pytest.mark.parametrize(
    "config",
    [
        toy_config(67),
        toy_config(67, activation="relu", norm="pre", inner=None, eps=1e-6),
        toy_config(67, encoder="modern", window=4, global_every=2, rotary_base=100.0),
    ],
)
def test_model_json_there_and_back(tmp_path: Path, config: BertConfig) -> None:
    facts = {"max_length": 128, "threshold": 0.5}
    write_model_json(tmp_path, config=config, heads=["pooler", "classifier"], labels=["no", "yes"], facts=facts)
    told = read_model_json(tmp_path)
    assert (told.config, told.heads, told.labels) == (config, ("pooler", "classifier"), ("no", "yes"))
    assert (told.problem, told.facts) == (None, facts)
    assert [path.name for path in tmp_path.iterdir()] == ["model.json"]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"format": 2}, "format 2.*format 1"),
        ({"model": "gpt"}, "is of the model 'gpt'"),
        ({"config": {"layers": 1}}, "makes no sense: .*missing"),
        ({"config": {**vars(toy_config(67)), "depth": 1}}, "unexpected keyword argument 'depth'"),
        ({"config": {**vars(toy_config(67)), "heads": 7}}, "hidden must divide by heads=7"),
        ({"heads": ["decoder"]}, "heads.*'decoder'"),
        ({"heads": ...}, "it has no 'heads'"),
        ({"problem": "guess"}, "problem must be one of classify, labels, regress, answer"),
        ({"labels": ["a", "a"]}, "labels must differ"),
        ({"labels": "ab"}, "labels must be a list. Got 'ab'"),
        ({"labels": [["a"], ["b"]]}, "labels must be names"),
        ({"heads": "pooler"}, "heads must be a list. Got 'pooler'"),
        ({"heads": [["pooler"]]}, "heads must be names"),
        ({"facts": [1]}, r"facts must be an object. Got \[1\]"),
        ({"problem": ["x"]}, "problem must be one of classify, labels, regress, answer"),
        ({"config": 5}, "config must be an object. Got 5"),
        ({"config": {**vars(toy_config(67)), "layers": 6.0}}, "layers must be a whole number. Got 6.0"),
        ({"config": {**vars(toy_config(67)), "hidden": "384"}}, "hidden must be a whole number. Got '384'"),
        ({"config": {**vars(toy_config(67)), "vocab": None}}, "vocab.*None"),
        ({"config": {**vars(toy_config(67)), "positions": True}}, "positions.*True"),
        ({"config": {**vars(toy_config(67)), "inner": "x"}}, "inner.*'x'"),
        ({"config": {**vars(toy_config(67)), "activation": ["gelu"]}}, "activation must be a name. Got"),
    ],
    ids=str,
)
def test_model_json_that_makes_no_sense(tmp_path: Path, change: dict[str, Any], message: str) -> None:
    write_model_json(tmp_path, config=toy_config(67), heads=[])
    path = tmp_path / "model.json"
    content = {**json.loads(path.read_text()), **change}
    path.write_text(json.dumps({name: value for name, value in content.items() if value is not ...}))
    with pytest.raises(ValueError, match=message) as problem:
        read_model_json(tmp_path)
    assert "model.json" in str(problem.value)


def test_a_model_json_is_not_replaced_by_one_that_makes_no_sense(tmp_path: Path) -> None:
    write_model_json(tmp_path, config=toy_config(67), heads=[])
    with pytest.raises(ValueError, match="heads must be among"):
        write_model_json(tmp_path, config=toy_config(67), heads=["decoder"])
    with pytest.raises(TypeError):
        write_model_json(tmp_path, config=toy_config(67), heads=[], facts={"a": object()})
    assert read_model_json(tmp_path).heads == ()
    assert [path.name for path in tmp_path.iterdir()] == ["model.json"]


@pytest.mark.parametrize("changes", [{}, {"norm": "pre"}, {"encoder": "modern"}], ids=str)
def test_a_run_and_its_parts(tmp_path: Path, changes: dict[str, Any]) -> None:
    model, cube = run(tmp_path, **changes), Cube.single()
    wanted = values(model)
    weights = open_weights(tmp_path)
    assert (weights.config, weights.heads, weights.labels, weights.problem) == (model.config, HEADS, None, None)
    cube.manual_seed(2)
    assert same(values(BertForPreTraining.from_pretrained(tmp_path, cube)), wanted)
    encoder = BertModel(model.config, cube)
    told = weights.fill(encoder, cube)
    assert same(values(encoder), {n.removeprefix("bert."): v for n, v in wanted.items() if n.startswith("bert.")})
    assert (told.found, told.fresh) == ((), ())
    assert {name.partition(".")[0] for name in told.unused} == set(HEADS)
    answering = BertForQuestionAnswering(model.config, cube)
    before = values(answering)
    assert weights.fill(answering, cube).fresh == ("answers",)
    for name, value in values(answering).items():
        assert torch.equal(value, before[name] if name.startswith("answers") else wanted[name])


def test_the_newest_step_or_the_one_that_is_named(tmp_path: Path) -> None:
    first, cube = run(tmp_path), Cube.single()
    cube.manual_seed(9)
    second = BertForPreTraining(first.config, cube)
    checkpointed(second, cube, tmp_path, step=2)
    assert same(values(BertForPreTraining.from_pretrained(tmp_path, cube)), values(second))
    step = tmp_path / "checkpoints" / "step-00000001"
    assert same(values(BertForPreTraining.from_pretrained(step, cube)), values(first))
    assert open_weights(step).folder == tmp_path


def test_a_classifier_keeps_its_labels(tmp_path: Path) -> None:
    cube = Cube.single()
    model = BertForSequenceClassification(toy_config(67), 3, cube)
    checkpointed(model, cube, tmp_path)
    facts = {"classifier_dropout": 0.4}
    labels = ("a", "b", "c")
    write_model_json(
        tmp_path, config=model.config, heads=("pooler", "classifier"), labels=labels, problem="classify", facts=facts
    )
    (tmp_path / "huggingface").mkdir()
    (tmp_path / "huggingface" / "config.json").write_text('{"task": "mine"}')
    weights = open_weights(tmp_path)
    assert (weights.outputs, weights.labels, weights.problem) == (3, labels, "classify")
    assert weights.settings == {"task": "mine"}
    ours = BertForSequenceClassification.from_pretrained(tmp_path, cube)
    assert ours.dropout.p == 0.4
    assert same(values(ours), values(model))


def test_what_is_wrong_with_a_folder(tmp_path: Path) -> None:
    write_model_json(tmp_path, config=toy_config(67), heads=HEADS)
    with pytest.raises(ValueError, match="has no checkpoint yet"):
        open_weights(tmp_path)
    model = run(tmp_path)
    write_model_json(tmp_path, config=model.config, heads=(*HEADS, "answers"))
    with pytest.raises(ValueError, match=r"step-00000001.*model.json of"):
        open_weights(tmp_path)
    write_model_json(tmp_path, config=toy_config(68), heads=HEADS)
    cube = Cube.single()
    other = BertForPreTraining(toy_config(68), cube)
    before = values(other)
    with pytest.raises(ValueError, match=r"tokens.weight has shape \(67, 64\), and the model.json .* \(68, 64\)"):
        open_weights(tmp_path).fill(other, cube)
    assert same(values(other), before)
    write_model_json(tmp_path, config=toy_config(67, layers=1), heads=HEADS)
    with pytest.raises(ValueError, match=r"has 2 layers, and the model.json of .* says 1"):
        open_weights(tmp_path)
    (tmp_path / "model.json").unlink()
    with pytest.raises(ValueError, match=r"checkpoint.*has no model.json"):
        open_weights(tmp_path / "checkpoints" / "step-00000001")


def test_a_folder_of_models_names_them(tmp_path: Path) -> None:
    for name in ("seed-1", "seed-0"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "model.json").write_text("{}")
    with pytest.raises(ValueError, match=r"model.*seed-0, seed-1\. Name one:.*seed-0"):
        open_weights(str(tmp_path))
