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
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, Protocol, Self

import numpy as np

from herta_gpu.backends.base import Array, norm

_NEWTON_STEPS = 40
_UNIT = 0.5 * float(np.finfo(np.float64).eps)  # what one operation rounds
_TINY = 1e-300
_LARGEST_SHIFT = 60.0  # a constant beyond which exp(-b) adds nothing to a loss ...
_NO_LOSS = 1e-15  # ... of a billion labels


class Loss(Protocol):
    """What training needs of a loss."""

    separable: bool  # columns of W are independent problems
    quadratic: bool  # the Hessian is the same everywhere: bounds of its spectrum certify a fit
    steepest: float  # the largest eigenvalue that the Hessian with respect to F can have

    @property
    def weights(self) -> Array | None: ...
    @property
    def intercept(self) -> bool: ...
    @property
    def plain(self) -> bool: ...
    def bound(self, weights: Array | None, intercept: bool) -> Self: ...
    def of_rows(self, rows: slice) -> Self: ...
    def shift(self, xp: Any, F: Array, Y: Array) -> Array: ...
    def placed(self, xp: Any, F: Array, Y: Array) -> Array: ...
    def mean(self, xp: Any, Q: Array) -> Array: ...
    def weighted(self, E: Array) -> Array: ...
    def total(self, count: int) -> float: ...
    def seen(self, xp: Any, Q: Array, rows: slice, mean: Array | None) -> Array: ...
    def stray(self, xp: Any, E: Array) -> float: ...
    def reach(
        self, xp: Any, Y: Array, b: Array, objective: float, ridge: float, X_norm: float
    ) -> float: ...
    def aside(self, stray: float, error: float, reach: float) -> float: ...
    def start_curvature(self, c: int) -> float: ...
    def value(self, xp: Any, F: Array, Y: Array) -> float: ...
    def residual(self, xp: Any, F: Array, Y: Array) -> Array: ...
    def at(self, xp: Any, F: Array, Y: Array) -> tuple[float, Array]: ...
    def curvature(self, xp: Any, F: Array) -> float: ...
    def probabilities(self, xp: Any, E: Array, Y: Array) -> Array: ...
    def row_curvature(self, xp: Any, E: Array, Y: Array) -> Array: ...
    def rounding(self, F: Array) -> float: ...
    def second(self, xp: Any, F: Array) -> Callable[[int, int], Array]: ...
    def centred(self, xp: Any, G: Array) -> Array: ...
    def step(
        self,
        xp: Any,
        F: Array,
        FD: Array,
        Y: Array,
        ridge: tuple[Array, Array],
        enough: float = 0.0,
    ) -> Array: ...


@dataclass(frozen=True)
class _Rows:
    """What all losses share: weights of the rows and an intercept, or neither."""

    weights: Array | None = None  # (n_train,) positive, at most 1; None: all 1
    intercept: bool = False

    @property
    def plain(self) -> bool:
        """Whether the loss is that of the paper."""
        return self.weights is None and not self.intercept

    def bound(self, weights: Array | None, intercept: bool) -> Self:
        """The same loss of rows with these weights, with or without free constants."""
        return replace(self, weights=weights, intercept=intercept)

    def of_rows(self, rows: slice) -> Self:
        """The loss of some of the rows, whose constants are part of F."""
        if self.plain:
            return self
        return replace(self, weights=None if self.weights is None else self.weights[rows],
                       intercept=False)  # fmt: skip

    def mean(self, xp: Any, Q: Array) -> Array:
        """(r,) weighted means of the columns of Q."""
        if self.weights is None:
            return Q.mean(axis=0)
        return (self.weights @ Q) / self.weights.sum()

    def seen(self, xp: Any, Q: Array, rows: slice, mean: Array | None) -> Array:
        """Rows of Q as a quadratic loss sees them: less their mean, times the root of the weight.

        Their Gram matrix is the Hessian of 1/2 ||Q u||^2, weights and intercept included.
        """
        Q = Q if mean is None else Q - mean
        return Q if self.weights is None else xp.sqrt(self.weights[rows])[:, None] * Q

    def total(self, count: int) -> float:
        """The sum of the weights of so many rows."""
        return float(count) if self.weights is None else float(self.weights.sum())  # synchronize!

    def stray(self, xp: Any, E: Array) -> float:
        """||1^T E|| over the root of all weights, rounding included: 0 at the best constants."""
        if not self.intercept:
            return 0.0
        count = E.shape[0]
        rounded = (count + 2) * _UNIT * math.sqrt(count) * norm(E)
        return (norm(E.sum(axis=0)) + rounded) / math.sqrt(self.total(count))

    def weighted(self, E: Array) -> Array:
        """Rows of E times their weights."""
        return E if self.weights is None else self.weights[:, None] * E

    def _level(self, xp: Any, FD: Array) -> Array:
        """A direction that constants follow: FD less the means of its columns."""
        return FD - self.mean(xp, FD) if self.intercept else FD


