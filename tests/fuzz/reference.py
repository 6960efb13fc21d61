"""The objective and its optimum by dense algebra that shares no code with the package.

Whatever W is found here, its objective is at least the optimum.  So `objective(W_) - best` is a
lower bound of the true gap, however good or bad the search for `best` was: a certificate below it
is false.  Objectives are evaluated in extended precision with a bound of what that is off by.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import scipy.linalg
import scipy.sparse as sp

LD = np.longdouble
_UNIT = float(np.finfo(LD).eps)
_CUTS = (1e-16, 1e-14, 1e-12, 1e-10, 1e-8)  # of directions that may be rounding and no data
_SEEN = 1e-14  # columns of A below this share of H^-1 X hold no digit that is right


@dataclass(frozen=True)
class Value:
    """An objective, and how far rounding can have moved it."""

    value: Any
    error: Any

    @property
    def low(self) -> Any:
        return self.value - self.error

    @property
    def high(self) -> Any:
        return self.value + self.error


def adjacency(n: int, edges: Any, weights: Any) -> Any:
    """A from the edge list, in extended precision; (u, v) and (v, u) are one edge."""
    A = np.zeros((n, n), dtype=LD)
    w = np.ones(edges.shape[1]) if weights is None else weights
    for u, v, size in zip(*edges.tolist(), w.tolist(), strict=True):
        A[u, v] = A[v, u] = LD(size)
    return A


def system(n: int, edges: Any, weights: Any, lam: float, factor: Any = None) -> Any:
    """H = I + lam L_hat from the edge list, in extended precision, straight from the definition.

    Edges times `factor` keep the degrees that they had.
    """
    A = adjacency(n, edges, weights)
    loops = np.where(A.diagonal() > 0, A.diagonal(), LD(1))  # a missing self-loop has weight 1
    np.fill_diagonal(A, 0)
    s = 1 / np.sqrt(A.sum(axis=1) + loops)
    A = A if factor is None else A * adjacency(n, edges, factor)
    off = A.sum(axis=1)
    return np.eye(n, dtype=LD) + LD(lam) * (s[:, None] * (np.diag(off) - A) * s[None, :])


class System:
    """H, and solves with it: float64 factors, refined in extended precision."""

    def __init__(self, H: Any) -> None:
        self.H, self.abs_H = sp.csr_array(H), sp.csr_array(abs(H))
        self.factor = scipy.linalg.cho_factor(H.astype(float))

    def solve(self, B: Any) -> tuple[Any, Any]:
        """H^-1 B and the residual that is left."""
        Z, R = np.zeros_like(B), B
        for _ in range(4):
            unit = np.exp2(np.floor(np.log2(abs(R).max(axis=0) + LD(2) ** -16000)))  # for float64
            Z = Z + unit * scipy.linalg.cho_solve(self.factor, (R / unit).astype(float))
            R = B - self.H @ Z
        return Z, R


class Reference:
    """One problem: min over W of loss(M H^-1 X W) + ridge/2 ||W||^2.

    H may be a list: W has a block of rows for each.  Rows of the loss may have weights, and with
    an intercept the last row of W holds the constants.
    """

    def __init__(
        self,
        H: Any,
        X: Any,
        Y: Any,
        train: Any,
        loss: str,
        ridge: float,
        weights: Any = None,
        intercept: bool = False,
    ) -> None:
        self.systems = [System(one) for one in (H if isinstance(H, list) else [H])]
        X = X.toarray() if sp.issparse(X) else np.asarray(X)
        self.X, self.Y, self.train = X.astype(LD), Y.astype(LD), train
        self.loss, self.ridge, self.intercept = loss, LD(ridge), intercept
        w = np.ones(len(train)) if weights is None else np.asarray(weights)
        self.w = w.astype(LD)[:, None]
        self.rows = X.shape[1] * len(self.systems) + intercept  # of W

    def solve(self, B: Any) -> tuple[Any, Any]:
        """H^-1 B of the first H, and the residual that is left."""
        return self.systems[0].solve(B)

    def outputs(self, W: Any) -> tuple[Any, Any]:
        """M H^-1 X W, and a bound of its error: H >= I, so no more than that of the residual."""
        n, d = self.X.shape
        F = np.zeros((len(self.train), W.shape[1]), dtype=LD)
        off = LD(0)
        for i, system in enumerate(self.systems):
            part = W[i * d : (i + 1) * d]
            Z, R = system.solve(self.X @ part)
            rounding = (d + 2) * _size(abs(self.X) @ abs(part))
            rounding += (n + 2) * _size(system.abs_H @ abs(Z)) + _size(Z)
            F, off = F + Z[self.train], off + _size(R) + _UNIT * rounding
        if self.intercept:
            F = F + W[-1]
            off += _UNIT * _size(F)
        return F, off

    def objective(self, W: Any) -> Value:
        W = np.asarray(W).astype(LD)
        F, off = self.outputs(W)
        value, slope, rounding = self._loss(F)
        held = W[:-1] if self.intercept else W
        penalty = self.ridge / 2 * (held * held).sum()
        # All losses have a Hessian of at most the weights in F.
        bend = off**2 / 2 * self.w.max()
        return Value(value + penalty, slope * off + bend + rounding + 1e3 * _UNIT * penalty)

    def _loss(self, F: Any) -> tuple[Any, Any, Any]:
        """The loss, the norm of its gradient in F, and what rounding does to it."""
        count, top = F.size + 10, self.w.max()
        if self.loss == "mse":
            E = F - self.Y
            value = (self.w * E * E).sum() / 2
            rounding = _UNIT * (count * value + top * _size(E) * (_size(F) + _size(self.Y)))
            return value, _size(self.w * E), rounding
        terms = self.w * self.terms(F)
        rounding = _UNIT * count * (abs(terms).sum() + top * abs(F).max(initial=0) * len(F))
        return terms.sum(), _size(self.w * self.slope(F)), rounding

    def terms(self, F: Any) -> Any:
        """The loss of each row, or of each label, weights apart; without cancellation."""
        if self.loss == "bce":
            wrong = np.maximum(np.where(self.Y > 0, -F, F), 0)
            return np.where(self.Y >= 0, wrong + np.log1p(np.exp(-abs(F))), 0)
        over = F - (F * self.Y).sum(axis=1, keepdims=True)  # logits above that of the label
        top = np.maximum(over.max(axis=1, keepdims=True), 0)
        S = np.where(self.Y > 0, 0, np.exp(over - top))  # the others', and the label's apart
        return top + np.log1p(S.sum(axis=1, keepdims=True) + np.expm1(-top))

    def slope(self, F: Any) -> Any:
        """Its gradient in F; the label's entry is -(the others' probabilities)."""
        if self.loss == "bce":
            return np.where(self.Y >= 0, np.where(self.Y > 0, -_sigmoid(-F), _sigmoid(F)), 0)
        S = np.where(self.Y > 0, 0, _softmax(F))
        return S - self.Y * S.sum(axis=1, keepdims=True)

    def bend(self, F: Any, a: int, b: int) -> Any:
        """The second derivatives of each row with respect to the outputs a and b."""
        if self.loss == "bce":
            both = _sigmoid(F[:, a]) * _sigmoid(-F[:, a])
            return np.where(self.Y[:, a] >= 0, both, 0) * (a == b)
        S = _softmax(F)
        return S[:, a] * (np.delete(S, a, axis=1).sum(axis=1) if a == b else -S[:, b])

    # ---- leave-one-out ---------------------------------------------------------------------
    def left_out(self, some: Any) -> tuple[Any, Any]:
        """(outputs of `some` rows by models refitted without each, leverages of all rows); MSE."""
        A = np.hstack([system.solve(self.X)[0] for system in self.systems])[self.train]
        rows, outputs = np.arange(len(A)), []
        for i in some:
            W, constant, _ = self._refit(A, np.delete(rows, i))
            outputs.append(A[i] @ W + constant)
        return np.array(outputs), self._refit(A, rows)[2]

    def _refit(self, A: Any, rows: Any) -> tuple[Any, Any, Any]:
        """(W, constants, leverages) from some rows; of many W the smallest in units of X."""
        w, A, Y = self.w[rows], A[rows], self.Y[rows]
        means = [(w * B).sum(axis=0) / w.sum() * self.intercept for B in (A, Y)]
        M, T = (np.sqrt(w) * (B - mean) for B, mean in zip((A, Y), means, strict=True))
        units = np.tile(np.sqrt((self.X * self.X).sum(axis=0)), len(self.systems))
        if self.ridge > 0:
            M = np.vstack([M, np.sqrt(self.ridge) * np.eye(M.shape[1], dtype=LD)])
            T = np.vstack([T, np.zeros((A.shape[1], T.shape[1]), dtype=LD)])
            units = np.sqrt((M * M).sum(axis=0))
        units[units == 0] = 1
        Q, R, order = pivoted_qr(M / units, 1e-14)
        Q2, R2, order2 = pivoted_qr(R.T, 0.0)
        V = (Q.T @ T)[order2]
        for k in range(len(V)):
            V[k] = (V[k] - R2[:k, k] @ V[:k]) / R2[k, k]
        W = np.zeros((A.shape[1], T.shape[1]), dtype=LD)
        W[order] = Q2 @ V
        W /= units[:, None]
        leverage = (Q[: len(rows)] ** 2).sum(axis=1) + self.intercept * w[:, 0] / w.sum()
        return W, means[1] - means[0] @ W, leverage

    # ---- the search ------------------------------------------------------------------------
    @cached_property
    def best(self) -> Value:
        """The lowest objective that was found; 0 is one of the W that are tried."""
        zero = np.zeros((self.rows, self.Y.shape[1]), dtype=LD)
        found = [self.objective(zero)]
        for basis in self._bases():
            for W in basis.candidates():
                if np.isfinite(W).all():
                    found.append(self.objective(W))
        return min(found, key=lambda f: f.high)

    def _bases(self) -> list[Basis]:
        Z = np.hstack([system.solve(self.X)[0] for system in self.systems])
        if self.intercept:
            Z = np.hstack([Z, np.ones((len(Z), 1), dtype=LD)])
        A = np.sqrt(self.w) * Z[self.train]
        Z = np.sqrt(self.w.max()) * Z
        seen = np.sqrt((A * A).sum(axis=0)) > _SEEN * np.sqrt((Z * Z).sum(axis=0))
        if self.ridge > 0:
            seen[:] = True  # noise is small against the ridge, or is refined away
        columns = np.flatnonzero(seen)
        if columns.size == 0:
            return []
        stacked = A[:, columns]
        if self.ridge > 0:
            penalty = np.sqrt(self.ridge) * np.eye(columns.size, dtype=LD)
            if self.intercept:
                penalty[-1, -1] = 0
            stacked = np.vstack([stacked, penalty])
        units = np.sqrt((stacked * stacked).sum(axis=0))
        Q, R, order = pivoted_qr(stacked / units, _CUTS[0])
        ranks = sorted({int((R.diagonal() > cut).sum()) for cut in _CUTS}, reverse=True)
        return [Basis(self, Q[:, :r], R[:r, :r], columns[order[:r]], 1 / units[order[:r]])
                for r in ranks]  # fmt: skip


@dataclass
class Basis:
    """[A; sqrt(ridge) I] = Q R on some columns: in V = R W all is as round as it can be."""

    problem: Reference
    Q: Any
    R: Any
    columns: Any
    units: Any

    def weights(self, V: Any) -> Any:
        W = np.zeros((self.problem.rows, V.shape[1]), dtype=LD)
        W[self.columns] = self.units[:, None] * _back_substituted(self.R, V)
        return W

    def candidates(self) -> list[Any]:
        return self._least_squares() if self.problem.loss == "mse" else self._newton()

    def _least_squares(self) -> list[Any]:
        """Refined twice: what is left of Y is computed by solves, not with the stored A."""
        p, n = self.problem, self.problem.train.shape[0]
        found = [np.zeros((p.rows, p.Y.shape[1]), dtype=LD)]
        for _ in range(3):
            W = found[-1]
            left = self.Q[:n].T @ (np.sqrt(p.w) * (p.Y - p.outputs(W)[0]))
            if p.ridge > 0:
                left -= np.sqrt(p.ridge) * (self.Q[n:].T @ W)  # of all columns
            found.append(W + self.weights(left))
        return found[1:]

    def _newton(self, steps: int = 80) -> list[Any]:
        """Damped Newton, all of it in extended precision."""
        p, n = self.problem, self.problem.train.shape[0]
        root, C = np.sqrt(p.w), self.Q[n:]
        B = self.Q[:n] / root
        V = np.zeros((self.Q.shape[1], p.Y.shape[1]), dtype=LD)

        def value(V: Any) -> Any:
            F, CV = B @ V, C @ V
            return (p.w * p.terms(F)).sum() + (CV * CV).sum() / 2

        now = value(V)
        for _ in range(steps):
            F = B @ V
            g = self.Q[:n].T @ (root * p.slope(F)) + C.T @ (C @ V)
            D = self._newton_step(C.T @ C, F, g)
            slope, eta = (g * D).sum(), LD(1)
            while eta > 1e-9 and not (ahead := value(V + eta * D)) <= now + eta * slope / 10:
                eta /= 2
            if eta <= 1e-9 or not np.isfinite(ahead):
                break  # whatever was found is an upper bound of the optimum all the same
            V, now = V + eta * D, ahead
            if -slope <= 1e-18 * abs(now):
                break
        return [self.weights(V)]

    def _newton_step(self, CC: Any, F: Any, g: Any) -> Any:
        """The rows of Q hold the roots of the weights already."""
        p, (r, c), rows = self.problem, g.shape, self.Q[: F.shape[0]]
        H = np.kron(np.eye(c), CC)
        for a, b in zip(*np.tril_indices(c), strict=True):
            if a == b or p.loss == "ce":
                block = rows.T @ (p.bend(F, a, b)[:, None] * rows)
                H[a * r : (a + 1) * r, b * r : (b + 1) * r] += block
        return _solved_by_cholesky(H, -g.T.ravel()).reshape(c, r).T


def _solved_by_cholesky(H: Any, b: Any) -> Any:
    """H^-1 b from the lower triangle; a trace of I keeps the factor alive where H is singular."""
    n = H.shape[0]
    L, trace = np.zeros_like(H), LD(1e-17) * max(H.diagonal().max(), LD(2) ** -16000)
    for k in range(n):
        column = H[k:, k] - L[k:, :k] @ L[k, :k]
        L[k:, k] = column / np.sqrt(np.maximum(column[0] + trace, trace))
        L[k, k] = np.sqrt(np.maximum(column[0] + trace, trace))
    x = b.copy()
    for k in range(n):
        x[k] = (x[k] - L[k, :k] @ x[:k]) / L[k, k]
    return _back_substituted(L.T, x[:, None])[:, 0]


def _softmax(F: Any) -> Any:
    S = np.exp(F - F.max(axis=1, keepdims=True))
    return S / S.sum(axis=1, keepdims=True)


def pivoted_qr(A: Any, cut: float) -> tuple[Any, Any, Any]:
    """A[:, order] = Q R by Gram and Schmidt, twice per column, largest column first."""
    m, d = A.shape
    left, order = A.copy(), np.arange(d)
    Q, R = np.zeros((m, min(m, d)), dtype=LD), np.zeros((min(m, d), d), dtype=LD)
    rank, first = 0, None
    for k in range(min(m, d)):
        norms = np.sqrt((left[:, k:] * left[:, k:]).sum(axis=0))
        j = k + int(norms.argmax())
        first = norms[j - k] if first is None else first
        if not norms[j - k] > cut * first:
            break
        left[:, [k, j]], R[:, [k, j]], order[[k, j]] = left[:, [j, k]], R[:, [j, k]], order[[j, k]]
        q = left[:, k] - Q[:, :k] @ (Q[:, :k].T @ left[:, k])
        q = q / np.sqrt((q * q).sum())
        R[k, k:] = q @ left[:, k:]
        left[:, k:] -= q[:, None] * R[k, k:]
        Q[:, k], rank = q, k + 1
    return Q[:, :rank], R[:rank], order


def _back_substituted(R: Any, V: Any) -> Any:
    W = V.copy()
    for k in range(R.shape[0] - 1, -1, -1):
        W[k] = (W[k] - R[k, k + 1 :] @ W[k + 1 :]) / R[k, k]
    return W


def _size(R: Any) -> Any:
    return np.sqrt((R * R).sum())


def _sigmoid(F: Any) -> Any:
    z = np.exp(-abs(F))
    return np.where(F >= 0, 1, z) / (1 + z)


def pagerank(A: Any, P: Any, damping: float) -> Any:
    """pi of each column of P by a factorisation of the chain, refined in extended precision.

    A walk that ends where A has no edge starts anew.
    """
    sums, found = A.sum(axis=0), []
    for p in (P / P.sum(axis=0)).T:
        T = np.where(sums > 0, A / np.where(sums > 0, sums, 1), p[:, None])
        M = np.eye(len(p), dtype=LD) - LD(damping) * T
        factor, x = scipy.linalg.lu_factor(M.astype(float)), np.zeros(len(p), dtype=LD)
        for _ in range(6):
            r = (1 - LD(damping)) * p - M @ x
            x = x + scipy.linalg.lu_solve(factor, r.astype(float))
        found.append(x)
    return np.array(found).T
