"""The matrix product on the cube: the heart of the project (Bian et al. 2021, §3.1, for any box).

M tokens of the cube, K input features, N output features; here for face z, face y swaps y and z
"""

from __future__ import annotations

from functools import cache
from typing import Any, Literal

import torch
from torch import Tensor, nn

from tensor3d.distributed.autograd_graph import asked_for
from tensor3d.distributed.collectives import CommHandle, all_gather, reduce_scatter
from tensor3d.distributed.cube import Cube
from tensor3d.distributed.cube_shape import chunk_bounds
from tensor3d.distributed.fp8_scales import GRADIENT, INPUT, KINDS, WEIGHT
from tensor3d.distributed.weight_prefetch import PassPosition
from tensor3d.ops.as_type import as_type
from tensor3d.ops.autograd_function import Function, once_differentiable, out_of_graphs
from tensor3d.ops.fp8 import GRADIENTS, Current, Rounded, Scaling, fp8_product, product_of_rounded, rounded, suits_fp8
from tensor3d.ops.products import added_product, product, wide_product
from tensor3d.ops.row_chunks import sum_of_rows
from tensor3d.sharding.activation_layout import Face, other
from tensor3d.sharding.fused_products import fused_product, fused_with_product
from tensor3d.sharding.layout_checks import check_matrix, check_origin
from tensor3d.sharding.param_layout import check_layout, local, matrix, vector
from tensor3d.sharding.weight_slabs import (
    block_or_shadow,
    converted_pair,
    pass_gathered_weight,
    position_in_pass,
    prefetch_next_weight,
    type_of_sum,
    weight_source,
)
from tensor3d.torch_private import backward_pass, free_storage, has_storage

# --- Which gathered operands stay for backward ------------------------------------------------------------------------

Reshard = bool | Literal["input", "weight"]
"""Which gathered operands of a product are dropped after forward and gathered again in backward: both, none, or the one
that is named; the others are kept."""


def check_reshard(reshard: Reshard) -> None:
    """Raises ValueError for what is no `Reshard`."""
    if not (isinstance(reshard, bool) or reshard in ("input", "weight")):
        raise ValueError(
            'reshard_after_forward must be True or False, or "input" or "weight", to gather that operand alone again. '
            f"Got {reshard!r}."
        )


# --- What a product reads, and others after it ------------------------------------------------------------------------


class HandedOn:
    """Inside, the first product that reads a tensor itself hands it on, to a residual:

        with HandedOn(x, cube) as residual:
            y = mlp(x)
        x = residual.tensor + y

    Then autograd need not add the two gradients of x: the product's backward pass does, where it multiplies. Where no
    product reads it, nothing changes.
    """

    def __init__(self, tensor: Tensor, cube: Cube) -> None:
        self.tensor = tensor
        """For what reads it after the product."""
        self._cube = cube

    def __enter__(self) -> HandedOn:
        self._cube.handed_on.append(self)
        return self

    def __exit__(self, *_: object) -> None:
        self._cube.handed_on.remove(self)


def _wanted_by(a: Tensor, cube: Cube) -> HandedOn | None:
    for each in reversed(cube.handed_on):
        if each.tensor is a:
            return each if a.requires_grad and torch.is_grad_enabled() else None
    return None


# --- The product ------------------------------------------------------------------------------------------------------


