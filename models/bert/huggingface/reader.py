"""Weights of a Hugging Face folder: config.json, a file of tensors, and how they lie on the cube."""

from __future__ import annotations

import pickle
import re
import warnings
import zipfile
import zlib
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from math import prod
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn

from models.bert.huggingface import param_names
from models.bert.huggingface.architectures import (
    ARCHITECTURES,
    DIFFERENCE,
    TASKS,
    Architecture,
    architecture_of,
    architectures_from,
)
from models.bert.huggingface.config import (
    CONFIG,
    config_from,
    head_dropout_from,
    labels_from,
    problem_from,
)
from models.bert.huggingface.model_json import read_object
from models.bert.huggingface.weights import WeightSource
from tensor3d import Cube
from tensor3d.checkpoint.format import NAME_OF
from tensor3d.distributed.object_collectives import all_gather_object, first_names, run_on_all_ranks
from tensor3d.files import broken_links, open_regular
from tensor3d.sharding.param_layout import local, local_slices

# --- The tensors of a Hugging Face folder, in whichever of the usual files they are; read slice by slice --------------
#
#     model.safetensors                  read where it lies, a slice at a time
#     model.safetensors.index.json       the same, of several files
#     pytorch_model.bin                  a pickle, of which PyTorch reads tensors and plain values alone; nothing is run
#     pytorch_model.bin.index.json       the same, of several files
#
# A .bin of PyTorch before 1.6 cannot be read in parts: each rank then holds that file while it reads it.

_SAFE, _PICKLED = "model.safetensors", "pytorch_model.bin"
WEIGHT_FILES = (_SAFE, f"{_SAFE}.index.json", _PICKLED, f"{_PICKLED}.index.json")
"""In the order in which they are looked for."""
FLOATS = {"F64": "fp64", "F32": "fp32", "BF16": "bf16", "F16": "fp16"}
"""The types that weights may have in a file, and what they are called here."""

GENERATOR_FILES = ("generator_config.json", "pytorch_model.generator.bin")
"""Settings, which may be missing, and weights of the generator that learnt beside a DeBERTa, in its folder."""

Read = Callable[[str, tuple[slice, ...]], Tensor]


