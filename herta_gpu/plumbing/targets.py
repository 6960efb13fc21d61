"""scikit-learn manners without scikit-learn: parameters, targets, predictions."""

from __future__ import annotations

import inspect
import math
import sys
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from herta_gpu.plumbing.checks import as_labels, check_targets, has_label, train_rows
from herta_gpu.plumbing.machine import host_memory

_LEAST_WEIGHT = 1e-30  # of the largest weight: with less no objective adds up

Total = Callable[[Any], Any]  # the sum over all processes; by default this is the only one


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

    def __sklearn_tags__(self) -> Any:
        """What scikit-learn asks of an estimator; nobody else calls this."""
        from sklearn.utils import ClassifierTags, InputTags, RegressorTags, Tags, TargetTags

        kind = getattr(self, "_estimator_type", None)
        return Tags(
            estimator_type=kind,
            target_tags=TargetTags(required=True, multi_output=kind != "classifier"),
            classifier_tags=ClassifierTags() if kind == "classifier" else None,
            regressor_tags=RegressorTags() if kind == "regressor" else None,
            input_tags=InputTags(sparse=True),
        )

    def __repr__(self) -> str:
        changed = [
            f"{k}={getattr(self, k)!r}"
            for k, v in self._defaults().items()
            if isinstance(getattr(self, k), np.ndarray) or getattr(self, k) != v
        ]
        return f"{type(self).__name__}({', '.join(changed)})"


class NotFittedError(ValueError, AttributeError, RuntimeError):
    """A model was asked before it was fitted."""


class ConvergenceWarning(UserWarning):
    """A fit ended before its optimum was certified."""


def not_fitted(model: Any) -> Exception:
    """The error to raise."""
    error = _for_sklearn(NotFittedError)
    return error(f"This {type(model).__name__} is not fitted yet: call fit first.")


def warn_unfinished(status: str, tol: float, max_iter: int) -> None:
    """Warn of a fit that ended early, in the line from which this package was called."""
    told = {
        "max_iter": f"after max_iter={max_iter} steps: raise max_iter, or add a ridge",
        "stagnated": 'because rounding forbids more: use dtype="float64", or add a ridge',
    }
    if status in told:
        package, level, frame = str(Path(__file__).parents[1]), 1, sys._getframe()
        while frame.f_back is not None and frame.f_code.co_filename.startswith(package):
            level, frame = level + 1, frame.f_back
        text = f"The fit ended before its optimum was certified to {tol:g}, {told[status]}."
        warnings.warn(text, _for_sklearn(ConvergenceWarning), level)


def _for_sklearn(kind: Any) -> Any:
    """Our class; scikit-learn's of that name as well where it is in use, as that is looked for."""
    theirs = getattr(sys.modules.get("sklearn.exceptions"), kind.__name__, kind)
    return kind if issubclass(kind, theirs) else type(kind.__name__, (kind, theirs), {})


