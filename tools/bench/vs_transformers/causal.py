"""`bench causal`: training steps of a causal language model of `transformers`, by the library and on packs of the same
texts by `models.transformers_causal_lm`.

B texts of a padded micro-batch or packs of a packed one, W its width in tokens
"""

from __future__ import annotations

import statistics
import time
from abc import ABC, abstractmethod
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from importlib.util import find_spec
from itertools import pairwise
from pathlib import Path
from typing import Annotated, Any, ClassVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from models.gpt import CausalBatch, count_targets, lay, pack_texts
from models.gpt.causal_batch import NO_TARGET, Text
from models.transformers_causal_lm import PackedCausalLM
from tensor3d import Cube, CubeShape, clip_grad_norm_
from tensor3d.optim import AdamW, decay_groups
from tools.bench.harness.benchmark import OWN_PROCESSES, Benchmark, Count, Natural, Report, listed
from tools.bench.harness.figures import (
    Column,
    as_json,
    deal,
    flat,
    milliseconds,
    quartiles,
    relative_difference,
    spread,
    table,
)
from tools.bench.harness.processes import CubeHandle, Trial, interleave, start
from tools.bench.harness.synthetic_data import SHORTEST, lengths_of
from tools.bench.vs_transformers.figures import Operator, operators_of
from tools.bench.vs_transformers.figures import table as table_of_operators
from tools.common.bounds import AtLeast

PADDED, SORTED, UNMASKED = "transformers-padded", "transformers-sorted", "transformers-unmasked"
LIBRARY_PACKED, OURS = "transformers-packed", "ours"
LIBRARY = (PADDED, SORTED, UNMASKED, LIBRARY_PACKED)
SIDES = (*LIBRARY, OURS)
"""The library's model on texts as they come, each micro-batch padded to its longest; on texts sorted by length; on
these without an attention mask, which causal attention does not need where padding comes last; on packs, by positions
that start again; and ours on the same packs."""
LOSS_TOLERANCE, NORM_TOLERANCE = 1e-4, 1e-3
"""Relative differences that rounding can explain: of the loss of any step, and of the norm of the first gradients."""
_OPTIONS: dict[str, Any] = {"lr": 1e-4, "betas": (0.9, 0.95), "eps": 1e-8}
_DECAY = 0.1


@dataclass(frozen=True, kw_only=True)
class Task:
    """What is measured."""

    sides: list[str]
    shape: CubeShape
    histogram: NDArray[np.int64]
    source: str
    """What to say of the lengths."""


@dataclass(frozen=True, kw_only=True)
class CausalCommand(Benchmark[Task]):
    """Time training steps (forward, backward, AdamW, in fp32) of a small Llama: that of transformers on padded
    batches and on its own packed ones, and PackedCausalLM on packs of the same texts, in turns."""

    cube: str = "1x1x1"
    """Sizes of the axes x, y and z, as XxYxZ, of ours; transformers is one process with as many cores in all."""
    data_parallel: int = 1
    """Copies of the cube."""
    sides: str = ",".join(SIDES)
    """Which of them, with commas: transformers-padded (always there, to compare with), transformers-sorted (by length
    in the step), transformers-unmasked (the same without an attention mask), transformers-packed (the library's own
    packs), ours."""
    layers: Count = 4
    """Transformer blocks."""
    hidden: Count = 128
    """Columns of a hidden state."""
    heads: Count = 4
    """Of queries; divide --hidden."""
    kv_heads: Count = 2
    """Of keys and values; divide --heads."""
    inner: Count = 352
    """Columns inside the gated MLP."""
    vocab: Annotated[int, AtLeast(8)] = 2048
    """Entries of the vocabulary."""
    length: Annotated[int, AtLeast(SHORTEST)] = 256
    """Tokens of the longest text, and slots of a pack."""
    histogram: Path | None = None
    """JSON file: an object with `counts`, whose entry i counts the texts of length i. Default: a formula."""
    texts: Count = 32
    """Of a step."""
    batch: Count = 8
    """Texts of a padded micro-batch and packs of a packed one, at most: those of a step are dealt out evenly."""
    steps: Count = 10
    """Steps that are timed, of each side."""
    warmup: Count = 1
    """Steps before that, at least 1."""
    rounds: Count = 5
    """Turns that each side gets, one side after another; the steps are dealt out over them."""
    threads: Count | None = None
    """Of one process; a cube's processes share them. Default: one a core."""
    seed: Natural = 0
    """Of weights and texts."""
    operators: Natural = 0
    """Also follow one step of each side with a profiler, and tell so many operators that took longest."""

    launcher: ClassVar[str | None] = OWN_PROCESSES
    at_once: ClassVar[bool] = True

    def plan(self) -> Task:
        sides = listed("--sides", self.sides, SIDES, needs=PADDED, least=2)
        if self.hidden % (2 * self.heads) or self.heads % self.kv_heads:
            raise ValueError(
                f"--heads must divide --hidden, with an even head dimension, and --kv-heads divide --heads. Got hidden "
                f"{self.hidden}, heads {self.heads} and kv-heads {self.kv_heads}."
            )
        shape = CubeShape.parse(self.cube, self.data_parallel)
        shape.check_block(heads=self.heads, kv_heads=self.kv_heads, hidden=self.hidden, inner=self.inner)
        unit = packs_of_a_cube(shape)
        if self.batch % unit or shape.z * self.length % shape.y:
            raise ValueError(
                f"on {shape} --batch must divide by {unit}, and z*length by y. Got a batch of {self.batch} and texts "
                f"of {self.length} tokens."
            )
        if find_spec("transformers") is None:
            raise ValueError("transformers is what is compared with, and is not installed: pip install transformers.")
        histogram, source = lengths_of(self.histogram, self.length, f"--length {self.length}. Raise that")
        return Task(sides=sides, shape=shape, histogram=histogram, source=source)

    def measure(self, plan: Task) -> Report:
        print(f"lengths: {plan.source}; {self.texts} texts a step, cube {plan.shape}", flush=True)
        with ExitStack() as stack:
            found = measure(self, plan, stack)
        lines = [*table(found), *told(found, plan.shape)]
        for side in found:
            if side.operators is not None:
                lines += [f"{side.side}, one step:", *table_of_operators(side.operators)]
        content = {"lengths": plan.source, "cube": str(plan.shape), "results": as_json(found)}
        return Report(lines=lines, content=content, faults=faults(found))


