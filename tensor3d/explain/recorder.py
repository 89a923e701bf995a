"""Which module sends and keeps what: forward hooks know where the host is, sequence numbers where a node was made."""

from __future__ import annotations

import copy
from bisect import bisect_right
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, fields, is_dataclass
from typing import Any, Literal

import torch
from torch import Tensor, nn

from tensor3d.distributed.autograd_graph import walk
from tensor3d.distributed.comm_stats import Key, Kind
from tensor3d.distributed.shadow_weights import shadow_of
from tensor3d.explain.report import Shape
from tensor3d.layers.embedding import Embedding3D, LookupEmbedding3D
from tensor3d.layers.heads import SmallHead3D
from tensor3d.layers.linear import Linear3D, Projection3D
from tensor3d.sharding.activation_layout import other
from tensor3d.sharding.layout_checks import keeps_face, marked_face
from tensor3d.sharding.param_layout import local
from tensor3d.torch_private import current_node, next_sequence_nr, sequence_nr

# --- The tensors in what a model is given and gives back --------------------------------------------------------------


def tensors_in(value: Any) -> Iterator[Tensor]:
    """All tensors in tuples, lists, mappings and dataclasses, in order."""
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, Mapping):
        for item in value.values():
            yield from tensors_in(item)
    elif isinstance(value, (tuple, list)):
        for item in value:
            yield from tensors_in(item)
    elif is_dataclass(value) and not isinstance(value, type):
        for each in fields(value):
            yield from tensors_in(getattr(value, each.name))


def cut_off(value: Any) -> Any:
    """The same without the graph behind it: a backward pass ends at these tensors. Parameters stay themselves.

    What holds tensors with a graph is copied and stays of its type, and what is one object in several places stays one
    (attention asks whether its query *is* its key). All else stays itself.

    Raises:
        ValueError: something that holds such tensors cannot be copied.
    """
    return _cut(value, {})


def _cut(value: Any, done: dict[int, tuple[Any, Any]]) -> Any:
    if not any(tensor.requires_grad and not isinstance(tensor, nn.Parameter) for tensor in tensors_in(value)):
        return value
    if id(value) not in done:
        new = _cut_copy(value, done)
        done[id(value)] = value, new  # with the value itself, so that its id is not used again
    return done[id(value)][1]


def _cut_copy(value: Any, done: dict[int, tuple[Any, Any]]) -> Any:
    if isinstance(value, Tensor):
        return value.detach().requires_grad_()
    if isinstance(value, tuple):
        items = [_cut(item, done) for item in value]
        return value._make(items) if hasattr(value, "_make") else type(value)(items)
    try:
        copied = copy.copy(value)
        done[id(value)] = value, copied  # an attribute may lead back to it
        _cut_contents(value, copied, done)
    except (TypeError, AttributeError):
        copied = value
    if any(tensor.grad_fn is not None for tensor in tensors_in(copied)):
        raise ValueError(
            f"inputs of explain are cut off from the graph behind them, and a {type(value).__name__} among them cannot "
            "be copied for it. Put detached tensors into it, or pass the tensors themselves."
        )
    return copied


def _cut_contents(value: Any, copied: Any, done: dict[int, tuple[Any, Any]]) -> None:
    """Attributes too: those of a mapping may be where its items are. A dataclass may have slots for its own."""
    for name, item in list(getattr(value, "__dict__", {}).items()):
        vars(copied)[name] = _cut(item, done)
    for each in fields(value) if is_dataclass(value) else ():
        object.__setattr__(copied, each.name, _cut(getattr(value, each.name), done))
    if isinstance(value, (dict, list)):
        for key, item in list(value.items() if isinstance(value, dict) else enumerate(value)):
            copied[key] = _cut(item, done)


def scalar_of(output: Any, what: str) -> Tensor:
    """What a backward pass begins with: the output's `.loss`, else the sum of all that has a gradient in it.

    Args:
        what: the name of `output`, for the error.

    Raises:
        ValueError: nothing in it has a gradient.
    """
    loss = output.get("loss") if isinstance(output, Mapping) else getattr(output, "loss", None)
    parts = [loss] if isinstance(loss, Tensor) else [tensor for tensor in tensors_in(output) if tensor.requires_grad]
    if not parts or not parts[0].requires_grad:
        raise ValueError(
            f"nothing in {what} needs a gradient, so there is no backward pass to look at. Got {type(output)}. "
            "Pass inputs, or a loss of the output, that do."
        )
    return torch.stack([part.sum() for part in parts]).sum() if len(parts) > 1 else parts[0].sum()


# --- The faces that a module reads and returns ------------------------------------------------------------------------


def face_of(tensor: Tensor) -> str:
    """The face on which the functions that `tensor` comes from put their results; `""` where they do not tell or agree.

    They mark their nodes: see `tensor3d.sharding.layout_checks`.
    """
    faces = {face for each in walk(tensor, keeps_face) if (face := marked_face(*each)) is not None}
    return str(faces.pop()) if len(faces) == 1 else ""


def faces_of(module: nn.Module) -> tuple[str, str]:
    """Face of the input and of the output, by what the module says of itself; `""` for what lies on none.

    A layer that is not of this library may tell by an attribute `face`: it reads that one, and stays on it.
    """
    if isinstance(module, Linear3D):
        return module.reads, other(module.face)
    if isinstance(module, (Embedding3D, LookupEmbedding3D)):
        return "", "z"
    if isinstance(module, Projection3D):
        return module.reads, "y"
    if isinstance(module, SmallHead3D):
        return module.face, ""
    face = getattr(module, "face", None)
    return (face, face) if face in ("y", "z") else ("", "")


# --- Which module sends and keeps what --------------------------------------------------------------------------------

LOSS = "(loss)"
"""Where what is made of the model's output is counted."""
SHARED = "(kept by several layers)"
"""Where is counted what equal layers of a stack keep together, such as an index of the batch."""
Phase = Literal["forward", "backward", "sums"]


@dataclass(kw_only=True)
class LayerStats:
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
        self.tallies: dict[str, LayerStats] = {}
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
        copies = [copy for parameter in self._model.parameters() if (copy := shadow_of(parameter)) is not None]
        for copy in copies:  # which stay anyway
            self._kept.pop(copy.untyped_storage().data_ptr(), None)
        for kept in self._kept.values():
            self._tally(SHARED if kept.shared else kept.place).saved += kept.tensor.untyped_storage().nbytes()
        self._kept.clear()
        self._phase = "backward"

    def sums_begin_or_end(self, moment: Literal["sum", "summed"]) -> None:
        """For `GradReducer.observer`."""
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
        """For `CommCounter.dry`."""
        if self._phase == "sums":
            self.sums[axis, kind] += received
        elif self._phase == "forward":
            self._tally(self._here()).forward[axis, kind] += received
        else:
            place = self._here() if self._running else self._place_of(current_node())
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
            self._numbers.append(next_sequence_nr())
            self._places.append(self._here())

    def _place_of(self, node: Any) -> str:
        return self._places[max(0, bisect_right(self._numbers, sequence_nr(node)) - 1)]

    def _tally(self, place: str) -> LayerStats:
        return self.tallies.setdefault(place, LayerStats())


def _without_numbers(place: str) -> str:
    return ".".join("#" if part.isdecimal() else part for part in place.split("."))
