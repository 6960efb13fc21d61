"""Optimizers on preconditioned weights w, W = P^-1/2 w.

An optimizer turns the gradient at w into a direction; how far to go along it is decided exactly
by the loss (`searches` is True) or by the optimizer itself (the direction is the whole step).
Where the columns of W are independent problems (MSE) the scalars below are one per column.
"""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any, Protocol

from herta_gpu.backends.base import Array

LBFGS_MEMORY = 20


class Optimizer(Protocol):
    """One direction at a time."""

    searches: bool  # the step length comes from a line search

    def direction(self, w: Array, g: Array) -> Array: ...


class GradientDescent:
    """w <- w - eta g, the loop of Algorithm 1; eta by exact line search unless it is given."""

    def __init__(self, learning_rate: float | None = None) -> None:
        self.learning_rate, self.searches = learning_rate, learning_rate is None

    def direction(self, w: Array, g: Array) -> Array:
        return -g if self.learning_rate is None else -self.learning_rate * g


class Momentum:
    """Polyak's heavy ball; optimal for eigenvalues in [a, b] with the step and the weight below."""

    searches = False

    def __init__(self, learning_rate: float, momentum: float) -> None:
        self.learning_rate, self.momentum, self._step = learning_rate, momentum, 0.0

    @classmethod
    def for_spectrum(cls, a: float, b: float) -> Momentum:
        root_a, root_b = a**0.5, b**0.5
        rate = 4.0 / (root_a + root_b) ** 2
        return cls(rate, ((root_b - root_a) / (root_b + root_a)) ** 2)

    def direction(self, w: Array, g: Array) -> Array:
        self._step = self.momentum * self._step - self.learning_rate * g
        return self._step


class Adam:
    """Kingma and Ba (2015) with the usual constants."""

    searches = False

    def __init__(self, learning_rate: float, xp: Any) -> None:
        self.learning_rate, self.xp = learning_rate, xp
        self._m, self._v, self._t = 0.0, 0.0, 0

    def direction(self, w: Array, g: Array) -> Array:
        self._t += 1
        self._m = 0.9 * self._m + 0.1 * g
        self._v = 0.999 * self._v + 0.001 * g * g
        m, v = self._m / (1 - 0.9**self._t), self._v / (1 - 0.999**self._t)
        return -self.learning_rate * m / (self.xp.sqrt(v) + 1e-8)


class ConjugateGradients:
    """Polak-Ribiere CG, which is linear CG for MSE and forgives inexact gradients."""

    searches = True

    def __init__(self, xp: Any, by_column: bool) -> None:
        self.xp, self.axis = xp, 0 if by_column else None
        self._g: Array | None = None
        self._d: Array | None = None

    def direction(self, w: Array, g: Array) -> Array:
        xp = self.xp
        if self._g is None or self._d is None:
            self._d = -g
        else:
            old = xp.sum(self._g**2, axis=self.axis)
            change = xp.sum((g - self._g) * g, axis=self.axis)
            beta = xp.maximum(0.0, change / xp.where(old > 0, old, 1.0))
            self._d = -g + beta * self._d
            uphill = xp.sum(self._d * g, axis=self.axis) > 0
            self._d = xp.where(uphill, -g, self._d)
        self._g = g
        return self._d


