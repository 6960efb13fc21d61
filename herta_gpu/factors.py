"""P^-1/2, and cheaper factors that give the same iterates.

P = curvature * Q^T Q + shift * I.  The curvature is 1 for MSE and that of the softmax for cross
entropy; the shift is the ridge or, where there are fewer training rows than columns, a damping.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np

from herta_gpu.backends.base import Array, Backend

RANK_CUT = 1e-12  # eigenvalues of P below this share of the largest are rounding, not data
_TINY = 1e-300  # nothing is known of the smallest eigenvalue
DAMPING = 1e-7  # share of the largest eigenvalue added when there are fewer train rows than columns


class Factor(Protocol):
    """C with C C^T = P^-1: the coordinates w, W = C w, that make the problem well conditioned."""

    @property
    def kind(self) -> str:
        """Which factor this is."""

    @property
    def note(self) -> str:
        """What was cut or damped, for the user."""

    @property
    def rank(self) -> int:
        """Dimension of the kept subspace."""

    def half(self, w: Array) -> Array:
        """C w: from preconditioned weights to W."""

    def half_T(self, g: Array) -> Array:
        """C^T g: the gradient in preconditioned coordinates."""

    def unhalf(self, W: Array) -> Array:
        """C^-1 W: from W to preconditioned weights."""

    def project(self, v: Array) -> Array:
        """v without what lies outside the kept subspace, in preconditioned coordinates."""

    def amplified(self, sizes: Array) -> float:
        """A bound of ||E C|| over all E whose columns have these norms."""


@dataclass
class Identity:
    """No preconditioner: the standard training that the paper compares with."""

    d: int
    kind: str = "none"
    note: str = ""

    @property
    def rank(self) -> int:
        return self.d

    def half(self, w: Array) -> Array:
        return w

    def half_T(self, g: Array) -> Array:
        return g

    def unhalf(self, W: Array) -> Array:
        return W

    def project(self, v: Array) -> Array:
        return v

    def amplified(self, sizes: Array) -> float:
        return float((sizes**2).sum() ** 0.5)


@dataclass
class Cholesky:
    """P = L L^T, C = L^-T: the same iterates as P^-1/2 at a tenth of the cost."""

    backend: Backend
    L: Array
    smallest: float  # eigenvalue of P; a bound from below
    note: str = ""
    kind: str = "cholesky"

    @property
    def rank(self) -> int:
        return self.L.shape[0]

    def half(self, w: Array) -> Array:
        return self.backend.solve_triangular(self.L, w, trans=True)

    def half_T(self, g: Array) -> Array:
        return self.backend.solve_triangular(self.L, g)

    def unhalf(self, W: Array) -> Array:
        return self.backend.matmul(self.L.T, W)

    def project(self, v: Array) -> Array:
        return v

    def amplified(self, sizes: Array) -> float:
        return float(((sizes**2).sum() / self.smallest) ** 0.5)


@dataclass
class Pivoted:
    """P[J, J] = L L^T on columns J that span the rest; the weights of the rest are 0."""

    backend: Backend
    L: Array  # r x r
    J: Array  # (r,)
    d: int
    smallest: float  # eigenvalue of P[J, J]; a bound from below
    note: str = ""
    kind: str = "pivoted cholesky"

    @property
    def rank(self) -> int:
        return self.J.shape[0]

    def half(self, w: Array) -> Array:
        W = self.backend.xp.zeros((self.d, w.shape[1]))
        W[self.J] = self.backend.solve_triangular(self.L, w, trans=True)
        return W

    def half_T(self, g: Array) -> Array:
        return self.backend.solve_triangular(self.L, g[self.J])

    def unhalf(self, W: Array) -> Array:
        return self.backend.matmul(self.L.T, W[self.J])

    def project(self, v: Array) -> Array:
        return v

    def amplified(self, sizes: Array) -> float:
        return float(((sizes[self.J] ** 2).sum() / self.smallest) ** 0.5)


@dataclass
class Eigen:
    """P^-1/2 = V diag(values^-1/2) V^T as the paper prints it, on the kept eigenvectors V."""

    V: Array  # d x r
    values: Array  # (r,)
    note: str = ""
    kind: str = "eigen"

    @property
    def rank(self) -> int:
        return self.V.shape[1]

    def half(self, w: Array) -> Array:
        return self.V @ ((self.V.T @ w) / self.values[:, None] ** 0.5)

    def half_T(self, g: Array) -> Array:
        return self.half(g)  # symmetric

    def unhalf(self, W: Array) -> Array:
        return self.V @ ((self.V.T @ W) * self.values[:, None] ** 0.5)

    def project(self, v: Array) -> Array:
        return self.V @ (self.V.T @ v)

    def amplified(self, sizes: Array) -> float:
        return float(((sizes**2).sum() / self.values.min()) ** 0.5)


@dataclass
class LowRank:
    """(A^T A + shift I)^-1/2 for A with few rows, from the eigenvectors of A A^T."""

    U: Array  # d x r, orthonormal
    values: Array  # (r,) eigenvalues of A A^T
    shift: float
    note: str = ""
    kind: str = "low rank"

    @property
    def rank(self) -> int:
        return self.U.shape[0]

    def half(self, w: Array) -> Array:
        Uw = self.U.T @ w
        keep = (self.values + self.shift) ** -0.5 - self.shift**-0.5
        return w / self.shift**0.5 + self.U @ (keep[:, None] * Uw)

    def half_T(self, g: Array) -> Array:
        return self.half(g)  # symmetric

    def unhalf(self, W: Array) -> Array:
        keep = (self.values + self.shift) ** 0.5 - self.shift**0.5
        return W * self.shift**0.5 + self.U @ (keep[:, None] * (self.U.T @ W))

    def project(self, v: Array) -> Array:
        return v

    def amplified(self, sizes: Array) -> float:
        return float(((sizes**2).sum() / self.shift) ** 0.5)


@dataclass
class Scaled:
    """A factor of P for columns of X scaled to norm 1: C = diag(scale) C_inner."""

    scale: Array  # (d,)
    inner: Factor

    @property
    def kind(self) -> str:
        return self.inner.kind

    @property
    def note(self) -> str:
        return self.inner.note

    @property
    def rank(self) -> int:
        return self.inner.rank

    def half(self, w: Array) -> Array:
        return self.scale[:, None] * self.inner.half(w)

    def half_T(self, g: Array) -> Array:
        return self.inner.half_T(self.scale[:, None] * g)

    def unhalf(self, W: Array) -> Array:
        scale = self.scale[:, None]
        return self.inner.unhalf(W / (scale + (scale == 0)))

    def project(self, v: Array) -> Array:
        return self.inner.project(v)

    def amplified(self, sizes: Array) -> float:
        return self.inner.amplified(self.scale * sizes)


class Gram(Protocol):
    """Q^T Q, from which P and its factor are made for any curvature and ridge."""

    def factor(self, curvature: float, ridge: float, symmetric: bool) -> Factor:
        """C with C C^T = (curvature Q^T Q + shift I)^-1; `symmetric`: P^-1/2 itself."""


@dataclass
class DenseGram:
    """Q^T Q as a d x d matrix."""

    backend: Backend
    QtQ: Array
    units: Array  # (d,) norms of the columns of X
    damped: bool

    def factor(self, curvature: float, ridge: float, symmetric: bool) -> Factor:
        xp, d = self.backend.xp, self.QtQ.shape[0]
        P = curvature * self.QtQ
        diagonal = xp.arange(d)
        P[diagonal, diagonal] += ridge
        # A feature's unit must not decide whether it counts, so columns of X are scaled to norm 1.
        # What is small after that is barely seen by the training rows, whatever its unit.
        filled = self.units > 0
        scale = xp.where(filled, 1.0 / xp.where(filled, self.units, 1.0), 0.0)
        P *= scale[:, None]
        P *= scale[None, :]
        return Scaled(scale, self._factor(P, symmetric))

    def _factor(self, P: Array, symmetric: bool) -> Factor:
        """A factor of the scaled P, damped and cut as far as it must be."""
        xp, d = self.backend.xp, P.shape[0]
        top = _largest_eigenvalue(self.backend, P)
        note = ""
        if self.damped:
            P[xp.arange(d), xp.arange(d)] += DAMPING * top
            note = _damping_note(DAMPING)
        if not symmetric:
            return self._triangular(P, top, note)
        values, V = xp.linalg.eigh(P)
        keep = values > RANK_CUT * xp.maximum(values[-1], 1e-300)
        if not bool(keep.all()):  # synchronize!
            note = (
                f"optimum over {int(keep.sum()):,} of {d:,} directions, those above "
                f"{RANK_CUT:g} of the largest"
            )
        return Eigen(xp.ascontiguousarray(V[:, keep]), values[keep], note)

    def _triangular(self, P: Array, top: float, note: str) -> Factor:
        """A Cholesky factor; of well-separated columns only where P is close to singular."""
        backend, d = self.backend, P.shape[0]
        L = backend.cholesky(P)
        # No eigenvalue is above the least square of L's diagonal: a glance often settles it.
        if L is not None and float(L.diagonal().min()) ** 2 > 10 * RANK_CUT * top:  # synchronize!
            smallest = _smallest_eigenvalue(backend, P, L)
            if smallest > 10 * RANK_CUT * top:
                return Cholesky(backend, L, smallest, note)
        L, J = backend.pivoted_cholesky(P, RANK_CUT * top)
        r = J.shape[0]
        if r < d:
            note = (
                f"optimum over {r:,} of {d:,} features; on the training rows the others add less "
                f"than {RANK_CUT**0.5:.0e} to their span and have weight 0"
            )
        smallest = _smallest_eigenvalue(backend, P[J[:, None], J[None, :]], L) if r else 1.0
        return Pivoted(backend, L, J, d, smallest, note)


@dataclass
class LowRankGram:
    """Q^T Q = U diag(values) U^T for a Q with few rows."""

    U: Array  # d x r
    values: Array  # (r,)
    damped: bool

    @classmethod
    def of_rows(cls, backend: Backend, Q: Array, damped: bool) -> LowRankGram:
        xp, Q = backend.xp, Q.astype("float64")
        values, V = xp.linalg.eigh(Q @ Q.T)
        keep = values > RANK_CUT * max(float(values[-1]), 1e-300)  # synchronize!
        values, V = values[keep], V[:, keep]
        return cls((Q.T @ V) / xp.sqrt(values), values, damped)

    def factor(self, curvature: float, ridge: float, symmetric: bool) -> Factor:
        values = curvature * self.values
        top = float(values[-1]) if values.shape[0] else 1.0  # synchronize!
        # P need not be the Hessian: a shift below this would only cancel in `LowRank.half`.
        shift = max(ridge, RANK_CUT * top) if ridge > 0 else DAMPING * top
        note = _damping_note(DAMPING) if self.damped else ""
        return LowRank(self.U, values, shift, note)


def _damping_note(share: float) -> str:
    return f"damped by {share:g} of its largest eigenvalue: fewer train rows than features"


def _smallest_eigenvalue(backend: Backend, P: Array, L: Array) -> float:
    """Proven to be below all eigenvalues of P = L L^T: less so much of I, P has a factor still.

    Inverse iteration says what to try.
    """

    def inverse(v: Array) -> Array:
        return backend.solve_triangular(L, backend.solve_triangular(L, v), trans=True)

    d, size = P.shape[0], _growth(backend.xp, inverse, P.shape[0], 6)
    # float64 finds no factor of a matrix that is indefinite by more than this.
    rounding = (d + 2) * float(np.finfo(np.float64).eps) * float(P.diagonal().sum())  # synchronize!
    bound = 0.5 / size if np.isfinite(size) and size > 0 else 0.0
    diagonal = backend.xp.arange(d)
    while bound > rounding:
        shifted = P.copy()
        shifted[diagonal, diagonal] -= bound
        if backend.cholesky(shifted) is not None:
            return bound - rounding
        bound /= 4
    return _TINY


def _largest_eigenvalue(backend: Backend, P: Array) -> float:
    """Power iteration; a few per cent are enough to scale the damping."""
    return _growth(backend.xp, lambda v: backend.matmul(P, v), P.shape[0], 20) or 1.0


def _growth(xp: Any, multiply: Callable[[Array], Array], d: int, steps: int) -> float:
    """By how much `multiply` stretches a vector after so many steps; the host waits once."""
    # No structure of P is likely to be orthogonal to these.
    v = xp.asarray(np.random.default_rng(0).standard_normal((d, 1)))
    v = v / xp.linalg.norm(v)
    for _ in range(steps):
        v = multiply(v)
        size = xp.linalg.norm(v)
        v = v / xp.where(size > 0, size, 1.0)
    return float(size)  # synchronize!
