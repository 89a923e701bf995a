"""A model on a cube as a Hugging Face folder: config.json and model.safetensors, one tensor at a time."""

from __future__ import annotations

import json
import struct
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from math import prod
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from models.bert.config import BertConfig
from models.bert.families import FAMILIES, told
from models.bert.huggingface.architectures import ARCHITECTURES, CLASSES, Architecture
from models.bert.huggingface.config import CONFIG, labels_from, says_head_dropout, settings_of
from models.bert.huggingface.model_json import replacing, write_object
from models.bert.huggingface.param_names import (
    CONVOLUTION,
    DECODER_BIAS,
    HEADS,
    LABELLED,
    library_names,
    part_of,
    part_sizes,
    parted,
    parts_of,
)
from tensor3d import Cube
from tensor3d.checkpoint.format import NAME_OF, write_parts
from tensor3d.distributed.object_collectives import run_on_all_ranks
from tensor3d.parallelize import full_tensor

WEIGHTS = "model.safetensors"
_EPS_OF_DISTILBERT = 1e-12
_TYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
_NO_POOLER = (
    "the model has no pooler, and the library's {} makes a new one unless it is loaded with add_pooling_layer=False; "
    "last_hidden_state does not depend on it"
)


@dataclass(frozen=True, kw_only=True)
class ExportReport:
    """A folder that was written."""

    folder: Path
    architecture: str
    """The library's class that it is for."""
    note: str | None
    """What has to be said to whoever loads it."""


def export_huggingface(
    model: nn.Module,
    cube: Cube,
    folder: Path,
    *,
    heads: Collection[str] | None = None,
    settings: Mapping[str, Any] | None = None,
    labels: Sequence[str] | None = None,
    problem: str | None = None,
    dtype: str = "fp32",
    types: Mapping[str, str] | None = None,
) -> ExportReport:
    """Writes what `transformers` loads without a missing or an unexpected tensor. Every rank calls it.

    Tensors are made whole one after another; rank 0 writes them. A tied weight of the masked-LM head is written once;
    where it has one of its own, the bias is written under both names that versions of the library look for.

    Args:
        model: `BertModel`, or a model with one as its attribute `bert`; its modules that are none of `HEADS` are left
            out, and the note says so.
        folder: made where it is not there; other files in it stay.
        heads: those to write, of the model's. Default: all, but for a pooler that the others do not use.
        settings: a config.json that was imported: what it says besides is kept.
        labels: names of the outputs of a classifier, of texts or of tokens. Default: those of `settings`, else LABEL_0,
            LABEL_1, ...
        problem: what the classifier of texts is for, "classify", "labels" (several may hold at once), "regress" or
            "rank" (a score of a query and a passage).
        dtype: of the weights: "fp32", "bf16" or "fp16".
        types: of single tensors that are of another one, by the library's names: `facts["types"]` of a folder that was
            imported. "fp64" is written as fp32, to which it has been rounded on the way in.

    Raises:
        ValueError: a model that the library does not have, heads that none of its classes has together, a folder with
            a model in it, weights too large for the type, or a file that cannot be written; on every rank.
    """
    whole = model if hasattr(model, "bert") else nn.ModuleDict({"bert": model})
    plan = run_on_all_ranks(cube, lambda: _Plan(whole, heads, dtype, types or {}, folder))
    config = run_on_all_ranks(cube, lambda: plan.settings(settings, labels, problem))
    run_on_all_ranks(cube, lambda: plan.write(config, cube))
    return ExportReport(folder=folder, architecture=plan.architecture, note=plan.note)


