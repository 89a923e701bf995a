"""Narrow types on one CPU: which operators run, and what is still added up and kept in fp32."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from tensor3d import (
    Cube,
    Embedding3D,
    LayerNorm3D,
    Linear3D,
    MixedPrecisionPolicy,
    RMSNorm3D,
    SmallHead3D,
    cross_entropy,
    local,
)
from tensor3d.layers import norm
from tensor3d.layers.norm_kernels import combined_moments
from tests.single_device_reference import error

NARROW = [torch.bfloat16, torch.float16]


class Operators(TorchDispatchMode):
    """Counts operators, and those of results of at least so many elements by type."""

    def __init__(self, large: int) -> None:
        super().__init__()
        self.calls: Counter[str] = Counter()
        self.made: Counter[torch.dtype] = Counter()
        self.large = large

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        self.calls[func.overloadpacket.__name__] += 1
        if func.overloadpacket not in (torch.ops.aten.detach, torch.ops.aten.view, torch.ops.aten.split):
            results = result if isinstance(result, tuple) else (result,)
            self.made.update(each.dtype for each in results if isinstance(each, Tensor) and each.numel() >= self.large)
        return result


def half(dtype: torch.dtype = torch.bfloat16) -> Cube:
    return Cube.single(precision=MixedPrecisionPolicy(compute=dtype))


def test_the_product_adds_its_bias() -> None:
    layer = Linear3D(8, 4, half(), "z")
    with Operators(0) as counted:
        layer(torch.randn(6, 8, dtype=torch.bfloat16))
    assert counted.calls["addmm"] == 1
    assert not {"mm", "add", "add_"} & set(counted.calls)


@pytest.mark.parametrize("rows", [0, 1, 3000])
def test_gradients_of_a_bias_are_sums_in_fp32(rows: int) -> None:
    """Each row adds 1 to every third column's: in bf16 the sum would be rounded to a multiple of 16."""
    layer = Linear3D(4, 600, half(), "z")
    result = layer(torch.zeros(rows, 4, dtype=torch.bfloat16))
    above = torch.zeros(rows, 600, dtype=torch.bfloat16)
    above[:, ::3] = 1
    with Operators(0) as counted:
        result.backward(above)
    assert local(layer.bias.grad).tolist() == [float(rows), 0.0, 0.0] * 200
    assert counted.calls["sum"] == (4 if rows == 3000 else 1), "873 rows at a time"


def test_a_narrow_bias_has_sums_in_fp32_too() -> None:
    """What the first rows add up to is more than fp16 has; the last ones take it back."""
    layer = Linear3D(4, 600, Cube.single(precision=MixedPrecisionPolicy(compute=torch.float32)), "z").half()
    result = layer(torch.zeros(4000, 4))
    above = torch.zeros(4000, 600)
    above[:800], above[1748:2548] = 90, -90
    result.backward(above)
    assert layer.bias.grad.dtype == torch.float16
    assert local(layer.bias.grad).tolist() == [0.0] * 600


