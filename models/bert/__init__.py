"""BERT (Devlin et al. 2018) on packed, unpadded batches, split three ways."""

from models.bert.config import PRESETS, BertConfig
from models.bert.electra import ElectraForPreTraining, ReplacedTokens, ReplacedTokensOutput
from models.bert.embedding import BertForSentenceEmbedding
from models.bert.huggingface import export_huggingface, open_weights
from models.bert.model import BertForPreTraining, BertModel, PreTrainingOutput
from models.bert.tasks import BertForQuestionAnswering, BertForSequenceClassification, BertForTokenClassification
from models.bert.text_batches import EncodedText, TextBatch, collate_texts

__all__ = [
    "PRESETS",
    "BertConfig",
    "BertForPreTraining",
    "BertForQuestionAnswering",
    "BertForSentenceEmbedding",
    "BertForSequenceClassification",
    "BertForTokenClassification",
    "BertModel",
    "ElectraForPreTraining",
    "EncodedText",
    "PreTrainingOutput",
    "ReplacedTokens",
    "ReplacedTokensOutput",
    "TextBatch",
    "collate_texts",
    "export_huggingface",
    "open_weights",
]
