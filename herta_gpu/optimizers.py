"""Optimizers on preconditioned weights w, W = P^-1/2 w, and on stored rows.

An optimizer turns the gradient at w into a direction; how far to go along it is decided exactly
by the loss (`searches` is True) or by the optimizer itself (the direction is the whole step).
Where the columns of W are independent problems (MSE) the scalars below are one per column.

`minimise` trains cross entropy on stored rows A, without a solve.  L-BFGS takes the steps; its
first guess of the inverse Hessian is P^-1, P = A^T A + ridge G with each row of A weighted by its
curvature (`factor_rows`), and improves when it must: to the Hessian itself but for rows that add
next to nothing, a matrix of r (c - 1) rows (`class_blocks`).
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

from scipy.linalg import helmert

from herta_gpu.backends.base import Array, Backend, norm
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
from herta_gpu.losses import LOSSES
from herta_gpu.planning.settings import Status
from herta_gpu.problem import Callback, History, StoredPoint, StoredProblem

LBFGS_MEMORY = 20
_ALIKE = 1e-9  # relative difference of weights that are called equal
_SHARE = 0.999  # of all curvature, that the rows in a Hessian hold
_PAIRS = 300  # of L-BFGS; a quarter of the rows where that is less
_STALE = 2.0  # change of the mean curvature after which P is factored again
_WHOLE_SIZE = 8000  # numbers in u up to which the whole Hessian of cross entropy is worth having
_WATCHED = 10  # steps after which their progress says something
_STUCK = 50  # steps without progress that are the end
_NOISE = 1e-12  # relative, of objectives that are taken for equal


class GradientDescent:
    """w <- w - eta g, the loop of Algorithm 1; eta by exact line search unless it is given.  With
    momentum it is Polyak's heavy ball."""

    def __init__(self, learning_rate: float | None = None, momentum: float = 0.0) -> None:
        self.learning_rate, self.momentum, self._step = learning_rate, momentum, 0.0
        self.searches = learning_rate is None

    def direction(self, w: Array, g: Array) -> Array:
        rate = 1.0 if self.learning_rate is None else self.learning_rate
        self._step = self.momentum * self._step - rate * g
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
        self._last: tuple[Array, Array] | None = None

    def direction(self, w: Array, g: Array) -> Array:
        xp, d = self.xp, -g
        if self._last is not None:
            before, d = self._last
            old = xp.sum(before**2, axis=self.axis)
            change = xp.sum((g - before) * g, axis=self.axis)
            d = -g + xp.maximum(0.0, change / xp.where(old > 0, old, 1.0)) * d
            d = xp.where(xp.sum(d * g, axis=self.axis) > 0, -g, d)
        self._last = (g, d)
        return d


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
        # S^T, Y^T, D and R^-1, with room for more pairs; those in use begin at `_first`.
        self._arrays = xp.zeros((0, 0)), xp.zeros((0, 0)), xp.zeros(0), xp.zeros((0, 0))
        self.forget()

    def forget(self) -> None:
        """Begin anew, without pairs."""
        self._first, self.pairs = 0, 0
        self._last: tuple[Array, Array] | None = None

    def direction(
        self,
        w: Array,
        g: Array,
        inverse: Callable[[Array], Array] | None = None,
        product: Callable[[Array, Array], Array] = operator.matmul,
        scaled: bool = True,
    ) -> Array:
        """The next direction; `inverse` applies H_0 (None: the identity).  `scaled`: H_0 is right
        up to a factor, which the last pair tells."""
        if self._last is not None:
            self._remember(w - self._last[0], g - self._last[1], product)
        self._last = (w, g)
        H_0 = inverse or (lambda v: v)
        if self.pairs == 0:
            return -H_0(g)
        S, Y, D, R_inverse = self._pairs()
        q = product(R_inverse, product(S, g.reshape(-1, 1)))
        v = H_0((g.reshape(-1, 1) - product(Y.T, q)).reshape(g.shape)).reshape(-1, 1)
        if scaled:
            y = Y[-1].reshape(g.shape)
            size = self.xp.sum(y * H_0(y))  # 0 where the squares vanish
            v = v * (D[-1] / self.xp.where(size > 0, size, D[-1]))
        back = product(R_inverse.T, D[:, None] * q - product(Y, v))
        return -(v + product(S.T, back)).reshape(g.shape)

    def _pairs(self) -> tuple[Array, Array, Array, Array]:
        """(S^T, Y^T, D, R^-1) of the pairs in use, the newest last."""
        J = slice(self._first, self._first + self.pairs)
        S, Y, D, R_inverse = self._arrays
        return S[J], Y[J], D[J], R_inverse[J, J]

    def _remember(self, s: Array, y: Array, product: Callable[[Array, Array], Array]) -> None:
        """One more pair.  R grows by a column, R^-1 with it; the oldest pair is its first row."""
        sy = float(self.xp.sum(s * y))  # synchronize!
        if not sy > 0 or self.memory == 0:
            return
        if self.pairs == self.memory:
            self._first, self.pairs = self._first + 1, self.pairs - 1
        old, k, size = self._pairs(), self.pairs, s.size
        if self._first + k == self._arrays[0].shape[0]:  # room for twice as many, at the front
            room, self._first = max(2 * k, 16), 0
            shapes: list[tuple[int, ...]] = [(room, size), (room, size), (room,), (room, room)]
            S, Y, D, R_inverse = self._arrays = tuple(self.xp.zeros(shape) for shape in shapes)
            if k:
                S[:k], Y[:k], D[:k], R_inverse[:k, :k] = old
        (S, Y, D, R_inverse), first, at = self._arrays, self._first, self._first + k
        R_inverse[at, at] = 1 / sy
        if k:
            column = product(R_inverse[first:at, first:at], product(old[0], y.reshape(-1, 1)))
            R_inverse[first:at, at] = column[:, 0] / -sy
        S[at], Y[at], D[at], self.pairs = s.reshape(-1), y.reshape(-1), sy, k + 1


