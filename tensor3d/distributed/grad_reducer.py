"""The ledger: how gradients reach `.grad`.

A reduce-scatter that still runs cannot be returned from `backward` (autograd may read it at once), and a gradient that
has to be summed over ranks should not be summed alone. So every function that uses a parameter hands its local gradient
in here, with its pending work, and returns None. The first hand-in of a backward pass queues one engine callback; it
waits, adds up the uses of each parameter, sums over ranks what has to be summed (in buckets), and adds to `.grad`.

Sums are by parameter: the ranks compare what each of them has used, and where that differs, a parameter counts as zero
on those that have not used it (`UseAgreement`).

Hooks on parameters are called when the sums are there, as those of FSDP2 are. The price: `torch.autograd.grad` cannot
return these gradients.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Literal, NamedTuple, TypeVar
from weakref import WeakSet, finalize, ref

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.optim import optimizer as torch_optim
from torch.utils.hooks import RemovableHandle

from tensor3d.distributed.collectives import Axis, CommHandle, all_equal, all_reduce, open_group
from tensor3d.distributed.comm_stats import bucket_elements
from tensor3d.distributed.cube_policies import MixedPrecisionPolicy
from tensor3d.distributed.cube_shape import AxisName, CubeShape
from tensor3d.distributed.seeds import Number, ParamNumbers, check_copies, names_of

T = TypeVar("T")
_MOST_NAMED = 6  # parameters in a message
_NOT_STORED = ("_relatives", "_hooks", "_guard")


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
        agreement: UseAgreement | None = None,
    ) -> None:
        self._relatives = WeakSet() if relatives is None else relatives  # of cubes that compute on the same processes
        self._relatives.add(self)
        self.observer: Callable[[Literal["sum", "summed"]], None] | None = None
        """Called where the sums over ranks at the end of a backward pass begin and end: for whoever measures them."""
        self._at_end = at_end  # of each backward pass
        self.agreement = agreement
        """None on one rank."""
        self._precision = precision
        self._passes: dict[int, _BackwardPass] = {}
        self._held: dict[int, _PendingGrad] = {}
        self._unsummed_while_holding: dict[int, nn.Parameter] = {}  # whose gradients are sums over no ranks
        self._holding = False
        self._hooks: dict[int, _HeldHooks] = {}
        self._guard: finalize[..., GradReducer] | None = None  # ends it when it is called

    def __getstate__(self) -> dict[str, Any]:
        # A model that is stored takes its cube along; weak references cannot be stored, and relatives are not its part.
        return {name: value for name, value in vars(self).items() if name not in _NOT_STORED}

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state)
        self._relatives, self._hooks, self._guard = WeakSet([self]), {}, None
        self._guard_steps()

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
        if parameter._backward_hooks or parameter._post_accumulate_grad_hooks:
            self._hooks.setdefault(id(parameter), _HeldHooks(parameter)).passes.add(task)
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
            for hooks in self._hooks.values():
                hooks.put_back()
            self._hooks.clear()

    @property
    def holds_back(self) -> bool:
        """Whether gradients wait for a backward pass outside of `holding`, here or on a cube made by `with_policy`."""
        return any(ledger._held for ledger in self._relatives)

    def check_nothing_held(self) -> None:
        """Raises ValueError where gradients are held back: of a step that would be incomplete."""
        if self.holds_back:
            raise ValueError(_HELD_BACK)

    def relative(self, precision: MixedPrecisionPolicy, at_end: Callable[[], None]) -> GradReducer:
        """One for a cube of the same processes that computes in other types."""
        return GradReducer(precision, self._relatives, at_end, self.agreement)

    def discard(self) -> None:
        """Drops gradients held back by `holding`: for a step that is given up in the middle of its accumulation."""
        for ledger in self._relatives:
            ledger._held.clear()
            ledger._unsummed_while_holding.clear()
            ledger._guard_steps()

    @contextmanager
    def holding(self) -> Iterator[None]:
        """Inside, gradients that need a sum over ranks are added up locally and wait for the next pass outside; as do
        those of parameters with hooks, which are called as often on every cube."""
        before, self._holding = self._holding, True
        try:
            yield
        finally:
            self._holding = before

    def _close(self, task: int) -> None:
        """The end of one backward pass."""
        hooks = self._hooks_of(task)
        if self._at_end is not None:
            self._at_end()
        entries: dict[int, _PendingGrad] = dict(self._held)
        local: dict[int, _PendingGrad] = {}
        _add_all(self._passes.pop(task).handed, entries, local)
        if self._holding:
            entries |= {key: local.pop(key) for key in list(local) if key in hooks}
        arrived = list(local.values())
        unsummed = self._unsummed_while_holding | {key: entry.parameter for key, entry in local.items()}
        if self._holding:
            self._held, self._unsummed_while_holding = entries, unsummed
        else:
            self._held, self._unsummed_while_holding = {}, {}
            self._observe("sum")
            summed = [entry for entry in entries.values() if entry.over.size > 1]
            arrived += [entry for entry in entries.values() if entry.over.size == 1]
            unsummed |= {id(entry.parameter): entry.parameter for entry in arrived}
            if self.agreement is not None:
                summed = self.agreement.completed(summed, unsummed.values())
            _sum_over_ranks(summed, self._precision)
            self._observe("summed")
            arrived += summed
        self._guard_steps()
        for entry in arrived:
            _arrive(entry, hooks.get(id(entry.parameter)))

    def _hooks_of(self, task: int) -> dict[int, _HeldHooks]:
        """Of the parameters of a pass that has come to its end, back in their places."""
        found = {key: hooks for key, hooks in self._hooks.items() if task in hooks.passes}
        for key, hooks in found.items():
            hooks.passes.discard(task)
            if not hooks.passes:  # else a pass within this one, or around it
                self._hooks.pop(key).put_back()
        return found

    def _guard_steps(self) -> None:
        """While gradients are held back, no optimiser of torch steps on their parameters: it would take what has
        arrived of this step, and the rest in the next one."""
        if not self._held:
            if self._guard is not None:
                self._guard()
                self._guard = None
            return
        if self._guard is None:
            check = partial(_check_step, ref(self))
            handles = (
                torch_optim.register_optimizer_step_pre_hook(check),
                torch_optim.register_optimizer_step_post_hook(check),  # for what a closure has held back
            )
            self._guard = finalize(self, _remove, handles)
            self._guard.atexit = False

    def _observe(self, moment: Literal["sum", "summed"]) -> None:
        if self.observer is not None:
            self.observer(moment)


_HELD_BACK = (
    "gradients are still held back by Cube.no_sync and would be missing. Run the last micro-batch's backward outside "
    "of it, or give the step up with cube.ledger.discard()."
)


def _remove(handles: Sequence[RemovableHandle]) -> None:
    for handle in handles:
        handle.remove()


def _check_step(reducer: ref[GradReducer], optimizer: torch.optim.Optimizer, *step: Any) -> None:
    """Raises ValueError where an optimiser's step meets parameters whose gradients are held back."""
    held = reducer()
    if held is None or not held._held:
        return
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    incomplete = [parameter for parameter in parameters if id(parameter) in held._held]
    if incomplete:
        first = ", ".join(names_of(incomplete[:_MOST_NAMED]))
        raise ValueError(f"{_HELD_BACK} {type(optimizer).__name__} has {len(incomplete)} such parameters: {first}.")


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
        _add(entries if over.size > 1 or id(parameter) in entries else local, parameter, gradient, over)


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


