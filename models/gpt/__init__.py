"""GPT: a causal language model with RMSNorm, rotary positions and SwiGLU, on packed batches, split three ways."""

from models.gpt.causal_batch import CausalBatch, count_targets, lay, pack_texts
from models.gpt.generate import Sampling, generate
from models.gpt.model import PRESETS, Gpt, GptConfig

__all__ = [
    "PRESETS",
    "CausalBatch",
    "Gpt",
    "GptConfig",
    "Sampling",
    "count_targets",
    "generate",
    "lay",
    "pack_texts",
]
