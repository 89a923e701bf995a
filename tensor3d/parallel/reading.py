"""Runs a module once on an example and follows its activations from layer to layer.

The run is seen by a TorchFunctionMode: known layers (`role_of`) are taken as wholes, and of every other function is
recorded what it does with the tensors that come from them.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils.weak import WeakTensorKeyDictionary

from tensor3d.parallel.example import hides_what_comes_later, tensors_in, untouched
from tensor3d.parallel.facts import Call, Flow, Reading, Role, role_of
from tensor3d.parallel.functions import ATTENTION, PRODUCTS, Objection, name_of, objection


def read(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Reading:
    """Runs `module` once, in evaluation mode, and leaves it, its buffers and the random generators as they were.

    Raises:
        ValueError: the module raises on its example.
    """
    reader = _Reader(module)
    with untouched(module), reader.hooks():
        module.eval()
        labels = reader.enter(module, args, kwargs)
        try:
            with torch.no_grad(), reader:
                result = module(*args, **kwargs)
        except Exception as error:
            place = f"in {reader.place()!r}" if reader.place() else "in its own forward"
            raise ValueError(
                f"{type(module).__name__} raised {type(error).__name__} on its example, {place}: {error}. "
                f"Pass propose_plan what one call of it takes. Got {', '.join(labels) or 'no arguments'}."
            ) from error
    reader.leave(result)
    return reader.seen


class _Reader(TorchFunctionMode):
    """Follows activations through functions (as a mode) and through known layers (by hooks)."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.seen = Reading()
        self._modules = list(module.named_modules())
        self._stack: list[str] = []
        self._layer: nn.Module | None = None  # the known layer that is running: what it does inside is its own
        self._layer_name = ""
        self._flows = WeakTensorKeyDictionary()
        self._given = WeakTensorKeyDictionary()  # tensors without a face that come from the arguments: ids, masks
        self._parameters = WeakTensorKeyDictionary()  # and what is computed from parameters alone: (owner, name)
        for owner, part in self._modules:
            for name, parameter in part.named_parameters(recurse=False):
                self._parameters[parameter] = (owner, name)
        self._with_weights = {name for name, part in self._modules if any(p.dim() > 1 for p in part.parameters())}

    def place(self) -> str:
        """The name of the module that runs."""
        return self._layer_name if self._layer is not None else self._stack[-1] if self._stack else ""

    def enter(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[str]:
        """Takes the example's tensors in: floats of two dims and more are activations. Returns a word on each."""
        try:
            names = dict(inspect.signature(module.forward).bind(*args, **kwargs).arguments)
        except (TypeError, ValueError):
            names = {**{str(place): value for place, value in enumerate(args)}, **kwargs}
        labels = []
        for label, tensor in tensors_in(names):
            labels.append(f"{label} {tuple(tensor.shape)} {str(tensor.dtype).removeprefix('torch.')}")
            if tensor.is_floating_point() and tensor.dim() > 1:
                self._flows[tensor] = flow = replace(self._fresh(), given=True)
                self.seen.inputs.append((label, flow.face))
                self.seen.widths.add(tensor.shape[-1])
            else:
                self._given[tensor] = True
        return labels

    def leave(self, result: Any) -> None:
        for label, tensor in tensors_in(result):
            flow = self._flows.get(tensor)
            if flow is not None:
                self.seen.outputs.append((label, flow.face, flow.since))

    @contextmanager
    def hooks(self) -> Iterator[None]:
        handles = []
        try:
            for name, part in self._modules:
                handles.append(part.register_forward_pre_hook(partial(self._called, name), with_kwargs=True))
                handles.append(part.register_forward_hook(partial(self._returned, name), with_kwargs=True))
            yield
        finally:
            for handle in handles:
                handle.remove()

    # --- known layers ---------------------------------------------------------------------------------------------

    def _called(self, name: str, module: nn.Module, args: Any, kwargs: Any) -> None:
        if self._layer is None:
            if role_of(module) is None:
                self._stack.append(name)
            else:
                self._layer, self._layer_name = module, name

    def _returned(self, name: str, module: nn.Module, args: Any, kwargs: Any, result: Any) -> None:
        if self._layer is None:
            self._stack.pop()
        elif self._layer is module:
            role = role_of(module)
            tensors = [tensor for _, tensor in tensors_in((args, kwargs))]
            output = next((tensor for _, tensor in tensors_in(result)), None)
            self._layer = None
            if role is not None and tensors and output is not None:
                self._through(name, role, tensors, output)
            if isinstance(module, nn.MultiheadAttention):
                self._check_attention(name, module, args, kwargs)

    def _through(self, name: str, role: Role, tensors: list[Tensor], output: Tensor) -> None:
        x = tensors[0]
        if role == "embedding":
            self._flows[output] = flow = self._fresh()
            call = Call(layer=name, role=role, reads=0, returns=flow.face, numel=0, from_arguments=x in self._given)
            self.seen.calls.append(call)
            return
        into = self._flows.get(x) or replace(self._fresh(), given=True)
        if role == "dropout":
            self._flows[output] = into
            return
        self.seen.read_on |= into.since
        if role == "foreign":
            self._foreign(name, x, output, into)
            return
        if x not in self._flows:
            text = f"reads what is no activation (a tensor of shape {tuple(x.shape)} made here, or by code that"
            self._note(f"{text} propose_plan cannot follow): on a cube it must be this rank's block", into, at=name)
        self._enter(into, name)
        out = replace(self._fresh(), since=frozenset({name})) if role == "linear" else Flow(face=into.face)
        self._flows[output] = out
        self.seen.calls.append(Call(layer=name, role=role, reads=into.face, returns=out.face, numel=x.numel()))

    def _foreign(self, name: str, x: Tensor, output: Tensor, into: Flow) -> None:
        """A module of no kind, fed with arguments, is replicated with all that follows up to the first layer."""
        if into.given or into.whole:
            out = replace(self._fresh(), whole=into.whole | {name})
        else:
            out = Flow(face=into.face) if output.shape == x.shape else self._fresh()
        self._flows[output] = out
        self.seen.calls.append(Call(layer=name, role="foreign", reads=0, returns=out.face, numel=0))

    def _enter(self, flow: Flow, where: str) -> None:
        """What foreign modules have made is needed on a face here."""
        for module in flow.whole:
            self.seen.enters.setdefault(module, (where, flow.face))

    def _check_attention(self, name: str, module: nn.MultiheadAttention, args: Any, kwargs: Any) -> None:
        """What its counterpart on a cube refuses: other keys than queries, masks, weights."""
        given = inspect.signature(module.forward).bind(*args, **kwargs).arguments
        query, mask, notes = given["query"], given.get("attn_mask"), []
        if given["key"] is not query or given["value"] is not query:
            self.seen.unfit.add(name)
            notes.append("has other keys than queries, and there is self-attention only: kinds.replace(build)")
        if given.get("need_weights") is True:
            notes.append("is asked for its weights, which a cube never holds: call it with need_weights=False")
        if given.get("is_causal") or (mask is not None and hides_what_comes_later(mask)):
            self.seen.causal.add(name)
        if mask is not None:
            remedy = "causal=True hides what comes later" if name in self.seen.causal else "Sequences tell them apart"
            notes.append(f"is called with a mask, and rows are packed: call it without, {remedy}")
        if given.get("key_padding_mask") is not None:
            notes.append("is called with a padding mask, and packed rows have no padding: call it without")
        for text in notes:
            self._note(text, Flow(face=0), at=name)

    # --- every other function -------------------------------------------------------------------------------------

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        if self._layer is None:
            self._follow(name_of(func), args, kwargs or {}, result)
        return result

    def _follow(self, name: str, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any) -> None:
        tensors = [tensor for _, tensor in tensors_in((args, kwargs))]
        outputs = [tensor for _, tensor in tensors_in(result)]
        active = [(tensor, self._flows[tensor]) for tensor in tensors if tensor in self._flows]
        if not active:
            self._pass_on(tensors, outputs)
            return
        x, flow = active[0]
        flows = [found for _, found in active]
        if all(each.whole for each in flows):
            whole = replace(flow, whole=frozenset().union(*(each.whole for each in flows)))
            for output in outputs:
                self._flows[output] = whole
            for module in whole.whole if outputs else ():
                self.seen.after.setdefault(module, {})[self.place(), name] = None
            return
        for each in flows:
            self._enter(each, self.place() or "the module itself")
        found = objection(name, x, args, kwargs, result)
        if found is not None:
            self._note(found.text, flow, of_columns=found.of_columns)
        if not outputs:
            return
        if name in ATTENTION or (name in PRODUCTS and len(active) > 1):
            flow = self._attend(name, flows)
        elif name in PRODUCTS:
            flow = self._product(name, tensors, x, flow)
        else:
            if found is None and len(active) == 1 and outputs[0].numel() != x.numel():
                self._note(f"does what propose_plan cannot follow ({name}): compare with the original", flow)
            flow = self._meet(name, tensors, active, objected=found is not None)
        for output in outputs:
            self._flows[output] = flow

    def _pass_on(self, tensors: list[Tensor], outputs: list[Tensor]) -> None:
        """No activation here; but what is made of arguments, or of a parameter, is remembered as such."""
        for output in outputs:
            if any(tensor in self._given for tensor in tensors):
                self._given[output] = True
            for tensor in tensors:
                if tensor in self._parameters:
                    self._parameters[output] = self._parameters[tensor]

    def _attend(self, name: str, flows: list[Flow]) -> Flow:
        """Activations multiply activations: attention, on face y, where a rank holds whole sequences and heads."""
        host = next((module for module in reversed(self._stack) if module in self._with_weights), self.place())
        self.seen.attending.setdefault(host, []).append(name)
        for flow in flows:
            self.seen.pinned.append((flow.face, "y", f"{host or 'the module itself'} ({name})"))
            self.seen.read_on |= flow.since
        return Flow(face=flows[0].face)

    def _product(self, name: str, tensors: list[Tensor], x: Tensor, flow: Flow) -> Flow:
        """A product with what is no activation: a parameter outside of its layer, or a constant."""
        self.seen.read_on |= flow.since
        owned = [self._parameters[tensor] for tensor in sorted(tensors, key=Tensor.dim) if tensor in self._parameters]
        owner, parameter = owned[-1] if owned else ("", "")
        parameter = f"its {parameter}" if owner == self.place() else f"the parameter {owner}.{parameter}"
        what = parameter if owned else "a matrix made here"
        self._note(
            f"multiplies by {what} ({name}) outside of a known layer: only a layer of the cube knows how to cut it; "
            "make it an nn.Linear, or use matmul of tensor3d",
            flow,
        )
        return self._fresh()

    def _meet(self, name: str, tensors: list[Tensor], active: list[tuple[Tensor, Flow]], objected: bool) -> Flow:
        """Elementwise work: all that meet lie on one face. What is not an activation has to be cut as one is."""
        x, flow = active[0]
        since = frozenset().union(*(found.since for _, found in active))
        for _, found in active[1:]:
            self.seen.equal.append((flow.face, found.face, f"{self.place() or 'the module itself'} ({name})"))
            if found.since != flow.since:
                self.seen.read_on |= since
        for tensor in tensors:
            if tensor in self._parameters:
                self._meet_parameter(name, tensor, x, flow)
            elif tensor not in self._flows and tensor.numel() > 1 and not objected:
                self._note(
                    f"lets an activation meet a tensor of shape {tuple(tensor.shape)} made here ({name}), which a rank "
                    "needs its own rows and columns of: own_block and own_rows take them",
                    flow,
                )
        return Flow(face=flow.face, since=since, given=all(found.given for _, found in active))

    def _meet_parameter(self, name: str, tensor: Tensor, x: Tensor, flow: Flow) -> None:
        owner, parameter = self._parameters[tensor]
        if tensor.numel() == tensor.shape[-1] == x.shape[-1] and tensor.numel() > 1 and name not in ("cat", "stack"):
            self.seen.vectors.setdefault((owner, parameter), set()).add(flow.face)
            return
        self._note(
            f"lets an activation meet the parameter {parameter} as {tuple(tensor.shape)} ({name}): make it on the cube "
            "with a layout of its own (tensor3d.layout) and take it by tensor3d.use",
            flow,
            at=owner,
        )

    def _note(self, text: str, flow: Flow, at: str | None = None, of_columns: bool = False) -> None:
        note = Objection(text=text, of_columns=of_columns)
        notes = self.seen.notes.setdefault(self.place() if at is None else at, {})
        notes[note] = notes.get(note, frozenset()) | (flow.since or frozenset({""}))

    def _fresh(self) -> Flow:
        self.seen.numbers += 1
        return Flow(face=self.seen.numbers)
