"""`explain`: a dry step of a model, on this rank alone."""

from __future__ import annotations

import inspect
import json
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from tensor3d.batches.sequences import Sequences
from tensor3d.distributed.comm_stats import Key
from tensor3d.distributed.cube import Cube
from tensor3d.distributed.grad_reducer import GradReducer
from tensor3d.explain.recorder import LOSS, SHARED, LayerStats, Recorder, cut_off, faces_of, scalar_of
from tensor3d.explain.report import ReportRow, by_axis, folded, named, table
from tensor3d.layers.embedding import Embedding3D, LookupEmbedding3D
from tensor3d.layers.heads import SmallHead3D
from tensor3d.layers.linear import Linear3D, Projection3D
from tensor3d.layers.norm import LayerNorm3D, RMSNorm3D
from tensor3d.sharding.activation_layout import Face, other
from tensor3d.sharding.param_layout import local

# --- What `explain` finds, with its sums, as a table or as JSON -------------------------------------------------------


@dataclass(frozen=True, kw_only=True, repr=False)
class CostReport:
    """One forward and backward pass of a model on one rank. Printed, it is a table."""

    model: str
    """The model's class."""
    cube: str
    """Sizes of the cube."""
    rank: int
    ranks: int
    tokens: int | None
    """Tokens of the whole cube, if they were told."""
    rows: tuple[ReportRow, ...]
    """Every layer that has parameters or that sends or keeps something; then the loss and the sums of gradients."""

    @property
    def received(self) -> Counter[Key]:
        """Bytes received by (axis, kind of collective): what `cube.traffic.counting()` shows of such a step."""
        return sum((row.received for row in self.rows), Counter())

    @property
    def received_by_axis(self) -> Counter[str]:
        """Bytes received by axis; `"x+z"` for axes taken together."""
        return by_axis(self.received)

    @property
    def saved(self) -> int:
        """Bytes kept for backward, each storage once, parameters left out."""
        return sum(row.saved for row in self.rows)

    @property
    def parameters(self) -> int:
        """Elements of all parameters of the model."""
        return sum(row.parameters for row in self.rows)

    @property
    def parameters_here(self) -> int:
        """Elements of the blocks that this rank holds."""
        return sum(row.parameters_here for row in self.rows)

    @property
    def folded(self) -> tuple[ReportRow, ...]:
        """The rows, with equal layers that follow each other in a stack as one."""
        return tuple(folded(self.rows))

    def row(self, name: str) -> ReportRow:
        """The row of one layer, by its name in `named_modules`.

        Raises:
            ValueError: there is none.
        """
        for row in self.rows:
            if row.name == name:
                return row
        names = ", ".join(row.name for row in self.rows)
        raise ValueError(f"no row is named {name!r}. Rows are: {names}.")

    def json(self, indent: int | None = None) -> str:
        """The rows of the table and their sums as JSON, in elements and bytes; collectives as `"y all-gather"`."""
        return json.dumps(
            {
                "model": self.model,
                "cube": self.cube,
                "rank": self.rank,
                "ranks": self.ranks,
                "tokens": self.tokens,
                "rows": [row.plain() for row in self.folded],
                "total": {
                    "parameters": self.parameters,
                    "parameters_here": self.parameters_here,
                    "received": named(self.received),
                    "received_by_axis": dict(self.received_by_axis),
                    "saved": self.saved,
                },
            },
            indent=indent,
        )

    def __repr__(self) -> str:
        tokens = "" if self.tokens is None else f", {self.tokens} tokens"
        title = f"{self.model} on {self.cube}, rank {self.rank} of {self.ranks}{tokens}: one forward and backward pass"
        return "\n".join([title, "", *table(self.folded)])


# --- `explain` --------------------------------------------------------------------------------------------------------

Inputs = tuple[Any, ...] | Mapping[str, Any]