@out_of_graphs
def matmul(
    a: Tensor,
    weight: nn.Parameter,
    cube: Cube,
    face: Face,
    bias: nn.Parameter | None = None,
    *,
    reshard_after_forward: Reshard = True,
    fp8: bool = True,
) -> Tensor:
    """`a @ weight.T + bias` of a matrix that lies on `face`; the result lies on the other face.

    Global: A (M, K), W (N, K), C (M, N). Local, for face z:

        a     A    (M/xy, K/z)          weight  W  (N/yx, K/z), layout matrix("z")
        forward    A' = all-gather A over y        W' = all-gather W over x
                   C  = reduce-scatter over z of A' W'^T                      -> (M/xz, N/y)
        backward   dC' = all-gather dC over z      A', W' as in the forward
                   dA = reduce-scatter over y of dC' W'
                   dW = reduce-scatter over x of dC'^T A'                     -> to the ledger

    Elements received, ring model: forward `(y-1)/y*MK/xz + (x-1)/x*NK/yz + (z-1)/z*MN/xy`; backward the same three,
    and `(y-1)/y*MK/xz` for dA and `(x-1)/x*NK/yz` for dW.

    Saved for backward: the shards `a` and `weight`, never A' and W' (1/P of one device's). All gathers of a pass are
    issued together, that of the next product's W' under this product (distributed/weight_prefetch.py); the
    reduce-scatter of dA runs under the product for dW, that of dW under the next layer's.
    `ExecutionPolicy(overlap=False)` waits for each; the bits are the same. `ExecutionPolicy(symmetric_memory=True)` has
    the larger of the collectives over y and z in one operator with the product (sharding/fused_products.py).

    Args:
        a: (M/xy, K/z) on this rank; its type (`cube.precision.compute`, if that is set; inside `torch.autocast`:
            autocast's) is that of the product and of what travels. The gradient of the weight travels in
            `cube.precision.reduce`.
        weight: layout `matrix(face)`. N need not divide by y or x: blocks are DTensor's chunks. A tied weight may be
            used any number of times.
        bias: layout `vector(other(face))`.
        reshard_after_forward: False keeps A' and W' for backward: two gathers less, more memory. "input" keeps W'
            alone, "weight" A' alone.
        fp8: False leaves it in the type of `a`, whatever `cube.precision.fp8` says. Else, where that is set and the
            sides of W' divide by 16, A' W'^T and dC' W' are products in FP8, and dC'^T A' is, too, unless
            it is "rowwise" (ops/fp8.py); their results are of the type of `a` again, so what travels and what is saved
            is the same.

    Raises:
        ValueError: `a` is no matrix of floating-point numbers, or one of other columns; `weight` or `bias` lies on the
            cube in another way, or is not a leaf of the graph; an unknown `reshard_after_forward`.
    """
    check_reshard(reshard_after_forward)
    check_matrix(a, "matmul")
    check_layout(weight, matrix(face), cube)
    shape, columns = weight.shape, cube.axis(face)
    first, last = chunk_bounds(shape[1], columns.size, columns.index)
    if a.shape[1] != last - first:
        raise ValueError(
            f"the {_named(shape)} reads face {face}, where this rank has "
            f"{last - first} columns. Got shape {tuple(a.shape)}. Is it on face {other(face)}? `redistribute` changes "
            "the face."
        )
    if bias is not None:
        check_layout(bias, vector(other(face)), cube)
    check_origin(a, face, cube, f"the {_named(shape)}")
    a = as_type(a, cube.precision.computed(a.dtype))
    if a.dtype != torch.float64 and torch.is_autocast_enabled(a.device.type):  # which leaves float64 alone
        a = a.to(torch.get_autocast_dtype(a.device.type))
    wanted = _wanted_by(a, cube)
    if cube.shape.is_undivided and cube.precision.fp8 is None:
        if wanted is None:
            return _UndividedProduct.apply(a, weight, bias, cube, face, reshard_after_forward, False)
        c, wanted.tensor = _UndividedProduct.apply(a, weight, bias, cube, face, reshard_after_forward, True)
        return c
    # Inside of the function nobody can tell any more whether a backward pass will follow, and what `a` comes from.
    position = position_in_pass(a, cube)
    options = cube, face, reshard_after_forward, fp8, position
    if wanted is None:
        return _Product.apply(a, weight, bias, *options, False)
    c, wanted.tensor = _Product.apply(a, weight, bias, *options, True)
    return c


