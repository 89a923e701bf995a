"""What of a Hugging Face folder is not taken over: files of other libraries, and tensors that are no weights."""

from __future__ import annotations

from pathlib import Path

from models.bert.pretrained.names import BUFFERS
from models.bert.pretrained.tensor_files import WEIGHT_FILES, file_tensors
from tools.corpus.tokenizers.huggingface import OF_TOKENIZERS
from tools.model_folder import CONFIG

_BUFFERS = tuple(name.removeprefix("bert.") for name in BUFFERS)


def buffers_in(folder: Path) -> list[str]:
    """Tensors that older versions of the library have stored: they count positions, and say nothing of the model."""
    return [name for name in file_tensors(folder) if name.endswith(_BUFFERS)]


def files_beside(folder: Path) -> list[str]:
    """Files and folders that are neither the model's nor its tokenizer's, such as sentence-transformers' own, which say
    how a sentence's vector is made of the hidden states. Folders have a slash; hidden ones are not looked at."""
    weights = {tensor.path.name for tensor in file_tensors(folder).values()}
    used = {CONFIG, *OF_TOKENIZERS, *weights, *(name for name in WEIGHT_FILES if name.endswith(".index.json"))}
    others = sorted(path for path in folder.iterdir() if path.name not in used and not path.name.startswith("."))
    return [f"{path.name}/" if path.is_dir() else path.name for path in others]