class LBFGS:
    """Limited-memory BFGS in the compact form of Byrd, Nocedal and Schnabel (1994).

    With the steps s_i and the changes of the gradient y_i as columns of S and Y, R the upper
    triangle of S^T Y and D its diagonal, the direction is that of Nocedal's two loops,

        v = H_0 (g - Y R^-1 S^T g),     direction = -(v + S R^-T (D R^-1 S^T g - Y^T v)),

    but it takes four products with matrices, however many pairs there are.  The pairs live in the
    coordinates of w: H_0, the guess of the inverse Hessian, may change from step to step.
    """

    searches = True

    def __init__(self, xp: Any, memory: int = LBFGS_MEMORY) -> None:
        self.xp, self.memory = xp, memory
        self._first, self.pairs = 0, 0  # as many pairs are in use, in the rows from _first on
        self._S: Array = xp.zeros((0, 0))
        self._Y: Array = xp.zeros((0, 0))
        self._D: Array = xp.zeros(0)  # <s_i, y_i>
        self._R_inverse: Array = xp.zeros((0, 0))
        self._last: tuple[Array, Array] | None = None

    def direction(
        self,
        w: Array,
        g: Array,
        inverse: Callable[[Array], Array] | None = None,
        product: Callable[[Array, Array], Array] = operator.matmul,
        scaled: bool = True,
    ) -> Array:
        """The next direction; `inverse` applies H_0 (None: the identity).

        `scaled`: H_0 is right up to a factor, which the last pair tells.
        """
        if self._last is not None:
            self._remember(w - self._last[0], g - self._last[1], product)
        self._last = (w, g)
        H_0 = inverse or (lambda v: v)
        if self.pairs == 0:
            return -H_0(g)
        S, Y, D, R_inverse = self._stored()
        q = product(R_inverse, product(S, g.reshape(-1, 1)))
        v = H_0((g.reshape(-1, 1) - product(Y.T, q)).reshape(g.shape)).reshape(-1, 1)
        if scaled:
            y = Y[-1].reshape(g.shape)
            size = self.xp.sum(y * H_0(y))  # 0 where the squares vanish
            v = v * (D[-1] / self.xp.where(size > 0, size, D[-1]))
        back = product(R_inverse.T, D[:, None] * q - product(Y, v))
        return -(v + product(S.T, back)).reshape(g.shape)

    def forget(self) -> None:
        """Begin anew, without pairs."""
        self._first, self.pairs, self._last = 0, 0, None

    def _stored(self) -> tuple[Array, Array, Array, Array]:
        """(S^T, Y^T, D, R^-1) of the pairs in use, the newest last."""
        J = slice(self._first, self._first + self.pairs)
        return self._S[J], self._Y[J], self._D[J], self._R_inverse[J, J]

    def _remember(self, s: Array, y: Array, product: Callable[[Array, Array], Array]) -> None:
        """One more pair.  R grows by a column, R^-1 with it; the oldest pair is its first row."""
        sy = float(self.xp.sum(s * y))  # synchronize!
        if not sy > 0 or self.memory == 0:
            return
        if self.pairs == self.memory:
            self._first, self.pairs = self._first + 1, self.pairs - 1
        if self._first + self.pairs == self._S.shape[0]:
            self._make_room(s.size)
        at = self._first + self.pairs
        old = slice(self._first, at)
        self._R_inverse[at, at] = 1 / sy
        if self.pairs:
            column = product(self._S[old], y.reshape(-1, 1))
            self._R_inverse[old, at] = product(self._R_inverse[old, old], column)[:, 0] / -sy
        self._S[at], self._Y[at], self._D[at] = s.reshape(-1), y.reshape(-1), sy
        self.pairs += 1

    def _make_room(self, size: int) -> None:
        """Arrays with room for twice the pairs in use, which move to their front."""
        xp, k, room = self.xp, self.pairs, max(2 * self.pairs, 16)
        kept = self._stored()
        shapes: list[tuple[int, ...]] = [(room, size), (room, size), (room,), (room, room)]
        self._S, self._Y, self._D, self._R_inverse = (xp.zeros(shape) for shape in shapes)
        self._first = 0
        if k:
            self._S[:k], self._Y[:k], self._D[:k], self._R_inverse[:k, :k] = kept


def make_optimizer(name: str, learning_rate: float | None, xp: Any, by_column: bool) -> Optimizer:
    """An optimizer by name; `by_column`: the columns of W are independent problems."""
    if name == "cg":
        return ConjugateGradients(xp, by_column)
    if name == "gd":
        return GradientDescent(learning_rate)
    if name == "lbfgs":
        return LBFGS(xp)
    if name == "adam":
        return Adam(learning_rate or 0.01, xp)
    return Momentum(learning_rate or 0.5, 0.9)
