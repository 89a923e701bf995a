"""The BERT of the `transformers` library as it is, on a cube: a lesson in adapting a model that one does not own."""

from models.transformers_bert.adapter import plan_for
from models.transformers_bert.model import Encoded, PackedBert

__all__ = ["Encoded", "PackedBert", "plan_for"]
