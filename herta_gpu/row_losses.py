"""What all losses share: rows have weights, and outputs may have a free constant each."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Any, Self

import numpy as np

from herta_gpu.backends.base import Array, norm

_UNIT = 0.5 * float(np.finfo(np.float64).eps)  # what one operation rounds


@dataclass(frozen=True)
class RowLoss:
    """Weights of the rows and an intercept, or neither."""

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
            return Q.sum(axis=0) / Q.shape[0]
        return (self.weights[:, None] * Q).sum(axis=0) / self.weights.sum()

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
