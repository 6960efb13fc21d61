"""What is known of the preconditioned Hessian P^-1/2 T P^-1/2: where its eigenvalues lie.

In the order of their price: proven from the polynomial behind Q, from the norms of the columns of
R = X C0 - H Q, or found by Lanczos from a random start, which fails with a stated probability.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from herta_gpu.backends.base import Array, Backend, norm
from herta_gpu.coordinates import Units, Whitened
from herta_gpu.diffusion import residual_norms
from herta_gpu.factors import gram
from herta_gpu.laplacian import block_cg
from herta_gpu.preconditioner import Preconditioner
from herta_gpu.unfolded import UnfoldedMap

LANCZOS_STEPS = 20
_MOST_STEPS = 80  # steps of Lanczos where fewer leave too little of a
_LANCZOS_TOL = 1e-4
_LANCZOS_LEAST_TOL = 1e-12
_ENDED = 1e-12  # share of a product outside the space of a run that is rounding
_EPS = float(np.finfo(np.float64).eps)
_BLUR = 0.05  # movement of the Ritz values that makes tighter solves worth it
_USEFUL = 0.02  # a below this makes the certificate too pessimistic to be worth having
_PROVEN = 0.1  # below this it is worth measuring what rounding really did
_SLACK = 0.1  # departure of P from Q^T Q + ridge beyond which nothing is built on that form
_LEAST_SIZE = 1e-25  # norm of a column below which float32 loses digits to underflow
_ENOUGH = 0.1  # rho below this is not worth a better bound
_ROWS = 1 << 13  # rows of Q in float64 at a time


@dataclass(frozen=True)
class Spectrum:
    """What is known of P^-1/2 T P^-1/2: a <= eigenvalues <= b, and ||H^-1 X P^-1/2|| <= norm.

    Of the kind "estimate" it proves nothing and only tells a good moment to stop.
    """

    a: float
    b: float
    norm: float
    kind: str
    probability: float = 0.0

    @property
    def kappa(self) -> float:
        """b / a: the condition number of the preconditioned Hessian, or a bound of it."""
        return self.b / self.a


def choose_spectrum(
    kind: str, P: Preconditioner, A: UnfoldedMap, ridge: float, seed: int
) -> Spectrum | None:
    """Bounds of the preconditioned Hessian: the cheapest of those planned that holds."""
    found = None
    if P.factor.rank > 0 and P.inner.slack < _SLACK and _in_range(P):
        if P.Q_all is not None and isinstance(P.basis, (Units, Whitened)):
            outside = _outside(P, A)
            found = proven_spectrum(P, A, outside)
            if found is None and kind == "spectral-deterministic":
                found = measured_spectrum(P, residual_norms(A.H, P.basis, P.Q_all, A.width))
        elif P.column_error is not None:
            found = measured_spectrum(P, P.column_error)
    if found is None and kind.startswith("spectral"):
        found = probabilistic_spectrum(P, A, ridge, seed)
    return found


def _in_range(P: Preconditioner) -> bool:
    """Whether no column was so small or large that float32 lost digits of it."""
    if P.basis is None or P.Q_all is None or P.Q_all.dtype == np.float64:
        return True
    sizes = P.basis.sizes
    fine = (sizes > _LEAST_SIZE) & (sizes < 1 / _LEAST_SIZE)
    return bool(((sizes == 0) | fine).all())  # synchronize!


# Both of the next two start from | ||A v|| - ||M Q v|| | <= ||(H^-1 X - Q) v|| <= rho for
# ||P^1/2 v|| = 1, so that (1 - rho)^2 <= eigenvalues <= (1 + rho)^2, for any X.
def proven_spectrum(P: Preconditioner, A: UnfoldedMap, outside: float) -> Spectrum | None:
    """From the polynomial: ||(H^-1 X - p(H) X) v|| <= eps ||H^-1 X v||, and Q is off p(H) X by no
    more than rounding."""
    assert P.Q_all is not None
    eps, relative = P.Q_error, P.Q_rounding
    if eps + relative >= 0.5:
        return None
    backend, xp = A.H.backend, A.H.backend.xp
    norms2 = backend.total(backend.column_dots(P.Q_all, P.Q_all))
    sizes = xp.sqrt(norms2) * (relative / (1 - eps - relative))
    rounding = P.inner.amplified(sizes)
    rho = eps / (1 - eps) * (math.sqrt(1 + outside) + rounding) + rounding
    return _around_one(rho, outside, P.inner.slack, "spectral-proven", least=_PROVEN)


def measured_spectrum(P: Preconditioner, left: Array) -> Spectrum | None:
    """From the columns of R = X C0 - H Q: ||(H^-1 X C0 - Q) v|| <= ||R v||."""
    assert P.basis is not None
    # ||H^-1 X C0 C|| <= ||X C0|| ||C||, whichever rows are outside training.
    outside = max(0.0, (P.basis.norm * P.inner.size) ** 2 - 1)
    rho = P.inner.amplified(left)
    return _around_one(rho, outside, P.inner.slack, "spectral-deterministic", least=_USEFUL)


def _around_one(
    rho: float, outside: float, slack: float, kind: str, least: float
) -> Spectrum | None:
    """[(1 - rho)^2, (1 + rho)^2], widened by how far P may be from Q^T Q + ridge."""
    low, high = math.sqrt(1 - slack) - rho, math.sqrt(1 + slack) + rho
    if not low > 0 or low**2 < least:
        return None
    # P = Q^T Q over the training rows (+ ridge), so ||Q P^-1/2||^2 <= 1 + the rows outside.
    norm = math.sqrt(1 + slack + outside) + rho
    return Spectrum(low**2, high**2, norm, kind)


def _outside(P: Preconditioner, A: UnfoldedMap) -> float:
    """A bound of ||Q P^-1/2||^2 over the rows of Q outside training."""
    assert P.Q_all is not None
    backend, xp = A.H.backend, A.H.backend.xp
    if not A.loss.plain:
        return _norm_bound(_congruent(P, _gram_outside(P.Q_all, A)), backend)
    mask = xp.ones(A.H.n, dtype=bool)
    mask[A.train] = False
    at = xp.flatnonzero(mask)
    count = int(backend.total(at.shape[0]))
    if count == 0:
        return 0.0
    enough = (_ENOUGH / max(P.Q_error, 1e-16)) ** 2
    if count > P.Q_all.shape[1] or not backend.whole:
        G = backend.total(gram(backend, P.Q_all, at))
        return _norm_bound(_congruent(P, G), backend, enough)
    B = P.inner.to_gradient(P.Q_all[at].astype("float64").T)
    total = float((B * B).sum())  # synchronize!
    if total <= enough:
        return total
    return _norm_bound(backend.matmul(B.T, B), backend, enough)


def _gram_outside(Q: Array, A: UnfoldedMap) -> Array:
    """Q^T Q less the part of it that P has, where rows have weights or are centred.

    ||Q v||^2 is that of the rows as the loss sees them, of what their weights w leave (1 - w, and
    1 outside training), and of the mean row as often as it was taken away.
    """
    backend, xp, loss = A.H.backend, A.H.backend.xp, A.loss
    left = xp.ones(A.H.n)
    left[A.train] = 0.0 if loss.weights is None else backend.own(1 - loss.weights)
    G = xp.zeros((Q.shape[1], Q.shape[1]))
    for a in range(0, A.H.n, _ROWS):
        rows = slice(a, a + _ROWS)
        backend.add_gram(G, Q[rows].astype("float64") * xp.sqrt(left[rows])[:, None])
    G = backend.total(G)
    if loss.intercept:
        rows = A.rows(Q)
        mean = loss.mean(xp, rows)
        G = G + loss.total(rows.shape[0]) * mean[:, None] * mean[None, :]
    return G


def _congruent(P: Preconditioner, S: Array) -> Array:
    """P^-1/2 S P^-1/2 for a symmetric S."""
    return P.inner.to_gradient(P.inner.to_gradient(S).T)


def _norm_bound(S: Array, backend: Backend, enough: float = 0.0) -> float:
    """An upper bound of the largest eigenvalue of S >= 0: at most `enough`, or within d^(1/16)."""
    bound, power = math.inf, S
    scale = 1.0
    for doubling in range(4):
        size = norm(power)
        if size == 0:
            return 0.0
        scale *= size ** (0.5**doubling)
        bound = scale * (1 + 1e-6)
        if bound <= enough or doubling == 3:
            break
        power = power / size
        power = backend.matmul(power, power)
    return bound


def probabilistic_spectrum(
    P: Preconditioner, A: UnfoldedMap, ridge: float, seed: int
) -> Spectrum | None:
    """Lanczos from random starts, with a bound of what each run misses.

    When those bounds leave nothing, the Ritz values are returned as an estimate.

    Two runs share the solves: one on P^-1/2 (T + ridge) P^-1/2, one on the same without the mask,
    whose largest eigenvalue is ||H^-1 X P^-1/2||^2.  Each of three eigenvalues (the least and the
    largest of the one, the largest of the other) is missed with probability at most 1/(3n).
    """
    if P.damped:
        return None
    if P.factor.rank == 0:  # the training rows see nothing of X: every W is optimal
        return Spectrum(1.0, 1.0, 0.0, "spectral-deterministic")
    tol, steps, most = _LANCZOS_TOL, LANCZOS_STEPS, min(P.factor.rank, _MOST_STEPS)
    while True:
        bounds = _ritz_bounds(P, A, ridge, seed, tol, steps)
        if bounds is None:
            return None
        found, slip = bounds
        if found.kind != "estimate":
            return found
        if slip >= _BLUR and tol > _LANCZOS_LEAST_TOL:
            # Where ||H^-1 X P^-1/2|| is large, it is the solves that blur the picture.
            tol = max(_LANCZOS_LEAST_TOL, tol * min(0.1, 0.1 * _BLUR / slip))
        elif steps < most and found.a > _USEFUL:
            # The eigenvalues are fine, but what Lanczos may have missed is not.
            steps = min(4 * steps, most)
        else:
            return found


def _ritz_bounds(
    P: Preconditioner, A: UnfoldedMap, ridge: float, seed: int, tol: float, steps: int
) -> tuple[Spectrum, float] | None:
    """Bounds from Ritz values, and how far inexact products may have moved those."""
    n, rank = int(A.H.backend.total(A.H.n)), P.factor.rank
    runs = _two_runs(P, A, ridge, seed, tol, steps)
    if runs is None:
        return None
    masked, whole = (Missed.of(run, rank, n) for run in runs)
    low, top, largest = (float(v) for v in (masked.ritz[0], masked.ritz[-1], whole.ritz[-1]))
    estimate = Spectrum(max(low, 1e-6 * top), top, math.sqrt(max(largest, 0.0)), "estimate")
    if masked.share >= 1 or whole.share >= 1:
        return estimate, 0.0
    # Residuals of the first solve reach the product through the root of the run's own largest
    # eigenvalue, those of the second through that of the run without the mask.
    forward, adjoint, rounded = whole.off
    norm = whole.largest_root(forward + adjoint, rounded)
    forward, adjoint, rounded = masked.off
    root = masked.largest_root(forward, norm * adjoint + rounded)
    slip = masked.gain * (masked.left + root * forward + norm * adjoint + rounded)
    b = root**2
    a = b - (b - (low - slip)) / (1 - masked.share)
    if not a >= _USEFUL:
        return estimate, slip
    return Spectrum(a, b, norm, "spectral-probabilistic", 1.0 / n), slip


@dataclass(frozen=True)
class Missed:
    """What a run of Lanczos may have missed of the largest and the least eigenvalue of S, S >= 0.

    Its products are Y = S V + E.  The true eigenvalue lies at most `share` of the spectrum, and
    `gain` (`left` + ||E||) besides, beyond the outermost Ritz value:

    * V is a basis of the whole space: the Ritz values are the eigenvalues, up to E.
    * The run went on to its last step: `share` is Kuczynski and Wozniakowski's, failing with
      probability at most 1/(4n).  Inexact products move the Ritz values, and the space they are
      from.
    * It ended before: with T the section V^T Y made symmetric, and (mu, u) an eigenpair of S,
      u^T V (mu - T) = u^T (S V - V T): some Ritz value is within ||S V - V T|| / |u^T v_1| of mu.
      A random start has |u^T v_1| < t with probability at most t sqrt(2 rank / pi): t makes that
      1/(12n).  That S V - V T is small is measured, whatever made the run end.
    """

    ritz: Any
    share: float
    gain: float
    left: float
    off: tuple[float, float, float]

    @classmethod
    def of(cls, run: Run, rank: int, n: int) -> Missed:
        steps = run.ritz.shape[0]
        if steps == rank:
            return cls(run.ritz, 0.0, 3.0, 0.0, run.off)
        if run.ended:
            return cls(run.ritz, 0.0, 12 * n * math.sqrt(2 * rank / math.pi), run.left, run.off)
        share = (math.log(1.648 * math.sqrt(rank) * 4 * n) / (2 * steps - 1)) ** 2
        return cls(run.ritz, share, 3.0, 0.0, run.off)

    def largest_root(self, slope: float, rest: float) -> float:
        """A bound of the root x of the largest eigenvalue, where ||E|| <= slope x + rest."""
        top = max(float(self.ritz[-1]), 0.0) / (1 - self.share) + self.gain * (self.left + rest)
        half = self.gain * slope / 2
        return half + math.sqrt(half**2 + top)


def ritz_interval(
    P: Preconditioner, A: UnfoldedMap, ridge: float, seed: int
) -> tuple[float, float]:
    """An estimate, not a bound, of the spectrum of the preconditioned Hessian."""
    if P.factor.rank == 0:
        return 1.0, 1.0
    runs = _two_runs(P, A, ridge, seed, _LANCZOS_TOL, LANCZOS_STEPS)
    if runs is None:
        return 1.0, 1.0
    values = runs[0].ritz
    top = max(float(values[-1]), 1e-300)
    return max(float(values[0]), 1e-6 * top), top


def _two_runs(
    P: Preconditioner, A: UnfoldedMap, ridge: float, seed: int, tol: float, most: int
) -> list[Run] | None:
    """Lanczos with the training rows and with all rows; None where a product overflowed."""
    H, X, xp = A.H, A.X, A.H.backend.xp
    start = np.random.default_rng(seed).standard_normal((P.w_start.shape[0], 2))
    mask = xp.zeros((H.n, 1), dtype=bool)
    mask[A.train] = True
    transposed = P.factor.amplified(X.transpose_rounding())

    def multiply(v: Array, at: Sequence[int]) -> tuple[Array, Any]:
        W = P.factor.to_weights(v)
        Z, there = block_cg(H, X.times(W), tol)
        rounded = A.forward_rounding(W, Z)
        if at[0] == 0:  # the run that sees the training rows alone
            if A.loss.plain:
                Z[:, 0:1] *= mask
            else:
                seen = A.rows(Z[:, 0:1])
                seen = seen - A.loss.mean(xp, seen) if A.loss.intercept else seen
                Z = Z.astype("float64")  # what it rounded away, no residual would tell
                Z[:, 0] = 0
                Z[A.train, 0:1] = H.backend.own(A.loss.weigh(seen))
        V, back = block_cg(H, Z, tol)
        off = (
            there.residuals + rounded,
            back.residuals + A.adjoint_rounding(V),
            np.full(len(at), transposed * A.size(V)),
        )
        return P.factor.to_gradient(X.transpose_times(V) + ridge * W), np.stack(off)

    return lanczos(H.backend, multiply, start, min(most, P.factor.rank), P.factor.project)


@dataclass(frozen=True)
class Run:
    """A run of Lanczos: one orthonormal basis V, and Y, what the products with it came to."""

    ritz: Any  # eigenvalues of V^T Y, made symmetric, rising: as many as the run had steps
    ended: bool  # before its last step, as nothing was left outside V
    left: float  # ||Y - V V^T Y||, with V^T Y made symmetric
    off: tuple[float, float, float]  # by how much Y is off: what the products told, as root of sums


def lanczos(
    backend: Backend,
    multiply: Callable[[Array, Sequence[int]], tuple[Array, Any]],
    start: Any,
    steps: int,
    project: Callable[[Array], Array],
) -> list[Run] | None:
    """A run of Lanczos from each column of `start`, orthogonalised in full; they share products.

    A run ends when its own space is invariant; the others go on.  None where a product overflowed.

    Parameters
    ----------
    multiply : function
        (v, runs) -> the products of the columns of v, each with the matrix of its run, and
        (3, columns) bounds of what they are off by.
    project : function
        What rounding leaves outside a subspace of the columns is taken away by it.
    """
    xp, (dim, count) = backend.xp, start.shape
    v, at = backend.asarray(start), list(range(count))
    bases, images = (xp.zeros((count, steps, dim)) for _ in range(2))
    made, off = [steps] * count, np.zeros((3, count))
    for j in range(steps):
        before = xp.linalg.norm(v, axis=0)
        _orthogonalise(v, [bases[i] for i in at], j)
        v = project(v)  # what rounding leaves outside the subspace would grow
        _orthogonalise(v, [bases[i] for i in at], j)  # twice is enough
        after = xp.linalg.norm(v, axis=0)
        ended = backend.to_numpy(after <= _ENDED * before)  # synchronize!
        if ended.any():
            going = np.flatnonzero(~ended).tolist()
            for done in np.flatnonzero(ended).tolist():
                made[at[done]] = j
            if not going:
                break
            kept = backend.asarray(np.array(going))
            at, v, after = [at[i] for i in going], v[:, kept], after[kept]
        v = v / after
        for place, i in enumerate(at):  # a GPU's arrays take no list as an index
            bases[i, j] = v[:, place]
        v, errors = multiply(v, at)
        for place, i in enumerate(at):
            images[i, j] = v[:, place]
        off[:, at] += errors**2
    runs = []
    for i, k in enumerate(made):
        V, Y = (backend.to_numpy(a[i, :k]) for a in (bases, images))  # synchronize!
        T = V @ Y.T
        T = (T + T.T) / 2
        if not np.isfinite(T).all():
            return None
        rounded = (k + dim + 8) * _EPS * (np.linalg.norm(Y) + np.linalg.norm(T))
        left = float(np.linalg.norm(Y - T @ V) + rounded)
        forward, adjoint, rest = (float(x) for x in np.sqrt(off[:, i]))
        runs.append(Run(np.linalg.eigvalsh(T), k < steps, left, (forward, adjoint, rest)))
    return runs


def _orthogonalise(v: Array, bases: list[Array], j: int) -> None:
    for i, basis in enumerate(bases):
        v[:, i] -= basis[:j].T @ (basis[:j] @ v[:, i])
