"""The cube as a small SVG: what a rank receives along each axis stands on its edge; axes of size 1 are grey."""

from __future__ import annotations

from collections.abc import Mapping

from markupsafe import Markup

from tensor3d import CubeShape
from tensor3d.distributed.cube_shape import AXES
from tools.common.units import in_bytes

# Where the edges of the drawn box run, in SVG's units; y goes down. Nearest corner, then the step along each axis.
_CORNER = (120.0, 190.0)
_ALONG = {"x": (130.0, 0.0), "y": (0.0, -120.0), "z": (62.0, -46.0)}
_LABEL = {"x": (185.0, 212.0, "middle"), "y": (110.0, 134.0, "end"), "z": (293.0, 178.0, "start")}
_MOST_CELLS = 8  # beyond, lines of the grid would touch one another


def cube_picture(shape: CubeShape, received: Mapping[str, float]) -> Markup:
    """
    Args:
        received: bytes of a step along one axis alone, by its name.
    """
    faces = (("x", "y", None), ("x", "z", "y"), ("y", "z", "x"))
    drawn = [line for first, second, on in faces for line in _face(shape, first, second, on)]
    for axis, (x, y, anchor) in _LABEL.items():
        drawn.append(_label(shape, axis, received.get(axis), x, y, anchor))
    drawn.append(_label(shape, "data", received.get("data"), 185.0, 14.0, "middle"))
    words = ", ".join(f"{axis} {shape.size(axis)}: {_bytes(received.get(axis))}" for axis in AXES)
    text = Markup('<svg class="cube" viewBox="0 0 400 240" role="img" aria-label="{}">{}</svg>')
    return text.format(f"{shape}; received along {words}", Markup("").join(drawn))


def _face(shape: CubeShape, first: str, second: str, on: str | None) -> list[Markup]:
    """The lines of one face, that lies at the far end of axis `on`, or at the near corner."""
    origin = _CORNER if on is None else _moved(_CORNER, on, 1.0)
    lines = []
    for axis, other in ((first, second), (second, first)):
        cells = min(shape.size(other), _MOST_CELLS)  # type: ignore[arg-type]
        for cell in range(cells + 1):
            start = _moved(origin, other, cell / cells)
            end = _moved(start, axis, 1.0)
            edge = "edge" if cell in (0, cells) else "cell"
            off = " off" if shape.size(axis) == 1 else ""  # type: ignore[arg-type]
            lines.append(
                Markup('<line class="{}{}" x1="{:g}" y1="{:g}" x2="{:g}" y2="{:g}"/>').format(edge, off, *start, *end)
            )
    return lines


def _moved(place: tuple[float, float], axis: str, share: float) -> tuple[float, float]:
    return place[0] + share * _ALONG[axis][0], place[1] + share * _ALONG[axis][1]


def _label(shape: CubeShape, axis: str, count: float | None, x: float, y: float, anchor: str) -> Markup:
    size = shape.size(axis)  # type: ignore[arg-type]
    text = Markup(
        '<text class="{}" x="{:g}" y="{:g}" text-anchor="{}"><tspan class="axis">{} = {}</tspan>'
        '<tspan x="{:g}" dy="15">{}</tspan></text>'
    )
    return text.format("off" if size == 1 else "", x, y, anchor, axis, size, x, "" if size == 1 else _bytes(count))


def _bytes(count: float | None) -> str:
    return "nothing alone" if not count else in_bytes(count)
