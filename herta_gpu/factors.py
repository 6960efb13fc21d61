"""P^-1/2, and cheaper factors that give the same iterates.

A factor is a matrix C with C C^T = P^-1: the coordinates w, W = C w, in which the problem is well
conditioned.  `grams` makes them from Q^T Q.
"""

from __future__ import annotations

import math
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


class Factor(Protocol):
    """C with C C^T = P^-1: the coordinates w, W = C w, that make the problem well conditioned."""

    @property
    def kind(self) -> str:
        """Which factor this is."""

    @property
    def note(self) -> str:
        """What was cut or added, for the user."""

    @property
    def rank(self) -> int:
        """Dimension of the kept subspace."""

    @property
    def slack(self) -> float:
        """A bound of ||C^T (curvature Q^T Q + ridge) C - I||; inf if P is another matrix."""

    def to_weights(self, w: Array) -> Array:
        """C w: from preconditioned weights to W."""

    def to_gradient(self, g: Array) -> Array:
        """C^T g: the gradient in preconditioned coordinates."""

    def from_weights(self, W: Array) -> Array:
        """C^-1 W: from W to preconditioned weights."""

    def project(self, v: Array) -> Array:
        """v without what lies outside the kept subspace, in preconditioned coordinates."""

    @property
    def size(self) -> float:
        """A bound of ||C||_2."""

    def amplified(self, sizes: Array) -> float:
        """A bound of ||E C|| over all E whose columns have these norms."""


@dataclass
class Identity:
    """No preconditioner: the standard training that the paper compares with."""

    d: int
    kind: str = "none"
    note: str = ""
    slack: float = math.inf

    @property
    def rank(self) -> int:
        return self.d

    def to_weights(self, w: Array) -> Array:
        return w

    def to_gradient(self, g: Array) -> Array:
        return g

    def from_weights(self, W: Array) -> Array:
        return W

    def project(self, v: Array) -> Array:
        return v

    @property
    def size(self) -> float:
        return 1.0

    def amplified(self, sizes: Array) -> float:
        return norm(sizes)


@dataclass
class Cholesky:
    """P = L L^T, C = L^-T: the same iterates as P^-1/2 at a tenth of the cost."""

    backend: Backend
    L: Array
    smallest: float  # eigenvalue of P; a bound from below
    slack: float
    note: str = ""
    kind: str = "cholesky"

    @property
    def rank(self) -> int:
        return self.L.shape[0]

    def to_weights(self, w: Array) -> Array:
        return self.backend.solve_triangular(self.L, w, trans=True)

    def to_gradient(self, g: Array) -> Array:
        return self.backend.solve_triangular(self.L, g)

    def from_weights(self, W: Array) -> Array:
        return self.backend.matmul(self.L.T, W)

    def project(self, v: Array) -> Array:
        return v

    @property
    def size(self) -> float:
        return self.smallest**-0.5

    def amplified(self, sizes: Array) -> float:
        return norm(sizes) * self.size


@dataclass
class Pivoted:
    """P[J, J] = L L^T on columns J that span the rest; the weights of the rest are 0."""

    backend: Backend
    L: Array  # r x r
    J: Array  # (r,)
    d: int
    smallest: float  # eigenvalue of P[J, J]; a bound from below
    slack: float
    note: str = ""
    kind: str = "pivoted cholesky"

    @property
    def rank(self) -> int:
        return self.J.shape[0]

    def to_weights(self, w: Array) -> Array:
        W = self.backend.xp.zeros((self.d, w.shape[1]))
        W[self.J] = self.backend.solve_triangular(self.L, w, trans=True)
        return W

    def to_gradient(self, g: Array) -> Array:
        return self.backend.solve_triangular(self.L, g[self.J])

    def from_weights(self, W: Array) -> Array:
        return self.backend.matmul(self.L.T, W[self.J])

    def project(self, v: Array) -> Array:
        return v

    @property
    def size(self) -> float:
        return self.smallest**-0.5

    def amplified(self, sizes: Array) -> float:
        return norm(sizes[self.J]) * self.size


