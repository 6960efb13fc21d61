"""Training on stored rows: min over u of loss(A u) + ridge/2 ||C0 u||^2 for a dense A.

The strategy "direct" keeps the training rows of Q as A (n_train x r), in coordinates u with
W = C0 u, and needs no solve from there on.  MSE is one factor of P = A^T A + ridge G, G = C0^T C0.
Cross entropy takes L-BFGS steps whose first guess of the inverse Hessian is P^-1, with each row of
A weighted by its curvature.  "Pass" is a product with A or A^T.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from herta_gpu.backends.base import Array, Backend, norm
from herta_gpu.factors import Cholesky, Factor, Scaled
from herta_gpu.grams import ROW_CUT, DenseGram
from herta_gpu.losses import Loss
from herta_gpu.optimizers import LBFGS

_UNIT = 0.5 * float(np.finfo(np.float64).eps)  # what one operation rounds
_PAIRS = 300  # of L-BFGS; a quarter of the rows where that is less
_CHUNK_BYTES = 16 << 20  # rows of A that are weighted at a time
_STALE = 2.0  # change of the mean curvature after which P is factored again
_REFINEMENTS = 3  # of the solution of MSE
_POWER_STEPS = 8


class Metric:
    """The ridge term in coordinates u: ||W||^2 = u^T G u, with W = C0 u and G = C0^T C0.

    Parameters
    ----------
    backend : Backend
    G, K : None, (r,) or (r, r) arrays
        G and a K with K K^T = G^-1; one-dimensional ones are diagonals, None is the identity.
        ||K^T g|| is the norm of the gradient with respect to W, and u = K t makes ||W|| = ||t||.

    Examples
    --------
    >>> import numpy as np
    >>> from herta_gpu.backends import get_backend
    >>> C0 = np.array([[2.0, 1.0], [0.0, 1.0], [1.0, 0.0]])
    >>> metric = Metric.of_map(get_backend("cpu"), C0)
    >>> u = np.array([[1.0], [-1.0]])
    >>> float((u * metric.times(u)).sum()), float(((C0 @ u) ** 2).sum())
    (3.0, 3.0)
    """

    def __init__(self, backend: Backend, G: Array | None = None, K: Array | None = None) -> None:
        self.backend, self.G, self.K = backend, G, K

    @classmethod
    def diagonal(cls, backend: Backend, G: Array) -> Metric:
        """The metric of a diagonal G, given as a vector."""
        return cls(backend, G, G**-0.5)

    @classmethod
    def of_map(cls, backend: Backend, C0: Array) -> Metric:
        """The metric of a d x r matrix C0 of full rank."""
        xp = backend.xp
        R = xp.linalg.qr(C0, mode="r")
        K = backend.solve_triangular(R.T, xp.eye(R.shape[0]), trans=True)
        return cls(backend, backend.matmul(C0.T, C0), K)

    @classmethod
    def of_whitening(cls, backend: Backend, L: Array) -> Metric:
        """The metric of C0 = L^-T, which whitens an X with X^T X = L L^T."""
        C0_T = backend.solve_triangular(L, backend.xp.eye(L.shape[0]))
        return cls(backend, backend.matmul(C0_T, C0_T.T), L)

    @classmethod
    def of_gram(cls, backend: Backend, G: Array) -> Metric:
        """The metric of G itself, r x r and well enough conditioned for a Cholesky factor."""
        scale = G.diagonal() ** -0.5
        L = backend.cholesky(scale[:, None] * G * scale)
        if L is None:
            raise ValueError("G must be positive definite: give C0 itself, or its inverse.")
        K = backend.solve_triangular(L, backend.xp.eye(G.shape[0]), trans=True)
        return cls(backend, G, scale[:, None] * K)

    def times(self, u: Array) -> Array:
        """G u."""
        return self._by(self.G, u)

    def outer(self, g: Array) -> Array:
        """K^T g: the gradient with respect to W, up to a rotation."""
        return self._by(None if self.K is None else self.K.T, g)

    def lift(self, t: Array) -> Array:
        """K t: the u of coordinates t in which the metric is the identity."""
        return self._by(self.K, t)

    def lower(self, u: Array) -> Array:
        """K^-1 u."""
        return self.outer(self.times(u))

    def rows(self, A: Array) -> Array:
        """A K: the rows of A in the coordinates t."""
        if self.K is None:
            return A
        return A * self.K if self.K.ndim == 1 else self.backend.matmul(A, self.K)

    def add_to(self, P: Array, ridge: float) -> None:
        """P += ridge G."""
        if self.G is not None and self.G.ndim == 2:
            P += ridge * self.G
        else:
            diagonal = self.backend.xp.arange(P.shape[0])
            P[diagonal, diagonal] += ridge * (1.0 if self.G is None else self.G)

    def stretch(self) -> float:
        """||K||, to some per cent."""
        if self.K is None:
            return 1.0
        if self.K.ndim == 1:
            return float(self.K.max())  # synchronize!
        return _size(self.backend, self.K)

    def _by(self, M: Array | None, u: Array) -> Array:
        if M is None:
            return u
        return M[:, None] * u if M.ndim == 1 else self.backend.matmul(M, u)


@dataclass
class DenseFit:
    """What training on stored rows found."""

    u: Array  # r x c
    objective: float  # loss + ridge/2 <u, G u>
    objective_error: float  # what rounding may have done to it
    gradient: Array  # r x c, with respect to u, from products with A at the very end
    size: float  # ||P^-1/2 gradient||, P the last one that was factored
    gap: float  # bound of objective - optimum, rounding included; inf where there is none
    steps: int
    passes: int  # products with A or A^T
    status: str  # "certified" (gap <= goal * objective), "converged", "stagnated", "max_iter"
    history: list[dict[str, Any]]  # step, objective, gap, passes


@dataclass
class Point:
    """Everything known at one u."""

    u: Array
    F: Array  # A u
    Gu: Array  # G u
    objective: float
    E: Array  # the gradient of the loss with respect to F
    g: Array  # the gradient of the objective with respect to u


class DenseProblem:
    """Objective, gradient, exact steps and the bound of the gap, with passes counted."""

    def __init__(
        self, backend: Backend, loss: Loss, A: Array, Y: Array, ridge: float, metric: Metric
    ) -> None:
        self.backend, self.xp, self.loss, self.A, self.Y = backend, backend.xp, loss, A, Y
        self.ridge, self.metric, self.passes = ridge, metric, 0
        self.columns = self.xp.sqrt((A * A).sum(axis=0))  # norms
        # Rounding is seen through the gradient with respect to W.
        self.stretch = metric.stretch() if ridge > 0 else math.inf
        self.A_norm = _size(backend, A)

    def start(self, u: Array | None) -> Point:
        """The point of u (None: 0)."""
        if u is None:
            u = self.xp.zeros((self.A.shape[1], self.Y.shape[1]))
            return self._at(u, self.xp.zeros_like(self.Y), u)
        self.passes += 1
        return self._at(u, self.backend.matmul(self.A, u), self.metric.times(u))

    def again(self, point: Point) -> Point:
        """The same u, every number computed from it."""
        return self.start(point.u)

    def move(self, at: Point, D: Array) -> Point:
        """The minimiser along D."""
        FD, GD = self.backend.matmul(self.A, D), self.metric.times(D)
        self.passes += 1
        slope = self.ridge * self.xp.sum(at.Gu * D, axis=0)
        curvature = self.ridge * self.xp.sum(GD * D, axis=0)
        eta = self.loss.step(self.xp, at.F, FD, self.Y, (slope, curvature))
        return self._at(at.u + eta * D, at.F + eta * FD, at.Gu + eta * GD)

    def _at(self, u: Array, F: Array, Gu: Array) -> Point:
        value, E = self.loss.at(self.xp, F, self.Y)
        self.passes += 1
        g = self.loss.centred(self.xp, self.backend.matmul(self.A.T, E)) + self.ridge * Gu
        if self.ridge > 0:
            value += 0.5 * self.ridge * float(self.xp.sum(u * Gu))  # synchronize!
        return Point(u, F, Gu, value, E, g)

    def gram(self, weights: Array | None = None) -> Array:
        """A^T diag(weights) A."""
        n, r = self.A.shape
        G, step = self.xp.zeros((r, r)), max(1, _CHUNK_BYTES // (8 * max(r, 1)))
        if weights is None:
            self.backend.add_gram(G, self.A)
            return G
        roots = self.xp.sqrt(weights)[:, None]
        for i in range(0, n, step):
            self.backend.add_gram(G, self.A[i : i + step] * roots[i : i + step])
        return G

    def duality_gap(self, point: Point) -> float:
        """A bound of objective - optimum by strong convexity; inf without a ridge."""
        if self.ridge == 0:
            return math.inf
        size = norm(self.metric.outer(point.g)) + self._rounding(point)
        return size**2 / (2 * self.ridge)

    def forward_rounding(self, point: Point) -> float:
        """A bound of what float64 may have done to F and E."""
        rows = self.xp.sqrt((point.u * point.u).sum(axis=1))
        terms = min(norm(self.columns) * norm(rows), float((self.columns * rows).sum()))
        return _UNIT * ((self.A.shape[1] + 2) * terms + 4 * (norm(point.F) + norm(self.Y)))

    def objective_error(self, point: Point) -> float:
        """A bound of what float64 may have done to the objective."""
        off = norm(point.E) * self.forward_rounding(point) + self.loss.rounding(point.F)
        return off + 8 * _UNIT * abs(point.objective)

    def _rounding(self, point: Point) -> float:
        """The same for the gradient with respect to W."""
        forward = self.A_norm * self.forward_rounding(point)
        adjoint = (self.A.shape[0] + 2) * _UNIT * norm(point.E) * norm(self.columns)
        G_terms = 1 if self.metric.G is None or self.metric.G.ndim == 1 else self.A.shape[1]
        ridge = (G_terms + 2) * _UNIT * self.ridge * norm(point.Gu)
        return self.stretch * (forward + adjoint + ridge)


def minimise(
    backend: Backend,
    loss: Loss,
    A: Array,
    Y: Array,
    ridge: float = 0.0,
    metric: Metric | None = None,
    *,
    goal: float = 1e-7,
    max_steps: int = 2000,
    start: Array | None = None,
    factor: Factor | None = None,
    memory_limit: int | None = None,
    callback: Callable[[dict[str, Any]], None] | None = None,
) -> DenseFit:
    """Minimise loss(A u) + ridge/2 <u, G u> over u.

    Parameters
    ----------
    backend : Backend
    loss : Loss
        One of `herta_gpu.losses.LOSSES`.
    A : (n_train, r) float64 array of the backend
    Y : (n_train, c) float64 array of the backend
    ridge : float
    metric : Metric
        G; None is the identity.
    goal : float
        Stop once the gap is proven to be at most goal * objective.
    max_steps : int
        Of cross entropy; MSE takes none but refinements.
    start : (r, c) array
        Where to begin; 0 if None.
    factor : Factor
        C with C C^T = (A^T A + ridge G)^-1, for MSE; where it cuts directions, the optimum is the
        one over the others.  Made here if None.
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
    >>> fit = minimise(get_backend("cpu"), LOSSES["ce"], A, Y, ridge=0.1)
    >>> fit.status, bool(fit.gap <= 1e-7 * fit.objective)
    ('certified', True)
    """
    metric = metric or Metric(backend)
    problem = DenseProblem(backend, loss, A, Y, ridge, metric)
    if A.shape[0] < A.shape[1] and factor is None:
        return _in_row_space(problem, goal, max_steps, start, memory_limit, callback)
    if loss.quadratic:
        return _least_squares(problem, goal, start, factor, callback)
    return _Descent(problem, goal, max_steps, callback).run(problem.start(start))


def row_space(
    backend: Backend, A: Array, ridge: float, metric: Metric
) -> tuple[Array, Callable[[Array], Array], Callable[[Array], Array]]:
    """(T, lift, lower): the same problem in as few coordinates as A has rows.

    loss(A u) + ridge/2 <u, G u> is smallest at some u = lift(t), where it is
    loss(T t) + ridge/2 ||t||^2; lower(u) is the nearest t.  With G = K^-T K^-1 and u = K v the
    problem has the rows A K and the ridge of the identity; directions of v that no row has would
    only add to the ridge term.  Without a ridge they have no effect at all, and neither has G.
    """
    plain = metric if ridge > 0 else Metric(backend)
    B = plain.rows(A)
    if ridge > 0:
        V, R = backend.xp.linalg.qr(B.T)
        T = backend.xp.ascontiguousarray(R.T)
    else:
        V, _ = backend.row_space(B, ROW_CUT)
        T = backend.matmul(B, V)

    def lift(t: Array) -> Array:
        return plain.lift(backend.matmul(V, t))

    def lower(u: Array) -> Array:
        return backend.matmul(V.T, plain.lower(u))

    return T, lift, lower


def _in_row_space(
    whole: DenseProblem,
    goal: float,
    max_steps: int,
    start: Array | None,
    memory_limit: int | None,
    callback: Callable[[dict[str, Any]], None] | None,
) -> DenseFit:
    """Fewer rows than columns: train where the rows are, measure in the whole space."""
    backend, ridge = whole.backend, whole.ridge
    T, lift, lower = row_space(backend, whole.A, ridge, whole.metric)
    fit = minimise(
        backend,
        whole.loss,
        T,
        whole.Y,
        ridge,
        goal=0.5 * goal,  # what rounding adds on the way back
        max_steps=max_steps,
        start=None if start is None else lower(start),
        memory_limit=memory_limit,
        callback=callback,
    )
    point = whole.start(lift(fit.u))
    gap = whole.duality_gap(point)
    if ridge == 0:
        gap = fit.gap
    fit.u, fit.objective, fit.gradient, fit.gap = point.u, point.objective, point.g, gap
    fit.objective_error = whole.objective_error(point)
    if fit.status == "certified" and not gap <= goal * point.objective:
        fit.status = "stagnated"
    fit.passes += whole.passes
    return fit


def _least_squares(
    problem: DenseProblem,
    goal: float,
    start: Array | None,
    factor: Factor | None,
    callback: Callable[[dict[str, Any]], None] | None,
) -> DenseFit:
    """MSE: u = P^-1 A^T Y, refined until the gradient is rounding."""
    history: list[dict[str, Any]] = []
    exact = factor is None or factor.slack < 0.1
    if factor is None:
        P = problem.gram()
        problem.metric.add_to(P, problem.ridge)
        factor, exact = _factor(problem.backend, P, problem.ridge)
    point = problem.start(start)
    best = math.inf
    for step in range(_REFINEMENTS + 1):
        ahead = problem.again(problem.move(point, -factor.half(factor.half_T(point.g))))
        size = norm(factor.half_T(ahead.g))
        if not size < best:
            break
        shrunk, best, point = size / best, size, ahead
        gap = _quadratic_gap(problem, point, factor, size, exact)
        _record(history, step + 1, point, gap, problem.passes, callback)
        if shrunk > 0.5:
            break
    status = "certified" if gap <= goal * point.objective else "stagnated"
    return _fit(problem, point, best, gap, len(history), status, history)


def _quadratic_gap(
    problem: DenseProblem, point: Point, factor: Factor, size: float, exact: bool
) -> float:
    """1/2 <g, P^-1 g>, or by duality where P is not the Hessian."""
    gap = problem.duality_gap(point)
    if exact:
        rounding = problem.forward_rounding(point)  # ||A C|| <= 1
        rows = (problem.A.shape[0] + 2) * _UNIT * norm(point.E) * problem.columns
        gap = min(gap, 0.5 * (size + rounding + factor.amplified(rows)) ** 2)
    return gap


class _Descent:
    """L-BFGS for cross entropy."""

    def __init__(
        self,
        problem: DenseProblem,
        goal: float,
        max_steps: int,
        callback: Callable[[dict[str, Any]], None] | None,
    ) -> None:
        self.problem, self.goal, self.max_steps, self.callback = problem, goal, max_steps, callback
        self.backend, self.xp, self.loss = problem.backend, problem.xp, problem.loss
        self.lbfgs = LBFGS(self.xp, min(_PAIRS, problem.A.shape[0] // 4))
        self.history: list[dict[str, Any]] = []
        self.curvature = math.nan  # of the rows when P was factored
        self.at_zero = self.loss.value(self.xp, self.xp.zeros_like(problem.Y), problem.Y)

    def run(self, point: Point) -> DenseFit:
        problem, status, fresh = self.problem, "max_iter", True
        for step in range(self.max_steps + 1):
            self._follow(point)
            gap = problem.duality_gap(point)
            size = norm(self.factor.half_T(point.g))
            found = self._status(point, gap, size)
            if found and not fresh:  # steps add to F: what they rounded must not decide
                point, fresh = problem.again(point), True
                gap, size = problem.duality_gap(point), norm(self.factor.half_T(point.g))
                found = self._status(point, gap, size)
            _record(self.history, step, point, gap, problem.passes, self.callback)
            if found or step == self.max_steps:
                status = found or status
                break
            ahead = self._step(point)
            if not ahead.objective < point.objective:
                if fresh and not self.lbfgs.pairs:
                    status = "stagnated"
                    break
                self.lbfgs.forget()
                point, fresh = problem.again(point), True
                continue
            point, fresh = ahead, False
        return _fit(problem, point, size, gap, step, status, self.history)

    def _step(self, point: Point) -> Point:
        D = self.lbfgs.direction(point.u, point.g, self._inverse, self.backend.matmul)
        if not float(self.xp.sum(D * point.g)) < 0:  # synchronize!
            self.lbfgs.forget()
            D = -self._inverse(point.g)
        return self.problem.move(point, D)

    def _inverse(self, g: Array) -> Array:
        return self.factor.half(self.factor.half_T(g))

    def _follow(self, point: Point) -> None:
        """Factor P again once the rows' curvature has changed."""
        weights = self.loss.row_curvature(self.xp, point.F)
        now = float(weights.sum())  # synchronize!
        if self.curvature / _STALE < now < self.curvature * _STALE:
            return
        self.curvature = now
        P = self.problem.gram(weights)
        self.problem.metric.add_to(P, self.problem.ridge)
        self.factor, _ = _factor(self.backend, P, self.problem.ridge)

    def _status(self, point: Point, gap: float, size: float) -> str:
        """The word for having arrived, or nothing."""
        if gap <= self.goal * point.objective:
            return "certified"
        if self.problem.ridge > 0:
            return ""
        if point.objective <= self.goal * self.at_zero:
            return "converged"  # no objective is below 0
        losses = [h["objective"] for h in self.history[-4:]]
        settled = len(losses) == 4 and losses[0] - point.objective <= 0.3 * self.goal * losses[0]
        return "converged" if settled and size**2 <= self.goal * point.objective else ""


