"""`bench tokenize`: our encoder and the tokenizers library on one core, and the step `tokenize` from end to end."""

from __future__ import annotations

import dataclasses
import multiprocessing
import os
import statistics
import tempfile
import time
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, Protocol

import numpy as np

from tensor3d.data import IndexedDataset
from tools.bench import corpus
from tools.bench.harness.benchmark import Benchmark, Count, Report
from tools.common.machine import format_table
from tools.common.workers import usable_cores
from tools.corpus.pipeline import local_team
from tools.corpus.sentences import split_sentences
from tools.corpus.tokenize.documents import document_files, parse_text, ranges_of, read_lines
from tools.corpus.tokenize.encode import TokenizeOptions, tokenize
from tools.corpus.tokenizers import FILES, load_tokenizer
from tools.corpus.tokenizers.base import flatten
from tools.corpus.tokenizers.tokenizer_json import JsonTokenizer
from tools.corpus.tokenizers.wordpiece import WordPieceTokenizer

_SLICE = 20_000
"""Sentences that the library is given at a time: what it returns takes some hundred bytes a token."""
HEADER = ("", "seconds", "fastest", "MB/s", "ratio")


class Encoder(Protocol):
    """What is measured of the tokenizers library."""

    def encode_batch(self, texts: list[str], *, add_special_tokens: bool) -> Any: ...

    def encode_batch_fast(self, texts: list[str], *, add_special_tokens: bool) -> Any: ...


@dataclass(frozen=True, kw_only=True)
class TokenizeCommand(Benchmark[tuple[Encoder, list[str]]]):
    """Time, by turns, our encoder and `encode_batch` of the tokenizers library on one core, then `encode_batch_fast` on
    all, and the step `tokenize` with and without the start of Python; check that library and step give the same ids."""

    docs: Path
    """Output of the step extract."""
    tokenizer: Path
    """Output of the step tokenizer: a WordPiece vocabulary or a tokenizer.json."""
    rounds: Count = 3
    """Turns of each."""
    language: str = "en"
    """Whose rules say where a sentence ends."""

    at_once: ClassVar[bool] = True

    def plan(self) -> tuple[Encoder, list[str]]:
        """The library, and the sentences that the step finds."""
        return open_library(self.tokenizer), read_sentences(self.docs, self.language)

    def measure(self, plan: tuple[Encoder, list[str]]) -> Report:
        library, sentences = plan
        size = sum(len(sentence.encode()) for sentence in sentences)
        print(f"{len(sentences):,} sentences, {size / 1e6:.1f} MB", flush=True)
        figures = measure(self, library, sentences, size)
        ratios = {
            "step_ratio": figures.ratio(figures.step_seconds),
            "whole_ratio": figures.ratio(figures.whole_seconds),
            "encoder_ratio": figures.encoder_ratio,
            "step_share": figures.share(figures.step_seconds),
            "whole_share": figures.share(figures.whole_seconds),
        }
        return Report(
            lines=[*format_table(HEADER, rows(figures)), "", *in_words(figures)],
            content={"figures": {**dataclasses.asdict(figures), **ratios}},
            faults=[] if figures.ids_equal else ["the step writes other ids than the library gives"],
        )


@dataclass(frozen=True, kw_only=True)
class TokenizeFigures:
    """All rates are of the same text."""

    bytes: int
    """Of the sentences, in UTF-8, without what stands between them."""
    raw_seconds: tuple[float, ...]
    """Of the library alone, on all cores, by round; nothing is done with the ids."""
    step_seconds: tuple[float, ...]
    """Of the step, by round: reading, splitting, ids, writing, in a Python that runs already; its workers' start is
    counted."""
    whole_seconds: tuple[float, ...]
    """Of the command, by round: from starting Python to the finished folder."""
    library_seconds: tuple[float, ...]
    """Of the processor, of the library's `encode_batch` on one core, by round."""
    own_seconds: tuple[float, ...]
    """The same of our encoder, which knows no word at the beginning of a round."""
    cores: int
    """That the step's workers have."""
    ids_equal: bool

    @property
    def encoder_ratio(self) -> float:
        """Our rate on one core over that of the library's `encode_batch`."""
        return statistics.median(self.library_seconds) / statistics.median(self.own_seconds)

    def share(self, seconds: Sequence[float]) -> float:
        """Their rate over that of our encoder on as many cores, if it did nothing else."""
        return statistics.median(self.own_seconds) / (self.cores * statistics.median(seconds))

    def ratio(self, seconds: Sequence[float]) -> float:
        """Their rate over that of the library: above 1, they are faster."""
        return statistics.median(self.raw_seconds) / statistics.median(seconds)


def rows(figures: TokenizeFigures) -> list[tuple[str, ...]]:
    """The table under `HEADER`."""
    cases = (
        ("encode_batch, one core", figures.library_seconds),
        ("our encoder, one core", figures.own_seconds),
        ("encode_batch_fast alone", figures.raw_seconds),
        ("the step tokenize", figures.step_seconds),
        ("with the start of Python", figures.whole_seconds),
    )
    return [
        (
            name,
            f"{statistics.median(seconds):.2f}",
            f"{min(seconds):.2f}",
            f"{figures.bytes / 1e6 / statistics.median(seconds):.2f}",
            f"{figures.ratio(seconds):.2f}",
        )
        for name, seconds in cases
    ]


