"""Whether a module that does attention in its own forward, or a gated MLP, may keep it on a cube, by trying it.

On a cube a rank has some of the heads, and all of its rows in one line. So the module's code is given parts of the
heads here, as a cube with y = 2 (or the smallest that divides) would give them, of the example's rows in one line; and
what it makes of them must be that part of what it makes of the whole. In the place of attention stands something that
is done row by row, so that rows meet nowhere else either.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import combinations
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from tensor3d.parallelize.auto.op_rules import Role, mask_of_sdpa, name_of, role_of, tensors_in, untouched
from tensor3d.parallelize.own_attention import OwnAttention, StandIn, cut_heads
from tensor3d.parallelize.torch_attention import PackedRows
from tensor3d.parallelize.trials import columns_of

# Of so many attributes that may count heads, each set is tried.
_COUNTS = 8


@dataclass(frozen=True, kw_only=True)
class TriedAttention:
    """The rule for a module, or why there is none."""

    rule: OwnAttention | None
    why_not: str = ""


def try_attention(
    root: nn.Module, names: list[str], args: tuple[Any, ...], kwargs: dict[str, Any], rows: PackedRows
) -> dict[str, TriedAttention]:
    """Runs `root` on its example once more, and tries the named modules inside on parts of their heads.

    Everything is left as it was.
    """
    modules = {name: root.get_submodule(name) for name in names if name}
    with untouched(root), torch.no_grad():
        root.eval()
        calls = _calls(root, modules, args, kwargs)
        return {name: _tried(modules[name], calls.get(name), rows) for name in modules}


def _tried(module: nn.Module, call: _Call | None, rows: PackedRows) -> TriedAttention:
    try:
        return TriedAttention(rule=_rule(module, call, rows))
    except Exception as error:  # whatever a stranger's code says of a part of its heads
        told = " ".join(str(error).split()).partition(" Say with rules.replace")[0]
        return TriedAttention(rule=None, why_not=told.rstrip(".") or type(error).__name__)


def _rule(module: nn.Module, call: _Call | None, rows: PackedRows) -> OwnAttention:
    if call is None or len(call.head_dims) > 1:
        raise ValueError("it is called more than once, or attends with heads of several sizes")
    if call.masks:
        raise ValueError("it is given a mask that does more than to hide what comes later")
    if not isinstance(call.x, Tensor) or call.x.dim() != 3:
        raise ValueError("its first argument is no hidden state (sequences, length, columns)")
    if call.x.is_meta or min(call.x.shape[:2]) < 2:
        raise ValueError(
            "it is tried on numbers, of two sequences of two tokens or more. Pass propose_plan such an example, of a "
            "module that has memory"
        )
    head_dim = min(call.head_dims, default=1)  # of an MLP each column is one
    linears = [each for each, part in module.named_children() if call.roles[each] == "linear" and each in call.read]
    outputs = [each for each in linears if call.read[each] is not call.x]
    output = outputs[0] if outputs else None
    if not call.head_dims and output is None:
        raise ValueError("it has no nn.Linear behind those of its input")
    inputs = [each for each in linears if each != output]
    rule = OwnAttention(rows if call.head_dims else None, head_dim, output)
    problems: list[Exception] = []
    for fused in _fusions(module, rule, inputs):
        rule = replace(rule, fused=fused, shares=())
        try:
            counts = rule.check_parts(module, type(module).__name__)
        except ValueError as error:  # so many do not divide the columns
            problems.append(error)
            continue
        heads, widths = set(counts.values()), rule.widths(counts)
        for shares in _counts(module, heads | {each * head_dim for each in heads}):
            rule = replace(rule, shares=shares)
            try:
                whole = _of_heads(module, call, rule, widths, _Part())
                for part in _parts(heads):
                    _check_part(whole, _of_heads(module, call, rule, widths, part), part)
            except Exception as error:
                problems.append(error)
            else:
                return rule
    raise next((each for each in problems if isinstance(each, _DiffersError)), problems[0])


class _DiffersError(ValueError):
    """It is no matter of what counts the heads: parts do not give parts of the whole, though of the right shape."""


def _fusions(module: nn.Module, rule: OwnAttention, inputs: list[str]) -> Iterator[dict[str, Any]]:
    """Which projections may hold queries, keys and values one after another, or keys and values, or gate and up."""
    yield {}
    if len(inputs) == 2 and rule.rows is not None:
        yield from ({each: 2} for each in inputs)
    if len(inputs) != 1:
        return
    yield {inputs[0]: 2 if rule.rows is None else 3}
    if rule.rows is not None and rule.output is not None:  # fewer heads of keys and values than of queries
        queries = module.get_submodule(rule.output).in_features // rule.head_dim  # type: ignore[operator]
        others = module.get_submodule(inputs[0]).out_features // rule.head_dim - queries  # type: ignore[operator]
        if others > 0 and others % 2 == 0 and queries % (others // 2) == 0:
            yield {inputs[0]: (queries // (others // 2), 1, 1)}


def _counts(module: nn.Module, numbers: set[int]) -> Iterator[tuple[str, ...]]:
    """Sets of the module's attributes that may count heads or their columns by their value, the smallest first."""
    found = [each for each, value in vars(module).items() if type(value) is int and value in numbers][:_COUNTS]
    for size in range(len(found) + 1):
        yield from combinations(found, size)


