"""`bench compile`: a training step with compiled regions and without, side by side, and each region alone."""

from __future__ import annotations

import dataclasses
import statistics
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, ClassVar, Literal, cast, get_args

import torch
import torch.distributed as dist
import tyro
from torch import Tensor, nn
from tqdm import tqdm

from models.bert import PRESETS, BertConfig, BertForPreTraining
from tensor3d import (
    Cube,
    CubeShape,
    ExecutionPolicy,
    LayerNorm3D,
    MixedPrecisionPolicy,
    TransformerLayer3D,
    constant,
    cross_entropy,
)
from tensor3d.distributed import process_group
from tensor3d.layers.mlp import add_bias_and_activate, add_dropped
from tensor3d.ops.activations import activated
from tensor3d.ops.dropout import drop
from tensor3d.optim import Lamb, StableAdamW, decay_groups
from tensor3d.sharding.param_layout import local, vector
from tools.bench.harness.benchmark import Benchmark, Count, Report, cubes_of, listed
from tools.bench.harness.figures import (
    Column,
    as_json,
    deal,
    flat,
    means,
    mebibytes,
    milliseconds,
    ratios_of,
    spread,
    table,
)
from tools.bench.harness.memory import counting_kept, peak_on
from tools.bench.harness.processes import Trial, check_world, is_shown, start, take_case_turns
from tools.bench.vs_pytorch.trial import Implementation, make_ours
from tools.bench.vs_pytorch.work import Work, packed_batch
from tools.training.config import read_config

# --- What a rank does for `bench compile`: the same model eager and compiled, in the same process, in turns -----------

Side = Literal["eager", "compiled"]
Type = Literal["fp32", "bf16"]
Case = tuple[Type, Side]
SIDES: tuple[Side, ...] = ("eager", "compiled")
COMPUTE: dict[Type, torch.dtype | None] = {"fp32": None, "bf16": torch.bfloat16}


def cases_of(types: Sequence[Type]) -> list[Case]:
    return [(kind, side) for kind in types for side in SIDES]


def cube_of(cube: Cube, case: Case) -> Cube:
    """The same processes, computing in that type and way."""
    kind, side = case
    return cube.with_policy(MixedPrecisionPolicy(compute=COMPUTE[kind]), ExecutionPolicy(compile=side == "compiled"))


def lock_bars_here() -> None:
    """The compiler asks for tqdm's lock, by default one of all processes, which a rank would leave behind."""
    tqdm.set_lock(threading.RLock())


