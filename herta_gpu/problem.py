"""The training problem through the model, which is a linear map.

Z*(W) = H^-1 X W is linear in W, so training needs two products only: A W and A^T E with
A = M H^-1 X (M picks the training rows).  `UnfoldedMap` computes them by two block solves with the
full graph, as the loop of Algorithm 1 does, and `Problem` goes down on them.  `StoredProblem` is
the same on stored rows of Q = H^-1 X C0, in coordinates u with W = C0 u: no solve.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import numpy as np

from herta_gpu.backends.base import Array, Backend, norm, unit_roundoff
from herta_gpu.factors import Factor, Map
from herta_gpu.features import Features
from herta_gpu.graph import Graph
from herta_gpu.laplacian import RegularizedLaplacian, block_cg
from herta_gpu.losses import LOSSES, Loss
from herta_gpu.prediction import Outputs

_UNIT = unit_roundoff()
_LEAST_TOL = 1e-14  # the tightest solve: below is rounding, even in float64
_CHUNK_BYTES = 32 << 20  # outputs at a time
_FLAT = 0.1  # share of the slope at the start of a step that may be left at its end

History = list[dict[str, Any]]
Callback = Callable[[dict[str, Any]], None]


@dataclass
class Solved:
    """A product with A or A^T, with what its solve left over."""

    value: Array
    block: Array  # the n x c solution behind it (of `correct`: the residual)
    residual: float  # ||true residual||_F, measured
    iterations: int
    stagnated: bool


class UnfoldedMap:
    """A and A^T by solves with H = I + lam L_hat, on the whole graph."""

    row_floor = 0.0  # rows of each block are divided by their length, or by this where that is less
    hidden: Any = None  # `more.hidden.Behind`: columns that a layer makes of the rows

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
        beside these blocks, which no H was applied to."""
        self.H, self.X, self.train, self.width, self.loss = H, X, rows, width, loss
        self.systems, self.extra = systems, extra
        self.blocks = 1 if systems is None else len(systems)  # how often X counts

    @property
    def extras(self) -> list[Any]:
        """Features that no H is applied to, in the order of their rows of W."""
        return [one for one in (self.hidden, self.extra) if one is not None]

    @property
    def features(self) -> int:
        """Rows of W."""
        return self.blocks * self.X.shape[1] + sum(one.shape[1] for one in self.extras)

    def X_norm(self) -> float:
        """A bound of the 2-norm of all features together, before any diffusion."""
        more = [one.norm_bound + one.off * math.sqrt(one.shape[1]) for one in self.extras]
        if self.row_floor:  # rows of length 1
            count = int(self.H.backend.total(self.train.shape[0]))
            return math.hypot(math.sqrt(self.blocks * count), *more)
        return math.hypot(math.sqrt(self.blocks) * self.X.norm_bound, *more)

    def distinct_columns(self, graph: Graph) -> int:
        """How many different columns the training rows can see, zeros apart."""
        rows = self.H.backend.to_numpy(self.train)  # synchronize!
        seen = self.blocks * self.X.distinct_columns(graph.connected_to(rows))
        if not self.extras:
            return seen
        own = np.zeros(graph.num_nodes, dtype=bool)
        own[rows] = True
        return seen + sum(one.distinct_columns(own) for one in self.extras)

    def forward(self, W: Array, tol: float) -> Solved:
        """Z = H^-1 X W (n x c), of which the training rows are A W."""
        return self._solve(self.X.times(W), tol, None)

    def outputs(self, W: Array) -> Array:
        """The training rows of the outputs of W, of all blocks, by solves to the last digit."""
        if self.hidden is not None and self.systems:
            self.hidden.solve(self.systems)
        known = (self.systems or [self.H], self.X, W, self.width, None, self.extras, self.row_floor)
        found = Outputs(*known, tol=_LEAST_TOL).of(self.train, "float64")
        return self.H.backend.gathered(found)

    def rows(self, Z: Array) -> Array:
        return self.H.backend.gathered(Z[self.train].astype("float64"))

    def correct(self, W: Array, Z: Array, limit: float) -> Solved:
        """Measure X W - H Z (the result's `block`); above `limit`, solve for what is missing."""
        U, most, stagnated = self.X.times(W), 0, False
        R, dots = self.H.residual(U, Z)  # in float64
        if float(dots[0].sum()) ** 0.5 > limit:  # synchronize!
            tol = 0.3 * min(1.0, limit / (self.size(Z) or 1.0))
            again = self._solve(U, tol, Z)
            Z, most, stagnated = again.value, again.iterations, again.stagnated
            R, dots = self.H.residual(U, Z)
        return Solved(Z, R, float(dots[0].sum()) ** 0.5, most, stagnated)  # synchronize!

    def adjoint(self, E: Array, tol: float, guess: Array | None) -> Solved:
        """X^T H^-1 M^T E (d x c)."""
        full = self.H.backend.xp.zeros((self.H.n, E.shape[1]))
        full[self.train] = self.H.backend.own(E)
        V = self._solve(full, tol, guess)
        return replace(V, value=self.X.transpose_times(V.value))

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

    def _solve(self, B: Array, tol: float, guess: Array | None) -> Solved:
        xp, tol = self.H.backend.xp, max(tol, _LEAST_TOL)

        def solve(j: int) -> dict[str, Array]:
            J = slice(j, j + self.width)
            start = None if guess is None else guess[:, J]
            Z, info = block_cg(self.H, B[:, J], tol, start)
            left = float((info.residuals**2).sum())
            most = int(info.iterations.max(initial=0))
            return {"Z": Z, "about": np.array([left, most, info.status != "converged"])}

        blocks = range(0, B.shape[1], self.width)
        parts = list(self.H.backend.dealt(blocks, solve))
        Z = parts[0]["Z"] if len(parts) == 1 else xp.concatenate([p["Z"] for p in parts], axis=1)
        about = np.stack([part["about"] for part in parts])
        residual, most = float(np.sqrt(sum(about[:, 0]))), int(about[:, 1].max())
        return Solved(Z, Z, residual, most, bool(about[:, 2].any()))


