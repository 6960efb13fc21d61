"""What each way to train would cost, in seconds of a nominal 2-core machine.

The figures need not be right on yours: only their ratios decide, and those are between the same few
operations everywhere.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum

from herta_gpu.planning.settings import Settings

BLOCK_WIDTH = 64  # columns advanced together when memory allows: best per column on the CPU
# C of s = C n_lambda ln(n) / eps^2.  The paper proves that some C exists, not which.  With C = 4
# the true error was at most 0.6 eps on every graph tried; with C = 1 it was up to 1.4 eps,
# at lam = 20.
EMPIRICAL_SAMPLE_CONSTANT = 4.0
# Draws per edge: each edge would be drawn so often that its weight hardly differs from its own, at
# a cost that has no bound.  With more, all edges are kept as they are.
MOST_DRAWS = 100

# A feature that only occurs outside the training rows reaches them through many hops, weakly: it
# takes a polynomial of high degree in float64 to see it as the Hessian does.
EXACT_TOL = 1e-9
_ROW_SPACE_TOL = 1e-10

# Measured on the compiled CPU backend, per non-zero plus four per node and column (seconds).  CG
# runs on few columns and measures true residuals in float64: hence more than its share of memory.
_CHEBYSHEV_STEP = 0.8e-10
_CG_STEP = 2.0e-10
_CG_LAUNCH = 1e-4  # one step, however small the graph ...
_CHEBYSHEV_LAUNCH = 4e-5  # ... and of one of Chebyshev's on a block of columns
_NARROW = 12  # a block of one or two columns costs about as much as this many of a wide one ...
# ... but a graph that is dense enough to be sampled has its eigenvalues in a bunch: CG ends early.
_NARROW_AND_DENSE = 4.5
_DENSE_PASS = 2e-9  # X W or X^T V per number of a dense X, as float64, a few columns ...
_SPARSE_PASS = 3e-9  # ... and per non-zero of a sparse one
_GEMM_FLOP = 1.0 / 75e9  # float64
_FACTOR_FLOP = 1.0 / 30e9
_MISFIT = 3.0  # 1 + ||Y|| / ||E||: how much of a certificate the targets themselves make up
_ALIKE = 1 / 30  # smallest singular value of columns of norm 1, as on bags of words
_CE_GOAL = 1e-4  # cross entropy: times sqrt(tol ridge)
_OUTER_STEPS = 1  # steps of CG from the warm start, as on nearly every real graph tried
_CE_EVALUATIONS = 40  # cross entropy and its gradient, so many times


class Case(Enum):
    """How P is made from Q: by how many rows there are, and whether there is a ridge."""

    DENSE = "dense"  # Q^T Q as a matrix
    FEW_ROWS = "few rows"  # a ridge and fewer than half as many rows as features: from Q Q^T
    ROW_SPACE = "row space"  # no ridge and too few rows, all known: only what they span
    DAMPED = "damped"  # no ridge and too few rows, not all known: a multiple of I is added ...
    DAMPED_FEW_ROWS = "damped few rows"  # ... to a P that is made from Q Q^T

    @property
    def damped(self) -> bool:
        """Whether P carries a large multiple of I that the Hessian does not have."""
        return self in (Case.DAMPED, Case.DAMPED_FEW_ROWS)

    @property
    def low_rank(self) -> bool:
        """Whether P is made from Q Q^T."""
        return self in (Case.FEW_ROWS, Case.DAMPED_FEW_ROWS)


def case_of(n_train: int, d: int, ridge: float, known: bool, rows: int | None = None) -> Case:
    """The case of P; `known`: rows of A itself, or measured ones; `rows`: of a sketch."""
    few = 2 * min(n_train, n_train if rows is None else rows) < d
    if ridge > 0:
        return Case.FEW_ROWS if few else Case.DENSE
    if n_train >= d:
        return Case.DENSE
    if known:
        return Case.ROW_SPACE
    return Case.DAMPED_FEW_ROWS if few else Case.DAMPED


@dataclass(frozen=True)
class Sizes:
    """The numbers that costs and memory depend on."""

    n: int
    m: int
    d: int  # columns of X, times the number of lam
    c: int
    n_train: int
    word: int  # bytes per number
    X_bytes: int
    hidden: bool = False  # some features occur only outside the training rows
    beside: int = 0  # rows of Q outside training that are kept for evaluation
    half: bool = False  # neighbours are gathered in half precision
    card: bool = False  # memory is that of a GPU; the host has its own
    weighted: bool = False  # edges have weights: in float64, and in the working precision
    mapped: bool = False  # the graph lies in files, and its neighbours may stay there
    nonzeros: int | None = None  # entries of a sparse X
    X_bytes_at: Callable[[int], int] | None = None  # X_bytes with another budget
    ranks: int = 1  # processes that blocks of columns are dealt out to
    parts: int = 1  # processes that have rows of their own
    copies: int = 0  # of the training rows of Q: centred for an intercept, scaled by weights
    curvature: float = 1.0  # of the loss where training starts
    top: float = 3.0  # a bound of the largest eigenvalue of H
    can_sample: bool = True  # Algorithm 2 works where this runs
    effective: Callable[[], float] | None = None  # a bound of n_lambda, which takes a look at edges

    @property
    def dtype(self) -> str:
        return f"float{8 * self.word}"

    @property
    def work(self) -> int:
        """Numbers that a product with H touches for each column."""
        return 2 * self.m + 4 * self.n

    @property
    def few_rows(self) -> bool:
        return self.n_train < self.d

    def degree(self, eps: float) -> int:
        """Products with H after which Chebyshev's polynomial is right to `eps`."""
        return least_degree(self.top, eps)

    def n_lambda(self) -> float:
        """A cheap bound of the effective dimension; of a graph that is not there, of any graph.

        The sum of w (1/d_u + 1/d_v) over the edges is that of dt_u/d_u < 1 over the nodes, and
        1 + 1/lam is 1 + 2/(top - 1) where top = 1 + 2 lam.
        """
        if self.effective is not None:
            return self.effective()
        return self.n / (1.0 + 2.0 / (self.top - 1.0))