class _Product(Function):
    @staticmethod
    def forward(
        ctx: Any,
        a: Tensor,
        weight: nn.Parameter,
        bias: nn.Parameter | None,
        cube: Cube,
        face: Face,
        reshard: Reshard,
        fp8: bool,
        position: PassPosition,
        hands_on: bool,
    ) -> Tensor | tuple[Tensor, Tensor]:
        cube.ledger.forget_failed_passes()
        rows, columns = cube.axis(other(face)), cube.axis(face)
        results, inner = weight.shape
        fused = fused_with_product(cube, gathered_over=rows, columns=inner, summed_over=columns, results=results)
        gathering_a = CommHandle(a) if fused == "gather" else all_gather(a, rows)
        if cube.speed.shadow_weights:
            cube.shadows.enrol(weight, bias)
        source, pair = weight_source(weight, cube, rows), converted_pair(weight, bias, cube, a.dtype)
        gathering_w = source.gather(a.dtype, position) if pair is None else CommHandle(pair[0])
        a_full, w_full = gathering_a.wait(), gathering_w.wait()
        prefetch_next_weight(cube, position=position)
        shift = None if pair is None else pair[1]
        if bias is not None and pair is None:
            shift = as_type(block_or_shadow(bias, cube, a.dtype), a.dtype)
        ctx.products = products = _products(cube, weight, w_full, fp8)
        # W' is for dA alone, A' for dW.
        ctx.keeps_w = reshard in (False, "input") and ctx.needs_input_grad[0]
        ctx.keeps_a = reshard in (False, "weight") and ctx.needs_input_grad[1]
        adds_bias = fused is None and columns.size == 1  # where nothing is summed, the product itself does
        if fused is not None:
            sending_c, a_full = fused_product(fused, a_full, w_full.t(), rows, columns, keep=ctx.keeps_a)
        else:
            added = shift if adds_bias else None
            sending_c = reduce_scatter(products.forward(a_full, w_full, added), columns)
        c = sending_c.wait()
        if shift is not None and not adds_bias:
            c += shift
        ctx.weight, ctx.bias, ctx.cube, ctx.face = weight, bias, cube, face
        source.expect(gather=ctx.needs_input_grad[0] and not ctx.keeps_w, grad=ctx.needs_input_grad[1])
        ctx.source, ctx.is_ordered = source, True
        ctx.result_face, ctx.made = other(face), f"a {_named(weight.shape)}"
        ctx.save_for_backward(a_full if ctx.keeps_a else a, w_full if ctx.keeps_w else weight)
        if not hands_on:
            return c
        ctx.read_face = face
        ctx.set_materialize_grads(False)
        return c, a

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dc: Tensor | None, handed_back: Tensor | None = None) -> tuple[Tensor | None, ...]:
        """`handed_back`: the gradient of `a` where it was handed on."""
        if dc is None:  # a pass that goes through that alone
            ctx.cube.ledger.pass_by(ctx.weight, ctx.bias)
            return handed_back, *[None] * 8
        cube, face, weight, bias, products = ctx.cube, ctx.face, ctx.weight, ctx.bias, ctx.products
        rows, columns = cube.axis(other(face)), cube.axis(face)
        needs_da, (needs_dw, needs_db) = ctx.needs_input_grad[0], asked_for(ctx, weight, bias)

        # Everything is issued before anything is waited for; the order is the same on every rank.
        results, inner = weight.shape
        fused = fused_with_product(cube, gathered_over=columns, columns=results, summed_over=rows, results=inner)
        fused = fused if needs_da else None
        gathers_dc = (needs_da or needs_dw) and fused != "gather"
        gathering_dc = all_gather(dc, columns) if gathers_dc else CommHandle(dc)
        saved_a, saved_w = ctx.saved_tensors  # read once: activation checkpointing hands them out a single time
        gathering_w = gathering_a = None
        keeps_w = ctx.keeps_w and has_storage(saved_w)  # which a backward pass before, of the same graph, has freed
        if needs_da and keeps_w:
            pass_gathered_weight(weight, cube, rows, dc.dtype)
        elif needs_da:
            gathering_w = ctx.source.gather_again(dc.dtype)
        if needs_dw and not ctx.keeps_a:
            gathering_a = all_gather(saved_a, rows)
        if needs_db:
            db = CommHandle(sum_of_rows(dc, bias.dtype))
            cube.ledger.accumulate_grad(bias, db, cube.over(*vector(other(face)).sum_over))
        dc_full, w_full = gathering_dc.wait(), saved_w if gathering_w is None else gathering_w.wait()
        prefetch_next_weight(cube)

        sending_da = None
        if fused is not None:
            sending_da, dc_full = fused_product(fused, dc_full, w_full, columns, rows, keep=needs_dw)
        elif needs_da:
            addend, handed_back = (handed_back, None) if rows.size == 1 else (None, handed_back)
            sending_da = reduce_scatter(products.input_grad(dc_full, w_full, addend), rows)
        if needs_da and keeps_w and cube.axis("x").size > 1:  # else it may be the weight itself
            free_storage(saved_w)  # now, and not when autograd lets go of it: dW needs as much again
        del gathering_w, w_full, saved_w
        if needs_dw:
            a_full = saved_a if gathering_a is None else gathering_a.wait()
            dw = products.weight_grad(dc_full, a_full, type_of_sum(weight, cube))
            ctx.source.accumulate_grad(dw, cube.over(*matrix(face).sum_over))
        products.end()
        da = None if sending_da is None else sending_da.wait()
        if da is not None and handed_back is not None:
            da.add_(handed_back)
        return da, *[None] * 8


