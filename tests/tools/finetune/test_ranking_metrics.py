"""Metrics of rankings: written out by hand, and scikit-learn's; the relevance files of BEIR."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tools.finetune.ranking_metrics import in_rank_order, ndcg, ranking_metrics, read_relevance, recall, reciprocal_rank


def test_one_ranking_by_hand() -> None:
    ranked, judged = np.array([0.0, 3, 0, 1]), np.array([1.0, 3, 0, 0, 2])  # the document of grade 2 was not found
    assert reciprocal_rank(ranked, 10) == 1 / 2
    assert (reciprocal_rank(ranked, 1), reciprocal_rank(ranked, 2)) == (0, 1 / 2)
    assert [recall(ranked, judged, cut) for cut in (1, 2, 4, 100)] == [0, 1 / 3, 2 / 3, 2 / 3]
    best = 3 + 2 / math.log2(3) + 1 / 2
    assert ndcg(ranked, judged, 10) == pytest.approx((3 / math.log2(3) + 1 / math.log2(5)) / best, abs=1e-15)
    assert ndcg(ranked, judged, 2) == pytest.approx(3 / math.log2(3) / (3 + 2 / math.log2(3)), abs=1e-15)
    best = 7 + 3 / math.log2(3) + 1 / 2
    expected = (7 / math.log2(3) + 1 / math.log2(5)) / best
    assert ndcg(ranked, judged, 10, "exponential") == pytest.approx(expected, abs=1e-15)


@pytest.mark.parametrize("gain", ["linear", "exponential"])
def test_ndcg_is_that_of_scikit_learn_where_no_scores_are_equal(gain: str) -> None:
    from sklearn.metrics import ndcg_score  # takes every process that collects tests half a second

    generator = np.random.default_rng(0)
    for cut in (1, 3, 10, 50):
        scores, grades = generator.permutation(20).astype(float), generator.integers(0, 4, 20).astype(float)
        gains = grades if gain == "linear" else 2**grades - 1
        found = ndcg(in_rank_order(scores, grades), grades, cut, gain)  # type: ignore[arg-type]
        assert found == pytest.approx(ndcg_score(gains[None], scores[None], k=cut), abs=1e-12)


@pytest.mark.parametrize(("high", "low"), [(1100.0, 0.0), (1e308, 1e308), (1e-20, 1e-20), (1e-310, 0.0)])
@pytest.mark.parametrize("gain", ["linear", "exponential"])
def test_grades_of_any_size_have_an_ndcg(gain: Any, high: float, low: float) -> None:
    """Of the gains themselves some are infinite, and some 0: a ratio of such is no number."""
    last, judged = np.array([0.0, low, high]), np.array([high, low, 0.0])
    relevant = 1 + (low > 0)
    best = sum(1 / math.log2(place + 2) for place in range(relevant))
    assert ndcg(judged, judged, 10, gain) == 1
    assert ndcg(last, judged, 10, gain) == pytest.approx(
        sum(1 / math.log2(place + 2) for place in range(3 - relevant, 3)) / best, rel=1e-9
    )


def test_equal_scores_do_not_favour_the_relevant_wherever_it_is_listed() -> None:
    for place in range(4):
        grades = np.zeros(4)
        grades[place] = 1
        assert reciprocal_rank(in_rank_order(np.full(4, 0.5), grades), 10) == 1 / 4
    # One is truly better, two are tied behind it.
    assert in_rank_order(np.array([0.1, 0.1, 0.9]), np.array([2.0, 1, 0])).tolist() == [0, 1, 2]
    with pytest.raises(ValueError, match="1 nan"):
        in_rank_order(np.array([np.nan, 1]), np.zeros(2))


def test_queries_without_a_relevant_document_are_left_out_and_counted() -> None:
    first, second, nothing = np.array([1.0, 0]), np.array([0.0, 1]), np.zeros(2)
    found = ranking_metrics(
        [(first, first), (second, second), (nothing, nothing)], mrr=(1, 10), ndcg_at=(10,), recall_at=(1,)
    )
    assert found.metrics == {
        "mrr@1": 1 / 2,
        "mrr@10": 3 / 4,
        "ndcg@10": pytest.approx((1 + 1 / math.log2(3)) / 2),
        "recall@1": 1 / 2,
    }
    assert (found.queries, found.without) == (2, 1)
    with pytest.raises(ValueError, match="none of 1 queries"):
        ranking_metrics([(nothing, nothing)])


def test_grades_below_0_are_not_relevant() -> None:
    ranked = np.array([-2.0, 1])
    assert reciprocal_rank(ranked, 10) == 1 / 2
    assert ndcg(ranked, ranked, 10) == pytest.approx(1 / math.log2(3))


HEAD = "query-id\tcorpus-id\tscore\n"


def test_a_relevance_file(tmp_path: Path) -> None:
    file = tmp_path / "test.tsv"
    file.write_text(HEAD + "q2\td1\t2\nq1\td1\t0\nq2\td0\t1\nq2\td0\t1\n")
    assert read_relevance(file, {"q1", "q2"}, {"d0", "d1"}) == {"q2": {"d1": 2, "d0": 1}, "q1": {"d1": 0}}


@pytest.mark.parametrize(
    ("text", "told"),
    [
        (HEAD + "q1\td1\t1\nq1\td9\t1\n", "line 3: there is no document 'd9'"),
        (HEAD + "q9\td1\t1\n", "line 2: there is no query 'q9'"),
        (HEAD + "q1\td1\thigh\n", "line 2: a grade must be a number, 0 for what is not relevant. Got 'high'"),
        (HEAD + "q1\td1\tinf\n", "line 2: a grade must be a number"),
        (HEAD + "q1\td1\t1\nq1\td1\t2\n", "line 3: the document 'd1' has the grade 1 for the query 'q1' already"),
        (HEAD + "q1\td1\n", "line 2: it has 2 columns"),
        (HEAD, "has no row"),
        ("q1 0 d1 1\nq2 0 d1 1\n", "has no column 'query-id'"),
    ],
)
def test_a_relevance_file_that_is_wrong(tmp_path: Path, text: str, told: str) -> None:
    file = tmp_path / "test.tsv"
    file.write_text(text)
    with pytest.raises(ValueError, match=r"test\.tsv") as problem:
        read_relevance(file, {"q1"}, {"d1"})
    assert told in str(problem.value)
