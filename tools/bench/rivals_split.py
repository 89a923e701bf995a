"""How PyTorch's own means split the plain model.

| name     | what splits it                                               | each rank has             |
| -------- | ------------------------------------------------------------ | ------------------------- |
| tp       | `torch.distributed.tensor.parallel` with sequence parallel,  | a slice of every sequence |
|          | vocabulary and its loss split (Shoeybi et al. 2019;          |                           |
|          | Korthikanti et al. 2022)                                     |                           |
| fsdp2    | `torch.distributed.fsdp.fully_shard`, by layer               | sequences of its own      |
|          | (Rajbhandari et al. 2020; Zhao et al. 2023)                  |                           |
| tp+fsdp2 | both, on a mesh of two dimensions                            | a slice of some sequences |
| ddp      | `DistributedDataParallel` (Li et al. 2020)                   | sequences of its own      |

Each is set up as its documentation has it, with what makes it faster or smaller and changes nothing else.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    ParallelStyle,
    PrepareModuleInput,
    PrepareModuleOutput,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)
from torch.nn.parallel import DistributedDataParallel

from tools.bench.plain import PlainBert, PlainLayer

Plan = Mapping[str, ParallelStyle]


def tensor_parallel(model: PlainBert | PlainLayer, mesh: DeviceMesh) -> None:
    """Splits it in place over a mesh of one dimension. Hidden states are cut along the sequence between blocks.

    Local tensors between modules, not DTensors: what is not a module's own then costs no dispatch.
    """
    if isinstance(model, PlainLayer):
        parallelize_module(model, mesh, dict(_layer_plan()))
        return
    for layer in model.bert.layers:
        parallelize_module(layer, mesh, dict(_layer_plan()))
    parallelize_module(model, mesh, dict(_bert_plan()))
    model.tie()  # both got a parameter of their own, with the same placement


@torch.no_grad()
def sum_partial_gradients(parameters: Iterable[nn.Parameter]) -> None:
    """Makes the gradients of what tensor parallelism replicates whole: it leaves them as parts of a sum.

    Whoever uses them would sum them otherwise, clipping and then the optimiser again. All sums are begun at once.
    """
    for parameter in parameters:
        gradient = parameter.grad
        if not isinstance(parameter, DTensor) or not isinstance(gradient, DTensor):
            continue
        if gradient.placements != parameter.placements:
            parameter.grad = gradient.redistribute(placements=parameter.placements, async_op=True)


def fully_sharded(model: PlainBert | PlainLayer, mesh: DeviceMesh) -> None:
    """Shards it in place, a layer at a time; embeddings and heads, which share a weight, are the root's."""
    if isinstance(model, PlainLayer):
        fully_shard(model, mesh=mesh, reshard_after_forward=True)  # as inside a model: a root alone would keep it
        return
    for layer in model.bert.layers:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)


def replicated(model: nn.Module) -> DistributedDataParallel:
    """A copy on each rank; gradients lie in the buckets in which they travel, which saves a copy of them."""
    return DistributedDataParallel(model, gradient_as_bucket_view=True)


def _layer_plan() -> Plan:
    whole = PrepareModuleInput(input_layouts=Shard(1), desired_input_layouts=Replicate(), use_local_output=False)
    return {
        "attention": whole,
        "attention.qkv": ColwiseParallel(),
        "attention.out": RowwiseParallel(output_layouts=Shard(1)),
        "attention_norm": SequenceParallel(use_local_output=True),
        "mlp": whole,
        "mlp.up": ColwiseParallel(),
        "mlp.down": RowwiseParallel(output_layouts=Shard(1)),
        "mlp_norm": SequenceParallel(use_local_output=True),
    }


def _bert_plan() -> Plan:
    """All but the layers."""
    return {
        # Ids are whole on every rank; each looks up the types and positions of its own slice.
        "bert.embeddings": PrepareModuleInput(
            input_layouts=(Replicate(), Replicate(), Replicate()),
            desired_input_layouts=(Replicate(), Shard(0), Shard(1)),
        ),
        "bert.embeddings.tokens": RowwiseParallel(input_layouts=Replicate(), output_layouts=Shard(1)),
        "bert.embeddings.positions": SequenceParallel(sequence_dim=0, use_local_output=True),
        "bert.embeddings.types": SequenceParallel(use_local_output=True),
        "bert.embeddings.norm": SequenceParallel(use_local_output=True),
        "chosen": PrepareModuleInput(
            input_layouts=(Shard(1), None), desired_input_layouts=(Replicate(), None), use_local_output=True
        ),
        # Rows are dealt out for the dense product, and each rank sees them all for its slice of the vocabulary.
        "masked_lm": PrepareModuleInput(
            input_layouts=Replicate(), desired_input_layouts=Shard(0), use_local_output=True
        ),
        "masked_lm.dense": SequenceParallel(sequence_dim=0, use_local_output=True),
        "masked_lm.norm": SequenceParallel(sequence_dim=0, use_local_output=True),
        "masked_lm.projection": ColwiseParallel(
            input_layouts=Shard(0), output_layouts=Shard(-1), use_local_output=False
        ),
        "masked_loss": PrepareModuleOutput(output_layouts=Replicate(), desired_output_layouts=Replicate()),
        "pooler.dense": ColwiseParallel(),
        "next_sentence": RowwiseParallel(),
    }
