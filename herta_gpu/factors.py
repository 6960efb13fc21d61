"""P^-1/2, and cheaper factors that give the same iterates.

A factor is a matrix C with C C^T = P^-1: the coordinates w, W = C w, in which the problem is well
conditioned.  They are made from Q^T Q, with P = curvature * Q^T Q + ridge * I.  The curvature is 1
for MSE and that of the softmax for cross entropy.  Three rules keep certificates true:

* With a ridge no direction is ever cut.  P is scaled to a unit diagonal, ridge included, and where
  rounding hides its smallest eigenvalue a little is added to that diagonal.
* Without a ridge, directions that P hardly sees are cut.  The factor's `rank` tells how many stay,
  and what is proven is proven for those only.
* A factor whose P is not curvature * Q^T Q + ridge * I up to rounding (something was added) has an
  infinite `slack`, and whoever builds on that form must refuse it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np

from herta_gpu.backends.base import Array, Backend, norm, unit_roundoff
from herta_gpu.features import in_float64
from herta_gpu.losses import LOSSES, Loss

_UNIT = unit_roundoff()
RANK_CUT = 1e-12  # eigenvalues of P below this share of the largest are rounding, not data
ROW_CUT = 1e-9  # singular values of A below this share of the largest are left over by the solves
DAMPING = 1e-7  # share of the largest eigenvalue added when Q has too few rows to span the features
_DAMPED = f"damped by {DAMPING:g} of its largest eigenvalue: fewer train rows than features"
_PLAIN_RIDGE = 1e-6  # share of the largest eigenvalue from which on Q Q^T is exact enough
_GRAM_BYTES = 16 << 20  # float64 copies of rows of Q at a time; P's own size if that is more
_LEAST_RIDGE = 1e-20  # share of the largest eigenvalue below which a ridge drowns in rounding
_TINY = 1e-300  # nothing is known of the smallest eigenvalue
NOT_FINITE = (
    "Products of the features are beyond the range of float64: multiply columns of X, y or the "
    "weights so that they are about 1."
)


class Map:
    """Coordinates u of the weights: W = C u.

    C and K = C^-T (K^T C = I) are d x r matrices, or (d,) diagonals; a 0 on C's diagonal leaves
    a feature out.  A ridge on W is one on u: ||W||^2 = <u, G u>, G = C^T C.

    Examples
    --------
    >>> import numpy as np
    >>> from herta_gpu.backends import get_backend
    >>> C0 = Map(get_backend("cpu"), np.array([[2.0, 1.0], [0.0, 1.0], [1.0, 0.0]]))
    >>> u = np.array([[1.0], [-1.0]])
    >>> float((u * C0.times_ridge(u)).sum()), float((C0.to_weights(u) ** 2).sum())
    (3.0, 3.0)
    """

    C: Any
    K: Any
    shape: tuple[int, int]

    def __init__(self, backend: Backend, C: Array, K: Array | None = None) -> None:
        self.backend, self.C = backend, C
        self.K = 1.0 / (C + (C == 0)) if K is None and C.ndim == 1 else K
        self.shape = C.shape[0], C.shape[-1]

    @cached_property
    def ridge(self) -> Array:
        """G; (r,) where it is diagonal."""
        return self.C**2 if self.C.ndim == 1 else self.backend.matmul(self.C.T, self.C)

    def times_ridge(self, u: Array) -> Array:
        """G u."""
        return multiply(self.backend, self.ridge, u)

    @property
    def stretch(self) -> float:
        """A bound of ||C||_2."""
        return float(self.C.max()) if self.C.ndim == 1 else norm(self.C)  # synchronize!

    def to_weights(self, u: Array, /) -> Array:
        """C u: from these coordinates to W."""
        return multiply(self.backend, self.C, u)

    def to_gradient(self, g: Array, /) -> Array:
        """C^T g: a gradient in these coordinates."""
        return multiply(self.backend, self.C.T, g)

    def from_weights(self, W: Array, /) -> Array:
        """C^-1 W: from W to these coordinates."""
        return multiply(self.backend, self.K.T, W)

    def gradient(self, g: Array) -> Array:
        """C^-T g: a gradient in u as W sees it."""
        return multiply(self.backend, self.K, g)

    def rows(self, Q: Array) -> Array:
        """Q C^-1: rows of H^-1 X C as rows of H^-1 X."""
        return self.backend.xp.ascontiguousarray(self.gradient(Q.T).T)

    def column_sizes(self, sizes: Array) -> Array:
        """(r,) bounds of the norms of the columns of E C, given those of E."""
        return multiply(self.backend, abs(self.C).T, sizes[:, None])[:, 0]


def multiply(backend: Backend, M: Array, u: Array) -> Array:
    """M u; a diagonal M is given as a vector."""
    return M[:, None] * u if M.ndim == 1 else backend.matmul(M, u)


class Factor:
    """C with C C^T = P^-1: the coordinates w, W = C w, that make the problem well conditioned.
    Here C = I, no preconditioner: the standard training that the paper compares with."""

    note: str = ""  # what was cut or added, for the user
    slack = math.inf  # a bound of ||C^T (curvature Q^T Q + ridge) C - I||; inf for another P
    rank: int  # dimension of the kept subspace
    size: Any = 1.0  # a bound of ||C||_2

    def __init__(self, rank: int) -> None:
        self.rank = rank

    def to_weights(self, w: Array, /) -> Array:
        """C w: from preconditioned weights to W."""
        return w

    def to_gradient(self, g: Array, /) -> Array:
        """C^T g: the gradient in preconditioned coordinates."""
        return g

    def from_weights(self, W: Array, /) -> Array:
        """C^-1 W: from W to preconditioned weights."""
        return W

    def project(self, v: Array) -> Array:
        """v without what lies outside the kept subspace, in preconditioned coordinates."""
        return v

    @property
    def singular_values(self) -> tuple[float, float]:
        """Bounds of the singular values of the rows behind P (and of the ridge's) times C."""
        return math.sqrt(1 - self.slack), math.sqrt(1 + self.slack)

    def product_bound(self, sizes: Array) -> float:
        """A bound of ||E C|| over all E whose columns have these norms."""
        return norm(sizes) * self.size


@dataclass
class Cholesky(Factor):
    """P[J, J] = L L^T, C = L^-T: the same iterates as P^-1/2 at a tenth of the cost.  The columns J
    span the rest, whose weights are 0."""

    backend: Backend
    L: Array
    smallest: float  # eigenvalue of P[J, J]; a bound from below
    slack: float
    note: str = ""
    J: Array | None = None  # (r,); None: all columns
    d: int = 0  # number of all columns, where J is only some

    def __post_init__(self) -> None:
        self.rank = self.L.shape[0]
        self.size = self.smallest**-0.5 if self.smallest else math.inf

    def to_weights(self, w: Array) -> Array:
        found = self.backend.solve_triangular(self.L, w, trans=True)
        if self.J is None:
            return found
        W = self.backend.xp.zeros((self.d, w.shape[1]))
        W[self.J] = found
        return W

    def to_gradient(self, g: Array) -> Array:
        return self.backend.solve_triangular(self.L, self._select(g))

    def from_weights(self, W: Array) -> Array:
        return self.backend.matmul(self.L.T, self._select(W))

    def product_bound(self, sizes: Array) -> float:
        return super().product_bound(self._select(sizes))

    def _select(self, rows: Array) -> Array:
        return rows if self.J is None else rows[self.J]


@dataclass
class Eigen(Factor):
    """P^-1/2 itself, as the paper prints it: P = V diag(values) V^T + shift I.  Without a shift
    what V does not span is cut."""

    V: Array  # d x r, orthonormal
    values: Array  # (r,)
    slack: float
    note: str
    shift: float = 0.0

    def __post_init__(self) -> None:
        self.rank = self.V.shape[0 if self.shift else 1]

    @property
    def size(self) -> float:
        smallest = self.shift or (float(self.values.min()) if self.rank else math.inf)
        return smallest**-0.5  # synchronize!

    def to_weights(self, w: Array) -> Array:
        return self._power(-0.5, w)

    to_gradient = to_weights  # symmetric

    def from_weights(self, W: Array) -> Array:
        return self._power(0.5, W)

    def project(self, v: Array) -> Array:
        return v if self.shift else self.V @ (self.V.T @ v)

    def _power(self, exponent: float, v: Array) -> Array:
        """P^exponent v."""
        outside = self.shift**exponent if self.shift else 0.0
        inside = (self.values + self.shift) ** exponent - outside
        found = self.V @ (inside[:, None] * (self.V.T @ v))
        return found + outside * v if outside else found


class RowSpace(Map, Factor):
    """W = C w, C = V R^-1: the span of the rows of A, in which A W = U w with orthonormal columns.

    Fewer training rows than features leave all other directions without any effect on the loss.
    Something can be proven of rows that are stored, against the optimum over all W = C w, and
    ||(A C)^T A C - I|| is measured.  Other rows, whose columns have `units`, span a space that is
    only nearly that of the true A: then `slack` is infinite.
    """

    def __init__(
        self, backend: Backend, A: Array, curvature: float, units: Array | None = None
    ) -> None:
        xp, A = backend.xp, math.sqrt(curvature) * A.astype("float64", copy=False)
        stored, units = units is None, xp.ones(A.shape[1]) if units is None else units
        # Columns of X have norm 1 after this: a unit decides nothing.
        scale = xp.where(units > 0, 1.0 / xp.where(units > 0, units, 1.0), 0.0)
        V, R = backend.row_space(A * scale, ROW_CUT)
        r, eye = V.shape[1], xp.eye(V.shape[1])
        C = backend.matmul(V, backend.solve_triangular(R.T, eye, trans=True))
        Map.__init__(self, backend, scale[:, None] * C, units[:, None] * backend.matmul(V, R.T))
        self.note = (
            f"fewer train rows than features: optimum over the {r:,} directions that they see"
        )
        self.rank, self.size = r, math.inf
        if not stored:
            return
        AC = backend.matmul(A, C)
        off = (A.shape[1] + 2) * _UNIT * norm(A) * norm(C)  # ||computed A C - A C||_F
        rounding = (A.shape[0] + 2) * _UNIT * norm(AC) ** 2
        slack = norm(backend.matmul(AC.T, AC) - eye) + rounding
        self.slack, self.size = slack + 2 * off * norm(AC) + off**2, norm(C)

    def product_bound(self, sizes: Array) -> float:
        if self.slack == math.inf:
            return math.inf
        by_row = self.backend.xp.sqrt((self.C * self.C).sum(axis=1))
        return min(norm(sizes) * self.size, float((sizes * by_row).sum()))  # synchronize!

    def outside_bound(self, u: Array, sizes: Array) -> float:
        """A bound of ||E (u - C w)|| for some w, over all E whose columns have these norms."""
        w, r = self.from_weights(u), self.rank
        rounded = (r + 3) * _UNIT * (self.backend.matmul(abs(self.C), abs(w)) + abs(u))
        missed = abs(u - self.to_weights(w)) + rounded
        rows = self.backend.xp.sqrt((missed * missed).sum(axis=1))
        return float((sizes * rows).sum())  # synchronize!


class Composed(Factor):
    """A factor of P for columns X C0, seen from the weights of X: C = C0 C_inner."""

    def __init__(self, C0: Map, inner: Factor) -> None:
        self.C0, self.inner = C0, inner
        self.rank, self.note, self.slack = inner.rank, inner.note, inner.slack

    @property
    def size(self) -> float:
        return self.C0.stretch * self.inner.size

    def to_weights(self, w: Array) -> Array:
        return self.C0.to_weights(self.inner.to_weights(w))

    def to_gradient(self, g: Array) -> Array:
        return self.inner.to_gradient(self.C0.to_gradient(g))

    def from_weights(self, W: Array) -> Array:
        return self.inner.from_weights(self.C0.from_weights(W))

    def project(self, v: Array) -> Array:
        return self.inner.project(v)

    def product_bound(self, sizes: Array) -> float:
        return self.inner.product_bound(self.C0.column_sizes(sizes))


# ---- numbers that are proven of a matrix -------------------------------------------------------
class Lifted(NamedTuple):
    """L L^T = P + added I."""

    L: Array
    added: float  # 0 where P has a factor as it is
    smallest: float  # a bound below the eigenvalues of P + added I; 0 where none was asked for


def safe_cholesky(
    backend: Backend, P: Array, first: float = 0.0, proven: bool = False
) -> Lifted | None:
    """A Cholesky factor of P, which is overwritten by P + added I where rounding hides it.

    P is symmetric, without a negative eigenvalue but for rounding.  `first` is added before the
    first try; where a bound of the smallest eigenvalue is wanted, too (`proven`), more is added
    until there is one.  None where P is not finite or no such matrix: then more than its trace
    would be needed, and it has no factor at all.

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
    added, more = first, 8 * (d + 2) * _UNIT * trace
    add_ridge(backend.xp, P, first)
    while added <= trace + first:
        L = backend.cholesky(P)
        smallest = smallest_eigenvalue(backend, P, L) if proven and L is not None else 0.0
        if L is not None and (smallest > _TINY or not proven):
            return Lifted(L, added, smallest)
        add_ridge(backend.xp, P, more)
        added, more = added + more, 4 * more
    return None


def smallest_eigenvalue(backend: Backend, P: Array, L: Array) -> float:
    """A number that is proven to be below all eigenvalues of P = L L^T.  The proof is a Cholesky
    factor of P minus that multiple of I.  Inverse iteration says which multiple to try."""

    def inverse(v: Array) -> Array:
        return backend.solve_triangular(L, backend.solve_triangular(L, v), trans=True)

    d, size = P.shape[0], power_iteration(backend.xp, inverse, P.shape[0], 6)
    # float64 finds no factor of a matrix that is indefinite by more than this.
    rounding = 2 * (d + 2) * _UNIT * float(P.diagonal().sum())  # synchronize!
    bound = 0.5 / size if np.isfinite(size) and size > 0 else 0.0
    while bound > rounding:
        shifted = P.copy()
        add_ridge(backend.xp, shifted, -bound)
        if backend.cholesky(shifted) is not None:
            return bound - rounding
        bound /= 4
    return _TINY


def power_iteration(xp: Any, apply: Callable[[Array], Array], d: int, steps: int) -> float:
    """The largest eigenvalue of a symmetric operator, from below; the host waits once.  It is right
    to some per cent after a few steps."""
    # No structure of the operator is likely to be orthogonal to these.
    v = xp.asarray(np.random.default_rng(0).standard_normal((d, 1)))
    v = v / xp.linalg.norm(v)
    for _ in range(steps):
        v = apply(v)
        size = xp.linalg.norm(v)
        v = v / xp.where(size > 0, size, 1.0)
    return float(size)  # synchronize!


def add_ridge(xp: Any, P: Array, ridge: Array | float) -> None:
    """P += ridge: a number, a (d,) diagonal, or a matrix."""
    if getattr(ridge, "ndim", 0) == 2:
        P += ridge
    else:
        diagonal = xp.arange(P.shape[0])
        P[diagonal, diagonal] += ridge


# ---- from Q^T Q to a factor -------------------------------------------------------------------
@dataclass
class DenseGram:
    """Q^T Q as a d x d matrix, from which P and its factor are made for any curvature and ridge."""

    backend: Backend
    QtQ: Array
    penalty: Array  # C0^T C0, what a ridge adds in the coordinates of Q; (d,) if it is diagonal
    damped: bool
    rounding: float = 0.0  # |error| <= rounding |q_i| |q_j| of each entry of Q^T Q

    def factor(self, curvature: float, ridge: float, symmetric: bool) -> Factor:
        """C with C C^T = (curvature Q^T Q + ridge I)^-1; `symmetric`: P^-1/2 itself."""
        xp, P = self.backend.xp, curvature * self.QtQ
        if not math.isfinite(float(P.diagonal().sum())):  # synchronize!
            raise ValueError(NOT_FINITE)
        if ridge == 0:
            # Columns of X C0 have norm 1: what is small is barely seen by the training rows.
            return self._cut(P, symmetric)
        add_ridge(xp, P, ridge * self.penalty)
        # With a ridge every feature counts, and the unit diagonal makes P as well conditioned as
        # scaling can.  What rounding hides is lifted.
        scale, d = 1.0 / xp.sqrt(P.diagonal()), P.shape[0]
        P *= scale[:, None]
        P *= scale[None, :]
        inner: Factor
        if symmetric:
            values, V = xp.linalg.eigh(P)
            least, smallest = 8 * (d + 2) * d * _UNIT, float(values[0])  # synchronize!
            added = least + max(0.0, -smallest) if smallest < least else 0.0
            inner = Eigen(V, values + added, self._slack(P, smallest, added), _lifted_note(added))
        elif (lifted := safe_cholesky(self.backend, P, proven=True)) is None:
            raise ValueError(NOT_FINITE)
        else:
            L, added, smallest = lifted
            slack = self._slack(P, smallest, added)
            inner = Cholesky(self.backend, L, smallest, slack, _lifted_note(added))
        return Composed(Map(self.backend, scale), inner)

    def _cut(self, P: Array, symmetric: bool) -> Factor:
        """A factor of P without a ridge, cut where it must be, or damped if Q has too few rows."""
        backend, xp, d, note = self.backend, self.backend.xp, P.shape[0], ""
        # A few per cent are enough to scale the damping.
        top = power_iteration(xp, lambda v: backend.matmul(P, v), d, 20) or 1.0
        if self.damped:
            add_ridge(xp, P, DAMPING * top)
            note = _DAMPED
        if symmetric:
            values, V = xp.linalg.eigh(P)
            keep = values > RANK_CUT * xp.maximum(values[-1], 1e-300)
            smallest = float(xp.where(keep, values, xp.inf).min())  # synchronize!
            V = xp.ascontiguousarray(V[:, keep])
            return Eigen(V, values[keep], self._slack(P, smallest), note)
        L, J, kept, smallest = backend.cholesky(P), None, P, 0.0
        if L is not None:
            smallest = smallest_eigenvalue(backend, P, L)
        if not smallest > 10 * RANK_CUT * top:
            L, J = backend.pivoted_cholesky(P, RANK_CUT * top)
            kept = P[J[:, None], J[None, :]]
            smallest = smallest_eigenvalue(backend, kept, L) if J.shape[0] else 1.0
        return Cholesky(backend, L, smallest, self._slack(kept, smallest), note, J, d)

    def _slack(self, P: Array, smallest: float, added: float = 0.0) -> float:
        """What rounding of Q^T Q and of its factor may do, seen from P's smallest eigenvalue.
        |error of P_ij| <= rounding sqrt(P_ii P_jj), a matrix of norm rounding * trace(P)."""
        if self.damped or added:
            return math.inf
        trace = float(P.diagonal().sum())  # synchronize!
        return (self.rounding + 2 * (P.shape[0] + 6) * _UNIT) * trace / smallest


class LowRankGram:
    """The same as U diag(values) U^T, of a Q with few rows: U (d x r) orthonormal, values fall."""

    def __init__(self, backend: Backend, Q: Array, ridge: float) -> None:
        xp, Q = backend.xp, Q.astype("float64")
        values, V = xp.linalg.eigh(backend.matmul(Q, Q.T))
        top = float(values[-1])  # synchronize!
        if ridge < _PLAIN_RIDGE * top:
            # Q Q^T has lost its small eigenvalues to rounding, and this ridge does not hide them.
            self.U, s = backend.thin_svd(Q)
            self.values = s**2
        else:
            keep = values > RANK_CUT * max(top, 1e-300)
            self.values, V = values[keep][::-1], V[:, keep][:, ::-1]
            self.U = backend.matmul(Q.T, V) / xp.sqrt(self.values)

    def factor(self, curvature: float, ridge: float, symmetric: bool) -> Factor:
        """C with C C^T = (curvature Q^T Q + ridge I)^-1, always symmetric."""
        values = curvature * self.values
        r = values.shape[0]
        top = float(values[0]) if r else 0.0  # synchronize!
        if ridge == 0:
            return Eigen(self.U, values, math.inf, _DAMPED, DAMPING * (top or 1.0))
        shift = max(ridge, _LEAST_RIDGE * top)
        # U is orthonormal and its values are right to within rounding of the largest.
        slack = 128 * (r + 2) * _UNIT * math.sqrt(max(top / shift, 1.0))
        slack = slack if shift == ridge else math.inf
        return Eigen(self.U, values, slack, _lifted_note(shift - ridge), shift)


Gram = DenseGram | LowRankGram


def _lifted_note(added: float) -> str:
    return f"P lifted by {added:.1g}: features as good as dependent" if added else ""


# ---- sums over rows of Q -----------------------------------------------------------------------
def products(
    backend: Backend,
    Q: Array,
    Y: Array | None,
    at: Array | None = None,
    with_gram: bool = True,
    loss: Loss = LOSSES["mse"],
) -> tuple[Array, Array]:
    """(Q^T Q, Q^T Y) over the rows `at` of Q, which are converted to float64 once for both.  Rows
    are taken as the loss sees them: with their weights, and less their mean."""
    xp, d, count = backend.xp, Q.shape[1], Q.shape[0] if at is None else at.shape[0]
    QtQ = xp.zeros((d, d) if with_gram else (0, 0))
    QtY = xp.zeros((d, 0 if Y is None else Y.shape[1]))
    step, wide, mean = _gram_step(d), in_float64(xp), None

    def chunks() -> Iterator[tuple[slice, Array]]:
        for a in range(0, count, step):
            rows = slice(a, min(a + step, count))
            yield rows, wide(Q[rows] if at is None else Q[at[rows]])

    if loss.intercept:
        sums = (loss.of_rows(rows).weigh(part).sum(axis=0) for rows, part in chunks())
        mean = sum(sums, xp.zeros(d)) / loss.total(count)
    for rows, part in chunks():
        part = part if loss.plain else loss.scale_rows(xp, part, rows, mean)
        if with_gram:
            backend.add_gram(QtQ, part)
        if Y is not None:
            y = Y[rows] if loss.plain else loss.scale_rows(xp, Y[rows], rows, None)
            QtY += backend.matmul(part.T, y)
    return QtQ, QtY


def weigh_rows(loss: Loss, backend: Backend, Q: Array) -> Array:
    """All rows of Q as the loss sees them, in float64: with their weights, and less their mean."""
    if loss.plain:
        return Q
    Q, whole = Q.astype("float64"), slice(None)
    mean = loss.mean(backend.xp, Q) if loss.intercept else None
    return loss.scale_rows(backend.xp, Q, whole, mean)


def _gram_step(d: int) -> int:
    """Rows of Q that a Gram matrix takes at a time."""
    return max(1, d, _GRAM_BYTES // (8 * max(d, 1)))


def gram_rounding(count: int, d: int) -> float:
    """|error of entry i, j| <= this |q_i| |q_j|: sums over chunks of sums over rows."""
    step = _gram_step(d)
    return (min(count, step) + -(-count // step) + 2) * _UNIT
