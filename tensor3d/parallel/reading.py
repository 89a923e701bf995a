"""Runs a module once on an example and follows its activations from layer to layer.

The run is seen by a TorchFunctionMode: known layers (`role_of`) are taken as wholes, and of every other function is
recorded what it does with the tensors that come from them.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from tensor3d.parallel.example import hides_what_comes_later, tensors_in, untouched
from tensor3d.parallel.facts import Call, Flow, Reading, Role, role_of
from tensor3d.parallel.following import Follower


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


class _Reader(Follower):
    """Follows activations through functions (as a mode) and through known layers (by hooks)."""

    def __init__(self, module: nn.Module) -> None:
        self._modules = list(module.named_modules())
        super().__init__(self._modules)

    def enter(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[str]:
        """Takes the example's tensors in: floats of two dims and more are activations. Returns a word on each."""
        try:
            names = dict(inspect.signature(module.forward).bind(*args, **kwargs).arguments)
        except (TypeError, ValueError):
            names = {**{str(place): value for place, value in enumerate(args)}, **kwargs}
        labels = []
        for label, tensor in tensors_in(names):
            labels.append(f"{label} {tuple(tensor.shape)} {str(tensor.dtype).removeprefix('torch.')}")
            if tensor.is_floating_point() and tensor.dim() > 1 and not hides_what_comes_later(tensor):
                self.flows[tensor] = flow = replace(self.fresh(), given=True)
                self.seen.inputs.append((label, flow.face))
                self.seen.widths.add(tensor.shape[-1])
            else:
                self.given[tensor] = True
        return labels

    def leave(self, result: Any) -> None:
        for label, tensor in tensors_in(result):
            flow = self.flows.get(tensor)
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
        if self.layer is None:
            self.seen.ran.add(name)
            if role_of(module) is None:
                self.stack.append(name)
            else:
                self.layer, self.layer_name = module, name

    def _returned(self, name: str, module: nn.Module, args: Any, kwargs: Any, result: Any) -> None:
        if self.layer is None:
            self.stack.pop()
        elif self.layer is module:
            role = role_of(module)
            tensors = [tensor for _, tensor in tensors_in((args, kwargs))]
            output = next((tensor for _, tensor in tensors_in(result)), None)
            if role is not None and tensors and output is not None:
                self._through(name, role, tensors, output)
            if isinstance(module, nn.MultiheadAttention):
                self._check_attention(name, module, args, kwargs)
            self.layer = None

    def _through(self, name: str, role: Role, tensors: list[Tensor], output: Tensor) -> None:
        x = tensors[0]
        if role == "embedding":
            self.flows[output] = flow = self.fresh()
            given = x in self.given
            call = Call(layer=name, role=role, reads=0, returns=flow.face, numel=0, from_arguments=given)
            self.seen.calls.append(call)
            if not given:
                self.note(
                    "looks up numbers that are no argument's, place by place, such as positions that forward counts: "
                    "in packs each sequence starts at 0 anew. Make them an argument, and pass `packs.positions` for "
                    "positions",
                    flow,
                    at=name,
                )
            return
        into = self.flows.get(x) or replace(self.fresh(), given=True)
        if role == "dropout":
            self.flows[output] = into
            return
        self.seen.read_on |= into.since
        if role == "foreign":
            self._foreign(name, x, output, into)
            return
        if x not in self.flows:
            text = f"reads what is no activation (a tensor of shape {tuple(x.shape)} made here, or by code that"
            self.note(f"{text} propose_plan cannot follow): on a cube it must be this rank's block", into, at=name)
        self.enter_face(into, name)
        out = replace(self.fresh(), since=frozenset({name})) if role == "linear" else Flow(face=into.face)
        self.flows[output] = out
        self.seen.calls.append(Call(layer=name, role=role, reads=into.face, returns=out.face, numel=x.numel()))

    def _foreign(self, name: str, x: Tensor, output: Tensor, into: Flow) -> None:
        """A module of no kind, fed with arguments, is replicated with all that follows up to the first layer."""
        if into.given or into.whole:
            out = replace(self.fresh(), whole=into.whole | {name})
        else:
            out = Flow(face=into.face) if output.shape == x.shape else self.fresh()
        self.flows[output] = out
        self.seen.calls.append(Call(layer=name, role="foreign", reads=0, returns=out.face, numel=0))

    def _check_attention(self, name: str, module: nn.MultiheadAttention, args: Any, kwargs: Any) -> None:
        """What its counterpart on a cube refuses: other keys than queries, masks, weights."""
        given = inspect.signature(module.forward).bind(*args, **kwargs).arguments
        query, mask, notes = given["query"], given.get("attn_mask"), []
        if given["key"] is not query or given["value"] is not query:
            self.seen.unfit.add(name)
            notes.append("has other keys than queries, and there is self-attention only: kinds.replace(build)")
        if given.get("need_weights") is True:
            notes.append("is asked for its weights, which a cube never holds: call it with need_weights=False")
        causal = given.get("is_causal") or (mask is not None and hides_what_comes_later(mask))
        if causal:
            self.seen.causal.add(name)
        elif mask is not None:
            notes.append(
                "is called with a mask, and rows are packed: call it without, Sequences tell them apart, or with one "
                "that hides what comes later and does nothing else"
            )
        if given.get("key_padding_mask") is not None:
            notes.append("is called with a padding mask, and packed rows have no padding: call it without")
        for text in notes:
            self.note(text, Flow(face=0), at=name)
