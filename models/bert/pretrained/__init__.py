"""Weights in and out: Hugging Face folders, folders of this project, and `from_pretrained`.

weights = open_weights(folder)                  what kind of model it is; nothing large is read
told = weights.fill(model, cube).in_words()     every rank reads its part
export_huggingface(model, cube, folder)         config.json and model.safetensors
"""

from models.bert.pretrained.export import Exported, export_huggingface
from models.bert.pretrained.loading import Pretrained, PretrainedClassifier
from models.bert.pretrained.model_folder import ModelJson, read_model_json, write_model_json
from models.bert.pretrained.names import HEADS
from models.bert.pretrained.opening import model_folder_of, open_weights
from models.bert.pretrained.weights import Filled, Weights

__all__ = [
    "HEADS",
    "Exported",
    "Filled",
    "ModelJson",
    "Pretrained",
    "PretrainedClassifier",
    "Weights",
    "export_huggingface",
    "model_folder_of",
    "open_weights",
    "read_model_json",
    "write_model_json",
]
