"""The ledger: how gradients reach `.grad`.

A reduce-scatter that still runs cannot be returned from `backward` (autograd may read it at once), and a gradient that
has to be summed over ranks should not be summed alone. So every function that uses a parameter hands its local gradient
in here, with its pending work, and returns None. The uses of a parameter are added up. The first hand-in of a backward
pass queues one engine callback; it waits, sums over ranks what has to be summed, and adds to `.grad`.

Sums over `data` do not wait for it: what came in which order is written down, and in the next passes a bucket leaves as
soon as its last gradient is there (distributed/grad_buckets.py). An order counts when all ranks know of it, which costs
nothing: a rank that has a new one says so in the comparison that ends every pass. The first pass sends all at its end.

Sums are by parameter: the ranks compare what each of them has used, and where that differs, a parameter counts as zero
on those that have not used it (distributed/use_agreement.py).

Hooks on parameters are called when the sums are there, as those of FSDP2 are. The price: `torch.autograd.grad` cannot
return these gradients.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, Literal
from weakref import WeakSet, finalize, ref

import torch
from torch import Tensor, nn
from torch.optim import optimizer as torch_optim
from torch.utils.hooks import RemovableHandle

from tensor3d.distributed.collectives import Axis, CommHandle
from tensor3d.distributed.cube_policies import MixedPrecisionPolicy
from tensor3d.distributed.data_shares import refuse_unaware_optimizers
from tensor3d.distributed.grad_arrival import HeldHooks, PendingGrad, add_to_grads, arrive, is_watched
from tensor3d.distributed.grad_buckets import BucketPlan, GradBuckets, KeptMemory
from tensor3d.distributed.seeds import Number, names_of, number_of
from tensor3d.distributed.use_agreement import OwnUses, Record, UseAgreement, slot_of
from tensor3d.torch_private import at_end_of_pass, backward_pass, has_storage, lent_by_fully_shard

_MOST_NAMED = 6  # parameters in a message
_NOT_STORED = ("_relatives", "_hooks", "_recomputing", "_guard", "_passes", "_early")

_WIDE = 4
"""Bytes of a type in which a sum of thousands does not stop growing."""
HandIn = tuple[nn.Parameter, Tensor | CommHandle, Axis]
"""A parameter, a gradient of it, and the ranks over which it is to be summed."""


class RowSums(CommHandle):
    """The gradient of a table that few rows were read of: where one is there already, as that of a tied projection is,
    those rows are added to it, and nothing as large as the table is made.

    Args:
        whole: makes the gradient.
        add: adds the rows to another one, in place.
    """

    __slots__ = ("_add", "_made")

    def __init__(self, rows: Tensor, whole: Callable[[], Tensor], add: Callable[[Tensor], object]) -> None:
        super().__init__(rows)
        self._made, self._add = whole, add

    def wait(self) -> Tensor:
        return self._made()

    def add_to(self, gradient: Tensor) -> None:
        self._add(gradient)


@dataclass(kw_only=True)
class _BackwardPass:
    """What one backward pass has handed in so far."""

    entries: dict[int, PendingGrad] = field(default_factory=dict)
    uses: dict[int, int] = field(default_factory=dict)
    """How many of each parameter, in the order of the last ones."""
    travelling: Sequence[HandIn] = ()
    rest: list[Callable[[], Sequence[HandIn]]] = field(default_factory=list)
    """Called at its end: give what has been announced and not handed in."""
    buckets: GradBuckets | None = None
    """Of sums that travel while the pass runs."""
    sent: dict[Number, PendingGrad] = field(default_factory=dict)
    """What is in them."""
    inner: bool = False
    """Whether it began within another one. Sums of the two do not mix: its own wait for its end, before which those of
    the other one are finished."""
    interrupted: bool = False
    """Whether another one ended within it."""
    of_recomputed: bool = False
    """Whether it goes through what was computed again within another one: a reentrant checkpoint."""


@dataclass(kw_only=True)
class _EarlySums:
    """What is known of passes before."""

    plan: BucketPlan | None = None
    agreed: Record = ()
    """This rank's, when the ranks agreed on the plan."""
    last: Record = ()
    memory: KeptMemory = field(default_factory=KeptMemory)
    """Of the plan's buckets, if it stays."""

    def is_new(self, record: Record) -> bool:
        """Whether the ranks should make a plan of it: of a first pass, or of one that was made twice alike."""
        last, self.last = self.last, record
        return record != self.agreed and (self.plan is None or record == last)


