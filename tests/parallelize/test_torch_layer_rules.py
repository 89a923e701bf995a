"""rules.norm and rules.embedding find out by trial what norms and embeddings of others compute."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tensor3d import Cube, gather, local_block
from tensor3d.parallelize import full_state_dict, parallelize, propose_plan, rules
from tests.parallelize.foreign import HIDDEN, ROWS, TinyRMSNorm, errors_of, own_plane, varied
from tests.ranks import run_ranks
from tests.single_device_reference import fast_alone, ranks_of, worst

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


class PlusInputRMSNorm(TinyRMSNorm):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) + 1e-2 * x


@pytest.mark.parametrize("make", [EpsOutsideRMSNorm, PlusInputRMSNorm])
def test_what_is_computed_otherwise_is_found(make: type[TinyRMSNorm]) -> None:
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


class OtherEps(nn.Module):
    """An eps that no attribute says, and a class that calls itself nothing."""

    def __init__(self, hidden: int) -> None:
        super().__init__()
        self.weight, self.eps = nn.Parameter(torch.ones(hidden)), 1e-5

    def forward(self, x: Tensor) -> Tensor:
        return self.weight * (x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 3e-3))


class OnePlus(nn.LayerNorm):
    def forward(self, x: Tensor) -> Tensor:
        return F.layer_norm(x, self.normalized_shape, self.weight + 1, self.bias, self.eps)


class Centered(OtherEps):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x - x.mean(-1, keepdim=True))


class BareNorm(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return F.rms_norm(x, x.shape[-1:], eps=1e-2)


class Scaled(nn.Embedding):
    """The scale is kept as a buffer, which has a name in state dicts."""

    def __init__(self, rows: int, hidden: int, padding_idx: int | None = None) -> None:
        super().__init__(rows, hidden, padding_idx)
        self.register_buffer("factor", torch.tensor(2.3))

    def forward(self, ids: Tensor) -> Tensor:
        return super().forward(ids) * self.factor


class ByWidth(nn.Embedding):
    def forward(self, ids: Tensor) -> Tensor:
        return super().forward(ids) * self.embedding_dim**0.5


class ByRow(nn.Embedding):
    def forward(self, ids: Tensor) -> Tensor:
        return super().forward(ids) * (1 + ids[..., None])


class Own(nn.Module):
    """Norms and embeddings of its own making, one after another."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.places = Scaled(20, HIDDEN, padding_idx=3), ByWidth(4, HIDDEN)
        norms = [OnePlus(HIDDEN, eps=1e-2), Centered(HIDDEN), OtherEps(HIDDEN)]
        norms += [BareNorm(), nn.LayerNorm(HIDDEN, 0.1, False)]
        self.norms = nn.ModuleList(norms)
        self.linears = nn.ModuleList(nn.Linear(HIDDEN, HIDDEN) for _ in norms)
        self.out = nn.Linear(HIDDEN, 40)

    def forward(self, ids: Tensor, places: Tensor) -> Tensor:
        h = self.words(ids) + self.places(places)
        for norm, linear in zip(self.norms, self.linears, strict=True):
            h = linear(norm(h))
        return self.out(h)  # type: ignore[no-any-return]


def compared(cube: Cube) -> dict[str, float]:
    torch.manual_seed(2)
    original = varied(Own())
    ids, places = torch.arange(ROWS) % 20, torch.arange(ROWS) % 4
    proposal = propose_plan(original, ids.view(8, -1), places.view(8, -1))
    assert {line.kind for line in proposal.lines} >= {
        "embedding()",
        "table()",
        'norm("z")',
        f'norm("y", columns={HIDDEN})',
    }
    proposal.check(cube)
    model = parallelize(original, cube, proposal.settled())
    logits = model(own_plane(ids, cube), own_plane(places, cube))
    wanted = original(ids, places)
    direction = torch.randn(wanted.shape, generator=torch.Generator().manual_seed(3))
    face = "z"  # behind six linears
    (logits * local_block(own_plane(direction, cube), cube, face)).sum().backward()
    (wanted * direction).sum().backward()
    back = full_state_dict(model, cube)
    assert all(torch.equal(back[name], value) for name, value in original.state_dict().items())
    assert list(back) == list(original.state_dict())
    return errors_of(model, original, cube, {"logits": (gather(logits, cube, face), wanted)})


def _on_ranks(shape: tuple[int, int, int, int]) -> dict[str, float]:
    torch.set_default_dtype(torch.float64)
    return compared(Cube(*shape))


@pytest.mark.usefixtures("fp64")
def test_norms_and_embeddings_of_own_making_equal_themselves_on_one_device() -> None:
    name, value = max(compared(Cube.single()).items(), key=lambda each: each[1])
    assert value <= 1e-9, f"{name} differs by {value}"


@pytest.mark.parametrize("shape", fast_alone((1, 2, 2, 1), (2, 2, 2, 1), (1, 2, 2, 2)))
def test_norms_and_embeddings_of_own_making_equal_themselves_on_a_cube(shape: tuple[int, int, int, int]) -> None:
    name, value = worst(run_ranks(ranks_of(shape), _on_ranks, shape))
    assert value <= 1e-9, f"{name} differs by {value}"


def test_an_embedding_that_does_more_than_to_scale_is_refused() -> None:
    with pytest.raises(ValueError, match="is a ByRow, whose forward is its own"):
        parallelize(ByRow(8, 4), Cube.single(), {"": rules.embedding()})
    assert propose_plan(ByRow(8, 4), torch.arange(6).view(2, 3)).unresolved
