"""How PyTorch's own means split the plain model.

| name           | what splits it                                               | each rank has             |
| -------------- | ------------------------------------------------------------ | ------------------------- |
| tp             | `torch.distributed.tensor.parallel` with sequence parallel,  | a slice of every sequence |
|                | vocabulary and its loss split (Shoeybi et al. 2019;          |                           |
|                | Korthikanti et al. 2022)                                     |                           |
| fsdp2          | `torch.distributed.fsdp.fully_shard`, by layer               | sequences of its own      |
|                | (Rajbhandari et al. 2020; Zhao et al. 2023)                  |                           |
| fsdp2-prefetch | the same, with two layers gathered ahead each way, and the   | sequences of its own      |
|                | root before its batch (explicit prefetching)                 |                           |
| tp+fsdp2       | both, on a mesh of two dimensions                            | a slice of some sequences |
| ddp            | `DistributedDataParallel` (Li et al. 2020), whose gradients  | sequences of its own      |
|                | are views of its buckets                                     |                           |
| ddp+zero       | the same, and the optimiser's state dealt out by             | sequences of its own      |
|                | `ZeroRedundancyOptimizer` (Rajbhandari et al. 2020, stage 1) |                           |

Each is set up as its documentation has it, with what makes it faster or smaller and changes nothing else. In bf16,
fully_shard computes by its `MixedPrecisionPolicy` with gradients summed in fp32, the others under `torch.autocast`.
"""

from __future__ import annotations

import warnings
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
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

from tensor3d.distributed.comm_stats import summed_elements
from tensor3d.torch_private import TorchDispatchMode, resolve_group
from tools.bench.vs_pytorch.plain_bert import PlainBert, PlainLayer

# --- Counts what collectives move, whoever issues them: DTensor, FSDP2, the reducer of DDP, or a cube -----------------
#
# The ring model of `tensor3d.distributed.comm_stats`, on n members:
#
# | kind           | bytes received by one member                                       |
# | -------------- | ------------------------------------------------------------------ |
# | all-gather     | (n - 1) * bytes of one shard                                       |
# | reduce-scatter | (n - 1) * bytes of one shard                                       |
# | all-reduce     | 2 * (n - 1) * ceil(elements / n) * bytes of one element            |
# | of up to 4     | 2 * (n - 1) * ceil(elements / 2) * bytes of one element            |
# | all-to-all     | bytes received from the other members                              |
# | broadcast      | bytes of the tensor, by all members but one                        |
#
# Several tensors that travel in one call are one collective.

_NAMESPACES = ("c10d", "_c10d_functional", "_dtensor")
_SENDS_NOTHING = ("wait_tensor", "_wrap_tensor_autograd", "barrier", "monitored_barrier_", "check_for_nan")