def packs_of_a_cube(shape: CubeShape) -> int:
    """By what the packs of a micro-batch must divide."""
    return shape.planes * shape.z


# --- The texts of a step, as each side takes them ---------------------------------------------------------------------


def texts_of(histogram: NDArray[np.integer], number: int, vocab: int, seed: tuple[int, ...]) -> list[list[int]]:
    """Texts of random ids, with lengths drawn from the histogram; what is drawn depends on the arguments alone."""
    draw = np.random.default_rng(seed)
    weights = np.asarray(histogram, dtype=np.float64)
    lengths = draw.choice(len(weights), size=number, p=weights / weights.sum())
    return [draw.integers(vocab, size=length).tolist() for length in lengths]


@dataclass(frozen=True, kw_only=True, eq=False)
class LibraryBatch:
    """A micro-batch as the library takes it."""

    ids: Tensor
    """int64 (B, W)"""
    labels: Tensor
    """int64 (B, W): the ids themselves, which the library shifts; -100 at padding, and at the first of a text."""
    mask: Tensor | None
    """int64 (B, W): 1 where a token is."""
    positions: Tensor | None
    """int64 (B, W), of packs: from 0 in each text. None: the library counts."""

    def to(self, device: torch.device) -> LibraryBatch:
        moved: Any = {name: None if each is None else each.to(device) for name, each in vars(self).items()}
        return LibraryBatch(**moved)


def padded_batches(texts: Sequence[Text], size: int, *, by_length: bool, masked: bool) -> list[LibraryBatch]:
    """The texts dealt out evenly over as few micro-batches as there can be, each as wide as its longest text.

    Args:
        size: texts of a micro-batch, at most.
        by_length: whether they are sorted first.
        masked: whether padding is told by an attention mask.
    """
    if by_length:
        texts = sorted(texts, key=len)
    found = []
    for part in dealt(texts, size):
        width = max(map(len, part))
        ids = torch.tensor([[*text, *[0] * (width - len(text))] for text in part])
        mask = torch.arange(width) < torch.tensor([[len(text)] for text in part])
        labels = ids.masked_fill(~mask, NO_TARGET)
        labels[:, 0] = NO_TARGET
        found.append(LibraryBatch(ids=ids, labels=labels, mask=mask.long() if masked else None, positions=None))
    return found


