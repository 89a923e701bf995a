"""Where an activation comes from, as the autograd graph knows it: so a layer can refuse what lies on the wrong face.

Where y = z both faces have the same local shapes, and a matrix that is read on the wrong one gives wrong numbers and no
error. So every function of the library that makes an activation marks its node, and layers look for the marks before
theirs. What lies between (activation functions, residuals, dropout, attention) changes no face.

A function of one's own that changes the face, or makes an activation, sets the two marks itself, in its forward:
`ctx.result_face = "y"`, and `ctx.made` says in words what it is. One without marks is not looked behind.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn
from torch.autograd.function import BackwardCFunction
from torch.distributed.tensor import DTensor

from tensor3d.cube import Cube
from tensor3d.graph import walk

_KNOWN = "tensor3d.origin"  # key in the metadata of nodes that were looked at before


def check_origin(tensor: Tensor, face: str, cube: Cube, reader: str) -> None:
    """Raises ValueError where `tensor` is known not to lie on `face`.

    And where a plain parameter went into it on a cube of several ranks: its copies would drift apart. Without a graph
    (no gradients, an input) nothing is known and nothing refused.

    Args:
        reader: who reads it, in words.
    """
    between, maker = [], None
    for node in walk(tensor, _is_seen_through):
        if hasattr(node, "variable"):
            refuse_plain(node.variable, cube)
            continue
        found, made = _mark(node)
        if found is None:
            between.append(node)
            continue
        if found != face:
            raise ValueError(
                f"{reader} reads face {face}. Got what lies on face {found}: it comes from {made}. Let one of the two "
                f'use the other face (face="{found}"), or put `turn(h, cube, to="{face}")` between them.'
            )
        maker = made
    if maker is not None:
        for node in between:  # so that no later reader of a residual stream goes all the way back again
            node.metadata[_KNOWN] = (face, maker)


def refuse_plain(parameter: Tensor, cube: Cube) -> None:
    """Raises ValueError for a parameter that is a plain tensor on a cube of several ranks."""
    if cube.mesh is not None and isinstance(parameter, nn.Parameter) and not isinstance(parameter, DTensor):
        raise ValueError(
            f"a parameter of shape {tuple(parameter.shape)} is a plain tensor on {cube.shape}: its gradient would "
            "differ from rank to rank. Make it with tensor3d.constant, normal or distribute, and take it into your "
            "arithmetic with tensor3d.use, which states over which axes its gradient is summed."
        )


def _is_seen_through(node: Any) -> bool:
    """Functions written in Python may do anything; those of torch between two layers change no face."""
    return not isinstance(node, BackwardCFunction) and _KNOWN not in node.metadata


def _mark(node: Any) -> tuple[str | None, str]:
    """On which face its result lies, if that is known, and what made it."""
    if isinstance(node, BackwardCFunction):
        return getattr(node, "result_face", None), getattr(node, "made", "a function of its own")
    known: tuple[str | None, str] = node.metadata.get(_KNOWN, (None, ""))
    return known