class _Plan:
    """What is to be written, known on every rank before anything is."""

    def __init__(
        self, model: nn.Module, heads: Collection[str] | None, dtype: str, types: Mapping[str, str], folder: Path
    ) -> None:
        self.model, self.folder = model, folder
        self.config: BertConfig = model.get_submodule("bert").config  # type: ignore[assignment]
        if dtype not in _TYPES:
            raise ValueError(f"dtype must be one of {', '.join(_TYPES)}. Got {dtype!r}.")
        self.dtype, self._types = dtype, {name: "fp32" if kind == "fp64" else kind for name, kind in types.items()}
        if unknown := [(name, kind) for name, kind in self._types.items() if kind not in _TYPES]:
            name, kind = unknown[0]
            raise ValueError(f"types must be of {', '.join(_TYPES)}. Got {kind!r} for {name}.")
        _check_encoder(self.config)
        for name in (CONFIG, WEIGHTS, f"{WEIGHTS}.index.json"):
            if (folder / name).exists():
                raise ValueError(f"{folder} has a {name} already, which is not overwritten. Name another folder.")
        parts = frozenset(parts_of(model, self.config))
        self._kind = ARCHITECTURES[self.config.family]
        present = parts & frozenset(HEADS)
        lost = frozenset({"classifier"} if self._kind.scores and self.config.before_classifier is not None else ())
        if lost & present & (present if heads is None else frozenset(heads)):
            raise ValueError(
                f"the library's {self._kind.class_of(lost)} is a linear without a bias of the last token that is "
                f'no padding (pooling="score"). This model has pooling="{self.config.pooling}", and a dense layer '
                "(pooler) before it, for which there is no place. Fine-tune it from a Hugging Face folder, whose "
                "new classifiers are as the library's."
            )
        self.heads = _chosen(present, heads, self._kind, lost)
        self._left_out = sorted(parts - self.heads) if heads is None else []
        self.architecture = self._kind.class_of(self.heads)
        self.parameters = {
            name: parameter.detach()
            for name, parameter in model.named_parameters()
            if part_of(name) in (None, *self.heads)
        }
        # Raises for one that the library does not have.
        self._files = [(name, library_names(name)) for name in self.parameters]
        if "masked_lm.projection.weight" in self.parameters and self._kind.second_bias:
            self._files.append(("masked_lm.projection.bias", (DECODER_BIAS,)))

    @property
    def note(self) -> str | None:
        told = []
        if self._left_out:
            lost = ", ".join(self._left_out)
            told.append(f"{lost} was left out, which the library's {self.architecture} does not have")
        if not self.heads and frozenset({"pooler"}) in self._kind.heads:
            told.append(_NO_POOLER.format(self.architecture))
        if self.heads in self._kind.own_classes:
            told.append(
                f"replaced_tokens is written as its authors' files have it; {self.architecture} does not read it"
            )
        if self.config.encoder == "modern":
            told += _dropout_lost(self.config)
        if "classifier" in self.heads and self._kind.scores and self.config.pad_id is None:
            told.append(f"{CONFIG} says no pad_token_id, without which {self.architecture} takes one text at a time")
        if self.config.traits.may_be_causal and not self.config.causal:
            told.append(f"by is_causal = false of {CONFIG} the library from 5.2 on sees both sides; older ones do not")
        if not self.heads.isdisjoint(LABELLED) and not says_head_dropout(self._kind, self.architecture):
            dropped = self._dropout()
            if dropped != self.config.dropout:
                told.append(f"{CONFIG} says nothing of dropout {dropped:g} of what the head reads")
        return "; ".join(told) or None

    def settings(
        self, found: Mapping[str, Any] | None, labels: Sequence[str] | None, problem: str | None
    ) -> dict[str, Any]:
        """The config.json."""
        head = next((head for head in LABELLED if head in self.heads), None)
        if head is None:
            dropped = self._dropout() if "answers" in self.heads else None
            return settings_of(self.config, self.architecture, self.dtype, found=found, answers_dropout=dropped)
        if head == "tags":
            problem = None  # the library asks for none
        elif problem not in (None, "classify", "labels", "regress", "rank"):
            raise ValueError(
                f'problem of a classifier must be "classify", "labels", "regress", "rank" or None. Got {problem!r}.'
            )
        outputs = self.parameters[f"{head}.weight"].shape[0]
        if labels is None:
            labels = _labels_found(found or {}, self.architecture, outputs)
        if len(labels) != outputs or len(set(labels)) != outputs:
            raise ValueError(f"labels must be {outputs} different names, one for each output. Got {list(labels)}.")
        dropout = self._dropout()
        return settings_of(
            self.config,
            self.architecture,
            self.dtype,
            found=found,
            labels=labels,
            problem=problem,
            classifier_dropout=None if dropout == self.config.dropout else dropout,
        )

    def _dropout(self) -> float:
        """Of what the head of fine-tuning reads."""
        found: float = getattr(getattr(self.model, "dropout", None), "p", self.config.dropout)
        return found

    def write(self, config: Mapping[str, Any], cube: Cube) -> None:
        """All ranks gather each tensor, whatever befalls rank 0: the others would wait for it."""
        pieces = self._pieces(cube)
        try:
            if cube.rank == 0:
                self._write_files(config, pieces)
        finally:
            for _ in pieces:
                pass

    def _write_files(self, config: Mapping[str, Any], pieces: Iterator[memoryview]) -> None:
        self.folder.mkdir(parents=True, exist_ok=True)
        with replacing(self.folder / WEIGHTS) as file:
            write_parts(file, chain([memoryview(self._header())], pieces))
        write_object(self.folder / CONFIG, config)  # last: with it the folder is a model

    def _targets(self, names: Sequence[str]) -> tuple[str, ...]:
        """As this architecture names tensors of BERT: those of a bare encoder without the prefix."""
        own = (self._kind.own_name(each, self.heads) for each in names)
        is_bare = self.architecture.endswith("Model") and self.heads not in self._kind.own_classes
        return tuple(each.removeprefix(self._kind.prefix) if is_bare else each for each in own)

    def _header(self) -> bytes:
        """The beginning of a safetensors file: its length, then JSON, filled up with blanks to a multiple of 8."""
        content: dict[str, Any] = {"__metadata__": {"format": "pt"}}
        start = 0
        for name, names in self._files:
            parameter, targets = self.parameters[name], self._targets(names)
            sizes = part_sizes(parameter.shape[0], len(targets), self.config)
            for target, known, size in zip(targets, names, sizes, strict=True):
                kind, shape = self._type_of(known), (size, *parameter.shape[1:])
                if known == CONVOLUTION and self.config.conv_kernel is not None:
                    shape = (size, self.config.hidden, self.config.conv_kernel)
                stop = start + prod(shape) * kind.itemsize
                before = content.get(target)  # what is fused there comes part by part
                first, rows = (before["data_offsets"][0], before["shape"][0]) if before else (start, 0)
                content[target] = {
                    "dtype": NAME_OF[kind],
                    "shape": (rows + shape[0], *shape[1:]),
                    "data_offsets": (first, stop),
                }
                start = stop
        text = json.dumps(content, separators=(",", ":")).encode()
        text += b" " * (-len(text) % 8)
        return struct.pack("<Q", len(text)) + text

    def _pieces(self, cube: Cube) -> Iterator[memoryview]:
        """The data of the file, tensor by tensor, on every rank."""
        for name, targets in self._files:
            whole = full_tensor(self.parameters[name], cube).cpu()
            for target, part in zip(targets, parted(whole, len(targets), self.config), strict=True):
                yield self._bytes(name, part, self._type_of(target))

    def _type_of(self, target: str) -> torch.dtype:
        return _TYPES[self._types.get(target, self.dtype)]

    def _bytes(self, name: str, part: Tensor, kind: torch.dtype) -> memoryview:
        values = part.to(kind).contiguous()
        if not values.isfinite().all() and part.isfinite().all():
            told = next(each for each, known in _TYPES.items() if known == kind)
            raise ValueError(f"{name} has values that {told} cannot hold. Export as fp32 or bf16.")
        return memoryview(values.view(-1).view(torch.uint8).numpy())  # type: ignore[arg-type]  # numpy's stubs


