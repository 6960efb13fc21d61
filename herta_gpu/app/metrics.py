"""The metrics of OGB's evaluators, without torch."""

from __future__ import annotations

from typing import Any

import numpy as np

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
    from scipy.stats import rankdata  # its import takes longer than all of ours: only who asks pays

    areas = []
    for truth, score in zip(np.asarray(y).T, np.asarray(scores).T, strict=True):
        known = ~np.isnan(truth.astype(np.float64))
        positive = truth[known] > 0.5
        p, q = int(positive.sum()), int((~positive).sum())
        if p == 0 or q == 0:
            continue
        ranks = rankdata(score[known])
        areas.append((ranks[positive].sum() - p * (p + 1) / 2) / (p * q))
    return float(np.mean(areas)) if areas else float("nan")


def evaluate(metric: str, y: Any, scores: Any, classes: Any | None) -> float:
    """`metric` of the model's outputs `scores` (rows as in y)."""
    if len(y) == 0:
        return float("nan")
    if metric == "rocauc":
        return rocauc(y, scores)
    if classes is not None:
        return accuracy(y, classes[scores.argmax(axis=1)])
    y = np.asarray(y).reshape(scores.shape)  # one target per node is one column
    left = ((y - scores) ** 2).sum(axis=0)
    total = ((y - y.mean(axis=0)) ** 2).sum(axis=0)
    return float(np.mean(1.0 - left / np.where(total > 0, total, 1.0)))
