"""Rows of Q = H^-1 X C0, solved for in blocks of columns, with a proven bound of their error.

No array of n x d numbers is needed.  Of each block of columns three arrays of n x k exist: the
right-hand side B, and the two iterates of Chebyshev.  A block takes a few passes:

    Z = p(H) B;   rows of Q += rows of Z;   B <- B - H Z

The residual is computed in float64, the first time against X C0 itself: B in float32 is not X C0,
and what its rounding hides would never be seen.  H >= I, so Q is off by no more than the residual:

    ||H^-1 X C0 v - Q v|| <= ||R v||,   R = X C0 - H Q.

`Rows.residual_bound` holds the norms of R's columns, with all that rounding may have added to them.

Several lam make blocks of columns [H_1^-1 X C0, H_2^-1 X C0, ...], each solved for with its own H,
in passes of its own.  (All lam from one Chebyshev sequence would share the first pass only: what
that leaves differs.)  Columns of X C0 themselves may stand beside them: those of lam = 0, and
features that are not diffused, such as those that labels make.

Where P need only be rough, `Approximation` makes Q without measuring anything: by one Chebyshev
polynomial, by rows of the inverse where there are few of them, or as a sketch (lines 3 to 5 of
Algorithm 1).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import accumulate
from typing import Any, NamedTuple, Protocol

import numpy as np

from herta_gpu.backends.base import Array, Backend, unit_roundoff
from herta_gpu.coordinates import Blocks, Columns, Coordinates
from herta_gpu.factors import products, weigh_rows
from herta_gpu.laplacian import (
    RegularizedLaplacian,
    block_cg,
    chebyshev,
    chebyshev_degree,
    chebyshev_rounding,
)
from herta_gpu.planning.plan import Recipe
from herta_gpu.plumbing.progress import Tell, marked
from herta_gpu.problem import UnfoldedMap

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


def no_cache(name: str, make: Callable[[], Arrays], together: bool = False) -> Arrays:
    """Nothing is stored: call `make()` each time."""
    return make()


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


@dataclass(frozen=True)
class Wanted:
    """Which rows of Q are wanted, and how they are solved for."""

    train: Array
    evaluate: Array
    blocks: Callable[[int], Sequence[slice]]  # of so many columns
    dtype: str  # the precision of the solves, and of the rows for evaluation
    stored: str = "float64"  # the precision of the training rows
    keep_residual: bool = False  # n x r numbers, from which a later `tighten` goes on
    tell: Tell = silent


class _Part(NamedTuple):
    """Columns of Q that are solved for with one H."""

    H: RegularizedLaplacian | None  # None: they are the columns of X C0 themselves
    columns: Columns
    first: int  # where they stand among all columns

    def among_all(self, J: slice) -> slice:
        return slice(self.first + J.start, self.first + J.stop)


class Rows:
    """Rows of Q on the training nodes and on those for evaluation.

    Parameters
    ----------
    backend : Backend
    systems : sequence of RegularizedLaplacian or None
        The H of each block of columns; None where the columns of X C0 are taken as they are.
    columns : sequence of Columns
        X C0 of each block.
    wanted : Wanted

    Attributes
    ----------
    basis : Coordinates
        C0 of all blocks.
    train_rows, eval_rows : arrays with r columns
        The first in float64 unless `wanted` says otherwise, the others in the working precision.
    residual_bound : (r,) array
        residual_bound[j] >= ||X c_j - H q_j||, which bounds ||H^-1 X c_j - q_j||.
    storage_error : (r,) array
        What rounding `train_rows` to float32 added to that.
    """

    def __init__(
        self,
        backend: Backend,
        systems: Sequence[RegularizedLaplacian | None],
        columns: Sequence[Columns],
        wanted: Wanted,
    ) -> None:
        firsts = accumulate((one.rank for one in columns), initial=0)
        self.parts = [_Part(*part) for part in zip(systems, columns, firsts)]
        self.basis: Coordinates = columns[0] if len(columns) == 1 else Blocks(columns)
        self.backend, self.wanted, xp, r = backend, wanted, backend.xp, self.basis.rank
        count, copied = int(backend.total(wanted.train.shape[0])), any(H is None for H in systems)
        self.train_rows = xp.zeros((count, r), dtype="float64" if copied else wanted.stored)
        self.eval_rows = xp.zeros((wanted.evaluate.shape[0], r), dtype=wanted.dtype)
        self.residual_bound, self.storage_error = self.basis.sizes.copy(), xp.zeros(r)  # Q is 0
        # Of a part or a block, by the first of its columns.
        self._products: dict[int, int] = {}
        self._residuals: dict[int, Array] | None = {} if wanted.keep_residual else None
        for part in self.parts:
            if part.H is None:
                self._copy(part.columns, part.among_all(slice(0, part.columns.rank)))

    @property
    def error(self) -> Array:
        """(r,) bounds of ||H^-1 X c_j - q_j|| for the training rows as they are stored."""
        return self.residual_bound + self.storage_error

    @property
    def worst(self) -> float:
        """The largest residual of a column that is solved for, relative to the column's size."""
        found = [0.0]
        for H, columns, first in self.parts:
            if H is not None:
                bound = self.residual_bound[first : first + columns.rank]
                found.append(_worst(self.backend.xp, bound, columns.sizes))
        return max(found)

    @property
    def products(self) -> int:
        """Products with H that the columns have taken, at most."""
        return sum(self._products.values())

    def _copy(self, columns: Columns, J: slice) -> None:
        """Take the columns of X C0 as they are."""
        xp, wanted = self.backend.xp, self.wanted
        train = xp.zeros((wanted.train.shape[0], columns.rank))
        places = ((wanted.train, train), (wanted.evaluate, self.eval_rows[:, J]))
        for block in wanted.blocks(columns.rank):
            for rows, part in columns.chunks(block):
                for nodes, kept in places:
                    here = xp.flatnonzero((nodes >= rows.start) & (nodes < rows.stop))
                    kept[here, block] = part[nodes[here] - rows.start]
        self.train_rows[:, J] = self.backend.gathered(train)
        off = xp.full(columns.shape[0], columns.X.off)  # what features that we made may be off by
        self.residual_bound[J] = columns.rounding + columns.column_sizes(off)

    def tighten(self, goal: float, cache: Cache, name: str) -> None:
        """Solve until no column leaves more than `goal` times its size, if rounding allows it."""
        for part in self.parts:
            if part.H is not None:
                own = name if len(self.parts) == 1 else f"{name}-lam-{part.H.lam!r}"
                self._tighten(part, part.H, goal, cache, own)

    def _tighten(
        self, part: _Part, H: RegularizedLaplacian, goal: float, cache: Cache, name: str
    ) -> None:
        blocks, backend = self.wanted.blocks(part.columns.rank), self.backend
        work = Workspace(H, max(J.stop - J.start for J in blocks), self.wanted.dtype)

        def solve(J: slice) -> Arrays:
            make = partial(self._block, J, part, H, goal, work)
            with marked("block of Q", first=J.start, columns=J.stop - J.start):
                block = cache(f"{name}-columns-{J.start}", make)
            if self._residuals is not None:
                self._residuals[part.first + J.start] = block["B"].copy()
            return {what: array for what, array in block.items() if what != "B"}

        self.wanted.tell(part.first, self.basis.rank)
        for J, block in zip(blocks, backend.dealt(blocks, solve)):
            at = part.among_all(J)
            self.train_rows[:, at] = backend.gathered(block["rows"])
            self.eval_rows[:, at] = block["others"]
            self.residual_bound[at], self.storage_error[at] = block["left"], block["lost"]
            products = int(block["products"][0])  # synchronize!
            self._products[part.first] = max(self._products.get(part.first, 0), products)
            self.wanted.tell(at.stop, self.basis.rank)

    def _block(
        self, J: slice, part: _Part, H: RegularizedLaplacian, goal: float, work: Workspace
    ) -> Arrays:
        """One block of columns: from X C0, or on from the residual that was kept."""
        columns, at, wanted, k = part.columns, part.among_all(J), self.wanted, J.stop - J.start
        xp, (B, iterates) = H.backend.xp, work.blocks(k)
        sizes, unit = columns.sizes[J], unit_roundoff(wanted.dtype)
        kept = None if self._residuals is None else self._residuals.get(at.start)
        on = kept is not None
        if kept is not None:
            B[...] = kept
            norms, bound = column_norms(H.backend, B), self.residual_bound[at]
            rounded = xp.maximum(bound - norms, 0.0) + unit * norms
            # A residual that was large when it was stored has too few digits for a small one.
            anew = columns.rounding[J] + 2 * H.rounding(k, rows=True) * sizes
            on = _worst(xp, rounded - anew, sizes) <= _KNOWN * goal
        if on:
            rows = H.backend.own(self.train_rows[:, at]).astype("float64")
            others, storage = self.eval_rows[:, at].copy(), self.storage_error[at]
        else:
            columns.fill(B, J)
            rows = xp.zeros((wanted.train.shape[0], k))
            others = xp.zeros((wanted.evaluate.shape[0], k), dtype=wanted.dtype)
            norms, rounded, storage = sizes, columns.rounding[J], xp.zeros(k)
        worst, last, products = _worst(xp, norms, sizes), math.inf, 0
        while worst > goal and worst < 0.5 * last and products < _MOST_PRODUCTS:
            degree = _degree(H, wanted.dtype, goal / worst, k)
            Z = chebyshev(H, B, degree, iterates, work.half)
            rows += Z[wanted.train]
            others += Z[wanted.evaluate]
            fresh = products == 0 and not on
            source = columns.chunks(J) if fresh else _chunks(H.backend, B)
            before, norms = norms, _residual(H, source, Z, B)
            # ||Z|| <= ||H Z|| <= ||B|| + ||B - H Z||, and the new B is stored rounded.
            rounded = rounded + H.rounding(k, rows=True) * (before + norms) + unit * norms
            products, last, worst = products + degree, worst, _worst(xp, norms, sizes)
        if self.train_rows.dtype != rows.dtype:
            # Half a unit of each number, or of the smallest there is.
            size = unit_roundoff("float32") * column_norms(H.backend, rows)
            tiny = 0.5 * float(np.finfo(np.float32).tiny)
            storage = storage + (size + tiny * self.train_rows.shape[0] ** 0.5)
        made = {"rows": rows, "others": others, "left": norms + rounded, "lost": storage}
        made["products"] = xp.asarray([products])
        return made if self._residuals is None else {**made, "B": B}


