"""Layers and functions that are fed a tensor of another rank or type: a message that names both."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

import tensor3d as t3d
from tensor3d import Cube, Sequences
from tests.ranks import run_ranks
from tests.single_device_reference import fast_alone

CUBE, SEQUENCES, H = Cube.single(), Sequences.from_lengths([4]), 8
CUBE.manual_seed(0)
LINEAR = t3d.Linear3D(H, H, CUBE)
READERS: dict[str, Callable[[Tensor], object]] = {
    "Linear3D": t3d.Linear3D(H, H, CUBE),
    "Projection3D": t3d.Projection3D(H, 5, CUBE),
    "LayerNorm3D": t3d.LayerNorm3D(H, CUBE),
    "RMSNorm3D": t3d.RMSNorm3D(H, CUBE),
    "SmallHead3D": t3d.SmallHead3D(H, 3, CUBE, "z"),
    "MLP3D": t3d.MLP3D(H, CUBE),
    "GatedMLP3D": t3d.GatedMLP3D(H, CUBE, 16),
    "Attention3D": lambda x: t3d.Attention3D(H, 2, CUBE)(x, SEQUENCES),
    "TransformerLayer3D": lambda x: t3d.TransformerLayer3D(H, 2, CUBE)(x, SEQUENCES),
    "matmul": lambda x: t3d.matmul(x, LINEAR.weight, CUBE, "z"),
    "select": lambda x: t3d.select(x, torch.tensor([0]), CUBE),
    "sum_rows": lambda x: t3d.sum_rows(x, torch.zeros(4, dtype=torch.int64), 1, CUBE),
    "spread_rows": lambda x: t3d.spread_rows(x, torch.zeros(4, dtype=torch.int64), CUBE),
    "unfold_rows": lambda x: t3d.unfold_rows(x, torch.zeros(4, dtype=torch.int64), 3, CUBE),
    "vocab_topk": lambda x: t3d.vocab_topk(x, 2, H, CUBE),
}


@pytest.mark.parametrize("reader", READERS)
def test_another_rank_or_type_is_named_with_what_is_needed(reader: str) -> None:
    for shape in ((H,), (), (1, 1, 4, H)):
        with pytest.raises(ValueError, match=r"needs a matrix \(rows, columns\).*Got \d dims, shape \(") as caught:
            READERS[reader](torch.ones(shape))
        assert str(shape) in str(caught.value)
        assert "face" not in str(caught.value)
        assert ("unsqueeze(0)" in str(caught.value)) == (len(shape) == 1)
    for dtype in (torch.int64, torch.bool, torch.complex64):
        with pytest.raises(
            ValueError, match=rf"needs floating-point numbers. Got {dtype}, shape \(4, 8\).*Embedding3D"
        ):
            READERS[reader](torch.ones(4, H).to(dtype))


def test_dropout_takes_any_shape_of_numbers_that_can_be_scaled() -> None:
    dropout = t3d.Dropout3D(0.5, CUBE)
    assert dropout(torch.ones(3)).shape == (3,)
    with pytest.raises(ValueError, match=r"Dropout3D needs floating-point numbers. Got torch.int64"):
        dropout(torch.ones(4, H, dtype=torch.int64))


@pytest.mark.parametrize(
    ("call", "match"),
    [
        (lambda: t3d.cross_entropy(torch.ones(4, H), torch.zeros(4), H, CUBE), r"labels.*torch.float32.*long\(\)"),
        (lambda: t3d.cross_entropy(torch.ones(4, H).long(), torch.zeros(4).long(), H, CUBE), "floating-point.*int64"),
        (lambda: t3d.local_rows(torch.tensor(3), CUBE), "dim for the rows.*single value 3"),
        (lambda: t3d.local_shard(torch.tensor(3), CUBE), "dim for its sequences.*single value 3"),
        (lambda: t3d.matmul(torch.ones(4, 9), LINEAR.weight, CUBE, "z"), r"\(8, 8\).*has 8 columns.*\(4, 9\)"),
        (lambda: t3d.sum_rows(torch.ones(4, H), torch.zeros(3).long(), 1, CUBE), r"row of the plane, 4 of.*\(3,\)"),
        (lambda: t3d.sum_rows(torch.ones(4, H), torch.full((4,), 2), 2, CUBE), "owner.*below 2.*from 2 to 2"),
        (lambda: t3d.sum_rows(torch.ones(4, H), torch.zeros(4), 2, CUBE), "owner.*int64.*torch.float32"),
        (lambda: t3d.spread_rows(torch.ones(2, H), torch.full((4,), 2), CUBE), "owner.*below 2.*from 2 to 2"),
        (lambda: t3d.spread_rows(torch.ones(2, H), torch.zeros(4), CUBE), "owner.*int64.*torch.float32"),
    ],
)
def test_values_beside_an_activation_are_checked_too(call: Callable[[], object], match: str) -> None:
    with pytest.raises(ValueError, match=match):
        call()


def _a_bad_label_of_one_rank(shape: tuple[int, int, int, int]) -> tuple[list[str], float, bool]:
    cube = Cube(*shape)
    cube.manual_seed(0)
    embedding, head = t3d.Embedding3D(5, H, cube), t3d.Projection3D(H, 5, cube)
    bad, good = torch.tensor([4, 5]), torch.tensor([4, -100])

    def loss(labels: Tensor) -> Tensor:
        logits = head(embedding(torch.arange(2 * cube.shape.z)))
        losses, _ = t3d.cross_entropy(logits, labels, 5, cube)
        return t3d.all_reduce_replicated(losses.sum(), cube.over("data", "x", "z"))

    messages = []
    found = loss(bad if cube.rank == 1 else good)
    for call in (found.backward, lambda: t3d.cross_entropy(torch.ones(2, 5), bad, 5, cube)):
        try:
            call()
        except ValueError as refusal:
            messages.append(str(refusal))
    cube.ledger.discard()
    again = loss(good)
    again.backward()
    return messages, found.item(), math.isfinite(again.item())


@pytest.mark.parametrize("shape", fast_alone((1, 1, 2, 1), (1, 1, 1, 2), (2, 1, 1, 1)))
def test_a_bad_label_of_one_rank_is_refused_on_every_rank(shape: tuple[int, int, int, int]) -> None:
    """Ranks have rows of their own along x, data and the axis of the face: were it refused where it is seen, the others
    would wait in their next sum."""
    one, other = run_ranks(2, _a_bad_label_of_one_rank, shape, timeout=20)
    messages, loss, good_again = one
    assert messages == other[0]
    assert messages == [
        "rank 1: labels must be at least 0 and below 5, or -100. Got 5.",
        "labels must be at least 0 and below 5, or -100. Got 5.",  # of what needs no gradient, on either for itself
    ]
    assert math.isnan(loss)
    assert math.isnan(other[1])
    assert good_again
    assert other[2]