def now(device: torch.device) -> float:
    """Seconds, when the device has done what it was given."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter()


@dataclass(frozen=True, kw_only=True)
class Facts:
    """One side on one rank."""

    device: str
    threads: int
    warmup: float
    """Seconds of all steps before the timed ones; compilation is in the first."""
    loss: float
    """Of the weights at the start, without dropout."""
    saved: int
    """Bytes that autograd keeps for backward, without parameters."""
    peak: int
    """The most bytes of tensors at once in a step, above those that stay."""


class CompileTrial(Trial):
    """Both sides in all types on one rank, halted between calls.

    Args:
        warmup: steps of each at the start, at least 1.
    """

    def __init__(self, cube: Cube, work: Work, types: Sequence[Type], warmup: int) -> None:
        lock_bars_here()
        self._cube, self._work = cube, work
        self._cases: dict[Case, Implementation] = {}
        self.facts: dict[Case, Facts] = {}
        for case in cases_of(types):
            self._cases[case], self.facts[case] = self._begun(case, warmup)

    def sample(self, case: Case) -> float:
        """Seconds of a step."""
        return self._step(self._cases[case])

    def _begun(self, case: Case, warmup: int) -> tuple[Implementation, Facts]:
        own = cube_of(self._cube, case)
        contender = make_ours(self._work, own)
        loss = self._loss(contender, own)
        begin = now(own.device)
        for _ in range(warmup):
            self._step(contender)
        seconds = now(own.device) - begin
        with counting_kept(contender.model) as passes:
            self._step(contender)
        facts = Facts(
            device=own.device.type,
            threads=torch.get_num_threads(),
            warmup=seconds,
            loss=loss,
            saved=passes[0].kept,
            peak=peak_on(own.device, contender.step),
        )
        return contender, facts

    def _loss(self, contender: Implementation, cube: Cube) -> float:
        model, work = contender.model, self._work
        assert isinstance(model, BertForPreTraining)
        model.eval()
        with torch.no_grad():
            output = model(packed_batch(work, cube), work.sequences * work.masked, work.sequences)
        model.train()
        return float(output.loss)

    def _step(self, contender: Implementation) -> float:
        if dist.is_initialized():
            dist.barrier()
        begin = now(self._cube.device)
        contender.step()
        return now(self._cube.device) - begin


# ----------------------------------------------------------------------------------------------------------------------
# The regions of `bench compile`, each alone, forward and backward: as a layer calls them, eager and compiled. And those
# of the optimisers that have some, a step of them.
#
# M tokens, R masked ones, H hidden size, I inner size, V vocabulary


@dataclass(frozen=True, kw_only=True)
class RegionFacts:
    """A region on one side."""

    elements: int
    """Of its largest input; of the optimisers, of all parameters."""
    first: float
    """Seconds of its first call in each direction, which compiles it."""


@dataclass(frozen=True, kw_only=True)
class _Region:
    elements: int
    call: Callable[[], object]


class RegionTrial(Trial):
    """All regions of a model's sizes on one rank, halted between calls."""

    def __init__(self, cube: Cube, work: Work, types: Sequence[Type]) -> None:
        lock_bars_here()
        self._device = cube.device
        self._regions: dict[tuple[str, Case], _Region] = {}
        self.facts: dict[tuple[str, Case], RegionFacts] = {}
        for case in cases_of(types):
            own = cube_of(cube, case)
            own.manual_seed(work.seed)
            for name, region in regions(work, own, COMPUTE[case[0]] or torch.float32).items():
                self._regions[name, case] = region
                self.facts[name, case] = RegionFacts(elements=region.elements, first=self._timed(region))

    def sample(self, name: str, case: Case) -> float:
        """Seconds of a call."""
        return self._timed(self._regions[name, case])

    def _timed(self, region: _Region) -> float:
        begin = now(self._device)
        region.call()
        return now(self._device) - begin


def regions(work: Work, cube: Cube, dtype: torch.dtype) -> dict[str, _Region]:
    """Each of them on a cube of one rank, by name."""
    c, rows, masked = work.config, work.tokens, work.sequences * work.masked
    compiled, p = cube.speed.compile, c.dropout
    norm = LayerNorm3D(c.hidden, cube, eps=c.eps)
    bias = constant((c.inner_size,), vector("y"), cube, 0.1)
    labels = torch.randint(0, c.vocab, (masked,), device=cube.device)
    hidden = [_leaf(rows, c.hidden, cube, dtype) for _ in range(3)]
    a, b, _ = hidden

    def with_bias(x: Tensor) -> Tensor:
        if compiled:
            return add_bias_and_activate(x, bias, c.activation, cube, "y")
        return activated(_Biased.apply(x, bias, cube), c.activation)

    def dropped() -> Tensor:
        return norm(a, b, dropout=p)

    inner, logits = _leaf(rows, c.inner_size, cube, dtype), _leaf(masked, c.vocab, cube, dtype)
    found: dict[str, tuple[Callable[[], Tensor], list[Tensor]]] = {
        f"bias + {c.activation}": (lambda: with_bias(inner), [inner]),
        "LayerNorm": (lambda: norm(a), [a]),
        "residual + LayerNorm": (lambda: norm(a, b), [a, b]),
        "embedding sum + LayerNorm": (lambda: norm(*hidden), hidden),
        "cross-entropy": (lambda: cross_entropy(logits, labels, c.vocab, cube)[0], [logits]),
    }
    if p:
        found["dropout + residual + LayerNorm"] = (dropped, [a, b])
        found["dropout + residual"] = (
            lambda: add_dropped(a, b, p, cube, "z") if compiled else a + drop(b, p),
            [a, b],
        )
    made = {name: _region(forward, leaves) for name, (forward, leaves) in found.items()}
    if dtype == torch.float32:  # as parameters are whatever products compute in
        made |= {f"{kind.__name__}, a step": _optimizer(kind, c, cube) for kind in (Lamb, StableAdamW)}
    return made


