"""Which tokens are hidden, and what stands in their place."""

from __future__ import annotations

import hashlib
from typing import Any

import numpy as np
import pytest

from tensor3d.data import SpecialTokens
from tensor3d.data.masking import (
    _UP_TO,
    Masked,
    MaskingRules,
    StoredMasks,
    choose_runs,
    mask_tokens,
    masked_count,
    masked_counts,
    span_rows,
    word_rows,
)
from tests.data.samples import VOCABULARY


@pytest.mark.parametrize(("length", "count"), [(5, 1), (9, 1), (10, 2), (20, 3), (64, 10), (128, 19), (512, 77)])
def test_how_many_are_guessed(length: int, count: int) -> None:
    assert masked_count(length) == count


def test_counts_of_many_agree_with_counts_of_one() -> None:
    lengths = np.arange(1, 5000)
    assert masked_counts(lengths).tolist() == [masked_count(int(length)) for length in lengths]


@pytest.mark.parametrize(
    ("length", "share", "count"),
    [
        (128, 0.3, 38),
        (512, 0.4, 205),
        (10, 0.4, 4),
        (5, 0.5, 2),
        (7, 0.8, 4),
        (3, 0.5, 1),
        (4, 0.8, 1),
        (100, 0.001, 1),
    ],
)
def test_how_many_are_guessed_at_another_share(length: int, share: float, count: int) -> None:
    """Of short sequences no more than a pair of their length has text: 7 tokens are 3 special ones and 4."""
    assert masked_count(length, share) == count


