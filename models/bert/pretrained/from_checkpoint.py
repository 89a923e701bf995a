"""Weights of a folder that this project has written: model.json and the newest checkpoint beside it."""

from __future__ import annotations

from pathlib import Path

from torch import Tensor, nn

from models.bert.pretrained.json_files import read_object
from models.bert.pretrained.library_config import CONFIG
from models.bert.pretrained.model_folder import MODEL as MODEL_JSON
from models.bert.pretrained.model_folder import read_model_json
from models.bert.pretrained.names import layers_among, part_of
from models.bert.pretrained.weights import Weights
from tensor3d import Cube, checkpoint
from tensor3d.checkpoint.state import MODEL

CHECKPOINTS = "checkpoints"
IMPORTED = "huggingface"
"""Where an imported folder has the config.json that it was made from."""


class OwnWeights(Weights):
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
        classifier = stored.get(f"{MODEL}classifier.weight")
        self.outputs = classifier.shape[0] if classifier is not None else None
        self._names = {name.removeprefix(MODEL) for name in stored if name.startswith(MODEL)}
        if (layers := layers_among(self._names)) > self.config.layers:
            raise ValueError(
                f"{found} has {layers} layers, and the {MODEL_JSON} of {folder} says {self.config.layers}. They are of "
                "different models: get both from the same folder."
            )
        present = {part_of(name) for name in self._names}
        if lost := [head for head in self.heads if head not in present]:
            raise ValueError(f"{found} has no {lost[0]}, which the model.json of {folder} says it has.")

    def _fill(self, model: nn.Module, used: dict[str, Tensor], cube: Cube) -> dict[str, tuple[str, ...]]:
        checkpoint.load(self.checkpoint, model, None, cube, only=used)
        return {"unused": tuple(sorted(self._names - used.keys()))}