class _Biased(torch.autograd.Function):
    """x + bias, with the gradients of both, as a product has it."""

    @staticmethod
    def forward(ctx: object, x: Tensor, bias: nn.Parameter, cube: Cube) -> Tensor:
        return x + local(bias).to(x.dtype)

    @staticmethod
    def backward(ctx: object, dy: Tensor) -> tuple[Tensor, None, None]:
        dy.sum(0, dtype=torch.float32)
        return dy, None, None


def _optimizer(kind: type[Lamb | StableAdamW], c: BertConfig, cube: Cube) -> _Region:
    """A step of one layer's parameters."""
    layer = TransformerLayer3D(c.hidden, c.heads, cube, inner=c.inner_size)
    for parameter in layer.parameters():
        parameter.grad = torch.randn_like(parameter)
    optimizer = kind(decay_groups(layer, 0.01), cube, lr=1e-4)
    return _Region(elements=sum(p.numel() for p in layer.parameters()), call=optimizer.step)


def _leaf(rows: int, columns: int, cube: Cube, dtype: torch.dtype) -> Tensor:
    return torch.randn(rows, columns, device=cube.device).to(dtype).requires_grad_()


def _region(forward: Callable[[], Tensor], leaves: list[Tensor]) -> _Region:
    arriving: list[Tensor] = []  # made once, at the first call

    def call() -> None:
        for leaf in leaves:
            leaf.grad = None
        result = forward()
        if not arriving:
            arriving.append(torch.ones_like(result))
        result.backward(arriving[0])

    return _Region(elements=max(leaf.numel() for leaf in leaves), call=call)


# --- The figures of `bench compile`, made of what all ranks noted in all rounds ---------------------------------------

# Relative, of first losses: what rounding explains with a wide margin.
_TOLERANCE: dict[Type, float] = {"fp32": 1e-4, "bf16": 2e-2}


@dataclass(frozen=True, kw_only=True)
class StepFigures:
    """A step on one cube in one type. Seconds of a step are the mean over the ranks."""

    cube: str
    ranks: int
    device: str
    threads: int
    """Of each rank."""
    type: Type
    seconds: dict[Side, float]
    """Median of the steps."""
    ratio: float
    """Compiled over eager: the median of the ratios of the rounds."""
    ratio_range: tuple[float, float]
    """The lowest and the highest of a round."""
    warmup: dict[Side, float]
    """Seconds of all steps before the timed ones, on the slowest rank: the compiled side compiles in them, unless it
    finds what an earlier run has left on the disk."""
    loss: dict[Side, float]
    """Of the weights at the start, without dropout."""
    saved: dict[Side, int]
    """Bytes kept by autograd for backward, on the rank that keeps most."""
    peak: dict[Side, int]
    """The most bytes of tensors at once in a step, above those that stay, on the rank that needs most."""
    rounds: dict[Side, list[list[float]]]
    """Seconds of every step, by round."""

    COLUMNS: ClassVar[tuple[Column, ...]] = (
        Column("cube", of="cube"),
        Column("type", of="type"),
        Column("threads", of="threads"),
        milliseconds("eager ms", of="seconds.eager"),
        milliseconds("compiled ms", of="seconds.compiled"),
        Column("ratio", ".3f", of="ratio"),
        Column("by round", ".2f", of="ratio_range"),
        Column("warm-up s", ".1f", of="warmup.eager"),
        Column("compiled s", ".1f", of="warmup.compiled"),
        mebibytes("saved MiB", of="saved.eager"),
        mebibytes("compiled", of="saved.compiled"),
        mebibytes("peak MiB", of="peak.eager"),
        mebibytes("compiled", of="peak.compiled"),
        Column("losses differ by", ".1e", of="loss_difference"),
    )

    @property
    def loss_difference(self) -> float:
        return abs(self.loss["compiled"] / self.loss["eager"] - 1)


