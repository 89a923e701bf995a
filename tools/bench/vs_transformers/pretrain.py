"""`bench library`: whole training steps of our BERT, RoBERTa or ModernBERT beside `transformers`', on one process."""

from __future__ import annotations

import dataclasses
import gc
import statistics
import tempfile
import time
import traceback
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from importlib.util import find_spec
from itertools import product
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray

from models.bert import PRESETS, BertConfig
from tensor3d import Cube, ExecutionPolicy
from tensor3d.attention.backends import SUPPORT, AttentionRequest, Backend
from tensor3d.attention.flash_version import FlashVersion, use_flash_attention
from tools.bench.harness.benchmark import ONE_PROCESS, Benchmark, Count, Natural, PictureFile, Report, listed
from tools.bench.harness.figures import as_json
from tools.bench.harness.figures import table as table_of
from tools.bench.harness.memory import peak_on
from tools.bench.harness.processes import interleave, using_threads
from tools.bench.harness.synthetic_data import SHORTEST, lengths_of
from tools.bench.vs_transformers.contenders import (
    COMPILING,
    CONTENDERS,
    GRAPHED,
    MASKED,
    OURS,
    PLAIN,
    UNPADDING,
    Checked,
    Implementation,
    SideMaker,
    check_fp8,
    with_sizes,
    write_model,
)
from tools.bench.vs_transformers.data import FULL, PADDED, SORTED, Work, works
from tools.bench.vs_transformers.figures import (
    LOSS_TOLERANCE,
    Operator,
    Sample,
    SideFigures,
    all_agree,
    draw,
    figures,
    input_figures,
    model_name,
    operators_of,
    read_results,
    table,
    verdict,
)
from tools.common.bounds import AtLeast
from tools.common.log import progress
from tools.common.workers import usable_cores
from tools.corpus.quick.sentencepiece_tokenizer import special_tokens
from tools.doctor.collective_timing import product_rate
from tools.training.factory import TYPES

# --- The turns of `bench library` -------------------------------------------------------------------------------------

R = TypeVar("R")
_SECONDS = 1.0  # of products of each size
_LONGEST = 4.0  # seconds of one product: one in bf16 on a processor that has no instructions for it takes a minute


@dataclass(frozen=True, kw_only=True)
class Rounds:
    """How often everything is done."""

    rounds: int
    """Turns of each contender."""
    steps: int
    """Of a turn, each on other sequences."""
    warmup: int
    """Steps of each contender before, at least 1: the first one makes the optimiser's state, and compiles; each further
    one, of other sequences, compiles for what it has that none had before."""
    memory: bool
    """Whether one more step is followed by a profiler."""
    operators: int
    """How many, the dearest of one more step, are told."""


class Running:
    """The contenders that have not failed. One that does, for want of memory say, is left out, and the others go on."""

    def __init__(self, place: tuple[str, str]) -> None:
        """
        Args:
            place: preset and precision.
        """
        self.sides: dict[str, Implementation] = {}
        self.failed: list[dict[str, str]] = []
        self._place = place

    def add(self, name: str, make: Callable[[str], Implementation]) -> None:
        """Takes one more in, unless it cannot be made."""
        try:
            self.sides[name] = make(name)
            return
        except Exception as error:
            told = _told(error)
        self._leave_out(name, told)

    def attempt(self, name: str, action: Callable[[Implementation], R]) -> R | None:
        """What an action of this contender gives. None: it has failed, now or before."""
        if name not in self.sides:
            return None
        try:
            return action(self.sides[name])
        except Exception as error:
            told = _told(error)
        self._leave_out(name, told)
        return None

    def _leave_out(self, name: str, told: str) -> None:
        """Outside of the handler, which holds what the action had made."""
        preset, precision = self._place
        self.failed.append({"preset": preset, "precision": precision, "contender": name, "error": told})
        print(f"{name} has failed and is left out: {told}", flush=True)
        side = self.sides.pop(name, None)
        if side is not None:
            side.optimizer.zero_grad(set_to_none=True)  # of a model that another one may share
        del side
        gc.collect()
        if torch.cuda.is_available():
            torch.cuda.empty_cache()


