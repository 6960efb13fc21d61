"""Optimizers on preconditioned weights w, W = P^-1/2 w, and on stored rows.

An optimizer turns the gradient at w into a direction; how far to go along it is decided exactly
by the loss (`searches` is True) or by the optimizer itself (the direction is the whole step).
Where the columns of W are independent problems (MSE) the scalars below are one per column.

`minimise` trains cross entropy on stored rows A, without a solve.  L-BFGS takes the steps; its
first guess of the inverse Hessian is P^-1, P = A^T A + ridge G with each row of A weighted by its
curvature (`ScaledGram`), and improves when it must.  The others are the Hessian itself but for rows
that add next to nothing: `ClassBlocks` as a matrix of r (c - 1) rows, `RankOnes` as P and a
correction by Woodbury's formula, for classes that are nearly separable: then few rows of A still
have any curvature, and most of those in one direction only.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import numpy as np

from herta_gpu.backends.base import Array, Backend
from herta_gpu.factors import (
    ROW_CUT,
    Cholesky,
    Composed,
    DenseGram,
    Factor,
    Map,
    add_ridge,
    products,
    safe_cholesky,
)
from herta_gpu.losses import LOSSES, Loss
from herta_gpu.problem import Callback, DensePoint, DenseProblem, History

LBFGS_MEMORY = 20
_ALIKE = 1e-9  # relative difference of weights that are called equal
_TINY = 1e-100  # a probability that is none: its square must not vanish
_SHARE = 0.999  # of all curvature, that the rows in a Hessian hold
_PAIRS = 300  # of L-BFGS; a quarter of the rows where that is less
_STALE = 2.0  # change of the mean curvature after which P is factored again
_WHOLE_SIZE = 8000  # numbers in u up to which the whole Hessian of cross entropy is worth having
_WATCHED = 10  # steps after which their progress says something
_STUCK = 50  # steps without progress that are the end
_NOISE = 1e-12  # relative, of objectives that are taken for equal


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


class Hessian(Protocol):
    """A guess of the Hessian that can be solved with."""

    exact: bool  # the Hessian itself, but for rows that add next to nothing

    def inverse(self, g: Array) -> Array: ...


class ScaledGram:
    """P = A^T diag(weights) A + ridge G, the same for every class."""

    exact = False

    def __init__(
        self,
        backend: Backend,
        A: Array,
        weights: Array,
        ridge: float,
        metric: Map,
        gram: Array | None = None,
    ) -> None:
        """`gram` is A^T A, if that is known: it will do while all weights are alike."""
        one = weights[0]
        if gram is None or float(abs(weights - one).max()) > _ALIKE * float(one):  # synchronize!
            P = weighted_gram(backend, A, weights)
        else:
            P = one * gram
        add_ridge(backend.xp, P, ridge * metric.ridge)
        self.factor = factor_of(backend, P, ridge)

    def inverse(self, g: Array) -> Array:
        return self.factor.to_weights(self.factor.to_gradient(g))


class ClassBlocks:
    """The whole Hessian of cross entropy, over the c - 1 directions that classes differ in.

    With B an orthonormal basis (c x (c - 1)) of what is not common to all classes, and p the
    softmax of a row, block a, b is A^T diag(B_a^T (diag(p) - p p^T) B_b) A + delta_ab ridge G.
    """

    exact = True

    def __init__(self, backend: Backend, A: Array, S: Array, ridge: float, metric: Map) -> None:
        xp, r, m = backend.xp, A.shape[1], S.shape[1] - 1
        self.backend, self.shape = backend, (r, m)
        self.B = xp.asarray(class_basis(m + 1))
        mean = S @ self.B
        H = xp.zeros((r * m, r * m))
        for a in range(m):
            rows = slice(a * r, (a + 1) * r)
            for b in range(a):
                columns = slice(b * r, (b + 1) * r)
                weights = S @ (self.B[:, a] * self.B[:, b]) - mean[:, a] * mean[:, b]
                H[rows, columns] = backend.matmul(A.T, weights[:, None] * A)
                H[columns, rows] = H[rows, columns].T
            weights = S @ self.B[:, a] ** 2 - mean[:, a] ** 2
            H[rows, rows] = weighted_gram(backend, A, xp.maximum(weights, 0.0))
            add_ridge(xp, H[rows, rows], ridge * metric.ridge)
        self.factor = factor_of(backend, H, ridge)

    def inverse(self, g: Array) -> Array:
        r, m = self.shape
        x = (g @ self.B).T.reshape(r * m, 1)
        x = self.factor.to_weights(self.factor.to_gradient(x))
        return x.reshape(m, r).T @ self.B.T


class ColumnBlocks:
    """The whole Hessian of a loss whose outputs are independent: one block for each of them."""

    exact = True

    def __init__(self, backend: Backend, A: Array, S: Array, ridge: float, metric: Map) -> None:
        bend, self.xp = backend.xp.maximum(S * (1 - S), 0.0), backend.xp
        self.columns = [ScaledGram(backend, A, column, ridge, metric) for column in bend.T]

    def inverse(self, g: Array) -> Array:
        parts = [self.xp.ascontiguousarray(g[:, j : j + 1]) for j in range(g.shape[1])]
        found = [P.inverse(part) for P, part in zip(self.columns, parts, strict=True)]
        return self.xp.concatenate(found, axis=1)


class RankOnes:
    """P of what is left, and the weightiest rank-one terms of the Hessian as they are.

    Row i of A with the softmax p adds sum_k (a_i x q_k) (a_i x q_k)^T, the q_k those of
    `rank_ones`.  With C C^T = P^-1 and B the rows a_i C of the terms, the correction needs the
    N x N matrix I + (B B^T) o (q q^T) only.
    """

    exact = True

    def __init__(
        self, backend: Backend, A: Array, terms: RankOneTerms, ridge: float, metric: Map
    ) -> None:
        self.backend, self.q = backend, terms.q
        self.P = ScaledGram(backend, A, terms.rest, ridge, metric)
        # Twice with the factor itself: what it cut or added, the correction must not see otherwise.
        rows = backend.xp.ascontiguousarray(A[terms.rows].T)
        self.BT = self.P.factor.to_gradient(rows)  # r x N
        N = self.q.shape[0]
        K = backend.xp.zeros((N, N))
        backend.add_gram(K, self.BT)
        K *= backend.matmul(self.q, self.q.T)
        K[backend.xp.arange(N), backend.xp.arange(N)] += 1
        self.K = factor_of(backend, K, 1.0)

    def inverse(self, g: Array) -> Array:
        y = self.P.factor.to_gradient(g)
        z = (self.backend.matmul(self.BT.T, y) * self.q).sum(axis=1)[:, None]
        z = self.K.to_weights(self.K.to_gradient(z))
        return self.P.factor.to_weights(y - self.backend.matmul(self.BT, z * self.q))


class RankOneTerms(NamedTuple):
    """Terms q q^T of the Hessians of rows, with respect to their outputs."""

    rows: Array  # (N,) the row that each belongs to
    q: Array  # (N, c)
    rest: Array  # the mean curvature of each row that the terms leave


class Newton:
    """Newton's method on the rows of a stored A, in the coordinates w = C^-1 W of a factor C."""

    searches = True

    def __init__(
        self, backend: Backend, loss: Loss, A: Array, factor: Factor, size: int, ridge: float
    ) -> None:
        """`size` is the number of coordinates, which may be more than the rank of C."""
        self.backend, self.loss, self.ridge = backend, loss, ridge
        C = factor.to_weights(backend.xp.eye(size))
        self.B = backend.matmul(A.astype("float64"), C)
        self.metric = Map(backend, C)

    def direction(self, w: Array, g: Array) -> Array:
        xp = self.backend.xp
        S = self.loss.activation(xp, self.backend.matmul(self.B, w))
        A = self.loss.scale_rows(xp, self.B, slice(None), None)
        kind = ColumnBlocks if self.loss.separable else ClassBlocks
        hessian: Hessian = kind(self.backend, A, S, self.ridge, self.metric)
        step = self.loss.centre(xp, hessian.inverse(g))
        # Rows whose class is beyond doubt have no curvature left.
        return -step if float(xp.sum(step * g)) > 0 else -self.loss.centre(xp, g)  # synchronize!