@dataclass(frozen=True, kw_only=True)
class RegionFigures:
    """One region, forward and backward, on one rank."""

    region: str
    type: Type
    elements: int
    """Of its largest input."""
    seconds: dict[Side, float]
    """Median of the calls."""
    ratio: float
    """Compiled over eager: the median of the ratios of the rounds."""
    ratio_range: tuple[float, float]
    first: dict[Side, float]
    """Seconds of the first call."""
    rounds: dict[Side, list[list[float]]]

    COLUMNS: ClassVar[tuple[Column, ...]] = (
        Column("region", of="region"),
        Column("type", of="type"),
        Column("elements", ",", of="elements"),
        Column("eager M/s", ".1f", 1e-6, of="speed.eager"),
        Column("compiled M/s", ".1f", 1e-6, of="speed.compiled"),
        Column("ratio", ".3f", of="ratio"),
        Column("by round", ".2f", of="ratio_range"),
        Column("first call s", ".1f", of="first.compiled"),
    )

    @property
    def speed(self) -> dict[Side, float]:
        """Elements a second, forward and backward together."""
        return {side: self.elements / seconds for side, seconds in self.seconds.items()}


def step_figures(
    shape: CubeShape,
    kind: Type,
    turns: Mapping[Case, Sequence[Sequence[Sequence[float]]]],
    facts: Sequence[Mapping[Case, Facts]],
) -> StepFigures:
    """The figures of one cube and type.

    Args:
        turns: seconds of steps by round, rank and step, of each case.
        facts: by rank.
    """
    rounds = {side: [means(turn) for turn in turns[kind, side]] for side in SIDES}
    own = {side: [fact[kind, side] for fact in facts] for side in SIDES}
    return StepFigures(
        cube=f"{shape.x}x{shape.y}x{shape.z}",
        ranks=shape.ranks,
        device=own["eager"][0].device,
        threads=own["eager"][0].threads,
        type=kind,
        **_compared(rounds),
        warmup={side: max(fact.warmup for fact in own[side]) for side in SIDES},
        loss={side: own[side][0].loss for side in SIDES},
        saved={side: max(fact.saved for fact in own[side]) for side in SIDES},
        peak={side: max(fact.peak for fact in own[side]) for side in SIDES},
        rounds=rounds,
    )


def region_figures(
    name: str,
    kind: Type,
    turns: Mapping[tuple[str, Case], Sequence[Sequence[float]]],
    facts: Mapping[tuple[str, Case], RegionFacts],
) -> RegionFigures:
    """The figures of one region and type; `turns` by round and call."""
    rounds = {side: [list(turn) for turn in turns[name, (kind, side)]] for side in SIDES}
    return RegionFigures(
        region=name,
        type=kind,
        elements=facts[name, (kind, "eager")].elements,
        **_compared(rounds),
        first={side: facts[name, (kind, side)].first for side in SIDES},
        rounds=rounds,
    )


def _compared(rounds: Mapping[Side, Sequence[Sequence[float]]]) -> dict[str, Any]:
    """Seconds of both sides, and what is said of their ratio."""
    ratios = ratios_of(rounds["compiled"], rounds["eager"])
    seconds = {side: statistics.median(flat(rounds[side])) for side in SIDES}
    return {"seconds": seconds, "ratio": statistics.median(ratios), "ratio_range": spread(ratios)}


def faults(steps: Sequence[StepFigures]) -> list[str]:
    """What makes the figures wrong, in words."""
    return [
        f"cube {each.cube}, {each.type}: the losses of both sides differ by {each.loss_difference:.1e}, allowed is "
        f"{_TOLERANCE[each.type]:g}; their times are no comparison"
        for each in steps
        if not each.loss_difference <= _TOLERANCE[each.type]  # NaN too
    ]


# --- `bench compile` --------------------------------------------------------------------------------------------------

Preset = Literal["tiny", "mini", "small", "base", "large"]


