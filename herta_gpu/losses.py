"""The outer losses of the paper, as sums over the training rows.

Each is a function of F = M Z*(W), the model's output on the training rows.  Because F is linear in
W, the loss along a direction costs no solve: line searches are exact and free.

A loss may be bound to weights of the rows (at most 1), and it may have an intercept: then it is
the smallest loss of F + 1 b^T over all constants b, one per output.  That is a convex function of
F as well, no steeper than the loss itself, so nothing else has to know of b:

    min over W, b of loss(A W + 1 b^T)  =  min over W of (min over b of loss(A W + 1 b^T)).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol, Self

from herta_gpu.backends.base import Array
from herta_gpu.entropies import BinaryCrossEntropy, CrossEntropy
from herta_gpu.row_losses import RowLoss

__all__ = ["LOSSES", "MSE", "BinaryCrossEntropy", "CrossEntropy", "Loss"]


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


class MSE(RowLoss):
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


LOSSES: dict[str, Loss] = {"mse": MSE(), "ce": CrossEntropy(), "bce": BinaryCrossEntropy()}
