"""Prediction sets that hold the truth with a stated probability.

Split conformal prediction.  Of m nodes whose labels no part of the model has seen, let
s_i = -f_i[y_i], f the model's scores, and q the ceil((m + 1) coverage)-th smallest of them.  The
set of node j is {k : -f_j[k] <= q}.  If node j and the m nodes are exchangeable (drawn alike, as by
a random split), y_j is in its set with a probability of at least `coverage`, and at most 1/(m + 1)
more if no two scores are equal: for any model, any graph and any distribution.  For numbers
s_i = |y_i - f_i|, and the set is an interval.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from herta_gpu.plumbing.checks import check_number


class SplitConformal:
    """Sets or intervals from the outputs of any model, calibrated on nodes that it has not seen.

    Parameters
    ----------
    coverage : float
        The probability with which the truth is to be in the set.

    Attributes
    ----------
    threshold_ : float, or array (c,) for numbers
        q; infinite where there are too few nodes for the coverage, and every set is whole.

    Examples
    --------
    >>> from herta_gpu import HERTA
    >>> from herta_gpu.conformal import SplitConformal
    >>> from herta_gpu.datasets import load
    >>> data = load("digits")
    >>> model = HERTA(lam=5.0, ridge=0.1).fit(data.graph, data.X, data.y, data.split["train"])
    >>> Z = model.transform(data.graph, data.X)
    >>> valid, test = data.split["valid"], data.split["test"]
    >>> conformal = SplitConformal(0.9).calibrate(Z[valid], data.y[valid], model.classes_)
    >>> sets = conformal.sets(Z[test])
    >>> sets.shape == (len(test), 10), bool(sets[range(len(test)), data.y[test]].mean() > 0.85)
    (True, True)
    """

    def __init__(self, coverage: float = 0.9) -> None:
        if not 0 < check_number("coverage", coverage) < 1:
            raise ValueError(f"coverage must lie between 0 and 1, not {coverage!r}.")
        self.coverage = coverage

    def calibrate(self, outputs: Any, y: Any, classes: Any = None) -> SplitConformal:
        """Find the threshold from outputs (m, c) and labels, or numbers, of m unseen nodes.

        Parameters
        ----------
        outputs : array (m, c)
            Of `HERTA.transform`, or scores from anywhere.
        y : array
            (m,) labels, or numbers of the shape of `outputs` where `classes` is None; each node
            has one.
        classes : array (c,), optional
            The labels of the columns, as in `HERTA.classes_`; None: y holds numbers.
        """
        outputs = _outputs(outputs)
        classes = None if classes is None else np.asarray(classes)
        y, m = _targets(y, outputs, classes), outputs.shape[0]
        self.classes_, self._width = classes, outputs.shape[1]
        if classes is None:
            scores = np.abs(y - outputs)
        else:
            order = np.argsort(classes)
            at = np.minimum(np.searchsorted(classes, y, sorter=order), order.size - 1)
            scores = -outputs[np.arange(m), order[at]][:, None]
            # A label that the model does not know is in no set: any threshold misses it.
            scores[classes[order[at]] != y] = np.inf
        k = math.ceil((m + 1) * self.coverage - 1e-9)
        found = np.full(scores.shape[1:], np.inf) if k > m else np.sort(scores, axis=0)[k - 1]
        self.threshold_: Any = found if classes is None else float(found[0])
        return self

    def sets(self, outputs: Any) -> Any:
        """(k, c) booleans: which classes are in the set of each node."""
        return -self._of_the_same(outputs, labels=True) <= self.threshold_

    def intervals(self, outputs: Any) -> tuple[Any, Any]:
        """(lower, upper) ends of the intervals, each of the shape (k, c)."""
        outputs = self._of_the_same(outputs, labels=False)
        return outputs - self.threshold_, outputs + self.threshold_

    def _of_the_same(self, outputs: Any, labels: bool) -> Any:
        """(k, c) outputs of the model that was calibrated, on labels or on numbers."""
        if not hasattr(self, "threshold_"):
            raise RuntimeError("Nothing is calibrated yet: call calibrate first.")
        if labels != (self.classes_ is not None):
            raise ValueError(
                f"y held {'numbers: use intervals' if labels else 'labels: use sets'}."
            )
        return _outputs(outputs, self._width)


def _outputs(outputs: Any, width: int | None = None) -> Any:
    """(m, c) outputs that are numbers, of the width that was calibrated."""
    outputs = _columns(outputs)
    if width is not None and outputs.shape[1:] != (width,):
        raise ValueError(
            f"Outputs of shape {outputs.shape} have not the width {width} of those that were "
            "calibrated: give the outputs of the same model."
        )
    _check_all_known(np.isnan(outputs).any(axis=1), "NaN among their outputs: leave them out")
    return outputs


def _targets(y: Any, outputs: Any, classes: Any) -> Any:
    """(m,) labels or (m, c) numbers that belong to these outputs, one for each node."""
    y = np.asarray(y)
    if y.ndim == 0 or y.shape[:1] != outputs.shape[:1] or y.shape[0] == 0:
        raise ValueError(
            f"y of shape {y.shape} does not belong to {outputs.shape[0]:,} rows of outputs: give "
            "one target for each, of one node at least."
        )
    if classes is None:
        y = _columns(y)
        if y.shape != outputs.shape:
            raise ValueError(f"y has shape {y.shape} for outputs of shape {outputs.shape}.")
        _check_all_known(np.isnan(y).any(axis=1), "no target: calibrate on the others")
        infinite = ~(np.isfinite(y) & np.isfinite(outputs)).all(axis=1)
        _check_all_known(infinite, "an infinite output or target: leave them out")
        return y
    if outputs.shape[1] != classes.shape[0]:
        raise ValueError(f"{outputs.shape[1]} outputs for {classes.shape[0]} classes.")
    if y.size != y.shape[0]:
        raise ValueError(f"y must hold one label per node, but its shape is {y.shape}.")
    y = y.reshape(-1)
    none = ("", None, -1)  # as in `HERTA.fit`, unless a class is called so
    unknown = [label in none or label != label for label in y.tolist()]
    missing = np.array(unknown) & ~np.isin(y.astype(str), classes.astype(str))
    _check_all_known(missing, "no label: calibrate on the others")
    return y


def _check_all_known(missing: Any, what: str) -> None:
    if missing.any():
        raise ValueError(f"{missing.sum():,} of {missing.shape[0]:,} nodes have {what}.")


def _columns(outputs: Any) -> Any:
    outputs = np.asarray(outputs, dtype=np.float64)
    if outputs.ndim not in (1, 2):
        raise ValueError(f"Give one row per node, not an array of shape {outputs.shape}.")
    return outputs[:, None] if outputs.ndim == 1 else outputs
