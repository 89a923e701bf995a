"""From how a tensor differs on several cubes: which mistake makes exactly that difference.

A sum too many or too few leaves a trace: a factor that is a product of axis sizes on every cube, or parts whose sum
over some axes is what was wanted. Several cubes of unequal sizes tell which axes.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import combinations
from math import isfinite, prod
from typing import Literal

import torch
from torch import Tensor

from tensor3d.distributed.cube_shape import AXES, AxisName, CubeShape
from tensor3d.sharding.activation_layout import Face, other
from tensor3d.testing.compare import Block, Expected, Returns, input_name
from tensor3d.testing.inputs import block as block_on
from tensor3d.testing.report import Outcome, Report, largest_difference, wanted_of

# --- A loss that no factor explains: whether it was divided by counts that differ from rank to rank -------------------
#
# M rows, H columns

_NEAR = 1e-4
_REMEDY = (
    "Divide by that of the whole step, which is the same on every rank; where labels are -100, all_reduce_replicated("
    '(mine != -100).sum(), cube.over("data", "x", "z")), with `mine` this rank\'s labels on face y.'
)


def divisor_hint(failing: Sequence[Outcome], expected: Expected) -> str:
    """What is to be said of a loss that is wrong on these cubes."""
    values = [rank["output"].values for outcome in failing for rank in outcome.ranks]
    if any(value is not None and not isfinite(float(value)) for value in values):
        return f"not finite. Does a rank that has none divide by its own count of rows? {_REMEDY}"
    whose = _divided_by(failing, expected)
    if whose in ("plane", "rank"):
        return (
            f"the loss was divided by the number of this {whose}'s rows that count, and the {whose}s have different "
            f"numbers: the gradient of each {whose}'s rows is the reference's times a factor of its own. {_REMEDY}"
        )
    return (
        "no factor of axis sizes and no missing sum explains it. First: is the divisor the count of the whole step "
        f"(labels != -100 counted over data, x and z)? {_REMEDY} Else: does it depend on the order of rows or the rank?"
    )


def _divided_by(failing: Sequence[Outcome], expected: Expected) -> str:
    """The largest group of ranks whose divisor is one number, as the gradients of inputs tell it."""
    for whose in ("cube", "plane", "rank"):
        if all(_has_divisors(whose, outcome, expected) for outcome in failing):
            return whose
    return "unknown"


def _has_divisors(whose: str, outcome: Outcome, expected: Expected) -> bool:
    """Whether inputs' gradients are the reference's times a factor of each group's rows (on face y)."""
    names = [name for name, wanted in expected.gradients.items() if name.startswith("input ") and wanted is not None]
    planes = outcome.shape.planes
    parts = {"cube": 1, "plane": planes, "rank": planes * outcome.shape.z}[whose]
    for name in names:
        wanted = expected.gradients[name]
        assert wanted is not None
        got = _assembled(outcome, name, wanted)
        if got is None or any(
            not _is_multiple(*pair) for pair in zip(got.chunk(parts), wanted.chunk(parts), strict=True)
        ):
            return False
    return bool(names)


def _assembled(outcome: Outcome, name: str, wanted: Tensor) -> Tensor | None:
    """(M, H) of the blocks of all ranks; None where one is missing."""
    got = torch.zeros_like(wanted)
    for rank in outcome.ranks:
        block = rank.get(name)
        if block is None or block.values is None:
            return None
        got[block.place] = block.values
    return got


def _is_multiple(got: Tensor, wanted: Tensor) -> bool:
    square = float(wanted.square().sum())
    factor = float((got * wanted).sum()) / square if square else 1.0
    return float((got - factor * wanted).abs().max()) <= _NEAR * float(got.abs().max())


# --- From what a layer raised on a cube, and how it did on those before: which mistake raises just there --------------


def crash_hint(traceback: str, shape: CubeShape, before: Sequence[Outcome], report: Report) -> str:
    """What is to be said of the traceback of a rank of `shape`; empty where it speaks for itself.

    Args:
        before: of the cubes that came through, one device among them; `report` has their errors.
    """
    if "got mixed torch.Tensor and DTensor" in traceback:
        return (
            "a parameter was used as it is. Take it into your arithmetic with tensor3d.local_param(parameter, "
            "layout, cube), which gives this rank's block and sums its gradient."
        )
    if "must match the size of tensor" in traceback and shape.y != shape.z and _fits_mixed_faces(before, report):
        return (
            "sizes that fit where y = z, and not here: a matrix on face y meets one on face z in elementwise "
            "arithmetic, or a vector of the other face. Turn one of the two first (tensor3d.redistribute), or cut the "
            "vector as the columns of the matrix are (tensor3d.sharding.param_layout.vector)."
        )
    return ""


