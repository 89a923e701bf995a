"""A tokenizer."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

import numpy as np

from tools.corpus.inspection.report import Excerpt, Report
from tools.corpus.tokenizers import SETTINGS, Tokenizer, load_tokenizer
from tools.corpus.work import read_manifest

if TYPE_CHECKING:
    from tools.corpus.inspection.command import InspectOptions

_PIECES = 20
"""Shown for each of `--samples`."""


def examine(options: InspectOptions) -> Report:
    """Raises ValueError unless the folder was made by `tokenizer`."""
    manifest = read_manifest(options.folder, "tokenizer")
    tokenizer = load_tokenizer(options.folder)
    report = Report(folder=options.folder, kind="a tokenizer", noted=manifest.counts)
    for name, value in json.loads((options.folder / SETTINGS).read_bytes()).items():
        report.add(name, "yes" if value is True else "no" if value is False else value)
    report.add("pieces of the vocabulary", tokenizer.vocab_size)
    for name, number in special_ids(tokenizer).items():
        report.add(f"id of {name}", number)
    rng = np.random.default_rng(options.seed)
    chosen = np.sort(rng.choice(tokenizer.vocab_size, min(_PIECES * options.samples, tokenizer.vocab_size), False))
    rows = [chosen[begin : begin + _PIECES].tolist() for begin in range(0, len(chosen), _PIECES)]
    report.excerpts["pieces, drawn at random"] = [
        Excerpt(f"{row[0]:,} to {row[-1]:,}", ("  ".join(tokenizer.pieces(row)),)) for row in rows
    ]
    return report


def special_ids(tokenizer: Tokenizer) -> dict[str, int]:
    """Ids of the special pieces, by their names."""
    numbers = list(tokenizer.special_ids.values())
    if tokenizer.unknown is not None and tokenizer.unknown not in numbers:
        numbers.append(tokenizer.unknown)
    return dict(zip(tokenizer.pieces(numbers), numbers, strict=True))