@dataclass
class Eigen:
    """P^-1/2 = V diag(values^-1/2) V^T as the paper prints it, on the kept eigenvectors V."""

    V: Array  # d x r
    values: Array  # (r,)
    slack: float
    note: str = ""
    kind: str = "eigen"

    @property
    def rank(self) -> int:
        return self.V.shape[1]

    def to_weights(self, w: Array) -> Array:
        return self.V @ ((self.V.T @ w) / self.values[:, None] ** 0.5)

    def to_gradient(self, g: Array) -> Array:
        return self.to_weights(g)  # symmetric

    def from_weights(self, W: Array) -> Array:
        return self.V @ ((self.V.T @ W) * self.values[:, None] ** 0.5)

    def project(self, v: Array) -> Array:
        return self.V @ (self.V.T @ v)

    @property
    def size(self) -> float:
        return float(self.values.min()) ** -0.5 if self.values.shape[0] else 0.0  # synchronize!

    def amplified(self, sizes: Array) -> float:
        return norm(sizes) * self.size


@dataclass
class LowRank:
    """(A^T A + shift I)^-1/2 for A with few rows, from the eigenvectors of A A^T."""

    U: Array  # d x r, orthonormal
    values: Array  # (r,) eigenvalues of A A^T
    shift: float
    slack: float
    note: str = ""
    kind: str = "low rank"

    @property
    def rank(self) -> int:
        return self.U.shape[0]

    def to_weights(self, w: Array) -> Array:
        Uw = self.U.T @ w
        keep = (self.values + self.shift) ** -0.5 - self.shift**-0.5
        return w / self.shift**0.5 + self.U @ (keep[:, None] * Uw)

    def to_gradient(self, g: Array) -> Array:
        return self.to_weights(g)  # symmetric

    def from_weights(self, W: Array) -> Array:
        keep = (self.values + self.shift) ** 0.5 - self.shift**0.5
        return W * self.shift**0.5 + self.U @ (keep[:, None] * (self.U.T @ W))

    def project(self, v: Array) -> Array:
        return v

    @property
    def size(self) -> float:
        return self.shift**-0.5

    def amplified(self, sizes: Array) -> float:
        return norm(sizes) * self.size


@dataclass
class RowSpace:
    """W = V R^-1 w: the span of the rows of A, in which A W = U w with orthonormal columns U.

    Fewer training rows than features leave all other directions without any effect on the loss.
    """

    backend: Backend
    V: Array  # d x r, orthonormal
    R: Array  # r x r, upper triangular, (A V)^T (A V) = R^T R
    note: str = ""
    slack: float = math.inf  # the rows of the true A span a space that is only nearly this one
    kind: str = "row space"

    @property
    def rank(self) -> int:
        return self.V.shape[1]

    def to_weights(self, w: Array) -> Array:
        return self.backend.matmul(self.V, self.backend.solve_triangular(self.R.T, w, trans=True))

    def to_gradient(self, g: Array) -> Array:
        return self.backend.solve_triangular(self.R.T, self.backend.matmul(self.V.T, g))

    def from_weights(self, W: Array) -> Array:
        return self.backend.matmul(self.R, self.backend.matmul(self.V.T, W))

    def project(self, v: Array) -> Array:
        return v

    @property
    def size(self) -> float:
        return math.inf

    def amplified(self, sizes: Array) -> float:
        return math.inf