Optimizer = GradientDescent | Adam | ConjugateGradients | LBFGS  # or Newton's method


def make_optimizer(
    name: str,
    rate: float | None,
    xp: Any,
    by_column: bool,
    interval: tuple[float, float] | None = None,
) -> Optimizer:
    """An optimizer by name; `by_column`: the columns of W are independent problems.  "gd" and
    "momentum" take the rate that is the best for eigenvalues in an `interval`."""
    weight = 0.9 if name == "momentum" else 0.0
    if interval is not None and name in ("gd", "momentum"):
        a, b = interval
        rate = 4.0 / (a**0.5 + b**0.5) ** 2 if weight else 2.0 / (a + b)
        weight = ((b**0.5 - a**0.5) / (b**0.5 + a**0.5)) ** 2 if weight else 0.0
    if name == "cg":
        return ConjugateGradients(xp, by_column)
    if name == "lbfgs":
        return LBFGS(xp)
    if name == "adam":
        return Adam(rate or 0.01, xp)
    return GradientDescent(rate or (0.5 if name == "momentum" else None), weight)


# ---- Hessians of the rows of a `StoredProblem`, of which S are the activations -------------------
Inverse = Callable[[Array], Array]  # of a guess of the Hessian: g -> its inverse times g


def inverse_of(factor: Factor) -> Inverse:
    """g -> P^-1 g."""
    return lambda g: factor.to_weights(factor.to_gradient(g))


def factor_rows(problem: StoredProblem, weights: Array, gram: Array | None = None) -> Factor:
    """P = A^T diag(weights) A + ridge G, the same for every class.  `gram` is A^T A, if that is
    known: it will do while all weights are alike."""
    backend, one = problem.backend, weights[0]
    if gram is None or float(abs(weights - one).max()) > _ALIKE * float(one):  # synchronize!
        P = weighted_gram(backend, problem.hessian_rows, weights)
    else:
        P = one * gram
    add_ridge(backend.xp, P, problem.ridge * problem.C0.ridge)
    return factor_of(backend, P, problem.ridge)


