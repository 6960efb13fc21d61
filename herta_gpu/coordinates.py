"""Coordinates for the columns of X: W = C0 u, so that training is on X C0 instead of X.

`Columns.unit` scales each column of X to norm 1: it costs nothing, and no unit of measurement
decides anything.  `whiten` makes the columns of X C0 orthonormal up to rounding, by Cholesky's
factor of X^T X in float64 (and of a second Gram matrix where X is ill-conditioned): errors of a
solve then count alike in every direction, however much the features resemble each other.  With a
ridge it is the columns of [X; sqrt(ridge) I] C0 that are orthonormal: a direction of which the
ridge says more than X, such as a column in a tiny unit, is no longer than the ridge makes it.
`Blocks` are those of several blocks of features side by side, one for each lam.

All leave the problem as it is: C0 is invertible on what it keeps, and a ridge on W becomes
ridge * C0^T C0 on u.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from copy import copy
from functools import cached_property
from typing import Any

import numpy as np

from herta_gpu.backends.base import Array, norm, unit_roundoff
from herta_gpu.factors import NOT_FINITE, Map, multiply, safe_cholesky, smallest_eigenvalue
from herta_gpu.features import Features

DEPENDENT = 1e-10  # what a combination of unit columns must leave to count as a direction
_UNIT = unit_roundoff()
_PLAIN = 1e-7  # eigenvalue of the Gram matrix of unit columns that one round resolves well


class Columns(Map):
    """C0 (d x r, or a diagonal) of one X, and what is known of the columns of X C0.  Where C0 is no
    diagonal, [X; sqrt(penalty) I] C0 is orthonormal up to rounding; the penalty is the ridge.
    `error` is that of (X C0)^T X C0 + penalty C0^T C0 = I, but for directions that were `lifted`:
    those are shorter than 1, and X says less of them than of C0."""

    def __init__(
        self,
        X: Features,
        C: Array,
        K: Array | None = None,
        error: float = 0.0,
        lifted: bool = False,
        penalty: float = 0.0,
    ) -> None:
        super().__init__(X.backend, C, K)
        self.X, self.error, self.lifted, self.penalty = X, error, lifted, penalty
        self.white, self.rank = C.ndim == 2, self.shape[1]

    @classmethod
    def unit(cls, X: Features) -> Columns:
        """C0 = 1 / norm of each column of X."""
        xp, size = X.backend.xp, X.column_norms
        return cls(X, 1.0 / xp.where(size > 0, size, 1.0))

    @classmethod
    def plain(cls, X: Features) -> Columns:
        """X as it is."""
        return cls(X, X.backend.xp.ones(X.shape[1]))

    @cached_property
    def spread(self) -> Array:
        """(r,) sum over features of |x_j| |C_jk|: what rounding is relative to."""
        return self.column_sizes(self.X.column_norms)

    @cached_property
    def norm(self) -> float:
        """A bound of ||X C0||_2."""
        return (1 + self.error) ** 0.5 if self.white else norm(self.sizes)  # Frobenius

    @cached_property
    def sizes(self) -> Array:
        """(r,) bounds of the norms of the columns of X C0."""
        if self.white:
            return self.backend.xp.full(self.rank, self.norm)
        return self.spread * (1 + self.X.sum_rounding)

    @property
    def rounding(self) -> Array:
        """(r,) bounds of what a computed X C0 is off by, X included where we made it."""
        found = ((self.shape[0] if self.white else 1) + 2) * _UNIT * self.spread
        off = self.X.off
        if isinstance(off, float) and off == 0:
            return found
        return found + self.column_sizes(self.backend.xp.zeros(self.shape[0]) + off)

    def of_rows(self, longest: float) -> Columns:
        """These for rows of X C0 that were made up to `longest` times as long."""
        other = copy(self)
        other.spread = self.spread * longest
        vars(other).pop("sizes", None)
        vars(other).pop("norm", None)
        return other

    @property
    def inverse(self) -> float:
        """A bound of ||C0^-1|| = ||B C0 C0^-1|| / (the smallest singular value of B C0), for
        B = [X; sqrt(penalty) I]; inf where C0 is not square, and W sees more than u does."""
        if self.lifted or self.error >= 1 or self.shape[0] != self.rank:
            return math.inf
        return math.hypot(self.X.norm_bound, self.penalty**0.5) / (1 - self.error) ** 0.5

    def ridge_size(self, sizes: Array) -> Array:
        """(r,) bounds of the row norms of |C0|^T |C0| u, for u whose rows have these norms."""
        return self.column_sizes(multiply(self.backend, abs(self.C), sizes[:, None])[:, 0])

    def weights_rounding(self, u: Array) -> float:
        """A bound of ||X (computed C0 u - C0 u)||_F."""
        rows = self.backend.xp.sqrt((u * u).sum(axis=1))
        total = float((self.spread * rows).sum())  # synchronize!
        return ((self.rank if self.white else 1) + 2) * _UNIT * total

    def dual_norm(self, g: Array) -> float:
        """A bound of ||C0^-T g||_F."""
        found, inverse = self.gradient(g), self.inverse if self.white else math.inf
        if inverse == math.inf:
            return inverse if self.white else norm(found)
        off = g - self.to_gradient(found)
        # What is left may be all rounding, of sums whose terms are larger than g.
        terms = self.backend.matmul(abs(self.C).T, abs(found))
        rounded = _UNIT * ((self.rank + 2) * norm(terms) + norm(g))
        return norm(found) + inverse * (norm(off) + rounded)

    def dual_bound(self, sizes: Array) -> float:
        """A bound of ||C0^-T G||_F for all G whose rows have these norms."""
        return self.inverse * norm(sizes) if self.white else norm(self.K * sizes)

    def chunks(self, J: slice) -> Iterator[tuple[slice, Array]]:
        """(rows, rows of X C0[:, J]) in float64, in turn."""
        if not self.white:
            for rows, part in self.X.row_chunks(J):
                yield rows, part * self.C[J]
            return
        C = self.backend.asarray(self.C[:, J])
        for rows, part in self.X.row_chunks():
            yield rows, self.backend.matmul(part, C)

    def fill(self, B: Array, J: slice) -> Array | None:
        """B <- X C0[:, J], rounded once to the precision of B; the same in float64 if it is there.
        The first residual asks for the same columns once more."""
        if self.X.sparse and not self.white and self.backend.xp is np:
            block = self.X.dense_block(J, self.C)
            B[...] = block
            return block
        for rows, part in self.chunks(J):
            B[rows] = part
        return None


def whiten(X: Features, cut: bool, penalty: float = 0.0) -> Columns:
    """Shifted Cholesky QR (Fukaya and others, 2020) of [X; sqrt(penalty) I], columns of norm 1.
    One round suffices where the Gram matrix is well conditioned.  Otherwise a little is added to
    its diagonal, and the Gram matrix of the columns found so far shows what that hid.  `cut`:
    directions that unit columns nearly do not have go; never with a ridge, which sees them all."""
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
        found = safe_cholesky(backend, G, first=32 * (d + 2) * d * _UNIT)
        if found is None:
            raise ValueError(NOT_FINITE)
        L, shift, _ = found
    C, K = scale[:, None] * backend.solve_triangular(L, xp.eye(d), trans=True), L / scale[:, None]
    # What the Gram matrix and its factor have lost to rounding, seen from the smallest eigenvalue.
    rounding = X.sum_rounding + (4 * d + 16) * _UNIT
    if not shift:
        return Columns(X, C, K, rounding * d / smallest, False, penalty)
    # The columns are nearly orthonormal but for what the shift hid: the second round.
    first = Columns(X, C, K, 0.0, False, penalty)
    values, V = xp.linalg.eigh(X.gram(C) + penalty * first.ridge)
    least = DEPENDENT**2 / shift  # sigma^2 / (sigma^2 + shift) of a direction of size sigma
    keep = values > least if cut else xp.ones(d, dtype=bool)
    values = xp.maximum(values, least)[keep]
    V, roots = xp.ascontiguousarray(V[:, keep]), xp.sqrt(values)
    off = (d + 2) * _UNIT * norm(first.spread)  # ||computed X C - X C||_F
    error = rounding * d / least + 2 * off / least**0.5 + off**2 / least
    lifted = bool((values <= least).any())  # synchronize!
    C, K = backend.matmul(C, V / roots), backend.matmul(K, V * roots)
    return Columns(X, C, K, error, lifted, penalty)


def _of_parts(name: str, axis: int, join: Callable[..., Any] | None = None) -> Any:
    """The method `name` of each block on its share of the rows: by its features (0) or its rank."""

    def method(self: Blocks, rows: Array) -> Any:
        found, start = [], 0
        for one in self.inners:
            found.append(getattr(one, name)(rows[start : start + one.shape[axis]]))
            start += one.shape[axis]
        return join(*found) if join else self.backend.xp.concatenate(found)

    return method


def _diagonal(name: str) -> Callable[[Blocks], Array]:
    """The matrices `name` of all blocks along the diagonal of one; of vectors alone, one vector."""

    def stack(self: Blocks) -> Array:
        xp, parts, i, j = self.backend.xp, [getattr(one, name) for one in self.inners], 0, 0
        if all(G.ndim == 1 for G in parts):
            return xp.concatenate(parts)
        parts = [xp.diag(G) if G.ndim == 1 else G for G in parts]
        whole = xp.zeros((sum(G.shape[0] for G in parts), sum(G.shape[1] for G in parts)))
        for G in parts:
            whole[i : i + G.shape[0], j : j + G.shape[1]] = G
            i, j = i + G.shape[0], j + G.shape[1]
        return whole

    return stack


class Blocks(Map):
    """The coordinates of several blocks of features side by side: C0 is block diagonal."""

    to_weights, gradient, ridge_size = (
        _of_parts(name, 1) for name in ("to_weights", "gradient", "ridge_size")
    )
    to_gradient, from_weights, column_sizes = (
        _of_parts(name, 0) for name in ("to_gradient", "from_weights", "column_sizes")
    )
    weights_rounding = _of_parts("weights_rounding", 1, lambda *found: sum(found))
    dual_norm, dual_bound = (_of_parts(name, 1, math.hypot) for name in ("dual_norm", "dual_bound"))
    C, K, ridge = (
        property(_diagonal("C")),
        property(_diagonal("K")),
        cached_property(_diagonal("ridge")),
    )

    def __init__(self, inners: Sequence[Columns]) -> None:
        self.inners, self.backend = inners, inners[0].backend
        d, r = zip(*(inner.shape for inner in inners))
        self.shape, self.rank, join = (sum(d), sum(r)), sum(r), self.backend.xp.concatenate
        self.sizes = join([inner.sizes for inner in inners])
        self.rounding = join([inner.rounding for inner in inners])
        self.norm = math.hypot(*(inner.norm for inner in inners))

    @property
    def stretch(self) -> float:
        return max(inner.stretch for inner in self.inners)


Coordinates = Columns | Blocks
