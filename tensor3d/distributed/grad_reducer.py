"""The ledger: how gradients reach `.grad`.

A reduce-scatter that still runs cannot be returned from `backward` (autograd may read it at once), and a gradient that
has to be summed over ranks should not be summed alone. So every function that uses a parameter hands its local gradient
in here, with its pending work, and returns None. The first hand-in of a backward pass queues one engine callback; it
waits, adds up the uses of each parameter, sums over ranks what has to be summed (in buckets), and adds to `.grad`.

The price: hooks on parameters do not see these gradients, and `torch.autograd.grad` cannot return them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Literal
from weakref import WeakSet

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from tensor3d.distributed.collectives import Axis, CommHandle, all_reduce
from tensor3d.distributed.comm_stats import bucket_elements
from tensor3d.distributed.cube_policies import MixedPrecisionPolicy


@dataclass(kw_only=True)
class _PendingGrad:
    """One parameter's gradient on this rank: the sum of its uses so far."""

    parameter: nn.Parameter
    gradient: Tensor
    over: Axis
    owned: bool  # whether `gradient` is a tensor of the ledger's own, so that it may be added to in place


@dataclass(kw_only=True)
class _BackwardPass:
    """What one backward pass has handed in so far."""

    handed: list[tuple[nn.Parameter, Tensor | CommHandle, Axis]] = field(default_factory=list)
    travelling: CommHandle | None = None


class GradReducer:
    """Collects the local gradients of backward passes. One on each cube; layers use it through `accumulate_grad`."""

    def __init__(
        self,
        precision: MixedPrecisionPolicy = MixedPrecisionPolicy(),  # noqa: B008
        relatives: WeakSet[GradReducer] | None = None,
        at_end: Callable[[], None] | None = None,
    ) -> None:
        self._relatives = WeakSet() if relatives is None else relatives  # of cubes that compute on the same processes
        self._relatives.add(self)
        self.observer: Callable[[Literal["sum", "summed"]], None] | None = None
        """Called where the sums over ranks at the end of a backward pass begin and end: for whoever measures them."""
        self._at_end = at_end  # of each backward pass
        self._precision = precision
        self._passes: dict[int, _BackwardPass] = {}
        self._held: dict[int, _PendingGrad] = {}
        self._holding = False

    def __getstate__(self) -> dict[str, Any]:
        # A model that is stored takes its cube along; weak references cannot be stored, and relatives are not its part.
        return {name: value for name, value in vars(self).items() if name != "_relatives"}

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state)
        self._relatives = WeakSet([self])

    def accumulate_grad(self, parameter: nn.Parameter, gradient: Tensor | CommHandle, over: Axis) -> None:
        """Takes this rank's gradient of one use of `parameter`, to be summed over the ranks of `over`.

        Only inside a backward pass. `gradient` has the local shape of the parameter and is not written to.
        """
        task = torch._C._current_graph_task_id()
        assert task != -1, "accumulate_grad outside of a backward pass"
        if task not in self._passes:
            self._passes[task] = _BackwardPass()
            torch.autograd.Variable._execution_engine.queue_callback(partial(self._close, task))
        current = self._passes[task]
        current.handed.append((parameter, gradient, over))
        if isinstance(gradient, CommHandle):
            # One weight's gradient travels under the next layer's products. Were all to travel until the end of the
            # pass, the gradients of whole slabs, x times this rank's share, would stay in memory for it.
            if current.travelling is not None:
                current.travelling.wait()
            current.travelling = gradient

    def forget_failed_passes(self) -> None:
        """Drops what passes that failed left behind. Called in every forward; mostly it tests one dict."""
        if self._passes and torch._C._current_graph_task_id() == -1:
            self._passes.clear()

    @property
    def holds_back(self) -> bool:
        """Whether gradients wait for a backward pass outside of `holding`, here or on a cube made by `computing`."""
        return any(ledger._held for ledger in self._relatives)

    def relative(self, precision: MixedPrecisionPolicy, at_end: Callable[[], None]) -> GradReducer:
        """One for a cube of the same processes that computes in other types."""
        return GradReducer(precision, self._relatives, at_end)

    def discard(self) -> None:
        """Drops gradients held back by `holding`: for a step that is given up in the middle of its accumulation."""
        for ledger in self._relatives:
            ledger._held.clear()

    @contextmanager
    def holding(self) -> Iterator[None]:
        """Inside, gradients that need a sum over ranks are added up locally and wait for the next pass outside."""
        before, self._holding = self._holding, True
        try:
            yield
        finally:
            self._holding = before

    def _close(self, task: int) -> None:
        """The end of one backward pass."""
        if self._at_end is not None:
            self._at_end()
        entries: dict[int, _PendingGrad] = dict(self._held)
        local: dict[int, _PendingGrad] = {}
        _add_all(self._passes.pop(task).handed, entries, local)
        if self._holding:
            self._held = entries
        else:
            self._held = {}
            self._observe("sum")
            _sum_over_ranks(entries.values(), self._precision)
            self._observe("summed")
            local.update(entries)
        for entry in local.values():
            _add_to_grad(entry)

    def _observe(self, moment: Literal["sum", "summed"]) -> None:
        if self.observer is not None:
            self.observer(moment)


