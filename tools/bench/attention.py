"""`bench attention`: attention of packed sequences against padded ones, and against what their squares predict.

h heads, d head dimension, T rows of all sequences, n sequences, L the longest
"""

from __future__ import annotations

import dataclasses
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal, cast

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor

from tensor3d import Sequences, attention
from tensor3d.attention.backends import SUPPORT, AttentionRequest, Name
from tensor3d.attention.flash_version import FlashVersion, use_flash_attention
from tensor3d.data import SpecialTokens
from tools.bench.harness.benchmark import ONE_PROCESS, Benchmark, Count, Report, listed
from tools.bench.harness.figures import Column, as_json, milliseconds, quartiles, table
from tools.bench.harness.processes import interleave, using_threads
from tools.bench.harness.synthetic_data import SHORTEST, RandomPairs, exponential_histogram
from tools.common.bounds import AtLeast, Share
from tools.common.machine import Machine
from tools.common.workers import usable_cores
from tools.packing.histogram import read_histogram

PADDED, FULL = "padded", "full"
_TYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
_PASSES = 10  # of a turn on a GPU, which is waited for at the end alone: a pass takes no longer than to wait for it
_CLOCKS = {"wall": time.perf_counter, "cpu": time.process_time}


@dataclass(frozen=True, kw_only=True)
class AttentionCommand(Benchmark[tuple[list[Name], list[int], str]]):
    """Time backends of attention, forward and backward, in turns with padded SDPA and with SDPA of full-length
    sequences, whose time for a score entry predicts what the sum of squared lengths should take."""

    histogram: Path | None = None
    """JSON file: an object with `counts`, whose entry i counts the sequences of length i. Default: a formula."""
    longest: Annotated[int, AtLeast(SHORTEST)] = 512
    """Tokens of the formula's longest sequence; the padded rows of a histogram are as long as its own longest."""
    tokens: Count = 16_384
    """Rows in all, nearly."""
    heads: Count = 8
    """Attention heads."""
    head_dim: Count = 64
    """Columns of a head."""
    type: Literal["fp32", "bf16"] = "fp32"
    """Of queries, keys and values."""
    backends: str = "grouped"
    """Some of grouped, varlen, flex and reference, with commas."""
    window: Count | None = None
    """Each backend is measured once more with this window."""
    dropout: Annotated[float, Share()] = 0.0
    """Of the probabilities."""
    flash_attention: FlashVersion | None = None
    """In the place of PyTorch's own FlashAttention-2, for varlen: one whose package is installed."""
    rounds: Count = 7
    """Turns that each gets, on a GPU of ten passes; one more before them is not counted."""
    threads: Count | None = None
    """Default: one a core."""
    clock: Literal["wall", "cpu"] = "wall"
    """cpu: what all threads of this process have computed, which other work on the machine disturbs less."""

    launcher: ClassVar[str | None] = ONE_PROCESS

    def plan(self) -> tuple[list[Name], list[int], str]:
        """The backends that are asked for, and the lengths with what to say of them."""
        names = listed("--backends", self.backends, SUPPORT)
        device = _device()
        capability = torch.cuda.get_device_capability() if device == "cuda" else None
        facts = AttentionRequest(
            device=device,
            dtype=_TYPES[self.type],
            head_dim=self.head_dim,
            capability=capability,
            dropout=self.dropout > 0,
            flash=self.flash_attention,
        )
        backends = cast("list[Name]", names)
        for name in backends:
            if refusals := SUPPORT[name].refusals(facts):
                raise ValueError(f"{name} cannot be measured here: it {'; it '.join(refusals)}.")
        if self.flash_attention is not None:
            if "varlen" not in backends:
                raise ValueError(f"--flash-attention is for the backend varlen. Got --backends {self.backends}.")
            use_flash_attention(self.flash_attention, torch.device(device))
        return backends, *self.lengths()

    def measure(self, plan: tuple[list[Name], list[int], str]) -> Report:
        names, lengths, source = plan
        with using_threads(self.threads or usable_cores()):
            threads = torch.get_num_threads()
            results = measure(self, names, lengths)
        flash = "" if self.flash_attention is None else f", varlen by {self.flash_attention}"
        lines = [
            f"{len(lengths)} sequences of {sum(lengths)} tokens in all, lengths: {source}",
            f"{self.heads} heads of {self.head_dim}, {self.type}, dropout {self.dropout:g}{flash}",
            f"{threads} threads, {self.rounds} rounds",
            *table(results),
        ]
        options = {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}
        content = {
            **{name: value for name, value in options.items() if not isinstance(value, Path)},
            "threads": threads,
            "lengths": lengths,
            "source": source,
            "load_after": Machine.here().load,
            "results": as_json(results),
        }
        return Report(lines=lines, content=content)

    def lengths(self) -> tuple[list[int], str]:
        """Of each sequence, and what to say of them."""
        if self.histogram is None:
            counts, source = exponential_histogram(self.longest), f"exponential, cut at {self.longest}"
        else:
            counts, source = np.trim_zeros(read_histogram(self.histogram), "b"), str(self.histogram)
        return drawn(counts, self.tokens), source


