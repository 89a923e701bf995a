"""What a run of a module does with its activations between the known layers, function by function."""

from __future__ import annotations

import inspect
import re
import weakref
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils.weak import WeakTensorKeyDictionary

from tensor3d.parallelize.auto.op_rules import (
    ATTENTION,
    ELEMENTWISE,
    PRODUCTS,
    RESHAPES,
    VALUES,
    Role,
    TensorTrace,
    TracedCall,
    TraceResult,
    UnsupportedOp,
    hides_what_comes_later,
    name_of,
    objection,
    role_of,
    tensors_in,
    untouched,
)
from tensor3d.parallelize.torch_layer_rules import has_forward

# --- Sizes read off an activation: ints that tell when they are computed with -----------------------------------------
#
# A rank's block has fewer rows and columns. So `x.view(*x.shape[:-1], 4, -1)` is as right on it as on the whole, and
# `x * x.shape[-1] ** -0.5` is not.

_SIZES = ("shape", "size", "numel", "nelement")
_TWO_SIDED = ("add", "sub", "truediv", "floordiv", "mod", "divmod", "pow", "and", "or", "xor", "lshift", "rshift")
_COMPUTES = (*_TWO_SIDED, *(f"r{each}" for each in _TWO_SIDED), *("neg", "abs", "float", "int", "round"))
_COMPARES = ("lt", "le", "gt", "ge")

Told = Callable[[str, "TracedSize"], None]


class TracedSize(int):
    """A size of an activation. It behaves as the int that it is, and calls `told` when it is computed with.

    Whether sizes are equal says nothing: on a cube the check fails aloud, or holds as before. A product of two is the
    number of rows of a flattened tensor, and an extent again. Not told: a float on the left (1.0 / x.shape[-1]), which
    takes any int by itself; numpy; `x.shape.numel()`.

    Attributes:
        of_columns: a number of columns, of which some tensors have all.
        since: the linears that the activation comes from.
        told: as long as its object lives, so that sizes that a model keeps are plain numbers after the run.
    """

    of_columns: bool
    since: frozenset[str]
    told: weakref.WeakMethod[Told]

    @classmethod
    def of(cls, value: int, of_columns: bool, since: frozenset[str], told: weakref.WeakMethod[Told]) -> TracedSize:
        extent = cls(value)
        extent.of_columns, extent.since, extent.told = of_columns, since, told
        return extent

    def tell(self, operation: str) -> None:
        told = self.told()
        if told is not None:
            told(operation, self)

    def __reduce__(self) -> tuple[type[int], tuple[int]]:
        return int, (int.__int__(self),)  # copies are plain

    def __mul__(self, other: int) -> int:
        if isinstance(other, TracedSize):
            return TracedSize.of(int.__mul__(self, other), False, self.since | other.since, self.told)
        self.tell("mul")
        return int.__mul__(self, other)

    def __rmul__(self, other: int) -> int:
        self.tell("mul")
        return int.__rmul__(self, other)


def _telling(operation: str) -> Callable[..., Any]:
    plain = getattr(int, f"__{operation}__")

    def computed(self: TracedSize, *others: Any) -> Any:
        self.tell(operation)
        return plain(self, *others)

    return computed


for _operation in (*_COMPUTES, *_COMPARES):
    setattr(TracedSize, f"__{_operation}__", _telling(_operation))


def measured(name: str, x: Tensor, dim: Any, result: Any, since: frozenset[str], told: weakref.WeakMethod[Told]) -> Any:
    """What the function `name` read off the activation `x`: its sizes as extents, all else as it is.

    Args:
        dim: that it was asked for, of one size.
        since, told: see Extent.
    """
    if name == "len":  # Python makes a plain int of it
        TracedSize.of(result, False, since, told).tell(name)
    if name not in _SIZES:
        return result
    last = x.dim() - 1
    if isinstance(result, torch.Size):
        return torch.Size(TracedSize.of(size, place == last, since, told) for place, size in enumerate(result))
    return TracedSize.of(result, name == "size" and dim in (-1, last), since, told)