class MSE(_Rows):
    """1/2 ||F - Y||_F^2 (equation 4.7)."""

    separable = True
    quadratic = True
    steepest = 1.0

    def start_curvature(self, c: int) -> float:
        """The curvature at W = 0, where training starts, for c outputs."""
        return 1.0

    def shift(self, xp: Any, F: Array, Y: Array) -> Array:
        """(c,) the best constants."""
        return self.mean(xp, Y - F)

    def placed(self, xp: Any, F: Array, Y: Array) -> Array:
        """F + 1 b^T with the best constants b; F itself without an intercept."""
        return F + self.shift(xp, F, Y) if self.intercept else F

    def value(self, xp: Any, F: Array, Y: Array) -> float:
        return 0.5 * float(xp.sum(self.weighted((self.placed(xp, F, Y) - Y) ** 2)))  # synchronize!

    def residual(self, xp: Any, F: Array, Y: Array) -> Array:
        """The gradient with respect to F."""
        return self.weighted(self.placed(xp, F, Y) - Y)

    def at(self, xp: Any, F: Array, Y: Array) -> tuple[float, Array]:
        """Value and gradient together, for less than one after the other."""
        E = self.placed(xp, F, Y) - Y
        WE = self.weighted(E)
        return 0.5 * float(xp.sum(E * WE)), WE  # synchronize!

    def curvature(self, xp: Any, F: Array) -> float:
        """The mean diagonal of the Hessian with respect to F, weights apart."""
        return 1.0

    def probabilities(self, xp: Any, E: Array, Y: Array) -> Array:
        """What the loss takes for probabilities, from its gradient E; here the outputs."""
        return (E if self.weights is None else E / self.weights[:, None]) + Y

    def row_curvature(self, xp: Any, E: Array, Y: Array) -> Array:
        """(n_train,) mean eigenvalue of each row's Hessian over what `centred` leaves, from E.

        Of `seen` rows: weights are in those.
        """
        return xp.ones(E.shape[0])

    def rounding(self, F: Array) -> float:
        """What `value` may be off by at an exact F, beside rounding of E and of the sum."""
        return 0.0

    def second(self, xp: Any, F: Array) -> Callable[[int, int], Array]:
        """The function (a, b) -> (n_train,) second derivatives with respect to columns of F."""
        ones = self.weighted(xp.ones((F.shape[0], 1)))[:, 0]
        return lambda a, b: ones * float(a == b)

    def centred(self, xp: Any, G: Array) -> Array:
        """G without the part that no gradient of this loss has."""
        return G

    def reach(
        self, xp: Any, Y: Array, b: Array, objective: float, ridge: float, X_norm: float
    ) -> float:
        """How far the constants b are from those of the optimum, times the root of all weights."""
        return 0.0  # `aside` needs none

    def aside(self, stray: float, error: float, reach: float) -> float:
        """What constants that are not the best for the true outputs may add to the gap.

        They are the best for outputs that are off by `error`, but for sums of E that `stray`.
        With weights that add up to s, the loss is s/2 ||b - best||^2 above its least.
        """
        return 0.5 * (error + stray) ** 2 if self.intercept else 0.0

    def step(
        self,
        xp: Any,
        F: Array,
        FD: Array,
        Y: Array,
        ridge: tuple[Array, Array],
        enough: float = 0.0,
    ) -> Array:
        """The minimiser of the objective along each column of the direction.

        `ridge` holds the column-wise slope and curvature of the ridge term.
        """
        FD = self._level(xp, FD)
        slope = xp.sum(self.residual(xp, F, Y) * FD, axis=0) + ridge[0]
        curvature = xp.sum(self.weighted(FD * FD), axis=0) + ridge[1]
        return -slope / xp.where(curvature > 0, curvature, 1.0)