@dataclass(frozen=True, kw_only=True)
class _Part:
    """The heads number `number` of `of` parts, of rows in one line; by default all heads of rows as they are."""

    number: int = 0
    of: int = 1
    in_line: bool = False

    def on_face_y(self, tensor: Tensor) -> Tensor:
        """(sequences, length, columns) to these heads' columns of all rows in one line."""
        return tensor.reshape(1, -1, tensor.shape[-1]).chunk(self.of, dim=-1)[self.number]

    def on_face_z(self, tensor: Tensor) -> Tensor:
        """The same to what no face y has: the second half of the columns, of all rows but the first."""
        return tensor.reshape(1, -1, tensor.shape[-1])[:, 1:].tensor_split(2, dim=-1)[1]


def _parts(heads: set[int]) -> Iterator[_Part]:
    """All parts of the smallest y that divides the heads, and the outermost of the largest."""
    most = math.gcd(*heads)
    fewest = next((each for each in range(2, most + 1) if most % each == 0), 1)
    yield from (_Part(number=number, of=fewest, in_line=True) for number in range(fewest))
    if most > fewest:
        yield from (_Part(number=number, of=most, in_line=True) for number in (0, most - 1))


@dataclass(kw_only=True)
class _Seen:
    """What a module's code made: what the norms over all heads and the output were given, and its result."""

    on_face_y: list[Tensor] = field(default_factory=list)
    on_face_z: list[Tensor] = field(default_factory=list)


def _check_part(whole: _Seen, seen: _Seen, part: _Part) -> None:
    pairs = [(part.on_face_y(each), found) for each, found in zip(whole.on_face_y, seen.on_face_y, strict=True)]
    pairs += [(part.on_face_z(each), found) for each, found in zip(whole.on_face_z, seen.on_face_z, strict=True)]
    for wanted, found in pairs:
        if found.shape != wanted.shape:
            raise ValueError(
                f"of a part of its heads it makes {tuple(found.shape)} where {tuple(wanted.shape)} is right: its code "
                "names the number of heads, or of rows"
            )
        rtol = 1e-4 if wanted.dtype.itemsize > 2 else 2e-2
        if not torch.allclose(found, wanted, rtol=rtol, atol=rtol * float(wanted.abs().max())):
            raise _DiffersError("of a part of its heads, or of rows in one line, it makes something else than of all")