def asked_for(ctx: Any, *parameters: nn.Parameter | None) -> list[bool]:
    """For each parameter used by a function, whether the backward pass that runs now is to compute its gradient.

    `ctx.needs_input_grad` says what the forward pass knew. `backward(inputs=...)` and `torch.autograd.grad` ask for
    some gradients alone, and the `.grad` of a parameter that they do not name must stay as it is.

    Raises:
        ValueError: `torch.autograd.grad` asks for a parameter's gradient, which is not there before the pass has ended.
    """
    nodes = {id(node.variable): node for node, _ in ctx.next_functions if hasattr(node, "variable")}
    return [id(parameter) in nodes and _is_executed(nodes[id(parameter)]) for parameter in parameters]


def _is_executed(accumulation: torch.autograd.graph.Node) -> bool:
    try:
        return torch._C._will_engine_execute_node(accumulation)
    except RuntimeError:  # torch's way to say that autograd.grad wants this very gradient
        raise ValueError(
            "torch.autograd.grad cannot return the gradient of a parameter on a cube, which is complete only at the "
            "end of the pass. Call backward (with inputs=[...] for some parameters alone) and read `.grad`."
        ) from None


def _add_all(
    handed: list[tuple[nn.Parameter, Tensor | CommHandle, Axis]],
    entries: dict[int, _PendingGrad],
    local: dict[int, _PendingGrad],
) -> None:
    """Into `local` what is summed over no ranks. A function of its own: the last gradient, such as that of a table, is
    then gone before the sums take memory."""
    for parameter, gradient, over in handed:
        _add(entries if over.size > 1 else local, parameter, gradient, over)


def _add(entries: dict[int, _PendingGrad], parameter: nn.Parameter, handed: Tensor | CommHandle, over: Axis) -> None:
    owned = isinstance(handed, CommHandle)
    gradient = handed.wait() if isinstance(handed, CommHandle) else handed
    entry = entries.get(id(parameter))
    if entry is None:
        entries[id(parameter)] = _PendingGrad(parameter=parameter, gradient=gradient, over=over, owned=owned)
        return
    assert entry.over.ranks == over.ranks, f"uses of one parameter name {entry.over.name} and {over.name} for its sum"
    entry.gradient = entry.gradient.add_(gradient) if entry.owned else entry.gradient + gradient
    entry.owned = True


def _sum_over_ranks(entries: Iterable[_PendingGrad], precision: MixedPrecisionPolicy) -> None:
    """Sums each entry over its ranks: flat buckets, all in flight at once, in the same order on every rank."""
    together = [(group, torch.cat([entry.gradient.reshape(-1) for entry in group])) for group in _grouped(entries)]
    sums = [
        (bucket, all_reduce(bucket.to(precision.reduced(bucket.dtype)), group[0].over))
        for group, flat in together
        for bucket in flat.split(bucket_elements(group[0].over.size, flat.element_size()))
    ]
    for bucket, pending in sums:
        summed = pending.wait()
        if summed is not bucket:  # it has travelled in another type
            bucket.copy_(summed)
    for group, flat in together:
        parts = flat.split([entry.gradient.numel() for entry in group])
        for entry, part in zip(group, parts, strict=True):
            entry.gradient = part.view(entry.gradient.shape)
            # A part is cloned before it becomes a `.grad`: it would keep all of them alive, and a DTensor that begins
            # inside a storage cannot be deep-copied.
            entry.owned = len(group) == 1


def _grouped(entries: Iterable[_PendingGrad]) -> list[list[_PendingGrad]]:
    """Entries of one axis, type and device together."""
    groups: dict[tuple[str, torch.dtype, torch.device], list[_PendingGrad]] = {}
    for entry in entries:
        groups.setdefault((entry.over.name, entry.gradient.dtype, entry.gradient.device), []).append(entry)
    return list(groups.values())


def _add_to_grad(entry: _PendingGrad) -> None:
    parameter, gradient = entry.parameter, entry.gradient
    if parameter.grad is not None:
        # On local tensors: DTensor arithmetic on a four-axis mesh takes seconds the first time.
        local = parameter.grad.to_local() if isinstance(parameter.grad, DTensor) else parameter.grad
        local.add_(gradient)
        return
    gradient = gradient.to(parameter.dtype)
    if not entry.owned:
        # Autograd may still own this storage; and fused optimisers read `.grad` in the parameter's own order.
        gradient = gradient.clone(memory_format=torch.contiguous_format)
    if isinstance(parameter, DTensor):
        # As FSDP2 wraps its gradients: `from_local` builds and checks the specification anew, a fifth of a small step.
        gradient = DTensor(gradient, parameter._spec, requires_grad=False)
    parameter.grad = gradient