def least_degree(top: float, eps: float) -> int:
    """The least degree k with 1/T_k(sigma) <= eps, the error of Chebyshev's polynomial on [1, top].

    Examples
    --------
    >>> least_degree(41.0, 1e-6), least_degree(1.0, 1e-6)
    (47, 1)
    """
    if top <= 1.0 or eps >= 1.0:
        return 1
    return max(1, math.ceil(math.acosh(1.0 / eps) / math.acosh((top + 1) / (top - 1)) - 1e-9))


def sample_size(n_lambda: float, n: int, eps: float) -> int:
    """s = C n_lambda ln(n) / eps^2 with the measured constant C."""
    return max(1, math.ceil(EMPIRICAL_SAMPLE_CONSTANT * n_lambda * math.log(max(n, 2)) / eps**2))


def row_copies(settings: Settings, weighted: bool) -> int:
    """Copies of the training rows of Q that an intercept and weights ask for."""
    seen = settings.fit_intercept or weighted
    return int(settings.fit_intercept) + int(seen and not settings.quadratic)


# ---- how well Q is solved for ------------------------------------------------------------
def Q_tolerance(sizes: Sizes, settings: Settings, direct: bool) -> float:
    """How well Q must approximate H^-1 X."""
    if sizes.hidden and not sizes.few_rows:
        return EXACT_TOL
    if direct:  # and the true model is looked at afterwards
        # What Q is off by counts squared in the loss.  Tight enough that the first look at the true
        # model is nearly always the last; a duality gap asks for more.
        share = 0.5 if settings.quadratic else 0.1
        return min(1e-3, share * math.sqrt(settings.tol / sizes.top))
    if sizes.n_train == sizes.n:
        return 0.1
    # With a mask the error counts against the masked rows: tighter as lam grows.
    return min(0.1 / sizes.top, 0.003 if sizes.few_rows else 0.1)


def Q_goal(sizes: Sizes, settings: Settings, whiten: bool) -> float:
    """Residuals of Q's columns that should prove a fit from Q alone, relative to those of X C0.

    A guess: should it miss, the fit itself tells what is needed, and goes on.
    """
    if not settings.quadratic:
        return softmax_goal(settings)
    rho = min(0.1, math.sqrt(settings.tol) / _MISFIT)
    # The smallest singular value of the training rows of H^-1 X C0, as seen on real graphs.
    smallest = math.sqrt(sizes.n_train / sizes.n) / (0.7 * sizes.top + 0.9)
    smallest *= 1.0 if whiten else _ALIKE
    # The objective, too, is known from Q alone, and what Q is off by counts there as it is.
    seen = 3e-3 * math.sqrt(settings.tol) * min(1.0, (1e6 * settings.tol) ** 0.25)
    return max(1e-13, min(rho * smallest / math.sqrt(sizes.d), seen))


def softmax_goal(settings: Settings) -> float:
    """`Q_goal` for cross entropy."""
    # A ridge of 0 proves nothing, but the optimum must be that of the true model.
    size = math.sqrt(settings.tol * min(settings.ridge, 1.0)) if settings.ridge else 1.0
    return min(1e-4, max(1e-10, _CE_GOAL * size))


def row_tolerance(settings: Settings, look: bool = False) -> float:
    """How well H^-1 M^T must be solved for; without a ridge its rows must span what A's do.

    With one they must prove the fit, unless the true model does (`look`): a guess, and the fit
    tells what is needed should it miss.
    """
    if settings.ridge == 0:
        return _ROW_SPACE_TOL
    if look:
        return min(1e-4, math.sqrt(settings.tol) / 10)
    return max(1e-12, (1e-4 if settings.quadratic else 1e-6) * math.sqrt(settings.tol))


