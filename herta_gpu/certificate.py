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
from functools import partial
from typing import Any, NamedTuple

import numpy as np

from herta_gpu.backends.base import Array, Backend, norm, unit_roundoff
from herta_gpu.coordinates import Columns
from herta_gpu.diffusion import residual_norms
from herta_gpu.factors import RowSpace
from herta_gpu.laplacian import block_cg
from herta_gpu.planning.settings import Kind, Status
from herta_gpu.preconditioner import Preconditioner
from herta_gpu.problem import Point, StoredPoint, StoredProblem, UnfoldedMap

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
        What the bound rests on.  "residual": norms of the columns of X - H Q, for stored rows Q of
        H^-1 X.  "duality": the gradient and the strong convexity that a ridge gives.
        "spectral-proven", "spectral-deterministic", "spectral-probabilistic": eigenvalues of the
        preconditioned Hessian, by the error of Chebyshev's polynomial, by residuals, or by Lanczos.
        "nonnegative": the objective itself bounds the gap.  "none": nothing is proven.
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
        if self.kind == Kind.NONE:
            return f"no certificate ({self.note})"
        if self.kind == Kind.NONNEGATIVE:
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
    """An upper bound of the gap for stored rows Q = A - D, as a function of how well they are
    solved for: `gap(share)` is the bound if D were `share` of what it is."""

    kind: str
    gradient: float  # norm of the gradient, with all errors but those of the outputs
    E: float = 0.0  # ||E_Q||
    through: float = 0.0  # how much of an error of the outputs the gradient sees
    D: float = 0.0  # ||D|| as the gradient sees it
    Du: float = 0.0  # ||D u||
    other: float = 0.0  # further errors of the outputs
    convexity: float = 0.0  # strong convexity at D = 0, as a root
    bend: float = math.inf  # the largest curvature of the loss, where it need not be quadratic
    slip: float = 0.0  # rounding of E itself
    extra: Callable[[float], float] | None = None  # more gap, from an error of the outputs
    probability: float = 0.0  # that the bound fails

    def gap(self, share: float = 1.0) -> float:
        D, error = share * self.D, share * self.Du + self.other
        extra = 0.0 if self.extra is None else self.extra(error)
        size = self.gradient + D * self.E + (self.through + D) * error
        root = self.convexity - D if self.kind == Kind.RESIDUAL else self.convexity
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