@dataclass(frozen=True, kw_only=True)
class CompileCommand(Benchmark[tuple[list[CubeShape], list[Type]]]):
    """Time BERT steps with compiled regions and without, in turns in the same processes, and each region alone."""

    recipe: tyro.conf.Positional[Path | None] = None
    """TOML file whose model is measured, in place of a preset."""
    preset: Preset = "small"
    """Sizes of the model."""
    cubes: str = "1x1x1"
    """Cubes to measure, as XxYxZ,XxYxZ,..."""
    types: str = "fp32"
    """In which is computed: fp32, bf16, or both with a comma."""
    dropout: float | None = None
    """Of hidden states; attention has none. Default: that of the model."""
    sequences: Count = 8
    """Of the global batch. All are full."""
    length: Count = 128
    """Tokens of a sequence."""
    steps: Count = 10
    """Steps that are timed, of each side; and calls of each region."""
    warmup: Count = 2
    """Steps before that, at least 1. The first one compiles."""
    rounds: Count = 5
    """Turns that each side gets; the steps are dealt out over them."""
    regions: bool = True
    """Measure each region alone, too, on one rank. Not under torchrun."""

    def config(self) -> BertConfig:
        """The model's sizes."""
        found = PRESETS[self.preset]
        if self.recipe is not None:
            recipe = read_config(self.recipe)
            found = recipe.model.config(recipe.data)
        dropout = found.dropout if self.dropout is None else self.dropout
        positions = max(found.positions, self.length)
        of_attention = found.attention_out_dropout if self.dropout is None else None
        return dataclasses.replace(
            found, dropout=dropout, attention_dropout=0.0, attention_out_dropout=of_attention, positions=positions
        )

    def work(self) -> Work:
        return Work(what="step", config=self.config(), sequences=self.sequences, length=self.length)

    def plan(self) -> tuple[list[CubeShape], list[Type]]:
        """Cubes and types."""
        types = listed("--types", self.types, get_args(Type))
        shapes = cubes_of(self.cubes)
        for shape in shapes:
            self.work().check_cube(shape)
        check_world(shapes)
        if self.regions and process_group.is_launched():
            raise ValueError(
                "regions are measured in one process of their own, and torchrun, srun or mpirun has started all there "
                "are. Add --no-regions, or call python -m tools.bench itself."
            )
        return shapes, cast("list[Type]", types)

    def measure(self, plan: tuple[list[CubeShape], list[Type]]) -> Report:
        shapes, types = plan
        config, counts = self.config(), deal(self.steps, self.rounds)
        (steps, shown), regions = self.measure_steps(shapes, types, counts), list[RegionFigures]()
        if self.regions:
            regions = self.measure_regions(types, counts)
        sizes = f"{config.layers} layers, hidden {config.hidden}, vocabulary {config.vocab}, dropout {config.dropout:g}"
        lines = [
            f"{sizes}; {self.sequences} sequences of {self.length} tokens; {self.steps} steps of each side in "
            f"{len(counts)} rounds; ratios are compiled over eager",
            *table(steps),
            *(table(regions) if regions else []),
        ]
        content = {
            "model": dataclasses.asdict(config),
            "rounds": counts,
            "steps": as_json(steps),
            "regions": as_json(regions),
        }
        return Report(lines=lines, content=content, faults=faults(steps), shown=shown)

    def measure_steps(
        self, shapes: Sequence[CubeShape], types: Sequence[Type], counts: Sequence[int]
    ) -> tuple[list[StepFigures], bool]:
        """The figures, and whether this process is the one that shows them."""
        cases, make = cases_of(types), partial(CompileTrial, work=self.work(), types=types, warmup=self.warmup)
        found, shown = list[StepFigures](), True
        for shape in shapes:
            with ExitStack() as stack:
                (part,) = start([shape], make, stack)
                shown = is_shown()
                names = {f"{shape}, {kind}, {side}": ((kind, side),) for kind, side in cases}
                turns = take_case_turns(part, names, counts, shown=shown)
                facts = part.call(CompileTrial.get_facts)
            by_case = dict(zip(cases, turns, strict=True))
            found += [step_figures(shape, kind, by_case, facts) for kind in types]
        return found, shown

    def measure_regions(self, types: Sequence[Type], counts: Sequence[int]) -> list[RegionFigures]:
        with ExitStack() as stack:
            (part,) = start([CubeShape()], partial(RegionTrial, work=self.work(), types=types), stack)
            facts = part.call(RegionTrial.get_facts)[0]
            turns = take_case_turns(
                part, {f"{name}, {case[0]}, {case[1]}": (name, case) for name, case in facts}, counts
            )
        by_case = {key: [rank for (rank,) in mine] for key, mine in zip(facts, turns, strict=True)}
        names = list(dict.fromkeys(name for name, _ in facts))
        return [region_figures(name, kind, by_case, facts) for kind in types for name in names]
