"""How good rankings are, as trec_eval and BEIR (Thakur et al. 2021, arXiv 2104.08663) count it, and the relevance files
that BEIR has.

A query's documents have grades: above 0 a document is relevant, and the more so the higher its grade is. A query with
no relevant document says nothing of a ranking: it is left out of every mean, and counted.

Equal scores rank as badly as they can, the lower grade first. So neither the order in which documents are listed nor
their names can make a ranking look better than its scores are, and a model that gives all documents the same score has
the worst metrics. (trec_eval takes the later name first,
sentence-transformers' InformationRetrievalEvaluator those that `torch.topk` gives.)
"""

from __future__ import annotations

from collections.abc import Container, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from tools.finetune.rows import read_rows

Grades = NDArray[np.floating]
Gain = Literal["linear", "exponential"]
""""linear": a document counts its grade, as in trec_eval and BEIR; "exponential": 2^grade - 1 (Burges et al. 2005).
For grades 0 and 1 they are the same."""


def in_rank_order(scores: NDArray[Any], grades: NDArray[Any]) -> Grades:
    """(n,): the grades, highest score first; of equal scores the lower grade first.

    Raises:
        ValueError: other shapes than (n,) of both, or a score that is nan.
    """
    if scores.shape != grades.shape or scores.ndim != 1 or np.isnan(scores).any():
        raise ValueError(
            f"as many scores as grades are needed, none of them nan. Got {scores.shape} and {grades.shape}, "
            f"{int(np.isnan(scores).sum())} nan."
        )
    ranked: Grades = np.asarray(grades, dtype=np.float64)[np.lexsort((grades, -scores))]
    return ranked


# --- Of one query -----------------------------------------------------------------------------------------------------
#
# ranked   (n,): the grades of the documents that were found, best first
# judged   (m,): those of all documents that have a grade, found or not, in any order; one of them is above 0


def reciprocal_rank(ranked: Grades, cut: int) -> float:
    """One over the place of the first relevant document, from 1; 0 where none is among the first `cut`."""
    places = np.flatnonzero(ranked[:cut] > 0)
    return 1 / float(places[0] + 1) if len(places) else 0.0


def recall(ranked: Grades, judged: Grades, cut: int) -> float:
    """The share of the relevant documents that are among the first `cut`."""
    return float((ranked[:cut] > 0).sum() / (judged > 0).sum())


def ndcg(ranked: Grades, judged: Grades, cut: int, gain: Gain = "linear") -> float:
    """The gains of the first `cut` documents, each over log2(place + 1), by those of the best ranking (Järvelin and
    Kekäläinen 2002). Grades below 0 count as 0."""
    best = np.sort(judged)[::-1]
    highest = float(best[0])
    return _discounted(ranked, cut, gain, highest) / _discounted(best, cut, gain, highest)


def _discounted(ranked: Grades, cut: int, gain: Gain, highest: float) -> float:
    """By about the gain of the highest grade, of which a ratio knows nothing: 2^1100 is no number, nor 2^1e-20 - 1."""
    grades = np.maximum(ranked[:cut], 0).astype(np.float64)
    if gain == "exponential":
        gains = np.exp2(grades - highest) * -np.expm1(-grades * np.log(2))
    else:
        gains = np.ldexp(grades, -int(np.frexp(highest)[1]))
    return float((gains / np.log2(np.arange(2, len(gains) + 2))).sum())


# --- The mean over queries --------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class Rankings:
    """Means over the queries that have a relevant document."""

    metrics: dict[str, float]
    """"mrr@10", "ndcg@10", "recall@10" and so on."""
    queries: int
    """Over which the means are."""
    without: int
    """Queries with no relevant document, which are left out."""


def ranking_metrics(
    queries: Iterable[tuple[Grades, Grades]],
    *,
    mrr: Iterable[int] = (10,),
    ndcg_at: Iterable[int] = (10,),
    recall_at: Iterable[int] = (),
    gain: Gain = "linear",
) -> Rankings:
    """Metrics by their names.

    Args:
        queries: (ranked, judged) of each, as above.
        mrr, ndcg_at, recall_at: cuts.

    Raises:
        ValueError: no query has a relevant document.
    """
    pairs = list(queries)
    useful = [(ranked, judged) for ranked, judged in pairs if (judged > 0).any()]
    if not useful:
        raise ValueError(f"none of {len(pairs)} queries has a relevant document, and a ranking needs one.")
    values = {f"mrr@{cut}": [reciprocal_rank(ranked, cut) for ranked, _ in useful] for cut in mrr}
    values |= {f"ndcg@{cut}": [ndcg(ranked, judged, cut, gain) for ranked, judged in useful] for cut in ndcg_at}
    values |= {f"recall@{cut}": [recall(ranked, judged, cut) for ranked, judged in useful] for cut in recall_at}
    metrics = {name: float(np.mean(of_queries)) for name, of_queries in values.items()}
    return Rankings(metrics=metrics, queries=len(useful), without=len(pairs) - len(useful))


# --- Relevance files --------------------------------------------------------------------------------------------------

_QUERY, _DOCUMENT, _GRADE = "query-id", "corpus-id", "score"


def grade_of(value: object, where: str) -> float:
    """Raises ValueError, naming the place, for what is no finite number; text may spell one."""
    try:
        grade = float(value) if isinstance(value, int | float | str) and not isinstance(value, bool) else np.nan
    except (ValueError, OverflowError):
        grade = np.nan
    if not np.isfinite(grade):
        raise ValueError(f"{where}: a grade must be a number, 0 for what is not relevant. Got {value!r:.60}.")
    return grade


def read_relevance(
    path: Path, queries: Container[str] | None = None, documents: Container[str] | None = None
) -> dict[str, dict[str, float]]:
    """The grades of a BEIR file (qrels/*.tsv, with the header query-id, corpus-id, score), by query and document, in
    the file's order.

    Args:
        queries, documents: those that exist. None: any.

    Raises:
        ValueError: naming the file and the line: see `read_rows`; an unknown query or document, a grade that is no
            number, two grades for one document. Also a file without a row.
    """
    found: dict[str, dict[str, float]] = {}
    for row in read_rows(path, (_QUERY, _DOCUMENT, _GRADE), format="tsv", quotes="no"):
        query, document, told = (row.values[name] or "" for name in (_QUERY, _DOCUMENT, _GRADE))
        for kind, name, known in (("query", query, queries), ("document", document, documents)):
            if known is not None and name not in known:
                raise ValueError(f"{row.where}: there is no {kind} {name!r}. Correct the line, or leave it out.")
        grade = grade_of(told, row.where)
        of_query = found.setdefault(query, {})
        if of_query.setdefault(document, grade) != grade:
            raise ValueError(
                f"{row.where}: the document {document!r} has the grade {of_query[document]:g} for the query {query!r} "
                f"already. Got {grade:g}; leave one of the lines out."
            )
    if not found:
        raise ValueError(f"{path} has no row. Give a file with a line query, document and grade at least.")
    return found
