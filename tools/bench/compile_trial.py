"""What a rank does for `bench compile`: the same model eager and compiled, in the same process, in turns."""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import torch
import torch.distributed as dist
from tqdm import tqdm

from models.bert import BertForPreTraining
from tensor3d import Cube, Precision, Speed
from tools.bench.kept import counting_kept
from tools.bench.peak import peak_on
from tools.bench.rivals_contender import Contender, make_ours
from tools.bench.rivals_work import Work, packed_batch

Side = Literal["eager", "compiled"]
Type = Literal["fp32", "bf16"]
Case = tuple[Type, Side]
SIDES: tuple[Side, ...] = ("eager", "compiled")
COMPUTE: dict[Type, torch.dtype | None] = {"fp32": None, "bf16": torch.bfloat16}


def cube_of(cube: Cube, case: Case) -> Cube:
    """The same processes, computing in that type and way."""
    kind, side = case
    return cube.computing(Precision(compute=COMPUTE[kind]), Speed(compile=side == "compiled"))


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


class CompileTrial:
    """Both sides in all types on one rank, halted between calls.

    Args:
        warmup: steps of each at the start, at least 1.
    """

    def __init__(self, cube: Cube, work: Work, types: Sequence[Type], warmup: int) -> None:
        lock_bars_here()
        self._cube, self._work = cube, work
        self._cases: dict[Case, Contender] = {}
        self._facts: dict[Case, Facts] = {}
        for case in [(kind, side) for kind in types for side in SIDES]:
            self._cases[case], self._facts[case] = self._begun(case, warmup)

    def turn(self, case: Case, steps: int) -> list[float]:
        """Seconds of each step. One more goes first and counts for nothing."""
        return [self._step(self._cases[case]) for _ in range(1 + steps)][1:]

    def get_facts(self) -> dict[Case, Facts]:
        return self._facts

    def close(self) -> None:
        """Nothing is open."""

    def _begun(self, case: Case, warmup: int) -> tuple[Contender, Facts]:
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

    def _loss(self, contender: Contender, cube: Cube) -> float:
        model, work = contender.model, self._work
        assert isinstance(model, BertForPreTraining)
        model.eval()
        with torch.no_grad():
            output = model(packed_batch(work, cube), work.sequences * work.masked, work.sequences)
        model.train()
        return float(output.loss)

    def _step(self, contender: Contender) -> float:
        if dist.is_initialized():
            dist.barrier()
        begin = now(self._cube.device)
        contender.step()
        return now(self._cube.device) - begin