def rank_ones(xp: Any, S: Array, most: int) -> RankOneTerms | None:
    """The weightiest terms q q^T of diag(p) - p p^T for all rows p of S.

    They hold `_SHARE` of all; None if more than `most` would be needed.  With the classes of a row
    in falling order, R_k the probability of all after the k-th, and rho_k theirs over R_k,

        diag(p) - p p^T = sum_k  p_k R_k / (p_k + R_k)  (e_k - rho_k) (e_k - rho_k)^T,

    so that the first term, the top class against the others, is nearly all of a nearly certain
    row.
    """
    n, c = S.shape
    at = xp.arange(n)[:, None]
    order = xp.argsort(-S, axis=1)
    p = S[at, order]
    R, squares = xp.zeros((n, c)), xp.zeros((n, c))  # of the classes after the k-th
    for k in range(c - 2, -1, -1):
        R[:, k] = R[:, k + 1] + p[:, k + 1]
        squares[:, k] = squares[:, k + 1] + p[:, k + 1] ** 2
    seen = R > _TINY
    over = 1 / xp.where(seen, R, 1.0)
    weight = xp.where(seen, p * R / xp.where(seen, p + R, 1.0), 0.0)[:, :-1]
    trace = weight * (1 + squares[:, :-1] * over[:, :-1] ** 2)
    N = _most_of(xp, trace.reshape(-1), most)
    if N is None:
        return None
    chosen = xp.argsort(-trace.reshape(-1))[:N]
    rows, k = chosen // (c - 1), chosen % (c - 1)
    behind = xp.arange(c)[None, :] > k[:, None]
    q = xp.where(behind, -p[rows] * over[rows, k][:, None], 0.0)
    q[xp.arange(N), k] = 1.0
    q *= xp.sqrt(weight[rows, k])[:, None]
    by_class = xp.zeros((N, c))
    by_class[xp.arange(N)[:, None], order[rows]] = q
    trace[rows, k] = 0.0
    return RankOneTerms(rows, by_class, trace.sum(axis=1) / (c - 1))


