"""The tensors of a Hugging Face folder, in whichever of the usual files they are; read slice by slice.

    model.safetensors                  read where it lies, a slice at a time
    model.safetensors.index.json       the same, of several files
    pytorch_model.bin                  a pickle, of which PyTorch reads tensors and plain values alone; nothing is run
    pytorch_model.bin.index.json       the same, of several files

A .bin of PyTorch before 1.6 cannot be read in parts: each rank then holds that file while it reads it.
"""

from __future__ import annotations

import pickle
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from models.bert.pretrained.json_files import read_object
from tensor3d.checkpoint.files import NAME_OF

_SAFE, _PICKLED = "model.safetensors", "pytorch_model.bin"
WEIGHT_FILES = (_SAFE, f"{_SAFE}.index.json", _PICKLED, f"{_PICKLED}.index.json")
"""In the order in which they are looked for."""
FLOATS = {"F64": "fp64", "F32": "fp32", "BF16": "bf16", "F16": "fp16"}
"""The types that weights may have in a file, and what they are called here."""

Read = Callable[[str, tuple[slice, ...]], Tensor]


@dataclass(frozen=True, kw_only=True)
class FileTensor:
    """What a file says of one of its tensors."""

    path: Path
    shape: tuple[int, ...]
    dtype: str
    """As safetensors calls it: "F32"."""


def file_tensors(folder: Path) -> dict[str, FileTensor]:
    """All tensors of a folder by the names in the files; nothing but headers is read of safetensors.

    Raises:
        ValueError: no file of weights, or one that is none: cut off, a web page, a Git LFS pointer, code in a pickle.
    """
    found = next((folder / name for name in WEIGHT_FILES if (folder / name).exists()), None)
    if found is None:
        raise ValueError(f"{folder} has no weights. It needs one of {', '.join(WEIGHT_FILES)}.")
    if found.name.endswith(".index.json"):
        return _of_index(found)
    return _of_file(found)


@contextmanager
def reading(tensors: dict[str, FileTensor]) -> Iterator[Read]:
    """A function that reads a slice of a tensor into host memory, inside the block."""
    with ExitStack() as stack:
        opened: dict[Path, Any] = {}

        def read(name: str, part: tuple[slice, ...]) -> Tensor:
            path = tensors[name].path
            is_safe = path.suffix == ".safetensors"
            try:  # the file may have changed, or be another one on this rank, since its header was read
                if path not in opened:
                    opened[path] = stack.enter_context(safe_open(path, framework="pt")) if is_safe else _unpickled(path)
                source = opened[path]
                values: Tensor = (source.get_slice(name) if is_safe else source[name])[part]
            except (SafetensorError, KeyError, RuntimeError) as problem:
                raise ValueError(f"{path}: {name} cannot be read: {problem}.") from None
            return values

        yield read


def _of_index(index: Path) -> dict[str, FileTensor]:
    places = read_object(index).get("weight_map")
    if not isinstance(places, dict) or not all(isinstance(name, str) for name in places.values()):
        raise ValueError(f"{index} has no weight_map of tensors to files. Get it again from where the folder is from.")
    files: dict[str, dict[str, FileTensor]] = {}
    for name in sorted(set(places.values())):
        if Path(name).name != name:
            raise ValueError(f"{index} names {name!r}, which is no file of its folder. Put all files into one folder.")
        path = index.parent / name
        if not path.exists():
            raise ValueError(f"{path} is missing: {index.name} says that it holds a part of the weights. Get it too.")
        files[name] = _of_file(path)
    if lost := sorted(name for name, file in places.items() if name not in files[file]):
        raise ValueError(f"{index.parent / places[lost[0]]} has no {lost[0]}, which {index.name} says it has.")
    return {name: files[file][name] for name, file in places.items()}


def _of_file(path: Path) -> dict[str, FileTensor]:
    _check_beginning(path)
    if path.suffix != ".safetensors":
        return {
            name: FileTensor(path=path, shape=tuple(value.shape), dtype=NAME_OF.get(value.dtype, str(value.dtype)))
            for name, value in _unpickled(path).items()
        }
    try:
        with safe_open(path, framework="pt") as file:
            slices = {name: file.get_slice(name) for name in file.keys()}  # noqa: SIM118 (no mapping)
            return {
                name: FileTensor(path=path, shape=tuple(each.get_shape()), dtype=each.get_dtype())
                for name, each in slices.items()
            }
    except SafetensorError as problem:
        raise ValueError(f"{path} is cut off or damaged: {problem}. Get it again.") from None


def _unpickled(path: Path) -> dict[str, Tensor]:
    try:
        try:
            content = torch.load(path, map_location="cpu", weights_only=True, mmap=True)
        except RuntimeError as problem:
            if "mmap" not in str(problem):
                raise
            content = torch.load(path, map_location="cpu", weights_only=True)
    except pickle.UnpicklingError as problem:
        first = str(problem).partition("\n")[0]
        raise ValueError(
            f"{path} is no file of weights alone, or is damaged, and nothing in it is run: {first} Get the weights as "
            "safetensors."
        ) from None
    except (RuntimeError, EOFError, ValueError, LookupError, TypeError, AttributeError) as problem:
        first = str(problem).partition("\n")[0]
        raise ValueError(f"{path} is cut off or damaged: {first}. Get it again.") from None
    if not isinstance(content, dict) or not all(isinstance(value, Tensor) for value in content.values()):
        raise ValueError(
            f"{path} holds something else than tensors by name. Save the model's state_dict() alone, best as "
            "safetensors."
        )
    return content


def _check_beginning(path: Path) -> None:
    """What downloads leave instead of weights."""
    with path.open("rb") as file:
        beginning = file.read(64)
    if beginning.startswith(b"version https://git-lfs"):
        raise ValueError(
            f"{path} is a Git LFS pointer instead of the weights. Run `git lfs pull` in its folder, or download the "
            "file itself."
        )
    if beginning.lstrip().startswith((b"<!", b"<html", b"<?xml")):
        raise ValueError(f"{path} is a web page instead of weights. Download the file itself.")
    if not beginning:
        raise ValueError(f"{path} is empty. Get it again.")
