"""Lines 3 to 8 of Algorithm 1: Q, its Hadamard sketch, P, and P^-1/2.

P approximates the Hessian T = A^T A, A = M H^-1 X (M: the training rows), by P = Q^T Q with Q the
training rows of p(H_tilde) X, p a Chebyshev polynomial.  A ridge is part of the Hessian, and so of
P.  Gram matrices and factors are float64 whatever the working precision.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np

from herta_gpu.backends.base import Array, Backend, unit_roundoff
from herta_gpu.coordinates import Columns, Coordinates, whiten
from herta_gpu.diffusion import Arrays, Cache, Rows, approximate, no_cache, silent
from herta_gpu.factors import (
    RANK_CUT,
    Composed,
    DenseGram,
    Factor,
    Gram,
    LowRankGram,
    RowSpace,
    gram_rounding,
    products,
    weigh_rows,
)
from herta_gpu.laplacian import RegularizedLaplacian, chebyshev_error, chebyshev_rounding
from herta_gpu.losses import LOSSES
from herta_gpu.planning.costs import Case
from herta_gpu.planning.plan import Recipe
from herta_gpu.plumbing.progress import Tell
from herta_gpu.problem import UnfoldedMap


@dataclass
class Preconditioner:
    """P^-1/2 and what is known about how well P approximates the Hessian."""

    inner: Factor  # P^-1/2 in the coordinates of Q: W = C0 u
    basis: Coordinates | None  # C0; None without a preconditioner, or where Q has those of W
    gram: Gram | None  # Q^T Q; None without a preconditioner, or where only its row space counts
    w_start: Array  # P^-1/2 Q^T Y, so that W = P^-1 Q^T Y: least squares on Q, the warm start
    Q_error: float  # proven ||p(H) x - H^-1 x|| <= Q_error ||H^-1 x||; inf on L_tilde or a sketch
    Q_rounding: float  # proven, too: ||Q - p(H) x|| <= Q_rounding ||H^-1 x||
    damped: bool  # P carries a large multiple of I that the Hessian does not have
    features: int  # d
    kept: int  # features that what is proven speaks of; fewer than d where some had to go
    rows: Array | None = None  # training rows of Q, kept for training on Q itself
    column_error: Array | None = None  # (r,) bounds of ||H^-1 X c_j - q_j||, where measured
    stored: Rows | None = None  # how `rows` and `column_error` were found, to go on from
    Q_all: Array | None = None  # Q on all rows, kept for the certificate
    Z_start: Array | None = None  # Q W at w_start, on all rows: training starts close to Z

    @property
    def factor(self) -> Factor:
        """P^-1/2 in the coordinates of W."""
        return self.inner if self.basis is None else Composed(self.basis, self.inner)

    @property
    def fragile(self) -> bool:
        """Whether the coordinates amplify small errors of the solves beyond what is watched."""
        return self.damped or isinstance(self.inner, RowSpace)

    @property
    def note(self) -> str:
        """What was cut or added on the way to P, for the user."""
        if self.kept == self.features or isinstance(self.inner, RowSpace):
            return self.inner.note
        return (
            f"on the training rows {self.features - self.kept:,} features add less than "
            f"{RANK_CUT**0.5:.0e} to the span of the others; their optimum is not known"
        )

    def for_training(self, backend: Backend, blocks: bool = False) -> Preconditioner:
        """Without Q on all rows, the largest block there is, but with what it says of Z.  Where
        outputs are trained in blocks, Z is none of n x c either: Q stays."""
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

    def rescale(self, curvature: float, ridge: float, symmetric: bool) -> Preconditioner:
        """The same Q with P = curvature Q^T Q + ridge I: the loss has become flatter."""
        if self.gram is None:
            return self
        return replace(self, inner=self.gram.factor(curvature, ridge, symmetric))


def no_preconditioner(backend: Backend, d: int, c: int) -> Preconditioner:
    """W itself, started from zero as the paper does."""
    start = backend.xp.zeros((d, c))
    return Preconditioner(Factor(d), None, None, start, math.inf, math.inf, False, d, d)


def build(
    recipe: Recipe,
    H_tilde: RegularizedLaplacian,
    A: UnfoldedMap,
    Y: Array,
    ridge: float,
    cache: Cache = no_cache,
    evaluate: Array | None = None,
    tell: Tell = silent,
) -> Preconditioner:
    """Lines 3 to 8 of Algorithm 1 on the training rows, and rows to `evaluate` where measured."""
    # Factors of few rows find coordinates of their own.
    plain = recipe.by_rows or recipe.case(Y.shape[0], A.features, ridge) is Case.FEW_ROWS
    of = Columns.plain if plain else Columns.unit
    ours = A.row_floor > 0 or not isinstance(A.X.off, float)  # off by more than their own rounding
    white = recipe.whiten and not (plain or ours)
    basis = whiten(A.X, ridge == 0, ridge) if white else of(A.X)
    if recipe.goal is None or recipe.by_rows:
        make = partial(approximate, recipe, H_tilde, A, basis, cache, Y)
        made = cache(recipe.name, make, together=True)
        return _factor(recipe, H_tilde, A, Y, ridge, basis, made)
    columns = [basis] * A.blocks + [of(extra) for extra in A.extras]
    others = A.train[:0] if evaluate is None else evaluate
    return _from_rows(Rows(A, recipe, columns, others, tell), recipe, A, Y, ridge, cache)


def tighten(
    P: Preconditioner, recipe: Recipe, A: UnfoldedMap, Y: Array, ridge: float, cache: Cache
) -> Preconditioner:
    """P again, its residuals lowered to what `recipe` now asks for."""
    rows = P.stored
    if rows is None:
        return build(recipe, A.H, A, Y, ridge, cache)
    if recipe.goal is None or recipe.whiten != rows.parts[0].columns.white:
        return build(recipe, A.H, A, Y, ridge, cache, rows.evaluate, rows.tell)
    return _from_rows(rows, recipe, A, Y, ridge, cache)


def _from_rows(
    rows: Rows, recipe: Recipe, A: UnfoldedMap, Y: Array, ridge: float, cache: Cache
) -> Preconditioner:
    """P from measured rows of Q, as tight as the recipe asks for."""
    assert recipe.goal is not None
    rows.tighten(recipe.goal, cache, recipe.name)
    made = {"Q": rows.train_rows, "left": rows.residual_bound}
    return replace(_factor(recipe, A.H, A, Y, ridge, rows.basis, made), stored=rows)


def _factor(
    recipe: Recipe,
    H_tilde: RegularizedLaplacian,
    A: UnfoldedMap,
    Y: Array,
    ridge: float,
    basis: Coordinates,
    made: Arrays,
) -> Preconditioner:
    """P = Q^T Q + ridge C0^T C0 and its factor, from Q or its sketch."""
    backend, d, all_rows = A.H.backend, A.features, recipe.all_rows
    Q, at, Q_all = made["Q"], A.train if all_rows else None, made["Q"] if all_rows else None
    if at is not None and not backend.whole:
        Q, at = backend.gathered(Q[at]), None  # training rows are everywhere
    error = rounding = math.inf
    sketched = "QtY" in made  # made with the sketch, from Q itself
    if H_tilde is A.H and not (recipe.by_rows or sketched):
        error = chebyshev_error(H_tilde, recipe.degree)
        narrowest = min(J.stop - J.start for J in recipe.blocks(basis.rank))
        rounding = chebyshev_rounding(H_tilde, recipe.dtype(H_tilde.dtype), narrowest)
        rounding += A.X.relative_off * H_tilde.lambda_max
    case = recipe.case(Y.shape[0], d, ridge)
    dense = not (case.low_rank or case is Case.ROW_SPACE)
    loss = LOSSES["mse"] if sketched else A.loss  # a sketch is one of rows as the loss sees them
    G, QtY = products(backend, Q, None if sketched else Y, at, dense, loss)
    gram: Gram | None = None
    kept, seen = d, None if dense else weigh_rows(loss, backend, Q if at is None else Q[at])
    if dense:
        count = Q.shape[0] if at is None else at.shape[0]
        rounded = gram_rounding(count, d) + (0.0 if loss.plain else 16 * unit_roundoff())
        gram = DenseGram(backend, G, basis.ridge, case.damped, rounded)
    elif case.low_rank:
        gram = LowRankGram(backend, seen, ridge)
    if gram is None:
        inner: Factor = RowSpace(
            backend, seen, recipe.curvature, A.X.column_norms if recipe.by_rows else None
        )
        kept = d if recipe.by_rows else inner.rank
    else:
        inner = gram.factor(recipe.curvature, ridge, recipe.symmetric)
        if dense and inner.rank < d:
            kept = d - max(0, A.distinct_columns(A.H.graph) - inner.rank)
    w_start = inner.to_gradient(made["QtY"] if sketched else QtY)
    rows = Q if recipe.keep_rows and not sketched else None
    known = (error, rounding, case.damped, d, kept, rows, made.get("left"))
    return Preconditioner(inner, basis, gram, w_start, *known, Q_all=Q_all)
