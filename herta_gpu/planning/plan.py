"""What will be done and why, decided from sizes alone, before anything large is allocated."""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace

import numpy as np

from herta_gpu.features import chunk_bytes
from herta_gpu.optimizers import NEWTON_SIZE
from herta_gpu.planning.costs import (
    Options,
    Outline,
    Q_tolerance,
    Sizes,
    certificate_costs,
    row_tolerance,
    sampling_pays,
    strategy_costs,
)
from herta_gpu.plumbing.validation import BudgetError
from herta_gpu.preconditioner import Recipe
from herta_gpu.solver import (
    BLOCK_WIDTH,
    RegularizedLaplacian,
    block_width,
    chebyshev_degree,
    column_bytes,
)
from herta_gpu.sparsifier import degree_scores, sample_size

BETA = 1.0 / 64.0  # Algorithm 1; with K = C = 1 its sample sizes exceed m and n on real graphs
SKETCH_ROWS_PER_COLUMN = 16  # measured: condition number about 2.7 after preconditioning
AUTO_EPS = 0.5  # accuracy of a sparsifier that "auto" may use


@dataclass
class Plan:
    """The decisions of a fit; prints as a table.

    Attributes
    ----------
    strategy : "herta" or "direct"
    n_samples : int or None
        Edges to sample for L_tilde; None: the full graph.
    sketch_rows : int or None
        Rows of the SRHT; None: the exact Gram matrix.
    loop_samples : int or None
        Edges to sample for the loop itself (sparsify="mixed").
    certificate : str
        The kind that will be tried first.
    memory : dict of stage to bytes
    cost : dict of strategy to predicted seconds on a nominal machine
    decisions : list of (what, decision, why)
    """

    strategy: str
    n_samples: int | None
    sketch_rows: int | None
    certificate: str
    recipe: Recipe
    solve_width: int
    loop_samples: int | None = None
    memory: dict[str, int] = field(default_factory=dict)
    cost: dict[str, float] = field(default_factory=dict)
    decisions: list[tuple[str, str, str]] = field(default_factory=list)

    @property
    def identity(self) -> str:
        """What decides the coordinates of training and its last bits, in one word.

        A fit that goes on from a checkpoint may have more memory or less, and so another plan.
        """
        return repr((self.n_samples, self.loop_samples, self.solve_width, self.recipe))

    def __str__(self) -> str:
        rows = [("", "decision", "why"), *self.decisions]
        widths = [max(len(r[i]) for r in rows) for i in range(2)]
        lines = [f"{a:<{widths[0]}}  {b:<{widths[1]}}  {c}".rstrip() for a, b, c in rows]
        return "\n".join(lines)


def make_plan(H: RegularizedLaplacian, sizes: Sizes, options: Options) -> Plan:
    """Choose strategy, sparsifier, sketch and certificate within the memory budget."""
    decisions: list[tuple[str, str, str]] = []
    cost = strategy_costs(H, sizes, options)
    strategy = _strategy(sizes, options, cost, decisions)
    n_samples = _samples(H, sizes, options, strategy, decisions)
    by_rows = _by_rows(sizes, options, strategy, n_samples)
    degree = chebyshev_degree(H, Q_tolerance(H, sizes, options, strategy))
    certificate = _certificate(H, sizes, options, by_rows, n_samples)
    small = sizes.d * sizes.c <= NEWTON_SIZE
    keep_rows = options.loss == "ce" and (strategy == "direct" or small)
    sketch_rows, certificate, memory, width, Q_width = _fit_memory(
        sizes, options, by_rows, certificate, keep_rows, decisions
    )
    recipe = Recipe(
        degree=degree,
        width=Q_width,
        exact=sizes.hidden and sizes.n_train >= sizes.d,
        sketch_rows=sketch_rows,
        by_rows=by_rows,
        row_tol=row_tolerance(options),
        all_rows=certificate in _DETERMINISTIC,
        keep_rows=keep_rows and sketch_rows is None,
        # The softmax at W = 0, where training starts, has curvature (1 - 1/c) / c per class.
        curvature=1.0 if options.loss == "mse" or sizes.c < 2 else (1 - 1 / sizes.c) / sizes.c,
        symmetric=options.optimizer == "adam",
        seed=options.seed,
    )
    solved = (
        "H^-1 M^T (fewer train rows than features)" if by_rows else f"Chebyshev degree {degree}"
    )
    decisions.append(("Q", solved, "solves with " + ("CG" if by_rows else "one polynomial")))
    decisions.append(("certificate", certificate, _CERTIFICATE_WHY[certificate]))
    total = sum(memory.values())
    decisions.append(
        ("memory", f"{total / 2**20:,.1f} MB", f"budget {options.budget / 2**20:,.0f} MB")
    )
    loop_samples = _loop_samples(H, sizes, options, decisions)
    return Plan(
        strategy, n_samples, sketch_rows, certificate, recipe, width, loop_samples, memory, cost,
        decisions,
    )  # fmt: skip