@dataclass(frozen=True)
class Proof:
    """What is known at one point: of the objective, and of how far it is above the optimum."""

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
        """The best of the bounds."""
        d = self.features
        if not self.choices:
            return Certificate(math.inf, Kind.NONE, note=self.note, kept=d, features=d)
        best = min(self.choices, key=lambda terms: terms.gap(share))
        gap, whole = best.gap(share), best.kind == Kind.DUALITY  # over all features
        value = relative(gap, self.objective - self.error(share) - gap)
        known = ("", d, d) if whole else (self.note, self.kept, d)
        return Certificate(value, best.kind, best.probability, gap, *known)

    def nonnegative(self) -> Certificate:
        """What the objective itself says: none is below 0."""
        gap, d = self.objective + self.error(), self.features
        return Certificate(math.inf, Kind.NONNEGATIVE, 0.0, gap, self.note, d, d)

    def error(self, share: float = 1.0) -> float:
        """The objective is right up to this much."""
        outputs = share * min([self.Du, *(terms.Du for terms in self.choices)]) + self.other
        return self.rounding + outputs * (self.slope + 0.5 * outputs)

    def about_zero(self, tol: float, share: float = 1.0) -> bool:
        """Whether the optimum is about 0, which has no relative gap, and that is known."""
        near = self.objective <= (tol**2 if self.choices else tol) * self.unit
        return near and self.objective + self.error(share) <= tol * self.unit

    def enough(self, tol: float, share: float = 1.0) -> bool:
        """Whether the gap is proven, and the objective known about as well as the gap.  What D
        really does to the objective is orders of magnitude below its bound."""
        known = self.error(share) <= _LOSS_ERROR * tol * self.objective
        return (known and self.certificate(share).value <= tol) or self.about_zero(tol, share)

    def needed_share(self, tol: float) -> float:
        """The share of what the solves left that would be small enough; 0: none would be."""
        low, high = 0.0, 1.0
        if not self.enough(tol, 0.0):
            return 0.0
        while not (low and high < 1.2 * low) and high > _LEAST_SHARE:
            middle = 0.5 * (low + high) if low else 0.1 * high
            low, high = (middle, high) if self.enough(tol, middle) else (low, middle)
        return low


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
    With the outputs off by r1, E is off by no more than steepest ||r1||."""
    choices = []
    adjoint = point.adjoint_residual + point.adjoint_rounding
    off: dict[str, Any] = {
        "other": point.forward_residual + point.forward_rounding,
        "extra": lambda _: point.intercept_gap,
    }
    if ridge > 0:
        size = norm(point.gradient) + norm(point.gradient_rounding) + X_norm * adjoint
        how = off | {"through": X_norm * steepest, "convexity": math.sqrt(ridge)}
        choices.append(Terms(Kind.DUALITY, size, bend=steepest, **how))
    if spectrum is not None and spectrum.kind != Kind.ESTIMATE:
        size = (
            norm(point.g)
            + spectrum.norm * adjoint
            + P.factor.product_bound(point.gradient_rounding)
        )
        how = off | {"through": math.sqrt(spectrum.b), "convexity": math.sqrt(spectrum.a)}
        choices.append(Terms(spectrum.kind, size, probability=spectrum.probability, **how))
    known = (tuple(choices), 0.0, 0.0, P.note if choices else why_not, P.kept, P.features)
    return Proof(point.objective, point.objective_error, 0.0, 0.0, *known).certificate()


def relative(gap: float, optimum: float) -> float:
    """A gap relative to a lower bound of the optimum; inf where that says nothing."""
    if gap == 0:
        return 0.0  # even of an optimum of exactly 0
    return gap / optimum if optimum > 0 else math.inf


def judge(
    found: Certificate, tol: float, zero: bool = False, stuck: bool = False, settled: bool = False
) -> Status:
    """What the weights with this certificate are.  `zero`: their objective is about 0, where no gap
    is relative; `stuck`: rounding hides the way on; `settled`: nothing is left to gain by all
    signs."""
    if found.value <= tol:
        return Status.REDUCED if found.reduced else Status.CERTIFIED
    if zero:
        return Status.CONVERGED
    if stuck:
        return Status.STAGNATED
    return Status.CONVERGED if settled else Status.MAX_ITER


def merge_certificates(parts: Sequence[Certificate]) -> Certificate:
    """The certificate of a problem that falls apart into independent ones, from theirs.  Gaps add
    up, and so do the optima.  All parts lean on one spectrum: it fails once or never."""
    if any(part.kind == Kind.NONE for part in parts):
        return next(part for part in parts if part.kind == Kind.NONE)
    worst = max(parts, key=lambda part: (part.features - part.kept, part.gap))
    gap, optimum = sum(part.gap for part in parts), sum(part.optimum for part in parts)
    chance = max(part.probability for part in parts)
    return replace(worst, value=relative(gap, optimum), probability=chance, gap=gap)


@dataclass(frozen=True)
class Spectrum:
    """What is known of P^-1/2 T P^-1/2: a <= eigenvalues <= b, and ||H^-1 X P^-1/2|| <= norm.  Of
    the kind "estimate" it proves nothing and only tells a good moment to stop."""

    a: float
    b: float
    norm: float
    kind: str
    probability: float = 0.0

    @property
    def kappa(self) -> float:
        """b / a: the condition number of the preconditioned Hessian, or a bound of it."""
        return self.b / self.a

    def gradient_error(self, point: Point) -> float:
        """How far the solves can have moved the preconditioned gradient; rounding apart."""
        return math.sqrt(self.b) * point.forward_residual + self.norm * point.adjoint_residual


def choose_spectrum(
    kind: str, P: Preconditioner, A: UnfoldedMap, ridge: float, seed: int
) -> Spectrum | None:
    """Bounds of the preconditioned Hessian: the cheapest of those planned that holds."""
    found, fine, Q = None, P.inner.rank > 0 and P.inner.slack < _SLACK, P.Q_all
    if fine and P.basis is not None and Q is not None and Q.dtype != np.float64:
        # No column may be so small or large that float32 lost digits of it.
        size = P.basis.sizes
        in_range = (size == 0) | ((size > _LEAST_SIZE) & (size < 1 / _LEAST_SIZE))
        fine = bool(in_range.all())  # synchronize!
    if fine and Q is not None and isinstance(P.basis, Columns):
        found = proven_spectrum(P, A, Q)
        if found is None and kind == Kind.DETERMINISTIC:
            found = measured_spectrum(P, residual_norms(A.H, P.basis, Q, A.width))
    elif fine and P.column_error is not None:
        found = measured_spectrum(P, P.column_error)
    if found is None and kind.startswith("spectral"):
        found = probabilistic_spectrum(P, A, ridge, seed)
    return found


# Both of the next two start from | ||A v|| - ||M Q v|| | <= ||(H^-1 X - Q) v|| <= rho for
# ||P^1/2 v|| = 1, so that (1 - rho)^2 <= eigenvalues <= (1 + rho)^2, for any X.
def proven_spectrum(P: Preconditioner, A: UnfoldedMap, Q: Array) -> Spectrum | None:
    """From the polynomial: ||(H^-1 X - p(H) X) v|| <= eps ||H^-1 X v||, and Q is off p(H) X by no
    more than rounding."""
    backend, xp, loss = A.H.backend, A.H.backend.xp, A.loss
    eps, rounding = P.Q_error, P.Q_rounding
    if eps + rounding >= 0.5:
        return None
    # `outside` bounds ||Q P^-1/2||^2 over what P does not have of the rows of Q: the rows outside
    # training; of those in it what their weights w leave, 1 - w, and the mean row as often as it
    # was taken away.
    left, outside = xp.ones(A.H.n), 0.0
    left[A.train] = 0.0 if loss.weights is None else backend.own(1 - loss.weights)
    at = xp.flatnonzero(left)
    if not loss.plain or int(backend.total(at.shape[0])) > 0:
        G = xp.zeros((Q.shape[1], Q.shape[1]))
        for a in range(0, at.shape[0], _ROWS):
            rows = at[a : a + _ROWS]
            backend.add_gram(G, Q[rows].astype("float64") * xp.sqrt(left[rows])[:, None])
        G = backend.total(G)
        if loss.intercept:
            trained = A.rows(Q)
            mean = loss.mean(xp, trained)
            G = G + loss.total(trained.shape[0]) * mean[:, None] * mean[None, :]
        G = P.inner.to_gradient(P.inner.to_gradient(G).T)  # P^-1/2 G P^-1/2
        outside = _norm_bound(G, backend, (_ENOUGH / max(eps, 1e-16)) ** 2 if loss.plain else 0.0)
    sizes = xp.sqrt(backend.total(backend.column_dots(Q, Q))) * (rounding / (1 - eps - rounding))
    off = P.inner.product_bound(sizes)
    rho = eps / (1 - eps) * (math.sqrt(1 + outside) + off) + off
    return _around_one(P, rho, outside, Kind.PROVEN, least=_PROVEN)


def measured_spectrum(P: Preconditioner, left: Array) -> Spectrum | None:
    """From the columns of R = X C0 - H Q: ||(H^-1 X C0 - Q) v|| <= ||R v||."""
    assert P.basis is not None
    # ||H^-1 X C0 C|| <= ||X C0|| ||C||, whichever rows are outside training.
    outside = max(0.0, (P.basis.norm * P.inner.size) ** 2 - 1)
    return _around_one(P, P.inner.product_bound(left), outside, Kind.DETERMINISTIC, least=_USEFUL)


def _around_one(
    P: Preconditioner, rho: float, outside: float, kind: str, least: float
) -> Spectrum | None:
    """[(1 - rho)^2, (1 + rho)^2], widened by how far P may be from Q^T Q + ridge."""
    low, high = P.inner.singular_values
    if not low > rho or (low - rho) ** 2 < least:
        return None
    # P = Q^T Q over the training rows (+ ridge), so ||Q P^-1/2||^2 <= 1 + the rows outside.
    norm = math.sqrt(1 + P.inner.slack + outside) + rho
    return Spectrum((low - rho) ** 2, (high + rho) ** 2, norm, kind)


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
    if P.inner.rank == 0:  # the training rows see nothing of X: every W is optimal
        return Spectrum(1.0, 1.0, 0.0, Kind.DETERMINISTIC)
    tol, steps, most = _LANCZOS_TOL, LANCZOS_STEPS, min(P.inner.rank, _MOST_STEPS)
    while True:
        runs = _two_runs(P, A, ridge, seed, tol, steps)
        if runs is None:
            return None
        (masked, whole), slip = runs, 0.0
        if masked.share < 1 and whole.share < 1:
            # Residuals of the first solve reach the product through the root of the run's own
            # largest eigenvalue, those of the second through that of the run without the mask.
            forward, adjoint, rounded = whole.off
            norm = whole.largest_root(forward + adjoint, rounded)
            forward, adjoint, rounded = masked.off
            root = masked.largest_root(forward, norm * adjoint + rounded)
            # Inexact products may have moved the Ritz values by so much:
            slip = masked.gain * (masked.left + root * forward + norm * adjoint + rounded)
            a = root**2 - (root**2 - (float(masked.ritz[0]) - slip)) / (1 - masked.share)
            if a >= _USEFUL:
                n = int(A.H.backend.total(A.H.n))
                return Spectrum(a, root**2, norm, Kind.PROBABILISTIC, 1.0 / n)
        low, top = masked.interval
        if slip >= _BLUR and tol > _LANCZOS_LEAST_TOL:
            # Where ||H^-1 X P^-1/2|| is large, it is the solves that blur the picture.
            tol = max(_LANCZOS_LEAST_TOL, tol * min(0.1, 0.1 * _BLUR / slip))
        elif steps < most and low > _USEFUL:
            # The eigenvalues are fine, but what Lanczos may have missed is not.
            steps = min(4 * steps, most)
        else:
            return Spectrum(low, top, math.sqrt(max(float(whole.ritz[-1]), 0.0)), Kind.ESTIMATE)


def ritz_interval(
    P: Preconditioner, A: UnfoldedMap, ridge: float, seed: int
) -> tuple[float, float]:
    """An estimate, not a bound, of the spectrum of the preconditioned Hessian."""
    runs = _two_runs(P, A, ridge, seed, _LANCZOS_TOL, LANCZOS_STEPS) if P.inner.rank else None
    return (1.0, 1.0) if runs is None else runs[0].interval


def _two_runs(
    P: Preconditioner, A: UnfoldedMap, ridge: float, seed: int, tol: float, most: int
) -> list[Run] | None:
    """Lanczos with the training rows and with all rows; None where a product overflowed."""
    H, X, xp, factor = A.H, A.X, A.H.backend.xp, P.factor
    start = np.random.default_rng(seed).standard_normal((P.w_start.shape[0], 2))
    mask = xp.zeros((H.n, 1), dtype=bool)
    mask[A.train] = True
    transposed = factor.product_bound(X.transpose_rounding())

    def multiply(v: Array) -> tuple[Array, Any]:
        W = factor.to_weights(v)
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
        return factor.to_gradient(X.transpose_times(V) + ridge * W), off

    steps, n = min(most, factor.rank), int(H.backend.total(H.n))
    return lanczos(H.backend, multiply, start, steps, factor.project, factor.rank, n)


class Run(NamedTuple):
    """A run of Lanczos, and what it may have missed of the largest and least eigenvalue of S >= 0.

    V is its orthonormal basis, and its products are Y = S V + E.  The true eigenvalue lies at most
    `share` of the spectrum, and `gain` (`left` + ||E||) besides, beyond the outermost Ritz value:

    * V is a basis of the whole space: the Ritz values are the eigenvalues, up to E.
    * The run went on to its last step: `share` is Kuczynski and Wozniakowski's, failing with
      probability at most 1/(4n).  Inexact products move the Ritz values, and the space they are
      from.
    * It ended before: with T the section V^T Y made symmetric, and (mu, u) an eigenpair of S,
      u^T V (mu - T) = u^T (S V - V T): some Ritz value is within ||S V - V T|| / |u^T v_1| of mu.
      A random start has |u^T v_1| < t with probability at most t sqrt(2 rank / pi): t makes that
      1/(12n).  That S V - V T is small is measured, whatever made the run end.
    """

    ritz: Any  # eigenvalues of T, rising: as many as the run had steps
    share: float
    gain: float
    left: float  # ||Y - V T|| of a run that ended
    off: list[float]  # what the products told of E, as root of sums

    @property
    def interval(self) -> tuple[float, float]:
        """The outermost Ritz values: an estimate."""
        top = max(float(self.ritz[-1]), 1e-300)
        return max(float(self.ritz[0]), 1e-6 * top), top

    def largest_root(self, slope: float, rest: float) -> float:
        """A bound of the root x of the largest eigenvalue, where ||E|| <= slope x + rest."""
        top = max(float(self.ritz[-1]), 0.0) / (1 - self.share) + self.gain * (self.left + rest)
        half = self.gain * slope / 2
        return half + math.sqrt(half**2 + top)


def lanczos(
    backend: Backend,
    multiply: Callable[[Array], tuple[Array, Any]],
    start: Any,
    steps: int,
    project: Callable[[Array], Array],
    rank: int,
    n: int,
) -> list[Run] | None:
    """A run of Lanczos from each column of `start`, orthogonalised in full; they share products.

    A run ends when its own space is invariant; the others go on.  None where a product overflowed.
    `multiply` gives the products of the columns of v, each with the matrix of its run (those of
    runs that ended are 0), and (3, columns) bounds of what they are off by.  `project` takes away
    what rounding leaves outside a subspace of dimension `rank`.  What is said of each run fails
    with a probability of about 1/n.
    """
    xp, (dim, count), v = backend.xp, start.shape, backend.asarray(start)
    bases, images = (xp.zeros((count, steps, dim)) for _ in range(2))
    made, off = np.full(count, steps), np.zeros((3, count))

    def orthogonalise(v: Array, j: int) -> None:
        for i in range(count):
            v[:, i] -= bases[i, :j].T @ (bases[i, :j] @ v[:, i])

    for j in range(steps):
        before = xp.linalg.norm(v, axis=0)
        orthogonalise(v, j)
        v = project(v)  # what rounding leaves outside the subspace would grow
        orthogonalise(v, j)  # twice is enough
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
        share, gain, left = 0.0, 3.0, 0.0
        if k < rank and k < steps:
            rounded = (k + dim + 8) * 2 * _UNIT * (np.linalg.norm(Y) + np.linalg.norm(T))
            left = float(np.linalg.norm(Y - T @ V) + rounded)
            gain = 12 * n * math.sqrt(2 * rank / math.pi)
        elif k < rank:
            share = (math.log(1.648 * math.sqrt(rank) * 4 * n) / (2 * k - 1)) ** 2
        runs.append(Run(np.linalg.eigvalsh(T), share, gain, left, np.sqrt(off[:, i]).tolist()))
    return runs


def least_squares(problem: StoredProblem, P: Preconditioner, tol: float) -> StoredPoint:
    """u = P^-1 Q^T Y, refined by gradients of the stored problem where that matters."""
    at, last = problem.at(P.inner.to_weights(P.w_start)), math.inf
    for _ in range(_REFINEMENTS):
        w = P.inner.to_gradient(at.g)
        size = norm(w)
        if size**2 <= _EXACT * tol * at.loss or not size < 0.5 * last:
            break
        at, last = problem.at(at.u - P.inner.to_weights(w)), size
    return at


def prove(
    problem: StoredProblem,
    at: StoredPoint,
    P: Preconditioner,
    X_norm: float,
    why_not: Callable[[float], str],
    at_zero: float = 0.0,
) -> Proof:
    """All that stored rows say of the true problem at W = C0 u; the loss of W = 0 is given."""
    xp, inner, basis, loss = problem.xp, P.inner, problem.C0, problem.loss
    u, g, slope, objective, left = at.u, at.g, at.E_size, at.objective, P.column_error
    ridge, sizes, r, count = problem.ridge, problem.sizes, at.u.shape[0], problem.Y.shape[0]
    by_row = xp.sqrt((u * u).sum(axis=1))
    # Rounding: of Q u and of E, of Q^T E and the ridge's part, and of W itself.
    size_of_terms = float((sizes * by_row).sum())  # synchronize!
    outputs = (r + 2) * _UNIT * size_of_terms + basis.weights_rounding(u)
    outputs += 4 * _UNIT * (at.F_size + at.Y_size) / loss.steepest
    rows = (count + 4) * _UNIT * slope * sizes
    rows = rows + (r + 2) * _UNIT * xp.sqrt((g * g).sum(axis=1))  # of C^T g
    extra: Callable[[float], float] | None = None
    if at.b is not None and problem.mean is not None:
        # ||1^T E|| over the root of all weights, rounding included.
        rounded = (count + 4) * _UNIT * math.sqrt(count) * (at.E_size + 4 * _UNIT * at.F_size)
        imbalance = (norm(at.sums) + rounded) / math.sqrt(loss.total(count))
        # Rounding of the constants, and of the rows less their mean.
        terms = float((abs(problem.mean) * by_row).sum()) + norm(at.b)  # synchronize!
        outputs += (r + 4) * _UNIT * math.sqrt(count) * terms + _UNIT * size_of_terms
        slope += imbalance
        rows = rows + count * _UNIT * imbalance * sizes  # centred up to rounding only
        known = (objective + outputs * (slope + outputs), ridge, X_norm)
        Y = problem.Y[:0] if loss.quadratic else problem.Y[:]
        distance = loss.intercept_distance(xp, Y, at.b, *known)
        extra = partial(loss.intercept_gap, imbalance, distance=distance)
    if ridge > 0:
        # C0^T C0, its product with u and W itself are sums of r terms, if C0 is not diagonal.
        terms = 8 if basis.ridge.ndim == 1 else 3 * r + 8
        rows = rows + terms * _UNIT * ridge * basis.ridge_size(by_row)
    Du = float((left * by_row).sum())  # synchronize!
    if isinstance(inner, RowSpace):
        # Outputs are up to `missed` from those of weights that the proof speaks of.
        missed, others, steep = inner.outside_bound(u, sizes + left), extra, slope
        outputs += missed

        def extra(error: float) -> float:
            before = 0.0 if others is None else others(error)
            return before + missed * (steep + error + missed)

    choices, off = [], {"Du": Du, "other": outputs, "extra": extra}
    if loss.quadratic and inner.slack < _SLACK:
        size = norm(inner.to_gradient(g)) + inner.product_bound(rows)
        (low, high), rho = inner.singular_values, inner.product_bound(left)
        off["Du"] = min(Du, rho * norm(inner.from_weights(u)))
        choices.append(Terms(Kind.RESIDUAL, size, slope, high, rho, convexity=low, **off))
    if ridge > 0:
        size = basis.dual_norm(g) + basis.dual_bound(rows)
        D, bend = basis.dual_bound(left), loss.steepest
        slip = loss.gradient_rounding(at.E_size, problem.Y)
        off = {**off, "Du": Du, "convexity": math.sqrt(ridge), "bend": bend, "slip": slip}
        choices.append(Terms(Kind.DUALITY, size, slope, bend * X_norm, D, **off))
    note = P.note if choices else why_not(objective)
    rounding, unit = at.rounding + 8 * _UNIT * objective, at_zero if ridge == 0 else 0.0
    size, kept = norm(basis.gradient(g)), (P.kept, P.features, unit)
    return Proof(objective, rounding, slope, size, tuple(choices), Du, outputs, note, *kept)