class _Curved(_Rows):
    """What the losses share that are not quadratic: the step, and what constants may cost."""

    quadratic = False
    steepest: float

    def aside(self, stray: float, error: float, reach: float) -> float:
        # With E the gradient at outputs F that are off by `error`, convexity gives for all W, b
        #   loss(A W + b) >= loss(F) + <E, A W + b - F>,   and   loss <= that + steepest/2 error^2
        # at the outputs themselves.  What E strays by counts along the constants only.
        if not self.intercept:
            return 0.0
        astray = stray * reach if stray > 0 else 0.0
        return 0.5 * self.steepest * error**2 + astray + _NO_LOSS

    def _within(
        self, xp: Any, b: Array, sums: Array, slope: float, known: tuple[float, float, float]
    ) -> float:
        """`reach`, where the mean output of a column of weight `sums` is known from the optimum.

        The loss of the optimum is at most that of any W, so no mean of -f over rows that want f to
        be large exceeds objective / (their weight); and ||W||^2 <= 2 objective / ridge there.
        """
        objective, ridge, X_norm = known
        if ridge == 0:
            return math.inf
        least = float(xp.where(sums > 0, sums, xp.inf).min())  # synchronize!
        far = objective / least + slope * X_norm * math.sqrt(2 * objective / ridge)
        return norm(b) + math.sqrt(b.shape[0]) * far

    def _newton_step(
        self,
        xp: Any,
        at: Callable[[float], tuple[float, float]],
        ridge: tuple[Array, Array],
        enough: float,
        columns: int,
    ) -> Array:
        """The minimiser along a direction, by Newton's method kept inside a bracket.

        Or a step at which the slope is at most `enough`, up or down.  `at` gives slope and
        curvature of the loss.
        """
        slope0, curvature0 = (float(r.sum()) for r in ridge)  # synchronize!
        low, high, eta = 0.0, float("inf"), 1.0
        for _ in range(_NEWTON_STEPS):
            slope, curvature = at(eta)
            slope, curvature = slope + slope0 + eta * curvature0, curvature + curvature0
            if abs(slope) <= enough:
                break
            low, high = (eta, high) if slope < 0 else (low, eta)
            new = eta - slope / curvature if curvature > 0 else float("inf")
            if not low < new < high:
                new = 2 * eta if high == float("inf") else 0.5 * (low + high)
            done = abs(new - eta) <= 1e-6 * eta
            eta = new
            if done or eta > 1e8:  # without a minimiser (separable classes) a long step will do
                break
        return xp.full(columns, eta)


