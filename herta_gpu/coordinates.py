"""Coordinates for the columns of X: W = C0 u, so that training is on X C0 instead of X.

`Units` scales each column of X to norm 1: it costs nothing, and no unit of measurement decides
anything.  `Whitened` makes the columns of X C0 orthonormal up to rounding, by Cholesky's factor of
X^T X in float64 (and of a second Gram matrix where X is ill-conditioned): errors of a solve then
count alike in every direction, however much the features resemble each other.  With a ridge it is
the columns of [X; sqrt(ridge) I] C0 that are orthonormal: a direction of which the ridge says more
than X, such as a column in a tiny unit, is no longer than the ridge makes it.  `Blocks` are those
of several blocks of features side by side, one for each lam.

All leave the problem as it is: C0 is invertible on what it keeps, and a ridge on W becomes
ridge * C0^T C0 on u, which is what a `Metric` multiplies by.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Protocol

import numpy as np

from herta_gpu.backends.base import Array, Backend, norm
from herta_gpu.factors import (
    NOT_FINITE,
    Composed,
    Diagonal,
    Factor,
    Map,
    safe_cholesky,
    smallest_eigenvalue,
    spectral_norm,
)
from herta_gpu.features import Features

DEPENDENT = 1e-10  # what a combination of unit columns must leave to count as a direction
_EPS = float(np.finfo(np.float64).eps)
_ROWS = 1 << 13  # rows of such columns at a time
_PLAIN = 1e-7  # eigenvalue of the Gram matrix of unit columns that one round resolves well


class Metric:
    """The ridge term in coordinates u: ||W||^2 = u^T G u, with W = C0 u and G = C0^T C0.

    Parameters
    ----------
    backend : Backend
    G, K : None, (r,) or (r, r) arrays
        G and a K with K K^T = G^-1; one-dimensional ones are diagonals, None is the identity.
        ||K^T g|| is the norm of the gradient with respect to W, and u = K t makes ||W|| = ||t||.

    Examples
    --------
    >>> import numpy as np
    >>> from herta_gpu.backends import get_backend
    >>> C0 = np.array([[2.0, 1.0], [0.0, 1.0], [1.0, 0.0]])
    >>> metric = Metric.of_map(get_backend("cpu"), C0)
    >>> u = np.array([[1.0], [-1.0]])
    >>> float((u * metric.times(u)).sum()), float(((C0 @ u) ** 2).sum())
    (3.0, 3.0)
    """

    def __init__(self, backend: Backend, G: Array | None = None, K: Array | None = None) -> None:
        self.backend, self.G, self.K = backend, G, K

    def on(self, backend: Backend, there: Callable[[Array], Array]) -> Metric:
        """The same metric on another device; `there` moves an array to it."""
        G, K = (None if M is None else there(M) for M in (self.G, self.K))
        return Metric(backend, G, K)

    @classmethod
    def of_map(cls, backend: Backend, C0: Array) -> Metric:
        """The metric of a d x r matrix C0 of full rank."""
        R = backend.xp.linalg.qr(C0, mode="r")
        K = backend.solve_triangular(R.T, backend.xp.eye(R.shape[0]), trans=True)
        return cls(backend, backend.matmul(C0.T, C0), K)

    def times(self, u: Array) -> Array:
        """G u."""
        return self._by(self.G, u)

    def outer(self, g: Array) -> Array:
        """K^T g: the gradient with respect to W, up to a rotation."""
        return self._by(None if self.K is None else self.K.T, g)

    def lift(self, t: Array) -> Array:
        """K t: the u of coordinates t in which the metric is the identity."""
        return self._by(self.K, t)

    def lower(self, u: Array) -> Array:
        """K^-1 u."""
        return self.outer(self.times(u))

    def rows(self, A: Array) -> Array:
        """A K: the rows of A in the coordinates t."""
        if self.K is None:
            return A
        return A * self.K if self.K.ndim == 1 else self.backend.matmul(A, self.K)

    def add_to(self, P: Array, ridge: float) -> None:
        """P += ridge G."""
        if self.G is not None and self.G.ndim == 2:
            P += ridge * self.G
        else:
            diagonal = self.backend.xp.arange(P.shape[0])
            P[diagonal, diagonal] += ridge * (1.0 if self.G is None else self.G)

    def stretch(self) -> float:
        """||K||, to some per cent."""
        if self.K is None:
            return 1.0
        if self.K.ndim == 1:
            return float(self.K.max())  # synchronize!
        return spectral_norm(self.backend, self.K)

    def _by(self, M: Array | None, u: Array) -> Array:
        if M is None:
            return u
        return M[:, None] * u if M.ndim == 1 else self.backend.matmul(M, u)


class Coordinates(Map, Protocol):
    """C0 (d x r), and what is known of the columns of X C0."""

    @property
    def shape(self) -> tuple[int, int]:
        """(d, r)."""

    @property
    def rank(self) -> int:
        """r, the number of columns."""
        return self.shape[1]

    @property
    def sizes(self) -> Array:
        """(r,) bounds of the norms of the columns of X C0."""

    @property
    def norm(self) -> float:
        """A bound of ||X C0||_2."""

    @property
    def rounding(self) -> Array:
        """(r,) bounds of what rounding does to the columns of a computed X C0."""

    @property
    def ridge(self) -> Array:
        """C0^T C0; (r,) where it is diagonal."""

    def ridge_size(self, sizes: Array) -> Array:
        """(r,) bounds of the row norms of |C0|^T |C0| u, for u whose rows have these norms."""

    def weights_rounding(self, u: Array) -> float:
        """A bound of ||X (computed C0 u - C0 u)||_F."""

    def metric(self) -> Metric:
        """||W||^2 as a function of u."""

    def rows(self, Q: Array) -> Array:
        """Q C0^-1: rows of H^-1 X C0 as rows of H^-1 X."""

    def gradient(self, g: Array) -> Array:
        """C0^-T g: a gradient in u as W sees it."""

    def dual_norm(self, g: Array) -> float:
        """A bound of ||C0^-T g||_F; inf where C0 is not square, and W sees more than u does."""

    def dual_bound(self, sizes: Array) -> float:
        """A bound of ||C0^-T G||_F for all G whose rows have these norms."""

    def factor(self, inner: Factor) -> Factor:
        """C0 C for a factor C of P in the coordinates u: the same P seen from W."""
        return Composed(self, inner)


class Columns(Coordinates, Protocol):
    """Coordinates of one X, whose columns X C0 are what is solved for."""

    X: Features

    def chunks(self, J: slice) -> Iterator[tuple[slice, Array]]:
        """(rows, rows of X C0[:, J]) in float64, in turn."""

    def fill(self, B: Array, J: slice) -> None:
        """B <- X C0[:, J], rounded once to the precision of B."""
        for rows, part in self.chunks(J):
            B[rows] = part


@dataclass
class Units(Diagonal, Columns):
    """C0 = diag(scale), scale 1 / norm of each column of X."""

    X: Features
    _dense: tuple[slice, Array] | None = None  # columns of a sparse X, made dense

    @classmethod
    def of(cls, X: Features) -> Units:
        xp, size = X.backend.xp, X.column_norms
        return cls(1.0 / xp.where(size > 0, size, 1.0), X)

    @classmethod
    def plain(cls, X: Features) -> Units:
        """X as it is."""
        return cls(X.backend.xp.ones(X.shape[1]), X)

    @property
    def shape(self) -> tuple[int, int]:
        return self.scale.shape[0], self.scale.shape[0]

    @property
    def sizes(self) -> Array:
        return self.scale * self.X.column_norms * (1 + self.X.sum_rounding)

    @property
    def norm(self) -> float:
        return norm(self.sizes)  # Frobenius

    @property
    def rounding(self) -> Array:
        return 2 * _EPS * self.sizes

    @property
    def ridge(self) -> Array:
        return self.scale**2

    def ridge_size(self, sizes: Array) -> Array:
        return self.ridge * sizes

    def chunks(self, J: slice) -> Iterator[tuple[slice, Array]]:
        if self._dense is None or self._dense[0] != J:
            for rows, part in self.X.row_chunks(J):
                yield rows, part * self.scale[J]
            return
        (_, block), self._dense = self._dense, None
        for a in range(0, block.shape[0], _ROWS):
            rows = slice(a, min(a + _ROWS, block.shape[0]))
            yield rows, block[rows].copy()

    def fill(self, B: Array, J: slice) -> None:
        if not (self.X.sparse and self.X.backend.xp is np):
            return super().fill(B, J)
        # The first residual asks for the same columns once more.
        block = self.X.column_block(J.start, J.stop, "float64", self.scale)
        B[...], self._dense = block, (J, block)

    def weights_rounding(self, u: Array) -> float:
        rows = self.X.backend.xp.sqrt((u * u).sum(axis=1))
        return _EPS * float((self.sizes * rows).sum())  # synchronize!

    def metric(self) -> Metric:
        return Metric(self.X.backend, self.ridge, self.ridge**-0.5)

    def rows(self, Q: Array) -> Array:
        return Q / self.scale

    def gradient(self, g: Array) -> Array:
        return g / self.scale[:, None]

    def dual_norm(self, g: Array) -> float:
        return norm(self.gradient(g))

    def dual_bound(self, sizes: Array) -> float:
        return norm(sizes / self.scale)


@dataclass
class Whitened(Columns):
    """C0 with [X; sqrt(penalty) I] C0 orthonormal up to rounding."""

    X: Features
    C: Array  # d x r
    K: Array  # d x r, C0^-T: K^T C0 = I
    error: float  # of (X C0)^T X C0 + penalty C0^T C0 = I, but for directions that were lifted
    lifted: bool  # some directions are shorter than 1: X says less of them than of C0
    penalty: float = 0.0  # the ridge

    @property
    def shape(self) -> tuple[int, int]:
        return self.C.shape

    @property
    def norm(self) -> float:
        return (1 + self.error) ** 0.5

    @property
    def inverse(self) -> float:
        """A bound of ||C0^-1|| = ||B C0 C0^-1|| / (the smallest singular value of B C0), for
        B = [X; sqrt(penalty) I]."""
        if self.lifted or self.error >= 1:
            return math.inf
        return math.hypot(self.X.norm_bound, self.penalty**0.5) / (1 - self.error) ** 0.5

    @cached_property
    def spread(self) -> Array:
        """(r,) sum over features of |x_j| |C_jk|: what rounding is relative to."""
        return self.X.backend.matmul(abs(self.C).T, self.X.column_norms[:, None])[:, 0]

    @property
    def sizes(self) -> Array:
        return self.X.backend.xp.full(self.rank, self.norm)

    @property
    def rounding(self) -> Array:
        return (self.C.shape[0] + 2) * 0.5 * _EPS * self.spread

    @property
    def stretch(self) -> float:
        return norm(self.C)

    @property
    def ridge(self) -> Array:
        return self.transposed(self.C)

    def ridge_size(self, sizes: Array) -> Array:
        return self.column_sizes(self.X.backend.matmul(abs(self.C), sizes[:, None])[:, 0])

    def column_sizes(self, sizes: Array) -> Array:
        return self.X.backend.matmul(abs(self.C).T, sizes[:, None])[:, 0]

    def chunks(self, J: slice) -> Iterator[tuple[slice, Array]]:
        backend = self.X.backend
        C = backend.asarray(self.C[:, J])
        for rows, part in self.X.row_chunks():
            yield rows, backend.matmul(part, C)

    def weights(self, u: Array) -> Array:
        return self.X.backend.matmul(self.C, u)

    def weights_rounding(self, u: Array) -> float:
        rows = self.X.backend.xp.sqrt((u * u).sum(axis=1))
        return (self.rank + 2) * 0.5 * _EPS * float((self.spread * rows).sum())  # synchronize!

    def transposed(self, g: Array) -> Array:
        return self.X.backend.matmul(self.C.T, g)

    def metric(self) -> Metric:
        return Metric.of_map(self.X.backend, self.C)

    def coordinates(self, W: Array) -> Array:
        return self.X.backend.matmul(self.K.T, W)

    def rows(self, Q: Array) -> Array:
        return self.X.backend.matmul(Q, self.K.T)

    def gradient(self, g: Array) -> Array:
        return self.X.backend.matmul(self.K, g)

    def dual_norm(self, g: Array) -> float:
        if self.C.shape[0] != self.rank:
            return math.inf
        found, matmul = self.gradient(g), self.X.backend.matmul
        off = g - self.transposed(found)
        # What is left may be all rounding, of sums whose terms are larger than g.
        rounded = 0.5 * _EPS * ((self.rank + 2) * norm(matmul(abs(self.C).T, abs(found))) + norm(g))
        return norm(found) + self.inverse * (norm(off) + rounded)

    def dual_bound(self, sizes: Array) -> float:
        return self.inverse * norm(sizes) if self.C.shape[0] == self.rank else math.inf


def whiten(X: Features, cut: bool, penalty: float = 0.0) -> Whitened:
    """Shifted Cholesky QR (Fukaya and others, 2020) of [X; sqrt(penalty) I], columns of norm 1.

    One round suffices where the Gram matrix is well conditioned.  Otherwise a little is added to
    its diagonal, and the Gram matrix of the columns found so far shows what that hid.  `cut`:
    directions that unit columns nearly do not have go; never with a ridge, which sees them all.
    """
    backend, d = X.backend, X.shape[1]
    xp, at, G = backend.xp, backend.xp.arange(d), X.gram()
    size = xp.sqrt(X.column_norms**2 + penalty)
    scale = 1.0 / xp.where(size > 0, size, 1.0)
    G *= scale[:, None]  # each entry keeps its digits, whatever the units
    G *= scale
    # An empty column is no direction, but one of the ridge.
    G[at, at] = xp.where(X.column_norms > 0, G[at, at] + penalty * scale**2, 1.0)
    L = backend.cholesky(G)
    smallest, shift = 0.0 if L is None else smallest_eigenvalue(backend, G, L), 0.0
    if not smallest > _PLAIN:
        found = safe_cholesky(backend, G, first=16 * (d + 2) * d * _EPS)
        if found is None:
            raise ValueError(NOT_FINITE)
        L, shift, _ = found
    C, K = scale[:, None] * backend.solve_triangular(L, xp.eye(d), trans=True), L / scale[:, None]
    # What the Gram matrix and its factor have lost to rounding, seen from the smallest eigenvalue.
    lost = X.sum_rounding + (2 * d + 8) * _EPS
    if shift:
        return _second_round(Whitened(X, C, K, 0.0, False, penalty), shift, cut, lost)
    return Whitened(X, C, K, lost * d / smallest, False, penalty)


def _second_round(first: Whitened, shift: float, cut: bool, lost: float) -> Whitened:
    """Columns that are nearly orthonormal but for what the shift hid, made orthonormal."""
    X, C, K, penalty = first.X, first.C, first.K, first.penalty
    backend, xp = X.backend, X.backend.xp
    values, V = xp.linalg.eigh(X.gram(C) + penalty * first.ridge)
    least = DEPENDENT**2 / shift  # sigma^2 / (sigma^2 + shift) of a direction of size sigma
    keep = values > least if cut else xp.ones(values.shape[0], dtype=bool)
    values = xp.maximum(values, least)[keep]
    off = 0.5 * (X.shape[1] + 2) * _EPS * norm(first.spread)  # ||computed X C - X C||_F
    V, roots = xp.ascontiguousarray(V[:, keep]), xp.sqrt(values)
    C, K = backend.matmul(C, V / roots), backend.matmul(K, V * roots)
    error = lost * X.shape[1] / least + 2 * off / least**0.5 + off**2 / least
    short = bool((values <= least).any())  # synchronize!
    return Whitened(X, C, K, error, short, penalty)


@dataclass
class Blocks(Coordinates):
    """The coordinates of several blocks of features side by side: C0 is block diagonal."""

    inners: Sequence[Columns]

    @property
    def shape(self) -> tuple[int, int]:
        d, r = zip(*(inner.shape for inner in self.inners))
        return sum(d), sum(r)

    @cached_property
    def sizes(self) -> Array:
        return self._joined(inner.sizes for inner in self.inners)

    @property
    def norm(self) -> float:
        return math.hypot(*(inner.norm for inner in self.inners))

    @property
    def rounding(self) -> Array:
        return self._joined(inner.rounding for inner in self.inners)

    @property
    def stretch(self) -> float:
        return max(inner.stretch for inner in self.inners)

    @cached_property
    def ridge(self) -> Array:
        return self._diagonal([inner.ridge for inner in self.inners])

    def ridge_size(self, sizes: Array) -> Array:
        return self._joined(inner.ridge_size(s) for inner, s in self._parts(sizes))

    def column_sizes(self, sizes: Array) -> Array:
        return self._joined(inner.column_sizes(s) for inner, s in self._parts(sizes, axis=0))

    def weights(self, u: Array) -> Array:
        return self._joined(inner.weights(part) for inner, part in self._parts(u))

    def weights_rounding(self, u: Array) -> float:
        return sum(inner.weights_rounding(part) for inner, part in self._parts(u))

    def transposed(self, g: Array) -> Array:
        return self._joined(inner.transposed(part) for inner, part in self._parts(g, axis=0))

    def metric(self) -> Metric:
        inners = [inner.metric() for inner in self.inners]
        G, K = ([getattr(metric, name) for metric in inners] for name in "GK")
        return Metric(inners[0].backend, self._diagonal(G), self._diagonal(K))

    def coordinates(self, W: Array) -> Array:
        return self._joined(inner.coordinates(part) for inner, part in self._parts(W, axis=0))

    def rows(self, Q: Array) -> Array:
        xp = self.inners[0].X.backend.xp
        parts = [inner.rows(xp.ascontiguousarray(part.T)) for inner, part in self._parts(Q.T)]
        return xp.concatenate(parts, axis=1)

    def gradient(self, g: Array) -> Array:
        return self._joined(inner.gradient(part) for inner, part in self._parts(g))

    def dual_norm(self, g: Array) -> float:
        return math.hypot(*(inner.dual_norm(part) for inner, part in self._parts(g)))

    def dual_bound(self, sizes: Array) -> float:
        return math.hypot(*(inner.dual_bound(part) for inner, part in self._parts(sizes)))

    def _diagonal(self, parts: list[Array]) -> Array:
        """These matrices along the diagonal of one; of vectors alone, one vector."""
        if all(G.ndim == 1 for G in parts):
            return self._joined(iter(parts))
        xp, i = self.inners[0].X.backend.xp, 0
        whole = xp.zeros((self.rank, self.rank))
        for G in parts:
            J = slice(i, i + G.shape[0])
            whole[J, J] = xp.diag(G) if G.ndim == 1 else G
            i = J.stop
        return whole

    def _parts(self, rows: Array, axis: int = 1) -> Iterator[tuple[Columns, Array]]:
        """Each block's coordinates and its share of the rows: by its rank, or (0) its features."""
        start = 0
        for inner in self.inners:
            yield inner, rows[start : start + inner.shape[axis]]
            start += inner.shape[axis]

    def _joined(self, parts: Iterator[Array]) -> Array:
        return self.inners[0].X.backend.xp.concatenate(list(parts))
