"""Prediction sets that hold the truth with a stated probability.

Split conformal prediction.  Of m nodes whose labels no part of the model has seen, let
s_i = -f_i[y_i], f the model's scores, and q the ceil((m + 1) coverage)-th smallest of them.  The
set of node j is {k : -f_j[k] <= q}.  If node j and the m nodes are exchangeable (drawn alike, as by
a random split), y_j is in its set with a probability of at least `coverage`, and at most 1/(m + 1)
more if no two scores are equal: for any model, any graph and any distribution.  For numbers
s_i = |y_i - f_i|, and the set is an interval.

Jackknife+ (Barber and others 2021; for classes Romano and others 2020) needs no further labels: the
n training nodes calibrate, each by the model that was trained without it, f^i.  With the score
s_i = -f^i_i[y_i] of node i, class k is in the set of node j if fewer than coverage (n + 1) of the
nodes have s_i < -f^i_j[k].  For numbers the ends of the interval are quantiles of f^i_j -+ s_i,
s_i = |y_i - f^i_i|.  Proven is a coverage of at least 2 coverage - 1; about `coverage` is what is
usually seen.  (The plain jackknife, with the outputs of the one model in place of f^i_j, has no
such bound.)  What is assumed:

* Graph and features are as they are, for all nodes at once; what is random is which nodes are
  trained on.  Given graph and X, rows of H^-1 X do not depend on that, though each is made from
  other nodes' features.  If the training nodes and node j are a uniformly random sample of the
  nodes with labels, their pairs (row, label) are exchangeable, and the bound is for a random such
  sample.  Public splits with as many nodes of each class, or splits by time, are no such sample.
* Training treats all nodes alike, and the models without a node are what training without it would
  give: lam, ridge and weights are not chosen by the same labels (by leave-one-out, or
  class_weight="balanced"), and there are no label features.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import numpy as np

_NUMBERS = 1 << 21  # of outputs of models without a node, at a time


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
        if not 0 < coverage < 1:
            raise ValueError(f"coverage must lie between 0 and 1, not {coverage!r}.")
        self.coverage = coverage

    def calibrate(self, outputs: Any, y: Any, classes: Any = None) -> SplitConformal:
        """Find the threshold from outputs (m, c) and labels, or numbers, of m unseen nodes.

        Parameters
        ----------
        outputs : array (m, c)
            Of `HERTA.transform`, or scores from anywhere.
        y : array
            (m,) labels, or numbers of the shape of `outputs` where `classes` is None.
        classes : array (c,), optional
            The labels of the columns, as in `HERTA.classes_`; None: y holds numbers.
        """
        outputs = _columns(outputs)
        self.classes_ = None if classes is None else np.asarray(classes)
        y = _checked(y, outputs, self.classes_)
        if self.classes_ is None:
            self.threshold_: Any = _quantile(np.abs(_columns(y) - outputs), self.coverage)
            return self
        code, missed = _codes(y, self.classes_)
        # A label that the model does not know is in no set: it counts as missed by any threshold.
        scores = np.where(missed, np.inf, -outputs[np.arange(y.shape[0]), code])
        self.threshold_ = float(_quantile(scores[:, None], self.coverage)[0])
        return self

    def sets(self, outputs: Any) -> Any:
        """(k, c) booleans: which classes are in the set of each node."""
        if self._calibrated().classes_ is None:
            raise ValueError("y held numbers: use intervals.")
        return -_columns(outputs) <= self.threshold_

    def intervals(self, outputs: Any) -> tuple[Any, Any]:
        """(lower, upper) ends of the intervals, each of the shape (k, c)."""
        if self._calibrated().classes_ is not None:
            raise ValueError("y held labels: use sets.")
        outputs = _columns(outputs)
        return outputs - self.threshold_, outputs + self.threshold_

    def _calibrated(self) -> SplitConformal:
        if not hasattr(self, "threshold_"):
            raise RuntimeError("Nothing is calibrated yet: call calibrate first.")
        return self


class JackknifePlus:
    """Sets or intervals from leave-one-out: no node is kept back for calibration.

    Parameters
    ----------
    coverage : float
        About the probability with which the truth is in the set; 2 coverage - 1 is proven.

    Attributes
    ----------
    guaranteed_ : float
        2 coverage - 1: the coverage is at least this, if what the module says is given.

    Examples
    --------
    >>> from herta_gpu import HERTA
    >>> from herta_gpu.conformal import JackknifePlus
    >>> from herta_gpu.datasets import load
    >>> data = load("digits")
    >>> train, test = data.split["train"], data.split["test"][:100]
    >>> model = HERTA(lam=5.0, ridge=0.1)
    >>> model = model.fit(data.graph, data.X, data.y, train, evaluate=test, loo="influence")
    >>> jackknife = JackknifePlus(0.9)
    >>> jackknife = jackknife.calibrate(model.loo_, data.y[model.train_], model.classes_)
    >>> sets = jackknife.sets(model.outputs_, model.influence_)
    >>> sets.shape, bool(sets[range(100), data.y[test]].mean() > 0.8)
    ((100, 10), True)
    """

    def __init__(self, coverage: float = 0.9) -> None:
        if not 0.5 < coverage < 1:
            raise ValueError(
                f"coverage must lie between 0.5 and 1, not {coverage!r}: 2 coverage - 1 is proven."
            )
        self.coverage, self.guaranteed_ = coverage, 2 * coverage - 1

    def calibrate(self, loo: Any, y: Any, classes: Any = None) -> JackknifePlus:
        """Take the scores of the training nodes.

        Parameters
        ----------
        loo : array (n, c)
            `HERTA.loo_`; NaN, where no model is without the node, counts as missed by any set.
        y : array
            (n,) labels of the training nodes in the order of `HERTA.train_`, or numbers of the
            shape of `loo` where `classes` is None.
        classes : array (c,), optional
            `HERTA.classes_`; None: y holds numbers.
        """
        loo = _columns(loo)
        self.classes_ = None if classes is None else np.asarray(classes)
        y = _checked(y, loo, self.classes_)
        if self.classes_ is None:
            Y = _columns(y)
            scores = np.abs(Y - loo)
        else:
            code, unknown = _codes(y, self.classes_)
            if unknown.any():
                raise ValueError(f"y holds {y[unknown][0]!s}, which is none of the classes.")
            Y = np.eye(self.classes_.shape[0])[code]
            scores = -loo[np.arange(code.shape[0]), code]
        self._scores = np.where(np.isnan(scores), np.inf, scores)
        self._missed = np.where(np.isnan(loo), 0.0, loo - Y)  # such a row has an infinite score
        return self

    def sets(self, outputs: Any, influence: Any) -> Any:
        """(k, c) booleans: which classes are in the set of each node.

        Parameters
        ----------
        outputs : array (k, c)
            `HERTA.outputs_` of the nodes.
        influence : array (k, n)
            `HERTA.influence_` of the same nodes.
        """
        if self._calibrated().classes_ is None:
            raise ValueError("y held numbers: use intervals.")
        most = self.coverage * (self._scores.shape[0] + 1) - 1e-9
        found = [
            (self._scores[None, :, None] < -without).sum(axis=1) < most
            for without in self._without(outputs, influence)
        ]
        return np.concatenate(found)

    def intervals(self, outputs: Any, influence: Any) -> tuple[Any, Any]:
        """(lower, upper) ends of the intervals, each of the shape (k, c); arguments as of `sets`.

        Each column holds its number with the coverage, not all of them at once.
        """
        if self._calibrated().classes_ is not None:
            raise ValueError("y held labels: use sets.")
        scores, lower, upper = self._scores[:, None], [], []
        for without in self._without(outputs, influence):
            one = without.transpose(1, 0, 2)
            lower.append(-_quantile(scores - one, self.coverage))
            upper.append(_quantile(one + scores, self.coverage))
        return np.concatenate(lower), np.concatenate(upper)

    def _without(self, outputs: Any, influence: Any) -> Iterator[Any]:
        """(nodes, n, c) outputs of the models without each training node, a few nodes at a time."""
        outputs, influence = _columns(outputs), np.asarray(influence, dtype=np.float64)
        n, c = self._missed.shape
        if outputs.shape[1] != c or influence.shape != (outputs.shape[0], n):
            raise ValueError(
                f"Outputs of shape {outputs.shape} and an influence of shape {influence.shape} do "
                f"not belong to {n:,} training nodes and {c} outputs."
            )
        step = max(1, _NUMBERS // (n * c))
        for i in range(0, max(1, outputs.shape[0]), step):
            rows = slice(i, i + step)
            yield outputs[rows, None, :] + influence[rows, :, None] * self._missed

    def _calibrated(self) -> JackknifePlus:
        if not hasattr(self, "_scores"):
            raise RuntimeError("Nothing is calibrated yet: call calibrate first.")
        return self


def _checked(y: Any, outputs: Any, classes: Any) -> Any:
    """y as an array that belongs to these outputs."""
    y = np.asarray(y)
    if y.shape[:1] != outputs.shape[:1] or y.shape[0] == 0:
        raise ValueError(f"y has {y.shape[0]:,} rows for {outputs.shape[0]:,} outputs.")
    if classes is None and _columns(y).shape != outputs.shape:
        raise ValueError(f"y has shape {y.shape} for outputs of shape {outputs.shape}.")
    if classes is not None and outputs.shape[1] != classes.shape[0]:
        raise ValueError(f"{outputs.shape[1]} outputs for {classes.shape[0]} classes.")
    return y


def _codes(y: Any, classes: Any) -> tuple[Any, Any]:
    """(the column of each label, which labels have none)."""
    order = np.argsort(classes)
    at = np.minimum(np.searchsorted(classes, y, sorter=order), order.size - 1)
    return order[at], classes[order[at]] != y


def _columns(outputs: Any) -> Any:
    outputs = np.asarray(outputs, dtype=np.float64)
    return outputs[:, None] if outputs.ndim == 1 else outputs


def _quantile(scores: Any, coverage: float) -> Any:
    """The ceil((m + 1) coverage)-th smallest along the first axis; infinite if m is too small."""
    m = scores.shape[0]
    k = math.ceil((m + 1) * coverage - 1e-9)
    if k > m:
        return np.full(scores.shape[1:], np.inf)
    return np.sort(scores, axis=0)[k - 1]
