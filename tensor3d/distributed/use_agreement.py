"""Sums of gradients over ranks that need not all have used the same parameters."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn

from tensor3d.distributed.collectives import Axis, all_equal, open_group
from tensor3d.distributed.cube_policies import MixedPrecisionPolicy
from tensor3d.distributed.cube_shape import AxisName, CubeShape
from tensor3d.distributed.data_shares import lies_in_share, share
from tensor3d.distributed.grad_arrival import PendingGrad, block_of
from tensor3d.distributed.grad_buckets import BucketPlan, GradBuckets, GradSlot
from tensor3d.distributed.seeds import Number, ParamNumbers, check_copies, names_of

T = TypeVar("T")
_MOST_NAMED = 6  # parameters in a message

Record = tuple[tuple[Number, int], ...]
"""What a pass has handed in to be summed over `data`, and how often, in the order in which it was complete."""


class _Use(NamedTuple):
    """What a rank tells of a parameter that it has used."""

    over: str
    shape: tuple[int, ...]
    """Of the logical tensor."""
    dtype: torch.dtype
    """Of the gradient."""
    early: bool = False
    """Whether its gradient is in the buckets of the plan."""
    late: bool = False
    """Whether there is some of it beside them."""


@dataclass(frozen=True, kw_only=True)
class OwnUses:
    """What a rank has used in a pass."""

    sent: dict[Number, PendingGrad]
    """Its gradients in `buckets`, of which some may travel."""
    buckets: GradBuckets | None
    late: Sequence[PendingGrad]
    """Those that are to be summed, too."""
    unsummed: Sequence[nn.Parameter]
    """What else it has used."""
    record: Record
    is_new: bool
    """Whether the ranks are to make a plan of the record."""
    shares: bool
    """Whether sums over data are shared out."""
    of_recomputed: bool
    """Whether the pass is that of a reentrant checkpoint, within another one."""


class _Told(NamedTuple):
    """What a rank tells of a pass."""

    uses: dict[Number, _Use]
    has_sent: bool
    """Whether a bucket has left."""
    is_new: bool
    record: Record
    shares: bool
    of_recomputed: bool
    steps: int
    wrong_input: str


class UseAgreement:
    """Lets ranks that have used different parameters in a pass (layers dropped, heads by condition) sum by parameter.

    Each pass compares a hash of what each rank has used: one all-reduce of 16 bytes between hosts. Where all are equal,
    that is all. Else the ranks tell one another, and those that have not used a parameter count as zero; whoever has
    not used it looks it up once among the objects of its process, and holds it from then on.

    Of buckets that travel while a pass runs, a rank may have sent more than another when they compare. Where any has
    sent one, or all are full everywhere, all send all of them, with zeros for what they do not have. Else, as in a pass
    through another model, what is in them is summed with the rest.

    Args:
        everyone: all ranks of the cube, on a group through which hosts can speak, and on which no bucket travels.
        axes: the cube's, by the names of those taken together.
    """

    def __init__(
        self, shape: CubeShape, everyone: Axis, numbers: ParamNumbers, axes: Mapping[tuple[AxisName, ...], Axis]
    ) -> None:
        self._shape, self._everyone, self._numbers, self._axes = shape, everyone, numbers, axes
        self._found: dict[Number, nn.Parameter] = {}
        self._compared: set[Number] = set()  # whose copies were compared
        self.steps = 0
        """Of optimisers that hold parameters of the cube, whether or not these have a gradient."""
        self._wrong_input = ""

    def tell(self, wrong_input: str) -> None:
        """Has the backward pass that next sums over ranks raise ValueError with this, on every rank: what is wrong with
        the values that one rank has got, and others cannot know of. They would wait for it, were it raised here."""
        self._wrong_input = self._wrong_input or wrong_input

    def forget_told(self) -> None:
        """For a step that is given up without such a pass."""
        self._wrong_input = ""

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

    def completed(
        self, own: OwnUses, precision: MixedPrecisionPolicy
    ) -> tuple[dict[Number, PendingGrad], Record | None]:
        """The gradients summed, the same parameters in the same order on all ranks; and what the next passes are to go
        by, if that changes.

        Raises:
            ValueError: some rank was told of a wrong input, or ranks that work on one parameter together have not all
                used it, or have dropped a reentrant checkpoint that others have, or have taken other numbers of
                optimiser steps, or copies of a parameter that is used for the first time differ; on every rank.
        """
        sent, buckets = own.sent, own.buckets
        entries = self._by_number(own.late, lambda entry: entry.parameter, sent)
        uses = {
            number: _Use(
                entry.over.name, tuple(entry.parameter.shape), entry.gradient.dtype, number in sent, number in entries
            )
            for number, entry in (sent | entries).items()
        }
        parameters = self._by_number(own.unsummed, lambda parameter: parameter)
        for number, parameter in parameters.items():
            uses[number] = _Use("none", tuple(parameter.shape), parameter.dtype)
        has_sent = buckets is not None and buckets.has_sent
        wrong_input, self._wrong_input = self._wrong_input, ""
        mine = _Told(uses, has_sent, own.is_new, own.record, own.shares, own.of_recomputed, self.steps, wrong_input)
        known = sorted((number, use.over, use.early, use.late) for number, use in uses.items())
        told = known, has_sent, own.is_new and own.record, own.shares, own.of_recomputed, self.steps, wrong_input
        alike = all_equal(_hashed(repr(told)), self._everyone)
        by_rank: list[_Told] = [mine] if alike else self._told(mine)
        self._check_told(by_rank, alike)
        if buckets is not None and (any(each.has_sent for each in by_rank) or (alike and buckets.is_full)):
            buckets.finish()
        else:
            for number, entry in sent.items():
                if buckets is not None:
                    entry.take_back(buckets, number)
                if number in entries:
                    entry.add(entries[number].gradient)
            entries, sent, buckets = entries | sent, {}, None
        if not alike:
            self._add_unused(entries, sent, buckets, [each.uses for each in by_rank])
        used = parameters | {number: entry.parameter for number, entry in (sent | entries).items()}
        fresh = {number: parameter for number, parameter in used.items() if number not in self._compared}
        if fresh and not self._is_dry:
            self._compared |= fresh.keys()
            self._check_copies_of([fresh[number] for number in sorted(fresh)])
        _sum_over_ranks(entries, precision, own.shares)
        for number, entry in sent.items():
            if number in entries:
                entry.add(entries[number].gradient)
        summed = entries | sent
        agreed: dict[Number, int] = {}
        for number, times in (item for each in by_rank for item in each.record):
            agreed.setdefault(number, times)
        is_new = any(each.is_new for each in by_rank)
        return {number: summed[number] for number in sorted(summed)}, tuple(agreed.items()) if is_new else None

    @staticmethod
    def _check_told(by_rank: Sequence[_Told], alike: bool) -> None:
        """Raises ValueError where a rank was told of a wrong input, or ranks are not at the end of the same pass.

        Args:
            by_rank: what each has told; where all told the same, that one alone.
        """
        if wrong := {each.wrong_input: None for each in by_rank if each.wrong_input}:
            of_ranks = ([rank for rank, each in enumerate(by_rank) if each.wrong_input == text] for text in wrong)
            raise ValueError(
                "; ".join(
                    text if alike else f"rank{'s' * (len(ranks) > 1)} {_listed(ranks)}: {text}"
                    for text, ranks in zip(wrong, of_ranks, strict=True)
                )
            )
        if len({each.shares for each in by_rank}) > 1:
            raise ValueError(
                f"ranks {_listed([rank for rank, each in enumerate(by_rank) if each.shares])} alone have an optimiser "
                'with shard_over_data="gradients". Make it on every rank before the first backward pass.'
            )
        if len(steps := {each.steps for each in by_rank}) > 1:
            behind = _listed([rank for rank, each in enumerate(by_rank) if each.steps == min(steps)])
            raise ValueError(
                f"at the end of a backward pass ranks {behind} have taken {min(steps)} optimiser steps, and others up "
                f"to {max(steps)}: some have left out a pass, and sums would be of different steps. Let each rank use "
                "a parameter of the cube in every pass (a loss of weight 0 will do), and step where the others step."
            )
        if len({each.of_recomputed for each in by_rank}) > 1:
            within = _listed([rank for rank, each in enumerate(by_rank) if each.of_recomputed])
            raise ValueError(
                f"ranks {within} alone have come to the end of a reentrant checkpoint, a backward pass of its own in "
                "another. The others have dropped what is in it, so sums would be of different passes. Use "
                "torch.utils.checkpoint.checkpoint(..., use_reentrant=False), or let all ranks drop alike."
            )

    def union(self, keys: Sequence[T]) -> list[T]:
        """What any rank names, sorted, the same on all: one exchange of 16 bytes between hosts where all name the same.

        Args:
            keys: of this rank, sorted.
        """
        if all_equal(_hashed(repr(keys)), self._everyone):
            return list(keys)
        return sorted({key for told in self._told(keys) for key in told})

    def numbers_of(self, parameters: Sequence[nn.Parameter]) -> list[Number]:
        return list(self._by_number(parameters, lambda parameter: parameter))

    def _by_number(
        self,
        items: Iterable[T],
        parameter: Callable[[T], nn.Parameter],
        sent: Mapping[Number, PendingGrad] = {},  # never written to
    ) -> dict[Number, T]:
        found: dict[Number, T] = {}
        listed = list(items)
        for item, number in zip(listed, self._numbers.of([parameter(item) for item in listed]), strict=True):
            known = number
            while number in found or (number in sent and sent[number].parameter is not parameter(item)):
                number = (*number, -1)  # a parameter that was read from a file twice
            if number != known:
                self._numbers.keep(parameter(item), number)
            found[number] = item
        return found

    def _add_unused(
        self,
        entries: dict[Number, PendingGrad],
        sent: dict[Number, PendingGrad],
        buckets: GradBuckets | None,
        by_rank: Sequence[dict[Number, _Use]],
    ) -> None:
        """Adds what other ranks have used: to `sent` with its sum, to `entries` as zeros. `buckets`: None if nothing
        was sent."""
        everywhere: dict[Number, _Use] = {}
        for number, use in ((number, use) for each in by_rank for number, use in each.items()):
            before = everywhere.get(number, use)
            early, late = before.early or use.early, before.late or use.late
            everywhere[number] = use._replace(early=early and buckets is not None, late=late or buckets is None)
        uses = by_rank[self._everyone.index]
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
        for number, use in everywhere.items():
            known = sent.get(number) or entries.get(number)
            parameter = known.parameter if known is not None else self._found.get(number)
            if use.over == "none" or parameter is None:  # on all ranks alike, as was checked above
                continue
            axis = known.over if known is not None else self._axes[_names(use.over)]
            if use.late and number not in entries:
                zeros = torch.zeros_like(block_of(parameter), dtype=use.dtype, requires_grad=False)
                entries[number] = PendingGrad(parameter=parameter, gradient=zeros, over=axis, owned=True)
            if use.early and number not in sent:
                assert buckets is not None, "what nobody has sent is late"
                shared = buckets.plan.slots[number].rows is not None
                block = block_of(parameter)
                sums = buckets.unused[number].view((share(block, axis) if shared else block).shape)
                sent[number] = PendingGrad(parameter=parameter, gradient=sums, over=axis, owned=True, in_shares=shared)

    def _may_differ(self, number: Number, used: list[bool], by_rank: Sequence[dict[Number, _Use]]) -> bool:
        """Whether the ranks that have used it differ from the others along the axes of its sum alone. Along others they
        hold parts of one weight, which travelled in one product, or copies whose gradients are equal."""
        told = {(use.over, use.shape, use.dtype) for each in by_rank if (use := each.get(number)) is not None}
        if len(told) > 1:
            return False
        ((over, _, _),) = told
        places = [self._shape.coordinate(rank) for rank in range(len(used))]
        summed = [tuple(place[axis] for axis in _names(over)) for place in places]
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


def _sum_over_ranks(entries: Mapping[Number, PendingGrad], precision: MixedPrecisionPolicy, shares: bool) -> None:
    """Sums each entry over its ranks: all buckets in flight at once, in the same order on every rank."""
    slots = [slot_of(number, entries[number], shares) for number in sorted(entries)]
    axes = {entry.over.name: entry.over for entry in entries.values()}
    plan = BucketPlan(slots, axes, precision)
    buckets = GradBuckets(plan)
    for slot in sorted(slots, key=plan.first_bucket):  # so that one is begun when the last one is full
        entries[slot.number].put_into(buckets, slot.number)
    buckets.finish()


def slot_of(number: Number, entry: PendingGrad, shares: bool, uses: int = 0) -> GradSlot:
    gradient, block = entry.gradient, block_of(entry.parameter)
    shared = shares and entry.over.name == "data" and lies_in_share(entry.parameter, entry.over)
    rows = block.shape[0] if shared else None
    return GradSlot(number, entry.over.name, gradient.dtype, gradient.device.type, block.numel(), uses, rows)
