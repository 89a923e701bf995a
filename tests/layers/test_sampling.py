"""Entries of a vocabulary are drawn as softmax says, and the same on any cube."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from tensor3d import Cube
from tensor3d.distributed.cube_shape import chunk_bounds
from tensor3d.layers.sampling import gumbel, vocab_sample
from tests.ranks import run_ranks

ROWS = 20_000


def logits_and_draws(vocab: int, rows: int) -> tuple[Tensor, Tensor]:
    random = torch.Generator().manual_seed(1)
    logits = torch.randn(rows, vocab, generator=random, dtype=torch.float64)
    return logits, torch.randint(-(2**63), 2**63 - 1, (rows,), generator=random)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_entries_come_as_often_as_softmax_says(dtype: torch.dtype) -> None:
    logits, draws = logits_and_draws(7, ROWS)
    logits = logits[:1].to(dtype).expand(ROWS, 7)
    drawn = vocab_sample(logits, draws, 7, Cube.single())
    wanted = logits[0].double().softmax(0)
    deviations = (drawn.bincount(minlength=7) / ROWS - wanted) / (wanted * (1 - wanted) / ROWS).sqrt()
    assert deviations.abs().max() < 4
    # Neighbours, by row as by draw, say nothing of one another.
    for following in (vocab_sample(logits, draws + 1, 7, Cube.single()), drawn.roll(1)):
        assert abs(float((drawn == following).double().mean() - wanted.square().sum())) < 4 * 0.5 / ROWS**0.5


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_noise_is_finite_and_gumbels(dtype: torch.dtype) -> None:
    _, draws = logits_and_draws(1, 2000)
    noise = gumbel(draws.unsqueeze(1), torch.arange(500), dtype)
    assert noise.isfinite().all()
    assert float(noise.mean()) == pytest.approx(0.5772, abs=0.006)
    assert float(noise.var()) == pytest.approx(torch.pi**2 / 6, abs=0.02)


@pytest.mark.parametrize("bits", [0, 2**32 - 1])
def test_the_outermost_bits_give_finite_noise(bits: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tensor3d.layers.sampling._scrambled", lambda each: torch.full_like(each, bits))
    for dtype in (torch.float64, torch.float32):
        assert gumbel(torch.zeros(1, 1, dtype=torch.int64), torch.zeros(1, dtype=torch.int64), dtype).isfinite().all()


def drawn_on(cubes: list[tuple[int, int, int]], vocabs: list[int]) -> list[Tensor]:
    found = []
    for shape in cubes:
        cube = Cube(*shape)
        axis = cube.axis("y")
        for vocab in vocabs:
            logits, draws = logits_and_draws(vocab, 30)
            first, last = chunk_bounds(vocab, axis.size, axis.index)
            found.append(vocab_sample(logits[:, first:last].contiguous(), draws, vocab, cube))
    return found


def test_any_cube_draws_the_same_also_where_a_slice_is_empty() -> None:
    vocabs, cubes = [1, 5, 67], [(1, 4, 1), (1, 2, 2)]
    wanted = [vocab_sample(*logits_and_draws(vocab, 30), vocab, Cube.single()) for vocab in vocabs]
    assert len(wanted[2].unique()) > 10
    for found in run_ranks(4, drawn_on, cubes, vocabs):
        for got, each in zip(found, wanted * len(cubes), strict=True):
            assert torch.equal(got, each)


@pytest.mark.parametrize(
    ("rows", "columns", "message"),
    [
        (3, 6, r"vocab_sample over 5 entries on face y needs logits \(rows, 5\). Got \(3, 6\)"),
        (2, 5, r"draws must be int64 \(2,\), one for each row of logits. Got torch.int64 \(3,\)"),
    ],
)
def test_what_does_not_fit_is_refused(rows: int, columns: int, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        vocab_sample(torch.zeros(rows, columns), torch.zeros(3, dtype=torch.int64), 5, Cube.single())
