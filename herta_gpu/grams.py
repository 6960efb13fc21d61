"""From Q^T Q to a factor of P.

P = curvature * Q^T Q + ridge * I.  The curvature is 1 for MSE and that of the softmax for cross
entropy.  Three rules keep certificates true:

* With a ridge no direction is ever cut.  P is scaled to a unit diagonal, ridge included, and where
  rounding hides its smallest eigenvalue a little is added to that diagonal.
* Without a ridge, directions that P hardly sees are cut.  The factor's `rank` tells how many stay,
  and what is proven is proven for those only.
* A factor whose P is not curvature * Q^T Q + ridge * I up to rounding (something was added) has an
  infinite `slack`, and whoever builds on that form must refuse it.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np

from herta_gpu.backends.base import Array, Backend
from herta_gpu.factors import (
    NOT_FINITE,
    Cholesky,
    Composed,
    Diagonal,
    Eigen,
    Factor,
    LowRank,
    RowSpace,
    Spanned,
    power_iteration,
    safe_cholesky,
    smallest_eigenvalue,
)
from herta_gpu.features import in_float64
from herta_gpu.losses import LOSSES, Loss

RANK_CUT = 1e-12  # eigenvalues of P below this share of the largest are rounding, not data
ROW_CUT = 1e-9  # singular values of A below this share of the largest are left over by the solves
DAMPING = 1e-7  # share of the largest eigenvalue added when Q has too few rows to span the features
_EPS = float(np.finfo(np.float64).eps)
_PLAIN_RIDGE = 1e-6  # share of the largest eigenvalue from which on Q Q^T is exact enough
_GRAM_BYTES = 16 << 20  # float64 copies of rows of Q at a time; P's own size if that is more
_LEAST_RIDGE = 1e-20  # share of the largest eigenvalue below which a ridge drowns in rounding


class Gram(Protocol):
    """Q^T Q, from which P and its factor are made for any curvature and ridge."""

    backend: Backend

    def factor(self, curvature: float, ridge: float, symmetric: bool) -> Factor:
        """C with C C^T = (curvature Q^T Q + shift I)^-1; `symmetric`: P^-1/2 itself."""


@dataclass
class DenseGram:
    """Q^T Q as a d x d matrix."""

    backend: Backend
    QtQ: Array
    penalty: Array  # C0^T C0, what a ridge adds in the coordinates of Q; (d,) if it is diagonal
    damped: bool
    rounding: float = 0.0  # |error| <= rounding |q_i| |q_j| of each entry of Q^T Q

    def factor(self, curvature: float, ridge: float, symmetric: bool) -> Factor:
        xp, d = self.backend.xp, self.QtQ.shape[0]
        P = curvature * self.QtQ
        if not math.isfinite(float(P.diagonal().sum())):  # synchronize!
            raise ValueError(NOT_FINITE)
        if ridge == 0:
            # Columns of X C0 have norm 1: what is small is barely seen by the training rows.
            return self._cut(P, symmetric)
        if self.penalty.ndim == 1:
            diagonal = xp.arange(d)
            P[diagonal, diagonal] += ridge * self.penalty
        else:
            P += ridge * self.penalty
        # With a ridge every feature counts, and the unit diagonal makes P as well conditioned as
        # scaling can.
        scale = 1.0 / xp.sqrt(P.diagonal())
        P *= scale[:, None]
        P *= scale[None, :]
        return Composed(
            Diagonal(scale), self._whole_root(P) if symmetric else self._whole_triangle(P)
        )

    def _whole_triangle(self, P: Array) -> Factor:
        """A Cholesky factor of P, which has a unit diagonal; what rounding hides is lifted."""
        lifted = safe_cholesky(self.backend, P, proven=True)
        if lifted is None:
            raise ValueError(NOT_FINITE)
        L, added, smallest = lifted
        slack = math.inf if added else self._slack(P, smallest)
        return Cholesky(self.backend, L, smallest, slack, _lifted_note(added))

    def _whole_root(self, P: Array) -> Factor:
        """The symmetric root of P, which has a unit diagonal; no eigenvalue is cut here either."""
        xp, d = self.backend.xp, P.shape[0]
        values, V = xp.linalg.eigh(P)
        least, added = 4 * (d + 2) * d * _EPS, 0.0
        if float(values[0]) < least:  # synchronize!
            added = least + max(0.0, -float(values[0]))
            values = values + added
        slack = math.inf if added else self._slack(P, float(values[0]))
        return Eigen(V, values, slack, _lifted_note(added))

    def _cut(self, P: Array, symmetric: bool) -> Factor:
        """A factor of P without a ridge, cut where it must be, or damped if Q has too few rows."""
        xp, d = self.backend.xp, P.shape[0]
        # A few per cent are enough to scale the damping.
        top = power_iteration(xp, lambda v: self.backend.matmul(P, v), d, 20) or 1.0
        note = ""
        if self.damped:
            P[xp.arange(d), xp.arange(d)] += DAMPING * top
            note = _damping_note(DAMPING)
        if not symmetric:
            return self._cut_triangle(P, top, note)
        values, V = xp.linalg.eigh(P)
        keep = values > RANK_CUT * xp.maximum(values[-1], 1e-300)
        smallest = float(xp.where(keep, values, xp.inf).min())  # synchronize!
        slack = math.inf if self.damped else self._slack(P, smallest)
        return Eigen(xp.ascontiguousarray(V[:, keep]), values[keep], slack, note)

    def _cut_triangle(self, P: Array, top: float, note: str) -> Factor:
        """A Cholesky factor; of well-separated columns only where P is close to singular."""
        backend, d = self.backend, P.shape[0]
        L = backend.cholesky(P)
        # The smallest eigenvalue is at most the least square of L's diagonal: a glance at that
        # often settles that columns must go.
        if L is not None and float(L.diagonal().min()) ** 2 > 10 * RANK_CUT * top:  # synchronize!
            smallest = smallest_eigenvalue(backend, P, L)
            if smallest > 10 * RANK_CUT * top:
                slack = math.inf if self.damped else self._slack(P, smallest)
                return Cholesky(backend, L, smallest, slack, note)
        L, J = backend.pivoted_cholesky(P, RANK_CUT * top)
        kept = P[J[:, None], J[None, :]]
        smallest = smallest_eigenvalue(backend, kept, L) if J.shape[0] else 1.0
        slack = math.inf if self.damped else self._slack(kept, smallest)
        return Cholesky(backend, L, smallest, slack, note, J, d)

    def _slack(self, P: Array, smallest: float) -> float:
        """What rounding of Q^T Q and of its factor may do, seen from P's smallest eigenvalue.

        |error of P_ij| <= rounding sqrt(P_ii P_jj), a matrix of norm rounding * trace(P).
        """
        trace = float(P.diagonal().sum())  # synchronize!
        return (self.rounding + (P.shape[0] + 6) * _EPS) * trace / smallest


@dataclass
class LowRankGram:
    """Q^T Q = U diag(values) U^T for a Q with few rows."""

    backend: Backend
    U: Array  # d x r, orthonormal
    values: Array  # (r,), falling

    @classmethod
    def of_rows(cls, backend: Backend, Q: Array, ridge: float) -> LowRankGram:
        xp, Q = backend.xp, Q.astype("float64")
        values, V = xp.linalg.eigh(backend.matmul(Q, Q.T))
        top = float(values[-1])  # synchronize!
        if ridge < _PLAIN_RIDGE * top:
            # Q Q^T has lost its small eigenvalues to rounding, and this ridge does not hide them.
            U, s = backend.thin_svd(Q)
            return cls(backend, U, s**2)
        keep = values > RANK_CUT * max(top, 1e-300)
        values, V = values[keep][::-1], V[:, keep][:, ::-1]
        return cls(backend, backend.matmul(Q.T, V) / xp.sqrt(values), values)

    def factor(self, curvature: float, ridge: float, symmetric: bool) -> Factor:
        values = curvature * self.values
        r = values.shape[0]
        top = float(values[0]) if r else 0.0  # synchronize!
        if ridge == 0:
            shift = DAMPING * (top or 1.0)
            return LowRank(self.U, values, shift, math.inf, _damping_note(DAMPING))
        shift = max(ridge, _LEAST_RIDGE * top)
        # U is orthonormal and its values are right to within rounding of the largest.
        slack = 64 * (r + 2) * _EPS * math.sqrt(max(top / shift, 1.0))
        slack = slack if shift == ridge else math.inf
        return LowRank(self.U, values, shift, slack, _lifted_note(shift - ridge))


@dataclass
class RowSpaceGram:
    """Fewer training rows than features and no ridge: the rows of A are all that the loss sees."""

    backend: Backend
    scale: Array  # (d,) columns of X have norm 1 after this: a unit decides nothing
    V: Array  # d x r, orthonormal: the span of the rows
    R: Array  # r x r, upper triangular, (A V)^T (A V) = R^T R
    stored: Array | None = None  # A, where something is to be proven of it: then all scales are 1

    @classmethod
    def of_rows(cls, backend: Backend, A: Array, units: Array) -> RowSpaceGram:
        xp, filled = backend.xp, units > 0
        scale = xp.where(filled, 1.0 / xp.where(filled, units, 1.0), 0.0)
        V, R = backend.row_space(A.astype("float64") * scale, ROW_CUT)
        return cls(backend, scale, V, R)

    @classmethod
    def of_stored(cls, backend: Backend, Q: Array) -> RowSpaceGram:
        """For rows whose units play no part, and of which something is to be proven."""
        Q = Q.astype("float64", copy=False)
        return cls(backend, backend.xp.ones(Q.shape[1]), *backend.row_space(Q, ROW_CUT), Q)

    def factor(self, curvature: float, ridge: float, symmetric: bool) -> Factor:
        r = self.V.shape[1]
        note = f"fewer train rows than features: optimum over the {r:,} directions that they see"
        if self.stored is not None:
            root = math.sqrt(curvature)
            rows = self.stored if root == 1 else root * self.stored
            return Spanned.of_rows(self.backend, rows, self.V, root * self.R, note)
        R = math.sqrt(curvature) * self.R
        return Composed(Diagonal(self.scale), RowSpace(self.backend, self.V, R, note, math.inf))


def _damping_note(share: float) -> str:
    return f"damped by {share:g} of its largest eigenvalue: fewer train rows than features"


def _lifted_note(added: float) -> str:
    return f"P lifted by {added:.1g}: features as good as dependent" if added else ""


def gram(backend: Backend, Q: Array, at: Array | None = None) -> Array:
    """Q^T Q over the rows `at` (None: all) in float64."""
    return products(backend, Q, None, at)[0]


def products(
    backend: Backend,
    Q: Array,
    Y: Array | None,
    at: Array | None = None,
    with_gram: bool = True,
    loss: Loss = LOSSES["mse"],
) -> tuple[Array, Array]:
    """(Q^T Q, Q^T Y) over the rows `at` of Q, which are converted to float64 once for both.

    Rows are taken as the loss sees them: with their weights, and less their mean.
    """
    xp, d, count = backend.xp, Q.shape[1], Q.shape[0] if at is None else at.shape[0]
    QtQ = xp.zeros((d, d) if with_gram else (0, 0))
    QtY = xp.zeros((d, 0 if Y is None else Y.shape[1]))
    step, wide = _gram_step(d), in_float64(xp)
    mean = _mean_row(loss, backend, Q, at, step) if loss.intercept else None
    for a in range(0, count, step):
        rows = slice(a, min(a + step, count))
        part = wide(Q[rows] if at is None else Q[at[rows]])
        if not loss.plain:
            part = loss.seen(xp, part, rows, mean)
        if with_gram:
            backend.add_gram(QtQ, part)
        if Y is not None:
            y = Y[rows] if loss.plain else loss.seen(xp, Y[rows], rows, None)
            QtY += backend.matmul(part.T, y)
    return QtQ, QtY


def _mean_row(loss: Loss, backend: Backend, Q: Array, at: Array | None, step: int) -> Array:
    """(d,) the weighted mean of the rows `at` of Q (None: all)."""
    xp, count = backend.xp, Q.shape[0] if at is None else at.shape[0]
    total: Any = 0.0
    for a in range(0, count, step):
        rows = slice(a, min(a + step, count))
        part = (Q[rows] if at is None else Q[at[rows]]).astype("float64")
        total = total + loss.of_rows(rows).weighted(part).sum(axis=0)
    return xp.asarray(total) / loss.total(count)


def weigh_rows(loss: Loss, backend: Backend, Q: Array) -> Array:
    """All rows of Q as the loss sees them, in float64: with their weights, and less their mean."""
    if loss.plain:
        return Q
    Q, whole = Q.astype("float64"), slice(None)
    mean = loss.mean(backend.xp, Q) if loss.intercept else None
    return loss.seen(backend.xp, Q, whole, mean)


def _gram_step(d: int) -> int:
    """Rows of Q that a Gram matrix takes at a time."""
    return max(1, d, _GRAM_BYTES // (8 * max(d, 1)))


def gram_rounding(count: int, d: int) -> float:
    """|error of entry i, j| <= this |q_i| |q_j|: sums over chunks of sums over rows."""
    step = _gram_step(d)
    return (min(count, step) + -(-count // step) + 2) * 0.5 * _EPS