def _told(error: Exception) -> str:
    """Its first line; the rest goes to standard error."""
    traceback.print_exception(error)
    return f"{type(error).__name__}: {(str(error).splitlines() or [''])[0]}"


def measure(
    preset: str,
    config: BertConfig,
    precisions: Sequence[str],
    contenders: Sequence[str],
    steps: Mapping[str, Sequence[Work]],
    turns: Rounds,
    seed: int,
    device: torch.device,
    failed: list[dict[str, str]],
    backend: Backend = "auto",
    *,
    capacity: int = 512,
) -> Iterator[SideFigures]:
    """All precisions and kinds of input of one preset; prints the table of each as soon as it is there.

    Args:
        failed: gets those that have failed.
        backend: of our attention.
        capacity: slots of a pack.
        steps: by kind of input; the first ones are for warming up, the very first also for the check and for the peak,
            and the others are timed.
    """
    with tempfile.TemporaryDirectory() as folder:
        write_model(config, Path(folder), seed)
        for precision in precisions:
            products = _fastest_product(device, precision)
            compute = None if precision == "fp32" else TYPES[precision]
            running = Running((preset, precision))
            make = SideMaker(config, Path(folder), compute, device, backend, capacity=capacity)
            for name in contenders:
                running.add(name, make)
            del make  # which holds the model of some
            checks: dict[str, dict[str, Checked]] = {}
            for kind, mine in steps.items():  # before any of them has learnt something
                checks[kind] = {}
                for name in _shown(running.sides, f"{model_name(preset)}, {precision}, {kind}: first losses"):
                    found = running.attempt(name, partial(_checked, mine[0]))
                    if found is not None:
                        checks[kind][name] = found
            for kind, mine in steps.items():
                place = (preset, precision, kind)
                yield from _on_input(place, running, checks[kind], mine, turns, products, device)
            failed += running.failed
            del running  # the models of the next precision need the room


def _checked(work: Work, side: Implementation) -> Checked:
    return side.check(work)


def _on_input(
    place: tuple[str, str, str],
    running: Running,
    checks: Mapping[str, Checked],
    steps: Sequence[Work],
    turns: Rounds,
    products: float,
    device: torch.device,
) -> list[SideFigures]:
    """All contenders in turns, on one kind of input. After each round it is told, so that who is cut off has that."""
    first, timed = steps[0], steps[turns.warmup :]
    names = list(running.sides)
    print(", ".join([model_name(place[0]), *place[1:]]), flush=True)
    for number, work in enumerate(steps[: turns.warmup]):
        taken = {name: running.attempt(name, partial(_timed, work)) for name in _shown(running.sides, "warming up")}
        _tell(f"warm-up {number + 1} of {turns.warmup}", {name: [each] for name, each in taken.items() if each})
    told: dict[str, list[Sample]] = {}

    def turn(number: int, round_: int) -> list[Sample]:
        mine = timed[round_ * turns.steps : (round_ + 1) * turns.steps]
        done = [running.attempt(names[number], partial(_timed, work)) for work in mine]
        told[names[number]] = [each for each in done if each]
        if number == (len(names) - 1 if round_ % 2 == 0 else 0):  # the last of the round
            _tell(f"round {round_ + 1} of {turns.rounds}", told)
        return told[names[number]]

    rounds = dict(zip(names, interleave(names, turns.rounds, turn), strict=True))
    peaks, dearest = {}, {}
    for name in list(running.sides) if turns.memory or turns.operators else ():

        def further(side: Implementation) -> tuple[int | None, list[Operator] | None]:
            run = partial(side.step, side.prepared(first))
            peak = peak_on(device, run) if turns.memory else None
            return peak, operators_of(device, run, turns.operators) if turns.operators else None

        peaks[name], dearest[name] = running.attempt(name, further) or (None, None)
    if not running.sides:
        return []
    found = [
        figures(
            place,
            name,
            rounds[name],
            rounds[MASKED] if MASKED in running.sides else None,
            fill=_fill(side, timed),
            products=products,
            checked=checks[name],
            peak=peaks.get(name),
            operators=dearest.get(name),
        )
        for name, side in running.sides.items()
    ]
    print("\n".join(table_of(found)))
    print(verdict(found), flush=True)
    for name, operators in dearest.items():
        if operators is not None:
            print("\n".join([f"{name}, one step:", *table(operators)]), flush=True)
    return found