_DETERMINISTIC = ("spectral-proven", "spectral-deterministic")  # they need Q on all rows
_CERTIFICATE_WHY = {
    "spectral-proven": "the error of the polynomial proves it",
    "spectral-deterministic": "the error of the polynomial or, if need be, R = X - H Q proves it",
    "spectral-probabilistic": "Lanczos: Q is a sketch, of a sampled graph, or kept in part only",
    "duality": "the ridge makes the objective strongly convex",
    "none": "no strong convexity to build on: the gradient decides",
}


def _strategy(
    sizes: Sizes, options: Options, cost: dict[str, float], decisions: list[tuple[str, str, str]]
) -> str:
    if not options.precondition:
        decisions.append(("strategy", "herta", "precondition=False: standard training"))
        return "herta"
    if options.strategy != "auto":
        decisions.append(("strategy", options.strategy, "as asked"))
        return options.strategy
    if options.sparsify not in ("auto", False) or options.sketch not in ("auto", False):
        decisions.append(("strategy", "herta", "sparsify or sketch was asked for"))
        return "herta"
    best = min(cost, key=lambda s: cost[s])
    why = ", ".join(f"{s} {cost[s]:.3g}" for s in cost)
    decisions.append(("strategy", best, f"predicted cost: {why}"))
    return best


def _samples(
    H: RegularizedLaplacian,
    sizes: Sizes,
    options: Options,
    strategy: str,
    decisions: list[tuple[str, str, str]],
) -> int | None:
    """How many edges to sample for L_tilde."""
    m, wish = sizes.m, options.sparsify
    if wish is False or strategy == "direct" or m == 0 or not options.precondition:
        decisions.append(("sparsify", "no", "not asked for" if wish is False else "not useful"))
        return None
    if wish is not True and isinstance(wish, (int, np.integer)):
        decisions.append(("sparsify", f"{int(wish):,} samples", f"as asked, of {m:,} edges"))
        return int(wish)
    n_lambda = _n_lambda(H)
    if wish is True:
        s = sample_size(n_lambda, sizes.n, BETA / (3 * max(H.lam, 1.0)))
        capped = f"Algorithm 2 wants {s:.2g}, capped at m" if s > m else "Algorithm 2"
        decisions.append(("sparsify", f"{min(s, m):,} samples", capped))
        return min(s, m)
    s = sample_size(n_lambda, sizes.n, AUTO_EPS)
    if wish == "degree":
        capped = f"degree scores want {s:,}, capped at m" if s > m else "by degree scores"
        decisions.append(("sparsify", f"{min(s, m):,} samples", capped))
        return min(s, m)
    if s < m and sampling_pays(H, sizes, options, s):
        decisions.append(("sparsify", f"{s:,} samples", f"of {m:,} edges: cheaper solves for Q"))
        return s
    why = f"{s:,} samples would not save work on {m:,} edges"
    decisions.append(("sparsify", "no", why))
    return None


