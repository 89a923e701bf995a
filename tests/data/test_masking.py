"""Which tokens are hidden, and what stands in their place."""

from __future__ import annotations

import numpy as np
import pytest

from tensor3d.data.masking import Masked, mask_tokens, masked_count, masked_counts
from tests.data.samples import VOCABULARY


@pytest.mark.parametrize(("length", "count"), [(5, 1), (9, 1), (10, 2), (20, 3), (64, 10), (128, 19), (512, 77)])
def test_how_many_are_guessed(length: int, count: int) -> None:
    assert masked_count(length) == count


def test_counts_of_many_agree_with_counts_of_one() -> None:
    lengths = np.arange(1, 5000)
    assert masked_counts(lengths).tolist() == [masked_count(int(length)) for length in lengths]


def sequences(lengths: list[int], seed: int = 0) -> tuple[np.ndarray, np.ndarray]:
    """[CLS] text [SEP] of each length, and where the text stands."""
    rng = np.random.default_rng(seed)
    ids = np.concatenate([[2, *rng.integers(5, 100, size=length - 2), 3] for length in lengths])
    return ids, (ids != 2) & (ids != 3)


def mask(ids: np.ndarray, guessable: np.ndarray, lengths: list[int], numbers: list[int], **where: int) -> Masked:
    where = {"seed": 1, "epoch": 0, **where}
    return mask_tokens(ids, guessable, np.array(lengths), sequences=np.array(numbers), special=VOCABULARY, **where)


def test_only_text_is_guessed_in_the_right_number() -> None:
    lengths = [5, 40, 7, 128, 64]
    ids, guessable = sequences(lengths)
    result = mask(ids, guessable, lengths, [0, 1, 2, 3, 4])
    assert guessable[result.rows].all()
    assert (np.diff(result.rows) > 0).all()
    np.testing.assert_array_equal(result.labels, ids[result.rows])
    owner = np.repeat(range(5), lengths)[result.rows]
    assert np.bincount(owner).tolist() == [masked_count(length) for length in lengths]
    untouched = np.setdiff1d(np.arange(len(ids)), result.rows)
    np.testing.assert_array_equal(result.ids[untouched], ids[untouched])


def test_a_sequence_is_masked_alike_alone_and_among_others() -> None:
    lengths = [20, 50, 31]
    ids, guessable = sequences(lengths)
    together = mask(ids, guessable, lengths, [7, 8, 9])
    middle = slice(20, 70)
    alone = mask(ids[middle], guessable[middle], [50], [8])
    np.testing.assert_array_equal(alone.ids, together.ids[middle])
    inside = (together.rows >= 20) & (together.rows < 70)
    np.testing.assert_array_equal(alone.rows + 20, together.rows[inside])
    np.testing.assert_array_equal(alone.labels, together.labels[inside])


def test_seed_epoch_and_sequence_change_the_mask() -> None:
    ids, guessable = sequences([128])
    drawn = [
        tuple(mask(ids, guessable, [128], [number], seed=seed, epoch=epoch).rows)
        for seed, epoch, number in ((1, 0, 0), (2, 0, 0), (1, 1, 0), (1, 0, 1))
    ]
    assert len(set(drawn)) == 4
    assert drawn[0] == tuple(mask(ids, guessable, [128], [0]).rows)


def test_shares_of_mask_random_and_unchanged() -> None:
    lengths = [128] * 1500
    ids, guessable = sequences(lengths)
    result = mask(ids, guessable, lengths, list(range(1500)))
    seen = result.ids[result.rows]
    masked = (seen == VOCABULARY.mask).mean()
    unchanged = (seen == result.labels).mean()
    # 28,500 draws: a standard deviation is 0.24 % of them for 80 %, 0.18 % for 10 %.
    assert masked == pytest.approx(0.8, abs=0.01)
    # One in 96 of the random tokens is the old one.
    assert unchanged == pytest.approx(0.1 + 0.1 / 96, abs=0.008)
    replaced = seen[(seen != VOCABULARY.mask) & (seen != result.labels)]
    counts = np.bincount(replaced, minlength=100)
    assert counts[[0, 2, 3, 4]].tolist() == [0, 0, 0, 0]
    # Every ordinary id is drawn about equally often, the unknown one too.
    expected = len(replaced) / 96
    assert counts[1] > 0
    assert (np.abs(np.delete(counts, [0, 2, 3, 4]) - expected) < 6 * expected**0.5).all()


def test_every_place_is_guessed_equally_often() -> None:
    lengths = [42] * 4000
    ids, guessable = sequences(lengths)
    result = mask(ids, guessable, lengths, list(range(4000)))
    counts = np.bincount(result.rows % 42, minlength=42)
    expected = 4000 * masked_count(42) / 40
    assert counts[[0, 41]].tolist() == [0, 0]
    assert (np.abs(counts[1:41] - expected) < 6 * expected**0.5).all()


def test_too_little_text_is_named() -> None:
    guessable = np.zeros(10, dtype=bool)
    guessable[3] = True
    with pytest.raises(ValueError, match="sequence 17 has 1 tokens of text and 10 in all, of which 2 must be guessed"):
        mask(np.full(10, 9), guessable, [10], [17])
