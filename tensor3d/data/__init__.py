"""From indexed documents to packed batches: pairs of sentences, masking, packs and a loader that works ahead."""

from tensor3d.data.batch import Pack, PackedBatch, collate
from tensor3d.data.bins import Bins
from tensor3d.data.epochs import Epoch, Epochs, PackingRules
from tensor3d.data.evaluation import evaluation_batches
from tensor3d.data.exchange import Exchange, ExchangedPairs, ExchangeOptions
from tensor3d.data.indexed import IndexedDataset, IndexedWriter
from tensor3d.data.layout import BatchLayout
from tensor3d.data.loader import Loader, Step
from tensor3d.data.masking import Masked, mask_tokens, masked_count
from tensor3d.data.pairs import Pairs, sample_pairs
from tensor3d.data.pretraining import PretrainingData
from tensor3d.data.schedule import Schedule, StepPlan
from tensor3d.data.segments import Segments
from tensor3d.data.sources import Drawing, ShardedPairs, Source
from tensor3d.data.special import SpecialTokens
from tensor3d.data.stored import ExchangedSamples, StoredSamples, StoredShard
from tensor3d.data.texts import sample_texts

__all__ = [
    "BatchLayout",
    "Bins",
    "Drawing",
    "Epoch",
    "Epochs",
    "Exchange",
    "ExchangeOptions",
    "ExchangedPairs",
    "ExchangedSamples",
    "IndexedDataset",
    "IndexedWriter",
    "Loader",
    "Masked",
    "Pack",
    "PackedBatch",
    "PackingRules",
    "Pairs",
    "PretrainingData",
    "Schedule",
    "Segments",
    "ShardedPairs",
    "Source",
    "SpecialTokens",
    "Step",
    "StepPlan",
    "StoredSamples",
    "StoredShard",
    "collate",
    "evaluation_batches",
    "mask_tokens",
    "masked_count",
    "sample_pairs",
    "sample_texts",
]
