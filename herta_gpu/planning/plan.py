"""What will be done and why, decided from sizes alone, before anything large is allocated."""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

from herta_gpu.planning import costs
from herta_gpu.planning.costs import Case, Layout, Q_tolerance, Sizes, row_tolerance
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
    curvature: float  # where training starts: P = curvature Q^T Q + ridge I
    symmetric: bool  # the optimizer depends on the coordinates: P^-1/2 itself
    seed: int
    way: str = "chebyshev"  # how measured columns are solved for, or "factor" or "cg"
    multiple: int = 4  # of columns, which a device reads at once

    @property
    def name(self) -> str:
        """The name of Q in a checkpoint; it tells what depends on how much memory is free."""
        rows = "all" if self.all_rows else self.sketch_rows or "train"
        how = f"{self.degree}" if self.goal is None else f"{self.goal:.6e}"
        how = f"{self.row_tol:.6e}" if self.by_rows else how
        kind = f"{'W' if self.whiten else ''}Q{'64' if self.exact else ''}"
        kind = {"chebyshev": "", "factor": "F", "cg": "CG"}[self.way] + kind
        return f"{kind}-{how}-{rows}-{self.width}"

    def case(self, n_train: int, d: int, ridge: float) -> Case:
        """How P is made from so many training rows and features."""
        known = self.by_rows or self.goal is not None
        return costs.case_of(n_train, d, ridge, known, self.sketch_rows)

    def dtype(self, working: str) -> str:
        """The precision of Q where the fit works in `working`."""
        return "float64" if self.exact else working

    def blocks(self, d: int) -> list[slice]:
        """The columns of X in blocks of about the same size, multiples of four: 100 are 52 + 48.

        A GPU reads four at once, and the CPU takes 0.86 of the time for those, too (ogbn-arxiv).
        Where a GPU gathers float16, 16 columns are a sector of its memory: of 28, two and a half
        are read.
        """
        step = -(-d // -(-d // self.width))
        wide = -(-step // self.multiple) * self.multiple
        step = wide if wide <= self.width else min(-(-step // 4) * 4, self.width)
        return [slice(j, min(j + step, d)) for j in range(0, d, step)]

    # ---- what to try when P, or the proof, was not good enough ----------------------------
    def tighten(self, top: float) -> Chosen:
        """For a P that must not miss anything: Q in float64, close to H^-1 X."""
        why = "P missed too much of the Hessian"
        degree = costs.least_degree(top, costs.EXACT_TOL)
        return self._again("float64", why, exact=True, degree=degree)

    def orthogonalise(self) -> Chosen:
        """For features so alike that columns of norm 1 do not tell them apart."""
        why = "features too alike for columns of norm 1"
        return self._again("orthonormal columns", why, whiten=True)

    def measure_residuals(self, settings: Settings) -> Chosen:
        """For a Q that proves the fit itself, after a look at the true model did not."""
        why = "the true model asks for many steps"
        if self.by_rows:
            least = row_tolerance(settings)
            return self._again(f"residuals to {least:.1e}", why, row_tol=least)
        least = costs.softmax_goal(settings)
        return self._again(f"residuals to {least:.1e}", why, goal=least, exact=False)

    def leave_less(self, worst: float | None, share: float) -> Chosen | None:
        """For `share` of the present residuals only; None where rounding forbids it.

        `worst` is the largest, relative to its column; None: those of the rows of H^-1.
        """
        least = share * (self.row_tol if worst is None else worst)
        missed = worst is not None and self.goal is not None and worst > 4 * self.goal
        if self.goal is not None:
            least = min(least, 0.5 * self.goal)  # the same goal again would change nothing
        if least < LEAST_LEFT or missed:
            return None
        changed = {"row_tol" if worst is None else "goal": least}
        return self._again(f"residuals to {least:.1e}", "the certificate asks for it", **changed)

    def _again(self, choice: str, why: str, **changed: Any) -> Chosen:
        return Chosen(replace(self, **changed), Decision("Q again", choice, why))


@dataclass(frozen=True)
class Plan:
    """The decisions of a fit, as a table; what turned out otherwise is in `changes_`."""

    strategy: str  # "herta" or "direct"
    n_samples: int | None  # edges to sample for L_tilde; None: the full graph
    sketch_rows: int | None  # rows of the SRHT; None: the exact Gram matrix
    certificate: str  # the kind that will be tried first
    recipe: Recipe  # of P
    solve_width: int  # columns of a solve
    stored: bool = False  # proven from stored rows of Q, without a solve over the outputs
    outputs: int = 0  # that such solves work on together; 0: there is no memory for them
    look: bool = False  # such solves come first: they are cheaper than a Q that proves the fit
    beside: int = 0  # rows of Q outside training that are kept for evaluation
    on_host: bool = False  # stored rows of a GPU are trained on by the CPU: memory there is short
    loop_samples: int | None = None  # edges to sample for the loop itself (sparsify="mixed")
    memory: dict[str, int] = field(default_factory=dict)  # stage to bytes
    cost: dict[str, float] = field(default_factory=dict)  # strategy to seconds, nominal machine
    decisions: tuple[Decision, ...] = ()

    @property
    def identity(self) -> str:
        """What decides coordinates and last bits; with other memory the plan may be another."""
        made = (self.n_samples, self.loop_samples, self.solve_width, self.outputs, self.recipe)
        return repr(made)

    def __str__(self) -> str:
        rows = [("", "decision", "why"), *self.decisions]
        widths = [max(len(r[i]) for r in rows) for i in range(2)]
        lines = [f"{a:<{widths[0]}}  {b:<{widths[1]}}  {c}".rstrip() for a, b, c in rows]
        return "\n".join(lines)


def make_plan(sizes: Sizes, settings: Settings, budget: int, reordered: bool = False) -> Plan:
    """Choose strategy, sparsifier, sketch and certificate within `budget` bytes."""
    cost = costs.strategy_costs(sizes, settings)
    strategies = _strategies(settings, cost)
    for strategy in strategies:
        direct = strategy.value == "direct"
        samples = _samples(sizes, settings, direct)
        by_rows = _by_rows(sizes, settings, direct, samples.value)
        stored = direct and _stored(sizes, settings, by_rows)
        wanted = _certificate(sizes, settings, by_rows, samples.value, stored)
        try:
            way = costs.fitting_layout(Layout(sizes, settings, wanted, stored, by_rows), budget)
            break
        except BudgetError:
            if strategy is strategies[-1]:
                raise
    # One look at the true model may be cheaper than a Q that proves the fit alone: cross entropy,
    # and fewer rows than features, ask for a very tight one.
    look = stored and way.outputs > 0 and not (settings.several or settings.loo)
    look = look and (by_rows or not settings.quadratic)
    if look:
        alone, looked = costs.direct_costs(sizes, settings)
        look = looked < alone
    recipe, loop = _recipe(way, direct, look), _loop_samples(sizes, settings)
    total = sum(way.memory.values())
    told = [
        strategy.decision,
        samples.decision,
        *_layout_decisions(way),
        _Q_decision(recipe),
        Decision("certificate", way.certificate, _CERTIFICATE_WHY[way.certificate]),
        Decision("memory", f"{total / 2**20:,.1f} MB", f"budget {budget / 2**20:,.0f} MB"),
    ]
    told += [loop.decision] * settings.mixed
    told += [Decision("order", "by community", "neighbours close in memory")] * reordered
    return Plan(
        strategy=strategy.value,
        n_samples=samples.value,
        sketch_rows=way.sketch_rows,
        certificate=way.certificate,
        recipe=recipe,
        solve_width=way.width,
        stored=stored,
        outputs=0 if settings.several else way.outputs,
        look=look,
        beside=way.beside,
        on_host=way.on_host,
        loop_samples=loop.value,
        memory=way.memory,
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
    sizes, settings = layout.sizes, layout.settings
    whiten = layout.stored and costs.worth_whitening(sizes, settings)
    # The true model measures what Q leaves, if it is looked at anyway.
    measure = layout.stored and not layout.by_rows and not look
    goal = costs.Q_goal(sizes, settings, whiten) if measure else None
    # Steps on stored rows cost no solve, and Newton's method needs them for its Hessian.
    useful = direct or sizes.d * sizes.c <= NEWTON_SIZE
    way = "chebyshev"
    if measure or layout.by_rows:
        way = costs.way_to_Q(sizes, goal or row_tolerance(settings, look), layout.by_rows)[0]
    if way == "cg" and layout.width < layout.Q_width:  # it holds more blocks than Chebyshev
        way = "chebyshev"
    return Recipe(
        degree=sizes.degree(goal or Q_tolerance(sizes, settings, direct)),
        width=layout.Q_width,
        exact=way == "factor" or (sizes.hidden and not sizes.few_rows and goal is None),
        sketch_rows=layout.sketch_rows,
        by_rows=layout.by_rows,
        row_tol=row_tolerance(settings, look),
        all_rows=layout.certificate in costs.DETERMINISTIC,
        keep_rows=(layout.stored or not settings.quadratic)
        and useful
        and layout.sketch_rows is None,
        whiten=whiten,
        goal=goal,
        way=way,
        multiple=16 if sizes.card and sizes.half else 4,
        curvature=sizes.curvature,
        symmetric=settings.optimizer == "adam",
        seed=settings.seed,
    )


def _layout_decisions(way: Layout) -> list[Decision]:
    width, outputs, c = way.width, way.outputs, way.sizes.c
    rows, why = costs.sketch(way.sizes, way.settings, way.by_rows)
    if way.stored and not way.by_rows:
        rows, why = None, "Q itself is never stored"
    elif way.sketch_rows != rows:
        rows, why = way.sketch_rows, "Q does not fit the memory budget"
    shown = f"{width}" if width >= way.Q_width else f"{width}, of Q {way.Q_width}"
    paged = "not in memory, where more columns at once save more"
    each = "each block is finished before the next"
    told = {
        ("sketch", "no" if rows is None else f"{rows:,} rows", why): True,
        ("columns at once", shown, f"at most {costs.BLOCK_WIDTH}, as they fit"): True,
        ("outputs at once", f"{outputs} of {c:,}", each): not way.stored and outputs < c,
        ("neighbours", "read again for each product", paged): way.paged,
        ("training", "on the host", "outputs do not fit beside the graph"): way.on_host,
    }
    return [Decision(*line) for line, holds in told.items() if holds]


def _Q_decision(recipe: Recipe) -> Decision:
    if recipe.by_rows:
        how = "solves with a sparse factor" if recipe.way == "factor" else "solves with CG"
        return Decision("Q", "H^-1 M^T (fewer train rows than features)", how)
    if recipe.goal is not None:
        columns = "orthonormal columns" if recipe.whiten else "columns of norm 1"
        if recipe.way == "factor":
            return Decision("Q", "a sparse factor of H", f"cheaper than products over {columns}")
        if recipe.way == "cg":
            how = f"residuals to {recipe.goal:.1e}, where Chebyshev took {recipe.degree} products"
            return Decision("Q", how, f"block CG, faster on one column, over {columns}")
        how = f"residuals to {recipe.goal:.1e}, about {recipe.degree} products"
        return Decision("Q", how, f"passes of Chebyshev over {columns}")
    return Decision("Q", f"Chebyshev degree {recipe.degree}", "solves with one polynomial")


def _strategies(settings: Settings, cost: dict[str, float]) -> list[Chosen]:
    """The strategy to take, and what to take where memory forbids it."""
    best, other = sorted(cost, key=lambda s: cost[s])
    if not settings.precondition:
        found = {"herta": "precondition=False: standard training"}
    elif settings.several:
        found = {"direct": f"{settings.blocks} blocks of features, on stored rows"}
    elif settings.strategy != "auto":
        found = {settings.strategy: "as asked"}
    elif settings.custom_P:
        found = {"herta": "sparsify or sketch was asked for"}
    else:
        why = "predicted cost: " + ", ".join(f"{s} {cost[s]:.3g}" for s in cost)
        found = {best: why, other: f"{best} does not fit the memory budget"}
    return [Chosen(value, Decision("strategy", value, why)) for value, why in found.items()]


def _stored(sizes: Sizes, settings: Settings, by_rows: bool) -> bool:
    """Whether "direct" trains on stored rows, which then prove the fit as well if they can."""
    if settings.custom_P or (settings.optimizer not in ("cg", "lbfgs") and not settings.quadratic):
        return False  # an optimizer's own steps are asked for, with the true gradient
    if settings.several or (settings.loo and not by_rows):
        return True
    return settings.ridge > 0 if by_rows else not sizes.few_rows


def _samples(sizes: Sizes, settings: Settings, direct: bool) -> Chosen:
    """How many edges to sample for L_tilde; None: the full graph."""
    m, wish = sizes.m, settings.sparsify
    always, value, why = wish.when == "always", None, "not useful"
    if wish.when == "never":
        why = "not asked for"
    elif direct or m == 0 or not settings.precondition:
        pass
    elif not sizes.can_sample:
        why = "not on GPUs that share out nodes"
    elif wish.count is not None and wish.count > costs.MOST_DRAWS * m:
        why = f"{wish.count:,} samples of {m:,} edges say no more than the edges themselves"
    elif wish.count is not None:
        value, why = wish.count, f"as asked, of {m:,} edges"
    else:
        faithful = always and settings.scores == "sketch"
        eps = costs.BETA / (3 * max(settings.lam, 1.0)) if faithful else AUTO_EPS
        s = costs.sample_size(sizes.n_lambda(), sizes.n, eps)
        if always:
            value, why = min(s, m), "Algorithm 2" if faithful else "by degree scores"
            wants = f"Algorithm 2 wants {s:.2g}" if faithful else f"degree scores want {s:,}"
            why = f"{wants}, capped at m" if s > m else why
        elif s < m and costs.sampling_pays(sizes, settings, s):
            value, why = s, f"of {m:,} edges: cheaper solves for Q"
        else:
            why = f"{s:,} samples would not save work on {m:,} edges"
    return Chosen(value, Decision("sparsify", "no" if value is None else f"{value:,} samples", why))


def _by_rows(sizes: Sizes, settings: Settings, direct: bool, n_samples: int | None) -> bool:
    """Whether to solve for H^-1 M^T, fewer columns than H^-1 X has, and to know A itself."""
    if not sizes.few_rows or n_samples is not None or not settings.precondition:
        return False
    # What is proven, and left out, needs stored rows in coordinates of norm 1; the variance of
    # other nodes needs their rows, too.
    if settings.several or (settings.loo and (settings.ridge == 0 or sizes.beside)):
        return False
    # Without a ridge the rows of an approximate Q would span another space than those of A.
    return direct or (settings.ridge == 0 and settings.sketch.when != "always")


def _loop_samples(sizes: Sizes, settings: Settings) -> Chosen:
    """The appendix's mixed strategy: samples for the loop if n_lambda / tol <= m log(1 / tol)."""
    n_lambda = sizes.n_lambda() if settings.mixed and sizes.m else 0.0
    s = costs.sample_size(n_lambda, sizes.n, math.sqrt(settings.tol))
    rule = n_lambda / settings.tol <= sizes.m * math.log(1 / min(settings.tol, 0.5))
    if settings.mixed and rule and s < sizes.m:
        why = "n_lambda / tol <= m log(1 / tol)"
        return Chosen(s, Decision("loop", f"{s:,} samples", why))
    why = f"needs {s:,} samples of {sizes.m:,} edges" if rule else "n_lambda / tol > m log(1 / tol)"
    return Chosen(None, Decision("loop", "full graph", why))


def _certificate(
    sizes: Sizes, settings: Settings, by_rows: bool, n_samples: int | None, stored: bool
) -> str:
    if stored and settings.quadratic and not by_rows:
        return "residual"
    unseen = by_rows or (sizes.few_rows and settings.ridge == 0)
    if unseen or not settings.quadratic or not settings.precondition:
        return "duality" if settings.ridge > 0 else "none"
    if n_samples is not None or settings.sketch.when == "always":
        return "spectral-probabilistic"
    proven, measured, lanczos = costs.certificate_costs(sizes)
    if measured <= 2 * lanczos:
        return "spectral-deterministic"
    return "spectral-proven" if proven <= 2 * lanczos else "spectral-probabilistic"