def explain(
    model: nn.Module,
    tokens: int | None = None,
    *,
    inputs: Inputs | None = None,
    loss: Callable[[Any], Tensor] | None = None,
) -> CostReport:
    """What one forward and backward pass of `model` sends and keeps on this rank, layer by layer.

    A dry step: the model computes with its own weights, and its collectives are counted but send nothing. So any one
    rank may call it, and no other needs to. It takes the memory and the computing time of a real step of this rank.
    Nothing is left of it: gradients, gradients held back, PyTorch's random streams and the model's buffers are as
    before, and post-accumulate hooks (such as an optimiser's step in backward) do not run. Only what the model's own
    code and its other hooks change beside these stays changed: Python attributes, a `torch.Generator` of its own,
    parameters that forward writes to. The model is looked at in the mode it is in: `model.eval()` has no dropout masks
    to keep.

    The bytes are those that `cube.traffic.counting()` shows of a real step, by axis and kind, and exact unless the
    model decides by the values that it receives what to send next (as `gather` of unevenly cut columns does).

    Args:
        model: a model or a single layer on a cube. Layers outside of it are not looked at.
        tokens: of the whole cube, in one forward pass. For a model that has a method `example(tokens)`, which returns
            its forward arguments by name, and for a layer whose input is an activation or token ids (with
            `Sequences` of 512, if it needs them). Not needed with `inputs`.
        inputs: arguments of one forward call on this rank: a tuple, or a dict by name. Tensors are cut off from the
            graph behind them, also in lists, mappings and dataclasses, which are copied for it.
        loss: of the output. Default: its `.loss`, else the sum of its tensors that need a gradient.

    Raises:
        ValueError: no layer of the model lies on a cube, or layers lie on several; neither tokens nor inputs, tokens
            that do not divide, or a model whose arguments are not known; inputs that cannot be cut off; nothing in the
            output, or in what `loss` makes of it, needs a gradient.
    """
    cubes = _cubes(model)
    cube, recorder = cubes[0], Recorder(model)
    if inputs is None and tokens is None:
        raise ValueError(
            "explain needs tokens=N, those of the whole cube, or inputs= of one forward call. Got neither."
        )
    with ExitStack() as aside:
        aside.enter_context(_state_aside(model, cube))
        aside.enter_context(_gradients_aside(model.parameters()))
        aside.enter_context(_ledgers_aside(cubes, recorder))
        aside.enter_context(cube.traffic.dry(recorder.sent))
        # Whatever the caller has switched off: a step has gradients.
        aside.enter_context(torch.inference_mode(False))
        aside.enter_context(torch.enable_grad())
        arguments = cut_off(example(model, tokens, cube) if inputs is None else inputs)  # type: ignore[arg-type]
        with recorder.listening():
            with recorder.forward():
                output = model(**arguments) if isinstance(arguments, Mapping) else model(*arguments)
                total = scalar_of(output, "the output") if loss is None else scalar_of(loss(output), "the loss")
            with _gradients_aside(_leaves(total)):
                total.backward()
    return CostReport(
        model=type(model).__name__,
        cube=str(cube.shape),
        rank=cube.rank,
        ranks=cube.shape.ranks,
        tokens=tokens,
        rows=(*_layers(model, recorder), *_beside(recorder)),
    )


# --- rows -----------------------------------------------------------------------------------------------------------


def _layers(model: nn.Module, recorder: Recorder) -> Iterator[ReportRow]:
    """The modules that have parameters, or that send or keep something."""
    counted: set[int] = set()
    for name, module in model.named_modules():
        own = [each for each in module.parameters(recurse=False) if id(each) not in counted]
        counted.update(map(id, own))
        tally = recorder.tallies.get(name, LayerStats())
        told = faces_of(module)
        tally.faces = told if any(told) else tally.faces
        if any(True for _ in module.parameters(recurse=False)) or tally.forward or tally.backward or tally.saved:
            yield _row(
                name,
                type(module).__name__,
                tally,
                parameters=sum(each.numel() for each in own),
                parameters_here=sum(local(each).numel() for each in own),
            )


