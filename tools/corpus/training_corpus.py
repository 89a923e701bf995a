"""What training needs of a prepared corpus, in whichever of two ways it was prepared: documents, from which pairs are
drawn anew in every epoch, or samples, which were drawn before."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from tensor3d.data import MaskingRules, RemotePairs, SampleSource, ShardedPairs, SpecialTokens
from tensor3d.data.stored_samples import RemoteSamples, StoredSamples
from tensor3d.distributed.host_all_to_all import HostAllToAll
from tensor3d.packing import PackingPlan
from tools.corpus.pipeline.step import STEP
from tools.corpus.quick.corpus_info import Corpus, CorpusInfo, load_corpus, read_info
from tools.corpus.samples.document_runs import TOKENIZER
from tools.corpus.samples.reader import Samples, open_samples, read_step
from tools.corpus.tokenizers import FILES


class CorpusFacts(Protocol):
    """What is known of a corpus without opening its data. Two are equal where the corpora are."""

    @property
    def fingerprint(self) -> str:
        """Changes with the text and with everything that was decided in preparing it."""

    @property
    def vocab_size(self) -> int: ...

    @property
    def held_out(self) -> float:
        """The share kept from training that was asked for."""

    @property
    def shards(self) -> int: ...

    @property
    def has_held_out(self) -> bool: ...

    @property
    def unigram_entropy(self) -> float:
        """Nats a token: the loss of a model that knows the frequencies only."""

    @property
    def omissions(self) -> str:
        """What of the source is not in the corpus, in words; empty where nothing is, or other steps have told it."""

    @property
    def train_tokens(self) -> int:
        """In one epoch, about."""

    def mean_length(self, max_length: int, short_probability: float, *, single: bool = False) -> float:
        """Tokens of a sequence, the special ones counted; an estimate where sequences are drawn in training."""

    def in_words(self) -> str:
        """A line for the user."""


class TrainingCorpus(Protocol):
    """A corpus that training can read."""

    @property
    def info(self) -> CorpusFacts: ...

    @property
    def special(self) -> SpecialTokens: ...

    @property
    def tokenizer(self) -> Path:
        """The file that decides what an id means."""

    @property
    def missing(self) -> Sequence[int]:
        """Shards that are not on this machine."""

    def plan(self, method: str) -> PackingPlan | None:
        """Of the packs of an epoch, if it was made before by this method."""

    @property
    def stored_masking(self) -> MaskingRules | None:
        """By which masks were drawn that are stored; None: they are drawn in training."""

    @property
    def continuations(self) -> NDArray[np.generic] | None:
        """bool or uint8 (vocab_size,), as `PretrainingData` takes it, where words are masked whole."""

    def training(
        self, *, max_length: int, seed: int, short_probability: float, single: bool, everyone: HostAllToAll | None
    ) -> SampleSource:
        """The training sequences: all read here, or by exchange with `everyone` along the data axis.

        Args:
            single: of documents, texts are drawn instead of pairs. Samples are what they are.
        """

    def evaluation(self, *, max_length: int, seed: int, short_probability: float, single: bool) -> SampleSource:
        """The held-out sequences."""


@dataclass(frozen=True)
class DocumentCorpus:
    """Documents, from which pairs are drawn while training."""

    corpus: Corpus

    @property
    def info(self) -> CorpusInfo:
        return self.corpus.info

    @property
    def special(self) -> SpecialTokens:
        return self.corpus.special

    @property
    def tokenizer(self) -> Path:
        return self.corpus.tokenizer

    @property
    def missing(self) -> list[int]:
        return [number for number, shard in enumerate(self.corpus.train) if shard is None]

    def plan(self, method: str) -> None:
        return None

    @property
    def stored_masking(self) -> None:
        return None

    @property
    def continuations(self) -> None:
        return None

    def training(
        self, *, max_length: int, seed: int, short_probability: float, single: bool, everyone: HostAllToAll | None
    ) -> SampleSource:
        drawing: dict[str, Any] = {"max_length": max_length, "seed": seed, "single": single}
        if everyone is not None:
            return RemotePairs(self.corpus.train, everyone, short_probability=short_probability, **drawing)
        return ShardedPairs(self.corpus.train, short_probability=short_probability, **drawing)

    def evaluation(self, *, max_length: int, seed: int, short_probability: float, single: bool) -> SampleSource:
        documents = [self.corpus.held_out]
        return ShardedPairs(
            documents, max_length=max_length, seed=seed, short_probability=short_probability, single=single
        )


@dataclass(frozen=True, kw_only=True)
class SamplesInfo:
    """What step.json of a folder of samples says."""

    fingerprint: str
    vocab_size: int
    held_out: float
    shards: int
    max_length: int
    sequences: int
    tokens: int
    held_out_sequences: int
    unigram_entropy: float

    @classmethod
    def of(cls, settings: dict[str, Any], counts: dict[str, Any], fingerprint: str) -> SamplesInfo:
        return cls(
            fingerprint=fingerprint,
            vocab_size=settings["special"]["vocab_size"],
            held_out=settings["held_out"],
            shards=settings["shards"],
            max_length=settings["max_length"],
            sequences=counts["sequences"],
            tokens=counts["tokens"],
            held_out_sequences=counts["held_out_sequences"],
            unigram_entropy=counts["unigram_entropy"],
        )

    @property
    def has_held_out(self) -> bool:
        return self.held_out_sequences > 0

    @property
    def omissions(self) -> str:
        return ""

    @property
    def train_tokens(self) -> int:
        return self.tokens

    def mean_length(self, max_length: int, short_probability: float, *, single: bool = False) -> float:
        """Exact: they have been drawn."""
        return self.tokens / self.sequences

    def in_words(self) -> str:
        return (
            f"{self.sequences:,} sequences, {self.tokens:,} tokens of a vocabulary of {self.vocab_size:,}, unigram "
            f"entropy {self.unigram_entropy:.3f} nats"
        )


@dataclass(frozen=True)
class SampledCorpus:
    """Samples that lie on disk."""

    samples: Samples

    @property
    def info(self) -> SamplesInfo:
        return SamplesInfo.of(self.samples.settings, self.samples.counts, self.samples.fingerprint)

    @property
    def special(self) -> SpecialTokens:
        return self.samples.special

    @property
    def tokenizer(self) -> Path:
        folder = self.samples.folder / TOKENIZER
        return next(folder / name for name in FILES.values() if (folder / name).is_file())

    @property
    def missing(self) -> list[int]:
        return [number for number, shard in enumerate(self.samples.shards) if shard is None]

    def plan(self, method: str) -> PackingPlan | None:
        return self.samples.plan() if method == self.samples.packing else None

    @property
    def stored_masking(self) -> MaskingRules | None:
        return self.samples.masking if self.samples.static else None

    @property
    def continuations(self) -> NDArray[np.generic] | None:
        return self.samples.continuations

    def training(
        self, *, max_length: int, seed: int, short_probability: float, single: bool, everyone: HostAllToAll | None
    ) -> SampleSource:
        if everyone is not None:
            return RemoteSamples(self.samples.shards, everyone, max_length=max_length)
        return StoredSamples(self.samples.shards, max_length=max_length)

    def evaluation(self, *, max_length: int, seed: int, short_probability: float, single: bool) -> SampleSource:
        return StoredSamples([self.samples.held_out], max_length=max_length)


def open_corpus(folder: Path) -> TrainingCorpus:
    """A folder that `prepare` or the step `samples` has written. ValueError for any other, or a damaged one."""
    if is_samples(folder):
        return SampledCorpus(open_samples(folder))
    return DocumentCorpus(load_corpus(folder))


def read_facts(folder: Path) -> CorpusFacts:
    """What is known of the folder without opening the data."""
    return read_samples_info(folder) if is_samples(folder) else read_info(folder)


def read_samples_info(folder: Path) -> SamplesInfo:
    """The same, of samples."""
    values, fingerprint = read_step(folder)
    return SamplesInfo.of(values["settings"], values["counts"], fingerprint)


def is_samples(folder: Path) -> bool:
    """Whether a step has written the folder: then it is samples, or an error that says what is missing."""
    return (folder / STEP).is_file()