@dataclass(frozen=True, kw_only=True)
class FileTensor:
    """What a file says of one of its tensors."""

    path: Path
    shape: tuple[int, ...]
    dtype: str
    """As safetensors calls it: "F32"."""
    stored: str | None = None
    """Its name in the file, where it is a part of another one's rows."""
    first: int = 0
    """The first of these rows."""
    folded: int = 1
    """Numbers of the file's last dim, which is one with that before here: of a convolution's kernel."""

    @property
    def shape_in_file(self) -> tuple[int, ...]:
        return self.shape if self.folded == 1 else (*self.shape[:-1], self.shape[-1] // self.folded, self.folded)


def file_tensors(folder: Path) -> dict[str, FileTensor]:
    """All tensors of a folder by the names in the files; nothing but headers is read of safetensors.

    Raises:
        ValueError: no file of weights, or one that is none: cut off, a web page, a Git LFS pointer, code in a pickle.
    """
    found = next((folder / name for name in WEIGHT_FILES if (folder / name).exists()), None)
    if found is None:
        raise ValueError(f"{folder} has no weights. It needs one of {', '.join(WEIGHT_FILES)}.{_there_instead(folder)}")
    if found.name.endswith(".index.json"):
        return _of_index(found)
    return _of_file(found)


_SHARD = re.compile(r"(model|pytorch_model)-\d+-of-\d+\.(safetensors|bin)")
_ADAPTERS = ("adapter_config.json", "adapter_model.safetensors", "adapter_model.bin")


def _there_instead(folder: Path) -> str:
    """A sentence, after a space, of what a folder without weights has in their place, and what to do; maybe empty."""
    if told := broken_links(folder, WEIGHT_FILES):
        return told
    names = sorted(each.name for each in folder.iterdir())
    if parts := [name for name in names if _SHARD.fullmatch(name)]:
        index = f"{_SAFE if parts[0].endswith('.safetensors') else _PICKLED}.index.json"
        return f" It has {first_names(parts, 2)}, parts of weights without their {index}: get that, too."
    if any(name in _ADAPTERS for name in names):
        return " It has an adapter alone. Merge that into the model it was trained on (PEFT's merge_and_unload) first."
    others = (".safetensors", ".bin", ".pt", ".h5", ".msgpack", ".gguf", ".onnx", ".ckpt", ".index")
    if found := [name for name in names if name.endswith(others)]:
        return f" It has {first_names(found, 2)}, which is not looked into: get the weights as {_SAFE}."
    return ""


@contextmanager
def reading(tensors: dict[str, FileTensor]) -> Iterator[Read]:
    """A function that reads a slice of a tensor into host memory, inside the block."""
    with ExitStack() as stack:
        opened: dict[Path, Any] = {}

        def read(name: str, part: tuple[slice, ...]) -> Tensor:
            path, stored, first = tensors[name].path, tensors[name].stored or name, tensors[name].first
            part = (slice(part[0].start + first, part[0].stop + first), *part[1:])
            is_safe = path.suffix == ".safetensors"
            try:  # the file may have changed, or be another one on this rank, since its header was read
                if path not in opened:
                    opened[path] = stack.enter_context(safe_open(path, framework="pt")) if is_safe else _unpickled(path)
                source, folded = opened[path], tensors[name].folded
                whole = source.get_slice(stored) if is_safe else source[stored]
                values: Tensor = whole[part] if folded == 1 else _unfolded(whole, part, folded)
            except (SafetensorError, KeyError, RuntimeError) as problem:
                raise ValueError(f"{path}: {name} cannot be read: {problem}.") from None
            return values

        yield read


def _unfolded(whole: Any, part: tuple[slice, ...], folded: int) -> Tensor:
    """Of a tensor (N, H, k) this part of its (N, H * k)."""
    rows, columns = part
    first, last = columns.start // folded, -(-columns.stop // folded)
    values: Tensor = whole[rows, slice(first, last), slice(0, folded)].flatten(1)
    return values[:, columns.start - first * folded : columns.stop - first * folded]


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


_DAMAGE = (RuntimeError, EOFError, ValueError, LookupError, TypeError, AttributeError, OSError, zipfile.BadZipFile)
"""What reading a damaged pickle or archive raises."""


def _unpickled(path: Path) -> dict[str, Tensor]:
    try:
        _check_packing(path)
        with warnings.catch_warnings():  # of what is no file of weights: what is wrong with it is said below
            warnings.filterwarnings("ignore", "Detected pickle protocol", UserWarning)
            try:
                content = torch.load(path, map_location="cpu", weights_only=True, mmap=True)
            except RuntimeError as problem:
                if "mmap" not in str(problem):
                    raise
                content = torch.load(path, map_location="cpu", weights_only=True)
    except pickle.UnpicklingError as problem:
        raise ValueError(
            f"{path} is no file of weights alone, or is damaged, and nothing in it is run{_what_is_in(problem)}. Get "
            "the weights as safetensors."
        ) from None
    except FileNotFoundError:
        raise
    except _DAMAGE as problem:
        first = str(problem).partition("\n")[0].rstrip(".")
        raise ValueError(f"{path} is cut off or damaged: {first}. Get it again.") from None
    if not isinstance(content, dict) or not all(isinstance(k, str) and _is_whole(v) for k, v in content.items()):
        raise ValueError(
            f"{path} holds something else than tensors by name. Save the model's state_dict() alone, best as "
            "safetensors."
        )
    return content


def _what_is_in(problem: pickle.UnpicklingError) -> str:
    """What PyTorch says of it, without its advice on how to run it nevertheless."""
    told = str(problem).partition("WeightsUnpickler error: ")[2].partition("\n")[0].partition(". ")[0].rstrip(".")
    return f": {told}" if told else ""


def _check_packing(path: Path) -> None:
    """PyTorch takes the parts of an archive as they lie, also compressed ones, and unpacks others without end."""
    if zipfile.is_zipfile(path):
        with zipfile.ZipFile(path) as archive:
            if packed := next((part for part in archive.infolist() if part.compress_type), None):
                raise ValueError(f"its part {packed.filename!r} is compressed, which PyTorch's files are not")


def _is_whole(value: Any) -> bool:
    """Whether it is a tensor with all its numbers in the file: none without any, and no few that stand for many."""
    if not isinstance(value, Tensor) or value.is_nested or value.layout != torch.strided or value.is_meta:
        return False
    return value.numel() * value.element_size() <= value.untyped_storage().nbytes()


def _check_beginning(path: Path) -> None:
    """What downloads leave instead of weights."""
    with open_regular(path) as file:
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


# --- Weights of a Hugging Face folder ---------------------------------------------------------------------------------

_COMPARED = 4096  # rows at once
_SAMPLED = 256  # numbers of a row
_OWN_DECODER = "masked_lm.projection.weight"
"""Of a model whose masked-LM head is not tied to the embedding."""


class HFWeights(WeightSource):
    """Opens a Hugging Face folder: its config.json and the headers of its weights.

    Args:
        generator: not those of the model, but of the generator that learnt beside it, which published DeBERTas have in
            the same folder (`GENERATOR_FILES`).

    Raises:
        ValueError: no BERT, no weights, or files that cannot be read; see `config_from` and `file_tensors`.
    """

    def __init__(self, folder: Path, *, generator: bool = False) -> None:
        where = folder / CONFIG
        self.folder, self.settings = folder, read_object(where)
        if generator:
            own, weights = (folder / name for name in GENERATOR_FILES)
            found = _of_file(weights)
            if own.exists():  # what it does not say is as in the model
                self.settings, where = {**self.settings, **read_object(own)}, own
            else:
                self.settings["num_hidden_layers"] = _layers_among(found)
        else:
            found = file_tensors(folder)
        self._architecture = architecture_of(self.settings, where)
        self.config = config_from(self.settings, where)
        said = architectures_from(self.settings, where)
        self._tensors, self._names = _by_bert_name(found, folder, self._architecture, said)
        self._check_names()
        if (layers := param_names.layers_among(self._names)) not in (0, self.config.layers):
            raise ValueError(
                f"{folder}: the weights are of {layers} layers, and {CONFIG} says "
                f"{self._architecture.settings.get('num_hidden_layers', 'num_hidden_layers')} {self.config.layers}. "
                f"{CONFIG} and weights are of different models: get both from the same place."
            )
        self._check_encoder(layers)
        heads = param_names.heads_among(self._names, self._architecture, self.config, said)
        self.heads = tuple(head for head in heads if self._meant(head))
        self._with_tasks = self._reads_tasks(where)
        self.outputs, self.labels, self.problem = None, None, "answer" if "answers" in self.heads else None
        if not set(param_names.LABELLED).isdisjoint(self.heads):
            self._take_labels(where)
        self.facts: dict[str, Any] = {"dtype": _type_of_most(found)}
        if types := _other_types(self._tensors, self._names, self.facts["dtype"]):
            self.facts["types"] = types
        head = next((each for each in ("tags", "answers") if each in self.heads), "classifier")
        dropout = head_dropout_from(self.settings, where, head)
        if dropout is not None:
            self.facts["classifier_dropout"] = dropout

    def _check_names(self) -> None:
        """Raises ValueError for an encoder under other names, or with more in it than a BERT has."""
        kind = self._architecture
        prefix = param_names.prefix_among(map(kind.today, self._tensors))
        if prefix not in (None, "", kind.prefix):
            others = [each.title for each in ARCHITECTURES.values() if each.prefix == prefix]
            if others:
                raise ValueError(
                    f"{self.folder}: {CONFIG} is of {kind.title}, and the names of the encoder begin with {prefix!r}, "
                    f"as {others[0]}'s do. {CONFIG} and weights are of different models: get both from the same place."
                )
            raise ValueError(
                f"{self.folder}: the names of the encoder begin with {prefix!r} instead of {kind.prefix!r}, as "
                f"wrappers of a model save them. Rename the tensors, without what stands before {kind.prefix!r}, or "
                "save the model inside with its own save_pretrained."
            )
        names = {
            name: own
            for name, own in self._names.items()
            if param_names.of_encoder(name) and name not in kind.left_over and not (kind.tasks and name == TASKS)
        }
        unknown = {name: own for name, own in names.items() if not param_names.is_known(name, self.config)}
        more = list(unknown.values())
        if more and kind.name == "electra" and all(name.startswith(param_names.PROJECTION) for name in unknown):
            raise ValueError(
                f"{self.folder}: {CONFIG} says embedding_size {self.config.hidden}, which is hidden_size, and the "
                f"weights have {more[0]}, which projects embeddings of another size. {CONFIG} and weights are of "
                "different models: get both from the same place."
            )
        if more:
            told = f"{more[0]}{f' and {len(more) - 1} more' if len(more) > 1 else ''}"
            raise ValueError(
                f"{self.folder} has tensors in its encoder that no {kind.title} has: {told}. Adapters (LoRA and the "
                "like) change what the model says: merge them into its weights with the library that made them, or "
                "take the model without them. Other architectures are not read."
            )

    def _check_encoder(self, layers: int) -> None:
        """Raises ValueError where a tensor that is there has another shape than the config.json asks for."""
        for name, (rows, *columns) in param_names.encoder_shapes(self.config, layers).items():
            theirs = param_names.library_names(name)
            for each, size in zip(theirs, param_names.part_sizes(rows, len(theirs), self.config), strict=True):
                if each in self._names:
                    self._check_shape(each, (size, *columns))

    def _reads_tasks(self, where: Path) -> bool:
        """Whether all tokens get the first row of ERNIE's table of tasks, which is there."""
        setting = self._architecture.tasks
        if setting is None or not (said := (self.settings or {}).get(setting)):
            return False
        if said is not True:
            raise ValueError(f"{where}: {setting} must be true or false. Got {said!r:.60}.")
        if TASKS not in self._names:
            raise ValueError(
                f"{self.folder}: {where.name} says {setting}, and {self._own(TASKS)} is missing. Get a complete model, "
                f"or, if no token has a task, say {setting} = false."
            )
        rows = self._tensors[self._names[TASKS]].shape[:1]
        self._check_shape(TASKS, (max((1, *rows)), self.config.hidden))
        return True

    def _take_labels(self, where: Path) -> None:
        assert self.settings is not None
        rows = self._tensors[self._names["classifier.weight"]].shape[0]
        labels = labels_from(self.settings, where)
        if len(labels) != rows:
            raise ValueError(
                f"{where} names {len(labels)} labels, and the classifier has {rows} outputs. Correct id2label."
            )
        self.outputs = rows
        self.problem = "tag" if "tags" in self.heads else problem_from(self.settings, rows, where)
        self.labels = None if self.problem == "regress" else labels

    def _meant(self, head: str) -> bool:
        """Whose classifier it is, the class of the model says: that of texts, of tokens, or of choices."""
        if head not in param_names.LABELLED:
            return True
        kind, said = self._architecture, architectures_from(self.settings or {}, self.folder / CONFIG)
        if head == "tags":
            return kind.class_of((head,)) in said
        before = self.config.before_classifier
        if said and kind.class_of((head,) if before is None else (before, head)) not in said:
            return False
        if before is None:
            return "classifier.bias" not in self._names
        return not self._names.keys().isdisjoint(param_names.BEFORE_CLASSIFIER)

    def _own(self, name: str) -> str:
        """What this architecture calls a tensor of BERT, for messages."""
        return self._names.get(name) or self._architecture.own_name(name, self.heads)

    def _fill(self, model: nn.Module, used: dict[str, Tensor], cube: Cube) -> dict[str, tuple[str, ...]]:
        sources = run_on_all_ranks(cube, lambda: self._checked(used))
        self._check_same_files(sources, cube)
        # A masked-LM head without a weight of its own has the embedding's.
        shares = "masked_lm" in self.heads and hasattr(model, "masked_lm") and _OWN_DECODER not in used
        if shares:
            run_on_all_ranks(cube, lambda: self._check_tied(used, cube))
        run_on_all_ranks(cube, lambda: self._read(used, sources, cube))
        asked = {name for source in sources.values() for name in source}
        if shares:
            asked |= {param_names.DECODER_WEIGHT, param_names.DECODER_BIAS, param_names.MASKED_LM_BIAS}
        rounded = [name for name in asked if name in self._names and self._tensors[self._names[name]].dtype == "F64"]
        narrow = any(tensor.dtype != torch.float64 for tensor in used.values())
        taken = {found for name, found in self._names.items() if name in asked | set(param_names.BUFFERS)}
        return {
            "unused": tuple(found for found in dict.fromkeys(self._names.values()) if found not in taken),
            "in_part": (self._names[TASKS],)
            if TASKS in asked and self._tensors[self._names[TASKS]].shape[0] > 1
            else (),
            "rounded": tuple(sorted(self._names[name] for name in rounded)) if narrow else (),
        }

    def _check_same_files(self, sources: dict[str, tuple[str, ...]], cube: Cube) -> None:
        """Compares between ranks a few numbers of every tensor that is read, for of most each rank reads its own part.

        Raises:
            ValueError: they differ, as on machines with folders of their own; with a name, on every rank.
        """
        if cube.shape.ranks == 1:
            return

        def sampled() -> dict[str, int]:
            names = {self._names[each] for source in sources.values() for each in source}
            with reading(self._tensors) as read:
                return {name: _sampled(read, name, self._tensors[name].shape) for name in names}

        by_rank = all_gather_object(cube, run_on_all_ranks(cube, sampled))
        for rank, found in enumerate(by_rank):
            if other := sorted(name for name in by_rank[0].keys() | found if by_rank[0].get(name) != found.get(name)):
                raise ValueError(
                    f"{self.folder} is not the same for all ranks: {first_names(other, 4)} of rank {rank} differ from "
                    "those of rank 0. Put one folder on all machines."
                )

    def _checked(self, used: dict[str, Tensor]) -> dict[str, tuple[str, ...]]:
        """The library's tensors of each parameter, all of which are there and have the right shapes."""
        sources = {}
        for name, parameter in used.items():
            sources[name] = tuple(self._present(each) for each in param_names.library_names(name))
            rows, *columns = parameter.shape
            sizes = param_names.part_sizes(rows, len(sources[name]), self.config)
            for each, size in zip(sources[name], sizes, strict=True):
                self._check_shape(each, (size, *columns))
            if name == param_names.TYPES and self._with_tasks:
                sources[name] += (TASKS,)
        return sources

    def _present(self, name: str) -> str:
        """`name`, or the other one that the bias of the masked-LM head has in some files: where the decoder is not
        tied, that is the one which the library adds, whatever the first one says."""
        has_other = name == param_names.MASKED_LM_BIAS and param_names.DECODER_BIAS in self._names
        if has_other and not self.config.tied:
            return param_names.DECODER_BIAS
        if name in self._names:
            return name
        if has_other:
            return param_names.DECODER_BIAS
        if name == param_names.EMBEDDING and param_names.DECODER_WEIGHT in self._names and self.config.tied:
            return param_names.DECODER_WEIGHT  # one tensor for both, saved once
        if name == param_names.DECODER_WEIGHT and not self.config.tied:
            raise ValueError(
                f"{self.folder}: {CONFIG} says that the masked-LM head has a weight of its own (tie_word_embeddings = "
                f"false), and {self._own(name)} is missing. Get a complete model, leave the head masked_lm out "
                "(--heads of `python -m tools.convert from-hf`, or Weights.only), or correct the setting."
            )
        if name == param_names.EMBEDDING and DIFFERENCE in self._names:
            raise ValueError(
                f"{self.folder}: {self._own(name)} is missing, which the model needs. {self._own(DIFFERENCE)} is what "
                "it differs by from that of the generator that has learnt beside the model: write the sum of both "
                "under that name."
            )
        prefix = param_names.prefix_among(map(self._architecture.today, self._tensors))
        begin = f"the names of its encoder begin with {prefix!r}" if prefix else "its names have no prefix"
        if prefix is None:
            begin = f"it has no embedding of tokens, and its first tensor is {next(iter(self._tensors), 'none')}"
        raise ValueError(
            f"{self.folder}: {self._own(name)} is missing, which the model needs; {begin}. Get a complete "
            f"{self._architecture.title}."
        )

    def _check_shape(self, name: str, needed: tuple[int, ...]) -> None:
        found = self._tensors[self._names[name]]
        if found.dtype not in FLOATS:
            raise ValueError(
                f"{found.path}: {self._names[name]} is of type {found.dtype}, and one of {', '.join(FLOATS)} is "
                "needed. Get the model as it was before it was quantised, or write its weights in one of these."
            )
        if name == param_names.CONVOLUTION:
            needed = (needed[0], self.config.hidden, needed[1] // self.config.hidden)
        if found.shape_in_file == needed:
            return
        told = f"{found.path}: {self._names[name]} has shape {found.shape_in_file}, and {needed} is needed."
        if name == param_names.EMBEDDING and found.shape[1:] == needed[1:]:
            raise ValueError(
                f"{told} {CONFIG} says vocab_size {self.config.vocab}, and the weights have {found.shape[0]} entries. "
                f"Get the {CONFIG} that belongs to the weights."
            )
        raise ValueError(f"{told} {CONFIG} and weights are of different models, or the model has other sizes.")

    def _check_tied(self, used: dict[str, Tensor], cube: Cube) -> None:
        """Where the file has the embedding's weight and the head's bias twice, they must be the same."""
        embedding = used["bert.embeddings.tokens.weight"]
        pairs = (
            (param_names.DECODER_WEIGHT, param_names.EMBEDDING, local_slices(embedding, cube)),
            (param_names.DECODER_BIAS, param_names.MASKED_LM_BIAS, (slice(0, embedding.shape[0]),)),
        )
        with reading(self._tensors) as read:
            for one, other, part in pairs:
                if one not in self._names or other not in self._names:
                    continue
                self._check_shape(one, self._tensors[self._names[other]].shape)
                if not all(
                    _read(read, self._names[one], rows).equal(_read(read, self._names[other], rows))
                    for rows in _in_blocks(part)
                ):
                    raise ValueError(
                        f"{self.folder}: {self._own(one)} differs from {self._own(other)}, and this "
                        f"{self._architecture.title} has one tensor for both (tie_word_embeddings). Leave the head "
                        "masked_lm out (--heads of `python -m tools.convert from-hf`, or Weights.only), tie them, or, "
                        f"if the decoder has its own on purpose, say so in {CONFIG}: tie_word_embeddings = false."
                    )

    def _read(self, used: dict[str, Tensor], sources: dict[str, tuple[str, ...]], cube: Cube) -> None:
        with reading(self._tensors) as read:
            for name, parameter in used.items():
                found = [self._names[each] for each in sources[name]]
                here, part = local(parameter).detach(), local_slices(parameter, cube)
                if len(found) == 1 or name == param_names.TYPES:
                    here.copy_(_read(read, found[0], part))
                    for task in found[1:]:  # a sum with every type is one with every token
                        here.add_(_read(read, task, (slice(0, 1), *part[1:])).to(here.device, here.dtype))
                    continue
                of_turn = param_names.widths(len(found), self.config)
                for number, each in enumerate(found):
                    rows, places = param_names.rows_of_part(part[0], of_turn, number)
                    values = _read(read, each, (rows, *part[1:]))
                    here.index_copy_(0, places.to(here.device), values.to(here.device, here.dtype))


def _read(read: Read, name: str, part: tuple[slice, ...]) -> Tensor:
    """Files cannot be asked for nothing, which is what some ranks hold of a small vocabulary."""
    size = [each.stop - each.start for each in part]
    if 0 in size:
        return torch.empty(size)
    return read(name, part)


def _sampled(read: Read, name: str, shape: tuple[int, ...]) -> int:
    """A checksum of the beginnings of the first, the middle and the last row: another training changes all of them."""
    total = 0
    for row in sorted({0, shape[0] // 2, shape[0] - 1}):
        part = read(name, (slice(row, row + 1), *(slice(0, min(size, _SAMPLED)) for size in shape[1:])))
        total = zlib.crc32(part.contiguous().view(torch.uint8).numpy().tobytes(), total)
    return total


def _in_blocks(part: tuple[slice, ...]) -> Iterator[tuple[slice, ...]]:
    """Some rows after others: two tensors are never held whole to be compared."""
    rows, *columns = part
    for first in range(rows.start, rows.stop, _COMPARED):
        yield slice(first, min(first + _COMPARED, rows.stop)), *columns


_NUMBERED = re.compile(r"(?:^|\.)layer\.(\d+)\.")


def _layers_among(names: Iterable[str]) -> int:
    """Layers of which a file has tensors."""
    return max((int(match[1]) + 1 for name in names if (match := _NUMBERED.search(name))), default=0)


def _by_bert_name(
    found: dict[str, FileTensor], folder: Path, architecture: Architecture, classes: Sequence[str]
) -> tuple[dict[str, FileTensor], dict[str, str]]:
    """The tensors, fused ones in their parts; and their names by those of the library's BERT of today.

    Args:
        classes: of the library, that the folder was saved from.
    """
    today = {name: architecture.today(name) for name in sorted(found)}
    masked_lm = architecture.own_name(param_names.MASKED_LM_BIAS) in today.values()
    answers = any(name.endswith("ForQuestionAnswering") for name in classes)
    is_bare = param_names.prefix_among(today.values()) == ""
    # A classifier's dense layer is its pooler, and one of the encoder beside it is left over.
    left_over = (
        f"{architecture.prefix}pooler."
        if any(name in today.values() for name in architecture.of_texts.values())
        else None
    )
    tensors: dict[str, FileTensor] = {}
    by_name: dict[str, str] = {}
    for name, of_today in today.items():
        is_left = left_over is not None and of_today.startswith(left_over)
        known = name if is_left else param_names.canonical(of_today, architecture, is_bare=is_bare)
        held, apart = architecture.held_in(known, masked_lm=masked_lm, answers=answers)
        one = found[name]
        if known == param_names.CONVOLUTION and len(one.shape) == 3:
            one = replace(one, shape=(one.shape[0], one.shape[1] * one.shape[2]), folded=one.shape[2])
        parts = _parts(name, one, len(held)) if apart else {name: one}
        tensors |= parts
        for each, own in zip(held, parts if apart else [name] * len(held), strict=True):
            if each in by_name:
                raise ValueError(
                    f"{folder} has {by_name[each]} and {name}, which are the same tensor. Remove one of them."
                )
            by_name[each] = own
    return tensors, by_name


def _parts(name: str, whole: FileTensor, count: int) -> dict[str, FileTensor]:
    """The rows of a fused tensor in as many parts, one after another."""
    rows, *columns = whole.shape or (0,)
    if rows % count:
        raise ValueError(f"{whole.path}: {name} has shape {whole.shape}, and its rows must divide by {count}.")
    each = rows // count
    return {
        f"{name} (rows from {i * each})": replace(whole, shape=(each, *columns), stored=name, first=i * each)
        for i in range(count)
    }


def _type_of_most(found: Mapping[str, FileTensor]) -> str:
    """The type that most numbers have."""
    sizes: Counter[str] = Counter()
    for tensor in found.values():
        if tensor.dtype in FLOATS:
            sizes[FLOATS[tensor.dtype]] += prod(tensor.shape)
    return sizes.most_common(1)[0][0] if sizes else "fp32"


def _other_types(tensors: Mapping[str, FileTensor], by_name: Mapping[str, str], usual: str) -> dict[str, str]:
    """Of the tensors that are of another type than the usual one, by the library's names."""
    found = {
        name: FLOATS.get(tensors[own].dtype, usual) for name, own in by_name.items() if name not in param_names.BUFFERS
    }
    if param_names.DECODER_BIAS in found:
        found.setdefault(param_names.MASKED_LM_BIAS, found[param_names.DECODER_BIAS])
    return {name: kind for name, kind in found.items() if kind != usual}
