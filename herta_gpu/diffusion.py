"""Rows of Q = H^-1 X C0, solved for in blocks of columns, with a proven bound of their error.

No array of n x d numbers is needed.  Of each block of columns three arrays of n x k exist: the
right-hand side B, and the two iterates of Chebyshev.  A block takes a few passes:

    Z = p(H) B;   rows of Q += rows of Z;   B <- B - H Z

The residual is computed in float64, the first time against X C0 itself: B in float32 is not X C0,
and what its rounding hides would never be seen.  H >= I, so Q is off by no more than what is left:

    ||H^-1 X C0 v - Q v|| <= ||R v||,   R = X C0 - H Q.

`left` holds the norms of R's columns, with all that rounding may have added to them.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any, Protocol

import numpy as np

from herta_gpu.backends.base import Array, Backend
from herta_gpu.coordinates import Columns
from herta_gpu.laplacian import (
    RegularizedLaplacian,
    chebyshev,
    chebyshev_degree,
    chebyshev_rounding,
)
from herta_gpu.plumbing.progress import Tell, marked

_MOST_PRODUCTS = 10**5  # with H, for each column
_MARGIN = 0.9  # a pass aims a little lower, so that the last one is not missed by rounding
_TYPICAL = 0.01  # what rounding really does to a pass, of the worst case
_KNOWN = 0.5  # share of a goal that the rounding of a stored residual may take
_CHUNK = 1 << 19  # numbers of a block that the residual is computed for at a time


Arrays = dict[str, Array]  # or text


class Cache(Protocol):
    """`cache(name, make)` returns the arrays stored under `name`, or makes and stores them.

    `together`: all processes make them at once, instead of this one alone.
    """

    def __call__(self, name: str, make: Callable[[], Arrays], together: bool = False) -> Arrays: ...


def silent(done: int, of: int) -> None:
    """Nobody hears how many columns are done."""


class Workspace:
    """Three blocks of k columns for every k up to `width`, allocated once.

    Where it is faster to gather neighbours in half precision, there is a fourth for those bits.
    """

    def __init__(self, H: RegularizedLaplacian, width: int, dtype: str) -> None:
        backend, L = H.backend, H.laplacian(dtype)
        self.half = dtype == "float32" and backend.half_pays(L, width)
        kinds = [dtype] * 3 + ["uint16"] * self.half
        self._rows = [H.n, *[backend.block_rows(L)] * 2, H.n][: len(kinds)]
        self._flat = [backend.empty((n * width,), kind) for n, kind in zip(self._rows, kinds)]

    def blocks(self, k: int) -> tuple[Array, tuple[Array, ...]]:
        """(B, the blocks that `chebyshev` works in)."""
        B, *work = (flat[: n * k].reshape(n, k) for n, flat in zip(self._rows, self._flat))
        return B, tuple(work)


class Diffusion:
    """The rows `at` of Q, those `beside` in the working precision, and what is left.

    In float32 the rows `at` have `lost` something that their residual does not show.

    Where n x r numbers may be `kept`, a later call of `lower` goes on from the residual.
    """

    def __init__(
        self,
        H: RegularizedLaplacian,
        basis: Columns,
        at: Array,
        beside: Array,
        blocks: Sequence[slice],
        dtype: str,
        kept: bool,
        tell: Tell = silent,
        stored: str = "float64",
    ) -> None:
        xp, r, count = H.backend.xp, basis.rank, int(H.backend.total(at.shape[0]))
        self.H, self.basis, self.at, self.beside, self.dtype = H, basis, at, beside, dtype
        self.cuts, self.width = blocks, max(J.stop - J.start for J in blocks)
        self.rows, self.lost = xp.zeros((count, r), dtype=stored), xp.zeros(r)
        self.others = xp.zeros((beside.shape[0], r), dtype=dtype)
        self.left = basis.sizes  # bounds of the norms of the columns of X C0 - H Q, Q still 0
        self.products = 0  # with H, for each column, at most
        self._kept: dict[int, Array] | None = {} if kept else None  # by the first of its columns
        self._begun, self.tell = False, tell

    @property
    def worst(self) -> float:
        """The largest of what is left, relative to the size of its column."""
        return _worst(self.H.backend.xp, self.left, self.basis.sizes)

    def lower(self, goal: float, cache: Cache, name: str) -> None:
        """Solve until no column leaves more than `goal` times its size, if rounding allows it."""
        work = Workspace(self.H, self.width, self.dtype)
        on = self._begun and self._kept is not None
        left, gathered = self.left.copy(), self.H.backend.gathered

        def solved(J: slice) -> Arrays:
            with marked("block of Q", first=J.start, columns=J.stop - J.start):
                block = cache(f"{name}-columns-{J.start}", partial(self._block, J, goal, work, on))
            if self._kept is not None:
                self._kept[J.start] = block["B"].copy()
            return {what: array for what, array in block.items() if what != "B"}

        self.tell(0, left.shape[0])
        for J, block in zip(self.cuts, self.H.backend.dealt(self.cuts, solved)):
            self.rows[:, J], self.others[:, J] = gathered(block["rows"]), block["others"]
            left[J], self.lost[J] = block["left"], block["lost"]
            self.products = max(self.products, int(block["products"][0]))  # synchronize!
            self.tell(J.stop, left.shape[0])
        self.left, self._begun = left, True

    def _block(self, J: slice, goal: float, work: Workspace, on: bool) -> Arrays:
        """One block of columns: from X C0, or on from what was left of it."""
        H, basis, k = self.H, self.basis, J.stop - J.start
        xp, (B, iterates) = H.backend.xp, work.blocks(k)
        sizes, unit = basis.sizes[J], 0.5 * float(np.finfo(self.dtype).eps)
        if on:
            assert self._kept is not None
            B[...] = self._kept[J.start]
            norms, left = xp.sqrt(H.backend.total(H.backend.column_dots(B, B))), self.left[J]
            rounded = xp.maximum(left - norms, 0.0) + unit * norms
            # A residual that was large when it was stored has too few digits for a small one.
            anew = basis.rounding[J] + 2 * H.rounding(k, rows=True) * sizes
            on = _worst(xp, rounded - anew, sizes) <= _KNOWN * goal
        if on:
            rows = H.backend.own(self.rows[:, J]).astype("float64")
            others, lost = self.others[:, J].copy(), self.lost[J]
        else:
            basis.fill(B, J)
            rows = xp.zeros((self.at.shape[0], k))
            others = xp.zeros((self.beside.shape[0], k), dtype=self.dtype)
            norms, rounded, lost = sizes, basis.rounding[J], xp.zeros(k)
        worst, last, products = _worst(xp, norms, sizes), math.inf, 0
        while worst > goal and worst < 0.5 * last and products < _MOST_PRODUCTS:
            degree = self._degree(goal / worst, k)
            Z = chebyshev(H, B, degree, iterates, work.half)
            rows += Z[self.at]
            others += Z[self.beside]
            fresh = products == 0 and not on
            source = basis.chunks(J) if fresh else _chunks(H.backend, B)
            before, norms = norms, _new_residual(H, source, Z, B)
            # ||Z|| <= ||H Z|| <= ||B|| + ||B - H Z||, and the new B is stored rounded.
            rounded = rounded + H.rounding(k, rows=True) * (before + norms) + unit * norms
            products, last, worst = products + degree, worst, _worst(xp, norms, sizes)
        if self.rows.dtype != rows.dtype:
            # Half a unit of each number, or of the smallest there is.
            size = xp.sqrt(H.backend.total(H.backend.column_dots(rows, rows)))
            count, kind = self.rows.shape[0], np.finfo(np.float32)
            lost = lost + 0.5 * (float(kind.eps) * size + float(kind.tiny) * count**0.5)
        made = {"rows": rows, "others": others, "left": norms + rounded, "lost": lost}
        made["products"] = xp.asarray([products])
        return made if self._kept is None else {**made, "B": B}

    def _degree(self, factor: float, columns: int) -> int:
        """The degree of the next of the passes, all alike, that lower a residual by `factor`.

        One pass cannot do more than rounding lets it.
        """
        worst_case = chebyshev_rounding(self.H, self.dtype, columns)
        least = max(8 * float(np.finfo(self.dtype).eps), _TYPICAL * worst_case)
        count = max(1, math.ceil(math.log(factor) / math.log(min(least, 0.1)) - 1e-9))
        return chebyshev_degree(self.H, _MARGIN * factor ** (1 / count))


def _worst(xp: Any, norms: Array, sizes: Array) -> float:
    return float((norms / xp.where(sizes > 0, sizes, 1.0)).max())  # synchronize!


def _chunks(backend: Backend, B: Array) -> Iterator[tuple[slice, Array]]:
    step = max(1, _CHUNK // B.shape[1])
    for a in range(0, B.shape[0], step):
        rows = slice(a, min(a + step, B.shape[0]))
        yield rows, B[rows].astype("float64")


def _new_residual(
    H: RegularizedLaplacian, source: Iterator[tuple[slice, Array]], Z: Array, B: Array
) -> Array:
    """B <- source - H Z; the norms of its columns, before they are stored."""
    squares, Z = H.backend.xp.zeros(B.shape[1]), H.with_neighbours(Z)
    with marked("residual", columns=B.shape[1]):
        for rows, part in source:
            R = H.residual_rows(part, Z, rows.start)
            B[rows] = R
            squares = squares + H.backend.column_dots(R, R)
    return H.backend.xp.sqrt(H.backend.total(squares))
