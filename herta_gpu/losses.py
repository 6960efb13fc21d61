"""The outer losses of the paper, as sums over the training rows.

Each is a function of F = M Z*(W), the model's output on the training rows.  Because F is linear in
W, the loss along a direction costs no solve: line searches are exact and free.

A loss may be bound to weights of the rows (at most 1), and it may have an intercept: then it is
the smallest loss of F + 1 b^T over all constants b, one per output.  That is a convex function of
F as well, no steeper than the loss itself, so nothing else has to know of b:

    min over W, b of loss(A W + 1 b^T)  =  min over W of (min over b of loss(A W + 1 b^T)).
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Self

import numpy as np

from herta_gpu.backends.base import Array, norm, unit_roundoff

Slopes = tuple[Array, Array]
_UNIT = unit_roundoff()
_NEWTON_STEPS = 40
_SINKHORN_STEPS = 50
_TINY = 1e-300
_LARGEST_SHIFT = 60.0  # a constant beyond which exp(-b) adds nothing to a loss ...
_NO_LOSS = 1e-15  # ... of a billion labels


@dataclass(frozen=True)
class Loss(ABC):
    """What training needs of a loss; here what all of them share, weights and intercept.  A new
    loss must be convex in F.  It defines the three constants, `_terms`, `_bend`, `shift`, and those
    methods below that are not true of it; see `MSE`, `CrossEntropy` and `BinaryCrossEntropy`."""

    weights: Array | None = None  # (n_train,) positive, at most 1; None: all 1
    intercept: bool = False

    separable: ClassVar[bool]  # columns of W are independent problems
    quadratic: ClassVar[bool]  # the Hessian is the same everywhere: its spectrum certifies a fit
    steepest: ClassVar[float]  # the largest eigenvalue that the Hessian with respect to F can have

    @abstractmethod
    def _terms(self, xp: Any, F: Array, S: Array, Y: Array) -> Array:
        """What the loss is the weighted sum of, for outputs F and their activation S."""

    @abstractmethod
    def _bend(self, xp: Any, S: Array, FD: Array) -> Array:
        """What the second derivative along FD is the weighted sum of."""

    @abstractmethod
    def shift(self, xp: Any, F: Array, Y: Array) -> Array:
        """(c,) the best constants."""

    # ---- rows, weights, intercept --------------------------------------------------------------
    @property
    def plain(self) -> bool:
        """Whether the loss is that of the paper."""
        return self.weights is None and not self.intercept

    def bind(self, weights: Array | None, intercept: bool) -> Self:
        """The same loss of rows with these weights, with or without free constants."""
        return replace(self, weights=weights, intercept=intercept)

    def of_rows(self, rows: slice) -> Self:
        """The loss of some of the rows, whose constants are part of F."""
        if self.plain:
            return self
        return self.bind(None if self.weights is None else self.weights[rows], False)

    def mean(self, xp: Any, Q: Array) -> Array:
        """(r,) weighted means of the columns of Q."""
        if self.weights is None:
            return Q.sum(axis=0) / Q.shape[0]
        return self.weigh(Q).sum(axis=0) / self.weights.sum()

    def scale_rows(self, xp: Any, Q: Array, rows: slice, mean: Array | None) -> Array:
        """Rows of Q as a quadratic loss sees them: less their mean, times the root of the weight.
        Their Gram matrix is the Hessian of 1/2 ||Q u||^2, weights and intercept included."""
        Q = Q if mean is None else Q - mean
        return Q if self.weights is None else xp.sqrt(self.weights[rows])[:, None] * Q

    def total(self, count: int) -> float:
        """The sum of the weights of so many rows."""
        return float(count) if self.weights is None else float(self.weights.sum())  # synchronize!

    def weigh(self, E: Array, counted: Array | None = None) -> Array:
        """Rows of E times their weights, 0 for labels that are not `counted`."""
        E = E if counted is None else counted * E
        return E if self.weights is None else self.weights[:, None] * E

    def add_intercept(self, xp: Any, F: Array, Y: Array) -> Array:
        """F + 1 b^T with the best constants b; F itself without an intercept."""
        return F + self.shift(xp, F, Y) if self.intercept else F

    def imbalance(self, xp: Any, E: Array) -> float:
        """||1^T E|| over the root of all weights, rounding included: 0 at the best constants."""
        if not self.intercept:
            return 0.0
        count = E.shape[0]
        rounded = (count + 2) * _UNIT * math.sqrt(count) * norm(E)
        return (norm(E.sum(axis=0)) + rounded) / math.sqrt(self.total(count))

    def intercept_gap(self, imbalance: float, output_error: float, distance: float) -> float:
        """How much the objective could still fall by changing the intercept alone, at most.  The
        constants are the best for outputs that are off by `output_error`, but for an `imbalance` of
        the gradient, and no farther than `distance` from those of the optimum."""
        # With E the gradient at outputs F that are off by that error, convexity gives for all W, b
        #   loss(A W + b) >= loss(F) + <E, A W + b - F>,   and   loss <= that + steepest/2 error^2
        # at the outputs themselves.  The imbalance of E counts along the constants only.
        if not self.intercept:
            return 0.0
        tilted = imbalance * distance if imbalance > 0 else 0.0
        return 0.5 * self.steepest * output_error**2 + tilted + _NO_LOSS

    def intercept_distance(
        self, xp: Any, Y: Array, b: Array, objective: float, ridge: float, X_norm: float
    ) -> float:
        """How far the constants b are from those of the optimum, times the root of all weights.
        The loss of the optimum is at most that of any W, so no mean of -f over rows that want f to
        be large exceeds objective / (their weight); and ||W||^2 <= 2 objective / ridge there."""
        sums, slope = self._resistance(xp, Y)
        if ridge == 0:
            return math.inf
        b = self.centre(xp, b[None])
        least = float(xp.where(sums > 0, sums, xp.inf).min())  # synchronize!
        far = objective / least + slope * X_norm * math.sqrt(2 * objective / ridge)
        return math.sqrt(self.total(Y.shape[0])) * (norm(b) + math.sqrt(b.shape[1]) * far)

    def _resistance(self, xp: Any, Y: Array) -> tuple[Array, float]:
        """((c,) weight of the rows that hold a constant back, slope of a difference of outputs)."""
        return xp.zeros(Y.shape[1]), 0.0  # nothing of a loss whose `intercept_gap` needs none

    def _labels_that_count(self, xp: Any, Y: Array) -> Array | None:
        """Which labels count; None: all."""
        return None

    # ---- values and derivatives ----------------------------------------------------------------
    def at(self, xp: Any, F: Array, Y: Array) -> tuple[float, Array]:
        """Value and gradient together, for less than one after the other."""
        F = self.add_intercept(xp, F, Y)
        return self._plain(xp, F, Y, self._labels_that_count(xp, Y))[:2]

    def _plain(
        self, xp: Any, F: Array, Y: Array, counted: Array | None = None
    ) -> tuple[float, Array, Array]:
        """The loss whose constants are part of F, its gradient, and the activation."""
        S = self.activation(xp, F)
        terms, E = self._terms(xp, F, S, Y), self.weigh(S - Y, counted)
        return float(xp.sum(self.weigh(terms, counted))), E, S  # synchronize!

    def value(self, xp: Any, F: Array, Y: Array) -> float:
        return self.at(xp, F, Y)[0]

    def residual(self, xp: Any, F: Array, Y: Array) -> Array:
        """The gradient with respect to F."""
        return self.at(xp, F, Y)[1]

    def rounding(self, F: Array) -> float:
        """What `value` may be off by at an exact F, beside rounding of E and of the sum."""
        # Logarithms and outputs of the size of F, whose difference may be far smaller.
        return 16 * _UNIT * math.sqrt(F.size) * norm(F)

    def gradient_rounding(self, E: float, Y: Any) -> float:
        """What rounding does to a gradient of norm E, beside what outputs a little off would do."""
        # Probabilities, each from a sum over its row, of which labels are subtracted.
        return (2 * Y.shape[1] + 16) * _UNIT * math.sqrt(Y.shape[0] * Y.shape[1])

    def start_curvature(self, c: int) -> float:
        """The curvature at W = 0, where training starts, for c outputs; 1 where there is none."""
        return self.curvature(np, np.zeros((1, c))) or 1.0

    def activation(self, xp: Any, F: Array) -> Array:
        """What the loss takes the outputs for: the softmax, the sigmoid, or the outputs."""
        return F

    def curvature(self, xp: Any, F: Array) -> float:
        """The mean diagonal of the Hessian with respect to F, weights apart."""
        S = self.activation(xp, F)
        return float(xp.mean(S * (1 - S)))  # synchronize!

    def probabilities(self, xp: Any, E: Array, Y: Array) -> Array:
        """The activation, from the gradient E; 0, without curvature, for labels that count not."""
        S = (E if self.weights is None else E / self.weights[:, None]) + Y
        counted = self._labels_that_count(xp, Y)
        return S if counted is None else xp.where(counted, S, 0.0)

    def row_curvature(self, xp: Any, E: Array, Y: Array) -> Array:
        """(n_train,) mean eigenvalue of each row's Hessian over what `centre` leaves, from E.  Of
        rows after `scale_rows`: weights are in those."""
        # diag(s) - s s^T and diag(s (1 - s)) have the same trace.
        S = self.probabilities(xp, E, Y)
        directions = Y.shape[1] if self.separable else max(1, Y.shape[1] - 1)
        return _row_sum(xp, S * (1 - S))[:, 0] / directions

    def centre(self, xp: Any, G: Array) -> Array:
        """G without the part that no gradient of this loss has."""
        return G

    def step(
        self, xp: Any, F: Array, FD: Array, Y: Array, ridge: Slopes, enough: float = 0.0
    ) -> Array:
        """(c,) how far to go along each column of the direction FD: to the least objective.  Or to
        where the slope is at most `enough`, up or down.  `ridge` holds the column-wise slope and
        curvature of the ridge term."""
        F = self.add_intercept(xp, F, Y)
        FD = FD - self.mean(xp, FD) if self.intercept else FD  # constants follow
        slope0, curvature0 = (float(r.sum()) for r in ridge)  # synchronize!
        counted = self._labels_that_count(xp, Y)
        # Newton's method, kept inside a bracket.
        low, high, eta = 0.0, math.inf, 1.0
        for _ in range(_NEWTON_STEPS):
            S = self.activation(xp, F + eta * FD)
            both = ((S - Y) * FD, self._bend(xp, S, FD))
            sums = xp.stack([xp.sum(self.weigh(E, counted)) for E in both])
            slope, curvature = sums.tolist()  # synchronize!
            slope, curvature = slope + slope0 + eta * curvature0, curvature + curvature0
            if abs(slope) <= enough:
                break
            low, high = (eta, high) if slope < 0 else (low, eta)
            new = eta - slope / curvature if curvature > 0 else math.inf
            if not low < new < high:
                new = 2 * eta if high == math.inf else 0.5 * (low + high)
            done = abs(new - eta) <= 1e-6 * eta
            eta = new
            if done or eta > 1e8:  # without a minimiser (separable classes) a long step will do
                break
        return xp.full(FD.shape[1], eta)

    def _log_totals(self, xp: Any, logs: Array) -> Array:
        """(c,) logarithms of weighted sums over the rows, of numbers given by theirs; 0 if none."""
        if self.weights is not None:
            logs = logs + xp.log(self.weights)[:, None]
        found = _log_sums(xp, logs, axis=0)[0]
        return xp.where(found > -xp.inf, found, 0.0)


class MSE(Loss):
    """1/2 ||F - Y||_F^2 (equation 4.7)."""

    separable, quadratic, steepest = True, True, 1.0

    def _terms(self, xp: Any, F: Array, S: Array, Y: Array) -> Array:
        return 0.5 * (F - Y) ** 2

    def _bend(self, xp: Any, S: Array, FD: Array) -> Array:
        return FD * FD

    def shift(self, xp: Any, F: Array, Y: Array) -> Array:
        return self.mean(xp, Y - F)

    def intercept_gap(self, imbalance: float, output_error: float, distance: float) -> float:
        # With weights that add up to s, the loss is s/2 ||b - best||^2 above its least.
        return 0.5 * (output_error + imbalance) ** 2 if self.intercept else 0.0

    def rounding(self, F: Array) -> float:
        return 0.0

    def gradient_rounding(self, E: float, Y: Any) -> float:
        return 4 * _UNIT * E

    def curvature(self, xp: Any, F: Array) -> float:
        return 1.0

    def row_curvature(self, xp: Any, E: Array, Y: Array) -> Array:
        return xp.ones(E.shape[0])

    def step(
        self, xp: Any, F: Array, FD: Array, Y: Array, ridge: Slopes, enough: float = 0.0
    ) -> Array:
        FD = FD - self.mean(xp, FD) if self.intercept else FD
        slope = xp.sum(self.residual(xp, F, Y) * FD, axis=0) + ridge[0]
        curvature = xp.sum(self.weigh(FD * FD), axis=0) + ridge[1]
        return -slope / xp.where(curvature > 0, curvature, 1.0)


class CrossEntropy(Loss):
    """Sum over the training rows of -<y, log softmax(f)>."""

    separable, quadratic, steepest = False, False, 0.5

    def _terms(self, xp: Any, F: Array, S: Array, Y: Array) -> Array:
        top = _row_max(xp, F)
        # Not top - <F, Y>: of a row that is all but certain that would leave rounding only.
        known = _row_sum(xp, (top - F) * Y) + top * (1 - _row_sum(xp, Y))
        return known - xp.log(_row_max(xp, S))

    def _bend(self, xp: Any, S: Array, FD: Array) -> Array:
        return S * (FD - _row_sum(xp, S * FD)) ** 2

    def shift(self, xp: Any, F: Array, Y: Array) -> Array:
        """By Newton's method: each class gets the share of the softmax that it has of the rows."""
        goal = self.weigh(Y).sum(axis=0)
        share = xp.maximum(goal / xp.maximum(goal.sum(), _TINY), _TINY)
        b, c = xp.log(share), share.shape[0]

        def at(b: Array) -> tuple[float, Array, Array]:
            value, E, S = self._plain(xp, F + b, Y)
            WS = self.weigh(S)
            hessian = xp.diag(WS.sum(axis=0)) - S.T @ WS
            return value, E.sum(axis=0), hessian + WS.sum() / c**2

        def rescale(b: Array) -> Array:
            logs = F + b
            logs = logs - _log_sums(xp, logs, axis=1)
            b = b + xp.log(xp.maximum(goal, _TINY)) - self._log_totals(xp, logs)
            return b - b.sum() / c

        return _best_constants(xp, b - b.sum() / c, rescale, at)

    def activation(self, xp: Any, F: Array) -> Array:
        return softmax(xp, F)

    def centre(self, xp: Any, G: Array) -> Array:
        # Adding one vector to all classes changes no softmax: only a ridge speaks of such a
        # direction, so softly that what solves leave over there would run away with W.
        return G - _row_sum(xp, G) / G.shape[1]

    def _resistance(self, xp: Any, Y: Array) -> tuple[Array, float]:
        # Rows of class k: the mean of f_j - f_k is at most objective / (their weight) for each j.
        return self.weigh(Y).sum(axis=0), math.sqrt(2)