def _tell(when: str, samples: Mapping[str, Sequence[Sample]]) -> None:
    """Of each contender, what a step has taken."""
    means = {name: statistics.fmean(each.seconds for each in mine) for name, mine in samples.items() if mine}
    print(f"{when}: {', '.join(f'{name} {seconds * 1e3:,.0f} ms' for name, seconds in means.items())}", flush=True)


def _fastest_product(device: torch.device, precision: str) -> float:
    """FLOP/s, of square matrices of the size that is fastest here."""
    first, *larger = (2048, 4096, 8192) if device.type == "cuda" else (512, 1024, 2048)
    best = product_rate(device, precision, first, _SECONDS)
    for n in larger:
        if 6 * n**3 / best.flops > _LONGEST:
            break
        best = max(best, product_rate(device, precision, n, _SECONDS), key=lambda rate: rate.flops)
    told = f"products of {best.n:,} rows and columns, {precision}: {best.flops / 1e9:,.0f} GFLOP/s"
    print(f"{told}, by which MFU is measured", flush=True)
    return best.flops


def _shown(names: Iterable[str], doing: str) -> Iterator[str]:
    """One contender after another, with a bar: a step of a large model takes minutes on a few cores."""
    with progress(list(names), desc=doing, unit="step", leave=False) as bar:
        for name in bar:
            bar.set_postfix_str(name)
            yield name


def _timed(work: Work, side: Implementation) -> Sample:
    fresh = side.prepared(work)
    begin = time.perf_counter()
    side.step(fresh)
    seconds = time.perf_counter() - begin
    return Sample(seconds=seconds, tokens=work.step.tokens, sequences=work.step.sequences, flops=side.flops(work))


def _fill(side: Implementation, steps: Sequence[Work]) -> float:
    """Share of the slots that hold a token, over all of them."""
    return sum(work.step.tokens for work in steps) / sum(side.slots(work) for work in steps)


# --- `bench library` --------------------------------------------------------------------------------------------------

_SEQUENCES = {FULL: 16, PADDED: 64, SORTED: 64}
_MASKED_LM: dict[str, Any] = {"eps": 1e-5, "next_sentence": False}
_ARCHITECTURES: Mapping[str, Mapping[str, Any]] = {
    "bert": {},
    # Padding is piece 0 of the sequences here, not 1 as in RoBERTa's own tokenizer.
    "roberta": {**_MASKED_LM, "family": "roberta", "types": 1, "first_position": 1},
    "modernbert": {
        **{**_MASKED_LM, "family": "modernbert", "encoder": "modern", "types": 0, "window": 65, "global_every": 3},
        **{"rotary_base": 160_000.0, "local_rotary_base": 10_000.0},
    },
    "deberta-v2": {**_MASKED_LM, "family": "deberta-v2", "types": 0},
}
"""What they have beside BERT's sizes (Liu et al. 2019, arXiv 1907.11692; Warner et al. 2024, arXiv 2412.13663; He et
al. 2021, arXiv 2006.03654)."""
_WHY_WARMUP = (
    ": a contender's first step makes its optimiser's state, and may compile; timed, it would be compared with steps "
    "that do neither"
)


@dataclass(frozen=True, kw_only=True)
class Task:
    """What is measured."""

    presets: list[str]
    precisions: list[str]
    inputs: list[str]
    contenders: list[str]
    lengths: NDArray[np.int64]
    source: str
    """What to say of the lengths."""
    earlier: list[SideFigures]
    """The figures of other runs, to be drawn too."""