def active_rows(xp: Any, weights: Array) -> Array:
    """The rows that hold `_SHARE` of all weights, in their order."""
    N = _most_of(xp, weights, weights.shape[0])
    return xp.sort(xp.argsort(-weights)[:N])


def _most_of(xp: Any, weights: Array, most: int) -> int | None:
    """How many of the largest weights hold `_SHARE` of all; None if more than `most`."""
    sums = xp.cumsum(-xp.sort(-weights))
    N = 1 + int((sums < _SHARE * sums[-1]).sum())  # synchronize!
    return N if most >= N else None


def class_basis(c: int) -> Any:
    """c x (c - 1): an orthonormal basis of the vectors whose sum is 0."""
    B = np.zeros((c, c - 1))
    for k in range(1, c):
        B[:k, k - 1], B[k, k - 1] = 1, -k
        B[:, k - 1] /= (k * (k + 1)) ** 0.5
    return B


def weighted_gram(backend: Backend, A: Array, weights: Array) -> Array:
    """A^T diag(weights) A."""
    return products(backend, A, None, loss=LOSSES["mse"].bind(weights, False))[0]


def factor_of(backend: Backend, P: Array, ridge: float) -> Factor:
    """C with C C^T = P^-1, about: a guess needs no bound.  P is overwritten.

    Without a ridge, directions that P does not see are cut.
    """
    xp, r = backend.xp, P.shape[0]
    size = xp.sqrt(P.diagonal())
    if r == 0:
        return Factor(0)
    scale = 1 / xp.where(size > 0, size, 1.0)
    P *= scale[:, None]
    P *= scale[None, :]
    if ridge == 0:
        cut = DenseGram(backend, P, xp.ones(r), damped=False).factor(1.0, 0.0, False)
        return Composed(Map(backend, scale), cut)
    lifted = safe_cholesky(backend, P)
    inner = Factor(r) if lifted is None else Cholesky(backend, lifted.L, 0.0, 0.0)
    return Composed(Map(backend, scale), inner)