class BinaryCrossEntropy(Loss):
    """Sum over rows and labels of -y log s - (1 - y) log(1 - s), s = 1 / (1 + exp(-f)).  A label
    below 0 is unknown and does not count."""

    separable, quadratic, steepest = True, False, 0.25

    def _terms(self, xp: Any, F: Array, S: Array, Y: Array) -> Array:
        # y softplus(-f) + (1 - y) softplus(f): no difference of large numbers.
        softplus = xp.log1p(xp.exp(-abs(F)))
        return softplus + Y * xp.maximum(-F, 0.0) + (1 - Y) * xp.maximum(F, 0.0)

    def _bend(self, xp: Any, S: Array, FD: Array) -> Array:
        return S * (1 - S) * FD * FD

    def shift(self, xp: Any, F: Array, Y: Array) -> Array:
        known, ones, zeros = self._counts(xp, Y)
        mixed = (ones > 0) & (zeros > 0)
        odds = xp.log(xp.where(mixed, ones, 1.0)) - xp.log(xp.where(mixed, zeros, 1.0))

        def at(b: Array) -> tuple[float, Array, Array]:
            value, E, S = self._plain(xp, F + b, Y, known & mixed)
            bend = self.weigh(S * (1 - S), known & mixed).sum(axis=0)
            return value, E.sum(axis=0), xp.diag(xp.where(mixed, bend, 1.0))

        def rescale(b: Array) -> Array:
            one, zero = (  # logarithms of the sums of sigmoid(f), and of sigmoid(-f)
                self._log_totals(xp, xp.where(known, -xp.logaddexp(0.0, side), -xp.inf))
                for side in (-F - b, F + b)
            )
            return b + xp.where(mixed, odds - one + zero, 0.0)

        # Without a 0 (or a 1) no constant is large enough.
        alone = xp.where(ones > 0, _LARGEST_SHIFT, -_LARGEST_SHIFT) * (ones + zeros > 0)
        return xp.where(mixed, _best_constants(xp, odds, rescale, at), alone)

    def _counts(self, xp: Any, Y: Array) -> tuple[Array, Array, Array]:
        """(which labels are known, weight of the ones of each column, weight of the zeros)."""
        known = Y >= 0
        return known, self.weigh(Y, known).sum(axis=0), self.weigh(1 - Y, known).sum(axis=0)

    def _labels_that_count(self, xp: Any, Y: Array) -> Array:
        # With an intercept, a column of equal ones has no loss at all.
        if not self.intercept:
            return Y >= 0
        known, ones, zeros = self._counts(xp, Y)
        return known & (ones > 0) & (zeros > 0)

    def rounding(self, F: Array) -> float:
        return super().rounding(F) + 16 * _UNIT * F.size

    def activation(self, xp: Any, F: Array) -> Array:
        z = xp.exp(-abs(F))
        return xp.where(F >= 0, 1.0, z) / (1 + z)

    def _resistance(self, xp: Any, Y: Array) -> tuple[Array, float]:
        # Rows of the label 1: the mean of -f is at most objective / (their weight); so for 0.
        _, ones, zeros = self._counts(xp, Y)
        return xp.minimum(ones, zeros), 1.0