class GradReducer:
    """Collects the local gradients of backward passes. One on each cube; layers use it through `accumulate_grad`."""

    def __init__(
        self,
        precision: MixedPrecisionPolicy = MixedPrecisionPolicy(),  # noqa: B008
        relatives: WeakSet[GradReducer] | None = None,
        at_end: Callable[[], None] | None = None,
        agreement: UseAgreement | None = None,
        keep_buckets: bool | None = False,
        at_sum: Callable[[UseAgreement | None], None] | None = None,
    ) -> None:
        self._at_sum = at_sum  # of each outermost backward pass that sums over ranks, after its sums
        self._keep_buckets = keep_buckets  # None: unless memory is scarce
        self._spares = False
        self._shares = False
        self._relatives = WeakSet() if relatives is None else relatives  # of cubes that compute on the same processes
        self._relatives.add(self)
        self.observer: Callable[[Literal["sum", "summed"]], None] | None = None
        """Called where the sums over ranks at the end of a backward pass begin and end: for whoever measures them."""
        self._at_end = at_end  # of each backward pass
        self.agreement = agreement
        """None on one rank."""
        self._precision = precision
        self._passes: dict[int, _BackwardPass] = {}
        self._held: dict[int, PendingGrad] = {}
        self._unsummed_while_holding: dict[int, nn.Parameter] = {}  # whose gradients are sums over no ranks
        self._holding = False
        self._hooks: dict[int, HeldHooks] = {}
        self._recomputing: set[int] = set()  # passes in which something was computed again
        self._guard: finalize[..., GradReducer] | None = None  # ends it when it is called
        self._early = _EarlySums()
        self._accumulated = False  # whether the last pass was the end of several that were held back

    def __getstate__(self) -> dict[str, Any]:
        # A model that is stored takes its cube along; weak references cannot be stored, and relatives are not its part.
        return {name: value for name, value in vars(self).items() if name not in _NOT_STORED}

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state)
        self._relatives, self._hooks, self._recomputing, self._guard = WeakSet([self]), {}, set(), None
        self._passes, self._early = {}, _EarlySums()
        self._guard_steps()
        if self._shares:
            refuse_unaware_optimizers(self)

    def accumulate_grad(self, parameter: nn.Parameter, gradient: Tensor | CommHandle, over: Axis) -> None:
        """Takes this rank's gradient of one use of `parameter`, to be summed over the ranks of `over`.

        Only inside a backward pass. `gradient` has the local shape of the parameter. A tensor is not written to; what
        comes in a handle is the ledger's own from then on, and may become `.grad` itself.
        """
        if isinstance(gradient, CommHandle) and gradient.travels:
            self.accumulate_grads([(parameter, gradient, over)])
            return
        if is_watched(parameter):
            self._keep_hooks(parameter)
        self._receive(self._current(), parameter, gradient, over)

    def accumulate_grads(self, handed: Sequence[HandIn]) -> None:
        """The same for gradients that travel together, or for one."""
        current, travel = self._current(), False
        for parameter, gradient, _ in handed:
            self._keep_hooks(parameter)
            travel = travel or (isinstance(gradient, CommHandle) and gradient.travels)
        if travel:
            # One weight's gradient travels under the next layer's products. Were all to travel until the end of the
            # pass, the gradients of whole slabs, x times this rank's share, would stay in memory for it.
            before, current.travelling = current.travelling, handed
            handed = before
        for each in handed:
            self._receive(current, *each)

    def announce(self, parameter: nn.Parameter, rest: Callable[[], Sequence[HandIn]] | None = None) -> None:
        """A gradient of `parameter` will be handed in within this pass.

        Args:
            rest: called at the end of the pass, gives what has not been handed in until then.
        """
        current = self._current()
        self._keep_hooks(parameter)
        if rest is not None:
            current.rest.append(rest)

    def join_pass(self) -> None:
        """Within a backward pass: it is not over before its own end, though passes within it may hand everything in."""
        self._current()

    def pass_by(self, *parameters: nn.Parameter | None) -> None:
        """Within a backward pass: the graph leads to these, and no gradient of them is computed here. Their hooks rest
        until the end of the pass; autograd would call them with None."""
        watched = [parameter for parameter in parameters if parameter is not None and is_watched(parameter)]
        for parameter in watched:
            self._keep_hooks(parameter)
        if watched and backward_pass() not in self._passes:
            at_end_of_pass(partial(self._end_without_gradients, backward_pass()))

    def _end_without_gradients(self, task: int) -> None:
        if task not in self._passes:  # else its own end needs them
            self._hooks_of(task)

    def _keep_hooks(self, parameter: nn.Parameter) -> None:
        if is_watched(parameter):
            self._hooks.setdefault(id(parameter), HeldHooks(parameter)).passes.add(backward_pass())

    def _current(self) -> _BackwardPass:
        task = backward_pass()
        found = self._passes.get(task)
        if found is None:
            assert task != -1, "a gradient outside of a backward pass"
            found = self._passes[task] = self._begun()
            found.of_recomputed = bool(self._recomputing - {task})
            at_end_of_pass(partial(self._close, task))
        return found

    def _begun(self) -> _BackwardPass:
        plan, aside = self._early.plan, [other for other in self._relatives if other is not self and other._passes]
        current = _BackwardPass(inner=bool(self._passes))
        if plan is not None and not self._holding and not current.inner:
            # Of two cubes in one pass, neither knows when the other sends. And who waits for a sum where it is issued
            # would wait for ranks that have not used what is in it, which are at the end of their pass.
            memory, overlaps = self._early.memory if self.keeps_buckets else None, plan.overlaps
            current.buckets = GradBuckets(plan, early=overlaps and not aside, kept=memory)
        for other in aside:
            for running in other._passes.values():
                if running.buckets is not None:
                    running.buckets.early = False
        return current

    def _receive(
        self, current: _BackwardPass, parameter: nn.Parameter, gradient: Tensor | CommHandle, over: Axis
    ) -> None:
        """A use's gradient is there. That of a parameter which is complete leaves."""
        if torch.is_grad_enabled():  # seldom, and asking takes less time than entering `no_grad` for each gradient
            with torch.no_grad():
                self._receive(current, parameter, gradient, over)
            return
        key = id(parameter)
        _add(current.entries, parameter, gradient, over)
        if not current.inner and not current.interrupted:
            current.uses[key] = current.uses.pop(key, 0) + 1  # now the last
        if current.buckets is not None:
            self._put(current, parameter, current.uses.get(key))

    def _put(self, current: _BackwardPass, parameter: nn.Parameter, uses: int | None) -> None:
        """Into the buckets, if it is complete, with what micro-batches before have held back, which stays there in case
        this pass fails. `uses`: so far; None: all."""
        assert current.buckets is not None
        key, number = id(parameter), number_of(parameter)
        slot = None if number is None else current.buckets.plan.slots.get(number)
        if number is None or slot is None or uses not in (None, slot.uses):
            return
        entry, held = current.entries.get(key), self._held.get(key)
        whole = entry or held
        assert whole is not None
        if not current.buckets.takes(number, whole.gradient, whole.over):
            return
        if held is not None:
            whole = replace(held, owned=False)
            if entry is not None:
                whole.add(entry.gradient)
        current.entries.pop(key, None)
        current.sent[number] = whole
        whole.put_into(current.buckets, number)

    def forget_failed_passes(self) -> None:
        """Drops what passes that failed left behind, and takes note of what is computed again. Called in every forward;
        mostly it tests three containers. Not in what a compiler traces, which can learn nothing."""
        if torch.compiler.is_compiling():  # which cannot trace what follows
            return
        task = backward_pass()
        if task != -1:
            if task not in self._recomputing:
                self._recomputing.add(task)
                at_end_of_pass(partial(self._recomputing.discard, task))
        elif self._passes or self._hooks or self._recomputing:
            for failed in self._passes.values():
                if failed.buckets is not None:  # of which another rank may have sent more
                    failed.buckets.finish()
                    failed.buckets.keep_memory()
            self._passes.clear()
            self._recomputing.clear()
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

    @property
    def keeps_buckets(self) -> bool:
        """Whether memory of gradients that are summed over `data` stays from step to step."""
        return not self._spares if self._keep_buckets is None else self._keep_buckets

    def spare_memory(self) -> None:
        """From here on memory of gradients stays nowhere, but where a policy says that it does: told by optimisers that
        do without memory of their own."""
        for ledger in self._relatives:
            ledger._spares = True
            if not ledger.keeps_buckets:
                ledger.free_buckets()

    @property
    def shards_gradients(self) -> bool:
        """Whether sums over `data` are shared out."""
        return self._shares

    def shard_gradients(self) -> None:
        """From here on, of a gradient that is summed over `data` alone, each rank along it gets the sum of its share
        alone (distributed/data_shares.py), and `.grad` is that: ZeRO stage 2. Told by optimisers that step shares, on
        every rank alike. Others refuse to step on such gradients.

        Raises:
            ValueError: within a backward pass, or gradients are held back.
        """
        if backward_pass() != -1:
            raise ValueError('shard_over_data="gradients" cannot begin within a backward pass. Choose it before one.')
        self.check_nothing_held()
        for ledger in self._relatives:
            if not ledger._shares:
                ledger._shares, ledger._early = True, _EarlySums()
                refuse_unaware_optimizers(ledger)

    def free_buckets(self) -> None:
        """Lets go of memory that was kept for gradients; the next pass takes it anew."""
        self._early.memory.forget()

    def take_buckets(self) -> None:
        """Takes that memory, where it will stay, before the next pass does: so its forward pass is as later ones."""
        if self._early.plan is not None and self.keeps_buckets and not self._accumulated:
            buckets = GradBuckets(self._early.plan, kept=self._early.memory)
            buckets.take_memory()
            buckets.keep_memory()

    @property
    def kept_bytes(self) -> int:
        """Of that memory."""
        return self._early.memory.bytes

    def relative(
        self,
        precision: MixedPrecisionPolicy,
        at_end: Callable[[], None],
        keep_buckets: bool | None,
        at_sum: Callable[[UseAgreement | None], None] | None = None,
    ) -> GradReducer:
        """One for a cube of the same processes that computes in other types."""
        relative = GradReducer(precision, self._relatives, at_end, self.agreement, keep_buckets, at_sum)
        relative._spares = self._spares
        if self._shares:
            relative._shares = True
            refuse_unaware_optimizers(relative)
        return relative

    def discard(self) -> None:
        """Drops gradients held back by `holding`, and what was told of wrong inputs: for a step that is given up in the
        middle of its accumulation, or before it."""
        if self.agreement is not None:
            self.agreement.forget_told()
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

    @torch.no_grad()
    def _close(self, task: int) -> None:
        """The end of one backward pass."""
        hooks = self._hooks_of(task)
        if self._at_end is not None:
            self._at_end()
        current = self._passes[task]
        for each in current.travelling:
            self._receive(current, *each)
        for each in [item for rest in current.rest for item in rest()]:
            self._receive(current, *each)
        del self._passes[task]
        for around in self._passes.values():
            around.interrupted = True
            if around.buckets is not None:
                around.buckets.finish()
        self._accumulated = bool(self._held)
        if self._holding:
            self.free_buckets()
            arrived = self._hold(current, hooks)
        else:
            self._observe("sum")
            arrived = self._summed(current)
            self._observe("summed")
            if self._at_sum is not None and not self._passes:
                self._at_sum(self.agreement)
        if self.agreement is None:
            _check_memory(arrived)
        self._guard_steps()
        # Where `.grad` is there already, sums are added to it, and what they lie in is used no more. And sums of
        # micro-batches lie elsewhere until the last one: memory that stays would be there beside them.
        fresh = any(entry.parameter.grad is None for entry in current.sent.values())
        if current.buckets is not None and fresh and not self._accumulated:
            current.buckets.keep_memory()
        watched = [entry for entry in arrived if is_watched(entry.parameter)]
        add_to_grads(arrived if not watched else [entry for entry in arrived if not is_watched(entry.parameter)])
        for entry in watched:
            arrive(entry, hooks.get(id(entry.parameter)))

    def _hold(self, current: _BackwardPass, hooks: Mapping[int, HeldHooks]) -> list[PendingGrad]:
        """Adds to what waits for the last micro-batch; returns what need not wait."""
        arrived = []
        for key, entry in current.entries.items():
            if key in self._held:
                self._held[key].add(entry.gradient)
            elif entry.over.size > 1 or key in hooks:
                self._held[key] = entry
            else:
                arrived.append(entry)
                self._unsummed_while_holding[key] = entry.parameter
        return arrived

    def _summed(self, current: _BackwardPass) -> list[PendingGrad]:
        """All gradients of the pass and of the micro-batches before, summed over ranks."""
        early = self._early
        for key in list(current.entries | self._held) if current.buckets is not None else ():
            entry = current.entries.get(key) or self._held[key]
            self._put(current, entry.parameter, None)
        # What a pass around this one has put into its buckets already, it sums itself.
        around = {id(entry.parameter) for other in self._passes.values() for entry in other.sent.values()}
        held = {key: entry for key, entry in self._held.items() if key not in around}
        self._held = {key: entry for key, entry in self._held.items() if key in around}
        unsummed, self._unsummed_while_holding = self._unsummed_while_holding, {}
        gone = {id(entry.parameter) for entry in current.sent.values()}
        for key, entry in held.items():
            if key in current.entries and key not in gone:
                entry.add(current.entries[key].gradient)
            if key not in gone:
                current.entries[key] = entry
        arrived = [entry for entry in current.entries.values() if entry.over.size == 1]
        if self.agreement is None:
            return arrived
        unsummed |= {id(entry.parameter): entry.parameter for entry in arrived}
        late = [entry for entry in current.entries.values() if entry.over.size > 1]
        record = self._record(current, late)
        own = OwnUses(
            sent=current.sent,
            buckets=current.buckets,
            late=late,
            unsummed=list(unsummed.values()),
            record=record,
            is_new=not current.inner and early.is_new(record),
            shares=self._shares,
            of_recomputed=current.of_recomputed,
        )
        summed, agreed = self.agreement.completed(own, self._precision)
        if agreed is not None:
            axes = {entry.over.name: entry.over for entry in summed.values()}
            slots = [slot_of(number, summed[number], self._shares, uses) for number, uses in agreed]
            early.plan, early.agreed = BucketPlan(slots, axes, self._precision), record
        return arrived + list(summed.values())

    def _record(self, current: _BackwardPass, late: Sequence[PendingGrad]) -> Record:
        """What came before another pass has ended within this one; else all, at last what has come before it alone."""
        assert self.agreement is not None
        entries = {id(e.parameter): e for e in (*late, *current.sent.values()) if e.over.name == "data"}
        order = [key for key in current.uses if key in entries]
        order += [key for key in entries if key not in current.uses and not current.interrupted]
        numbers = self.agreement.numbers_of([entries[key].parameter for key in order])
        return tuple((number, current.uses.get(key, 0)) for number, key in zip(numbers, order, strict=True))

    def _hooks_of(self, task: int) -> dict[int, HeldHooks]:
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