@pytest.fixture(params=["in parts", "few operators"])
def way(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """How a norm works: as on this device, or as on one that each operator is named to."""
    if request.param == "few operators":
        monkeypatch.setattr(norm, "_suits_few_operators", lambda *addends: True)
    return str(request.param)


@pytest.mark.parametrize("dtype", NARROW, ids=str)
def test_a_norm_makes_no_wide_copy(dtype: torch.dtype) -> None:
    layer = LayerNorm3D(64, half(dtype), eps=1e-5)
    x = torch.randn(9000, 64).to(dtype).requires_grad_()  # more than fits at once
    above = torch.randn(9000, 64).to(dtype)
    with Operators(9000 * 64) as counted:
        layer(x).backward(above)
    assert set(counted.made) == {dtype}


@pytest.mark.parametrize("rows", [40, 9000])
@pytest.mark.parametrize("mean", [0, 1000])
@pytest.mark.parametrize("dtype", NARROW, ids=str)
def test_a_norm_is_as_exact_as_its_type(dtype: torch.dtype, mean: int, rows: int, way: str) -> None:
    """PyTorch's own kernel is 0.08 off in the gradients of gain and shift at some thousand rows of bf16."""
    layer = LayerNorm3D(64, half(dtype), eps=1e-5)
    x = (mean + 4 * torch.randn(rows, 64, generator=torch.Generator().manual_seed(1))).to(dtype).requires_grad_()
    twin = x.detach().double().requires_grad_()
    above = torch.randn(rows, 64, generator=torch.Generator().manual_seed(2)).to(dtype)
    gain, shift = (torch.full((64,), each, dtype=torch.float64, requires_grad=True) for each in (1.0, 0.0))
    wanted = F.layer_norm(twin, (64,), gain, shift, eps=1e-5)
    result = layer(x)
    wanted.backward(above.double())
    result.backward(above)
    bound = torch.finfo(dtype).eps
    assert result.dtype == dtype
    assert error(result, wanted) <= bound
    assert error(x.grad, twin.grad) <= bound
    # Of fp32, as the parameters are; few operators leave a rounding of the mean in each row, 2^-24 of it.
    assert error(local(layer.weight.grad), gain.grad) <= (3e-5 if way == "few operators" else 1e-5)
    assert error(local(layer.bias.grad), shift.grad) <= 1e-6


@pytest.mark.parametrize("dtype", NARROW, ids=str)
def test_a_norm_of_rows_that_are_all_the_same(dtype: torch.dtype) -> None:
    """What rounding leaves of a mean is magnified a million times, with the smallest eps."""
    constants = torch.tensor([0.0, 2.158, 33.59, -1000.0]).to(dtype)
    layer = LayerNorm3D(768, half(dtype))
    x = constants.repeat(3).unsqueeze(1).repeat(1, 768).requires_grad_()
    twin = x.detach().double().requires_grad_()
    above = (1e-3 * torch.randn(12, 768, generator=torch.Generator().manual_seed(2))).to(dtype)
    F.layer_norm(twin, (768,), eps=1e-12).backward(above.double())
    result = layer(x)
    result.backward(above)
    assert not result.any()
    assert error(x.grad, twin.grad) <= torch.finfo(dtype).eps


@pytest.mark.parametrize("dtype", NARROW, ids=str)
def test_a_norm_of_a_sum_in_few_operators(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of the sum as its type rounds it, which alone is kept; of a mean of 100, half of the last bits would differ."""
    layer, generator = LayerNorm3D(64, half(dtype), eps=1e-5), torch.Generator().manual_seed(1)
    x, other, above = (each + torch.randn(40, 64, generator=generator) for each in (100, 0, 0))
    x, other, above = (each.to(dtype) for each in (x, other, above))
    found = []
    for few in (False, True):
        monkeypatch.setattr(norm, "_suits_few_operators", lambda *addends: few)  # noqa: B023
        addends = [each.detach().requires_grad_() for each in (x, other)]
        layer.zero_grad()
        with Operators(0) as forward:
            result = layer(*addends)
        with Operators(0) as backward:
            result.backward(above)
        found.append([result, *(each.grad for each in addends), local(layer.weight.grad), local(layer.bias.grad)])
    named = {"add", "native_layer_norm", "_foreach_copy_"}, {"_foreach_copy_", "native_layer_norm_backward", "_to_copy"}
    for counted, names in zip((forward, backward), named, strict=True):
        assert {name: counted.calls[name] for name in names} == dict.fromkeys(names, 1)
    assert set(forward.calls) == named[0] | {"empty_like"}
    assert set(backward.calls) <= named[1] | {"empty_like", "detach", "new_empty_strided", "copy_"}, (
        "the last of leaves"
    )
    for wanted, got, bound in zip(*found, [torch.finfo(dtype).eps] * 3 + [1e-5, 1e-6], strict=True):
        assert got.dtype == wanted.dtype
        assert error(got, wanted) <= bound


def test_which_norms_are_of_few_operators() -> None:
    """Of rows that are all the same the kernel has the mean exactly where columns are a power of two."""
    wide, narrow = torch.empty(3, 64, device="meta"), torch.empty(3, 64, device="meta", dtype=torch.bfloat16)
    assert norm._suits_few_operators(narrow, narrow)
    for addends in ([wide], [narrow, wide], [narrow[:, :48]], [torch.empty(3, 64, dtype=torch.bfloat16)]):
        assert not norm._suits_few_operators(*addends)


@pytest.mark.parametrize("asked", [("weight",), ("bias",), ("weight", "bias"), ()])
def test_some_gradients_of_a_norm(asked: tuple[str, ...], way: str) -> None:
    whole, some = (LayerNorm3D(64, half()) for _ in range(2))
    x, above = (torch.randn(9000, 64).bfloat16() for _ in range(2))
    for layer, names in ((whole, ("weight", "bias")), (some, asked)):
        for name, parameter in layer.named_parameters():
            parameter.requires_grad_(name in names)
        layer(x.requires_grad_()).backward(above)
    for name, parameter in some.named_parameters():
        twin = whole.get_parameter(name).grad
        assert parameter.grad is None if name not in asked else torch.equal(local(parameter.grad), local(twin))


def test_the_table_and_its_gradient_stay_in_fp32() -> None:
    """A token in 257 rows: bf16 has no such number."""
    cube = half()
    table = Embedding3D(5000, 8, cube)
    with Operators(5000 * 8) as counted:
        rows = table(torch.tensor([7] * 257 + [-1] * 3))
        rows.float().sum().backward()
    assert rows.dtype == torch.bfloat16
    assert not rows[257:].any()
    assert torch.equal(rows[0], local(table.weight)[7].bfloat16())
    assert local(table.weight.grad)[7].tolist() == [257.0] * 8
    assert counted.made[torch.bfloat16] == 0


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16], ids=str)
def test_the_loss_goes_back_a_few_rows_at_a_time(dtype: torch.dtype) -> None:
    rows, vocab = 50, 30_000
    logits = torch.randn(rows, vocab, generator=torch.Generator().manual_seed(1)).to(dtype).requires_grad_()
    labels = torch.randint(vocab, (rows,), generator=torch.Generator().manual_seed(2))
    labels[::7] = -100
    twin = logits.detach().double().requires_grad_()
    losses, _ = cross_entropy(logits, labels, vocab, Cube.single())
    weights = torch.arange(1.0, rows + 1)
    F.cross_entropy(twin, labels, reduction="none").backward(weights.double())
    with Operators(rows * vocab) as counted:
        losses.backward(weights.to(losses.dtype))
    assert counted.made == {dtype: 1}, "the gradient; what comes and goes is of some rows"
    assert error(logits.grad, twin.grad) <= 4 * torch.finfo(dtype).eps
    assert not logits.grad[::7].any()


def test_moments_are_about_the_mean_though_it_was_rounded() -> None:
    """Each member tells a mean that is off by a rest, squares about that, and the rest."""
    x = (
        torch.randn(2, 5, 8, dtype=torch.float64, generator=torch.Generator().manual_seed(1)) + 3
    )  # members, rows, columns
    rest = torch.tensor([0.25, -0.5], dtype=torch.float64)[:, None]
    told = x.mean(2) - rest
    moments = torch.stack([told, rest.expand(2, 5), (x - told[:, :, None]).square().sum(2)], 2)
    center, offset, variance = combined_moments(moments, 8)
    whole = x.transpose(0, 1).flatten(1)
    assert torch.allclose((center + offset).flatten(), whole.mean(1), atol=1e-12)
    assert torch.allclose(variance.flatten(), whole.var(1, unbiased=False), atol=1e-12)


@pytest.mark.parametrize("kind", [LayerNorm3D, RMSNorm3D])
def test_a_row_of_zeros_stays_zero(kind: type[LayerNorm3D] | type[RMSNorm3D]) -> None:
    """That is what eps is for."""
    assert torch.equal(kind(8, Cube.single())(torch.zeros(3, 8)), torch.zeros(3, 8))


@pytest.mark.parametrize("dtype", NARROW, ids=str)
def test_a_narrow_head_computes_in_fp32(dtype: torch.dtype) -> None:
    head = SmallHead3D(16, 3, half(dtype), std=0.3)
    head.bias.data.copy_(torch.tensor([1.0, 2.0, 4.0]))
    x = torch.randn(6, 16).to(dtype).requires_grad_()
    twins = [each.detach().float().requires_grad_() for each in (x, local(head.weight), local(head.bias))]
    wanted, got = F.linear(*twins), head(x)
    assert got.dtype == torch.float32
    assert torch.allclose(got, wanted, atol=1e-5)
    for result in (wanted, got):
        result.square().sum().backward()
    assert torch.allclose(x.grad.float(), twins[0].grad.to(dtype).float(), rtol=2 * torch.finfo(dtype).eps, atol=1e-3)
    for parameter, twin in zip((head.weight, head.bias), twins[1:], strict=True):
        assert torch.allclose(local(parameter.grad), twin.grad, rtol=1e-4, atol=1e-4)