@dataclass
class Point:
    """Everything known at one iterate."""

    w: Array  # preconditioned weights
    W: Array  # d x c, W = P^-1/2 w
    Z: Array  # H^-1 X W on all rows
    V: Array  # H^-1 M^T E, E the gradient of the loss with respect to M Z
    objective: float  # loss + ridge/2 ||W||^2 at W
    objective_error: float  # it is right up to this much
    gradient: Array  # d x c, of the objective
    g: Array  # the same in preconditioned coordinates, P^-1/2 gradient
    forward_residual: float  # ||X W - H Z||_F
    adjoint_residual: float  # ||M^T E - H V||_F
    # Bounds of what float64 may have rounded away, beside what was measured:
    forward_rounding: float  # of the residual X W - H Z, and of E
    adjoint_rounding: float  # of the residual M^T E - H V
    gradient_rounding: Array  # (d,) row norms of what X^T V is off by
    inner_iterations: int
    stagnated: bool  # a solve did not reach what was asked of it
    intercept_gap: float = 0.0  # what the constants of an intercept may add to the gap


@dataclass
class Problem:
    """min over W of loss(A W) + ridge/2 ||W||^2, in preconditioned coordinates."""

    map: UnfoldedMap
    Y: Array
    ridge: float
    factor: Factor
    tol: float  # relative, for inner solves; tightened when it limits the certificate
    X_norm: float = math.inf

    def __post_init__(self) -> None:
        self.loss, self.xp = self.map.loss, self.map.H.backend.xp

    def point(self, w: Array, Z: Array, V: Array | None = None, spent: int = 0) -> Point:
        """Objective and gradient at w, after `spent` iterations.  Z must approximate H^-1 X W and
        is corrected if needed; V is a guess of its adjoint."""
        xp, Y, W = self.xp, self.Y, self.factor.to_weights(w)
        E = self.loss.residual(xp, self.map.rows(Z), Y)
        there = self.map.correct(W, Z, self.tol * norm(E))
        rows = self.map.rows(there.value)
        F, loss = self.loss.add_intercept(xp, rows, Y), self.loss.of_rows(slice(None))
        objective, E = loss.at(xp, F, Y)
        back = self.map.adjoint(E, self.tol, V)
        gradient = self.loss.centre(xp, back.value) + self.ridge * W
        objective += 0.5 * self.ridge * float(xp.sum(W * W))  # synchronize!
        r1, r2, size = there.residual, back.residual, norm(E)
        # E is a difference of numbers like these: its rounding is that of outputs so far off.
        forward = self.map.forward_rounding(W, there.value)
        forward += 4 * _UNIT * (norm(F) + norm(Y)) / self.loss.steepest
        imbalance = self.loss.imbalance(xp, E)
        # A mean row times 1^T E, which a centred P does not see, and what E itself has lost.
        adjoint = self.map.adjoint_rounding(back.block)
        adjoint += imbalance + self.loss.gradient_rounding(size, Y)
        off = size * forward + self.loss.rounding(F) + 8 * _UNIT * objective
        # Z is off by H^-1 R, and <E, M H^-1 R> = <V, R> with V = H^-1 M^T E at hand: what is left
        # is of second order, ||r1|| ||r2|| + ||r1||^2 / 2.
        backend = self.map.H.backend
        objective += float(backend.total(float(xp.sum(back.block * there.block))))  # synchronize!
        intercept_gap = 0.0
        if self.loss.intercept:
            b, missed = (F - rows).sum(axis=0) / F.shape[0], r1 + forward
            known = (objective + missed * (size + missed), self.ridge, self.X_norm)
            distance = self.loss.intercept_distance(xp, Y, b, *known)
            intercept_gap = self.loss.intercept_gap(imbalance, missed, distance)
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
            forward_rounding=forward,
            adjoint_rounding=adjoint,
            gradient_rounding=self.map.X.transpose_rounding() * self.map.size(back.block),
            inner_iterations=spent + there.iterations + back.iterations,
            stagnated=there.stagnated or back.stagnated,
            intercept_gap=intercept_gap,
        )

    def intercept(self, at: Point) -> Array | None:
        """(c,) the constants that belong to a point; None where there are none."""
        if not self.loss.intercept:
            return None
        return self.loss.shift(self.xp, self.map.rows(at.Z), self.Y)

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
            F, FD = self.map.rows(at.Z), self.map.rows(ahead.value)
            slope, bend = (self.ridge * self.xp.sum(V * D, axis=0) for V in (at.W, D))
            eta = self.loss.step(self.xp, F, FD, self.Y, (slope, bend))
        Z = at.Z + ahead.value * eta.astype(ahead.value.dtype)
        return self.point(at.w + eta * direction, Z, at.V, spent=ahead.iterations)