def _written(func: Callable[..., Any], args: tuple[Any, ...]) -> list[Tensor]:
    """The tensors that a function writes into: its first argument, and the one that this is a view of."""
    called = getattr(func, "__name__", "")
    in_place = called == "__setitem__" or re.fullmatch(r"__i\w+__|\w*[a-z0-9]_", called) is not None
    if not in_place or not args or not isinstance(args[0], Tensor):
        return []
    return [args[0]] if args[0]._base is None else [args[0], args[0]._base]


def extents_in(values: Any) -> Iterator[TracedSize]:
    """The extents in arguments."""
    if isinstance(values, TracedSize):
        yield values
    elif isinstance(values, Mapping):
        yield from extents_in(tuple(values.values()))
    elif isinstance(values, (tuple, list)):
        for value in values:
            yield from extents_in(value)


# --- What a run of a module does with its activations between the known layers, function by function ------------------


class OpTracer(TorchFunctionMode):
    """Sees every torch function, and records what those do that get an activation.

    Attributes:
        seen: the facts.
        stack: names of the modules that run.
        layer, layer_name: the known layer that is running: what it does inside is its own.
        flows: what is known of each activation.
        given: tensors without a face whose values come from the arguments, place by place: ids, masks.
        follows: those, and all that is computed from one of them and of other things: angles of positions.
        parameters: those of the modules, and what is computed from them alone: (owner, name).
        tied: all modules that have a parameter, by the first.
        dims: how many each of the parameters has.
        mixed: of these, those whose columns were mixed on the way, or met what is no part of them: by what, in words.
        kept: tensors that the modules keep beside them, and what is computed from them: (owner, "buffer NAME").
        with_code, with_weights: names of modules with a forward, and of those with matrices.
    """

    def __init__(self, modules: list[tuple[str, nn.Module]]) -> None:
        super().__init__()
        self.seen = TraceResult()
        self.stack: list[str] = []
        self.layer: nn.Module | None = None
        self.layer_name = ""
        self.flows = WeakTensorKeyDictionary()
        self.given = WeakTensorKeyDictionary()
        self.follows = WeakTensorKeyDictionary()
        self.parameters = WeakTensorKeyDictionary()
        self.tied: dict[tuple[str, str], list[tuple[str, str]]] = {}
        for owner, part in modules:
            for name, parameter in part.named_parameters(recurse=False):
                self.parameters.setdefault(parameter, (owner, name))
                self.tied.setdefault(self.parameters[parameter], []).append((owner, name))
        self.dims = {found: parameter.dim() for parameter, found in self.parameters.items()}
        self.mixed = WeakTensorKeyDictionary()
        self.with_code = {name for name, part in modules if has_forward(part)}
        self.seen.roles = {name: role for name, part in modules if (role := role_of(part)) is not None}
        self.kept = WeakTensorKeyDictionary()
        for owner, part in modules:
            for name, value in (*part.named_buffers(recurse=False), *vars(part).items()):
                if isinstance(value, Tensor) and value not in self.kept:
                    self.kept[value] = (owner, f"{'attribute' if name in vars(part) else 'buffer'} {name}")
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
        self._follow(name, args, kwargs or {}, result, _written(func, args))
        if not args or not isinstance(args[0], Tensor):
            return result
        dim = args[1] if len(args) > 1 else (kwargs or {}).get("dim")
        if args[0] in self.flows:
            since = self.flows[args[0]].since
            return measured(name, args[0], dim, result, since, weakref.WeakMethod(self.computed_with))
        if args[0] in self.parameters and args[0].dim() == 1 and self.parameters[args[0]][0] not in self.seen.roles:
            told: weakref.WeakMethod[Told] = weakref.WeakMethod(self.computed_with_parameter)
            return measured(name, args[0], dim, result, frozenset(), told)
        return result

    def computed_with_parameter(self, operation: str, extent: TracedSize) -> None:
        """The same of a size of a vector that would be cut as the columns are."""
        if self.layer is None:
            self.note(
                f"computes with a size read off a parameter ({operation}), of which a rank holds a share where its "
                "columns are cut: take it from the module's own configuration",
                TensorTrace(face=0),
            )

    def computed_with(self, operation: str, extent: TracedSize) -> None:
        """Takes in that the module computes with a size of an activation."""
        if self.layer is None:
            self.note(
                f"computes with a size read off an activation ({operation}), and a rank holds fewer rows and columns: "
                "take the number of columns from the module's own configuration, and that of rows from an argument",
                TensorTrace(face=0, since=extent.since),
                of_columns=extent.of_columns,
            )

    def _follow(
        self, name: str, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any, written: list[Tensor]
    ) -> None:
        tensors = [tensor for _, tensor in tensors_in((args, kwargs))]
        outputs = [tensor for _, tensor in tensors_in(result)]
        active = [(tensor, self.flows[tensor]) for tensor in tensors if tensor in self.flows]
        extents = list(extents_in((args, kwargs)))
        if not active:
            of_parameter = name not in RESHAPES and any(tensor in self.parameters for tensor in tensors)
            if extents and outputs and (of_parameter or outputs[0].numel() == 1):
                extents[0].tell(name)
            self._pass_on(name, args, kwargs, result, written)
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
            self.note(found.text, flow, of_columns=found.of_columns, firm=found.firm)
        elif extents and name not in RESHAPES:
            extents[0].tell(name)
        elif name in ELEMENTWISE and outputs and outputs[0].shape[:-1] not in {each.shape[:-1] for each, _ in active}:
            shape = tuple(outputs[0].shape)
            self.note(f"lets rows meet one another ({name} to {shape}), of which a rank holds only its share", flow)
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

    def _pass_on(
        self, name: str, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any, written: list[Tensor]
    ) -> None:
        """No activation here; but what is made of arguments, place by place, or of a parameter is remembered."""
        tensors = [tensor for _, tensor in tensors_in((args, kwargs))]
        given = any(tensor in self.given for tensor in tensors) and all(
            tensor in self.given or tensor.numel() == 1 for tensor in tensors
        )
        given = given and (name in RESHAPES or objection(name, tensors[0], args, kwargs, result) is None)
        follows = any(tensor in self.given or tensor in self.follows for tensor in tensors)
        mixed = self._mixing(name, tensors, args, kwargs, result)
        self._decide(name, tensors, result)
        for output in (*written, *(each for _, each in tensors_in(result))):
            if given:
                self.given[output] = True
            if follows:
                self.follows[output] = True
            if mixed:
                self.mixed[output] = mixed
            for known in (self.parameters, self.kept):
                first = next((known[tensor] for tensor in tensors if tensor in known), None)
                if first is not None:
                    known[output] = first

    def _decide(self, name: str, tensors: list[Tensor], result: Any) -> None:
        """Python reads a value of a parameter, or of what is made of one."""
        own = next((each for each in map(self.parameters.get, tensors) if each is not None), None)
        if own is not None and self.dims[own] and name in VALUES and not isinstance(result, Tensor):
            self.note(
                f"decides by values of the parameter {own[1]} ({name}), of which a rank holds a share where its "
                "columns are cut: keep what does not change as a setting of the module",
                TensorTrace(face=0),
            )

    def _mixing(
        self, name: str, tensors: list[Tensor], args: tuple[Any, ...], kwargs: dict[str, Any], result: Any
    ) -> str:
        """What makes another tensor of a parameter's block than of the whole, in words; empty where nothing does."""
        before = next((self.mixed[tensor] for tensor in tensors if tensor in self.mixed), None)
        own = [tensor for tensor in tensors if tensor in self.parameters]
        if before is not None or not own:
            return before or ""
        if len({self.parameters[tensor] for tensor in own}) > 1:
            return f"computes one with another ({name}): let the activation meet one after the other"
        others = [tensor for tensor in tensors if tensor not in self.parameters and tensor.numel() > 1]
        if others and own[0].numel() > 1:
            return f"lets it meet {self._spelled(others[0])} ({name}), of which a rank needs its own columns"
        found = None if name in RESHAPES else objection(name, own[0], args, kwargs, result)
        return "" if found is None else found.text

    def _attend(self, name: str, flows: list[TensorTrace]) -> TensorTrace:
        """Activations multiply activations: attention, on face y, where a rank holds whole sequences and heads."""
        host = next((module for module in reversed(self.stack) if module in self.with_weights), self.place())
        self.seen.attending.setdefault(host, []).append(name)
        for flow in flows:
            self.seen.pinned.append((flow.face, "y", f"{host or 'the module itself'} ({name})"))
            self.seen.read_on |= flow.since
        return TensorTrace(face=flows[0].face)

    def _product(self, name: str, tensors: list[Tensor], flow: TensorTrace) -> TensorTrace:
        """A product with what is no activation: a parameter outside of its layer, or a constant."""
        self.seen.read_on |= flow.since
        owned = [self.parameters[tensor] for tensor in sorted(tensors, key=Tensor.dim) if tensor in self.parameters]
        owner, parameter = owned[-1] if owned else ("", "")
        parameter = f"its {parameter}" if owner == self.place() else f"the parameter {owner}.{parameter}"
        kept = next((self._spelled(tensor) for tensor in tensors if tensor in self.kept), "a matrix made here")
        what = parameter if owned else kept
        self.note(
            f"multiplies by {what} ({name}) outside of a known layer: only a layer of the cube knows how to cut it; "
            "make it an nn.Linear, or use matmul of tensor3d",
            flow,
            firm=True,
        )
        return self.fresh()

    def _meet(
        self, name: str, tensors: list[Tensor], active: list[tuple[Tensor, TensorTrace]], objected: bool
    ) -> TensorTrace:
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
                    f"lets an activation meet {self._spelled(tensor)} ({name}), which a rank needs its own rows and "
                    "columns of: local_block and local_rows take them",
                    flow,
                    firm=tensor not in self.follows,
                )
        return TensorTrace(face=flow.face, since=since, given=all(found.given for _, found in active))

    def _meet_parameter(self, name: str, tensor: Tensor, x: Tensor, flow: TensorTrace) -> None:
        every = self.tied[self.parameters[tensor]]
        owner, parameter = next((each for each in every if each[0] in self.stack), every[0])
        if tensor in self.mixed:
            self.note(
                f"lets an activation meet what is made of the parameter {parameter} ({name}), and of a rank's block of "
                f"it something else is made: it {self.mixed[tensor]}",
                flow,
                at=owner,
            )
            return
        if owner in self.seen.roles or (owner in self.with_code and owner not in self.stack):
            self.note(
                f"has a {parameter} that an activation meets outside of its forward ({name}), where it is no plain "
                "tensor: take it by tensor3d.local_param with its layout, or make a parameter for the activation",
                flow,
                at=owner,
            )
            return
        along = tensor.dim() > 0 and tensor.shape[-1:] == x.shape[-1:] and tensor.numel() == tensor.shape[-1]
        is_vector = self.dims[self.parameters[tensor]] == 1
        if is_vector and along and tensor.numel() > 1 and name not in ("cat", "stack"):
            self.seen.vectors.setdefault((owner, parameter), set()).add(flow.face)
            return
        self.note(
            f"lets an activation meet the parameter {parameter} as {tuple(tensor.shape)} ({name}): make it on the cube "
            "with a layout of its own (tensor3d.sharding.param_layout) and take it by tensor3d.local_param",
            flow,
            at=owner,
        )

    def _is_known(self, tensor: Tensor) -> bool:
        """Whether it is an argument, a parameter or what a module keeps, or made of such."""
        return any(tensor in known for known in (self.given, self.parameters, self.kept))

    def _spelled(self, tensor: Tensor) -> str:
        """What a tensor is that is no activation and no parameter."""
        shape = f"of shape {tuple(tensor.shape)}"
        if tensor not in self.kept:
            return f"a tensor {shape} made {'of the arguments' if tensor in self.given else 'here'}"
        owner, name = self.kept[tensor]
        whose = f"its {name}" if owner == self.place() else f"the {name} of {owner or 'the module itself'}"
        return f"{whose}, as a tensor {shape}"

    def enter_face(self, flow: TensorTrace, where: str) -> None:
        """What foreign modules have made is needed on a face here."""
        for module in flow.whole:
            self.seen.enters.setdefault(module, (where, flow.face))

    def note(
        self,
        text: str,
        flow: TensorTrace,
        at: str | None = None,
        *,
        of_columns: bool = False,
        firm: bool = False,
    ) -> None:
        note = UnsupportedOp(text=text, of_columns=of_columns, firm=firm)
        notes = self.seen.notes.setdefault(self.place() if at is None else at, {})
        notes[note] = notes.get(note, frozenset()) | (flow.since or frozenset({""}))

    def fresh(self) -> TensorTrace:
        self.seen.numbers += 1
        return TensorTrace(face=self.seen.numbers)


