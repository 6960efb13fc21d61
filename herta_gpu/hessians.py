"""Guesses of the inverse Hessian of loss(A u) + ridge/2 <u, G u> for a stored A.

`ScaledGram` has one r x r matrix for all classes, P.  The two others are the Hessian itself but
for rows that add next to nothing: `ClassBlocks` as a matrix of r (c - 1) rows, `RankOnes` as P and
a correction by Woodbury's formula, for classes that are nearly separable: then few rows of A still
have any curvature, and most of those in one direction only.
"""

from __future__ import annotations

from typing import Any, Protocol

import numpy as np

from herta_gpu.backends.base import Array, Backend, unit_roundoff
from herta_gpu.coordinates import Metric
from herta_gpu.factors import (
    Cholesky,
    Composed,
    DenseGram,
    Diagonal,
    Factor,
    Identity,
    power_iteration,
    safe_cholesky,
)
from herta_gpu.losses import Loss

_CHUNK_BYTES = 16 << 20  # rows of A that are weighted at a time
_ALIKE = 1e-9  # relative difference of weights that are called equal
_UNIT = unit_roundoff()
_POWER_STEPS = 8
_TINY = 1e-100  # a probability that is none: its square must not vanish
_SHARE = 0.999  # of all curvature, that the rows in a Hessian hold


class Hessian(Protocol):
    """A guess of the Hessian that can be solved with."""

    exact: bool  # the Hessian itself, but for rows that add next to nothing

    def inverse(self, g: Array) -> Array: ...


class ScaledGram:
    """P = A^T diag(weights) A + ridge G, the same for every class."""

    exact = False

    def __init__(
        self,
        backend: Backend,
        A: Array,
        weights: Array,
        ridge: float,
        metric: Metric,
        gram: Array | None = None,
    ) -> None:
        """`gram` is A^T A, if that is known: it will do while all weights are alike."""
        one = weights[0]
        if gram is None or float(abs(weights - one).max()) > _ALIKE * float(one):  # synchronize!
            P = weighted_gram(backend, A, weights)
        else:
            P = one * gram
        metric.add_to(P, ridge)
        self.factor, _ = factor_of(backend, P, ridge)

    def inverse(self, g: Array) -> Array:
        return self.factor.to_weights(self.factor.to_gradient(g))

    @staticmethod
    def cost(n: int, r: int) -> float:
        """Flops of making one."""
        return n * r**2 + r**3 / 3


class ClassBlocks:
    """The whole Hessian of cross entropy, over the c - 1 directions that classes differ in.

    With B an orthonormal basis (c x (c - 1)) of what is not common to all classes, and p the
    softmax of a row, block a, b is A^T diag(B_a^T (diag(p) - p p^T) B_b) A + delta_ab ridge G.
    """

    exact = True

    def __init__(
        self, backend: Backend, A: Array, S: Array, ridge: float, metric: Metric, active: Array
    ) -> None:
        xp, r, m = backend.xp, A.shape[1], S.shape[1] - 1
        self.backend, self.shape = backend, (r, m)
        self.B = xp.asarray(class_basis(m + 1))
        A, S = A[active], S[active]
        mean = S @ self.B
        H = xp.zeros((r * m, r * m))
        for a in range(m):
            rows = slice(a * r, (a + 1) * r)
            for b in range(a):
                columns = slice(b * r, (b + 1) * r)
                weights = S @ (self.B[:, a] * self.B[:, b]) - mean[:, a] * mean[:, b]
                H[rows, columns] = backend.matmul(A.T, weights[:, None] * A)
                H[columns, rows] = H[rows, columns].T
            weights = S @ self.B[:, a] ** 2 - mean[:, a] ** 2
            block = weighted_gram(backend, A, xp.maximum(weights, 0.0))
            metric.add_to(block, ridge)
            H[rows, rows] = block
        self.factor, _ = factor_of(backend, H, ridge)

    def inverse(self, g: Array) -> Array:
        r, m = self.shape
        x = (g @ self.B).T.reshape(r * m, 1)
        x = self.factor.to_weights(self.factor.to_gradient(x))
        return x.reshape(m, r).T @ self.B.T

    @staticmethod
    def cost(rows: int, r: int, m: int) -> float:
        """Flops of making one with so many active rows."""
        return m**2 * rows * r**2 + (r * m) ** 3 / 3

    @staticmethod
    def memory(rows: int, r: int, m: int) -> int:
        """Bytes that it needs."""
        return 8 * (2 * (r * m) ** 2 + 2 * rows * r)