# --- Ranks that use different parameters ------------------------------------------------------------------------------


class _Use(NamedTuple):
    """What a rank tells of a parameter that it has used."""

    over: str
    shape: tuple[int, ...]
    """Of the logical tensor."""
    dtype: torch.dtype
    """Of the gradient."""


class UseAgreement:
    """Lets ranks that have used different parameters in a pass (layers dropped, heads by condition) sum by parameter.

    Each pass compares a hash of what each rank has used: one all-reduce of 16 bytes between hosts. Where all are equal,
    that is all. Else the ranks tell one another, and those that have not used a parameter count as zero; whoever has
    not used it looks it up once among the objects of its process, and holds it from then on.

    Args:
        everyone: all ranks of the cube, on a group through which hosts can speak.
        axes: the cube's, by the names of those taken together.
    """

    def __init__(
        self, shape: CubeShape, everyone: Axis, numbers: ParamNumbers, axes: Mapping[tuple[AxisName, ...], Axis]
    ) -> None:
        self._shape, self._everyone, self._numbers, self._axes = shape, everyone, numbers, axes
        self._found: dict[Number, nn.Parameter] = {}
        self._compared: set[Number] = set()  # whose copies were compared

    def check_copies(self, tensors: Mapping[str, Tensor]) -> None:
        """Raises ValueError, on every rank, where ranks that hold copies of a tensor do not hold the same bits."""
        if not self._is_dry:
            check_copies(tensors.items(), self._shape, self._told)

    @property
    def _is_dry(self) -> bool:
        return self._everyone.traffic.is_dry or "fake" in dist.get_backend()

    def _check_copies_of(self, parameters: Sequence[nn.Parameter]) -> None:
        try:
            check_copies(((" ", parameter) for parameter in parameters), self._shape, self._told)
        except ValueError:  # on all ranks; only now are names worth looking for
            check_copies(zip(names_of(parameters), parameters, strict=True), self._shape, self._told)

    def completed(self, summed: Sequence[_PendingGrad], unsummed: Iterable[nn.Parameter]) -> list[_PendingGrad]:
        """The gradients to be summed, the same parameters in the same order on all ranks.

        Args:
            summed: those of this rank. unsummed: what else it has used.

        Raises:
            ValueError: ranks that work on one parameter together have not all used it, or copies of one that is used
                for the first time differ; on every rank.
        """
        entries = self._by_number(summed, lambda entry: entry.parameter)
        parameters = self._by_number(unsummed, lambda parameter: parameter)
        uses = {
            number: _Use(entry.over.name, tuple(entry.parameter.shape), entry.gradient.dtype)
            for number, entry in entries.items()
        }
        for number, parameter in parameters.items():
            uses[number] = _Use("none", tuple(parameter.shape), parameter.dtype)
        known = repr(sorted((number, use.over) for number, use in uses.items()))
        if not all_equal(_hashed(known), self._everyone):
            self._add_unused(entries, uses)
        fresh = {number: each for number, each in parameters.items() if number not in self._compared}
        fresh |= {number: entry.parameter for number, entry in entries.items() if number not in self._compared}
        if fresh and not self._is_dry:
            self._compared |= fresh.keys()
            self._check_copies_of([fresh[number] for number in sorted(fresh)])
        return [entries[number] for number in sorted(entries)]

    def _by_number(self, items: Iterable[T], parameter: Callable[[T], nn.Parameter]) -> dict[Number, T]:
        found: dict[Number, T] = {}
        listed = list(items)
        for item, number in zip(listed, self._numbers.of([parameter(item) for item in listed]), strict=True):
            while number in found:  # a parameter that was read from a file twice
                number = (*number, -1)
            found[number] = item
        return found

    def _add_unused(self, entries: dict[Number, _PendingGrad], uses: dict[Number, _Use]) -> None:
        by_rank: list[dict[Number, _Use]] = self._told(uses)
        everywhere = {number: use for each in by_rank for number, use in each.items()}
        users = {number: [number in each for each in by_rank] for number in everywhere}
        refused = [number for number in everywhere if not self._may_differ(number, users[number], by_rank)]
        if refused:
            over = ", ".join(sorted({everywhere[number].over for number in refused}))
            raise ValueError(
                f"ranks have used different parameters in this backward pass: {self._uses_of(refused, users)}. A "
                "parameter may be left out on some ranks along the axes alone over which its gradient is summed (of "
                f"these {over}): along the others they hold parts of it, and need all of them. Let ranks that differ "
                "along those choose alike: draw layers and heads from a generator that is seeded alike on them."
            )
        unused = [number for number in everywhere if number not in uses]
        self._found |= self._numbers.find(number for number in unused if number not in self._found)
        absent: list[Number] = [
            number
            for number in unused
            if number not in self._found or tuple(self._found[number].shape) != everywhere[number].shape
        ]
        absent = sorted({number for each in self._told(absent) for number in each})
        if absent:
            raise ValueError(
                f"ranks have used different parameters in this backward pass: {self._uses_of(absent, users)}. The "
                "others do not have them. Make the same parameters on every rank in the same order, with "
                "tensor3d.normal, constant or distribute, whether it uses them or not."
            )
        for number in unused:
            parameter, use = self._found[number], everywhere[number]
            entries[number] = _PendingGrad(
                parameter=parameter,
                gradient=torch.zeros_like(_local(parameter), dtype=use.dtype, requires_grad=False),
                over=self._axes[_names(use.over)],
                owned=True,
            )

    def _may_differ(self, number: Number, used: list[bool], by_rank: list[dict[Number, _Use]]) -> bool:
        """Whether the ranks that have used it differ from the others along the axes of its sum alone. Along others they
        hold parts of one weight, which travelled in one product, or copies whose gradients are equal."""
        told = {each[number] for each in by_rank if number in each}
        if len(told) > 1:
            return False
        places = [self._shape.coordinate(rank) for rank in range(len(used))]
        summed = [tuple(place[axis] for axis in _names(next(iter(told)).over)) for place in places]
        using = {place for place, uses in zip(summed, used, strict=True) if uses}
        return all(uses == (place in using) for place, uses in zip(summed, used, strict=True))

    def _uses_of(self, numbers: Sequence[Number], users: Mapping[Number, list[bool]]) -> str:
        """Who has used each, on every rank alike: those that have a parameter tell its name."""
        mine = self._numbers.find(numbers)
        told = self._told(dict(zip(mine, names_of(mine.values()), strict=True)))
        parts = []
        for number in numbers[:_MOST_NAMED]:
            name = next((each[number] for each in told if number in each), "a parameter")
            ranks = [rank for rank, used in enumerate(users[number]) if used]
            parts.append(f"{name} by rank{'s' * (len(ranks) > 1)} {_listed(ranks)} alone")
        more = f", and {len(numbers) - _MOST_NAMED} more" if len(numbers) > _MOST_NAMED else ""
        return "; ".join(parts) + more

    def _told(self, value: Any) -> list[Any]:
        values: list[Any] = [None] * self._everyone.size
        dist.all_gather_object(values, value, group=open_group(self._everyone))
        return values