LOSSES: dict[str, Loss] = {"mse": MSE(), "ce": CrossEntropy(), "bce": BinaryCrossEntropy()}


# ---- the constants of an intercept -------------------------------------------------------------
def _best_constants(
    xp: Any,
    b: Array,
    rescale: Callable[[Array], Array],
    at: Callable[[Array], tuple[float, Array, Array]],
) -> Array:
    """Constants at which the gradient is rounding; `at` gives value, gradient and Hessian.
    Sinkhorn's steps go first, from which Newton's method gets there wherever the outputs are: each
    adds to a constant the logarithm of (the share that its class should have / the one that it
    has).  None makes the loss larger, and any distance is one step."""
    for _ in range(_SINKHORN_STEPS):
        before, b = b, rescale(b)
        if not float(abs(b - before).max()) > 1.0:  # synchronize!
            break
    (value, g, hessian), diagonal = at(b), xp.arange(b.shape[0])
    size = norm(g)
    for _ in range(_NEWTON_STEPS):
        # Outputs that are far apart leave no curvature, and any step would be too long.
        hessian[diagonal, diagonal] += 1e-12 * hessian.diagonal().max() + 1e-12 * size + _TINY
        step, eta = xp.linalg.solve(hessian, -g), 1.0
        while True:
            ahead = b + eta * step
            found = at(ahead)
            # Of equal losses, up to rounding, the one with the smaller gradient.
            near = found[0] <= value + 1e-12 * abs(value)
            lower = near and (found[0] < value or norm(found[1]) < size)
            if lower or eta < 1e-12:
                break
            eta *= 0.25
        if not lower:
            break
        shrunk = norm(found[1]) / size if size > 0 else 1.0
        b, (value, g, hessian), size = ahead, found, norm(found[1])
        if shrunk > 0.5 and eta == 1.0 and size <= 1e-10 * abs(value):
            break
    return b


# ---- functions of arrays -----------------------------------------------------------------------
def softmax(xp: Any, F: Array) -> Array:
    """The softmax of each row."""
    S = xp.exp(F - _row_max(xp, F))
    S /= _row_sum(xp, S)
    return S


def _log_sums(xp: Any, logs: Array, axis: int) -> Array:
    """log of the sum of exp(logs) along an axis, which stays, without overflow."""
    top = logs.max(axis=axis, keepdims=True)
    top = xp.where(top > -xp.inf, top, 0.0)
    sums = xp.exp(logs - top).sum(axis=axis, keepdims=True)
    return xp.log(xp.where(sums > 0, sums, 1.0)) + xp.where(sums > 0, top, -xp.inf)


# Rows are short, one number per class: NumPy reduces them several times faster by other means.
def _row_max(xp: Any, F: Array) -> Array:
    return xp.ascontiguousarray(F.T).max(axis=0)[:, None]


def _row_sum(xp: Any, F: Array) -> Array:
    return F @ xp.ones((F.shape[1], 1))
