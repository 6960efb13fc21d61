"""What each way to train would cost: seconds of a nominal 2-core machine, and bytes.

The seconds need not be right on yours: only their ratios decide, and those are between the same few
operations everywhere.  Of the bytes, at the end, the budget decides.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from enum import Enum

import numpy as np

from herta_gpu.planning.settings import LABEL_LAMS, LABEL_WIDTH, TOGETHER, Settings
from herta_gpu.plumbing.checks import BudgetError

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
_FACTOR_ENTRY = 8e-10  # triangular solves of a sparse factor, per entry and column
_TRY_FACTOR = 3e-9  # seconds per node squared that Chebyshev must take before a factor is tried
_PROBE = 100.0, 32  # bound of H's spectrum and columns from which CG is worth a look
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
_ALIKE = 1 / 4  # of columns of norm 1, beside orthonormal ones: five datasets asked for no more
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
    factored: Callable[[], int] | None = None  # entries of a sparse factor, made to see; 0: none
    probe: Callable[[], float] | None = None  # steps of CG for each digit, measured on one column
    slowness: float = 1.0  # of products with H, in the times of the compiled CPU backend

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

    def cg_steps(self, eps: float) -> int:
        """Steps of CG to `eps`: fewer than Chebyshev's degree where eigenvalues come in a bunch."""
        most = self.degree(eps)
        if self.probe is None or self.top < _PROBE[0] or self.d < _PROBE[1]:
            return most
        return min(most, 2 + math.ceil(self.probe() * math.log10(1 / eps)))

    def n_lambda(self) -> float:
        """A cheap bound of the effective dimension; of a graph that is not there, of any graph.

        The sum of w (1/d_u + 1/d_v) over the edges is at most n; top = 1 + 2 lam.
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
    # The smallest of many exact weights have no proof: they are as exact as Q, so it is tight.
    bare = sizes.few_rows and settings.ridge == 0
    smallest *= 1.0 if whiten else 0.1 * _ALIKE if bare else _ALIKE
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

    With one they must prove the fit, unless the true model does (`look`): a guess as `Q_goal`.
    """
    if settings.ridge == 0:
        return _ROW_SPACE_TOL
    if look:
        return min(1e-4, math.sqrt(settings.tol) / 10)
    return max(1e-12, (1e-4 if settings.quadratic else 1e-6) * math.sqrt(settings.tol))


# ---- seconds -----------------------------------------------------------------------------
def worth_whitening(sizes: Sizes, settings: Settings) -> bool:
    """Whether orthonormal columns are cheap; a ridge, which speaks of W, would mix their units."""
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
    if settings.quadratic and settings.precondition and not sizes.few_rows:
        proven, measured, lanczos = certificate_costs(sizes)
        herta += measured if measured <= 2 * lanczos else min(proven, lanczos)
    return {"herta": herta + dense, "direct": dense + min(direct_costs(sizes, settings))}


def direct_costs(sizes: Sizes, settings: Settings) -> tuple[float, float]:
    """Predicted seconds of "direct", proven from Q alone or by one look at the true model."""
    training = 0.0
    if not settings.quadratic:
        training = _CE_EVALUATIONS * 4 * sizes.n_train * sizes.d * sizes.c * _GEMM_FLOP
    if sizes.few_rows:
        training += 2 * sizes.n * sizes.n_train * sizes.d * _GEMM_FLOP
        looked, alone = (
            way_to_Q(sizes, row_tolerance(settings, look), True)[1] + training
            for look in (True, False)
        )
        return (alone if settings.ridge > 0 else math.inf), looked + _evaluation(sizes)
    whiten = worth_whitening(sizes, settings)
    alone = way_to_Q(sizes, Q_goal(sizes, settings, whiten))[1] + training
    if settings.quadratic:
        return alone + whiten * _whitening(sizes), math.inf
    looked = _columns(sizes, Q_tolerance(sizes, settings, direct=True)) + training
    return alone, looked + _evaluation(sizes)


def _whitening(sizes: Sizes) -> float:
    """Seconds of X^T X, and of X C0 twice."""
    return 5 * sizes.n * sizes.d**2 * _GEMM_FLOP


def _columns(sizes: Sizes, eps: float) -> float:
    """Seconds of one polynomial for all columns of Q."""
    step = sizes.d * sizes.work * _CHEBYSHEV_STEP * sizes.slowness
    return sizes.degree(eps) * (step + math.ceil(sizes.d / BLOCK_WIDTH) * _CHEBYSHEV_LAUNCH)