def _hashed(text: str) -> int:
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=7).digest(), "little")


def _names(over: str) -> tuple[AxisName, ...]:
    return () if over == "none" else tuple(over.split("+"))  # type: ignore[arg-type]


def _listed(ranks: Sequence[int]) -> str:
    return ", ".join(map(str, ranks[:8])) + (", ..." if len(ranks) > 8 else "")


# --- Sums -------------------------------------------------------------------------------------------------------------


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
    groups: dict[tuple[str, str, str], list[_PendingGrad]] = {}
    for entry in entries:
        key = entry.over.name, str(entry.gradient.dtype), entry.gradient.device.type
        groups.setdefault(key, []).append(entry)
    return [groups[key] for key in sorted(groups)]


def _local(tensor: Tensor) -> Tensor:
    # DTensor arithmetic on a four-axis mesh takes seconds the first time.
    return tensor.to_local().detach() if isinstance(tensor, DTensor) else tensor


class _HeldHooks:
    """The hooks of a parameter (`register_hook`, `register_post_accumulate_grad_hook`) while a backward pass runs, in
    which autograd would call them before the gradient is there: until `put_back`, others stand in their places.

    A hook that is removed meanwhile stays removed."""

    def __init__(self, parameter: nn.Parameter) -> None:
        self.passes: set[int] = set()
        self.by_autograd: Tensor | None = None
        """The part of the gradient that did not come through the reducer: of arithmetic on the parameter itself."""
        self._taken = [
            (places, dict(places), stand_in)
            for places, stand_in in (
                (parameter._backward_hooks, self._note),
                (parameter._post_accumulate_grad_hooks, _nothing),
            )
            if places
        ]
        for places, _, stand_in in self._taken:
            places.update(dict.fromkeys(places, stand_in))

    def put_back(self) -> None:
        for places, hooks, _ in self._taken:
            places.update({key: hooks[key] for key in places if key in hooks})

    def _note(self, gradient: Tensor | None) -> None:
        self.by_autograd = gradient