def _n_lambda(H: RegularizedLaplacian) -> float:
    """A cheap bound of the effective dimension."""
    if isinstance(H, Outline):
        # The sum of w (1/d_u + 1/d_v) over the edges is that of dt_u/d_u < 1 over the nodes.
        return H.n / (1.0 + 1.0 / H.lam)
    return float(degree_scores(H.graph, H.lam).sum())


def _by_rows(sizes: Sizes, options: Options, strategy: str, n_samples: int | None) -> bool:
    """Whether to solve for H^-1 M^T, fewer columns than H^-1 X has, and to know A itself."""
    if sizes.n_train >= sizes.d or n_samples is not None or not options.precondition:
        return False
    # Without a ridge the rows of an approximate Q would span another space than those of A.
    return strategy == "direct" or (options.ridge == 0 and options.sketch in ("auto", False))


def _loop_samples(
    H: RegularizedLaplacian, sizes: Sizes, options: Options, decisions: list[tuple[str, str, str]]
) -> int | None:
    """The appendix's mixed strategy: samples for the loop if n_lambda / tol <= m log(1 / tol)."""
    if options.sparsify != "mixed":
        return None
    n_lambda = _n_lambda(H) if sizes.m else 0.0
    s = sample_size(n_lambda, sizes.n, math.sqrt(options.tol))
    rule = n_lambda / options.tol <= sizes.m * math.log(1 / min(options.tol, 0.5))
    if rule and s < sizes.m:
        decisions.append(("loop", f"{s:,} samples", "n_lambda / tol <= m log(1 / tol)"))
        return s
    why = f"needs {s:,} samples of {sizes.m:,} edges" if rule else "n_lambda / tol > m log(1 / tol)"
    decisions.append(("loop", "full graph", why))
    return None


def _certificate(
    H: RegularizedLaplacian, sizes: Sizes, options: Options, by_rows: bool, n_samples: int | None
) -> str:
    """The kind of certificate to try first."""
    if options.loss == "ce" or not options.precondition:
        return "duality" if options.ridge > 0 else "none"
    if by_rows or (sizes.n_train < sizes.d and options.ridge == 0):
        return "duality" if options.ridge > 0 else "none"
    if n_samples is not None or options.sketch not in ("auto", False):
        return "spectral-probabilistic"
    proven, measured, lanczos = certificate_costs(H, sizes)
    if measured <= 2 * lanczos:
        return "spectral-deterministic"
    return "spectral-proven" if proven <= 2 * lanczos else "spectral-probabilistic"


