"""Weights in a folder, of whichever kind, and how they come into a model on a cube."""

from __future__ import annotations

import copy
from abc import ABC, abstractmethod
from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from models.bert.config import BertConfig
from models.bert.huggingface.config import CONFIG, head_dropout_from
from models.bert.huggingface.param_names import LABELLED, part_of, parts_of
from tensor3d import Cube
from tensor3d.distributed.object_collectives import all_gather_object, check_copies, first_names
from tensor3d.sharding.param_layout import local

W = TypeVar("W", bound="WeightSource")

DENSE = "dense"
"""What dense layers behind pooling are called in a model, and among the heads of its weights."""


@dataclass(frozen=True, kw_only=True)
class LoadReport:
    """What a model got from a folder, and what it did not."""

    found: tuple[str, ...]
    """Heads of the model that have their weights from the folder; the encoder always has."""
    fresh: tuple[str, ...]
    """Heads and other modules of the model that did not come from the folder: as they were initialised."""
    unused: tuple[str, ...]
    """Tensors of the folder that the model has no place for, under the folder's names."""
    declined: tuple[str, ...] = ()
    """Those of `fresh` that the folder has, and that were not to be taken (`WeightSource.only`)."""
    in_part: tuple[str, ...] = ()
    """Tensors of the folder of which the first row alone is used: the others stand for tasks that nobody names."""
    rounded: tuple[str, ...] = ()
    """Tensors of the folder in fp64 that were rounded to the model's type."""
    spoilt: tuple[str, ...] = ()
    """Parameters of the model that are not finite now, as they are not in the folder: it is good for nothing."""

    def in_words(self) -> str:
        """One line for the user."""
        told = [f"loaded: {', '.join(('encoder', *self.found))}"]
        if lacking := [part for part in self.fresh if part not in self.declined]:
            told.append(f"not in the folder, so as initialised: {', '.join(lacking)}")
        if self.declined:
            told.append(f"not taken from the folder, so as initialised: {', '.join(self.declined)}")
        if self.in_part:
            told.append(f"the first row alone of: {first_names(self.in_part, 4)}")
        if self.rounded:
            told.append(f"fp64 in the folder, so rounded: {first_names(self.rounded, 4)}")
        if self.spoilt:
            told.append(f"NOT FINITE in the folder, of which the model is useless: {first_names(self.spoilt, 4)}")
        if self.unused:
            told.append(f"in the folder, but not of this model: {first_names(self.unused, 4)}")
        return "; ".join(told)


