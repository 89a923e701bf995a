"""`from_pretrained`: a model with the weights of a folder."""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any, ClassVar, TypeVar

import torch
from torch import Tensor, nn

from models.bert.config import BertConfig
from models.bert.huggingface.config import CONFIG, config_from
from models.bert.huggingface.model_json import MODEL_JSON as MODEL_JSON
from models.bert.huggingface.model_json import config_from_json, read_model_json, read_object
from models.bert.huggingface.param_names import (
    GENERATOR,
    LABELLED,
    TOKENS,
    encoder_shapes,
    in_generator,
    layers_among,
    of_encoder,
    part_of,
)
from models.bert.huggingface.reader import GENERATOR_FILES, HFWeights
from models.bert.huggingface.weights import DENSE, WeightSource
from models.folder_kinds import CHECKPOINTS, instead, is_gpt_run, run_of
from tensor3d import Cube, checkpoint
from tensor3d.checkpoint.directory import PROGRESS
from tensor3d.checkpoint.state import MODEL
from tensor3d.distributed.object_collectives import run_on_all_ranks
from tensor3d.files import broken_links
from tensor3d.sharding.param_layout import local

# --- Weights of a folder that this project has written: model.json and the newest checkpoint beside it ----------------

IMPORTED = "huggingface"
"""Where an imported folder has the config.json that it was made from."""


class CheckpointWeights(WeightSource):
    """Opens a folder with a model.json.

    Args:
        folder: it.
        step: the checkpoint to read. Default: the newest.

    Raises:
        ValueError: no model.json, no checkpoint, or ones that cannot be read.
    """

    def __init__(self, folder: Path, step: Path | None = None) -> None:
        told = read_model_json(folder)
        self.folder, self.config, self.heads = folder, told.config, told.heads
        self.labels, self.problem, self.facts = told.labels, told.problem, told.facts
        imported = folder / IMPORTED / CONFIG
        self.settings = read_object(imported) if imported.exists() else None
        found = step or checkpoint.latest(folder / CHECKPOINTS)
        if found is None:
            raise ValueError(
                f"{folder} has no checkpoint yet. Wait for the first one of its run, or name another folder."
            )
        self.checkpoint = found
        stored = checkpoint.read_contents(found).tensors
        classifiers = (stored.get(f"{MODEL}{head}.weight") for head in LABELLED if head in self.heads)
        classifier = next(classifiers, None)
        self.outputs = classifier.shape[0] if classifier is not None else None
        self.shapes = {
            name.removeprefix(MODEL): tuple(tensor.shape) for name, tensor in stored.items() if name.startswith(MODEL)
        }
        """Of its parameters, by their names in the model."""
        if (layers := layers_among(self.shapes)) not in (0, self.config.layers):
            raise ValueError(
                f"{found} has {layers} layers, and the {MODEL_JSON} of {folder} says {self.config.layers}. They are of "
                "different models: get both from the same folder."
            )
        for name, shape in encoder_shapes(self.config, layers).items():
            tensor = stored.get(f"{MODEL}{name}")
            if tensor is not None and tuple(tensor.shape) != shape:
                raise ValueError(
                    f"{found}: {name} has shape {tuple(tensor.shape)}, and the {MODEL_JSON} of {folder} asks for "
                    f"{shape}. They are of different models: get both from the same folder."
                )
        if self.labels is not None and self.outputs is not None and len(self.labels) != self.outputs:
            raise ValueError(
                f"the {MODEL_JSON} of {folder} names {len(self.labels)} labels, and the classifier in {found} has "
                f"{self.outputs} outputs. They are of different models: get both from the same folder."
            )
        present = {part_of(name) for name in self.shapes}
        if self.config.masked_lm_is_embedding:
            present.add("masked_lm")
        if lost := [head for head in self.heads if head not in present]:
            raise ValueError(f"{found} has no {lost[0]}, which the model.json of {folder} says it has.")
        if DENSE in present:
            self.heads = (*self.heads, DENSE)

    def _fill(self, model: nn.Module, used: dict[str, Tensor], cube: Cube) -> dict[str, tuple[str, ...]]:
        checkpoint.load(self.checkpoint, model, None, cube, only=used)
        self._add_generators(used, cube)
        return {"unused": tuple(sorted(self.shapes.keys() - used.keys()))}

    def _add_generators(self, used: dict[str, Tensor], cube: Cube) -> None:
        """Of a run whose model's embeddings are what they differ by from its generator's, adds these."""
        stored = in_generator(TOKENS, self.config)
        if GENERATOR not in self.facts or not self.config.traits.disentangles_embeddings or TOKENS not in used:
            return
        beside = nn.Parameter(torch.empty_like(used[TOKENS]))
        checkpoint.load(self.checkpoint, _tree({stored: beside}), None, cube, only=[stored])
        with torch.no_grad():
            local(used[TOKENS]).add_(local(beside))

    @property
    def generator(self) -> WeightSource:
        return _GeneratorWeights(self) if GENERATOR in self.facts else super().generator