def _add(entries: dict[int, PendingGrad], parameter: nn.Parameter, handed: Tensor | CommHandle, over: Axis) -> None:
    entry = entries.get(id(parameter))
    if entry is not None:
        names = f"{entry.over.name} and {over.name}"
        assert entry.over.ranks == over.ranks, f"uses of one parameter name {names} for its sum"
        if isinstance(handed, RowSums) and entry.owned and entry.gradient.dtype.itemsize >= _WIDE:
            handed.add_to(entry.gradient)
            return
    owned = isinstance(handed, CommHandle)
    gradient = handed.wait() if isinstance(handed, CommHandle) else handed
    if entry is None:
        entries[id(parameter)] = PendingGrad(parameter=parameter, gradient=gradient, over=over, owned=owned)
    else:
        entry.add(gradient)


def _check_memory(arrived: Sequence[PendingGrad]) -> None:
    """Raises ValueError where a parameter's memory is lent for this pass, by whoever has looked for its gradient
    already, and found none: it is gone before the gradient is there, or is known to be `fully_shard`'s."""
    gone = next((entry.parameter for entry in arrived if not has_storage(entry.parameter)), None)
    lent = gone if gone is not None else lent_by_fully_shard([entry.parameter for entry in arrived])
    if lent is not None:
        how = "was given back within the backward pass" if lent is gone else "is a place for what is gathered"
        raise ValueError(
            f"the memory of a parameter of shape {tuple(lent.shape)} {how}, as of fully_shard, which sums gradients "
            "meanwhile: that of a layer of tensor3d is there at the end of the pass, and would be lost. Leave "
            "fully_shard out, and make the cube of all processes: Cube(x=N) is fully sharded data parallelism."
        )
