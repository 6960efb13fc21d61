"""The outer losses of the paper, as sums over the training rows.

Each is a function of F = M Z*(W), the model's output on the training rows.  Because F is linear in
W, the loss along a direction costs no solve: line searches are exact and free.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, Protocol

import numpy as np

from herta_gpu.backends.base import Array, norm

_NEWTON_STEPS = 40


class Loss(Protocol):
    """What training needs of a loss."""

    separable: bool  # columns of W are independent problems
    quadratic: bool  # the Hessian is the same everywhere: bounds of its spectrum certify a fit
    steepest: float  # the largest eigenvalue that the Hessian with respect to F can have

    def start_curvature(self, c: int) -> float: ...
    def value(self, xp: Any, F: Array, Y: Array) -> float: ...
    def residual(self, xp: Any, F: Array, Y: Array) -> Array: ...
    def at(self, xp: Any, F: Array, Y: Array) -> tuple[float, Array]: ...
    def curvature(self, xp: Any, F: Array) -> float: ...
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


class MSE:
    """1/2 ||F - Y||_F^2 (equation 4.7)."""

    separable = True
    quadratic = True
    steepest = 1.0

    def start_curvature(self, c: int) -> float:
        """The curvature at W = 0, where training starts, for c outputs."""
        return 1.0

    def value(self, xp: Any, F: Array, Y: Array) -> float:
        return 0.5 * float(xp.sum((F - Y) ** 2))  # synchronize!

    def residual(self, xp: Any, F: Array, Y: Array) -> Array:
        """The gradient with respect to F."""
        return F - Y

    def at(self, xp: Any, F: Array, Y: Array) -> tuple[float, Array]:
        """Value and gradient together, for less than one after the other."""
        E = F - Y
        return 0.5 * float(xp.sum(E * E)), E  # synchronize!

    def curvature(self, xp: Any, F: Array) -> float:
        """The mean diagonal of the Hessian with respect to F."""
        return 1.0

    def row_curvature(self, xp: Any, E: Array, Y: Array) -> Array:
        """(n_train,) mean eigenvalue of each row's Hessian over what `centred` leaves, from E."""
        return xp.ones(E.shape[0])

    def rounding(self, F: Array) -> float:
        """What `value` may be off by at an exact F, beside rounding of E and of the sum."""
        return 0.0

    def second(self, xp: Any, F: Array) -> Callable[[int, int], Array]:
        """The function (a, b) -> (n_train,) second derivatives with respect to columns of F."""
        return lambda a, b: xp.full(F.shape[0], float(a == b))

    def centred(self, xp: Any, G: Array) -> Array:
        """G without the part that no gradient of this loss has."""
        return G

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
        slope = xp.sum((F - Y) * FD, axis=0) + ridge[0]
        curvature = xp.sum(FD * FD, axis=0) + ridge[1]
        return -slope / xp.where(curvature > 0, curvature, 1.0)


class CrossEntropy:
    """Sum over the training rows of -<y, log softmax(f)>."""

    separable = False
    quadratic = False
    steepest = 0.5

    def start_curvature(self, c: int) -> float:
        return 1.0 if c < 2 else (1 - 1 / c) / c  # curvature of the softmax, per class

    def value(self, xp: Any, F: Array, Y: Array) -> float:
        return self.at(xp, F, Y)[0]

    def residual(self, xp: Any, F: Array, Y: Array) -> Array:
        return _softmax(xp, F) - Y

    def at(self, xp: Any, F: Array, Y: Array) -> tuple[float, Array]:
        top = _row_max(xp, F)
        below = top - F
        S = xp.exp(-below)
        total = _row_sum(xp, S)
        # Not log + top - <F, Y>: of a row that is all but certain that would leave rounding only.
        rows = xp.log(total) + _row_sum(xp, below * Y) + top * (1 - _row_sum(xp, Y))
        value = float(xp.sum(rows))  # synchronize!
        S /= total
        S -= Y
        return value, S

    def curvature(self, xp: Any, F: Array) -> float:
        S = _softmax(xp, F)
        return float(xp.mean(S * (1 - S)))  # synchronize!

    def row_curvature(self, xp: Any, E: Array, Y: Array) -> Array:
        # diag(s) - s s^T has the trace sum(s (1 - s)), and c - 1 directions to share it out to.
        S = E + Y
        return _row_sum(xp, S * (1 - S))[:, 0] / max(1, Y.shape[1] - 1)

    def rounding(self, F: Array) -> float:
        # Logarithms and outputs of the size of F, whose difference may be far smaller.
        return 8 * float(np.finfo(np.float64).eps) * math.sqrt(F.size) * norm(F)

    def second(self, xp: Any, F: Array) -> Callable[[int, int], Array]:
        S = _softmax(xp, F)
        return lambda a, b: S[:, a] * (float(a == b) - S[:, b])

    def centred(self, xp: Any, G: Array) -> Array:
        # Adding one vector to all classes changes no softmax: only a ridge speaks of such a
        # direction, so softly that what solves leave over there would run away with W.
        return G - _row_sum(xp, G) / G.shape[1]

    def step(
        self,
        xp: Any,
        F: Array,
        FD: Array,
        Y: Array,
        ridge: tuple[Array, Array],
        enough: float = 0.0,
    ) -> Array:
        """The minimiser along the direction, by Newton's method kept inside a bracket.

        Or a step at which the slope is at most `enough`, up or down.
        """
        slope0, curvature0 = (float(r.sum()) for r in ridge)  # synchronize!
        low, high, eta = 0.0, float("inf"), 1.0
        for _ in range(_NEWTON_STEPS):
            S = _softmax(xp, F + eta * FD)
            mean = _row_sum(xp, S * FD)
            both = xp.stack([xp.sum((S - Y) * FD), xp.sum(S * (FD - mean) ** 2)])
            slope, curvature = both.tolist()  # synchronize!
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
        return xp.full(FD.shape[1], eta)


def _softmax(xp: Any, F: Array) -> Array:
    S = xp.exp(F - _row_max(xp, F))
    S /= _row_sum(xp, S)
    return S


# Rows are short, one number per class: NumPy reduces them several times faster by other means.
def _row_max(xp: Any, F: Array) -> Array:
    return xp.ascontiguousarray(F.T).max(axis=0)[:, None]


def _row_sum(xp: Any, F: Array) -> Array:
    return F @ xp.ones((F.shape[1], 1))


LOSSES: dict[str, Loss] = {"mse": MSE(), "ce": CrossEntropy()}
