"""Certificates: how a fit proves how far it is from the optimum.

G bounds objective - optimum from above, and the certificate is G / (objective - G).  Solves are
never assumed exact: H >= I, so a solution with true residual r is off by at most ||r||, and

    ||P^-1/2 (g_computed - g)|| <= sqrt(b) ||r1|| + ||H^-1 X P^-1/2|| ||r2||

with r1, r2 the measured residuals of the forward and the adjoint solve, and [a, b] an interval
that holds the eigenvalues of P^-1/2 T P^-1/2 (T: the Hessian).

* ridge > 0: strong convexity gives G = ||g||^2 / (2 ridge), the duality gap at the natural point;
  or, of g without what r1 does to it, that and steepest/2 ||r1||^2.
* MSE: G = ||P^-1/2 g||^2 / (2 a), with a > 0 proven from the error of the polynomial behind Q,
  computed from R = X C0 - H Q (deterministic), or from Lanczos with a random start, which fails
  with a stated probability.
* otherwise there is no relative bound, and none is printed.

Rounding counts like a residual: each point brings bounds of what it may have done.
The spectral kinds hold over the features that P kept.  Where those are not all, the certificate
says so, and the fit is not "certified" but "certified-reduced".

The strategy "direct" trains on the stored rows of Q, and proves it from Q alone.  With D = A - Q,
A = M H^-1 X and Q the stored rows (both in coordinates u, W = C0 u), and with bounds of the norms
of D's columns, the true gradient at u is known up to

    ||C^T g|| <= ||C^T g_Q|| + rho ||E_Q|| + (1 + rho) ||D u||,      rho >= ||D C||,

for C C^T = P^-1 and g_Q, E_Q the gradient and the residual of the stored problem: no solve and no
array on all nodes is needed any more.  MSE has a Hessian of at least (1 - rho)^2 in these
coordinates, so its gap is at most ||C^T g||^2 / (2 (1 - rho)^2).  With a ridge any loss is strongly
convex in W, and the same difference seen from W gives

    ||g|| <= ||g_Q|| + ||D|| ||E_Q|| + beta ||X|| ||D u||,           gap <= ||g||^2 / (2 ridge),

beta the largest curvature of the loss; or, as E_Q is a gradient of the true loss as well, at
outputs that are off by D u, and the loss is convex and no steeper than beta,

    gap <= (||g_Q|| + ||D|| ||E_Q||)^2 / (2 ridge) + beta/2 ||D u||^2.

Rounding is counted where it happens, that of W = C0 u included.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from typing import Any

import numpy as np

from herta_gpu.backends.base import Array, Backend, norm, unit_roundoff
from herta_gpu.coordinates import Units, Whitened
from herta_gpu.diffusion import residual_norms
from herta_gpu.factors import DenseGram, RowSpace
from herta_gpu.laplacian import block_cg
from herta_gpu.losses import Loss
from herta_gpu.optimizers import minimise
from herta_gpu.preconditioner import Preconditioner
from herta_gpu.problem import DenseProblem, Point, UnfoldedMap

Tell = Callable[[dict[str, Any]], None]

LANCZOS_STEPS = 20
_MOST_STEPS = 80  # steps of Lanczos where fewer leave too little of a
_LANCZOS_TOL = 1e-4
_LANCZOS_LEAST_TOL = 1e-12
_ENDED = 1e-12  # share of a product outside the space of a run that is rounding
_UNIT = unit_roundoff()
_BLUR = 0.05  # movement of the Ritz values that makes tighter solves worth it
_USEFUL = 0.02  # a below this makes the certificate too pessimistic to be worth having
_PROVEN = 0.1  # below this it is worth measuring what rounding really did
_SLACK = 0.1  # departure of P from Q^T Q + ridge beyond which nothing is built on that form
_LEAST_SIZE = 1e-25  # norm of a column below which float32 loses digits to underflow
_ENOUGH = 0.1  # rho below this is not worth a better bound
_ROWS = 1 << 13  # rows of Q in float64 at a time
_CHUNK_BYTES = 32 << 20  # outputs at a time
_LOSS_ERROR = 300.0  # times tol: the bound of what is not known of the objective
_LEAST_SHARE = 1e-12
_EXACT = 1e-4  # times tol: what a gradient may leave of the gap before it is worth another step
_REFINEMENTS = 3  # of least squares: each repairs what rounding did to the factor


@dataclass(frozen=True)
class Certificate:
    """A bound on the relative suboptimality of a fit.

    Attributes
    ----------
    value : float
        (objective - optimum) / optimum is at most this; inf when nothing is proven.
    kind : str
        "duality", "spectral-proven", "spectral-deterministic", "spectral-probabilistic",
        "nonnegative" (the objective itself bounds the gap) or "none".
    probability : float
        That the bound fails, over the random start of Lanczos; 0 for the other kinds.
    gap : float
        The bound of objective - optimum itself.
    note : str
        What else there is to know, or why there is no certificate.
    kept, features : int
        The bound is against the optimum over so many features, of so many that were given; or over
        so many directions of W, if the note says that fewer training rows see no more.
    """

    value: float
    kind: str
    probability: float = 0.0
    gap: float = math.inf
    note: str = ""
    kept: int = 0
    features: int = 0

    @property
    def optimum(self) -> float:
        """The optimum is at least this: `value` is `gap` relative to it."""
        return self.gap / self.value if 0 < self.value < math.inf else 0.0

    @property
    def reduced(self) -> bool:
        """Whether some features had to be left out of what is proven."""
        return self.kept < self.features

    @property
    def over(self) -> str:
        """ " over 1,431 of 1,433 features" where some had to be left out, or nothing."""
        return f" over {self.kept:,} of {self.features:,} features" if self.reduced else ""

    def __str__(self) -> str:
        if self.kind == "none":
            return f"no certificate ({self.note})"
        if self.kind == "nonnegative":
            note = f"; {self.note}" if self.note else ""
            return f"gap <= {self.gap:.2e}, the objective itself: no objective is below 0{note}"
        if self.value == math.inf:
            return (
                f"gap <= {self.gap:.2e}{self.over}, of an optimum too close to 0 for a relative gap"
            )
        chance = f", fails with probability <= {self.probability:.1e}" if self.probability else ""
        note = f"; {self.note}" if self.note else ""
        return f"relative gap <= {self.value:.2e}{self.over} ({self.kind}{chance}{note})"


@dataclass(frozen=True)
class Terms:
    """What a bound of the gap is made of; `share` scales what the solves for Q left, D."""

    kind: str
    gradient: float  # at the outputs at hand, errors included that are not due to theirs
    E: float = 0.0  # ||E_Q||
    through: float = 0.0  # how an error of the outputs reaches the gradient
    D: float = 0.0  # ||D|| as the gradient sees it
    Du: float = 0.0  # ||D u||
    other: float = 0.0  # further errors of the outputs
    convexity: float = 0.0  # strong convexity at D = 0, as a root
    bend: float = math.inf  # the largest curvature of the loss, where it need not be quadratic
    slip: float = 0.0  # what E is off by, beside being that of outputs which are off
    extra: Callable[[float], float] | None = None  # more gap, from an error of the outputs
    probability: float = 0.0  # that the bound fails

    def gap(self, share: float = 1.0) -> float:
        D, error = share * self.D, share * self.Du + self.other
        extra = 0.0 if self.extra is None else self.extra(error)
        size = self.gradient + D * self.E + (self.through + D) * error
        root = self.convexity - D if self.kind == "residual" else self.convexity
        if root <= 0:
            return math.inf
        gap = size**2 / (2 * root**2)
        if self.bend < math.inf:
            # E is a gradient of the loss itself, at outputs that are off: a difference that the
            # gradient sees through X, or that costs no more than the loss bends.  Rounding of E
            # itself is seen through X.
            size = self.gradient + D * self.E + (self.through / self.bend + D) * self.slip
            gap = min(gap, size**2 / (2 * root**2) + 0.5 * self.bend * error**2)
        return math.inf if math.isnan(gap) else gap + extra


def best_certificate(
    choices: Sequence[Terms],
    below: Callable[[Terms], float],
    known: tuple[int, int, str],
    share: float = 1.0,
) -> Certificate:
    """The best of several bounds; `below` bounds the objective, `known`: (kept, features, note)."""
    kept, features, note = known
    if not choices:
        return Certificate(math.inf, "none", note=note, kept=features, features=features)
    gap, best = min(((terms.gap(share), terms) for terms in choices), key=lambda c: c[0])
    value = relative(gap, below(best) - gap)
    if best.kind == "duality":  # over all features
        kept, note = features, ""
    return Certificate(value, best.kind, best.probability, gap, note, kept, features)


def gradient_error(point: Point, spectrum: Spectrum) -> float:
    """How far the solves can have moved the preconditioned gradient; rounding apart."""
    return math.sqrt(spectrum.b) * point.forward_residual + spectrum.norm * point.adjoint_residual


def certify(
    point: Point,
    spectrum: Spectrum | None,
    P: Preconditioner,
    ridge: float,
    X_norm: float,
    steepest: float,
    why_not: str,
) -> Certificate:
    """The best certificate that is valid at `point`; no curvature of the loss exceeds `steepest`.

    With the outputs off by r1, E is off by no more than steepest ||r1||.
    """
    choices = []
    outputs = point.forward_residual + point.forward_rounding
    adjoint = point.adjoint_residual + point.adjoint_rounding
    off: dict[str, Any] = {"other": outputs, "extra": lambda _: point.intercept_gap}
    if ridge > 0:
        size = norm(point.gradient) + norm(point.gradient_rounding) + X_norm * adjoint
        choices.append(
            Terms("duality", size, through=X_norm * steepest, convexity=math.sqrt(ridge),
                  bend=steepest, **off)
        )  # fmt: skip
    if spectrum is not None and spectrum.kind != "estimate":
        size = norm(point.g) + spectrum.norm * adjoint + P.factor.amplified(point.gradient_rounding)
        roots: dict[str, Any] = {
            "through": math.sqrt(spectrum.b),
            "convexity": math.sqrt(spectrum.a),
        }
        choices.append(Terms(spectrum.kind, size, probability=spectrum.probability, **roots, **off))
    below = point.objective - point.objective_error
    note = P.note if choices else why_not
    return best_certificate(choices, lambda _: below, (P.kept, P.features, note))


def relative(gap: float, optimum: float) -> float:
    """A gap relative to a lower bound of the optimum; inf where that says nothing."""
    if gap == 0:
        return 0.0  # even of an optimum of exactly 0
    return gap / optimum if optimum > 0 else math.inf


def judge(found: Certificate, tol: float, otherwise: str = "max_iter") -> str:
    """The status of weights with this certificate; `otherwise` where it proves too little."""
    if not found.value <= tol:
        return otherwise
    return "certified-reduced" if found.reduced else "certified"


def joined(parts: Sequence[Certificate]) -> Certificate:
    """The certificate of a problem that falls apart into independent ones, from theirs.

    Gaps add up, and so do the optima.  All parts lean on one spectrum: it fails once or never.
    """
    if any(part.kind == "none" for part in parts):
        return next(part for part in parts if part.kind == "none")
    worst = max(parts, key=lambda part: (part.features - part.kept, part.gap))
    gap, optimum = sum(part.gap for part in parts), sum(part.optimum for part in parts)
    chance = max(part.probability for part in parts)
    return replace(worst, value=relative(gap, optimum), probability=chance, gap=gap)


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
    found, fine = None, P.factor.rank > 0 and P.inner.slack < _SLACK
    if fine and P.basis is not None and P.Q_all is not None and P.Q_all.dtype != np.float64:
        # No column may be so small or large that float32 lost digits of it.
        size = P.basis.sizes
        in_range = (size == 0) | ((size > _LEAST_SIZE) & (size < 1 / _LEAST_SIZE))
        fine = bool(in_range.all())  # synchronize!
    if fine and P.Q_all is not None and isinstance(P.basis, (Units, Whitened)):
        found = proven_spectrum(P, A, _outside(P, A))
        if found is None and kind == "spectral-deterministic":
            found = measured_spectrum(P, residual_norms(A.H, P.basis, P.Q_all, A.width))
    elif fine and P.column_error is not None:
        found = measured_spectrum(P, P.column_error)
    if found is None and kind.startswith("spectral"):
        found = probabilistic_spectrum(P, A, ridge, seed)
    return found


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
    return _around_one(P, rho, outside, "spectral-proven", least=_PROVEN)


def measured_spectrum(P: Preconditioner, left: Array) -> Spectrum | None:
    """From the columns of R = X C0 - H Q: ||(H^-1 X C0 - Q) v|| <= ||R v||."""
    assert P.basis is not None
    # ||H^-1 X C0 C|| <= ||X C0|| ||C||, whichever rows are outside training.
    outside = max(0.0, (P.basis.norm * P.inner.size) ** 2 - 1)
    rho = P.inner.amplified(left)
    return _around_one(P, rho, outside, "spectral-deterministic", least=_USEFUL)


def _singular_values(P: Preconditioner) -> tuple[float, float]:
    """Bounds of the singular values of the rows behind P (and of the ridge's) times P^-1/2."""
    return math.sqrt(1 - P.inner.slack), math.sqrt(1 + P.inner.slack)


def _around_one(
    P: Preconditioner, rho: float, outside: float, kind: str, least: float
) -> Spectrum | None:
    """[(1 - rho)^2, (1 + rho)^2], widened by how far P may be from Q^T Q + ridge."""
    low, high = _singular_values(P)
    low, high = low - rho, high + rho
    if not low > 0 or low**2 < least:
        return None
    # P = Q^T Q over the training rows (+ ridge), so ||Q P^-1/2||^2 <= 1 + the rows outside.
    norm = math.sqrt(1 + P.inner.slack + outside) + rho
    return Spectrum(low**2, high**2, norm, kind)


def _outside(P: Preconditioner, A: UnfoldedMap) -> float:
    """A bound of ||Q P^-1/2||^2 over what P does not have of the rows of Q.

    That are the rows outside training; of those in it what their weights w leave, 1 - w, and the
    mean row as often as it was taken away.
    """
    assert P.Q_all is not None
    backend, xp, loss, Q = A.H.backend, A.H.backend.xp, A.loss, P.Q_all
    left = xp.ones(A.H.n)
    left[A.train] = 0.0 if loss.weights is None else backend.own(1 - loss.weights)
    at = xp.flatnonzero(left)
    if loss.plain and int(backend.total(at.shape[0])) == 0:
        return 0.0
    G = xp.zeros((Q.shape[1], Q.shape[1]))
    for a in range(0, at.shape[0], _ROWS):
        rows = at[a : a + _ROWS]
        backend.add_gram(G, Q[rows].astype("float64") * xp.sqrt(left[rows])[:, None])
    G = backend.total(G)
    if loss.intercept:
        trained = A.rows(Q)
        mean = loss.mean(xp, trained)
        G = G + loss.total(trained.shape[0]) * mean[:, None] * mean[None, :]
    # P^-1/2 G P^-1/2
    G = P.inner.to_gradient(P.inner.to_gradient(G).T)
    return _norm_bound(G, backend, (_ENOUGH / max(P.Q_error, 1e-16)) ** 2 if loss.plain else 0.0)


def _norm_bound(S: Array, backend: Backend, enough: float = 0.0) -> float:
    """An upper bound of the largest eigenvalue of S >= 0: at most `enough`, or within d^(1/16)."""
    bound, scale = math.inf, 1.0
    for doubling in range(4):
        size = norm(S)
        if size == 0:
            return 0.0
        scale *= size ** (0.5**doubling)
        bound = scale * (1 + 1e-6)
        if bound <= enough or doubling == 3:
            break
        S = S / size
        S = backend.matmul(S, S)
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
        runs = _two_runs(P, A, ridge, seed, tol, steps)
        if runs is None:
            return None
        found, slip = _ritz_bounds(runs, P.factor.rank, int(A.H.backend.total(A.H.n)))
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


def _ritz_bounds(runs: list[Run], rank: int, n: int) -> tuple[Spectrum, float]:
    """Bounds from Ritz values, and how far inexact products may have moved those."""
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
    runs = _two_runs(P, A, ridge, seed, _LANCZOS_TOL, LANCZOS_STEPS) if P.factor.rank else None
    if runs is None:
        return 1.0, 1.0
    top = max(float(runs[0].ritz[-1]), 1e-300)
    return max(float(runs[0].ritz[0]), 1e-6 * top), top


def _two_runs(
    P: Preconditioner, A: UnfoldedMap, ridge: float, seed: int, tol: float, most: int
) -> list[Run] | None:
    """Lanczos with the training rows and with all rows; None where a product overflowed."""
    H, X, xp = A.H, A.X, A.H.backend.xp
    start = np.random.default_rng(seed).standard_normal((P.w_start.shape[0], 2))
    mask = xp.zeros((H.n, 1), dtype=bool)
    mask[A.train] = True
    transposed = P.factor.amplified(X.transpose_rounding())

    def multiply(v: Array) -> tuple[Array, Any]:
        W = P.factor.to_weights(v)
        Z, there = block_cg(H, X.times(W), tol)
        rounded = A.forward_rounding(W, Z)
        if A.loss.plain:
            Z[:, 0:1] *= mask
        else:
            seen = A.rows(Z[:, 0:1])
            seen = seen - A.loss.mean(xp, seen) if A.loss.intercept else seen
            Z = Z.astype("float64")  # what it rounded away, no residual would tell
            Z[:, 0] = 0
            Z[A.train, 0:1] = H.backend.own(A.loss.weigh(seen))
        V, back = block_cg(H, Z, tol)
        adjoint = back.residuals + A.adjoint_rounding(V)
        off = np.stack([there.residuals + rounded, adjoint, np.full(2, transposed * A.size(V))])
        return P.factor.to_gradient(X.transpose_times(V) + ridge * W), off

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
    multiply: Callable[[Array], tuple[Array, Any]],
    start: Any,
    steps: int,
    project: Callable[[Array], Array],
) -> list[Run] | None:
    """A run of Lanczos from each column of `start`, orthogonalised in full; they share products.

    A run ends when its own space is invariant; the others go on.  None where a product overflowed.

    Parameters
    ----------
    multiply : function
        v -> the products of its columns, each with the matrix of its run, and (3, columns) bounds
        of what they are off by.  Columns of runs that ended are 0.
    project : function
        What rounding leaves outside a subspace of the columns is taken away by it.
    """
    xp, (dim, count), v = backend.xp, start.shape, backend.asarray(start)
    bases, images = (xp.zeros((count, steps, dim)) for _ in range(2))
    made, off = np.full(count, steps), np.zeros((3, count))
    for j in range(steps):
        before = xp.linalg.norm(v, axis=0)
        _orthogonalise(v, bases, j)
        v = project(v)  # what rounding leaves outside the subspace would grow
        _orthogonalise(v, bases, j)  # twice is enough
        after = xp.linalg.norm(v, axis=0)
        ended = after <= _ENDED * before
        going = ~backend.to_numpy(ended)  # synchronize!
        made[~going] = np.minimum(made[~going], j)
        if not going.any():
            break
        v = xp.where(ended, 0.0, v / xp.where(ended, 1.0, after))
        bases[:, j] = v.T
        v, errors = multiply(v)
        images[:, j] = v.T
        off[:, going] += errors[:, going] ** 2
    runs = []
    for i, k in enumerate(made.tolist()):
        V, Y = (backend.to_numpy(a[i, :k]) for a in (bases, images))  # synchronize!
        T = V @ Y.T
        T = (T + T.T) / 2
        if not np.isfinite(T).all():
            return None
        rounded = (k + dim + 8) * 2 * _UNIT * (np.linalg.norm(Y) + np.linalg.norm(T))
        left = float(np.linalg.norm(Y - T @ V) + rounded)
        forward, adjoint, rest = (float(x) for x in np.sqrt(off[:, i]))
        runs.append(Run(np.linalg.eigvalsh(T), k < steps, left, (forward, adjoint, rest)))
    return runs


