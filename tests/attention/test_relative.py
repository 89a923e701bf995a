"""Attention with relative positions: its buckets beside the library's, every backend beside the formula."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from tensor3d import Sequences, attention
from tensor3d.attention.backends import SUPPORT, AttentionRequest, choose
from tensor3d.attention.relative import BiasBuckets, Buckets, LogBuckets, RelativeTerms
from tensor3d.batches.row_selection import RowSelection

LENGTHS = (5, 40, 1, 17, 1, 2, 40, 39, 9)
BUCKETS = {"bias": BiasBuckets(rows=8, farthest=20), "log": LogBuckets(span=8, farthest=30)}


def test_buckets_of_a_bias_are_those_of_the_library() -> None:
    modeling = pytest.importorskip("transformers.models.mpnet.modeling_mpnet")
    for rows, farthest in ((32, 128), (8, 20)):
        away = torch.arange(-1100, 1101)
        wanted = modeling.MPNetEncoder.relative_position_bucket(away, num_buckets=rows, max_distance=farthest)
        found = BiasBuckets(rows=rows, farthest=farthest).of((-away).numpy())  # there it is key less query
        assert (found == wanted.numpy()).all()


def test_logarithmic_buckets_are_those_of_the_library() -> None:
    modeling = pytest.importorskip("transformers.models.deberta_v2.modeling_deberta_v2")
    for span, farthest in ((256, 512), (8, 30), (32, 512)):
        away = torch.arange(-1100, 1101)
        wanted = modeling.make_log_bucket_position(away, span, farthest)
        found = LogBuckets(span=span, farthest=farthest).of(away.numpy())
        assert (found == (wanted.long() + span).clamp(0, 2 * span - 1).numpy()).all()


def terms_of(parts: str, buckets: Buckets, heads: int = 3, width: int = 8) -> RelativeTerms:
    random = torch.Generator().manual_seed(1)
    drawn: dict[str, Tensor] = {}
    for name in parts.split():
        shape = (buckets.rows, heads) if name == "bias" else (buckets.rows, heads, width)
        drawn[name] = torch.randn(shape, generator=random, dtype=torch.float64).requires_grad_()
    return RelativeTerms(buckets=buckets, **drawn)


def results(
    parts: str, buckets: Buckets, backend: Any, dtype: torch.dtype = torch.float64, device: str = "cpu", **options: Any
) -> Any:
    random, sequences = torch.Generator().manual_seed(0), Sequences.from_lengths(LENGTHS, device)
    asked = options.get("queries")
    if asked is not None:
        options = options | {"queries": asked.to(device)}
    rows = sequences.rows if asked is None else len(asked)
    q, k, v, above = (
        torch.randn(n, 3, 8, generator=random, dtype=torch.float64).to(device, dtype)
        for n in (rows, sequences.rows, sequences.rows, rows)
    )
    inputs = [t.requires_grad_() for t in (q, k, v)]
    terms = terms_of(parts, buckets)
    own = [each.detach().to(device, dtype).requires_grad_() for each in terms.tensors]
    terms = RelativeTerms(buckets=buckets, **dict(zip(parts.split(), own, strict=True)))
    out = attention(*inputs, sequences, backend=backend, relative=terms, **options)
    out.backward(above)
    return [out.detach(), *(t.grad for t in (*inputs, *own))]


@pytest.mark.parametrize("parts", ["bias", "keys", "queries", "keys queries", "bias keys queries"])
@pytest.mark.parametrize("kind", list(BUCKETS))
@pytest.mark.parametrize(
    "options",
    [{}, {"causal": True}, {"window": 7}, {"queries": "some"}, {"queries": "some", "causal": True, "window": 3}],
)
def test_as_the_formula(parts: str, kind: str, options: dict[str, Any]) -> None:
    if "queries" in options:
        numbers = np.random.default_rng(1).integers(-1, sum(LENGTHS), 30)
        options = options | {"queries": RowSelection.from_numbers(numbers)}
    found = results(parts, BUCKETS[kind], "grouped", **options)
    for a, b in zip(found, results(parts, BUCKETS[kind], "reference", **options), strict=True):
        assert torch.allclose(a, b, rtol=1e-11, atol=1e-11)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_narrow_types(dtype: torch.dtype) -> None:
    found = results("keys queries", BUCKETS["log"], "auto", dtype)
    for a, b in zip(found, results("keys queries", BUCKETS["log"], "reference"), strict=True):
        assert (a.double() - b).norm() / b.norm() < (1e-5 if dtype == torch.float32 else 0.03)


def test_dropout_is_of_probabilities() -> None:
    """The mean over many draws is the result without; no draw is it."""
    sequences, terms = Sequences.from_lengths([6]), terms_of("bias keys", BUCKETS["bias"])
    q = torch.randn(6, 3, 8, dtype=torch.float64, generator=torch.Generator().manual_seed(2))
    torch.manual_seed(0)
    draws = torch.stack([attention(q, q, q, sequences, relative=terms, dropout=0.3) for _ in range(600)])
    wanted = attention(q, q, q, sequences, relative=terms)
    assert (draws.mean(0) - wanted).abs().max() < 0.15
    assert (draws - wanted).abs().amax((1, 2, 3)).min() > 0.01


def test_a_rank_without_rows_still_goes_back() -> None:
    """Its neighbours wait for what backward sends of the tables."""
    for lengths, queries in (((), None), ((3,), RowSelection.from_numbers([-1, -1]))):
        terms, sequences = terms_of("bias keys queries", BUCKETS["log"]), Sequences.from_lengths(lengths)
        k = torch.zeros(sequences.rows, 3, 8, dtype=torch.float64, requires_grad=True)
        q = k if queries is None else torch.zeros(2, 3, 8, dtype=torch.float64, requires_grad=True)
        attention(q, k, k, sequences, relative=terms, queries=queries).sum().backward()
        assert all(each.grad is not None and not each.grad.any() for each in terms.tensors)


def test_backends_that_have_none_are_refused_and_not_taken() -> None:
    facts = AttentionRequest(device="cuda", dtype=torch.bfloat16, head_dim=64, capability=(9, 0), relative=True)
    assert choose("auto", facts) == "grouped"
    for name in ("varlen", "flex"):
        assert not SUPPORT[name].relative  # type: ignore[index]
        with pytest.raises(ValueError, match=r"has no relative positions\. Take 'grouped', or"):
            choose(name, facts)  # type: ignore[arg-type]


def test_what_is_refused() -> None:
    q, sequences, buckets = torch.zeros(4, 3, 8), Sequences.from_lengths([4]), BUCKETS["bias"]
    with pytest.raises(ValueError, match="Got none of them"):
        RelativeTerms(buckets=buckets)
    with pytest.raises(ValueError, match=r"bias must be \(rows, heads\) with 8 rows. Got \(9, 3\)"):
        RelativeTerms(buckets=buckets, bias=torch.zeros(9, 3))
    with pytest.raises(ValueError, match=r"keys must be \(rows, heads, head dimension\) with 8 rows. Got \(8, 3\)"):
        RelativeTerms(buckets=buckets, keys=torch.zeros(8, 3))
    with pytest.raises(ValueError, match=r"bias by distance must have the heads of q, \(4, 3, 8\). Got \(8, 2\)"):
        attention(q, q, q, sequences, relative=RelativeTerms(buckets=buckets, bias=torch.zeros(8, 2)))
    with pytest.raises(ValueError, match=r"keys by distance must be of q's type, torch.float32. Got torch.float64"):
        attention(q, q, q, sequences, relative=terms_of("keys", buckets))
    for rows, farthest in ((6, 20), (0, 20), (8, 2)):
        with pytest.raises(ValueError, match=r"must be above|divide by 4"):
            BiasBuckets(rows=rows, farthest=farthest)
    for span, farthest in ((3, 20), (0, 20), (8, 5)):
        with pytest.raises(ValueError, match=r"must be above|must be even"):
            LogBuckets(span=span, farthest=farthest)


@pytest.mark.parametrize("buckets", BUCKETS.values(), ids=BUCKETS)
def test_a_step_is_counted_without_numbers(buckets: Buckets) -> None:
    """Tensors then pretend; which buckets occur is known all the same."""
    sequences = Sequences.from_lengths(LENGTHS)
    with FakeTensorMode(allow_non_fake_inputs=True):
        q, k, v = (torch.empty(sequences.rows, 3, 8, requires_grad=True) for _ in range(3))
        terms = RelativeTerms(buckets=buckets, bias=torch.empty(buckets.rows, 3, requires_grad=True))
        out = attention(q, k, v, sequences, relative=terms)
        out.sum().backward()
    assert out.shape == q.shape
    assert terms.bias is not None
    assert terms.bias.grad is not None


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("parts", ["bias", "keys queries"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("options", [{}, {"causal": True}, {"queries": "some"}, {"window": 7}])
def test_on_a_gpu(parts: str, dtype: torch.dtype, options: dict[str, Any]) -> None:
    """SDPA's kernels take the scores' second part as their mask, and give its gradient; groups on streams of their
    own."""
    if "queries" in options:
        numbers = np.random.default_rng(1).integers(-1, sum(LENGTHS), 30)
        options = {"queries": RowSelection.from_numbers(numbers)}
    found = results(parts, BUCKETS["log"], "auto", dtype, "cuda", **options)
    for a, b in zip(found, results(parts, BUCKETS["log"], "reference", **options), strict=True):
        assert (a.cpu().double() - b).norm() / b.norm() < (1e-4 if dtype == torch.float32 else 4e-2)
