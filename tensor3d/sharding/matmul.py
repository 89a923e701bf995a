"""The matrix product on the cube: the heart of the project (Bian et al. 2021, §3.1, for any box).

M tokens of the cube, K input features, N output features; here for face z, face y swaps y and z
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from typing import Any, Literal

import torch
from torch import Tensor, nn

from tensor3d.distributed.autograd_graph import asked_for
from tensor3d.distributed.collectives import Axis, CommHandle, all_gather, reduce_scatter
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
    WeightSource,
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
    (c,) = matmul_each(a, [weight], cube, face, [bias], reshard_after_forward=[reshard_after_forward], fp8=fp8)
    return c


@out_of_graphs
def matmul_each(
    a: Tensor,
    weights: Sequence[nn.Parameter],
    cube: Cube,
    face: Face,
    biases: Sequence[nn.Parameter | None],
    *,
    reshard_after_forward: Sequence[Reshard],
    fp8: bool = True,
) -> tuple[Tensor, ...]:
    """`matmul(a, weight, cube, face, bias)` of each weight, with one gather of A', forward and backward, and one
    reduce-scatter of the sum of their dA: for weights that cannot be one, such as queries, keys and values of a model
    whose parameters keep their names.

    A' is kept for backward where `reshard_after_forward` says so of any of them. Of several weights no collective is in
    one operator with a product.
    """
    check_matrix(a, "matmul")
    for weight, bias, reshard in zip(weights, biases, reshard_after_forward, strict=True):
        check_reshard(reshard)
        check_layout(weight, matrix(face), cube)
        shape, columns = weight.shape, cube.axis(face)
        first, last = chunk_bounds(shape[1], columns.size, columns.index)
        if a.shape[1] != last - first:
            raise ValueError(
                f"the {_named(shape)} reads face {face}, where this rank has "
                f"{last - first} columns. Got shape {tuple(a.shape)}. Is it on face {other(face)}? `redistribute` "
                "changes the face."
            )
        if bias is not None:
            check_layout(bias, vector(other(face)), cube)
    check_origin(a, face, cube, f"the {_named(weights[0].shape)}")
    a = as_type(a, cube.precision.computed(a.dtype))
    if a.dtype != torch.float64 and torch.is_autocast_enabled(a.device.type):  # which leaves float64 alone
        a = a.to(torch.get_autocast_dtype(a.device.type))
    wanted = _wanted_by(a, cube)
    hands_on = wanted is not None
    results: tuple[Tensor, ...]
    if cube.shape.is_undivided and cube.precision.fp8 is None:
        results = _UndividedProduct.apply(a, cube, face, reshard_after_forward, hands_on, *weights, *biases)
    else:
        # Inside of the function nobody can tell any more whether a backward pass will follow, and what `a` comes from.
        options = cube, face, reshard_after_forward, fp8, position_in_pass(a, cube)
        results = _Product.apply(a, *options, hands_on, *weights, *biases)
    if wanted is not None:
        wanted.tensor = results[-1]
    return results[: len(weights)]


class _Use:
    """A weight that multiplies a matrix, in one forward pass and the backward passes through it."""

    __slots__ = ("keeps_w", "products", "source")

    products: _Products | _DelayedProducts

    def __init__(self, source: WeightSource, keeps_w: bool) -> None:
        self.source, self.keeps_w = source, keeps_w


class _Turn:
    """A use in one backward pass, which is asked for gradients of what it multiplied and of its own."""

    __slots__ = ("bias", "dc", "gathering_dc", "needs_db", "needs_dw", "place", "weight")

    gathering_dc: CommHandle

    def __init__(self, ctx: Any, place: int, dc: Tensor) -> None:
        self.place, self.dc = place, dc
        self.weight, self.bias = ctx.weights[place], ctx.biases[place]
        self.needs_dw, self.needs_db = asked_for(ctx, self.weight, self.bias)


def _turns(ctx: Any, gradients: Sequence[Tensor | None]) -> list[_Turn]:
    """Of the uses whose results the loss depends on. A pass may go through others alone, or what was handed on."""
    turns = []
    for place, dc in enumerate(gradients[: len(ctx.weights)]):
        if dc is None:
            ctx.cube.ledger.pass_by(ctx.weights[place], ctx.biases[place])
        else:
            turns.append(_Turn(ctx, place, dc))
    return turns


def _returned(ctx: Any, results: list[Tensor], a: Tensor, face: Face, hands_on: bool) -> tuple[Tensor, ...]:
    ctx.result_face, ctx.hands_on, ctx.made = other(face), hands_on, f"a {_named(ctx.weights[0].shape)}"
    if len(results) > 1:
        ctx.results = len(results)
    if hands_on:
        ctx.read_face = face
        results.append(a)
    if len(results) > 1:
        ctx.set_materialize_grads(False)
    return tuple(results)


class _Product(Function):
    @staticmethod
    def forward(
        ctx: Any,
        a: Tensor,
        cube: Cube,
        face: Face,
        reshards: Sequence[Reshard],
        fp8: bool,
        position: PassPosition,
        hands_on: bool,
        *parameters: nn.Parameter | None,
    ) -> tuple[Tensor, ...]:
        cube.ledger.forget_failed_passes()
        weights, biases = _halves(parameters)
        rows, columns, fused = cube.axis(other(face)), cube.axis(face), None
        if len(weights) == 1:
            results, inner = weights[0].shape
            fused = fused_with_product(cube, gathered_over=rows, columns=inner, summed_over=columns, results=results)
        gathering_a = CommHandle(a) if fused == "gather" else all_gather(a, rows)
        gathering_w, shifts, ctx.uses, ctx.keeps_a = [], [], [], False
        needs_da, needs_dw = ctx.needs_input_grad[0], ctx.needs_input_grad[-len(parameters) :]
        for weight, bias, reshard, needs_grad in zip(weights, biases, reshards, needs_dw, strict=False):
            if cube.speed.shadow_weights:
                cube.shadows.enrol(weight, bias)
            source, pair = weight_source(weight, cube, rows), converted_pair(weight, bias, cube, a.dtype)
            gathering_w.append(source.gather(a.dtype, position) if pair is None else CommHandle(pair[0]))
            shift = None if pair is None else pair[1]
            if bias is not None and pair is None:
                shift = as_type(block_or_shadow(bias, cube, a.dtype), a.dtype)
            shifts.append(shift)
            # W' is for dA alone, A' for dW.
            keeps_w = reshard in (False, "input") and needs_da
            ctx.keeps_a |= reshard in (False, "weight") and needs_grad
            source.expect(gather=needs_da and not keeps_w, grad=needs_grad)
            ctx.uses.append(_Use(source, keeps_w))
        a_full, full_w = gathering_a.wait(), [each.wait() for each in gathering_w]
        prefetch_next_weight(cube, position=position)
        adds_bias = fused is None and columns.size == 1  # where nothing is summed, the product itself does
        sending_c, kept = [], []
        for use, weight, w, shift in zip(ctx.uses, weights, full_w, shifts, strict=True):
            use.products = _products(cube, weight, w, fp8)
            if fused is not None:
                sending, a_full = fused_product(fused, a_full, w.t(), rows, columns, keep=ctx.keeps_a)
            else:
                sending = reduce_scatter(use.products.forward(a_full, w, shift if adds_bias else None), columns)
            sending_c.append(sending)
            kept.append(w if use.keeps_w else weight)
        found = []
        for sending, shift in zip(sending_c, shifts, strict=True):
            c = sending.wait()
            if shift is not None and not adds_bias:
                c += shift
            found.append(c)
        ctx.weights, ctx.biases, ctx.cube, ctx.face, ctx.is_ordered = weights, biases, cube, face, True
        ctx.save_for_backward(a_full if ctx.keeps_a else a, *kept)
        return _returned(ctx, found, a, face, hands_on)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[Tensor | None, ...]:
        """Of each result, and of `a` where it was handed on."""
        cube, face = ctx.cube, ctx.face
        rows, columns = cube.axis(other(face)), cube.axis(face)
        handed_back, nothing = gradients[-1] if ctx.hands_on else None, [None] * (len(ctx.needs_input_grad) - 1)
        turns = _turns(ctx, gradients)
        if not turns:
            return handed_back, *nothing
        needs_da, needs_dw = ctx.needs_input_grad[0], True in [turn.needs_dw for turn in turns]

        # Everything is issued before anything is waited for; the order is the same on every rank.
        fused = None
        if needs_da and len(ctx.weights) == 1:
            results, inner = ctx.weights[0].shape
            fused = fused_with_product(cube, gathered_over=columns, columns=results, summed_over=rows, results=inner)
        for turn in turns:
            gathers_dc = (needs_da or turn.needs_dw) and fused != "gather"
            turn.gathering_dc = all_gather(turn.dc, columns) if gathers_dc else CommHandle(turn.dc)
        saved_a, *saved_w = ctx.saved_tensors  # read once: activation checkpointing hands them out a single time
        gathering_w = [_again(ctx, turn, saved_w[turn.place], rows) for turn in turns] if needs_da else []
        gathering_a = all_gather(saved_a, rows) if needs_dw and not ctx.keeps_a else CommHandle(saved_a)
        for turn in turns:
            if turn.needs_db:
                db = CommHandle(sum_of_rows(turn.dc, turn.bias.dtype))
                cube.ledger.accumulate_grad(turn.bias, db, cube.over(*vector(other(face)).sum_over))
        full_dc, full_w = [turn.gathering_dc.wait() for turn in turns], [each.wait() for each in gathering_w]
        prefetch_next_weight(cube)

        sending_da = None
        if fused is not None:
            sending_da, full_dc[0] = fused_product(fused, full_dc[0], full_w[0], columns, rows, keep=needs_dw)
        elif needs_da:
            total: Any = None
            if rows.size == 1:
                total, handed_back = handed_back, None
            for n, turn in enumerate(turns):
                total = ctx.uses[turn.place].products.input_grad(full_dc[n], full_w[n], total)
            sending_da, total = reduce_scatter(total, rows), None
        if needs_da and cube.axis("x").size > 1:  # else it may be the weight itself
            _free_kept(saved_w, full_w)  # now, and not when autograd lets go of it: dW needs as much again
        del gathering_w, full_w, saved_w
        a_full = gathering_a.wait()
        for turn, dc_full in zip(turns, full_dc, strict=True):
            use = ctx.uses[turn.place]
            if turn.needs_dw:
                dw = use.products.weight_grad(dc_full, a_full, type_of_sum(turn.weight, cube))
                use.source.accumulate_grad(dw, cube.over(*matrix(face).sum_over))
            use.products.end()
        da = None if sending_da is None else sending_da.wait()
        if da is not None and handed_back is not None:
            da.add_(handed_back)
        return da, *nothing


def _free_kept(saved: list[Tensor], used: list[Tensor]) -> None:
    for saved_w in saved:
        for each in used:
            if each is saved_w:
                free_storage(saved_w)


def _again(ctx: Any, turn: _Turn, saved_w: Tensor, rows: Axis) -> CommHandle:
    """W' in a backward pass: as it was kept, unless a pass before, of the same graph, has freed it."""
    use, dtype = ctx.uses[turn.place], turn.dc.dtype
    if not (use.keeps_w and has_storage(saved_w)):
        return use.source.gather_again(dtype)
    pass_gathered_weight(turn.weight, ctx.cube, rows, dtype)
    return CommHandle(saved_w)


