"""Leave-one-out: what the models that did not see a row say of it, in closed form.

For MSE with P = A^T W A + ridge I, W the weights of the rows, row i has the leverage
h_i = w_i a_i^T P^-1 a_i, and the model that was trained without it misses y_i by e_i / (1 - h_i),
e the residuals of the model at hand: exact, for all outputs at once.  An intercept centres the rows
and adds w_i / (sum of w) to the leverage.

Where there are fewer rows than features h is nearly 1, and 1 - h has lost its digits.  There

    G = W^1/2 A A^T W^1/2 + ridge I,   1 - h_i = ridge (G^-1)_ii,

and row i misses y_i by (G^-1 W^1/2 Y)_i / ((G^-1)_ii w_i^1/2).  An intercept takes the direction of
w^1/2 away from G.  No G is made: it is R^T R, R from a QR of [A^T W^1/2; ridge^1/2 I].  The rows of
that, the features, are sorted by size, and its columns are pivoted, so that each feature is as
exact as in its own unit (Cox and Higham 1998).  For another row a, ridge a^T P^-1 a is the square
of what the QR leaves of (a, 0).

Without a ridge the model of fewer rows than features is the one of smallest weights, in units in
which the columns of X have norm 1; so are those without a row.  With U the left singular vectors of
the rows (weighted and centred as the loss sees them), and N N^T = I - U U^T (less the constants, if
there is an intercept), 1 - h is the diagonal of N N^T.  A row that others determine misses y_i by
(N N^T Y)_i / (N N^T)_ii; one that adds a direction of its own (h = 1), as all do where the rows are
independent, by (G^+ Y)_i / (G^+)_ii: both are limits of the formula above as the ridge goes to 0.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from scipy.linalg import solve_triangular
from scipy.linalg.lapack import dgeqp3, dormqr

from herta_gpu.backends.base import Array
from herta_gpu.factors import ROW_CUT, Factor
from herta_gpu.preconditioner import Preconditioner
from herta_gpu.problem import StoredPoint, StoredProblem

_ROWS = 1 << 13  # rows of Q at a time
_ALONE = 1e-10  # 1 - h below which a row alone decides some direction: no model without it does
_NEARLY = 1e-8  # the same, where the ridge has the last word
_CLOSE = 1e-6  # 1 - h below which it has lost digits: it comes from the rows' QR, if that is small
_SMALL = 1 << 11  # rows of such a QR
_UNSURE = 1e-2  # error, relative to targets and output, beyond which an output is not told
_SLACK = 0.1  # departure of P from Q^T Q + ridge beyond which h is not taken from it


@dataclass(frozen=True)
class LeftOut:
    """What leaving out each row would change, on the host."""

    outputs: Any  # (n_train, c) of the models that left each row out; NaN where there is none
    leverage: Any  # (n_train,)
    noise: Any  # (c,) variance of the residuals of each output
    spread: Any = None  # a^T P^-1 a of other rows a

    @classmethod
    def unknown(cls, n: int, c: int) -> LeftOut:
        """Of W = 0 that stands in for an optimum: the formulas are about the optimum."""
        return cls(np.full((n, c), math.nan), np.full(n, math.nan), np.full(c, math.nan))


def leave_one_out(
    problem: StoredProblem, at: StoredPoint, P: Preconditioner, others: Array | None
) -> LeftOut:
    """Leave-one-out at the optimum of a stored MSE problem; the spread of `others`, if given."""
    backend, xp, loss, Q = problem.backend, problem.xp, problem.loss, problem.Q
    few, Y, rows, inner = Q.shape[0] < Q.shape[1], problem.Y[:], None, P.inner
    smallest = few and problem.ridge == 0
    dual = problem.ridge > 0 and (few or inner.slack > _SLACK)
    if smallest:
        missed, free = _of_smallest_weights(problem)
    elif not dual:
        missed, free = _from_P(problem, at, inner)
        missed = xp.where((free <= _ALONE)[:, None], math.nan, missed)
        small = problem.ridge > 0 and Q.shape[0] <= _SMALL
        dual = small and bool((free < _CLOSE).any())  # synchronize!
    if dual:
        rows = DualRows.of(problem)

        def moved(x: Any) -> Any:
            u = backend.to_numpy(problem.C0.from_weights(backend.asarray(x)))
            return backend.to_numpy(P.column_error) @ abs(u)

        known = None if P.column_error is None else moved
        missed, free = map(backend.asarray, rows.missed(backend.to_numpy(Y), known))
    e = xp.nan_to_num(missed, nan=0.0) * free[:, None]  # of rows alone nothing is left
    squares = loss.weigh(e * e).sum(axis=0)
    # Residuals of 0 whatever the targets, as of independent rows without a ridge, say nothing.
    fitted = smallest and bool((free < _ALONE).all())  # synchronize!
    noise = squares / (math.nan if fitted else xp.maximum(free.sum(), 1.0))
    left_out = LeftOut(*map(backend.to_numpy, (Y - missed, 1 - free, noise)))  # synchronize!
    if others is None:
        return left_out
    # Nothing speaks of the directions that no training row has.
    spread = np.full(others.shape[0], math.inf if smallest else 0.0)
    for i in range(0, 0 if smallest else others.shape[0], _ROWS):
        J = slice(i, i + _ROWS)
        part = others[J].astype("float64")
        part = part if problem.mean is None else part - problem.mean
        if rows is None:
            B = inner.to_gradient(xp.ascontiguousarray(part.T))
            spread[J] = backend.to_numpy((B * B).sum(axis=0))  # synchronize!
        else:
            spread[J] = rows.spread(backend.to_numpy(problem.C0.rows(part)))  # synchronize!
    spread += 1 / loss.total(Q.shape[0]) if loss.intercept else 0.0
    return replace(left_out, spread=spread)


class DualRows:
    """R of G = R^T R, on the host; with an intercept of G without the direction of w^1/2."""

    def __init__(self, A: Any, weights: Any, ridge: float, intercept: bool) -> None:
        self.A, self.ridge, self.root, self.reflector = A, ridge, np.sqrt(weights), None
        rows = self.root[:, None] * A
        if intercept:
            # A reflection takes w^1/2 to the first axis; the others are what is orthogonal to it.
            self.reflector = self.root / np.linalg.norm(self.root)
            self.reflector[0] += math.copysign(1.0, self.reflector[0])
            self.reflector /= np.linalg.norm(self.reflector)
            rows = self._orthogonal(rows)
        count, self.features = rows.shape
        rows = np.concatenate([rows, math.sqrt(ridge) * np.eye(count)], axis=1)
        self.order = np.argsort(-np.abs(rows).max(axis=0, initial=0.0), kind="stable")
        stacked = np.take(rows, self.order, axis=1).T
        lwork = int(dgeqp3(stacked, lwork=-1, overwrite_a=1)[3][0])
        self.qr, pivots, self.tau, _, _ = dgeqp3(stacked, lwork=lwork, overwrite_a=1)
        self.pivots = pivots - 1
        self.R = np.triu(self.qr[:count])

    @classmethod
    def of(cls, problem: StoredProblem) -> DualRows:
        """Those of the stored rows, in the units of W."""
        to_numpy, weights = problem.backend.to_numpy, problem.loss.weights
        A = to_numpy(problem.C0.rows(problem.Q.astype("float64", copy=False)))  # synchronize!
        w = np.ones(A.shape[0]) if weights is None else to_numpy(weights)
        return cls(A, w, problem.ridge, problem.loss.intercept)

    def _orthogonal(self, B: Any) -> Any:
        """Columns without what they have of w^1/2, in one coordinate less."""
        v = self.reflector
        return B if v is None else (B - 2 * np.outer(v, v @ B))[1:]

    def missed(self, Y: Any, moved: Callable[[Any], Any] | None = None) -> tuple[Any, Any]:
        """(y less the output of the model without the row, 1 - leverage).

        With V = G^-1 a change of the rows by D changes V by -V (D A^T + A D^T) V.  `moved` bounds
        ||D x|| for columns x: outputs without a row that decides alone, but for the errors of Q,
        are NaN.
        """
        count, c = Y.shape
        if self.R.shape[0] == 0:  # an intercept and one row
            return np.full((count, c), math.nan), np.zeros(count)
        # Columns of half are R^-T e_i, seen from the coordinates of R.
        units = self._orthogonal(np.eye(count))[self.pivots]
        half, root = solve_triangular(self.R, units, trans="T", check_finite=False), self.root
        diagonal, turned = (half * half).sum(axis=0), half.T @ (half @ (root[:, None] * Y))
        with np.errstate(invalid="ignore", divide="ignore"):
            missed = turned / (diagonal * root)[:, None]
            if moved is not None:
                V, VY = (root[:, None] * B for B in (half.T @ half, turned))
                v, w = (np.linalg.norm(B, axis=0) for B in (V, VY))
                Dv, Dw = (moved(self.A.T @ B) for B in (V, VY))
                off = (np.outer(v, Dw) + np.outer(Dv, w)) / root[:, None]
                off = (off + 2 * abs(missed) * (v * Dv)[:, None]) / diagonal[:, None]
                alone = (self.ridge * diagonal < _NEARLY)[:, None]
                missed[alone & (off > _UNSURE * (abs(Y).max() + abs(Y - missed)))] = math.nan
        return missed, self.ridge * diagonal

    def spread(self, others: Any) -> Any:
        """a^T P^-1 a of rows a of other nodes, less the mean if there is an intercept."""
        count = self.R.shape[0]
        stacked = np.zeros((self.features + count, others.shape[0]), order="F")
        stacked[: self.features] = others.T
        stacked = np.asfortranarray(stacked[self.order])
        if count:
            lwork = int(dormqr("L", "T", self.qr, self.tau, stacked, -1)[1][0])
            stacked = dormqr("L", "T", self.qr, self.tau, stacked, lwork)[0]
        left = stacked[count:]
        return (left * left).sum(axis=0) / self.ridge


def _from_P(problem: StoredProblem, at: StoredPoint, inner: Factor) -> tuple[Array, Array]:
    """(y less the output of the model without the row, 1 - leverage)."""
    backend, xp, loss, Q = problem.backend, problem.backend.xp, problem.loss, problem.Q
    u, b, count = at.u, at.b, Q.shape[0]
    free, missed = xp.zeros(count), xp.zeros((count, u.shape[1]))
    for i in range(0, count, _ROWS):
        J = slice(i, min(i + _ROWS, count))
        B = inner.to_gradient(xp.ascontiguousarray(Q[J].T))
        h = (B * B).sum(axis=0)
        if loss.intercept:
            h = h + 1 / loss.total(count)
        h = loss.of_rows(J).weigh(h[:, None])[:, 0]
        F = backend.matmul(Q[J], u)
        e = problem.Y[J] - (F if b is None else F + b)
        free[J] = 1 - h
        missed[J] = e / xp.maximum(1 - h, np.finfo(float).tiny)[:, None]
    return missed, free


def _of_smallest_weights(problem: StoredProblem) -> tuple[Array, Array]:
    """The same without a ridge, for fewer rows than features: from an SVD of the rows that the loss
    sees."""
    backend, xp, loss = problem.backend, problem.backend.xp, problem.loss
    root = None if loss.weights is None else xp.sqrt(loss.weights)
    rows = problem.Q if root is None else root[:, None] * problem.Q
    U, s, _ = xp.linalg.svd(rows.astype("float64", copy=False), full_matrices=False)
    r = int((s > ROW_CUT * s[0]).sum())  # synchronize!
    U, s, count = U[:, :r], s[:r], problem.Q.shape[0]
    Y, spanned = problem.Y[:] if root is None else root[:, None] * problem.Y[:], U
    if loss.intercept:
        ones = (xp.ones(count) if root is None else root)[:, None]
        spanned = xp.concatenate([U, ones / xp.linalg.norm(ones)], axis=1)
    free = 1 - (spanned * spanned).sum(axis=1)  # 1 - h
    alone = free <= _ALONE
    around = Y - backend.matmul(spanned, backend.matmul(spanned.T, Y))
    inverse = (U / s) * (U / s)
    through = backend.matmul(U / s**2, backend.matmul(U.T, Y))
    missed = xp.where(
        alone[:, None],
        through / xp.maximum(inverse.sum(axis=1), np.finfo(float).tiny)[:, None],
        around / xp.where(alone, 1.0, free)[:, None],
    )
    missed = missed if root is None else missed / root[:, None]
    return missed, xp.where(alone, 0.0, free)