def _nothing(parameter: Tensor) -> None:
    pass


@torch.no_grad()
def _arrive(entry: _PendingGrad, held: _HeldHooks | None) -> None:
    """A gradient is there: its hooks see it, and it is added to `.grad`."""
    parameter = entry.parameter
    hooks = list((parameter._backward_hooks or {}).values())
    if hooks:
        other = held.by_autograd if held is not None else None
        gradient = _as_parameter(entry.gradient if other is None else entry.gradient + _local(other), parameter)
        for hook in hooks:
            changed = hook(gradient)
            gradient = gradient if changed is None else changed
        if isinstance(gradient, DTensor) and isinstance(parameter, DTensor):
            gradient = gradient.redistribute(placements=parameter.placements)
        entry.gradient = _local(gradient) if other is None else _local(gradient) - _local(other)
        entry.owned = False
    _add_to_grad(entry)
    for hook in list((parameter._post_accumulate_grad_hooks or {}).values()):
        hook(parameter)


def _as_parameter(block: Tensor, parameter: nn.Parameter) -> Tensor:
    """As FSDP2 wraps its gradients: `from_local` builds and checks the specification anew, a fifth of a small step."""
    return DTensor(block, parameter._spec, requires_grad=False) if isinstance(parameter, DTensor) else block


def _add_to_grad(entry: _PendingGrad) -> None:
    parameter, gradient = entry.parameter, entry.gradient
    if parameter.grad is not None:
        _local(parameter.grad).add_(gradient)
        return
    gradient = gradient.to(parameter.dtype)
    if not entry.owned:
        # Autograd may still own this storage; and fused optimisers read `.grad` in the parameter's own order.
        gradient = gradient.clone(memory_format=torch.contiguous_format)
    parameter.grad = _as_parameter(gradient, parameter)