@dataclass(frozen=True)
class DenseFit:
    """What training on stored rows found."""

    point: DensePoint
    gap: float  # bound of objective - optimum, rounding included; without a ridge often no better
    #              than the objective, since none is below 0
    status: str  # "certified" (gap <= goal * objective), "converged", "stagnated" or "max_iter"
    history: History  # step, objective, gap, grad_norm

    @property
    def u(self) -> Array:
        """(r, c) the weights."""
        return self.point.u

    @property
    def objective(self) -> float:
        """loss + ridge/2 <u, G u>."""
        return self.point.objective

    @property
    def steps(self) -> int:
        return len(self.history) - 1


def minimise(
    problem: DenseProblem,
    goal: float = 1e-7,
    max_steps: int = 2000,
    start: Array | None = None,
    memory_limit: int | None = None,
    callback: Callback | None = None,
) -> DenseFit:
    """Minimise loss(A u) + ridge/2 <u, G u> over u, for a loss that is not quadratic.

    Parameters
    ----------
    problem : DenseProblem
    goal : float
        Stop once the gap is proven to be at most goal * objective.
    max_steps : int
    start : (r, c) array
        Where to begin; 0 if None.
    memory_limit : int
        Bytes that may be allocated beside A; None asks the backend.
    callback : function
        Called with each record of the history.

    Examples
    --------
    >>> import numpy as np
    >>> from herta_gpu.backends import get_backend
    >>> from herta_gpu.losses import LOSSES
    >>> rng = np.random.default_rng(0)
    >>> A, Y = rng.standard_normal((50, 4)), np.eye(3)[rng.integers(0, 3, 50)]
    >>> fit = minimise(DenseProblem(get_backend("cpu"), LOSSES["ce"], A, Y, ridge=0.1))
    >>> fit.status, bool(fit.gap <= 1e-7 * fit.objective)
    ('certified', True)
    """
    backend, ridge = problem.backend, problem.ridge
    limit = backend.memory_available() if memory_limit is None else memory_limit
    if problem.A.shape[0] >= problem.A.shape[1]:
        return Descent(problem, goal, max_steps, limit, callback).run(start)
    # Fewer rows than columns: train where the rows are, measure in the whole space.
    T, lift, lower = row_space(backend, problem.A, ridge, problem.metric)
    inner = DenseProblem(backend, problem.loss, T, problem.Y, ridge)
    # Half of the goal is for what rounding adds on the way back.
    descent = Descent(inner, 0.5 * goal, max_steps, limit, callback)
    fit = descent.run(None if start is None else lower(start))
    point = problem.start(lift(fit.u))
    gap = problem.gap(point) if ridge > 0 else fit.gap
    missed = fit.status == "certified" and not gap <= goal * point.objective
    status = "stagnated" if missed else fit.status
    return DenseFit(point, gap, status, fit.history)


def row_space(
    backend: Backend, A: Array, ridge: float, metric: Map
) -> tuple[Array, Callable[[Array], Array], Callable[[Array], Array]]:
    """(T, lift, lower): the same problem in as few coordinates as A has rows.

    loss(A u) + ridge/2 <u, G u> is smallest at some u = lift(t), where it is
    loss(T t) + ridge/2 ||t||^2; lower(u) is the nearest t.  With G = K^-T K^-1 and u = K v the
    problem has the rows A K and the ridge of the identity; directions of v that no row has would
    only add to the ridge term.  Without a ridge they have no effect at all, and neither has G.
    """
    plain = metric if ridge > 0 else Map(backend, backend.xp.ones(A.shape[1]))
    B = plain.rows(A)
    if ridge > 0:
        V, R = backend.xp.linalg.qr(B.T)
        T = backend.xp.ascontiguousarray(R.T)
    else:
        V, _ = backend.row_space(B, ROW_CUT)
        T = backend.matmul(B, V)

    def lift(t: Array) -> Array:
        return plain.from_weights(backend.matmul(V, t))

    def lower(u: Array) -> Array:
        return backend.matmul(V.T, plain.to_weights(u))

    return T, lift, lower