def _fits_mixed_faces(before: Sequence[Outcome], report: Report) -> bool:
    """With y = z such a layer gives wrong numbers, with y != z none at all."""
    cubes = [outcome.shape for outcome in before if outcome.shape.y * outcome.shape.z > 1]
    return all(shape.y == shape.z and report.fails("output", str(shape)) for shape in cubes)


# --- From how a tensor differs on several cubes -----------------------------------------------------------------------


@dataclass(frozen=True)
class BugHypothesis:
    """A mistake that would explain what was found."""

    kind: Literal["too often", "divided", "not summed", "over others"]
    axes: tuple[AxisName, ...]
    """Of "over others" too: those over which the sum is missing."""
    instead: tuple[AxisName, ...] = ()
    """Of "over others": those over which it was summed, whose members have it whole."""

    @property
    def size(self) -> int:
        """How many axes it names."""
        return len(self.axes) + len(self.instead)

    def explains(self, outcome: Outcome, name: str, wanted: Tensor) -> bool:
        """Whether the tensor differs on this cube just so."""
        blocks = [rank[name] for rank in outcome.ranks if name in rank]
        if len(blocks) != len(outcome.ranks) or any(block.values is None for block in blocks):
            return False
        if self.kind in ("not summed", "over others"):
            factor = float(prod(outcome.shape.size(axis) for axis in self.instead))
            return _adds_up(blocks, self.axes, outcome.shape, wanted, factor)
        factor = float(prod(outcome.shape.size(axis) for axis in self.axes))
        factor = 1 / factor if self.kind == "divided" else factor
        return all(_are_near(block, wanted[block.place] * factor) for block in blocks)


def hints(report: Report, outcomes: Sequence[Outcome], expected: Expected, returns: Returns) -> list[str]:
    """Sentences that say what to do, most likely the cause first."""
    wrong = [name for name in dict.fromkeys(found.tensor for found in report.errors) if report.fails(name)]
    if returns == "scalar" and "output" in wrong and not report.fails("output", str(CubeShape())):
        wrong = [name for name in wrong if name == "output" or not _follows(name, outcomes, expected)]
    by_text: dict[str, list[str]] = {}
    for name in wrong:
        by_text.setdefault(_hint(name, report, outcomes, expected, returns), []).append(name)
    return [f"{', '.join(names)}: {text}" for text, names in by_text.items()]


def _follows(name: str, outcomes: Sequence[Outcome], expected: Expected) -> bool:
    """Whether a gradient is wrong as the loss is, so that there is nothing to be mended but the loss."""
    wanted = wanted_of(name, expected)
    if wanted is None or any(rank[name].values is None or rank[name].plain for one in outcomes for rank in one.ranks):
        return False
    causes = _causes("output", outcomes, expected)
    if not causes:
        return not _causes(name, outcomes, expected)
    return all(causes[0].explains(outcome, name, wanted) for outcome in outcomes)


def _hint(name: str, report: Report, outcomes: Sequence[Outcome], expected: Expected, returns: Returns) -> str:
    first = next(outcome for outcome in outcomes if report.fails(name, str(outcome.shape)))
    blocks, wanted = [rank[name] for rank in first.ranks if name in rank], wanted_of(name, expected)
    if any(block.plain for block in blocks):
        return (
            "a plain tensor on a cube of several ranks; its gradient is this rank's own. Make it with "
            "tensor3d.constant, normal or distribute, and read it with tensor3d.local_param."
        )
    if wanted is None:
        return (
            "a gradient arrived where the reference has none. Does the layer use something that the reference does not?"
        )
    if any(block.values is None for block in blocks):
        return (
            "no gradient arrived. A parameter must be read with tensor3d.local_param or passed to a layer (its local "
            "block, `.data` or `.detach()` are no part of the graph); a function of your own must return the gradient "
            "of its input and hand that of its parameter to the gradient reducer."
        )
    if first.shape.ranks == 1:
        return "wrong on one device already, so no sum over ranks is to blame: compare the arithmetic of the two."
    if name == "output" and (text := _misplaced(first, blocks, wanted, returns)):
        return text
    if causes := _causes(name, outcomes, expected):
        return _advice(causes, name, report, returns)
    if name == "output" and returns == "scalar":
        return divisor_hint([outcome for outcome in outcomes if report.fails(name, str(outcome.shape))], expected)
    return _suspicion(name, report, outcomes)


def _causes(name: str, outcomes: Sequence[Outcome], expected: Expected) -> list[BugHypothesis]:
    """The simplest guesses that explain a tensor on all cubes: of one kind, and over as many axes."""
    wanted = wanted_of(name, expected)
    found: list[BugHypothesis] = []
    if wanted is None:
        return found
    for guess in _guesses():
        if found and guess.size > found[0].size:
            break
        if (not found or guess.kind == found[0].kind) and all(
            guess.explains(outcome, name, wanted) for outcome in outcomes
        ):
            found.append(guess)
    return found