def _beside(recorder: Recorder) -> Iterator[ReportRow]:
    """What belongs to no module: the loss, and the ledger's sums of gradients, one row for each set of axes."""
    for place in (SHARED, LOSS):
        tally = recorder.tallies.get(place, LayerStats())
        if tally.forward or tally.backward or tally.saved:
            yield _row(place, "", tally)
    for (axis, kind), count in sorted(recorder.sums.items()):
        sums = LayerStats()
        sums.backward[axis, kind] = count
        yield _row("(sums of gradients)", f"over {axis}", sums)


def _row(name: str, kind: str, tally: LayerStats, **more: Any) -> ReportRow:
    return ReportRow(name=name, kind=kind, **vars(tally), **more)


# --- what must be as before -----------------------------------------------------------------------------------------


def _cubes(model: nn.Module) -> list[Cube]:
    """The cubes of the model's layers: one, or some that share its processes and compute in different types."""
    found: dict[int, Cube] = {}
    for module in model.modules():
        cube = getattr(module, "cube", None)
        if isinstance(cube, Cube):
            found[id(cube)] = cube
    cubes = list(found.values())
    if not cubes:
        raise ValueError(
            f"explain needs a model with layers on a cube, and found none in {type(model).__name__}. Layers of "
            "tensor3d have one; a layer of your own keeps it as `self.cube`."
        )
    if any(cube.traffic is not cubes[0].traffic for cube in cubes):
        raise ValueError(f"the layers of {type(model).__name__} lie on {len(cubes)} different cubes. Use one for all.")
    return cubes


@contextmanager
def _state_aside(model: nn.Module, cube: Cube) -> Iterator[None]:
    """Random streams and the model's buffers are afterwards what they were."""
    places = [(module._buffers, dict(module._buffers)) for module in model.modules()]
    buffers = [buffer for _, before in places for buffer in before.values() if buffer is not None]
    values = [_memory(buffer).clone() for buffer in buffers]
    with torch.random.fork_rng(devices=[cube.device] if cube.device.type == "cuda" else []):
        try:
            yield
        finally:
            for now, before in places:
                now.clear()
                now.update(before)
            for buffer, value in zip(buffers, values, strict=True):
                _memory(buffer).copy_(value)


def _memory(buffer: Tensor) -> Tensor:
    """What it holds, each element once: an expanded buffer cannot be written to as it is.

    Through `.data`, where writing bumps no version: a forward pass that waits for its backward may have saved it.
    """
    own = local(buffer).data
    repeated = [dim for dim, stride in enumerate(own.stride()) if stride == 0] if own.layout is torch.strided else []
    for dim in repeated:
        own = own.narrow(dim, 0, min(1, own.shape[dim]))
    return own


@contextmanager
def _ledgers_aside(cubes: list[Cube], recorder: Recorder) -> Iterator[None]:
    """Each cube has a ledger of its own for this step: what the real one holds back stays where it is."""
    before = [cube.ledger for cube in cubes]
    try:
        for cube in cubes:
            cube.ledger = GradReducer(cube.precision, agreement=cube.ledger.agreement)
            cube.ledger.observer = recorder.sums_begin_or_end
        yield
    finally:
        for cube, ledger in zip(cubes, before, strict=True):
            cube.ledger = ledger


@contextmanager
def _gradients_aside(leaves: Iterable[Tensor]) -> Iterator[None]:
    """The `.grad` of `leaves` is afterwards what it was, and no hook is told of it.

    The model's parameters are named beside the leaves behind the loss: a reentrant checkpoint hides its own from there.
    """
    leaves = list(leaves)
    gradients = [leaf.grad for leaf in leaves]
    hooks = [places for leaf in leaves for places in (leaf._backward_hooks, leaf._post_accumulate_grad_hooks) if places]
    told = [dict(each) for each in hooks]
    try:
        for leaf in leaves:
            leaf.grad = None
        for each in hooks:
            each.clear()
        yield
    finally:
        for leaf, gradient in zip(leaves, gradients, strict=True):
            leaf.grad = gradient
        for each, before in zip(hooks, told, strict=True):
            each.update(before)