def drawn(counts: NDArray[np.int64], tokens: int) -> list[int]:
    """Lengths as the histogram has them, about so many tokens in all, in an order drawn at random."""
    mean = float((counts * np.arange(len(counts))).sum() / counts.sum())
    special = SpecialTokens(vocab_size=1000, pad=0, cls=1, sep=2, mask=3)  # of whose ids nothing is drawn here
    pairs = RandomPairs(counts, max(1, round(tokens / mean)), special=special, seed=0)
    return [int(length) for length in pairs.draw(0).lengths]


@dataclass(frozen=True, kw_only=True)
class AttentionFigures:
    """Of one way to attend. Seconds of one forward and backward pass."""

    name: Annotated[str, Column("attention")]
    seconds: list[float]
    """By round."""
    median: Annotated[float, milliseconds("ms")]
    quartiles: Annotated[tuple[float, float], milliseconds("quartiles")]
    faster_than_padded: Annotated[float, Column("x faster than padded", ".2f")]
    """Median over the rounds of padded / this."""
    of_prediction: Annotated[float, Column("x of prediction", ".3f")]
    """Median over the rounds of this / predicted: the sum of squared lengths times the seconds that full-length SDPA
    takes for a score entry, in the same round."""
    flops: Annotated[float, Column("GFLOP/s", ",.0f", 1e-9)]
    """FLOP/s of the model, of the median: q kᵀ and weights · v of each sequence alone, and twice that backward."""
    calls: Annotated[int, Column("calls")]
    """Of SDPA or of another kernel."""
    area: Annotated[float, Column("area", ".3f")]
    """Score entries that are computed, over the sum of squared lengths."""


