"""Several lam at once: the features are blocks [H_1^-1 X, H_2^-1 X, ...], 0 standing for X itself.

The model is linear in W as before, which now has a block of rows per lam.  One basis C0 of X serves
all blocks, and each block of Q is solved for with its own H, in passes of its own: what is left of
its columns is measured, so all that is proven from Q and the norms of those columns stays proven.
(All lam from one Chebyshev sequence would share the first pass only: what that leaves differs.)
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from herta_gpu.backends.base import Array
from herta_gpu.dense import Metric
from herta_gpu.diffusion import Diffusion, Recall
from herta_gpu.factors import Factor
from herta_gpu.features import Features
from herta_gpu.plumbing.stages import Tell
from herta_gpu.solver import RegularizedLaplacian
from herta_gpu.whitening import Basis


@dataclass
class Repeated:
    """C0 once for each of `count` blocks: a basis of [X, X, ...] that is block diagonal."""

    inner: Basis
    count: int

    @property
    def X(self) -> Features:
        return self.inner.X

    @property
    def xp(self) -> Any:
        return self.X.backend.xp

    @property
    def rank(self) -> int:
        return self.count * self.inner.rank

    @cached_property
    def sizes(self) -> Array:
        return self.xp.concatenate([self.inner.sizes] * self.count)

    @property
    def norm(self) -> float:
        return math.sqrt(self.count) * self.inner.norm

    @property
    def rounding(self) -> Array:
        return self.xp.concatenate([self.inner.rounding] * self.count)

    @cached_property
    def ridge(self) -> Array:
        G = self.inner.ridge
        if G.ndim == 1:
            return self.xp.concatenate([G] * self.count)
        return self._diagonal(G)

    def _diagonal(self, G: Array) -> Array:
        """G once for each block, along the diagonal."""
        r, whole = G.shape, self.xp.zeros((self.count * G.shape[0], self.count * G.shape[1]))
        for i in range(self.count):
            whole[i * r[0] : (i + 1) * r[0], i * r[1] : (i + 1) * r[1]] = G
        return whole

    def ridge_size(self, sizes: Array) -> Array:
        return self._joined(self.inner.ridge_size(s) for s in self._parts(sizes))

    def weights(self, u: Array) -> Array:
        return self._joined(self.inner.weights(part) for part in self._parts(u))

    def weights_rounding(self, u: Array) -> float:
        return sum(self.inner.weights_rounding(part) for part in self._parts(u))

    def metric(self) -> Metric:
        inner = self.inner.metric()
        if inner.G is not None and inner.K is not None and inner.G.ndim == 2:
            return Metric(inner.backend, self._diagonal(inner.G), self._diagonal(inner.K))
        return Metric.diagonal(inner.backend, self.ridge)

    def coordinates(self, W: Array) -> Array:
        return self._joined(self.inner.coordinates(part) for part in self._parts(W))

    def rows(self, Q: Array) -> Array:
        parts = [self.inner.rows(self.xp.ascontiguousarray(part.T)) for part in self._parts(Q.T)]
        return self.xp.concatenate(parts, axis=1)

    def gradient(self, g: Array) -> Array:
        return self._joined(self.inner.gradient(part) for part in self._parts(g))

    def dual_norm(self, g: Array) -> float:
        return math.hypot(*(self.inner.dual_norm(part) for part in self._parts(g)))

    def dual_bound(self, sizes: Array) -> float:
        return math.hypot(*(self.inner.dual_bound(part) for part in self._parts(sizes)))

    def factor(self, inner: Factor) -> Factor:
        return _Blockwise(self, inner)

    def chunks(self, J: slice) -> Iterator[tuple[slice, Array]]:
        raise NotImplementedError  # each block is solved for by itself

    def fill(self, B: Array, J: slice) -> None:
        raise NotImplementedError

    def _parts(self, rows: Array) -> list[Array]:
        step = rows.shape[0] // self.count
        return [rows[i * step : (i + 1) * step] for i in range(self.count)]

    def _joined(self, parts: Iterator[Array]) -> Array:
        return self.xp.concatenate(list(parts))


class _Blockwise:
    """C0 C: a factor of P seen from the weights of all blocks."""

    def __init__(self, basis: Repeated, inner: Factor) -> None:
        self.basis, self.inner = basis, inner
        self.kind, self.note = inner.kind, inner.note

    @property
    def rank(self) -> int:
        return self.inner.rank

    @property
    def slack(self) -> float:
        return self.inner.slack

    def half(self, w: Array) -> Array:
        return self.basis.weights(self.inner.half(w))

    def half_T(self, g: Array) -> Array:
        raise NotImplementedError  # the true model has one lam

    def unhalf(self, W: Array) -> Array:
        return self.inner.unhalf(self.basis.coordinates(W))

    def project(self, v: Array) -> Array:
        return self.inner.project(v)

    @property
    def size(self) -> float:
        return math.inf

    def amplified(self, sizes: Array) -> float:
        return math.inf


class SeveralDiffusions:
    """Rows of all blocks of Q, and what is left of their columns."""

    def __init__(
        self,
        systems: Sequence[RegularizedLaplacian],
        basis: Basis,
        at: Array,
        beside: Array,
        blocks: Sequence[slice],
        dtype: str,
        kept: bool,
        tell: Tell,
        stored: str,
    ) -> None:
        self.basis, self.at, self.beside, self.tell = (
            Repeated(basis, len(systems)),
            at,
            beside,
            tell,
        )
        self.H, self.dtype, self.done = systems[0], dtype, 0
        self.parts: list[Diffusion | _Itself] = []
        for i, H in enumerate(systems):
            first = i * basis.rank

            def told(done: int, of: int, first: int = first) -> None:
                tell(first + done, self.basis.rank)

            if H.lam == 0:
                self.parts.append(_Itself(H, basis, at, beside, blocks, dtype))  # in float64
            else:
                self.parts.append(
                    Diffusion(H, basis, at, beside, blocks, dtype, kept, told, stored)
                )

    @property
    def rows(self) -> Array:
        return self._joined("rows")

    @property
    def others(self) -> Array:
        return self._joined("others")

    @property
    def left(self) -> Array:
        return self._joined("left")

    @property
    def lost(self) -> Array:
        return self._joined("lost")

    @property
    def worst(self) -> float:
        return max((part.worst for part in self.parts if isinstance(part, Diffusion)), default=0.0)

    @property
    def products(self) -> int:
        return sum(part.products for part in self.parts)

    def lower(self, goal: float, recall: Recall, name: str) -> None:
        """Solve until no column of any block leaves more than `goal` times its size."""
        for part in self.parts:
            if isinstance(part, Diffusion):
                part.lower(goal, recall, f"{name}-lam-{part.H.lam!r}")

    def _joined(self, name: str) -> Array:
        xp = self.H.backend.xp
        return xp.concatenate([getattr(part, name) for part in self.parts], axis=-1)


class _Itself:
    """lam = 0: rows of X C0, which nothing has to be solved for."""

    products = 0

    def __init__(
        self,
        H: RegularizedLaplacian,
        basis: Basis,
        at: Array,
        beside: Array,
        blocks: Sequence[slice],
        dtype: str,
    ) -> None:
        xp = H.backend.xp
        self.rows = xp.zeros((at.shape[0], basis.rank))
        self.others = xp.zeros((beside.shape[0], basis.rank), dtype=dtype)
        for J in blocks:
            for rows, part in basis.chunks(J):
                for nodes, kept in ((at, self.rows), (beside, self.others)):
                    here = xp.flatnonzero((nodes >= rows.start) & (nodes < rows.stop))
                    kept[here, J] = part[nodes[here] - rows.start]
        self.left, self.lost = basis.rounding.copy(), xp.zeros(basis.rank)
