"""Lines 3 to 8 of Algorithm 1: Q, its Hadamard sketch, P, and P^-1/2.

P approximates the Hessian T = A^T A, A = M H^-1 X (M: the training rows), by P = Q^T Q with Q the
training rows of p(H_tilde) X, p a Chebyshev polynomial.  A ridge is part of the Hessian, and so of
P.  Gram matrices and factors are float64 whatever the working precision.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np

from herta_gpu.backends.base import Array, Backend
from herta_gpu.coordinates import Blocks, Columns, Coordinates, Units, Whitened, whitened
from herta_gpu.diffusion import Arrays, Cache, Diffusion, Workspace, silent
from herta_gpu.factors import Factor, Identity, Spanned
from herta_gpu.features import Features, in_float64
from herta_gpu.grams import RANK_CUT, DenseGram, Gram, LowRankGram, RowSpaceGram
from herta_gpu.laplacian import (
    RegularizedLaplacian,
    block_cg,
    chebyshev,
    chebyshev_error,
    chebyshev_rounding,
)
from herta_gpu.losses import LOSSES, Loss
from herta_gpu.planning.plan import Recipe
from herta_gpu.plumbing.progress import Tell, marked
from herta_gpu.several import SeveralDiffusions
from herta_gpu.unfolded import UnfoldedMap

_EPS = float(np.finfo(np.float64).eps)
_GRAM_BYTES = 16 << 20  # float64 copies of rows of Q at a time; P's own size if that is more


def no_cache(name: str, make: Callable[[], Arrays], together: bool = False) -> Arrays:
    """Nothing is stored: call `make()` each time."""
    return make()


@dataclass
class Preconditioner:
    """P^-1/2 and what is known about how well P approximates the Hessian."""

    factor: Factor  # in the coordinates of W
    inner: Factor  # the same in those of Q: W = C0 u
    basis: Coordinates | None  # C0; None without a preconditioner, or where Q has those of W
    gram: Gram | None  # Q^T Q; None without a preconditioner
    w_start: Array  # P^-1/2 Q^T Y, so that W = P^-1 Q^T Y: least squares on Q, the warm start
    Q_error: float  # proven ||p(H) x - H^-1 x|| <= Q_error ||H^-1 x||; inf on L_tilde or a sketch
    Q_rounding: float  # proven, too: ||Q - p(H) x|| <= Q_rounding ||H^-1 x||
    damped: bool  # P carries a large multiple of I that the Hessian does not have
    features: int  # d
    kept: int  # features that what is proven speaks of; fewer than d where some had to go
    rows: Array | None = None  # training rows of Q, kept for training on Q itself
    left: Array | None = None  # (r,) bounds of the columns of X C0 - H Q, where that was measured
    diffusion: Diffusion | SeveralDiffusions | None = (
        None  # how `rows` and `left` were found, to go on from
    )
    Q_all: Array | None = None  # Q on all rows, kept for the certificate
    Z_start: Array | None = None  # Q W at w_start, on all rows: training starts close to Z

    @property
    def fragile(self) -> bool:
        """Whether the coordinates amplify small errors of the solves beyond what is watched."""
        return self.damped or isinstance(self.gram, RowSpaceGram)

    @property
    def note(self) -> str:
        """What was cut or added on the way to P, for the user."""
        if self.kept == self.features or isinstance(self.inner, Spanned):
            return self.factor.note
        return (
            f"on the training rows {self.features - self.kept:,} features add less than "
            f"{RANK_CUT**0.5:.0e} to the span of the others; their optimum is not known"
        )

    def for_training(self, backend: Backend, blocks: bool = False) -> Preconditioner:
        """Without Q on all rows, the largest block there is, but with what it says of Z.

        Where outputs are trained in blocks, Z is none of n x c either: Q stays.
        """
        if self.Q_all is None or blocks:
            return self
        return replace(self, Q_all=None, Z_start=self.guess(backend, slice(None)))

    def guess(self, backend: Backend, at: Any) -> Array | None:
        """Q W at `w_start` on all rows, of the outputs `at`, if Q is there on all rows."""
        if self.Q_all is None:
            return self.Z_start if self.Z_start is None else self.Z_start[:, at]
        with np.errstate(over="ignore"):
            u = self.inner.to_weights(self.w_start[:, at]).astype(self.Q_all.dtype)
        Z = backend.matmul(self.Q_all, u)
        size = backend.total(float(backend.column_dots(Z, Z).sum()))  # synchronize!
        # Weights of extreme units may not fit the working precision: then there is no guess.
        return Z if math.isfinite(size) else None

    def rescaled(self, curvature: float, ridge: float, symmetric: bool) -> Preconditioner:
        """The same Q with P = curvature Q^T Q + ridge I: the loss has become flatter."""
        if self.gram is None:
            return self
        inner = self.gram.factor(curvature, ridge, symmetric)
        factor = inner if self.basis is None else self.basis.factor(inner)
        return replace(self, factor=factor, inner=inner)


def no_preconditioner(backend: Backend, d: int, c: int) -> Preconditioner:
    """W itself, started from zero as the paper does."""
    none, start = Identity(d), backend.xp.zeros((d, c))
    return Preconditioner(none, none, None, None, start, math.inf, math.inf, False, d, d)


def build(
    recipe: Recipe,
    H_tilde: RegularizedLaplacian,
    A: UnfoldedMap,
    Y: Array,
    ridge: float,
    cache: Cache = no_cache,
    beside: Array | None = None,
    tell: Tell = silent,
) -> Preconditioner:
    """Lines 3 to 8 of Algorithm 1 on the training rows; rows `beside` of Q are kept if measured."""
    plain = recipe.by_rows or (ridge > 0 and 2 * Y.shape[0] < A.features)
    basis = _basis(recipe, A.X, ridge, plain)
    if recipe.goal is None or recipe.by_rows:
        solved = partial(_solved, recipe, H_tilde, A, basis, Y, cache)
        made = cache(recipe.name, solved, together=True)
        return _factored(recipe, H_tilde, A, basis, made, Y, ridge)
    beside = A.train[:0] if beside is None else beside
    solved_for = (
        basis, A.train, beside, recipe.blocks(basis.rank), recipe.dtype(A.H.dtype),
        recipe.keep_residual, tell, "float32" if recipe.narrow else "float64",
    )  # fmt: skip
    diffusion: Diffusion | SeveralDiffusions
    if A.systems is None:
        diffusion = Diffusion(A.H, *solved_for)
    else:
        extra = None if A.extra is None else (Units.plain if plain else Units.of)(A.extra)
        diffusion = SeveralDiffusions(A.systems, *solved_for, extra)
    diffusion.lower(recipe.goal, cache, recipe.name)
    made = {"Q": diffusion.rows, "left": diffusion.left + diffusion.lost}
    found = _factored(recipe, H_tilde, A, diffusion.basis, made, Y, ridge)
    return replace(found, diffusion=diffusion)


def lowered(
    P: Preconditioner,
    recipe: Recipe,
    A: UnfoldedMap,
    Y: Array,
    ridge: float,
    cache: Cache = no_cache,
) -> Preconditioner:
    """P again, its residuals lowered to what `recipe` now asks for."""
    diffusion = P.diffusion
    basis = P.basis.inners[0] if isinstance(P.basis, Blocks) else P.basis
    coordinates = recipe.whiten == isinstance(basis, Whitened)
    if diffusion is None or recipe.goal is None or not coordinates:
        if diffusion is None:
            return build(recipe, A.H, A, Y, ridge, cache)
        return build(recipe, A.H, A, Y, ridge, cache, diffusion.beside, diffusion.tell)
    diffusion.lower(recipe.goal, cache, recipe.name)
    made = {"Q": diffusion.rows, "left": diffusion.left + diffusion.lost}
    again = _factored(recipe, A.H, A, diffusion.basis, made, Y, ridge)
    return replace(again, diffusion=diffusion)


def _factored(
    recipe: Recipe,
    H_tilde: RegularizedLaplacian,
    A: UnfoldedMap,
    basis: Coordinates,
    made: Arrays,
    Y: Array,
    ridge: float,
) -> Preconditioner:
    """P = Q^T Q + ridge C0^T C0 and its factor, from Q or its sketch."""
    H, X, rows, sampled = A.H, A.X, A.train, H_tilde is not A.H
    backend, d = H.backend, A.features
    Q, at = made["Q"], rows if recipe.all_rows else None
    Q_all = Q if recipe.all_rows else None
    if at is not None and not backend.whole:
        Q, at = backend.gathered(Q[at]), None  # training rows are everywhere
    error = rounding = math.inf
    if not (sampled or recipe.by_rows or recipe.sketch_rows is not None):
        error = chebyshev_error(H_tilde, recipe.degree)
        narrowest = min(J.stop - J.start for J in recipe.blocks(basis.rank))
        rounding = chebyshev_rounding(H_tilde, recipe.dtype(H_tilde.dtype), narrowest)
    # Rows of A itself, or measured ones to train on: no other is missing.
    whole_rows = (recipe.by_rows or recipe.goal is not None) and ridge == 0 and Y.shape[0] < d
    damped = ridge == 0 and Y.shape[0] < d and not whole_rows
    few = min(Y.shape[0], Q.shape[0])  # a sketch may have fewer
    low_rank = (damped or ridge > 0) and 2 * few < d
    sketched = "QtY" in made  # made with the sketch, from Q itself
    with_gram = not (low_rank or whole_rows)
    loss = LOSSES["mse"] if sketched else A.loss  # a sketch is one of rows as the loss sees them
    dense, QtY = products(backend, Q, None if sketched else Y, at, with_gram, loss)
    QtY = made["QtY"] if sketched else QtY
    QtQ: Gram
    if whole_rows and not recipe.by_rows:
        QtQ = RowSpaceGram.of_stored(backend, _seen(loss, backend, Q))
    elif whole_rows:
        QtQ = RowSpaceGram.of_rows(backend, _seen(loss, backend, Q), X.column_norms)
    elif low_rank:
        few_rows = Q if at is None else Q[at]
        QtQ = LowRankGram.of_rows(backend, _seen(loss, backend, few_rows), ridge)
    else:
        count = Q.shape[0] if at is None else rows.shape[0]
        rounded = _gram_rounding(count, d) + (0.0 if loss.plain else 8 * _EPS)
        QtQ = DenseGram(backend, dense, basis.ridge, damped, rounded)
    inner = QtQ.factor(recipe.curvature, ridge, recipe.symmetric)
    if isinstance(QtQ, DenseGram) and inner.rank < d:
        kept = d - max(0, A.distinct_columns(H.graph) - inner.rank)
    else:
        kept = inner.rank if isinstance(inner, Spanned) else d
    return Preconditioner(
        basis.factor(inner),
        inner,
        basis,
        QtQ,
        inner.to_gradient(QtY),
        error,
        rounding,
        damped,
        d,
        kept,
        rows=Q if recipe.keep_rows and recipe.sketch_rows is None else None,
        left=made.get("left"),
        Q_all=Q_all,
    )


def _basis(recipe: Recipe, X: Features, ridge: float, plain: bool) -> Columns:
    """The coordinates in which Q is solved for."""
    if plain:
        return Units.plain(X)  # factors of few rows find their own
    return whitened(X, ridge == 0, ridge) if recipe.whiten else Units.of(X)


def _solved(
    recipe: Recipe,
    H_tilde: RegularizedLaplacian,
    A: UnfoldedMap,
    basis: Columns,
    Y: Array,
    cache: Cache,
) -> Arrays:
    """Q on the training rows or on all, or its sketch."""
    H, rows, backend = A.H, A.train, A.H.backend
    if recipe.by_rows:
        return _adjoint_rows(recipe, H, A.X, rows, cache)
    if recipe.sketch_rows is not None:
        Q_tilde, QtY = _sketched_rows(recipe, H_tilde, basis, Y, A, cache)
        return {"Q": Q_tilde, "QtY": QtY}
    n_rows = H.n if recipe.all_rows else int(backend.total(rows.shape[0]))
    Q = backend.xp.empty((n_rows, basis.rank), dtype=recipe.dtype(H.dtype))
    at = None if recipe.all_rows else rows
    for J, Q_J in _solved_columns(recipe, H_tilde, basis, cache, at):
        Q[:, J] = Q_J if recipe.all_rows else backend.gathered(Q_J)
    return {"Q": Q}


def _solved_columns(
    recipe: Recipe,
    H_tilde: RegularizedLaplacian,
    basis: Columns,
    cache: Cache,
    at: Array | None,
) -> Iterator[tuple[slice, Array]]:
    """Q <- SDDSolver(I + lam L_tilde; X C0), a block of columns J at a time.

    Of each block the rows `at`; None: all.
    """
    blocks = recipe.blocks(basis.rank)
    width = max(J.stop - J.start for J in blocks)
    work = Workspace(H_tilde, width, recipe.dtype(H_tilde.dtype))

    def solved(J: slice) -> Arrays:
        with marked("block of Q", first=J.start, columns=J.stop - J.start):
            B, iterates = work.blocks(J.stop - J.start)
            basis.fill(B, J)
            return {"Q": chebyshev(H_tilde, B, recipe.degree, iterates)}

    def wanted(J: slice) -> Arrays:
        Q_J = cache(f"{recipe.name}-columns-{J.start}", partial(solved, J))["Q"]
        return {"Q": Q_J if at is None else Q_J[at]}

    for J, made in zip(blocks, H_tilde.backend.dealt(blocks, wanted)):
        yield J, made["Q"]


def _adjoint_rows(
    recipe: Recipe, H: RegularizedLaplacian, X: Features, rows: Array, cache: Cache
) -> Arrays:
    """A = (H^-1 M^T)^T X row by row: fewer solves than H^-1 X when n_train < d.

    With V the solutions and R = M^T - H V, column j of A is off by (H^-1 R)^T x_j: by no more than
    ||R|| ||x_j||, and by what the residuals and X^T V were rounded.
    """
    xp, k = H.backend.xp, recipe.width
    count = int(H.backend.total(rows.shape[0]))
    mine = H.backend.own(np.arange(count))  # which of all training rows are here
    A, squares = xp.empty((count, X.shape[1]), dtype="float64"), 0.0
    starts = range(0, count, k)

    def solved(first: int) -> Arrays:
        left, (a, b) = [], np.searchsorted(mine, (first, first + k))

        def solve(unit: Array) -> Array:
            V, info = block_cg(H, unit, recipe.row_tol)
            size = xp.sqrt(H.backend.total(H.backend.column_dots(V, V)))
            left.append(xp.asarray(info.residuals) + H.rounding(V.shape[1]) * size)
            return V

        columns, at = min(k, count - first), H.backend.asarray(mine[a:b] - first)
        made = rows_of_inverse(xp, solve, X.transpose_times, rows[a:b], H.n, H.dtype, (columns, at))
        return {"A": made, "left": left[0]}

    def wanted(i: int) -> Arrays:
        with marked("block of Q", first=i, rows=min(k, count - i)):
            return cache(f"{recipe.name}-rows-{i}", partial(solved, i))

    for i, block in zip(starts, H.backend.dealt(starts, wanted)):
        A[i : i + k] = block["A"]
        squares = squares + (block["left"] ** 2).sum()
    # H >= I, so no solution is longer than its right-hand side plus what it leaves.
    longest = math.sqrt(count) + float(squares) ** 0.5  # synchronize!
    rounding = X.transpose_rounding() * longest
    return {"Q": A, "left": xp.sqrt(squares) * X.column_norms + rounding}


def rows_of_inverse(
    xp: Any,
    solve: Callable[[Array], Array],
    transpose_times: Callable[[Array], Array],
    rows: Array,
    n: int,
    dtype: str,
    among: tuple[int, Array] | None = None,
) -> Array:
    """The rows `rows` of H^-1 X by one solve per row, since H is symmetric.

    `solve` gives H^-1 of n x k columns and `transpose_times` X^T of them; both compute in the array
    package `xp`.  Where other processes have more of the rows, `among` holds the number of all and
    the places of these.
    """
    count, at = (rows.shape[0], xp.arange(rows.shape[0])) if among is None else among
    unit = xp.zeros((n, count), dtype=dtype)
    unit[rows, at] = 1
    return transpose_times(solve(unit)).T


def _sketched_rows(
    recipe: Recipe,
    H_tilde: RegularizedLaplacian,
    basis: Columns,
    Y: Array,
    A: UnfoldedMap,
    cache: Cache,
) -> tuple[Array, Array]:
    """Q_tilde, s uniform rows of Hadamard(R Q), and Q^T Y; Q itself never exists whole."""
    backend, s = H_tilde.backend, recipe.sketch_rows
    assert s is not None
    Q_tilde = backend.xp.empty((s, basis.rank), dtype=recipe.dtype(H_tilde.dtype))
    QtY = backend.xp.empty((basis.rank, Y.shape[1]))
    for J, Q_J in _solved_columns(recipe, H_tilde, basis, cache, A.train):
        Q_rows = backend.asarray(backend.gathered(Q_J))
        _, QtY[J] = products(backend, Q_rows, Y, with_gram=False, loss=A.loss)
        seen = Q_rows if A.loss.plain else _seen(A.loss, backend, Q_rows).astype(Q_tilde.dtype)
        Q_tilde[:, J] = backend.srht(seen, s, recipe.seed)
    return Q_tilde, QtY


def residual_norms(H: RegularizedLaplacian, basis: Columns, Q: Array, width: int) -> Array:
    """(r,) bounds of the norms of the columns of X C0 - H Q, rounding included."""
    xp, left = H.backend.xp, basis.rounding
    sizes = xp.sqrt(H.backend.total(H.backend.column_dots(Q, Q)))

    def squares(j: int) -> Arrays:
        J = slice(j, min(j + width, Q.shape[1]))
        Z, found = H.with_neighbours(H.backend.asarray(Q[:, J])), xp.zeros(J.stop - J.start)
        for rows, part in basis.chunks(J):
            found = found + (H.residual_rows(part, Z, rows.start) ** 2).sum(axis=0)
        return {"squares": H.backend.total(found)}

    starts = range(0, Q.shape[1], width)
    for j, found in zip(starts, H.backend.dealt(starts, squares)):
        J = slice(j, min(j + width, Q.shape[1]))
        left[J] += xp.sqrt(found["squares"]) + H.rounding(J.stop - J.start, rows=True) * sizes[J]
    return left


def gram(backend: Backend, Q: Array, at: Array | None = None) -> Array:
    """Q^T Q over the rows `at` (None: all) in float64."""
    return products(backend, Q, None, at)[0]


def products(
    backend: Backend,
    Q: Array,
    Y: Array | None,
    at: Array | None = None,
    with_gram: bool = True,
    loss: Loss = LOSSES["mse"],
) -> tuple[Array, Array]:
    """(Q^T Q, Q^T Y) over the rows `at` of Q, which are converted to float64 once for both.

    Rows are taken as the loss sees them: with their weights, and less their mean.
    """
    xp, d, count = backend.xp, Q.shape[1], Q.shape[0] if at is None else at.shape[0]
    QtQ = xp.zeros((d, d) if with_gram else (0, 0))
    QtY = xp.zeros((d, 0 if Y is None else Y.shape[1]))
    step, wide = _gram_step(d), in_float64(xp)
    mean = _mean_row(loss, backend, Q, at, step) if loss.intercept else None
    for a in range(0, count, step):
        rows = slice(a, min(a + step, count))
        part = wide(Q[rows] if at is None else Q[at[rows]])
        if not loss.plain:
            part = loss.seen(xp, part, rows, mean)
        if with_gram:
            backend.add_gram(QtQ, part)
        if Y is not None:
            y = Y[rows] if loss.plain else loss.seen(xp, Y[rows], rows, None)
            QtY += backend.matmul(part.T, y)
    return QtQ, QtY


def _mean_row(loss: Loss, backend: Backend, Q: Array, at: Array | None, step: int) -> Array:
    """(d,) the weighted mean of the rows `at` of Q (None: all)."""
    xp, count = backend.xp, Q.shape[0] if at is None else at.shape[0]
    total: Any = 0.0
    for a in range(0, count, step):
        rows = slice(a, min(a + step, count))
        part = (Q[rows] if at is None else Q[at[rows]]).astype("float64")
        total = total + loss.of_rows(rows).weighted(part).sum(axis=0)
    return xp.asarray(total) / loss.total(count)


def _seen(loss: Loss, backend: Backend, Q: Array) -> Array:
    """All rows of Q as the loss sees them, in float64."""
    if loss.plain:
        return Q
    Q, whole = Q.astype("float64"), slice(None)
    mean = loss.mean(backend.xp, Q) if loss.intercept else None
    return loss.seen(backend.xp, Q, whole, mean)


def _gram_step(d: int) -> int:
    """Rows of Q that a Gram matrix takes at a time."""
    return max(1, d, _GRAM_BYTES // (8 * max(d, 1)))


def _gram_rounding(count: int, d: int) -> float:
    """|error of entry i, j| <= this |q_i| |q_j|: sums over chunks of sums over rows."""
    step = _gram_step(d)
    return (min(count, step) + -(-count // step) + 2) * 0.5 * _EPS
