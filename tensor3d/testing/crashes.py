"""From what a layer raised on a cube, and how it did on those before: which mistake raises just there."""

from __future__ import annotations

from collections.abc import Sequence

from tensor3d.shape import CubeShape
from tensor3d.testing.report import Outcome, Report


def crash_hint(traceback: str, shape: CubeShape, before: Sequence[Outcome], report: Report) -> str:
    """What is to be said of the traceback of a rank of `shape`; empty where it speaks for itself.

    Args:
        before: of the cubes that came through, one device among them; `report` has their errors.
    """
    if "got mixed torch.Tensor and DTensor" in traceback:
        return (
            "a parameter was used as it is. Take it into your arithmetic with tensor3d.use(parameter, layout, cube), "
            "which gives this rank's block and sums its gradient."
        )
    if "must match the size of tensor" in traceback and shape.y != shape.z and _fits_mixed_faces(before, report):
        return (
            "sizes that fit where y = z, and not here: a matrix on face y meets one on face z in elementwise "
            "arithmetic, or a vector of the other face. Turn one of the two first (tensor3d.turn), or cut the vector "
            "as the columns of the matrix are (tensor3d.layout.vector)."
        )
    return ""


def _fits_mixed_faces(before: Sequence[Outcome], report: Report) -> bool:
    """With y = z such a layer gives wrong numbers, with y != z none at all."""
    cubes = [outcome.shape for outcome in before if outcome.shape.y * outcome.shape.z > 1]
    return all(shape.y == shape.z and report.fails("output", str(shape)) for shape in cubes)
