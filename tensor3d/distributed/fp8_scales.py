"""Delayed scaling of products in FP8: a scale comes from the largest magnitudes of passes before (Micikevicius et al.
2022, arXiv 2209.05433; Transformer Engine's `DelayedScaling`).

So rounding is one pass over memory, and nothing is reduced before a product. Each weight's products have three scales,
of A', W' and dC', logical matrices all: at the end of a backward pass that sums over ranks, the largest magnitudes that
it met are reduced over all ranks, in one collective for all weights, and each history, of H of them, goes on by one.
All uses of a weight in a pass share its scales, as do the micro-batches of a step.

What is written down is what backward passes used: an evaluation, and a forward pass that is computed again, write
nothing. A magnitude that is not finite is left out: so a step that is skipped for it changes no scale. Where there is
no history yet, and for frozen products that no gradient passes through, scaling is current, of what a rank holds.

What is known of a weight is kept on it; `Linear3D` gives it to its copies, and to files of whole models; checkpoints
hold it (`history_tensor`). Tensors here are never changed in place: whoever holds a scale keeps it.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, TypeAlias

import torch
import torch.nn.functional as F
from torch import Tensor

from tensor3d.distributed.collectives import Axis, all_reduce_largest
from tensor3d.distributed.seeds import Number, ParamNumbers
from tensor3d.ops.fp8 import E4M3, E5M2, scale_of
from tensor3d.torch_private import storage_id

if TYPE_CHECKING:
    from tensor3d.distributed.use_agreement import UseAgreement

INPUT, WEIGHT, GRADIENT = range(3)
"""A', W' and dC' of a product."""
KINDS = (E4M3, E4M3, E5M2)
"""Their types in FP8."""
_KEPT_AS = "_tensor3d_fp8_history"
_NOTHING = -1.0
"""In place of a magnitude that is not there."""
_APART = 4
"""Numbers of fp32 in 16 bytes."""
_Key: TypeAlias = tuple[int, Number]  # a role and a parameter's number


@dataclass(kw_only=True)
class _History:
    """What is known of a weight's products, by role; kept on the weight."""

    rows: list[Tensor | None] = field(default_factory=lambda: [None] * len(KINDS))
    """Largest magnitudes, fp32 (H,), the newest first."""
    scales: list[Tensor | None] = field(default_factory=lambda: [None] * len(KINDS))

    def __deepcopy__(self, memo: dict[int, Any]) -> _History:
        return _History(rows=list(self.rows), scales=list(self.scales))

    def __reduce__(self) -> tuple[Any, ...]:
        return torch.Size, ()  # in a file there is no class of ours


