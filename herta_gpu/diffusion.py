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

Where P need only be rough, `approximate` makes Q without measuring anything: by one Chebyshev
polynomial, by rows of the inverse where there are few of them, or as a sketch (lines 3 to 5 of
Algorithm 1).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from itertools import accumulate, count
from typing import Any, NamedTuple, Protocol

import numpy as np

from herta_gpu.backends.base import CHUNK, Array, Backend, unit_roundoff
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


Arrays = dict[str, Array]  # or text


class Cache(Protocol):
    """`cache(name, make)` returns the arrays stored under `name`, or makes and stores them.
    `together`: all processes make them at once, instead of this one alone."""

    def __call__(self, name: str, make: Callable[[], Arrays], together: bool = False) -> Arrays: ...


def silent(done: float, of: int) -> None:
    """Nobody hears how many columns are done."""


def no_cache(name: str, make: Callable[[], Arrays], together: bool = False) -> Arrays:
    """Nothing is stored: call `make()` each time."""
    return make()


class Workspace:
    """Three blocks of k columns for every k up to `width`, allocated once.  Where it is faster to
    gather neighbours in half precision, there is a fourth for those bits."""

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


class Part(NamedTuple):
    """Columns of Q that are solved for with one H."""

    H: RegularizedLaplacian | None  # None: they are the columns of X C0 themselves
    columns: Columns
    first: int  # where they stand among all columns

    @property
    def whole(self) -> slice:
        return slice(self.first, self.first + self.columns.rank)

    def among_all(self, J: slice) -> slice:
        return slice(self.first + J.start, self.first + J.stop)


