"""`from_pretrained`: a model with the weights of a folder."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any, TypeVar

from torch import nn

from models.bert.pretrained.names import of_encoder
from models.bert.pretrained.opening import open_weights
from models.bert.pretrained.weights import Weights
from tensor3d import Cube
from tensor3d.agree import on_every_rank

M = TypeVar("M", bound=nn.Module)


class Pretrained(nn.Module):
    """A module whose `__init__` takes a config and a cube."""

    @classmethod
    def from_pretrained(cls: type[M], folder: Path | str, cube: Cube, **options: Any) -> M:
        """The model with the weights of a folder that `open_weights` takes. Every rank calls it at the same time.

        What the folder does not have is initialised, after `cube.manual_seed`, and a warning says so.

        Args:
            options: further arguments of the class.

        Raises:
            ValueError: what `open_weights` or `Weights.fill` refuse, on every rank.
        """
        weights = on_every_rank(cube, lambda: open_weights(Path(folder)))
        return made(cls, weights, cube, options)


class PretrainedClassifier(nn.Module):
    """As `Pretrained`, for a model that has a number of outputs."""

    @classmethod
    def from_pretrained(cls: type[M], folder: Path | str, cube: Cube, outputs: int | None = None, **options: Any) -> M:
        """The model with the weights of a folder that `open_weights` takes. Every rank calls it at the same time.

        What the folder does not have is initialised, after `cube.manual_seed`, and a warning says so. So is the
        classifier where the folder's has another number of outputs.

        Args:
            outputs: classes, or 1 for regression. Default: as many as the folder's classifier has.
            options: further arguments of the class.

        Raises:
            ValueError: what `open_weights` or `Weights.fill` refuse, or a folder without classifier and no `outputs`;
                on every rank.
        """
        weights = on_every_rank(cube, lambda: open_weights(Path(folder)))
        if outputs is None:
            if weights.outputs is None:
                raise ValueError(f"{folder} has no classifier. Say how many outputs the new one has: outputs=...")
            outputs = weights.outputs
        elif weights.outputs not in (None, outputs):
            weights = weights.only([head for head in weights.heads if head != "classifier"])
        options = {"dropout": weights.facts.get("classifier_dropout"), **options, "outputs": outputs}
        return made(cls, weights, cube, options)


def made(kind: type[M], weights: Weights, cube: Cube, options: dict[str, Any]) -> M:
    """A model of this kind, filled. Warns on rank 0 of what the weights lack, and of what of their encoder is lost."""
    model = kind(config=weights.config, cube=cube, **options)
    filled = weights.fill(model, cube)
    if (filled.fresh or any(map(of_encoder, filled.unused))) and cube.rank == 0:
        warnings.warn(f"{weights.folder}: {filled.in_words()}.", stacklevel=3)
    return model