# --- Runs a module once on an example and follows its activations from layer to layer ---------------------------------
#
# The run is seen by a TorchFunctionMode: known layers (`role_of`) are taken as wholes, and of every other function is
# recorded what it does with the tensors that come from them.


def read(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> TraceResult:
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


class _Reader(OpTracer):
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
            elif tensor.is_floating_point() and tensor.dim() > 1 and self.seen.calls and not self._is_known(tensor):
                self.note(
                    f"returns a tensor of shape {tuple(tensor.shape)} made here, or by code that propose_plan cannot "
                    "follow: compare with the original",
                    replace(self.fresh(), given=True),
                )

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
            if name not in self.seen.roles:
                self.stack.append(name)
            else:
                self.layer, self.layer_name = module, name

    def _returned(self, name: str, module: nn.Module, args: Any, kwargs: Any, result: Any) -> None:
        if self.layer is None:
            self.stack.pop()
        elif self.layer is module:
            role = self.seen.roles.get(name)
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
            call = TracedCall(layer=name, role=role, reads=0, returns=flow.face, numel=0, from_arguments=given)
            self.seen.calls.append(call)
            if not given:
                its = f" ({self._spelled(x)})" if x in self.kept else ""
                self.note(
                    f"looks up numbers{its} that are no argument's, place by place, such as positions that forward "
                    "counts: in packs each sequence starts at 0 anew. Make them an argument, and pass "
                    "`packs.positions` for positions",
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
            maybe = "" if x in self.kept or x in self.given else ", or by code that propose_plan cannot follow"
            text = f"reads what is no activation ({self._spelled(x)}{maybe})"
            self.note(f"{text}: on a cube it must be this rank's block", into, at=name)
        self.enter_face(into, name)
        out = replace(self.fresh(), since=frozenset({name})) if role == "linear" else TensorTrace(face=into.face)
        self.flows[output] = out
        call = TracedCall(
            layer=name, role=role, reads=into.face, returns=out.face, numel=x.numel(), columns=x.shape[-1]
        )
        self.seen.calls.append(call)

    def _foreign(self, name: str, x: Tensor, output: Tensor, into: TensorTrace) -> None:
        """A module of no kind, fed with arguments, is replicated with all that follows up to the first layer."""
        if into.given or into.whole:
            out = replace(self.fresh(), whole=into.whole | {name})
        else:
            out = TensorTrace(face=into.face) if output.shape == x.shape else self.fresh()
        self.flows[output] = out
        self.seen.calls.append(TracedCall(layer=name, role="foreign", reads=0, returns=out.face, numel=0))

    def _check_attention(self, name: str, module: nn.MultiheadAttention, args: Any, kwargs: Any) -> None:
        """What its counterpart on a cube refuses: other keys than queries, masks, weights."""
        given = inspect.signature(module.forward).bind(*args, **kwargs).arguments
        query, mask, notes = given["query"], given.get("attn_mask"), []
        if given["key"] is not query or given["value"] is not query:
            self.seen.unfit.add(name)
            notes.append("has other keys than queries, and there is self-attention only: rules.replace(build)")
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
            self.note(text, TensorTrace(face=0), at=name)