class CrossEntropy(_Curved):
    """Sum over the training rows of -<y, log softmax(f)>."""

    separable = False
    steepest = 0.5

    def start_curvature(self, c: int) -> float:
        return 1.0 if c < 2 else (1 - 1 / c) / c  # curvature of the softmax, per class

    def shift(self, xp: Any, F: Array, Y: Array) -> Array:
        """By Newton's method: each class gets the share of the softmax that it has of the rows."""
        goal = self.weighted(Y).sum(axis=0)
        share = xp.maximum(goal / xp.maximum(goal.sum(), _TINY), _TINY)
        b = xp.log(share) - xp.log(share).mean()
        c = b.shape[0]

        def at(b: Array) -> tuple[float, Array, Array]:
            value, E = self._plain_at(xp, F + b, Y)
            S = E + Y
            WS = self.weighted(S)
            hessian = xp.diag(WS.sum(axis=0)) - S.T @ WS
            return value, self.weighted(E).sum(axis=0), hessian + WS.sum() / c**2

        return _least(xp, at, b)

    def placed(self, xp: Any, F: Array, Y: Array) -> Array:
        return F + self.shift(xp, F, Y) if self.intercept else F

    def value(self, xp: Any, F: Array, Y: Array) -> float:
        return self.at(xp, F, Y)[0]

    def residual(self, xp: Any, F: Array, Y: Array) -> Array:
        return self.weighted(_softmax(xp, self.placed(xp, F, Y)) - Y)

    def at(self, xp: Any, F: Array, Y: Array) -> tuple[float, Array]:
        value, E = self._plain_at(xp, self.placed(xp, F, Y), Y)
        return value, self.weighted(E)

    def _plain_at(self, xp: Any, F: Array, Y: Array) -> tuple[float, Array]:
        """The loss, and its gradient but for the weights."""
        top = _row_max(xp, F)
        below = top - F
        S = xp.exp(-below)
        total = _row_sum(xp, S)
        # Not log + top - <F, Y>: of a row that is all but certain that would leave rounding only.
        rows = xp.log(total) + _row_sum(xp, below * Y) + top * (1 - _row_sum(xp, Y))
        value = float(xp.sum(self.weighted(rows)))  # synchronize!
        S /= total
        S -= Y
        return value, S

    def curvature(self, xp: Any, F: Array) -> float:
        S = _softmax(xp, F)
        return float(xp.mean(S * (1 - S)))  # synchronize!

    def probabilities(self, xp: Any, E: Array, Y: Array) -> Array:
        """The softmax, from the gradient."""
        return (E if self.weights is None else E / self.weights[:, None]) + Y

    def row_curvature(self, xp: Any, E: Array, Y: Array) -> Array:
        # diag(s) - s s^T has the trace sum(s (1 - s)), and c - 1 directions to share it out to.
        S = self.probabilities(xp, E, Y)
        return _row_sum(xp, S * (1 - S))[:, 0] / max(1, Y.shape[1] - 1)

    def rounding(self, F: Array) -> float:
        # Logarithms and outputs of the size of F, whose difference may be far smaller.
        return 8 * float(np.finfo(np.float64).eps) * math.sqrt(F.size) * norm(F)

    def second(self, xp: Any, F: Array) -> Callable[[int, int], Array]:
        S = _softmax(xp, F)
        WS = self.weighted(S)
        return lambda a, b: WS[:, a] * (float(a == b) - S[:, b])

    def centred(self, xp: Any, G: Array) -> Array:
        # Adding one vector to all classes changes no softmax: only a ridge speaks of such a
        # direction, so softly that what solves leave over there would run away with W.
        return G - _row_sum(xp, G) / G.shape[1]

    def reach(
        self, xp: Any, Y: Array, b: Array, objective: float, ridge: float, X_norm: float
    ) -> float:
        # Rows of class k: the mean of f_j - f_k is at most objective / (their weight) for each j.
        sums = self.weighted(Y).sum(axis=0)
        known = (objective, ridge, X_norm)
        within = self._within(xp, b - b.mean(), sums, math.sqrt(2), known)
        return math.sqrt(self.total(Y.shape[0])) * within

    def step(
        self,
        xp: Any,
        F: Array,
        FD: Array,
        Y: Array,
        ridge: tuple[Array, Array],
        enough: float = 0.0,
    ) -> Array:
        F, FD = self.placed(xp, F, Y), self._level(xp, FD)

        def at(eta: float) -> tuple[float, float]:
            S = _softmax(xp, F + eta * FD)
            mean = _row_sum(xp, S * FD)
            bend = self.weighted(S * (FD - mean) ** 2)
            both = xp.stack([xp.sum(self.weighted(S - Y) * FD), xp.sum(bend)])
            slope, curvature = both.tolist()  # synchronize!
            return slope, curvature

        return self._newton_step(xp, at, ridge, enough, FD.shape[1])