def way_to_Q(sizes: Sizes, eps: float, by_rows: bool = False) -> tuple[str, float]:
    """The cheapest way to solve for measured columns of Q, or of H^-1 M^T, and its seconds."""
    columns, launch = (sizes.n_train, 0.0) if by_rows else (sizes.d, _CHEBYSHEV_LAUNCH)
    step = columns * sizes.work * sizes.slowness * (_CG_STEP if by_rows else _CHEBYSHEV_STEP)
    step += math.ceil(columns / BLOCK_WIDTH) * launch
    found = {"chebyshev": (sizes.cg_steps(eps) if by_rows else sizes.degree(eps) + 2) * step}
    if not by_rows and sizes.cg_steps(eps) < sizes.degree(eps):
        found["cg"] = sizes.cg_steps(eps) * step * _CG_STEP / _CHEBYSHEV_STEP
    # What a factor would cost is known when it is there: worth a try where it cannot cost much.
    if sizes.factored is not None and found["chebyshev"] > _TRY_FACTOR * sizes.n**2:
        entries = sizes.factored() or math.inf
        found["factor"] = columns * entries * _FACTOR_ENTRY + 2 * step
    way = min(found, key=lambda name: found[name])
    return way, found[way]


def _evaluation(sizes: Sizes) -> float:
    """Seconds of the true objective and its gradient: two solves over the outputs."""
    solves = (
        2 * sizes.cg_steps(1e-4) * (sizes.c * sizes.work * sizes.slowness * _CG_STEP + _CG_LAUNCH)
    )
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
    lanczos = 40 * sizes.cg_steps(1e-4) * (sizes.work * _NARROW * _CG_STEP + _CG_LAUNCH)
    return proven, measured, lanczos + 80 * 2 * sizes.n * sizes.d * _GEMM_FLOP


# ---- bytes -------------------------------------------------------------------------------
BETA = 1.0 / 64.0  # Algorithm 1; with K = C = 1 its sample sizes exceed m and n on real graphs
SKETCH_ROWS_PER_COLUMN = 16  # measured: condition number about 2.7 after preconditioning
_BLOCKS, _ENOUGH = 1 << 30, 32  # blocks of so many bytes are no wider than so many columns
CHUNK_BYTES = 16 << 20  # float64 copies of rows of X at most, and a small part of the budget
_SWEEP = 128 << 20  # bytes of outputs, residuals and targets of a run of training rows
_OUTPUTS = 7  # float64 numbers per node and output that the loop with the true model holds
_FEW = 16  # outputs at once: before they are fewer, rows of Q outside training go
_BESIDE = 0.25  # share of the memory that rows for evaluation may take
_LEFT_OUT_ROWS = 1 << 13  # training rows that leave-one-out looks at together
_NARROWEST = 8  # columns: a narrower block costs about as much
_LINE = 16  # columns of float32 in a cache line: a gather of fewer costs as much
# CuPy's pool cuts memory into pieces that no longer fit together: fits took up to 1.2 times the
# bytes that they used at once.  What is allocated once and stays is in one piece.
FRAGMENTS, CARD_SHARE = 1.2, 0.85
_IN_PIECES = ("chunks of X", "outputs on training nodes", "leave-one-out", "P and its factor")
DETERMINISTIC = ("spectral-proven", "spectral-deterministic")  # they need Q on all rows