@dataclass
class StoredPoint:
    """Everything known at one u."""

    u: Array
    loss: float
    objective: float  # loss + ridge/2 ||C0 u||^2
    g: Array  # r x c, the gradient of the objective with respect to u
    b: Array | None  # (c,) the constants of an intercept, in the coordinates of the rows
    F: Array = None  # Q u, and E, the gradient of the loss with respect to it ...
    E: Array = None
    # ... or what a proof needs of them, where they were never there as a whole:
    E_size: float = 0.0
    F_size: float = 0.0  # constants included
    Y_size: float = 0.0
    rounding: float = 0.0  # of the loss
    sums: Array = 0.0  # 1^T E, which the constants should make 0


@dataclass
class StoredProblem:
    """min over u of loss(Q u) + ridge/2 ||C0 u||^2 on stored rows Q of H^-1 X C0, W = C0 u."""

    backend: Backend
    loss: Loss
    Q: Array
    Y: Any  # of which runs of rows may be all there is
    ridge: float
    basis: Any = None  # C0, a `Map`; None: the identity
    gram: Array | None = None  # Q^T Q as Hessians see Q, if known
    mean: Array | None = None  # (r,) what was taken away from each row: a loss has constants

    def __post_init__(self) -> None:
        self.xp = self.backend.xp
        self.C0: Any = self.basis or Map(self.backend, self.xp.ones(self.Q.shape[1]))

    @classmethod
    def of_rows(cls, backend: Backend, loss: Loss, Q: Array, *known: Any) -> StoredProblem:
        """The problem of rows less their mean, if the loss has an intercept."""
        Q = Q if loss.quadratic else Q.astype("float64", copy=False)
        if not loss.intercept:
            return cls(backend, loss, Q, *known)
        mean = loss.mean(backend.xp, Q)
        return replace(cls(backend, loss, Q - mean, *known), mean=mean)

    def whole(self, backend: Backend) -> StoredProblem:
        """The same with all of Y, on another backend: that of the host, if this one has none."""
        if backend.xp is self.xp:
            return replace(self, backend=backend, Y=self.Y[:])
        there, C0 = self.backend.to_numpy, self.C0  # synchronize!
        gram, basis = (
            None if self.gram is None else there(self.gram),
            Map(backend, *map(there, (C0.C, C0.K))),
        )
        Q, Y = there(self.Q), there(self.Y[:])
        return StoredProblem(backend, self.loss, Q, Y, self.ridge, basis, gram)

    @cached_property
    def hessian_rows(self) -> Array:
        """Q, as Hessians see it."""
        mean = self.loss.mean(self.xp, self.Q) if self.loss.intercept else None
        return self.loss.scale_rows(self.xp, self.Q, slice(None), mean)

    @cached_property
    def sizes(self) -> Array:
        """(r,) norms of the columns of Q."""
        return self.xp.sqrt(self.backend.column_dots(self.Q, self.Q))

    @cached_property
    def at_zero(self) -> float:
        """The loss of u = 0."""
        return self.loss.value(self.xp, self.xp.zeros_like(self.Y), self.Y)

    def at(self, u: Array, F: Array | None = None) -> StoredPoint:
        """The point of u.  Without F = Q u over runs of rows: no array of n_train x c is made."""
        xp, matmul, (n, c), W = self.xp, self.backend.matmul, self.Y.shape, self.C0.to_weights(u)
        b = self._constants(u, F) if self.loss.intercept else None
        # Rows in float32 are widened on the way.
        numbers = c + (u.shape[0] if self.Q.dtype != u.dtype else 0)
        step = max(1, _CHUNK_BYTES // (8 * numbers) if F is None else n)
        found, total = StoredPoint(u, 0.0, 0.0, u, b, F), xp.zeros(u.shape)
        for i in range(0, n, step):
            rows = slice(i, i + step)
            Q, Y, loss = self.Q[rows].astype("float64", copy=False), self.Y[rows], self.loss
            part = matmul(Q, u) if F is None else F
            part = part if b is None else part + b
            value, E = loss.of_rows(rows).at(xp, part, Y)
            found.loss, total = found.loss + value, total + matmul(Q.T, E)
            if F is not None:
                found.E = E
                continue
            found.sums = found.sums + E.sum(axis=0)
            found.rounding += loss.rounding(part)
            found.E_size = math.hypot(found.E_size, norm(E))
            found.F_size = math.hypot(found.F_size, norm(part))
            found.Y_size = math.hypot(found.Y_size, norm(Y))
        found.g = self.loss.centre(xp, total) + self.ridge * self.C0.times_ridge(u)
        found.objective = found.loss + 0.5 * self.ridge * float(xp.sum(W * W))  # synchronize!
        return found

    def _constants(self, u: Array, F: Array | None) -> Array:
        """The best constants; those of least squares without Q u."""
        xp, loss = self.xp, self.loss
        if F is None and loss.quadratic:
            return self._Y_mean - loss.mean(xp, self.Q) @ u
        return loss.shift(xp, self.backend.matmul(self.Q, u) if F is None else F, self.Y[:])

    @cached_property
    def _Y_mean(self) -> Array:
        return self.loss.mean(self.xp, self.Y[:])

    def intercept(self, at: StoredPoint) -> Array | None:
        """(c,) the constants that belong to W = C0 u; None where there are none."""
        return None if at.b is None or self.mean is None else at.b - self.mean @ at.u

    def start(self, u: Array | None) -> StoredPoint:
        """The point of u (None: 0) with its F and E."""
        u = self.xp.zeros((self.Q.shape[1], self.Y.shape[1])) if u is None else u
        return self.at(u, self.backend.matmul(self.Q, u))

    def move(self, at: StoredPoint, D: Array) -> StoredPoint:
        """The minimiser along D, or a point near it that is lower than the start, too."""
        xp, FD, GD = self.xp, self.backend.matmul(self.Q, D), self.C0.times_ridge(D)
        ridge = (self.ridge * xp.sum(at.u * GD, axis=0), self.ridge * xp.sum(GD * D, axis=0))
        enough = _FLAT * abs(float(xp.sum(at.g * D)))  # synchronize!
        for flat in (enough, 0.0):
            eta = self.loss.step(xp, at.F, FD, self.Y, ridge, flat)
            ahead = self.at(at.u + eta * D, at.F + eta * FD)
            if ahead.objective <= at.objective:
                break  # a slight slope may go on for long behind a narrow valley: not otherwise
        return ahead

    def gap(self, point: StoredPoint) -> float:
        """A bound of objective - optimum but for rounding; no certificate is built on it."""
        if self.ridge == 0:
            return point.objective
        return norm(self.C0.gradient(point.g)) ** 2 / (2 * self.ridge)
