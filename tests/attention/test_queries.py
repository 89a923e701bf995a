"""Attention of some rows only: as those rows of the whole, forward and backward, in any order."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from tensor3d import Attention3D, Cube, Sequences, attention
from tensor3d.attention import Backend
from tensor3d.batches.row_selection import RowSelection

BACKENDS: tuple[Backend, ...] = ("reference", "grouped")
HEADS, WIDTH = 3, 4
LENGTHS = (5, 30, 1, 22, 1, 2, 29, 30)
LONG = (300, 2, 260, 410)


def rows(count: int, seed: int = 0) -> list[Tensor]:
    """q, k, v of all rows, and the direction in which the result is differentiated."""
    random = torch.Generator().manual_seed(seed)
    return [torch.randn(count, HEADS, WIDTH, generator=random, dtype=torch.float64) for _ in range(4)]


def whole(numbers: list[int], data: list[Tensor], sequences: Sequences, **options: Any) -> list[Tensor]:
    """The rows that ask, of the attention of all; and the gradients of q of all rows, of k and of v."""
    q, k, v = (t.clone().requires_grad_() for t in data[:3])
    out = attention(q, k, v, sequences, backend="reference", **options)
    used = [number for number in numbers if number >= 0]
    chosen = torch.zeros(len(numbers), HEADS, WIDTH, dtype=q.dtype)
    chosen[[i for i, number in enumerate(numbers) if number >= 0]] = out[used]
    return finished(chosen, data[3][: len(numbers)], q, k, v)


def some(
    numbers: list[int], data: list[Tensor], sequences: Sequences, backend: Backend, **options: Any
) -> list[Tensor]:
    q, k, v = (t.clone().requires_grad_() for t in data[:3])
    queries = RowSelection.from_numbers(numbers)
    asked = q.index_select(0, queries.rows.clamp_min(0))
    out = attention(asked, k, v, sequences, backend=backend, queries=queries, **options)
    return finished(out, data[3][: len(numbers)], q, k, v)


def finished(out: Tensor, direction: Tensor, *qkv: Tensor) -> list[Tensor]:
    out.backward(direction)
    assert all(t.grad is not None for t in qkv)
    return [out.detach(), *(t.grad for t in qkv if t.grad is not None)]


def check(numbers: list[int], lengths: tuple[int, ...], backend: Backend, **options: Any) -> None:
    sequences = Sequences.from_lengths(lengths)
    data = rows(max(sum(lengths), len(numbers)))
    data = [t[: sum(lengths)] for t in data[:3]] + data[3:]
    got, wanted = some(numbers, data, sequences, backend, **options), whole(numbers, data, sequences, **options)
    for name, a, b in zip(("output", "q", "k", "v"), got, wanted, strict=True):
        assert torch.allclose(a, b, rtol=1e-11, atol=1e-11), f"{name} differs by {float((a - b).abs().max())}"


@pytest.mark.parametrize("options", [{}, {"causal": True}, {"window": 6}, {"causal": True, "window": 6}])
@pytest.mark.parametrize(
    ("numbers", "lengths"),
    [
        ([0, 5, 35, 36, 58], LENGTHS),
        ([119, 3, -1, 40, 40, -1, 3, 0, 62], LENGTHS),
        ([*range(5), -1, *range(100, 120)], LENGTHS),
        ([-1, -1, 7], LENGTHS),
        ([0, 299, 600, 971, 5, -1, 300, 301, 650], LONG),
        ([600, 700, 971], LONG),
    ],
)
@pytest.mark.parametrize("backend", BACKENDS)
def test_equals_these_rows_of_the_whole(
    backend: Backend, numbers: list[int], lengths: tuple[int, ...], options: dict[str, Any]
) -> None:
    check(numbers, lengths, backend, **options)


@given(
    lengths=st.lists(st.integers(1, 30), min_size=1, max_size=12).map(tuple),
    causal=st.booleans(),
    window=st.none() | st.integers(1, 32),
    data=st.data(),
)
def test_any_rows_of_any_mixture(
    lengths: tuple[int, ...], causal: bool, window: int | None, data: st.DataObject
) -> None:
    numbers = data.draw(st.lists(st.integers(-1, sum(lengths) - 1), min_size=1, max_size=30))
    check(numbers, lengths, "grouped", causal=causal, window=window)


@pytest.mark.parametrize("lengths", [LENGTHS, LONG])
@pytest.mark.parametrize("backend", BACKENDS)
def test_slots_that_are_not_used_give_zeros_and_still_have_a_backward_pass(
    backend: Backend, lengths: tuple[int, ...]
) -> None:
    """On the other ranks some are used, and all must come to the same collectives."""
    sequences = Sequences.from_lengths(lengths)
    out, *gradients = some([-1, -1], rows(sequences.rows), sequences, backend)
    assert not out.any()
    assert not any(bool(gradient.any()) for gradient in gradients)


def test_only_sequences_in_which_rows_ask_are_computed() -> None:
    short = Sequences.from_lengths((9, 7, 8, 6) * 10)
    grouping = short.grouping_of(RowSelection.from_numbers([0, 1, 20]))
    assert sorted(member for group in grouping.groups for member in group.members) == [0, 2]
    assert sum(group.asking_slots * group.length for group in grouping.groups) < 60
    long = Sequences.from_lengths(LONG).grouping_of(RowSelection.from_numbers([0, 1, 700]))
    assert [group.asked for group in long.groups] == [2, 0, 0, 1]
    assert long.gather is None, "keys stay where they lie"


def test_made_once_for_all_layers() -> None:
    sequences, queries = Sequences.from_lengths(LENGTHS), RowSelection.from_numbers([1, 2])
    assert sequences.grouping_of(queries) is sequences.grouping_of(queries)
    assert sequences.grouping_of(RowSelection.from_numbers([1, 2])) is not sequences.grouping_of(queries)


@pytest.mark.slow
@pytest.mark.parametrize("backend", BACKENDS)
def test_dropout_of_chosen_rows_is_unbiased(backend: Backend) -> None:
    torch.manual_seed(1)
    sequences, queries = Sequences.from_lengths((5, 9, 5, 1)), RowSelection.from_numbers([2, 7, -1, 19, 13])
    q, k, v, _ = (t.float() for t in rows(20))
    call: dict[str, Any] = {"backend": backend, "queries": queries}
    wanted = attention(q[:5], k, v, sequences, **call)
    draws = torch.stack([attention(q[:5], k, v, sequences, dropout=0.4, **call) for _ in range(2000)])
    assert not torch.equal(draws[0], draws[1])
    assert bool(((draws.mean(0) - wanted).abs() <= 6 * draws.std(0) / 2000**0.5 + 1e-4).all())


@pytest.mark.parametrize("backend", [*BACKENDS, "auto"])
@pytest.mark.parametrize(("count", "numbers"), [(0, []), (4, []), (0, [-1, -1])])
def test_nobody_asks(backend: Backend, count: int, numbers: list[int]) -> None:
    """Where no row asks, or there is none: zeros, and a backward pass to q, k and v."""
    k, v = torch.randn(2, count, HEADS, WIDTH, requires_grad=True).unbind()
    q = torch.full((len(numbers), HEADS, WIDTH), float("nan"), requires_grad=True)
    sequences, queries = Sequences.from_lengths([count] if count else []), RowSelection.from_numbers(numbers)
    out = attention(q, k, v, sequences, backend=backend, queries=queries)
    assert torch.equal(out, torch.zeros(len(numbers), HEADS, WIDTH))
    gradients = torch.autograd.grad(out.sum(), (q, k, v))
    assert all(not gradient.any() for gradient in gradients)


def test_the_layer_takes_and_refuses_what_the_function_does() -> None:
    layer = Attention3D(8, 2, Cube.single())
    with pytest.raises(ValueError, match=r"numbers.*4 rows, from \b0\b.*4"):
        layer(torch.randn(4, 8), Sequences.from_lengths([4]), RowSelection.from_numbers([4]))
    none = layer(torch.randn(0, 8), Sequences.from_lengths([]), RowSelection.from_numbers([-1, -1]))
    none.sum().backward()
    assert torch.equal(none, layer.out(torch.zeros(2, 8)))


def test_moves_and_shows_its_numbers() -> None:
    queries = RowSelection.from_numbers(np.array([3, -1], dtype=np.int32))
    assert (queries.rows.tolist(), queries.rows.dtype, len(queries), queries.most) == ([3, -1], torch.int64, 2, 3)
    moved = queries.to("meta")
    assert moved.rows.device.type == "meta"
    assert moved.numbers.tolist() == [3, -1]
    assert RowSelection.from_numbers([]).most == -1


def test_what_does_not_fit_is_refused() -> None:
    q, sequences = torch.zeros(4, 2, 3), Sequences.from_lengths([4])
    with pytest.raises(ValueError, match=r"row.*4 rows for \b2\b"):
        attention(q, q, q, sequences, queries=RowSelection.from_numbers([0, 1]))
    with pytest.raises(ValueError, match=r"numbers.*4 rows, from \b0\b.*4"):
        attention(q[:1], q, q, sequences, queries=RowSelection.from_numbers([4]))
    with pytest.raises(ValueError, match=r"-1 for an unused slot\. Got -2"):
        RowSelection.from_numbers([0, -2])
    with pytest.raises(ValueError, match=r"whole numbers .* Got float64 of shape \(1,\)"):
        RowSelection.from_numbers([0.5])  # type: ignore[list-item]
    with pytest.raises(ValueError, match=r"one shape"):
        attention(q[:2, :1], q, q, sequences, queries=RowSelection.from_numbers([0, 1]))