def test_a_share_goes_in_a_straight_line_to_that_of_the_last_step() -> None:
    rules = MaskingRules(share=0.3, end_share=0.1, steps=5)
    assert [rules.at(step) for step in range(7)] == pytest.approx([0.3, 0.25, 0.2, 0.15, 0.1, 0.1, 0.1])
    assert (rules.most, rules.mean) == pytest.approx((0.3, 0.2))
    assert rules.end == MaskingRules(share=0.1, steps=5)
    assert (MaskingRules(share=0.2, end_share=0.4).most, MaskingRules(share=0.2).at(9)) == (0.4, 0.2)


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"share": 0.0}, r"masked share must be above 0 and at most 0.8. Got 0.0"),
        ({"share": float("nan")}, r"share.*nan"),
        ({"end_share": 0.9}, r"masked end_share.*0.9"),
        ({"mask_replace": 0.7, "random_replace": 0.4}, r"at most 1 together. Got 0.7 and 0.4"),
        ({"random_replace": -0.1}, r"at least 0.*-0.1"),
        ({"steps": 0}, r"steps must be at least 1. Got 0"),
    ],
)
def test_shares_out_of_range_are_named(values: dict, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        MaskingRules(**values)


def test_masks_of_the_default_are_those_of_before_shares_could_be_chosen() -> None:
    """The digest is that of the commit before."""
    rng = np.random.default_rng(0)
    lengths = rng.integers(5, 129, 500)
    ids = rng.integers(4, 2000, lengths.sum())
    ends, guessable = np.cumsum(lengths), np.ones(lengths.sum(), dtype=bool)
    guessable[ends - 1] = guessable[ends - lengths] = False
    special = SpecialTokens(vocab_size=2000, pad=0, cls=1, sep=2, mask=3)
    digest = hashlib.sha256()
    for words in (None, np.arange(2000) % 3 == 0):
        found = mask_tokens(
            ids, guessable, lengths, sequences=np.arange(500), special=special, seed=5, epoch=2, continuations=words
        )
        for array in (found.ids, found.rows, found.labels):
            digest.update(array.tobytes())
    assert digest.hexdigest() == "1343bd5b1dca03e682ce5a6f22d95f6ac81492d14228dde8012164dbb6aacc07"


def sequences(lengths: list[int], seed: int = 0) -> tuple[np.ndarray, np.ndarray]:
    """[CLS] text [SEP] of each length, and where the text stands."""
    rng = np.random.default_rng(seed)
    ids = np.concatenate([[2, *rng.integers(5, 100, size=length - 2), 3] for length in lengths])
    return ids, (ids != 2) & (ids != 3)


def mask(ids: np.ndarray, guessable: np.ndarray, lengths: list[int], numbers: list[int], **where: Any) -> Masked:
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


def test_what_guessed_tokens_become_is_drawn_by_the_shares_asked_for() -> None:
    lengths = [102] * 500
    ids, guessable = sequences(lengths)
    rules = MaskingRules(share=0.4, mask_replace=0.5, random_replace=0.3)
    result = mask(ids, guessable, lengths, list(range(500)), rules=rules)
    assert len(result.rows) == 500 * 41
    seen = result.ids[result.rows]
    hidden, same = (seen == 4).mean(), (seen == result.labels).mean()
    deviation = 0.5 * len(seen) ** -0.5
    assert abs(hidden - 0.5) < 5 * deviation
    assert abs(same - (0.2 + 0.3 / 96)) < 5 * deviation  # another token may be drawn that is the same
    every = mask(ids, guessable, lengths, list(range(500)), rules=MaskingRules(mask_replace=1, random_replace=0))
    assert (every.ids[every.rows] == 4).all()


def test_a_share_that_falls_takes_fewer_of_the_same_tokens() -> None:
    lengths = [60, 33]
    ids, guessable = sequences(lengths)
    rules = MaskingRules(share=0.4, end_share=0.1, steps=4)
    before = None
    for step in range(4):
        found = mask(ids, guessable, lengths, [3, 4], rules=rules, step=step)
        owner = np.repeat(range(2), lengths)[found.rows]
        assert np.bincount(owner).tolist() == [round((0.4 - 0.1 * step) * length) for length in lengths]
        here = dict(zip(found.rows.tolist(), found.ids[found.rows].tolist(), strict=True))
        assert before is None or here.items() <= before.items()
        before = here


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
    with pytest.raises(ValueError, match=r"sequence \b17\b has \b1\b.*10.*2"):
        mask(np.full(10, 9), guessable, [10], [17])


def flags(*continuations: int) -> np.ndarray:
    return np.isin(np.arange(100), continuations)


def test_words_end_where_the_next_begins_and_at_special_tokens() -> None:
    #                CLS  10  51  52 SEP  51  11 SEP
    ids = np.array([  2,  10, 51, 52,  3, 51, 11,  3])  # fmt: skip
    row, size = word_rows(ids, np.array([1, 2, 3, 5, 6]), flags(51, 52))
    assert row.tolist() == [1, 5, 6]
    assert size.tolist() == [3, 1, 1]


def chosen(words: list[list[int]], wanted: int, turns: list[int]) -> list[list[int]]:
    """Which rows of each word of one sequence are taken, when the words' turns come in this order."""
    ids = np.array([50 if n else 10 for word in words for n in range(len(word))])
    first = np.cumsum([0, *map(len, words)])[:-1].tolist()
    turn_of = np.zeros(len(ids), dtype=np.uint64)
    turn_of[first] = np.argsort(turns)
    rows = choose_runs(
        *word_rows(ids, np.arange(len(ids)), flags(50)),
        np.zeros(len(ids), dtype=np.int64),
        np.array([wanted]),
        lambda asked: turn_of[asked],
    )
    flat = [token for word in words for token in word]
    taken = {flat[row] for row in rows.tolist()}
    assert len(taken) == wanted
    return [[token for token in word if token in taken] for word in words]


def test_whole_words_are_taken_in_turn_as_they_fit() -> None:
    words = [[1], [2, 3], [4, 5, 6], [7]]
    assert chosen(words, 3, turns=[1, 0, 2, 3]) == [[1], [2, 3], [], []]
    assert chosen(words, 3, turns=[1, 2, 0, 3]) == [[1], [2, 3], [], []]  # the third is passed over
    assert chosen(words, 4, turns=[2, 1, 0, 3]) == [[1], [], [4, 5, 6], []]
    assert chosen(words, 7, turns=[2, 1, 0, 3]) == words


def test_a_part_of_a_word_is_taken_where_no_word_fits() -> None:
    assert chosen([[1, 2, 3], [4, 5]], 1, turns=[1, 0]) == [[], [4]]
    # Three of the last word, then the second and the first do not fit the one that is left.
    assert chosen([[1, 2], [3, 4, 5], [6, 7, 8]], 4, turns=[2, 1, 0]) == [[], [3], [6, 7, 8]]
    assert chosen([[1, 2, 3], [4, 5, 6]], 4, turns=[0, 1]) == [[1, 2, 3], [4]]


def test_whole_words_keep_the_number_and_are_the_same_alone_and_among_others() -> None:
    lengths = [20, 50, 31, 5]
    ids, guessable = sequences(lengths)
    goes_on = np.arange(100) % 2 == 0
    together = mask(ids, guessable, lengths, [7, 8, 9, 10], continuations=goes_on)
    owner = np.repeat(range(4), lengths)[together.rows]
    assert np.bincount(owner).tolist() == [masked_count(length) for length in lengths]
    assert guessable[together.rows].all()
    middle = slice(20, 70)
    alone = mask(ids[middle], guessable[middle], [50], [8], continuations=goes_on)
    np.testing.assert_array_equal(alone.ids, together.ids[middle])
    assert mask(ids, guessable, lengths, [7, 8, 9, 10]).rows.tolist() != together.rows.tolist()


def test_short_words_are_preferred_only_to_fill_a_gap() -> None:
    """Words of one and of two ids in turn. Nine ids are guessed: where one is missing, only a short word fits."""
    ids = np.tile([2, *[10, 11, 50] * 20, 3], 4000)
    lengths = [62] * 4000
    result = mask(ids, (ids != 2) & (ids != 3), lengths, list(range(4000)), continuations=flags(50))
    counts = np.bincount(result.rows % 62, minlength=62)[1:61].reshape(20, 3)
    assert (counts[:, 1] == counts[:, 2]).all()
    assert 0.8 < counts[:, 1].mean() / counts[:, 0].mean() < 1
    assert np.ptp(counts[:, 0]) < 12 * counts[:, 0].mean() ** 0.5


def spans_of(words: list[tuple[int, int, int]], lengths: list[int]) -> list[tuple[int, int]]:
    """Spans of words (first row, rows, sequence), when the n-th word of each stretch is given the n-th length."""
    row, size, of = (np.array(each) for each in zip(*words, strict=True))
    owner = np.zeros(row.max() + 1, dtype=np.int64)
    owner[row] = of
    middle = _UP_TO - np.diff(_UP_TO, prepend=0.0) / 2  # chance in the midst of a length's share
    bits = [int(middle[length - 1] * 2**53) << 11 for length in lengths]
    found = span_rows(row, size, owner, np.array(bits, dtype=np.uint64))
    return list(zip(*(each.tolist() for each in found), strict=True))


def test_spans_of_words_by_hand() -> None:
    # Words of 1, 2 and 1 rows, a gap, one of 3 and one of 1; then another sequence.
    words = [(1, 1, 0), (2, 2, 0), (4, 1, 0), (6, 3, 0), (9, 1, 0), (10, 1, 1), (11, 1, 1)]
    assert spans_of(words, [2, 9, 1, 1, 1, 10, 1]) == [(1, 3), (4, 1), (6, 3), (9, 1), (10, 2)]
    assert spans_of(words, [1, 1, 1, 2, 5, 1, 1]) == [(1, 1), (2, 2), (4, 1), (6, 4), (10, 1), (11, 1)]
    assert spans_of([(5, 2, 0)], [1]) == [(5, 2)]


def test_lengths_of_spans_are_geometric_up_to_ten() -> None:
    rng = np.random.default_rng(1)
    row, owner = np.arange(400_000), np.zeros(400_000, dtype=np.int64)
    _, size = span_rows(row, np.ones_like(row), owner, rng.integers(0, 2**64, 400_000, dtype=np.uint64))
    assert size.sum() == 400_000
    weights = 0.2 * 0.8 ** np.arange(10)
    expected = weights / weights.sum()
    counts = np.bincount(size, minlength=11)[1:]
    assert len(counts) == 10
    assert (np.abs(counts - expected * len(size)) < 6 * np.sqrt(expected * len(size))).all()
    assert size.mean() == pytest.approx(3.8, abs=0.02)  # as Joshi et al. say


@pytest.mark.parametrize("continuations", [None, np.isin(np.arange(100), range(50, 70))], ids=["tokens", "words"])
def test_spans_are_replaced_alike_in_the_right_number(continuations: np.ndarray | None) -> None:
    lengths = [102] * 300
    ids, guessable = sequences(lengths)
    rules = MaskingRules(spans=True, mask_replace=0.5, random_replace=0.0)
    numbers = list(range(300))
    result = mask(ids, guessable, lengths, numbers, rules=rules, continuations=continuations)
    owner = np.repeat(range(300), lengths)[result.rows]
    assert np.bincount(owner).tolist() == [15] * 300
    assert guessable[result.rows].all()
    # Of neighbours that are guessed most are of one span, and then both are hidden or none is.
    beside = (np.diff(result.rows) == 1) & (owner[1:] == owner[:-1])
    hidden = result.ids[result.rows] == 4
    assert beside.mean() > 0.6
    assert (hidden[1:] == hidden[:-1])[beside].mean() > 0.85
    assert abs(hidden.mean() - 0.5) < 0.06
    alone = mask(ids[102:204], guessable[102:204], [102], [1], rules=rules, continuations=continuations)
    np.testing.assert_array_equal(alone.ids, result.ids[102:204])


def test_stored_masks_are_put_back() -> None:
    lengths = np.array([12, 30])
    ids, guessable = sequences(lengths.tolist())
    masked = mask(ids, guessable, lengths.tolist(), [0, 1])
    stored = StoredMasks.of(masked, lengths)
    assert len(stored.places) == 2 + 4
    assert (stored.places[:2] < 12).all()
    again = stored.apply(ids, lengths)
    for name in ("ids", "rows", "labels"):
        np.testing.assert_array_equal(getattr(again, name), getattr(masked, name))
