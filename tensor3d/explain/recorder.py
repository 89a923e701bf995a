"""Which module sends and keeps what: forward hooks know where the host is, sequence numbers where a node was made."""

from __future__ import annotations

from bisect import bisect_right
from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from torch import Tensor, nn

from tensor3d.explain.faces import face_of
from tensor3d.explain.row import Shape
from tensor3d.explain.tensors import tensors_in
from tensor3d.layout import local
from tensor3d.traffic import Key, Kind

LOSS = "(loss)"
"""Where what is made of the model's output is counted."""
SHARED = "(kept by several layers)"
"""Where is counted what equal layers of a stack keep together, such as an index of the batch."""
Phase = Literal["forward", "backward", "sums"]


@dataclass(kw_only=True)
class Tally:
    """What one place, a module or not, sends and keeps itself."""

    forward: Counter[Key] = field(default_factory=Counter)
    backward: Counter[Key] = field(default_factory=Counter)
    saved: int = 0
    faces: tuple[str, str] = ("", "")
    input_shape: Shape | None = None
    output_shape: Shape | None = None


@dataclass(kw_only=True)
class _Kept:
    """A storage that is kept for backward, and where."""

    tensor: Tensor  # held, so that no address is used twice
    place: str
    shared: bool = False


class Recorder:
    """Watches one forward and backward pass of a model.

    In the forward pass (and where backward repeats one) the innermost module that runs is charged. In the backward pass
    a collective belongs to the node that issues it, and the node to the module that ran when it was made: autograd
    numbers nodes as it makes them, and the recorder notes at which numbers modules begin and end.
    """

    def __init__(self, model: nn.Module) -> None:
        self.tallies: dict[str, Tally] = {}
        self.sums: Counter[Key] = Counter()
        """Bytes that the ledger's sums of gradients receive."""
        self._model = model
        self._phase: Phase = "forward"
        self._running: list[str] = []
        self._numbers: list[int] = []
        self._places: list[str] = []  # who runs from the number of the same index on
        self._kept: dict[int, _Kept] = {}
        self._weights = {local(parameter).untyped_storage().data_ptr() for parameter in model.parameters()}

    # --- phases -----------------------------------------------------------------------------------------------------

    @contextmanager
    def forward(self) -> Iterator[None]:
        """Around the forward pass: notes what is kept for backward."""
        self._mark()
        with torch.autograd.graph.saved_tensors_hooks(self._keep, lambda tensor: tensor):
            yield
        for kept in self._kept.values():
            self._tally(SHARED if kept.shared else kept.place).saved += kept.tensor.untyped_storage().nbytes()
        self._kept.clear()
        self._phase = "backward"

    def sums_begin_or_end(self, moment: Literal["sum", "summed"]) -> None:
        """For `Ledger.observer`."""
        self._phase = "sums" if moment == "sum" else "backward"

    @contextmanager
    def listening(self) -> Iterator[None]:
        """Around both passes: every module tells where it begins and ends."""
        with ExitStack() as hooks:
            for name, module in self._model.named_modules():
                before, after = self._hooks(name)
                hooks.callback(module.register_forward_pre_hook(before, prepend=True, with_kwargs=True).remove)
                # Always: the recomputation of a checkpoint leaves its modules by an exception.
                hooks.callback(module.register_forward_hook(after, always_call=True).remove)
            yield

    # --- what happens -----------------------------------------------------------------------------------------------

    def sent(self, axis: str, kind: Kind, received: int) -> None:
        """For `Traffic.dry`."""
        if self._phase == "sums":
            self.sums[axis, kind] += received
        elif self._phase == "forward":
            self._tally(self._here()).forward[axis, kind] += received
        else:
            place = self._here() if self._running else self._place_of(torch._C._current_autograd_node())
            self._tally(place).backward[axis, kind] += received

    def _keep(self, tensor: Tensor) -> Tensor:
        with torch.no_grad():
            own = local(tensor).detach()
        address, place = own.untyped_storage().data_ptr(), self._here()
        if address in self._weights:
            return tensor
        kept = self._kept.setdefault(address, _Kept(tensor=own, place=place))
        kept.shared |= kept.place != place and _without_numbers(kept.place) == _without_numbers(place)
        return tensor

    def _hooks(self, name: str) -> tuple[Any, Any]:
        def before(module: nn.Module, args: Any, kwargs: Any) -> None:
            if self._phase == "forward" and self._tally(name).input_shape is None:
                tally, first = self._tally(name), next(tensors_in((args, kwargs)), None)
                if first is not None:
                    tally.input_shape, tally.faces = tuple(first.shape), (face_of(first), "")
            self._running.append(name)
            self._mark()

        def after(module: nn.Module, args: Any, output: Any) -> None:
            if self._phase == "forward" and self._tally(name).output_shape is None:
                tally, first = self._tally(name), next(tensors_in(output), None)
                if first is not None:
                    tally.output_shape, tally.faces = tuple(first.shape), (tally.faces[0], face_of(first))
            self._running.pop()
            self._mark()

        return before, after

    # --- places -----------------------------------------------------------------------------------------------------

    def _here(self) -> str:
        return self._running[-1] if self._running else LOSS

    def _mark(self) -> None:
        if self._phase == "forward":
            self._numbers.append(torch.autograd._get_sequence_nr())
            self._places.append(self._here())

    def _place_of(self, node: Any) -> str:
        return self._places[max(0, bisect_right(self._numbers, node._sequence_nr()) - 1)]

    def _tally(self, place: str) -> Tally:
        return self.tallies.setdefault(place, Tally())


def _without_numbers(place: str) -> str:
    return ".".join("#" if part.isdecimal() else part for part in place.split("."))
