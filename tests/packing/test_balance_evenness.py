"""How even lengths of a known law get, and the documented example."""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray

from tensor3d.packing.balance import Work, deal, imbalance

LARGE = Work(per_token=6 * 24 * 12 * 1024**2, per_square=12 * 24 * 1024)  # the encoder of BERT-large


def lengths(rng: np.random.Generator, count: int) -> NDArray[np.int64]:
    """A quarter of them 512, the others falling off slowly from 5, as in an encyclopaedia cut to 512 tokens."""
    drawn = 5 + np.floor(rng.exponential(320, size=count))
    return np.minimum(drawn, 512).astype(np.int64)


@pytest.mark.parametrize(("ranks", "count", "most"), [(8, 56, 1.0015), (64, 8, 1.006), (256, 8, 1.006)])
def test_sequences_get_even_in_tokens_and_work(ranks: int, count: int, most: float) -> None:
    rng = np.random.default_rng(ranks)
    for _ in range(8):
        tokens = lengths(rng, ranks * count)
        work = LARGE.of(tokens, tokens**2)
        result = deal(np.stack([tokens, work], axis=1), ranks)
        assert imbalance(tokens, result) <= most
        assert imbalance(work, result) <= most
        snake, order = (imbalance(work, deal(work, ranks, method)) for method in ("snake", "order"))
        assert imbalance(work, deal(work, ranks)) - 1 < (snake - 1) / 2
        assert order > 1.05


@pytest.mark.parametrize("ranks", [8, 64, 256])
@pytest.mark.parametrize("objectives", [1, 2])
def test_packs_get_even_in_work(ranks: int, objectives: int) -> None:
    rng = np.random.default_rng(ranks)
    order = []
    for _ in range(8):
        cuts = np.sort(rng.integers(1, 512, size=(ranks * 8, 3)), axis=1)
        cuts[rng.random(len(cuts)) < 0.3] = 512  # one sequence fills the pack
        pieces = np.diff(cuts, axis=1, prepend=0, append=512)
        pieces[:, -1] -= rng.integers(0, 5, size=len(pieces)) * (pieces[:, -1] > 5)  # nearly full
        tokens = pieces.sum(axis=1)
        work = LARGE.of(tokens, (pieces**2).sum(axis=1))
        result = deal(work if objectives == 1 else np.stack([tokens, work], axis=1), ranks)
        order.append(imbalance(work, deal(work, ranks, "order")))
        assert imbalance(work, result) <= 1.001
        assert imbalance(tokens, result) <= 1.006
    assert np.mean(order) > 1.009


def test_the_example_of_the_documentation(capsys: pytest.CaptureFixture[str]) -> None:
    page = (Path(__file__).parents[2] / "docs" / "balance.md").read_text()
    (code,) = re.findall(r"```python\n(.*?)```", page, re.DOTALL)
    exec(compile(code, "balance.md", "exec"), {})
    printed = " ".join(f"{float(number):.4f}" for number in capsys.readouterr().out.split())
    assert printed == code.rpartition("# ")[2].strip()