class BinaryCrossEntropy(_Curved):
    """Sum over rows and labels of -y log s - (1 - y) log(1 - s), s = 1 / (1 + exp(-f)).

    A label below 0 is unknown and does not count.
    """

    separable = True
    steepest = 0.25

    def start_curvature(self, c: int) -> float:
        return 0.25

    def shift(self, xp: Any, F: Array, Y: Array) -> Array:
        known, ones, zeros = self._counts(xp, Y)
        mixed = (ones > 0) & (zeros > 0)
        b = xp.log(xp.where(mixed, ones, 1.0)) - xp.log(xp.where(mixed, zeros, 1.0))
        c = b.shape[0]

        def at(b: Array) -> tuple[float, Array, Array]:
            value, E, S = self._plain_at(xp, F + b, Y, known & mixed)
            bend = self.weighted(xp.where(known & mixed, S * (1 - S), 0.0)).sum(axis=0)
            return value, self.weighted(E).sum(axis=0), xp.diag(xp.where(mixed, bend, 1.0))

        # Without a 0 (or a 1) no constant is large enough.
        alone = xp.where(ones > 0, _LARGEST_SHIFT, -_LARGEST_SHIFT) * (ones + zeros > 0)
        return xp.where(mixed, _least(xp, at, b) if c else b, alone)

    def placed(self, xp: Any, F: Array, Y: Array) -> Array:
        return F + self.shift(xp, F, Y) if self.intercept else F

    def value(self, xp: Any, F: Array, Y: Array) -> float:
        return self.at(xp, F, Y)[0]

    def residual(self, xp: Any, F: Array, Y: Array) -> Array:
        return self.at(xp, F, Y)[1]

    def at(self, xp: Any, F: Array, Y: Array) -> tuple[float, Array]:
        value, E, _ = self._plain_at(xp, self.placed(xp, F, Y), Y, self._seen(xp, Y))
        return value, self.weighted(E)

    def _plain_at(self, xp: Any, F: Array, Y: Array, known: Array) -> tuple[float, Array, Array]:
        """The loss, its gradient but for the weights, and s."""
        z = xp.exp(-abs(F))
        S = xp.where(F >= 0, 1.0, z) / (1 + z)
        # y softplus(-f) + (1 - y) softplus(f): no difference of large numbers.
        terms = xp.log1p(z) + Y * xp.maximum(-F, 0.0) + (1 - Y) * xp.maximum(F, 0.0)
        value = float(xp.sum(self.weighted(xp.where(known, terms, 0.0))))  # synchronize!
        return value, xp.where(known, S - Y, 0.0), S

    def _counts(self, xp: Any, Y: Array) -> tuple[Array, Array, Array]:
        """(which labels are known, weight of the ones of each column, weight of the zeros)."""
        known = Y >= 0
        ones = self.weighted(xp.where(known, Y, 0.0)).sum(axis=0)
        zeros = self.weighted(xp.where(known, 1 - Y, 0.0)).sum(axis=0)
        return known, ones, zeros

    def _seen(self, xp: Any, Y: Array) -> Array:
        """Which labels count: with an intercept, a column of equal ones has no loss at all."""
        if not self.intercept:
            return Y >= 0
        known, ones, zeros = self._counts(xp, Y)
        return known & (ones > 0) & (zeros > 0)

    def curvature(self, xp: Any, F: Array) -> float:
        S = _sigmoid(xp, F)
        return float(xp.mean(S * (1 - S)))  # synchronize!

    def probabilities(self, xp: Any, E: Array, Y: Array) -> Array:
        """s, from the gradient; 0 where the label is unknown, so that there is no curvature."""
        S = (E if self.weights is None else E / self.weights[:, None]) + Y
        return xp.where(self._seen(xp, Y), S, 0.0)

    def row_curvature(self, xp: Any, E: Array, Y: Array) -> Array:
        S = self.probabilities(xp, E, Y)
        return _row_sum(xp, S * (1 - S))[:, 0] / Y.shape[1]

    def rounding(self, F: Array) -> float:
        return 8 * float(np.finfo(np.float64).eps) * (math.sqrt(F.size) * norm(F) + F.size)

    def second(self, xp: Any, F: Array) -> Callable[[int, int], Array]:
        S = _sigmoid(xp, F)
        bend = self.weighted(S * (1 - S))
        return lambda a, b: bend[:, a] * float(a == b)

    def centred(self, xp: Any, G: Array) -> Array:
        return G

    def reach(
        self, xp: Any, Y: Array, b: Array, objective: float, ridge: float, X_norm: float
    ) -> float:
        # Rows of the label 1: the mean of -f is at most objective / (their weight); so for 0.
        _, ones, zeros = self._counts(xp, Y)
        known = (objective, ridge, X_norm)
        within = self._within(xp, b, xp.minimum(ones, zeros), 1.0, known)
        return math.sqrt(self.total(Y.shape[0])) * within

    def step(
        self,
        xp: Any,
        F: Array,
        FD: Array,
        Y: Array,
        ridge: tuple[Array, Array],
        enough: float = 0.0,
    ) -> Array:
        F, FD, known = self.placed(xp, F, Y), self._level(xp, FD), self._seen(xp, Y)

        def at(eta: float) -> tuple[float, float]:
            S = _sigmoid(xp, F + eta * FD)
            slope = self.weighted(xp.where(known, (S - Y) * FD, 0.0))
            bend = self.weighted(xp.where(known, S * (1 - S) * FD * FD, 0.0))
            found, curvature = xp.stack([xp.sum(slope), xp.sum(bend)]).tolist()  # synchronize!
            return found, curvature

        return self._newton_step(xp, at, ridge, enough, FD.shape[1])


