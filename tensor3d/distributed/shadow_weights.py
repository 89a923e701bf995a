"""Shadow weights: copies of parameters in the type of products, made when a parameter has changed, not at each use.

Where products are in another type than the parameters (bf16 beside fp32), each converts its weight in the forward pass,
and again in the backward pass. With `ExecutionPolicy.shadow_weights` it takes a copy instead, which is made at the
first use after a change, together with the copies of all others that have changed since: after an optimiser's step one
operator converts all weights, for any number of micro-batches. Copies have the bits of the conversion. They are held of
what products use, weights and biases; a lookup in a table that is also a product's weight takes its copy, and makes
none.

A change is seen by the version counters of the parameter and of its local block, by where that block lies, and by the
end of an optimiser's step, whose foreach and fused operators leave the counters of a DTensor as they are. What none of
them shows is an edit in place through `.data` (`parameter.data.add_(1)`), through memory that NumPy or a collective
writes to, and, of DTensors, by foreach operators (`torch.optim.swa_utils.AveragedModel`) or to the block of a detached
one, as `torch.distributed.checkpoint` loads into a `state_dict()`: `ShadowWeights.forget` after it. An edit under
`torch.no_grad`, of the parameter or of its block, is seen; so is all that this library reads into a model.

A copy that somebody still holds (a graph that waits for its backward pass, a gather on its way) keeps its numbers: the
next one gets memory of its own. Else its memory is written anew. While a CUDA graph is captured, and for what has no
version counters (parameters made in inference mode), nothing is taken from a copy: conversions are part of the graph.
"""

from __future__ import annotations

from typing import Any
from weakref import WeakSet, finalize

import torch
import torch.optim.optimizer as torch_optim
from torch import Tensor

from tensor3d.torch_private import FakeTensor, storage_id, storage_uses

_KEPT_AS = "_tensor3d_shadow"
_Place = tuple[int, int, torch.Size, tuple[int, ...]]


class _Shadow:
    """What is known of one parameter's copy, kept on the parameter: weak references would forbid that its content is
    exchanged (`torch.utils.swap_tensors`, which `.to` and the like need for DTensors)."""

    def __init__(self) -> None:
        self.copy: Tensor | None = None
        self._parameter: Tensor | None = None
        """Detached, as is the block: both share their version counters, and keep an address from being used again."""
        self._block: Tensor | None = None
        self._place: _Place | None = None
        self._seen: tuple[int, int] | None = None
        """Their versions when the copy was made."""
        self._alone = 0

    def __deepcopy__(self, memo: dict[int, Any]) -> tuple[()]:
        return ()  # a copied parameter has another copy

    def __reduce__(self) -> tuple[Any, ...]:
        return torch.Size, ()  # in a file there is no class of ours

    def fits(self, parameter: Tensor, block: Tensor, dtype: torch.dtype) -> bool:
        """Whether the copy is of what `parameter` holds now."""
        return (
            self.copy is not None
            and self.copy.dtype == dtype
            and self._seen == (parameter._version, block._version)
            and self._place == _place(block)
        )

    def bind(self, parameter: Tensor, block: Tensor) -> None:
        """Copies are made of this block from now on."""
        place = _place(block)
        if place != self._place:
            self._parameter, self._block, self._place = parameter.detach(), block.detach(), place

    @property
    def is_outdated(self) -> bool:
        """Whether there is something to copy that is not what was copied."""
        return self._block is not None and self._seen != self._versions

    def is_fake(self) -> bool:
        return isinstance(self._block, FakeTensor)

    def make_room(self, dtype: torch.dtype | None = None) -> tuple[Tensor, Tensor]:
        """Where the next copy goes, and what is to be copied.

        Args:
            dtype: of the copy. None: that of the one before.
        """
        before, block = self.copy, self._block
        assert block is not None, "what is copied was used before"
        dtype = before.dtype if dtype is None and before is not None else dtype
        if (
            before is None
            or before.dtype != dtype
            or before.shape != block.shape
            or before.device != block.device
            or storage_uses(before) > self._alone
        ):
            self.copy = before = None  # which may be all that holds the old one
            self.copy = torch.empty_like(block, dtype=dtype)
            self._alone = storage_uses(self.copy)
        assert self.copy is not None, "there is one now"
        return self.copy, block

    def note_copied(self) -> None:
        self._seen = self._versions

    def mark_changed(self) -> None:
        """The parameter has changed in a way that its counters may not show."""
        self._seen = None

    def forget(self) -> None:
        """Lets go of the copy and of the block."""
        self.copy = self._parameter = self._block = self._place = self._seen = None

    @property
    def _versions(self) -> tuple[int, int] | None:
        if self._parameter is None or self._block is None:
            return None
        return self._parameter._version, self._block._version


