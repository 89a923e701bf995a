"""On a GPU with a kernel, products in FP8 are those of the emulation, and so is what a model learns of them."""

from __future__ import annotations

import math
from typing import get_args

import pytest
import torch
from torch import Tensor

from models.bert import BertForPreTraining
from tensor3d import Cube, ExecutionPolicy, MixedPrecisionPolicy
from tensor3d.ops import fp8
from tensor3d.ops.fp8 import E4M3, E5M2, GRADIENTS, Current, Scaling, fp8_product, has_kernel, quantise, rounded
from tests.models.toy import lay, totals, toy_config, toy_packs
from tests.single_device_reference import full

gpu = pytest.mark.skipif(
    not (torch.cuda.is_available() and has_kernel(torch.device("cuda", 0))), reason="needs a GPU that multiplies FP8"
)
SCALINGS = pytest.mark.parametrize("scaling", get_args(Current))
BITS = 13
"""Of a term, behind the first one of the largest: what Hopper's units keep of it in a sum, whatever cuBLAS is asked for
(DeepSeek-AI 2024, arXiv 2412.19437, §3.5.2: "around 14 bits")."""
TOLERANCE = 0.3
"""Of a gradient's norm. Sums that differ in the last of those bits turn into other roundings to bf16, these into other
roundings to FP8: 0.18 in what a test without a GPU computes."""


def _values(*shape: int) -> Tensor:
    torch.manual_seed(shape[0])
    return (torch.randn(shape) * torch.randn(shape[0], 1).exp()).bfloat16()


@gpu
@pytest.mark.parametrize("kind", [E4M3, E5M2], ids=["e4m3", "e5m2"])
@pytest.mark.parametrize("dim", [0, 1, None])
def test_both_round_to_the_same_bits(kind: torch.dtype, dim: int | None) -> None:
    x = _values(40, 64)
    x[3] = 0
    x[5, 7], x[6, 9] = math.inf, math.nan
    for on_cpu, on_gpu in zip(quantise(x, dim, kind), quantise(x.cuda(), dim, kind), strict=True):
        torch.testing.assert_close(on_gpu.cpu().float(), on_cpu.float(), rtol=0, atol=0, equal_nan=True)


@gpu
@SCALINGS
@pytest.mark.parametrize("fast", [False, True])
@pytest.mark.parametrize("biased", [False, True])
@pytest.mark.parametrize(("rows", "inner"), [(64, 256), (1, 256), (37, 256), (48, 37), (0, 32)])
@pytest.mark.parametrize("transposed", [False, True])
def test_the_kernel_gives_what_is_emulated(
    scaling: Current, fast: bool, biased: bool, rows: int, inner: int, transposed: bool
) -> None:
    """Of types as layers use them: none has E5M2 with a scale of each row, for which a kernel need not be there."""
    a, b, bias = _values(rows, inner), _values(inner, 96), torch.randn(96).bfloat16() if biased else None
    if transposed:
        a, b = a.t().contiguous().t(), b.t().contiguous().t()
    for kind in {E4M3, GRADIENTS[scaling]}:
        wanted = fp8_product(a, b, scaling, bias, kind=kind)
        got = fp8_product(a.cuda(), b.cuda(), scaling, None if bias is None else bias.cuda(), kind=kind, fast=fast)
        assert got.dtype == torch.bfloat16
        # One rounding to bf16 in each; sums that are made fast have some 14 bits.
        size = a.float().abs() @ b.float().abs() + (0 if bias is None else bias.float().abs())
        most = (2**-7 + (2**-10 if fast else 0)) * size
        assert ((got.cpu().float() - wanted.float()).abs() <= most).all()


@gpu
@SCALINGS
def test_what_is_not_finite_stays_visible(scaling: Current) -> None:
    a, b = _values(16, 32), _values(32, 16)
    a[1, 3] = math.inf
    lost = fp8_product(a.cuda(), b.cuda(), scaling).isnan().all(1).tolist()
    assert lost == [scaling == "tensorwise" or row == 1 for row in range(16)]


