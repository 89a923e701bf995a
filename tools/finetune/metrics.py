"""Metrics of classes and of numbers, as GLUE has them (Wang et al. 2018, arXiv 1804.07461). None of them is ever nan.

Where one is not defined it is 0, its value for predictions that say nothing: Matthews' correlation if all predictions
or all labels are one class, and a correlation with a constant. A class that neither is predicted nor occurs is in no
mean, as in scikit-learn.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.floating]
Numbers = NDArray[np.generic]
Classes = NDArray[np.integer]


def class_metrics(predicted: Classes, labels: Classes, classes: int) -> dict[str, float]:
    """Of N texts whose classes are 0 to classes - 1.

    accuracy     share of right ones
    f1           of the last class if there are two, else the mean over the classes that occur or are predicted (macro)
    matthews     correlation of predictions and labels: Matthews (1975), for several classes Gorodkin (2004)
    accuracy_f1  mean of both, by which GLUE ranks MRPC and QQP

    Raises:
        ValueError: no text, or not as many predictions as labels.
    """
    _check(predicted, labels)
    accuracy = float((predicted == labels).mean())
    table = confusion(predicted, labels, classes)
    per_class = _f1(table)
    named = table.any(0) | table.any(1)
    f1 = float(per_class[-1] if classes == 2 else per_class[named].mean())
    return {"accuracy": accuracy, "f1": f1, "accuracy_f1": (accuracy + f1) / 2, "matthews": _matthews(table)}


def confusion(predicted: NDArray[Any], labels: NDArray[Any], classes: int) -> NDArray[np.int64]:
    """(classes, classes): how many texts of each class (rows) are predicted as which (columns)."""
    table = np.zeros((classes, classes), dtype=np.int64)
    np.add.at(table, (labels, predicted), 1)
    return table


def number_metrics(predicted: Floats, targets: Floats) -> dict[str, float]:
    """Of N numbers.

    pearson            linear correlation
    spearman           the same of ranks; equal values share their mean rank
    pearson_spearman   mean of both, by which GLUE ranks STS-B
    mse                mean of squared errors, of which alone a lower one is better

    Raises:
        ValueError: no number, or not as many predictions as targets.
    """
    _check(predicted, targets)
    predicted, targets = predicted.astype(np.float64), targets.astype(np.float64)
    pearson = _correlation(predicted, targets)
    spearman = _correlation(_ranks(predicted), _ranks(targets))
    mse = float(np.square(predicted - targets).mean())
    return {"pearson_spearman": (pearson + spearman) / 2, "pearson": pearson, "spearman": spearman, "mse": mse}


CLASS_METRICS = ("accuracy", "f1", "accuracy_f1", "matthews")
"""By which a model can be chosen; the first is the default."""
NUMBER_METRICS = ("pearson_spearman", "pearson", "spearman")


LABEL_METRICS = ("micro_f1", "macro_f1", "auc", "average_precision", "accuracy")
"""The same where several labels may hold."""


def label_metrics(probabilities: Floats, targets: Numbers, thresholds: Floats) -> dict[str, float]:
    """Of N texts with c labels, of which each may hold, (N, c), by scikit-learn. A label holds from its threshold on.

    micro_f1, macro_f1  of all decisions together, and the mean over the labels that hold somewhere or are said to
    auc                 area under the receiver's curve, the mean over the labels that hold for some texts, not for all
    average_precision   the mean over the labels that hold somewhere (mAP)
    accuracy            share of texts all of whose labels are right
    """
    rows = of_labels(probabilities, targets, thresholds)
    means = {name: [row[name] for row in rows if np.isfinite(row[name])] for name in ("f1", "auc", "average_precision")}
    macro_f1, auc, average = (float(np.mean(values)) if values else 0.0 for values in means.values())
    said = probabilities >= thresholds
    # Of a single column "micro" would count what does not hold as a class too.
    micro = scikit_metrics().f1_score(targets.astype(bool).ravel(), said.ravel(), zero_division=0)
    values = (float(micro), macro_f1, auc, average, float((said == targets).all(1).mean()))
    return dict(zip(LABEL_METRICS, values, strict=True))


def of_labels(probabilities: Floats, targets: Numbers, thresholds: Floats) -> list[dict[str, float]]:
    """Of each label precision, recall, f1, auc, average_precision, and the number of texts that have it; nan where one
    is not defined."""
    metrics, rows = scikit_metrics(), []
    for chance, holds, least in zip(probabilities.T, targets.T.astype(bool), thresholds, strict=True):
        precision, recall, f1, _ = metrics.precision_recall_fscore_support(
            holds, chance >= least, average="binary", zero_division=np.nan
        )
        row = {"precision": precision, "recall": recall, "f1": f1, "auc": np.nan, "average_precision": np.nan}
        if holds.any():
            row["average_precision"] = metrics.average_precision_score(holds, chance)
            row["auc"] = np.nan if holds.all() else metrics.roc_auc_score(holds, chance)
        rows.append({name: float(value) for name, value in row.items()} | {"texts": float(holds.sum())})
    return rows


def fitted_thresholds(probabilities: Floats, targets: Numbers) -> Floats:
    """(c,): by which each label has its best F1 on these texts, halfway to the next lower probability; of several the
    highest. A half for a label that no text has."""
    found = np.full(probabilities.shape[1], 0.5)
    for label, (chance, holds) in enumerate(zip(probabilities.T.astype(np.float64), targets.T, strict=True)):
        order = np.argsort(-chance, kind="stable")
        chance, right = chance[order], np.cumsum(holds[order])
        ends = np.append(chance[1:] < chance[:-1], True)  # equal ones are on the same side
        f1 = np.where(ends, 2 * right / (np.arange(1, len(chance) + 1) + right[-1]), 0)
        if right[-1]:
            best = int(f1.argmax())
            found[label] = (chance[best] + (chance[best + 1] if best + 1 < len(chance) else 0.0)) / 2
    return found


def scikit_metrics() -> Any:
    """Raises ValueError where scikit-learn is missing."""
    try:
        from sklearn import metrics
    except ImportError:
        raise ValueError("data.multi_label needs scikit-learn for its metrics: pip install scikit-learn.") from None
    return metrics


def summary(values: list[float]) -> tuple[float, float | None]:
    """Mean and standard deviation over seeds (with n - 1; None of a single one, which has none)."""
    return float(np.mean(values)), float(np.std(values, ddof=1)) if len(values) > 1 else None


def _check(predicted: NDArray[np.generic], labels: NDArray[np.generic]) -> None:
    if predicted.shape != labels.shape or predicted.ndim != 1 or not len(predicted):
        raise ValueError(
            f"metrics need as many predictions as labels, at least one. Got {predicted.shape} and {labels.shape}."
        )


def _f1(table: NDArray[np.int64]) -> Floats:
    """Of each class. `table` counts texts by label and prediction."""
    right = np.diag(table)
    named = table.sum(0) + table.sum(1)
    return np.divide(2.0 * right, named, out=np.zeros(len(right)), where=named > 0)


def _matthews(table: NDArray[np.int64]) -> float:
    # Python's whole numbers: products of four counts overflow an int64.
    total, right = int(table.sum()), int(np.trace(table))
    predicted, labels = ([int(n) for n in table.sum(dim)] for dim in (0, 1))
    covariance = right * total - sum(p * t for p, t in zip(predicted, labels, strict=True))
    spreads = [total**2 - sum(n * n for n in counts) for counts in (predicted, labels)]
    return covariance / float(np.sqrt(float(spreads[0]))) / float(np.sqrt(float(spreads[1]))) if all(spreads) else 0.0


def _ranks(values: Floats) -> Floats:
    """Equal values share their mean rank."""
    _, place, counts = np.unique(values, return_inverse=True, return_counts=True)
    ranks: Floats = (np.cumsum(counts) - (counts - 1) / 2)[place]
    return ranks


def _correlation(a: Floats, b: Floats) -> float:
    if np.ptp(a) == 0 or np.ptp(b) == 0:
        return 0.0
    a, b = a - a.mean(), b - b.mean()
    # Each by its own size first: squares of tiny numbers would vanish.
    a, b = a / np.abs(a).max(), b / np.abs(b).max()
    return float(np.clip((a @ b) / np.sqrt((a @ a) * (b @ b)), -1.0, 1.0))
