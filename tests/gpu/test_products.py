"""On a GPU the product of 16-bit matrices that is asked for in fp32 is the sum, not a rounded one."""

from __future__ import annotations

import pytest
import torch

from tensor3d.ops.products import wide_product

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")


@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_sums_are_not_rounded(dtype: torch.dtype, transposed: bool) -> None:
    """A gradient's shapes: over 384 rows, as they lie and transposed."""
    a, b = torch.randn(384, 200, device="cuda").to(dtype), torch.randn(384, 136, device="cuda").to(dtype)
    left = a.t() if transposed else a.t().contiguous()
    got, wanted = wide_product(left, b, torch.float32), a.double().t() @ b.double()
    assert got.dtype == torch.float32
    assert float((got - wanted).norm() / wanted.norm()) < 1e-5  # rounded to fp16: 2e-4
