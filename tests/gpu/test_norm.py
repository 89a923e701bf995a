"""On a GPU a norm of 16 bits in few operators is as exact as its type, also where rows are all the same."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from tensor3d import Cube, LayerNorm3D, MixedPrecisionPolicy, local
from tests.single_device_reference import error

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")


@pytest.mark.parametrize("columns", [64, 768, 1024, 4096])
@pytest.mark.parametrize("mean", [0, 1000])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_a_norm_of_a_sum(dtype: torch.dtype, mean: int, columns: int) -> None:
    layer = LayerNorm3D(columns, Cube.single("cuda", precision=MixedPrecisionPolicy(compute=dtype)), eps=1e-5)
    x, other, above = (each + 4 * torch.randn(3000, columns, device="cuda") for each in (mean, 0, 0))
    x, other, above = (each.to(dtype) for each in (x, other, above))
    twin = (x + other).double().requires_grad_()
    gain, shift = (torch.full((columns,), each, dtype=torch.float64, device="cuda") for each in (1.0, 0.0))
    gain, shift = gain.requires_grad_(), shift.requires_grad_()
    wanted = F.layer_norm(twin, (columns,), gain, shift, eps=1e-5)
    wanted.backward(above.double())
    result = layer(x.requires_grad_(), other)
    result.backward(above)
    assert error(result, wanted) <= torch.finfo(dtype).eps
    assert error(x.grad, twin.grad) <= torch.finfo(dtype).eps
    assert error(local(layer.weight.grad), gain.grad) <= 3e-5
    assert error(local(layer.bias.grad), shift.grad) <= 3e-6


@pytest.mark.parametrize("columns", [64, 768, 1024, 4096])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_rows_that_are_all_the_same(dtype: torch.dtype, columns: int) -> None:
    """What rounding leaves of a mean is magnified a million times, with the smallest eps."""
    constants = torch.tensor([0.0, 2.158, 33.59, -1000.0], device="cuda").to(dtype)
    layer = LayerNorm3D(columns, Cube.single("cuda", precision=MixedPrecisionPolicy(compute=dtype)))
    x = constants.unsqueeze(1).repeat(1, columns).requires_grad_()
    twin = x.detach().double().requires_grad_()
    above = (1e-3 * torch.randn(4, columns, device="cuda")).to(dtype)
    F.layer_norm(twin, (columns,), eps=1e-12).backward(above.double())
    result = layer(x)
    result.backward(above)
    assert not result.any()
    assert error(x.grad, twin.grad) <= torch.finfo(dtype).eps


def test_a_sum_is_rounded_before_it_is_written_in_fp32() -> None:
    a, b = (torch.randn(300, 64, device="cuda").bfloat16() for _ in range(2))
    assert torch.equal(torch.add(a, b, out=torch.empty(300, 64, device="cuda")), (a + b).float())