class Rows:
    """Rows of Q on the training nodes of A and on those to `evaluate`, `columns` for each system.
    There are `columns` for each lam of A, and for its further features, which no H is applied
    to."""

    basis: Coordinates  # C0 of all blocks
    train_rows: Array  # in float64
    eval_rows: Array  # in the working precision
    residual_bound: Array  # (r,) bounds of ||X c_j - H q_j||, and so of ||H^-1 X c_j - q_j||

    def __init__(
        self,
        A: UnfoldedMap,
        recipe: Recipe,
        columns: Sequence[Columns],
        evaluate: Array,
        tell: Tell = silent,
    ) -> None:
        # The columns of lam = 0 and those of further features are taken as they are.
        systems = [H if H.lam or A.systems is None else None for H in A.systems or [A.H]]
        firsts = accumulate((one.rank for one in columns), initial=0)
        self.parts = [Part(*part) for part in zip([*systems, None, None], columns, firsts)]
        self.floor, self.layer, solved = A.row_floor, A.hidden, len(systems)
        self.under: Rows | None = None  # unit rows of what goes into a hidden layer
        if self.floor:  # rows of these blocks are divided by their lengths, or by the floor
            longest = [one.of_rows(1 / self.floor) for one in columns[:solved]]
            columns = [*longest, *columns[solved:]]
        self.basis = columns[0] if len(columns) == 1 else Blocks(columns)
        self.train, self.evaluate, self.recipe, self.tell = A.train, evaluate, recipe, tell
        self.backend, self.dtype, r = A.H.backend, recipe.dtype(A.H.dtype), self.basis.rank
        xp, count = self.backend.xp, int(self.backend.total(A.train.shape[0]))
        self.train_rows = xp.zeros((count, r))
        self.eval_rows = xp.zeros((evaluate.shape[0], r), dtype=self.dtype)
        self.residual_bound = self.basis.sizes.copy()  # Q is 0
        self._residuals: dict[int, Array] = {}  # of a part, by the first of its columns ...
        self._products: dict[int, int] = {}  # ... and the products that it has taken
        self.turns: dict[int, float] = {}  # how far its unit rows may be off, all together
        for i, part in enumerate(self.parts):
            if self.layer is not None and i == solved:
                under, own, blocks = self.layer.inputs(A, recipe)
                self.under = Rows(under, own, blocks, evaluate, tell)
            elif part.H is None:
                self._copy(part.columns, part.whole)
                if self.floor and i < solved:
                    self._scale(part)

    @property
    def worst(self) -> float:
        """The largest residual of a column that is solved for, relative to the column's size."""
        found = [
            self._worst_of(part) for part in self.parts if part.H is not None and not part.H.hops
        ]
        return max([*found, 0.0 if self.under is None else self.under.worst])

    def _worst_of(self, part: Part) -> float:
        bounds = self._residuals.get(part.first, part.columns.sizes)
        return _worst(self.backend.xp, bounds, part.columns.sizes)

    @property
    def products(self) -> int:
        """Products with H that the columns have taken, at most."""
        return sum(self._products.values())

    def _copy(self, columns: Columns, J: slice) -> None:
        """Take the columns of X C0 as they are."""
        xp, train = self.backend.xp, self.backend.xp.zeros((self.train.shape[0], columns.rank))
        places = ((self.train, train), (self.evaluate, self.eval_rows[:, J]))
        for block in self.recipe.blocks(columns.rank):
            for rows, part in columns.chunks(block):
                for nodes, kept in places:
                    here = xp.flatnonzero((nodes >= rows.start) & (nodes < rows.stop))
                    kept[here, block] = part[nodes[here] - rows.start]
        self.train_rows[:, J] = self.backend.gathered(train)
        self.residual_bound[J] = self._residuals[J.start] = columns.rounding

    def tighten(self, goal: float, cache: Cache, name: str) -> None:
        """Solve until no column leaves more than `goal` times its size, if rounding allows it."""
        for part in self.parts:
            if part.H is not None and self._worst_of(part) > goal:
                kind = f"hops-{part.H.hops}" if part.H.hops else f"lam-{part.H.lam!r}"
                own = name if len(self.parts) == 1 else f"{name}-{kind}"
                self._tighten(part, part.H, goal, cache, own)
                self._residuals[part.first] = self.residual_bound[part.whole].copy()
                if self.floor:
                    self._scale(part)
        if self.under is not None:
            self.under.tighten(goal, cache, f"{name}-hidden")
            part = next(part for part in self.parts if part.columns.X is self.layer)
            places = (self.train_rows[:, part.whole], self.eval_rows[:, part.whole])
            self.residual_bound[part.whole] = self.layer.fill(self.under, *places, part.columns.C)

    def _scale(self, part: Part) -> None:
        """Divide the rows of a block by their lengths, in the units of X, or by the floor.  Rows
        that are eta away from the true ones in all, and not shorter than s, turn by eta/s."""
        at, xp, columns, d = part.whole, self.backend.xp, part.columns, part.columns.rank
        left, Q, lengths = self.residual_bound[at], self.train_rows[:, at], xp.zeros(0)
        for rows in (self.eval_rows[:, at], Q):
            wide = columns.rows(rows.astype("float64", copy=False))
            lengths = xp.maximum(xp.sqrt((wide * wide).sum(axis=1, keepdims=True)), self.floor)
            rows /= lengths.astype(rows.dtype)
        off, most = columns.dual_bound(left), abs(Q).max(axis=0)
        shortest = max(self.floor, float(lengths.min()) - off)  # synchronize!
        self.turns[part.first] = off / shortest
        rounded = (d + 8) * unit_roundoff() * Q.shape[0] ** 0.5 * most
        self.residual_bound[at] = (left + most * off) / shortest + rounded

    def _tighten(
        self, part: Part, H: RegularizedLaplacian, goal: float, cache: Cache, name: str
    ) -> None:
        blocks, backend = self.recipe.blocks(part.columns.rank), self.backend
        work = Workspace(H, max(J.stop - J.start for J in blocks), self.dtype)
        columns, spool = part.columns, list[Any]()

        def fill(B: Array, J: slice) -> Array | None:
            """B <- X C0[:, J]; an X that streams comes once for all, if the host has room."""
            if columns.X.streamed and len(blocks) > 1 and backend.ranks == 1 and not spool:
                chunks = columns.chunks(slice(0, columns.rank))
                made = backend.spooled(chunks, blocks, (H.n, columns.rank), self.dtype)
                spool.extend(made or [None] * len(blocks))
            held = spool[blocks.index(J)] if spool else None
            if held is None:
                return columns.fill(B, J)
            B.set(held)
            return None

        own = -(-len(blocks) // (backend.ranks if backend.whole else 1))  # blocks of a process
        width, solved = part.columns.rank / own, count()

        def solve(J: slice) -> Arrays:
            i, alone = next(solved), own == len(blocks)
            start, size = (J.start, J.stop - J.start) if alone else (i * width, width)

            def tell(share: float) -> None:
                self.tell(part.first + start + share * size, self.basis.rank)

            make = partial(self._block, J, part, H, goal, work, fill, tell)
            with marked("block of Q", first=J.start, columns=J.stop - J.start):
                return cache(f"{name}-columns-{J.start}", make)

        self.tell(part.first, self.basis.rank)
        for J, block in zip(blocks, backend.dealt(blocks, solve)):
            at = part.among_all(J)
            self.train_rows[:, at] = backend.gathered(block["rows"])
            self.eval_rows[:, at] = block["others"]
            self.residual_bound[at] = block["left"]
            products = int(block["products"][0])  # synchronize!
            self._products[part.first] = max(self._products.get(part.first, 0), products)
            self.tell(at.stop, self.basis.rank)

    def _block(
        self,
        J: slice,
        part: Part,
        H: RegularizedLaplacian,
        goal: float,
        work: Workspace,
        fill: Callable[[Array, slice], Array | None],
        tell: Callable[[float], None],
    ) -> Arrays:
        """One block of columns, from X C0."""
        if H.hops:
            return self._hops(J, part, H)
        columns, k, (B, iterates) = part.columns, J.stop - J.start, work.blocks(J.stop - J.start)
        xp, sizes, unit = H.backend.xp, columns.sizes[J], unit_roundoff(self.dtype)
        whole = fill(B, J)
        source: Iterator[Any] | None = (
            columns.chunks(J) if whole is None else _chunks(H.backend, whole)
        )
        rows = xp.zeros((self.train.shape[0], k))
        others = xp.zeros((self.evaluate.shape[0], k), dtype=self.dtype)
        norms, rounded = sizes, columns.rounding[J]
        if columns.X.streamed and goal > unit:
            # Another pass over X would cost more than to count what B's rounding hides.
            source, tiny = None, float(np.finfo(np.float32).tiny) * H.n**0.5
            rounded = rounded + unit * sizes + tiny
        worst, last, products, done = _worst(xp, norms, sizes), math.inf, 0, 0
        # One pass cannot do more than rounding lets it.
        least = max(16 * unit, _TYPICAL * chebyshev_rounding(H, self.dtype, k))
        while worst > goal and worst < 0.5 * last and products < _MOST_PRODUCTS:
            # The passes that are left are all alike.
            factor = goal / worst
            passes = max(1, math.ceil(math.log(factor) / math.log(min(least, 0.1)) - 1e-9))
            wanted = _MARGIN * factor ** (1 / passes)
            degree = chebyshev_degree(H, wanted)
            if H.factor is not None:
                Z, degree = H.inverse(B), 1
            elif self.recipe.way == "cg":  # H >= I: the H-norm of H^-1 b is no longer than b
                Z, info = block_cg(H, B, wanted)
                degree = int(info.iterations.max())
            else:
                of = done + passes
                Z = chebyshev(H, B, degree, iterates, work.half, _part_of(tell, done, of))
            done += 1
            rows += Z[self.train]
            others += Z[self.evaluate]
            before, norms = norms, _residual(H, source, Z, B)
            source, whole = None, None
            # ||Z|| <= ||H Z|| <= ||B|| + ||B - H Z||, and the new B is stored rounded.
            rounded = rounded + H.rounding(k, rows=True) * (before + norms) + unit * norms
            products, last, worst = products + degree, worst, _worst(xp, norms, sizes)
        made = {"rows": rows, "others": others, "left": norms + rounded}
        return {**made, "products": xp.asarray([products])}

    def _hops(self, J: slice, part: Part, H: RegularizedLaplacian) -> Arrays:
        """One block of columns of S^k X C0, in float64: there is nothing to solve."""
        xp, k = H.backend.xp, J.stop - J.start
        B = H.backend.empty((H.n, k), "float64")
        part.columns.fill(B, J)
        B = H.hopped(B)
        left = part.columns.rounding[J] + H.hop_rounding(k) * part.columns.sizes[J]
        made = {"rows": B[self.train], "others": B[self.evaluate].astype(self.dtype)}
        return {**made, "left": left, "products": xp.asarray([H.hops])}


def _part_of(tell: Callable[[float], None], done: int, of: int) -> Callable[[float], None]:
    return lambda share: tell((done + share) / of)


def column_norms(backend: Backend, B: Array) -> Array:
    """(k,) the norms of the columns of B, over all processes."""
    return backend.xp.sqrt(backend.total(backend.column_dots(B, B)))


def _worst(xp: Any, norms: Array, sizes: Array) -> float:
    return float((norms / xp.where(sizes > 0, sizes, 1.0)).max())  # synchronize!


def _chunks(backend: Backend, B: Array) -> Iterator[tuple[slice, Array]]:
    step = max(1, CHUNK // B.shape[1])
    for a in range(0, B.shape[0], step):
        rows = slice(a, min(a + step, B.shape[0]))
        yield rows, B[rows].astype("float64")


def _residual(
    H: RegularizedLaplacian,
    source: Iterator[tuple[slice, Array]] | None,
    Z: Array,
    B: Array | None = None,
) -> Array:
    """The norms of the columns of source (None: B) - H Z, before they are stored in B."""
    squares, Z = H.backend.xp.zeros(Z.shape[1]), H.with_neighbours(Z)
    with marked("residual", columns=Z.shape[1]):
        if source is None:
            squares = H.backend.residual_over(H.laplacian(str(Z.dtype)), H.lam, Z, B)
        for rows, part in source or ():
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


def approximate(
    recipe: Recipe,
    H_tilde: RegularizedLaplacian,
    A: UnfoldedMap,
    basis: Columns,
    cache: Cache,
    Y: Array,
) -> Arrays:
    """Q where P need only be rough, on the training rows or on all, or its sketch.  Q <-
    SDDSolver(I + lam L_tilde; X C0), a block of columns at a time.  Of a sketch, s uniform rows of
    Hadamard(R Q), Q itself never exists whole; Q^T Y comes with it."""
    if recipe.by_rows:
        return _rows_of_inverse(recipe, A, cache)
    backend, s, dtype = A.H.backend, recipe.sketch_rows, recipe.dtype(A.H.dtype)
    whole, blocks = recipe.all_rows and s is None, recipe.blocks(basis.rank)
    work = Workspace(H_tilde, max(J.stop - J.start for J in blocks), dtype)
    count = A.H.n if whole else int(backend.total(A.train.shape[0]))
    Q = backend.xp.empty((s or count, basis.rank), dtype=dtype)
    QtY = backend.xp.empty((basis.rank, Y.shape[1]))

    def solve(J: slice) -> Arrays:
        with marked("block of Q", first=J.start, columns=J.stop - J.start):
            B, iterates = work.blocks(J.stop - J.start)
            basis.fill(B, J)
            return {"Q": chebyshev(H_tilde, B, recipe.degree, iterates)}

    def fetch(J: slice) -> Arrays:
        Q_J = cache(f"{recipe.name}-columns-{J.start}", partial(solve, J))["Q"]
        return {"Q": Q_J if whole else Q_J[A.train]}

    for J, made in zip(blocks, backend.dealt(blocks, fetch)):
        Q_J = made["Q"] if whole else backend.gathered(made["Q"])
        if s is not None:
            rows = backend.asarray(Q_J)
            _, QtY[J] = products(backend, rows, Y, with_gram=False, loss=A.loss)
            seen = weigh_rows(A.loss, backend, rows).astype(dtype, copy=False)
            Q_J = backend.srht(seen, s, recipe.seed)
        Q[:, J] = Q_J
    return {"Q": Q} if s is None else {"Q": Q, "QtY": QtY}


def _rows_of_inverse(recipe: Recipe, A: UnfoldedMap, cache: Cache) -> Arrays:
    """M H^-1 X = (H^-1 M^T)^T X row by row: fewer solves than H^-1 X when n_train < d.  With V the
    solutions and R = M^T - H V, column j is off by (H^-1 R)^T x_j: by no more than ||R|| ||x_j||,
    and by what the residuals and X^T V were rounded."""
    H, X, rows, xp, k = A.H, A.X, A.train, A.H.backend.xp, recipe.width
    count = int(H.backend.total(rows.shape[0]))
    mine = H.backend.own(np.arange(count))  # which of all training rows are here
    Q, squares = xp.empty((count, X.shape[1]), dtype="float64"), 0.0
    starts = range(0, count, k)

    def solve(first: int) -> Arrays:
        a, b = np.searchsorted(mine, (first, first + k))
        unit = xp.zeros((H.n, min(k, count - first)), dtype=H.dtype)
        unit[rows[a:b], H.backend.asarray(mine[a:b] - first)] = 1
        V, info = block_cg(H, unit, recipe.row_tol)
        rounding = H.rounding(V.shape[1]) * column_norms(H.backend, V)
        return {"A": X.transpose_times(V).T, "left": xp.asarray(info.residuals) + rounding}

    def fetch(first: int) -> Arrays:
        with marked("block of Q", first=first, rows=min(k, count - first)):
            return cache(f"{recipe.name}-rows-{first}", partial(solve, first))

    for i, block in zip(starts, H.backend.dealt(starts, fetch)):
        Q[i : i + k] = block["A"]
        squares = squares + (block["left"] ** 2).sum()
    # H >= I, so no solution is longer than its right-hand side plus what it leaves.
    longest = math.sqrt(count) + float(squares) ** 0.5  # synchronize!
    rounding = X.transpose_rounding() * longest
    return {"Q": Q, "left": xp.sqrt(squares) * X.column_norms + rounding}
