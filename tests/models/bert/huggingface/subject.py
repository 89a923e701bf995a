"""Small models of the transformers library, and folders of all the kinds in which such models are found."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import save_file
from torch import Tensor, nn

from models.bert import BertForPreTraining, EncodedText
from models.bert.huggingface.architectures import ARCHITECTURES
from models.bert.huggingface.param_names import library_names, parted
from tensor3d import Cube, checkpoint
from tensor3d.parallelize import full_tensor
from tests.models.toy import CAPACITY
from tests.single_device_reference import error

ODD = 67
# What some configurations call what the others call so.
_OWN_NAMES = {
    "distilbert": {
        "intermediate_size": "hidden_dim",
        "hidden_dropout_prob": "dropout",
        "attention_probs_dropout_prob": "attention_dropout",
        "hidden_act": "activation",
    },
    "modernbert": {
        "hidden_dropout_prob": "embedding_dropout",
        "attention_probs_dropout_prob": "attention_dropout",
        "hidden_act": "hidden_activation",
        "layer_norm_eps": "norm_eps",
    },
    "gemma3_text": {
        "attention_probs_dropout_prob": "attention_dropout",
        "hidden_act": "hidden_activation",
        "layer_norm_eps": "rms_norm_eps",
    },
    "qwen3": {"attention_probs_dropout_prob": "attention_dropout", "layer_norm_eps": "rms_norm_eps"},
}


def original(kind: str = "BertForPreTraining", **changes: Any) -> Any:
    """A model of the library with random values in every vector too, in fp32 and without dropout.

    Args:
        changes: settings by BERT's names.
    """
    import transformers

    settings = {
        "vocab_size": ODD,
        "hidden_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 8,
        "intermediate_size": 96,
        "max_position_embeddings": CAPACITY,
        "hidden_dropout_prob": 0.0,
        "attention_probs_dropout_prob": 0.0,
        "initializer_range": 0.15,
    }
    torch.manual_seed(5)
    made, settings = getattr(transformers, kind), {**settings, **changes}
    own = _OWN_NAMES.get(made.config_class.model_type, {})
    settings = {own.get(name, name): value for name, value in settings.items()}
    model = made(made.config_class(**settings))
    for parameter in model.parameters():
        parameter.data += 0.1 * torch.randn(parameter.shape)
    return model.eval()


def tensors_of(model: Any) -> dict[str, Tensor]:
    """As the library saves them: the tied decoder once."""
    tied = tied_keys(model)
    return {name: value.clone() for name, value in model.state_dict().items() if name not in tied}


def tied_keys(model: Any) -> set[str]:
    """Of tensors that are another one's."""
    return set(getattr(model, "_tied_weights_keys", None) or ()) if model.config.tie_word_embeddings else set()


def settings_of(model: Any) -> dict[str, Any]:
    """What the library writes into config.json."""
    settings: dict[str, Any] = json.loads(model.config.to_json_string(use_diff=True))
    return {**settings, "architectures": [type(model).__name__]}


def write(
    folder: Path, tensors: Mapping[str, Tensor], settings: Mapping[str, Any], file: str = "model.safetensors"
) -> Path:
    """A folder with these tensors in a file of this name, or, of an index, in three files."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(settings))
    if not file.endswith(".index.json"):
        put(folder / file, tensors)
        return folder
    stem, kind = file.removesuffix(".index.json").split(".")
    names, places = sorted(tensors), {}
    for number in range(3):
        shard = f"{stem}-{number + 1:05d}-of-00003.{kind}"
        put(folder / shard, {name: tensors[name] for name in names[number::3]})
        places |= dict.fromkeys(names[number::3], shard)
    (folder / file).write_text(json.dumps({"metadata": {"total_size": 1}, "weight_map": places}))
    return folder


def put(path: Path, tensors: Mapping[str, Tensor]) -> None:
    if path.suffix == ".safetensors":
        save_file(dict(tensors), path, metadata={"format": "pt"})
    else:
        torch.save(dict(tensors), path)


def saved(folder: Path, kind: str = "BertForPreTraining", **changes: Any) -> Any:
    """The model, and a folder of it."""
    model = original(kind, **changes)
    # Older versions of the library write half of what EmbeddingGemma's window was, which they would halve again.
    again = {name: changes[name] for name in ("sliding_window",) if name in changes}
    write(folder, tensors_of(model), settings_of(model) | again)
    return model


def values(model: nn.Module, cube: Cube | None = None) -> dict[str, Tensor]:
    """Logical tensors by name, of a model on one device or on a cube."""
    cube = cube or Cube.single()
    return {name: full_tensor(parameter.detach(), cube) for name, parameter in model.named_parameters()}


def same(ours: Mapping[str, Tensor], theirs: Mapping[str, Tensor]) -> bool:
    """The same names and bits."""
    return ours.keys() == theirs.keys() and all(torch.equal(ours[name], theirs[name]) for name in ours)


def loaded(folder: Path, kind: Any = BertForPreTraining) -> Any:
    """On one device."""
    cube = Cube.single()
    cube.manual_seed(3)
    return kind.from_pretrained(folder, cube)


def checkpointed(model: nn.Module, cube: Cube, folder: Path, step: int = 1) -> Path:
    optimizer = torch.optim.AdamW(model.parameters())
    return checkpoint.save(folder / "checkpoints", step, model, optimizer, cube, {})


def texts(vocab: int, count: int = 5) -> list[EncodedText]:
    random = np.random.default_rng(1)
    lengths = random.integers(2, 20, count)
    return [EncodedText(ids=random.integers(0, vocab, n), types=np.arange(n) * 2 // n) for n in lengths.tolist()]


def gradients(model: nn.Module, cube: Cube, *, heads: tuple[str, ...] = ()) -> dict[str, Tensor]:
    """Under the library's names, of a model with these heads, and in its order of rows."""
    config: Any = model.config
    kind, found = ARCHITECTURES[config.family], {}
    whole = model if hasattr(model, "bert") else nn.ModuleDict({"bert": model})
    for name, parameter in whole.named_parameters():
        if parameter.grad is not None:
            gradient, targets = full_tensor(parameter.grad, cube), library_names(name)
            for each, part in zip(targets, parted(gradient, len(targets), config), strict=True):
                own = kind.own_name(each, heads)  # of several, where they are fused there
                found[own] = torch.cat([found[own], part]) if own in found else part
    return found


def gradient_errors(ours: Mapping[str, Tensor], wanted: Mapping[str, Tensor]) -> dict[str, float]:
    """Of each tensor of the library that has a gradient."""
    errors = {}
    for name, gradient in ours.items():
        beside = wanted.get(f"{name.removesuffix('.bias')}.weight", wanted[name]).abs().max()
        if wanted[name].abs().max() < 1e-4 * beside:
            # Shifts all scores of a row alike, so its gradient is zero but for rounding: measured by the weight's.
            errors[name] = float(torch.maximum(gradient.abs().max(), wanted[name].abs().max()) / beside)
        else:
            errors[name] = error(gradient, wanted[name].reshape(gradient.shape), name)
    return errors


def theirs(model: Any, text: EncodedText) -> Any:
    with torch.no_grad():
        return model(input_ids=torch.tensor(text.ids[None]), token_type_ids=torch.tensor(text.types[None]))
