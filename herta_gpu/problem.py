"""The model as a linear map, and the training problem through it.

Z*(W) = H^-1 X W is linear in W, so training needs two products only: A W and A^T E with
A = M H^-1 X (M picks the training rows).  `UnfoldedMap` computes them by two block solves with the
full graph, as the loop of Algorithm 1 does; `DenseMap` multiplies with a stored A.  `DenseProblem`
is min over u of loss(A u) + ridge/2 ||C0 u||^2 for a stored A, in coordinates u with W = C0 u; a
"pass" is a product with A or A^T.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Protocol

import numpy as np

from herta_gpu.backends.base import Array, Backend, norm, unit_roundoff
from herta_gpu.coordinates import Metric
from herta_gpu.factors import Factor, spectral_norm
from herta_gpu.features import Features
from herta_gpu.graph import Graph
from herta_gpu.laplacian import RegularizedLaplacian, block_cg
from herta_gpu.losses import LOSSES, Loss

_UNIT = unit_roundoff()
_LEAST_TOL = 1e-14  # the tightest solve: below is rounding, even in float64
_FLAT = 0.1  # share of the slope at the start of a step that may be left at its end

History = list[dict[str, Any]]
Callback = Callable[[dict[str, Any]], None]


@dataclass
class Solved:
    """A product with A or A^T, with what its solve left over."""

    value: Array
    block: Array | None  # the n x c solution behind it (of `correct`: the residual)
    residual: float  # ||true residual||_F, measured
    iterations: int
    stagnated: bool


@dataclass
class Rounding:
    """Bounds of what float64 may have rounded away at a point, beside what was measured."""

    forward: float  # error of the residual X W - H Z, and of E
    adjoint: float  # error of the residual M^T E - H V
    transposed: Array  # (d,) row norms of what X^T V is off by


class LinearMap(Protocol):
    """A = M H^-1 X."""

    def forward(self, W: Array, tol: float) -> Solved: ...
    def rows(self, Z: Array) -> Array: ...
    def correct(self, W: Array, Z: Array, limit: float) -> Solved: ...
    def adjoint(self, E: Array, tol: float, guess: Array | None) -> Solved: ...
    def rounding(self, W: Array, Z: Array, V: Array | None) -> Rounding: ...
    def inner(self, V: Array, R: Array) -> float: ...


class UnfoldedMap:
    """A and A^T by solves with H = I + lam L_hat, on the whole graph."""

    def __init__(
        self,
        H: RegularizedLaplacian,
        X: Features,
        rows: Array,
        width: int,
        loss: Loss = LOSSES["mse"],
        systems: Sequence[RegularizedLaplacian] | None = None,
        extra: Features | None = None,
    ) -> None:
        """`loss` is what the rows are for: it knows their weights, and whether they are centred.

        `systems` are the H of several lam, whose blocks [H_1^-1 X, H_2^-1 X, ...] are solved for
        once, on stored rows; there are no products with all of them.  `extra` are further features
        beside these blocks, which no H was applied to.
        """
        self.H, self.X, self.train, self.width, self.loss = H, X, rows, width, loss
        self.systems, self.extra = systems, extra

    @property
    def blocks(self) -> int:
        """How often X counts: once for each lam."""
        return 1 if self.systems is None else len(self.systems)

    @property
    def features(self) -> int:
        """Rows of W."""
        more = 0 if self.extra is None else self.extra.shape[1]
        return self.blocks * self.X.shape[1] + more

    def X_norm(self) -> float:
        """A bound of the 2-norm of all features together, before any diffusion."""
        more = 0.0
        if self.extra is not None:
            more = self.extra.norm_bound + self.extra.off * math.sqrt(self.extra.shape[1])
        return math.hypot(math.sqrt(self.blocks) * self.X.norm_bound, more)

    def distinct_columns(self, graph: Graph) -> int:
        """How many different columns the training rows can see, zeros apart."""
        rows = self.H.backend.to_numpy(self.train)  # synchronize!
        seen = self.blocks * self.X.distinct_columns(graph.connected_to(rows))
        if self.extra is None:
            return seen
        own = np.zeros(graph.num_nodes, dtype=bool)
        own[rows] = True
        return seen + self.extra.distinct_columns(own)

    def forward(self, W: Array, tol: float) -> Solved:
        """Z = H^-1 X W (n x c), of which the training rows are A W."""
        return self._solve(self.X.times(W), tol, None)

    def outputs(self, W: Array) -> Array:
        """The training rows of the outputs of W, of all blocks, by solves to the last digit."""
        d, F = self.X.shape[1], 0.0
        for i, H in enumerate(self.systems or [self.H]):
            part = W[i * d : (i + 1) * d]
            one = UnfoldedMap(H, self.X, self.train, self.width)
            Z = self.X.times(part) if H.lam == 0 else one.forward(part, _LEAST_TOL).value
            F = F + self.rows(Z)
        return F if self.extra is None else F + self.rows(self.extra.times(W[self.blocks * d :]))

    def rows(self, Z: Array) -> Array:
        return self.H.backend.gathered(Z[self.train].astype("float64"))

    def correct(self, W: Array, Z: Array, limit: float) -> Solved:
        """Measure X W - H Z (the result's `block`); above `limit`, solve for what is missing."""
        U = self.X.times(W)
        R, size = self._left(U, Z)
        if size <= limit:
            return Solved(Z, R, size, 0, False)
        scale = self.size(Z) or 1.0
        again = self._solve(U, 0.3 * min(1.0, limit / scale), Z)
        R, size = self._left(U, again.value)
        return Solved(again.value, R, size, again.iterations, again.stagnated)

    def adjoint(self, E: Array, tol: float, guess: Array | None) -> Solved:
        """X^T H^-1 M^T E (d x c)."""
        full = self.H.backend.xp.zeros((self.H.n, E.shape[1]))
        full[self.train] = self.H.backend.own(E)
        V = self._solve(full, tol, guess)
        return Solved(
            self.X.transpose_times(V.value), V.value, V.residual, V.iterations, V.stagnated
        )

    def rounding(self, W: Array, Z: Array, V: Array | None) -> Rounding:
        assert V is not None
        transposed = self.X.transpose_rounding() * self.size(V)
        return Rounding(self.forward_rounding(W, Z), self.adjoint_rounding(V), transposed)

    def forward_rounding(self, W: Array, Z: Array) -> float:
        """How far a measured X W - H Z may be from the true one."""
        return self.X.times_rounding(W) + self.H.rounding(Z.shape[1]) * self.size(Z)

    def adjoint_rounding(self, V: Array) -> float:
        """How far a measured M^T E - H V may be from the true one."""
        return self.H.rounding(V.shape[1]) * self.size(V)

    def size(self, R: Array) -> float:
        """||R||_F without a copy of R, which is n x c."""
        squares = float(self.H.backend.column_dots(R, R).sum())  # synchronize!
        return float(self.H.backend.total(squares)) ** 0.5

    def inner(self, V: Array, R: Array) -> float:
        """<V, R> of two blocks of all rows."""
        backend = self.H.backend
        return float(backend.total(float(backend.xp.sum(V * R))))  # synchronize!

    def _left(self, U: Array, Z: Array) -> tuple[Array, float]:
        """U - H Z in float64, and its norm."""
        R, dots = self.H.residual(U, Z)
        return R, float(dots[0].sum()) ** 0.5  # synchronize!

    def _solve(self, B: Array, tol: float, guess: Array | None) -> Solved:
        xp, tol = self.H.backend.xp, max(tol, _LEAST_TOL)

        def solved(j: int) -> dict[str, Array]:
            J = slice(j, j + self.width)
            start = None if guess is None else guess[:, J]
            Z, info = block_cg(self.H, B[:, J], tol, start)
            left = float((info.residuals**2).sum())
            most = int(info.iterations.max(initial=0))
            return {"Z": Z, "about": np.array([left, most, info.status != "converged"])}

        blocks = range(0, B.shape[1], self.width)
        parts = list(self.H.backend.dealt(blocks, solved))
        Z = parts[0]["Z"] if len(parts) == 1 else xp.concatenate([p["Z"] for p in parts], axis=1)
        about = np.stack([part["about"] for part in parts])
        residual, most = float(np.sqrt(sum(about[:, 0]))), int(about[:, 1].max())
        return Solved(Z, Z, residual, most, bool(about[:, 2].any()))


class DenseMap:
    """A stored: what the strategy "direct" trains on before the true model is checked."""

    def __init__(self, A: Array, backend: Backend) -> None:
        self.A, self.backend = A.astype("float64"), backend

    def forward(self, W: Array, tol: float) -> Solved:
        return Solved(self.backend.matmul(self.A, W), None, 0.0, 0, False)

    def rows(self, Z: Array) -> Array:
        return Z

    def correct(self, W: Array, Z: Array, limit: float) -> Solved:
        return Solved(Z, None, 0.0, 0, False)

    def adjoint(self, E: Array, tol: float, guess: Array | None) -> Solved:
        return Solved(self.backend.matmul(self.A.T, E), None, 0.0, 0, False)

    def rounding(self, W: Array, Z: Array, V: Array | None) -> Rounding:
        return Rounding(0.0, 0.0, self.backend.xp.zeros(1))  # nothing is proven of this model

    def inner(self, V: Array, R: Array) -> float:
        return float(self.backend.xp.sum(V * R))  # synchronize!


@dataclass
class Point:
    """Everything known at one iterate."""

    w: Array  # preconditioned weights
    W: Array  # d x c, W = P^-1/2 w
    Z: Array  # H^-1 X W on all rows (or on the training rows of a DenseMap)
    V: Array | None  # H^-1 M^T E, E the gradient of the loss with respect to M Z
    objective: float  # loss + ridge/2 ||W||^2 at W
    objective_error: float  # it is right up to this much
    gradient: Array  # d x c, of the objective
    g: Array  # the same in preconditioned coordinates, P^-1/2 gradient
    forward_residual: float  # ||X W - H Z||_F
    adjoint_residual: float  # ||M^T E - H V||_F
    rounding: Rounding
    inner_iterations: int
    stagnated: bool  # a solve did not reach what was asked of it
    aside: float = 0.0  # what the constants of an intercept may add to the gap


@dataclass
class Problem:
    """min over W of loss(A W) + ridge/2 ||W||^2, in preconditioned coordinates."""

    map: LinearMap
    loss: Loss
    Y: Array
    ridge: float
    factor: Factor
    xp: Any
    tol: float  # relative, for inner solves; tightened when it limits the certificate
    X_norm: float = math.inf

    def point(self, w: Array, Z: Array, V: Array | None = None, spent: int = 0) -> Point:
        """Objective and gradient at w; Z must approximate H^-1 X W and is corrected if needed."""
        xp, W = self.xp, self.factor.to_weights(w)
        E = self.loss.residual(xp, self.map.rows(Z), self.Y)
        scale = norm(E)
        there = self.map.correct(W, Z, self.tol * scale)
        return self._at(w, W, there, self.tol, V, spent)

    def _at(
        self, w: Array, W: Array, there: Solved, tol: float, V: Array | None, spent: int
    ) -> Point:
        """Objective and gradient at W, where Z is known; V to `tol` from the guess given."""
        xp, rows = self.xp, self.map.rows(there.value)
        F, loss = self.loss.add_intercept(xp, rows, self.Y), self.loss.of_rows(slice(None))
        E = loss.residual(xp, F, self.Y)
        back = self.map.adjoint(E, tol, V)
        gradient = self.loss.centre(xp, back.value) + self.ridge * W
        objective = loss.value(xp, F, self.Y)
        objective += 0.5 * self.ridge * float(xp.sum(W * W))  # synchronize!
        r1, r2 = there.residual, back.residual
        rounding = self.map.rounding(W, there.value, back.block)
        # E is a difference of these; what it rounds is as large as what outputs so far off do.
        rounding.forward += 4 * _UNIT * (norm(F) + norm(self.Y)) / self.loss.steepest
        stray = self.loss.imbalance(xp, E)
        # A mean row times 1^T E, which a centred P does not see, and what E itself has lost.
        rounding.adjoint += stray + self.loss.gradient_rounding(norm(E), self.Y)
        off = norm(E) * rounding.forward + self.loss.rounding(F) + 8 * _UNIT * objective
        if there.block is not None and back.block is not None:
            # Z is off by H^-1 R, and <E, M H^-1 R> = <V, R> with V = H^-1 M^T E at hand: what is
            # left is of second order, ||r1|| ||r2|| + ||r1||^2 / 2.
            objective += self.map.inner(back.block, there.block)
        return Point(
            w=w,
            W=W,
            Z=there.value,
            V=back.block,
            objective=objective,
            objective_error=r1 * r2 + 0.5 * r1**2 + off,
            gradient=gradient,
            g=self.factor.to_gradient(gradient),
            forward_residual=r1,
            adjoint_residual=r2,
            rounding=rounding,
            inner_iterations=spent + there.iterations + back.iterations,
            stagnated=there.stagnated or back.stagnated,
            aside=self._aside(F - rows, E, objective, stray, r1 + rounding.forward),
        )

    def _aside(self, b: Array, E: Array, objective: float, stray: float, off: float) -> float:
        """What constants b that are the best for outputs that are off by so much may cost."""
        if not self.loss.intercept:
            return 0.0
        known = (objective + off * (norm(E) + off), self.ridge, self.X_norm)
        reach = self.loss.intercept_distance(self.xp, self.Y, b.sum(axis=0) / b.shape[0], *known)
        return self.loss.intercept_gap(stray, off, reach)

    def tighten(self, least: float) -> None:
        """Solve ten times tighter from now on, but no tighter than `least` on this account."""
        self.tol = min(self.tol, max(0.1 * self.tol, least))

    def start(self, w: Array, Z: Array | None = None) -> Point:
        """The first point: from a guess of Z, or from scratch."""
        if Z is not None:
            return self.point(w, Z)
        found = self.map.forward(self.factor.to_weights(w), self.tol)
        return self.point(w, found.value, spent=found.iterations)

    def move(self, at: Point, direction: Array, search: bool) -> Point:
        """The next point along `direction`: two block solves, whatever the line search does."""
        D = self.factor.to_weights(direction)
        ahead = self.map.forward(D, self.tol)
        eta = self.xp.ones(D.shape[1])
        if search:
            FD = self.map.rows(ahead.value)
            ridge = (
                self.ridge * self.xp.sum(at.W * D, axis=0),
                self.ridge * self.xp.sum(D * D, axis=0),
            )
            eta = self.loss.step(self.xp, self.map.rows(at.Z), FD, self.Y, ridge)
        Z = at.Z + ahead.value * eta.astype(ahead.value.dtype)
        return self.point(at.w + eta * direction, Z, at.V, spent=ahead.iterations)


@dataclass
class DensePoint:
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

    def start(self, u: Array | None) -> DensePoint:
        """The point of u (None: 0)."""
        F, rounding = self.xp.zeros_like(self.Y), self.xp.zeros(())
        if u is None:
            u = self.xp.zeros((self.A.shape[1], self.Y.shape[1]))
        else:
            self.passes += 1
            F, rounding = self.backend.matmul(self.A, u), self._product_rounding(u)
        return self._at(u, F, rounding, self._values(u, F))

    def move(self, at: DensePoint, D: Array) -> DensePoint:
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

    def _at(
        self, u: Array, F: Array, rounding: Array, values: tuple[float, Array, Array]
    ) -> DensePoint:
        objective, E, Gu = values
        self.passes += 1
        g = self.loss.centre(self.xp, self.backend.matmul(self.A.T, E)) + self.ridge * Gu
        return DensePoint(u, F, Gu, objective, E, g, rounding)

    def _product_rounding(self, u: Array) -> Array:
        """A bound of what float64 may have done to A u."""
        xp, rows = self.xp, self.xp.sqrt((u * u).sum(axis=1))
        whole = xp.sqrt((self.columns**2).sum() * (rows**2).sum())
        return (self.A.shape[1] + 2) * _UNIT * xp.minimum(whole, (self.columns * rows).sum())

    def gap(self, point: DensePoint, rounding: bool = True) -> float:
        """A bound of objective - optimum, by strong convexity or because nothing is below 0."""
        if self.ridge == 0:
            return point.objective + (self.objective_error(point) if rounding else 0.0)
        size = norm(self.metric.outer(point.g))
        if not rounding:
            return size**2 / (2 * self.ridge)
        least = (size + self._rounding(point)) ** 2 / (2 * self.ridge)
        return min(least, point.objective + self.objective_error(point))

    def forward_rounding(self, point: DensePoint) -> float:
        """A bound of what float64 may have done to F and E."""
        own = 4 * _UNIT * (norm(point.F) + norm(self.Y))
        return float(point.rounding) + own  # synchronize!

    def objective_error(self, point: DensePoint) -> float:
        """A bound of what float64 may have done to the objective."""
        off = norm(point.E) * self.forward_rounding(point) + self.loss.rounding(point.F)
        return off + 8 * _UNIT * abs(point.objective)

    def _rounding(self, point: DensePoint) -> float:
        """The same for the gradient with respect to W."""
        forward = self.A_norm * self.forward_rounding(point)
        adjoint = (self.A.shape[0] + 2) * _UNIT * norm(point.E) * norm(self.columns)
        G_terms = 1 if self.metric.G is None or self.metric.G.ndim == 1 else self.A.shape[1]
        ridge = (G_terms + 2) * _UNIT * self.ridge * norm(point.Gu)
        return self.amplification * (forward + adjoint + ridge)

    def record(
        self, history: History, point: DensePoint, gap: float, callback: Callback | None
    ) -> None:
        """One line of the history, told to the callback."""
        found = {"objective": point.objective, "gap": gap, "passes": self.passes}
        found["grad_norm"] = norm(self.metric.outer(point.g))
        history.append({"step": len(history), **found})
        if callback is not None:
            callback(history[-1])