def _least(xp: Any, at: Callable[[Array], tuple[float, Array, Array]], b: Array) -> Array:
    """Constants b at which the gradient is rounding; `at` gives value, gradient and Hessian."""
    value, g, hessian = at(b)
    size, diagonal = norm(g), xp.arange(b.shape[0])
    for _ in range(_NEWTON_STEPS):
        # Outputs that are far apart leave no curvature, and any step would be too long.
        hessian[diagonal, diagonal] += 1e-12 * hessian.diagonal().max() + 1e-12 * size + _TINY
        step = xp.linalg.solve(hessian, -g)
        eta = 1.0
        while True:
            ahead = b + eta * step
            found = at(ahead)
            lower = found[0] < value or norm(found[1]) < size
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


def _sigmoid(xp: Any, F: Array) -> Array:
    z = xp.exp(-abs(F))
    return xp.where(F >= 0, 1.0, z) / (1 + z)


def _softmax(xp: Any, F: Array) -> Array:
    S = xp.exp(F - _row_max(xp, F))
    S /= _row_sum(xp, S)
    return S


# Rows are short, one number per class: NumPy reduces them several times faster by other means.
def _row_max(xp: Any, F: Array) -> Array:
    return xp.ascontiguousarray(F.T).max(axis=0)[:, None]


def _row_sum(xp: Any, F: Array) -> Array:
    return F @ xp.ones((F.shape[1], 1))


LOSSES: dict[str, Loss] = {"mse": MSE(), "ce": CrossEntropy(), "bce": BinaryCrossEntropy()}
