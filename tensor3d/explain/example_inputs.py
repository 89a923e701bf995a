"""Input for a layer on its own, made from what the layer says of itself.

M tokens of the cube, R = M / (data * x) rows of a plane
"""

from __future__ import annotations

import inspect
from typing import Any

import torch
from torch import nn

from tensor3d.batches.sequences import Sequences
from tensor3d.distributed.cube import Cube
from tensor3d.layers.embedding import Embedding3D, LookupEmbedding3D
from tensor3d.layers.heads import SmallHead3D
from tensor3d.layers.linear import Linear3D, Projection3D
from tensor3d.layers.norm import LayerNorm3D, RMSNorm3D
from tensor3d.sharding.activation_layout import Face, other

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
    dtype = cube.precision.computed(next(module.parameters()).dtype)
    return torch.zeros(height, width, dtype=dtype, device=cube.device, requires_grad=True)


def _sequences(rows: int, cube: Cube) -> Sequences:
    """All rows of a rank on face y in sequences of `_SEQUENCE`, the last one shorter."""
    whole, rest = divmod(rows, _SEQUENCE)
    return Sequences.from_lengths([_SEQUENCE] * whole + ([rest] if rest else []), cube.device)
