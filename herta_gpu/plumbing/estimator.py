"""scikit-learn manners without scikit-learn: parameters, targets, predictions."""

from __future__ import annotations

import inspect
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from herta_gpu.plumbing.machine import host_memory
from herta_gpu.plumbing.validation import as_labels, check_targets, has_label, train_rows


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


class OneHot:
    """Rows of the identity, one per label, each made when it is looked at.

    Of a million labels and hundreds of classes they would fill gigabytes with zeros.

    Examples
    --------
    >>> from herta_gpu.plumbing.estimator import OneHot
    >>> import numpy as np
    >>> Y = OneHot(np.array([2, 0, 1]), 3)
    >>> Y.shape, Y[1:].tolist()
    ((3, 3), [[1.0, 0.0, 0.0], [0.0, 1.0, 0.0]])
    """

    def __init__(self, codes: Any, c: int, xp: Any = np) -> None:
        self.codes, self.shape, self.xp = codes, (codes.shape[0], c), xp

    def on(self, backend: Any) -> OneHot:
        return OneHot(backend.asarray(self.codes), self.shape[1], backend.xp)

    def __getitem__(self, rows: slice) -> Any:
        codes = self.codes[rows]
        Y = self.xp.zeros((codes.shape[0], self.shape[1]))
        Y[self.xp.arange(codes.shape[0]), codes] = 1.0
        return Y

    def columns(self, at: Any) -> Any:
        """All rows of the columns `at`."""
        return (self.codes[:, None] == self.xp.asarray(at)[None]).astype(float)

    def __array__(self, dtype: Any = None, copy: Any = None) -> Any:
        return self[:].astype(dtype or float, copy=False)


@dataclass
class Targets:
    """The training rows and what they should give."""

    rows: Any  # sorted ids of the training nodes, caller's order
    Y: Any  # n_train x c float64, or OneHot
    classes: Any | None  # None for regression
    flat: bool  # y was one-dimensional


def make_targets(
    y: Any, train: Any, n: int, loss: str, gathered: Callable[[Any], Any] | None = None
) -> Targets:
    """Labels or float targets of the training rows, checked.

    Where other processes have other rows, `gathered` puts what all of them have together.
    """
    y = as_labels("y", y)
    if y.shape[0] != n:
        raise ValueError(f"y has shape {y.shape} but the graph has {n:,} nodes: one row per node.")
    if y.ndim == 1 and y.dtype.kind in "iubU":
        known = has_label(y)
        rows = train_rows(train, known, n, alone=gathered is None)
        labels = y[rows] if gathered is None else _of_all(y[rows], gathered)
        classes, codes = np.unique(labels, return_inverse=True)
        if classes.shape[0] == 1 and train is None and not known.all():
            warnings.warn(
                f"The only label besides {'the empty one' if y.dtype.kind == 'U' else -1} "
                f"(unlabelled) is {classes[0]}: for two classes use 0 and 1.",
                stacklevel=4,
            )
        return Targets(rows, _one_hot(codes, classes.shape[0]), classes, True)
    if loss == "ce":
        raise ValueError(
            'loss="ce" needs one integer class label per node (or text), not floats or columns.'
        )
    if y.ndim == 2 and y.shape[1] == 0:
        raise ValueError("y has no columns: give at least one target.")
    rows = train_rows(train, np.ones(n, dtype=bool), n, alone=gathered is None)
    Y = y[rows].astype(np.float64)
    Y = Y if gathered is None else _of_all(Y, gathered)
    check_targets(Y)
    return Targets(rows, Y[:, None] if y.ndim == 1 else Y, None, y.ndim == 1)


def _of_all(labels: Any, gathered: Callable[[Any], Any]) -> Any:
    """The labels of all processes' training rows."""
    found = gathered(labels)
    if found.shape[0] == 0:
        raise ValueError("There is no training node: train is empty, or y has no label.")
    return found


def check_scored(y: Any, n: int) -> None:
    """Raise an error unless `y` holds labels or targets for n predictions."""
    y = as_labels("y", y)
    if y.shape[0] != n:
        raise ValueError(f"y has shape {y.shape} but there are {n:,} predictions.")


def _one_hot(codes: Any, c: int) -> OneHot:
    """Labels as rows of the identity; as many classes as rows (ids taken for labels) are none."""
    if 8 * codes.shape[0] * c > host_memory():
        raise ValueError(
            f"y has {c:,} classes on {codes.shape[0]:,} training nodes, more than fit into memory: "
            "give classes, not ids; numbers to be predicted as such must be floats."
        )
    return OneHot(codes, c)


def accuracy_or_r2(predicted: Any, y: Any, rows: Any, classes: Any | None) -> float:
    """Share of right labels among the labelled ones of `rows`, which the predictions are of; or
    R^2 (mean over the columns)."""
    y = as_labels("y", y)
    if rows.size == 0:
        raise ValueError("There is no row to score: idx is empty.")
    y = y[rows]
    if classes is not None:
        if y.ndim == 2 or (y.dtype.kind == "U") != (classes.dtype.kind == "U"):
            kind = "text" if classes.dtype.kind == "U" else "number"
            raise ValueError(f"y must hold one {kind} per node, as the classes of the model are.")
        known = has_label(y) if y.dtype.kind == "U" else y >= 0  # floats, too: NaN is none
        if not known.any():
            raise ValueError("None of the rows to score has a label.")
        return float(np.mean(predicted[known] == y[known]))
    if y.dtype.kind == "U":
        raise ValueError("y holds text but the model predicts numbers.")
    if not np.isfinite(y).all():
        raise ValueError("y holds NaN or infinity in a row to score: leave such rows out by idx.")
    truth, guess = (a.astype(np.float64).reshape(rows.size, -1) for a in (y, predicted))
    if truth.shape != guess.shape:
        raise ValueError(f"y has {truth.shape[1]} columns but the model has {guess.shape[1]}.")
    return r_squared(truth, guess)


def r_squared(truth: Any, predicted: Any) -> float:
    """R^2 of predictions (rows, columns), as the mean over the columns.

    A column of equal targets has no variance to divide by: its squared error counts as it is.
    """
    found = []
    for true, guess in zip(truth.T, predicted.T, strict=True):
        total, left = float(((true - true.mean()) ** 2).sum()), float(((true - guess) ** 2).sum())
        found.append(1.0 - left / (total if total > 0 else 1.0))
    return float(np.mean(found))
