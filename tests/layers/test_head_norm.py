"""Norms of queries and keys of each head, and heads of any width, beside plain PyTorch."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from tensor3d import (
    Attention3D,
    Cube,
    ExecutionPolicy,
    HeadNorm3D,
    RelativeRows,
    RMSNorm3D,
    Sequences,
    local,
    rotary,
    shard,
)
from tensor3d.attention.relative import BiasBuckets
from tensor3d.layers.head_norm import normed_and_turned
from tests.default_type import default_type
from tests.models.toy import Shape
from tests.ranks import run_ranks
from tests.saved_tensors import saved_bytes
from tests.single_device_reference import fast_alone, ranks_of

HIDDEN, HEADS, GROUPS, WIDTH = 16, 4, 2, 6
LENGTHS = (3, 5)
BASE = 100.0


def drawn(*shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(len(shape))).to(torch.get_default_dtype())


@pytest.mark.parametrize("zero_centered", [False, True])
def test_a_norm_of_heads_is_torchs_of_each(zero_centered: bool) -> None:
    with default_type(torch.float64):
        norm = HeadNorm3D(WIDTH, Cube.single(), eps=1e-3, zero_centered=zero_centered)
        assert norm.weight.unique().tolist() == [0.0 if zero_centered else 1.0]
        norm.weight.data += 0.3 * drawn(WIDTH)
        twin = norm.weight.detach().clone().requires_grad_()
        ones, others = (drawn(7, HEADS, WIDTH).requires_grad_() for _ in range(2))
        wanted = F.rms_norm(others, (WIDTH,), twin + 1 if zero_centered else twin, eps=1e-3)
        got = norm(ones)
        assert torch.allclose(got, wanted, atol=1e-13)
        for each in (got, wanted):
            each.backward(drawn(7, HEADS, WIDTH))
        assert torch.allclose(ones.grad, others.grad, atol=1e-13)  # type: ignore[arg-type]
        assert torch.allclose(norm.weight.grad, twin.grad, atol=1e-13)  # type: ignore[arg-type]
        assert saved_bytes(lambda: norm(ones)) == 8 * (7 * HEADS * (WIDTH + 1) + WIDTH)


def by_hand(attention: Attention3D, x: Tensor, positions: Tensor) -> Tensor:
    """Of one sequence."""
    shape = (len(x), GROUPS, HEADS // GROUPS + 2, WIDTH)
    q, k, v = F.linear(x, attention.qkv.weight, attention.qkv.bias).view(shape).split([HEADS // GROUPS, 1, 1], 2)
    of_queries, of_keys = attention.q_norm, attention.k_norm
    assert of_queries is not None
    assert of_keys is not None
    q, k = q.flatten(1, 2), k.squeeze(2)
    q, k = (
        rotary(F.rms_norm(each, (WIDTH,), 1 + norm.weight, eps=norm.eps), positions, BASE)
        for each, norm in ((q, of_queries), (k, of_keys))
    )
    q, k, v = (each.transpose(0, 1) for each in (q, k, v.squeeze(2)))
    mixed = F.scaled_dot_product_attention(q, k, v, enable_gqa=True)
    return F.linear(mixed.transpose(0, 1).flatten(1), attention.out.weight, attention.out.bias)


def an_attention(cube: Cube, **more: Any) -> Attention3D:
    cube.manual_seed(1)
    sizes: dict[str, Any] = {"head_dim": WIDTH, "kv_heads": GROUPS, "qk_norm": 1e-4, "std": 0.4, "rotary_base": BASE}
    attention = Attention3D(HIDDEN, HEADS, cube, **sizes | {"zero_centered_norms": True} | more)
    for name, each in attention.named_parameters():
        if each.dim() == 1:
            local(each).data += 0.3 * torch.randn(each.shape, generator=torch.Generator().manual_seed(len(name)))
    return attention


def test_an_attention_of_wide_heads_with_norms_is_torchs() -> None:
    sequences = Sequences.from_lengths(list(LENGTHS))
    with default_type(torch.float64):
        attention, twin = an_attention(Cube.single()), an_attention(Cube.single())
        assert attention.qkv.weight.shape == ((HEADS + 2 * GROUPS) * WIDTH, HIDDEN)
        assert attention.out.weight.shape == (HIDDEN, HEADS * WIDTH)
        ones, others = (drawn(sum(LENGTHS), HIDDEN).requires_grad_() for _ in range(2))
        got = attention(ones, sequences)
        wanted = torch.cat([by_hand(twin, x, torch.arange(len(x))) for x in others.split(LENGTHS)])
        assert torch.allclose(got, wanted, atol=1e-12)
        got.square().sum().backward()
        wanted.square().sum().backward()
        assert torch.allclose(ones.grad, others.grad, atol=1e-11)  # type: ignore[arg-type]
        for (name, mine), (_, theirs) in zip(attention.named_parameters(), twin.named_parameters(), strict=True):
            assert torch.allclose(mine.grad, theirs.grad, atol=1e-11), name  # type: ignore[arg-type]


def test_norms_that_somebody_watches_are_called_where_regions_are_compiled() -> None:
    attention = an_attention(Cube.single(speed=ExecutionPolicy(compile=True)), rotary_base=None)
    eager = an_attention(Cube.single(), rotary_base=None)
    x, sequences = drawn(sum(LENGTHS), HIDDEN), Sequences.from_lengths(list(LENGTHS))
    assert torch.allclose(attention(x, sequences), eager(x, sequences), atol=1e-6), (
        "without positions there is no region"
    )
    watched, called = an_attention(Cube.single(speed=ExecutionPolicy(compile=True))), []
    watched.q_norm.register_forward_hook(lambda *_: called.append("q"))  # type: ignore[union-attr]
    assert torch.allclose(watched(x, sequences), an_attention(Cube.single())(x, sequences), atol=1e-6)
    assert called == ["q"]


def test_norms_that_differ_in_more_than_weights_are_not_computed_as_one() -> None:
    """A region would take the keys' eps, and whether 1 is added, from the queries' norm."""
    x, sequences = drawn(sum(LENGTHS), HIDDEN), Sequences.from_lengths(list(LENGTHS))
    for other in ({"eps": 0.5, "zero_centered": True}, {"eps": 1e-4}):
        given = []
        for cube in (Cube.single(), Cube.single(speed=ExecutionPolicy(compile=True))):
            attention = an_attention(cube)
            attention.k_norm = HeadNorm3D(WIDTH, cube, **other)  # type: ignore[arg-type]
            given.append(attention(x, sequences))
        assert torch.equal(*given)
    attention.k_norm = HeadNorm3D(1, attention.cube)
    with pytest.raises(ValueError, match=r"needs \(rows, heads, 1\)"):
        attention(x, sequences)


def test_a_weight_that_is_changed_before_backward_is_told_by_torch() -> None:
    q_norm, k_norm = norms = HeadNorm3D(WIDTH, Cube.single()), HeadNorm3D(WIDTH, Cube.single())
    for each in (q_norm, k_norm):
        q, *_ = normed_and_turned(drawn(5, GROUPS, 4, WIDTH).requires_grad_(), torch.arange(5), norms, BASE)
        with torch.no_grad():
            each.weight.add_(1)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            q.sum().backward()


def test_a_small_weight_of_16_bits_counts_beside_the_1() -> None:
    x = drawn(5, HEADS, WIDTH)
    norms = HeadNorm3D(WIDTH, Cube.single(), zero_centered=True), RMSNorm3D(WIDTH, Cube.single(), zero_centered=True)
    for norm, rows in zip(norms, (x, x[:, 0]), strict=True):
        norm.bfloat16().weight.data.fill_(0.003)
        wanted = F.rms_norm(rows, (WIDTH,), 1 + norm.weight.float(), eps=norm.eps)
        assert torch.allclose(norm(rows), wanted, rtol=1e-5)
    plain, qkv = HeadNorm3D(WIDTH, Cube.single(), zero_centered=True), x.unsqueeze(2).expand(-1, -1, 3, -1)
    small, none = (normed_and_turned(qkv, torch.arange(5), (each, each), BASE)[0] for each in (norms[0], plain))
    assert torch.allclose(small, none * (1 + norms[0].weight[0].item()), rtol=1e-5)


def test_what_cannot_be_is_refused() -> None:
    cube = Cube.single()
    with pytest.raises(ValueError, match=r"needs \(rows, heads, 6\). Got \(5, 24\)"):
        HeadNorm3D(WIDTH, cube)(torch.zeros(5, 24))
    with pytest.raises(ValueError, match=r"head_dim must be at least 1. Got 0"):
        HeadNorm3D(0, cube)
    with pytest.raises(ValueError, match=r"head_dim must be at least 1. Got 0"):
        Attention3D(HIDDEN, HEADS, cube, head_dim=0)
    with pytest.raises(ValueError, match=r"hidden must divide by heads=3. Got 16. Choose others, or give head_dim"):
        Attention3D(HIDDEN, 3, cube)
    with pytest.raises(ValueError, match=r"the head dimension must be even. Got 5"):
        Attention3D(HIDDEN, 3, cube, head_dim=5, rotary_base=BASE)
    with pytest.raises(ValueError, match=r"zero_centered_norms=True is of qk_norm. Got no qk_norm"):
        Attention3D(HIDDEN, HEADS, cube, zero_centered_norms=True)
    attention = Attention3D(HIDDEN, HEADS, cube, qk_norm=1e-6)
    relative = RelativeRows(rows=torch.zeros(32, HIDDEN), buckets=BiasBuckets())
    with pytest.raises(ValueError, match="a table by distance needs an attention without qk_norm"):
        attention(torch.zeros(8, HIDDEN), Sequences.from_lengths([8]), relative=relative)


def test_they_say_what_they_are() -> None:
    cube = Cube.single()
    assert repr(HeadNorm3D(WIDTH, cube, zero_centered=True)) == "HeadNorm3D(6, eps=1e-06, zero_centered=True)"
    assert "eps=1e-06, zero_centered=True" in repr(RMSNorm3D(HIDDEN, cube, zero_centered=True))
    assert "heads=4, causal=False, dropout=0.0, backend=auto, kv_heads=2, head_dim=6" in repr(an_attention(cube))


def _gradients(shape: Shape) -> list[Tensor]:
    torch.set_default_dtype(torch.float64)
    cube = Cube(*shape) if ranks_of(shape) > 1 else Cube.single()
    attention, full = an_attention(cube, bias=False), drawn(4 * sum(LENGTHS), HIDDEN)
    packs = cube.shape.planes * cube.shape.z
    sequences = Sequences.from_lengths(list(LENGTHS) * (4 // packs))
    attention(shard(full, cube, "z"), sequences).square().sum().backward()
    assert attention.q_norm is not None
    assert attention.k_norm is not None
    return [local(norm.weight.grad) for norm in (attention.q_norm, attention.k_norm)]  # type: ignore[arg-type]


@pytest.mark.parametrize("shape", fast_alone((1, 2, 1, 1), (2, 2, 2, 1)))
def test_all_ranks_sum_the_gradients_of_norms_of_heads(shape: Shape) -> None:
    wanted = run_ranks(1, _gradients, (1, 1, 1, 1))[0]
    for found in run_ranks(ranks_of(shape), _gradients, shape):
        for mine, theirs in zip(found, wanted, strict=True):
            assert torch.allclose(mine, theirs, rtol=1e-11)