def _orthogonalise(v: Array, bases: Array, j: int) -> None:
    for i in range(v.shape[1]):
        v[:, i] -= bases[i, :j].T @ (bases[i, :j] @ v[:, i])


@dataclass(frozen=True)
class Proof:
    """What is known at one u."""

    objective: float
    rounding: float  # of the objective, at exact outputs
    slope: float  # ||E_Q||: how fast the objective changes with the outputs
    grad_norm: float
    choices: tuple[Terms, ...]
    Du: float  # ||D u|| ...
    other: float  # ... and errors of the outputs that are rounding
    note: str
    kept: int
    features: int
    unit: float = 0.0  # the loss of W = 0, where the optimum may be 0: a ridge forbids that

    def certificate(self, share: float = 1.0) -> Certificate:
        def below(best: Terms) -> float:
            return self.objective - self._error(share * best.Du + best.other)

        known = (self.kept, self.features, self.note)
        return best_certificate(self.choices, below, known, share)

    def nonnegative(self) -> Certificate:
        """What the objective itself says: none is below 0."""
        gap, d = self.objective + self.error(), self.features
        return Certificate(math.inf, "nonnegative", 0.0, gap, self.note, d, d)

    def error(self, share: float = 1.0) -> float:
        """The objective is right up to this much."""
        Du = min([share * self.Du, *(share * terms.Du for terms in self.choices)])
        return self._error(Du + self.other)

    def _error(self, outputs: float) -> float:
        """What the objective may be off by where outputs are."""
        return self.rounding + outputs * (self.slope + 0.5 * outputs)

    def about_zero(self, tol: float, share: float = 1.0) -> bool:
        """Whether the optimum is about 0, which has no relative gap, and that is known."""
        near = self.near_zero(tol**2 if self.choices else tol)
        return near and self.objective + self.error(share) <= tol * self.unit

    def near_zero(self, share: float) -> bool:
        """Whether the objective is a small share of that of W = 0, without a ridge."""
        return self.objective <= share * self.unit

    def enough(self, tol: float, share: float = 1.0) -> bool:
        """Whether the gap is proven, and the objective known about as well as the gap.

        What D really does to the objective is orders of magnitude below its bound.
        """
        known = self.error(share) <= _LOSS_ERROR * tol * self.objective
        return (known and self.certificate(share).value <= tol) or self.about_zero(tol, share)

    def wanted(self, tol: float) -> float:
        """The share of what the solves left that would be small enough; 0: none would be."""
        low, high = 0.0, 1.0
        if not self.enough(tol, 0.0):
            return 0.0
        while not (low and high < 1.2 * low) and high > _LEAST_SHARE:
            middle = 0.5 * (low + high) if low else 0.1 * high
            low, high = (middle, high) if self.enough(tol, middle) else (low, middle)
        return low