def _labels_found(found: Mapping[str, Any], architecture: str, outputs: int) -> Sequence[str]:
    """Those of a config.json that was imported, if it is of the same class and they are as many."""
    if architecture in (found.get("architectures") or ()) and found.get("id2label"):
        labels = labels_from(found, Path(CONFIG))
        if len(labels) == outputs:
            return labels
    return [f"LABEL_{i}" for i in range(outputs)]


def _dropout_lost(config: BertConfig) -> list[str]:
    """What the config.json of a modern encoder cannot say of the dropout of training here."""
    told = []
    if config.dropout:
        told.append(f"{CONFIG} says nothing of dropout {config.dropout:g}, of embeddings and MLPs' outputs")
    if config.traits.rms_norm:
        if config.out_dropout != config.dropout:
            told.append(f"{CONFIG} says nothing of dropout {config.out_dropout:g}, of attention's output")
    elif config.attention_dropout != config.out_dropout:
        told.append(
            f"attention_dropout of {CONFIG} is 0, for it is that of attention's weights and of its output: here they "
            f"had {config.attention_dropout:g} and {config.out_dropout:g}"
        )
    return told


def _check_encoder(config: BertConfig) -> None:
    if "classic" not in config.traits.encoders:
        return
    norm = "pre" if config.traits.norms == ("pre",) else "post"
    for field, value, needed, reason in (
        ("encoder", config.encoder, "classic", "rotary positions, a gated MLP and no biases"),
        ("norm", config.norm, norm, "norms before its blocks"),
    ):
        if value != needed:
            alone = (name for name, each in FAMILIES.items() if each.norms == ("pre",) or each.encoders == ("modern",))
            raise ValueError(
                f'Hugging Face\'s {ARCHITECTURES[config.family].title} has no {field}="{value}": this model has '
                f'{reason}. Only encoder="classic" with norm="post" and the families {told(alone, ", ")} can be '
                "exported."
            )
    if config.family == "distilbert" and config.eps != _EPS_OF_DISTILBERT:
        raise ValueError(
            f"the library's DistilBERT adds {_EPS_OF_DISTILBERT} to LayerNorm's variances. Got eps={config.eps}, which "
            "it would not compute with. Export a model with its eps."
        )


def _chosen(
    present: frozenset[str], heads: Collection[str] | None, kind: Architecture, lost: frozenset[str]
) -> frozenset[str]:
    """The heads to write; messages advise none that are `lost`. Older files have a pooler beside heads that do not use
    it, and no class has them together; after pre-training here there is a head for next sentences, which few have."""
    chosen = present if heads is None else frozenset(heads)
    if strange := sorted(chosen - present):
        raise ValueError(f"the model has no head {strange[0]!r}. It has {_told(present)}.")
    for spare in ("next_sentence", "pooler", "prediction_head"):
        if heads is None and chosen not in kind.heads and (spare == "pooler" or not FAMILIES[kind.name].next_sentence):
            chosen = chosen - {spare}
    if chosen not in kind.heads:
        known = "; ".join(_told(each) for each in CLASSES if each in kind.heads and each <= present - lost)
        raise ValueError(
            f"no {kind.title} of the library has exactly the heads {_told(chosen)}. Export one of: {known}."
        )
    return chosen


def _told(heads: Collection[str]) -> str:
    return " and ".join(head for head in HEADS if head in heads) or "none"