def measure(command: AttentionCommand, names: Sequence[Name], lengths: list[int]) -> list[AttentionFigures]:
    """All in turns: padded and full-length SDPA first."""
    squares, longest = sum(length**2 for length in lengths), max(lengths)
    whole = max(1, squares // longest**2)
    sequences = Sequences.from_lengths(lengths, _device())
    passes: dict[str, Callable[[], object]] = {
        PADDED: _sdpa(command, len(lengths), longest, lengths),
        FULL: _sdpa(command, whole, longest, None),
    }
    for name in names:
        passes[name] = _packed(command, name, sequences, None)
        if command.window is not None:
            passes[f"{name}, window {command.window}"] = _packed(command, name, sequences, command.window)
    clock = _CLOCKS[command.clock]

    def turn(i: int, number: int) -> float:
        return _seconds(list(passes.values())[i], clock, gpu=_device() == "cuda")

    taken = interleave(list(passes), command.rounds + 1, turn)
    seconds = {name: each[1:] for name, each in zip(passes, taken, strict=True)}
    predicted = [each / (whole * longest**2) * squares for each in seconds[FULL]]
    grouped = sequences.grouping
    work = {
        PADDED: (1, len(lengths) * longest**2 / squares),
        FULL: (1, whole * longest**2 / squares),
        "grouped": (len(grouped.groups), sum(len(g.members) * g.length**2 for g in grouped.groups) / squares),
        "reference": (1, sum(lengths) ** 2 / squares),
    }
    needed = 3 * 4 * command.heads * command.head_dim * squares
    if command.window is not None:
        blocks = sequences.grouping_of(None, command.window).groups
        area = sum(group.asking_slots * group.length for group in blocks) / squares
        work[f"grouped, window {command.window}"] = (len(blocks), area)
    of_full = whole * longest**2 / squares  # which are other sequences
    return [
        figures(
            name,
            seconds[name],
            seconds[PADDED],
            predicted,
            work.get(name, (1, 1.0)),
            needed * (of_full if name == FULL else 1.0),
        )
        for name in passes
    ]


def _seconds(run: Callable[[], object], clock: Callable[[], float], *, gpu: bool) -> float:
    """Of one pass."""
    often, before = _PASSES if gpu else 1, clock()
    for _ in range(often):
        run()
    if gpu:
        torch.cuda.synchronize()
    return (clock() - before) / often


def figures(
    name: str,
    seconds: list[float],
    padded: Sequence[float],
    predicted: Sequence[float],
    work: tuple[int, float],
    needed: float,
) -> AttentionFigures:
    """Ratios are taken in each round: what slows the machine down for a while meets both sides.

    Args:
        work: calls and area.
        needed: FLOPs of the model.
    """
    first, median, third = quartiles(seconds)
    return AttentionFigures(
        name=name,
        seconds=seconds,
        median=median,
        quartiles=(first, third),
        faster_than_padded=statistics.median(a / b for a, b in zip(padded, seconds, strict=True)),
        of_prediction=statistics.median(a / b for a, b in zip(seconds, predicted, strict=True)),
        flops=needed / median,
        calls=work[0],
        area=work[1],
    )


def _sdpa(command: AttentionCommand, count: int, longest: int, lengths: list[int] | None) -> Callable[[], object]:
    """One sequence a row; with `lengths`, a mask hides the padded keys, as in the library transformers."""
    device = _device()
    mask = None
    if lengths is not None:
        mask = (torch.arange(longest) < torch.tensor(lengths)[:, None])[:, None, None].to(device)

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        q, k, v = (t.transpose(1, 2) for t in (q, k, v))
        return F.scaled_dot_product_attention(q, k, v, attn_mask=mask, dropout_p=command.dropout).transpose(1, 2)

    return _pass(attend, (count, longest, command.heads, command.head_dim), _TYPES[command.type])


def _packed(command: AttentionCommand, name: Name, sequences: Sequences, window: int | None) -> Callable[[], object]:
    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return attention(q, k, v, sequences, backend=name, dropout=command.dropout, window=window)

    return _pass(attend, (sequences.rows, command.heads, command.head_dim), _TYPES[command.type])


def _pass(
    attend: Callable[[Tensor, Tensor, Tensor], Tensor], shape: Sequence[int], dtype: torch.dtype
) -> Callable[[], object]:
    device = _device()
    generator = torch.Generator(device).manual_seed(0)
    drawn: Mapping[str, Any] = {"generator": generator, "device": device, "dtype": dtype}
    direction, *qkv = (torch.randn(*shape, **drawn) for _ in range(4))
    for tensor in qkv:
        tensor.requires_grad_()

    def once() -> None:
        attend(*qkv).backward(direction)
        for tensor in qkv:
            tensor.grad = None

    return once


def _device() -> str:
    return "cuda" if torch.cuda.is_available() else "cpu"
