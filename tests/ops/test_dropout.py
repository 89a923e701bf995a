"""Which elements dropout leaves, at what rate, and what it keeps for the backward pass."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from tensor3d import Cube, Dropout3D
from tensor3d.ops.dropout import drop, gain_of, keep_mask


def test_it_leaves_its_share() -> None:
    for p in (0.1, 0.5, 0.97):
        kept = keep_mask(torch.empty(1001, 999), p)
        assert set(kept.unique().tolist()) == {0, 1}
        # Six standard deviations of a mean of so many draws.
        assert abs(kept.double().mean() - (1 - p)) < 6 * (p * (1 - p) / kept.numel()) ** 0.5
    assert int(keep_mask(torch.empty(999), 1e-12).sum()) == 999
    assert int(keep_mask(torch.empty(999_999), 1 - 1e-12).sum()) < 100, "one of 65,536"


@pytest.mark.parametrize("p", [0.0, 1e-9, 0.1, 0.3, 0.99, 0.9999, 1 - 1e-9])
def test_the_mean_stays_exactly(p: float) -> None:
    """Over all 65,536 values of an element's bits, each of which is as likely."""
    bits = torch.arange(-(2**15), 2**15, dtype=torch.int16)
    kept = bits.view(torch.int64)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.Tensor, "random_", lambda self, *_: self.copy_(kept))
        assert float(drop(torch.ones(2**16, dtype=torch.float64), p).mean()) == pytest.approx(1, rel=1e-15)


def test_nothing_stays_of_all() -> None:
    x = torch.ones(99_999, requires_grad=True)
    result = drop(x, 1.0)
    (gradient,) = torch.autograd.grad(result.sum(), x)
    assert not result.any()
    assert not gradient.any()


def test_elements_are_drawn_each_by_itself() -> None:
    """Four elements share one random number of 64 bits: any two of them stay together no more often than others do."""
    kept, p = keep_mask(torch.empty(250_000, 4), 0.3).double(), 0.3
    deviations = (kept - (1 - p)) / (p * (1 - p)) ** 0.5
    for lag in (1, 2, 3, 4, 8):
        flat = deviations.flatten()
        assert abs((flat[lag:] * flat[:-lag]).mean()) < 6 / flat.numel() ** 0.5
    assert ((deviations.T @ deviations / len(kept) - torch.eye(4)).abs() < 6 * 2**0.5 / len(kept) ** 0.5).all()


@pytest.mark.parametrize("shape", [(), (0,), (1,), (7,), (3, 5), (2, 4, 8)], ids=str)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_what_stays_is_scaled_and_so_are_gradients(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    x, above = torch.randn(shape).to(dtype).requires_grad_(), torch.randn(shape).to(dtype)
    torch.manual_seed(1)
    kept = keep_mask(x, 0.3)
    torch.manual_seed(1)
    result = drop(x, 0.3)
    (gradient,) = torch.autograd.grad(result, x, above)
    wide = torch.promote_types(dtype, torch.float32)
    for got, of in ((result, x.detach()), (gradient, above)):
        assert got.dtype == dtype
        torch.testing.assert_close(got, (of.to(wide) * kept * gain_of(0.3)).to(dtype))


def test_another_layout_is_dropped_as_the_plain_one() -> None:
    x = torch.randn(6, 4)
    torch.manual_seed(1)
    plain = drop(x, 0.5)
    torch.manual_seed(1)
    assert torch.equal(drop(x.T.contiguous().T, 0.5), plain)


def test_the_gradient_has_a_gradient() -> None:
    x = torch.randn(50, dtype=torch.float64, requires_grad=True)

    def seeded(x: Tensor) -> Tensor:
        torch.manual_seed(1)
        return drop(x, 0.5) ** 2

    assert torch.autograd.gradgradcheck(seeded, x)


def test_a_byte_an_element_is_kept() -> None:
    x, kept = torch.randn(6, 100, requires_grad=True), []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append((t.shape, t.dtype)) or t, lambda t: t):
        drop(x, 0.1)
    assert kept == [(x.shape, torch.uint8)]


def test_the_layer_drops_in_training_alone() -> None:
    layer, x = Dropout3D(0.5, Cube.single()), torch.randn(100)
    torch.manual_seed(1)
    dropped = layer(x)
    torch.manual_seed(1)
    assert torch.equal(dropped, drop(x, 0.5))
    assert layer.eval()(x) is x
    assert Dropout3D(0.0, Cube.single())(x) is x