class Fp8Scales:
    """Of a cube's products. Histories themselves are kept on the weights.

    Args:
        everyone: all ranks of the cube.
        device: of its parameters.
        length: H.
    """

    def __init__(self, everyone: Axis, numbers: ParamNumbers, device: torch.device, length: int) -> None:
        self._everyone, self._numbers, self._device, self._length = everyone, numbers, device, length
        self._seen: dict[tuple[int, int], tuple[Tensor, Tensor]] = {}  # by role and id: a weight and a magnitude
        self._cut: Tensor | None = None

    def __getstate__(self) -> dict[str, Any]:
        return vars(self) | {"_seen": {}, "_cut": None}

    @property
    def cut(self) -> int:
        """In how many logical matrices something was cut off so far: each A', W' and dC' counts once a pass. The same
        on all ranks. Waits for the device."""
        return 0 if self._cut is None else int(self._cut)

    def of(self, weight: Tensor) -> list[Tensor | None]:
        """The scales of A', W' and dC', fp32 (), a copy of the list. None: there is no history yet."""
        history = _history_of(weight)
        return [None] * len(KINDS) if history is None else list(history.scales)

    def observe(self, weight: Tensor, largest: Sequence[Tensor | None]) -> None:
        """Within a backward pass: the largest magnitudes, fp32 (), of what this rank has multiplied, by role."""
        for role, number in enumerate(largest):
            if number is not None:
                before = self._seen.get((role, id(weight)))
                self._seen[role, id(weight)] = weight, number if before is None else torch.maximum(before[1], number)

    @torch.no_grad()
    def end_of_pass(self, agreement: UseAgreement | None) -> None:
        """All histories that were met go on by one, on every rank alike, whether it has met them or not."""
        seen, self._seen = self._seen, {}
        weights = [weight for weight, _ in seen.values()]
        numbers = self._numbers.of(weights) if agreement is not None else [(i,) for i in range(len(weights))]
        mine = {(role, n): found for (role, _), n, found in zip(seen, numbers, seen.values(), strict=True)}
        keys: list[_Key] = sorted(mine)
        if agreement is not None:
            keys = agreement.union(keys)
        if not keys:
            return
        strangers = {number for role, number in keys if (role, number) not in mine}
        found: Mapping[Number, Tensor] = self._numbers.find(strangers) if strangers else {}
        nothing = torch.full((), _NOTHING, device=self._device)
        largest = torch.stack([mine[key][1] if key in mine else nothing for key in keys])
        largest = all_reduce_largest(largest, self._everyone)
        histories = [_made(mine[key][0] if key in mine else found.get(key[1])) for key in keys]
        self._go_on([role for role, _ in keys], histories, largest)

    def _go_on(self, roles: Sequence[int], histories: Sequence[_History], largest: Tensor) -> None:
        """Args:
        roles: sorted, so that those of one type lie together.
        largest: fp32 (n,).
        """
        none = largest.new_full((self._length,), _NOTHING)
        infinite = largest.new_full((), torch.inf)
        places = list(zip(roles, histories, strict=True))
        before = torch.stack([none if (row := of.rows[role]) is None else self._fitting(row) for role, of in places])
        most = [torch.finfo(kind).max for kind in KINDS]
        limits = [infinite if (scale := of.scales[role]) is None else scale * most[role] for role, of in places]
        finite = largest.isfinite()
        cut = ((largest > torch.stack(limits)) & finite).sum()
        self._cut = cut if self._cut is None else self._cut + cut
        after = torch.where(finite[:, None], torch.cat([largest[:, None], before[:, :-1]], 1), before)
        scales = _scales(after, sum(role != GRADIENT for role in roles))
        # Each at a multiple of 16 bytes, as all memory of its own is: what lies otherwise compiled code copies first.
        scales = scales.unsqueeze(1).repeat(1, _APART)[:, 0]
        for (role, of), row, scale in zip(places, after.unbind(), scales.unbind(), strict=True):
            of.rows[role], of.scales[role] = row, scale

    def _fitting(self, row: Tensor) -> Tensor:
        """Of another length, as a checkpoint may have it."""
        missing = self._length - row.shape[0]
        return row if missing == 0 else F.pad(row[: self._length], (0, max(0, missing)), value=_NOTHING)


def kept_bytes(weights: Iterable[Tensor]) -> int:
    """Of what is known of these weights: H magnitudes and a scale for each of three matrices, in fp32, a scale at a
    multiple of 16 bytes. The weights of a pass have them in two pieces of memory."""
    known = [history for weight in weights if (history := _history_of(weight)) is not None]
    kept = [each for history in known for each in (*history.rows, *history.scales) if each is not None]
    return sum({storage_id(each): each.untyped_storage().nbytes() for each in kept}.values())


def _scales(rows: Tensor, first_gradient: int) -> Tensor:
    """Of rows (n, H), those of dC' at the end. Where there was nothing but 0, 1: no number is out of the range then."""
    most = rows.amax(1)
    split = scale_of(most[:first_gradient], E4M3), scale_of(most[first_gradient:], E5M2)
    return torch.where(most > 0, torch.cat(split), 1.0)


def _history_of(weight: Tensor) -> _History | None:
    found = vars(weight).get(_KEPT_AS)
    return found if isinstance(found, _History) else None  # else it comes out of a file


def _made(weight: Tensor | None) -> _History:
    """The history that is kept on a weight, from now on at least; of a weight that this rank does not have, none."""
    found = None if weight is None else _history_of(weight)
    if found is None:
        found = _History()
        if weight is not None:
            vars(weight)[_KEPT_AS] = found
    return found


# --- In checkpoints ---------------------------------------------------------------------------------------------------


def history_tensor(weight: Tensor) -> Tensor | None:
    """fp32 (3, H): of A', W' and dC', the newest first, -1 where there is none. None: nothing is known of it."""
    history = _history_of(weight)
    known = [] if history is None else [row for row in history.rows if row is not None]
    if history is None or not known:
        return None
    nothing = torch.full_like(known[0], _NOTHING)
    return torch.stack([nothing if row is None else row for row in history.rows])


def restore_history(weight: Tensor, stored: Tensor | None) -> None:
    """What `history_tensor` gave becomes what is known of the weight; of None, nothing."""
    vars(weight).pop(_KEPT_AS, None)
    if stored is None:
        return
    history, scales = _made(weight), _scales(stored, GRADIENT)
    for role in range(len(KINDS)):
        if stored[role].amax() >= 0:
            history.rows[role], history.scales[role] = stored[role].clone(), scales[role].clone()