def _degree(H: RegularizedLaplacian, dtype: str, factor: float, columns: int) -> int:
    """The degree of the next of the passes, all alike, that lower a residual by `factor`.

    One pass cannot do more than rounding lets it.
    """
    worst_case = chebyshev_rounding(H, dtype, columns)
    least = max(16 * unit_roundoff(dtype), _TYPICAL * worst_case)
    count = max(1, math.ceil(math.log(factor) / math.log(min(least, 0.1)) - 1e-9))
    return chebyshev_degree(H, _MARGIN * factor ** (1 / count))


def column_norms(backend: Backend, B: Array) -> Array:
    """(k,) the norms of the columns of B, over all processes."""
    return backend.xp.sqrt(backend.total(backend.column_dots(B, B)))


def _worst(xp: Any, norms: Array, sizes: Array) -> float:
    return float((norms / xp.where(sizes > 0, sizes, 1.0)).max())  # synchronize!


def _chunks(backend: Backend, B: Array) -> Iterator[tuple[slice, Array]]:
    step = max(1, _CHUNK // B.shape[1])
    for a in range(0, B.shape[0], step):
        rows = slice(a, min(a + step, B.shape[0]))
        yield rows, B[rows].astype("float64")


def _residual(
    H: RegularizedLaplacian,
    source: Iterator[tuple[slice, Array]],
    Z: Array,
    B: Array | None = None,
) -> Array:
    """The norms of the columns of source - H Z, before they are stored in B."""
    squares, Z = H.backend.xp.zeros(Z.shape[1]), H.with_neighbours(Z)
    with marked("residual", columns=Z.shape[1]):
        for rows, part in source:
            R = H.residual_rows(part, Z, rows.start)
            if B is not None:
                B[rows] = R
            squares = squares + H.backend.column_dots(R, R)
    return H.backend.xp.sqrt(H.backend.total(squares))


def residual_norms(H: RegularizedLaplacian, basis: Columns, Q: Array, width: int) -> Array:
    """(r,) bounds of the norms of the columns of X C0 - H Q, rounding included."""
    found, sizes = basis.rounding, column_norms(H.backend, Q)
    blocks = [slice(j, min(j + width, Q.shape[1])) for j in range(0, Q.shape[1], width)]

    def measure(J: slice) -> Arrays:
        return {"norms": _residual(H, basis.chunks(J), H.backend.asarray(Q[:, J]))}

    for J, made in zip(blocks, H.backend.dealt(blocks, measure)):
        found[J] += made["norms"] + H.rounding(J.stop - J.start, rows=True) * sizes[J]
    return found


@dataclass(frozen=True)
class Approximation:
    """Q where P need only be rough: without measuring anything."""

    recipe: Recipe
    H_tilde: RegularizedLaplacian
    A: UnfoldedMap
    basis: Columns
    cache: Cache

    def make(self, Y: Array) -> Arrays:
        """Q on the training rows or on all, or its sketch."""
        recipe, backend, train = self.recipe, self.A.H.backend, self.A.train
        if recipe.by_rows:
            return self._rows_of_inverse()
        if recipe.sketch_rows is not None:
            return self._sketch(recipe.sketch_rows, Y)
        n_rows = self.A.H.n if recipe.all_rows else int(backend.total(train.shape[0]))
        Q = backend.xp.empty((n_rows, self.basis.rank), dtype=recipe.dtype(self.A.H.dtype))
        for J, Q_J in self._solve_columns(None if recipe.all_rows else train):
            Q[:, J] = Q_J if recipe.all_rows else backend.gathered(Q_J)
        return {"Q": Q}

    def _solve_columns(self, at: Array | None) -> Iterator[tuple[slice, Array]]:
        """Q <- SDDSolver(I + lam L_tilde; X C0), a block of columns J at a time.

        Of each block the rows `at`; None: all.
        """
        recipe, H, basis = self.recipe, self.H_tilde, self.basis
        blocks = recipe.blocks(basis.rank)
        work = Workspace(H, max(J.stop - J.start for J in blocks), recipe.dtype(H.dtype))

        def solve(J: slice) -> Arrays:
            with marked("block of Q", first=J.start, columns=J.stop - J.start):
                B, iterates = work.blocks(J.stop - J.start)
                basis.fill(B, J)
                return {"Q": chebyshev(H, B, recipe.degree, iterates)}

        def wanted(J: slice) -> Arrays:
            Q_J = self.cache(f"{recipe.name}-columns-{J.start}", partial(solve, J))["Q"]
            return {"Q": Q_J if at is None else Q_J[at]}

        for J, made in zip(blocks, H.backend.dealt(blocks, wanted)):
            yield J, made["Q"]

    def _sketch(self, s: int, Y: Array) -> Arrays:
        """Q_tilde, s uniform rows of Hadamard(R Q), and Q^T Y; Q itself never exists whole."""
        recipe, loss, backend = self.recipe, self.A.loss, self.H_tilde.backend
        Q_tilde = backend.xp.empty((s, self.basis.rank), dtype=recipe.dtype(self.H_tilde.dtype))
        QtY = backend.xp.empty((self.basis.rank, Y.shape[1]))
        for J, Q_J in self._solve_columns(self.A.train):
            Q_rows = backend.asarray(backend.gathered(Q_J))
            _, QtY[J] = products(backend, Q_rows, Y, with_gram=False, loss=loss)
            seen = weigh_rows(loss, backend, Q_rows).astype(Q_tilde.dtype, copy=False)
            Q_tilde[:, J] = backend.srht(seen, s, recipe.seed)
        return {"Q": Q_tilde, "QtY": QtY}

    def _rows_of_inverse(self) -> Arrays:
        """A = (H^-1 M^T)^T X row by row: fewer solves than H^-1 X when n_train < d.

        With V the solutions and R = M^T - H V, column j of A is off by (H^-1 R)^T x_j: by no more
        than ||R|| ||x_j||, and by what the residuals and X^T V were rounded.
        """
        recipe, H, X, rows = self.recipe, self.A.H, self.A.X, self.A.train
        xp, k = H.backend.xp, recipe.width
        count = int(H.backend.total(rows.shape[0]))
        mine = H.backend.own(np.arange(count))  # which of all training rows are here
        A, squares = xp.empty((count, X.shape[1]), dtype="float64"), 0.0
        starts = range(0, count, k)

        def solve(first: int) -> Arrays:
            a, b = np.searchsorted(mine, (first, first + k))
            unit = xp.zeros((H.n, min(k, count - first)), dtype=H.dtype)
            unit[rows[a:b], H.backend.asarray(mine[a:b] - first)] = 1
            V, info = block_cg(H, unit, recipe.row_tol)
            rounding = H.rounding(V.shape[1]) * column_norms(H.backend, V)
            return {"A": X.transpose_times(V).T, "left": xp.asarray(info.residuals) + rounding}

        def wanted(first: int) -> Arrays:
            with marked("block of Q", first=first, rows=min(k, count - first)):
                return self.cache(f"{recipe.name}-rows-{first}", partial(solve, first))

        for i, block in zip(starts, H.backend.dealt(starts, wanted)):
            A[i : i + k] = block["A"]
            squares = squares + (block["left"] ** 2).sum()
        # H >= I, so no solution is longer than its right-hand side plus what it leaves.
        longest = math.sqrt(count) + float(squares) ** 0.5  # synchronize!
        rounding = X.transpose_rounding() * longest
        return {"Q": A, "left": xp.sqrt(squares) * X.column_norms + rounding}