def _fit_memory(
    sizes: Sizes,
    options: Options,
    by_rows: bool,
    certificate: str,
    keep_rows: bool,
    decisions: list[tuple[str, str, str]],
) -> tuple[int | None, str, dict[str, int], int, int]:
    """Sketch rows, certificate, bytes per stage, block widths of solves and of Q in the budget."""
    padded = 1 << max(0, sizes.n_train - 1).bit_length()
    rows, why = _sketch_wish(sizes, options, padded)
    if by_rows or not options.precondition:
        rows, why = None, "no Q to sketch"
    for attempt in ("as planned", "without R", "training rows of Q", "sketched"):
        if attempt == "without R" and certificate == "spectral-deterministic":
            certificate = "spectral-proven"
        if attempt == "training rows of Q" and certificate == "spectral-proven":
            certificate = "spectral-probabilistic"
        if attempt == "sketched":
            can = options.sketch == "auto" and not by_rows and options.precondition
            if not can or SKETCH_ROWS_PER_COLUMN * sizes.d >= sizes.n_train:
                continue
            rows, why = SKETCH_ROWS_PER_COLUMN * sizes.d, "Q does not fit the memory budget"
        memory = _memory(sizes, options, rows, certificate)
        left = options.budget - sum(memory.values())
        width = block_width(sizes.n, max(sizes.d, sizes.c), sizes.dtype, left)
        if width >= 1:
            Q_column = _Q_column(sizes, by_rows, rows)
            Q_width = min(sizes.d, BLOCK_WIDTH, left // Q_column)
            block = max(Q_width * Q_column, _block_bytes(sizes, width, certificate))
            memory["one block of columns"] = block
            shown = "no" if rows is None else f"{rows:,} rows"
            decisions.append(("sketch", shown, why))
            shown = f"{width}" if width >= Q_width else f"{width}, of Q {Q_width}"
            decisions.append(("columns at once", shown, f"at most {BLOCK_WIDTH}, as they fit"))
            return rows, certificate, memory, width, Q_width
    least = _least_budget(sizes, options, rows, certificate)
    raise BudgetError(
        f"This fit needs at least {least:,} MB but the budget is {options.budget / 2**20:,.1f} MB: "
        "raise memory_budget, free memory or use fewer features."
    )


def _least_budget(sizes: Sizes, options: Options, rows: int | None, certificate: str) -> int:
    """MB with which the thriftiest plan works: what it takes grows with the budget, but slower."""
    budget, need = 0, 1
    while need > budget << 20:
        budget = -(-need >> 20)
        there = replace(options, budget=budget << 20)
        held = sizes.X_bytes if sizes.X_bytes_at is None else sizes.X_bytes_at(there.budget)
        memory = _memory(replace(sizes, X_bytes=held), there, rows, certificate)
        need = sum(memory.values()) + sizes.n * column_bytes(sizes.dtype)
    return budget


def _Q_column(sizes: Sizes, by_rows: bool, sketch_rows: int | None) -> int:
    """Bytes of a column of Q while it is made: Chebyshev holds three, CG and a sketch more."""
    if by_rows or sketch_rows is not None:
        return sizes.n * column_bytes(sizes.dtype)
    return sizes.n * (3 * (8 if sizes.hidden else sizes.word) + 8)


def _block_bytes(sizes: Sizes, width: int, certificate: str) -> int:
    """Of a block of outputs while it is solved for by CG, or of Q while R is measured."""
    block = min(width, sizes.c) * column_bytes(sizes.dtype)
    if certificate == "spectral-deterministic":
        block = max(block, width * (2 * sizes.word + 32))
    return sizes.n * block


def _sketch_wish(sizes: Sizes, options: Options, padded: int) -> tuple[int | None, str]:
    wish = options.sketch
    if wish is True:
        s = math.ceil(sizes.d * math.log(max(sizes.n, 2)) / BETA**2)
        why = f"Algorithm 1 wants {s:.2g}, capped at n padded to a power of two"
        return min(s, padded), why if s > padded else "Algorithm 1"
    if wish is not False and isinstance(wish, (int, np.integer)):
        s = min(int(wish), padded)
        return s, "as asked" if s == wish else "as asked, capped at n padded to a power of two"
    return None, "not asked for" if wish is False else "the exact Gram matrix is cheaper"


def _memory(sizes: Sizes, options: Options, rows: int | None, certificate: str) -> dict[str, int]:
    """Bytes per stage that stay allocated, blocks of columns apart."""
    n, d, c, word = sizes.n, sizes.d, sizes.c, sizes.word
    graph = 2 * sizes.m * 4 + 8 * n + 4 * 8 * n
    chunks = 2 * min(chunk_bytes(options.budget), 8 * n * d)
    memory = {
        "graph": graph, "X (copies)": sizes.X_bytes, "chunks of X": chunks,
        "outputs": 7 * n * c * 8,
    }  # fmt: skip
    if options.precondition:
        q_rows = sizes.n_train if rows is None else rows
        if certificate in _DETERMINISTIC:
            q_rows = n
        memory["Q"] = q_rows * d * (8 if sizes.hidden else word)
        memory["P and its factor"] = 3 * min(d, max(sizes.n_train, 1)) * d * 8
    if certificate in _DETERMINISTIC:
        # B and its Gram matrix, for as many rows outside training as columns at most.
        outside = min(n - sizes.n_train, d)
        memory["rows of Q outside training"] = 8 * outside * (d + 3 * outside)
    if certificate == "spectral-deterministic":
        memory["R"] = n * d * (8 if sizes.hidden else word) + 3 * d * d * 8
    return memory
