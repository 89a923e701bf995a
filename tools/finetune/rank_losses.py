"""Losses of ranking: of the scores of one query's passages, whose grades say how relevant they are.

"pointwise"  binary cross-entropy of each passage; a grade is the probability of being relevant
"ranknet"    log(1 + exp(s_j - s_i)) of each pair in which i has the higher grade (Burges et al. 2005)
"margin"     max(0, margin - (s_i - s_j)) of the same pairs
"softmax"    cross-entropy of the softmax of the scores with the grades, divided by their sum
"listnet"    cross-entropy of the softmax of the scores with the softmax of the grades (Cao et al. 2007, top one)

The loss of a step is the mean over its passages, its pairs, or its queries.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor

LossName = Literal["pointwise", "ranknet", "margin", "softmax", "listnet"]
Grades = NDArray[np.floating[Any]]


def terms(grades: Grades, kind: LossName) -> int:
    """What the loss of a query is the sum of: passages, pairs, or the query itself."""
    if kind == "pointwise":
        return len(grades)
    return len(_pairs(grades)[0]) if kind in ("ranknet", "margin") else 1


def rank_loss(scores: Tensor, grades: Sequence[Grades], kind: LossName, margin: float = 1.0) -> Tensor:
    """The sum over the terms of all queries.

    Args:
        scores: (N,) of the passages, those of one query after those of the other.
        grades: of the passages of each query, at least 0; of "pointwise" at most 1; of the others some differ.
    """
    parts = scores.split([len(of_query) for of_query in grades])
    return torch.stack([_of_query(own, told, kind, margin) for own, told in zip(parts, grades, strict=True)]).sum()


def _of_query(scores: Tensor, grades: Grades, kind: LossName, margin: float) -> Tensor:
    if kind in ("ranknet", "margin"):
        better, worse = (torch.from_numpy(side).to(scores.device) for side in _pairs(grades))
        ahead = scores[better] - scores[worse]
        return (F.softplus(-ahead) if kind == "ranknet" else F.relu(margin - ahead)).sum()
    told = torch.as_tensor(grades, dtype=scores.dtype, device=scores.device)
    if kind == "pointwise":
        return F.binary_cross_entropy_with_logits(scores, told, reduction="sum")
    target = told / told.sum() if kind == "softmax" else told.softmax(0)
    return -(target * scores.log_softmax(0)).sum()


def _pairs(grades: Grades) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Places of the better and of the worse passage of each pair with different grades."""
    better, worse = np.nonzero(grades[:, None] > grades[None, :])
    return better, worse
