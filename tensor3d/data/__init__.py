"""From indexed documents to packed batches: pairs of sentences, masking, packs and a loader that works ahead."""

from typing import TYPE_CHECKING

from tensor3d.lazy_package import import_lazily

if TYPE_CHECKING:
    from tensor3d.data.dataset import PretrainingData
    from tensor3d.data.epochs import Epoch, Epochs, LengthBuckets, PackingRules
    from tensor3d.data.indexed_dataset import IndexedDataset, IndexedWriter
    from tensor3d.data.loader import Loader, TrainBatch, evaluation_batches
    from tensor3d.data.masking import Masked, MaskingRules, SpecialTokens, mask_tokens, masked_count
    from tensor3d.data.packed_batch import BatchLayout, Pack, PackedBatch, collate
    from tensor3d.data.sampling import Pairs, sample_pairs, sample_texts
    from tensor3d.data.segments import Segments
    from tensor3d.data.shard_exchange import ExchangeOptions, RemotePairs, ShardExchange
    from tensor3d.data.sources import EpochSamples, SampleSource, ShardedPairs
    from tensor3d.data.step_schedule import BatchRamp, Schedule, StepPlan
    from tensor3d.data.stored_samples import RemoteSamples, StoredSamples, StoredShard
else:
    import_lazily(__name__)


__all__ = [
    "BatchLayout",
    "BatchRamp",
    "Epoch",
    "EpochSamples",
    "Epochs",
    "ExchangeOptions",
    "IndexedDataset",
    "IndexedWriter",
    "LengthBuckets",
    "Loader",
    "Masked",
    "MaskingRules",
    "Pack",
    "PackedBatch",
    "PackingRules",
    "Pairs",
    "PretrainingData",
    "RemotePairs",
    "RemoteSamples",
    "SampleSource",
    "Schedule",
    "Segments",
    "ShardExchange",
    "ShardedPairs",
    "SpecialTokens",
    "StepPlan",
    "StoredSamples",
    "StoredShard",
    "TrainBatch",
    "collate",
    "evaluation_batches",
    "mask_tokens",
    "masked_count",
    "sample_pairs",
    "sample_texts",
]
