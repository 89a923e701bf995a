"""Pre-training passes of BERT as CUDA graphs: one for each shape of micro-batch, of which a run has one."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from typing import Any, TypeVar

import torch
from torch import Tensor

from models.bert.model import BertForPreTraining
from tensor3d import Sequences
from tensor3d.batches.length_groups import LengthGroups
from tensor3d.batches.row_selection import RowSelection
from tensor3d.data import PackedBatch
from tensor3d.ops.cuda_graph import CapturedPass

T = TypeVar("T")
_NEEDS_ENDS = (
    'a CUDA graph of a pass needs attention that is "varlen", which knows sequences by a tensor of their ends alone. '
    "Take bf16 or fp16 and heads of a multiple of 8 columns, or leave the graph out."
)
_FIELDS = ("ids", "positions", "types", "masked", "masked_labels", "first", "next_labels")


class EndsOnly(Sequences):
    """Sequences whose lengths no host may know, for they differ from replay to replay: the tensor of ends has them. Its
    `lengths` are those of packs, and bound the longest."""

    @property
    def grouping(self) -> LengthGroups:
        raise ValueError(_NEEDS_ENDS)

    def grouping_of(
        self, queries: RowSelection | None, window: int | None = None, causal: bool = False
    ) -> LengthGroups:
        raise ValueError(_NEEDS_ENDS)

    def once(self, key: Hashable, make: Callable[[], T]) -> T:
        raise ValueError(_NEEDS_ENDS)


class GraphedBert:
    """Forward and backward of micro-batches, replayed as a CUDA graph from the second one of a shape on.

    Packs fill the same slots in every micro-batch, and only where their sequences end differs: that is a tensor with
    room for as many as the slots of [CLS] allow, whose last entries repeat the number of rows.

    Args:
        model: on a cube of one rank with a GPU, whose attention knows sequences from one another by their
            ends alone ("varlen"), and which computes all rows.
        capacity: slots of a pack, the longest that a sequence can be.

    Raises:
        ValueError: another model; at the first pass, attention that is not varlen.
    """

    def __init__(self, model: BertForPreTraining, capacity: int) -> None:
        cube = model.cube
        if cube.precision.fp8 == "delayed":
            raise ValueError(
                'a CUDA graph would keep the scales of its capture: fp8="delayed" changes them on the host. Take '
                '"rowwise" or "tensorwise".'
            )
        backends = {getattr(module, "backend", "auto") for module in model.modules()} - {"auto", "varlen"}
        if backends:
            raise ValueError(f"{_NEEDS_ENDS} Got {', '.join(sorted(backends))}.")
        if cube.shape.ranks > 1 or cube.device.type != "cuda":
            raise ValueError(
                f"a CUDA graph of a pass needs one rank with a GPU. Got {cube.shape} on {cube.device.type}."
            )
        if cube.speed.shadow_weights:
            raise ValueError(
                "a CUDA graph converts weights in each replay, and copies that are made once after an update would be "
                "held for nothing. Make the cube with ExecutionPolicy(shadow_weights=False)."
            )
        if model.bert.read_rows_only:
            raise ValueError(
                "a CUDA graph needs the same shapes in every micro-batch, and a last layer of the rows that heads read "
                "has others in each. Make the model with read_rows_only=False."
            )
        if any(getattr(module, "recompute", "none") != "none" for module in model.modules()):
            raise ValueError(
                "a CUDA graph cannot read random numbers' state, as recomputing does. Take recompute='none'."
            )
        self._model, self._capacity = model, capacity
        self._passes: dict[tuple[Any, ...], CapturedPass] = {}
        self._pool = torch.cuda.graph_pool_handle()

    def __call__(self, batch: PackedBatch, targets: int, sequences: int, scale: Tensor | None = None) -> Tensor:
        """Runs both passes, which add to `.grad`.

        Args:
            batch, targets, sequences: as `BertForPreTraining.forward` takes them.
            scale: what the loss is multiplied by before backward, a tensor of no dims; None: nothing.

        Returns:
            (5,): the sums of `PreTrainingOutput`, in memory that the next call overwrites.
        """
        inputs = self._inputs(batch, targets, sequences, scale)
        key = (self._model.training, *((name, tensor.shape, tensor.dtype) for name, tensor in inputs.items()))
        if key not in self._passes:
            self._passes[key] = self._captured(inputs)
        return self._passes[key](**inputs)

    def _captured(self, inputs: dict[str, Tensor]) -> CapturedPass:
        ledger = self._model.cube.ledger
        observer, ledger.observer = ledger.observer, None  # it would read a clock once, at the capture
        try:
            return CapturedPass(self._run, inputs, list(self._model.parameters()), pool=self._pool)
        finally:
            ledger.observer = observer

    def _inputs(self, batch: PackedBatch, targets: int, sequences: int, scale: Tensor | None) -> dict[str, Tensor]:
        device = batch.ids.device
        ends = batch.sequences.cu_seqlens
        most = batch.first.shape[0] + batch.ids.shape[0] // self._capacity + 1  # with the unused tails of packs
        if len(ends) > most:
            raise ValueError(f"a micro-batch of {batch.first.shape[0]} slots for [CLS] has {len(ends) - 1} sequences.")
        inputs = {name: getattr(batch, name) for name in _FIELDS}
        inputs["ends"] = torch.cat([ends, ends[-1:].expand(most - len(ends))])
        if self._model.config.has_rotary:  # which turns positions in attention
            inputs["places"] = batch.sequences.positions
        inputs["targets"] = torch.full((), float(targets), device=device)
        inputs["sequences"] = torch.full((), float(sequences), device=device)
        inputs["scale"] = torch.ones((), device=device) if scale is None else scale
        return inputs

    def _run(
        self,
        *,
        ends: Tensor,
        targets: Tensor,
        sequences: Tensor,
        scale: Tensor,
        places: Tensor | None = None,
        **fields: Tensor,
    ) -> Tensor:
        rows = fields["ids"].shape[0]
        whole = EndsOnly(cu_seqlens=ends, lengths=(self._capacity,) * (rows // self._capacity))
        if places is not None:
            vars(whole)["positions"] = places  # those of the sequences that are there
        # Nothing may be asked of another rank: a graph holds what the device does.
        batch = PackedBatch(sequences=whole, planes_alike=True, **fields)  # type: ignore[arg-type]
        output = self._model(batch, targets, sequences)
        (output.loss * scale).backward()
        return output.sums