@dataclass
class Spanned(RowSpace):
    """The same with C = V R^-1 at hand, and what it makes of the stored rows measured.

    Of these rows something can be proven: against the optimum over all W = C w.
    """

    C: Array | None = None  # d x r

    @classmethod
    def of_rows(cls, backend: Backend, A: Array, V: Array, R: Array, note: str) -> Spanned:
        xp, (count, d), r = backend.xp, A.shape, V.shape[1]
        C = backend.matmul(V, backend.solve_triangular(R.T, xp.eye(r), trans=True))
        AC = backend.matmul(A, C)
        off = (d + 2) * _UNIT * norm(A) * norm(C)  # ||computed A C - A C||_F
        gram = norm(backend.matmul(AC.T, AC) - xp.eye(r)) + (count + 2) * _UNIT * norm(AC) ** 2
        slack = gram + 2 * off * norm(AC) + off**2
        return cls(backend, V, R, note, slack, "row space", C)

    def to_weights(self, w: Array) -> Array:
        assert self.C is not None
        return self.backend.matmul(self.C, w)

    def to_gradient(self, g: Array) -> Array:
        assert self.C is not None
        return self.backend.matmul(self.C.T, g)

    @property
    def size(self) -> float:
        assert self.C is not None
        return norm(self.C)

    def amplified(self, sizes: Array) -> float:
        assert self.C is not None
        by_row = self.backend.xp.sqrt((self.C * self.C).sum(axis=1))
        return min(norm(sizes) * self.size, float((sizes * by_row).sum()))  # synchronize!

    def missed(self, u: Array, sizes: Array) -> float:
        """A bound of ||E (u - C w)|| for some w, over all E whose columns have these norms."""
        assert self.C is not None
        xp, w, r = self.backend.xp, self.from_weights(u), self.rank
        rounded = (r + 3) * _UNIT * (self.backend.matmul(abs(self.C), abs(w)) + abs(u))
        left = abs(u - self.to_weights(w)) + rounded
        return float((sizes * xp.sqrt((left * left).sum(axis=1))).sum())  # synchronize!


@dataclass
class _Around:
    """A factor in other coordinates; what was cut or added is that of the inner one."""

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

    @property
    def slack(self) -> float:
        return self.inner.slack

    def project(self, v: Array) -> Array:
        return self.inner.project(v)


class Scaled(_Around):
    """A factor of P in scaled coordinates: C = diag(scale) C_inner."""

    def __init__(self, scale: Array, inner: Factor) -> None:
        super().__init__(inner)
        self.scale = scale  # (d,)

    def to_weights(self, w: Array) -> Array:
        return self.scale[:, None] * self.inner.to_weights(w)

    def to_gradient(self, g: Array) -> Array:
        return self.inner.to_gradient(self.scale[:, None] * g)

    def from_weights(self, W: Array) -> Array:
        scale = self.scale[:, None]
        return self.inner.from_weights(W / (scale + (scale == 0)))

    @property
    def size(self) -> float:
        return float(self.scale.max()) * self.inner.size  # synchronize!

    def amplified(self, sizes: Array) -> float:
        return self.inner.amplified(self.scale * sizes)


class Composed(_Around):
    """A factor of P for columns X C0: C = C0 C_inner."""

    def __init__(self, backend: Backend, C0: Array, K: Array, inner: Factor) -> None:
        super().__init__(inner)
        self.backend, self.C0 = backend, C0  # d x r
        self.K = K  # d x r, K^T C0 = I

    def to_weights(self, w: Array) -> Array:
        return self.backend.matmul(self.C0, self.inner.to_weights(w))

    def to_gradient(self, g: Array) -> Array:
        return self.inner.to_gradient(self.backend.matmul(self.C0.T, g))

    def from_weights(self, W: Array) -> Array:
        return self.inner.from_weights(self.backend.matmul(self.K.T, W))

    @property
    def size(self) -> float:
        return norm(self.C0) * self.inner.size

    def amplified(self, sizes: Array) -> float:
        return self.inner.amplified(self.backend.matmul(abs(self.C0).T, sizes[:, None])[:, 0])


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

    d, size = P.shape[0], growth(backend.xp, inverse, P.shape[0], 6)
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


def growth(xp: Any, multiply: Callable[[Array], Array], d: int, steps: int) -> float:
    """By how much `multiply` stretches a vector after so many steps; the host waits once."""
    # No structure of P is likely to be orthogonal to these.
    v = xp.asarray(np.random.default_rng(0).standard_normal((d, 1)))
    v = v / xp.linalg.norm(v)
    for _ in range(steps):
        v = multiply(v)
        size = xp.linalg.norm(v)
        v = v / xp.where(size > 0, size, 1.0)
    return float(size)  # synchronize!