def in_words(figures: TokenizeFigures) -> list[str]:
    step, whole = figures.share(figures.step_seconds), figures.share(figures.whole_seconds)
    return [
        f"our encoder on one core: {figures.encoder_ratio:.2f} times as fast as encode_batch",
        f"the step on {figures.cores} cores: {step:.2f} of what our encoder alone would do there, {whole:.2f} with the "
        "start of Python",
    ]


def open_library(folder: Path) -> Encoder:
    """The library's own object.

    Raises:
        ValueError: no folder of the step tokenizer, or a sentencepiece model, which is not the library's.
    """
    tokenizer = load_tokenizer(folder)
    if not isinstance(tokenizer, WordPieceTokenizer | JsonTokenizer):
        raise ValueError(
            f"{folder} holds a sentencepiece model; what is measured against is the tokenizers library, so take "
            f"{FILES['wordpiece']} or {FILES['json']}."
        )
    return tokenizer.library


def read_sentences(docs: Path, language: str) -> list[str]:
    """The sentences of all documents, as the step finds them."""
    lines = ((unit.file, at, line) for unit in ranges_of(document_files([docs])) for at, line in read_lines(unit))
    texts = (parse_text(line, file, at) for file, at, line in lines)
    return [sentence for text in texts for sentence in split_sentences(text, language)]


def measure(command: TokenizeCommand, library: Encoder, sentences: Sequence[str], size: int) -> TokenizeFigures:
    """Library, step and command by turns, and whether they give the same ids.

    Args:
        size: bytes of the sentences.
    """
    one_core: dict[bool, list[float]] = {False: [], True: []}
    raw, step, whole = [], [], []
    slices = [list(sentences[start : start + _SLICE]) for start in range(0, len(sentences), _SLICE)]
    with tempfile.TemporaryDirectory() as folder:
        output = Path(folder, "round-0")
        run_step(command, output)  # the disk's cache and the library's threads are warm in every round
        is_same = _is_same(library, slices, IndexedDataset(output / "documents"))
        for number in range(1, command.rounds + 1):
            for own, seconds in one_core.items():
                seconds.append(on_one_core(command.tokenizer, sentences, own))
            start = time.perf_counter()
            for part in slices:
                library.encode_batch_fast(part, add_special_tokens=False)
            raw.append(time.perf_counter() - start)
            start = time.perf_counter()
            tokenize(step_options(command, Path(folder, f"step-{number}")), local_team())
            step.append(time.perf_counter() - start)
            start = time.perf_counter()
            run_step(command, Path(folder, f"round-{number}"))
            whole.append(time.perf_counter() - start)
    return TokenizeFigures(
        bytes=size,
        raw_seconds=tuple(raw),
        step_seconds=tuple(step),
        whole_seconds=tuple(whole),
        library_seconds=tuple(one_core[False]),
        own_seconds=tuple(one_core[True]),
        cores=usable_cores(),
        ids_equal=is_same,
    )


def on_one_core(tokenizer: Path, sentences: Sequence[str], own: bool) -> float:
    """Seconds of the processor in a process of its own on one core, where the library's threads are begun too."""
    core = min(os.sched_getaffinity(0))
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(1, context, initializer=os.sched_setaffinity, initargs=(0, {core})) as pool:
        return pool.submit(_encode, tokenizer, list(sentences), own).result()


def _encode(tokenizer: Path, sentences: list[str], own: bool) -> float:
    encoder, library = load_tokenizer(tokenizer), open_library(tokenizer)
    start = time.process_time()
    for first in range(0, len(sentences), _SLICE):
        part = sentences[first : first + _SLICE]
        if own:
            encoder.encode_flat(part)
        else:
            library.encode_batch(part, add_special_tokens=False)
    return time.process_time() - start


def step_options(command: TokenizeCommand, output: Path) -> TokenizeOptions:
    """Of the step, as the command line has them."""
    return TokenizeOptions(docs=(command.docs,), tokenizer=command.tokenizer, language=command.language, output=output)


def run_step(command: TokenizeCommand, output: Path) -> None:
    """Raises ValueError with what the step has said where it fails."""
    options = {
        "docs": command.docs.absolute(),
        "tokenizer": command.tokenizer.absolute(),
        "language": command.language,
        "output": output,
        "workers": usable_cores(),
    }
    corpus.run_step("tokenize", *(part for name, value in options.items() for part in (f"--{name}", value)))


def _is_same(library: Encoder, slices: Sequence[list[str]], dataset: IndexedDataset) -> bool:
    at = 0
    for part in slices:
        found = [item.ids for item in library.encode_batch_fast(part, add_special_tokens=False)]
        ids = flatten(found, vocab_size=2**31 - 1).ids
        if not np.array_equal(ids, dataset.ids[at : at + len(ids)]):
            return False
        at += len(ids)
    return at == len(dataset.ids)
