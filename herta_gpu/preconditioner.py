"""Lines 3 to 8 of Algorithm 1: Q, its Hadamard sketch, P, and P^-1/2.

P approximates the Hessian T = A^T A, A = M H^-1 X (M: the training rows), by P = Q^T Q with Q the
training rows of p(H_tilde) X, p a Chebyshev polynomial.  A ridge is part of the Hessian, and so of
P.  Gram matrices and factors are float64 whatever the working precision.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from herta_gpu.backends.base import Array, Backend
from herta_gpu.features import Features
from herta_gpu.solver import RegularizedLaplacian, block_cg, chebyshev, chebyshev_error

RANK_CUT = 1e-12  # eigenvalues of P below this share of the largest are rounding, not data
DAMPING = 1e-8  # share of the largest eigenvalue added when there are fewer train rows than columns
_GRAM_BYTES = 64 << 20  # of float64 copies of rows of Q


class Factor(Protocol):
    """C with C C^T = P^-1: the coordinates w, W = C w, that make the problem well conditioned."""

    kind: str
    note: str  # what was cut or damped, for the user
    condition: float  # of P on the kept subspace, estimated

    @property
    def rank(self) -> int:
        """Dimension of the kept subspace."""

    def half(self, w: Array) -> Array:
        """C w: from preconditioned weights to W."""

    def half_T(self, g: Array) -> Array:
        """C^T g: the gradient in preconditioned coordinates."""

    def project(self, v: Array) -> Array:
        """v without what lies outside the kept subspace, in preconditioned coordinates."""


@dataclass
class Identity:
    """No preconditioner: the standard training that the paper compares with."""

    d: int
    kind: str = "none"
    note: str = ""
    condition: float = 1.0

    @property
    def rank(self) -> int:
        return self.d

    def half(self, w: Array) -> Array:
        return w

    def half_T(self, g: Array) -> Array:
        return g

    def project(self, v: Array) -> Array:
        return v


@dataclass
class Cholesky:
    """P = L L^T, C = L^-T: the same iterates as P^-1/2 at a tenth of the cost."""

    backend: Backend
    L: Array
    condition: float
    note: str = ""
    kind: str = "cholesky"

    @property
    def rank(self) -> int:
        return self.L.shape[0]

    def half(self, w: Array) -> Array:
        return self.backend.solve_triangular(self.L, w, trans=True)

    def half_T(self, g: Array) -> Array:
        return self.backend.solve_triangular(self.L, g)

    def project(self, v: Array) -> Array:
        return v


@dataclass
class Eigen:
    """P^-1/2 = V diag(values^-1/2) V^T as the paper prints it, on the kept eigenvectors V."""

    V: Array  # d x r
    values: Array  # (r,)
    condition: float
    note: str = ""
    kind: str = "eigen"

    @property
    def rank(self) -> int:
        return self.V.shape[1]

    def half(self, w: Array) -> Array:
        return self.V @ ((self.V.T @ w) / self.values[:, None] ** 0.5)

    def half_T(self, g: Array) -> Array:
        return self.half(g)  # symmetric

    def project(self, v: Array) -> Array:
        return self.V @ (self.V.T @ v)


@dataclass
class LowRank:
    """(A^T A + shift I)^-1/2 for A with few rows, from the eigenvectors of A A^T."""

    U: Array  # d x r, orthonormal
    values: Array  # (r,) eigenvalues of A A^T
    shift: float
    condition: float
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

    def project(self, v: Array) -> Array:
        return v


@dataclass
class Preconditioner:
    """P^-1/2 and what is known about how well P approximates the Hessian."""

    factor: Factor
    w_start: Array  # P^-1/2 Q^T Y, so that W = P^-1 Q^T Y: least squares on Q, the warm start
    Q_error: float  # proven ||p(H) x - H^-1 x|| <= Q_error ||H^-1 x||; inf on L_tilde or a sketch
    damped: bool  # P carries an extra multiple of I that the Hessian does not have
    rows: Array | None = None  # training rows of Q, kept for training on Q itself
    gram_Q: Array | None = None  # Q^T Q over all rows
    gram_R: Array | None = None  # R^T R, R = X - H Q over all rows


def no_preconditioner(backend: Backend, d: int, c: int) -> Preconditioner:
    """W itself, started from zero as the paper does."""
    return Preconditioner(Identity(d), backend.xp.zeros((d, c)), float("inf"), damped=False)


@dataclass
class Recipe:
    """How to build P; decided by the planner."""

    degree: int  # of the Chebyshev polynomial
    width: int  # columns of X at once
    sketch_rows: int | None  # SRHT rows; None: the exact Gram matrix
    by_rows: bool  # solve for H^-1 M^T instead of H^-1 X
    row_tol: float  # of those solves
    measure: bool  # keep R = X - H Q for the deterministic certificate
    keep_rows: bool  # keep Q's training rows
    symmetric: bool  # the optimizer depends on the coordinates: P^-1/2 itself
    seed: int


def build(
    recipe: Recipe,
    H_tilde: RegularizedLaplacian,
    H: RegularizedLaplacian,
    X: Features,
    Y: Array,
    rows: Array,
    ridge: float,
    sampled: bool,
) -> Preconditioner:
    """Lines 3 to 8 of Algorithm 1 on the training rows."""
    backend, d = H.backend, X.shape[1]
    gram_Q = gram_R = None
    error = float("inf")
    if recipe.by_rows:
        Q = _adjoint_rows(recipe, H, X, rows)
        QtY = gram_product(backend, Q, Y)
    elif recipe.sketch_rows is not None:
        Q, QtY = _sketched_rows(recipe, H_tilde, X, Y, rows)
    else:
        Q, gram_Q, gram_R = _chebyshev_rows(recipe, H_tilde, H, X, rows)
        QtY = gram_product(backend, Q, Y)
        if not sampled:
            error = chebyshev_error(H_tilde, recipe.degree)
    damped = ridge == 0 and Q.shape[0] < d
    factor = _factorise(recipe, backend, Q, ridge, damped)
    kept = Q if recipe.keep_rows and recipe.sketch_rows is None else None
    return Preconditioner(factor, factor.half_T(QtY), error, damped, kept, gram_Q, gram_R)


def _solved_columns(
    recipe: Recipe, H_tilde: RegularizedLaplacian, X: Features
) -> Iterator[tuple[slice, Array, Array]]:
    """Q <- SDDSolver(I + lam L_tilde; X), a block of columns at a time: (columns, X_J, Q_J)."""
    for j in range(0, X.shape[1], recipe.width):
        J = slice(j, min(j + recipe.width, X.shape[1]))
        X_J = X.column_block(J.start, J.stop)
        yield J, X_J, chebyshev(H_tilde, X_J, recipe.degree)


def _chebyshev_rows(
    recipe: Recipe,
    H_tilde: RegularizedLaplacian,
    H: RegularizedLaplacian,
    X: Features,
    rows: Array,
) -> tuple[Array, Array | None, Array | None]:
    """The training rows of Q; with `measure`, also the Gram matrices of Q and R over all rows."""
    xp, (n, d) = H.backend.xp, X.shape
    if not recipe.measure:
        Q = xp.empty((rows.shape[0], d), dtype=H.dtype)
        for J, _, Q_J in _solved_columns(recipe, H_tilde, X):
            Q[:, J] = Q_J[rows]
        return Q, None, None
    Q_all, R = (xp.empty((n, d), dtype=H.dtype) for _ in range(2))
    for J, X_J, Q_J in _solved_columns(recipe, H_tilde, X):
        Q_all[:, J] = Q_J
        R[:, J] = H.residual(X_J, Q_J)
    gram_R = gram(H.backend, R)
    del R
    if rows.shape[0] == n:
        return Q_all, None, gram_R
    return Q_all[rows], gram(H.backend, Q_all), gram_R


def _adjoint_rows(recipe: Recipe, H: RegularizedLaplacian, X: Features, rows: Array) -> Array:
    """A = (H^-1 M^T)^T X row by row: fewer solves than H^-1 X when n_train < d."""
    xp = H.backend.xp
    A = xp.empty((rows.shape[0], X.shape[1]), dtype="float64")
    for i in range(0, rows.shape[0], recipe.width):
        at = rows[i : i + recipe.width]
        unit = xp.zeros((H.n, at.shape[0]), dtype=H.dtype)
        unit[at, xp.arange(at.shape[0])] = 1
        columns, _ = block_cg(H, unit, recipe.row_tol)
        A[i : i + at.shape[0]] = X.transpose_times(columns).T
    return A


def _sketched_rows(
    recipe: Recipe, H_tilde: RegularizedLaplacian, X: Features, Y: Array, rows: Array
) -> tuple[Array, Array]:
    """Q_tilde, s uniform rows of Hadamard(R Q), and Q^T Y; Q itself never exists whole."""
    backend, s = H_tilde.backend, recipe.sketch_rows
    assert s is not None
    Q_tilde = backend.xp.empty((s, X.shape[1]), dtype=H_tilde.dtype)
    QtY = backend.xp.empty((X.shape[1], Y.shape[1]))
    for J, _, Q_J in _solved_columns(recipe, H_tilde, X):
        Q_rows = backend.asarray(Q_J[rows])
        QtY[J] = gram_product(backend, Q_rows, Y)
        Q_tilde[:, J] = backend.srht(Q_rows, s, recipe.seed)
    return Q_tilde, QtY


def gram(backend: Backend, Q: Array) -> Array:
    """Q^T Q in float64, a chunk of rows at a time."""
    return gram_product(backend, Q, Q)


def gram_product(backend: Backend, Q: Array, Y: Array) -> Array:
    """Q^T Y in float64, a chunk of rows at a time."""
    rows = max(1, _GRAM_BYTES // (8 * max(Q.shape[1], 1)))
    out = backend.xp.zeros((Q.shape[1], Y.shape[1]))
    for a in range(0, Q.shape[0], rows):
        part = Q[a : a + rows].astype("float64")
        out += part.T @ (part if Y is Q else Y[a : a + rows])
    return out


def _factorise(recipe: Recipe, backend: Backend, Q: Array, ridge: float, damped: bool) -> Factor:
    """P^-1/2, or a cheaper factor that gives the same iterates."""
    d = Q.shape[1]
    if (damped or ridge > 0) and 2 * Q.shape[0] < d:
        return _low_rank(backend, Q, ridge)
    P = gram(backend, Q)
    top = _largest_eigenvalue(backend, P)
    shift = ridge if ridge > 0 else (DAMPING * top if damped else 0.0)
    note = f"damped by {shift:.1e} (fewer train rows than features)" if damped else ""
    P[backend.xp.arange(d), backend.xp.arange(d)] += shift
    if not recipe.symmetric:
        found = _cholesky(backend, P, top + shift)
        if found is not None:
            return Cholesky(backend, *found, note)
    values, V = backend.xp.linalg.eigh(P)
    keep = values > RANK_CUT * values[-1]
    if not bool(keep.all()):  # synchronize!
        note = f"rank {int(keep.sum()):,} of {d:,}: eigenvalues below {RANK_CUT:g} cut"
    V, values = backend.xp.ascontiguousarray(V[:, keep]), values[keep]
    return Eigen(V, values, float(values[-1] / values[0]), note)


def _cholesky(backend: Backend, P: Array, top: float) -> tuple[Array, float] | None:
    """(L, condition) of P = L L^T, or None when P is too close to singular for it."""
    xp = backend.xp
    try:
        L = xp.linalg.cholesky(P)
    except np.linalg.LinAlgError:
        return None
    v = xp.ones((P.shape[0], 1)) / P.shape[0] ** 0.5
    smallest = top
    for _ in range(12):  # inverse iteration
        v = backend.solve_triangular(L, backend.solve_triangular(L, v), trans=True)
        size = float(xp.linalg.norm(v))  # synchronize!
        if not np.isfinite(size) or size == 0:
            return None
        smallest, v = 1.0 / size, v / size
    return (L, top / smallest) if smallest > 10 * RANK_CUT * top else None


def _largest_eigenvalue(backend: Backend, P: Array) -> float:
    """Power iteration; a few per cent are enough to scale the damping."""
    xp = backend.xp
    v = xp.ones(P.shape[0])
    size = 0.0
    for _ in range(20):
        v = P @ v
        size = float(xp.linalg.norm(v))  # synchronize!
        if size == 0:
            return 1.0
        v = v / size
    return size


def _low_rank(backend: Backend, A: Array, ridge: float) -> LowRank:
    xp = backend.xp
    A = A.astype("float64")
    values, V = xp.linalg.eigh(A @ A.T)
    keep = values > RANK_CUT * max(float(values[-1]), 1e-300)  # synchronize!
    values, V = values[keep], V[:, keep]
    shift = ridge if ridge > 0 else DAMPING * (float(values[-1]) if values.shape[0] else 1.0)
    U = (A.T @ V) / xp.sqrt(values)
    note = "" if ridge > 0 else f"damped by {shift:.1e} (fewer train rows than features)"
    return LowRank(U, values, shift, (float(values[-1]) + shift) / shift, note)
