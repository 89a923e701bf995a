"""What one rank does for `bench matmul` and `bench layer`: forward and backward passes, timed, counted and weighed."""

from __future__ import annotations

import dataclasses
import math
import statistics
import time
from abc import abstractmethod
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from typing import Annotated, Literal

import numpy as np
import torch
from torch import Tensor, nn

from tensor3d import Cube, CubeShape, MixedPrecisionPolicy, Sequences, TransformerLayer3D, matmul, normal, shard
from tensor3d.cost_model.comm_volume import Bytes, CommModel, product, replicated_gradients, transformer_layer
from tensor3d.layers.attention import Recompute
from tensor3d.ops.seeds import mix
from tensor3d.sharding.activation_layout import Face, other
from tensor3d.sharding.param_layout import local, matrix, owns_for_norm
from tools.bench.harness.benchmark import Benchmark, Count, Report, cubes_of
from tools.bench.harness.figures import Column, Times, as_json, deal, means, mebibytes, milliseconds, table, times
from tools.bench.harness.memory import SavedTensors, nonzero, peak_on, wire_of
from tools.bench.harness.processes import Trial, check_world, is_shown, start, take_turns

# ----------------------------------------------------------------------------------------------------------------------
# What `bench matmul` and `bench layer` run: a product and a transformer layer of given sizes, the same on any cube.
#
# M tokens of the whole job, K input and N output features, H hidden size, I inner size

_SEED = 1


@dataclass(frozen=True, kw_only=True)
class Workload:
    """Something that runs forward and backward on a cube, as one rank has it."""

    forward: Callable[[Tensor], Tensor]
    inputs: Tensor
    """This rank's shard; a leaf that wants its gradient."""
    arriving: Tensor
    """Gradient of the result's shard."""
    parameters: tuple[nn.Parameter, ...]
    closed_form: Callable[[CommModel], Bytes]
    """What a forward and backward pass sends."""


