"""Weights in and out on cubes: the bits of one device, and refusals on every rank."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from models.bert import BertForPreTraining, BertForSequenceClassification, BertModel, export_huggingface, open_weights
from models.bert.huggingface import write_model_json
from tensor3d import Cube
from tests.models.bert.huggingface.subject import checkpointed, original, same, settings_of, tensors_of, values, write
from tests.models.toy import Shape
from tests.ranks import run_ranks

pytest.importorskip("transformers")


def there_and_back(folder: Path, shapes: tuple[Shape, ...], files: dict[str, dict[str, Tensor]]) -> None:
    for number, shape in enumerate(shapes):
        cube = Cube(*shape)
        for name in files:
            ours = BertForPreTraining.from_pretrained(folder / name, cube)
            alone = BertForPreTraining.from_pretrained(folder / name, Cube.single())
            assert same(values(ours, cube), values(alone))
            facts = open_weights(folder / name).facts
            types = {"dtype": facts["dtype"], "types": facts.get("types")}
            told = export_huggingface(ours, cube, folder / f"{name} {number}", **types)
            assert told.architecture == "BertForPreTraining"
        refusals(folder, cube)
        own_folder(folder / f"run {number}", cube)


def refusals(folder: Path, cube: Cube) -> None:
    """On every rank, also where one alone finds something; nobody waits for anybody afterwards."""
    weights = open_weights(folder / "model.safetensors")
    model = BertForPreTraining(weights.config, cube)
    before = values(model, cube)
    for name, message in (("lost", "encoder.layer.1.output.dense.weight is missing"), ("untied", "differs from")):
        with pytest.raises(ValueError, match=message):
            open_weights(folder / name).fill(model, cube)
    with pytest.raises(ValueError, match=r"not there.*folder"):
        BertModel.from_pretrained(folder / "nowhere" if cube.rank == 0 else folder / "lost", cube)
    with pytest.raises(ValueError, match=r"classifier.*2.*3"):
        open_weights(folder / "classes").fill(BertForSequenceClassification(model.config, 3, cube), cube)
    assert same(values(model, cube), before)
    with pytest.raises(ValueError, match=r"has a config.json already"):
        export_huggingface(model, cube, folder / "lost")
    with pytest.raises(ValueError, match="cannot be read or written"):
        export_huggingface(model, cube, folder / "file" / "out")
    # The last rank's own file is cut off after its header was read.
    mine = folder / "model.safetensors"
    if cube.rank == cube.shape.ranks - 1:
        mine = Path(shutil.copytree(mine, folder / "mine", dirs_exist_ok=True))
    weights = open_weights(mine)
    if mine.name == "mine":
        os.truncate(mine / "model.safetensors", 400)
    with pytest.raises(ValueError, match=r"mine/model.safetensors: .* cannot be read"):
        weights.fill(model, cube)


def own_folder(folder: Path, cube: Cube) -> None:
    model = BertForSequenceClassification.from_pretrained(folder.parent / "model.safetensors", cube, outputs=3)
    checkpointed(model, cube, folder)
    if cube.rank == 0:
        write_model_json(folder, config=model.config, heads=("pooler", "classifier"), labels=("a", "b", "c"))
    torch.distributed.barrier()
    assert same(values(BertForSequenceClassification.from_pretrained(folder, cube), cube), values(model, cube))
    encoder = BertModel.from_pretrained(folder, cube)
    assert same(
        {f"bert.{name}": value for name, value in values(encoder, cube).items()},
        {name: value for name, value in values(model, cube).items() if name.startswith("bert.")},
    )


def check_bits(folder: Path, world: int, shapes: tuple[Shape, ...]) -> None:
    model = original()
    tensors, settings = tensors_of(model), settings_of(model)
    files: dict[str, dict[str, Tensor]] = {
        "pytorch_model.bin.index.json": tensors,
        "model.safetensors": {n: v if "LayerNorm" in n else v.bfloat16() for n, v in tensors.items()},
    }
    for name, content in files.items():
        write(folder / name, content, settings, name)
    write(folder / "lost", {n: v for n, v in tensors.items() if not n.endswith("1.output.dense.weight")}, settings)
    decoder = tensors["bert.embeddings.word_embeddings.weight"].clone()
    decoder[-1, -1] += 1  # which one rank alone reads
    write(folder / "untied", {**tensors, "cls.predictions.decoder.weight": decoder}, settings)
    classifier = {"classifier.weight": torch.ones(2, 64), "classifier.bias": torch.ones(2)}
    as_classes = {**settings, "architectures": ["BertForSequenceClassification"]}
    write(folder / "classes", {**tensors, **classifier}, as_classes)
    (folder / "file").write_text("in the way of a folder")
    run_ranks(world, there_and_back, folder, shapes, files)
    for name, content in files.items():
        for number in range(len(shapes)):
            assert same(load_file(folder / f"{name} {number}" / "model.safetensors"), content)


def test_bits_on_two_ranks(tmp_path: Path) -> None:
    check_bits(tmp_path, 2, ((1, 2, 1, 1),))


@pytest.mark.slow
def test_bits_on_eight_ranks(tmp_path: Path) -> None:
    check_bits(tmp_path, 8, ((2, 2, 2, 1), (4, 2, 1, 1), (1, 2, 2, 2)))
