"""What `bench matmul` and `bench layer` run: a product and a transformer layer of given sizes, the same on any cube.

M tokens of the whole job, K input and N output features, H hidden size, I inner size
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from tensor3d import Cube, CubeShape, Sequences, TransformerLayer3D, matmul, normal, shard
from tensor3d.faces import Face, other
from tensor3d.layers.attention import Recompute
from tensor3d.layout import local, matrix
from tensor3d.planning.traffic import Bytes, Wire, product, replicated_gradients, transformer_layer
from tensor3d.seeds import mix

_SEED = 1


@dataclass(frozen=True, kw_only=True)
class Subject:
    """Something that runs forward and backward on a cube, as one rank has it."""

    forward: Callable[[Tensor], Tensor]
    inputs: Tensor
    """This rank's shard; a leaf that wants its gradient."""
    arriving: Tensor
    """Gradient of the result's shard."""
    parameters: tuple[nn.Parameter, ...]
    closed_form: Callable[[Wire], Bytes]
    """What a forward and backward pass sends."""


@dataclass(frozen=True, kw_only=True)
class Product:
    """One `tensor3d.matmul`: (M, K) times (N, K) transposed."""

    rows: int
    """M"""
    k: int
    n: int
    face: Face = "z"
    keep_gathered: bool = False

    @property
    def flops(self) -> int:
        """Of the three products of a pass."""
        return 6 * self.rows * self.k * self.n

    def check(self, shape: CubeShape) -> None:
        """Raises ValueError for sizes that do not divide on a cube, named with what they must divide by."""
        columns, rows = shape.size(self.face), shape.size(other(self.face))
        _check_divides(shape, "--rows", self.rows, shape.planes * math.lcm(shape.y, shape.z))
        _check_divides(shape, "--inputs", self.k, columns)
        _check_divides(shape, "--outputs", self.n, rows)

    def __call__(self, cube: Cube) -> Subject:
        cube.manual_seed(_SEED)
        face, kept = self.face, self.keep_gathered
        weight = normal((self.n, self.k), matrix(face), cube, self.k**-0.5)

        def closed_form(wire: Wire) -> Bytes:
            sent = product(wire, self.rows // cube.shape.planes, self.k, self.n, face, kept=kept)
            return sent + replicated_gradients(wire, 0, 0, local(weight).numel())

        return Subject(
            forward=lambda a: matmul(a, weight, cube, face, reshard_after_forward=not kept),
            inputs=_random(self.rows, self.k, cube, face, 1).requires_grad_(),
            arriving=_random(self.rows, self.n, cube, other(face), 2),
            parameters=(weight,),
            closed_form=closed_form,
        )


@dataclass(frozen=True, kw_only=True)
class Layer:
    """One `TransformerLayer3D`, post-norm and without dropout, on whole sequences of one length."""

    hidden: int
    heads: int
    inner: int
    sequences: int
    """Of the whole job."""
    length: int
    recompute: Recompute = "none"
    keep_gathered: bool = False

    @property
    def rows(self) -> int:
        return self.sequences * self.length

    @property
    def flops(self) -> int:
        """Of the products and of attention in a pass, backward twice forward; recomputation is not counted."""
        weights = 4 * self.hidden**2 + 2 * self.hidden * self.inner
        return 3 * (2 * self.rows * weights + 4 * self.rows * self.length * self.hidden)

    def check(self, shape: CubeShape) -> None:
        """Raises ValueError for sizes that do not divide on a cube, named with what they must divide by."""
        _check_divides(shape, "--hidden", self.hidden, math.lcm(shape.y, shape.z))
        _check_divides(shape, "--heads", self.heads, shape.y)
        _check_divides(shape, "--hidden", self.hidden, self.heads)
        _check_divides(shape, "--inner", self.inner, shape.y)
        _check_divides(shape, "--sequences", self.sequences, shape.planes * shape.z)
        _check_divides(shape, "--sequences times --length", self.rows, shape.planes * math.lcm(shape.y, shape.z))

    def __call__(self, cube: Cube) -> Subject:
        cube.manual_seed(_SEED)
        layer = TransformerLayer3D(
            self.hidden,
            self.heads,
            cube,
            self.inner,
            recompute=self.recompute,
            reshard_after_forward=not self.keep_gathered,
        )
        mine = self.sequences // (cube.shape.planes * cube.shape.z)
        sequences = Sequences.from_lengths([self.length] * mine, cube.device)
        parameters = tuple(layer.parameters())

        def closed_form(wire: Wire) -> Bytes:
            plane = self.rows // cube.shape.planes
            recomputed = self.recompute == "layer"
            sent = transformer_layer(
                wire, plane, self.hidden, self.inner, kept=self.keep_gathered, recomputed=recomputed
            )
            on_y = (3 * self.hidden + self.inner) // cube.shape.y  # biases of QKV and up
            on_z = 6 * self.hidden // cube.shape.z  # biases of the other two, gains and biases of both norms
            matrices = sum(local(weight).numel() for weight in parameters if weight.dim() > 1)
            return sent + replicated_gradients(wire, on_y, on_z, matrices)

        return Subject(
            forward=lambda x: layer(x, sequences),
            inputs=_random(self.rows, self.hidden, cube, "z", 1).requires_grad_(),
            arriving=_random(self.rows, self.hidden, cube, "z", 2),
            parameters=parameters,
            closed_form=closed_form,
        )


def _random(rows: int, columns: int, cube: Cube, face: Face, number: int) -> Tensor:
    """This rank's shard of a matrix that is the same on every cube, in the type in which the cube computes."""
    full = torch.randn(rows, columns, generator=torch.Generator().manual_seed(mix(_SEED, number)))
    own = shard(full, cube, face).clone()  # where nothing is cut, a view
    return own.to(cube.device, cube.precision.computed(own.dtype))


def _check_divides(shape: CubeShape, option: str, value: int, by: int) -> None:
    if value < 1 or value % by:
        raise ValueError(f"cube {shape}: {option} must be a multiple of {by}. Got {value}.")