class _UndividedProduct(Function):
    """`_Product` where x, y and z are 1: each rank has all of both operands, nothing travels, and the host need not ask
    for each step what does."""

    @staticmethod
    def forward(
        ctx: Any,
        a: Tensor,
        weight: nn.Parameter,
        bias: nn.Parameter | None,
        cube: Cube,
        face: Face,
        reshard: Reshard,
        hands_on: bool,
    ) -> Tensor | tuple[Tensor, Tensor]:
        cube.ledger.forget_failed_passes()
        dtype, w, shift = a.dtype, local(weight), None if bias is None else local(bias)
        keeps_w = False
        if w.dtype != dtype or (shift is not None and shift.dtype != dtype):
            w, shift = _converted(weight, bias, cube, dtype)
            keeps_w = reshard in (False, "input") and ctx.needs_input_grad[0]
        c = product(a, w.t(), shift)
        ctx.weight, ctx.bias, ctx.cube, ctx.face, ctx.keeps_w = weight, bias, cube, face, keeps_w
        ctx.result_face, ctx.made = other(face), f"a {_named(weight.shape)}"
        ctx.save_for_backward(a, w if keeps_w else weight)
        if not hands_on:
            return c
        ctx.read_face = face
        ctx.set_materialize_grads(False)
        return c, a

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dc: Tensor | None, handed_back: Tensor | None = None) -> tuple[Tensor | None, ...]:
        cube, weight, bias = ctx.cube, ctx.weight, ctx.bias
        if dc is None:  # a pass that goes through what was handed on alone
            cube.ledger.pass_by(weight, bias)
            return handed_back, *[None] * 6
        needs_dw, needs_db = asked_for(ctx, weight, bias)
        a, w = ctx.saved_tensors
        over = cube.over(*matrix(ctx.face).sum_over)
        if needs_db:
            cube.ledger.accumulate_grad(bias, CommHandle(sum_of_rows(dc, bias.dtype)), over)
        da = None
        if ctx.needs_input_grad[0]:
            w = w if ctx.keeps_w else as_type(block_or_shadow(weight, cube, dc.dtype), dc.dtype)
            da = added_product(handed_back, dc, w)
        if needs_dw:
            dw = wide_product(dc.t(), a, weight.dtype)
            cube.ledger.accumulate_grad(weight, CommHandle(dw), over)
        return da, *[None] * 6


def _converted(
    weight: nn.Parameter, bias: nn.Parameter | None, cube: Cube, dtype: torch.dtype
) -> tuple[Tensor, Tensor | None]:
    if cube.speed.shadow_weights:
        cube.shadows.enrol(weight, bias)
    pair = converted_pair(weight, bias, cube, dtype)
    if pair is not None:
        return pair
    w, shift = (None if each is None else as_type(block_or_shadow(each, cube, dtype), dtype) for each in (weight, bias))
    assert w is not None
    return w, shift


# --- In which types a rank multiplies ---------------------------------------------------------------------------------