def _leaves(total: Tensor) -> list[Tensor]:
    waiting: list[Any] = [total.grad_fn]
    seen: set[Any] = set(waiting)
    while waiting:
        node = waiting.pop()
        new = [before for before, _ in node.next_functions if before is not None and before not in seen]
        seen.update(new)
        waiting.extend(new)
    return [node.variable for node in seen if hasattr(node, "variable")]


# --- Example inputs ---------------------------------------------------------------------------------------------------


_SEQUENCE = 512  # tokens of a sequence, where a layer asks for sequences and none are given


def example(model: nn.Module, tokens: int, cube: Cube) -> dict[str, Any] | tuple[Any, ...]:
    """Arguments of one forward call, on this rank, for so many tokens of the whole cube.

    Those of the model's own `example(tokens)`, if it has that. Else the model is taken for a layer: its input is that
    of the first layer in it that tells what it reads.

    Raises:
        ValueError: tokens that do not divide, or a model that is no such layer.
    """
    own = getattr(model, "example", None)
    if callable(own):
        arguments: dict[str, Any] = own(tokens)
        return arguments
    rows = _rows(tokens, cube)
    needed = _needed(model)
    first = next((made for module in model.modules() if (made := _input(module, rows, cube)) is not None), None)
    if first is None or needed[1:] not in ([], ["sequences"]):
        raise ValueError(
            f"no input is known for {type(model).__name__}, whose forward needs ({', '.join(needed)}). Pass "
            "inputs=(...) or inputs={...}, its arguments on this rank, or give it a method example(tokens) that "
            "returns them by name."
        )
    return (first, _sequences(rows // cube.axis("z").size, cube)) if len(needed) > 1 else (first,)


def _rows(tokens: int, cube: Cube) -> int:
    shape = cube.shape
    rows, rest = divmod(tokens, shape.planes)
    if tokens < 1 or rest or rows % shape.y or rows % shape.z:
        raise ValueError(
            f"tokens are those of the whole cube: on {shape} they must divide by data*x={shape.planes}, and what comes "
            f"out, the rows of a plane, by y={shape.y} and by z={shape.z}. Got {tokens}."
        )
    return rows


def _needed(model: nn.Module) -> list[str]:
    """Names of the arguments that the model's forward cannot do without."""
    parameters = inspect.signature(model.forward).parameters.values()
    named = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
    return [each.name for each in parameters if each.kind in named and each.default is inspect.Parameter.empty]


def _input(module: nn.Module, rows: int, cube: Cube) -> torch.Tensor | None:
    """What goes into one of the library's layers; None for other modules."""
    if isinstance(module, (Embedding3D, LookupEmbedding3D)):
        return torch.zeros(rows, dtype=torch.int64, device=cube.device)
    if isinstance(module, Linear3D):
        return _state(module, rows, module.in_features, module.reads, cube)
    if isinstance(module, SmallHead3D):
        return _state(module, rows, module.in_features, module.face, cube)
    if isinstance(module, (LayerNorm3D, RMSNorm3D)):
        return _state(module, rows, module.hidden, module.face, cube)
    if isinstance(module, Projection3D) and module.weight is not None:
        return _state(module, rows, module.hidden, module.reads, cube)
    return None


def _state(module: nn.Module, rows: int, features: int, face: Face, cube: Cube) -> torch.Tensor:
    """(R/y, features/z) on face z, as from the middle of a model: with a gradient, in the type of the products."""
    height, width = rows // cube.axis(other(face)).size, features // cube.axis(face).size
    parameter = next(module.parameters(), None)  # a norm may have none
    dtype = cube.precision.computed(torch.get_default_dtype() if parameter is None else parameter.dtype)
    return torch.zeros(height, width, dtype=dtype, device=cube.device, requires_grad=True)


def _sequences(rows: int, cube: Cube) -> Sequences:
    """All rows of a rank on face y in sequences of `_SEQUENCE`, the last one shorter."""
    whole, rest = divmod(rows, _SEQUENCE)
    return Sequences.from_lengths([_SEQUENCE] * whole + ([rest] if rest else []), cube.device)
