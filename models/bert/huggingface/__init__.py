"""Weights in and out: Hugging Face folders, folders of this project, and `from_pretrained`.

weights = open_weights(folder)                  what kind of model it is; nothing large is read
told = weights.fill(model, cube).in_words()     every rank reads its part
export_huggingface(model, cube, folder)         config.json and model.safetensors
"""

from models.bert.huggingface.export import ExportReport, export_huggingface
from models.bert.huggingface.from_pretrained import (
    Pretrained,
    PretrainedClassifier,
    model_folder_of,
    open_generator,
    open_weights,
    read_model_config,
)
from models.bert.huggingface.model_json import ModelJson, read_model_json, write_model_json
from models.bert.huggingface.param_names import GENERATOR, HEADS
from models.bert.huggingface.weights import LoadReport, WeightSource

__all__ = [
    "GENERATOR",
    "HEADS",
    "ExportReport",
    "LoadReport",
    "ModelJson",
    "Pretrained",
    "PretrainedClassifier",
    "WeightSource",
    "export_huggingface",
    "model_folder_of",
    "open_generator",
    "open_weights",
    "read_model_config",
    "read_model_json",
    "write_model_json",
]
