"""Long sequences in blocks where a window is narrow: as the dense attention, and what it costs grows with the rows."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from tensor3d import Sequences, attention
from tensor3d.attention import Backend
from tensor3d.batches.length_groups import LengthGroups, is_cut
from tensor3d.batches.row_selection import RowSelection

# Cut into several blocks, into one more than whole ones, and not at all.
LENGTHS = (600, 3, 200, 1, 449, 80)
HEADS, WIDTH = 2, 4


def results(
    backend: Backend, numbers: list[int] | None, dtype: torch.dtype = torch.float64, **options: Any
) -> list[Tensor]:
    """The result of the rows that ask, and the gradients of q, k and v."""
    sequences, random = Sequences.from_lengths(LENGTHS), torch.Generator().manual_seed(0)
    q, k, v, direction = (
        torch.randn(sequences.rows, HEADS, WIDTH, generator=random, dtype=dtype).requires_grad_() for _ in range(4)
    )
    queries = None if numbers is None else RowSelection.from_numbers(numbers)
    asked = q if queries is None else q.index_select(0, queries.rows.clamp_min(0))
    out = attention(asked, k, v, sequences, backend=backend, queries=queries, **options)
    out.backward(direction.detach()[: len(out)])
    assert q.grad is not None
    assert k.grad is not None
    assert v.grad is not None
    return [out.detach(), q.grad, k.grad, v.grad]


def area(grouping: LengthGroups) -> int:
    return sum(group.asking_slots * group.length for group in grouping.groups)


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("numbers", [None, [599, 0, -1, 63, 64, 65, 600, 803, 804, 1332, 700, 1000, 1001, 65]])
@pytest.mark.parametrize("window", [1, 9, 65, 90])
def test_equals_dense_attention(window: int, numbers: list[int] | None, causal: bool) -> None:
    assert is_cut(max(LENGTHS), window)
    got, wanted = (results(backend, numbers, window=window, causal=causal) for backend in ("grouped", "reference"))
    for name, a, b in zip(("output", "q", "k", "v"), got, wanted, strict=True):
        assert torch.allclose(a, b, rtol=1e-11, atol=1e-11), f"{name} differs by {float((a - b).abs().max())}"


def test_what_is_computed_grows_with_the_rows() -> None:
    for rows in (4096, 8192):
        for causal, seen in ((False, 64 + 2 * 64), (True, 64 + 64)):
            assert area(Sequences.from_lengths([rows]).grouping_of(None, 65, causal)) <= rows * seen


def test_each_row_asks_once_and_sees_all_of_its_window() -> None:
    sequences, window = Sequences.from_lengths(LENGTHS), 9
    grouping = sequences.grouping_of(None, window)
    assert grouping.ask is not None
    assert grouping.gather is not None
    assert grouping.restore is not None
    assert torch.equal(grouping.ask[grouping.restore], torch.arange(sequences.rows))
    starts, ends = np.asarray(sequences.starts), np.asarray(sequences.starts) + np.asarray(sequences.lengths)
    slots, asking = 0, 0
    for group in grouping.groups:
        keys = grouping.gather[slots : slots + group.slots].view(len(group.members), -1)
        asks = grouping.ask[asking : asking + group.asking_slots].view(len(group.members), -1)
        for own, rows in zip(keys.tolist(), asks.tolist(), strict=True):
            for row in rows:
                sequence = int(np.searchsorted(starts, row, side="right")) - 1
                low, high = max(starts[sequence], row - window + 1), min(ends[sequence], row + window)
                assert set(range(low, high)) <= set(own)
        slots, asking = slots + group.slots, asking + group.asking_slots


def test_made_once_for_all_layers_and_short_sequences_as_before() -> None:
    sequences = Sequences.from_lengths(LENGTHS)
    assert sequences.grouping_of(None, 9) is sequences.grouping_of(None, 9)
    assert sequences.grouping_of(None, 500) is sequences.grouping
    assert Sequences.from_lengths([150, 20]).grouping_of(None, 65).ask is None


def test_dropout_leaves_what_is_expected_of_the_probabilities() -> None:
    torch.manual_seed(0)
    sequences = Sequences.from_lengths(LENGTHS)
    q, k = torch.randn(2, sequences.rows, HEADS, WIDTH)
    out = attention(q, k, torch.ones_like(q), sequences, backend="grouped", window=33, dropout=0.2)
    assert abs(float(out.mean()) - 1) < 0.02
    assert float(out.std()) > 0.05


def test_what_is_not_finite_reaches_no_other_sequence() -> None:
    sequences = Sequences.from_lengths(LENGTHS)
    q, k, v = (torch.randn(sequences.rows, HEADS, WIDTH) for _ in range(3))
    k[300] = torch.nan
    out = attention(q, k, v, sequences, backend="grouped", window=9)
    assert out[300].isnan().all()
    assert out[600:].isfinite().all()
