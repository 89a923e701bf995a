"""`check_layer`: a layer on many cubes against one device."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from math import lcm
from typing import Any, get_args

import torch
from torch import Tensor, nn

from tensor3d.distributed.cube import Cube
from tensor3d.distributed.cube_shape import CubeShape
from tensor3d.sharding.activation_layout import Face, check_face
from tensor3d.testing.compare import Expected, Loss, MakeLayer, Returns, default_dtype, expect, on_rank, run
from tensor3d.testing.hints import crash_hint, hints
from tensor3d.testing.inputs import Input, check_inputs, read_inputs
from tensor3d.testing.processes import RankError, check_sendable
from tensor3d.testing.report import Outcome, Report, measure
from tensor3d.testing.row_orders import check_orders, order_hint, reordered
from tensor3d.testing.standing_ranks import StandingRanks

CUBES = (
    CubeShape(x=2, y=2, z=2),
    CubeShape(x=1, y=2, z=4),
    CubeShape(x=4, y=2, z=1),
    CubeShape(data=2, x=1, y=2, z=2),
)
"""Boxes of 8 ranks. No two axes have the same sizes on all: each leaves a trace of its own where it is forgotten."""


def check_layer(
    layer: MakeLayer,
    reference: Callable[[], nn.Module] | None,
    inputs: Any,
    *more: Any,
    face: Face = "z",
    returns: Returns | None = None,
    cubes: Sequence[CubeShape] = CUBES,
    dtype: torch.dtype = torch.float64,
    tolerance: float = 1e-9,
    rename: Mapping[str, str] | None = None,
    rows: Mapping[str, Tensor] | None = None,
    loss: Loss | None = None,
    timeout: float = 60.0,
    ranks: StandingRanks | None = None,
) -> Report:
    """Compares a layer on real ranks with one device: output, gradient of every input and of every parameter.

    The reference's parameters are given values of their own (seeded; biases and gains not trivial), which are copied to
    the layer on each cube. Backward begins with the gradient of a random weighting of the output. First the layer
    runs on one device, in this process; then on every cube, one process a rank. In a script, call it below
    `if __name__ == "__main__":`.

    Args:
        layer: makes the layer on a cube. It is sent to other processes: a class, a function at the top level of a
            module, or `functools.partial` of one, but no lambda.
        reference: makes the same in plain PyTorch. None: the layer itself on one device, which then stands for right.
        inputs: one input or a list of them. A matrix (rows, columns) is an activation on `face`; `on_face(t, "y")` is
            one on another face; `per_row(t)` has a value for each row (ids, labels), of which a rank is given those of
            its plane; `Sequences` are those of all rows, of which a rank is given those of its rows on face y;
            `whole(t)`, and whatever is no tensor, is passed as it is. The reference is given all of it.
        more: refused, with the list that is meant.
        returns: the face of the output (default: `face`; `Linear3D` returns the other one), `"rows-y"` or `"rows-z"`
            for an output whose rows lie as on that face and whose columns are whole, or `"scalar"` for a loss.
        cubes: their shapes. Rows and columns must divide on each.
        dtype: of parameters, activations and computation.
        tolerance: the largest max|got - reference| / max|reference| of a tensor.
        rename: of parameters of the layer that have another name in the reference: that name.
        rows: of parameters of the layer whose rows lie in another order than the reference's: of each row the number
            of the reference's, as `tensor3d.to_fused_rows` gives it for q, k and v in one weight.
        loss: of the full output, to a scalar, in place of the random weighting.
        timeout: seconds that a cube may take.
        ranks: where the cubes are laid. None: ranks of this call alone. A suite of many checks shares one.

    Returns:
        The errors by tensor and cube; `print` shows a table.

    Raises:
        AssertionError: something differs: the table, and for each mistake that is recognised what to do. A layer that
            raises on a cube or hangs there raises `RankError`, which is one, with the rank's traceback.
        ValueError: arguments that cannot be compared, or a reference that is not finite; before any process is started.
    """
    if more:
        raise ValueError(
            "several inputs go in one list: check_layer(layer, reference, [h, per_row(labels)]). Got "
            f"{3 + len(more)} arguments without a name."
        )
    check_face(face)
    returns = face if returns is None else returns
    if returns not in get_args(Returns):
        raise ValueError(f"returns must be one of {', '.join(map(repr, get_args(Returns)))}. Got {returns!r}.")
    given = read_inputs(inputs, face, dtype)
    _check_cubes(cubes, given)
    check_sendable(layer)
    with default_dtype(dtype), torch.random.fork_rng(devices=[]):
        torch.manual_seed(1)
        model = layer(Cube.single())
        twin = model if reference is None else reference()
        names = _names(model, twin, rename or {})
        check_orders(rows or {}, model)
        expected = reordered(expect(twin, names, given, loss, dtype), rows or {})
        _check_returns(expected, returns)

        def on_one_device(wanted: Expected) -> Outcome:
            return Outcome(shape=CubeShape(), ranks=[run(layer, given, wanted, returns, Cube.single())])

        def passes(wanted: Expected) -> bool:
            return measure([on_one_device(wanted)], wanted, tolerance).passed

        alone = on_one_device(expected)
        if not measure([alone], expected, tolerance).passed and (hint := order_hint(model, expected, passes)):
            raise AssertionError(_differs(tolerance, f"{measure([alone], expected, tolerance)}\nHINT {hint}"))
    _judge([alone], expected, tolerance, returns)
    outcomes = [alone]
    with nullcontext(ranks) if ranks is not None else StandingRanks() as standing:
        for shape in cubes:
            outcomes.append(_on_cube(standing, layer, given, expected, returns, shape, timeout, outcomes, tolerance))
    return _judge(outcomes, expected, tolerance, returns)


def _on_cube(
    standing: StandingRanks,
    layer: MakeLayer,
    inputs: Sequence[Input],
    expected: Expected,
    returns: Returns,
    shape: CubeShape,
    timeout: float,
    before: Sequence[Outcome],
    tolerance: float,
) -> Outcome:
    try:
        ranks = standing.run(shape.ranks, on_rank, layer, inputs, expected, returns, shape, timeout=timeout)
    except RankError as error:
        report = measure(before, expected, tolerance)
        hint = crash_hint(str(error), shape, before, report)
        text = f"the layer did not come through on the cube {shape}; {error}"
        text += f"\nHINT {hint}" if hint else ""
        if len(before) > 1:
            text += f"\nBefore that:\n{report if hint else _verdict(before, expected, tolerance, returns)}"
        raise RankError(text) from None
    return Outcome(shape=shape, ranks=ranks)


def _judge(outcomes: Sequence[Outcome], expected: Expected, tolerance: float, returns: Returns) -> Report:
    report = measure(outcomes, expected, tolerance)
    if not report.passed:
        raise AssertionError(_differs(tolerance, _verdict(outcomes, expected, tolerance, returns)))
    return report


def _differs(tolerance: float, verdict: str) -> str:
    return f"the layer differs from the reference (max|d|/max|reference|, `!` above {tolerance:g}):\n{verdict}"


def _verdict(outcomes: Sequence[Outcome], expected: Expected, tolerance: float, returns: Returns) -> str:
    report = measure(outcomes, expected, tolerance)
    lines = [f"HINT {hint}" for hint in hints(report, outcomes, expected, returns)]
    return "\n".join([str(report), *lines])


def _names(model: nn.Module, twin: nn.Module, rename: Mapping[str, str]) -> dict[str, str]:
    """Of each of the layer's parameters the reference's name. Raises ValueError where the two do not match."""
    ours, theirs = dict(model.named_parameters()), dict(twin.named_parameters())
    unknown = sorted(set(rename) - set(ours))
    if unknown:
        raise ValueError(f"rename names {', '.join(unknown)}, which the layer does not have. It has {', '.join(ours)}.")
    names = {name: rename.get(name, name) for name in ours}
    if sorted(names.values()) != sorted(theirs):
        raise ValueError(
            f"layer and reference must have the same parameters. Got {', '.join(ours) or 'none'} in the layer and "
            f"{', '.join(theirs) or 'none'} in the reference. Say which is which: rename={{layer's name: reference's}}."
        )
    for name, own in ours.items():
        if own.shape != theirs[names[name]].shape:
            raise ValueError(
                f"parameter {name} has shape {tuple(own.shape)} in the layer and {tuple(theirs[names[name]].shape)} in "
                "the reference. Give the reference the layer's shape (a matrix is stored as [out, in])."
            )
    return names


def _check_cubes(cubes: Sequence[CubeShape], inputs: Sequence[Input]) -> None:
    if not cubes:
        raise ValueError("cubes must name at least one shape, such as CubeShape(x=2, y=2, z=2). Got none.")
    for shape in cubes:
        if not isinstance(shape, CubeShape):
            raise ValueError(f"cubes are CubeShapes, such as CubeShape(x=2, y=2, z=2). Got {shape!r}.")
    rows = lcm(*(shape.planes * lcm(shape.y, shape.z) for shape in cubes))
    columns = lcm(*(lcm(shape.y, shape.z) for shape in cubes))
    for shape in cubes:
        check_inputs(inputs, shape, rows, columns)


def _check_returns(expected: Expected, returns: Returns) -> None:
    dims = expected.output.dim()
    fits = dims == 0 if returns == "scalar" else dims == 2 if returns in ("y", "z") else dims > 0
    if not fits:
        raise ValueError(
            f"the reference returns shape {tuple(expected.output.shape)}, which is nothing that lies as "
            f'returns={returns!r}. Use "scalar" for a loss, "y" or "z" for a matrix (rows, columns), "rows-y" or '
            '"rows-z" for values of rows.'
        )
