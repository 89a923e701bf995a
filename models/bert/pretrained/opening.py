"""Finds out what kind of folder holds a model."""

from __future__ import annotations

from pathlib import Path

from models.bert.pretrained.from_checkpoint import CHECKPOINTS, OwnWeights
from models.bert.pretrained.from_library import LibraryWeights
from models.bert.pretrained.library_config import CONFIG
from models.bert.pretrained.model_folder import MODEL
from models.bert.pretrained.weights import Weights
from tensor3d.checkpoint.folders import PROGRESS


def open_weights(folder: Path | str) -> Weights:
    """A Hugging Face folder, a folder with a model.json (a run of `tools.pretrain` too), or one checkpoint inside it.

    Reads what the folder says of itself and the headers of its weights; `Weights.fill` reads the numbers. Nothing is
    downloaded, and nothing that a file holds is run.

    Raises:
        ValueError: it is none of these, or damaged; the message names the file.
    """
    folder = Path(folder)
    if not folder.is_dir():
        kind = "is a file" if folder.exists() else "is not there"
        raise ValueError(f"{folder} {kind}: a model is a folder. Nothing is downloaded; get the folder first.")
    if (folder / MODEL).exists():
        return OwnWeights(folder)
    root = model_folder_of(folder)
    if (folder / PROGRESS).exists():
        if root == folder:
            raise ValueError(
                f"{folder} is a checkpoint, and the folder above it has no {MODEL} that says what model it is of. Runs "
                "write it since models can be taken from them; keep a checkpoint in the folder of its run."
            )
        return OwnWeights(root, folder)
    if (folder / CONFIG).exists():
        return LibraryWeights(folder)
    if folder.absolute().name == CHECKPOINTS and root != folder:
        return OwnWeights(root)
    if inside := sorted(child.name for child in folder.iterdir() if (child / MODEL).exists()):
        raise ValueError(f"{folder} is no model, but holds some: {', '.join(inside)}. Name one: {folder / inside[0]}.")
    raise ValueError(
        f"{folder} is no folder of a model: it has neither {MODEL} (a model of this project, a run) nor {CONFIG} "
        "(a Hugging Face model)."
    )


def model_folder_of(path: Path) -> Path:
    """The folder of the model that a path means: itself, or the one with the model.json that this checkpoint, or this
    folder of checkpoints, belongs to.

    Checkpoints lie in the folder "checkpoints" of their model, or beside its model.json.
    """
    full = path.absolute()
    if (path / MODEL).exists() or (path / CONFIG).exists():
        return path
    if full.name == CHECKPOINTS:
        above = full.parent
    elif full.parent.name == CHECKPOINTS:
        above = full.parents[1]
    elif (path / PROGRESS).exists():
        above = full.parent
    else:
        return path
    return above if (above / MODEL).exists() else path
