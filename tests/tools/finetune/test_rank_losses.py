"""Losses of ranking against formulas written out pair by pair in plain PyTorch, on one text at a time: values, and the
gradients of every parameter, on one rank and on cubes."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import get_args

import numpy as np
import pytest
import torch
from torch import Tensor

from models.bert.tasks import BertForSequenceClassification, class_logits
from models.bert.text_batches import EncodedText, collate_texts
from tensor3d.testing.compare import default_dtype
from tests.models.toy import toy_config
from tests.ranks import run_ranks
from tests.single_device_reference import fast_alone, full, gradient_errors, make_twins, ranks_of, worst
from tools.finetune.rank_losses import Grades, LossName, rank_loss, terms

VOCAB = 67
KINDS: tuple[LossName, ...] = get_args(LossName)
GRADES: list[Grades] = [np.array(each) for each in ([0, 1.0], [1.0, 0, 0, 0.5, 0], [0.25, 1, 0.25], [0, 0, 1.0])]
"""Of each query. One has more passages than fit beside the others."""
Shape = tuple[int, int, int, int]


def groups() -> list[list[EncodedText]]:
    random = np.random.default_rng(3)
    lengths = iter([5, 24, 3, 9, 17, 6, 4, 11, 2, 7, 20, 3, 8])
    return [
        [
            EncodedText(ids=random.integers(5, VOCAB, size), types=(np.arange(size) > 1).astype(np.int64))
            for size in (next(lengths) for _ in grades)
        ]
        for grades in GRADES
    ]


def written_out(scores: list[Tensor], grades: Grades, kind: LossName, margin: float) -> tuple[Tensor, int]:
    """The sum over the terms of one query, and their number."""
    n = range(len(scores))
    if kind == "pointwise":
        chances = [1 / (1 + (-score).exp()) for score in scores]
        each = [-(g * p.log() + (1 - g) * (1 - p).log()) for g, p in zip(grades, chances, strict=True)]
    elif kind in ("ranknet", "margin"):
        ahead = [scores[i] - scores[j] for i in n for j in n if grades[i] > grades[j]]
        each = [(1 + (-a).exp()).log() if kind == "ranknet" else (margin - a).clamp(min=0) for a in ahead]
    else:
        weights = [math.exp(g) for g in grades] if kind == "listnet" else list(grades)
        whole = sum(score.exp() for score in scores)
        each = [sum(-w / sum(weights) * (s.exp() / whole).log() for w, s in zip(weights, scores, strict=True))]
    return torch.stack(each).sum(), len(each)


def errors_on(shape: Shape, kinds: Sequence[LossName], padded: bool = False) -> dict[str, float]:
    with default_dtype(torch.float64):
        return errors_of(shape, kinds, padded)


def errors_of(shape: Shape, kinds: Sequence[LossName], padded: bool) -> dict[str, float]:
    """Of the loss of each kind and of its gradients, of a step of two micro-batches."""
    config = toy_config(VOCAB, layers=1)
    cube, model, single, twin = make_twins(lambda cube: BertForSequenceClassification(config, 1, cube), shape)
    texts, errors = groups(), {}
    for kind in kinds:
        total = sum(terms(grades, kind) for grades in GRADES)
        loss, wanted, count = 0.0, torch.zeros(()), 0
        for some in (slice(0, 3), slice(3, 4)):
            laid = collate_texts([text for group in texts[some] for text in group], cube, alone=padded)
            part = rank_loss(model.logits_of_texts(laid)[:, 0], GRADES[some], kind, 0.7) / total
            part.backward()
            loss += float(part.detach())
        for group, grades in zip(texts, GRADES, strict=True):
            own, more = written_out(
                [twin.logits(collate_texts([text], single).batch)[0, 0] for text in group], grades, kind, 0.7
            )
            wanted, count = wanted + own, count + more
        assert count == total
        (wanted / count).backward()
        errors[kind] = abs(loss - float(wanted.detach()) / count)
        found = gradient_errors(model, twin)
        if kind != "pointwise":
            # What is added to all scores of a query changes no comparison: this gradient is 0.
            found["classifier.bias"] = float(full(model.classifier.bias.grad).abs())
        errors |= {f"{kind} {name}": value for name, value in found.items()}
        model.zero_grad()
        twin.zero_grad()
    flat = [text for group in texts for text in group]
    with torch.no_grad():
        together = model.logits_of_texts(collate_texts(flat, cube))
    model.eval()
    errors["in the order of the texts"] = float((together.cpu() - class_logits(model, flat)).abs().max())
    return errors


@pytest.mark.parametrize("padded", [False, True])
def test_losses_and_gradients_on_one_rank(padded: bool) -> None:
    name, value = worst([errors_on((1, 1, 1, 1), ("softmax",) if padded else KINDS, padded)])
    assert value < 1e-9, name


@pytest.mark.parametrize("shape", fast_alone((1, 2, 1, 2), (2, 2, 2, 1)))
def test_losses_and_gradients_on_cubes(shape: Shape) -> None:
    name, value = worst(run_ranks(ranks_of(shape), errors_on, shape, ("ranknet", "softmax")))
    assert value < 1e-9, name


def test_numbers_that_overflow_alone_do_not_in_a_loss() -> None:
    scores = torch.tensor([300.0, -300.0], dtype=torch.float64)
    for kind in KINDS:
        for grades in ([1.0, 0], [0, 1.0]):
            assert torch.isfinite(rank_loss(scores, [np.array(grades)], kind))
