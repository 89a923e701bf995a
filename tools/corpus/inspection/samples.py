"""Sequences that were drawn ahead of training."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from tools.corpus.inspection.histogram import Histogram
from tools.corpus.inspection.report import Report
from tools.corpus.inspection.sequences import Training
from tools.corpus.samples.reading import open_samples, shard_names
from tools.corpus.tokenizers import load_tokenizer

if TYPE_CHECKING:
    from tools.corpus.inspection.command import InspectOptions


def examine(options: InspectOptions) -> Report:
    """Raises ValueError unless the folder was made by `samples`, or is a copy of such a one without some shards."""
    samples = open_samples(options.folder)
    counts = np.flatnonzero(samples.histogram)
    training = Training(
        names=tuple(shard_names(len(samples.shards))),
        shards=samples.shards,
        special=samples.special,
        tokenizer=load_tokenizer(options.folder / "tokenizer"),
        max_length=samples.max_length,
        lengths=Histogram(
            title="tokens of a sequence", lengths=counts, counts=samples.histogram[counts], doubling=False
        ),
        plan=samples.plan(),
    )
    kind = "single texts" if samples.single else "sentence pairs"
    report = Report(folder=options.folder, kind=f"{kind} in shards, with a plan of their packs", noted=samples.counts)
    words = " of whole words" if samples.continuations is not None else ""
    report.add("what is guessed", ("stored" if samples.static else "drawn in training") + words)
    report.add("method of the plan", samples.packing)
    report.add("held-out sequences", 0 if samples.held_out is None else len(samples.held_out))
    report.add("left out as bad", samples.left_out)
    for number, corpus in enumerate(samples.counts["corpora"], start=1):
        passes = f"{100 * corpus['share']:.1f} %, {corpus['passes']:.2f} times gone through"
        report.add(f"sequences from corpus {number}", corpus["sequences"], passes)
    training.describe(report, samples=options.samples, packs=options.packs, seed=options.seed)
    return report
