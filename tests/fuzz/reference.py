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


def system(n: int, edges: Any, weights: Any, lam: float) -> Any:
    """H = I + lam L_hat from the edge list, in extended precision, straight from the definition."""
    A = np.zeros((n, n), dtype=LD)
    w = np.ones(edges.shape[1]) if weights is None else weights
    for u, v, size in zip(*edges.tolist(), w.tolist(), strict=True):
        A[u, v] = A[v, u] = LD(size)
    loops = np.where(A.diagonal() > 0, A.diagonal(), LD(1))  # a missing self-loop has weight 1
    np.fill_diagonal(A, 0)
    off = A.sum(axis=1)
    s = 1 / np.sqrt(off + loops)
    return np.eye(n, dtype=LD) + LD(lam) * (s[:, None] * (np.diag(off) - A) * s[None, :])


class _System:
    """H, and solves with it: float64 factors, refined in extended precision."""

    def __init__(self, H: Any) -> None:
        self.H, self.abs_H = sp.csr_array(H), sp.csr_array(abs(H))
        self.factor = scipy.linalg.cho_factor(H.astype(float))

    def solve(self, B: Any) -> tuple[Any, Any]:
        """H^-1 B and the residual that is left."""
        Z, R = np.zeros_like(B), B
        for _ in range(4):
            Z = Z + scipy.linalg.cho_solve(self.factor, R.astype(float)).astype(LD)
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
        self.systems = [_System(one) for one in (H if isinstance(H, list) else [H])]
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
        """The loss of each row, or of each label, weights apart."""
        if self.loss == "bce":
            known = np.where(self.Y >= 0, self.Y, 0)
            each = np.log1p(np.exp(-abs(F))) + np.maximum(F, 0) - F * known
            return np.where(self.Y >= 0, each, 0)
        return (_softmax(F)[1] - (F * self.Y).sum(axis=1))[:, None]

    def slope(self, F: Any) -> Any:
        """Its gradient in F."""
        if self.loss == "bce":
            return np.where(self.Y >= 0, _sigmoid(F) - self.Y, 0)
        return _softmax(F)[0] - self.Y

    def bend(self, F: Any, a: int, b: int) -> Any:
        """The second derivatives of each row with respect to the outputs a and b."""
        if self.loss == "bce":
            S = _sigmoid(F[:, a])
            return np.where(self.Y[:, a] >= 0, S * (1 - S), 0) * (a == b)
        S = _softmax(F)[0]
        return S[:, a] * ((a == b) - S[:, b])

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
        """Damped Newton; gradients in extended precision, the Hessian's factor in float64."""
        p, n = self.problem, self.problem.train.shape[0]
        B, C = self.Q[:n] / np.sqrt(p.w), self.Q[n:]
        r, c = self.Q.shape[1], p.Y.shape[1]
        V = np.zeros((r, c), dtype=LD)

        def value(V: Any) -> Any:
            F, CV = B @ V, C @ V
            return (p.w * p.terms(F)).sum() + (CV * CV).sum() / 2

        now = value(V)
        for _ in range(steps):
            F = B @ V
            g = B.T @ (p.w * p.slope(F)) + C.T @ (C @ V)
            try:
                D = self._newton_step(B.astype(float), C.astype(float), F, g)
            except np.linalg.LinAlgError:
                break  # whatever was found is an upper bound of the optimum all the same
            slope, eta = (g * D).sum(), LD(1)
            while eta > 1e-9 and not (ahead := value(V + eta * D)) <= now + eta * slope / 10:
                eta /= 2
            if eta <= 1e-9 or not np.isfinite(ahead):
                break
            V, now = V + eta * D, ahead
            if -slope <= 1e-18 * abs(now):
                break
        return [self.weights(V)]

    def _newton_step(self, B: Any, C: Any, F: Any, g: Any) -> Any:
        p, (r, c) = self.problem, g.shape
        H = np.kron(np.eye(c), C.T @ C)
        for a in range(c):
            for b in range(c):
                weight = (p.w[:, 0] * p.bend(F, a, b)).astype(float)
                H[a * r : (a + 1) * r, b * r : (b + 1) * r] += B.T @ (weight[:, None] * B)
        # Logits may move together for nothing: a trace of I keeps the factor alive.
        H[np.diag_indices(r * c)] += 1e-15 * max(H.diagonal().max(), 1e-300)
        step = np.linalg.lstsq(H, -g.astype(float).T.ravel(), rcond=None)[0]
        return step.reshape(c, r).T.astype(LD)


def _softmax(F: Any) -> tuple[Any, Any]:
    top = F.max(axis=1, keepdims=True)
    S = np.exp(F - top)
    total = S.sum(axis=1, keepdims=True)
    return S / total, (np.log(total) + top)[:, 0]


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