def class_blocks(problem: StoredProblem, S: Array, rows: Any = slice(None)) -> Inverse:
    """The whole Hessian of cross entropy, over the c - 1 directions that classes differ in.  With B
    an orthonormal basis (c x (c - 1)) of what is not common to all classes, and p the softmax of a
    row, block a, b is A^T diag(B_a^T (diag(p) - p p^T) B_b) A + delta_ab ridge G.  The constants of
    an intercept are one more feature, which has no ridge and no gradient.  `rows` count."""
    backend, xp, A, S = problem.backend, problem.xp, problem.hessian_rows[rows], S[rows]
    d, m = A.shape[1], S.shape[1] - 1
    if problem.loss.intercept:
        ones = xp.ones((problem.Y.shape[0], 1))
        ones = problem.loss.scale_rows(xp, ones, slice(None), None)
        A = xp.concatenate([A, ones[rows]], axis=1)
    B, r = xp.asarray(helmert(m + 1).T), A.shape[1]
    mean, H = S @ B, xp.zeros((r * m, r * m))
    for a in range(m):
        at = slice(a * r, (a + 1) * r)
        for b in range(a):
            columns = slice(b * r, (b + 1) * r)
            weights = S @ (B[:, a] * B[:, b]) - mean[:, a] * mean[:, b]
            H[at, columns] = backend.matmul(A.T, weights[:, None] * A)
            H[columns, at] = H[at, columns].T
        weights = S @ B[:, a] ** 2 - mean[:, a] ** 2
        H[at, at] = weighted_gram(backend, A, xp.maximum(weights, 0.0))
        add_ridge(xp, H[at, at][:d, :d], problem.ridge * problem.C0.ridge)
    solve = inverse_of(factor_of(backend, H, problem.ridge))

    def inverse(g: Array) -> Array:
        whole = xp.zeros((m, r))
        whole[:, :d] = (g @ B).T
        return solve(whole.reshape(r * m, 1)).reshape(m, r)[:, :d].T @ B.T

    return inverse


def column_blocks(problem: StoredProblem, S: Array) -> Inverse:
    """The whole Hessian of a loss whose outputs are independent: one block for each of them."""
    xp = problem.xp
    columns = [inverse_of(factor_rows(problem, w)) for w in xp.maximum(S * (1 - S), 0.0).T]

    def inverse(g: Array) -> Array:
        parts = [xp.ascontiguousarray(g[:, j : j + 1]) for j in range(g.shape[1])]
        return xp.concatenate([solve(g_j) for solve, g_j in zip(columns, parts)], axis=1)

    return inverse


class Newton:
    """Newton's method on stored rows, in the coordinates w = C^-1 W of a factor C."""

    searches = True

    def __init__(self, rows: StoredProblem, factor: Factor, size: int) -> None:
        """`size` is the number of coordinates, which may be more than the rank of C."""
        backend, C = rows.backend, factor.to_weights(rows.xp.eye(size))
        A, metric = backend.matmul(rows.Q, C), Map(backend, C)
        self.problem = StoredProblem(backend, rows.loss, A, rows.Y, rows.ridge, metric)

    def direction(self, w: Array, g: Array) -> Array:
        problem, xp, loss = self.problem, self.problem.xp, self.problem.loss
        F = loss.add_intercept(xp, problem.backend.matmul(problem.Q, w), problem.Y)
        S = loss.activation(xp, F)
        inverse = column_blocks(problem, S) if loss.separable else class_blocks(problem, S)
        step = loss.centre(xp, inverse(g))
        # Rows whose class is beyond doubt have no curvature left.
        return -step if float(xp.sum(step * g)) > 0 else -loss.centre(xp, g)  # synchronize!


def weighted_gram(backend: Backend, A: Array, weights: Array) -> Array:
    """A^T diag(weights) A."""
    return products(backend, A, None, loss=LOSSES["mse"].bind(weights, False))[0]


def factor_of(backend: Backend, P: Array, ridge: float) -> Factor:
    """C with C C^T = P^-1, about: a guess needs no bound.  P is overwritten.  Without a ridge,
    directions that P does not see are cut."""
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


class DenseFit(NamedTuple):
    """What training on stored rows found."""

    u: Array  # (r, c) the weights
    objective: float  # loss + ridge/2 <u, G u>
    status: Status  # CONVERGED, STAGNATED or MAX_ITER
    history: History  # step, objective, gap, grad_norm


