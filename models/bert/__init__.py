"""BERT (Devlin et al. 2018) on packed, unpadded batches, split three ways."""

from models.bert.config import PRESETS, BertConfig
from models.bert.model import BertForPreTraining, BertModel, PreTrainingOutput

__all__ = ["PRESETS", "BertConfig", "BertForPreTraining", "BertModel", "PreTrainingOutput"]
