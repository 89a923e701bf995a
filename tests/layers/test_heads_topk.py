"""The likeliest entries of a vocabulary in slices: the same on any cube, also among equal logits and empty slices."""

from __future__ import annotations

import pytest
import torch

from tensor3d import Cube, local_block
from tensor3d.distributed.cube_shape import chunk_bounds
from tensor3d.layers.heads import vocab_topk
from tensor3d.sharding.activation_layout import gather_rows
from tests.ranks import run_ranks

ROWS = 6


def some_logits(vocab: int) -> torch.Tensor:
    """Small whole numbers, so that many are equal."""
    generator = torch.Generator().manual_seed(3)
    return torch.randint(0, 4, (ROWS, vocab), generator=generator).double()


def found(vocab: int, k: int) -> tuple[torch.Tensor, torch.Tensor]:
    cube = Cube(1, 4, 2)
    y, z = cube.axis("y"), cube.axis("z")
    first, last = chunk_bounds(vocab, y.size, y.index)
    own = some_logits(vocab).chunk(z.size)[z.index][:, first:last]
    ids, logs = vocab_topk(own, k, vocab, cube)
    return gather_rows(ids, cube, "y"), gather_rows(logs, cube, "y")


@pytest.mark.parametrize(("vocab", "k"), [(11, 3), (11, 11), (2, 2)])
def test_as_a_stable_sort_of_whole_rows(vocab: int, k: int) -> None:
    logits = some_logits(vocab)
    wanted = logits.log_softmax(1).sort(dim=1, descending=True, stable=True)
    for ids, logs in run_ranks(8, found, vocab, k):
        assert torch.equal(ids, wanted.indices[:, :k])
        torch.testing.assert_close(logs, wanted.values[:, :k], rtol=1e-12, atol=0)


def test_what_cannot_be_is_refused() -> None:
    cube = Cube.single()
    with pytest.raises(ValueError, match=r"k must lie between 1 and the vocabulary of 5\. Got 6"):
        vocab_topk(torch.zeros(2, 5), 6, 5, cube)
    with pytest.raises(ValueError, match=r"needs logits \(rows, 5\)\. Got \(2, 4\)"):
        vocab_topk(torch.zeros(2, 4), 1, 5, cube)
    with pytest.raises(ValueError, match='face must be "y" or "z"'):
        vocab_topk(torch.zeros(2, 5), 1, 5, cube, "x")  # type: ignore[arg-type]
    on_z = local_block(torch.zeros(4, 5), cube, "z")
    with pytest.raises(ValueError, match='face must be "y" or "z"'):
        gather_rows(on_z, cube, "x")  # type: ignore[arg-type]
