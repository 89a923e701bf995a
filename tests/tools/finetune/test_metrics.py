"""Metrics of fine-tuning: values counted by hand, scipy's, and what they are where they are not defined."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from tools.finetune.metrics import class_metrics, number_metrics, summary


def test_two_classes_by_hand() -> None:
    predicted, labels = np.array([1, 1, 1, 0, 0, 1]), np.array([1, 1, 0, 0, 1, 1])
    found = class_metrics(predicted, labels, 2)
    # True positives 3, false positives 1, false negatives 1, true negatives 1.
    assert found["accuracy"] == pytest.approx(4 / 6)
    assert found["f1"] == pytest.approx(2 * 3 / (2 * 3 + 1 + 1))
    assert found["accuracy_f1"] == pytest.approx((4 / 6 + 6 / 8) / 2)
    assert found["matthews"] == pytest.approx((3 * 1 - 1 * 1) / np.sqrt(4 * 4 * 2 * 2))


def test_three_classes_by_hand() -> None:
    predicted, labels = np.array([0, 0, 1, 2, 2, 1]), np.array([0, 1, 1, 2, 0, 2])
    found = class_metrics(predicted, labels, 3)
    assert found["accuracy"] == pytest.approx(0.5)
    assert found["f1"] == pytest.approx(0.5), "each class: 1 right, named 2 + 2 times"
    # Gorodkin: (3 * 6 - (2*2 + 2*2 + 2*2)) / (36 - 12)
    assert found["matthews"] == pytest.approx((3 * 6 - 12) / (36 - 12))


def test_f1_of_two_classes_is_that_of_the_last() -> None:
    assert class_metrics(np.array([0, 0, 0, 1]), np.array([0, 0, 0, 0]), 2)["f1"] == 0.0
    assert class_metrics(np.array([0, 0, 1, 1]), np.array([0, 0, 0, 1]), 2)["f1"] == pytest.approx(2 / 3)


@pytest.mark.parametrize("value", [0, 1])
def test_a_model_that_always_says_the_same_has_no_correlation(value: int) -> None:
    same, labels = np.full(5, value), np.array([0, 1, 1, 0, 1])
    assert class_metrics(same, labels, 2)["matthews"] == 0.0
    assert class_metrics(labels, same, 2)["matthews"] == 0.0
    numbers = number_metrics(same.astype(np.float32), labels.astype(np.float32))
    assert (numbers["pearson"], numbers["spearman"], numbers["pearson_spearman"]) == (0.0, 0.0, 0.0)


@pytest.mark.parametrize(
    ("predicted", "labels", "classes", "f1"),
    [
        ([0, 1], [0, 1], 3, 1.0),
        ([0, 2, 2], [0, 2, 0], 5, 2 / 3),  # two classes of 2 / 3 each
        ([3, 3], [3, 3], 4, 1.0),
        ([0, 0, 1], [0, 0, 4], 5, 1 / 3),  # predicted alone and occurring alone are 0 each
    ],
)
def test_a_class_that_nobody_names_is_in_no_mean(predicted: Any, labels: Any, classes: int, f1: float) -> None:
    """Values of scikit-learn's f1_score(labels, predicted, average="macro")."""
    assert class_metrics(np.array(predicted), np.array(labels), classes)["f1"] == pytest.approx(f1)


def test_a_class_that_nobody_names_leaves_the_correlation_alone() -> None:
    assert class_metrics(np.array([0, 1]), np.array([0, 1]), 3)["matthews"] == pytest.approx(1.0)


@pytest.mark.slow  # for the seconds that scipy.stats takes to import
def test_numbers_as_scipy_has_them() -> None:
    stats = pytest.importorskip("scipy.stats")
    draw = np.random.default_rng(3)
    targets = np.round(draw.random(400) * 5, 1)  # with ties
    predicted = np.round(targets + draw.normal(size=400), 1)
    found = number_metrics(predicted, targets)
    assert found["pearson"] == pytest.approx(stats.pearsonr(predicted, targets)[0])
    assert found["spearman"] == pytest.approx(stats.spearmanr(predicted, targets)[0])
    assert found["pearson_spearman"] == pytest.approx((found["pearson"] + found["spearman"]) / 2)
    assert found["mse"] == pytest.approx(np.mean((predicted - targets) ** 2))


def test_correlations_of_very_small_numbers() -> None:
    numbers = np.array([1e-200, 2e-200, 4e-200])
    assert number_metrics(numbers, np.array([1.0, 2.0, 4.0]))["pearson"] == pytest.approx(1.0)


def test_large_counts_do_not_overflow() -> None:
    labels = np.arange(200_000) % 2
    assert class_metrics(labels, labels, 2)["matthews"] == pytest.approx(1.0)


def test_summary_over_seeds() -> None:
    assert summary([1.0, 2.0, 3.0]) == (2.0, 1.0)
    assert summary([4.0]) == (4.0, None)


@pytest.mark.parametrize(("predicted", "labels"), [([], []), ([1], [1, 0])])
def test_no_texts_or_unlike_numbers_are_refused(predicted: list[int], labels: list[int]) -> None:
    with pytest.raises(ValueError, match="as many predictions as labels"):
        class_metrics(np.array(predicted, dtype=int), np.array(labels, dtype=int), 2)


def test_matthews_correlation_of_classes_that_are_named_more_often_than_they_occur() -> None:
    found = class_metrics(np.array([1, 1, 0, 0]), np.array([1, 0, 0, 0]), 2)
    # True positives 1, false positives 1, false negatives 0, true negatives 2.
    assert found["matthews"] == pytest.approx((1 * 2 - 1 * 0) / np.sqrt(2 * 1 * 3 * 2))
