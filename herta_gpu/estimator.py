"""scikit-learn manners without scikit-learn: parameters, targets, predictions."""

from __future__ import annotations

import inspect
import warnings
from dataclasses import dataclass
from typing import Any

import numpy as np

from herta_gpu.validation import train_rows


class Estimator:
    """get_params, set_params and a repr that shows what differs from the defaults."""

    @classmethod
    def _defaults(cls) -> dict[str, Any]:
        parameters = inspect.signature(cls.__init__).parameters.values()
        return {p.name: p.default for p in parameters if p.name != "self"}

    def get_params(self, deep: bool = True) -> dict[str, Any]:
        """The parameters as they were given."""
        return {name: getattr(self, name) for name in self._defaults()}

    def set_params(self, **params: Any) -> Any:
        """Change parameters by name and return the estimator."""
        for name, value in params.items():
            if name not in self._defaults():
                known = ", ".join(self._defaults())
                raise ValueError(f"There is no parameter {name!r}; there are: {known}.")
            setattr(self, name, value)
        return self

    def __repr__(self) -> str:
        changed = [
            f"{k}={getattr(self, k)!r}"
            for k, v in self._defaults().items()
            if getattr(self, k) != v
        ]
        return f"{type(self).__name__}({', '.join(changed)})"


@dataclass
class Targets:
    """The training rows and what they should give."""

    rows: Any  # sorted ids of the training nodes, caller's order
    Y: Any  # n_train x c float64
    classes: Any | None  # None for regression
    flat: bool  # y was one-dimensional


def make_targets(y: Any, train: Any, n: int, loss: str) -> Targets:
    """Labels or float targets of the training rows, checked."""
    y = np.asarray(y)
    if y.ndim not in (1, 2) or y.shape[0] != n:
        raise ValueError(f"y has shape {y.shape} but the graph has {n:,} nodes: one row per node.")
    if y.dtype.kind not in "fiub":
        raise ValueError(f"y must hold integer labels or floats, not {y.dtype}.")
    if y.ndim == 1 and y.dtype.kind in "iub":
        rows = train_rows(train, y >= 0, n)
        classes, codes = np.unique(y[rows], return_inverse=True)
        if classes.shape[0] == 1 and train is None and (y < 0).any():
            warnings.warn(
                f"The only label besides -1 (unlabelled) is {classes[0]}: for two classes use 0 "
                "and 1.",
                stacklevel=4,
            )
        return Targets(rows, np.eye(classes.shape[0])[codes], classes, True)
    if loss == "ce":
        raise ValueError('loss="ce" needs one integer class label per node, not floats or columns.')
    if y.ndim == 2 and y.shape[1] == 0:
        raise ValueError("y has no columns: give at least one target.")
    rows = train_rows(train, np.ones(n, dtype=bool), n)
    Y = y[rows].astype(np.float64)
    if not np.isfinite(Y).all():
        raise ValueError("y holds NaN or infinity in a training row: leave such rows out of train.")
    return Targets(rows, Y[:, None] if y.ndim == 1 else Y, None, y.ndim == 1)


def accuracy_or_r2(predicted: Any, y: Any, rows: Any, classes: Any | None) -> float:
    """Share of right labels among the labelled rows, or R^2 (mean over the columns)."""
    y = np.asarray(y)
    if y.shape[0] != predicted.shape[0] or y.ndim > 2:
        raise ValueError(f"y has shape {y.shape} but there are {predicted.shape[0]:,} predictions.")
    if rows.size == 0:
        raise ValueError("There is no row to score: idx is empty.")
    if classes is not None:
        rows = rows[y[rows] >= 0]
        if rows.size == 0:
            raise ValueError("None of the rows to score has a label.")
        return float(np.mean(predicted[rows] == y[rows]))
    truth, guess = (a[rows].astype(np.float64).reshape(rows.size, -1) for a in (y, predicted))
    if truth.shape != guess.shape:
        raise ValueError(f"y has {truth.shape[1]} columns but the model has {guess.shape[1]}.")
    total = ((truth - truth.mean(axis=0)) ** 2).sum(axis=0)
    left = ((truth - guess) ** 2).sum(axis=0)
    return float(np.mean(1.0 - left / np.where(total > 0, total, 1.0)))