def minimise(
    problem: StoredProblem,
    goal: float = 1e-7,
    max_steps: int = 2000,
    start: Array | None = None,
    memory_limit: int | None = None,
    callback: Callback | None = None,
) -> DenseFit:
    """Minimise loss(A u) + ridge/2 <u, G u> over u, for a loss that is not quadratic.  It ends once
    the gap is at most goal * objective.  `start` is where to begin, 0 if None; `memory_limit` the
    bytes that may be allocated beside A; None asks the backend."""
    backend, ridge, few = problem.backend, problem.ridge, problem.Q.shape[0] < problem.Q.shape[1]
    limit = backend.memory_available() if memory_limit is None else memory_limit
    inner = problem
    if few:  # train where the rows are
        T, lift, lower = row_space(backend, problem.Q, ridge, problem.C0)
        inner = StoredProblem(backend, problem.loss, T, problem.Y, ridge)
        start = None if start is None else lower(start)
    descent = Descent(inner, goal, max_steps, limit, callback)
    point, status = descent.run(start)
    point = problem.start(lift(point.u)) if few else point
    return DenseFit(point.u, point.objective, status, descent.history)


def row_space(
    backend: Backend, A: Array, ridge: float, metric: Map
) -> tuple[Array, Callable[[Array], Array], Callable[[Array], Array]]:
    """(T, lift, lower): the same problem in as few coordinates as A has rows.  The optimum is at
    some u = lift(t), where the objective is loss(T t) + ridge/2 ||t||^2; lower(u) is the nearest t.
    With G = K^-T K^-1 and u = K v the rows are A K, and directions of v that no row has only add to
    the ridge term; without a ridge neither they nor G have any effect."""
    plain = metric if ridge > 0 else Map(backend, backend.xp.ones(A.shape[1]))
    B = plain.rows(A)
    if ridge > 0:
        V, R = backend.xp.linalg.qr(B.T)
        T = backend.xp.ascontiguousarray(R.T)
    else:
        V, _ = backend.row_space(B, ROW_CUT)
        T = backend.matmul(B, V)
    return (
        T,
        lambda t: plain.from_weights(backend.matmul(V, t)),
        lambda u: backend.matmul(V.T, plain.to_weights(u)),
    )