class Descent:
    """L-BFGS for cross entropy, from a guess of the Hessian that becomes better when it must."""

    def __init__(
        self,
        problem: DenseProblem,
        goal: float,
        max_steps: int,
        memory_limit: int,
        callback: Callback | None,
    ) -> None:
        self.problem, self.goal, self.max_steps, self.callback = problem, goal, max_steps, callback
        self.backend, self.xp, self.loss = problem.backend, problem.xp, problem.loss
        self.memory_limit, rows = memory_limit, problem.A.shape[0]
        self.lbfgs = LBFGS(self.xp, max(LBFGS_MEMORY, min(_PAIRS, rows // 4)))
        self.history: History = []
        self.curvature = -1.0  # of all rows when P was factored
        self.hessian: Hessian | None = None
        self.least: list[float] = []  # the smallest gap so far, at each step with this Hessian

    def run(self, start: Array | None) -> DenseFit:
        """From `start` to the optimum, or as far as rounding and `max_steps` allow."""
        problem, status = self.problem, "max_iter"
        point = problem.start(start)
        for step in range(self.max_steps + 1):
            self._update_hessian(point)
            point, gap, found = self._look(point)
            problem.record(self.history, point, gap, self.callback)
            if found or step == self.max_steps:
                status = found or status
                break
            ahead = self._step(point)
            rise = ahead.objective - point.objective
            if rise <= _NOISE * abs(point.objective) or rise <= self.loss.rounding(point.F):
                point = ahead  # it went down, as far as rounding can tell
            elif self.lbfgs.pairs:
                self.lbfgs.forget()
                point = problem.start(point.u)
            else:
                status = "stagnated"
                break
        return DenseFit(point, problem.gap(point), status, self.history)

    def _look(self, point: DensePoint) -> tuple[DensePoint, float, str]:
        """(the point, its gap, the word for having arrived or nothing)."""
        problem, gap = self.problem, self.problem.gap(point, rounding=False)
        if not self._status(point, gap):
            return point, gap, ""
        gap = problem.gap(point)
        found = self._status(point, gap)
        if found:
            return point, gap, found
        point = problem.start(point.u)  # steps add to F, and rounding to rounding
        bare, gap = problem.gap(point, rounding=False), problem.gap(point)
        hidden = bare <= 0.1 * self.goal * point.objective  # what is left is rounding
        return point, gap, self._status(point, gap) or ("stagnated" if hidden else "")

    def _step(self, point: DensePoint) -> DensePoint:
        assert self.hessian is not None
        scaled = not self.hessian.exact
        arguments = (point.u, point.g, self.hessian.inverse, self.backend.matmul, scaled)
        D = self.lbfgs.direction(*arguments)
        if not float(self.xp.sum(D * point.g)) < 0:  # synchronize!
            self.lbfgs.forget()
            D = self.lbfgs.direction(*arguments)
        return self.problem.move(point, D)

    def _decrement(self, point: DensePoint) -> float:
        """||H^-1/2 gradient||^2 with the present guess H of the Hessian."""
        g = point.g if self.hessian is None else self.hessian.inverse(point.g)
        return max(0.0, float(self.xp.sum(point.g * g)))  # synchronize!

    def _status(self, point: DensePoint, gap: float) -> str:
        """The word for having arrived, or nothing."""
        if gap <= self.goal * point.objective:
            return "certified"
        ridge, losses = self.problem.ridge, [h["objective"] for h in self.history]
        if point.objective <= self.goal * (self.goal if ridge else 1) * self.problem.at_zero:
            return "converged"  # an optimum of about 0 has no relative gap
        if ridge > 0:
            gaps = [h["gap"] for h in self.history]
            idle = len(gaps) > _STUCK and min(gaps[-_STUCK:]) >= min(gaps[:-_STUCK])
            idle = idle and losses[-_STUCK] - losses[-1] <= 100 * _NOISE * abs(losses[-1])
            return "stagnated" if idle else ""
        settled = len(losses) > 3 and losses[-4] - point.objective <= 0.3 * self.goal * losses[-4]
        near = settled and self._decrement(point) <= self.goal * point.objective
        return "converged" if near else ""

    def _update_hessian(self, point: DensePoint) -> None:
        """Make P anew once the rows' curvature has changed, the whole Hessian once that pays."""
        problem = self.problem
        weights = self.loss.row_curvature(self.xp, point.E, problem.Y)
        left = self._steps_left(point)
        whole = self._whole(point, weights, min(len(self.least), 0.5 * left)) if left else None
        if whole is not None:
            self.hessian, self.least = whole, []
            self.lbfgs.forget()  # it knows better than any pair
            return
        now = float(weights.sum())  # synchronize!
        near = self.curvature / _STALE <= now <= self.curvature * _STALE
        if self.hessian is None or not (near or self.hessian.exact):
            self.curvature = now
            known = (problem.ridge, problem.metric, problem.gram)
            self.hessian = ScaledGram(self.backend, problem.seen, weights, *known)

    def _steps_left(self, point: DensePoint) -> float:
        """How many more steps like the last ones there would be; 0 where that is not asked."""
        ridge = self.problem.ridge
        gap = self.problem.gap(point, rounding=False) if ridge else self._decrement(point)
        self.least.append(min([gap, *self.least[-1:]]))
        taken, goal, now = len(self.least), self.goal * point.objective, self.least[-1]
        if taken < _WATCHED or taken % 5 or not now > goal > 0:
            return 0.0
        window = taken // 2
        rate = math.log(self.least[-window - 1] / now) / window
        return math.log(now / goal) / rate if rate > 0 else math.inf

    def _whole(self, point: DensePoint, weights: Array, steps: float) -> Hessian | None:
        """The Hessian itself, where it costs less than so many steps and fits the memory."""
        problem, (n, c), r = self.problem, self.problem.Y.shape, self.problem.A.shape[1]
        # A product with few columns runs at about a quarter of the speed of a Gram matrix.
        a_step = 16.0 * n * r * c + 32.0 * self.lbfgs.pairs * r * c + 400.0 * n * c + 2e7
        budget, a_gram = steps * a_step, n * r**2 + r**3 / 3  # flops
        if (c == 1 and not self.loss.separable) or a_gram > budget:
            return None
        S, known = (
            self.loss.probabilities(self.xp, point.E, problem.Y),
            (problem.ridge, problem.metric),
        )
        if self.loss.separable:
            if c * a_gram > budget or 8 * (c * r**2 + n * c) > self.memory_limit:
                return None
            return ColumnBlocks(self.backend, problem.seen, S, *known)
        active, size = active_rows(self.xp, weights), r * (c - 1)
        blocks = (c - 1) ** 2 * active.shape[0] * r**2 + size**3 / 3
        if r * c > _WHOLE_SIZE or 8 * (2 * size**2 + 2 * active.shape[0] * r) > self.memory_limit:
            blocks = math.inf
        if problem.ridge > 0:
            # As many terms, in hundreds, as cost less and fit the memory.
            N, left = 0, min(budget, blocks) - a_gram
            while N < _WHOLE_SIZE:
                M = N + 100
                flops = M * r**2 + M**2 * r + M**3 / 3
                if flops > left or 8 * (3 * M**2 + 2 * M * r) > self.memory_limit:
                    break
                N = M
            terms = rank_ones(self.xp, S, N) if N else None
            if terms is not None:
                return RankOnes(self.backend, problem.seen, terms, *known)
        if blocks > budget:
            return None
        return ClassBlocks(self.backend, problem.seen[active], S[active], *known)
