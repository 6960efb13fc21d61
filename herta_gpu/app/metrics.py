"""The metrics of OGB's evaluators, without torch."""

from __future__ import annotations

from typing import Any

import numpy as np

from herta_gpu.plumbing.estimator import r_squared
from herta_gpu.plumbing.validation import as_labels, has_label


def accuracy(y: Any, predicted: Any) -> float:
    """Share of right labels among the labelled nodes; nan when there is none."""
    y = as_labels("y", y)
    known = has_label(y)
    return float(np.mean(predicted[known] == y[known])) if known.any() else float("nan")


def rocauc(y: Any, scores: Any) -> float:
    """Mean area under the ROC curve over the tasks that have both classes.

    Examples
    --------
    >>> import numpy as np
    >>> from herta_gpu.app.metrics import rocauc
    >>> rocauc(np.array([[0], [0], [1], [1]]), np.array([[0.1], [0.4], [0.35], [0.8]]))
    0.75
    """
    areas = []
    for truth, score in zip(np.asarray(y).T, np.asarray(scores).T, strict=True):
        known = ~np.isnan(truth.astype(np.float64))
        positive = truth[known] > 0.5
        p, q = int(positive.sum()), int((~positive).sum())
        if p == 0 or q == 0:
            continue
        ranks = _ranks(score[known])
        areas.append((ranks[positive].sum() - p * (p + 1) / 2) / (p * q))
    return float(np.mean(areas)) if areas else float("nan")


def _ranks(values: Any) -> Any:
    """Ranks from 1 on; equal values share the mean of their ranks (as scipy.stats.rankdata)."""
    _, place, count = np.unique(values, return_inverse=True, return_counts=True)
    return (np.cumsum(count) - (count - 1) / 2)[place]


def evaluate(metric: str, y: Any, scores: Any, classes: Any | None) -> float:
    """`metric` of the model's outputs `scores` (rows as in y), or of its labels."""
    if len(y) == 0:
        return float("nan")
    if scores.ndim == 1:
        return accuracy(y, scores)
    if metric == "rocauc":
        return rocauc(y, scores)
    if classes is not None:
        return accuracy(y, classes[scores.argmax(axis=1)])
    return r_squared(np.asarray(y).reshape(scores.shape), scores)  # one target is one column
