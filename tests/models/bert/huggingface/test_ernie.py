"""ERNIE's table of tasks, whose first row the library adds to all tokens unless told otherwise."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from models.bert import BertModel, export_huggingface, open_weights
from tensor3d import Cube
from tests.models.bert.huggingface.subject import loaded, original, settings_of, tensors_of, values, write

transformers = pytest.importorskip("transformers")
TASKS = "embeddings.task_type_embeddings.weight"


def folder_with(folder: Path, without: str | None = None, **said: Any) -> dict[str, torch.Tensor]:
    """An ERNIE's, without a tensor, and with other settings than it has."""
    model = original("ErnieModel", use_task_id=True, task_type_vocab_size=3, pad_token_id=0)
    tensors = tensors_of(model)
    write(folder, {name: each for name, each in tensors.items() if name != without}, {**settings_of(model), **said})
    return tensors


def test_its_first_row_goes_to_the_types_and_no_folder_has_it_then(tmp_path: Path) -> None:
    """As where the setting is not said, which is no: then a table is left over, and told."""
    tensors, cube = folder_with(tmp_path / "there"), Cube.single()
    model = loaded(tmp_path / "there", BertModel)
    told = open_weights(tmp_path / "there").fill(model, cube)
    assert (told.unused, told.in_part) == (("pooler.dense.bias", "pooler.dense.weight"), (TASKS,))
    assert f"the first row alone of: {TASKS}" in told.in_words()
    types = tensors["embeddings.token_type_embeddings.weight"]
    assert values(model)["embeddings.types.weight"].equal(types + tensors[TASKS][0])
    settings = open_weights(tmp_path / "there").settings
    export_huggingface(model, cube, tmp_path / "back", settings=settings)
    assert json.loads((tmp_path / "back" / "config.json").read_text())["use_task_id"] is False
    again = transformers.ErnieModel.from_pretrained(tmp_path / "back", add_pooling_layer=False).eval()
    twin = transformers.ErnieModel.from_pretrained(tmp_path / "there").eval()
    ids = torch.arange(3, 12)[None]
    with torch.no_grad():
        assert torch.allclose(again(ids).last_hidden_state, twin(ids).last_hidden_state, atol=1e-5)

    folder_with(tmp_path / "without", use_task_id=False)
    alone = BertModel(open_weights(tmp_path / "without").config, cube)
    told = open_weights(tmp_path / "without").fill(alone, cube)
    assert TASKS in told.unused
    assert values(alone)["embeddings.types.weight"].equal(types)


def test_a_table_without_a_row_is_refused(tmp_path: Path) -> None:
    tensors = folder_with(tmp_path)
    write(tmp_path, {**tensors, TASKS: tensors[TASKS][:0]}, json.loads((tmp_path / "config.json").read_text()))
    with pytest.raises(ValueError, match=r"task_type_embeddings.weight has shape \(0, 64\), and \(1, 64\) is needed"):
        open_weights(tmp_path)


@pytest.mark.parametrize(
    ("without", "said", "message"),
    [
        (TASKS, {}, "config.json says use_task_id, and ernie.embeddings.task_type_embeddings.weight is missing"),
        (None, {"use_task_id": "yes"}, "use_task_id must be true or false. Got 'yes'"),
        (None, {"model_type": "bert", "architectures": ["BertModel"]}, "that no BERT has: embeddings.task_type"),
    ],
    ids=str,
)
def test_refusals(tmp_path: Path, without: str | None, said: dict[str, Any], message: str) -> None:
    folder_with(tmp_path, without, **said)
    with pytest.raises(ValueError, match=message):
        open_weights(tmp_path)