class _Products:
    """The three products of one use of a weight, in the type of what is multiplied or in FP8 by current scaling."""

    __slots__ = ("_cube", "_scaling")

    def __init__(self, cube: Cube, scaling: Current | None) -> None:
        self._cube, self._scaling = cube, scaling

    def forward(self, a: Tensor, w: Tensor, bias: Tensor | None = None) -> Tensor:
        """C' (M, N) of A' (M, K), W' (N, K) and a bias (N,)."""
        if self._scaling is None:
            return product(a, w.t(), bias)
        return fp8_product(a, w.t(), self._scaling, bias, fast=True, regions=self._cube.regions)

    def input_grad(self, dc: Tensor, w: Tensor, addend: Tensor | None = None) -> Tensor:
        """dA' (M, K) of dC' (M, N), and an addend."""
        if self._scaling is None:
            return added_product(addend, dc, w)
        da = fp8_product(dc, w, self._scaling, kind=GRADIENTS[self._scaling], regions=self._cube.regions)
        return da if addend is None else da.add_(addend)

    def weight_grad(self, dc: Tensor, a: Tensor, wide: torch.dtype) -> Tensor:
        """dW' (N, K), in the type `wide` where the product can give it."""
        scaling = self._scaling
        if scaling == "tensorwise":
            return fp8_product(dc.t(), a, scaling, kind=GRADIENTS[scaling], regions=self._cube.regions)
        # A scale of each row of dC' would be one of each term of these sums, which no kernel has.
        return wide_product(dc.t(), a, wide)

    def end(self) -> None:
        """A backward pass has used what it needs."""


class _DelayedProducts:
    """The same in FP8 by delayed scaling: all three by the scales that there are when the forward pass uses the weight.
    What backward gathers again is rounded again, to the same bits."""

    __slots__ = ("_cube", "_dc", "_largest", "_scales", "_weight")

    def __init__(self, cube: Cube, weight: nn.Parameter) -> None:
        self._cube, self._weight = cube, weight
        self._scales = cube.fp8_scales.of(weight)
        self._largest: list[Tensor | None] = [None] * len(KINDS)
        self._dc: Rounded | None = None  # of the backward pass that runs

    def forward(self, a: Tensor, w: Tensor, bias: Tensor | None = None) -> Tensor:
        of_a, of_w = self._rounded(INPUT, a), self._rounded(WEIGHT, w)
        return product_of_rounded(of_a, of_w.t(), a.dtype, bias, fast=True)

    def input_grad(self, dc: Tensor, w: Tensor, addend: Tensor | None = None) -> Tensor:
        self._dc = self._rounded(GRADIENT, dc)
        da = product_of_rounded(self._dc, self._rounded(WEIGHT, w), dc.dtype)
        return da if addend is None else da.add_(addend)

    def weight_grad(self, dc: Tensor, a: Tensor, wide: torch.dtype) -> Tensor:
        of_dc = self._rounded(GRADIENT, dc) if self._dc is None else self._dc
        return product_of_rounded(of_dc.t(), self._rounded(INPUT, a), dc.dtype)

    def end(self) -> None:
        self._dc = None
        self._cube.fp8_scales.observe(self._weight, self._largest)

    def _rounded(self, role: int, x: Tensor) -> Rounded:
        found, largest = rounded(x, KINDS[role], self._scales[role], self._cube.regions)
        if role != GRADIENT:  # of which another backward pass through this graph brings another one
            self._scales[role] = found.scale
        if self._largest[role] is None or role == GRADIENT:
            self._largest[role] = largest
        return found


def _products(cube: Cube, weight: nn.Parameter, w_full: Tensor, fp8: bool) -> _Products | _DelayedProducts:
    scaling = _scaling(cube, w_full, fp8)
    if scaling == "delayed" and backward_pass() != -1:
        # What is computed again may have a backward pass within this one: its end is not the step's, and no scale
        # changes before that.
        cube.ledger.join_pass()
    return _DelayedProducts(cube, weight) if scaling == "delayed" else _Products(cube, scaling)


def _scaling(cube: Cube, w_full: Tensor, fp8: bool) -> Scaling | None:
    """In which FP8 products with a gathered weight are. Type and sides of that alone decide, which forward and backward
    share; nothing that travels depends on it."""
    scaling = cube.precision.fp8
    if scaling is None:
        return None
    if not fp8:
        use = "kept out"
    elif w_full.dtype != torch.bfloat16:
        use = "type"
    else:
        use = "fp8" if suits_fp8(*w_full.shape) else "sides"
    cube.fp8_uses[use] += 1
    return scaling if use == "fp8" else None


@cache
def _named(shape: torch.Size) -> str:
    return f"product with a weight of shape {tuple(shape)}"
