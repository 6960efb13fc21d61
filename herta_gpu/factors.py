"""P^-1/2, and cheaper factors that give the same iterates.

A factor is a matrix C with C C^T = P^-1: the coordinates w, W = C w, in which the problem is well
conditioned.  `grams` makes them from Q^T Q.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import numpy as np

from herta_gpu.backends.base import Array, Backend, norm

_EPS = float(np.finfo(np.float64).eps)
_UNIT = 0.5 * _EPS  # what one operation rounds
_TINY = 1e-300  # nothing is known of the smallest eigenvalue
NOT_FINITE = (
    "Products of the features are beyond the range of float64: multiply columns of X, y or the "
    "weights so that they are about 1."
)


class Factor(ABC):
    """C with C C^T = P^-1: the coordinates w, W = C w, that make the problem well conditioned."""

    kind: str  # which factor this is
    note: str  # what was cut or added, for the user
    slack: float  # a bound of ||C^T (curvature Q^T Q + ridge) C - I||; inf if P is another matrix

    @property
    @abstractmethod
    def rank(self) -> int:
        """Dimension of the kept subspace."""

    @property
    @abstractmethod
    def size(self) -> float:
        """A bound of ||C||_2."""

    @abstractmethod
    def to_weights(self, w: Array, /) -> Array:
        """C w: from preconditioned weights to W."""

    @abstractmethod
    def to_gradient(self, g: Array, /) -> Array:
        """C^T g: the gradient in preconditioned coordinates."""

    @abstractmethod
    def from_weights(self, W: Array, /) -> Array:
        """C^-1 W: from W to preconditioned weights."""

    def project(self, v: Array) -> Array:
        """v without what lies outside the kept subspace, in preconditioned coordinates."""
        return v

    def amplified(self, sizes: Array) -> float:
        """A bound of ||E C|| over all E whose columns have these norms."""
        return norm(sizes) * self.size


@dataclass
class Identity(Factor):
    """No preconditioner: the standard training that the paper compares with."""

    d: int
    kind = "none"
    note = ""
    slack = math.inf

    @property
    def rank(self) -> int:
        return self.d

    @property
    def size(self) -> float:
        return 1.0

    def to_weights(self, w: Array) -> Array:
        return w

    to_gradient = from_weights = to_weights


@dataclass
class Cholesky(Factor):
    """P[J, J] = L L^T, C = L^-T: the same iterates as P^-1/2 at a tenth of the cost.

    The columns J span the rest, whose weights are 0.
    """

    backend: Backend
    L: Array
    smallest: float  # eigenvalue of P[J, J]; a bound from below
    slack: float
    note: str = ""
    J: Array | None = None  # (r,); None: all columns
    d: int = 0  # number of all columns, where J is only some

    @property
    def kind(self) -> str:  # type: ignore[override]
        return "cholesky" if self.J is None else "pivoted cholesky"

    @property
    def rank(self) -> int:
        return self.L.shape[0]

    @property
    def size(self) -> float:
        return self.smallest**-0.5

    def to_weights(self, w: Array) -> Array:
        found = self.backend.solve_triangular(self.L, w, trans=True)
        if self.J is None:
            return found
        W = self.backend.xp.zeros((self.d, w.shape[1]))
        W[self.J] = found
        return W

    def to_gradient(self, g: Array) -> Array:
        return self.backend.solve_triangular(self.L, self._kept(g))

    def from_weights(self, W: Array) -> Array:
        return self.backend.matmul(self.L.T, self._kept(W))

    def amplified(self, sizes: Array) -> float:
        return super().amplified(self._kept(sizes))

    def _kept(self, rows: Array) -> Array:
        return rows if self.J is None else rows[self.J]


@dataclass
class Eigen(Factor):
    """P^-1/2 = V diag(values^-1/2) V^T as the paper prints it, on the kept eigenvectors V."""

    V: Array  # d x r
    values: Array  # (r,)
    slack: float
    note: str = ""
    kind = "eigen"

    @property
    def rank(self) -> int:
        return self.V.shape[1]

    @property
    def size(self) -> float:
        return float(self.values.min()) ** -0.5 if self.values.shape[0] else 0.0  # synchronize!

    def to_weights(self, w: Array) -> Array:
        return self.V @ ((self.V.T @ w) / self.values[:, None] ** 0.5)

    to_gradient = to_weights  # symmetric

    def from_weights(self, W: Array) -> Array:
        return self.V @ ((self.V.T @ W) * self.values[:, None] ** 0.5)

    def project(self, v: Array) -> Array:
        return self.V @ (self.V.T @ v)


@dataclass
class LowRank(Factor):
    """(A^T A + shift I)^-1/2 for A with few rows, from the eigenvectors of A A^T."""

    U: Array  # d x r, orthonormal
    values: Array  # (r,) eigenvalues of A A^T
    shift: float
    slack: float
    note: str = ""
    kind = "low rank"

    @property
    def rank(self) -> int:
        return self.U.shape[0]

    @property
    def size(self) -> float:
        return self.shift**-0.5

    def to_weights(self, w: Array) -> Array:
        keep = (self.values + self.shift) ** -0.5 - self.shift**-0.5
        return w / self.shift**0.5 + self.U @ (keep[:, None] * (self.U.T @ w))

    to_gradient = to_weights  # symmetric

    def from_weights(self, W: Array) -> Array:
        keep = (self.values + self.shift) ** 0.5 - self.shift**0.5
        return W * self.shift**0.5 + self.U @ (keep[:, None] * (self.U.T @ W))


@dataclass
class RowSpace(Factor):
    """W = V R^-1 w: the span of the rows of A, in which A W = U w with orthonormal columns U.

    Fewer training rows than features leave all other directions without any effect on the loss.
    Where the rows of the true A span a space that is only nearly this one, `slack` is infinite.
    """

    backend: Backend
    V: Array  # d x r, orthonormal
    R: Array  # r x r, upper triangular, (A V)^T (A V) = R^T R
    note: str
    slack: float
    kind = "row space"

    @property
    def rank(self) -> int:
        return self.V.shape[1]

    @property
    def size(self) -> float:
        return math.inf

    def to_weights(self, w: Array) -> Array:
        return self.backend.matmul(self.V, self.backend.solve_triangular(self.R.T, w, trans=True))

    def to_gradient(self, g: Array) -> Array:
        return self.backend.solve_triangular(self.R.T, self.backend.matmul(self.V.T, g))

    def from_weights(self, W: Array) -> Array:
        return self.backend.matmul(self.R, self.backend.matmul(self.V.T, W))

    def amplified(self, sizes: Array) -> float:
        return math.inf


@dataclass
class Spanned(RowSpace):
    """The row space of stored rows A, with C = V R^-1 itself and ||(A C)^T (A C) - I|| measured.

    Of these rows something can be proven: against the optimum over all W = C w.
    """

    C: Array  # d x r

    @classmethod
    def of_rows(cls, backend: Backend, A: Array, V: Array, R: Array, note: str) -> Spanned:
        xp, (count, d), r = backend.xp, A.shape, V.shape[1]
        C = backend.matmul(V, backend.solve_triangular(R.T, xp.eye(r), trans=True))
        AC = backend.matmul(A, C)
        off = (d + 2) * _UNIT * norm(A) * norm(C)  # ||computed A C - A C||_F
        gram = norm(backend.matmul(AC.T, AC) - xp.eye(r)) + (count + 2) * _UNIT * norm(AC) ** 2
        return cls(backend, V, R, note, gram + 2 * off * norm(AC) + off**2, C)

    @property
    def size(self) -> float:
        return norm(self.C)

    def to_weights(self, w: Array) -> Array:
        return self.backend.matmul(self.C, w)

    def to_gradient(self, g: Array) -> Array:
        return self.backend.matmul(self.C.T, g)

    def amplified(self, sizes: Array) -> float:
        by_row = self.backend.xp.sqrt((self.C * self.C).sum(axis=1))
        return min(norm(sizes) * self.size, float((sizes * by_row).sum()))  # synchronize!

    def missed(self, u: Array, sizes: Array) -> float:
        """A bound of ||E (u - C w)|| for some w, over all E whose columns have these norms."""
        xp, w, r = self.backend.xp, self.from_weights(u), self.rank
        rounded = (r + 3) * _UNIT * (self.backend.matmul(abs(self.C), abs(w)) + abs(u))
        left = abs(u - self.to_weights(w)) + rounded
        return float((sizes * xp.sqrt((left * left).sum(axis=1))).sum())  # synchronize!


class Map(Protocol):
    """Coordinates u of the weights: W = C0 u."""

    @property
    def stretch(self) -> float:
        """A bound of ||C0||_2."""

    def weights(self, u: Array) -> Array:
        """C0 u."""

    def transposed(self, g: Array) -> Array:
        """C0^T g."""

    def coordinates(self, W: Array) -> Array:
        """u of W = C0 u."""

    def column_sizes(self, sizes: Array) -> Array:
        """(r,) bounds of the norms of the columns of E C0, given those of E."""


@dataclass
class Diagonal:
    """C0 = diag(scale); a scale of 0 leaves its feature out."""

    scale: Array  # (d,)

    @property
    def stretch(self) -> float:
        return float(self.scale.max())  # synchronize!

    def weights(self, u: Array) -> Array:
        return self.scale[:, None] * u

    transposed = weights

    def coordinates(self, W: Array) -> Array:
        scale = self.scale[:, None]
        return W / (scale + (scale == 0))

    def column_sizes(self, sizes: Array) -> Array:
        return self.scale * sizes


class Composed(Factor):
    """A factor of P for columns X C0, seen from the weights of X: C = C0 C_inner."""

    def __init__(self, C0: Map, inner: Factor) -> None:
        self.C0, self.inner = C0, inner
        self.kind, self.note, self.slack = inner.kind, inner.note, inner.slack

    @property
    def rank(self) -> int:
        return self.inner.rank

    @property
    def size(self) -> float:
        return self.C0.stretch * self.inner.size

    def to_weights(self, w: Array) -> Array:
        return self.C0.weights(self.inner.to_weights(w))

    def to_gradient(self, g: Array) -> Array:
        return self.inner.to_gradient(self.C0.transposed(g))

    def from_weights(self, W: Array) -> Array:
        return self.inner.from_weights(self.C0.coordinates(W))

    def project(self, v: Array) -> Array:
        return self.inner.project(v)

    def amplified(self, sizes: Array) -> float:
        return self.inner.amplified(self.C0.column_sizes(sizes))


class Lifted(NamedTuple):
    """L L^T = P + added I."""

    L: Array
    added: float  # 0 where P has a factor as it is
    smallest: float  # a bound below the eigenvalues of P + added I; 0 where none was asked for


def safe_cholesky(
    backend: Backend, P: Array, first: float = 0.0, proven: bool = False
) -> Lifted | None:
    """A Cholesky factor of P, which is overwritten by P + added I where rounding hides it.

    Parameters
    ----------
    backend : Backend
    P : (d, d) array
        Symmetric, without a negative eigenvalue but for rounding.
    first : float
        What is added before the first try.
    proven : bool
        Whether a bound of the smallest eigenvalue is wanted, too: more is added until there is one.

    Returns
    -------
    Lifted, or None where P is not finite or no such matrix: then more than its trace would be
    needed, and it has no factor at all.

    Examples
    --------
    >>> import numpy as np
    >>> from herta_gpu.backends import get_backend
    >>> P = np.ones((3, 3)) - 1e-16
    >>> L, added, _ = safe_cholesky(get_backend("cpu"), P, proven=True)
    >>> 0 < added < 1e-13, bool(abs(L @ L.T - P).max() < 1e-15)
    (True, True)
    """
    d, trace = P.shape[0], float(P.diagonal().sum())  # synchronize!
    if not 0 < trace < math.inf:
        return None
    diagonal, added, more = backend.xp.arange(d), first, 4 * (d + 2) * _EPS * trace
    if first:
        P[diagonal, diagonal] += first
    while added <= trace + first:
        L = backend.cholesky(P)
        smallest = smallest_eigenvalue(backend, P, L) if proven and L is not None else 0.0
        if L is not None and (smallest > _TINY or not proven):
            return Lifted(L, added, smallest)
        P[diagonal, diagonal] += more
        added, more = added + more, 4 * more
    return None


def smallest_eigenvalue(backend: Backend, P: Array, L: Array) -> float:
    """A number that is proven to be below all eigenvalues of P = L L^T.

    The proof is a Cholesky factor of P minus that multiple of I.  Inverse iteration says which
    multiple to try.
    """

    def inverse(v: Array) -> Array:
        return backend.solve_triangular(L, backend.solve_triangular(L, v), trans=True)

    d, size = P.shape[0], power_iteration(backend.xp, inverse, P.shape[0], 6)
    # float64 finds no factor of a matrix that is indefinite by more than this.
    rounding = (d + 2) * _EPS * float(P.diagonal().sum())  # synchronize!
    bound = 0.5 / size if np.isfinite(size) and size > 0 else 0.0
    diagonal = backend.xp.arange(d)
    while bound > rounding:
        shifted = P.copy()
        shifted[diagonal, diagonal] -= bound
        if backend.cholesky(shifted) is not None:
            return bound - rounding
        bound /= 4
    return _TINY


def power_iteration(xp: Any, multiply: Callable[[Array], Array], d: int, steps: int) -> float:
    """The largest eigenvalue of a symmetric operator, from below; the host waits once.

    It is right to some per cent after a few steps.
    """
    # No structure of the operator is likely to be orthogonal to these.
    v = xp.asarray(np.random.default_rng(0).standard_normal((d, 1)))
    v = v / xp.linalg.norm(v)
    for _ in range(steps):
        v = multiply(v)
        size = xp.linalg.norm(v)
        v = v / xp.where(size > 0, size, 1.0)
    return float(size)  # synchronize!


def spectral_norm(backend: Backend, M: Array) -> float:
    """||M||, to some per cent and rather above."""
    if M.size == 0:
        return 0.0

    def squared(v: Array) -> Array:
        return backend.matmul(M.T, backend.matmul(M, v))

    return 1.1 * power_iteration(backend.xp, squared, M.shape[1], 8) ** 0.5
