"""Weights of dense layers behind pooling: sentence-transformers has each in a folder of its own beside the encoder's;
a checkpoint of this project has them with the other parameters.

    here               there
    dense.0.weight     2_Dense/model.safetensors (or pytorch_model.bin): linear.weight
    dense.0.bias       linear.bias
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import torch
from safetensors.torch import save
from torch import Tensor, nn

from models.bert.embedding import DenseConfig, VectorDense
from models.bert.huggingface.from_pretrained import CheckpointWeights
from models.bert.huggingface.model_json import replacing
from models.bert.huggingface.param_names import part_of
from models.bert.huggingface.reader import FLOATS, FileTensor, file_tensors, reading
from models.bert.huggingface.weights import DENSE, WeightSource
from tensor3d import Cube
from tensor3d.distributed.object_collectives import run_on_all_ranks
from tensor3d.sharding.param_layout import local

_THEIRS = "linear."
_TYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


def with_dense(weights: WeightSource, dense: Sequence[DenseConfig], folders: Sequence[Path]) -> WeightSource:
    """The same weights, with those of these dense layers as their head "dense".

    Args:
        folders: where those of each layer lie, of a Hugging Face folder. Those of a checkpoint lie in it.

    Raises:
        ValueError: they are not there, or of other shapes.
    """
    if not dense:
        return weights
    shapes = _shapes(dense, weights.config.hidden)
    if not isinstance(weights, CheckpointWeights):
        return _DenseBeside(weights, shapes, folders)
    for name, needed in shapes.items():
        found = weights.shapes.get(name)
        if found != needed:
            told = "has no" if found is None else f"has {found} as the shape of"
            raise ValueError(
                f"{weights.checkpoint} {told} {name}, and the modules.json of {weights.folder} asks for {needed}. They "
                "are of different models: get both from the same folder."
            )
    return weights


def write_dense(folder: Path, layer: VectorDense, types: Mapping[str, str]) -> None:
    """Writes its weights as sentence-transformers has them. One rank calls it: each has them whole.

    Args:
        types: of "weight" and "bias": "fp32", "bf16" or "fp16".

    Raises:
        ValueError: weights too large for the type ("fp32", "bf16" or "fp16"), or a file that cannot be written.
    """
    content = {}
    for name, parameter in layer.named_parameters():
        whole = local(parameter).detach().cpu()
        content[f"{_THEIRS}{name}"] = values = whole.to(_TYPES[types[name]]).contiguous()
        if whole.isfinite().all() and not values.isfinite().all():
            raise ValueError(
                f"{name} of a dense layer has values that {types[name]} cannot hold. Export as fp32 or bf16."
            )
    folder.mkdir(parents=True, exist_ok=True)
    with replacing(folder / "model.safetensors") as file:
        file.write(save(content, {"format": "pt"}))


class _DenseBeside(WeightSource):
    """An encoder's folder with the folders of dense layers: of itself it says what the encoder's says."""

    def __init__(self, encoder: WeightSource, shapes: dict[str, tuple[int, ...]], folders: Sequence[Path]) -> None:
        vars(self).update(vars(encoder))
        self._encoder = encoder
        self.heads = (*encoder.heads, DENSE)
        self._files = [file_tensors(folder) for folder in folders]
        for number, (folder, file) in enumerate(zip(folders, self._files, strict=True)):
            wanted = {name: shape for name, shape in shapes.items() if _place(name)[0] == number}
            _check(folder, file, {_place(name)[1]: shape for name, shape in wanted.items()})
        usual, types = self.facts["dtype"], {name: FLOATS[self._tensor(name).dtype] for name in shapes}
        others = {name: kind for name, kind in types.items() if kind != usual}
        if others:
            self.facts = {**self.facts, "types": {**self.facts.get("types", {}), **others}}

    def _fill(self, model: nn.Module, used: dict[str, Tensor], cube: Cube) -> dict[str, tuple[str, ...]]:
        own = {name: tensor for name, tensor in used.items() if part_of(name) == DENSE}
        rest = {name: tensor for name, tensor in used.items() if name not in own}
        left = self._encoder._fill(model, rest, cube)
        run_on_all_ranks(cube, lambda: self._read(own))
        rounded = [name for name in own if self._tensor(name).dtype == "F64" and own[name].dtype != torch.float64]
        return {**left, "rounded": (*left.get("rounded", ()), *sorted(rounded))}

    def _tensor(self, name: str) -> FileTensor:
        number, theirs = _place(name)
        return self._files[number][theirs]

    def _read(self, own: dict[str, Tensor]) -> None:
        for name, parameter in own.items():
            number, theirs = _place(name)
            with reading(self._files[number]) as read:
                here = local(parameter).detach()
                here.copy_(read(theirs, tuple(slice(0, size) for size in here.shape)))


def _shapes(dense: Sequence[DenseConfig], hidden: int) -> dict[str, tuple[int, ...]]:
    """Of the parameters of these layers, by their names here."""

    def each() -> Iterator[tuple[str, tuple[int, ...]]]:
        inputs = hidden
        for number, layer in enumerate(dense):
            yield f"{DENSE}.{number}.weight", (layer.outputs, inputs)
            if layer.bias:
                yield f"{DENSE}.{number}.bias", (layer.outputs,)
            inputs = layer.outputs

    return dict(each())


def _place(name: str) -> tuple[int, str]:
    """Which layer a parameter is of, and its name in that layer's file."""
    _, number, kind = name.split(".")
    return int(number), f"{_THEIRS}{kind}"


def _check(folder: Path, file: dict[str, FileTensor], needed: dict[str, tuple[int, ...]]) -> None:
    """Raises ValueError for a file that has not just these tensors."""
    told = ", ".join(f"{name} {shape}" for name, shape in needed.items())
    wrong = next((f"no {name}" for name in needed if name not in file), None)
    wrong = wrong or next((f"{name}, too" for name in file if name not in needed), None)
    wrong = wrong or next(
        (f"{name} of shape {file[name].shape}" for name, shape in needed.items() if file[name].shape != shape), None
    )
    wrong = wrong or next(
        (f"{name} of type {tensor.dtype}" for name, tensor in file.items() if tensor.dtype not in FLOATS), None
    )
    if wrong is not None:
        raise ValueError(
            f"the weights in {folder} have {wrong}. Its config.json asks for {told}, in one of {', '.join(FLOATS)}. "
            "Get both from the same place."
        )