@dataclass
class Descent:
    """L-BFGS for cross entropy, from a guess of the Hessian that becomes better when it must."""

    problem: StoredProblem
    goal: float
    max_steps: int
    memory_limit: int
    callback: Callback | None

    def __post_init__(self) -> None:
        self.xp, self.loss, self.history = self.problem.xp, self.problem.loss, History()
        pairs = min(_PAIRS, self.problem.Q.shape[0] // 4)
        self.lbfgs = LBFGS(self.xp, max(LBFGS_MEMORY, pairs))
        self.curvature = -1.0  # of all rows when P was factored
        self.inverse: Inverse | None = None  # of the present guess of the Hessian
        self.exact = False  # it is the Hessian itself, but for rows that add next to nothing
        self.least: list[float] = []  # the smallest gap so far, at each step with this Hessian

    def run(self, start: Array | None) -> tuple[StoredPoint, Status]:
        """(the optimum, or as far as rounding and `max_steps` allow from `start`; the status)."""
        problem, point = self.problem, self.problem.start(start)
        for step in range(self.max_steps + 1):
            self._update_hessian(point)
            gap = problem.gap(point)
            found = self._status(point, gap)
            if found:  # steps add to F, and rounding to rounding
                point = problem.start(point.u)
                gap = problem.gap(point)
                found = self._status(point, gap)
            size = norm(problem.C0.gradient(point.g))
            known = {"objective": point.objective, "gap": gap, "grad_norm": size}
            self.history.append({"step": len(self.history), **known})
            if self.callback is not None:
                self.callback(self.history[-1])
            if found or step == self.max_steps:
                return point, found or Status.MAX_ITER
            arguments = (point.u, point.g, self.inverse, problem.backend.matmul, not self.exact)
            D = self.lbfgs.direction(*arguments)
            if not float(self.xp.sum(D * point.g)) < 0:  # synchronize!
                self.lbfgs.forget()
                D = self.lbfgs.direction(*arguments)
            ahead = problem.move(point, D)
            rise = ahead.objective - point.objective
            if rise <= _NOISE * abs(point.objective) or rise <= self.loss.rounding(point.F):
                point = ahead  # it went down, as far as rounding can tell
            elif self.lbfgs.pairs:
                self.lbfgs.forget()
                point = problem.start(point.u)
            else:
                break
        return point, Status.STAGNATED

    def _status(self, point: StoredPoint, gap: float) -> Status | None:
        """What the end is, if this is one."""
        if gap <= self.goal * point.objective:
            return Status.CONVERGED
        ridge, losses = self.problem.ridge, [h["objective"] for h in self.history]
        if point.objective <= self.goal * (self.goal if ridge else 1) * self.problem.at_zero:
            return Status.CONVERGED  # an optimum of about 0 has no relative gap
        if ridge > 0:
            gaps = [h["gap"] for h in self.history]
            idle = len(gaps) > _STUCK and min(gaps[-_STUCK:]) >= min(gaps[:-_STUCK])
            idle = idle and losses[-_STUCK] - losses[-1] <= 100 * _NOISE * abs(losses[-1])
            return Status.STAGNATED if idle else None
        settled = len(losses) > 3 and losses[-4] - point.objective <= 0.3 * self.goal * losses[-4]
        near = settled and self._decrement(point) <= self.goal * point.objective
        return Status.CONVERGED if near else None

    def _decrement(self, point: StoredPoint) -> float:
        """||H^-1/2 gradient||^2 with the present guess H of the Hessian."""
        g = point.g if self.inverse is None else self.inverse(point.g)
        return max(0.0, float(self.xp.sum(point.g * g)))  # synchronize!

    def _update_hessian(self, point: StoredPoint) -> None:
        """Make P anew once the rows' curvature has changed, the whole Hessian once that pays."""
        problem = self.problem
        weights = self.loss.row_curvature(self.xp, point.E, problem.Y)
        gap = problem.gap(point) if problem.ridge else self._decrement(point)
        goal = self.goal * point.objective
        self.least.append(min([gap, *self.least[-1:]]))
        taken, gap = len(self.least), self.least[-1]
        if taken >= _WATCHED and taken % 5 == 0 and gap > goal > 0:
            # How many more steps like the last ones there would be.
            rate = math.log(self.least[-(taken // 2) - 1] / gap) / (taken // 2)
            steps = math.log(gap / goal) / rate if rate > 0 else math.inf
            whole = self._whole(point, weights, min(taken, 0.5 * steps))
            if whole is not None:
                self.inverse, self.exact, self.least = whole, True, []
                return self.lbfgs.forget()  # it knows better than any pair
        now = float(weights.sum())  # synchronize!
        near = self.curvature / _STALE <= now <= self.curvature * _STALE
        if self.inverse is None or not (near or self.exact):
            self.curvature = now
            self.inverse = inverse_of(factor_rows(problem, weights, problem.gram))

    def _whole(self, point: StoredPoint, weights: Array, steps: float) -> Inverse | None:
        """The Hessian itself, where it costs less than so many steps and fits the memory."""
        problem, (n, c), r = self.problem, self.problem.Y.shape, self.problem.Q.shape[1]
        # A product with few columns runs at about a quarter of the speed of a Gram matrix.
        a_step = 16.0 * n * r * c + 32.0 * self.lbfgs.pairs * r * c + 400.0 * n * c + 2e7
        budget, a_gram = steps * a_step, n * r**2 + r**3 / 3  # flops
        if (c == 1 and not self.loss.separable) or a_gram > budget:
            return None
        S, limit = self.loss.probabilities(self.xp, point.E, problem.Y), self.memory_limit / 8
        if self.loss.separable:
            fits = c * a_gram <= budget and c * r**2 + n * c <= limit
            return column_blocks(problem, S) if fits else None
        # Of nearly separable classes few rows have any curvature: these hold `_SHARE` of it.
        order, sums = self.xp.argsort(-weights), self.xp.cumsum(-self.xp.sort(-weights))
        N = 1 + int((sums < _SHARE * sums[-1]).sum())  # synchronize!
        size = r * (c - 1)
        flops = (c - 1) ** 2 * N * r**2 + size**3 / 3
        if r * c > _WHOLE_SIZE or flops > budget or 2 * size**2 + 2 * N * r > limit:
            return None
        return class_blocks(problem, S, self.xp.sort(order[:N]))
