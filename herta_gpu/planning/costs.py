"""What each way to train would cost, in seconds of a nominal 2-core machine.

The figures need not be right on yours: only their ratios decide, and those are between the same few
operations everywhere.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import scipy.sparse as sp

from herta_gpu.backends.base import Backend
from herta_gpu.features import bytes_held, has_hidden_columns
from herta_gpu.graph import Graph
from herta_gpu.laplacian import BLOCK_WIDTH, RegularizedLaplacian, chebyshev_degree
from herta_gpu.losses import LOSSES
from herta_gpu.planning.settings import Settings
from herta_gpu.plumbing.estimator import Targets
from herta_gpu.plumbing.reading import mapping_of

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
_ROUNDED, _SINGLE = 0.3, np.finfo(np.float32)  # share of a goal that float32 rows may take
_CE_GOAL = 1e-4  # cross entropy: times sqrt(tol ridge)
_OUTER_STEPS = 1  # steps of CG from the warm start, as on nearly every real graph tried
_CE_EVALUATIONS = 40  # cross entropy and its gradient, so many times


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
    mapped: bool = False  # the graph lies in files, and its neighbours may stay there ...
    paged: bool = False  # ... and do: each product reads them again
    may_narrow: bool = False  # training rows of Q may be float32 ...
    narrow: bool = False  # ... and are
    nonzeros: int | None = None  # entries of a sparse X
    X_bytes_at: Callable[[int], int] | None = None  # X_bytes with another budget
    ranks: int = 1  # processes that blocks of columns are dealt out to
    parts: int = 1  # processes that have rows of their own
    copies: int = 0  # of the training rows of Q: centred for an intercept, scaled by weights

    @property
    def dtype(self) -> str:
        return f"float{8 * self.word}"


def sizes_of(
    H: RegularizedLaplacian,
    X: Any,
    targets: Targets,
    settings: Settings,
    budget: int,
    beside: int = 0,
) -> Sizes:
    """The sizes of data that are there; `beside` rows of outputs are wanted as well."""
    backend = H.backend
    here = bytes_held(X, backend, budget)
    return Sizes(
        n=int(backend.total(H.n)),
        m=H.graph.num_edges,
        d=settings.features(X.shape[1], targets.Y.shape[1]),
        c=targets.Y.shape[1],
        n_train=targets.Y.shape[0],
        word=np.dtype(settings.dtype).itemsize,
        X_bytes=int(backend.total(here)),
        hidden=has_hidden_columns(X, targets.rows, backend),
        nonzeros=int(backend.total(X.nnz)) if sp.issparse(X) else None,
        X_bytes_at=lambda other: bytes_held(X, backend, other),
        beside=int(backend.total(beside)),
        copies=row_copies(settings, targets.weights is not None),
        card=backend.xp is not np,
        weighted=H.graph.weights is not None,
        mapped=backend.xp is np and mapping_of(H.graph.indices) is not None,
        half=settings.dtype == "float32" and backend.half_pays(H.laplacian(), BLOCK_WIDTH),
        ranks=backend.ranks if backend.whole else 1,
        parts=1 if backend.whole else backend.ranks,
    )


def row_copies(settings: Settings, weighted: bool) -> int:
    """Copies of the training rows of Q that an intercept and weights ask for."""
    seen = settings.fit_intercept or weighted
    return int(settings.fit_intercept) + int(seen and not LOSSES[settings.loss].quadratic)


class Outline(RegularizedLaplacian):
    """H of a graph that is not there yet: enough for a plan, with bounds that hold for any."""

    def __init__(self, n: int, lam: float) -> None:
        self.lam, self._n = float(lam), n

    @property
    def n(self) -> int:
        return self._n

    @property
    def lambda_max(self) -> float:
        return 1.0 + 2.0 * self.lam


def Q_tolerance(H: RegularizedLaplacian, sizes: Sizes, settings: Settings, strategy: str) -> float:
    """How well Q must approximate H^-1 X."""
    top = H.lambda_max
    if sizes.hidden and sizes.n_train >= sizes.d:
        return EXACT_TOL
    if strategy == "direct":  # and the true model is looked at afterwards
        # What Q is off by counts squared in the loss.  Tight enough that the first look at the true
        # model is nearly always the last; a duality gap asks for more.
        share = 0.5 if LOSSES[settings.loss].quadratic else 0.1
        return min(1e-3, share * math.sqrt(settings.tol / top))
    if sizes.n_train == sizes.n:
        return 0.1
    # With a mask the error counts against the masked rows: tighter as lam grows.
    loose = min(0.1, 0.1 / top)
    return min(loose, 0.003) if sizes.n_train < sizes.d else loose


def softmax_goal(settings: Settings) -> float:
    """`Q_goal` for cross entropy."""
    # A ridge of 0 proves nothing, but the optimum must be that of the true model.
    size = math.sqrt(settings.tol * min(settings.ridge, 1.0)) if settings.ridge else 1.0
    return min(1e-4, max(1e-10, _CE_GOAL * size))


def Q_goal(H: RegularizedLaplacian, sizes: Sizes, settings: Settings, whiten: bool) -> float:
    """Residuals of Q's columns that should prove a fit from Q alone, relative to those of X C0.

    A guess: should it miss, the fit itself tells what is needed, and goes on.
    """
    if not LOSSES[settings.loss].quadratic:
        return softmax_goal(settings)
    rho = min(0.1, math.sqrt(settings.tol) / _MISFIT)
    # The smallest singular value of the training rows of H^-1 X C0, as seen on real graphs.
    smallest = math.sqrt(sizes.n_train / sizes.n) / (0.7 * H.lambda_max + 0.9)
    smallest *= 1.0 if whiten else _ALIKE
    # The objective, too, is known from Q alone, and what Q is off by counts there as it is.
    seen = 3e-3 * math.sqrt(settings.tol) * min(1.0, (1e6 * settings.tol) ** 0.25)
    return max(1e-13, min(rho * smallest / math.sqrt(sizes.d), seen))


def rows_may_be_narrow(H: RegularizedLaplacian, sizes: Sizes, settings: Settings) -> bool:
    """Whether training rows of Q can be kept in float32 and still prove the fit.

    What that rounds away counts like what the solves leave.  Cross entropy asks for far less.
    """
    if not LOSSES[settings.loss].quadratic or sizes.word > _SINGLE.dtype.itemsize:
        return False
    if sizes.copies:
        return False  # centred or scaled ones are made beside them, in float64
    if 0.0 in settings.lams or settings.label_folds:
        return False  # features as they are have no residual that says what rounding took
    goal = Q_goal(H, sizes, settings, worth_whitening(H, sizes, settings))
    return 0.5 * float(_SINGLE.eps) <= _ROUNDED * goal


def worth_whitening(H: RegularizedLaplacian, sizes: Sizes, settings: Settings) -> bool:
    """Whether orthonormal columns cost little beside the products with H.

    Not with a ridge, which speaks of W: features of very unequal units would be mixed.
    """
    if settings.ridge > 0 or not LOSSES[settings.loss].quadratic or sizes.n_train < sizes.d:
        return False
    work = (2 * sizes.m + 4 * sizes.n) * _CHEBYSHEV_STEP
    degree = chebyshev_degree(H, Q_goal(H, sizes, settings, True))
    return _whitening(sizes) <= 0.35 * sizes.d * degree * work


def _whitening(sizes: Sizes) -> float:
    """Predicted seconds of X^T X, and of X C0 twice."""
    return 5 * sizes.n * sizes.d**2 * _GEMM_FLOP


def row_tolerance(settings: Settings, look: bool = False) -> float:
    """How well H^-1 M^T must be solved for; without a ridge its rows must span what A's do.

    With one they must prove the fit, unless the true model does (`look`): a guess, and the fit
    tells what is needed should it miss.
    """
    if settings.ridge == 0:
        return _ROW_SPACE_TOL
    if look:
        return min(1e-4, math.sqrt(settings.tol) / 10)
    share = 1e-4 if LOSSES[settings.loss].quadratic else 1e-6
    return max(1e-12, share * math.sqrt(settings.tol))


def strategy_costs(H: RegularizedLaplacian, sizes: Sizes, settings: Settings) -> dict[str, float]:
    """Predicted seconds of each strategy: solves for Q, d x d work, the loop."""
    small = min(sizes.n_train, sizes.d)
    dense = sizes.n_train * sizes.d * small * _GEMM_FLOP + small**3 / 3 * _FACTOR_FLOP
    evaluations = 1 + (_OUTER_STEPS if LOSSES[settings.loss].quadratic else _CE_EVALUATIONS)
    rough = chebyshev_degree(H, Q_tolerance(H, sizes, settings, "herta"))
    herta = _columns(sizes, rough) + evaluations * _evaluation(H, sizes)
    return {"herta": herta + dense, "direct": dense + min(direct_costs(H, sizes, settings))}


def direct_costs(H: RegularizedLaplacian, sizes: Sizes, settings: Settings) -> tuple[float, float]:
    """Predicted seconds of "direct", proven from Q alone or by one look at the true model."""
    loss = LOSSES[settings.loss]
    training = 0.0
    if not loss.quadratic:
        training = _CE_EVALUATIONS * 4 * sizes.n_train * sizes.d * sizes.c * _GEMM_FLOP
    if sizes.n_train < sizes.d:
        work = sizes.n_train * (2 * sizes.m + 4 * sizes.n) * _CG_STEP
        training += 2 * sizes.n * sizes.n_train * sizes.d * _GEMM_FLOP
        alone, looked = (chebyshev_degree(H, row_tolerance(settings, look)) * work + training
                         for look in (False, True))  # fmt: skip
        return (alone if settings.ridge > 0 else math.inf), looked + _evaluation(H, sizes)
    whiten = worth_whitening(H, sizes, settings)
    tight = chebyshev_degree(H, Q_goal(H, sizes, settings, whiten)) + 2
    alone = _columns(sizes, tight) + (_whitening(sizes) if whiten else 0.0) + training
    if loss.quadratic:
        return alone, math.inf
    degree = chebyshev_degree(H, Q_tolerance(H, sizes, settings, "direct"))
    return alone, _columns(sizes, degree) + training + _evaluation(H, sizes)


def _columns(sizes: Sizes, degree: int) -> float:
    """Predicted seconds of Q by Chebyshev."""
    work = sizes.d * (2 * sizes.m + 4 * sizes.n) * _CHEBYSHEV_STEP
    return degree * (work + math.ceil(sizes.d / BLOCK_WIDTH) * _CHEBYSHEV_LAUNCH)


def _evaluation(H: RegularizedLaplacian, sizes: Sizes) -> float:
    """Predicted seconds of the true objective and its gradient: two solves over the outputs."""
    work = (2 * sizes.m + 4 * sizes.n) * _CG_STEP
    inner = chebyshev_degree(H, 1e-4)
    return 2 * inner * (sizes.c * work + _CG_LAUNCH) + 3 * _pass(sizes)


def _pass(sizes: Sizes) -> float:
    """Predicted seconds of X W or X^T V."""
    if sizes.nonzeros is not None:
        return sizes.nonzeros * (_SPARSE_PASS + 2 * sizes.c * _GEMM_FLOP)
    return sizes.n * sizes.d * (_DENSE_PASS + 2 * sizes.c * _GEMM_FLOP)


def worth_reordering(settings: Settings, d: int, c: int, least: float) -> bool:
    """Whether a fit multiplies enough columns with H, at `least` so many, for a better order."""
    H = Outline(1, settings.lam)  # decided before the graph has been looked at
    evaluations = 1 if LOSSES[settings.loss].quadratic else _CE_EVALUATIONS
    columns = d * chebyshev_degree(H, 1e-3) + 2 * c * evaluations * chebyshev_degree(H, 1e-4)
    return columns >= least


def stored_order(graph: Graph, X: Any, c: int, settings: Settings, backend: Backend) -> Graph:
    """`graph` in the order in which it is worked on."""
    if not backend.whole:
        return graph
    if settings.reorder.when != "auto":
        return graph.reordered("communities") if settings.reorder.when == "always" else graph
    # Rows of X on disk are read in their own order.
    pays = worth_reordering(settings, X.shape[1], c, backend.order_columns)
    if isinstance(X, np.memmap) or not pays:
        return graph
    return graph.in_local_order(backend.communities)


def sampling_pays(H: RegularizedLaplacian, sizes: Sizes, settings: Settings, s: int) -> bool:
    """Whether s samples save more solves for Q than a rougher P costs."""
    m, degree = sizes.m, chebyshev_degree(H, Q_tolerance(H, sizes, settings, "herta"))
    saved = sizes.d * degree * 2 * (m - s) * _CHEBYSHEV_STEP
    # About three more outer steps, and Lanczos for the certificate.
    columns = 3 * 2 * sizes.c + 40 * _NARROW_AND_DENSE
    return saved > columns * chebyshev_degree(H, 1e-4) * 2 * m * _CG_STEP


def certificate_costs(H: RegularizedLaplacian, sizes: Sizes) -> tuple[float, float, float]:
    """Predicted seconds of the proven, the measured and the probabilistic certificate."""
    # Rows of Q outside training, their Gram matrix or its like, and its norm.
    rest = sizes.n - sizes.n_train
    work, small = 2 * sizes.m + 4 * sizes.n, min(rest, sizes.d)
    proven = (rest * sizes.d**2 + 8 * small**2 * sizes.d) * _GEMM_FLOP
    measured = proven + 2 * sizes.d * work * _CHEBYSHEV_STEP
    lanczos = 40 * chebyshev_degree(H, 1e-4) * (work * _NARROW * _CG_STEP + _CG_LAUNCH)
    lanczos += 80 * 2 * sizes.n * sizes.d * _GEMM_FLOP
    return proven, measured, lanczos