def _guesses() -> Iterator[BugHypothesis]:
    """The simplest first."""
    for number in range(1, len(AXES) + 1):
        for axes in combinations(AXES, number):
            yield BugHypothesis("too often", axes)
            yield BugHypothesis("not summed", axes)
            yield BugHypothesis("divided", axes)
        # Behind those of one sort: two mistakes at once are less likely than one.
        for missing in range(1, number):
            for axes in combinations(AXES, missing):
                others = [axis for axis in AXES if axis not in axes]
                for instead in combinations(others, number - missing):
                    yield BugHypothesis("over others", axes, instead)


def _are_near(block: Block, target: Tensor) -> bool:
    assert block.values is not None
    if block.values.shape != target.shape:
        return False
    return largest_difference(block.values, target) <= _NEAR * float(target.abs().max() if target.numel() else 1.0)


def _adds_up(
    blocks: Sequence[Block], axes: tuple[AxisName, ...], shape: CubeShape, wanted: Tensor, factor: float
) -> bool:
    """Whether the members' parts add up to `wanted` times the factor."""
    for rank, block in enumerate(blocks):
        members = [blocks[member] for member in shape.members(axes, rank)]
        if any(member.place != block.place for member in members):
            return False
        parts = [member.values for member in members if member.values is not None]
        target = wanted[block.place] * factor
        if any(part.shape != target.shape for part in parts):
            return False
        if largest_difference(torch.stack(parts).sum(0), target) > _NEAR * factor * float(wanted.abs().max()):
            return False
    return True


def _misplaced(outcome: Outcome, blocks: Sequence[Block], wanted: Tensor, returns: Returns) -> str:
    """What is to be said where the output is another part of the right matrix, or none of its parts."""
    values = [block.values for block in blocks if block.values is not None]
    if returns in ("y", "z"):
        elsewhere: Face = other("y" if returns == "y" else "z")
        targets = [wanted[block_on(wanted.shape, elsewhere, outcome.shape, rank)] for rank in range(len(values))]
        if all(
            value.shape == target.shape and largest_difference(value, target) <= _NEAR * float(wanted.abs().max())
            for value, target in zip(values, targets, strict=True)
        ):
            return (
                f'it lies on face {elsewhere}. If that is meant, say check_layer(..., returns="{elsewhere}"); if not, '
                f'let the last product read the other face, or end with `redistribute(h, cube, to="{returns}")`.'
            )
    for block, value in zip(blocks, values, strict=True):
        if value.shape != wanted[block.place].shape:
            return (
                f"the local shape is {tuple(value.shape)}. Of {tuple(wanted.shape)}, which the reference returns, a "
                f"rank of {outcome.shape} holds {tuple(wanted[block.place].shape)} as returns={returns!r} says. Is "
                "that how the output lies (a face, its rows alone, a scalar)?"
            )
    return ""


def _advice(causes: Sequence[BugHypothesis], name: str, report: Report, returns: Returns) -> str:
    """What to do about causes of one kind, which the cubes that ran do not tell apart."""
    if name == "output" and returns == "scalar" and causes[0].kind == "too often":
        return _loss_advice(causes, report)
    if causes[0].kind == "over others":
        return _over_others_advice(causes, name)
    axes, sizes = _either([_listed(guess.axes) for guess in causes]), _either(["*".join(c.axes) for c in causes])
    if causes[0].kind == "not summed":
        over = _either([f"cube.over({_quoted(guess.axes)})" for guess in causes])
        return f"its sum over {axes} is missing: the parts of these ranks add up to the reference. " + (
            f"Sum them with all_reduce_replicated(part, {over})."
            if name == "output"
            else f"Read the parameter with tensor3d.local_param, and name {axes} in the `sum_over` of its layout."
            if not _is_input(name)
            else f"Its backward must add up what the members of {axes} got from their own part."
        )
    if causes[0].kind == "divided":
        return (
            f"the reference divided by {sizes}. Is a mean taken over {axes} where a sum is meant, or is the result "
            "divided by the number of ranks?"
        )
    if name == "output" or _is_input(name):
        return (
            f"{sizes} times the reference: it was summed over {axes} too often. What every member already holds whole "
            "must not be summed again; in backward that is the gradient of a result that all of them use alike "
            "(all_reduce_replicated leaves it as it is)."
        )
    return (
        f"{sizes} times the reference: it was summed over {axes} too often. Leave {axes} out of the `sum_over` of the "
        "parameter's layout: its members have equal gradients already, or the function has summed them itself. If "
        "the output and the inputs are wrong too, look there first."
    )


