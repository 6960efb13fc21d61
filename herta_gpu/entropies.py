"""Cross entropy, of one class out of several per node or of several labels of 0 or 1 per node.

Neither is quadratic: steps along a direction are found by Newton's method, and so are the constants
of an intercept.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np

from herta_gpu.backends.base import Array, norm
from herta_gpu.row_losses import RowLoss

_NEWTON_STEPS = 40
_SINKHORN_STEPS = 50
_TINY = 1e-300
_LARGEST_SHIFT = 60.0  # a constant beyond which exp(-b) adds nothing to a loss ...
_NO_LOSS = 1e-15  # ... of a billion labels


class _Curved(RowLoss):
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

    def _log_totals(self, xp: Any, logs: Array) -> Array:
        """(c,) logarithms of the weighted sums over the rows of numbers that are given by theirs.

        0 for a column without any.
        """
        if self.weights is not None:
            logs = logs + xp.log(self.weights)[:, None]
        found = _log_sums(xp, logs, axis=0)[0]
        return xp.where(found > -xp.inf, found, 0.0)

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
        b = xp.log(share)
        b = b - b.sum() / b.shape[0]
        c = b.shape[0]

        def at(b: Array) -> tuple[float, Array, Array]:
            value, E = self._plain_at(xp, F + b, Y)
            S = E + Y
            WS = self.weighted(S)
            hessian = xp.diag(WS.sum(axis=0)) - S.T @ WS
            return value, self.weighted(E).sum(axis=0), hessian + WS.sum() / c**2

        def scaled(b: Array) -> Array:
            logs = F + b
            logs = logs - _log_sums(xp, logs, axis=1)
            return b + xp.log(xp.maximum(goal, _TINY)) - self._log_totals(xp, logs)

        b = _near(xp, scaled, b)
        return _least(xp, at, b - b.sum() / c)

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
        within = self._within(xp, b - b.sum() / b.shape[0], sums, math.sqrt(2), known)
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

        def scaled(b: Array) -> Array:
            one, zero = (
                self._log_totals(xp, xp.where(known, _log_sigmoid(xp, side), -xp.inf))
                for side in (F + b, -F - b)
            )
            odds = xp.log(xp.where(mixed, ones, 1.0)) - xp.log(xp.where(mixed, zeros, 1.0))
            return b + xp.where(mixed, odds - one + zero, 0.0)

        b = _near(xp, scaled, b)
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


def _near(xp: Any, scaled: Callable[[Array], Array], b: Array) -> Array:
    """Constants from which Newton's method finds the best ones, wherever the outputs are.

    Sinkhorn's steps: each adds to a constant the logarithm of (the share that its class should
    have / the one that it has).  None makes the loss larger, and any distance is one step.
    """
    for _ in range(_SINKHORN_STEPS):
        ahead = scaled(b)
        moved = float(abs(ahead - b).max())  # synchronize!
        b = ahead
        if not moved > 1.0:
            break
    return b


def _log_sums(xp: Any, logs: Array, axis: int) -> Array:
    """log of the sum of exp(logs) along an axis, which stays, without overflow."""
    top = logs.max(axis=axis, keepdims=True)
    top = xp.where(top > -xp.inf, top, 0.0)
    sums = xp.exp(logs - top).sum(axis=axis, keepdims=True)
    return xp.log(xp.where(sums > 0, sums, 1.0)) + xp.where(sums > 0, top, -xp.inf)


def _log_sigmoid(xp: Any, F: Array) -> Array:
    return xp.minimum(F, 0.0) - xp.log1p(xp.exp(-abs(F)))


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