@dataclass(frozen=True, kw_only=True)
class LibraryCommand(Benchmark[Task]):
    """Time whole training steps (forward, backward, clipping, AdamW) of a model of transformers on padded batches and
    of this project's on packs of the same sequences, in turns, from the same weights."""

    architecture: Literal["bert", "roberta", "modernbert", "deberta-v2"] = "bert"
    """BertForPreTraining; or RobertaForMaskedLM, ModernBertForMaskedLM or DebertaV2ForMaskedLM, which learn masked
    tokens alone."""
    presets: str = "small,base"
    """Sizes of BERT to measure, with commas; base of ModernBERT is ModernBERT-base."""
    precisions: str = "fp32,bf16"
    """Types of the products, with commas: fp32, bf16 (transformers: torch.autocast)."""
    inputs: str = f"{FULL},{PADDED},{SORTED}"
    """Kinds of input, with commas: sequences without any padding; padded to the longest possible; sorted by length in
    the step, each micro-batch padded to its own longest."""
    contenders: str = f"{PLAIN},{MASKED},{OURS}"
    """Some of transformers, transformers-masked (its masked-LM head on the masked rows alone; always there, to compare
    with), transformers-unpadded (its modules on our packs), both of these with -compiled, ours, ours-rows (the last
    layer computes the rows that heads read), ours-compiled, ours-rows-compiled, both with -shadows (shadow
    weights), ours-graph (as CUDA graphs); in FP8, beside bf16 alone, ours-rows-fp8, ours-rows-compiled-fp8,
    ours-rows-compiled-tensorwise, ours-rows-compiled-delayed."""
    histogram: Path | None = None
    """JSON file: an object with `counts`, whose entry i counts the sequences of length i. Default: a formula."""
    length: Annotated[int, AtLeast(SHORTEST)] = 512
    """Tokens of the longest sequence, and slots of a pack."""
    sequences: Count | None = None
    """Of a step, rounded to whole micro-batches of packs. Default: 16 of kind full, else 64."""
    capacity: int | None = None
    """Slots of a pack. Default: --length."""
    micro_batch: Count = 8
    """Sequences of a padded micro-batch, at most: those of a step are dealt out evenly."""
    packs: Count | None = None
    """Packs of a packed one. Default: as many slots as a padded one has."""
    steps: Count = 1
    """Of a turn, each on other sequences."""
    rounds: Count = 5
    """Turns that each contender gets, one contender after another."""
    warmup: Annotated[int, AtLeast(1, why=_WHY_WARMUP)] = 1
    """Steps of each contender before that, at least 1, each on other sequences."""
    layers: Count | None = None
    """Transformer layers, instead of the preset's."""
    dropout: float = 0.1
    """Probability, of hidden states and attention weights; of ModernBERT, of attention's weights and output."""
    attention_dropout: float | None = None
    """That of attention weights, where it is another."""
    backend: Backend = "auto"
    """Of our attention."""
    flash_attention: FlashVersion | None = None
    """In the place of PyTorch's own FlashAttention-2, for all contenders: one whose package is installed."""
    vocab: int = 30522
    """Entries of the vocabulary."""
    threads: Count | None = None
    """Default: one a core."""
    seed: Natural = 0
    """Of weights, sequences and masks."""
    memory: bool = False
    """Also follow one step of each contender with a profiler: the most tensor memory at once."""
    operators: Natural = 0
    """Also follow one step of each contender with a profiler, and tell so many operators that took longest."""
    plot: PictureFile = None
    """PNG file of tokens a second: a panel for each preset and kind of input."""
    also: str | None = None
    """JSON files of earlier runs, with commas, whose figures --plot draws too."""

    launcher: ClassVar[str | None] = ONE_PROCESS
    at_once: ClassVar[bool] = True

    def plan(self) -> Task:
        if self.capacity is not None and self.capacity < self.length:
            raise ValueError(
                f"--capacity must be at least --length {self.length}, for a pack holds whole sequences. Got "
                f"{self.capacity}."
            )
        try:
            special_tokens(self.vocab)
        except ValueError as error:
            raise ValueError(f"--vocab {self.vocab} is too small: {error}") from None
        presets = listed("--presets", self.presets, PRESETS)
        precisions = listed("--precisions", self.precisions, LOSS_TOLERANCE)
        inputs = listed("--inputs", self.inputs, _SEQUENCES)
        contenders = listed("--contenders", self.contenders, CONTENDERS)
        if self.architecture != "bert" and UNPADDING & set(contenders):
            raise ValueError(
                f"{min(UNPADDING & set(contenders))} is made of the modules of the library's BERT. Got --architecture "
                f"{self.architecture}: leave it out of --contenders."
            )
        if MASKED not in contenders:
            raise ValueError(f"--contenders must have {MASKED} among them, to compare with. Got {self.contenders!r}.")
        for preset in presets:
            config = self.config(preset)
            for precision in precisions:
                self.check_backend(config, precision)
        self.check_earlier(set(product(map(self.name_of, presets), precisions, inputs, contenders)))
        check_fp8(contenders, precisions)
        if GRAPHED in contenders and _device().type != "cuda":
            raise ValueError(f"{GRAPHED} replays CUDA graphs, and no GPU is here. Leave it out of --contenders.")
        if self.flash_attention is not None:
            use_flash_attention(self.flash_attention, _device())
        if COMPILING & set(contenders):
            Cube.single(_device(), speed=ExecutionPolicy(compile=True))  # refuses where there is no compiler
        if find_spec("transformers") is None:
            raise ValueError("transformers is what is compared with, and is not installed: pip install transformers.")
        lengths, source = lengths_of(self.histogram, self.length, f"--length {self.length}. Raise that")
        return Task(
            presets=presets,
            precisions=precisions,
            inputs=inputs,
            contenders=contenders,
            lengths=lengths,
            source=source,
            earlier=self.earlier(),
        )

    def measure(self, plan: Task) -> Report:
        turns = Rounds(
            rounds=self.rounds, steps=self.steps, warmup=self.warmup, memory=self.memory, operators=self.operators
        )
        device = _device()
        with using_threads(self.threads or usable_cores()):
            print(f"lengths: {plan.source}; {torch.get_num_threads()} threads", flush=True)
            steps = {kind: self._works(kind, plan.lengths, device) for kind in plan.inputs}
            held = [input_figures(kind, mine[self.warmup :]) for kind, mine in steps.items()]
            print("\n".join(str(each) for each in held), flush=True)
            results: list[SideFigures] = []
            failed: list[dict[str, str]] = []
            for preset in plan.presets:
                config, asked = self.config(preset), (plan.precisions, plan.contenders)
                results += measure(
                    self.name_of(preset),
                    config,
                    *asked,
                    steps,
                    turns,
                    self.seed,
                    device,
                    failed,
                    self.backend,
                    capacity=self.capacity or self.length,
                )
        agreed = all_agree(results)
        content = {"lengths": plan.source, "inputs": as_json(held), "agree": agreed, "failed": failed}
        content["results"] = as_json(results)
        drawn = [*plan.earlier, *results]
        return Report(content=content, well=agreed and not failed, picture=partial(draw, drawn) if drawn else None)

    def check_backend(self, config: BertConfig, precision: str) -> None:
        """Raises ValueError where our attention cannot be by the backend, or not by the FlashAttention that is asked
        for."""
        if self.backend == "auto" and self.flash_attention is None:
            return
        device = _device()
        facts = AttentionRequest(
            device=device.type,
            dtype=TYPES[precision],
            head_dim=config.head_size,
            capability=torch.cuda.get_device_capability(device) if device.type == "cuda" else None,
            dropout=config.attention_dropout > 0,
            relative=config.has_relative_positions,
            flash=self.flash_attention,
        )
        if self.flash_attention is not None and (refusals := SUPPORT["varlen"].refusals(facts)):
            asked = f"--flash-attention {self.flash_attention}"
            raise ValueError(f"{asked} is for varlen, which in {precision} {'; it '.join(refusals)}.")
        if self.backend != "auto" and (refusals := SUPPORT[self.backend].refusals(facts)):
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

    def name_of(self, preset: str) -> str:
        """By which figures know the model: BERT's sizes as they are."""
        return preset if self.architecture == "bert" else f"{self.architecture}-{preset}"

    def config(self, preset: str) -> BertConfig:
        own = dict(_ARCHITECTURES[self.architecture])
        if (self.architecture, preset) == ("modernbert", "base"):
            own |= {"layers": 22, "inner": 1152}
        sizes = dataclasses.replace(PRESETS[preset], vocab=self.vocab, positions=max(512, self.length), **own)
        inner = self.attention_dropout
        return with_sizes(sizes, layers=self.layers, dropout=self.dropout, attention_dropout=inner)

    def _works(self, kind: str, lengths: NDArray[np.int64], device: torch.device) -> list[Work]:
        capacity = self.capacity or self.length
        return works(
            kind,
            lengths,
            steps=self.warmup + self.rounds * self.steps,
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