class _GeneratorWeights(WeightSource):
    """A masked language model out of a run's checkpoint, where its parameters have other names."""

    def __init__(self, run: CheckpointWeights) -> None:
        self.folder, self._checkpoint = run.folder, run.checkpoint
        self.config, self.heads = config_from_json(run.facts[GENERATOR]), ("masked_lm",)
        self.labels = self.problem = self.outputs = None
        self.facts = {name: value for name, value in run.facts.items() if name != GENERATOR}
        self.settings = run.settings

    def _fill(self, model: nn.Module, used: dict[str, Tensor], cube: Cube) -> dict[str, tuple[str, ...]]:
        named = {in_generator(name, self.config): parameter for name, parameter in model.named_parameters()}
        only = [in_generator(name, self.config) for name in used]
        checkpoint.load(self._checkpoint, _tree(named), None, cube, only=only)
        return {"unused": ()}


def _tree(parameters: Mapping[str, nn.Parameter]) -> nn.Module:
    """A module that has these parameters under these names."""
    root = nn.Module()
    for name, parameter in parameters.items():
        *parts, last = name.split(".")
        place = root
        for part in parts:
            if part not in place._modules:
                place.add_module(part, nn.Module())
            place = place.get_submodule(part)
        place.register_parameter(last, parameter)
    return root


# --- Finds out what kind of folder holds a model ----------------------------------------------------------------------


def open_weights(folder: Path | str) -> WeightSource:
    """A Hugging Face folder, a folder with a model.json (a run of `tools.pretrain` too), or one checkpoint inside it.

    Reads what the folder says of itself and the headers of its weights; `WeightSource.fill` reads the numbers. Nothing
    is downloaded, and nothing that a file holds is run.

    Raises:
        ValueError: it is none of these, or damaged; the message names the file.
    """
    folder = Path(folder)
    if not folder.is_dir():
        kind = "is a file" if folder.exists() else "is not there"
        raise ValueError(
            f"{folder.absolute()} {kind}: a model is a folder. Nothing is downloaded; get the folder first."
        )
    if (folder / MODEL_JSON).exists():
        return CheckpointWeights(folder)
    root = model_folder_of(folder)
    if (folder / PROGRESS).exists():
        if root == folder:
            if is_gpt_run(run_of(folder)):
                raise ValueError(f"{folder} is no checkpoint of a BERT.{instead(folder)}")
            raise ValueError(
                f"{folder} is a checkpoint, and the folder above it has no {MODEL_JSON} that says what model it is of. "
                "Runs write it since models can be taken from them; keep a checkpoint in the folder of its run."
            )
        return CheckpointWeights(root, folder)
    if (folder / CONFIG).exists():
        return HFWeights(folder)
    if folder.absolute().name == CHECKPOINTS and root != folder:
        return CheckpointWeights(root)
    if inside := sorted(child.name for child in folder.iterdir() if (child / MODEL_JSON).exists()):
        raise ValueError(f"{folder} is no model, but holds some: {', '.join(inside)}. Name one: {folder / inside[0]}.")
    raise ValueError(
        f"{folder} is no folder of a model: it has neither {MODEL_JSON} (a model of this project, a run) nor {CONFIG} "
        f"(a Hugging Face model).{broken_links(folder, (MODEL_JSON, CONFIG)) or instead(folder)}"
    )


def open_generator(folder: Path | str) -> WeightSource:
    """The generator that learnt replaced tokens beside a model: of the folder of a published DeBERTa the files that it
    has of it, else what `open_weights` finds.

    Raises:
        ValueError: as of `open_weights`.
    """
    folder = Path(folder)
    if (folder / CONFIG).exists() and (folder / GENERATOR_FILES[1]).exists():
        return HFWeights(folder, generator=True)
    return open_weights(folder)


