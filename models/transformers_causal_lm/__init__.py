"""Causal language models of the `transformers` library as they are, on a cube: their own code around 3-D layers."""

from models.transformers_causal_lm.model import PackedCausalLM

__all__ = ["PackedCausalLM"]
