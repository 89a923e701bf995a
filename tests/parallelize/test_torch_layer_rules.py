"""rules.norm finds the eps that an RMSNorm computes with."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from tensor3d import Cube
from tensor3d.parallelize import parallelize, rules
from tests.parallelize.foreign import TinyRMSNorm

PLAN = {"": rules.norm("z")}


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32, torch.float64])
@pytest.mark.parametrize("size", [1e-3, 1.0])
def test_an_rms_norm_without_an_eps_of_its_own_has_that_of_torchs_arithmetic(dtype: torch.dtype, size: float) -> None:
    original = nn.RMSNorm(8).to(dtype)
    model = parallelize(original, Cube.single(), PLAN)
    x = (size * torch.linspace(-2, 3, 16).view(2, 8)).to(dtype)
    torch.testing.assert_close(model(x), original(x))


class EpsOutsideRMSNorm(TinyRMSNorm):
    def forward(self, x: Tensor) -> Tensor:
        return self.weight * (x / (x.pow(2).mean(-1, keepdim=True).sqrt() + self.variance_epsilon))


class OtherEpsRMSNorm(TinyRMSNorm):
    def forward(self, x: Tensor) -> Tensor:
        return self.weight * (x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6))


@pytest.mark.parametrize("make", [EpsOutsideRMSNorm, OtherEpsRMSNorm])
def test_an_eps_that_is_used_otherwise_is_found(make: type[TinyRMSNorm]) -> None:
    with pytest.raises(ValueError, match="computes something else"):
        parallelize(make(8), Cube.single(), PLAN)


def test_hooks_do_not_see_the_rows_that_a_norm_is_tried_with() -> None:
    calls = []
    original = TinyRMSNorm(8)
    original.register_forward_hook(lambda *_: calls.append("called"))
    model = parallelize(original, Cube.single(), PLAN)
    assert not calls
    model(torch.ones(1, 8))
    assert calls == ["called"]
