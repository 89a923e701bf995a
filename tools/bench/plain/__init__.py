"""BERT in plain PyTorch: what PyTorch's own parallelism splits, to be compared with `models.bert` on a cube."""

from tools.bench.plain.model import PlainBert, PlainLayer
from tools.bench.plain.weights import copy_weights

__all__ = ["PlainBert", "PlainLayer", "copy_weights"]