def _of_heads(module: nn.Module, call: _Call, rule: OwnAttention, widths: set[int], part: _Part) -> _Seen:
    """What the module's code makes of some of the heads.

    Args:
        widths: columns of several heads, as `rule.widths` tells them.

    Raises:
        ValueError: what it reads or gives is not what the rule is for, or its own error.
    """
    seen = _Seen()

    def cut(name: str, tensor: Tensor) -> Tensor:
        found = cut_heads(tensor, rule.told(name), rule.head_dim, part.number, part.of)
        return found.reshape(1, -1, found.shape[-1]) if part.in_line else found

    def projected(name: str, given: Any) -> Tensor:
        if not isinstance(given, StandIn):
            raise ValueError(f"its {name} reads another tensor than the module's input")
        return cut(name, call.gave[name])

    def normed(name: str, given: Tensor) -> Tensor:
        seen.on_face_y.append(given)
        return cut(name, call.gave[name])

    def put_out(gave: Tensor, given: Tensor) -> Tensor:
        seen.on_face_y.append(given.reshape(1, -1, given.shape[-1]) if part.in_line else given)
        found = part.on_face_z(gave) if part.in_line else gave
        return found if gave.dim() == 3 or not part.in_line else found.squeeze(0)

    stubs: dict[str, Callable[..., Tensor]] = {}
    for name, child in module.named_children():
        if name == rule.output:
            stubs[name] = partial(put_out, call.gave[name])
        elif call.roles[name] == "linear":
            stubs[name] = partial(projected, name)
        elif call.roles[name] == "norm" and name in call.gave and columns_of(child) in widths:
            stubs[name] = partial(normed, name)  # over all heads: on a cube a norm of it
    args, kwargs = call.with_stand_in(part.of, part.in_line)
    numbers = {each: vars(module)[each] // part.of for each in rule.shares}
    rows = (1, call.x.shape[:2].numel()) if part.in_line else tuple(call.x.shape[:2])
    with _stubbed(module, stubs, numbers), _RowByRow(rule.head_dim, rows):
        results = [tensor for _, tensor in tensors_in(module.forward(*args, **kwargs))]
    if len(results) != 1:
        raise _DiffersError(f"it returns {len(results)} tensors, where attention has one")
    (seen.on_face_y if rule.output is None else seen.on_face_z).extend(results)
    return seen


@contextmanager
def _stubbed(module: nn.Module, stubs: dict[str, Callable[..., Tensor]], numbers: dict[str, int]) -> Iterator[None]:
    """Inside, the named parts of the module do what the stubs do, and its attributes are these numbers."""
    before = {name: module._modules[name] for name in stubs}
    attributes = {name: vars(module)[name] for name in numbers}
    try:
        vars(module).update(numbers)
        for name, stub in stubs.items():
            module._modules[name] = _Stub(stub)
        yield
    finally:
        module._modules.update(before)
        vars(module).update(attributes)


class _Stub(nn.Module):
    def __init__(self, does: Callable[..., Tensor]) -> None:
        super().__init__()
        self.does = does

    def forward(self, given: Any) -> Tensor:
        return self.does(given)


class _RowByRow(TorchFunctionMode):
    """Inside, what attention returns of a row and head comes of that row, its place, and that head alone."""

    def __init__(self, head_dim: int, rows: tuple[int, ...]) -> None:
        super().__init__()
        self.head_dim, self.rows = head_dim, rows

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if name_of(func) != "scaled_dot_product_attention":
            return func(*args, **(kwargs or {}))
        given = _given(args, kwargs or {})
        q, k, v = given["query"], given["key"], given["value"]
        if q.shape[-1] != self.head_dim:
            raise ValueError(
                f"of a part of its heads it makes heads of {q.shape[-1]} columns, which have {self.head_dim}: its code "
                "names their number"
            )
        sequences, length = self.rows
        if any(each.dim() != 4 or each.shape[::2] != (sequences, length) for each in (q, k, v)):
            shapes = ", ".join(str(tuple(each.shape)) for each in (q, k, v))
            raise _DiffersError(f"it attends with {shapes} of ({sequences}, heads, {length}, columns)")
        if not k.shape[1] or k.shape[1] != v.shape[1] or q.shape[1] % k.shape[1]:
            counts = ", ".join(str(each.shape[1]) for each in (q, k, v))
            raise ValueError(f"of a part of its heads it attends with {counts}: its code names their number")
        hides = mask_of_sdpa(given.get("attn_mask"))
        if hides == "other":
            raise _DiffersError("it makes a mask that does more than to hide what comes later")
        k, v = (each.repeat_interleave(q.shape[-3] // each.shape[-3], dim=-3) for each in (k, v))
        scale, causal = given.get("scale"), given.get("is_causal") or hides == "later"
        places = torch.arange(1, sequences * length + 1, device=q.device).view(sequences, 1, length, 1) / 8
        products = (q * k).sum(-1, keepdim=True) * (1 if scale is None else scale)
        return products * v + q * places.to(q.dtype) + (v if causal else 0)


# --- The calls of the modules, on the whole example -------------------------------------------------------------------


@dataclass(kw_only=True)
class _Call:
    """One call of a module; of its parts what they are taken for, were given and gave."""

    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    x: Any
    roles: dict[str, Role | None]
    read: dict[str, Tensor] = field(default_factory=dict)
    gave: dict[str, Tensor] = field(default_factory=dict)
    head_dims: set[int] = field(default_factory=set)
    masks: int = 0

    def with_stand_in(self, parts: int, in_line: bool) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """The arguments with what stands for the input as a rank of `parts` would have it, and rows in one line."""
        rows = (1, self.x.shape[:-1].numel()) if in_line else self.x.shape[:-1]
        stand_in = StandIn.made(self.x, (*rows, self.x.shape[-1] // parts), "The code")

        def put(value: Any) -> Any:
            if value is self.x:
                return stand_in
            if type(value) in (tuple, list):
                return type(value)(map(put, value))
            return _in_line(value, *self.x.shape[:2]) if in_line and isinstance(value, Tensor) else value

        return tuple(map(put, self.args)), {name: put(value) for name, value in self.kwargs.items()}


def _in_line(tensor: Tensor, batch: int, length: int) -> Tensor:
    """What comes beside the rows of a batch, with one line of all rows: (1, batch * length, ...)."""
    if tensor.dim() > 1 and tensor.shape[0] in (1, batch) and tensor.shape[1] == length:
        return tensor.expand(batch, *tensor.shape[1:]).flatten(0, 1).unsqueeze(0)
    if tensor.dim() > 2 and tensor.shape[0] in (1, batch) and tensor.shape[1] == 1 and tensor.shape[2] == length:
        return tensor.expand(batch, *tensor.shape[1:]).transpose(0, 1).flatten(1, 2).unsqueeze(1)
    if tensor.dim() > 0 and tensor.shape[0] == length:
        return tensor.repeat(batch, *[1] * (tensor.dim() - 1))
    return tensor


class _Watch(TorchFunctionMode):
    """Sees what attention the modules on `stack` ask for."""

    def __init__(self) -> None:
        super().__init__()
        self.stack: list[_Call] = []

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if self.stack and name_of(func) == "scaled_dot_product_attention":
            given = _given(args, kwargs or {})
            self.stack[-1].head_dims.add(given["query"].shape[-1])
            self.stack[-1].masks += mask_of_sdpa(given.get("attn_mask")) == "other"
        return func(*args, **(kwargs or {}))


def _given(args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
    """The arguments of a call of torch's function, which has no signature of its own."""
    names = ("query", "key", "value", "attn_mask", "dropout_p", "is_causal")
    return dict(zip(names, args, strict=False)) | kwargs


def _calls(
    root: nn.Module, modules: dict[str, nn.Module], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> dict[str, _Call]:
    """By name of the module; of one that is called more than once nothing."""
    found: dict[str, _Call | None] = {}
    watch, handles = _Watch(), []
    roles = {name: {own: role_of(part) for own, part in module.named_children()} for name, module in modules.items()}

    def called(name: str, module: nn.Module, args: Any, kwargs: Any) -> None:
        forward = vars(module).get("forward", module.forward)
        x = next(iter(inspect.signature(forward).bind(*args, **kwargs).arguments.values()), None)
        watch.stack.append(_Call(args=args, kwargs=dict(kwargs), x=x, roles=roles[name]))
        found[name] = None if name in found else watch.stack[-1]

    def returned(module: nn.Module, args: Any, result: Any) -> None:
        watch.stack.pop()

    def part_returned(name: str, module: nn.Module, args: Any, result: Any) -> None:
        if watch.stack and args and isinstance(result, Tensor):
            # What is done to keys of 0, as weights may start, is not seen.
            hides = watch.stack[-1].roles.get(name) == "linear"
            gave = result + torch.randn_like(result) if hides else result
            watch.stack[-1].read[name], watch.stack[-1].gave[name] = args[0], gave

    try:
        for name, module in modules.items():
            handles.append(module.register_forward_pre_hook(partial(called, name), with_kwargs=True))
            handles.append(module.register_forward_hook(returned))
            for own, part in module.named_children():
                handles.append(part.register_forward_hook(partial(part_returned, own)))
        with watch:
            root(*args, **kwargs)
    finally:
        for handle in handles:
            handle.remove()
    return {name: call for name, call in found.items() if call is not None}
