"""Arithmetic of weights and shards, by hand."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tools.corpus.samples.document_runs import DocRun, _Cutter
from tools.corpus.samples.merge_shards import cuts_missing, deal, kept, targets


@pytest.mark.parametrize(
    ("drawn", "weights", "wanted"),
    [
        ([70, 10], None, [70, 10]),
        ([70, 10], [0.7, 0.3], [70, 30]),
        ([70, 10], [7, 3], [70, 30]),
        ([10, 30], [0.5, 0.5], [30, 30]),
        ([60, 40], [0.6, 0.4], [60, 40]),
    ],
)
def test_every_corpus_is_used_and_shares_are_those_of_the_weights(
    drawn: list[int], weights: list[float] | None, wanted: list[int]
) -> None:
    assert targets(drawn, weights) == wanted


@pytest.mark.parametrize(("cuts", "target", "more"), [([10], 10, 0), ([10], 11, 1), ([10], 30, 2), ([10, 12], 34, 2)])
def test_how_often_a_corpus_is_drawn_again(cuts: list[int], target: int, more: int) -> None:
    assert cuts_missing(cuts, target) == more


def test_of_the_last_cut_a_part_is_used_from_all_over_it() -> None:
    assert kept([[4, 6], [5, 5], [9]], 15) == [[4, 6], [2, 3], [0]]
    assert kept([[4, 6], [4, 4, 4]], 13) == [[4, 6], [1, 1, 1]]
    assert kept([[3], [0, 3]], 6) == [[3], [0, 3]]


def test_three_parts_are_dealt_to_two_shards() -> None:
    # Numbers 0 1 2 | 3 4 | 5: the even ones are of shard 0.
    assert deal([3, 2, 1], 2) == [[(0, 2), (0, 1), (0, 0)], [(2, 3), (1, 2), (0, 1)]]


@given(st.lists(st.integers(0, 20), max_size=6), st.integers(1, 5))
def test_dealt_shards_are_even_and_hold_everything_once(counts: list[int], shards: int) -> None:
    dealt = deal(counts, shards)
    sizes = [sum(end - begin for begin, end in places) for places in dealt]
    assert max(sizes) - min(sizes) <= 1
    for part, count in enumerate(counts):
        here = [n for places in dealt for n in range(*places[part])]
        assert here == list(range(count))


def runs(sizes: list[int]) -> list[DocRun]:
    cutter = _Cutter(10)
    for number, size in enumerate(sizes):
        if size:
            cutter.add(number, size)
    return cutter.end(len(sizes))


def test_a_run_has_two_documents_at_least_and_small_rests_join() -> None:
    assert runs([5, 5, 5, 5]) == [DocRun(0, 2, 10), DocRun(2, 4, 10)]
    assert runs([50, 1, 3, 3, 3, 3]) == [DocRun(0, 2, 51), DocRun(2, 6, 12)]
    assert runs([5, 5, 30]) == [DocRun(0, 3, 40)]
    assert runs([5, 5, 2, 2]) == [DocRun(0, 4, 14)]
    assert runs([7]) == [DocRun(0, 1, 7)]
    assert runs([]) == []


def test_documents_without_ids_are_of_a_run_too() -> None:
    assert runs([0, 5, 0, 5, 0, 5, 5, 0, 0]) == [DocRun(0, 4, 10), DocRun(4, 9, 10)]
    assert runs([5, 5, 2, 0]) == [DocRun(0, 4, 12)]
    assert runs([0, 0]) == []
