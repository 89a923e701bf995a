"""A training on one rank that is saved while somebody holds a watch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from time import perf_counter

import numpy as np
import torch
import torch.distributed as dist

from models.bert import BertConfig, BertForPreTraining
from tensor3d import Cube, clip_grad_norm_
from tensor3d.checkpoint import Checkpoints, Outcome
from tensor3d.data.batch import Pack, PackedBatch, collate

_LENGTH = 32  # tokens of the one sequence of a pack: steps as short as such a model has


@dataclass(frozen=True, kw_only=True)
class SyncSample:
    """A save that training waits for."""

    blocked: float
    bytes: int

    @classmethod
    def slowest(cls, ranks: Sequence[SyncSample]) -> SyncSample:
        return cls(blocked=max(rank.blocked for rank in ranks), bytes=ranks[0].bytes)


@dataclass(frozen=True, kw_only=True)
class AsideSample:
    """A save beside training."""

    blocked: float
    seconds: float
    """Until it was complete."""
    steps: tuple[float, ...]
    """Seconds of each step that began before it was."""

    @classmethod
    def slowest(cls, ranks: Sequence[AsideSample]) -> AsideSample:
        return cls(
            blocked=max(rank.blocked for rank in ranks),
            seconds=max(rank.seconds for rank in ranks),
            steps=tuple(max(step) for step in zip(*(rank.steps for rank in ranks), strict=True)),
        )


class SavingTrial:
    """Pre-training on one small batch of random ids, halted between calls."""

    def __init__(self, cube: Cube, config: BertConfig, directory: Path) -> None:
        self._cube = cube
        cube.manual_seed(0)
        self._model = BertForPreTraining(config, cube)
        self._optimizer = torch.optim.AdamW(self._model.parameters(), lr=1e-4, fused=True)
        self._batch, self._targets = _batch(cube, config)
        self._checkpoints = Checkpoints(directory, cube, keep_last=1)
        self._step = 0

    def prepare(self) -> int:
        """Two steps and a save, after which all memory is there; returns the number of parameters."""
        self.steps(2)
        self.save_and_wait()
        self.save_aside()
        return sum(parameter.numel() for parameter in self._model.parameters())

    def steps(self, number: int) -> list[float]:
        """Seconds of each."""
        return [self._train() for _ in range(number)]

    def save_and_wait(self) -> SyncSample:
        blocked = self._save(wait=True)
        return SyncSample(blocked=blocked, bytes=self._ended().bytes)

    def save_aside(self) -> AsideSample:
        """Saves and trains on until all ranks have heard that it is complete."""
        blocked = self._save(wait=False)
        steps: list[float] = []
        outcomes: list[Outcome] = []
        while not self._everywhere(bool(outcomes)):
            steps.append(self._train())
            outcomes += self._checkpoints.finished()
        return AsideSample(blocked=blocked, seconds=_good(outcomes).seconds, steps=tuple(steps))

    def close(self) -> None:
        self._checkpoints.close()

    def _save(self, *, wait: bool) -> float:
        if self._cube.mesh is not None:
            dist.barrier()  # so that none counts waiting for another's step
        return self._checkpoints.save(self._step, self._model, self._optimizer, {"benchmark": True}, wait=wait)

    def _ended(self) -> Outcome:
        return _good(self._checkpoints.finished())

    def _everywhere(self, flag: bool) -> bool:
        if self._cube.mesh is None:
            return flag
        found = torch.tensor([int(flag)], device=self._cube.device)
        dist.all_reduce(found, op=dist.ReduceOp.MIN)
        return bool(found.item())

    def _train(self) -> float:
        begin = perf_counter()
        self._model(self._batch, self._targets, self._targets).loss.backward()
        clip_grad_norm_(self._model.parameters(), 1.0, self._cube)
        self._optimizer.step()
        self._optimizer.zero_grad(set_to_none=True)
        if self._cube.device.type == "cuda":
            torch.cuda.synchronize(self._cube.device)
        self._step += 1
        return perf_counter() - begin


def _good(outcomes: Sequence[Outcome]) -> Outcome:
    outcome = outcomes[0]
    if outcome.error is not None:
        raise OSError(f"step {outcome.step} was not saved: {outcome.error}")
    return outcome


def _batch(cube: Cube, config: BertConfig) -> tuple[PackedBatch, int]:
    """One sequence of random ids in each pack of the plane, one of its tokens masked; and how many packs there are."""
    shape = cube.shape
    rng = np.random.default_rng([cube.coordinate["data"], cube.coordinate["x"]])
    packs = []
    for _ in range(shape.z):
        ids = rng.integers(0, config.vocab, _LENGTH)
        one = np.ones(1, dtype=np.int64)
        packs.append(
            Pack(
                ids=ids,
                types=np.zeros(_LENGTH, dtype=np.int64),
                lengths=one * _LENGTH,
                masked=one,
                masked_labels=ids[1:2],
                next_labels=0 * one,
            )
        )
    batch = collate(
        packs,
        capacity=_LENGTH,
        masked_per_pack=1,
        max_sequences=1,
        y=shape.y,
        z=shape.z,
        slice_index=cube.coordinate["z"],
        pad=0,
    )
    return batch.to(cube.device), shape.z * shape.x * shape.data