@dataclass
class Sweep:
    """One look at all stored rows."""

    loss: float
    gradient: Array  # r x c, of the objective with respect to u
    E: float  # norm of the gradient of the loss with respect to the outputs
    F: float  # norm of the outputs ...
    Y: float  # ... and of what they should be
    rounding: float  # of the loss
    b: Array | None = None  # (c,) the constants of an intercept, in the coordinates of `Q` ...
    sums: Array | None = None  # ... and 1^T E, which they should make 0


class StoredProblem:
    """min over u of loss(Q u) + ridge/2 ||C0 u||^2 on the stored rows."""

    def __init__(
        self, backend: Backend, loss: Loss, P: Preconditioner, Y: Array, ridge: float, X_norm: float
    ) -> None:
        assert P.rows is not None
        assert P.basis is not None
        self.backend, self.loss, self.P, self.Y, self.ridge = backend, loss, P, Y, ridge
        self.Q = P.rows if loss.quadratic else P.rows.astype("float64", copy=False)
        self.basis, self.X_norm = P.basis, X_norm
        self.mean = loss.mean(backend.xp, self.Q) if loss.intercept else None
        if self.mean is not None:
            self.Q = self.Q - self.mean  # nothing but constants: the loss has its own
        self._swept: tuple[Array, Sweep] | None = None  # the last look, at this very u
        self.settled = True  # whether the optimum of the stored problem was found
        self.host: Backend | None = None  # where cross entropy is trained, if not on the device
        self.sizes = backend.xp.sqrt(backend.column_dots(self.Q, self.Q))

    def sweep(self, u: Array) -> Sweep:
        """Loss and gradient at u, over runs of rows: no other array of n_train x c is made."""
        if self._swept is not None and self._swept[0] is u:
            return self._swept[1]
        xp, matmul, G = self.backend.xp, self.backend.matmul, self.basis.ridge
        penalty = G[:, None] * u if G.ndim == 1 else matmul(G, u)
        found = Sweep(0.0, self.ridge * penalty, 0.0, 0.0, 0.0, 0.0)
        # Rows in float32 are widened on the way.
        numbers = u.shape[1] + (u.shape[0] if self.Q.dtype != u.dtype else 0)
        step, total = max(1, _CHUNK_BYTES // (8 * numbers)), 0.0
        if self.loss.intercept:
            found.b, found.sums = self._constants(u), xp.zeros(u.shape[1])
        for i in range(0, self.Y.shape[0], step):
            Q, Y = self.Q[i : i + step].astype("float64", copy=False), self.Y[i : i + step]
            loss = self.loss.of_rows(slice(i, i + step))
            F = matmul(Q, u)
            F = F if found.b is None else F + found.b
            E = loss.residual(xp, F, Y)
            total = total + matmul(Q.T, E)
            found.loss += loss.value(xp, F, Y)
            found.rounding += loss.rounding(F)
            if found.sums is not None:
                found.sums += E.sum(axis=0)
            found.E = math.hypot(found.E, norm(E))
            found.F = math.hypot(found.F, norm(F))
            found.Y = math.hypot(found.Y, norm(Y))
        found.gradient = self.loss.centre(xp, total) + found.gradient
        self._swept = (u, found)
        return found

    def _constants(self, u: Array) -> Array:
        """The best constants of an intercept at u."""
        xp = self.backend.xp
        if not self.loss.quadratic:
            return self.loss.shift(xp, self.backend.matmul(self.Q, u), self.Y[:])
        # Rows of Q are centred but for rounding.
        return self._Y_mean - self.loss.mean(xp, self.Q) @ u

    @cached_property
    def _Y_mean(self) -> Array:
        """Weighted, over runs of rows: not all of Y need be there at once."""
        total, step = 0.0, 1 << 16
        for i in range(0, self.Y.shape[0], step):
            rows = slice(i, i + step)
            total = total + self.loss.of_rows(rows).weigh(self.Y[rows]).sum(axis=0)
        return total / self.loss.total(self.Y.shape[0])

    def intercept(self, u: Array) -> Array | None:
        """(c,) the constants that belong to W = C0 u; None where there are none."""
        b = self.sweep(u).b
        return None if b is None or self.mean is None else b - self.mean @ u

    def objective(self, u: Array) -> float:
        xp, W = self.backend.xp, self.basis.weights(u)
        return self.sweep(u).loss + 0.5 * self.ridge * float(xp.sum(W * W))  # synchronize!

    def minimised(self, tol: float, start: Array | None, steps: int, tell: Tell) -> Array:
        """u at the optimum of the stored problem, or ten times closer to it than `tol`."""
        if self.loss.quadratic:
            return self.least_squares(tol)
        # It holds several arrays of n_train x c, which may be too much for a GPU, not for the host.
        backend = self.host or self.backend
        memory = int(self.backend.agreed(backend.memory_available()))

        def there(x: Array) -> Array:
            return x if self.host is None else self.backend.to_numpy(x)  # synchronize!

        gram = there(self.P.gram.QtQ) if isinstance(self.P.gram, DenseGram) else None
        rows = (there(self.Q), there(self.Y[:]), self.ridge)
        problem = DenseProblem(backend, self.loss, *rows, self.basis.on(backend, there), gram)
        begin = None if start is None else there(start)
        fitted = minimise(problem, 0.1 * tol, steps, begin, memory, tell)
        self.settled = fitted.status != "max_iter"
        return self.backend.asarray(fitted.u)

    def least_squares(self, tol: float) -> Array:
        """u = P^-1 Q^T Y, refined by gradients of the stored problem where that matters."""
        inner = self.P.inner
        u, last = inner.to_weights(self.P.w_start), math.inf
        for _ in range(_REFINEMENTS):
            found = self.sweep(u)
            w = inner.to_gradient(found.gradient)
            size = norm(w)
            if size**2 <= _EXACT * tol * found.loss or not size < 0.5 * last:
                break
            u, last = u - inner.to_weights(w), size
        return u

    def proof(self, u: Array, why_not: Callable[[float], str], at_zero: float = 0.0) -> Proof:
        """Everything that is known of the true problem at W = C0 u; the loss of W = 0 is given."""
        xp, P, inner, basis = self.backend.xp, self.P, self.P.inner, self.basis
        found = self.sweep(u)
        g, slope = found.gradient, found.E
        by_row = xp.sqrt((u * u).sum(axis=1))
        objective = self.objective(u)
        # Rounding: of Q u and of E, of Q^T E and the ridge's part, and of W itself.
        r, count = u.shape[0], self.Y.shape[0]
        size_of_terms = float((self.sizes * by_row).sum())  # synchronize!
        outputs = (r + 2) * _UNIT * size_of_terms + basis.weights_rounding(u)
        outputs += 4 * _UNIT * (found.F + found.Y) / self.loss.steepest
        rows = (count + 4) * _UNIT * slope * self.sizes
        rows = rows + (r + 2) * _UNIT * xp.sqrt((g * g).sum(axis=1))  # of C^T g
        extra: Callable[[float], float] | None = None
        if found.b is not None:
            assert found.sums is not None
            assert self.mean is not None
            # ||1^T E|| over the root of all weights, rounding included.
            rounded = (count + 4) * _UNIT * math.sqrt(count) * (found.E + 4 * _UNIT * found.F)
            imbalance = (norm(found.sums) + rounded) / math.sqrt(self.loss.total(count))
            # Rounding of the constants, and of the rows less their mean.
            terms = float((abs(self.mean) * by_row).sum()) + norm(found.b)  # synchronize!
            outputs += (r + 4) * _UNIT * math.sqrt(count) * terms + _UNIT * size_of_terms
            slope += imbalance
            rows = rows + count * _UNIT * imbalance * self.sizes  # centred up to rounding only
            known = (objective + outputs * (slope + outputs), self.ridge, self.X_norm)
            Y = self.Y[:0] if self.loss.quadratic else self.Y[:]
            distance = self.loss.intercept_distance(xp, Y, found.b, *known)
            extra = partial(self.loss.intercept_gap, imbalance, distance=distance)
        if self.ridge > 0:
            # C0^T C0, its product with u and W itself are sums of r terms, if C0 is not diagonal.
            terms = 8 if basis.ridge.ndim == 1 else 3 * r + 8
            rows = rows + terms * _UNIT * self.ridge * basis.ridge_size(by_row)
        Du = float((P.column_error * by_row).sum())  # synchronize!
        if isinstance(inner, RowSpace):
            # Outputs are up to `missed` from those of weights that the proof speaks of.
            missed, others, steep = inner.missed(u, self.sizes + P.column_error), extra, slope
            outputs += missed

            def extra(error: float) -> float:
                before = 0.0 if others is None else others(error)
                return before + missed * (steep + error + missed)

        choices, off = [], {"Du": Du, "other": outputs, "extra": extra}
        if self.loss.quadratic and inner.slack < _SLACK:
            size = norm(inner.to_gradient(g)) + inner.amplified(rows)
            (low, high), rho = _singular_values(P), inner.amplified(P.column_error)
            off["Du"] = min(Du, rho * norm(inner.from_weights(u)))
            choices.append(Terms("residual", size, slope, high, rho, convexity=low, **off))
        if self.ridge > 0:
            size = basis.dual_norm(g) + basis.dual_bound(rows)
            D, bend = basis.dual_bound(P.column_error), self.loss.steepest
            slip = self.loss.gradient_rounding(found.E, self.Y)
            off = {**off, "Du": Du, "convexity": math.sqrt(self.ridge), "bend": bend, "slip": slip}
            choices.append(Terms("duality", size, slope, bend * self.X_norm, D, **off))
        note = P.note if choices else why_not(objective)
        return Proof(
            objective,
            found.rounding + 8 * _UNIT * objective,
            slope,
            norm(basis.gradient(g)),
            tuple(choices),
            Du,
            outputs,
            note,
            P.kept,
            P.features,
            at_zero if self.ridge == 0 else 0.0,
        )
