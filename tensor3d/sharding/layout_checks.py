"""Where an activation comes from, as the autograd graph knows it: so a layer can refuse what lies on the wrong face.

Where y = z both faces have the same local shapes, and a matrix that is read on the wrong one gives wrong numbers and no
error. So every function of the library that makes an activation marks its node, and layers look for the marks before
theirs. What lies between (activation functions, residuals, dropout, attention) changes no face.

A function of one's own that changes the face, or makes an activation, sets marks itself, in its forward:
`ctx.result_face = "y"`, and `ctx.made` says in words what it is; or, where its result lies where its inputs do,
`ctx.keeps_face = True`. One without marks is not looked behind, and neither is what `torch.compile` has made of code
between two layers. Results after the first, or after as many as `ctx.results` says, lie on `ctx.read_face`, if that is
set.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import BackwardCFunction
from torch.distributed.tensor import DTensor

from tensor3d.distributed.autograd_graph import walk
from tensor3d.distributed.cube import Cube
from tensor3d.torch_private import is_compiled_code

_KNOWN = "tensor3d.sharding.layout_checks"  # key in the metadata of nodes that were looked at before


def check_matrix(tensor: Tensor, reader: str) -> None:
    """Raises ValueError unless `tensor` can be an activation: a matrix of floating-point numbers.

    Args:
        reader: who reads it, in words.
    """
    if tensor.dim() != 2:
        single = " One row is `row.unsqueeze(0)`, on one device." if tensor.dim() == 1 else ""
        raise ValueError(
            f"{reader} needs a matrix (rows, columns), this rank's block of the tokens by features, or one in a batch "
            f"of one, (1, rows, columns). Got {tensor.dim()} dims, shape {tuple(tensor.shape)}.{single} Put a padded "
            "batch into packs (tensor3d.pack_padded), and all dims but the last together (tensor.flatten(0, -2))."
        )
    check_floating_point(tensor, reader)


def check_floating_point(tensor: Tensor, reader: str) -> None:
    """Raises ValueError unless `tensor` holds floating-point numbers."""
    if not tensor.is_floating_point():
        raise ValueError(
            f"{reader} needs floating-point numbers. Got {tensor.dtype}, shape {tuple(tensor.shape)}. Ids become "
            "features by Embedding3D or LookupEmbedding3D; numbers that are features themselves by "
            f"tensor.to({torch.get_default_dtype()})."
        )


def check_origin(tensor: Tensor, face: str, cube: Cube, reader: str) -> None:
    """Raises ValueError where `tensor` is known not to lie on `face`.

    And where a plain parameter went into it on a cube of several ranks: its copies would drift apart. Without a graph
    (no gradients, an input) nothing is known and nothing refused.

    Args:
        reader: who reads it, in words.
    """
    maker: Any = tensor.grad_fn
    if maker is None:
        return
    mark = _mark(maker, tensor.output_nr)
    if mark is not None and mark[0] == face:
        return  # by far most often
    if mark is None:  # most often the sum of a residual, or an activation
        marks = [_mark(node, number) for node, number in maker.next_functions if node is not None]
        if marks and all(each is not None and each[0] == face for each in marks):
            maker.metadata[_KNOWN] = marks[0]
            return
    between: dict[Any, None] = {}  # what is seen through, nearest first
    makers: dict[Any, str] = {}
    for node, number in walk(tensor, between.__contains__):
        if not isinstance(node, BackwardCFunction) and hasattr(node, "variable"):
            _refuse_leaf(node, cube)
            continue
        if is_compiled_code(node):  # in which nobody sees what becomes of what; these go into it all the same
            for leaf, _ in node.next_functions:
                if hasattr(leaf, "variable"):
                    _refuse_leaf(leaf, cube)
        mark = _mark(node, number)
        if mark is None:
            between[node] = None
            continue
        found, made = mark
        if found == face:
            makers[node] = made
        elif found is not None:
            raise ValueError(
                f"{reader} reads face {face}. Got what lies on face {found}: it comes from {made}. Put "
                f'`redistribute(h, cube, to="{face}")` between them, or, where one of the two can, let it use the '
                f'other face (face="{found}").'
            )
    _remember(between, makers, face)


def _refuse_leaf(node: Any, cube: Cube) -> None:
    if isinstance(node.variable, nn.Parameter):
        refuse_plain(node.variable, cube)


def refuse_plain(parameter: Tensor, cube: Cube) -> None:
    """Raises ValueError for a parameter that is a plain tensor on a cube of several ranks."""
    if cube.shape.ranks > 1 and not isinstance(parameter, DTensor):
        raise ValueError(
            f"a parameter of shape {tuple(parameter.shape)} is a plain tensor on {cube.shape}: its gradient would "
            "differ from rank to rank. Make it with tensor3d.constant, normal or distribute, and take it into your "
            "arithmetic with tensor3d.local_param, which states over which axes its gradient is summed; in place of a "
            "layer of torch.nn take its 3-D counterpart."
        )


def _remember(between: Iterable[Any], makers: dict[Any, str], face: str) -> None:
    """Writes down what the nodes of a walk lie on, so that no later reader of a residual stream goes back as far.

    Those that lead to a maker lie on its face. The others (conditions, gates, inputs) may be used on both.
    """
    readers: dict[Any, list[Any]] = {}
    for node in between:
        for before, _ in node.next_functions:
            readers.setdefault(before, []).append(node)
    waiting, known = list(makers.items()), set()
    while waiting:
        node, made = waiting.pop()
        for reader in readers.get(node, ()):
            if reader not in known:
                known.add(reader)
                reader.metadata[_KNOWN] = (face, made)
                waiting.append((reader, made))
    for node in between:
        if node not in known:
            node.metadata[_KNOWN] = (None, "")


def mark_alike(result: Tensor, source: Tensor) -> None:
    """Writes down that `result`, which was made of `source`, lies where that does: whoever knows so spares the next
    layer to look through what is between them."""
    maker: Any = result.grad_fn
    if maker is None or source.grad_fn is None or not keeps_face(maker):
        return
    mark = _mark(source.grad_fn, source.output_nr)
    if mark is not None:
        maker.metadata[_KNOWN] = mark


def keeps_face(node: Any) -> bool:
    """Whether the node's result is known to lie on the face of its inputs: functions written in Python may do anything;
    those of torch between two layers change no face."""
    return not isinstance(node, BackwardCFunction) or getattr(node, "keeps_face", False)


def marked_face(node: Any, number: int) -> str | None:
    """The face that a node tells of its result of that number."""
    face: str | None = getattr(node, "result_face", None)
    return face if number < getattr(node, "results", 1) else getattr(node, "read_face", face)


def _mark(node: Any, number: int) -> tuple[str | None, str] | None:
    """On which face that result of it lies, if that is known, and what made it; None: where its inputs do."""
    if keeps_face(node):
        known: tuple[str | None, str] | None = node.metadata.get(_KNOWN)
        return known
    return marked_face(node, number), getattr(node, "made", "a function of its own")