def _over_others_advice(causes: Sequence[BugHypothesis], name: str) -> str:
    """A sum over other axes than it should be; those of the other face, if that explains it: layouts differ so."""
    swaps = [guess for guess in causes if set(guess.axes + guess.instead) == {"y", "z"}]
    causes = swaps or causes
    missing = _either([_listed(guess.axes) for guess in causes])
    instead = _either([_listed(guess.instead) for guess in causes])
    swap = _either([f"{_listed(guess.axes)} in place of {_listed(guess.instead)}" for guess in causes])
    found = (
        f"summed over {instead}, whose members have the same, and not over {missing}, whose members have parts of it"
    )
    face = swaps[0].instead[0] if len(swaps) == 1 else None
    if _is_input(name):
        return f"it was {found}. Its backward must add up what the members of {missing} got from their own part."
    if name == "output":
        rows = "" if face is None else f': rows of face {face} are added over cube.over("data", "x", "{missing}")'
        return f"it was {found}. Pass {swap} to all_reduce_replicated{rows}."
    fits = (
        f': copies("{face}"), over data, x and {missing}, is for what meets rows on face {face}; '
        f'copies("{missing}"), over data, x and {face}, for what meets those on face {missing}'
        if face is not None
        else ""
    )
    return f"the `sum_over` of its layout does not fit. Its gradient was {found}. Name {swap}{fits}."


def _loss_advice(causes: Sequence[BugHypothesis], report: Report) -> str:
    """A loss that is too large: added too often, or its parts were."""
    if not any(report.fails(found.tensor) for found in report.errors if found.tensor != "output"):
        sizes, axes = _either(["*".join(c.axes) for c in causes]), _either([_listed(guess.axes) for guess in causes])
        return (
            f"{sizes} times the reference, and the gradients are right: it was added over axes whose members have the "
            f"same losses. Leave {axes} out of what is passed to all_reduce_replicated."
        )
    rows = {"data", "x", "y"}, {"data", "x", "z"}
    likely = [guess for guess in causes if any(set(guess.axes) <= axes for axes in rows)] or causes
    return (
        f"{_either(['*'.join(guess.axes) for guess in likely])} times the reference: the loss was divided by the "
        "number of this rank's rows. Divide by the number of the whole step, which is the same on every rank: "
        "all_reduce_replicated(losses.sum() / count, ...)."
    )


def _suspicion(name: str, report: Report, outcomes: Sequence[Outcome]) -> str:
    """From which cubes it is wrong on; every axis that they allow is named."""
    shapes = [outcome.shape for outcome in outcomes if outcome.shape.ranks > 1]
    failing = [shape for shape in shapes if report.fails(name, str(shape))]
    fits = [axis for axis in AXES if failing == [shape for shape in shapes if shape.size(axis) > 1]]
    if failing == shapes:
        where, members = f"wrong on every cube that ran ({', '.join(map(str, shapes))})", "ranks"
        where += f", all with {_listed(fits)} > 1, which tells no axis apart" if fits else ""
        group, reach = "other ranks", "cube.axis(...)"
    elif fits:
        where, members = f"wrong exactly on the cubes with {_either(fits)} > 1", f"members of {_either(fits)}"
        group, reach = f"all {members}", _either([f"cube.axis({axis!r})" for axis in fits])
    else:
        return (
            "no factor of axis sizes and no missing sum explains it. Does it depend on the order of rows or on the "
            "rank?"
        )
    if name != "output" and not report.fails("output"):
        over = "their axis" if failing == shapes else _either(fits)
        return (
            f"{where}, and the output is right: backward leaves out what the other {members} contribute. A value that "
            "is equal on all of them, and that each uses in its own way (for its own columns), needs its gradient "
            f"added over {over}: tensor3d.sum_gradient(value, axis) does that, and all_reduce_replicated does not."
        )
    return (
        f"{where}. Is something that needs {group} (a mean over columns, a row of another rank) computed from this "
        f"rank's part alone? {reach} and tensor3d.distributed.collectives reach the others."
    )


def _is_input(name: str) -> bool:
    return name.startswith(input_name(0)[:-1])


def _listed(axes: Sequence[str]) -> str:
    return axes[0] if len(axes) == 1 else f"{', '.join(axes[:-1])} and {axes[-1]}"


def _quoted(axes: Sequence[str]) -> str:
    return ", ".join(f'"{axis}"' for axis in axes)


def _either(texts: Sequence[str]) -> str:
    texts = list(dict.fromkeys(texts))
    return texts[0] if len(texts) == 1 else f"{', '.join(texts[:-1])} or {texts[-1]}"