def read_model_config(folder: Path | str) -> BertConfig:
    """The encoder of a folder that `open_weights` takes, by what the folder says of itself: its weights need not be
    there.

    Raises:
        ValueError: it says nothing of itself, or of a model that is not here; the message names the file.
    """
    root = model_folder_of(Path(folder))
    if (root / MODEL_JSON).exists():
        return read_model_json(root).config
    if (root / CONFIG).exists():
        return config_from(read_object(root / CONFIG), root / CONFIG)
    raise ValueError(
        f"{root.absolute()} is no folder of a model: it has neither {MODEL_JSON} (a model of this project, a run) nor "
        f"{CONFIG} (a Hugging Face model).{instead(root)}"
    )


def model_folder_of(path: Path) -> Path:
    """The folder of the model that a path means: itself, or the one with the model.json that this checkpoint, or this
    folder of checkpoints, belongs to.

    Checkpoints lie in the folder "checkpoints" of their model, or beside its model.json.
    """
    full = path.absolute()
    if (path / MODEL_JSON).exists() or (path / CONFIG).exists():
        return path
    if full.name == CHECKPOINTS:
        above = full.parent
    elif full.parent.name == CHECKPOINTS:
        above = full.parents[1]
    elif (path / PROGRESS).exists():
        above = full.parent
    else:
        return path
    return above if (above / MODEL_JSON).exists() else path


# --- `from_pretrained` ------------------------------------------------------------------------------------------------

M = TypeVar("M", bound=nn.Module)


class Pretrained(nn.Module):
    """A module whose `__init__` takes a config and a cube."""

    head: ClassVar[str | None] = None
    """What of fine-tuning stands on the encoder."""

    @classmethod
    def from_pretrained(cls: type[M], folder: Path | str, cube: Cube, **options: Any) -> M:
        """The model with the weights of a folder that `open_weights` takes. Every rank calls it at the same time.

        What the folder does not have is initialised, after `cube.manual_seed`, and a warning says so.

        Args:
            options: further arguments of the class.

        Raises:
            ValueError: what `open_weights` or `WeightSource.fill` refuse, on every rank.
        """
        weights = run_on_all_ranks(cube, lambda: open_weights(Path(folder)))
        head: str | None = cls.head  # type: ignore[attr-defined]
        of_head = {} if head is None else {"dropout": weights.head_dropout(head)}
        return made(cls, weights, cube, {**of_head, **options})


class PretrainedClassifier(nn.Module):
    """As `Pretrained`, for a model that has a number of outputs."""

    head: ClassVar[str] = "classifier"
    """Whose they are."""

    @classmethod
    def from_pretrained(cls: type[M], folder: Path | str, cube: Cube, outputs: int | None = None, **options: Any) -> M:
        """The model with the weights of a folder that `open_weights` takes. Every rank calls it at the same time.

        What the folder does not have is initialised, after `cube.manual_seed`, and a warning says so. So is the
        classifier where the folder's has another number of outputs.

        Args:
            outputs: classes, or 1 for regression. Default: as many as the folder's classifier has.
            options: further arguments of the class.

        Raises:
            ValueError: what `open_weights` or `WeightSource.fill` refuse, or a folder without classifier and no
                `outputs`; on every rank.
        """
        weights = run_on_all_ranks(cube, lambda: open_weights(Path(folder)))
        head: str = cls.head  # type: ignore[attr-defined]
        found = weights.outputs if head in weights.heads else None
        if outputs is None:
            if found is None:
                raise ValueError(f"{folder} has no {head}. Say how many outputs the new one has: outputs=...")
            outputs = found
        elif found not in (None, outputs):
            weights = weights.only([each for each in weights.heads if each != head])
        options = {"dropout": weights.head_dropout(head), **options, "outputs": outputs}
        return made(cls, weights, cube, options)


def made(kind: type[M], weights: WeightSource, cube: Cube, options: dict[str, Any]) -> M:
    """A model of this kind, filled. Warns on rank 0 of what the weights lack, and of what of their encoder is lost."""
    model = kind(config=weights.config, cube=cube, **options)
    filled = weights.fill(model, cube)
    if (filled.fresh or any(map(of_encoder, filled.unused))) and cube.rank == 0:
        warnings.warn(f"{weights.folder}: {filled.in_words()}.", stacklevel=3)
    return model
