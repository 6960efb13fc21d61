"""Coordinates for the columns of X: W = C0 u, so that training is on X C0 instead of X.

Two kinds.  `Units` scales each column of X to norm 1: it costs nothing, and no unit of measurement
decides anything.  `Whitened` makes the columns of X C0 orthonormal up to rounding, by Cholesky's
factor of X^T X in float64 (and of a second Gram matrix where X is ill-conditioned): errors of a
solve then count alike in every direction, however much the features resemble each other.

Both leave the problem as it is: C0 is invertible on what it keeps, and a ridge on W becomes
ridge * C0^T C0 on u.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from herta_gpu.backends.base import Array, norm
from herta_gpu.factors import (
    NOT_FINITE,
    Composed,
    Factor,
    Map,
    safe_cholesky,
    smallest_eigenvalue,
)
from herta_gpu.features import Features
from herta_gpu.hessians import Metric

DEPENDENT = 1e-10  # what a combination of unit columns must leave to count as a direction
_EPS = float(np.finfo(np.float64).eps)
_ROWS = 1 << 13  # rows of such columns at a time
_PLAIN = 1e-7  # eigenvalue of the Gram matrix of unit columns that one round resolves well


class Basis(Map, Protocol):
    """C0 (d x r): the columns of X C0 are what is solved for."""

    @property
    def X(self) -> Features:
        """The features themselves."""

    @property
    def rank(self) -> int:
        """r, the number of columns."""

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

    def chunks(self, J: slice) -> Iterator[tuple[slice, Array]]:
        """(rows, rows of X C0[:, J]) in float64, in turn."""

    def fill(self, B: Array, J: slice) -> None:
        """B <- X C0[:, J], rounded once to the precision of B."""

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


@dataclass
class Units:
    """C0 = diag(scale), scale 1 / norm of each column of X."""

    X: Features
    scale: Array  # (d,)
    _dense: tuple[slice, Array] | None = None  # columns of a sparse X, made dense

    @classmethod
    def of(cls, X: Features) -> Units:
        xp, size = X.backend.xp, X.column_norms
        return cls(X, 1.0 / xp.where(size > 0, size, 1.0))

    @classmethod
    def plain(cls, X: Features) -> Units:
        """X as it is."""
        return cls(X, X.backend.xp.ones(X.shape[1]))

    @property
    def rank(self) -> int:
        return self.scale.shape[0]

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
        if self.X.sparse and self.X.backend.xp is np:
            # The first residual asks for the same columns once more.
            block = self.X.column_block(J.start, J.stop, "float64", self.scale)
            B[...], self._dense = block, (J, block)
            return
        for rows, part in self.chunks(J):
            B[rows] = part

    def weights(self, u: Array) -> Array:
        return self.scale[:, None] * u

    def weights_rounding(self, u: Array) -> float:
        rows = self.X.backend.xp.sqrt((u * u).sum(axis=1))
        return _EPS * float((self.sizes * rows).sum())  # synchronize!

    def metric(self) -> Metric:
        return Metric.diagonal(self.X.backend, self.ridge)

    def coordinates(self, W: Array) -> Array:
        return W / self.scale[:, None]

    def rows(self, Q: Array) -> Array:
        return Q / self.scale

    def gradient(self, g: Array) -> Array:
        return g / self.scale[:, None]

    def dual_norm(self, g: Array) -> float:
        return norm(self.gradient(g))

    def dual_bound(self, sizes: Array) -> float:
        return norm(sizes / self.scale)

    @property
    def stretch(self) -> float:
        return float(self.scale.max())  # synchronize!

    def transposed(self, g: Array) -> Array:
        return self.weights(g)

    def column_sizes(self, sizes: Array) -> Array:
        return self.scale * sizes

    def factor(self, inner: Factor) -> Factor:
        return Composed(self, inner)


@dataclass
class Whitened:
    """C0 with X C0 orthonormal up to rounding."""

    X: Features
    C: Array  # d x r
    K: Array  # d x r, C0^-T: K^T C0 = I
    norm: float
    inverse: float  # a bound of ||C0^-1||_2: ||X|| where X C0 is orthonormal; inf if not known
    spread: Array  # (r,) sum over features of |x_j| |C_jk|: what rounding is relative to

    @property
    def rank(self) -> int:
        return self.C.shape[1]

    @property
    def sizes(self) -> Array:
        return self.X.backend.xp.full(self.rank, self.norm)

    @property
    def rounding(self) -> Array:
        return (self.C.shape[0] + 2) * 0.5 * _EPS * self.spread

    @property
    def ridge(self) -> Array:
        return self.X.backend.matmul(self.C.T, self.C)

    def ridge_size(self, sizes: Array) -> Array:
        C = abs(self.C)
        return self.X.backend.matmul(C.T, self.X.backend.matmul(C, sizes[:, None]))[:, 0]

    def chunks(self, J: slice) -> Iterator[tuple[slice, Array]]:
        backend = self.X.backend
        C = backend.asarray(self.C[:, J])
        for rows, part in self.X.row_chunks():
            yield rows, backend.matmul(part, C)

    def fill(self, B: Array, J: slice) -> None:
        for rows, part in self.chunks(J):
            B[rows] = part

    def weights(self, u: Array) -> Array:
        return self.X.backend.matmul(self.C, u)

    def weights_rounding(self, u: Array) -> float:
        rows = self.X.backend.xp.sqrt((u * u).sum(axis=1))
        return (self.rank + 2) * 0.5 * _EPS * float((self.spread * rows).sum())  # synchronize!

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
        off = g - matmul(self.C.T, found)
        # What is left may be all rounding, of sums whose terms are larger than g.
        rounded = 0.5 * _EPS * ((self.rank + 2) * norm(matmul(abs(self.C).T, abs(found))) + norm(g))
        return norm(found) + self.inverse * (norm(off) + rounded)

    def dual_bound(self, sizes: Array) -> float:
        return self.inverse * norm(sizes) if self.C.shape[0] == self.rank else math.inf

    @property
    def stretch(self) -> float:
        return norm(self.C)

    def transposed(self, g: Array) -> Array:
        return self.X.backend.matmul(self.C.T, g)

    def column_sizes(self, sizes: Array) -> Array:
        return self.X.backend.matmul(abs(self.C).T, sizes[:, None])[:, 0]

    def factor(self, inner: Factor) -> Factor:
        return Composed(self, inner)


def whitened(X: Features, cut: bool) -> Whitened:
    """Shifted Cholesky QR (Fukaya and others, 2020) of X with its columns scaled to norm 1.

    One round suffices where the Gram matrix is well conditioned.  Otherwise a little is added to
    its diagonal, and the Gram matrix of the columns found so far shows what that hid.  `cut`:
    directions that unit columns nearly do not have go; never with a ridge, which sees them all.
    """
    backend, d = X.backend, X.shape[1]
    xp, at, G = backend.xp, backend.xp.arange(d), X.gram()
    scale = Units.of(X).scale
    G *= scale[:, None] * scale  # each entry keeps its digits, whatever the units
    G[at, at] = xp.where(X.column_norms > 0, G[at, at], 1.0)  # an empty column is no direction
    L = backend.cholesky(G)
    smallest, shift = 0.0 if L is None else smallest_eigenvalue(backend, G, L), 0.0
    if not smallest > _PLAIN:
        lifted = safe_cholesky(backend, G, first=16 * (d + 2) * d * _EPS)
        if lifted is None:
            raise ValueError(NOT_FINITE)
        L, shift, _ = lifted
    C, K = scale[:, None] * backend.solve_triangular(L, xp.eye(d), trans=True), L / scale[:, None]
    # What the Gram matrix and its factor have lost to rounding, seen from the smallest eigenvalue.
    lost = X.sum_rounding + (d + 6) * _EPS
    if shift:
        return _second_round(X, C, K, shift, cut, lost)
    error = lost * d / smallest  # ||(X C)^T X C - I|| <= this
    return Whitened(X, C, K, (1 + error) ** 0.5, _inverse(X, error), _spread(X, C))


def _second_round(
    X: Features, C: Array, K: Array, shift: float, cut: bool, lost: float
) -> Whitened:
    """The columns X C, nearly orthonormal but for what the shift hid, made orthonormal."""
    backend, xp = X.backend, X.backend.xp
    values, V = xp.linalg.eigh(X.gram(C))
    least = DEPENDENT**2 / shift  # sigma^2 / (sigma^2 + shift) of a direction of size sigma
    keep = values > least if cut else xp.ones(values.shape[0], dtype=bool)
    values = xp.maximum(values, least)[keep]
    off = 0.5 * (X.shape[1] + 2) * _EPS * norm(_spread(X, C))  # ||computed X C - X C||_F
    V, roots = xp.ascontiguousarray(V[:, keep]), xp.sqrt(values)
    C, K = backend.matmul(C, V / roots), backend.matmul(K, V * roots)
    error = lost * X.shape[1] / least + 2 * off / least**0.5 + off**2 / least
    # A direction that was lifted to `least` is shorter than 1: X says less of it than of C0.
    inverse = math.inf if bool((values <= least).any()) else _inverse(X, error)  # synchronize!
    return Whitened(X, C, K, (1 + error) ** 0.5, inverse, _spread(X, C))


def _inverse(X: Features, error: float) -> float:
    """||C0^-1|| = ||X C0 C0^-1|| / (the smallest singular value of X C0) at most."""
    return X.norm_bound / (1 - error) ** 0.5 if error < 1 else math.inf


def _spread(X: Features, C: Array) -> Array:
    return X.backend.matmul(abs(C).T, X.column_norms[:, None])[:, 0]
