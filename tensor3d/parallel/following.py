"""What a run of a module does with its activations between the known layers, function by function."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils.weak import WeakTensorKeyDictionary

from tensor3d.parallel.example import tensors_in
from tensor3d.parallel.extents import Extent, extents_in, measured
from tensor3d.parallel.facts import Flow, Reading
from tensor3d.parallel.functions import ATTENTION, PRODUCTS, RESHAPES, Objection, name_of, objection


class Follower(TorchFunctionMode):
    """Sees every torch function, and records what those do that get an activation.

    Attributes:
        seen: the facts.
        stack: names of the modules that run.
        layer, layer_name: the known layer that is running: what it does inside is its own.
        flows: what is known of each activation.
        given: tensors without a face whose values come from the arguments, place by place: ids, masks.
        parameters: those of the modules, and what is computed from them alone: (owner, name).
        with_weights: names of modules with matrices.
    """

    def __init__(self, modules: list[tuple[str, nn.Module]]) -> None:
        super().__init__()
        self.seen = Reading()
        self.stack: list[str] = []
        self.layer: nn.Module | None = None
        self.layer_name = ""
        self.flows = WeakTensorKeyDictionary()
        self.given = WeakTensorKeyDictionary()
        self.parameters = WeakTensorKeyDictionary()
        for owner, part in modules:
            for name, parameter in part.named_parameters(recurse=False):
                self.parameters[parameter] = (owner, name)
        self.with_weights = {name for name, part in modules if any(p.dim() > 1 for p in part.parameters())}

    def place(self) -> str:
        """The name of the module that runs."""
        return self.layer_name if self.layer is not None else self.stack[-1] if self.stack else ""

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        if self.layer is not None:
            return result
        name = name_of(func)
        self._follow(name, args, kwargs or {}, result)
        if not args or not isinstance(args[0], Tensor) or args[0] not in self.flows:
            return result
        dim = args[1] if len(args) > 1 else (kwargs or {}).get("dim")
        since = self.flows[args[0]].since
        return measured(name, args[0], dim, result, since, weakref.WeakMethod(self.computed_with))

    def computed_with(self, operation: str, extent: Extent) -> None:
        """Takes in that the module computes with a size of an activation."""
        if self.layer is None:
            self.note(
                f"computes with a size read off an activation ({operation}), and a rank holds fewer rows and columns: "
                "take the number of columns from the module's own configuration, and that of rows from an argument",
                Flow(face=0, since=extent.since),
                of_columns=extent.of_columns,
            )

    def _follow(self, name: str, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any) -> None:
        tensors = [tensor for _, tensor in tensors_in((args, kwargs))]
        outputs = [tensor for _, tensor in tensors_in(result)]
        active = [(tensor, self.flows[tensor]) for tensor in tensors if tensor in self.flows]
        extents = list(extents_in((args, kwargs)))
        if not active:
            if extents and outputs and outputs[0].numel() == 1:
                self.computed_with(name, extents[0])
            self._pass_on(name, args, kwargs, result)
            return
        x, flow = active[0]
        flows = [found for _, found in active]
        if all(each.whole for each in flows):
            whole = replace(flow, whole=frozenset().union(*(each.whole for each in flows)))
            for output in outputs:
                self.flows[output] = whole
            for module in whole.whole if outputs else ():
                self.seen.after.setdefault(module, {})[self.place(), name] = None
            return
        for each in flows:
            self.enter_face(each, self.place() or "the module itself")
        found = objection(name, x, args, kwargs, result)
        if found is not None:
            self.note(found.text, flow, of_columns=found.of_columns)
        elif extents and name not in RESHAPES:
            self.computed_with(name, extents[0])
        if not outputs:
            return
        if name in ATTENTION or (name in PRODUCTS and len(active) > 1):
            flow = self._attend(name, flows)
        elif name in PRODUCTS:
            flow = self._product(name, tensors, flow)
        else:
            flow = self._meet(name, tensors, active, objected=found is not None)
        for output in outputs:
            self.flows[output] = flow

    def _pass_on(self, name: str, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any) -> None:
        """No activation here; but what is made of arguments, place by place, or of a parameter is remembered."""
        tensors = [tensor for _, tensor in tensors_in((args, kwargs))]
        given = any(tensor in self.given for tensor in tensors) and all(
            tensor in self.given or tensor.numel() == 1 for tensor in tensors
        )
        given = given and (name in RESHAPES or objection(name, tensors[0], args, kwargs, result) is None)
        for _, output in tensors_in(result):
            if given:
                self.given[output] = True
            for tensor in tensors:
                if tensor in self.parameters:
                    self.parameters[output] = self.parameters[tensor]

    def _attend(self, name: str, flows: list[Flow]) -> Flow:
        """Activations multiply activations: attention, on face y, where a rank holds whole sequences and heads."""
        host = next((module for module in reversed(self.stack) if module in self.with_weights), self.place())
        self.seen.attending.setdefault(host, []).append(name)
        for flow in flows:
            self.seen.pinned.append((flow.face, "y", f"{host or 'the module itself'} ({name})"))
            self.seen.read_on |= flow.since
        return Flow(face=flows[0].face)

    def _product(self, name: str, tensors: list[Tensor], flow: Flow) -> Flow:
        """A product with what is no activation: a parameter outside of its layer, or a constant."""
        self.seen.read_on |= flow.since
        owned = [self.parameters[tensor] for tensor in sorted(tensors, key=Tensor.dim) if tensor in self.parameters]
        owner, parameter = owned[-1] if owned else ("", "")
        parameter = f"its {parameter}" if owner == self.place() else f"the parameter {owner}.{parameter}"
        what = parameter if owned else "a matrix made here"
        self.note(
            f"multiplies by {what} ({name}) outside of a known layer: only a layer of the cube knows how to cut it; "
            "make it an nn.Linear, or use matmul of tensor3d",
            flow,
        )
        return self.fresh()

    def _meet(self, name: str, tensors: list[Tensor], active: list[tuple[Tensor, Flow]], objected: bool) -> Flow:
        """Elementwise work: all that meet lie on one face. What is not an activation has to be cut as one is."""
        x, flow = active[0]
        since = frozenset().union(*(found.since for _, found in active))
        for _, found in active[1:]:
            self.seen.equal.append((flow.face, found.face, f"{self.place() or 'the module itself'} ({name})"))
            if found.since != flow.since:
                self.seen.read_on |= since
        for tensor in tensors:
            if tensor in self.parameters:
                self._meet_parameter(name, tensor, x, flow)
            elif tensor not in self.flows and tensor.numel() > 1 and not objected:
                self.note(
                    f"lets an activation meet a tensor of shape {tuple(tensor.shape)} made here ({name}), which a rank "
                    "needs its own rows and columns of: own_block and own_rows take them",
                    flow,
                )
        return Flow(face=flow.face, since=since, given=all(found.given for _, found in active))

    def _meet_parameter(self, name: str, tensor: Tensor, x: Tensor, flow: Flow) -> None:
        owner, parameter = self.parameters[tensor]
        along = tensor.dim() > 0 and tensor.shape[-1:] == x.shape[-1:] and tensor.numel() == tensor.shape[-1]
        if along and tensor.numel() > 1 and name not in ("cat", "stack"):
            self.seen.vectors.setdefault((owner, parameter), set()).add(flow.face)
            return
        self.note(
            f"lets an activation meet the parameter {parameter} as {tuple(tensor.shape)} ({name}): make it on the cube "
            "with a layout of its own (tensor3d.layout) and take it by tensor3d.use",
            flow,
            at=owner,
        )

    def enter_face(self, flow: Flow, where: str) -> None:
        """What foreign modules have made is needed on a face here."""
        for module in flow.whole:
            self.seen.enters.setdefault(module, (where, flow.face))

    def note(self, text: str, flow: Flow, at: str | None = None, of_columns: bool = False) -> None:
        note = Objection(text=text, of_columns=of_columns)
        notes = self.seen.notes.setdefault(self.place() if at is None else at, {})
        notes[note] = notes.get(note, frozenset()) | (flow.since or frozenset({""}))

    def fresh(self) -> Flow:
        self.seen.numbers += 1
        return Flow(face=self.seen.numbers)