def _factor(backend: Backend, P: Array, ridge: float) -> tuple[Factor, bool]:
    """(C with C C^T = P^-1, whether nothing had to be added to P).

    Without a ridge, directions that P does not see are cut.
    """
    xp, r = backend.xp, P.shape[0]
    size = xp.sqrt(P.diagonal())
    scale = 1 / xp.where(size > 0, size, 1.0)
    P = scale[:, None] * P * scale
    if ridge == 0:
        factor = DenseGram(backend, P, xp.ones(r), damped=False).factor(1.0, 0.0, False)
        return Scaled(scale, factor), factor.slack < 0.1
    diagonal, added, more = xp.arange(r), 0.0, 4 * (r + 2) * r * _UNIT
    L = backend.cholesky(P)
    while L is None:
        P[diagonal, diagonal] += more
        added, more = added + more, 4 * more
        L = backend.cholesky(P)

    def inverse(v: Array) -> Array:
        return backend.solve_triangular(L, backend.solve_triangular(L, v), trans=True)

    smallest = 0.5 / _growth(xp, inverse, r)
    return Scaled(scale, Cholesky(backend, L, smallest, 0.0)), added == 0


def _growth(xp: Any, multiply: Callable[[Array], Array], r: int) -> float:
    """The largest eigenvalue of a symmetric operator, to some per cent."""
    v = xp.asarray(np.random.default_rng(0).standard_normal((r, 1)))
    size = xp.ones(())
    for _ in range(_POWER_STEPS):
        v = v / xp.where(size > 0, size, 1.0)
        v = multiply(v)
        size = xp.sqrt((v * v).sum())
    return float(size)  # synchronize!


def _size(backend: Backend, M: Array) -> float:
    """||M||, to some per cent."""
    if M.size == 0:
        return 0.0

    def squared(v: Array) -> Array:
        return backend.matmul(M.T, backend.matmul(M, v))

    return 1.1 * _growth(backend.xp, squared, M.shape[1]) ** 0.5


def _record(
    history: list[dict[str, Any]],
    step: int,
    point: Point,
    gap: float,
    passes: int,
    callback: Callable[[dict[str, Any]], None] | None,
) -> None:
    history.append({"step": step, "objective": point.objective, "gap": gap, "passes": passes})
    if callback is not None:
        callback(history[-1])


def _fit(
    problem: DenseProblem,
    point: Point,
    size: float,
    gap: float,
    steps: int,
    status: str,
    history: list[dict[str, Any]],
) -> DenseFit:
    return DenseFit(
        u=point.u,
        objective=point.objective,
        objective_error=problem.objective_error(point),
        gradient=point.g,
        size=size,
        gap=gap,
        steps=steps,
        passes=problem.passes,
        status=status,
        history=history,
    )
