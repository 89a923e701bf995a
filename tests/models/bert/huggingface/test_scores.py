"""Classifiers of decoders' families, whose head is a linear alone (`score`): which token it reads, what is refused."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from models.bert import (
    BertForSequenceClassification,
    BertForTokenClassification,
    BertModel,
    EncodedText,
    collate_texts,
    export_huggingface,
    open_weights,
)
from models.bert.embedding import last_of_texts
from models.bert.tasks import class_logits
from tensor3d import Cube
from tests.models.bert.huggingface.families import GEMMA, QWEN, check_bits_on_a_cube
from tests.models.bert.huggingface.subject import original, same, saved, settings_of, tensors_of, values, write
from tests.models.toy import FAMILIES, Shape, toy_config
from tests.ranks import run_ranks
from tests.single_device_reference import ranks_of

pytest.importorskip("transformers")

PAD = 3
SIZES: dict[str, Any] = {"num_key_value_heads": 4, "head_dim": 12, "pad_token_id": PAD}
ROWS = [[9, 8, 7, 6, 5, 4], [9, PAD], [8, 7, PAD, 6, PAD, PAD], [PAD, PAD], [5], [4, 9, 9, 9]]
"""Some end with padding, as those of tokenizers that have one token for both; one has nothing else."""
COUNTED = [5, 0, 3, 0, 0, 3]
SCORED = {**FAMILIES["qwen"], "causal": True, "pooling": "score", "pad_id": PAD}


def texts_of(rows: list[list[int]]) -> list[EncodedText]:
    return [EncodedText(ids=np.array(row), types=np.zeros(len(row), dtype=np.int64)) for row in rows]


def of_library(model: Any, rows: list[list[int]], *, left: bool = False) -> Tensor:
    """Its logits of a batch, padded."""
    longest = max(map(len, rows))
    fill = [[PAD] * (longest - len(row)) for row in rows]
    masks = [[1] * len(row) + [0] * (longest - len(row)) for row in rows]
    ids = [more + row if left else row + more for row, more in zip(rows, fill, strict=True)]
    given = {"input_ids": torch.tensor(ids), "attention_mask": torch.tensor([m[::-1] if left else m for m in masks])}
    with torch.no_grad():
        logits: Tensor = model(**given).logits
    return logits


def read_logits(folder: Path, shape: Shape) -> Tensor:
    cube = Cube(*shape) if ranks_of(shape) > 1 else Cube.single()
    cube.manual_seed(0)
    model = BertForSequenceClassification.from_pretrained(folder, cube).eval()
    return class_logits(model, texts_of(ROWS))


@pytest.mark.parametrize(
    ("kind", "shape"),
    [
        ("Qwen3", (1, 1, 1, 1)),
        ("Gemma3Text", (1, 1, 1, 1)),
        pytest.param("Qwen3", (1, 2, 2, 1), marks=pytest.mark.slow),
        pytest.param("Gemma3Text", (2, 2, 1, 2), marks=pytest.mark.slow),
    ],
)
def test_the_token_that_the_library_reads(tmp_path: Path, kind: str, shape: Shape) -> None:
    more = {"use_bidirectional_attention": True, "query_pre_attn_scalar": 12} if kind == "Gemma3Text" else {}
    model = saved(tmp_path, f"{kind}ForSequenceClassification", **SIZES, **more, num_labels=1)
    found = open_weights(tmp_path)
    assert (found.heads, found.outputs, found.problem, found.config.pad_id) == (("classifier",), 1, "regress", PAD)
    ranks = ranks_of(shape)
    for logits in [read_logits(tmp_path, shape)] if ranks == 1 else run_ranks(ranks, read_logits, tmp_path, shape):
        torch.testing.assert_close(logits, of_library(model, ROWS), atol=1e-5, rtol=0)
    # To the left, a text of padding alone has a row of it before it, which no other has.
    some = [row for row in ROWS if row != [PAD, PAD]]
    torch.testing.assert_close(of_library(model, some, left=True), of_library(model, some), atol=1e-5, rtol=0)


@pytest.mark.slow
@pytest.mark.parametrize("family", [QWEN, GEMMA])
def test_bits_on_cubes(tmp_path: Path, family: str) -> None:
    check_bits_on_a_cube(tmp_path, family, (1, 2, 2, 1))


def test_padding_at_the_end_of_texts_is_passed_over() -> None:
    laid = collate_texts(texts_of(ROWS), Cube.single())
    for padding, wanted in ((PAD, COUNTED), (None, [len(row) - 1 for row in ROWS]), (60, [len(r) - 1 for r in ROWS])):
        found = last_of_texts(laid.batch, padding) - laid.batch.first
        assert laid.of_texts(found.unsqueeze(1)).squeeze(1).tolist() == wanted
        assert last_of_texts(laid.batch, padding)[laid.batch.first < 0].eq(-1).all()


@pytest.mark.parametrize("problem", ["classify", "labels", "rank"])
def test_there_and_back_with_what_it_is_for(tmp_path: Path, problem: str) -> None:
    cube, outputs = Cube.single(), 1 if problem == "rank" else 3
    cube.manual_seed(0)
    model = BertForSequenceClassification(toy_config(67, **SCORED), outputs, cube)
    assert [name for name, _ in model.named_parameters() if not name.startswith("bert.")] == ["classifier.weight"]
    told = export_huggingface(model, cube, tmp_path, problem=problem)
    assert (told.architecture, told.note) == ("Qwen3ForSequenceClassification", None)
    settings = json.loads((tmp_path / "config.json").read_text())
    assert settings["pad_token_id"] == PAD
    assert load_file(tmp_path / "model.safetensors")["score.weight"].shape == (outputs, 64)
    found = open_weights(tmp_path)
    assert found.config == replace(model.config, next_sentence=True)
    assert found.problem == ("regress" if problem == "rank" else problem)
    again = BertForSequenceClassification.from_pretrained(tmp_path, cube)
    assert same(values(again), values(model))
    # A bare encoder keeps what was said of padding, and says nothing else of it.
    bare = export_huggingface(model.bert, cube, tmp_path / "bare", settings={"pad_token_id": 9})
    assert bare.architecture == "Qwen3Model"
    assert json.loads((tmp_path / "bare" / "config.json").read_text())["pad_token_id"] == 9


def test_what_the_library_cannot_compute_is_refused_or_told(tmp_path: Path) -> None:
    cube = Cube.single()
    dense = BertForSequenceClassification(toy_config(67, **{**SCORED, "pooling": "last", "pad_id": None}), 3, cube)
    for heads in (None, ("classifier",), ("pooler", "classifier")):
        with pytest.raises(ValueError, match=r'has pooling="last", and a dense layer \(pooler\) before it, for which'):
            export_huggingface(dense, cube, tmp_path, heads=heads)
    some = BertForSequenceClassification(toy_config(67, **{**SCORED, "pad_id": None}), 3, cube)
    told = export_huggingface(some, cube, tmp_path, settings={"pad_token_id": 9})
    assert told.note == (
        "config.json says no pad_token_id, without which Qwen3ForSequenceClassification takes one text at a time"
    )
    assert json.loads((tmp_path / "config.json").read_text())["pad_token_id"] is None
    assert open_weights(tmp_path).config.pad_id is None


def test_whose_head_it_is(tmp_path: Path) -> None:
    """The class says it; without one, a bias is that of tags."""
    cube = Cube.single()
    tags = original("Qwen3ForTokenClassification", **SIZES, num_labels=3)
    tensors, settings = tensors_of(tags), settings_of(tags)
    found = open_weights(write(tmp_path / "tags", tensors, settings))
    assert (found.heads, found.problem, found.head_dropout("tags")) == (("tags",), "tag", 0.1)
    model = BertForTokenClassification.from_pretrained(tmp_path / "tags", cube)
    told = export_huggingface(model, cube, tmp_path / "back", settings=found.settings, labels=found.labels)
    assert (told.architecture, told.note) == ("Qwen3ForTokenClassification", None)
    assert same(load_file(tmp_path / "back" / "model.safetensors"), tensors)
    unsaid = open_weights(write(tmp_path / "unsaid", tensors, {**settings, "architectures": None}))
    assert unsaid.heads == ()
    assert unsaid.fill(BertModel(unsaid.config, cube), cube).unused == ("score.bias", "score.weight")
    texts = {name: each for name, each in tensors.items() if name != "score.bias"}
    for said in (None, ["Qwen3ForSequenceClassification"]):
        write(tmp_path / str(said), texts, {**settings, "architectures": said})
        assert open_weights(tmp_path / str(said)).heads == ("classifier",)
    write(tmp_path / "lost", texts, settings)  # which `token_classification_bias` would have
    with pytest.raises(ValueError, match=r"score.bias is missing, which the model needs"):
        BertForTokenClassification.from_pretrained(tmp_path / "lost", cube)


@pytest.mark.parametrize("changes", [{"pooling": "last"}, {"pad_id": -1}], ids=str)
def test_padding_is_of_that_head_alone(changes: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=r'pad_id must be at least 0, and belongs to pooling="score". Got pad_id='):
        toy_config(67, **{**SCORED, **changes})