def library_packs(packs: Sequence[Sequence[Text]], capacity: int, size: int) -> list[LibraryBatch]:
    """The packs as rows of ids, whose positions start again in each text; an unused tail is a text of its own.

    Args:
        size: packs of a micro-batch, at most.
    """
    found = []
    for part in dealt(packs, size):
        ids = torch.zeros(len(part), capacity, dtype=torch.int64)
        labels, positions = torch.full_like(ids, NO_TARGET), torch.zeros_like(ids)
        for row, pack in enumerate(part):
            first = 0
            for text in pack:
                end = first + len(text)
                ids[row, first:end] = labels[row, first:end] = torch.tensor(text)
                labels[row, first] = NO_TARGET
                positions[row, first:end] = torch.arange(len(text))
                first = end
            positions[row, first:] = torch.arange(capacity - first)
        found.append(LibraryBatch(ids=ids, labels=labels, mask=None, positions=positions))
    return found


def dealt(items: Sequence[Any], size: int, unit: int = 1) -> list[Sequence[Any]]:
    """Parts of at most `size` items, as few and as even as can be.

    Args:
        unit: by which the number of items of each part divides, as all of them do.
    """
    whole = len(items) // unit
    bounds = np.cumsum([0, *deal(whole, -(-len(items) // size))]) * unit
    return [items[first:end] for first, end in pairwise(bounds.tolist())]


# --- The sides --------------------------------------------------------------------------------------------------------


def llama(command: CausalCommand, device: torch.device) -> nn.Module:
    """The library's model, with random weights; the same whenever it is called."""
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=command.vocab,
        hidden_size=command.hidden,
        intermediate_size=command.inner,
        num_hidden_layers=command.layers,
        num_attention_heads=command.heads,
        num_key_value_heads=command.kv_heads,
        max_position_embeddings=command.length,
        attn_implementation="sdpa",
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(command.seed)
        model: nn.Module = LlamaForCausalLM(config)
    return model.to(device).train()


class Side(ABC):
    """A model with its optimiser."""

    model: nn.Module
    optimizer: torch.optim.Optimizer

    @abstractmethod
    def batches(self, texts: Sequence[Text]) -> list[Any]:
        """The micro-batches of a step, on the device."""

    @abstractmethod
    def loss(self, batch: Any, targets: int) -> Tensor:
        """Of one micro-batch, its part of the mean over the step's next tokens."""

    @abstractmethod
    def norm(self) -> float:
        """Of the gradients."""

    @abstractmethod
    def slots(self, batches: Sequence[Any]) -> int:
        """What it computes, padding included."""

    def gradients(self, batches: Sequence[Any], targets: int) -> Tensor:
        """Forward and backward of all micro-batches. The loss of the step."""
        losses = []
        for batch in batches:
            loss = self.loss(batch, targets)
            loss.backward()
            losses.append(loss.detach())
        return torch.stack(losses).sum()

    def step(self, batches: Sequence[Any], targets: int) -> float:
        """A whole training step; the loss, for which it waits."""
        loss = self.gradients(batches, targets)
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        return loss.item()

    def check(self, texts: Sequence[Text]) -> float:
        """The norm of the gradients; changes nothing."""
        self.gradients(self.batches(texts), targets_of(texts))
        norm = self.norm()
        self.optimizer.zero_grad(set_to_none=True)
        return norm


class Library(Side):
    """`transformers`' model, with its own loss.

    Args:
        side: one of `LIBRARY`.
    """

    def __init__(self, side: str, command: CausalCommand, device: torch.device) -> None:
        self._side, self._size, self._capacity, self._device = side, command.batch, command.length, device
        self.model = llama(command, device)
        self.optimizer = torch.optim.AdamW(decay_groups(self.model, _DECAY), fused=True, **_OPTIONS)

    def batches(self, texts: Sequence[Text]) -> list[Any]:
        if self._side == LIBRARY_PACKED:
            found = library_packs(pack_texts(texts, self._capacity), self._capacity, self._size)
        else:
            sort, masked = self._side != PADDED, self._side != UNMASKED
            found = padded_batches(texts, self._size, by_length=sort, masked=masked)
        return [batch.to(self._device) for batch in found]

    def loss(self, batch: LibraryBatch, targets: int) -> Tensor:
        # Without a cache, which the library's packs must not have.
        output = self.model(
            input_ids=batch.ids,
            attention_mask=batch.mask,
            position_ids=batch.positions,
            labels=batch.labels,
            use_cache=False,
            num_items_in_batch=targets,
        )
        loss: Tensor = output.loss
        return loss

    def norm(self) -> float:
        return torch.nn.utils.get_total_norm([p.grad for p in self.model.parameters() if p.grad is not None]).item()

    def slots(self, batches: Sequence[LibraryBatch]) -> int:
        return sum(batch.ids.numel() for batch in batches)


class Ours(Side):
    """`PackedCausalLM` of the same model, on a cube."""

    def __init__(self, command: CausalCommand, cube: Cube) -> None:
        self._cube, self._size, self._capacity = cube, command.batch, command.length
        self.model = PackedCausalLM(llama(command, cube.device), cube).train()
        self.optimizer = AdamW(decay_groups(self.model, _DECAY), cube, **_OPTIONS)

    def batches(self, texts: Sequence[Text]) -> list[Any]:
        unit = packs_of_a_cube(self._cube.shape)
        packs = pack_texts(texts, self._capacity, multiple_of=unit)
        return [lay(part, self._capacity, self._cube) for part in dealt(packs, self._size, unit)]

    def loss(self, batch: CausalBatch, targets: int) -> Tensor:
        loss: Tensor = self.model(batch, targets)
        return loss

    def norm(self) -> float:
        return clip_grad_norm_(self.model.parameters(), 1e9, self._cube).item()  # limits nothing

    def slots(self, batches: Sequence[CausalBatch]) -> int:
        return sum(batch.ids.numel() for batch in batches) * self._cube.shape.planes


def targets_of(texts: Sequence[Text]) -> int:
    """Next tokens of a step."""
    return count_targets([texts])


# --- The figures ------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class StepFigures:
    """One step of one side."""

    seconds: float
    tokens: int
    """Of the texts."""
    slots: int
    loss: float


class CausalTrial(Trial):
    """Some of the sides on one rank, halted between calls. A side's steps are of the same texts as those of others."""

    def __init__(
        self, cube: Cube, command: CausalCommand, histogram: NDArray[np.int64], sides: Sequence[str], ranks: int
    ) -> None:
        self._cube, self._command, self._histogram = cube, command, histogram
        own = [side for side in sides if cube.shape.ranks == (ranks if side == OURS else 1)]
        self._sides: dict[str, Side] = {
            side: Ours(command, cube) if side == OURS else Library(side, command, cube.device) for side in own
        }
        self._done = dict.fromkeys(own, 0)

    def check(self, side: str) -> float:
        """The norm of the gradients before any step."""
        return self._sides[side].check(self._texts(0))

    def sample(self, side: str) -> StepFigures:
        """The side's next step."""
        texts = self._texts(self._done[side])
        self._done[side] += 1
        batches, targets = self._sides[side].batches(texts), targets_of(texts)
        if self._cube.device.type == "cuda":
            torch.cuda.synchronize(self._cube.device)
        begin = time.perf_counter()
        loss = self._sides[side].step(batches, targets)
        seconds = time.perf_counter() - begin
        slots, tokens = self._sides[side].slots(batches), sum(map(len, texts))
        return StepFigures(seconds=seconds, tokens=tokens, slots=slots, loss=loss)

    def operators(self, side: str, most: int) -> list[Operator]:
        """The dearest of one more step."""
        texts = self._texts(0)
        batches = self._sides[side].batches(texts)
        run = partial(self._sides[side].step, batches, targets_of(texts))
        return operators_of(self._cube.device, run, most)

    def _texts(self, step: int) -> list[list[int]]:
        command = self._command
        return texts_of(self._histogram, command.texts, command.vocab, (command.seed, step))


@dataclass(frozen=True, kw_only=True)
class SideFigures:
    """One side."""

    side: Annotated[str, Column("side")]
    steps: int
    seconds_median: Annotated[float, milliseconds("step ms")]
    seconds_quartiles: Annotated[tuple[float, float], milliseconds("quartiles")]
    tokens_per_second: Annotated[float, Column("real tokens/s", ",.0f")]
    """Median of the rounds."""
    fill: Annotated[float, Column("fill", ".1%")]
    """Share of the slots that hold a token."""
    speed_up: Annotated[float, Column("speed-up", ".3f")]
    """Tokens/s over those of "transformers-padded"; median of the rounds."""
    speed_up_range: Annotated[tuple[float, float], Column("by round", ".2f")]
    """The lowest and the highest round."""
    first_loss: Annotated[float, Column("first loss", ".5f")]
    """Nats, of the first step."""
    last_loss: Annotated[float, Column("last loss", ".5f")]
    first_gradient_norm: float
    losses: tuple[float, ...]
    """Of all timed steps."""
    seconds: tuple[tuple[float, ...], ...]
    """Every step, by round."""
    operators: Sequence[Operator] | None
    """The dearest of one more step, by their own time. None: not measured."""


def measure(command: CausalCommand, task: Task, stack: ExitStack) -> list[SideFigures]:
    """All sides in turns; every second round runs backwards. Those of the library are one process."""
    one, shape = CubeShape(), task.shape
    shapes = [one] if shape.ranks == 1 else [one, shape]
    make = partial(CausalTrial, command=command, histogram=task.histogram, sides=task.sides, ranks=shape.ranks)
    groups = start(shapes, make, stack, cores=command.threads)
    of = {side: groups[-1] if side == OURS else groups[0] for side in task.sides}
    norms = {side: group.call(CausalTrial.check, side)[0] for side, group in of.items()}
    first = {side: _warmed_up(group, side, command.warmup) for side, group in of.items()}
    counts = deal(command.steps, command.rounds)
    found = interleave(
        task.sides,
        len(counts),
        # Ranks end a step together, for all have its loss.
        lambda i, number: of[task.sides[i]].call(Trial.turn, counts[number], task.sides[i])[0],
    )
    turns = dict(zip(task.sides, found, strict=True))
    dearest = {side: _operators(group, side, command.operators) for side, group in of.items()}
    return [
        figures(
            side,
            turns[side],
            turns[PADDED],
            first_loss=first[side],
            first_gradient_norm=norms[side],
            operators=dearest[side],
        )
        for side in task.sides
    ]


def _warmed_up(group: CubeHandle[CausalTrial], side: str, steps: int) -> float:
    """The loss of the first of so many steps."""
    first, *_ = [group.call(CausalTrial.sample, side)[0].loss for _ in range(steps)]
    return first


def _operators(group: CubeHandle[CausalTrial], side: str, most: int) -> list[Operator] | None:
    return group.call(CausalTrial.operators, side, most)[0] if most else None


def figures(
    side: str,
    turns: Sequence[Sequence[StepFigures]],
    padded: Sequence[Sequence[StepFigures]],
    *,
    first_loss: float,
    first_gradient_norm: float,
    operators: Sequence[Operator] | None = None,
) -> SideFigures:
    """Of turns on the same texts, by round."""
    every = flat(turns)
    low, median, high = quartiles([step.seconds for step in every])
    gains = [_speed(turn) / _speed(other) for turn, other in zip(turns, padded, strict=True)]
    return SideFigures(
        side=side,
        steps=len(every),
        seconds_median=median,
        seconds_quartiles=(low, high),
        tokens_per_second=statistics.median(map(_speed, turns)),
        fill=sum(step.tokens for step in every) / sum(step.slots for step in every),
        speed_up=statistics.median(gains),
        speed_up_range=spread(gains),
        first_loss=first_loss,
        last_loss=every[-1].loss,
        first_gradient_norm=first_gradient_norm,
        losses=tuple(step.loss for step in every),
        seconds=tuple(tuple(step.seconds for step in turn) for turn in turns),
        operators=operators,
    )


def _speed(turn: Sequence[StepFigures]) -> float:
    return sum(step.tokens for step in turn) / sum(step.seconds for step in turn)


def differences(found: Sequence[SideFigures]) -> tuple[float, float]:
    """The largest relative differences between sides: of the loss of any step, and of the norm of first gradients."""
    steps = [(side.first_loss, *side.losses) for side in found]
    losses = max(map(relative_difference, zip(*steps, strict=True)), key=lambda each: np.inf if each != each else each)
    return losses, relative_difference([side.first_gradient_norm for side in found])


def faults(found: Sequence[SideFigures]) -> list[str]:
    """What says that sides did not do the same work. What is no number is like nothing."""
    loss, norm = differences(found)
    if loss <= LOSS_TOLERANCE and norm <= NORM_TOLERANCE:
        return []
    return [
        f"sides learn different things: losses of a step differ by {loss:.1e} (at most {LOSS_TOLERANCE:g}), norms of "
        f"the first gradients by {norm:.1e} (at most {NORM_TOLERANCE:g})"
    ]


def told(found: Sequence[SideFigures], shape: CubeShape) -> list[str]:
    """In words."""
    loss, norm = differences(found)
    lines = [f"losses of a step differ by {loss:.1e} at most, norms of the first gradients by {norm:.1e}"]
    by_name = {side.side: side for side in found}
    others = [side for side in found if side.side != OURS]
    if OURS in by_name:
        best = max(others, key=lambda side: side.tokens_per_second)
        over = [
            statistics.fmean(theirs) / statistics.fmean(mine)
            for mine, theirs in zip(by_name[OURS].seconds, best.seconds, strict=True)
        ]
        where = "" if shape.ranks == 1 else f", on {shape}"
        lines.append(
            f"{OURS}{where} over {best.side}, the fastest of the library: {statistics.median(over):.3f} "
            f"({min(over):.2f}-{max(over):.2f} by round)"
        )
    return lines