class OneHot:
    """Rows of the identity, one per label, each made when it is looked at.

    Of a million labels and hundreds of classes they would fill gigabytes with zeros.
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

    rows: Any  # sorted ids of the training nodes (of this process, if rows are split)
    Y: Any  # n_train x c float64, or OneHot
    classes: Any | None  # None for regression
    flat: bool  # y was one-dimensional
    weights: Any | None = None  # (n_train,) of the rows, over `unit`; None: all 1
    unit: float = 1.0  # a power of two, so that no weight is above 1 and none was rounded
    of_all: Any = None  # ids of the training nodes of all processes, where each has its own

    @property
    def nodes(self) -> Any:
        """Ids of all training nodes, one for each row of Y."""
        return self.rows if self.of_all is None else self.of_all


def make_targets(
    y: Any,
    train: Any,
    n: int,
    loss: str,
    sample_weight: Any = None,
    class_weight: Any = None,
) -> Targets:
    """Labels or float targets of the training rows, checked; rows of weight 0 are none."""
    y = labels_of(y, n)
    weight = None if sample_weight is None else _row_weights(sample_weight, n)
    labels = y.ndim == 1 and y.dtype.kind in "iubU" and loss != "bce"
    if class_weight is not None and not labels:
        raise ValueError("class_weight needs one class label per node: use sample_weight instead.")
    if not labels and loss == "ce":
        raise ValueError(
            'loss="ce" needs one integer class label per node (or text), not floats or columns.'
        )
    if loss == "bce":
        Y = _several_labels(y)
        known = (Y >= 0).any(axis=1)
    else:
        Y, known = y, has_label(y) if labels else np.ones(n, dtype=bool)
        if y.ndim == 2 and y.shape[1] == 0:
            raise ValueError("y has no columns: give at least one target.")
        if y.ndim == 2 and y.dtype.kind in "iub":
            raise ValueError(
                f"y holds whole numbers in {y.shape[1]} columns: for several labels per node use "
                'loss="bce"; numbers to be predicted as such must be floats, y.astype(float).'
            )
    rows, weight = _weighty(train_rows(train, known, n), weight)
    classes: Any = None
    if labels:
        if class_weight is not None:
            by_class = _class_weights(class_weight, y[known], y[rows])
            rows, weight = _weighty(rows, by_class if weight is None else by_class * weight, True)
        classes, codes = np.unique(y[rows], return_inverse=True)
        count = classes.shape[0]
        if count == 1 and train is None and not known.all():
            warnings.warn(
                f"The only label besides {'the empty one' if y.dtype.kind == 'U' else -1} "
                f"(unlabelled) is {classes[0]}: for two classes use 0 and 1.",
                stacklevel=4,
            )
        if 8 * rows.shape[0] * count > host_memory():  # ids taken for labels
            raise ValueError(
                f"y has {count:,} classes on {rows.shape[0]:,} training nodes, more than fit into "
                "memory: give classes, not ids; numbers to be predicted as such must be floats."
            )
        Y = OneHot(codes, count)
    else:
        Y = columns_of(Y[rows].astype(np.float64))
        check_targets(Y)
    if weight is None or (weight == 1).all():
        return Targets(rows, Y, classes, y.ndim == 1)
    unit = 2.0 ** math.ceil(math.log2(float(weight.max())))
    return Targets(rows, Y, classes, y.ndim == 1, weight / unit, unit)


def joint_targets(
    y: Any, train: Any, n: int, loss: str, sample_weight: Any, class_weight: Any, backend: Any
) -> Targets:
    """`make_targets` where each process has n rows of its own: of the training rows of all.

    What they hold is put together, n_train numbers or c times as many, and looked at by everyone.
    """
    y = labels_of(y, n)
    y = y if y.dtype.kind == "U" else y.astype(np.float64 if y.dtype.kind == "f" else np.int64)
    backend.same((y.shape[1:], y.dtype.kind), "kind of labels", always=True)
    backend.same(sample_weight is None, "choice of sample_weight", always=True)
    known = has_label(y) if y.dtype.kind != "f" else np.ones(n, dtype=bool)
    if loss == "bce" and y.dtype.kind != "U":
        known = columns_of(np.isfinite(y) & (y >= 0)).any(axis=1)
    rows = train_rows(train, known, n, alone=False)
    backend.train_on(rows)
    taken = backend.gathered(y[rows])
    count = taken.shape[0]
    weight = None
    if sample_weight is not None:
        weight = backend.gathered(_row_weights(sample_weight, n)[rows])
    if isinstance(class_weight, Mapping) and y.ndim == 1:
        # It may name a label that no training row has.
        others = backend.joined(np.unique(y[known]))
        taken = np.concatenate([taken, others])
        weight = None if weight is None else np.concatenate([weight, np.zeros(others.shape[0])])
    chosen = np.arange(count)
    found = make_targets(taken, chosen, taken.shape[0], loss, weight, class_weight)
    kept = np.isin(chosen, found.rows)
    rows = rows[backend.own(kept)]
    return replace(found, rows=rows, of_all=backend.train_on(rows))


def columns_of(x: Any) -> Any:
    """One number per row as one column."""
    return x[:, None] if x.ndim == 1 else x


def labels_of(y: Any, n: int, what: str = "the graph has {n:,} nodes: one row per node") -> Any:
    """Labels or targets, one row for each of n; the sentence of an error says of `what`."""
    y = as_labels("y", y)
    if y.shape[0] != n:
        raise ValueError(f"y has shape {y.shape} but {what.format(n=n)}.")
    return y


def _several_labels(y: Any) -> Any:
    """Zeros and ones, several per node; -1 or NaN is unknown, and becomes -1."""
    if y.dtype.kind == "U" or (y.ndim == 2 and y.shape[1] == 0):
        raise ValueError('loss="bce" needs zeros and ones, (n,) or (n, c), -1 or NaN for unknown.')
    Y = columns_of(np.where(np.isnan(y), -1, y).astype(np.float64))
    bad = Y[~np.isin(Y, (-1.0, 0.0, 1.0))]
    if bad.size:
        shown = f"{bad[0]:g}" if np.isfinite(bad[0]) else "infinity"
        raise ValueError(
            f'loss="bce" needs zeros and ones (-1 or NaN for unknown), but y holds {shown}.'
        )
    return Y


def _row_weights(given: Any, n: int) -> Any:
    """sample_weight as (n,) floats, or a sentence that says what is wrong with it."""
    weight = np.asarray(given)
    if weight.shape != (n,) or weight.dtype.kind not in "fiub":
        raise ValueError(
            f"sample_weight must hold one number per node, shape ({n},), not "
            f"{weight.dtype} of shape {weight.shape}."
        )
    return weight.astype(np.float64)


def _weighty(rows: Any, weight: Any, given: bool = False) -> tuple[Any, Any]:
    """The rows that have any weight, and theirs; `given`: one per row, not one per node."""
    if weight is None:
        return rows, None
    weight = weight if given else weight[rows]
    if not np.isfinite(weight).all() or (weight < 0).any():
        raise ValueError("A weight of a training node is negative, NaN or infinite: use 0 or more.")
    largest = float(weight.max(initial=0.0))
    if largest == 0:
        raise ValueError("All training nodes have the weight 0: give at least one a positive one.")
    if not _LEAST_WEIGHT <= largest <= 1 / _LEAST_WEIGHT:
        raise ValueError(
            f"The largest weight of a training node is {largest:.3g}: divide all of them by that."
        )
    keep = weight > 0
    least = float(weight[keep].min())
    if least < _LEAST_WEIGHT * largest:
        raise ValueError(
            f"A training node has the weight {least:.3g} beside others of {largest:.3g}, which "
            f"float64 cannot add up: give it 0, or {_LEAST_WEIGHT:g} of the largest at least."
        )
    return rows[keep], weight[keep]


def _class_weights(given: Any, labels: Any, y: Any) -> Any:
    """One weight per row of y: that of its class."""
    classes, codes, counts = np.unique(y, return_inverse=True, return_counts=True)
    if isinstance(given, str):  # "balanced": as much of each class
        return (y.shape[0] / (classes.shape[0] * counts))[codes]
    unknown = [name for name in given if name not in labels]
    if unknown:
        raise ValueError(f"class_weight names {unknown[0]!r}, which is no label of y.")
    return np.array([float(given.get(name, 1.0)) for name in classes.tolist()])[codes]


# ---- scores ------------------------------------------------------------------------------
def check_scored(y: Any, n: int) -> None:
    """Raise an error unless `y` holds labels or targets for n predictions."""
    labels_of(y, n, "there are {n:,} predictions")


def accuracy_or_r2(
    predicted: Any, y: Any, rows: Any, classes: Any | None, total: Total = lambda x: x
) -> float:
    """Share of right labels among the labelled ones of `rows`, which the predictions are of; R^2.

    Where other processes have other rows, `total` adds up over all of them.
    """
    y = as_labels("y", y)
    if total(rows.size) == 0:
        raise ValueError("There is no row to score: idx is empty.")
    y = y[rows]
    if classes is not None:
        if y.ndim == 2 or (y.dtype.kind == "U") != (classes.dtype.kind == "U"):
            kind = "text" if classes.dtype.kind == "U" else "number"
            raise ValueError(f"y must hold one {kind} per node, as the classes of the model are.")
        known = has_label(y) if y.dtype.kind == "U" else y >= 0  # floats, too: NaN is none
        return _share_right(predicted[known] == y[known], total)
    if y.dtype.kind == "U":
        raise ValueError("y holds text but the model predicts numbers.")
    if not np.isfinite(y).all():
        raise ValueError("y holds NaN or infinity in a row to score: leave such rows out by idx.")
    return r_squared(*_pair(y.astype(np.float64), predicted.astype(np.float64)), total)


def _pair(y: Any, predicted: Any) -> tuple[Any, Any]:
    """Truth and predictions with as many columns each."""
    y, predicted = columns_of(y), columns_of(predicted)
    if y.shape != predicted.shape:
        raise ValueError(f"y has {y.shape[1]} columns but the model has {predicted.shape[1]}.")
    return y, predicted


def _share_right(right: Any, total: Total) -> float:
    count = total(int(right.size))
    if count == 0:
        raise ValueError("None of the rows to score has a label.")
    return float(total(int(np.count_nonzero(right))) / count)


def label_accuracy(predicted: Any, y: Any, rows: Any, total: Total = lambda x: x) -> float:
    """The share of right labels of 0 or 1, among those of `rows` that are known."""
    y, predicted = _pair(as_labels("y", y)[rows], predicted)
    known = (y == 0) | (y == 1)
    return _share_right(predicted[known] == y[known], total)


def r_squared(truth: Any, predicted: Any, total: Total = lambda x: x) -> float:
    """R^2 of predictions (rows, columns), as the mean over the columns.

    A column of equal targets has no variance to divide by: its squared error counts as it is.
    """
    found = []
    for true, guess in zip(truth.T, predicted.T, strict=True):
        mean = total(float(true.sum())) / total(true.size)
        spread, left = (total(float(((true - other) ** 2).sum())) for other in (mean, guess))
        found.append(1.0 - left / (spread if spread > 0 else 1.0))
    return float(np.mean(found))
