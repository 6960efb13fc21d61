"""Cross entropy on stored rows: min over u of loss(A u) + ridge/2 ||C0 u||^2 for a dense A.

The strategy "direct" keeps the training rows of Q as A (n_train x r), in coordinates u with
W = C0 u, and needs no solve from there on.  L-BFGS takes the steps; its first guess of the inverse
Hessian is P^-1, P = A^T A + ridge G with each row of A weighted by its curvature and G = C0^T C0,
and improves when it must.  A "pass" is a product with A or A^T.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

from herta_gpu.backends.base import Array, Backend, norm, unit_roundoff
from herta_gpu.coordinates import Metric
from herta_gpu.factors import ROW_CUT, spectral_norm
from herta_gpu.hessians import (
    ClassBlocks,
    ColumnBlocks,
    Hessian,
    RankOnes,
    ScaledGram,
    active_rows,
    rank_ones,
)
from herta_gpu.losses import Loss
from herta_gpu.optimizers import LBFGS, LBFGS_MEMORY

_UNIT = unit_roundoff()
_PAIRS = 300  # of L-BFGS; a quarter of the rows where that is less
_STALE = 2.0  # change of the mean curvature after which P is factored again
_FLAT = 0.1  # share of the slope at the start of a step that may be left at its end
_WHOLE_SIZE = 8000  # numbers in u up to which the whole Hessian of cross entropy is worth having
_WATCHED = 10  # steps after which their progress says something
_STUCK = 50  # steps without progress that are the end
_NOISE = 1e-12  # relative, of objectives that are taken for equal

History = list[dict[str, Any]]
Callback = Callable[[dict[str, Any]], None]


@dataclass(frozen=True)
class DenseFit:
    """What training on stored rows found."""

    u: Array  # r x c
    objective: float  # loss + ridge/2 <u, G u>
    objective_error: float  # what rounding may have done to it
    gradient: Array  # r x c, with respect to u, in float64
    gap: float  # bound of objective - optimum, rounding included; without a ridge often no better
    #              than the objective, since none is below 0
    steps: int
    passes: int  # products with A or A^T
    status: str  # "certified" (gap <= goal * objective), "converged", "stagnated" or "max_iter"
    history: History  # step, objective, gap, passes


@dataclass
class Point:
    """Everything known at one u."""

    u: Array
    F: Array  # A u
    Gu: Array  # G u
    objective: float
    E: Array  # the gradient of the loss with respect to F
    g: Array  # the gradient of the objective with respect to u
    rounding: Array  # a bound of what float64 may have done to F, a number on the device


class DenseProblem:
    """Objective, gradient, exact steps and the bound of the gap, with passes counted."""

    def __init__(
        self,
        backend: Backend,
        loss: Loss,
        A: Array,
        Y: Array,
        ridge: float,
        metric: Metric | None = None,
        gram: Array | None = None,
    ) -> None:
        """`metric` is G (None: the identity); `gram` is A^T A as Hessians see A, if known."""
        self.gram = gram
        self.backend, self.xp, self.loss, self.A, self.Y = backend, backend.xp, loss, A, Y
        self.ridge, self.metric, self.passes = ridge, metric or Metric(backend), 0
        mean = loss.mean(self.xp, A) if loss.intercept else None
        self.seen = loss.scale_rows(self.xp, A, slice(None), mean)  # A, as Hessians see it
        self.columns = self.xp.sqrt((A * A).sum(axis=0))  # norms
        self.at_zero = loss.value(self.xp, self.xp.zeros_like(Y), Y)

    @cached_property
    def amplification(self) -> float:
        """By how much an error of the gradient may grow on the way to that with respect to W."""
        return self.metric.stretch() if self.ridge > 0 else math.inf

    @cached_property
    def A_norm(self) -> float:
        if self.gram is None or not self.loss.plain:
            return spectral_norm(self.backend, self.A)
        return (1.1 * spectral_norm(self.backend, self.gram)) ** 0.5  # as far above as the other

    def start(self, u: Array | None) -> Point:
        """The point of u (None: 0)."""
        F, rounding = self.xp.zeros_like(self.Y), self.xp.zeros(())
        if u is None:
            u = self.xp.zeros((self.A.shape[1], self.Y.shape[1]))
        else:
            self.passes += 1
            F, rounding = self.backend.matmul(self.A, u), self._product_rounding(u)
        return self._at(u, F, rounding, self._values(u, F))

    def move(self, at: Point, D: Array) -> Point:
        """The minimiser along D, or a point near it that is lower than the start, too."""
        FD, GD = self.backend.matmul(self.A, D), self.metric.times(D)
        self.passes += 1
        slope = self.ridge * self.xp.sum(at.Gu * D, axis=0)
        curvature = self.ridge * self.xp.sum(GD * D, axis=0)
        enough = _FLAT * abs(float(self.xp.sum(at.g * D)))  # synchronize!
        for flat in (enough, 0.0):
            eta = self.loss.step(self.xp, at.F, FD, self.Y, (slope, curvature), flat)
            u, F = at.u + eta * D, at.F + eta * FD
            values = self._values(u, F)
            if values[0] <= at.objective:
                break  # a slight slope may go on for long behind a narrow valley: not otherwise
        added = self._product_rounding(eta * D) + 2 * _UNIT * self.xp.sqrt((F * F).sum())
        return self._at(u, F, at.rounding + added, values)

    def _values(self, u: Array, F: Array) -> tuple[float, Array, Array]:
        """(objective, gradient of the loss with respect to F, G u)."""
        Gu, (value, E) = self.metric.times(u), self.loss.at(self.xp, F, self.Y)
        if self.ridge > 0:
            value += 0.5 * self.ridge * float(self.xp.sum(u * Gu))  # synchronize!
        return value, E, Gu

    def _at(self, u: Array, F: Array, rounding: Array, values: tuple[float, Array, Array]) -> Point:
        objective, E, Gu = values
        self.passes += 1
        g = self.loss.centre(self.xp, self.backend.matmul(self.A.T, E)) + self.ridge * Gu
        return Point(u, F, Gu, objective, E, g, rounding)

    def _product_rounding(self, u: Array) -> Array:
        """A bound of what float64 may have done to A u."""
        xp, rows = self.xp, self.xp.sqrt((u * u).sum(axis=1))
        whole = xp.sqrt((self.columns**2).sum() * (rows**2).sum())
        return (self.A.shape[1] + 2) * _UNIT * xp.minimum(whole, (self.columns * rows).sum())

    def gap(self, point: Point, rounding: bool = True) -> float:
        """A bound of objective - optimum, by strong convexity or because nothing is below 0."""
        if self.ridge == 0:
            return point.objective + (self.objective_error(point) if rounding else 0.0)
        size = norm(self.metric.outer(point.g))
        if not rounding:
            return size**2 / (2 * self.ridge)
        least = (size + self._rounding(point)) ** 2 / (2 * self.ridge)
        return min(least, point.objective + self.objective_error(point))

    def forward_rounding(self, point: Point) -> float:
        """A bound of what float64 may have done to F and E."""
        own = 4 * _UNIT * (norm(point.F) + norm(self.Y))
        return float(point.rounding) + own  # synchronize!

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
        return self.amplification * (forward + adjoint + ridge)

    def record(self, history: History, point: Point, gap: float, callback: Callback | None) -> None:
        """One line of the history, told to the callback."""
        found = {"objective": point.objective, "gap": gap, "passes": self.passes}
        found["grad_norm"] = norm(self.metric.outer(point.g))
        history.append({"step": len(history), **found})
        if callback is not None:
            callback(history[-1])


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
    if problem.A.shape[0] < problem.A.shape[1]:
        return _in_row_space(problem, goal, max_steps, start, memory_limit, callback)
    limit = problem.backend.memory_available() if memory_limit is None else memory_limit
    return Descent(problem, goal, max_steps, limit, callback).run(problem.start(start))


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
    callback: Callback | None,
) -> DenseFit:
    """Fewer rows than columns: train where the rows are, measure in the whole space."""
    backend, ridge = whole.backend, whole.ridge
    T, lift, lower = row_space(backend, whole.A, ridge, whole.metric)
    inner = DenseProblem(backend, whole.loss, T, whole.Y, ridge)
    start = None if start is None else lower(start)
    # Half of the goal is for what rounding adds on the way back.
    fit = minimise(inner, 0.5 * goal, max_steps, start, memory_limit, callback)
    point = whole.start(lift(fit.u))
    gap = whole.gap(point) if ridge > 0 else fit.gap
    missed = fit.status == "certified" and not gap <= goal * point.objective
    return replace(
        fit,
        u=point.u,
        objective=point.objective,
        objective_error=whole.objective_error(point),
        gradient=point.g,
        gap=gap,
        passes=fit.passes + whole.passes,
        status="stagnated" if missed else fit.status,
    )


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
        self.hessian: Hessian = _Nothing()
        self.least: list[float] = []  # the smallest gap so far, at each step with this Hessian

    def run(self, point: Point) -> DenseFit:
        problem, status = self.problem, "max_iter"
        for step in range(self.max_steps + 1):
            self._follow(point)
            point, gap, found = self._arrived(point)
            problem.record(self.history, point, gap, self.callback)
            if found or step == self.max_steps:
                status = found or status
                break
            ahead = self._step(point)
            if self._not_above(ahead, point):
                point = ahead
            elif self.lbfgs.pairs:
                self.lbfgs.forget()
                point = problem.start(point.u)
            else:
                status = "stagnated"
                break
        return DenseFit(
            u=point.u,
            objective=point.objective,
            objective_error=problem.objective_error(point),
            gradient=point.g,
            gap=problem.gap(point),
            steps=self.history[-1]["step"],
            passes=problem.passes,
            status=status,
            history=self.history,
        )

    def _arrived(self, point: Point) -> tuple[Point, float, str]:
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

    def _step(self, point: Point) -> Point:
        scaled = not self.hessian.exact
        arguments = (point.u, point.g, self.hessian.inverse, self.backend.matmul, scaled)
        D = self.lbfgs.direction(*arguments)
        if not float(self.xp.sum(D * point.g)) < 0:  # synchronize!
            self.lbfgs.forget()
            D = self.lbfgs.direction(*arguments)
        return self.problem.move(point, D)

    def _not_above(self, ahead: Point, point: Point) -> bool:
        """Whether a step went down, as far as rounding can tell."""
        rise = ahead.objective - point.objective
        return rise <= _NOISE * abs(point.objective) or rise <= self.loss.rounding(point.F)

    def _size(self, point: Point) -> float:
        """||H^-1/2 gradient|| with the present guess H of the Hessian."""
        square = float(self.xp.sum(point.g * self.hessian.inverse(point.g)))  # synchronize!
        return max(0.0, square) ** 0.5

    def _status(self, point: Point, gap: float) -> str:
        """The word for having arrived, or nothing."""
        if gap <= self.goal * point.objective:
            return "certified"
        if point.objective <= self.goal * (self.goal if self.problem.ridge else 1) * (
            self.problem.at_zero
        ):
            return "converged"  # an optimum of about 0 has no relative gap
        losses = [h["objective"] for h in self.history]
        if self.problem.ridge > 0:
            gaps = [h["gap"] for h in self.history]
            idle = len(gaps) > _STUCK and min(gaps[-_STUCK:]) >= min(gaps[:-_STUCK])
            idle = idle and losses[-_STUCK] - losses[-1] <= 100 * _NOISE * abs(losses[-1])
            return "stagnated" if idle else ""
        settled = len(losses) > 3 and losses[-4] - point.objective <= 0.3 * self.goal * losses[-4]
        near = settled and self._size(point) ** 2 <= self.goal * point.objective
        return "converged" if near else ""

    def _follow(self, point: Point) -> None:
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
        if not (near or self.hessian.exact):
            self.curvature = now
            known = (problem.ridge, problem.metric, problem.gram)
            self.hessian = ScaledGram(self.backend, problem.seen, weights, *known)

    def _steps_left(self, point: Point) -> float:
        """How many more steps like the last ones there would be; 0 where that is not asked."""
        gap = self.problem.gap(point, rounding=False)
        if self.problem.ridge == 0:
            gap = self._size(point) ** 2
        self.least.append(min([gap, *self.least[-1:]]))
        taken, goal, now = len(self.least), self.goal * point.objective, self.least[-1]
        if taken < _WATCHED or taken % 5 or not now > goal > 0:
            return 0.0
        window = taken // 2
        rate = math.log(self.least[-window - 1] / now) / window
        return math.log(now / goal) / rate if rate > 0 else math.inf

    def _whole(self, point: Point, weights: Array, steps: float) -> Hessian | None:
        """The Hessian itself, where it costs less than so many steps and fits the memory."""
        problem, (n, c), r = self.problem, self.problem.Y.shape, self.problem.A.shape[1]
        # A product with few columns runs at about a quarter of the speed of a Gram matrix.
        a_step = 16.0 * n * r * c + 32.0 * self.lbfgs.pairs * r * c + 400.0 * n * c + 2e7
        budget = steps * a_step
        if (c == 1 and not self.loss.separable) or ScaledGram.cost(n, r) > budget:
            return None
        active = active_rows(self.xp, weights)
        blocks = ClassBlocks.cost(active.shape[0], r, c - 1)
        memory = ClassBlocks.memory(active.shape[0], r, c - 1)
        if r * c > _WHOLE_SIZE or memory > self.memory_limit:
            blocks = math.inf
        arguments = (problem.ridge, problem.metric)
        S = self.loss.probabilities(self.xp, point.E, problem.Y)
        if self.loss.separable:
            cost = ColumnBlocks.cost(n, r, c)
            if cost > budget or ColumnBlocks.memory(n, r, c) > self.memory_limit:
                return None
            return ColumnBlocks(self.backend, problem.seen, S, *arguments)
        if problem.ridge > 0:
            most = _most_terms(n, r, min(budget, blocks), self.memory_limit)
            terms = rank_ones(self.xp, S, most) if most else None
            if terms is not None:
                return RankOnes(self.backend, problem.seen, terms, *arguments)
        if blocks > budget:
            return None
        return ClassBlocks(self.backend, problem.seen, S, *arguments, active)


class _Nothing:
    """No guess of the Hessian yet."""

    exact = False

    def inverse(self, g: Array) -> Array:
        return g


def _most_terms(n: int, r: int, cost: float, memory: int) -> int:
    """How many terms a `RankOnes` may have, in hundreds."""
    N = 0
    while N < _WHOLE_SIZE:
        if RankOnes.cost(n, r, N + 100) > cost or RankOnes.memory(r, N + 100) > memory:
            break
        N += 100
    return N