class CollectiveCount(TorchDispatchMode):
    """Counts inside a `with` block, forward and backward, on this rank. It slows Python down: time another step."""

    def __init__(self) -> None:
        super().__init__()
        self.received: Counter[str] = Counter()
        """Bytes received by this rank, by kind."""
        self.calls: Counter[str] = Counter()
        """Collectives issued by this rank, by kind."""

    def __torch_dispatch__(
        self, func: Any, types: Sequence[type], args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if any(issubclass(kind, DTensor) for kind in types):
            return NotImplemented  # DTensor splits it into local operators, which come here again
        if func.namespace in _NAMESPACES:
            self._add(func, args, kwargs or {})
        return func(*args, **(kwargs or {}))

    def _add(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        name = func._schema.name.partition("::")[2]
        if name in _SENDS_NOTHING:
            return
        if name not in _COUNTED:
            # Not left out silently: the count would claim to be whole.
            raise NotImplementedError(f"bytes of {func} are not known here. Add it to {__name__}.")
        names = [argument.name for argument in func._schema.arguments]
        given = {**dict(zip(names, args, strict=False)), **kwargs}
        kind, received = _COUNTED[name]
        members = _members(given)
        if members > 1:
            self.received[kind] += received(given, members)
            self.calls[kind] += 1


def _members(given: Mapping[str, Any]) -> int:
    """Of the group that a collective is called on."""
    if "process_group" in given:
        return dist.ProcessGroup.unbox(given["process_group"]).size()
    group: Any = given["group_name"]
    if isinstance(group, str):
        group = resolve_group(group)
    return int(group.size())


def _tensors(value: Any) -> list[Tensor]:
    """All tensors in lists of lists."""
    return [value] if isinstance(value, Tensor) else [tensor for part in value for tensor in _tensors(part)]


def _bytes(value: Any) -> int:
    return sum(tensor.numel() * tensor.element_size() for tensor in _tensors(value))


def _shards(name: str) -> Callable[[Mapping[str, Any], int], int]:
    """Of collectives whose argument `name` is one member's shard."""
    return lambda given, members: (members - 1) * _bytes(given[name])


def _wholes(name: str) -> Callable[[Mapping[str, Any], int], int]:
    """Of collectives whose argument `name` has a shard for each member."""
    return lambda given, members: (members - 1) * (_bytes(given[name]) // members)


def _sums(name: str) -> Callable[[Mapping[str, Any], int], int]:
    """Of tensors of one type, as if they lay end to end."""

    def received(given: Mapping[str, Any], members: int) -> int:
        tensors = _tensors(given[name])
        elements = sum(tensor.numel() for tensor in tensors)
        return summed_elements(members, elements) * tensors[0].element_size()

    return received


def _exchanged(given: Mapping[str, Any], members: int) -> int:
    """Of an exchange of rows: even blocks, unless sizes are given."""
    rows = given["output"].shape[0]
    sizes = given["output_split_sizes"] or [rows // members] * members
    own = sizes[dist.ProcessGroup.unbox(given["process_group"]).rank()]
    return int((sum(sizes) - own) * (_bytes(given["output"]) // max(1, rows)))


def _copied(given: Mapping[str, Any], members: int) -> int:
    """Of a broadcast: nothing by its source."""
    is_source = dist.ProcessGroup.unbox(given["process_group"]).rank() == given["root_rank"]
    return 0 if is_source else _bytes(given["tensors"])


_COUNTED: Mapping[str, tuple[str, Callable[[Mapping[str, Any], int], int]]] = {
    "_allgather_base_": ("all-gather", _shards("input_tensor")),
    "allgather_": ("all-gather", _shards("input_tensors")),
    "allgather_coalesced_": ("all-gather", _shards("input_list")),
    "allgather_into_tensor_coalesced_": ("all-gather", _shards("inputs")),
    "all_gather_into_tensor": ("all-gather", _shards("input")),
    "all_gather_into_tensor_out": ("all-gather", _shards("input")),
    "all_gather_into_tensor_coalesced": ("all-gather", _shards("inputs")),
    "_reduce_scatter_base_": ("reduce-scatter", _shards("output_tensor")),
    "reduce_scatter_": ("reduce-scatter", _shards("output_tensors")),
    "reduce_scatter_tensor_coalesced_": ("reduce-scatter", _shards("outputs")),
    "reduce_scatter_tensor": ("reduce-scatter", _wholes("input")),
    "reduce_scatter_tensor_out": ("reduce-scatter", _wholes("input")),
    "reduce_scatter_tensor_coalesced": ("reduce-scatter", _wholes("inputs")),
    "allreduce_": ("all-reduce", _sums("tensors")),
    "allreduce_coalesced_": ("all-reduce", _sums("tensors")),
    "all_reduce": ("all-reduce", _sums("input")),
    "all_reduce_": ("all-reduce", _sums("input")),
    "all_reduce_coalesced": ("all-reduce", _sums("inputs")),
    "all_reduce_coalesced_": ("all-reduce", _sums("inputs")),
    "alltoall_base_": ("all-to-all", _exchanged),
    "broadcast_": ("broadcast", _copied),
}


# --- How PyTorch's own means split the plain model --------------------------------------------------------------------

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


def fully_sharded(model: PlainBert | PlainLayer, mesh: DeviceMesh, compute: torch.dtype | None = None) -> None:
    """Shards it in place, a layer at a time; embeddings and heads, which share a weight, are the root's.

    Args:
        compute: the type in which it computes, and gathers weights. None: that of the parameters.
    """
    policy = MixedPrecisionPolicy()
    if compute is not None:
        policy = MixedPrecisionPolicy(param_dtype=compute, reduce_dtype=torch.float32)
    if isinstance(model, PlainLayer):  # as inside a model: a root alone would keep it
        fully_shard(model, mesh=mesh, reshard_after_forward=True, mp_policy=policy)
        return
    for layer in model.bert.layers:
        fully_shard(layer, mesh=mesh, mp_policy=policy)
    fully_shard(model, mesh=mesh, mp_policy=policy)


_LAYERS_AHEAD = 2  # with fewer, says its documentation, a gather is issued earlier and no more of it is hidden


def prefetch_explicitly(model: PlainBert | PlainLayer) -> Callable[[], object]:
    """Has every fully sharded layer gather the next two with its own, forward and backward.

    Returns:
        What to call before each forward pass: it starts the gather of the root.
    """
    every = model.bert.layers if isinstance(model, PlainBert) else ()
    layers: list[FSDPModule] = []
    layers += [each for each in every if isinstance(each, FSDPModule)]
    for place, layer in enumerate(layers):
        layer.set_modules_to_forward_prefetch(layers[place + 1 : place + 1 + _LAYERS_AHEAD])
        layer.set_modules_to_backward_prefetch(layers[:place][: -_LAYERS_AHEAD - 1 : -1])
    assert isinstance(model, FSDPModule), "fully_sharded comes first"
    return model.unshard


def replicated(model: nn.Module) -> DistributedDataParallel:
    """A copy on each rank; gradients lie in the buckets in which they travel, which saves a copy of them."""
    return DistributedDataParallel(model, gradient_as_bucket_view=True)


def zero_adamw(groups: list[dict[str, Any]], **settings: Any) -> torch.optim.Optimizer:
    """AdamW whose state is dealt out over all ranks; each sends the parameters that it has updated to the others."""
    with warnings.catch_warnings():
        # Compiles functional optimisers, which nobody here uses, in a way that torch itself calls deprecated.
        warnings.filterwarnings("ignore", message=".*torch.jit.script.* is deprecated", category=DeprecationWarning)
        from torch.distributed.optim import ZeroRedundancyOptimizer
    return ZeroRedundancyOptimizer(groups, torch.optim.AdamW, **settings)


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
