"""What will be done and why, decided from sizes alone, before anything large is allocated."""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

from herta_gpu.planning.costs import (
    BLOCK_WIDTH,
    EXACT_TOL,
    MOST_DRAWS,
    Case,
    Q_goal,
    Q_tolerance,
    Sizes,
    case_of,
    certificate_costs,
    direct_costs,
    least_degree,
    row_tolerance,
    rows_may_be_narrow,
    sample_size,
    sampling_pays,
    softmax_goal,
    strategy_costs,
    worth_whitening,
)
from herta_gpu.planning.memory import BETA, DETERMINISTIC, Layout, Way, fitting_layout, sketch
from herta_gpu.planning.settings import NEWTON_SIZE, Settings
from herta_gpu.plumbing.checks import BudgetError

LEAST_LEFT = 1e-14  # residuals relative to their columns: below is rounding, even in float64
AUTO_EPS = 0.5  # accuracy of a sparsifier that "auto" may use


class Decision(NamedTuple):
    """One line of a plan."""

    what: str
    choice: str
    why: str


class Chosen(NamedTuple):
    """A value, and how to tell the user of it."""

    value: Any
    decision: Decision


@dataclass(frozen=True)
class Recipe:
    """Every decision that the bits of P depend on."""

    degree: int  # degree of the Chebyshev polynomial
    width: int  # columns of X at once
    exact: bool  # solve and keep Q in float64
    sketch_rows: int | None  # SRHT rows; None: the exact Gram matrix
    by_rows: bool  # solve for H^-1 M^T instead of H^-1 X
    row_tol: float  # tolerance of those solves
    all_rows: bool  # keep Q on all rows, for a certificate that does not depend on chance
    keep_rows: bool  # keep Q's training rows
    whiten: bool  # orthonormal columns X C0 instead of columns of norm 1
    goal: float | None  # residuals of Q's columns, relative to those of X C0; None: not measured
    keep_residual: bool  # n x d numbers, so that a later pass can go on from them
    curvature: float  # where training starts: P = curvature Q^T Q + ridge I
    symmetric: bool  # the optimizer depends on the coordinates: P^-1/2 itself
    seed: int
    narrow: bool = False  # keep measured training rows in float32

    @property
    def name(self) -> str:
        """The name of Q in a checkpoint; it tells what depends on how much memory is free."""
        rows = "all" if self.all_rows else self.sketch_rows or "train"
        how = f"{self.degree}" if self.goal is None else f"{self.goal:.6e}"
        how = f"{self.row_tol:.6e}" if self.by_rows else how
        kind = f"{'W' if self.whiten else ''}Q{'64' if self.exact else ''}"
        return f"{kind}-{how}-{rows}-{self.width}"

    def case(self, n_train: int, d: int, ridge: float) -> Case:
        """How P is made from so many training rows and features."""
        known = self.by_rows or self.goal is not None
        return case_of(n_train, d, ridge, known, self.sketch_rows)

    def dtype(self, working: str) -> str:
        """The precision of Q where the fit works in `working`."""
        return "float64" if self.exact else working

    def blocks(self, d: int) -> list[slice]:
        """The columns of X in blocks of about the same size: none is narrow without need.

        In multiples of four columns, which a GPU reads at once: 100 are 52 + 48, not 50 + 50.  The
        CPU takes 0.86 of the time for those, too (ogbn-arxiv): one whole vector less in each row.
        """
        step = -(-d // -(-d // self.width))
        step = min(-(-step // 4) * 4, self.width)
        return [slice(j, min(j + step, d)) for j in range(0, d, step)]


@dataclass(frozen=True)
class Plan:
    """The decisions of a fit; prints as a table.

    Nothing changes it: what turned out otherwise is told by the fitted model's `changes_`.

    Attributes
    ----------
    strategy : "herta" or "direct"
    n_samples : int or None
        Edges to sample for L_tilde; None: the full graph.
    sketch_rows : int or None
        Rows of the SRHT; None: the exact Gram matrix.
    stored : bool
        Whether the fit is proven from stored rows of Q, without a solve over the outputs.
    outputs : int
        Outputs that such solves work on together; 0: there is no memory for them.
    look : bool
        Whether such solves come first, as they are cheaper than a Q that proves the fit alone.
    beside : int
        Rows of Q outside training that are kept for evaluation.
    on_host : bool
        Whether the stored rows of a GPU are trained on by the CPU, as memory there is short.
    loop_samples : int or None
        Edges to sample for the loop itself (sparsify="mixed").
    certificate : str
        The kind that will be tried first.
    memory : dict of stage to bytes
    cost : dict of strategy to predicted seconds on a nominal machine
    decisions : tuple of (what, choice, why)
    """

    strategy: str
    n_samples: int | None
    sketch_rows: int | None
    certificate: str
    recipe: Recipe
    solve_width: int
    stored: bool = False
    outputs: int = 0
    look: bool = False
    beside: int = 0
    on_host: bool = False
    loop_samples: int | None = None
    memory: dict[str, int] = field(default_factory=dict)
    cost: dict[str, float] = field(default_factory=dict)
    decisions: tuple[Decision, ...] = ()

    @property
    def identity(self) -> str:
        """What decides the coordinates of training and its last bits, in one word.

        A fit that goes on from a checkpoint may have more memory or less, and so another plan.
        """
        made = (self.n_samples, self.loop_samples, self.solve_width, self.outputs, self.recipe)
        return repr(made)

    @property
    def may_look(self) -> bool:
        """Whether there is memory for solves over the outputs."""
        return self.outputs > 0

    def __str__(self) -> str:
        rows = [("", "decision", "why"), *self.decisions]
        widths = [max(len(r[i]) for r in rows) for i in range(2)]
        lines = [f"{a:<{widths[0]}}  {b:<{widths[1]}}  {c}".rstrip() for a, b, c in rows]
        return "\n".join(lines)


def make_plan(sizes: Sizes, settings: Settings, budget: int, reordered: bool = False) -> Plan:
    """Choose strategy, sparsifier, sketch and certificate within `budget` bytes."""
    cost = strategy_costs(sizes, settings)
    strategies = _strategies(settings, cost)
    for strategy in strategies:
        direct = strategy.value == "direct"
        samples = _samples(sizes, settings, direct)
        by_rows = _by_rows(sizes, settings, direct, samples.value)
        stored = direct and _stored(sizes, settings, by_rows)
        wanted = _certificate(sizes, settings, by_rows, samples.value, stored)
        narrow = stored and rows_may_be_narrow(sizes, settings)
        try:
            layout = fitting_layout(Way(sizes, settings, wanted, stored, by_rows), budget, narrow)
            break
        except BudgetError:
            if strategy is strategies[-1]:
                raise
    way, look = layout.way, layout.outputs > 0 and _look(sizes, settings, stored, by_rows)
    recipe, loop = _recipe(layout, direct, look), _loop_samples(sizes, settings)
    total = sum(layout.memory.values())
    told = [
        strategy.decision,
        samples.decision,
        *_layout_decisions(layout),
        _Q_decision(recipe),
        Decision("certificate", way.certificate, _CERTIFICATE_WHY[way.certificate]),
        Decision("memory", f"{total / 2**20:,.1f} MB", f"budget {budget / 2**20:,.0f} MB"),
    ]
    if loop is not None:
        told.append(loop.decision)
    if reordered:
        told.append(Decision("order", "by community", "neighbours close in memory"))
    return Plan(
        strategy=strategy.value,
        n_samples=samples.value,
        sketch_rows=way.sketch_rows,
        certificate=way.certificate,
        recipe=recipe,
        solve_width=layout.width,
        stored=stored,
        outputs=0 if settings.several else layout.outputs,
        look=look,
        beside=layout.beside,
        on_host=layout.on_host,
        loop_samples=None if loop is None else loop.value,
        memory=layout.memory,
        cost=cost,
        decisions=tuple(told),
    )


_CERTIFICATE_WHY = {
    "residual": "the residuals of Q's columns prove it, without another solve",
    "spectral-proven": "the error of the polynomial proves it",
    "spectral-deterministic": "the error of the polynomial or, if need be, residuals prove it",
    "spectral-probabilistic": "Lanczos: Q is a sketch, of a sampled graph, or kept in part only",
    "duality": "the ridge makes the objective strongly convex",
    "none": "no strong convexity to build on: the gradient decides",
}


def _recipe(layout: Layout, direct: bool, look: bool) -> Recipe:
    way, sizes, settings = layout.way, layout.way.sizes, layout.way.settings
    whiten = way.stored and worth_whitening(sizes, settings)
    # The true model measures what Q leaves, if it is looked at anyway.
    measure = way.stored and not way.by_rows and not look
    goal = Q_goal(sizes, settings, whiten) if measure else None
    # Steps on stored rows cost no solve, and Newton's method needs them for its Hessian.
    useful = direct or sizes.d * sizes.c <= NEWTON_SIZE
    keep = (way.stored or not settings.quadratic) and useful and way.sketch_rows is None
    return Recipe(
        degree=sizes.degree(goal or Q_tolerance(sizes, settings, direct)),
        width=layout.Q_width,
        exact=sizes.hidden and sizes.n_train >= sizes.d and goal is None,
        sketch_rows=way.sketch_rows,
        by_rows=way.by_rows,
        row_tol=row_tolerance(settings, look),
        all_rows=way.certificate in DETERMINISTIC,
        keep_rows=keep,
        whiten=whiten,
        goal=goal,
        keep_residual=layout.keep_residual,
        narrow=way.narrow,
        curvature=sizes.curvature,
        symmetric=settings.optimizer == "adam",
        seed=settings.seed,
    )


def tighter(recipe: Recipe, top: float) -> Chosen:
    """The recipe for a P that must not miss anything: Q in float64, close to H^-1 X."""
    again = Decision("Q again", "float64", "P missed too much of the Hessian")
    return Chosen(replace(recipe, exact=True, degree=least_degree(top, EXACT_TOL)), again)


def with_less_left(recipe: Recipe, worst: float | None, share: float) -> Chosen | None:
    """The recipe that leaves only `share` of the present residuals; None where rounding forbids it.

    `worst` is the largest of them, relative to its column; None: those of the rows of H^-1.
    """
    least = share * (recipe.row_tol if worst is None else worst)
    missed = worst is not None and recipe.goal is not None and worst > 4 * recipe.goal
    if recipe.goal is not None:
        least = min(least, 0.5 * recipe.goal)  # the same goal again would change nothing
    if least < LEAST_LEFT or missed:
        return None
    again = replace(recipe, row_tol=least) if worst is None else replace(recipe, goal=least)
    why = "the certificate asks for it"
    return Chosen(again, Decision("Q again", f"residuals to {least:.1e}", why))


def measured(recipe: Recipe, settings: Settings) -> Chosen:
    """The recipe for a Q that proves the fit itself, after a look at the true model did not."""
    why = "the true model asks for many steps"
    if recipe.by_rows:
        again, left = replace(recipe, row_tol=row_tolerance(settings)), row_tolerance(settings)
    else:
        left = softmax_goal(settings)
        again = replace(recipe, goal=left, exact=False)
    return Chosen(again, Decision("Q again", f"residuals to {left:.1e}", why))


def orthonormal(recipe: Recipe) -> Chosen:
    """The recipe for features so alike that columns of norm 1 do not tell them apart."""
    again = Decision("Q again", "orthonormal columns", "features too alike for columns of norm 1")
    return Chosen(replace(recipe, whiten=True), again)


def _layout_decisions(layout: Layout) -> list[Decision]:
    way, sizes, width = layout.way, layout.way.sizes, layout.width
    rows, why = sketch(sizes, way.settings, way.by_rows)
    if way.stored and not way.by_rows:
        rows, why = None, "Q itself is never stored"
    elif way.sketch_rows != rows:
        rows, why = way.sketch_rows, "Q does not fit the memory budget"
    shown = f"{width}" if width >= layout.Q_width else f"{width}, of Q {layout.Q_width}"
    told = [
        Decision("sketch", "no" if rows is None else f"{rows:,} rows", why),
        Decision("columns at once", shown, f"at most {BLOCK_WIDTH}, as they fit"),
    ]
    if not way.stored and layout.outputs < sizes.c:
        shown = f"{layout.outputs} of {sizes.c:,}"
        told.append(Decision("outputs at once", shown, "each block is finished before the next"))
    if way.narrow:
        told.append(Decision("rows of Q", "float32", "memory is short; what they round is counted"))
    if way.paged:
        why = "not in memory, where more columns at once save more"
        told.append(Decision("neighbours", "read again for each product", why))
    if way.stored and layout.on_host:
        told.append(Decision("training", "on the host", "outputs do not fit beside the graph"))
    return told


def _Q_decision(recipe: Recipe) -> Decision:
    if recipe.by_rows:
        return Decision("Q", "H^-1 M^T (fewer train rows than features)", "solves with CG")
    if recipe.goal is not None:
        columns = "orthonormal columns" if recipe.whiten else "columns of norm 1"
        how = f"residuals to {recipe.goal:.1e}, about {recipe.degree} products"
        return Decision("Q", how, f"passes of Chebyshev over {columns}")
    return Decision("Q", f"Chebyshev degree {recipe.degree}", "solves with one polynomial")


def _strategies(settings: Settings, cost: dict[str, float]) -> list[Chosen]:
    """The strategy to take, and what to take where memory forbids it."""

    def chosen(value: str, why: str) -> Chosen:
        return Chosen(value, Decision("strategy", value, why))

    if not settings.precondition:
        return [chosen("herta", "precondition=False: standard training")]
    if settings.several:
        return [chosen("direct", f"{len(settings.lams)} blocks of features, on stored rows")]
    if settings.strategy != "auto":
        return [chosen(settings.strategy, "as asked")]
    if settings.custom_P:
        return [chosen("herta", "sparsify or sketch was asked for")]
    best, other = sorted(cost, key=lambda s: cost[s])
    why = "predicted cost: " + ", ".join(f"{s} {cost[s]:.3g}" for s in cost)
    return [chosen(best, why), chosen(other, f"{best} does not fit the memory budget")]


def _stored(sizes: Sizes, settings: Settings, by_rows: bool) -> bool:
    """Whether "direct" trains on stored rows, which then prove the fit as well if they can."""
    if settings.custom_P or (settings.optimizer not in ("cg", "lbfgs") and not settings.quadratic):
        return False  # an optimizer's own steps are asked for, with the true gradient
    if settings.several or (settings.loo and not by_rows):
        return True
    return settings.ridge > 0 if by_rows else sizes.n_train >= sizes.d


def _look(sizes: Sizes, settings: Settings, stored: bool, by_rows: bool) -> bool:
    """Whether one look at the true model is cheaper than a Q that proves the fit alone.

    Cross entropy, and fewer rows than features, ask for a very tight one.
    """
    if not stored or settings.several or settings.loo or (settings.quadratic and not by_rows):
        return False
    alone, looked = direct_costs(sizes, settings)
    return looked < alone


def _samples(sizes: Sizes, settings: Settings, direct: bool) -> Chosen:
    """How many edges to sample for L_tilde; None: the full graph."""

    def chosen(value: int | None, why: str) -> Chosen:
        told = "no" if value is None else f"{value:,} samples"
        return Chosen(value, Decision("sparsify", told, why))

    m, wish = sizes.m, settings.sparsify
    if wish.when == "never":
        return chosen(None, "not asked for")
    if direct or m == 0 or not settings.precondition:
        return chosen(None, "not useful")
    if not sizes.can_sample:
        return chosen(None, "not on GPUs that share out nodes")
    if wish.count is not None:
        if wish.count <= MOST_DRAWS * m:
            return chosen(wish.count, f"as asked, of {m:,} edges")
        why = f"{wish.count:,} samples of {m:,} edges say no more than the edges themselves"
        return chosen(None, why)
    faithful = wish.when == "always" and settings.scores == "sketch"
    eps = BETA / (3 * max(settings.lam, 1.0)) if faithful else AUTO_EPS
    s = sample_size(sizes.n_lambda(), sizes.n, eps)
    if faithful:
        capped = f"Algorithm 2 wants {s:.2g}, capped at m" if s > m else "Algorithm 2"
        return chosen(min(s, m), capped)
    if wish.when == "always":
        capped = f"degree scores want {s:,}, capped at m" if s > m else "by degree scores"
        return chosen(min(s, m), capped)
    if s < m and sampling_pays(sizes, settings, s):
        return chosen(s, f"of {m:,} edges: cheaper solves for Q")
    return chosen(None, f"{s:,} samples would not save work on {m:,} edges")


def _by_rows(sizes: Sizes, settings: Settings, direct: bool, n_samples: int | None) -> bool:
    """Whether to solve for H^-1 M^T, fewer columns than H^-1 X has, and to know A itself."""
    if sizes.n_train >= sizes.d or n_samples is not None or not settings.precondition:
        return False
    # What is proven, and left out, needs stored rows in coordinates of norm 1; the variance of
    # other nodes needs their rows, too.
    if settings.several or (settings.loo and (settings.ridge == 0 or sizes.beside)):
        return False
    # Without a ridge the rows of an approximate Q would span another space than those of A.
    return direct or (settings.ridge == 0 and settings.sketch.when != "always")


def _loop_samples(sizes: Sizes, settings: Settings) -> Chosen | None:
    """The appendix's mixed strategy: samples for the loop if n_lambda / tol <= m log(1 / tol)."""
    if not settings.mixed:
        return None
    n_lambda = sizes.n_lambda() if sizes.m else 0.0
    s = sample_size(n_lambda, sizes.n, math.sqrt(settings.tol))
    rule = n_lambda / settings.tol <= sizes.m * math.log(1 / min(settings.tol, 0.5))
    if rule and s < sizes.m:
        why = "n_lambda / tol <= m log(1 / tol)"
        return Chosen(s, Decision("loop", f"{s:,} samples", why))
    why = f"needs {s:,} samples of {sizes.m:,} edges" if rule else "n_lambda / tol > m log(1 / tol)"
    return Chosen(None, Decision("loop", "full graph", why))


def _certificate(
    sizes: Sizes, settings: Settings, by_rows: bool, n_samples: int | None, stored: bool
) -> str:
    if stored and settings.quadratic and not by_rows:
        return "residual"
    unseen = by_rows or (sizes.n_train < sizes.d and settings.ridge == 0)
    if unseen or not settings.quadratic or not settings.precondition:
        return "duality" if settings.ridge > 0 else "none"
    if n_samples is not None or settings.sketch.when == "always":
        return "spectral-probabilistic"
    proven, measured, lanczos = certificate_costs(sizes)
    if measured <= 2 * lanczos:
        return "spectral-deterministic"
    return "spectral-proven" if proven <= 2 * lanczos else "spectral-probabilistic"