class ColumnBlocks:
    """The whole Hessian of a loss whose outputs are independent: one block for each of them."""

    exact = True

    def __init__(self, backend: Backend, A: Array, S: Array, ridge: float, metric: Metric) -> None:
        bend = backend.xp.maximum(S * (1 - S), 0.0)
        self.columns = [
            ScaledGram(backend, A, bend[:, j], ridge, metric) for j in range(S.shape[1])
        ]
        self.xp = backend.xp

    def inverse(self, g: Array) -> Array:
        found = [P.inverse(self.xp.ascontiguousarray(g[:, j : j + 1]))
                 for j, P in enumerate(self.columns)]  # fmt: skip
        return self.xp.concatenate(found, axis=1)

    @staticmethod
    def cost(n: int, r: int, c: int) -> float:
        """Flops of making one."""
        return c * ScaledGram.cost(n, r)

    @staticmethod
    def memory(n: int, r: int, c: int) -> int:
        """Bytes that it needs."""
        return 8 * (c * r**2 + n * c)


class RankOnes:
    """P of what is left, and the weightiest rank-one terms of the Hessian as they are.

    Row i of A with the softmax p adds sum_k (a_i x q_k) (a_i x q_k)^T, the q_k those of
    `rank_ones`.  With C C^T = P^-1 and B the rows a_i C of the terms, the correction needs the
    N x N matrix I + (B B^T) o (q q^T) only.
    """

    exact = True

    def __init__(
        self,
        backend: Backend,
        A: Array,
        terms: tuple[Array, Array, Array],
        ridge: float,
        metric: Metric,
    ) -> None:
        self.backend, (rows, self.q, rest) = backend, terms
        self.P = ScaledGram(backend, A, rest, ridge, metric)
        # Twice with the factor itself: what it cut or added, the correction must not see otherwise.
        self.BT = self.P.factor.to_gradient(backend.xp.ascontiguousarray(A[rows].T))  # r x N
        N = self.q.shape[0]
        K = backend.xp.zeros((N, N))
        backend.add_gram(K, self.BT)
        K *= backend.matmul(self.q, self.q.T)
        K[backend.xp.arange(N), backend.xp.arange(N)] += 1
        self.K, _ = factor_of(backend, K, 1.0)

    def inverse(self, g: Array) -> Array:
        y = self.P.factor.to_gradient(g)
        z = (self.backend.matmul(self.BT.T, y) * self.q).sum(axis=1)[:, None]
        z = self.K.to_weights(self.K.to_gradient(z))
        return self.P.factor.to_weights(y - self.backend.matmul(self.BT, z * self.q))

    @staticmethod
    def cost(n: int, r: int, N: int) -> float:
        """Flops of making one with N terms."""
        return ScaledGram.cost(n, r) + N * r**2 + N**2 * r + N**3 / 3

    @staticmethod
    def memory(r: int, N: int) -> int:
        """Bytes that it needs."""
        return 8 * (3 * N**2 + 2 * N * r)


class Newton:
    """Newton's method on the rows of a stored A, in the coordinates w = C^-1 W of a factor C."""

    searches = True

    def __init__(
        self, backend: Backend, loss: Loss, A: Array, factor: Factor, size: int, ridge: float
    ) -> None:
        """`size` is the number of coordinates, which may be more than the rank of C."""
        self.backend, self.loss, self.ridge = backend, loss, ridge
        C = factor.to_weights(backend.xp.eye(size))
        self.B = backend.matmul(A.astype("float64"), C)
        self.metric = Metric(backend, backend.matmul(C.T, C))

    def direction(self, w: Array, g: Array) -> Array:
        xp = self.backend.xp
        S = self.loss.activation(xp, self.backend.matmul(self.B, w))
        A = self.loss.scale_rows(xp, self.B, slice(None), None)
        hessian: Hessian
        if self.loss.separable:
            hessian = ColumnBlocks(self.backend, A, S, self.ridge, self.metric)
        else:
            every = xp.arange(A.shape[0])
            hessian = ClassBlocks(self.backend, A, S, self.ridge, self.metric, every)
        step = self.loss.centre(xp, hessian.inverse(g))
        # Rows whose class is beyond doubt have no curvature left.
        return -step if float(xp.sum(step * g)) > 0 else -self.loss.centre(xp, g)  # synchronize!


