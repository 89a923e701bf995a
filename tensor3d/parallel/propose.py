"""Proposes a plan for `parallelize` from one run of a module on an example."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from torch import nn

from tensor3d.parallel.choosing import Choice, Choices
from tensor3d.parallel.facts import Reading
from tensor3d.parallel.folding import fold
from tensor3d.parallel.opened import OpenPoints
from tensor3d.parallel.packed_rows import PackedRows
from tensor3d.parallel.proposal import Line, Proposal
from tensor3d.parallel.reading import read


def propose_plan(module: nn.Module, *args: Any, **kwargs: Any) -> Proposal:
    """Reads a single-device module and proposes a plan for `parallelize`, in words too.

        proposal = propose_plan(module, example)
        print(proposal)
        model = parallelize(module, cube, proposal.settled())

    The module runs once, in evaluation mode and without gradients, on the example and on its own device; it and torch's
    random generators are left as they were. The data is followed from layer to layer: a product changes the face,
    elementwise work keeps it, what is added up lies on one face, attention is done on face y, embeddings return face z;
    what is free starts on face z. Where this contradicts itself, a linear gets `turn=True`.

    The proposal depends on the module and the example alone; `proposal.check(cube)` says what does not divide, and
    `settled()` refuses while anything is open (`proposal.unresolved` lists it). Only what the example runs through is
    seen, and not what is made of a size by numpy, by `x.shape.numel()`, or with a float on its left
    (1.0 / x.shape[-1]). So compare one loss with the original's.

    Args:
        module: as it is called on one device.
        args, kwargs: of one call. A small batch will do.

    Raises:
        ValueError: the module raises on its example; the place is named.
    """
    reading, rows = read(module, args, kwargs), PackedRows()
    choices = Choices(module, reading, rows)
    layers = choices.of_layers() | dict(choices.of_containers())
    points = OpenPoints(module, reading, choices, layers)
    chosen = {name: choice for name, choice in layers.items() if name not in points.left_out}
    folded = fold(*_by_every_name(module, chosen))
    return Proposal(
        plan={pattern: choice.kind for pattern, choice in folded.items()},
        lines=tuple(Line(pattern=pattern, kind=each.spelled, why=each.why) for pattern, each in folded.items()),
        remarks=tuple(_remarks(module, reading, choices, chosen)),
        unresolved=tuple(points.lines(list(_by_every_name(module, chosen)[1]))),
        rows=rows,
        module=type(module).__name__,
        divisions=tuple(division for choice in chosen.values() for division in choice.divisions),
    )


def _by_every_name(module: nn.Module, chosen: Mapping[str, Choice]) -> tuple[dict[str, Choice], list[str]]:
    """Choices under all names of each module, as a plan needs them of a shared one; and all names there are."""
    names = {name: id(part) for name, part in module.named_modules(remove_duplicate=False)}
    by_identity = {names[name]: choice for name, choice in chosen.items()}
    return {name: by_identity[part] for name, part in names.items() if part in by_identity}, list(names)


def _remarks(module: nn.Module, reading: Reading, choices: Choices, chosen: Mapping[str, Choice]) -> Iterator[str]:
    faces = choices.solution.faces
    touched = {number for call in reading.calls for number in (call.reads, call.returns) if number}
    for label, number in reading.inputs:
        if choices.solution.is_met(number, touched):
            yield f"the argument {label}: this rank's block on face {faces.face(number)}, as own_block cuts it"
    for label, number, since in reading.outputs:
        columns = ", with all columns on each rank" if since and since <= choices.heads else ""
        yield f"the result{f' {label}' * bool(label)}: on face {faces.face(number)}{columns}"
    shared: dict[int, list[str]] = {}
    for name, parameter in module.named_parameters(remove_duplicate=False):
        shared.setdefault(id(parameter), []).append(name)
    for names in shared.values():
        if len(names) > 1:
            yield f"{' and '.join(names)} are one parameter, and stay one on the cube"
    if any(type(part) is nn.Dropout for part in module.modules()):
        yield "every nn.Dropout becomes a Dropout3D by itself"
    if any(choice.spelled.startswith("attention(") for choice in chosen.values()):
        yield "attention: call the model inside `with proposal.rows.holding(sequences):`"
    if reading.causal:
        yield "attention that hides what comes later needs no mask; one that does just that may be passed all the same"