@dataclass(frozen=True, kw_only=True)
class Product:
    """One `tensor3d.sharding.matmul`: (M, K) times (N, K) transposed."""

    rows: int
    """M"""
    k: int
    n: int
    face: Face = "z"
    reshard_after_forward: bool = True

    @property
    def flops(self) -> int:
        """Of the three products of a pass."""
        return 6 * self.rows * self.k * self.n

    def check(self, shape: CubeShape) -> None:
        """Raises ValueError for sizes that do not divide on a cube, named with what they must divide by."""
        columns, rows = shape.size(self.face), shape.size(other(self.face))
        _check_divides(shape, "--rows", self.rows, shape.planes * math.lcm(shape.y, shape.z))
        _check_divides(shape, "--inputs", self.k, columns)
        _check_divides(shape, "--outputs", self.n, rows)

    def __call__(self, cube: Cube) -> Workload:
        cube.manual_seed(_SEED)
        face, reshard = self.face, self.reshard_after_forward
        weight = normal((self.n, self.k), matrix(face), cube, self.k**-0.5)

        def closed_form(wire: CommModel) -> Bytes:
            sent = product(wire, self.rows // cube.shape.planes, self.k, self.n, face, kept=not reshard)
            return sent + replicated_gradients(wire, 0, 0, local(weight).numel())

        return Workload(
            forward=lambda a: matmul(a, weight, cube, face, reshard_after_forward=reshard),
            inputs=_random(self.rows, self.k, cube, face, 1).requires_grad_(),
            arriving=_random(self.rows, self.n, cube, other(face), 2),
            parameters=(weight,),
            closed_form=closed_form,
        )


@dataclass(frozen=True, kw_only=True)
class Layer:
    """One `TransformerLayer3D`, post-norm and without dropout, on whole sequences of one length."""

    hidden: int
    heads: int
    inner: int
    sequences: int
    """Of the whole job."""
    length: int
    recompute: Recompute = "none"
    reshard_after_forward: bool = True

    @property
    def rows(self) -> int:
        return self.sequences * self.length

    @property
    def flops(self) -> int:
        """Of the products and of attention in a pass, backward twice forward; recomputation is not counted."""
        weights = 4 * self.hidden**2 + 2 * self.hidden * self.inner
        return 3 * (2 * self.rows * weights + 4 * self.rows * self.length * self.hidden)

    def check(self, shape: CubeShape) -> None:
        """Raises ValueError for sizes that do not divide on a cube, named with what they must divide by."""
        _check_divides(shape, "--hidden", self.hidden, math.lcm(shape.y, shape.z))
        _check_divides(shape, "--heads", self.heads, shape.y)
        _check_divides(shape, "--hidden", self.hidden, self.heads)
        _check_divides(shape, "--inner", self.inner, shape.y)
        _check_divides(shape, "--sequences", self.sequences, shape.planes * shape.z)
        _check_divides(shape, "--sequences times --length", self.rows, shape.planes * math.lcm(shape.y, shape.z))

    def __call__(self, cube: Cube) -> Workload:
        cube.manual_seed(_SEED)
        layer = TransformerLayer3D(
            self.hidden,
            self.heads,
            cube,
            self.inner,
            recompute=self.recompute,
            reshard_after_forward=self.reshard_after_forward,
        )
        mine = self.sequences // (cube.shape.planes * cube.shape.z)
        sequences = Sequences.from_lengths([self.length] * mine, cube.device)
        parameters = tuple(layer.parameters())

        def closed_form(wire: CommModel) -> Bytes:
            plane = self.rows // cube.shape.planes
            recomputed = self.recompute == "layer"
            sent = transformer_layer(
                wire, plane, self.hidden, self.inner, kept=not self.reshard_after_forward, recomputed=recomputed
            )
            on_y = (3 * self.hidden + self.inner) // cube.shape.y  # biases of QKV and up
            on_z = 6 * self.hidden // cube.shape.z  # biases of the other two, gains and biases of both norms
            matrices = sum(local(weight).numel() for weight in parameters if weight.dim() > 1)
            return sent + replicated_gradients(wire, on_y, on_z, matrices)

        return Workload(
            forward=lambda x: layer(x, sequences),
            inputs=_random(self.rows, self.hidden, cube, "z", 1).requires_grad_(),
            arriving=_random(self.rows, self.hidden, cube, "z", 2),
            parameters=parameters,
            closed_form=closed_form,
        )


def _random(rows: int, columns: int, cube: Cube, face: Face, number: int) -> Tensor:
    """This rank's shard of a matrix that is the same on every cube, in the type in which the cube computes."""
    full = torch.randn(rows, columns, generator=torch.Generator().manual_seed(mix(_SEED, number)))
    own = shard(full, cube, face).clone()  # where nothing is cut, a view
    return own.to(cube.device, cube.precision.computed(own.dtype))


def _check_divides(shape: CubeShape, option: str, value: int, by: int) -> None:
    if value < 1 or value % by:
        raise ValueError(f"cube {shape}: {option} must be a multiple of {by}. Got {value}.")


# --- What one rank does for `bench matmul` and `bench layer` ----------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class PassSample:
    """One pass as one rank saw it, in seconds."""

    forward: float
    backward: float

    @property
    def total(self) -> float:
        return self.forward + self.backward


@dataclass(frozen=True, kw_only=True)
class PassFacts:
    """What does not change from pass to pass."""

    device: str
    threads: int
    received: Bytes
    """Bytes received by this rank, by axis and kind, as counted."""
    closed_form: Bytes
    """And as the formulas say."""
    calls: Bytes
    """Collectives issued by this rank, as counted."""
    closed_form_calls: Bytes
    saved: int
    """Bytes that autograd keeps for backward, without parameters."""
    peak: int
    """The most bytes of tensors at once, above inputs and parameters: what is saved, what passes, and gradients."""
    squares: tuple[float, float, float]
    """Sums of the squares of the result, of its gradient in the inputs and of those of parameters, of the elements for
    which this rank stands."""


class PassTrial(Trial):
    """A subject on one rank, halted between calls.

    Args:
        make: what is measured.
        compute: in which type; None: that of the parameters.
        warmup: passes at the start, at least 1.
    """

    def __init__(self, cube: Cube, make: Callable[[Cube], Workload], compute: torch.dtype | None, warmup: int) -> None:
        self._cube = cube.with_policy(MixedPrecisionPolicy(compute=compute))
        self._subject = make(self._cube)
        for _ in range(warmup):
            self.sample()
        self.facts = self._find_facts()

    def sample(self) -> PassSample:
        self._forget()
        before = self._now()
        result = self._subject.forward(self._subject.inputs)
        between = self._now()
        result.backward(self._subject.arriving)
        return PassSample(forward=between - before, backward=self._now() - between)

    def _forget(self) -> None:
        for tensor in (self._subject.inputs, *self._subject.parameters):
            tensor.grad = None

    def _now(self) -> float:
        if self._cube.device.type == "cuda":
            torch.cuda.synchronize(self._cube.device)
        return time.perf_counter()

    def _find_facts(self) -> PassFacts:
        subject, cube = self._subject, self._cube
        self._forget()
        saved, wire = SavedTensors(subject.parameters), wire_of(cube, subject.parameters[0].dtype)
        with cube.traffic.counting() as traffic:
            with saved.hooks:
                result = subject.forward(subject.inputs)
            result.backward(subject.arriving)
        squares = self._squares(result)
        kept = saved.take()
        del result
        self._forget()
        return PassFacts(
            device=cube.device.type,
            threads=torch.get_num_threads(),
            received=nonzero(traffic.received),
            closed_form=nonzero(subject.closed_form(wire)),
            calls=nonzero(traffic.calls),
            closed_form_calls=nonzero(subject.closed_form(dataclasses.replace(wire, unit="calls"))),
            saved=kept,
            peak=peak_on(cube.device, self.sample),
            squares=squares,
        )

    def _squares(self, result: Tensor) -> tuple[float, float, float]:
        subject = self._subject
        assert subject.inputs.grad is not None
        gradients = 0.0
        for parameter in subject.parameters:
            assert parameter.grad is not None
            if owns_for_norm(parameter, self._cube):
                gradients += _square(local(parameter.grad))
        return _square(result.detach()), _square(subject.inputs.grad), gradients


def _square(tensor: Tensor) -> float:
    return float(tensor.double().square().sum())


# --- The figures of `bench matmul` and `bench layer`, made of what all ranks noted in all rounds ----------------------

Turn = list[list[PassSample]]
"""The samples of one turn, by rank and pass."""


@dataclass(frozen=True, kw_only=True)
class PassFigures(Times):
    """One cube. Seconds are of passes, forward and backward together."""

    cube: Annotated[str, Column("cube", of="name", before="seconds_median")]
    """XxYxZ"""
    data_parallel: int
    ranks: Annotated[int, Column("ranks", before="seconds_median")]
    device: str
    threads: Annotated[int, Column("threads", before="seconds_median")]
    """Of each rank."""
    passes: int
    forward_seconds: Annotated[float, milliseconds("forward ms", before="seconds_median")]
    """Median of the passes."""
    backward_seconds: Annotated[float, milliseconds("backward ms", before="seconds_median")]
    seconds_median: Annotated[float, milliseconds("pass ms")]
    flops_per_second: Annotated[float, Column("GFLOP/s", ".1f", 1e-9)]
    """Floating-point operations of the job in a median pass, by closed form, over all ranks."""
    collectives: Annotated[int, Column("collectives")]
    """In a pass, on each rank."""
    bytes_received: Annotated[int, mebibytes("MiB received")]
    """In a pass, by the rank that receives most, in the ring model."""
    bytes_closed_form: Annotated[int, mebibytes("closed form", equal="traffic_equal")]
    """What that rank should receive by the formulas."""
    traffic_equal: bool
    """Whether counts and formulas agree on every rank, for each axis and kind: bytes and collectives."""
    saved_bytes: Annotated[int, mebibytes("saved MiB")]
    """Kept by autograd for backward, without parameters, on the rank that keeps most."""
    peak_bytes: Annotated[int, mebibytes("peak MiB")]
    """The most bytes of tensors at once above inputs and parameters, on the rank that needs most."""
    squares: tuple[float, float, float]
    """Sums of squares of result, inputs' gradient and parameters' gradients: equal on all cubes but for rounding."""

    @property
    def name(self) -> str:
        return self.cube if self.data_parallel == 1 else f"{self.data_parallel}*({self.cube})"


def figures(
    shape: CubeShape, turns: Sequence[Turn], facts: Sequence[PassFacts], first: Sequence[Turn], flops: int
) -> PassFigures:
    """The figures of one cube.

    Args:
        turns: its turns, by round.
        facts: of its ranks.
        first: the turns of the cube to compare with, in the same rounds.
        flops: floating-point operations of one pass, of all ranks together.
    """
    rounds, base = ([means(turn, lambda sample: sample.total) for turn in each] for each in (turns, first))
    timed = times(rounds, base)
    busiest = max(facts, key=lambda fact: fact.received.total())
    squares = np.sum([fact.squares for fact in facts], axis=0)
    forward, backward = (
        statistics.median(second for turn in turns for second in means(turn, part))
        for part in (lambda sample: sample.forward, lambda sample: sample.backward)
    )
    return PassFigures(
        **timed,
        cube=f"{shape.x}x{shape.y}x{shape.z}",
        data_parallel=shape.data,
        ranks=shape.ranks,
        device=facts[0].device,
        threads=facts[0].threads,
        passes=sum(map(len, rounds)),
        forward_seconds=forward,
        backward_seconds=backward,
        flops_per_second=flops / timed["seconds_median"],
        collectives=max(fact.calls.total() for fact in facts),
        bytes_received=busiest.received.total(),
        bytes_closed_form=busiest.closed_form.total(),
        traffic_equal=all(fact.received == fact.closed_form and fact.calls == fact.closed_form_calls for fact in facts),
        saved_bytes=max(fact.saved for fact in facts),
        peak_bytes=max(fact.peak for fact in facts),
        squares=(float(squares[0]), float(squares[1]), float(squares[2])),
    )


def difference(cubes: Sequence[PassFigures]) -> float:
    """The largest relative difference of a sum of squares from the first cube's; NaN where one of them is no number."""
    squares = np.array([cube.squares for cube in cubes])
    return float(np.max(np.abs(squares / squares[0] - 1)))


# --- What `bench matmul` and `bench layer` have in common: cubes side by side, forward and backward -------------------

# Relative, of sums of squares: what rounding explains with a wide margin.
_TOLERANCE = {"fp32": 1e-4, "bf16": 2e-2}


@dataclass(frozen=True, kw_only=True)
class PassCommand(Benchmark[list[CubeShape]]):
    """Something that runs forward and backward on one cube or several."""

    cubes: str = "1x1x1"
    """Cubes to compare, as XxYxZ,XxYxZ,...; ratios are to the first."""
    data_parallel: int = 1
    """Copies of each cube."""
    type: Literal["fp32", "bf16"] = "fp32"
    """In which is computed and sent. Weights and their gradients are fp32."""
    reshard_after_forward: bool = True
    """Gather operands again for backward, instead of keeping them."""
    passes: Count = 20
    """Forward and backward, timed, on each cube."""
    warmup: Count = 3
    """Passes before that, at least 1."""
    rounds: Count = 4
    """Turns that each cube gets, one cube after another; the passes are dealt out over them."""

    @abstractmethod
    def subject(self) -> Product | Layer:
        """What is measured."""

    def plan(self) -> list[CubeShape]:
        """The cubes."""
        shapes = cubes_of(self.cubes, self.data_parallel)
        for shape in shapes:
            self.subject().check(shape)
        check_world(shapes)
        return shapes

    def measure(self, plan: list[CubeShape]) -> Report:
        counts, subject = deal(self.passes, self.rounds), self.subject()
        compute = torch.bfloat16 if self.type == "bf16" else None
        with ExitStack() as stack:
            parts = start(plan, partial(PassTrial, make=subject, compute=compute, warmup=self.warmup), stack)
            shown = is_shown()
            turns = take_turns(parts, counts, shown=shown)
            results = [
                figures(part.shape, mine, part.call(PassTrial.get_facts), turns[0], subject.flops)
                for part, mine in zip(parts, turns, strict=True)
            ]
        apart = difference(results)
        lines = [f"{subject}, {self.type}", *table(results)]
        if len(results) > 1:
            allowed = f"allowed is {_TOLERANCE[self.type]:g}"
            lines.append(f"largest relative difference of sums of squares: {apart:.1e}, {allowed}")
        content = {
            "subject": dataclasses.asdict(subject),
            "type": self.type,
            "warmup": self.warmup,
            "rounds": counts,
            "difference": apart,
            "results": as_json(results),
        }
        return Report(lines=lines, content=content, faults=self.faults(results), shown=shown)

    def faults(self, results: Sequence[PassFigures]) -> list[str]:
        """What makes the figures wrong, in words."""
        found = [
            f"cube {cube.name}: counted traffic is not its closed form" for cube in results if not cube.traffic_equal
        ]
        if not difference(results) <= _TOLERANCE[self.type]:  # NaN too
            found.append("the cubes do not compute the same, so their times are no comparison")
        return found


# --- `bench matmul`: one matrix product on several cubes, side by side in one run -------------------------------------


@dataclass(frozen=True, kw_only=True)
class MatmulCommand(PassCommand):
    """Time one matrix product on one cube or several, in turns, forward and backward; count what it sends, and weigh
    what it keeps."""

    rows: int = 2048
    """Tokens of the whole job."""
    inputs: int = 512
    """Input features, K."""
    outputs: int = 2048
    """Output features, N."""
    face: Literal["y", "z"] = "z"
    """That the product reads."""

    def subject(self) -> Product:
        return Product(
            rows=self.rows,
            k=self.inputs,
            n=self.outputs,
            face=self.face,
            reshard_after_forward=self.reshard_after_forward,
        )


# --- `bench layer`: one transformer layer on several cubes, side by side in one run -----------------------------------


@dataclass(frozen=True, kw_only=True)
class LayerCommand(PassCommand):
    """Time one transformer layer on one cube or several, in turns, forward and backward; count what it sends, and weigh
    what it keeps."""

    hidden: int = 512
    heads: int = 8
    inner: int | None = None
    """Of the feed-forward block. Default: four times hidden."""
    sequences: int = 16
    """Of the whole job."""
    length: int = 128
    """Tokens of each sequence."""
    recompute: Recompute = "none"
    """What backward computes again instead of keeping it."""

    def subject(self) -> Layer:
        return Layer(
            hidden=self.hidden,
            heads=self.heads,
            inner=4 * self.hidden if self.inner is None else self.inner,
            sequences=self.sequences,
            length=self.length,
            recompute=self.recompute,
            reshard_after_forward=self.reshard_after_forward,
        )