def rank_ones(xp: Any, S: Array, most: int) -> tuple[Array, Array, Array] | None:
    """(rows, q, rest): the weightiest terms q q^T of diag(p) - p p^T for all rows p of S.

    They hold `_SHARE` of all; None if more than `most` would be needed.  With the classes of a row
    in falling order, R_k the probability of all after the k-th, and rho_k theirs over R_k,

        diag(p) - p p^T = sum_k  p_k R_k / (p_k + R_k)  (e_k - rho_k) (e_k - rho_k)^T,

    so that the first term, the top class against the others, is nearly all of a nearly certain
    row.  `rest` is the mean curvature of each row that the terms leave.
    """
    n, c = S.shape
    at = xp.arange(n)[:, None]
    order = xp.argsort(-S, axis=1)
    p = S[at, order]
    R, squares = xp.zeros((n, c)), xp.zeros((n, c))  # of the classes after the k-th
    for k in range(c - 2, -1, -1):
        R[:, k] = R[:, k + 1] + p[:, k + 1]
        squares[:, k] = squares[:, k + 1] + p[:, k + 1] ** 2
    seen = R > _TINY
    over = 1 / xp.where(seen, R, 1.0)
    weight = xp.where(seen, p * R / xp.where(seen, p + R, 1.0), 0.0)[:, :-1]
    trace = weight * (1 + squares[:, :-1] * over[:, :-1] ** 2)
    N = _most_of(xp, trace.reshape(-1), most)
    if N is None:
        return None
    chosen = xp.argsort(-trace.reshape(-1))[:N]
    rows, k = chosen // (c - 1), chosen % (c - 1)
    behind = xp.arange(c)[None, :] > k[:, None]
    q = xp.where(behind, -p[rows] * over[rows, k][:, None], 0.0)
    q[xp.arange(N), k] = 1.0
    q *= xp.sqrt(weight[rows, k])[:, None]
    by_class = xp.zeros((N, c))
    by_class[xp.arange(N)[:, None], order[rows]] = q
    trace[rows, k] = 0.0
    return rows, by_class, trace.sum(axis=1) / (c - 1)


def active_rows(xp: Any, weights: Array) -> Array:
    """The rows that hold `_SHARE` of all weights, in their order."""
    N = _most_of(xp, weights, weights.shape[0])
    return xp.sort(xp.argsort(-weights)[:N])


def _most_of(xp: Any, weights: Array, most: int) -> int | None:
    """How many of the largest weights hold `_SHARE` of all; None if more than `most`."""
    sums = xp.cumsum(-xp.sort(-weights))
    N = 1 + int((sums < _SHARE * sums[-1]).sum())  # synchronize!
    return N if most >= N else None


def class_basis(c: int) -> Any:
    """c x (c - 1): an orthonormal basis of the vectors whose sum is 0."""
    B = np.zeros((c, c - 1))
    for k in range(1, c):
        B[:k, k - 1], B[k, k - 1] = 1, -k
        B[:, k - 1] /= (k * (k + 1)) ** 0.5
    return B


def weighted_gram(backend: Backend, A: Array, weights: Array | None = None) -> Array:
    """A^T diag(weights) A (None: all 1)."""
    xp, (n, r) = backend.xp, A.shape
    G, step = xp.zeros((r, r)), max(1, r, _CHUNK_BYTES // (8 * max(r, 1)))
    roots = None if weights is None else xp.sqrt(weights)[:, None]
    for i in range(0, n, step):
        rows = slice(i, i + step)
        backend.add_gram(G, A[rows] if roots is None else A[rows] * roots[rows])
    return G


def factor_of(
    backend: Backend, P: Array, ridge: float, measured: bool = False
) -> tuple[Factor, bool]:
    """(C with C C^T = P^-1, whether nothing had to be added to P); P is overwritten.

    Without a ridge, directions that P does not see are cut.  `amplified` is of use only where the
    factor was `measured`.
    """
    xp, r = backend.xp, P.shape[0]
    size = xp.sqrt(P.diagonal())
    if r == 0:
        return Identity(0), True
    scale = 1 / xp.where(size > 0, size, 1.0)
    P *= scale[:, None]
    P *= scale[None, :]
    if ridge == 0:
        cut = DenseGram(backend, P, xp.ones(r), damped=False).factor(1.0, 0.0, False)
        return Composed(Diagonal(scale), cut), cut.slack < 0.1
    lifted = safe_cholesky(backend, P)
    if lifted is None:
        return Composed(Diagonal(scale), Identity(r)), False
    found = Cholesky(backend, lifted.L, 0.0, 0.0)
    if measured:
        # Inverse iteration is right to some per cent; half of what it says is below.
        grown = power_iteration(
            xp, lambda v: found.to_gradient(found.to_weights(v)), r, _POWER_STEPS
        )
        found.smallest = 0.5 / (grown or 1.0)
    return Composed(Diagonal(scale), found), lifted.added == 0
