"""From indexed documents to packed batches: pairs of sentences, masking, packs and a loader that works ahead."""

from tensor3d.data.batch import BatchLayout, Pack, PackedBatch, collate
from tensor3d.data.dataset import PretrainingData
from tensor3d.data.epochs import Bins, Epoch, Epochs, PackingRules
from tensor3d.data.indexed_dataset import IndexedDataset, IndexedWriter
from tensor3d.data.loader import Loader, Step, evaluation_batches
from tensor3d.data.masking import Masked, mask_tokens, masked_count
from tensor3d.data.sampling import Pairs, sample_pairs, sample_texts
from tensor3d.data.segments import Segments
from tensor3d.data.shard_exchange import Exchange, ExchangedPairs, ExchangeOptions
from tensor3d.data.sources import Drawing, ShardedPairs, Source
from tensor3d.data.special_tokens import SpecialTokens
from tensor3d.data.step_schedule import Schedule, StepPlan
from tensor3d.data.stored_samples import ExchangedSamples, StoredSamples, StoredShard

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