@gpu
@pytest.mark.parametrize("kind", [E4M3, E5M2], ids=["e4m3", "e5m2"])
def test_both_round_to_the_same_bits_by_an_old_scale(kind: torch.dtype) -> None:
    x = _values(40, 64)
    x[5, 7], x[6, 9] = math.inf, math.nan
    for scale in (None, torch.tensor(2.0**-9)):
        (one, most), (other, largest) = (
            rounded(each, kind, None if scale is None else scale.to(each.device)) for each in (x, x.cuda())
        )
        for on_cpu, on_gpu in ((one.values, other.values), (one.scale, other.scale), (most, largest)):
            torch.testing.assert_close(on_gpu.cpu().float(), on_cpu.float(), rtol=0, atol=0, equal_nan=True)


def _learnt(scaling: Scaling, device: str, *, compiled: bool = False) -> tuple[Tensor, dict[str, Tensor]]:
    """Loss and gradients, but those of QKV's biases, of which the keys' are 0."""
    policy = MixedPrecisionPolicy(compute=torch.bfloat16, fp8=scaling)
    cube = Cube.single(device, precision=policy, speed=ExecutionPolicy(compile=compiled))
    cube.manual_seed(0)
    model, packs = BertForPreTraining(toy_config(67), cube), toy_packs(67, 16)
    for _ in range(2 if scaling == "delayed" else 1):  # the second one by the scales of the first
        model.zero_grad()
        loss = model(lay(packs, cube).to(cube.device), *totals(packs)).loss
        loss.backward()
    assert cube.fp8_uses["fp8"] > 0
    return loss.detach(), {n: full(p.grad) for n, p in model.named_parameters() if "qkv.bias" not in n}


def _worst(found: tuple[Tensor, dict[str, Tensor]], emulated: tuple[Tensor, dict[str, Tensor]]) -> float:
    """Of the gradients, by their norms; the losses agree within 1e-2."""
    (loss, gradients), (wanted, others) = found, emulated
    assert float((loss - wanted).abs() / wanted.abs()) < 1e-2
    return max(float((g - others[n]).norm() / (others[n].norm() + 1e-6)) for n, g in gradients.items())


@gpu
@pytest.mark.parametrize("scaling", get_args(Scaling))
@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "compiled"])
def test_a_model_has_the_gradients_of_the_emulation(
    scaling: Scaling, compiled: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = _learnt(scaling, "cuda", compiled=compiled)
    monkeypatch.setattr(fp8, "has_kernel", lambda _: False)
    assert _worst(found, _learnt(scaling, "cuda", compiled=compiled)) < TOLERANCE


def _of_a_gpu(a: Tensor, b: Tensor, bias: Tensor | None = None) -> Tensor:
    """`a @ b + bias` as Hopper adds up: the 32 terms of an instruction and what is there, cut off `BITS` behind the
    first bit of the largest."""
    total = torch.zeros(a.shape[0], b.shape[1])
    for first in range(0, a.shape[1], 32):
        terms = a[:, first : first + 32, None] * b[None, first : first + 32]
        largest = torch.maximum(terms.abs().amax(1), total.abs()).clamp(min=2.0**-120)
        step = torch.exp2(largest.log2().floor() - BITS)
        total = ((terms / step[:, None]).trunc_().sum(1) + (total / step).trunc()) * step
    return total if bias is None else total + bias


@SCALINGS
def test_sums_of_a_gpu_are_within_the_tolerance(scaling: Current, monkeypatch: pytest.MonkeyPatch) -> None:
    """And no noise of them hides a product of something else: a weight's gradient by half is far outside."""
    emulated = _learnt(scaling, "cpu")
    monkeypatch.setattr(fp8, "product", _of_a_gpu)
    found = _learnt(scaling, "cpu")
    assert _worst(found, emulated) < 0.7 * TOLERANCE
    name = "bert.layers.0.mlp.up.weight"
    assert _worst((found[0], found[1] | {name: found[1][name] / 2}), emulated) > TOLERANCE
