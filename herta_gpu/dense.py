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
from herta_gpu.factors import Factor
from herta_gpu.grams import ROW_CUT
from herta_gpu.hessians import (
    ClassBlocks,
    Hessian,
    Metric,
    RankOnes,
    ScaledGram,
    active_rows,
    factor_of,
    rank_ones,
    spectral_norm,
    weighted_gram,
)
from herta_gpu.losses import Loss
from herta_gpu.optimizers import LBFGS

_UNIT = 0.5 * float(np.finfo(np.float64).eps)  # what one operation rounds
_PAIRS = 300  # of L-BFGS; a quarter of the rows where that is less
_STALE = 2.0  # change of the mean curvature after which P is factored again
_FLAT = 0.1  # share of the slope at the start of a step that may be left at its end
_WHOLE_SIZE = 8000  # numbers in u up to which the whole Hessian of cross entropy is worth having
_WATCHED = 10  # steps after which their progress says something
_STUCK = 50  # steps without progress that are the end
_REFINEMENTS = 3  # of the solution of MSE


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
        self.A_norm = spectral_norm(backend, A)

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
        enough = _FLAT * abs(float(self.xp.sum(at.g * D)))  # synchronize!
        eta = self.loss.step(self.xp, at.F, FD, self.Y, (slope, curvature), enough)
        return self._at(at.u + eta * D, at.F + eta * FD, at.Gu + eta * GD)

    def _at(self, u: Array, F: Array, Gu: Array) -> Point:
        value, E = self.loss.at(self.xp, F, self.Y)
        self.passes += 1
        g = self.loss.centred(self.xp, self.backend.matmul(self.A.T, E)) + self.ridge * Gu
        if self.ridge > 0:
            value += 0.5 * self.ridge * float(self.xp.sum(u * Gu))  # synchronize!
        return Point(u, F, Gu, value, E, g)

    def duality_gap(self, point: Point, rounding: bool = True) -> float:
        """A bound of objective - optimum by strong convexity; inf without a ridge."""
        if self.ridge == 0:
            return math.inf
        size = norm(self.metric.outer(point.g)) + (self._rounding(point) if rounding else 0.0)
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
    limit = backend.memory_available() if memory_limit is None else memory_limit
    return _Descent(problem, goal, max_steps, limit, callback).run(problem.start(start))


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
        P = weighted_gram(problem.backend, problem.A)
        problem.metric.add_to(P, problem.ridge)
        factor, exact = factor_of(problem.backend, P, problem.ridge, measured=True)
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
    """L-BFGS for cross entropy, from a guess of the Hessian that becomes better when it must."""

    def __init__(
        self,
        problem: DenseProblem,
        goal: float,
        max_steps: int,
        memory_limit: int,
        callback: Callable[[dict[str, Any]], None] | None,
    ) -> None:
        self.problem, self.goal, self.max_steps, self.callback = problem, goal, max_steps, callback
        self.backend, self.xp, self.loss = problem.backend, problem.xp, problem.loss
        self.memory_limit = memory_limit
        self.lbfgs = LBFGS(self.xp, min(_PAIRS, problem.A.shape[0] // 4))
        self.history: list[dict[str, Any]] = []
        self.at_zero = self.loss.value(self.xp, self.xp.zeros_like(problem.Y), problem.Y)
        self.hessian: Hessian | None = None
        self.curvature = 0.0  # of all rows when P was factored
        self.least: list[float] = []  # the smallest gap so far, at each step since the Hessian

    def run(self, point: Point) -> DenseFit:
        problem, status, fresh = self.problem, "max_iter", True
        for step in range(self.max_steps + 1):
            self._follow(point)
            gap = problem.duality_gap(point, rounding=False)
            found = self._status(point, gap)
            if found:
                if not fresh:  # steps add to F: what they rounded must not decide
                    point, fresh = problem.again(point), True
                gap = problem.duality_gap(point)
                found = self._status(point, gap)
            _record(self.history, step, point, gap, problem.passes, self.callback)
            if found or step == self.max_steps:
                status = found or status
                break
            ahead = self._step(point)
            if not ahead.objective <= point.objective + 1e-12 * abs(point.objective):
                if fresh and not self.lbfgs.pairs:
                    status = "stagnated"
                    break
                self.lbfgs.forget()
                point, fresh = problem.again(point), True
                continue
            point, fresh = ahead, False
        if not fresh:
            point = problem.again(point)
        gap, size = problem.duality_gap(point), self._size(point)
        return _fit(problem, point, size, gap, step, status, self.history)

    def _step(self, point: Point) -> Point:
        assert self.hessian is not None
        inverse = self.hessian.inverse
        D = self.lbfgs.direction(point.u, point.g, inverse, self.backend.matmul)
        if not float(self.xp.sum(D * point.g)) < 0:  # synchronize!
            self.lbfgs.forget()
            D = self.lbfgs.direction(point.u, point.g, inverse, self.backend.matmul)
        return self.problem.move(point, D)

    def _size(self, point: Point) -> float:
        """||H^-1/2 gradient|| with the present guess H of the Hessian."""
        assert self.hessian is not None
        return max(0.0, float(self.xp.sum(point.g * self.hessian.inverse(point.g)))) ** 0.5

    def _status(self, point: Point, gap: float) -> str:
        """The word for having arrived, or nothing."""
        if gap <= self.goal * point.objective:
            return "certified"
        losses = [h["objective"] for h in self.history]
        if self.problem.ridge > 0:
            gaps = [h["gap"] for h in self.history]
            idle = len(gaps) > _STUCK and min(gaps[-_STUCK:]) >= min(gaps[:-_STUCK])
            idle = idle and losses[-_STUCK] - losses[-1] <= 1e-10 * abs(losses[-1])
            return "stagnated" if idle else ""
        if point.objective <= self.goal * self.at_zero:
            return "converged"  # no objective is below 0
        settled = len(losses) > 3 and losses[-4] - point.objective <= 0.3 * self.goal * losses[-4]
        near = settled and self._size(point) ** 2 <= self.goal * point.objective
        return "converged" if near else ""

    def _follow(self, point: Point) -> None:
        """Make P anew once the rows' curvature has changed, the whole Hessian once that pays."""
        weights = self.loss.row_curvature(self.xp, point.E, self.problem.Y)
        whole = self._whole(point, weights) if self._slow(point) else None
        if whole is not None:
            self.hessian, self.least = whole, []
            self.lbfgs.forget()  # it knows better than any pair
            return
        now = float(weights.sum())  # synchronize!
        near = self.curvature / _STALE <= now <= self.curvature * _STALE
        if self.hessian is None or not (self.hessian.exact or near):
            problem, self.curvature = self.problem, now
            self.hessian = ScaledGram(
                self.backend, problem.A, weights, problem.ridge, problem.metric
            )

    def _slow(self, point: Point) -> bool:
        """Note how the gap shrinks; whether more steps are likely than were taken so far."""
        problem = self.problem
        gap = problem.duality_gap(point, rounding=False)
        if problem.ridge == 0 and self.hessian is not None:
            gap = self._size(point) ** 2
        self.least.append(min(gap, *self.least[-1:]) if self.least else gap)
        taken = len(self.least)
        if taken < _WATCHED or taken % 5:
            return False
        window = taken // 2
        before, now, goal = self.least[-window - 1], self.least[-1], self.goal * point.objective
        if not now > goal:
            return False
        rate = math.log(before / now) / window
        self.left = math.log(now / goal) / rate if rate > 0 else math.inf
        return True

    def _whole(self, point: Point, weights: Array) -> Hessian | None:
        """The Hessian itself where it costs less than the steps that are left, and were taken."""
        problem, xp, (n, c) = self.problem, self.xp, self.problem.Y.shape
        r, m, taken = problem.A.shape[1], c - 1, len(self.least)
        # A product with few columns runs at about a quarter of the speed of a Gram matrix.
        a_step = 16.0 * n * r * c + 32.0 * self.lbfgs.pairs * r * c + 400.0 * n * c + 2e7
        budget = a_step * min(2 * taken, self.left)
        if ScaledGram.cost(n, r) > budget or m == 0:
            return None
        rows = active_rows(xp, weights)
        blocks = ClassBlocks.cost(rows.shape[0], r, m)
        if r * c > _WHOLE_SIZE or ClassBlocks.memory(rows.shape[0], r, m) > self.memory_limit:
            blocks = math.inf
        if problem.ridge > 0:
            most = _most_terms(n, r, min(budget, blocks), self.memory_limit)
            terms = rank_ones(xp, point.E + problem.Y, most)
            if terms is not None:
                return RankOnes(self.backend, problem.A, terms, problem.ridge, problem.metric)
        if blocks > budget:
            return None
        S = point.E + problem.Y
        return ClassBlocks(self.backend, problem.A, S, problem.ridge, problem.metric, rows)


def _most_terms(n: int, r: int, cost: float, memory: int) -> int:
    """How many terms a `RankOnes` may have."""
    N = 0
    while N < _WHOLE_SIZE:
        if RankOnes.cost(n, r, N + 100) > cost or RankOnes.memory(r, N + 100) > memory:
            break
        N += 100
    return N


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