class ShadowWeights:
    """The copies on a cube and on those that `with_policy` has made of it."""

    def __init__(self) -> None:
        self._shadows: WeakSet[_Shadow] = WeakSet()
        self._watches_steps = False

    def __getstate__(self) -> dict[str, Any]:
        return {}  # a model that is stored takes its cube along, and no copies

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(vars(ShadowWeights()))

    def enrol(self, *parameters: Tensor | None) -> None:
        """Has copies made of them from their next use on."""
        for parameter in parameters:
            if parameter is not None and _shadow_of(parameter) is None:
                shadow = vars(parameter)[_KEPT_AS] = _Shadow()
                self._shadows.add(shadow)

    def of(self, parameter: Tensor, block: Tensor, dtype: torch.dtype) -> Tensor:
        """The copy of `block` in another type, not to be written to; of a parameter that is not enrolled, and where
        nothing may be taken from copies, the block itself.

        Args:
            block: this rank's block of the parameter, any shape.
        """
        shadow = _shadow_of(parameter)
        if shadow is None or block.is_inference() or (block.is_cuda and torch.cuda.is_current_stream_capturing()):
            return block
        if shadow.copy is not None and shadow.fits(parameter, block, dtype):
            return shadow.copy.detach()  # whoever holds it is seen by its storage alone
        if isinstance(block.new_empty(0), FakeTensor) and not isinstance(block, FakeTensor):
            return block  # of what pretends to compute nothing may stay with real parameters
        with torch.inference_mode(mode=False), torch.no_grad():
            shadow.bind(parameter, block)
            self._watch_steps()
            self._renew(shadow, dtype)
        assert shadow.copy is not None, "it was made"
        return shadow.copy.detach()

    def forget(self) -> None:
        """Lets go of all copies, which their next uses make anew: after an edit that no counter shows, or to have the
        memory back."""
        for shadow in self._shadows:
            shadow.forget()

    @property
    def kept_bytes(self) -> int:
        """Of the copies."""
        return sum(shadow.copy.nbytes for shadow in self._shadows if shadow.copy is not None)

    def _renew(self, wanted: _Shadow, dtype: torch.dtype) -> None:
        """Makes this copy, and with it those of all else that has changed: they will be asked for, too."""
        stale = [
            each
            for each in self._shadows
            if each is not wanted and each.copy is not None and each.is_outdated and each.is_fake() == wanted.is_fake()
        ]
        together: dict[tuple[Any, ...], list[tuple[Tensor, Tensor]]] = {}
        for each in (wanted, *stale):
            copy, block = each.make_room(dtype if each is wanted else None)
            together.setdefault((copy.device, copy.dtype, block.dtype), []).append((copy, block))
        for pairs in together.values():
            copies, blocks = zip(*pairs, strict=True)
            torch._foreach_copy_(copies, blocks)
        for each in (wanted, *stale):
            each.note_copied()

    def _watch_steps(self) -> None:
        if not self._watches_steps:
            self._watches_steps = True
            handle = torch_optim.register_optimizer_step_post_hook(_stepped)
            finalize(self, handle.remove).atexit = False


def shadow_of(parameter: Tensor) -> Tensor | None:
    """The copy of a parameter that there is now."""
    shadow = _shadow_of(parameter)
    return None if shadow is None or shadow.copy is None else shadow.copy.detach()


def _shadow_of(parameter: Tensor) -> _Shadow | None:
    found = vars(parameter).get(_KEPT_AS)
    return found if isinstance(found, _Shadow) else None  # else it comes out of a file, or was copied


def _stepped(optimizer: torch.optim.Optimizer, *_: Any) -> None:
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            shadow = _shadow_of(parameter)
            if shadow is not None:
                shadow.mark_changed()


def _place(block: Tensor) -> _Place:
    return storage_id(block), int(block.storage_offset()), block.shape, block.stride()
