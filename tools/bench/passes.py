"""What one rank does for `bench matmul` and `bench layer`: forward and backward passes, timed, counted and weighed."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from tensor3d import Cube, Precision
from tensor3d.layout import is_counted_here, local
from tensor3d.planning.traffic import Bytes, Wire
from tools.bench.peak import peak_on
from tools.bench.subjects import Subject


@dataclass(frozen=True, kw_only=True)
class PassSample:
    """One pass as one rank saw it, in seconds."""

    forward: float
    backward: float


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


class PassTrial:
    """A subject on one rank, halted between calls.

    Args:
        make: what is measured.
        compute: in which type; None: that of the parameters.
        warmup: passes at the start, at least 1.
    """

    def __init__(self, cube: Cube, make: Callable[[Cube], Subject], compute: torch.dtype | None, warmup: int) -> None:
        self._cube = cube.computing(Precision(compute=compute))
        self._subject = make(self._cube)
        for _ in range(warmup):
            self._pass()
        self.facts = self._find_facts()

    def turn(self, passes: int) -> list[PassSample]:
        """`passes` samples. One more goes first and counts for nothing: others had the caches in between."""
        return [self._pass() for _ in range(1 + passes)][1:]

    def get_facts(self) -> PassFacts:
        return self.facts

    def close(self) -> None:
        pass

    def _pass(self) -> PassSample:
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
        kept: dict[int, Tensor] = {}  # holds the tensors, so that no address is used twice

        def keep(tensor: Tensor) -> Tensor:
            own = local(tensor).detach()
            kept[own.untyped_storage().data_ptr()] = own
            return tensor

        with cube.traffic.counting() as traffic:
            with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
                result = subject.forward(subject.inputs)
            result.backward(subject.arriving)
        squares = self._squares(result)
        weights = {local(parameter).untyped_storage().data_ptr() for parameter in subject.parameters}
        saved = sum(tensor.untyped_storage().nbytes() for place, tensor in kept.items() if place not in weights)
        kept.clear()
        del result
        self._forget()
        return PassFacts(
            device=cube.device.type,
            threads=torch.get_num_threads(),
            received=_some(traffic.received),
            closed_form=_some(subject.closed_form(self._wire("bytes"))),
            calls=_some(traffic.calls),
            closed_form_calls=_some(subject.closed_form(self._wire("calls"))),
            saved=saved,
            peak=peak_on(cube.device, self._run),
            squares=squares,
        )

    def _run(self) -> None:
        self._pass()

    def _squares(self, result: Tensor) -> tuple[float, float, float]:
        subject = self._subject
        assert subject.inputs.grad is not None
        gradients = 0.0
        for parameter in subject.parameters:
            assert parameter.grad is not None
            if is_counted_here(parameter, self._cube):
                gradients += _square(local(parameter.grad))
        return _square(result.detach()), _square(subject.inputs.grad), gradients

    def _wire(self, unit: Literal["bytes", "calls"]) -> Wire:
        parameter = self._subject.parameters[0].dtype
        precision = self._cube.precision
        return Wire(
            shape=self._cube.shape,
            rank=self._cube.rank,
            compute=precision.computed(parameter).itemsize,
            gradient=precision.reduced(parameter).itemsize,
            parameter=parameter.itemsize,
            unit=unit,
        )


def _square(tensor: Tensor) -> float:
    return float(tensor.double().square().sum())


def _some(count: Bytes) -> Bytes:
    """Without what is zero, so that counts compare equal."""
    return Counter({key: number for key, number in count.items() if number})
