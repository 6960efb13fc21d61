"""How predictions are scored; the metric follows the loss and the targets."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np

from herta_gpu.plumbing.checks import as_labels, has_label
from herta_gpu.plumbing.targets import r_squared

NAN = float("nan")


def metric_of(told: str, loss: str, classes: Any | None, flat: bool) -> str:
    """The metric of a model: of its loss, its classes, and whether it has one target (`flat`).

    One class per node, and one label of 0 or 1, have an accuracy; several labels per node have the
    micro F1, and numbers R^2, unless the dataset told that its metric is "rocauc", as OGB's do.
    """
    if classes is not None:
        return "accuracy"
    if told == "rocauc":
        return told
    return "r2" if loss != "bce" else "accuracy" if flat else "micro F1"


def accuracy(y: Any, predicted: Any) -> float:
    """Share of right labels among the labelled nodes; nan when there is none."""
    y = as_labels("y", y)
    known = has_label(y)
    return float(np.mean(predicted[known] == y[known])) if known.any() else NAN


def confusion(y: Any, outputs: Any, classes: Any) -> Any:
    """(c, c): how many labelled nodes of the class of each row were taken for each class.

    Examples
    --------
    >>> import numpy as np
    >>> from herta_gpu.app.metrics import confusion
    >>> confusion(np.array([0, 0, 3, -1]), np.array([0, 3, 3, 0]), np.array([0, 3])).tolist()
    [[1, 1], [0, 1]]
    """
    y, c = as_labels("y", y), len(classes)
    guess = outputs if outputs.ndim == 1 else classes[outputs.argmax(axis=1)]
    known = has_label(y) & np.isin(y, classes)
    at = np.searchsorted(classes, y[known]) * c + np.searchsorted(classes, guess[known])
    return np.bincount(at, minlength=c * c).reshape(c, c)


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
    for positive, score in _labels(y, scores):
        p, q = int(positive.sum()), int((~positive).sum())
        if p and q:
            # Ranks from 1 on; equal scores share the mean of theirs (as scipy.stats.rankdata).
            _, place, count = np.unique(score, return_inverse=True, return_counts=True)
            ranks = (np.cumsum(count) - (count - 1) / 2)[place]
            areas.append((ranks[positive].sum() - p * (p + 1) / 2) / (p * q))
    return float(np.mean(areas)) if areas else NAN


def _labels(y: Any, outputs: Any) -> Iterator[tuple[Any, Any]]:
    """(whether a label is 1, output) of each column, where it is known: -1 and NaN are not."""
    for truth, score in zip(np.asarray(y).T, np.asarray(outputs).T, strict=True):
        known = (truth == 0) | (truth == 1)
        yield truth[known] == 1, score[known]


def label_scores(y: Any, outputs: Any) -> dict[str, float]:
    """F1 and accuracy of several labels per node; an output above 0 predicts the label.

    "micro F1" counts all labels together, "macro F1" is the mean of those of each label (0 for one
    that neither occurs nor is predicted), "label accuracy" the share of right zeros and ones.

    Examples
    --------
    >>> import numpy as np
    >>> from herta_gpu.app.metrics import label_scores
    >>> found = label_scores(np.array([[1, 0], [1, -1]]), np.array([[2.0, 1.0], [-1.0, 3.0]]))
    >>> {name: round(score, 3) for name, score in found.items()}
    {'micro F1': 0.5, 'macro F1': 0.333, 'label accuracy': 0.333}
    """
    each = []  # of each label: hits twice, labels that are there or predicted, right ones, known
    for true, score in _labels(y, outputs):
        guess = score > 0
        marked = true.sum() + guess.sum()
        each.append((2 * (true & guess).sum(), marked, (true == guess).sum(), true.size))
    hits, marks, right, known = np.array(each).T
    if known.sum() == 0:
        return dict.fromkeys(("micro F1", "macro F1", "label accuracy"), NAN)
    micro, macro = hits.sum() / max(1, marks.sum()), np.mean(hits / np.maximum(1, marks))
    share = right.sum() / known.sum()
    return {"micro F1": float(micro), "macro F1": float(macro), "label accuracy": float(share)}


def evaluate(metric: str, y: Any, outputs: Any, classes: Any | None) -> float:
    """`metric` of the model's outputs (rows as in y), or of its labels, one per row."""
    if len(y) == 0:
        return NAN
    if outputs.ndim == 1:
        return accuracy(y, outputs)
    if classes is not None:
        return accuracy(y, classes[outputs.argmax(axis=1)])
    y = np.asarray(y).reshape(outputs.shape)  # one target is one column
    if metric == "rocauc":
        return rocauc(y, outputs)
    if metric == "r2":  # the mean over the columns that have known targets
        known = {j: np.isfinite(y[:, j]) for j in range(y.shape[1])}
        pairs = ((y[at, j, None], outputs[at, j, None]) for j, at in known.items() if at.any())
        found = [r_squared(*pair) for pair in pairs]
        return float(np.mean(found)) if found else NAN
    return label_scores(y, outputs)["label accuracy" if metric == "accuracy" else metric]
