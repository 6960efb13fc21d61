"""Kernel ridge with the kernel of an infinitely wide ReLU net on diffused features, in float64.

    z = [unit rows of U's blocks / sqrt(blocks), 1/2],        G = z . z',   cos t = G / (|z| |z'|)
    K1 = k(G),   T1 = K1 + G k'(G),      T = k(K1) + T1 k'(K1)     (two hidden layers, all trained)
    k(G) = |z| |z'| (sin t + (pi - t) cos t) / pi,     k'(G) = (pi - t) / pi

with U as in `random_features` and blocks S^k U or H^-1 U, plus a share of the linear kernel of the
same blocks of X, both with a mean diagonal of 1.  min over f of 1/2 ||Y - f||^2 + rho/2 ||f||_K^2
is convex; with f = K a and R = Y - (K + rho) a the gap is exactly

    1/2 tr R^T K (K + rho)^-1 R <= 1/2 ||R||^2.

R is measured with a computed K; the true one is at most ||E||_F ||a|| further away.  E is bounded
entry by entry: an error g of G moves cos t by g/(|z| |z'|), k by no more than that, and t by
g / sin t, or by pi sqrt(g/2) where nodes are nearly alike, which is all that k' depends on.  What
hops and solves leave of z counts in g.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import scipy.linalg

from herta_gpu.backends.base import unit_roundoff
from herta_gpu.certificate import Certificate, relative
from herta_gpu.features import Features
from herta_gpu.laplacian import RegularizedLaplacian, block_cg
from herta_gpu.more.random_features import FLOOR, Layer
from herta_gpu.planning.costs import BLOCK_WIDTH

_UNIT, _TOL = unit_roundoff(), 1e-12


def wide_kernel(A: Any, B: Any, first: int | None = None, off: Any = None) -> tuple[Any, float]:
    """(T of the rows of A and B, a bound of ||computed T - T||_F).

    `off`: what each row of A and of B is off by.  Where A are the rows `first`, ... of B each of
    them is exactly like itself.

    Examples
    --------
    >>> import numpy as np
    >>> from herta_gpu.more.kernel import wide_kernel
    >>> T, error = wide_kernel(np.eye(2), np.eye(2), 0)
    >>> T.round(4).tolist(), error < 1e-12
    ([[3.0, 0.6857], [0.6857, 3.0]], True)
    """
    a, b = (np.sqrt((M * M).sum(axis=1)) for M in (A, B))
    size, T, unit = np.outer(a, b), A @ B.T, (A.shape[1] + 16) * _UNIT
    g = unit * size  # what T, and the sizes, are off by
    if off is not None:
        g += np.outer(off[0], b + off[1]) + np.outer(a, off[1])
    G, at, error = T, g, g
    itself = (np.arange(len(A)), np.arange(len(A)) + (first or 0))
    for _ in range(2):
        moved = 2 * (at + g) / size + unit  # of the cosine
        c = np.clip(G / size, -1.0, 1.0)
        room = 1 - (np.abs(c) + moved) ** 2
        turned = math.pi * np.sqrt(moved / 2)  # of the angle
        turned = np.minimum(turned, moved / np.sqrt(np.maximum(room, 1e-300))) + 8 * _UNIT
        if first is not None:
            c[itself], turned[itself] = 1.0, 0.0
        t = np.arccos(c)
        slope = 1 - t / math.pi
        G = size * (np.sin(t) / math.pi + slope * c)
        at = g + size * (moved + 16 * _UNIT)
        error = at + error + np.abs(T) * (turned / math.pi + 8 * _UNIT)
        T = G + T * slope
    return T, float(np.linalg.norm(error))


def kernel_ridge(K: Any, rho: float, Y: Any, E: float) -> tuple[Any, Any, Certificate]:
    """(a, leave-one-out, certificate): outputs are K a + the mean of Y; K is off by E in norm.

    A model without row i has the mean of the others, and the kernel of all.
    """
    n, at, mean = K.shape[0], np.arange(K.shape[0]), Y.mean(axis=0)
    L = K.copy(order="F")
    L[at, at] += rho
    L = scipy.linalg.cholesky(L, lower=True, overwrite_a=True, check_finite=False)
    T, b = Y - mean, np.concatenate([Y - mean, np.ones((n, 1))], axis=1)
    found = scipy.linalg.cho_solve((L, True), b, check_finite=False)
    left = b - K @ found - rho * found
    found += scipy.linalg.cho_solve((L, True), left, check_finite=False)
    a, s = found[:, :-1], found[:, -1:]
    Ka, size, norm = K @ a, float(np.linalg.norm(a)), float(np.linalg.norm(K))
    rounded = (n + 8) * _UNIT * (norm + rho) * size
    R = float(np.linalg.norm(T - Ka - rho * a)) + E * size + rounded
    # The objective with the exact kernel, at least.
    fit = max(0.0, float(np.linalg.norm(T - Ka)) - E * size - rounded)
    smooth = max(0.0, float((a * Ka).sum()) - (E * size + rounded) * size)
    gap = 0.5 * R**2
    value = relative(gap, 0.5 * fit**2 + 0.5 * rho * smooth - gap)
    note = f"the kernel is off by at most {E:.1e}"
    inverse, _ = scipy.linalg.lapack.dtrtri(L, lower=1, overwrite_c=1)
    diagonal = (inverse * inverse).sum(axis=0)[:, None]  # of (K + rho)^-1
    others = (n * mean - Y) / max(1, n - 1)
    loo = Y - (a + (mean - others) * s) / diagonal
    return a, loo, Certificate(value, "residual", 0.0, gap, note, n, n)


@dataclass
class Diffused:
    """Unit rows of S^k X and H^-1 X, as what goes into the kernel and as they are."""

    H: RegularizedLaplacian
    F: Features
    hops: Sequence[int]
    lam: Sequence[float]
    fixed: dict[str, Any]  # V, and the lengths below which rows are not made longer

    def diffused(self, B: Any) -> Iterator[tuple[Any, Any]]:
        """(S^k B or H^-1 B, (n, 1) bounds of what its rows are off by) for each block."""
        H, xp = self.H, self.H.backend.xp
        S, lengths, indptr = H.power(1), xp.sqrt((B * B).sum(axis=1, keepdims=True)), H.graph.indptr
        terms = H.backend.asarray(indptr[1:] - indptr[:-1], "float64")[:, None] + 16
        for hops in self.hops:
            h, off = lengths, xp.zeros_like(lengths)
            for _ in range(hops):  # rows of S |B| are no longer than S makes their lengths
                h = S.hopped(h)
                off = S.hopped(off) + terms * _UNIT * h
            yield H.power(hops).hopped(B), 1.01 * off
        for lam in self.lam:
            one = H.at(lam)
            Z, info = block_cg(one, B, _TOL)
            left = float((info.residuals**2).sum()) ** 0.5
            left += one.rounding(B.shape[1]) * float(xp.sqrt((lengths * lengths).sum()))
            yield Z, xp.full(lengths.shape, left)

    def inputs(self, at: Any) -> tuple[Any, Any]:
        """(z of the stored rows `at`, what each of them is off by)."""
        V, backend = self.fixed["V"], self.H.backend
        get = backend.to_numpy
        layer = Layer(V, V[:0], V[0, :0], float(self.fixed["floors"][0]), 1.0).on(backend)
        U, given = layer.reduce(self.F)
        blocks, offs = [], np.zeros((len(at), 1))
        for (Q, left), moved in zip(self.diffused(U), self._moved(given)):
            rows, left = (get(a[backend.asarray(at)]) for a in (Q, left + moved))
            lengths = np.maximum(np.sqrt((rows * rows).sum(axis=1, keepdims=True)), FLOOR)
            offs += (left / np.maximum(lengths - left, FLOOR)) ** 2
            blocks.append(rows / lengths)
        offs = np.sqrt(offs / len(blocks))[:, 0] + 8 * _UNIT
        Z = np.hstack([*blocks, np.full((len(at), 1), 0.5 * len(blocks) ** 0.5)])
        return Z / len(blocks) ** 0.5, offs

    def _moved(self, given: Any) -> Iterator[Any]:
        """What errors of the rows of B become in each block: S and H^-1 are not negative."""
        for hops in self.hops:
            yield 1.01 * self.H.power(hops).hopped(given)
        for _ in self.lam:
            yield given * 0 + float((given * given).sum()) ** 0.5

    def linear(self, at: Any, W: Any = None) -> Any:
        """(rows `at` of the blocks of X, of length 1; their error), or these rows times W."""
        (n, d), count, backend = self.F.shape, len(self.hops) + len(self.lam), self.H.backend
        at, xp, squares = backend.asarray(at), backend.xp, np.zeros((count, len(at), 1))
        B = np.zeros((count, len(at), d if W is None else W.shape[1]))
        off = np.zeros((count, len(at), 1))
        for j in range(0, d, BLOCK_WIDTH):
            J = slice(j, min(j + BLOCK_WIDTH, d))
            X = xp.empty((n, J.stop - j))
            for rows, part in self.F.row_chunks(J):
                X[rows] = part
            for i, (Q, left) in enumerate(self.diffused(X)):
                Q, left = backend.to_numpy(Q[at]), backend.to_numpy(left[at])
                squares[i] += (Q * Q).sum(axis=1, keepdims=True)
                off[i] = np.hypot(off[i], left)
                if W is None:
                    B[i, :, J] = Q
                else:
                    B[i] += Q @ W[i * d + j : i * d + J.stop]
        lengths = np.maximum(np.sqrt(squares), self.fixed["floors"][1])
        B /= lengths
        if W is not None:
            return B.sum(axis=0)
        left = 2 * off / np.maximum(lengths - off, self.fixed["floors"][1])
        return np.concatenate([*B], axis=1), float(np.linalg.norm(left))