class WeightSource(ABC):
    """A folder whose weights are ready to be read; `open_weights` finds out what kind it is.

    Attributes:
        folder: it.
        config: its encoder.
        heads: those that it has the weights of, of `HEADS`, or "dense", layers behind pooling, of which a modules.json
            says more (`with_dense`).
        outputs: of the classifier, of texts or of tokens, where there is one.
        labels: names of the classes or tags, where the classifier has some.
        problem: "classify", "labels", "regress", "answer", "tag" or "rank", where there is a head for it.
        facts: what else it says: of its model.json, or found in a Hugging Face folder: "dtype", that of most numbers;
            "types", those of single tensors that are of another one, by the library's names; "classifier_dropout", of
            what its head of fine-tuning reads.
        settings: the config.json of the Hugging Face folder that it is or was.
    """

    folder: Path
    config: BertConfig
    heads: tuple[str, ...]
    outputs: int | None
    labels: tuple[str, ...] | None
    problem: str | None
    facts: dict[str, Any]
    settings: dict[str, Any] | None
    _declined: tuple[str, ...] = ()

    def only(self: W, heads: Collection[str]) -> W:
        """The same folder, of whose heads these alone are taken: the others are as if they were not there.

        Raises:
            ValueError: a head that the folder does not have.
        """
        if lost := [head for head in heads if head not in self.heads]:
            raise ValueError(
                f"{self.folder} has no head {lost[0]!r}. It has {', '.join(self.heads) or 'none'}: name some of these."
            )
        chosen = copy.copy(self)
        chosen.heads = tuple(head for head in self.heads if head in heads)
        chosen._declined = (*self._declined, *(head for head in self.heads if head not in heads))
        if set(LABELLED).isdisjoint(chosen.heads):
            chosen.outputs = chosen.labels = None
        if {*LABELLED, "answers"}.isdisjoint(chosen.heads):
            chosen.problem = None
        return chosen

    def head_dropout(self, head: str) -> float | None:
        """Of what a head of fine-tuning ("classifier", "tags", "answers") reads, in a model that begins with this
        folder. None: as the model has it.

        Raises:
            ValueError: a config.json that says no probability.
        """
        if head in self.heads and (found := self.facts.get("classifier_dropout")) is not None:
            return float(found)
        return None if self.settings is None else head_dropout_from(self.settings, self.folder / CONFIG, head)

    def fill(self, model: nn.Module, cube: Cube) -> LoadReport:
        """Gives a model the weights, in the types of its parameters; heads that the folder does not have stay.

        Every rank calls it, and reads the parts that it holds. Names and shapes are compared on every rank before
        anything is changed.

        Args:
            model: `BertModel`, or a model with one as its attribute `bert`; its modules that are none of `HEADS` stay
                as they are.

        Raises:
            ValueError: a tensor is missing or of another shape, or cannot be read, or ranks that hold copies have read
                different ones, as on machines with folders of their own; with its name, on every rank.
        """
        whole = model if hasattr(model, "bert") else nn.ModuleDict({"bert": model})
        parameters: dict[str, Tensor] = dict(whole.named_parameters())
        wanted = parts_of(whole, self.config)
        found = tuple(head for head in self.heads if head in wanted)
        for head in set(LABELLED).intersection(found):
            self._check_outputs(parameters[f"{head}.weight"])
        used = {name: tensor for name, tensor in parameters.items() if part_of(name) in (None, *found)}
        try:
            left = self._fill(whole, used, cube)
        finally:
            # Writing to the blocks of DTensors is not seen on the parameters, by which keepers of copies go.
            torch.autograd.graph.increment_version(list(used.values()))
        weighted = {part_of(name) for name in parameters}  # without a masked-LM head that is the embedding alone
        fresh = tuple(sorted(wanted.intersection(weighted) - set(found)))
        declined = tuple(part for part in fresh if part in self._declined)
        self._check_same(used, cube)
        spoilt = [name for name, parameter in used.items() if not local(parameter).detach().isfinite().all()]
        spoilt = sorted({name for each in all_gather_object(cube, spoilt) for name in each})
        return LoadReport(found=found, fresh=fresh, declined=declined, spoilt=tuple(spoilt), **left)

    def _check_same(self, used: dict[str, Tensor], cube: Cube) -> None:
        """Raises ValueError, on every rank, where ranks hold copies and have read different numbers."""
        try:
            check_copies(used, cube)
        except ValueError as problem:
            told = str(problem).partition(". ")[0]
            raise ValueError(
                f"{self.folder} is not the same for all ranks: {told}. Put one folder on all machines."
            ) from None

    def _check_outputs(self, classifier: Tensor) -> None:
        if self.outputs is not None and classifier.shape[0] != self.outputs:
            raise ValueError(
                f"{self.folder} has a classifier of {self.outputs} outputs, and the model's has {classifier.shape[0]}. "
                "Leave it out (Weights.only), so that the model's own starts as initialised, or make the model with as "
                "many."
            )

    @property
    def generator(self) -> WeightSource:
        """Of a run that learns replaced tokens, the generator beside the model: a masked language model.

        Raises:
            ValueError: there is none.
        """
        raise ValueError(
            f"{self.folder} has no generator: it is no run that has learnt replaced tokens (data.objective = "
            "'replaced-tokens'). Take the model itself."
        )

    @abstractmethod
    def _fill(self, model: nn.Module, used: dict[str, Tensor], cube: Cube) -> dict[str, tuple[str, ...]]:
        """Fills the parameters of `used`; returns fields of `LoadReport`: what of the folder has no place, and so on.

        Args:
            model: with `bert` inside.
        """