class _UndividedProduct(Function):
    """`_Product` where x, y and z are 1: each rank has all of both operands, nothing travels, and the host need not ask
    for each step what does."""

    @staticmethod
    def forward(
        ctx: Any,
        a: Tensor,
        cube: Cube,
        face: Face,
        reshards: Sequence[Reshard],
        hands_on: bool,
        *parameters: nn.Parameter | None,
    ) -> tuple[Tensor, ...]:
        cube.ledger.forget_failed_passes()
        weights, biases = _halves(parameters)
        dtype, kept, results, ctx.keeps_w = a.dtype, [], [], []
        for weight, bias, reshard in zip(weights, biases, reshards, strict=True):
            w, shift, keeps_w = local(weight), None if bias is None else local(bias), False
            if w.dtype != dtype or (shift is not None and shift.dtype != dtype):
                w, shift = _converted(weight, bias, cube, dtype)
                keeps_w = reshard in (False, "input") and ctx.needs_input_grad[0]
            results.append(product(a, w.t(), shift))
            kept.append(w if keeps_w else weight)
            ctx.keeps_w.append(keeps_w)
        ctx.weights, ctx.biases, ctx.cube, ctx.face = weights, biases, cube, face
        ctx.save_for_backward(a, *kept)
        return _returned(ctx, results, a, face, hands_on)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[Tensor | None, ...]:
        cube, da = ctx.cube, gradients[-1] if ctx.hands_on else None
        turns, nothing = _turns(ctx, gradients), [None] * (len(ctx.needs_input_grad) - 1)
        if not turns:
            return da, *nothing
        a, *saved_w = ctx.saved_tensors
        over = cube.over(*matrix(ctx.face).sum_over)
        if not ctx.needs_input_grad[0]:
            da = None
        for turn in turns:
            weight, bias, dc = turn.weight, turn.bias, turn.dc
            if turn.needs_db:
                cube.ledger.accumulate_grad(bias, CommHandle(sum_of_rows(dc, bias.dtype)), over)
            if ctx.needs_input_grad[0]:
                w = saved_w[turn.place]
                if not ctx.keeps_w[turn.place]:
                    w = as_type(block_or_shadow(weight, cube, dc.dtype), dc.dtype)
                da = added_product(da, dc, w)
            if turn.needs_dw:
                cube.ledger.accumulate_grad(weight, CommHandle(wide_product(dc.t(), a, weight.dtype)), over)
        return da, *nothing


def _halves(parameters: Sequence[Any]) -> tuple[Sequence[nn.Parameter], Sequence[nn.Parameter | None]]:
    """Weights, and as many biases behind them."""
    count = len(parameters) // 2
    return parameters[:count], parameters[count:]


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
