"""Certificates: how a fit proves how far it is from the optimum.

G bounds objective - optimum from above, and the certificate is G / (objective - G).  Solves are
never assumed exact: H >= I, so a solution with true residual r is off by at most ||r||, and

    ||P^-1/2 (g_computed - g)|| <= sqrt(b) ||r1|| + ||H^-1 X P^-1/2|| ||r2||

with r1, r2 the measured residuals of the forward and the adjoint solve, and [a, b] an interval
that holds the eigenvalues of P^-1/2 T P^-1/2 (T: the Hessian).

* ridge > 0: strong convexity gives G = ||g||^2 / (2 ridge), the duality gap at the natural point;
  or, of g without what r1 does to it, that and steepest/2 ||r1||^2 (see `direct`).
* MSE: G = ||P^-1/2 g||^2 / (2 a), with a > 0 proven from the error of the polynomial behind Q,
  computed from R = X - H Q (deterministic), or from Lanczos with a random start (probabilistic).
* otherwise there is no relative bound, and none is printed.

Rounding counts like a residual: each point brings bounds of what it may have done (`Rounding`).
The spectral kinds hold over the features that P kept.  Where those are not all, the certificate
says so, and the fit is not "certified" but "certified-reduced".
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

from herta_gpu.backends.base import norm
from herta_gpu.preconditioner import Preconditioner
from herta_gpu.spectrum import Spectrum
from herta_gpu.unfolded import Point


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
    choices, rounding = [], point.rounding
    if ridge > 0:
        outputs = point.forward_residual + rounding.forward
        size = norm(point.gradient) + norm(rounding.transposed)
        size += X_norm * (point.adjoint_residual + rounding.adjoint)
        # E is a gradient of the loss itself, at outputs that are off: a difference that the
        # gradient sees through X, or that costs no more than the loss bends.
        gap = (size + X_norm * steepest * outputs) ** 2 / (2 * ridge)
        gap = min(gap, size**2 / (2 * ridge) + 0.5 * steepest * outputs**2)
        choices.append((gap, "duality", 0.0, "", P.features))
    if spectrum is not None and spectrum.kind != "estimate":
        error = gradient_error(point, spectrum)
        error += math.sqrt(spectrum.b) * rounding.forward + spectrum.norm * rounding.adjoint
        size = norm(point.g) + error + P.factor.amplified(rounding.transposed)
        gap = size**2 / (2 * spectrum.a)
        choices.append((gap, spectrum.kind, spectrum.probability, P.note, P.kept))
    if not choices:
        return Certificate(math.inf, "none", note=why_not, kept=P.features, features=P.features)
    gap, kind, probability, note, kept = min(choices)
    gap += point.aside
    below = point.objective - point.objective_error - gap
    return Certificate(relative(gap, below), kind, probability, gap, note, kept, P.features)


def relative(gap: float, optimum: float) -> float:
    """A gap relative to a lower bound of the optimum; inf where that says nothing."""
    if gap == 0:
        return 0.0  # even of an optimum of exactly 0
    return gap / optimum if optimum > 0 else math.inf


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
