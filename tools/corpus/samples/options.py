"""What the step `samples` can be told."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from tensor3d.data.dataset import PADDED, masked_budget
from tensor3d.data.epochs import PackingRules
from tensor3d.data.masking import MASKED_SHARE, MaskingRules
from tensor3d.packing import PLANNERS, Limits, fingerprint_of, save_plan
from tools.common.files import write_file
from tools.corpus.pipeline import Options


@dataclass(frozen=True, kw_only=True)
class SamplesOptions(Options):
    """Sequences for pre-training, in shards, with a plan of their packs."""

    corpora: tuple[str, ...]
    """Output folders of `tokenize`, or prefixes of .bin/.idx pairs in Megatron's format. Each may have a weight, its
    share of the sequences, as in `wiki=0.7 books=0.3`: a corpus that is too small for its share is drawn several times,
    with other cuts."""
    tokenizer: Path | None = None
    """Output folder of `tokenizer`; needed where corpora are pairs of files, which do not say what made them."""
    max_length: int = 512
    """Tokens of a sequence, at most; [CLS] and [SEP] are counted."""
    short_probability: float = 0.1
    """Share of the sequences that aim at a random shorter length."""
    single_texts: bool = False
    """[CLS] text [SEP] instead of pairs of segments, and no next-sentence label."""
    duplicates: int = 1
    """How often every corpus is drawn, each time with other cuts, at least."""
    masking: Literal["dynamic", "static"] = "dynamic"
    """dynamic: what is guessed is drawn in training, anew in every epoch. static: it is drawn now and stored."""
    masked_share: float = MASKED_SHARE
    """Share of the tokens that are guessed, at most 0.8: of static masks, and the largest one that the plan of packs
    has room for."""
    mask_replace: float = 0.8
    """Share of the guessed tokens that become [MASK]; of static masks."""
    random_replace: float = 0.1
    """Share of the guessed tokens that become another token; of static masks. The rest stays as it is."""
    masked_spans: bool = False
    """Runs of tokens, or of whole words, are guessed together and replaced alike; of static masks."""
    whole_words: bool = False
    """The pieces of a word are guessed together."""
    shards: int = 1
    """File pairs; their sizes differ by one sequence at most."""
    held_out: float = 0.02
    """Share of the documents that is kept from training, for evaluation. 0: none."""
    seed: int = 0
    """All that is drawn depends on it."""
    capacity: int | None = None
    """Token slots of a pack. Default: max_length."""
    max_sequences: int = 8
    """Sequences of a pack, at most."""
    masked_per_pack: int | None = None
    """Tokens to guess in a pack, at most. Default: the share of a full pack and two more."""
    packing: Literal["lp", "lpfhp", "spfhp", "nnlshp", "padded"] = "lp"
    """How packs are planned; `docs/packing.md` compares the methods."""
    run_tokens: int = 4_000_000
    """Tokens of documents that a worker draws from at a time. The random segment of a pair is of the same run."""

    def check(self) -> None:
        """Raises ValueError for a number out of range."""
        least = {"shards": 1, "duplicates": 1, "run_tokens": 1, "seed": 0, "max_length": 3 if self.single_texts else 5}
        for name, lowest in least.items():
            if getattr(self, name) < lowest:
                raise ValueError(f"{name} must be at least {lowest}. Got {getattr(self, name)}.")
        if not 0 <= self.held_out < 1:
            raise ValueError(f"held_out is a share of the documents, from 0 to below 1. Got {self.held_out}.")
        if not 0 <= self.short_probability <= 1:
            raise ValueError(f"short_probability must lie between 0 and 1. Got {self.short_probability}.")
        rules = self.mask_rules
        if self.masking == "dynamic" and rules != MaskingRules(share=rules.share):
            raise ValueError(
                f"mask_replace={self.mask_replace}, random_replace={self.random_replace} and masked_spans="
                f"{self.masked_spans} are of static masks, and masking is dynamic: give them to training, in [data] of "
                "its recipe, or choose static."
            )
        self.limits()

    @property
    def mask_rules(self) -> MaskingRules:
        """Raises ValueError for shares out of range."""
        return MaskingRules(
            share=self.masked_share,
            mask_replace=self.mask_replace,
            random_replace=self.random_replace,
            spans=self.masked_spans,
        )

    def limits(self) -> Limits:
        """Of a pack, as training has them with the same numbers. ValueError for those that contradict one another."""
        capacity = self.max_length if self.capacity is None else self.capacity
        most = 1 if self.packing == PADDED else self.max_sequences
        budget = masked_budget(capacity, self.max_length, most, self.masked_per_pack, self.masked_share)
        return PackingRules(
            method=self.packing,
            capacity=capacity,
            max_sequences=most,
            masked_per_pack=budget,
            masked_share=self.masked_share,
            seed=self.seed,
        ).limits


# --- The plan of packs, for all training sequences together -----------------------------------------------------------

PLAN, HISTOGRAM = "plan.json", "histogram.json"


def write_plan(folder: Path, histogram: NDArray[np.int64], options: SamplesOptions) -> dict[str, Any]:
    """Plans the packs and writes the plan and the histogram of lengths; returns what there is to say of them."""
    limits = options.limits()
    plan = PLANNERS[options.packing](
        histogram, limits.capacity, limits.max_sequences, budget=limits.budget, costs=limits.costs
    )
    save_plan(plan, folder / PLAN, fingerprint_of(histogram, limits, options.packing))
    write_file(folder / HISTOGRAM, json.dumps({"counts": histogram.tolist()}) + "\n")
    return {"packs": plan.packs, "efficiency": plan.efficiency, "sequences_per_pack": plan.packing_factor}