@dataclass(frozen=True)
class Layout:
    """One way to fit: what is held, and how many columns are worked on together."""

    sizes: Sizes
    settings: Settings
    certificate: str  # the kind that is tried first
    stored: bool  # proven from training rows of Q: nothing else of it is held, nor n x c numbers
    by_rows: bool  # H^-1 M^T is solved for
    sketch_rows: int | None = None
    paged: bool = False  # neighbours stay in the graph's file
    # What the budget leaves room for, as `fitting_layout` finds it.
    width: int = 0  # columns of a solve
    Q_width: int = 0  # columns of Q while it is made
    memory: dict[str, int] = field(default_factory=dict)  # stage to bytes
    outputs: int = 0  # worked on together by solves over the outputs; 0: no memory for one
    beside: int = 0  # rows of Q outside training that are kept for evaluation
    on_host: bool = False  # stored rows of a GPU are trained on by the CPU

    @property
    def solved_column(self) -> int:
        """Bytes of a column while CG solves for it."""
        return self.sizes.n * column_bytes(self.sizes.dtype)

    def held(self, budget: int) -> dict[str, int]:
        """Bytes per stage that stay allocated, blocks of columns and of outputs apart."""
        sizes, settings = self.sizes, self.settings
        n, n_train, d, c, word = sizes.n, max(sizes.n_train, 1), sizes.d, sizes.c, sizes.word
        # Scale, diagonal and weights in the working precision, and those of nodes in float64, too.
        graph = 24 * n + 2 * sizes.m * word * sizes.weighted
        if not self.paged:  # neighbours, their weights, where rows begin; degrees on the way
            graph += 2 * sizes.m * (12 if sizes.weighted else 4) + (8 if sizes.card else 16) * n
        chunks = 4 * min(chunk_bytes(budget), 8 * n * d)
        memory = {"graph": graph, "X (copies)": sizes.X_bytes, "chunks of X": chunks}
        if self.stored:  # MSE looks at runs of rows, cross entropy at all outputs
            outputs = sizes.n_train * c * 8
            outputs = min(_SWEEP, 4 * outputs) if settings.quadratic else 8 * outputs
            memory["outputs on training nodes"] = outputs
        if settings.hidden:  # what goes into the layer: of all nodes, and of those trained on
            wide = 8 * min(settings.hidden_rank or d, d)
            memory["hidden layer"] = wide * (2 * n + (settings.blocks + 1) * sizes.n_train)
        if settings.label_folds:
            memory["label features"] = 8 * n * len(LABEL_LAMS) * c
        if settings.loo:  # outputs without each row, and what they are found from
            few = 4 * sizes.n_train**2 + 3 * sizes.n_train * d
            found = few if sizes.few_rows else 2 * d * min(sizes.n_train, _LEFT_OUT_ROWS)
            memory["leave-one-out"] = 8 * (6 * sizes.n_train * c + found)
        all_rows = self.certificate in DETERMINISTIC
        if settings.precondition:
            rows = n if all_rows else self.sketch_rows or sizes.n_train
            wide = 8 if sizes.hidden or self.stored else word
            memory["Q"] = rows * d * wide + sizes.copies * sizes.n_train * d * 8
            # P, its factor, and what is needed on the way from one to the other.
            factor = 3 * min(d, n_train) * d
            if self.stored and n_train < d:  # else rows, their span, and copies for LAPACK
                dense = case_of(n_train, d, settings.ridge, known=True) is Case.DENSE
                factor = 4 * d * d if dense else 5 * n_train * d
            memory["P and its factor"] = 8 * factor
        if all_rows:  # B and its Gram matrix, for as many rows outside training as columns at most
            outside = min(n - sizes.n_train, d)
            memory["rows of Q outside training"] = 8 * outside * (d + 3 * outside)
        if sizes.card:
            pieces = sum(memory.get(name, 0) for name in _IN_PIECES)
            memory["gaps between pieces"] = int((FRAGMENTS - 1) * pieces)
        return memory

    def outputs_in(self, left: int) -> int:
        """Outputs that the loop with the true model can work on together; of CE all, or none."""
        c, column, separable = self.sizes.c, self.solved_column, self.settings.quadratic
        # Solves of a block that is all there are as wide as it is, if there is a choice.
        wide = min(c, _FEW) if separable else 1
        if self.output_bytes(c) + wide * column <= left:
            return c
        if not separable:
            return 0
        one = self.output_bytes(2) - self.output_bytes(1)
        return max(0, min(c - 1, (left - self.output_bytes(0)) // (one + column), BLOCK_WIDTH))

    def output_bytes(self, outputs: int) -> int:
        """What the loop with the true model holds of so many outputs, beside its solves."""
        sizes = self.sizes
        targets = 0 if outputs == sizes.c else sizes.n_train * sizes.c  # those of all, meanwhile
        return 8 * (_OUTPUTS * sizes.n * outputs + targets)

    def refuse(self, budget: int, column: int) -> BudgetError:
        """The error that names the least budget; nothing can be done without a `column` of bytes.

        What is held grows with the budget, but slower.
        """
        allowed, need, sizes = 0, 1, self.sizes
        while need > allowed << 20:
            allowed = -(-need >> 20)
            held = sizes.X_bytes if sizes.X_bytes_at is None else sizes.X_bytes_at(allowed << 20)
            there = replace(self, sizes=replace(sizes, X_bytes=held))
            need = sum(there.held(allowed << 20).values()) + column
        return _too_little(allowed, budget, self.settings)


def fitting_layout(way: Layout, budget: int) -> Layout:
    """The best layout within the budget.

    First the rows of Q outside training go, then Q for its sketch.
    """
    sizes, settings = way.sizes, way.settings
    # Processes with rows of their own have this together, beside what each of them holds whole.
    whole = 8 * (sizes.n_train * (sizes.d + 4 * sizes.c) + 3 * sizes.d**2)
    budget = sizes.parts * budget - (sizes.parts - 1) * whole
    if way.stored and not way.by_rows:
        return _roomy_layout(way, budget)
    ways = [replace(way, sketch_rows=sketch(sizes, settings, way.by_rows)[0])]
    if way.certificate in DETERMINISTIC:
        ways.append(replace(ways[0], certificate="spectral-probabilistic"))
    can = settings.sketch.when == "auto" and not way.by_rows and settings.precondition
    if can and SKETCH_ROWS_PER_COLUMN * sizes.d < sizes.n_train:
        ways.append(replace(ways[-1], sketch_rows=SKETCH_ROWS_PER_COLUMN * sizes.d))
    # Rather narrower blocks of outputs than a rougher P, down to a few.
    for fewest in (min(sizes.c, _FEW), 1):
        for one in ways:
            memory = one.held(budget)
            left = budget - sum(memory.values())
            left = int(left / FRAGMENTS) if sizes.card else left  # blocks come and go
            outputs = one.outputs_in(left)
            if not one.stored:
                memory["outputs"] = one.output_bytes(outputs)
                left -= memory["outputs"]
            width = block_width(sizes.n, max(sizes.d, sizes.c), sizes.dtype, left)
            if width < 1 or not (one.stored or outputs >= fewest):
                continue
            # Chebyshev holds three columns of Q while they are made, CG and a sketch more.
            Q_column = sizes.n * (3 * (8 if sizes.hidden else sizes.word) + 8)
            if one.by_rows or one.sketch_rows is not None:
                Q_column = one.solved_column
            solved = min(sizes.n_train, sizes.d) if one.by_rows else sizes.d
            Q_width = min(sizes.d, BLOCK_WIDTH, left // Q_column)
            Q_width = dealt_width(solved, Q_width, sizes.ranks)
            width = dealt_width(outputs or sizes.c, width, sizes.ranks)
            block = max(Q_width * Q_column, min(width, outputs) * one.solved_column)
            memory["one block of columns"] = block
            return replace(one, width=width, Q_width=Q_width, memory=memory, outputs=outputs)
    column = way.solved_column
    if not way.stored:
        column += way.output_bytes(1 if settings.quadratic else sizes.c)
    raise ways[-1].refuse(budget, column)


def _roomy_layout(way: Layout, budget: int) -> Layout:
    """The layout of stored rows; neighbours of a mapped graph may stay in its file.

    There they are read again for each product.  It gathers whole cache lines, and so takes as long
    for two columns as for sixteen.
    """
    try:
        held = _stored_layout(way, budget)
        if held.width >= min(_LINE, way.sizes.d) or not way.sizes.mapped:
            return held
        paged = _stored_layout(replace(way, paged=True), budget)
        return max(held, paged, key=lambda layout: layout.width)
    except BudgetError:
        return _stored_layout(replace(way, paged=way.sizes.mapped), budget)


def _stored_layout(way: Layout, budget: int) -> Layout:
    """Three blocks of columns beside the training rows of Q."""
    sizes, settings = way.sizes, way.settings
    # Three blocks (and half of one for gathers), and the rows of one on their way into Q.
    word = 8 if settings.hops else sizes.word  # products without a solve are in float64
    column = (3 * word + 2 * sizes.half) * sizes.n + 3 * sizes.n_train * 8
    column += 8 * sizes.n * (sizes.nonzeros is not None)  # of a sparse X, made dense
    memory = way.held(budget)
    on_host = sizes.card and sum(memory.values()) + column > budget
    if on_host:
        memory["outputs on training nodes"] = min(_SWEEP, memory["outputs on training nodes"])
    beside = sizes.beside * sizes.d * sizes.word
    # Outputs that would take much of the memory are solved for when they are asked for.
    beside = beside if beside <= _BESIDE * (budget - sum(memory.values())) else 0
    if beside:
        memory["rows of Q for evaluation"] = beside
    left = budget - sum(memory.values())
    # Half as many columns cost little more each, once they are far larger than any cache.
    wide = min(BLOCK_WIDTH, max(_ENOUGH, _BLOCKS // column))
    width = dealt_width(sizes.d, min(sizes.d, wide, left // column), sizes.ranks)
    if width < 1:
        raise way.refuse(budget, column)
    memory["one block of columns"] = width * column
    if settings.label_folds:  # made before anything else is there but the graph
        # Blocks for all lam: their sums and what is added to them, steps that wait, some blocks;
        # or a copy of the columns.
        blocks = (2 * len(LABEL_LAMS) + TOGETHER + 8) * min(sizes.c, LABEL_WIDTH) + sizes.c
        made = 8 * sizes.n * max(len(LABEL_LAMS) * sizes.c, blocks)
        short = made - (sum(memory.values()) - memory["graph"] - memory["label features"])
        if short > 0:
            memory["making label features"] = short
            if sum(memory.values()) > budget:
                raise _too_little(-(-sum(memory.values()) >> 20), budget, settings)
    return replace(
        way,
        width=width,
        Q_width=width,
        memory=memory,
        outputs=way.outputs_in(left),
        beside=sizes.beside if beside else 0,
        on_host=on_host,
    )


def _too_little(least: int, budget: int, settings: Settings) -> BudgetError:
    # Outputs of cross entropy cannot be worked on in blocks: each step would visit them all.
    other = settings.strategy == "herta" and settings.precondition and not settings.custom_P
    advice = 'strategy="direct", which works on no outputs' if other else "fewer features"
    return BudgetError(
        f"This fit needs at least {least:,} MB but the budget is {budget / 2**20:,.1f} MB: "
        f"raise memory_budget, free memory or use {advice}."
    )


def dealt_width(columns: int, width: int, ranks: int) -> int:
    """Columns of a block, so that ranks have as many: 64, 52, 36 of 200 for 1, 2, 3 ranks."""
    if ranks == 1 or width <= 0:
        return width
    rounds = -(-columns // (width * ranks))
    share = -(-columns // (rounds * ranks))
    return min(width, max(_NARROWEST, -(-share // 4) * 4))  # whole vectors, as `Recipe.blocks`


def outputs_at_once(sizes: Sizes, budget: int, X_width: int, label_columns: int = 0) -> int:
    """Outputs of a fitted model that are solved for together, one at least."""
    n, word = sizes.n, sizes.word
    # The graph, X, and of each node its two best outputs and a class, once more on the way.
    held = 8 * sizes.m + 40 * n + sizes.X_bytes + 6 * n * word
    held += 4 * min(chunk_bytes(budget), 8 * n * X_width) + 8 * n * label_columns
    # X W, and Z as it goes.
    columns = (budget - held) // max(1, n * (column_bytes(sizes.dtype) + 8 + word))
    return max(1, min(sizes.c, BLOCK_WIDTH, columns))


def column_bytes(dtype: str) -> int:
    """Per node, of a column of block CG: B in float64, Z, R, P, H P, the cycle's Z, D^-1/2 P."""
    return 8 + 6 * np.dtype(dtype).itemsize


def block_width(n: int, k: int, dtype: str, budget: int) -> int:
    """Columns that a solve may advance together within `budget` bytes; 0 when not even one."""
    return int(min(k, BLOCK_WIDTH, budget // (max(n, 1) * column_bytes(dtype))))


def chunk_bytes(budget: int) -> int:
    """Bytes of a chunk of rows of X in float64; a budget of 0 stands for none."""
    return min(CHUNK_BYTES, budget // 16) if budget else CHUNK_BYTES


def sketch(sizes: Sizes, settings: Settings, by_rows: bool) -> tuple[int | None, str]:
    """(rows of the SRHT, why)."""
    wish = settings.sketch
    if by_rows or not settings.precondition:
        return None, "no Q to sketch"
    if wish.when != "always":
        asked = wish.when != "never"
        return None, "the exact Gram matrix is cheaper" if asked else "not asked for"
    padded = 1 << max(0, sizes.n_train - 1).bit_length()
    s, why = wish.count, "as asked"
    if s is None:
        s, why = math.ceil(sizes.d * math.log(max(sizes.n, 2)) / BETA**2), "Algorithm 1"
    if s <= padded:
        return s, why
    why = why if wish.count else f"Algorithm 1 wants {s:.2g}"
    return padded, f"{why}, capped at n padded to a power of two"
