"""Leave-one-out: what the models that did not see a row say of it, in closed form.

For MSE with P = A^T W A + ridge I, W the weights of the rows, row i has the leverage
h_i = w_i a_i^T P^-1 a_i, and the model that was trained without it misses y_i by e_i / (1 - h_i),
e the residuals of the model at hand: exact, for all outputs at once.  An intercept centres the rows
and adds w_i / (sum of w) to the leverage.

Where there are fewer rows than features h is nearly 1, and 1 - h has lost its digits.  There

    G = A A^T + ridge diag(1 / w),   e_i / (1 - h_i) = (G^-1 Y)_i / (G^-1)_ii,

with G bordered by a row and a column of ones for an intercept.

Without a ridge the model of fewer rows than features is the one of smallest weights, in units in
which the columns of X have norm 1; so are those without a row.  With U the left singular vectors of
the rows (weighted and centred as the loss sees them), and N N^T = I - U U^T (less the constants, if
there is an intercept), 1 - h is the diagonal of N N^T.  A row that others determine misses y_i by
(N N^T Y)_i / (N N^T)_ii; one that adds a direction of its own (h = 1), as all do where the rows are
independent, by (G^+ Y)_i / (G^+)_ii: both are limits of the formula above as the ridge goes to 0.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np

from herta_gpu.backends.base import Array
from herta_gpu.direct import StoredProblem
from herta_gpu.grams import ROW_CUT

_ROWS = 1 << 13  # rows of Q at a time
_ALONE = 1e-10  # 1 - h below which a row alone decides some direction: no model without it does
_SLACK = 0.1  # departure of P from Q^T Q + ridge beyond which h is not taken from it


@dataclass(frozen=True)
class LeftOut:
    """What leaving out each row would change, on the host."""

    outputs: Any  # (n_train, c) of the models that left each row out; NaN where there is none
    leverage: Any  # (n_train,)
    noise: Any  # (c,) variance of the residuals of each output


def left_out(problem: StoredProblem, u: Array) -> LeftOut:
    """Leave-one-out for the optimum u of a stored MSE problem."""
    P, few = problem.P, problem.Q.shape[0] < problem.Q.shape[1]
    dual = few or (problem.ridge > 0 and P.inner.slack > _SLACK)
    if few and problem.ridge == 0:
        missed, leverage = _of_smallest_weights(problem)
    else:
        missed, leverage = _from_rows(problem) if dual else _from_P(problem, u)
    backend, xp = problem.backend, problem.backend.xp
    Y, weights = problem.Y[:], problem.loss.weights
    e = missed * (1 - leverage)[:, None]
    squares = (e * e if weights is None else weights[:, None] * e * e).sum(axis=0)
    # Residuals of 0 whatever the targets, as of independent rows without a ridge, say nothing.
    fitted = few and problem.ridge == 0 and bool((leverage > 1 - _ALONE).all())  # synchronize!
    free = math.nan if fitted else xp.maximum(Y.shape[0] - leverage.sum(), 1.0)
    lost = leverage >= 1 - _ALONE
    missed = missed if dual else xp.where(lost[:, None], math.nan, missed)
    found = (Y - missed, leverage, squares / free)
    return LeftOut(*(backend.to_numpy(a) for a in found))  # synchronize!


def spread(problem: StoredProblem, Q: Array) -> Any:
    """a^T P^-1 a for rows of Q that were not trained on, on the host.

    Infinite for fewer training rows than features without a ridge: nothing speaks of the
    directions that no training row has.
    """
    xp, loss = problem.backend.xp, problem.loss
    if problem.ridge == 0 and problem.Q.shape[0] < problem.Q.shape[1]:
        return np.full(Q.shape[0], math.inf)
    found = xp.zeros(Q.shape[0])
    for i in range(0, Q.shape[0], _ROWS):
        part = Q[i : i + _ROWS].astype("float64")
        part = part if problem.mean is None else part - problem.mean
        B = problem.P.inner.half_T(xp.ascontiguousarray(part.T))
        found[i : i + _ROWS] = (B * B).sum(axis=0)
    if loss.intercept:
        found = found + 1 / loss.total(problem.Q.shape[0])
    return problem.backend.to_numpy(found)  # synchronize!


def _from_P(problem: StoredProblem, u: Array) -> tuple[Array, Array]:
    """(y less the output of the model without the row, leverage)."""
    backend, xp, loss, Q = problem.backend, problem.backend.xp, problem.loss, problem.Q
    b, count = problem.sweep(u).b, Q.shape[0]
    leverage, missed = xp.zeros(count), xp.zeros((count, u.shape[1]))
    for i in range(0, count, _ROWS):
        J = slice(i, min(i + _ROWS, count))
        B = problem.P.inner.half_T(xp.ascontiguousarray(Q[J].T))
        h = (B * B).sum(axis=0)
        if loss.intercept:
            h = h + 1 / loss.total(count)
        h = loss.of_rows(J).weighted(h[:, None])[:, 0]
        F = backend.matmul(Q[J], u)
        e = problem.Y[J] - (F if b is None else F + b)
        leverage[J] = h
        missed[J] = e / xp.maximum(1 - h, np.finfo(float).tiny)[:, None]
    return missed, leverage


def _from_rows(problem: StoredProblem) -> tuple[Array, Array]:
    """The same from G, for fewer rows than features."""
    xp, loss = problem.backend.xp, problem.loss
    A, count, Y = problem.basis.rows(problem.Q), problem.Q.shape[0], problem.Y[:]
    if loss.intercept:
        Y = xp.concatenate([Y, xp.zeros((1, Y.shape[1]))])
    inverse = xp.linalg.inv(_bordered(problem, A))
    diagonal = inverse.diagonal()[:count]
    missed = (inverse @ Y)[:count] / diagonal[:, None]
    return missed, 1 - _own(problem) * diagonal


def _own(problem: StoredProblem) -> Array:
    """(n_train,) ridge / w."""
    xp, weights = problem.backend.xp, problem.loss.weights
    return problem.ridge / (xp.ones(problem.Q.shape[0]) if weights is None else weights)


def _bordered(problem: StoredProblem, A: Array) -> Array:
    """G, with a border of the size of its entries for an intercept."""
    # Rows less their mean differ by a multiple of 1, which the border takes away.
    backend, xp, count = problem.backend, problem.backend.xp, A.shape[0]
    G = backend.matmul(A, A.T)
    G[xp.arange(count), xp.arange(count)] += _own(problem)
    if not problem.loss.intercept:
        return G
    size = float(G.diagonal().sum()) / count  # synchronize!
    G = xp.concatenate([G, xp.full((1, count), size)])
    return xp.concatenate([G, xp.concatenate([xp.full((count, 1), size), xp.zeros((1, 1))])], 1)


def _seen_rows(problem: StoredProblem) -> tuple[Array, Array, Array, Array | None]:
    """(U, s, V^T, roots of the weights): an SVD of the rows as the loss sees them."""
    xp, weights = problem.backend.xp, problem.loss.weights
    root = None if weights is None else xp.sqrt(weights)
    rows = problem.Q if root is None else root[:, None] * problem.Q
    U, s, Vt = xp.linalg.svd(rows.astype("float64", copy=False), full_matrices=False)
    r = int((s > ROW_CUT * s[0]).sum())  # synchronize!
    return U[:, :r], s[:r], Vt[:r], root


def _of_smallest_weights(problem: StoredProblem) -> tuple[Array, Array]:
    """The same without a ridge, for fewer rows than features."""
    backend, xp, loss = problem.backend, problem.backend.xp, problem.loss
    count, (U, s, _, root) = problem.Q.shape[0], _seen_rows(problem)
    Y, spanned = problem.Y[:] if root is None else root[:, None] * problem.Y[:], U
    if loss.intercept:
        ones = (xp.ones(count) if root is None else root)[:, None]
        spanned = xp.concatenate([U, ones / xp.linalg.norm(ones)], axis=1)
    free = 1 - (spanned * spanned).sum(axis=1)  # 1 - h
    alone = free <= _ALONE
    around = Y - backend.matmul(spanned, backend.matmul(spanned.T, Y))
    inverse = (U / s) * (U / s)
    through = backend.matmul(U / s**2, backend.matmul(U.T, Y))
    missed = xp.where(
        alone[:, None],
        through / xp.maximum(inverse.sum(axis=1), np.finfo(float).tiny)[:, None],
        around / xp.where(alone, 1.0, free)[:, None],
    )
    missed = missed if root is None else missed / root[:, None]
    return missed, xp.where(alone, 1.0, 1 - free)