# ---- seconds -----------------------------------------------------------------------------
def worth_whitening(sizes: Sizes, settings: Settings) -> bool:
    """Whether orthonormal columns cost little beside the products with H.

    Not with a ridge, which speaks of W: features of very unequal units would be mixed.
    """
    if settings.ridge > 0 or not settings.quadratic or sizes.few_rows:
        return False
    if settings.row_norm or settings.hidden:
        return False
    products = sizes.d * sizes.degree(Q_goal(sizes, settings, True)) * sizes.work * _CHEBYSHEV_STEP
    return _whitening(sizes) <= 0.35 * products


def strategy_costs(sizes: Sizes, settings: Settings) -> dict[str, float]:
    """Predicted seconds of each strategy: solves for Q, d x d work, the loop."""
    small = min(sizes.n_train, sizes.d)
    dense = sizes.n_train * sizes.d * small * _GEMM_FLOP + small**3 / 3 * _FACTOR_FLOP
    evaluations = 1 + (_OUTER_STEPS if settings.quadratic else _CE_EVALUATIONS)
    herta = _columns(sizes, Q_tolerance(sizes, settings, direct=False))
    herta += evaluations * _evaluation(sizes)
    return {"herta": herta + dense, "direct": dense + min(direct_costs(sizes, settings))}


def direct_costs(sizes: Sizes, settings: Settings) -> tuple[float, float]:
    """Predicted seconds of "direct", proven from Q alone or by one look at the true model."""
    training = 0.0
    if not settings.quadratic:
        training = _CE_EVALUATIONS * 4 * sizes.n_train * sizes.d * sizes.c * _GEMM_FLOP
    if sizes.few_rows:
        work = sizes.n_train * sizes.work * _CG_STEP
        training += 2 * sizes.n * sizes.n_train * sizes.d * _GEMM_FLOP
        looked, alone = (
            sizes.degree(row_tolerance(settings, look)) * work + training for look in (True, False)
        )
        return (alone if settings.ridge > 0 else math.inf), looked + _evaluation(sizes)
    whiten = worth_whitening(sizes, settings)
    alone = _columns(sizes, Q_goal(sizes, settings, whiten), passes=2) + training
    if settings.quadratic:
        return alone + whiten * _whitening(sizes), math.inf
    looked = _columns(sizes, Q_tolerance(sizes, settings, direct=True)) + training
    return alone, looked + _evaluation(sizes)


def _whitening(sizes: Sizes) -> float:
    """Seconds of X^T X, and of X C0 twice."""
    return 5 * sizes.n * sizes.d**2 * _GEMM_FLOP


def _columns(sizes: Sizes, eps: float, passes: int = 0) -> float:
    """Seconds of solves for all columns of Q."""
    step = sizes.d * sizes.work * _CHEBYSHEV_STEP
    step += math.ceil(sizes.d / BLOCK_WIDTH) * _CHEBYSHEV_LAUNCH
    return (sizes.degree(eps) + passes) * step


def _evaluation(sizes: Sizes) -> float:
    """Seconds of the true objective and its gradient: two solves over the outputs."""
    solves = 2 * sizes.degree(1e-4) * (sizes.c * sizes.work * _CG_STEP + _CG_LAUNCH)
    sparse = sizes.nonzeros is not None
    count, each = (sizes.nonzeros, _SPARSE_PASS) if sparse else (sizes.n * sizes.d, _DENSE_PASS)
    return solves + 3 * (count or 0) * (each + 2 * sizes.c * _GEMM_FLOP)


def worth_reordering(settings: Settings, d: int, c: int, least: float) -> bool:
    """Whether a fit multiplies enough columns with H, at `least` so many, for a better order."""
    top = 1 + 2 * settings.lam  # decided before the graph has been looked at
    evaluations = 1 if settings.quadratic else _CE_EVALUATIONS
    columns = d * least_degree(top, 1e-3) + 2 * c * evaluations * least_degree(top, 1e-4)
    return columns >= least


def sampling_pays(sizes: Sizes, settings: Settings, s: int) -> bool:
    """Whether s samples save more solves for Q than a rougher P costs."""
    m, degree = sizes.m, sizes.degree(Q_tolerance(sizes, settings, direct=False))
    saved = sizes.d * degree * 2 * (m - s) * _CHEBYSHEV_STEP
    # About three more outer steps, and Lanczos for the certificate.
    columns = 3 * 2 * sizes.c + 40 * _NARROW_AND_DENSE
    return saved > columns * sizes.degree(1e-4) * 2 * m * _CG_STEP


def certificate_costs(sizes: Sizes) -> tuple[float, float, float]:
    """Predicted seconds of the proven, the measured and the probabilistic certificate."""
    # Rows of Q outside training, their Gram matrix or its like, and its norm.
    rest = sizes.n - sizes.n_train
    proven = (rest * sizes.d**2 + 8 * min(rest, sizes.d) ** 2 * sizes.d) * _GEMM_FLOP
    measured = proven + 2 * sizes.d * sizes.work * _CHEBYSHEV_STEP
    lanczos = 40 * sizes.degree(1e-4) * (sizes.work * _NARROW * _CG_STEP + _CG_LAUNCH)
    return proven, measured, lanczos + 80 * 2 * sizes.n * sizes.d * _GEMM_FLOP
