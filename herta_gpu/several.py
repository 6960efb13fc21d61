"""Several lam at once: the features are blocks [H_1^-1 X, H_2^-1 X, ...], 0 standing for X itself.

The model is linear in W as before, which now has a block of rows per lam.  One basis C0 of X serves
all blocks, and each block of Q is solved for with its own H, in passes of its own: what is left of
its columns is measured, so all that is proven from Q and the norms of those columns stays proven.
(All lam from one Chebyshev sequence would share the first pass only: what that leaves differs.)

Further features may stand beside these blocks as they are, such as those that labels make.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from herta_gpu.backends.base import Array
from herta_gpu.diffusion import Cache, Diffusion
from herta_gpu.factors import Composed, Factor
from herta_gpu.features import Features
from herta_gpu.hessians import Metric
from herta_gpu.laplacian import RegularizedLaplacian
from herta_gpu.plumbing.progress import Tell
from herta_gpu.whitening import Basis, Units

_WIDTH = 64  # columns of further features at a time


@dataclass
class Stacked:
    """The bases of several blocks of features side by side: C0 is block diagonal."""

    inners: Sequence[Basis]

    @property
    def X(self) -> Features:
        return self.inners[0].X

    @property
    def xp(self) -> Any:
        return self.X.backend.xp

    @cached_property
    def ranks(self) -> list[int]:
        return [inner.rank for inner in self.inners]

    @property
    def rank(self) -> int:
        return sum(self.ranks)

    @cached_property
    def sizes(self) -> Array:
        return self.xp.concatenate([inner.sizes for inner in self.inners])

    @property
    def norm(self) -> float:
        return math.hypot(*(inner.norm for inner in self.inners))

    @property
    def rounding(self) -> Array:
        return self.xp.concatenate([inner.rounding for inner in self.inners])

    @cached_property
    def ridge(self) -> Array:
        parts = [inner.ridge for inner in self.inners]
        if all(G.ndim == 1 for G in parts):
            return self.xp.concatenate(parts)
        return self._diagonal(parts)

    def _diagonal(self, parts: list[Array]) -> Array:
        """These matrices (or their diagonals) along the diagonal of one."""
        parts = [self.xp.diag(G) if G.ndim == 1 else G for G in parts]
        rows, columns = (sum(G.shape[axis] for G in parts) for axis in (0, 1))
        whole, i, j = self.xp.zeros((rows, columns)), 0, 0
        for G in parts:
            whole[i : i + G.shape[0], j : j + G.shape[1]] = G
            i, j = i + G.shape[0], j + G.shape[1]
        return whole

    def ridge_size(self, sizes: Array) -> Array:
        return self._joined(inner.ridge_size(s) for inner, s in self._parts(sizes))

    def weights(self, u: Array) -> Array:
        return self._joined(inner.weights(part) for inner, part in self._parts(u))

    def weights_rounding(self, u: Array) -> float:
        return sum(inner.weights_rounding(part) for inner, part in self._parts(u))

    def metric(self) -> Metric:
        inners = [inner.metric() for inner in self.inners]
        if all(m.G is not None and m.K is not None and m.G.ndim == 2 for m in inners):
            G, K = ([getattr(m, name) for m in inners] for name in "GK")
            return Metric(inners[0].backend, self._diagonal(G), self._diagonal(K))
        if self.ridge.ndim == 1:
            return Metric.diagonal(inners[0].backend, self.ridge)
        return Metric.of_map(inners[0].backend, self._map())

    def _map(self) -> Array:
        """C0 itself."""
        eye = (self.xp.eye(rank) for rank in self.ranks)
        return self._diagonal([inner.weights(one) for inner, one in zip(self.inners, eye)])

    def coordinates(self, W: Array) -> Array:
        cuts = [inner.X.shape[1] for inner in self.inners]
        return self._joined(inner.coordinates(part) for inner, part in self._parts(W, cuts))

    def rows(self, Q: Array) -> Array:
        parts = [inner.rows(self.xp.ascontiguousarray(q.T)) for inner, q in self._parts(Q.T)]
        return self.xp.concatenate(parts, axis=1)

    def gradient(self, g: Array) -> Array:
        return self._joined(inner.gradient(part) for inner, part in self._parts(g))

    def dual_norm(self, g: Array) -> float:
        return math.hypot(*(inner.dual_norm(part) for inner, part in self._parts(g)))

    def dual_bound(self, sizes: Array) -> float:
        return math.hypot(*(inner.dual_bound(part) for inner, part in self._parts(sizes)))

    @property
    def stretch(self) -> float:
        return max(inner.stretch for inner in self.inners)

    def transposed(self, g: Array) -> Array:
        cuts = [inner.X.shape[1] for inner in self.inners]
        return self._joined(inner.transposed(part) for inner, part in self._parts(g, cuts))

    def column_sizes(self, sizes: Array) -> Array:
        cuts = [inner.X.shape[1] for inner in self.inners]
        return self._joined(inner.column_sizes(s) for inner, s in self._parts(sizes, cuts))

    def factor(self, inner: Factor) -> Factor:
        return Composed(self, inner)

    def chunks(self, J: slice) -> Iterator[tuple[slice, Array]]:
        raise NotImplementedError  # each block is solved for by itself

    def fill(self, B: Array, J: slice) -> None:
        raise NotImplementedError

    def _parts(self, rows: Array, cuts: list[int] | None = None) -> Iterator[tuple[Basis, Array]]:
        """Each block's basis and its share of the rows; by ranks unless told otherwise."""
        start = 0
        for inner, count in zip(self.inners, self.ranks if cuts is None else cuts, strict=True):
            yield inner, rows[start : start + count]
            start += count

    def _joined(self, parts: Iterator[Array]) -> Array:
        return self.xp.concatenate(list(parts))


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
        extra: Units | None = None,
    ) -> None:
        """`extra` is the basis of further features: their rows as they are, and their error."""
        inners = [basis] * len(systems)
        self.basis = Stacked(inners if extra is None else [*inners, extra])
        self.at, self.beside, self.tell = at, beside, tell
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
        if extra is not None:
            cuts = [slice(a, min(a + _WIDTH, extra.rank)) for a in range(0, extra.rank, _WIDTH)]
            itself = _Itself(systems[0], extra, at, beside, cuts, dtype)
            itself.left = itself.left + extra.X.off * extra.scale
            self.parts.append(itself)
        self.rows, self.others = self._shared("rows"), self._shared("others")

    def _shared(self, name: str) -> Array:
        """One array of all blocks, of which each part has its own columns from now on."""
        xp, parts, first = self.H.backend.xp, [getattr(part, name) for part in self.parts], 0
        kind = max((part.dtype for part in parts), key=lambda kind: kind.itemsize)
        whole = xp.zeros((parts[0].shape[0], self.basis.rank), dtype=kind)
        for part, own in zip(self.parts, parts, strict=True):
            mine = whole[:, first : first + own.shape[1]]
            if isinstance(part, _Itself):
                mine[...] = own  # those of other blocks are still to be solved for
            setattr(part, name, mine)
            first += own.shape[1]
        return whole

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

    def lower(self, goal: float, cache: Cache, name: str) -> None:
        """Solve until no column of any block leaves more than `goal` times its size."""
        for part in self.parts:
            if isinstance(part, Diffusion):
                part.lower(goal, cache, f"{name}-lam-{part.H.lam!r}")

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
        self.rows = H.backend.gathered(self.rows)
        self.left, self.lost = basis.rounding.copy(), xp.zeros(basis.rank)
