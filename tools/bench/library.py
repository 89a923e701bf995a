"""`bench library`: whole training steps of our BERT beside `transformers`' BertForPreTraining, on one process."""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from models.bert import PRESETS, BertConfig
from tensor3d import Cube, Speed, rendezvous
from tensor3d.attention.support import SUPPORT, Backend, Facts
from tools.bench.library_data import FULL, PADDED, SORTED, Work, works
from tools.bench.library_figures import LOSS_TOLERANCE, SideFigures, all_agree, input_figures
from tools.bench.library_measure import Turns, measure
from tools.bench.library_picture import draw, read_results
from tools.bench.library_sides import COMPILING, CONTENDERS, MASKED, OURS, PLAIN, with_sizes
from tools.bench.machine import Machine, check_output, heading, write_json
from tools.bench.plots import check_picture, save_picture
from tools.bench.random_pairs import SHORTEST, exponential_histogram
from tools.bench.subcommand import Subcommand
from tools.bench.threads import using_threads
from tools.building import TYPES
from tools.cores import usable_cores
from tools.corpus.tokenizer import special_tokens
from tools.packing.histogram import read_histogram

_SEQUENCES = {FULL: 16, PADDED: 64, SORTED: 64}


@dataclass(frozen=True, kw_only=True)
class LibraryCommand(Subcommand):
    """Time whole training steps (forward, backward, clipping, AdamW) of transformers' BertForPreTraining on padded
    batches and of this project's on packs of the same sequences, in turns, from the same weights."""

    presets: str = "small,base"
    """Sizes of BERT to measure, with commas."""
    precisions: str = "fp32,bf16"
    """Types of the products, with commas: fp32, bf16 (transformers: torch.autocast)."""
    inputs: str = f"{FULL},{PADDED},{SORTED}"
    """Kinds of input, with commas: sequences without any padding; padded to the longest possible; sorted by length in
    the step, each micro-batch padded to its own longest."""
    contenders: str = f"{PLAIN},{MASKED},{OURS}"
    """Some of transformers, transformers-masked (its masked-LM head on the masked rows alone; always there, to compare
    with), ours, ours-rows (the last layer computes the rows that heads read), ours-compiled, ours-rows-compiled."""
    histogram: Path | None = None
    """JSON file: an object with `counts`, whose entry i counts the sequences of length i. Default: a formula."""
    length: int = 512
    """Tokens of the longest sequence, and slots of a pack."""
    sequences: int | None = None
    """Of a step, rounded to whole micro-batches of packs. Default: 16 of kind full, else 64."""
    capacity: int | None = None
    """Slots of a pack. Default: --length."""
    micro_batch: int = 8
    """Sequences of a padded micro-batch, at most: those of a step are dealt out evenly."""
    packs: int | None = None
    """Packs of a packed one. Default: as many slots as a padded one has."""
    steps: int = 1
    """Of a turn, each on other sequences."""
    rounds: int = 5
    """Turns that each contender gets, one contender after another."""
    warmup: int = 1
    """Steps of each contender before that, at least 1."""
    layers: int | None = None
    """Transformer layers, instead of the preset's."""
    dropout: float = 0.1
    """Probability, of hidden states and attention weights."""
    attention_dropout: float | None = None
    """That of attention weights, where it is another."""
    backend: Backend = "auto"
    """Of our attention."""
    vocab: int = 30522
    """Entries of the vocabulary."""
    threads: int | None = None
    """Default: one a core."""
    seed: int = 0
    """Of weights, sequences and masks."""
    memory: bool = False
    """Also follow one step of each contender with a profiler: the most tensor memory at once."""
    operators: int = 0
    """Also follow one step of each contender with a profiler, and tell so many operators that took longest."""
    output: Path | None = None
    """JSON file for all figures."""
    plot: Path | None = None
    """PNG file of tokens a second: a panel for each preset and kind of input."""
    also: str | None = None
    """JSON files of earlier runs, with commas, whose figures --plot draws too."""

    @classmethod
    def defaults(cls, arguments: Sequence[str]) -> Any:
        return cls()

    def run(self, arguments: Sequence[str]) -> int:
        presets, precisions, inputs, contenders = self.check()
        (lengths, source), earlier = self.lengths(), self.earlier()
        turns = Turns(
            rounds=self.rounds, steps=self.steps, warmup=self.warmup, memory=self.memory, operators=self.operators
        )
        machine, device = Machine.here(), _device()
        with using_threads(self.threads or usable_cores()):
            print(f"{machine}\nlengths: {source}; {torch.get_num_threads()} threads", flush=True)
            steps = {kind: self._works(kind, lengths, device) for kind in inputs}
            held = [input_figures(kind, mine[1:]) for kind, mine in steps.items()]
            print("\n".join(str(each) for each in held), flush=True)
            results: list[SideFigures] = []
            for preset in presets:
                config = self.config(preset)
                results += measure(
                    preset, config, precisions, contenders, steps, turns, self.seed, device, self.backend
                )
        if self.plot is not None:
            save_picture(draw([*earlier, *results]), self.plot)
            print(f"written: {self.plot}")
        agreed = all_agree(results)
        if self.output is not None:
            content = {
                **heading(arguments, machine),
                "lengths": source,
                "inputs": [dataclasses.asdict(each) for each in held],
                "agree": agreed,
                "results": [dataclasses.asdict(side) for side in results],
            }
            write_json(self.output, content)
            print(f"written: {self.output}")
        sys.stdout.flush()
        return 0 if agreed else 1

    def check(self) -> tuple[tuple[str, ...], ...]:
        """Presets, precisions, inputs and contenders. Raises ValueError for what can be seen before all work."""
        if rendezvous.is_launched():
            raise ValueError("this benchmark is one process. Call it without torchrun, srun or mpirun.")
        least = dict.fromkeys(("sequences", "micro_batch", "packs", "steps", "rounds", "layers", "threads"), 1)
        for name, bound in {**least, "length": SHORTEST, "seed": 0, "operators": 0}.items():
            value = getattr(self, name)
            if value is not None and value < bound:
                raise ValueError(f"--{name.replace('_', '-')} must be at least {bound}. Got {value}.")
        if self.warmup < 1:
            raise ValueError(
                "--warmup must be at least 1: a contender's first step makes its optimiser's state, and may compile; "
                f"timed, it would be compared with steps that do neither. Got {self.warmup}."
            )
        if self.capacity is not None and self.capacity < self.length:
            raise ValueError(
                f"--capacity must be at least --length {self.length}, for a pack holds whole sequences. Got "
                f"{self.capacity}."
            )
        try:
            special_tokens(self.vocab)
        except ValueError as error:
            raise ValueError(f"--vocab {self.vocab} is too small: {error}") from None
        check_output(self.output)
        if self.plot is not None:
            check_picture(self.plot)
        presets = _named("--presets", self.presets, PRESETS)
        precisions = _named("--precisions", self.precisions, LOSS_TOLERANCE)
        inputs = _named("--inputs", self.inputs, _SEQUENCES)
        contenders = _named("--contenders", self.contenders, CONTENDERS)
        if MASKED not in contenders:
            raise ValueError(f"--contenders must have {MASKED} among them, to compare with. Got {self.contenders!r}.")
        for preset in presets:
            config = self.config(preset)
            for precision in precisions:
                self.check_backend(config, precision)
        self.check_earlier(set(product(presets, precisions, inputs, contenders)))
        if COMPILING & set(contenders):
            Cube.single(_device(), speed=Speed(compile=True))  # refuses where there is no compiler
        if find_spec("transformers") is None:
            raise ValueError("transformers is what is compared with, and is not installed: pip install transformers.")
        return presets, precisions, inputs, contenders

    def check_backend(self, config: BertConfig, precision: str) -> None:
        """Raises ValueError where our attention cannot be by the backend."""
        if self.backend == "auto":
            return
        device = _device()
        facts = Facts(
            device=device.type,
            dtype=TYPES[precision],
            head_dim=config.hidden // config.heads,
            capability=torch.cuda.get_device_capability(device) if device.type == "cuda" else None,
            dropout=config.attention_dropout > 0,
        )
        if refusals := SUPPORT[self.backend].refusals(facts):
            raise ValueError(f"--backend {self.backend} in {precision}: it {'; it '.join(refusals)}.")

    def check_earlier(self, places: set[tuple[str, ...]]) -> None:
        """Raises ValueError for files that cannot be drawn beside contenders at these places."""
        if self.also is not None and self.plot is None:
            raise ValueError(f"--also names what --plot draws, too. Name a --plot, or leave out --also {self.also}.")
        for side in self.earlier():
            place = (side.preset, side.precision, side.inputs, side.contender)
            if place in places:
                raise ValueError(
                    f"--also must have what neither this run nor another file has. Got {', '.join(place)} again."
                )
            places = {*places, place}

    def earlier(self) -> list[SideFigures]:
        """The figures of the files of --also."""
        names = [] if self.also is None else self.also.split(",")
        return [side for name in names for side in read_results(Path(name))]

    def config(self, preset: str) -> BertConfig:
        sizes = dataclasses.replace(PRESETS[preset], vocab=self.vocab, positions=max(512, self.length))
        inner = self.attention_dropout
        return with_sizes(sizes, layers=self.layers, dropout=self.dropout, attention_dropout=inner)

    def lengths(self) -> tuple[NDArray[np.int64], str]:
        """The histogram, and what to say of it."""
        if self.histogram is None:
            told = f"exponential with mean {5 / 8 * self.length:g}, cut at {self.length}"
            return exponential_histogram(self.length), told
        counts = np.trim_zeros(read_histogram(self.histogram), "b")
        if len(counts) - 1 > self.length:
            raise ValueError(
                f"{self.histogram} has sequences of {len(counts) - 1} tokens, more than --length {self.length}. Raise "
                "that, or take another histogram."
            )
        return counts, str(self.histogram)

    def _works(self, kind: str, lengths: NDArray[np.int64], device: torch.device) -> list[Work]:
        capacity = self.capacity or self.length
        return works(
            kind,
            lengths,
            steps=self.rounds * self.steps + 1,  # the first one is for the check, for warming up and for the peak
            sequences=self.sequences or _SEQUENCES[kind],
            micro_batch=self.micro_batch,
            packs=self.packs or max(1, self.micro_batch * self.length // capacity),
            longest=self.length,
            capacity=capacity,
            special=special_tokens(self.vocab),
            seed=self.seed,
            device=device,
        )


def _device() -> torch.device:
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


def _named(option: str, text: str, known: Any) -> tuple[str, ...]:
    names = tuple(dict.fromkeys(text.split(",")))
    if not set(names) <= set(known):
        raise ValueError(f"{option} must be some of {','.join(known)}. Got {text!r}.")
    return names
